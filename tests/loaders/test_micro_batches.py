"""Gradient accumulation: a global batch that is read as micro-batches has the same rows, in the same order."""

from __future__ import annotations

import pytest
from elastic_jobs import bake_sources, handed, live

import batchwright as bw

WEIGHTS = bw.Mixture({"web": 0.5, "code": 0.3, "notes": 0.2}, max_epochs={"notes": 2})
MIXTURE = {"weights": WEIGHTS, "chunk_size": 16, "seed": 7}
NATURAL = {"chunk_size": 16, "seed": 7, "epoch_end": "wrap"}
"""684 rows an epoch, which is 14.25 steps of 48: one step reads the end of an epoch and the beginning of the next."""


@pytest.fixture(scope="module")
def sources(raw, tmp_path_factory):
    return bake_sources(raw, tmp_path_factory.mktemp("micro"))


@pytest.fixture
def open_ranks(sources):
    """One loader for each rank, settings as given."""

    def opened(world_size=1, batch_size=48, state=None, epoch_end=None, **settings):
        loaders = [
            bw.MixedDataLoader(
                sources,
                **settings or MIXTURE,
                batch_size=bw.Batching(batch_size, epoch_end=epoch_end),
                rank=rank,
                world_size=world_size,
                epochs=None,
                framework="numpy",
            )
            for rank in range(world_size)
        ]
        for loader in loaders if state is not None else []:
            loader.load_state_dict(state)
        return loaders

    return opened


def next_rows(ranks, batch_size=None):
    """[position, digest] of each row of the next batch, over all ranks."""
    return [row for loader in ranks for row in handed(loader.get_batch(batch_size))]


def rows_of_ranks(ranks, num_batches, batch_size=None):
    return [row for _ in range(num_batches) for row in next_rows(ranks, batch_size)]


