"""Shards written anew: equal, whole, restartable, and nothing of the user's is written over."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchwright
from batchwright.base.errors import BusyError, OutOfSpaceError, SourceError, SpecError
from batchwright.base.files import exclusive
from batchwright.columns.shard import content_mark, open_shard
from batchwright.pool import convert as module
from batchwright.pool.convert import FORMATS, convert
from refusals import refused


def columns_of(number: int, rows: int = 5) -> dict[str, np.ndarray]:
    """Five rows that say which shard they are of, and values that are easily lost on the way."""
    value = np.linspace(-1, 1, rows, dtype=np.float32) + number
    value[:1] = np.nan
    return {
        "board": (np.arange(rows * 8) + number).astype(np.int8).reshape(rows, 4, 2),
        "half": np.full(rows, 0.1, np.float16),
        "legal": np.arange(rows * 9).reshape(rows, 9) % (number + 2) == 0,
        "number": np.full(rows, 2**63 + number, np.uint64),
        "value": value,
    }


def write(path: Path, columns: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, **columns)


@pytest.fixture
def games(tmp_path):
    """games/run2_shard-000.npz to 003."""
    for number in range(4):
        write(tmp_path / "games" / f"run2_shard-{number:03}.npz", columns_of(number))
    return tmp_path / "games"


def read(path: str | Path, **options) -> dict[str, np.ndarray]:
    with open_shard(path, **options) as shard:
        return {name: values.copy() for name, values in next(shard.chunks(slice(0, None), 1000)).items()}


def assert_same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> None:
    assert sorted(one) == sorted(two)
    for name in one:
        assert (one[name].dtype, one[name].shape) == (two[name].dtype, two[name].shape)
        assert one[name].tobytes() == two[name].tobytes()


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def convert_quietly(*arguments, **options):
    return convert(*arguments, show_progress=False, **options)


# What is written


@pytest.mark.parametrize("to", FORMATS)
def test_every_format_has_the_same_columns_under_the_same_name(to, games, tmp_path):
    done = convert_quietly(games, tmp_path / "out", to=to)
    assert visible(tmp_path / "out") == [f"run2_shard-{number:03}.{to}" for number in range(4)]
    assert [shard.number for shard in done.shards] == [0, 1, 2, 3]
    for shard in done.shards:
        assert_same(read(shard.output), columns_of(shard.number))


def test_what_is_written_is_plain_for_other_tools(games, tmp_path):
    for to in FORMATS:
        convert_quietly(games, tmp_path / to, to=to, shard_range="1")
    name, columns = "run2_shard-001", columns_of(1)
    with np.load(tmp_path / "npz" / f"{name}.npz", allow_pickle=False) as loaded:
        assert_same(dict(loaded), columns)
    for table in (
        pa.ipc.open_file(tmp_path / "arrow" / f"{name}.arrow").read_all(),
        pq.read_table(tmp_path / "parquet" / f"{name}.parquet"),
    ):
        assert table["board"].to_pylist() == columns["board"].tolist()
        assert table["legal"].to_pylist() == columns["legal"].tolist()
    safetensors = pytest.importorskip("safetensors.numpy")
    assert_same(safetensors.load_file(tmp_path / "safetensors" / f"{name}.safetensors"), columns)


def test_npz_is_not_compressed_by_default(games, tmp_path):
    (shard, *_) = convert_quietly(games, tmp_path / "out").shards
    assert shard.bytes_after > sum(values.nbytes for values in columns_of(0).values())


def test_the_same_columns_are_the_same_bytes(games, tmp_path):
    for to in FORMATS:
        one, two = (convert_quietly(games, tmp_path / f"{to}{n}", to=to).shards[0].output for n in range(2))
        assert Path(one).read_bytes() == Path(two).read_bytes()
    with zipfile.ZipFile(tmp_path / "npz0" / "run2_shard-000.npz") as archive:
        assert {member.date_time[0] for member in archive.infolist()} == {1980}  # no clock in it


def test_only_columns_and_shards_that_are_asked_for(games, tmp_path):
    done = convert_quietly(games, tmp_path / "out", columns=["value", "board"], shard_range="1-2")
    assert [shard.number for shard in done.shards] == [1, 2]
    assert sorted(read(done.shards[0].output)) == ["board", "value"]


def test_a_shard_without_rows_stays_one(tmp_path):
    write(tmp_path / "games" / "0.npz", columns_of(0, rows=0))
    for to in FORMATS:
        (shard,) = convert_quietly(tmp_path / "games", tmp_path / to, to=to).shards
        assert (shard.rows, list(shard.schema)) == (0, ["board", "half", "legal", "number", "value"])


def test_more_rows_than_are_read_at_once(tmp_path):
    rows = 2 * module._ROWS_AT_ONCE + 3
    write(tmp_path / "games" / "0.npz", {"n": np.arange(rows)})
    (shard,) = convert_quietly(tmp_path / "games", tmp_path / "out").shards
    with np.load(shard.output) as loaded:
        assert loaded["n"].tolist() == list(range(rows))


def pickled(path: Path, number: int) -> None:
    path.parent.mkdir(exist_ok=True)
    examples = [{"board": np.full((3, 3), number, np.int8), "value": float(row)} for row in range(6)]
    with gzip.open(path, "wb") as file:
        pickle.dump({"examples": examples}, file)


def test_pickles_and_json_lines_become_arrays(tmp_path):
    pickled(tmp_path / "games" / "shard_0.pkl.gz", 7)
    rows = [{"board": [[7] * 3] * 3, "value": float(row)} for row in range(6)]
    (tmp_path / "games" / "shard_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, two = convert_quietly(tmp_path / "games", tmp_path / "out", allow_pickle=True).shards
    for shard in (one, two):
        with np.load(shard.output, allow_pickle=False) as loaded:
            assert loaded["board"].tolist() == [[[7] * 3] * 3] * 6
            assert loaded["value"].tolist() == [0, 1, 2, 3, 4, 5]


# Speed


def test_reading_is_measured_over_the_same_rows_before_and_after(games, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(
        module, "open_shard", lambda path, **options: opened.append(str(path)) or open_shard(path, **options)
    )
    done = convert_quietly(games, tmp_path / "out")
    assert (done.speed.num_shards, done.speed.num_rows) == (4, 20)
    assert done.speed.before > 0
    assert done.speed.after > 0
    assert opened[-8:] == [path for shard in done.shards for path in (shard.input, shard.output)]


def test_measuring_ends_after_some_seconds(games, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MEASURE_SECONDS", 0.0)
    assert convert_quietly(games, tmp_path / "out").speed.num_shards == 1


def test_without_rows_there_is_no_speed(tmp_path):
    write(tmp_path / "games" / "0.npz", columns_of(0, rows=0))
    assert convert_quietly(tmp_path / "games", tmp_path / "out").speed is None


# Again


def times(folder: Path) -> dict[str, int]:
    return {name: (folder / name).stat().st_mtime_ns for name in visible(folder)}


def test_what_was_made_from_the_same_input_is_not_made_again(games, tmp_path):
    convert_quietly(games, tmp_path / "out")
    before = times(tmp_path / "out")
    assert all(shard.was_there for shard in convert_quietly(games, tmp_path / "out").shards)
    assert times(tmp_path / "out") == before


def test_an_input_that_changed_is_converted_again(games, tmp_path):
    convert_quietly(games, tmp_path / "out")
    write(games / "run2_shard-002.npz", columns_of(9))
    done = convert_quietly(games, tmp_path / "out")
    assert [shard.was_there for shard in done.shards] == [True, True, False, True]
    assert_same(read(done.shards[2].output), columns_of(9))


def test_other_columns_are_converted_again(games, tmp_path):
    convert_quietly(games, tmp_path / "out", columns=["board", "value"])
    same = convert_quietly(games, tmp_path / "out", columns=["value", "board"])
    assert all(shard.was_there for shard in same.shards)
    other = convert_quietly(games, tmp_path / "out", columns=["board"])
    assert not any(shard.was_there for shard in other.shards)
    assert list(read(other.shards[0].output)) == ["board"]


def test_a_range_at_a_time_fills_one_folder(games, tmp_path):
    convert_quietly(games, tmp_path / "out", shard_range="0-1")
    done = convert_quietly(games, tmp_path / "out", shard_range="all")
    assert [shard.was_there for shard in done.shards] == [True, True, False, False]


def test_an_input_that_is_damaged_ends_it_and_keeps_what_was_done(games, tmp_path):
    np.savez(games / "run2_shard-002.npz", **columns_of(2, rows=5000))
    whole = (games / "run2_shard-002.npz").read_bytes()
    damaged = bytearray(whole)
    damaged[whole.index(columns_of(2, rows=5000)["value"].tobytes()) + 7] ^= 1  # in the numbers: headers do not tell
    (games / "run2_shard-002.npz").write_bytes(damaged)
    with refused(SourceError, file=games / "run2_shard-002.npz", column="value"):
        convert_quietly(games, tmp_path / "out")
    assert visible(tmp_path / "out") == ["run2_shard-000.npz", "run2_shard-001.npz"]
    (games / "run2_shard-002.npz").write_bytes(whole)
    done = convert_quietly(games, tmp_path / "out")
    assert [shard.was_there for shard in done.shards] == [True, True, False, False]


def run_python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(batchwright.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("where", ["_check_written", "content_mark", "write_whole", "publish"])
def test_a_killed_conversion_leaves_whole_shards_and_continues(where, games, tmp_path):
    script = f"""
