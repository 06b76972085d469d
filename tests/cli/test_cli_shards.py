"""`batchwright shards`: what shards hold, and the same in another format."""

from __future__ import annotations

import gzip
import pickle
import re

import numpy as np
import pytest


@pytest.fixture
def games(tmp_path):
    """games/shard_0000.npz to 0002: 4, 5 and 6 positions of 3 x 3 fields."""
    (tmp_path / "games").mkdir()
    for number in range(3):
        rows = 4 + number
        np.savez(
            tmp_path / "games" / f"shard_{number:04}.npz",
            board=np.full((rows, 3, 3), number, np.uint8),
            value=np.arange(rows, dtype=np.float32),
        )
    return tmp_path / "games"


def add_pickle(games):
    with gzip.open(games / "shard_0003.pkl.gz", "wb") as file:
        pickle.dump({"examples": [{"board": np.zeros((3, 3), np.uint8), "value": 0.5}] * 7}, file)


def test_info_lists_numbers_rows_bytes_and_columns(games, succeeds):
    sizes = [f"{(games / f'shard_{n:04}.npz').stat().st_size:,}" for n in range(3)]
    assert succeeds("shards info games", cwd=games.parent).out.splitlines() == [
        f"shards games: 3 shards, 15 rows, {sum(int(size.replace(',', '')) for size in sizes) / 1000:.1f} kB",
        "number  file            rows  bytes  columns",
        f"     0  shard_0000.npz     4  {sizes[0]:>5}  A",
        f"     1  shard_0001.npz     5  {sizes[1]:>5}  A",
        f"     2  shard_0002.npz     6  {sizes[2]:>5}  A",
        "A: board uint8[3, 3], value float32",
    ]


def test_info_as_json(games, succeeds):
    (shard,) = succeeds(f"shards info {games} --range 1 --json").json["shards"]
    assert shard == {
        "number": 1,
        "file": "shard_0001.npz",
        "format": "npz",
        "rows": 5,
        "bytes": (games / "shard_0001.npz").stat().st_size,
        "columns": {"board": {"dtype": "uint8", "shape": [3, 3]}, "value": {"dtype": "float32", "shape": []}},
        "fault": None,
    }


def test_info_of_only_some_columns(games, succeeds):
    assert succeeds(f"shards info {games} --columns value").out.splitlines()[-1] == "A: value float32"


def test_info_says_where_columns_differ(games, succeeds):
    np.savez(games / "shard_0003.npz", board=np.zeros((2, 4, 4), np.uint8))
    lines = succeeds(f"shards info {games}").out.splitlines()
    assert lines[4].endswith("A")
    assert lines[5].endswith("B")
    assert lines[6:8] == ["A: board uint8[3, 3], value float32", "B: board uint8[4, 4]"]
    assert lines[8].startswith("note: not all shards have the same columns")


def test_info_names_a_shard_that_cannot_be_read_and_lists_the_others(games, batchwright):
    (games / "shard_0001.npz").write_bytes(b"no archive")
    ran = batchwright(f"shards info {games}")
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert lines[0].endswith("10 rows in 2 of them, " + lines[0].rpartition(", ")[2])
    assert re.match(r" +1  shard_0001.npz +- +10  cannot be read", lines[3])
    assert lines[2].endswith("A")
    assert lines[4].endswith("A")
    assert f"  file       {games}/shard_0001.npz" in ran.out
    assert batchwright(f"shards info {games} --json").json["shards"][1]["fault"]


def test_info_reads_no_pickle_and_says_so(games, succeeds):
    add_pickle(games)
    line = succeeds(f"shards info {games}").out.splitlines()[5]
    assert line.endswith("a pickle: --allow-pickle --count reads it")
    assert " -  " in line


