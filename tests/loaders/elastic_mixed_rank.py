"""One rank of a job over a mixture, which may be killed: records what it was handed, amends when told, checkpoints.

Ranks wait for each other after every step, as an all-reduce makes them wait. Rank 0 saves a state every few steps, when
all have recorded them.

python elastic_mixed_rank.py JOB_FILE RANK
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import batchwright as bw
from batchwright.files import write_whole

_FIELDS = ("input_ids", "labels", "loss_mask", "attention_mask", "segment_ids", "position_ids")


def handed(batch: Any) -> list[list[Any]]:
    """[position, digest of what it has, as wide as it is] of each row of a batch."""
    fields = [batch[name] for name in _FIELDS if name in batch]
    rows = np.concatenate(fields, axis=1)
    positions = batch.metadata["position"].tolist()
    return [[p, xxhash.xxh3_64_hexdigest(row.tobytes())] for p, row in zip(positions, rows, strict=True)]


def open_source(source: Any) -> Any:
    """A store by its path, or a loader over one: {"door": its class, "path": the store, and its settings}."""
    if isinstance(source, str):
        return source
    settings = dict(source)
    return getattr(bw, settings.pop("door"))(settings.pop("path"), **settings)


def open_rank(job: dict[str, Any], rank: int) -> Any:
    """From settings, or from files alone: a plan that is kept with the stores, and a state."""
    if "loader" in job:  # one loader by itself, as `open_source` takes it
        own = {"rank": rank, "world_size": job["world_size"], "prefetch": 2 * (rank % 2)}
        loader = open_source({**job["loader"], **own, "epochs": None, "framework": "numpy"})
        if job["state"] is not None:
            loader.load_state_dict(job["state"])
        return loader
    loader = bw.MixedDataLoader(
        {name: open_source(source) for name, source in job["sources"].items()},
        **job["delivery"],
        **(job["settings"] if job["plan"] is None else {"plan": job["plan"]}),
        batch_size=job["batch_size"],
        epochs=None,
        framework="numpy",
        rank=rank,
        world_size=job["world_size"],
        prefetch=2 * (rank % 2),  # whether batches are made ahead must not matter, so ranks differ in it
    )
    if job["state"] is not None:
        loader.load_state_dict(job["state"])
    return loader


def batches(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader.get_iterator()


def amend_if_due(loader: bw.MixedDataLoader, amendments: list[tuple[int, dict[str, Any]]]) -> None:
    """Make the next amendment where its step begins. Plans that were amended already say so themselves."""
    made = len(loader.plan.amendments)
    if made < len(amendments) and amendments[made][0] == loader.step:
        loader.amend(**amendments[made][1])


def main(job_file: Path, rank: int) -> None:
    job = json.loads(job_file.read_text())
    folder, parent = job_file.parent, os.getppid()
    done = np.memmap(folder / "done", np.int64, "r+")
    out = os.open(folder / f"{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    loader = open_rank(job, rank)
    amend_if_due(loader, job["amendments"])
    for number, batch in enumerate(batches(loader), start=1):
        line = json.dumps({"step": loader.step - 1, "rows": handed(batch)})
        os.write(out, line.encode() + b"\n")  # one write: a reader may see half of the last line, never a mixed one
        done[rank] = number
        # After `most_steps` it waits to be killed, so that a slow test does not come too late.
        while done.min() < number or number == job["most_steps"]:
            time.sleep(0.0005)
            if os.getppid() != parent:
                sys.exit("nobody waits for this rank")
        if rank == 0 and number % job["checkpoint_steps"] == 0:
            checkpoint = {"step": loader.step, "state": loader.state_dict()}
            write_whole(folder / "checkpoint.json", json.dumps(checkpoint).encode())
        if loader.step == job["stop_at_step"]:
            return
        amend_if_due(loader, job["amendments"])
        time.sleep(0.001)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
