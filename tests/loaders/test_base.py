"""One cursor over a stream of rows: when it moves, what a state holds, where epochs end, who gets which rows."""

from __future__ import annotations

import gc
import json
import threading
import tracemalloc
import weakref

import numpy as np
import pytest

import batchwright as bw
from batchwright.base.errors import EndOfRun, PlanError, SpecError
from harness import no_thread_left
from refusals import refused


def row_numbers(batch):
    """Which rows a batch holds: row i begins with the token 10 i."""
    return (batch.input_ids[:, 0] // 10).tolist()


def take(loader, count):
    iterator = loader.get_iterator()
    return [row_numbers(next(iterator)) for _ in range(count)]


# Epochs and their ends


def test_an_iterator_runs_to_the_end_of_the_epoch_and_the_next_one_starts_the_next(open_numbers):
    loader = open_numbers(8, epochs=2)
    assert [row_numbers(batch) for batch in loader.get_iterator()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (loader.epoch, loader.step, loader.position) == (1, 2, 8)
    assert [row_numbers(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (loader.epoch, loader.step, loader.position) == (2, 4, 16)


def test_drop_leaves_out_the_last_partial_batch(open_numbers):
    loader = open_numbers(10, epochs=2)
    assert [row_numbers(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loader.position == 10  # the next multiple of an epoch
    assert [row_numbers(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_pad_fills_the_last_batch_with_rows_of_weight_0(open_numbers):
    loader = open_numbers(10, epochs=2, epoch_end="pad")
    for _ in range(2):
        first, second, last = loader.get_iterator()
        assert [row_numbers(first), row_numbers(second), row_numbers(last)[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert last.metadata["weight"].tolist() == [1, 1, 0, 0]
        assert last.loss_mask.tolist() == [[1, 1, 1]] * 2 + [[0, 0, 0]] * 2
        assert last.targets[2:].tolist() == [[-100] * 3] * 2
        assert first.metadata["weight"].tolist() == [1, 1, 1, 1]
    assert loader.position == 20


def test_wrap_lets_a_batch_cross_into_the_next_epoch(open_numbers):
    loader = open_numbers(10, epochs=2, epoch_end="wrap")
    assert [row_numbers(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert [row_numbers(batch) for batch in loader] == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert loader.position == 20


def test_get_batch_goes_on_into_the_next_epoch(open_numbers):
    loader = open_numbers(8, epochs=2)
    assert [row_numbers(loader.get_batch())[0] for _ in range(4)] == [0, 4, 0, 4]


@pytest.mark.parametrize("epoch_end", ["drop", "short", "pad", "wrap"])
def test_after_the_last_epoch_there_are_no_more_batches(open_numbers, epoch_end):
    loader = open_numbers(10, epochs=1, epoch_end=epoch_end)
    list(loader)
    for ask in (loader.get_batch, loader.get_iterator):
        with refused(EndOfRun, "1 epoch", remedy="epochs=2"):
            ask()
    assert loader.state_dict()["position"] in (8, 10)


def test_a_finished_run_that_is_restored_has_nothing_left_and_that_is_no_fault(open_numbers):
    finished = open_numbers(8)
    list(finished)
    again = open_numbers(8)
    again.load_state_dict(finished.state_dict())
    assert list(again.get_iterator()) == []


def test_epochs_none_has_no_end(open_numbers):
    loader = open_numbers(8, epochs=None)
    assert [len(list(loader)) for _ in range(5)] == [2] * 5
    assert loader.epoch == 5


@pytest.mark.parametrize("epoch_end", ["drop", "short", "pad"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_number_of_batches_is_what_an_epoch_gives_on_every_rank(open_numbers, epoch_end, world_size):
    for rank in range(world_size):
        loader = open_numbers(10, epochs=2, epoch_end=epoch_end, rank=rank, world_size=world_size)
        assert loader.get_num_batches() == len(loader) == (2 if epoch_end == "drop" else 3)
        assert [len(list(loader)), len(list(loader))] == [len(loader)] * 2


def test_an_endless_mixture_has_no_number_of_batches_and_says_what_gives_it_one(open_numbers):
    loader = open_numbers({"a": 5, "b": 5}, weights={"a": 0.5, "b": 0.5})
    with refused(SpecError, parameter="num_rows") as caught:
        loader.get_num_batches()
    for name in ("num_rows", "num_tokens", "stop", "first_exhausted", "all_exhausted"):
        assert name in caught.value.remedy


def test_a_run_shorter_than_one_batch_is_refused_with_what_to_write(open_numbers):
    with refused(SpecError, "batch_size=11", "10 rows", parameter="batch_size", remedy="epoch_end="):
        open_numbers(10, batch_size=11)
    with refused(SpecError, "batch_size=11", "10 rows", parameter="batch_size", remedy="batch_size=10"):
        open_numbers(10, batch_size=11, epoch_end="wrap")
    assert len(list(open_numbers(10, batch_size=11, epoch_end="wrap", epochs=2))) == 1


# The cursor


@pytest.mark.parametrize("ahead", [{}, {"prefetch": 2}, {"workers": 2}])
def test_the_cursor_moves_when_a_batch_is_handed_over_not_when_it_is_made(open_numbers, ahead):
    loader = open_numbers(40, **ahead)
    iterator = loader.get_iterator()
    assert loader.position == 0
    for count in range(1, 11):
        next(iterator)
        assert (loader.position, loader.step) == (4 * count, count)
        assert loader.state_dict()["position"] == 4 * count


def test_a_second_iterator_ends_the_first_with_an_error(open_numbers):
    loader = open_numbers(40)
    first = loader.get_iterator()
    next(first)
    second = loader.get_iterator()
    assert row_numbers(next(second)) == [4, 5, 6, 7]  # one cursor: it goes on from there
    with refused(PlanError, "get_batch", remedy="second loader"):
        next(first)
    assert row_numbers(next(second)) == [8, 9, 10, 11]


def test_a_second_iterator_that_finished_the_epoch_still_ends_the_first_with_an_error(open_numbers):
    loader = open_numbers(8, epochs=2)
    first = loader.get_iterator()
    next(first)
    assert len(list(loader.get_iterator())) == 1
    with refused(PlanError, "get_batch"):
        next(first)  # not a quiet end, after which the caller would think that it has seen the epoch


def test_get_batch_ends_an_iterator_with_an_error(open_numbers):
    loader = open_numbers(40)
    iterator = loader.get_iterator()
    next(iterator)
    assert row_numbers(loader.get_batch()) == [4, 5, 6, 7]
    with refused(PlanError, "get_batch"):
        next(iterator)


@pytest.mark.parametrize("move", ["reset", "seek", "load_state_dict"])
def test_moving_the_cursor_ends_an_iterator_with_an_error(open_numbers, move):
    loader = open_numbers(40)
    iterator = loader.get_iterator()
    next(iterator)
    {
        "reset": loader.reset,
        "seek": lambda: loader.seek(step=3),
        "load_state_dict": lambda: loader.load_state_dict(loader.state_dict()),
    }[move]()
    with refused(PlanError, "get_batch"):
        next(iterator)


def test_reset_goes_back_to_the_first_row(open_numbers):
    loader = open_numbers(8)
    list(loader)
    loader.reset()
    assert (loader.position, loader.step, loader.epoch) == (0, 0, 0)
    assert row_numbers(loader.get_batch()) == [0, 1, 2, 3]


def test_seek_goes_to_any_step_at_once(open_numbers):
    loader = open_numbers(10, epochs=3)
    for step, first_row in ((5, 4), (0, 0), (3, 4), (4, 0)):
        loader.seek(step=step)
        assert loader.step == step
        assert row_numbers(loader.get_batch())[0] == first_row
        assert loader.step == step + 1


def test_seek_goes_to_any_position_at_once(open_numbers):
    loader = open_numbers(40)
    loader.seek(position=5)
    assert row_numbers(loader.get_batch()) == [5, 6, 7, 8]
    assert loader.state_dict()["steps"] == [[0, 0, 4], [2, 5, 4]]  # what was passed over of step 1 counts as a step
    loader.seek(position=0)
    assert loader.state_dict()["steps"] == [[0, 0, 4]]


@pytest.mark.parametrize("to", [{"position": -1}, {"position": 31}, {"step": -1}, {"step": 8}])
def test_seek_outside_the_run_is_refused_and_moves_nothing(open_numbers, to):
    loader = open_numbers(10, epochs=3)
    loader.get_batch()
    before = loader.state_dict()
    with refused(PlanError, **to):
        loader.seek(**to)
    assert loader.state_dict() == before


def test_seek_takes_a_step_or_a_position(open_numbers):
    for both_or_none in ({}, {"step": 1, "position": 4}):
        with refused(SpecError, "step=", "position=", parameter="step"):
            open_numbers().seek(**both_or_none)


def test_get_batch_of_another_size_moves_the_cursor_by_that_many_rows(open_numbers):
    loader = open_numbers(40)
    batches = [loader.get_batch(), loader.get_batch(batch_size=2), loader.get_batch(batch_size=2), loader.get_batch()]
    assert [row_numbers(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5], [6, 7], [8, 9, 10, 11]]
    assert loader.state_dict() == {
        "position": 12,
        "plan": loader.plan.fingerprint,
        "steps": [[0, 0, 4], [1, 4, 2], [3, 8, 4]],
    }
    assert loader.step == 4


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_read_that_failed_can_be_tried_again_and_loses_nothing(open_numbers, prefetch):
    loader = open_numbers(40, prefetch=prefetch)
    (source,) = loader.stream.flow.rows
    gather, failures = source.gather, [OSError("the disk is away"), OSError("still away")]

    def fail_first(index, epoch, out):
        if failures:
            raise failures.pop(0)
        gather(index, epoch, out)

    source.gather = fail_first
    with pytest.raises(OSError, match="the disk is away"):
        loader.get_batch()
    with pytest.raises(OSError, match="still away"):
        list(loader.get_iterator())
    assert loader.position == 0
    assert [row_numbers(batch)[0] for batch in loader] == list(range(0, 40, 4))


# State


def test_a_state_is_small_json_and_does_not_depend_on_ranks_or_workers(open_numbers):
    settings = [{}, {"rank": 1, "world_size": 4}, {"prefetch": 2}, {"workers": 1}, {"framework": "torch"}]
    states = []
    for given in settings:
        loader = open_numbers(10**6, shuffle="global", **given)
        for _ in range(5):
            loader.get_batch()
        states.append(json.dumps(loader.state_dict()))
    assert set(states) == {json.dumps({"position": 20, "plan": loader.plan.fingerprint, "steps": [[0, 0, 4]]})}
    assert len(states[0]) < 100


def test_the_state_in_a_batch_is_the_state_after_it(open_numbers):
    loader = open_numbers(10, epochs=2)
    kept = []
    for _ in range(2):
        for batch in loader:
            assert batch.metadata["state"] == loader.state_dict()
            kept.append((batch, loader.state_dict()))
    for batch, state in kept:  # and stays so, though the loader has gone on
        assert batch.metadata["state"] == state


@pytest.mark.parametrize("stopped_after", [0, 1, 2, 3, 5, 6])
@pytest.mark.parametrize("epoch_end", ["drop", "short", "pad", "wrap"])
def test_a_restored_loader_yields_what_the_lost_one_would_have(open_numbers, stopped_after, epoch_end):
    settings = {"epochs": 3, "epoch_end": epoch_end, "shuffle": "global"}
    lost = open_numbers(10, **settings)
    for _ in range(stopped_after):
        lost.get_batch()
    state = json.loads(json.dumps(lost.state_dict()))
    restored = open_numbers(10, **settings)
    restored.load_state_dict(state)
    assert restored.step == stopped_after
    while True:
        try:
            expected = row_numbers(lost.get_batch())
        except EndOfRun:
            break
        assert row_numbers(restored.get_batch()) == expected
    with pytest.raises(EndOfRun):
        restored.get_batch()


def test_another_batch_size_continues_at_the_same_row_and_appends_one_triple(open_numbers):
    lost = open_numbers(40)
    take(lost, 3)
    restored = open_numbers(40, batch_size=6)
    restored.load_state_dict(lost.state_dict())
    assert restored.state_dict()["steps"] == [[0, 0, 4], [3, 12, 6]]
    assert restored.step == 3
    assert take(restored, 2) == [list(range(12, 18)), list(range(18, 24))]
    assert restored.step == 5
    back = open_numbers(40)
    back.load_state_dict(restored.state_dict())
    assert back.state_dict()["steps"] == [[0, 0, 4], [3, 12, 6], [5, 24, 4]]
    assert take(back, 1) == [[24, 25, 26, 27]]


def test_another_batch_size_that_no_longer_fits_the_epoch_goes_on_in_the_next(open_numbers):
    lost = open_numbers(10, batch_size=2, epochs=2)
    take(lost, 4)
    restored = open_numbers(10, batch_size=4, epochs=2)
    restored.load_state_dict(lost.state_dict())
    assert take(restored, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert restored.step == 6


def test_steps_of_earlier_batch_sizes_can_be_sought(open_numbers):
    loader = open_numbers(40)
    take(loader, 3)
    loader.get_batch(batch_size=8)
    loader.seek(step=1)
    assert row_numbers(loader.get_batch()) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "state",
    [
        {},
        None,
        [],
        "3f2a91c04be7d155",
        {"position": 4, "plan": "x"},
        {"position": "four", "plan": "x", "steps": [[0, 0, 4]]},
        {"position": 3.7, "plan": "x", "steps": [[0, 0, 4]]},
        {"position": -4, "plan": "x", "steps": [[0, 0, 4]]},
        {"position": 4, "plan": "x", "steps": []},
        {"position": 4, "plan": "x", "steps": [[0, 0]]},
        {"position": 4, "plan": "x", "steps": [[0, 0, 0]]},
        {"position": 4, "plan": "x", "steps": [[1, 8, 4]]},
        {"position": 4, "plan": "x", "steps": [[0, 0, 4], [3, 12, 4], [1, 4, 4]]},
    ],
)
def test_what_is_not_a_state_is_refused_and_moves_nothing(open_numbers, state):
    loader = open_numbers(40)
    loader.get_batch()
    before = loader.state_dict()
    with refused(PlanError, remedy="state_dict()"):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


def test_a_state_of_another_plan_is_refused_and_moves_nothing(open_numbers):
    loader, other = open_numbers(40), open_numbers(41)
    loader.get_batch()
    before = loader.state_dict()
    with refused(PlanError, other.plan.fingerprint, remedy="plan="):
        loader.load_state_dict(other.state_dict())
    assert loader.state_dict() == before


# Ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_ranks_get_contiguous_shares_of_each_batch(open_numbers, world_size):
    whole = open_numbers(100, batch_size=12, shuffle="global")
    parts = [
        open_numbers(100, batch_size=12, shuffle="global", rank=r, world_size=world_size) for r in range(world_size)
    ]
    for _ in range(8):
        expected = row_numbers(whole.get_batch())
        shares = [row_numbers(part.get_batch()) for part in parts]
        assert [row for share in shares for row in share] == expected
        assert {len(share) for share in shares} == {12 // world_size}


def test_a_batch_that_does_not_divide_is_refused_with_what_to_write(open_numbers):
    with refused(SpecError, "batch_size=10", "world_size=4", parameter="batch_size", remedy="8 or 12") as caught:
        open_numbers(100, batch_size=10, rank=0, world_size=4)
    assert "batch_size=8 or 12" in caught.value.remedy
    loader = open_numbers(100, batch_size=12, rank=0, world_size=4)
    with refused(SpecError, "batch_size=5", parameter="batch_size"):
        loader.get_batch(batch_size=5)
    assert loader.position == 0


@pytest.mark.parametrize("world_size", [2, 3, 7, 12])
def test_uneven_ranks_partition_each_batch(open_numbers, world_size):
    settings = {"batch_size": 10, "uneven": True, "world_size": world_size}
    parts = [open_numbers(40, rank=rank, **settings) for rank in range(world_size)]
    for step in range(4):
        batches = [part.get_batch() for part in parts]
        counts = [10 * (r + 1) // world_size - 10 * r // world_size for r in range(world_size)]
        real = [row_numbers(batch)[:count] for batch, count in zip(batches, counts, strict=True)]
        assert [row for rows in real for row in rows] == list(range(10 * step, 10 * step + 10))
        assert [len(batch.input_ids) for batch in batches] == [max(count, 1) for count in counts]
        assert {batch.metadata["global_rows"] for batch in batches} == {10}
        assert sum(float(batch.metadata["weight"].sum()) for batch in batches) == 10
    assert {part.position for part in parts} == {40}


@pytest.mark.parametrize("ahead", [{}, {"prefetch": 2}, {"workers": 2}])
def test_a_rank_without_rows_still_counts_steps(open_numbers, ahead):
    loader = open_numbers(10, batch_size=2, uneven=True, rank=0, world_size=3, **ahead)
    batches = list(loader)
    assert [batch.input_ids.shape for batch in batches] == [(1, 3)] * 5
    for batch in batches:  # one row, from which nothing is learned
        assert batch.metadata["weight"].tolist() == [0]
        assert (batch.targets == -100).all()
        assert not batch.loss_mask.any()
        assert batch.metadata["global_rows"] == 2
    assert (loader.position, loader.step) == (10, 5)


def test_padding_lies_on_the_ranks_whose_rows_are_missing(open_numbers):
    weights = []
    for rank in range(4):
        loader = open_numbers(10, epoch_end="pad", rank=rank, world_size=4)
        *_, last = loader.get_iterator()
        weights += last.metadata["weight"].tolist()
        assert last.input_ids.shape == (1, 3)
    assert weights == [1, 1, 0, 0]


# What a batch and a loader say


def test_a_batch_says_where_its_rows_come_from(open_numbers):
    loader = open_numbers({"a": 6, "b": 2})
    batch = loader.get_batch(batch_size=8)
    assert batch.metadata["source"] == ["a", "a", "b", "a", "a", "a", "b", "a"]
    assert batch.metadata["position"].tolist() == list(range(8))
    assert batch.metadata["weight"].tolist() == [1.0] * 8
    assert batch.metadata["global_rows"] == 8


def test_stats_follow_from_the_position_alone(open_numbers):
    settings = {"weights": {"a": 0.75, "b": 0.25}, "epochs": 1}
    lost = open_numbers({"a": 100, "b": 100}, **settings)
    for _ in range(5):
        lost.get_batch()
    restored = open_numbers({"a": 100, "b": 100}, **settings)
    restored.load_state_dict(lost.state_dict())
    stats = restored.stats()
    assert stats["data_wait_percent"] == 0
    assert {name: stats[name] for name in ("step", "position", "epoch", "tokens")} == {
        "step": 5,
        "position": 20,
        "epoch": 0,
        "tokens": 60,
    }
    assert stats["tokens_per_source"] == lost.stats()["tokens_per_source"] == {"a": 45, "b": 15}
    assert 0 <= lost.stats()["data_wait_percent"] <= 100


def test_a_loader_prints_what_it_will_do(open_numbers):
    text = repr(open_numbers(1000, batch_size=12, rank=1, world_size=4, epochs=2))
    for part in ("batches of 12 x 3 (numpy)", "rank 1 of 4 gets 3", "2 epochs", "83 steps an epoch", "at step 0"):
        assert part in text
    assert "endless" in repr(open_numbers({"a": 5, "b": 5}, weights={"a": 1.0, "b": 1.0}))


def test_work_ahead_ends_with_its_iterator(open_numbers):
    before = set(threading.enumerate())
    with no_thread_left():
        loader = open_numbers(10**6, prefetch=2)
        loader.get_batch()
        assert set(threading.enumerate()) - before
        loader.reset()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batch_size": 0}, 0),
        ({"batch_size": 2.5}, 2.5),
        ({"epochs": 0}, 0),
        ({"prefetch": -1}, -1),
        ({"workers": -1}, -1),
        ({"framework": "numpi"}, "'numpi'"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(open_numbers, settings, named):
    with refused(SpecError, named, parameter=next(iter(settings))):
        open_numbers(**settings)


# Resume reads nothing else


@pytest.mark.parametrize("weights", [None, {"a": 0.7, "b": 0.3}])
def test_resume_reads_only_the_rows_of_the_next_block(open_numbers, weights):
    loader = open_numbers({"a": 10**12, "b": 10**12}, weights=weights, shuffle="global", batch_size=32, row_tokens=2048)
    at = 32 * (10**9 // 32)
    loader.load_state_dict({"position": at, "plan": loader.plan.fingerprint, "steps": [[0, 0, 32]]})
    batch = loader.get_batch()
    gathered = {number: source.gathered for number, source in enumerate(loader.stream.flow.rows)}
    count = sum(map(len, gathered.values()))
    assert 32 <= count <= 256  # a block of a few batches, and nothing before it
    draw = loader.stream.flow.order.at(np.arange(at, at + count))
    for number, rows in gathered.items():
        assert rows == draw.index[draw.source == number].tolist()
    assert (batch.input_ids[:, 0] == 10 * draw.index[:32]).all()
    assert loader.step == at // 32 + 1


def test_a_trillion_rows_are_opened_resumed_and_traced_back_without_memory_to_speak_of(open_numbers):
    tracemalloc.start()
    loader = open_numbers(10**12, shuffle="global", batch_size=32, row_tokens=256)
    loader.seek(position=10**11)
    batch = loader.get_batch()
    row = int(batch.input_ids[0, 0]) // 10
    assert loader.stream.flow.order.positions(0, [row], 0).tolist() == [10**11]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 50e6


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_dropped_loader_is_freed_at_once_and_not_by_the_collector(open_loader, small_store, prefetch):
    # Its memory, its maps and its threads go with it. An abandoned pass that the collector finds may end anywhere.
    loader = open_loader(small_store, delivery=bw.Delivery(prefetch=prefetch))
    for _ in range(3):
        loader.get_batch()
    left = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert left() is None
    finally:
        gc.enable()
