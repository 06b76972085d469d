"""Which shards are found, in which order an epoch has them, and which are kept for validation."""

from __future__ import annotations

import logging
import math
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.base.errors import BatchwrightError, SourceError, SpecError
from batchwright.pool import shard_files as find
from batchwright.pool.shard_files import ShardFile, discover_and_split_multiple_data, find_shards, shard_sequence
from refusals import refused


def touch(directory: Path, *names: str) -> str:
    """A directory with files of these names; no shard is opened here, so they can be empty."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).touch()
    return str(directory)


def numbered(directory: Path, numbers) -> str:
    return touch(directory, *(f"shard_{number:04}.npz" for number in numbers))


def numbers_of(found) -> list[list[int]]:
    return [[shard.number for shard in shards] for shards in found]


# Discovery


def test_shards_are_found_by_number_not_by_name(tmp_path):
    a = touch(tmp_path / "a", "shard_10.npz", "shard_9.npz", "shard_008.pkl.gz", "other-11.parquet")
    assert find_shards([a], ["8-10"]) == [
        [
            ShardFile(0, f"{a}/shard_008.pkl.gz", 8),
            ShardFile(0, f"{a}/shard_9.npz", 9),
            ShardFile(0, f"{a}/shard_10.npz", 10),
        ]
    ]


def test_each_directory_has_its_own_range(tmp_path):
    a, b, c = (numbered(tmp_path / name, range(10)) for name in "abc")
    assert numbers_of(find_shards([a, Path(b), c], ["0-2", "none", "all"])) == [[0, 1, 2], [], list(range(10))]


def test_hidden_files_folders_and_other_kinds_do_not_count(tmp_path, caplog):
    a = numbered(tmp_path / "a", range(3))
    touch(tmp_path / "a", "README.md", "metadata.json", ".shard_3.npz", ".shard_1.npz.77.0.part", "shard_2.npz.tmp")
    (tmp_path / "a" / "shard_7.npz").mkdir()
    with caplog.at_level(logging.DEBUG, "batchwright"):
        assert numbers_of(find_shards([a], ["all"])) == [[0, 1, 2]]
    assert f"{a}: 3 shards; 6 " in caplog.text


def test_ids_are_taken_and_said_to_be_ids(tmp_path, caplog):
    a = touch(tmp_path / "a", "game_17.npz", "game_4011.npz", "game_90210.npz")
    with caplog.at_level(logging.INFO, "batchwright"):
        assert numbers_of(find_shards([a], ["all"])) == [[17, 4011, 90210]]
    assert " ids" in caplog.text


def test_one_directory_twice_with_ranges_apart_is_fine(tmp_path):
    a = numbered(tmp_path / "a", range(10))
    assert numbers_of(find_shards([a, a], ["0-4", "5-9"])) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_directory_that_is_none_is_not_looked_at(tmp_path):
    a = numbered(tmp_path / "a", range(2))
    assert numbers_of(find_shards([a, str(tmp_path / "gone")], ["all", "none"])) == [[0, 1], []]


def test_numbers_outside_the_range_may_be_there_twice(tmp_path):
    a = touch(tmp_path / "a", "shard_0.npz", "shard_1.npz", "shard_1.pkl.gz")
    assert numbers_of(find_shards([a], ["0"])) == [[0]]


class Case:
    """One bad input: how the folder is made, what is asked, and what the error says."""

    def __init__(self, make, dirs, ranges, kind, where, remedy):
        self.make, self.dirs, self.ranges = make, dirs, ranges
        self.kind, self.where, self.remedy = kind, where, remedy


def linked(folder: Path) -> None:
    os.symlink(folder / "a" / "shard_0001.npz", folder / "a" / "shard_0002.npz")


BAD = {
    "dirs not a list": Case(None, "a", ["all"], SpecError, {"given": "'a'"}, 'data_dirs=["'),
    "ranges not a list": Case(None, ["a"], "0-1", SpecError, {"given": "'0-1'"}, 'shard_ranges=["'),
    "no lists": Case(None, [], [], SpecError, {"parameter": "shard_ranges"}, "shard_ranges="),
    "not a path": Case(None, [None], ["all"], SpecError, {"parameter": "data_dirs"}, "data_dirs="),
    "unequal": Case(
        None,
        ["a", "bb", "c"],
        ["0-1", "all"],
        SpecError,
        {"data_dirs": "a, bb, c", "shard_ranges": "0-1, all"},
        "",
    ),
    "not a range": Case(None, ["a", "a"], ["0", "x"], SpecError, {"index": 1, "directory": "a"}, '"0-99"'),
    "a gap": Case(
        lambda folder: (folder / "a" / "shard_0001.npz").unlink(),
        ["a"],
        ["0-2"],
        SpecError,
        {"directory": "a", "missing": "1", "there": "0, 2"},
        '"0,2"',
    ),
    "a gap in all": Case(
        lambda folder: (folder / "a" / "shard_0001.npz").unlink(),
        ["a"],
        ["all"],
        SpecError,
        {"directory": "a", "missing": "1", "there": "0, 2"},
        '"0,2"',
    ),
    "a number twice": Case(
        lambda folder: touch(folder / "a", "shard_1.npz"),
        ["a"],
        ["all"],
        SourceError,
        {"directory": "a", "files": "1: shard_0001.npz and shard_1.npz"},
        "",
    ),
    "two formats": Case(
        lambda folder: touch(folder / "a", *(f"shard_{n:04}.pkl.gz" for n in range(3))),
        ["a"],
        ["0-1"],
        SourceError,
        {"files": "0: shard_0000.npz and shard_0000.pkl.gz, 1: shard_0001.npz and shard_0001.pkl.gz"},
        "",
    ),
    "no number": Case(
        lambda folder: touch(folder / "a", "positions.npz"),
        ["a"],
        ["0-1"],
        SourceError,
        {"file": "a/positions.npz"},
        "shard_0000.npz",
    ),
    "a directory twice": Case(
        None,
        ["a", "../{here}/a"],
        ["0-1", "1-2"],
        SpecError,
        {"index": 1, "files": "a/shard_0001.npz is ../{here}/a/shard_0001.npz"},
        "data_dirs[1]",
    ),
    "a link to a neighbour": Case(
        lambda folder: ((folder / "a" / "shard_0002.npz").unlink(), linked(folder)),
        ["a"],
        ["all"],
        SpecError,
        {"files": "a/shard_0001.npz is a/shard_0002.npz"},
        "2",
    ),
    "a link to nowhere": Case(
        lambda folder: os.symlink("gone.npz", folder / "a" / "shard_0003.npz"),
        ["a"],
        ["all"],
        SourceError,
        {"file": "a/shard_0003.npz"},
        "",
    ),
    "a pipe": Case(
        lambda folder: os.mkfifo(folder / "a" / "shard_0003.npz"),
        ["a"],
        ["all"],
        SourceError,
        {"file": "a/shard_0003.npz"},
        "",
    ),
    "no directory": Case(
        None, ["aa"], ["all"], SourceError, {"directory": "aa", "reason": "No such file or directory"}, "shard_0000.npz"
    ),
    "a file": Case(None, ["a/shard_0001.npz"], ["all"], SourceError, {"reason": "Not a directory"}, "shard_0000.npz"),
    "an empty directory": Case(
        lambda folder: touch(folder / "b"),
        ["b"],
        ["all"],
        SourceError,
        {"directory": "b", "found": "it is empty"},
        "",
    ),
    "no shards": Case(
        lambda folder: (touch(folder / "b", "README.md", ".x.npz"), touch(folder / "b" / "train")),
        ["b"],
        ["none", "all"][1:],
        SourceError,
        {"found": "README.md, train/"},
        "",
    ),
    "all none": Case(None, ["a", "a"], ["none", "none"], SpecError, {"parameter": "shard_ranges"}, ""),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_what_cannot_be_meant_is_refused(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    numbered(tmp_path / "a", range(3))
    if case.make:
        case.make(tmp_path)
    before = sorted(os.walk(tmp_path))
    words = {"here": tmp_path.name, "folder": str(tmp_path)}
    dirs = [each.format(**words) if isinstance(each, str) else each for each in case.dirs] if case.dirs != "a" else "a"
    where = {name: value.format(**words) if isinstance(value, str) else value for name, value in case.where.items()}
    with refused(case.kind, remedy=case.remedy or True, **where):
        find_shards(dirs, case.ranges)
    assert sorted(os.walk(tmp_path)) == before


def test_a_directory_without_shards_says_how_shards_are_named(tmp_path):
    with refused(SourceError, "*.npz", "*.pkl.gz", directory=tmp_path / "a", found="shards.tar"):
        find_shards([touch(tmp_path / "a", "shards.tar")], ["all"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list everything")
def test_a_directory_that_may_not_be_listed_is_named(tmp_path):
    a = numbered(tmp_path / "a", range(3))
    os.chmod(a, 0)
    try:
        with refused(SourceError, index=0, directory=a, reason="Permission denied"):
            find_shards([a], ["all"])
    finally:
        os.chmod(a, 0o700)


def test_an_error_of_the_disk_names_the_directory(tmp_path, monkeypatch):
    a = numbered(tmp_path / "a", range(3))

    def broken(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "scandir", broken)
    with refused(SourceError, index=0, directory=a, reason="Input/output error"):
        find_shards([a], ["all"])


# The order of an epoch


def found_of(counts) -> list[list[ShardFile]]:
    return [[ShardFile(i, f"{i}/{n}.npz", n) for n in range(count)] for i, count in enumerate(counts)]


COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=12)


@given(COUNTS)
def test_every_prefix_has_each_directory_within_one_shard_of_its_share(counts):
    sequence = shard_sequence(found_of(counts))
    seen = [0] * len(counts)
    for length, shard in enumerate(sequence, 1):
        seen[shard.directory] += 1
        assert all(abs(seen[i] - Fraction(length * count, sum(counts))) < 1 for i, count in enumerate(counts)), (
            f"after {length} shards"
        )


@given(COUNTS)
def test_an_epoch_has_each_shard_once_and_in_order_inside_its_directory(counts):
    found = found_of(counts)
    sequence = shard_sequence(found)
    assert [[shard for shard in sequence if shard.directory == i] for i in range(len(counts))] == found


def test_the_order_of_an_epoch_is_pinned():
    # Saved states are places in this order: if it changes, they point at other rows.
    assert [shard.path for shard in shard_sequence(found_of([5, 0, 2, 1]))] == [
        *("0/0.npz", "0/1.npz", "2/0.npz", "0/2.npz", "3/0.npz", "0/3.npz", "2/1.npz", "0/4.npz")
    ]


# Validation


def test_a_split_takes_whole_shards_of_every_directory(tmp_path):
    a, b = numbered(tmp_path / "a", range(20)), numbered(tmp_path / "b", range(100, 110))
    split = discover_and_split_multiple_data([a, b], ["all", "all"], 0.2, random_seed=7)
    assert numbers_of([split.validation_shards]) == [[3, 5, 6, 18, 103, 105]]
    assert split.validation_ranges == ("3,5-6,18", "103,105")
    assert split.train_ranges == ("0-2,4,7-17,19", "100-102,104,106-109")


def split_of(counts, share, seed):
    """A split of directories with so many shards each, without the files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "find_shards", lambda dirs, ranges: found_of(counts))
        return discover_and_split_multiple_data(["x"] * len(counts), ["all"] * len(counts), share, seed)


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(lambda counts: max(counts) > 1),
    st.floats(0, 1, exclude_max=True),
    st.integers(-(2**70), 2**70),
)
def test_no_shard_is_on_both_sides_and_none_is_lost(counts, share, seed):
    split = split_of(counts, share, seed)
    train, validation = set(split.train_shards), set(split.validation_shards)
    assert not train & validation
    assert train | validation == {shard for shards in found_of(counts) for shard in shards}


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(lambda counts: max(counts) > 1),
    st.floats(0, 1, exclude_max=True),
)
def test_each_directory_gives_its_rounded_share_and_keeps_one_for_training(counts, share):
    kept = [0] * len(counts)
    for shard in split_of(counts, share, 0).validation_shards:
        kept[shard.directory] += 1
    rounded = [min(round(count * share), max(0, count - 1)) for count in counts]
    if share and not any(rounded):
        rounded[counts.index(max(counts))] = 1  # the largest gives one, so that there is any
    assert kept == rounded


