"""The stream is the same whatever delivers it: ranks, workers, prefetch, restarts, batch sizes, frameworks."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from shared import arrays_of, slow

STREAMS = {
    "union, drop": {"batch_size": bw.Batching(12)},
    "union, short": {"batch_size": bw.Batching(12, epoch_end="short")},
    "union, pad": {"batch_size": bw.Batching(12, epoch_end="pad")},
    "union, wrap, pool": {
        "batch_size": bw.Batching(12, epoch_end="wrap"),
        "shuffle": bw.Shuffle("pool", pool_rows=40),
    },
    "mixture": {
        "batch_size": bw.Batching(12),
        "weights": bw.Mixture({"web": 0.2, "code": 0.5, "notes": 0.3}, num_rows=500),
    },
    "mixture, short": {
        "batch_size": bw.Batching(12, epoch_end="short"),
        "weights": bw.Mixture({"web": 0.9, "notes": 0.1}, num_rows=500),
    },
    "mixture, pad": {
        "batch_size": bw.Batching(12, epoch_end="pad"),
        "weights": bw.Mixture({"web": 0.9, "notes": 0.1}, num_rows=500),
    },
}
FIELDS = ("input_ids", "targets", "loss_mask", "attention_mask")


def next_global_batch(loaders):
    """The next batch of every rank, joined to one."""
    batches = [loader.get_batch() for loader in loaders]
    if loaders[0].plan.epoch_end == "short":  # a rank without a row has one of weight 0
        assert all(batch.metadata["weight"].all() or len(batch.input_ids) == 1 for batch in batches)
        batches = [batch for batch in batches if batch.metadata["weight"].all()]
        assert {batch.metadata["global_rows"] for batch in batches} == {sum(len(batch.input_ids) for batch in batches)}
    joined = {name: np.concatenate([np.asarray(getattr(batch, name)) for batch in batches]) for name in FIELDS}
    joined["position"] = np.concatenate([batch.metadata["position"] for batch in batches])
    joined["weight"] = np.concatenate([batch.metadata["weight"] for batch in batches])
    joined["source"] = np.array([name for batch in batches for name in batch.metadata["source"]])
    states = [batch.metadata["state"] for batch in batches]
    assert all(state == states[0] for state in states)
    return joined, states[0]


def assert_same(found, expected, step):
    for name, array in expected.items():
        assert np.array_equal(found[name], array), f"step {step}: {name} differs"


@pytest.fixture(scope="module", params=STREAMS)
def stream(request, small_store, open_loader):
    """(settings, the global batches of one uninterrupted process, the state before each)."""
    given_settings = STREAMS[request.param] | {"epochs": 3}
    loader = open_loader(small_store, **given_settings)
    batches, states = [], [loader.state_dict()]
    for _ in range(3):
        for batch in loader.get_iterator():
            loader_state = loader.state_dict()
            found = {name: getattr(batch, name).copy() for name in FIELDS}
            found |= {"position": batch.metadata["position"].copy(), "weight": batch.metadata["weight"].copy()}
            batches.append(found | {"source": np.array(batch.metadata["source"])})
            states.append(loader_state)
    return given_settings, batches, states


def restart_points(states):
    """The first steps, the steps around the end of the first and the second epoch, and one far into the last."""
    edge = next(n for n, state in enumerate(states) if state["position"] >= states[-1]["position"] // 3)
    return [0, 1, edge - 1, edge, edge + 1, 2 * edge, 2 * edge + 1, len(states) - 3]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 12])
def test_any_ranks_and_prefetch_restarted_anywhere_give_the_same_batches(
    stream, small_store, open_loader, world_size, prefetch
):
    given_settings, batches, states = stream
    loaders = [
        open_loader(
            small_store, rank=rank, world_size=world_size, delivery=bw.Delivery(prefetch=prefetch), **given_settings
        )
        for rank in range(world_size)
    ]
    for start in restart_points(states):
        for loader in loaders:
            loader.load_state_dict(json.loads(json.dumps(states[start])))
        for step in range(start, min(start + 3, len(batches))):
            found, state = next_global_batch(loaders)
            assert_same(found, batches[step], step)
            assert state == states[step + 1]


def in_pairs_backwards(num_rows, rank, world_size):
    return [row for row in reversed(range(num_rows)) if row // 2 % world_size == rank]


@pytest.mark.parametrize(
    ("sharding", "ahead"),
    [
        ("strided", {}),
        ("strided", {"prefetch": 2}),
        (in_pairs_backwards, {}),
        slow(in_pairs_backwards, {"workers": 2}),  # six processes for each stream
    ],
)
def test_any_sharding_gives_the_same_global_batches(stream, small_store, open_loader, sharding, ahead):
    given_settings, batches, states = stream
    shared_so = given_settings | {"batch_size": replace(given_settings["batch_size"], sharding=sharding)}
    loaders = [
        open_loader(small_store, rank=rank, world_size=3, delivery=bw.Delivery(**ahead), **shared_so)
        for rank in range(3)
    ]
    share = loaders[1].this_run.share(12)
    assert list(share) == ([1, 4, 7, 10] if sharding == "strided" else [9, 8, 3, 2])
    edge = restart_points(states)[3]
    for loader in loaders:
        loader.load_state_dict(states[edge - 1])
    for step in range(edge - 1, edge + 2):
        found, state = next_global_batch(loaders)
        rows = np.concatenate([loader.this_run.share(len(batches[step]["input_ids"])) for loader in loaders])
        assert_same(found, {name: array[rows] for name, array in batches[step].items()}, step)
        assert state == states[step + 1]
    for loader in loaders:
        loader.reset()  # ends its workers


def test_a_batch_that_does_not_divide_is_sharded_by_any_strategy(stream, small_store, open_loader):
    given_settings, batches, _ = stream
    shared_so = {"batch_size": replace(given_settings["batch_size"], uneven=True, sharding="strided")}
    loaders = [open_loader(small_store, rank=rank, world_size=5, **(given_settings | shared_so)) for rank in range(5)]
    parts = [loader.get_batch().input_ids for loader in loaders]
    assert [len(part) for part in parts] == [3, 3, 2, 2, 2]
    for rank, part in enumerate(parts):
        assert np.array_equal(part, batches[0]["input_ids"][rank::5])


def test_worker_processes_give_the_same_batches_from_any_start(stream, small_store, open_loader):
    given_settings, batches, states = stream
    edge = restart_points(states)[3]
    loaders = [
        open_loader(small_store, rank=rank, world_size=2, delivery=bw.Delivery(workers=2), **given_settings)
        for rank in range(2)
    ]
    for loader in loaders:
        loader.load_state_dict(states[edge - 1])
    for step in range(edge - 1, edge + 3):
        found, state = next_global_batch(loaders)
        assert_same(found, batches[step], step)
        assert state == states[step + 1]
    for loader in loaders:
        loader.reset()  # ends its workers


def test_two_restarts_with_other_ranks_each_lose_and_repeat_nothing(stream, small_store, open_loader):
    given_settings, batches, states = stream
    state, step = states[0], 0
    for world_size, prefetch, num_steps in ((4, 0, 17), (3, 2, len(batches) - 20), (6, 0, 3)):
        loaders = [
            open_loader(
                small_store, rank=rank, world_size=world_size, delivery=bw.Delivery(prefetch=prefetch), **given_settings
            )
            for rank in range(world_size)
        ]
        for loader in loaders:
            loader.load_state_dict(state)
        for _ in range(num_steps):
            found, state = next_global_batch(loaders)
            assert_same(found, batches[step], step)
            step += 1
    assert step == len(batches)


def test_iterators_and_get_batch_give_the_same_batches(stream, small_store, open_loader):
    given_settings, batches, _ = stream
    loader = open_loader(small_store, delivery=bw.Delivery(prefetch=2), **given_settings)
    for step, expected in enumerate(batches):
        assert np.array_equal(loader.get_batch().input_ids, expected["input_ids"]), step


def test_an_endless_mixture_is_resumed_anywhere(small_store, open_loader):
    given_settings = {"weights": {"web": 0.6, "notes": 0.4}}
    alone = open_loader(small_store, **given_settings)
    states, batches = [alone.state_dict()], []
    for _ in range(400):  # the notes are in their tenth epoch or so by then
        batches.append(alone.get_batch().input_ids.copy())
        states.append(alone.state_dict())
    loaders = [open_loader(small_store, rank=rank, world_size=4, **given_settings) for rank in range(4)]
    for start in (0, 7, 123, 397):
        for loader in loaders:
            loader.load_state_dict(states[start])
        for step in range(start, start + 3):
            found, state = next_global_batch(loaders)
            assert np.array_equal(found["input_ids"], batches[step])
            assert state == states[step + 1]


@pytest.mark.parametrize("ahead", [{}, {"prefetch": 2}, {"workers": 2}])
def test_torch_and_numpy_give_equal_numbers_of_equal_types(small_store, open_loader, ahead):
    torch = pytest.importorskip("torch")
    fields = bw.Fields(position_ids=True, segment_ids=True, border_loss=False)
    given_settings = {"fields": fields, "batch_size": bw.Batching(12, epoch_end="pad")}
    one = open_loader(small_store, framework="numpy", **given_settings)
    two = open_loader(small_store, framework="torch", delivery=bw.Delivery(**ahead), **given_settings)
    for _ in range(one.get_num_batches()):
        ours, theirs = one.get_batch(), two.get_batch()
        assert arrays_of(ours).keys() == arrays_of(theirs).keys()
        for name, array in arrays_of(theirs).items():
            assert isinstance(array, torch.Tensor)
            assert array.numpy().dtype == getattr(ours, name).dtype
            assert np.array_equal(array.numpy(), getattr(ours, name))
        assert ours.metadata["source"] == theirs.metadata["source"]
        assert ours.metadata["state"] == theirs.metadata["state"]
        for name in ("position", "weight"):
            assert np.array_equal(ours.metadata[name], theirs.metadata[name])


# Any chain of restarts, against rows read token by token


@pytest.fixture(scope="module")
def all_rows(small_store, open_loader, slow_rows):
    plan = open_loader(small_store).plan
    slow = slow_rows(small_store, plan)
    return plan.epoch_rows, np.array([slow.row(position) for position in range(3 * plan.epoch_rows)])


@st.composite
def legs(draw):
    """One stretch of a run between two restarts: (ranks, rows per rank, prefetch, steps)."""
    return draw(st.tuples(st.integers(1, 5), st.integers(1, 9), st.sampled_from([0, 2]), st.integers(0, 40)))


@settings(max_examples=30)
@given(chain=st.lists(legs(), min_size=1, max_size=4), epoch_end=st.sampled_from(["drop", "short", "pad", "wrap"]))
def test_any_chain_of_restarts_gives_the_rows_in_order(small_store, open_loader, all_rows, chain, epoch_end):
    epoch_rows, rows = all_rows
    state, position, steps_done = None, 0, 0
    for world_size, rows_each, prefetch, num_steps in chain:
        size = world_size * rows_each
        loaders = [
            open_loader(
                small_store,
                batch_size=bw.Batching(size, epoch_end=epoch_end),
                epochs=3,
                rank=rank,
                world_size=world_size,
                delivery=bw.Delivery(prefetch=prefetch),
            )
            for rank in range(world_size)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        for _ in range(num_steps):
            left = epoch_rows - position % epoch_rows
            if epoch_end == "drop" and left < size:
                position, left = position + left, epoch_rows
            real = min(size, left) if epoch_end in ("short", "pad") else size
            if position + real > 3 * epoch_rows:
                break
            found, state = next_global_batch(loaders)
            expected = rows[position : position + real]
            assert np.array_equal(found["input_ids"][:real], expected[:, :-1])
            assert np.array_equal(found["targets"][:real], expected[:, 1:])
            assert found["weight"].tolist() == [1] * real + [0] * (size - real) * (epoch_end == "pad")
            position, steps_done = position + real, steps_done + 1
            assert loaders[0].step == steps_done
