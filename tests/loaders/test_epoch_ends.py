"""No row of an epoch is lost where it ends in a short batch, and no rank misses a step. What is dropped is said."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright.base.errors import SpecError
from refusals import refused
from shared import slow


def open_ranks(open_numbers, num_rows, world_size, batch_size, state=None, **settings):
    given_settings = {"epoch_end": "short", "epochs": 2, "shuffle": "global", "uneven": True} | settings
    ranks = [
        open_numbers(num_rows, batch_size=batch_size, rank=rank, world_size=world_size, **given_settings)
        for rank in range(world_size)
    ]
    for loader in ranks if state else ():
        loader.load_state_dict(json.loads(json.dumps(state)))
    return ranks


def next_step(ranks):
    """Positions of the rows that count in the next global batch, after everything that its parts must say of it."""
    parts = [loader.get_batch() for loader in ranks]
    positions = []
    for batch in parts:
        weight = batch.metadata["weight"]
        assert weight.all() or weight.tolist() == [0]
        assert (batch.targets[weight == 0] == -100).all()
        assert not batch.loss_mask[weight == 0].any()
        positions += batch.metadata["position"][weight > 0].tolist()
    assert {batch.metadata["global_rows"] for batch in parts} == {len(positions)}
    assert len({loader.step for loader in ranks}) == 1
    assert all(loader.state_dict() == batch.metadata["state"] for loader, batch in zip(ranks, parts, strict=True))
    return positions


@given(
    num_rows=st.integers(1, 60),
    legs=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 24), st.integers(0, 12)), min_size=1, max_size=4),
)
def test_every_row_of_every_epoch_comes_once_over_any_ranks_batch_sizes_and_restarts(open_numbers, num_rows, legs):
    seen, state, steps = [], None, 0
    for leg, (world_size, batch_size, num_steps) in enumerate(legs):
        ranks = open_ranks(open_numbers, num_rows, world_size, batch_size, state)
        to_the_end = leg == len(legs) - 1
        while not ranks[0].is_over and (to_the_end or num_steps):
            before = len(seen)
            seen += next_step(ranks)
            left = num_rows - before % num_rows
            assert len(seen) - before == min(batch_size, left)
            num_steps, steps = num_steps - 1, steps + 1
            assert ranks[0].step == steps
        state = ranks[0].state_dict()
    assert seen == list(range(2 * num_rows))


@given(st.integers(1, 60), st.integers(1, 24), st.integers(1, 6), st.data())
def test_the_step_that_is_sought_is_the_one_that_a_run_comes_to(open_numbers, num_rows, batch_size, world_size, data):
    ranks = open_ranks(open_numbers, num_rows, world_size, batch_size)
    steps = -(-num_rows // batch_size)
    assert {loader.get_num_batches() for loader in ranks} == {steps}
    run = [next_step(ranks) for _ in range(2 * steps)]
    step = data.draw(st.integers(0, 2 * steps - 1))
    for loader in ranks:
        loader.seek(step=step)
        assert (loader.step, loader.position) == (step, run[step][0])
    assert next_step(ranks) == run[step]


@pytest.mark.parametrize(
    ("num_rows", "ahead"),
    [(41, {}), (42, {}), (46, {}), (41, {"prefetch": 2}), (42, {"prefetch": 2}), slow(42, {"workers": 1})],
)
def test_a_short_batch_is_shared_like_any_other(open_numbers, num_rows, ahead):
    ranks = open_ranks(open_numbers, num_rows, 5, 20, epochs=1, **ahead)
    *_, last = zip(*ranks, strict=True)
    left = num_rows % 20
    counts = [left * (rank + 1) // 5 - left * rank // 5 for rank in range(5)]
    assert [int(batch.metadata["weight"].sum()) for batch in last] == counts
    assert [len(batch.input_ids) for batch in last] == [max(count, 1) for count in counts]


@pytest.mark.parametrize("sharding", ["strided", lambda rows, rank, world: range(rows - 1 - rank, -1, -world)])
def test_any_sharding_shares_a_short_batch(open_numbers, sharding):
    ranks = open_ranks(open_numbers, 42, 5, 20, epochs=1, sharding=sharding, workers=1)
    steps = [next_step(ranks) for _ in range(3)]
    assert [sorted(step) for step in steps] == [list(range(20)), list(range(20, 40)), [40, 41]]


def test_a_sharding_that_cannot_share_the_short_batch_is_refused_when_the_loader_opens(open_numbers):
    def fours(num_rows, rank, world_size):
        return range(4 * rank, 4 * rank + 4)

    settings = {"batch_size": 8, "world_size": 2, "sharding": fours}
    open_numbers(40, epoch_end="short", **settings)
    with refused(SpecError, "a batch of 3", parameter="sharding"):
        open_numbers(43, epoch_end="short", **settings)


# What is dropped


@pytest.mark.parametrize(("epoch_end", "rows"), [("drop", "each epoch"), ("wrap", "the run")])
def test_rows_that_no_batch_has_are_counted_when_the_loader_opens(open_numbers, caplog, epoch_end, rows):
    loader = open_numbers(1423, batch_size=50, epoch_end=epoch_end)
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    for text in (said.getMessage(), repr(loader)):
        assert f"the last 23 rows of {rows}" in text


@pytest.mark.parametrize(
    "settings",
    [
        {"epoch_end": "short"},
        {"epoch_end": "pad"},
        {"epoch_end": "drop", "num_rows": 1400},
        {"epoch_end": "wrap", "epochs": None},
        {"epoch_end": "drop", "rank": 1, "world_size": 2},  # rank 0 says it for all
    ],
)
def test_nothing_is_said_where_no_row_is_dropped(open_numbers, caplog, settings):
    open_numbers(**({"num_rows": 1423, "batch_size": 50} | settings))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# Each loader with its default


def test_writing_back_by_batches_reaches_every_row_of_a_buffer_once():
    buffer = bw.DatasetBuffer([{"n": n, "loss": 0.0} for n in range(425)])
    visited = []
    for batch in buffer.loader(batch_size=50):
        visited += batch.ids.tolist()
        buffer.set(batch.ids, loss=batch["loss"] + 1)
    assert sorted(visited) == sorted(buffer.ids.tolist())
    assert buffer.to_pydict()["loss"] == [1.0] * 425


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """A store with a part kept for validation."""
    folder = tmp_path_factory.mktemp("held_out") / "texts.store"
    rows = [f"text {n}: " + "word " * (n % 17) for n in range(200)]
    recipe = bw.DatasetRecipe(seed=3).add_ingredient(rows, name="text").prepare_step(bw.tokenize("bytes"))
    bw.bake(recipe.holdout(0.3), to=folder, workers=0, show_progress=False)
    return str(folder)


@pytest.mark.parametrize("world_size", [1, 3, 7])
@pytest.mark.parametrize(
    "given", [{}, {"packing": "best_fit"}, {"fields": bw.Fields(position_ids=True, border_loss=False)}]
)
def test_validation_reads_every_row_once_on_any_ranks(held_out, world_size, given):
    settings = {"chunk_size": 64, "batch_size": 21, "split": "val", "framework": "numpy"} | given
    ranks = [
        bw.PretrainDataLoader(held_out, rank=rank, world_size=world_size, **settings) for rank in range(world_size)
    ]
    rows = ranks[0].plan.epoch_rows
    assert rows % 21  # or this test would show nothing
    found = []
    for parts in zip(*ranks, strict=True):
        weights = [batch.metadata["weight"] for batch in parts]
        found += [p for b, w in zip(parts, weights, strict=True) for p in b.metadata["position"][w > 0].tolist()]
        assert {batch.metadata["global_rows"] for batch in parts} == {int(sum(weight.sum() for weight in weights))}
    assert found == list(range(rows))


def test_a_traced_row_of_a_short_batch_names_the_rank_that_had_it(held_out):
    settings = {"chunk_size": 64, "batch_size": 21, "split": "val", "framework": "numpy", "world_size": 7}
    ranks = [bw.PretrainDataLoader(held_out, rank=rank, **settings) for rank in range(7)]
    last = [list(loader)[-1] for loader in ranks]
    step = ranks[0].step - 1
    traced = {record.position: record.rank for record in bw.trace(held_out, ranks[0], step=step)}
    had = {
        position: rank
        for rank, batch in enumerate(last)
        for position in batch.metadata["position"][batch.metadata["weight"] > 0].tolist()
    }
    assert traced == had


def rollouts(num_rows):
    return [
        {"prompt": [1, 2], "response": [3] * (1 + n % 5), "reward": float(n % 3), "group": n // 2}
        for n in range(num_rows)
    ]


@pytest.mark.parametrize("balance", [None, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rollouts_come_once_each_and_their_denominators_add_up(world_size, balance):
    data = rollouts(26)
    ranks = [
        bw.RolloutDataLoader(
            data,
            batch_size=bw.Batching(12, balance=balance),
            compute_advantages=True,
            rank=r,
            world_size=world_size,
            framework="numpy",
        )
        for r in range(world_size)
    ]
    seen = []
    for parts in zip(*ranks, strict=True):
        said = parts[0].metadata
        weights = [batch.metadata["weight"] for batch in parts]
        seen += [row for b, w in zip(parts, weights, strict=True) for row in b.metadata["row"][w > 0].tolist()]
        assert said["global_rows"] == said["global_sequences"] == sum(weight.sum() for weight in weights)
        assert said["global_tokens"] == sum(batch.loss_mask.sum() for batch in parts)
        assert len({batch.input_ids.shape[1] for batch in parts}) == 1
        assert all(np.isfinite(batch.metadata["advantages"]).all() for batch in parts)
    assert sorted(seen) == list(range(26))
    assert ranks[0].step == 3


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """25 conversations."""
    said = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "a" * (n % 37 + 1)}] for n in range(25)
    ]
    rows = [{"messages": messages} for messages in said]
    recipe = bw.DatasetRecipe(seed=3).add_ingredient(rows, name="talks").prepare_step(bw.chat("bytes", "chatml"))
    path = tmp_path_factory.mktemp("talks") / "talks.store"
    bw.bake(recipe, to=path, workers=0, show_progress=False)
    return str(path)


def open_talks(talks, rank, world_size, balance=None, workers=None):
    return bw.ConversationDataLoader(
        talks,
        max_length=128,
        batch_size=bw.Batching(12, balance=balance, epoch_end="short"),
        delivery=bw.Delivery(workers=workers, check=False),
        framework="numpy",
        rank=rank,
        world_size=world_size,
    )


@pytest.mark.parametrize(
    ("world_size", "given"),
    [
        *((ranks, given) for ranks in (1, 2, 4) for given in ({}, {"balance": True})),
        (2, {"workers": 2}),
        slow(4, {"workers": 2}),
    ],
)
def test_denominators_of_conversations_add_up_over_ranks_and_parts(talks, world_size, given):
    ranks = [open_talks(talks, rank, world_size, **given) for rank in range(world_size)]
    seen = []
    for parts in zip(*ranks, strict=True):
        learned = sum(part.loss_mask.sum() for batch in parts for part in batch.parts(max_tokens=300))
        assert {batch.metadata["global_tokens"] for batch in parts} == {learned}
        seen += [p for b in parts for p in b.metadata["position"][b.metadata["weight"] > 0].tolist()]
    assert sorted(seen) == list(range(25))  # the last of three steps has one row, for all ranks


def test_ranks_can_be_proven_to_be_in_step_before_a_short_batch(talks):
    loader = open_talks(talks, rank=0, world_size=1)
    loader.seek(step=2)
    assert loader.check_sync().position == loader.position == 24
    assert len(loader.get_batch().input_ids) == 1