def test_the_ranges_of_a_split_find_the_shards_of_the_split(tmp_path):
    a, b = numbered(tmp_path / "a", range(20)), numbered(tmp_path / "b", [3, 300, 3000])
    split = discover_and_split_multiple_data([a, b], ["3-17", "all"], 0.1)
    for ranges, shards in (
        (split.train_ranges, split.train_shards),
        (split.validation_ranges, split.validation_shards),
    ):
        assert tuple(shard for found in find_shards(split.data_dirs, ranges) for shard in found) == shards
    assert split.validation_ranges[1] == "none"  # round(0.3)


def test_a_split_follows_from_seed_and_numbers_and_not_from_paths(tmp_path):
    a, b = numbered(tmp_path / "a", range(40)), numbered(tmp_path / "elsewhere" / "b", range(40))
    one = discover_and_split_multiple_data([a], ["all"], 0.25, random_seed=1)
    assert discover_and_split_multiple_data([b], ["all"], 0.25, random_seed=1).train_ranges == one.train_ranges
    assert discover_and_split_multiple_data([a], ["all"], 0.25, random_seed=2).train_ranges != one.train_ranges


@given(st.integers(10, 60), st.integers(0, 12), st.floats(0.1, 0.9), st.integers(0, 100))
def test_no_more_old_shards_change_sides_than_were_added(before, added, share, seed):
    one, two = (set(split_of([count], share, seed).validation_shards) for count in (before, before + added))
    moved = [shard for shard in one ^ two if shard.number < before]
    assert len(moved) <= added