import os, signal, sys
from batchwright.pool import convert as module
original, calls = module.{where}, 0
def killed(path, *more):
    global calls
    calls += "002" in str(path) or "002" in repr(more)
    if calls == (2 if "{where}" == "content_mark" else 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(path, *more)
module.{where} = killed
module.convert(sys.argv[1], sys.argv[2], show_progress=False)
"""
    assert run_python(script, games, tmp_path / "out").returncode == -signal.SIGKILL
    assert visible(tmp_path / "out") == ["run2_shard-000.npz", "run2_shard-001.npz"]
    done = convert_quietly(games, tmp_path / "out")
    assert [shard.was_there for shard in done.shards] == [True, True, False, False]
    for shard in done.shards:
        assert_same(read(shard.output), columns_of(shard.number))
    assert not (tmp_path / "out" / module._UNFINISHED).exists()


@pytest.mark.parametrize("where", ["write_whole", "publish"])
def test_a_kill_while_an_old_shard_is_replaced_is_made_good(where, games, tmp_path):
    convert_quietly(games, tmp_path / "out")
    write(games / "run2_shard-002.npz", columns_of(9))
    script = f"""
import os, signal, sys
from batchwright.pool import convert as module
module.{where} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
module.convert(sys.argv[1], sys.argv[2], show_progress=False)
"""
    assert run_python(script, games, tmp_path / "out").returncode == -signal.SIGKILL
    done = convert_quietly(games, tmp_path / "out")
    assert [shard.was_there for shard in done.shards] == [True, True, False, True]
    assert_same(read(done.shards[2].output), columns_of(9))


def test_a_full_disk_leaves_nothing_half_written(games, tmp_path):
    write(games / "run2_shard-002.npz", {**columns_of(2, rows=2000)})
    script = """
import resource, sys
from batchwright.base.errors import OutOfSpaceError
from batchwright.pool.convert import convert
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    convert(sys.argv[1], sys.argv[2], show_progress=False)
except OutOfSpaceError as error:
    print(error)
"""
    ran = run_python(script, games, tmp_path / "out")
    assert "no space left while writing" in ran.stdout, ran.stderr
    assert "it continues where it stopped" in ran.stdout
    assert visible(tmp_path / "out") == ["run2_shard-000.npz", "run2_shard-001.npz"]
    assert not (tmp_path / "out" / module._UNFINISHED).exists()
    done = convert_quietly(games, tmp_path / "out")
    assert [shard.was_there for shard in done.shards] == [True, True, False, False]


@pytest.mark.parametrize("number", ["ENOSPC", "EDQUOT"])
def test_no_space_for_a_shard_is_an_error_of_ours(number, games, tmp_path, monkeypatch):
    import errno

    def full(file, columns):
        file.write(b"half")
        raise OSError(getattr(errno, number), "full")

    monkeypatch.setitem(module._WRITERS, ".npz", full)
    with refused(OutOfSpaceError, os.strerror(getattr(errno, number)), folder=tmp_path / "out"):
        convert_quietly(games, tmp_path / "out")
    assert visible(tmp_path / "out") == []
    assert not (tmp_path / "out" / module._UNFINISHED).exists()


# What is refused


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def changed(out: Path) -> None:
    write(out / "run2_shard-001.npz", {"mine": np.arange(3)})


REFUSED = {
    "the same folder": ({"out": "games"}, None, SpecError, "{tmp}/games", {"parameter": "out"}),
    "a link to it": ({"out": "link"}, None, SpecError, "{tmp}/games", {"parameter": "out"}),
    "a file": ({"out": "file"}, None, SpecError, "{tmp}/file", {"parameter": "out"}),
    "no format": ({"to": "hdf5"}, None, SpecError, "to='hdf5'", {"parameter": "to"}),
    "no range": ({"shard_range": "3-0"}, None, SpecError, "3-0", {"parameter": "shard_range"}),
    "none": ({"shard_range": "none"}, None, SpecError, "none", {"parameter": "shard_range"}),
    "a gap": ({"shard_range": "0-9"}, None, SpecError, "0-9", {"missing": "4-9"}),
    "no directory": ({"directory": "gone"}, None, SourceError, "gone", {"directory": "{tmp}/gone"}),
    "no column": ({"columns": ["valu"]}, None, SourceError, "valu", {"column": "valu"}),
    "a file of another": ({}, changed, SpecError, "force=True", {"file": "run2_shard-001.npz"}),
    "another format there": (
        {"to": "arrow"},
        changed,
        SpecError,
        "shard 1",
        {"file": "run2_shard-001.npz"},
    ),
}


@pytest.mark.parametrize(("options", "make", "kind", "named", "where"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_before_anything_is_written(options, make, kind, named, where, games, tmp_path):
    os.symlink(games, tmp_path / "link")
    (tmp_path / "file").touch()
    options = {"directory": "games", "out": "out"} | options
    directory, out = (tmp_path / options.pop(name) for name in ("directory", "out"))
    if make:
        make(out)
    before = snapshot(tmp_path)
    place = {name: value.format(tmp=tmp_path) for name, value in where.items()}
    with refused(kind, named.format(tmp=tmp_path), **place):
        convert_quietly(directory, out, **options)
    assert {path: data for path, data in snapshot(tmp_path).items() if not path.endswith(".lock")} == before


def test_pickles_are_refused_before_anything_is_written(games, tmp_path):
    pickled(games / "shard_4.pkl.gz", 4)
    command = f"batchwright shards convert {games} {games}-npz --allow-pickle"
    with refused(SourceError, "pickle", file=games / "shard_4.pkl.gz", remedy=command):
        convert_quietly(games, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_was_changed_is_written_over_only_by_force(games, tmp_path):
    convert_quietly(games, tmp_path / "out")
    changed(tmp_path / "out")
    with refused(SpecError, parameter="out", file="run2_shard-001.npz", remedy="force=True"):
        convert_quietly(games, tmp_path / "out")
    done = convert_quietly(games, tmp_path / "out", force=True)
    assert [shard.was_there for shard in done.shards] == [True, False, True, True]
    assert_same(read(done.shards[1].output), columns_of(1))


def test_without_its_manifest_nothing_is_skipped_or_written_over(games, tmp_path):
    convert_quietly(games, tmp_path / "out")
    (tmp_path / "out" / module._MANIFEST).write_text("{")
    with refused(SpecError, parameter="out", file="run2_shard-000.npz", remedy="force=True"):
        convert_quietly(games, tmp_path / "out")


def test_a_second_one_at_the_same_time_is_told_who_is_first(games, tmp_path):
    (tmp_path / "out").mkdir()
    with (
        exclusive(tmp_path / "out" / module._LOCK, doing="converting shards into"),
        refused(BusyError, "converting", folder=tmp_path / "out", process=f"pid {os.getpid()}"),
    ):
        convert_quietly(games, tmp_path / "out")
    assert visible(tmp_path / "out") == []


def test_a_column_that_a_format_cannot_hold_is_refused(tmp_path):
    write(tmp_path / "games" / "0.npz", {"__metadata__": np.arange(3), "value": np.arange(3)})
    file = tmp_path / "games" / "0.npz"
    with refused(SourceError, file=file, columns="__metadata__, value", remedy="npz, arrow, parquet"):
        convert_quietly(tmp_path / "games", tmp_path / "out", to="safetensors")
    assert visible(tmp_path / "out") == []


def test_a_column_may_have_any_name(tmp_path):
    names = ["file", "allow_pickle", "self", "a/b", "été"]
    pq_file = tmp_path / "games" / "0.parquet"
    pq_file.parent.mkdir()
    pq.write_table(pa.table({name: [1, 2] for name in names}), pq_file)
    for to in FORMATS:
        (shard,) = convert_quietly(tmp_path / "games", tmp_path / to, to=to).shards
        assert sorted(read(shard.output)) == sorted(names)


@pytest.mark.parametrize("change", ["a value", "a type", "a row"])
def test_what_does_not_read_as_it_was_written_does_not_appear(change, games, tmp_path, monkeypatch):
    def wrong(file, columns):
        columns = {name: values.copy() for name, values in columns.items()}
        if change == "a value":
            columns["board"][3, 1, 1] ^= 1
        elif change == "a type":
            columns["board"] = columns["board"].astype(np.int16)
        else:
            columns = {name: values[:-1] for name, values in columns.items()}
        write_npz(file, columns)

    write_npz = module._write_npz
    monkeypatch.setitem(module._WRITERS, ".npz", wrong)
    with refused(SourceError, file=games / "run2_shard-000.npz", remedy="safetensors, arrow, parquet"):
        convert_quietly(games, tmp_path / "out")
    assert visible(tmp_path / "out") == []


def test_a_folder_inside_the_directory_is_fine(games):
    convert_quietly(games, games / "npz")
    assert len(convert_quietly(games, games / "npz").shards) == 4


def test_what_a_killed_conversion_left_is_removed(games, tmp_path):
    (tmp_path / "out" / module._UNFINISHED).mkdir(parents=True)
    shutil.copy(games / "run2_shard-000.npz", tmp_path / "out" / module._UNFINISHED / "run2_shard-000.npz")
    convert_quietly(games, tmp_path / "out")
    assert not (tmp_path / "out" / module._UNFINISHED).exists()


def test_an_input_that_changed_where_no_mark_looks_is_converted_again(tmp_path):
    shard, boards, marks = tmp_path / "games/shard_0.safetensors", np.zeros((10_000, 80), np.int8), []
    shard.parent.mkdir()
    for sign in (1, -1):
        columns = {"before": boards, "sign": np.full(10_000, sign, np.int8), "wide": boards}
        with open(shard, "wb") as file:
            module._write_safetensors(file, columns)
        marks.append(content_mark(shard))
        convert(tmp_path / "games", tmp_path / "out", show_progress=False)
        with np.load(tmp_path / "out/shard_0.npz") as made:
            assert (made["sign"] == sign).all()
    assert marks[0] == marks[1]  # else this is a test of something else


@pytest.mark.parametrize(
    ("name", "content"), [("shard_0.jsonl", b"\n"), ("shard_0.pkl", pickle.dumps({"examples": []}))]
)
def test_a_shard_whose_rows_would_tell_its_columns_and_that_has_none_is_named(name, content, tmp_path):
    (tmp_path / "games").mkdir()
    (tmp_path / "games" / name).write_bytes(content)
    with refused(SourceError, file=tmp_path / "games" / name, remedy="--range"):
        convert(tmp_path / "games", tmp_path / "out", allow_pickle=True, show_progress=False)
    assert not (tmp_path / "out/shard_0.npz").exists()
