"""Two generators and two ranks of a trainer over one log, killed at random moments and started again until it is over.

    python rolling.py FOLDER SEED NUM_KILLS

Prints what happened as JSON; the folder has the log, and the last checkpoint of each rank. Processes are forks of this
one, which has no log open itself: so that 50 of them start in a second.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import batchwright.journal
from batchwright.files import write_whole
from batchwright.rollout_log import RolloutLog

NUM_PROMPTS = 100
EPOCHS = 2
STEP_GROUPS = 4
CHECKPOINT_STEPS = 3
MAX_STALENESS = 4

batchwright.journal._sync = lambda descriptor: None  # a killed process loses nothing that it wrote; a power cut would


def settings(seed: int) -> dict[str, Any]:
    """In some logs leases end by time too, so that answers come late."""
    return {
        "prompts": [{"prompt": f"prompt {n}"} for n in range(NUM_PROMPTS)],
        "group_size": 2,
        "seed": seed,
        "epochs": EPOCHS,
        "lease_seconds": 0.05 if seed % 2 else 600.0,
        "max_attempts": 10_000,
        "ahead": 24,
    }


def generate(folder: Path, seed: int, draw: random.Random) -> None:
    log = RolloutLog(folder / "log", **settings(seed))
    slow = []
    while True:
        jobs = log.next_prompts(draw.randint(1, 4), timeout=0.02)
        if not jobs and log.is_over:
            return
        for job in jobs:
            time.sleep(draw.random() * 0.002)
            is_early = job.ordinal >= NUM_PROMPTS * EPOCHS - 20 and not (folder / "enough").exists()
            if is_early or draw.random() < 0.03:
                log.give_back(job, "not in the mood")
            elif seed % 2 and draw.random() < 0.05:
                slow.append(job)  # its lease will end before it answers
            else:
                answer(log, job, restored(folder)["step"])
        if slow and draw.random() < 0.2:
            answer(log, slow.pop(), 0)


def answer(log: RolloutLog, job: Any, version: int) -> None:
    responses = [f"{job.prompt}, {job.ordinal}, {job.attempt}, {n}" for n in range(2)]
    log.add(job, responses, [float(job.ordinal), 0.0], policy_version=version)


def train(folder: Path, seed: int, draw: random.Random, rank: int) -> None:
    log = RolloutLog(folder / "log")
    state = restored(folder, rank)
    while True:
        first, step = len(state["used"]), state["step"]
        target = first + STEP_GROUPS
        have = log.take(target, policy_version=step, max_staleness=MAX_STALENESS, timeout=0.02)
        is_over = log.is_over
        if have < target and not is_over:
            continue
        groups = log.groups(first, min(log.num_taken, target))
        for group in groups:
            assert group.responses[1] == f"prompt {group.row}, {group.ordinal}, {group.attempt}, 1", group
        time.sleep(draw.random() * 0.004)
        state = {"step": step + 1, "used": state["used"] + [[group.ordinal, group.attempt] for group in groups]}
        if state["step"] % CHECKPOINT_STEPS == 0 or len(groups) < STEP_GROUPS:
            write_whole(folder / f"checkpoint-{rank}.json", json.dumps(state).encode())
        if len(groups) < STEP_GROUPS:
            return


def restored(folder: Path, rank: int = 0) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / f"checkpoint-{rank}.json").read_bytes())
    except FileNotFoundError:
        return {"step": 0, "used": []}
    return state


WORKS = (generate, generate, partial(train, rank=0), partial(train, rank=1))


def started(work: Any, folder: Path, seed: int, number: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work(folder, seed, random.Random(seed * 1000 + number))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(folder: Path, seed: int, num_kills: int) -> dict[str, Any]:
    draw = random.Random(seed)
    RolloutLog(folder / "log", **settings(seed)).close()
    works = {started(work, folder, seed, number): work for number, work in enumerate(WORKS)}
    killed, number = 0, len(works)
    while works:
        time.sleep(draw.random() * 0.02)
        while (ended := os.waitpid(-1, os.WNOHANG) if works else (0, 0))[0]:
            pid, status = ended
            works.pop(pid)
            if status:
                raise SystemExit(f"a process failed: {status}")
        if killed == num_kills:
            (folder / "enough").touch()  # until then the last prompts are not answered
        victims = list(works) if draw.random() < 0.1 else draw.sample(list(works), min(1, len(works)))
        for pid in victims:
            if killed >= num_kills:
                break
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            work = works.pop(pid)
            if not os.WIFSIGNALED(status):  # it was done, just now
                continue
            killed += 1
            number += 1
            works[started(work, folder, seed, number)] = work
    return {"killed": killed}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