def test_weights_are_shares_of_shards_per_split(tmp_path):
    a, b = numbered(tmp_path / "a", range(30)), numbered(tmp_path / "b", range(10))
    split = discover_and_split_multiple_data([a, b], ["all", "all"], 0.1)
    assert split.weights == {"train": {a: 0.75, b: 0.25}, "validation": {a: 0.75, b: 0.25}}


def test_weights_of_one_directory_given_twice_are_added(tmp_path):
    a = numbered(tmp_path / "a", range(4))
    assert discover_and_split_multiple_data([a, a], ["0-1", "2-3"], 0).weights["train"] == {a: 1.0}


def test_a_split_of_nothing_keeps_all_for_training(tmp_path):
    a = numbered(tmp_path / "a", range(4))
    split = discover_and_split_multiple_data([a], ["all"], 0)
    assert (split.train_ranges, split.validation_ranges) == (("0-3",), ("none",))
    assert split.weights["validation"] == {a: 0.0}


def test_a_split_prints_as_a_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    numbered(tmp_path / "games", range(30)), numbered(tmp_path / "b", range(10))
    split = discover_and_split_multiple_data(["games", "b"], ["all", "0-8"], 0.1)
    assert repr(split) == str(split)
    assert str(split).splitlines() == [
        "35 shards for training, 4 for validation",
        "directory    train    share  validation    share  validation shards",
        f"games           27   77.1 %           3   75.0 %  {split.validation_ranges[0]}",
        f"b                8   22.9 %           1   25.0 %  {split.validation_ranges[1]}",
    ]


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        *((wrong, "0.1") for wrong in (-0.1, 1, 1.0, math.nan, math.inf, "0.2", None, True)),
        (10, "0.1"),
        (np.float32(25), "0.25"),
    ],
)
def test_a_share_that_is_none_is_refused(given, remedy, tmp_path):
    a = numbered(tmp_path / "a", range(4))
    with refused(SpecError, parameter="validation_split", remedy=f"validation_split={remedy}"):
        discover_and_split_multiple_data([a], ["all"], given)


@pytest.mark.parametrize("seed", [None, 1.5, "7"])
def test_a_seed_is_a_whole_number(seed, tmp_path):
    with refused(SpecError, seed, parameter="random_seed", remedy="random_seed="):
        discover_and_split_multiple_data([numbered(tmp_path / "a", range(4))], ["all"], 0.5, random_seed=seed)


def test_where_no_directory_has_two_shards_none_can_be_kept(tmp_path):
    a, b = numbered(tmp_path / "a", [0]), numbered(tmp_path / "b", [5])
    with refused(SpecError, a, b, "'all'", parameter="validation_split", remedy="validation_split=0"):
        discover_and_split_multiple_data([a, b], ["all", "all"], 0.5)


def test_errors_of_discovery_survive_a_process_border(tmp_path):
    import pickle

    with pytest.raises(BatchwrightError) as caught:
        find_shards([str(tmp_path / "x")], ["all"])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
