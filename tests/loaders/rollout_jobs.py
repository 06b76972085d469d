"""Generators and ranks of a trainer over one rollout log, each a process that somebody will kill."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import batchwright as bw
from harness import SECONDS, say, stand_still

PROMPTS = [{"prompt": f"{a} + {b} = ", "answer": a + b} for a in range(8) for b in range(8)]
GROUP_SIZE, BATCH_ROWS = 4, 24


def generate(folder: Path) -> None:
    log = bw.RolloutLog(folder, prompts=PROMPTS, group_size=GROUP_SIZE, seed=1, lease_seconds=30, ahead=24)
    while not log.is_over:
        jobs = log.next_prompts(3, timeout=0.2)
        for job in jobs:
            responses = [str(job.fields["answer"] + random.randint(-1, 1)) for _ in range(GROUP_SIZE)]
            rewards = [float(int(answer) == job.fields["answer"]) for answer in responses]
            log.add(job, responses=responses, rewards=rewards, policy_version=0)


def train(folder: Path, rank: int, world_size: int, state: Any, most_steps: int | None) -> None:
    loader = bw.RolloutDataLoader(
        bw.RolloutLog(folder),
        "bytes",
        True,
        batch_size=bw.Batching(BATCH_ROWS, balance=True),
        rank=rank,
        world_size=world_size,
        timeout=SECONDS,
        framework="numpy",
    )
    if state is not None:
        loader.load_state_dict(state)
    for number, batch in enumerate(loader, start=1):
        rows = zip(
            batch.metadata["position"].tolist(),
            batch.metadata["ordinal"].tolist(),
            batch.metadata["answer"].tolist(),
            batch.metadata["weight"].tolist(),
            strict=True,
        )
        rows = [[position, ordinal, answer] for position, ordinal, answer, weight in rows if weight]
        say(step=loader.step - 1, state=loader.state_dict(), tokens=batch.metadata["global_tokens"], rows=rows)
        if number == most_steps:
            stand_still()
        time.sleep(0.01)
