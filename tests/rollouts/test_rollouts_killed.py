"""Generators and trainers that are killed at any moment: no prompt is lost, and none is used twice."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from rolling import generate, settings, train

from batchwright import RolloutLog
from batchwright.base import journal as journal_module
from batchwright.rollouts.log.status import history, status
from harness import Processes

NUM_ORDINALS = 200


def roll(processes: Processes, folder: Path, seed: int, num_kills: int) -> None:
    """Run until everything is used, with so many kills on the way; then account for every prompt."""
    folder.mkdir()
    RolloutLog(folder / "log", **settings(seed)).close()
    for number in range(2):
        processes.start(f"generator-{number}", generate, folder, seed)
        processes.start(f"rank-{number}", train, folder, number)
    names = ["generator-0", "generator-1", "rank-0", "rank-1"]
    processes.disturb(names, num_kills, longest_seconds=0.05)
    processes.kill(*names)
    processes.start_again(*names)
    (folder / "enough").touch()
    processes.finish(*names)
    facts = status(folder / "log")
    assert (facts["lost"], facts["used_twice"], facts["is_over"]) == ([], [], True)
    assert (facts["cursor"], facts["taken"], facts["dropped"]) == (NUM_ORDINALS, NUM_ORDINALS, {})
    with RolloutLog(folder / "log", read_only=True) as log:
        stream = [[group.ordinal, group.attempt] for group in log.groups(0, NUM_ORDINALS)]
    assert sorted(ordinal for ordinal, _ in stream) == list(range(NUM_ORDINALS))
    for rank in (0, 1):
        # What this rank had used by its last checkpoint, over all that it restored on the way.
        assert json.loads((folder / f"checkpoint-{rank}.json").read_bytes())["used"] == stream
    assert max(attempt for _, attempt in stream) > 1, "no kill hit a process that held a prompt"


@pytest.mark.parametrize("num_kills", [6, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, 1])
def test_after_kills_every_prompt_was_used_exactly_once(processes, tmp_path, seed, num_kills):
    roll(processes, tmp_path / "run", seed, num_kills)  # in two logs; in the second one, leases end by time too


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
def test_after_200_kills_every_prompt_was_used_exactly_once(processes, tmp_path, seed):
    roll(processes, tmp_path / "run", seed, num_kills=25)


# At every write


def generate_and_train_once(folder: Path, prompts: list[str], nth_write: int, share: float) -> None:
    """All that is written by generators and trainers, once; killed in the middle of the nth write."""
    os.fsync = lambda descriptor: None  # what a killed process wrote is not lost with it
    journal_module._sync = lambda descriptor: None
    num_writes = 0
    write = os.writev

    def write_a_part(descriptor: int, parts) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes == nth_write:
            data = b"".join(parts)
            os.write(descriptor, data[: int(len(data) * share)])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, parts)

    os.writev = write_a_part
    with RolloutLog(folder, prompts, group_size=1, seed=0, lease_seconds=0.001, max_attempts=99) as log:
        jobs = log.next_prompts(6)
        log.heartbeat()
        log.give_back(jobs[5])
        for job in jobs[:4]:
            log.add(job, ["yes"], [1.0], policy_version=job.ordinal)
        log.add(jobs[0], ["yes"], [1.0])
        log.take(2, policy_version=2, max_staleness=1)
        log.drop(4, "no")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99, 1.0], ids=["before", "early", "late", "after"])
def test_a_process_killed_in_the_middle_of_any_write_loses_nothing(processes, tmp_path, monkeypatch, share):
    monkeypatch.setattr(journal_module, "_sync", lambda descriptor: None)
    prompts = [f"prompt {n}" for n in range(6)]
    nth_write, name = 0, ""
    while nth_write == 0 or processes.exit_code(name) != 0:  # until one has done all before its nth write
        nth_write += 1
        folder, name = tmp_path / f"log-{nth_write}", f"killed-in-write-{nth_write}"
        processes.start(name, generate_and_train_once, folder, prompts, nth_write, share)
        assert processes.wait_for_end(name) in (0, -signal.SIGKILL), processes.told()
        with RolloutLog(folder, prompts, group_size=1, seed=0) as log:
            while not log.is_over:
                for job in log.next_prompts(9):
                    assert log.add(job, ["yes"], [1.0], policy_version=9)
                log.take(6)
        facts = status(folder)
        assert (facts["lost"], facts["used_twice"]) == ([], [])
        assert facts["taken"] + len(facts["dropped"]) == 6
    assert nth_write > 12


# A trainer that goes back


def test_a_trainer_that_restores_an_older_checkpoint_gets_the_same_groups_again(tmp_path):
    folder = tmp_path / "log"
    with RolloutLog(folder, [f"prompt {n}" for n in range(8)], group_size=1) as log:
        for job in reversed(log.next_prompts(8)):
            log.add(job, [f"to {job.prompt}"], [0.0], policy_version=job.ordinal)

        def trained(first: int, last: int, version: int) -> list[str]:
            with RolloutLog(folder) as mine:
                mine.take(last, policy_version=version, max_staleness=6)
                return [group.responses[0] for group in mine.groups(first, last)]

        once = trained(0, 2, 7) + trained(2, 4, 8) + trained(4, 5, 9)
        assert trained(0, 2, 7) + trained(2, 4, 8) + trained(4, 5, 9) == once
        assert log.state()["stale"] == 0
        assert status(folder, position=2)["checkpoint"] == {
            "position": 2,
            "groups_used": 2,
            "groups_to_come": 3,
            "missing": 0,
        }
        assert [event["event"] for event in history(folder, 7)["events"]] == ["issued", "answered", "taken"]
