"""Bad input to the mixed shard pool: one clear error each, that says what, where and what to do; nothing changes."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil

import numpy as np
import pytest

import batchwright as bw
from refusals import refused


def write_shard(path, rows=30, *, first=0, **more):
    columns = {"id": np.arange(first, first + rows), "board": np.zeros((rows, 3, 3), np.uint8)} | more
    np.savez(path, **{name: array for name, array in columns.items() if array is not None})


@pytest.fixture
def folder(tmp_path):
    """Ten shards of thirty positions."""
    (tmp_path / "games").mkdir()
    for number in range(10):
        write_shard(tmp_path / "games" / f"shard_{number:04d}.npz", first=30 * number)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.md").write_text("no shards here")
    return tmp_path


def make(folder, shard_range="all", *, directory="games", **settings):
    settings = {"pool_size": 100, "refill_threshold": 60, "random_seed": 1} | settings
    return bw.StreamingMixedShardDataset([str(folder / directory)], [shard_range], **settings)


# What is wrong when the dataset is made


@pytest.mark.parametrize(
    ("settings", "error", "says", "where", "remedy"),
    [
        ({"shard_range": "0-12"}, bw.SpecError, "10-12", {"parameter": "shard_ranges"}, "0-9"),
        ({"shard_range": "9-3"}, bw.SpecError, "reversed|backwards|9-3", {"parameter": "shard_ranges"}, "3-9"),
        ({"shard_range": "first ten"}, bw.SpecError, "range", {"parameter": "shard_ranges"}, "0-99"),
        ({"shard_range": ""}, bw.SpecError, "not a range of shards", {"parameter": "shard_ranges"}, "0-99"),
        ({"shard_range": "none"}, bw.SpecError, "no shard is left", {"parameter": "shard_ranges"}, "all"),
        ({"directory": "empty"}, bw.SourceError, "no shard is in this directory", {}, "none"),
        ({"directory": "notes"}, bw.SourceError, "no shard is in this directory", {"found": "README.md"}, "shards"),
        ({"directory": "nowhere"}, bw.SourceError, "cannot be listed", {"reason": "No such file"}, "shard_0000.npz"),
        ({"pool_size": 0}, bw.SpecError, "pool_size must be at least 1", {"parameter": "pool_size"}, "pool_size="),
        ({"pool_size": 10.5}, bw.SpecError, "whole number", {"parameter": "pool_size"}, "int"),
        (
            {"refill_threshold": 100},
            bw.SpecError,
            "refill_threshold=100 is not below pool_size=100",
            {"parameter": "refill_threshold"},
            "refill_threshold=75",
        ),
        (
            {"refill_threshold": 1_500_000},
            bw.SpecError,
            "is not below pool_size=100",
            {"parameter": "refill_threshold"},
            "refill_threshold=75",
        ),
        (
            {"batch_size": 101},
            bw.SpecError,
            "a pool of 100 entries is smaller than a batch of 101",
            {"parameter": "pool_size"},
            "pool_size=404",
        ),
        ({"batch_size": 0}, bw.SpecError, "batch_size must be at least 1", {"parameter": "batch_size"}, "batch_size="),
        ({"max_memory_gb": 0}, bw.SpecError, "above 0", {"parameter": "max_memory_gb"}, "max_memory_gb=5.0"),
        ({"max_memory_gb": float("nan")}, bw.SpecError, "above 0", {"parameter": "max_memory_gb"}, "5.0"),
        ({"max_memory_gb": "5GB"}, bw.SpecError, "'5GB'", {"parameter": "max_memory_gb"}, "5.0"),
        (
            {"max_examples_unaugmented": 0},
            bw.SpecError,
            "at least 1",
            {"parameter": "max_examples_unaugmented"},
            "max_examples_unaugmented=1",
        ),
        ({"on_memory_limit": "ignore"}, bw.SpecError, "'raise', 'stop'", {"parameter": "on_memory_limit"}, "raise"),
        ({"columns": ["bord"]}, bw.SourceError, "no column 'bord'", {"column": "bord"}, "board"),
        ({"columns": "board"}, bw.SpecError, "no list of names", {"parameter": "columns"}, "columns=['board'"),
        ({"transform": 3}, bw.SpecError, "transform=3 is not a function", {"parameter": "transform"}, "columns"),
        ({"augmentation": "hex5"}, bw.SpecError, "hex5", {}, "hex4"),
        ({"augmentation": lambda c, w: c}, bw.SpecError, "has no factor", {"parameter": "augmentation"}, "factor"),
        ({"random_seed": 1.5}, bw.SpecError, "whole number", {"parameter": "random_seed"}, "int"),
        ({"rank": 1}, bw.SpecError, "without world_size=", {"parameter": "world_size"}, "both"),
        ({"rank": 2, "world_size": 2}, bw.SpecError, "rank 2 of 2 does not exist", {"parameter": "rank"}, "0 to"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(folder, settings, error, says, where, remedy):
    with pytest.raises(error, match=says) as caught:
        make(folder, **settings)
    for name, value in where.items():
        assert value in str(caught.value.where[name])
    assert remedy in (caught.value.remedy or "")


def test_a_directory_that_is_refused_is_named(folder):
    for directory in ("empty", "notes", "nowhere"):
        with pytest.raises(bw.SourceError) as caught:
            make(folder, directory=directory)
        assert caught.value.where["directory"] == str(folder / directory)


def test_lists_of_unequal_length_are_shown(folder):
    with refused(bw.SpecError, folder / "more", 2, 1, parameter="shard_ranges", remedy="shard_ranges="):
        bw.StreamingMixedShardDataset([str(folder / "games"), str(folder / "more")], ["all"])


def test_gaps_are_listed(folder):
    (folder / "games" / "shard_0004.npz").unlink()
    (folder / "games" / "shard_0007.npz").unlink()
    for shard_range in ("0-9", "all"):
        with refused(bw.SpecError, missing="4, 7", remedy="0-3,5-6,8-9"):
            make(folder, shard_range)


def test_a_number_of_two_files_lists_both(folder):
    shutil.copy(folder / "games" / "shard_0003.npz", folder / "games" / "shard_3.npz")
    with refused(bw.SourceError, directory=folder / "games", files="3: shard_0003.npz and shard_3.npz"):
        make(folder)


@pytest.mark.parametrize(
    ("columns", "column", "says"),
    [
        ({"board": np.zeros((30, 4, 4), np.uint8)}, "board", r"uint8\[4, 4\], and in shard_0000.npz uint8\[3, 3\]"),
        ({"board": np.zeros((30, 3, 3), np.int8)}, "board", r"int8\[3, 3\], and in shard_0000.npz uint8\[3, 3\]"),
        ({"board": None}, "board", "not there"),
        ({"value": np.zeros(30)}, "value", "not there"),
    ],
)
def test_a_shard_with_another_schema_is_named_with_its_column(folder, columns, column, says):
    write_shard(folder / "games" / "shard_0006.npz", **columns)
    with pytest.raises(bw.SourceError, match=says) as caught:
        make(folder)
    assert caught.value.where["file"].endswith("shard_0006.npz")
    assert caught.value.where["column"] == column
    assert "columns=" in caught.value.remedy


def test_a_pickle_is_refused_with_the_way_out(folder):
    (folder / "old").mkdir()
    with gzip.open(folder / "old" / "shard_0000.pkl.gz", "wb") as file:
        pickle.dump({"examples": [{"board": np.zeros((3, 3), np.uint8)}]}, file)
    command = f"batchwright shards convert {folder / 'old'} {folder / 'old'}-npz --allow-pickle"
    file = folder / "old" / "shard_0000.pkl.gz"
    with refused(bw.SourceError, "pickle", "allow_pickle=True", file=file, remedy=command):
        make(folder, directory="old")
    assert len(make(folder, directory="old", allow_pickle=True)) == 1


# What goes wrong on the way


def taken_until_error(batches, error):
    taken: list[int] = []
    with pytest.raises(error) as caught:
        taken.extend(int(number) for batch in batches for number in batch["id"])
    return taken, caught.value


def test_a_shard_that_breaks_in_mid_epoch_is_named_and_nothing_is_lost(folder):
    dataset = make(folder)
    batches = dataset.batches(7)
    taken = next(batches)["id"].tolist()
    path = folder / "games" / "shard_0008.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[:150] + bytes(60) + whole[210:])
    more, error = taken_until_error(batches, bw.SourceError)
    assert error.where["file"] == str(path)
    assert error.remedy
    assert len(taken + more) == dataset.state_dict()["drawn"]
    path.write_bytes(whole)
    with refused(bw.SourceError, file=path, remedy="load_state_dict"):
        list(dataset.batches(7))
    mended = make(folder)
    mended.load_state_dict(dataset.state_dict())
    rest = [int(position["id"]) for position in mended]
    assert sorted(taken + more + rest) == list(range(300))


def test_a_shard_that_is_replaced_in_mid_epoch_is_named(folder):
    batches = make(folder).batches(7)
    next(batches)
    write_shard(folder / "games" / "new.npz", first=7000)
    (folder / "games" / "new.npz").rename(folder / "games" / "shard_0009.npz")
    _, error = taken_until_error(batches, bw.SourceError)
    assert error.where["file"].endswith("shard_0009.npz")
    assert "make the dataset again" in error.remedy


def test_a_shard_that_vanishes_in_mid_epoch_is_named(folder):
    batches = make(folder).batches(7)
    next(batches)
    (folder / "games" / "shard_0009.npz").unlink()
    _, error = taken_until_error(batches, bw.SourceError)
    assert error.where["file"].endswith("shard_0009.npz")


def test_a_shard_that_grows_in_mid_epoch_is_named(folder):
    batches = make(folder).batches(7)
    next(batches)
    write_shard(folder / "games" / "shard_0009.npz", rows=31)
    _, error = taken_until_error(batches, bw.SourceError)
    assert error.where["file"].endswith("shard_0009.npz")
    assert "31 rows, and had 30" in error.headline
    assert "make the dataset again" in error.remedy


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda c: {**c, "board": c["board"][:, :2]}, "board"),
        (lambda c: {**c, "board": c["board"].astype(np.float32)}, "board"),
        (lambda c: {"id": c["id"]}, "board"),
        (lambda c: {**c, "board": c["board"][:1]}, "board"),
        (lambda c: None, "did not return the columns"),
    ],
)
def test_an_augmentation_that_changes_shapes_is_named_with_the_column(folder, result, says):
    def turned(columns, which):
        return result(columns)

    turned.factor = 2
    dataset = make(folder, augmentation=turned)
    before = dataset.state_dict()
    with pytest.raises(bw.SpecError, match=says) as caught:
        next(dataset.batches(8))
    assert caught.value.where["parameter"] == "augmentation"
    assert "turned" in str(caught.value)
    assert caught.value.remedy
    assert dataset.state_dict()["drawn"] == before["drawn"] == 0


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (lambda c: None, "transform returned NoneType"),
        (lambda c: {"board": c["board"][:3]}, "gave column 'board' 3 rows, for a batch of 8"),
        (lambda c: {"loss": 0.5}, "gave column 'loss' no rows"),
    ],
)
def test_a_transform_that_loses_rows_is_refused(folder, transform, says):
    with pytest.raises(bw.SpecError, match=says) as caught:
        next(make(folder, transform=transform).batches(8))
    assert caught.value.where["parameter"] == "transform"


def test_a_pool_that_lanes_make_smaller_than_a_batch_is_refused(folder):
    with refused(bw.SpecError, 25, 32, "4 lanes", parameter="pool_size", remedy="pool_size=512"):
        next(make(folder, rank=0, world_size=4).batches(32))


# States that do not belong here


@pytest.fixture
def state(folder):
    dataset = make(folder)
    next(dataset.batches(45))
    return json.loads(json.dumps(dataset.state_dict()))


def refused_state(dataset, state):
    before = dataset.state_dict()
    with pytest.raises(bw.PlanError) as caught:
        dataset.load_state_dict(state)
    assert dataset.state_dict() == before
    assert caught.value.remedy
    return caught.value


def test_shards_that_were_added_are_listed_with_the_range_that_fits(folder, state):
    for number in (10, 11):
        write_shard(folder / "games" / f"shard_{number:04d}.npz")
    error = refused_state(make(folder), state)
    assert error.where["added"] == "10-11"
    assert "['0-9']" in error.remedy
    make(folder, "0-9").load_state_dict(state)  # as it says


def test_shards_that_were_taken_away_are_listed(folder, state):
    error = refused_state(make(folder, "0-7"), state)
    assert error.where["taken_away"] == "8-9"


def test_a_shard_that_changed_is_named(folder, state):
    write_shard(folder / "games" / "shard_0005.npz", first=7)
    error = refused_state(make(folder), state)
    assert error.where["file"].endswith("shard_0005.npz")
    assert "changed" in error.headline


def test_shards_may_move_to_another_folder(folder, state):
    shutil.move(folder / "games", folder / "moved")
    make(folder, directory="moved").load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "parameter"),
    [
        ({"random_seed": 2}, "random_seed"),
        ({"augmentation": "dihedral8"}, "augmentation"),
        ({"max_examples_unaugmented": 50}, "max_examples_unaugmented"),
        ({"is_validation": True}, "is_validation"),
    ],
)
def test_another_setting_is_refused_by_name(folder, state, settings, parameter):
    error = refused_state(make(folder, **settings), state)
    assert error.where["parameter"] == parameter


@pytest.mark.parametrize(
    "change",
    [
        lambda s: None,
        lambda s: [],
        lambda s: {},
        lambda s: {**s, "epoch": -1},
        lambda s: {**s, "drawn": 44},
        lambda s: {**s, "lanes": 2},
        lambda s: {**s, "by_lane": ["45"]},
        lambda s: {**s, "by_lane": [-45], "drawn": -45},
        lambda s: {**s, "pool": []},
        lambda s: {**s, "seed": "1"},
        lambda s: {**s, "shards": "f00"},
        lambda s: {key: value for key, value in s.items() if key != "seed"},
        lambda s: {**s, "by_lane": [10**9], "drawn": 10**9},
    ],
)
def test_what_is_no_state_is_refused(folder, state, change):
    error = refused_state(make(folder), change(state))
    assert "state" in str(error)


@pytest.mark.parametrize("call", [lambda d: d.reset(epoch=-1), lambda d: d.trace(-1), lambda d: d.trace(0, lane=3)])
def test_a_place_that_is_not_there_is_refused(folder, call):
    with pytest.raises(bw.SpecError):
        call(make(folder))
