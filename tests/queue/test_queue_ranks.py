"""Ranks that share a queue: one order whatever their number, gone on with by another number, and by one that died."""

from __future__ import annotations

import itertools
import json
import signal
from typing import Any

import pytest
from queue_jobs import BATCH, FILE_ROWS, Run, ids_below


def start_ranks(
    run: Run, world_size: int, *, prefix: str = "r", batch_size: int | None = None, **job: Any
) -> list[str]:
    if not run.providers:
        run.provide("p", pause_seconds=0)
    names = [f"{prefix}{rank}" for rank in range(world_size)]
    for rank, name in enumerate(names):
        run.consume(name, settings={"rank": rank, "world_size": world_size, "batch_size": batch_size}, **job)
    return names


def global_order(run: Run, names: list[str]) -> list[int]:
    """Ids as all ranks together were handed them: step by step, rank by rank."""
    steps = itertools.zip_longest(*([line["ids"] for line in run.handed(name)] for name in names), fillvalue=[])
    return [id for step in steps for ids in step for id in ids]


def steps_of(run: Run, name: str, pid: int) -> list[int]:
    """The steps of three ranks in which a process was handed a batch."""
    first = [divmod(line["ids"][0], 1000) for line in run.handed(name) if line["pid"] == pid]
    return [(number * FILE_ROWS + row) // (3 * BATCH) for number, row in first]


@pytest.mark.parametrize("batch_size", [None, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_are_handed_the_one_order(run: Run, world_size: int, batch_size: int | None) -> None:
    names = start_ranks(run, world_size, batch_size=batch_size)
    run.wait_for_batches(3, *names)
    end = run.come_to_an_end(*names, more_files=3)

    together = global_order(run, names)
    whole = min(len(run.handed(name)) for name in names) * world_size * (batch_size or BATCH)
    assert together[:whole] == ids_below(end + 9)[:whole]
    assert whole >= end * FILE_ROWS - world_size * (batch_size or BATCH), run.told()
    run.check_rows()
    run.check_nothing_is_left()


def place(state: dict[str, Any]) -> int:
    """The row at which a state goes on."""
    return state["train"]["file"] * FILE_ROWS + state["train"]["batch"] * BATCH


@pytest.mark.parametrize("after", [2, 3, 6])
def test_the_state_of_four_ranks_goes_on_with_another_number_of_them(run: Run, after: int) -> None:
    names = start_ranks(run, 4, save_every=5)
    states = [run.state(name) for name in names]
    run.wait_for("states", lambda: all(path.exists() for path in states))
    run.kill(*names)
    state = min(
        (json.loads(path.read_text()) for path in states), key=lambda s: (s["train"]["file"], s["train"]["batch"])
    )
    begins = state["train"]["file"] * FILE_ROWS + state["train"]["batch"] * BATCH
    assert begins % (4 * 5 * BATCH) == 0  # whole steps of all ranks, and the same for each
    for rank in range(after):
        run.state(f"s{rank}").write_text(json.dumps(state))
    others = start_ranks(run, after, prefix="s", save_every=1000)
    run.wait_for_batches(3, *others)
    end = run.come_to_an_end(*others, more_files=3)

    together = global_order(run, others)
    whole = min(len(run.handed(name)) for name in others) * after * BATCH
    assert together[:whole] == ids_below(end + 9)[begins : begins + whole], run.told()


@pytest.mark.parametrize("after", [4, 2])
def test_ranks_that_are_all_killed_lose_nothing_where_they_start_again_without_a_state(run: Run, after: int) -> None:
    names = start_ranks(run, 4)
    run.wait_for_batches(7, *names)
    run.kill(*names)
    others = start_ranks(run, after, prefix="s")
    run.wait_for_batches(3, *others)
    end = run.come_to_an_end(*others, more_files=3)

    steps_before = min(len(run.handed(name)) for name in names)
    together = global_order(run, others)
    begins = ids_below(end).index(together[0])
    assert (steps_before - 1) * 4 * BATCH <= begins <= steps_before * 4 * BATCH, run.told()
    whole = min(len(run.handed(name)) for name in others) * after * BATCH
    assert together[:whole] == ids_below(end + 9)[begins : begins + whole], run.told()


@pytest.mark.parametrize("times", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_while_another_reads_is_handed_at_most_its_last_batch_again(run: Run, times: int) -> None:
    names = start_ranks(run, 3, pause_seconds=0.01)
    run.wait_for_batches(1, "r2")
    run.disturb(["r0", "r1"], times, signal.SIGKILL, signal.SIGTERM, longest_seconds=0.06)
    run.wait_for_batches(1, *names)
    end = run.come_to_an_end(*names, more_files=3)

    assert run.num_repeats(end) <= times
    every = ids_below(end + 9)
    for rank, name in enumerate(names):
        batches = [line["ids"] for line in run.handed(name)]
        kept = [ids for ids, following in itertools.zip_longest(batches, batches[1:]) if ids != following]
        mine = [every[at : at + BATCH] for at in range(rank * BATCH, len(every), 3 * BATCH)]
        assert kept == mine[: len(kept)], f"{name}\n{run.told()}"
    run.check_nothing_is_left()


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_ranks_that_are_all_dead_at_once_go_on_where_the_slowest_was_and_count_what_comes_again(
    run: Run, times: int
) -> None:
    names = start_ranks(run, 3)
    begins = [0]
    for _ in range(times):
        run.wait_for_batches(run.chance.randrange(1, 6), *names)
        run.pause(0.05)
        run.kill(*names)
        slowest = min(steps_of(run, name, run.pid(name))[-1] for name in names)
        run.start_again(*names)
        run.wait_for_batches(1, *names)
        (begin,) = {steps_of(run, name, run.pid(name))[0] for name in names}
        assert begin in (slowest, slowest + 1), f"{begins}\n{run.told()}"
        begins.append(begin)
    end = run.come_to_an_end(*names, more_files=3)

    run.num_repeats(end)
    for name in names:
        pids = list(dict.fromkeys(line["pid"] for line in run.handed(name)))
        for begin, steps in zip(begins, (steps_of(run, name, pid) for pid in pids), strict=True):
            assert steps == [*range(begin, begin + len(steps))], f"{name}\n{run.told()}"
    run.check_nothing_is_left()
