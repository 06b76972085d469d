"""The mixed shard pool as its users see it: every position once, the same stream however it is taken, exact resumes."""

from __future__ import annotations

import copy
import gc
import gzip
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from itertools import chain, pairwise

import numpy as np
import pytest

import batchwright as bw
from batchwright.pool.shards import ShardSet
from harness import no_thread_left, wait_for
from refusals import refused

SIZES = {"selfplay": [40, 25, 60, 3, 33, 50], "human": [30, 41, 20]}
TOTAL = sum(map(sum, SIZES.values()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two directories of shards in which every position has its own id."""
    root, number = tmp_path_factory.mktemp("shards"), 0
    for name, sizes in SIZES.items():
        (root / name).mkdir()
        for shard, rows in enumerate(sizes):
            ids = np.arange(number, number + rows)
            np.savez(
                root / name / f"shard_{shard:04d}.npz",
                id=ids,
                board=np.stack([ids % 7, ids % 11, ids % 13, ids % 17], 1).astype(np.uint8).reshape(rows, 2, 2),
                value=(ids / 10).astype(np.float32),
                which=np.zeros(rows, np.int64),
            )
            number += rows
    return root


@pytest.fixture
def make(folder):
    def make(pool_size=120, refill_threshold=80, **settings):
        directories = [str(folder / name) for name in SIZES]
        settings = {"random_seed": 5} | settings
        return bw.StreamingMixedShardDataset(directories, ["all", "all"], pool_size, refill_threshold, **settings)

    return make


def ids(batches):
    return [int(number) for batch in batches for number in np.atleast_1d(batch["id"])]


def ids_of(shard):
    """The ids of a shard's positions, in order."""
    rows = [*SIZES["selfplay"], *SIZES["human"]]
    place = shard.number + (len(SIZES["selfplay"]) if shard.directory else 0)
    return range(sum(rows[:place]), sum(rows[: place + 1]))


def marked(columns, which):
    """An augmentation that says which entry it made."""
    return {**columns, "which": which.astype(np.int64)}


marked.factor = 3


# The stream


def test_every_position_comes_once_in_an_epoch(make):
    assert sorted(ids(make())) == list(range(TOTAL))


@pytest.mark.parametrize("batch_size", [1, 7, 32, 120])
def test_batches_of_any_size_are_the_positions_one_by_one(make, batch_size):
    assert ids(make().batches(batch_size)) == ids(make())


def test_a_batch_has_every_column_of_its_rows(make):
    for batch in make().batches(50):
        numbers = batch["id"]
        assert batch["board"].dtype == np.uint8
        assert batch["board"].shape == (len(numbers), 2, 2)
        assert (batch["board"].reshape(-1, 4) == np.stack([numbers % m for m in (7, 11, 13, 17)], 1)).all()
        assert (batch["value"] == (numbers / 10).astype(np.float32)).all()


def test_a_position_is_a_dict_of_its_columns(make):
    position = next(iter(make()))
    assert set(position) == {"id", "board", "value", "which"}
    assert position["board"].shape == (2, 2)
    assert position["value"] == np.float32(position["id"] / 10)


def test_a_dataset_with_a_batch_size_yields_batches(make):
    dataset = make(batch_size=64)
    assert ids(dataset) == ids(make())
    assert len(dataset) == len(list(make(batch_size=64))) == -(-TOTAL // 64)


def test_batches_that_are_held_do_not_change(make):
    held = list(make().batches(8))
    assert ids(held) == ids(make())


def test_the_stream_is_pinned(make):
    # States of running jobs are numbers of draws in this stream: if it changes, they mean other positions.
    assert ids(make())[:12] == [217, 19, 229, 226, 13, 2, 26, 21, 11, 216, 27, 213]


def test_epochs_have_orders_of_their_own_and_follow_each_other(make):
    dataset = make()
    first, second = ids(dataset), ids(dataset)
    assert dataset.epoch == 2
    assert first != second
    assert sorted(first) == sorted(second)
    dataset.reset(epoch=1)
    assert ids(dataset) == second
    dataset.reset()
    assert ids(dataset) == first


def test_other_seeds_give_other_orders(make):
    assert ids(make(random_seed=6)) != ids(make(random_seed=5))


def test_a_seed_that_was_not_given_is_drawn_logged_and_kept(make, caplog):
    with caplog.at_level(logging.INFO, "batchwright"):
        dataset = make(random_seed=None)
    assert str(dataset.random_seed) in caplog.text
    assert make(random_seed=None).random_seed != dataset.random_seed
    again = make(random_seed=None)
    again.load_state_dict(dataset.state_dict())
    assert ids(again) == ids(dataset)


def test_shards_come_from_directories_in_proportion_and_in_order(make):
    shards = make().shards
    assert [shard.directory for shard in shards] == [0, 1, 0, 0, 1, 0, 0, 1, 0]
    for directory in (0, 1):
        numbers = [shard.number for shard in shards if shard.directory == directory]
        assert numbers == sorted(numbers)
    assert list(make().directory_weights.values()) == [6 / 9, 3 / 9]


def test_examples_are_counted_before_augmentation(make):
    dataset = make(max_examples_unaugmented=100, augmentation=marked)
    assert len(dataset) == 300
    taken = ids(dataset)
    assert len(taken) == 300
    assert len(set(taken)) == 100


def test_columns_are_the_ones_asked_for(make):
    dataset = make(columns=["value", "id"])
    assert list(dataset.schema) == ["id", "value"]
    assert set(next(dataset.batches(4))) == {"id", "value"}


def test_a_second_pass_ends_the_first(make):
    dataset = make()
    first = iter(dataset)
    next(first)
    next(iter(dataset))
    with refused(bw.PlanError, remedy="dataset"):
        next(first)


def test_a_pass_that_was_broken_off_goes_on(make):
    dataset, taken = make(), []
    for position in dataset:
        taken += ids([position])
        if len(taken) == 17:
            break
    assert taken + ids(dataset) == ids(make())


# Augmentation and transform


def test_each_position_gives_its_entries_apart(make):
    taken = [(int(p["id"]), int(p["which"])) for p in make(augmentation=marked)]
    assert sorted(taken) == [(number, which) for number in range(TOTAL) for which in range(3)]
    assert sum(first[0] == second[0] for first, second in pairwise(taken)) < len(taken) / 20
    assert len(make(augmentation=marked)) == make(augmentation=marked, rank=0, world_size=2).num_entries == 3 * TOTAL


def test_without_an_augmentation_one_line_says_so(make, caplog):
    with caplog.at_level(logging.INFO, "batchwright"):
        assert make().factor == 1
    assert [r.getMessage() for r in caplog.records if "augmentation" in r.getMessage()] == [
        "no augmentation is given: each position is one entry"
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, "batchwright"):
        assert make(enable_augmentation=False, augmentation=marked).factor == 1
    assert not caplog.records


def test_a_transform_sees_batches_after_augmentation(make):
    def doubled(columns):
        return {"id": columns["id"], "double": columns["which"] * 2}

    batch = next(make(augmentation=marked, transform=doubled).batches(32))
    assert set(batch) == {"id", "double"}
    assert set(batch["double"].tolist()) == {0, 2, 4}


# States


@pytest.mark.parametrize("augmentation", [None, marked])
@pytest.mark.parametrize("taken", [0, 1, 39, 40, 41, 150, 301, 302])
def test_a_resume_gives_what_would_have_come(make, taken, augmentation):
    dataset = make(augmentation=augmentation)
    stream = iter(dataset)
    for _ in range(taken):
        next(stream)
    state = json.loads(json.dumps(dataset.state_dict()))
    again = make(augmentation=augmentation)
    again.load_state_dict(state)
    rest = ids(stream)
    assert ids(again) == (rest or ids(dataset))  # after its last position, the next epoch


def test_a_state_says_epoch_drawn_lanes_seed_and_shards(make):
    dataset = make()
    batches = dataset.batches(10)
    next(batches), next(batches)
    state = dataset.state_dict()
    assert (state["epoch"], state["drawn"], state["lanes"], state["seed"]) == (0, 20, 1, 5)
    assert state["shards"]["ranges"] == ["0-5", "0-2"]
    assert len(json.dumps(state)) < 1000


def test_an_epoch_that_is_over_resumes_in_the_next(make):
    dataset = make()
    ids(dataset)
    state = dataset.state_dict()
    assert (state["epoch"], state["drawn"]) == (1, 0)
    again = make()
    again.load_state_dict(state)
    assert ids(again) == ids(dataset)


def test_a_resume_may_change_the_pool_from_there_on(make):
    dataset = make()
    batches = dataset.batches(30)
    before = ids([next(batches) for _ in range(4)])
    other = make(pool_size=60, refill_threshold=20)
    other.load_state_dict(dataset.state_dict())
    more = other.batches(30)
    middle = ids([next(more) for _ in range(3)])
    third = make(pool_size=200, refill_threshold=100)
    third.load_state_dict(other.state_dict())
    assert sorted(before + middle + ids(third)) == list(range(TOTAL))
    assert [size["entries"] for size in other.state_dict()["pool"]] == [120, 60]


def test_a_resume_opens_only_shards_of_which_a_row_is_left(make, monkeypatch):
    dataset = make(pool_size=60, refill_threshold=20)
    batches = dataset.batches(20)
    for _ in range(13):
        next(batches)
    left = {int(number) for number in ids(batches)}
    dataset.reset()
    batches = dataset.batches(20)
    for _ in range(13):
        next(batches)
    opened = []
    whole = ShardSet.open
    monkeypatch.setattr(ShardSet, "open", lambda self, shard, *a: (opened.append(shard), whole(self, shard, *a))[1])
    again = make(pool_size=60, refill_threshold=20)
    again.load_state_dict(dataset.state_dict())
    ids(again)
    assert set(opened) == {place for place, shard in enumerate(again.shards) if left & set(ids_of(shard))}


def test_the_log_says_how_long_a_resume_took(make, caplog):
    dataset = make()
    next(dataset.batches(50))
    again = make()
    again.load_state_dict(dataset.state_dict())
    with caplog.at_level(logging.INFO, "batchwright"):
        next(again.batches(10))
    assert "50 draws" in caplog.text


def test_a_state_that_is_refused_changes_nothing(make):
    dataset = make()
    batches = dataset.batches(10)
    next(batches)
    before = dataset.state_dict()
    with pytest.raises(bw.PlanError):
        dataset.load_state_dict({**before, "seed": 99})
    assert dataset.state_dict() == before
    next(batches)  # the pass goes on, too


# Lanes


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_have_every_position_once_together(make, world_size):
    taken = [ids(make(rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert sorted(chain(*taken)) == list(range(TOTAL))
    assert [len(some) for some in taken] == [len(make(rank=r, world_size=world_size)) for r in range(world_size)]


def test_fewer_ranks_take_the_turns_that_would_have_come(make):
    def batches_of(rank, world_size, state=None):
        dataset = make(rank=rank, world_size=world_size)
        if state is not None:
            dataset.load_state_dict(state)
        return dataset, dataset.batches(12)

    ranks = [batches_of(rank, 4) for rank in range(4)]
    whole = []
    for step in range(20):
        whole += [ids([batch]) for batch in (next(batches, None) for _, batches in ranks) if batch is not None]
        if step == 2:
            states = [dataset.state_dict() for dataset, _ in ranks]
    assert all(state == states[0] for state in states)
    two = [batches_of(rank, 2, states[0]) for rank in range(2)]
    again = []
    for _ in range(40):
        again += [ids([batch]) for batch in (next(batches, None) for _, batches in two) if batch is not None]
    assert again == whole[12:]
    _, one = batches_of(0, 1, states[0])
    assert [ids([batch]) for batch in one] == whole[12:]


@pytest.mark.parametrize("world_size", [3, 8])
def test_ranks_that_do_not_divide_the_lanes_are_refused(make, world_size):
    dataset = make(rank=0, world_size=4)
    next(dataset.batches(10))
    other = make(rank=0, world_size=world_size)
    other.load_state_dict(dataset.state_dict())
    with refused(bw.PlanError, lanes=4, parameter="world_size", remedy="1, 2, 4"):
        next(iter(other))


@pytest.mark.parametrize("batch_size", [7, 10, 16])
def test_drop_last_gives_every_rank_as_many_whole_batches(make, batch_size):
    taken = [list(make(rank=r, world_size=3, drop_last=True).batches(batch_size)) for r in range(3)]
    assert {len(batches) for batches in taken} == {make(rank=0, world_size=3).num_batches(batch_size, drop_last=True)}
    assert all(len(batch["id"]) == batch_size for batches in taken for batch in batches)
    numbers = ids(chain(*taken))
    assert len(set(numbers)) == len(numbers)


def test_ranks_need_a_seed_that_they_share(make):
    with refused(bw.SpecError, parameter="random_seed"):
        next(iter(make(random_seed=None, rank=0, world_size=2)))


# Validation


def test_validation_reads_shards_in_order_and_does_not_augment(make):
    dataset = make(is_validation=True, augmentation=marked)
    expected = [number for shard in dataset.shards for number in ids_of(shard)]
    assert ids(dataset) == expected
    assert ids(dataset.batches(16)) == expected  # every epoch is the same


def test_training_and_validation_share_no_shard(folder):
    directories = [str(folder / name) for name in SIZES]
    train, validation = bw.create_datasets(
        directories, ["all", "all"], 0.3, pool_size=120, refill_threshold=80, random_seed=1
    )
    kept = ids(validation)
    assert sorted(ids(train) + kept) == list(range(TOTAL))
    assert len(validation.shards) == 3
    assert validation.is_validation
    assert bw.create_datasets(directories, ["all", "all"], 0.0, pool_size=120, refill_threshold=80)[1] is None


# Memory


def test_a_limit_that_binds_makes_refills_smaller_and_loses_nothing(folder, make):
    needs = make()._plan.needs
    limit = needs.bytes_of(rows=100, pool_entries=120) / 10**9
    limited = ids(make(refill_threshold=40, max_memory_gb=limit))
    assert sorted(limited) == list(range(TOTAL))
    assert limited != ids(make(refill_threshold=40))  # refills were smaller
    assert limited == ids(make(refill_threshold=40, max_memory_gb=limit))


@pytest.mark.parametrize("on_memory_limit", ["raise", "stop"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("augmentation", [None, marked])
@pytest.mark.parametrize("rows", [60, 70, 85, 100])
def test_under_a_limit_below_the_threshold_every_position_comes_once(
    make, caplog, rows, augmentation, world_size, on_memory_limit
):
    limit = make(augmentation=augmentation)._plan.needs.bytes_of(
        rows=-(-rows // world_size), pool_entries=120 // world_size
    )
    settings = {"max_memory_gb": limit / 10**9, "augmentation": augmentation, "on_memory_limit": on_memory_limit}
    factor = 1 if augmentation is None else 3
    every, limits = [], []
    for rank in range(world_size):
        dataset = make(refill_threshold=100, rank=rank, world_size=world_size, **settings)
        with caplog.at_level(logging.WARNING, "batchwright"):
            every += [*ids(dataset.batches(7)), *ids(dataset)]  # two epochs
        assert not dataset.stopped_early
        limits += [record.message for record in caplog.records if "pool_size=" in record.message]
        caplog.clear()
    assert sorted(every) == sorted(list(range(TOTAL)) * 2 * factor)
    assert len(limits) == world_size  # once


def test_the_warning_of_a_smaller_pool_says_what_fits(make, caplog):
    limit = make()._plan.needs.bytes_of(rows=85, pool_entries=120) / 10**9
    with caplog.at_level(logging.WARNING, "batchwright"):
        next(make(refill_threshold=40, max_memory_gb=limit).batches(5))
    (record,) = caplog.records
    assert all(name in record.message for name in ("max_memory_gb=0.0", "refill_threshold=40", "85 rows"))
    pool, threshold, enough = (
        float(record.message.rpartition(f"{name}=")[2].split()[0].rstrip(",;"))
        for name in ("pool_size", "refill_threshold", "max_memory_gb")
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING, "batchwright"):
        fits = make(pool_size=int(pool), refill_threshold=int(threshold), max_memory_gb=limit)
        for dataset in (fits, make(refill_threshold=40, max_memory_gb=enough)):
            assert sorted(ids(dataset)) == list(range(TOTAL))
    assert not caplog.records
    resumed = make(refill_threshold=40, max_memory_gb=limit)
    resumed.load_state_dict(fits.state_dict())
    with caplog.at_level(logging.WARNING, "batchwright"):
        next(resumed.batches(5))
    assert "pool_size=" in caplog.text


def test_a_run_under_a_smaller_pool_goes_on_where_it_was(make):
    limit = make()._plan.needs.bytes_of(rows=70, pool_entries=120) / 10**9
    expected = ids(make(max_memory_gb=limit))
    for taken in (0, 30, 71, 200):
        dataset = make(max_memory_gb=limit)
        batches = dataset.batches(1)
        before = ids([next(batches) for _ in range(taken)])
        again = make(max_memory_gb=limit)
        again.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
        assert before + ids(again) == expected


def test_where_no_shard_fits_the_error_has_a_report_and_a_state(make):
    limit = make()._plan.needs.bytes_of(rows=55, pool_entries=120)
    dataset, taken = make(refill_threshold=40, max_memory_gb=limit / 10**9), []
    with refused(bw.MemoryLimitError, "max_memory_gb=") as caught:
        taken.extend(ids([position])[0] for position in dataset)
    error = caught.value
    assert error.where["shard"].endswith(".npz")
    assert error.report.ours >= error.report.pool > 0
    assert error.report.limit == int(limit)
    assert error.report.needed > 0
    assert error.report.machine_free > 0
    assert "load_state_dict(error.state)" in error.remedy
    assert isinstance(error, MemoryError)
    again = make()
    again.load_state_dict(json.loads(json.dumps(error.state)))
    assert sorted(taken + ids(again)) == list(range(TOTAL))


def test_batches_before_the_limit_are_whole_and_the_rest_comes_after(make):
    limit = make()._plan.needs.bytes_of(rows=55, pool_entries=120)
    dataset, taken = make(refill_threshold=40, max_memory_gb=limit / 10**9), []
    with pytest.raises(bw.MemoryLimitError) as caught:
        taken.extend(ids([batch]) for batch in dataset.batches(17))
    assert {len(batch) for batch in taken} == {17}
    again = make()
    again.load_state_dict(caught.value.state)
    assert sorted([*chain(*taken), *ids(again)]) == list(range(TOTAL))


def test_a_stream_may_stop_there_instead_and_says_so(make, caplog):
    limit = make()._plan.needs.bytes_of(rows=55, pool_entries=120)
    dataset = make(refill_threshold=40, max_memory_gb=limit / 10**9, on_memory_limit="stop")
    with caplog.at_level(logging.WARNING, "batchwright"):
        taken = ids(dataset)
    assert dataset.stopped_early
    assert dataset.epoch == 0
    assert 0 < len(taken) < TOTAL
    assert "max_memory_gb" in caplog.text
    again = make()
    again.load_state_dict(dataset.state_dict())
    assert sorted(taken + ids(again)) == list(range(TOTAL))
    assert not again.stopped_early


def test_a_machine_without_memory_is_asked_before_it_is_used(make, monkeypatch):
    monkeypatch.setattr("batchwright.pool.memory.available_bytes", lambda: 1 << 20)
    with refused(bw.MemoryLimitError, "machine", remedy="pool_size"):
        next(iter(make()))


def test_the_report_says_what_is_held(make):
    dataset = make()
    assert dataset.memory_report().pool == 0
    batches = dataset.batches(10)
    next(batches)
    report = dataset.memory_report()
    assert report.pool >= 100 * dataset._plan.needs.row_bytes
    assert report.limit == 5 * 10**9
    batches.close()
    assert dataset.memory_report().pool == 0


# Reports


def test_the_stream_is_mixed_more_than_sequential_reading_and_less_than_a_perfect_shuffle(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for shard in range(10):
            np.savez(tmp_path / name / f"{shard}.npz", x=np.zeros(1000, np.uint8))
    directories = [str(tmp_path / name) for name in ("a", "b")]
    report = bw.StreamingMixedShardDataset(directories, ["all"] * 2, 10_000, 7_500, random_seed=0).mixing_report(256)
    assert report.shares == {0: 0.5, 1: 0.5}
    assert report.sequential.correlation > 0.99
    assert abs(report.shuffle.correlation) < 0.05
    assert report.stream.correlation < 0.9
    assert report.stream.spread > 20 * report.sequential.spread
    assert report.stream.share_deviation < 0.2 < report.sequential.share_deviation
    assert report.shuffle.share_deviation < 0.2
    whole = bw.StreamingMixedShardDataset(directories, ["all"] * 2, 30_000, 20_000, random_seed=0).mixing_report(256)
    assert abs(whole.stream.correlation) < 0.05  # a pool that holds everything is a perfect shuffle


@pytest.mark.parametrize("world_size", [1, 2])
def test_trace_names_the_row_of_every_draw(make, folder, world_size):
    for rank in range(world_size):
        dataset = make(rank=rank, world_size=world_size, augmentation=marked)
        taken = [(int(p["id"]), int(p["which"])) for p in dataset]
        dataset.reset()
        for first in (0, 100, 300):
            for record, (number, which) in zip(
                dataset.trace(first, 5, lane=rank), taken[first : first + 5], strict=True
            ):
                with np.load(record.file) as shard:
                    assert shard["id"][record.row] == number
                assert record.which == which


def test_verbose_logs_shards_shares_and_times(make, caplog):
    with caplog.at_level(logging.INFO, "batchwright"):
        ids(make(verbose=True))
    assert "66.7 % of the shards" in caplog.text
    assert caplog.text.count("s of reading") == 9
    assert "refill 0 after 0 draws: 95 rows of 3 shards, 95 entries" in caplog.text
    assert "by directory 0: 68.4 %, 1: 31.6 %" in caplog.text


def test_nothing_is_left_behind(make):
    with no_thread_left():
        for _ in range(5):
            next(iter(make()))
            next(make().batches(10))


def test_a_rank_that_broke_a_pass_off_knows_how_far_the_others_are(make):
    states = []
    for rank in range(2):
        dataset = make(rank=rank, world_size=2)
        for batches in (dataset.batches(10), dataset.batches(10)):  # the second goes on where the first was broken off
            next(batches), next(batches)
        states.append(dataset.state_dict())
    assert states[0] == states[1]
    assert states[0]["by_lane"] == [40, 40]


# What is said before it happens


def test_ranks_of_unequal_length_are_warned_of(make, caplog):
    with caplog.at_level(logging.WARNING, "batchwright"):
        next(make(rank=0, world_size=2).batches(50))  # 151 positions each: 4 batches on both
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "batchwright"):
        next(make(rank=0, world_size=2, max_examples_unaugmented=101).batches(50))  # 51 and 50
    assert "from 1 to 2 batches" in caplog.text
    assert "drop_last=True" in caplog.text


def test_an_epoch_that_memory_will_end_is_warned_of_with_what_would_do(make, caplog):
    limit = make()._plan.needs.bytes_of(rows=55, pool_entries=120) / 10**9
    dataset = make(refill_threshold=40, max_memory_gb=limit)
    with caplog.at_level(logging.WARNING, "batchwright"):
        batches = dataset.batches(5)
        next(batches)
    assert "max_memory_gb=" in caplog.text
    with pytest.raises(bw.MemoryLimitError) as caught:
        list(batches)
    remedy = caught.value.remedy
    enough = float(remedy.split("max_memory_gb=")[1].split()[0])
    assert len(list(make(refill_threshold=40, max_memory_gb=enough))) == TOTAL


def test_an_epoch_that_begins_may_have_other_lanes(make):
    dataset = make()
    ids(dataset)
    state = dataset.state_dict()
    assert (state["epoch"], state["lanes"]) == (1, 1)
    taken = []
    for rank in range(3):
        again = make(rank=rank, world_size=3)
        again.load_state_dict(state)
        taken += ids(again)
    assert sorted(taken) == list(range(TOTAL))


def test_an_epoch_that_begins_keeps_lanes_that_processes_divide(make):
    wide = make(rank=0, world_size=4)
    ids(wide)
    state = {**wide.state_dict(), "epoch": 1, "drawn": 0, "by_lane": [0] * 4}
    one = make()
    one.load_state_dict(state)
    next(one.batches(10))
    assert one.state_dict()["lanes"] == 4


def test_a_threshold_of_none_is_three_quarters_of_the_pool(make):
    assert ids(make(refill_threshold=None)) == ids(make(refill_threshold=90))


def test_the_split_does_not_depend_on_the_seed_of_the_order(folder):
    directories = [str(folder / name) for name in SIZES]
    splits = [
        bw.create_datasets(directories, ["all", "all"], 0.3, pool_size=120, refill_threshold=80, random_seed=seed)[1]
        for seed in (1, 2)
    ]
    assert splits[0].shards == splits[1].shards
    other = bw.create_datasets(
        directories,
        ["all", "all"],
        0.3,
        pool_size=120,
        refill_threshold=80,
        split_seed=1,
        random_seed=1,
        drop_last=True,
    )[1]
    assert other.shards != splits[0].shards
    assert not other.drop_last


def test_a_program_that_ends_in_mid_pass_ends_quietly(folder):
    code = f"""
import batchwright as bw
ds = bw.StreamingMixedShardDataset([{str(folder / "selfplay")!r}], ["all"], 120, 80, random_seed=1)
batches = ds.batches(5)
next(batches)
print("ends")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ends\n", "")


# What a hostile reader tried


def test_a_resume_with_a_smaller_pool_reads_what_was_in_the_larger_one(make):
    dataset = make(pool_size=200, refill_threshold=180)
    batches = dataset.batches(20)
    before = ids([next(batches) for _ in range(3)])
    smaller = make(pool_size=30, refill_threshold=10)
    smaller.load_state_dict(dataset.state_dict())
    assert sorted(before + ids(smaller)) == list(range(TOTAL))


def test_a_resume_under_a_limit_that_the_pool_exceeds_is_refused_with_what_it_needs(make):
    dataset = make(pool_size=200, refill_threshold=180)
    next(dataset.batches(20))
    limit = make()._plan.needs.bytes_of(rows=100, pool_entries=200) / 10**9
    limited = make(pool_size=200, refill_threshold=180, max_memory_gb=limit)
    limited.load_state_dict(dataset.state_dict())
    with refused(bw.MemoryLimitError, "max_memory_gb=", remedy="max_memory_gb=") as caught:
        next(limited.batches(20))
    enough = float(caught.value.remedy.split("max_memory_gb=")[1].split()[0])
    again = make(pool_size=200, refill_threshold=180, max_memory_gb=enough)
    again.load_state_dict(dataset.state_dict())
    assert len(ids(again)) == TOTAL - 20


def test_a_new_pass_lets_go_of_the_pool_of_the_one_before(make):
    dataset, threads = make(), set(threading.enumerate())
    held = []
    for _ in range(3):
        held.append(dataset.batches(10))
        next(held[-1])
        dataset.reset()
    wait_for("end of threads", lambda: len(set(threading.enumerate()) - threads) <= 2)
    held.append(dataset.batches(10))
    next(held[-1])
    assert dataset.memory_report().pool > 0
    with refused(bw.PlanError, remedy="dataset"):
        next(held[0])


def test_a_pass_goes_on_only_in_its_own_process(make):
    batches = make().batches(10)
    next(batches)
    child = os.fork()
    if not child:
        try:
            next(batches)
        except bw.PlanError as error:
            os._exit(7 if "begun by the parent" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(ids(batches)) == TOTAL - 10


def test_a_pass_that_is_garbage_in_a_cycle_leaves_no_thread(make):
    class Trainer:
        def __init__(self):
            self.me, self.batches = self, make().batches(10)

    with no_thread_left():
        for _ in range(5):
            next(Trainer().batches)
        gc.collect()


def test_an_interrupt_that_leaves_the_lock_taken_does_not_hang(make):
    with no_thread_left():
        dataset = make()
        batches = dataset.batches(10)
        next(batches)
        pool = dataset.passes._pools[0]
        pool._lock.acquire()  # what a KeyboardInterrupt right after the lock was taken leaves
        batches.close()


def test_traces_under_another_pool_are_what_will_be_drawn(make):
    dataset = make()
    next(dataset.batches(20))
    other = make(pool_size=60, refill_threshold=20)
    other.load_state_dict(dataset.state_dict())
    traced = [int(np.load(record.file)["id"][record.row]) for record in other.trace(20, 100)]
    assert traced == ids(other)[:100]


def test_a_trace_ends_where_memory_ends_the_epoch(make):
    limit = make()._plan.needs.bytes_of(rows=55, pool_entries=120) / 10**9
    dataset = make(refill_threshold=40, max_memory_gb=limit)
    assert 0 < len(dataset.trace(0, TOTAL)) < TOTAL
    assert dataset.mixing_report(16).draws == len(dataset.trace(0, TOTAL))


def test_a_copy_has_a_cursor_of_its_own(make):
    dataset = make()
    other = copy.copy(dataset)
    next(dataset.batches(20))
    assert ids(other) == ids(make())


def test_lanes_of_a_pool_with_a_high_threshold_are_refilled_and_not_for_ever(make):
    taken = [ids(make(pool_size=10, refill_threshold=9, rank=rank, world_size=4)) for rank in range(4)]
    assert sorted(chain(*taken)) == list(range(TOTAL))


def test_shards_without_rows_need_no_schema(tmp_path):
    for number, rows in enumerate([0, 3, 0, 2]):
        (tmp_path / f"{number}.jsonl").write_text(
            "".join(f'{{"id": {number * 10 + n}}}\n' for n in range(rows)) or "\n"
        )
    dataset = bw.StreamingMixedShardDataset([str(tmp_path)], ["all"], 4, 2, random_seed=0)
    assert sorted(ids(dataset)) == [10, 11, 12, 30, 31]


def test_decoding_is_under_the_memory_limit_from_the_first_look_on(tmp_path):
    with gzip.open(tmp_path / "0.pkl.gz", "wb", compresslevel=1) as file:
        pickle.dump({"examples": [{"id": 0, "blob": np.zeros(300_000_000, np.uint8)}]}, file, protocol=4)
    dataset = bw.StreamingMixedShardDataset([str(tmp_path)], ["all"], 4, 2, max_memory_gb=0.2, allow_pickle=True)
    with refused(bw.SourceError, "memory", "0.pkl.gz"):
        dataset.schema  # noqa: B018
