"""Jobs over a mixed shard pool, for tests: ranks of a torch.distributed job, and trainers that will be killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np

from batchwright import StreamingMixedShardDataset
from batchwright.base.files import write_whole
from harness import descendants, say, stand_still, wait_for

BATCH = 8
CHECKPOINT_STEPS = 2


def write_shards(folder: Path, sizes: list[int], extension: str = "npz", cells: int = 2) -> str:
    """Positions with an id, in shards of so many."""
    folder.mkdir()
    first = 0
    for number, rows in enumerate(sizes):
        path, ids = folder / f"shard_{number:04}.{extension}", np.arange(first, first + rows)
        if extension == "npz":
            np.savez(path, id=ids, board=np.repeat(ids, cells).reshape(rows, cells))
        else:
            path.write_text("".join(json.dumps({"id": n, "board": [n] * cells}) + "\n" for n in ids.tolist()))
        first += rows
    return str(folder)


def open_pool(job: dict[str, Any], **given: Any) -> StreamingMixedShardDataset:
    """The stream of a job, at the state that it was given."""
    settings = {"pool_size": 96, "refill_threshold": 64, "random_seed": 7, "batch_size": BATCH}
    ds = StreamingMixedShardDataset([job["shards"]], ["all"], **(settings | job.get("settings", {}) | given))
    if job.get("state") is not None:
        ds.load_state_dict(job["state"])
    return ds


def run_rank(folder: str, job: dict[str, Any], rank: int) -> None:
    """One rank of a job: says the ids of each batch and the state after it, until all ranks have no more.

    After every step the ranks wait for each other, as an optimiser makes them wait. Rank 0 saves its state every few
    steps, once all have said them.
    """
    import torch

    _begin()
    group = torch.distributed.init_process_group
    group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=job["world_size"])
    ds = open_pool(job)
    batches = iter(ds.loader(num_workers=job["num_workers"]))
    step = 0
    while True:
        batch = next(batches, None)
        if batch is not None:
            say(ids=batch["id"].tolist(), state=ds.state_dict())
        num_with_batch = torch.tensor(int(batch is not None))
        torch.distributed.all_reduce(num_with_batch)
        if not num_with_batch:
            break
        step += 1
        if rank == 0 and num_with_batch == job["world_size"] and step % CHECKPOINT_STEPS == 0:
            write_whole(Path(folder) / "checkpoint.json", json.dumps({"step": step, "state": ds.state_dict()}).encode())
        if step == job.get("wait_at_step"):
            stand_still()
    torch.distributed.destroy_process_group()


def train_until_killed(job: dict[str, Any]) -> None:
    """Draw a few batches, so that all who decode and draw for this process run."""
    _begin()
    batches = iter(open_pool(job).loader(num_workers=job["num_workers"]))
    for _ in range(2 * max(1, job["num_workers"])):
        next(batches)
    stand_still(drawn=True)


def train_past_a_dead_worker(job: dict[str, Any]) -> None:
    """One of two workers gets a SIGKILL in mid-epoch; say what was raised, and the rest of the pass."""
    _begin()
    ds = open_pool(job)
    loader = ds.loader(num_workers=2)
    batches = iter(loader)
    handed = [next(batches)["id"].tolist() for _ in range(4)]
    threads = {thread.name for thread in threading.enumerate()}
    os.kill(multiprocessing.active_children()[-1].pid or 0, signal.SIGKILL)
    try:
        handed.extend(batch["id"].tolist() for batch in batches)
        raised = None
    except (RuntimeError, OSError, EOFError) as error:  # torch's, or that of its connection to the dead worker
        raised = str(error)
    state = loader.state_dict()
    wait_for("end of the workers", lambda: not descendants(os.getpid()))
    wait_for("end of threads", lambda: threads >= {thread.name for thread in threading.enumerate()})
    del batches
    resumed = open_pool(job | {"state": state})
    rest = [batch["id"].tolist() for batch in resumed.loader(num_workers=2)]
    say(raised=raised, state=state, handed=handed, rest=rest)


def _begin() -> None:
    """As a program that somebody started, not a fork of a server. Workers that lost their trainer end soon."""
    import torch.utils.data._utils.worker as torch_worker

    multiprocessing.set_start_method("fork", force=True)
    torch_worker.MP_STATUS_CHECK_INTERVAL = 0.5  # seconds between two looks whether the trainer lives; torch has 5
