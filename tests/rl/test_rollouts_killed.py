"""Generators and trainers that are killed at any moment: no prompt is lost, and none is used twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from batchwright import RolloutLog
from batchwright import journal as journal_module
from batchwright.rollout_log.status import history, status

ROLLING = Path(__file__).with_name("rolling.py")
NUM_ORDINALS = 200


def roll(folder: Path, seed: int, num_kills: int) -> None:
    """Run until everything is used, with so many kills on the way; then account for every prompt."""
    folder.mkdir()
    ran = subprocess.run(
        [sys.executable, ROLLING, folder, str(seed), str(num_kills)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["killed"] == num_kills
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


@pytest.mark.parametrize("seed", [0, 1])
def test_after_50_kills_every_prompt_was_used_exactly_once(tmp_path, seed):
    roll(tmp_path / "run", seed, num_kills=25)  # in each of two logs; in the second one, leases end by time too


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
def test_after_200_kills_every_prompt_was_used_exactly_once(tmp_path, seed):
    roll(tmp_path / "run", seed, num_kills=25)


# At every write


def killed_in_a_child(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch, nth_write: int, share: float) -> bool:
    """Do some work in a child that is killed in the middle of its nth write. False: it had done all before."""
    pid = os.fork()
    if pid:
        _, ended = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(ended) or os.WEXITSTATUS(ended) == 0
        return os.WIFSIGNALED(ended)
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

    try:
        monkeypatch.setattr(journal_module.os, "writev", write_a_part)
        work()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99, 1.0], ids=["before", "early", "late", "after"])
def test_a_process_killed_in_the_middle_of_any_write_loses_nothing(tmp_path, monkeypatch, share):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # what a killed process wrote is not lost with it
    monkeypatch.setattr(journal_module, "_sync", lambda descriptor: None)
    prompts = [f"prompt {n}" for n in range(6)]

    def work() -> None:
        """All that is written by generators and trainers, once."""
        with RolloutLog(folder, prompts, group_size=1, seed=0, lease_seconds=0.001, max_attempts=99) as log:
            jobs = log.next_prompts(6)
            log.heartbeat()
            log.give_back(jobs[5])
            for job in jobs[:4]:
                log.add(job, ["yes"], [1.0], policy_version=job.ordinal)
            log.add(jobs[0], ["yes"], [1.0])
            log.take(2, policy_version=2, max_staleness=1)
            log.drop(4, "no")

    nth_write, was_killed = 0, True
    while was_killed:
        nth_write += 1
        folder = tmp_path / f"log-{nth_write}"
        was_killed = killed_in_a_child(work, monkeypatch, nth_write, share)
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