def test_info_counts_what_headers_do_not_say(games, succeeds):
    add_pickle(games)
    (games / "shard_0004.jsonl").write_text('{"value": 1.0}\n{"value": 2.0}\n')
    asked = f"shards info {games} --allow-pickle --json"
    assert [shard["rows"] for shard in succeeds(asked).json["shards"]] == [4, 5, 6, None, None]
    counted = succeeds(asked, "--count").json["shards"]
    assert [shard["rows"] for shard in counted] == [4, 5, 6, 7, 2]
    assert counted[4]["columns"] == {"value": {"dtype": "float64", "shape": []}}


def test_convert_says_rows_bytes_and_speed(games, succeeds):
    lines = succeeds("shards convert games out", cwd=games.parent).out.splitlines()
    assert re.fullmatch(r"out: 3 shards, 15 rows as npz in [\d.]+ s", lines[0])
    assert re.fullmatch(r"  bytes      [\d.]+ kB before, [\d.]+ kB after", lines[1])
    assert re.fullmatch(
        r"  reading    [\d,]+ rows/s before, [\d,]+ rows/s after \(3 shards, 15 rows, all of it in the page cache\)",
        lines[2],
    )
    assert lines[3:] == ["  columns    board uint8[3, 3], value float32"]
    again = succeeds("shards convert games out", cwd=games.parent).out
    assert "; 3 of them were there already" in again


def test_convert_as_json(games, tmp_path, succeeds):
    told = succeeds(f"shards convert {games} {tmp_path / 'out'} --to arrow --range 1-2 --json").json
    assert (told["to"], told["rows"], told["reading"]["num_rows"]) == ("arrow", 11, 11)
    assert told["bytes_after"] == sum((tmp_path / "out" / f"shard_000{n}.arrow").stat().st_size for n in (1, 2))
    assert [(shard["number"], shard["rows"], shard["was_there"]) for shard in told["shards"]] == [
        (1, 5, False),
        (2, 6, False),
    ]


def test_convert_notes_shards_whose_columns_differ(games, tmp_path, succeeds):
    np.savez(games / "shard_0003.npz", board=np.zeros((2, 4, 4), np.uint8))
    out = tmp_path / "out"
    assert f"batchwright shards info {out}" in succeeds(f"shards convert {games} {out}").out


def test_convert_reads_pickles_only_when_allowed(games, tmp_path, refuses, succeeds):
    add_pickle(games)
    assert refuses(f"shards convert {games} {tmp_path / 'out'}").splitlines() == [
        "batchwright: shard_0003.pkl.gz is a pickle, which can run code when read. If you made it: allow_pickle=True, "
        "or once: batchwright shards convert DIR OUT --allow-pickle",
        f"  file       {games}/shard_0003.pkl.gz",
        f"  try        allow_pickle=True, or once: batchwright shards convert {games} {games}-npz --allow-pickle",
    ]
    succeeds(f"shards convert {games} {tmp_path / 'out'} --allow-pickle")
    with np.load(tmp_path / "out" / "shard_0003.npz") as columns:
        assert columns["value"].tolist() == [0.5] * 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["info", "gone"], "gone"),
        (["info", "games", "--range", "9-0"], "9-0"),
        (["info", "games", "--range", "0-9"], "shards 3-9"),
        (["info", "games", "--range", "none"], "'none'"),
        (["info", "games", "out"], "unrecognized arguments: out"),
        (["info", "games", "--to", "npz"], "--to"),
        (["info", "games", "--force"], "--force"),
        (["convert", "games"], "OUT"),
        (["convert", "games", "out", "--count"], "--count"),
        (["convert", "games", "games"], "games"),
        (["convert", "games", "out", "--to", "hdf5"], "'hdf5'"),
        (["convert", "games", "out", "--columns", "a,,b"], "'a,,b'"),
        (["convert", "games", "out", "--columns", "valu"], "'valu'"),
        (["count", "games"], "'count'"),
    ],
)
def test_bad_usage_is_one_message(arguments, said, games, refuses):
    assert said in refuses("shards", *arguments, cwd=games.parent)
    assert not (games.parent / "out").exists()


def test_the_formats_of_the_command_line_are_those_of_convert():
    from batchwright.cli.shards import _FORMATS
    from batchwright.pool.convert import FORMATS

    assert _FORMATS == FORMATS
