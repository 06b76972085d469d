"""The drill passes where all is equal, and names the step, rank and reason where anything is not."""

from __future__ import annotations

import time

import numpy as np
import pytest

import batchwright as bw
from batchwright.audit.digesting import digest
from batchwright.audit.drilling import (
    Leg,
    Opening,
    _Crew,
    _RankError,
    _record,
    _what_differs,
    drill,
    legs_over,
    open_rank,
)
from batchwright.base.errors import PlanError, SpecError, WorkerError
from batchwright.base.processes import Worker
from batchwright.batches.settings import Asked
from batchwright.loaders.pretrain import make_plan
from refusals import refused
from shared import slow

TWO_LEGS = (Leg(ranks=1), Leg(ranks=2, prefetch=2))
SETTINGS = {"batch_size": 6, "steps": 12, "legs": TWO_LEGS, "checkpoint_every": 3, "kill_seed": 5}


@pytest.fixture
def plan(small_store):
    return make_plan(bw.open_store(small_store), Asked(chunk_size=16, seed=7))


def opened_with(change):
    """A way to open a rank whose loader goes through `change(loader, batches)` in legs of two ranks.

    Made here, inside a function, so that it travels to the rank's process by value.
    """

    def open_changed(opening):
        from batchwright.audit.drilling import open_rank

        loader = open_rank(opening)
        if opening.leg.ranks == 2:
            original = loader.get_iterator
            loader.get_iterator = lambda: change(loader, original(), opening.rank)
        return loader

    return open_changed


def test_a_plan_that_is_killed_and_restarted_equals_itself(small_store, plan):
    legs = [Leg(ranks=1), Leg(ranks=3, prefetch=2), Leg(ranks=2, workers=2)]
    report = drill(small_store, plan, **SETTINGS | {"steps": 40, "legs": legs})
    assert report.ok
    assert report.digest == digest(small_store, plan, 0, 39, batch_size=6)
    one, two, three = report.legs
    assert one.killed_in_step == one.num_steps
    assert two.first_step == one.killed_in_step - one.killed_in_step % 3 == one.num_steps - two.repeated_steps
    assert three.killed_in_step is None
    assert three.first_step + three.num_steps == 40


def test_the_same_seed_kills_in_the_same_steps(small_store, plan):
    seen = []
    settings = SETTINGS | {"legs": [Leg(ranks=1), Leg(ranks=1)]}
    for _ in range(2):
        drill(small_store, plan, **settings, on_leg=lambda leg: seen.append(leg.killed_in_step))
    assert seen[:2] == seen[2:]
    assert seen[0] in range(1, 12)


def test_a_drill_leaves_no_record_of_a_run(own_store):
    report = drill(
        own_store, make_plan(bw.open_store(own_store), Asked(chunk_size=16)), **SETTINGS | {"legs": [Leg(ranks=1)]}
    )
    assert report.ok
    assert not (own_store / "plans").exists()


@pytest.mark.parametrize("epoch_end", ["short", "pad"])
def test_a_drill_goes_over_the_end_of_epochs(small_store, epoch_end):
    plan = make_plan(bw.open_store(small_store), Asked(chunk_size=200, batch_size=bw.Batching(epoch_end=epoch_end)))
    assert plan.epoch_rows < 12 * 6
    report = drill(small_store, plan, **SETTINGS)
    assert report.ok
    assert report.digest == digest(small_store, plan, 0, 11, batch_size=6)


def changed_tokens(loader, batches, rank):
    for batch in batches:
        if loader.step == 10 and rank == 1:
            batch.input_ids = batch.input_ids.copy()
            batch.input_ids[2, 5] += 1
        yield batch


def changed_targets(loader, batches, rank):
    for batch in batches:
        if loader.step == 10:
            batch.targets = batch.targets.copy()
            batch.targets[0, 0] = -100
        yield batch


def moved_cursor(loader, batches, rank):
    for batch in batches:
        if loader.step == 10 and rank == 1:
            loader.seek(position=loader.position + 6)
        yield batch


def fewer_rows(loader, batches, rank):
    for batch in batches:
        if loader.step == 10:
            facts = batch.metadata
            facts["position"], facts["weight"] = facts["position"][1:], facts["weight"][1:]
            names = ("input_ids", "attention_mask", "targets", "loss_mask")
            for name, rows in {name: getattr(batch, name)[1:] for name in names}.items():
                setattr(batch, name, rows)
        yield batch


def raising(loader, batches, rank):
    for batch in batches:
        if loader.step == 10:
            raise ValueError("the shard is gone")
        yield batch


@pytest.mark.parametrize(
    ("change", "rank", "what"),
    [
        (changed_tokens, 1, "tokens of row 5 of the batch, and 0 more rows"),
        slow(changed_targets, 0, "targets, masks or position of row 0 of the batch"),
        (moved_cursor, 1, "the state is {'position': 66"),
        slow(fewer_rows, 0, "2 rows instead of 3"),
        (raising, 0, "ValueError: the shard is gone"),
    ],
)
def test_the_first_step_that_differs_is_named(small_store, plan, change, rank, what):
    settings = SETTINGS | {"legs": [Leg(ranks=2)]}
    report = drill(small_store, plan, **settings, open_loader=opened_with(by_value(change)))
    difference = report.first_difference
    assert not report.ok
    assert (difference.step, difference.leg, difference.rank) == (9, 1, rank)
    assert what in difference.what


