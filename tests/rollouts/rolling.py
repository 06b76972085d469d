"""Two generators and two ranks of a trainer over one log: jobs that are killed and started again until it is over.

The last prompts are not answered before the file `enough` is there, so that no process is done too early.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import batchwright.base.journal
from batchwright.base.files import write_whole
from batchwright.rollouts.log.log import RolloutLog
from harness import say

NUM_PROMPTS = 100
EPOCHS = 2
STEP_GROUPS = 4
CHECKPOINT_STEPS = 3
MAX_STALENESS = 4
LEASE_SECONDS = 0.5


def settings(seed: int) -> dict[str, Any]:
    """In some logs leases end by time too, so that answers come late."""
    return {
        "prompts": [{"prompt": f"prompt {n}"} for n in range(NUM_PROMPTS)],
        "group_size": 2,
        "seed": seed,
        "epochs": EPOCHS,
        "lease_seconds": LEASE_SECONDS if seed % 2 else 600.0,
        "max_attempts": 10_000,
        "ahead": 24,
    }


def generate(folder: Path, seed: int) -> None:
    log, draw = RolloutLog(folder / "log", **settings(seed)), _begin()
    late: list[tuple[float, Any]] = []
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
                late.append((time.monotonic() + LEASE_SECONDS, job))  # its lease has ended when it answers
            else:
                answer(log, job, restored(folder)["step"])
        if late and late[0][0] < time.monotonic():
            answer(log, late.pop(0)[1], 0)


def answer(log: RolloutLog, job: Any, version: int) -> None:
    responses = [f"{job.prompt}, {job.ordinal}, {job.attempt}, {n}" for n in range(2)]
    log.add(job, responses, [float(job.ordinal), 0.0], policy_version=version)


def train(folder: Path, rank: int) -> None:
    log, draw = RolloutLog(folder / "log"), _begin()
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


def _begin() -> random.Random:
    batchwright.base.journal._sync = lambda descriptor: None  # a killed process loses nothing that it wrote
    say(event="began")
    return random.Random(os.getpid())