@pytest.mark.parametrize("settings", [MIXTURE, NATURAL], ids=["weights", "natural"])
@pytest.mark.parametrize(("micro_rows", "world_size"), [(12, 1), (12, 4), (16, 2), (24, 3)])
def test_micro_batches_have_the_rows_of_the_step_in_order(open_ranks, settings, micro_rows, world_size):
    whole, parts = open_ranks(**settings), open_ranks(world_size, micro_rows, **settings)
    for step in range(32):
        assert rows_of_ranks(parts, 48 // micro_rows) == next_rows(whole), f"step {step}"


def test_a_loader_of_whole_steps_gives_micro_batches_when_asked(open_ranks):
    whole, parts = open_ranks(), open_ranks(world_size=4)
    for step in range(20):
        assert rows_of_ranks(parts, 4, batch_size=12) == next_rows(whole), f"step {step}"


@pytest.mark.parametrize("read", [1, 2, 3])
def test_a_state_from_the_middle_of_an_accumulation_goes_on_exactly(open_ranks, read):
    whole, parts = open_ranks(), open_ranks(world_size=4, batch_size=12)
    rows = rows_of_ranks(parts, 4 * 5 + read)
    resumed = open_ranks(world_size=2, batch_size=12, state=parts[0].state_dict())
    rows += rows_of_ranks(resumed, 4 - read + 4 * 5)
    assert rows == rows_of_ranks(whole, 11)
    assert resumed[0].step == 44
    assert resumed[0].state_dict()["steps"] == [[0, 0, 12]]


def test_accumulation_may_change_its_size_and_its_ranks_in_the_middle(open_ranks):
    whole = rows_of_ranks(open_ranks(), 20)
    rows, state = [], None
    for micro_rows, world_size, num_batches in [(12, 4, 7), (24, 3, 5), (6, 2, 3), (48, 8, 6), (16, 1, 11), (12, 4, 9)]:
        ranks = open_ranks(world_size, micro_rows, state)
        rows += rows_of_ranks(ranks, num_batches)
        state = ranks[-1].state_dict()
    assert rows == whole[: len(rows)]
    assert len(rows) == state["position"] == 794


def test_a_changed_batch_size_goes_on_at_the_same_row_and_steps_are_still_found(open_ranks, sources):
    whole = rows_of_ranks(open_ranks(), 20)
    (loader,) = open_ranks()
    rows_of_ranks([loader], 5)
    (changed,) = open_ranks(batch_size=36, state=loader.state_dict())
    assert (changed.step, changed.position) == (5, 240)
    assert next_rows([changed]) == whole[240:276]
    (back,) = open_ranks(batch_size=48, state=changed.state_dict())
    assert next_rows([back]) == whole[276:324]
    assert back.state_dict()["steps"] == [[0, 0, 48], [5, 240, 36], [6, 276, 48]]
    traced = bw.trace(list(sources.values()), back, step=5)
    assert sorted({record.position for record in traced}) == [*range(240, 276)]
    back.seek(step=5)
    assert next_rows([back], batch_size=36) == whole[240:276]


def test_an_epoch_that_drops_its_tail_is_cut_by_micro_batches_not_by_steps(open_ranks):
    # 684 rows are 14 steps of 48, or 57 micro-batches of 12: with "drop" the last one belongs to no whole step.
    whole, parts = open_ranks(chunk_size=16, seed=7), open_ranks(4, 12, chunk_size=16, seed=7)
    assert rows_of_ranks(parts, 4 * 14) == rows_of_ranks(whole, 14)
    assert [position for position, _ in next_rows(parts)] == [*range(672, 684)]
    assert rows_of_ranks(parts, 4 * 14) == rows_of_ranks(whole, 14)
    assert whole[0].position == 684 + 684
    assert parts[0].position == 684 + 672


def test_an_amendment_in_the_middle_of_an_accumulation_changes_the_same_rows(open_ranks):
    (whole,), parts = open_ranks(), open_ranks(world_size=4, batch_size=12)
    rows = rows_of_ranks(parts, 6)
    for rank in parts:
        rank.amend(weights={"web": 0.1, "code": 0.9}, skip=(100, 130))
    rows += rows_of_ranks(parts, 4 * 8 - 6)
    whole.amend(at=72, weights={"web": 0.1, "code": 0.9}, skip=(100, 130))
    assert rows == rows_of_ranks([whole], 8)
    assert parts[0].plan.fingerprint == whole.plan.fingerprint


def test_killed_processes_go_on_with_other_micro_batches_and_the_same_rows(open_ranks, sources, tmp_path, processes):
    # States are saved every third micro-batch, so many of them lie inside a step of 48; so does the amendment.
    new_weights = {"web": 0.1, "code": 0.9}
    job = {"sources": sources, "amendments": [(5, {"weights": new_weights})], "checkpoint_steps": 3, "stop_at_step": 50}
    starts = {"settings": MIXTURE, "world_size": 4, "batch_size": 12}
    lives = [live(processes, tmp_path / "1", job | starts, kill_after=(9, 16))]
    for world_size, micro_rows, kill_after in [(3, 24, (6, 12)), (2, 48, None)]:
        died = lives[-1]
        goes_on = {"plan": died.state["plan"], "state": died.state, "world_size": world_size, "batch_size": micro_rows}
        folder = tmp_path / str(len(lives) + 1)
        lives.append(live(processes, folder, job | goes_on, kill_after=kill_after, first_step=died.saved_step))

    (whole,) = open_ranks()
    whole.amend(at=60, weights=new_weights)
    expected = rows_of_ranks([whole], 50)
    starts_at = [0, *(life.state["position"] for life in lives)]
    for life, start in zip(lives, starts_at, strict=False):
        rows = [row for _, rows in life.steps for row in rows]
        assert rows == expected[start : start + len(rows)]
        assert start < life.state["position"] <= start + len(rows)
    assert lives[-1].saved_step > lives[-1].first_step