def by_value(function):
    """The same function, but of no module: so it travels by value, and a rank need not import this file."""
    return type(function)(function.__code__, {"__builtins__": __builtins__}, None, function.__defaults__)


def test_a_checkpoint_that_is_resumed_at_another_place_is_found(small_store, plan):
    def open_lost(opening):
        from batchwright.audit.drilling import open_rank

        loader = open_rank(opening)
        original = loader.load_state_dict

        def one_step_late(state):
            original({**state, "position": state["position"] + 6 * (opening.leg.ranks == 2)})

        loader.load_state_dict = one_step_late
        return loader

    report = drill(small_store, plan, **SETTINGS, open_loader=open_lost)
    assert report.first_difference.step == report.legs[1].first_step
    assert "tokens" in report.first_difference.what


def test_a_rank_that_does_not_answer_is_named():
    with Worker(lambda *task: time.sleep(600), doing="of this test") as rank:
        with pytest.raises(_RankError, match=r"0\.2 s") as raised:
            _Crew([rank], 0.2).ask("step")
        assert raised.value.rank == 0


def test_a_rank_that_dies_is_named():
    def die(*task):
        import os
        import signal

        os.kill(os.getpid(), signal.SIGTERM)

    with Worker(die, doing="of this test") as rank, pytest.raises(_RankError, match="killed by signal 15"):
        _Crew([rank], 240).ask("step")


def test_an_uninterrupted_run_that_fails_is_an_error_of_its_own(small_store, plan):
    def never(opening):
        raise ValueError("no such loader")

    with refused(WorkerError, "step 0", "ValueError: no such loader", remedy="batchwright verify"):
        drill(small_store, plan, **SETTINGS, open_loader=never)


def test_no_leg_has_more_ranks_than_a_batch_has_rows(small_store, plan):
    report = drill(small_store, plan, **SETTINGS | {"batch_size": 2, "legs": [Leg(ranks=5)]})
    assert report.ok
    assert [result.leg.ranks for result in report.legs] == [2]


def test_a_plan_that_does_not_say_its_batch_size_asks_for_it(small_store, plan):
    with refused(PlanError, "plan", remedy="batch_size="):
        drill(small_store, plan, steps=12, legs=TWO_LEGS)


def test_fewer_steps_than_legs_are_refused(small_store, plan):
    with refused(SpecError, parameter="steps", remedy="steps=2"):
        drill(small_store, plan, **SETTINGS | {"steps": 1})


def test_the_default_legs_are_every_number_of_ranks_with_every_number_of_workers():
    assert [(leg.ranks, leg.workers) for leg in legs_over()] == [(1, 0), (3, 0), (8, 0), (1, 2), (3, 2), (8, 2)]
    assert np.any([leg.prefetch for leg in legs_over()])


# Rows of whole documents


def talk_plan(store):
    delivery = bw.Delivery(check=False)
    return bw.ConversationDataLoader(store, max_length=120, batch_size=6, framework="numpy", delivery=delivery).plan


def packed_plan(store):
    return make_plan(bw.open_store(store), Asked(chunk_size=64, packing="best_fit", weights={"web": 1, "code": 2}))


@pytest.mark.parametrize(("store", "plan_of"), [("chat_store", talk_plan), ("small_store", packed_plan)])
def test_whole_documents_that_are_killed_and_restarted_equal_themselves(store, plan_of, request):
    store = request.getfixturevalue(store)
    plan = plan_of(store)
    report = drill(store, plan, **SETTINGS)
    assert report.ok
    assert report.digest == digest(store, plan, 0, 11, batch_size=6)


def test_a_rank_that_pads_to_its_own_longest_row_is_found(chat_store):
    plan, stores = talk_plan(chat_store), ((str(chat_store), bw.open_store(chat_store).version),)
    whole = open_rank(Opening(stores, plan, 6, Leg(ranks=1), 0))
    true, differences = _record(whole.get_batch(), whole, plan), []
    for rank, mine in enumerate((slice(0, 3), slice(3, 6))):
        loader = open_rank(Opening(stores, plan, 6, Leg(ranks=2), rank))
        batch = loader.get_batch()
        assert _what_differs(true, _record(batch, loader, plan), mine) is None
        width = int(batch.attention_mask.sum(axis=1).max())
        names = ("input_ids", "attention_mask", "targets", "loss_mask", "position_ids", "segment_ids")
        for name, narrow in [(name, getattr(batch, name)[:, :width]) for name in names]:
            setattr(batch, name, narrow)
        differences.append(_what_differs(true, _record(batch, loader, plan), mine))
    assert [what is None for what in differences].count(True) == 1  # the rank that has the longest row of all
    assert any("targets, masks or position" in (what or "") for what in differences)
