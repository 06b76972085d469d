"""A mixture that is amended while its job is killed and comes back with other ranks: the same rows as one process."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path

import pytest
from elastic_jobs import amend_if_due, bake_in_order, bake_sources, handed, live, notes

import batchwright as bw

ROWS_PER_STEP = 48
CHECKPOINT_STEPS = 3
STOP_AT_STEP = 54


@pytest.fixture
def sources(raw, tmp_path):
    return bake_sources(raw, tmp_path / "stores")


@pytest.fixture
def elsewhere(sources, tmp_path):
    """The same stores at another place, without what jobs leave beside them: the two share no file."""
    return {name: shutil.copytree(path, tmp_path / "elsewhere" / Path(path).name) for name, path in sources.items()}


def open_mixture(sources, **given):
    return bw.MixedDataLoader(sources, **given, batch_size=ROWS_PER_STEP, epochs=None, framework="numpy")


def without_interruption(loader, amendments):
    """[position, digest] of every row of every step, by one loader in one process."""
    steps = []
    while loader.step < STOP_AT_STEP:
        amend_if_due(loader, amendments)
        steps.append(handed(loader.get_batch()))
    return steps


def three_lives(processes, folder, sources, settings, amendments, last_amendment):
    """The lives of a job (4 ranks killed, 3 ranks killed, 8 ranks to the end), and its amendments with their steps.

    The ranks make all amendments but the last: that one is made while no rank runs, from files alone, at a position
    that no rank has come to. So the third life starts with a state that is older than its plan.
    """
    job = {"sources": sources, "batch_size": ROWS_PER_STEP, "checkpoint_steps": CHECKPOINT_STEPS}
    job |= {"amendments": amendments, "stop_at_step": STOP_AT_STEP}

    starts = {"settings": settings, "world_size": 4}
    first = live(processes, folder / "1", job | starts, kill_after=(8, 16))

    goes_on = {"plan": first.state["plan"], "state": first.state, "world_size": 3}
    second = live(processes, folder / "2", job | goes_on, kill_after=(12, 20), first_step=first.saved_step)

    loader = open_mixture(sources, plan=second.state["plan"])
    loader.load_state_dict(second.state)
    last_handed = max(position for line in chain(*second.recorded) for position, _ in line["rows"])
    unseen = max(last_handed + 1, loader.position)  # a state at the end of an epoch is past the rows that it left out
    last_amendment = {"at": unseen + processes.chance.randint(0, 59), **last_amendment}
    amended = loader.amend(**last_amendment)

    goes_on = {"plan": amended.fingerprint, "state": second.state, "world_size": 8}
    third = live(processes, folder / "3", job | goes_on, first_step=second.saved_step)
    assert third.saved_step == STOP_AT_STEP
    return [first, second, third], [*amendments, (second.saved_step, last_amendment)]


def check_lives(lives, expected):
    """Each rank was handed its part of each step, and no step is lost; only steps after a checkpoint come again."""
    for life in lives:
        share = ROWS_PER_STEP // len(life.recorded)
        for rank, lines in enumerate(life.recorded):
            assert [line["step"] for line in lines] == list(range(life.first_step, life.first_step + len(lines)))
            for line in lines:
                of_rank = expected[line["step"]][rank * share : (rank + 1) * share]
                assert line["rows"] == of_rank, f"rank {rank} of {len(life.recorded)}, step {line['step']}"
        assert life.first_step < life.saved_step <= life.first_step + len(life.steps)
        assert len(life.steps) - (life.saved_step - life.first_step) <= CHECKPOINT_STEPS
    given = dict(chain.from_iterable(life.steps for life in lives))
    assert [given[step] for step in range(STOP_AT_STEP)] == expected


def positions_of(steps):
    return [position for step in steps for position, _ in step]


def test_a_killed_job_goes_on_through_new_weights_skips_and_a_cap(sources, elsewhere, tmp_path, processes):
    settings = {
        "weights": bw.Mixture({"web": 0.5, "code": 0.3, "notes": 0.2}, max_epochs={"notes": 2}),
        "chunk_size": 16,
        "seed": 7,
    }
    amendments = [
        (5, {"weights": {"web": 0.3, "code": 0.5, "notes": 0.2}}),
        (12, {"skip": [[600, 639]]}),  # made before or after the first kill: by chance
    ]
    last = {"weights": {"web": 0.9, "code": 0.1}}
    lives, made = three_lives(processes, tmp_path / "lives", sources, settings, amendments, last)

    alone = open_mixture(elsewhere, **settings)
    expected = without_interruption(alone, made)
    check_lives(lives, expected)
    assert alone.state_dict() == lives[-1].state

    # The run was what the test is about: a skip, a source that left, sources that began again, an amendment at its end.
    assert positions_of(expected) == [p for p in range(alone.position) if not 600 <= p <= 639]
    assert [binding.source for binding in alone.plan.order.bindings] == ["notes"]
    given = dict(zip(alone.plan.order.names, alone.plan.order.counts(alone.position), strict=True))
    assert given["notes"] == 2 * 61
    assert given["web"] > 474
    assert given["code"] > 149
    assert alone.plan.amendments[-1].at < alone.position


def test_a_killed_job_goes_on_through_epochs_that_grow(sources, elsewhere, tmp_path, processes):
    settings = {"chunk_size": 16, "seed": 7}
    grown = bake_in_order(tmp_path / "grown.store", notes(range(80)))
    other = bake_in_order(tmp_path / "other.store", [f"other {n}" for n in range(60)])
    amendments = [
        (5, {"add": {"notes": grown}}),
        (12, {"skip": [[660, 700]]}),  # over the end of the first epoch, which has 684 rows
    ]
    last = {"add": {"other": other}}
    lives, made = three_lives(processes, tmp_path / "lives", sources, settings, amendments, last)

    alone = open_mixture(elsewhere, **settings)
    expected = without_interruption(alone, made)
    check_lives(lives, expected)
    assert alone.state_dict() == lives[-1].state

    # The run was what the test is about: several epochs, a source that grew, and one more from some epoch on.
    assert alone.epoch >= 2
    assert not {*range(660, 701)} & {*positions_of(expected)}
    given = dict(zip(alone.plan.order.names, alone.plan.order.counts(alone.position), strict=True))
    assert given["notes"] > alone.epoch * 61
    assert given["other"] > 0
