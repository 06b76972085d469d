"""Generators and ranks of a trainer over one rollout log, each a process that somebody will kill.

python rollout_jobs.py generate LOG
python rollout_jobs.py train LOG RANK WORLD_SIZE STATE_FILE OUT_FILE
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

import batchwright as bw

PROMPTS = [{"prompt": f"{a} + {b} = ", "answer": a + b} for a in range(8) for b in range(8)]
GROUP_SIZE, BATCH_ROWS = 4, 24


def generate(folder: str) -> None:
    log = bw.RolloutLog(folder, prompts=PROMPTS, group_size=GROUP_SIZE, seed=1, lease_seconds=30, ahead=24)
    while not log.is_over:
        jobs = log.next_prompts(3, timeout=0.2)
        for job in jobs:
            responses = [str(job.fields["answer"] + random.randint(-1, 1)) for _ in range(GROUP_SIZE)]
            rewards = [float(int(answer) == job.fields["answer"]) for answer in responses]
            log.add(job, responses=responses, rewards=rewards, policy_version=0)


def train(folder: str, rank: str, world_size: str, state_file: str, out_file: str) -> None:
    log = bw.RolloutLog(folder)
    loader = bw.RolloutDataLoader(
        log,
        "bytes",
        True,
        batch_size=BATCH_ROWS,
        rank=int(rank),
        world_size=int(world_size),
        balance=True,
        timeout=30,
        framework="numpy",
    )
    with open(state_file) as file:
        state = json.load(file)
    if state is not None:
        loader.load_state_dict(state)
    out = os.open(out_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for batch in loader:
        rows = zip(
            batch.metadata["position"].tolist(),
            batch.metadata["ordinal"].tolist(),
            batch.metadata["answer"].tolist(),
            batch.metadata["weight"].tolist(),
            strict=True,
        )
        line = {"step": loader.step - 1, "state": loader.state_dict(), "tokens": batch.metadata["global_tokens"]}
        line["rows"] = [[position, ordinal, answer] for position, ordinal, answer, weight in rows if weight]
        os.write(out, json.dumps(line).encode() + b"\n")
        time.sleep(0.01)


if __name__ == "__main__":
    {"generate": generate, "train": train}[sys.argv[1]](*sys.argv[2:])
