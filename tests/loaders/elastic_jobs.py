"""Ranks of jobs that are killed and come back, for tests: what one rank does, its stores, and what a life left.

A job is {"sources" or "loader", "settings", "world_size", "batch_size", "checkpoint_steps", "stop_at_step"}, and what
it goes on from: {"plan", "state"}. Settings are those of a loader; "batching" are those of `Batching` besides its size.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import batchwright as bw
from batchwright.base.files import write_whole
from harness import Processes, say, stand_still
from shared import bake_source

_FIELDS = ("input_ids", "targets", "loss_mask", "attention_mask", "segment_ids", "position_ids")


def bake_in_order(path: Path, rows: Any, step: Any = None, name: str = "text") -> str:
    """A store of one source that keeps the order of its documents, so that more of them make it grow."""
    return str(bake_source(path, rows, step, name=name, shuffle=False).path)


def bake_sources(raw: Path, folder: Path) -> dict[str, str]:
    """web (474 rows of 16 tokens), code (149) and notes (61)."""
    return {
        "web": bake_in_order(folder / "web.store", raw / "web" / "*.jsonl"),
        "code": bake_in_order(folder / "code.store", raw / "code" / "*.txt"),
        "notes": bake_in_order(folder / "notes.store", notes(range(50))),
    }


def notes(numbers: range) -> list[str]:
    return [f"note {n}." + " More." * (n % 5) for n in numbers]


def handed(batch: Any) -> list[list[Any]]:
    """[position, digest of what it has, as wide as it is] of each row of a batch."""
    fields = [array for name in _FIELDS if (array := getattr(batch, name)) is not None]
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
    prefetch = 2 * (rank % 2)  # whether batches are made ahead must not matter, so ranks differ in it
    if "loader" in job:  # one loader by itself, as `open_source` takes it
        delivery = replace(job["loader"].get("delivery", bw.Delivery()), prefetch=prefetch)
        own = {"rank": rank, "world_size": job["world_size"], "delivery": delivery}
        loader = open_source({**job["loader"], **own, "epochs": None, "framework": "numpy"})
        if job["state"] is not None:
            loader.load_state_dict(job["state"])
        return loader
    loader = bw.MixedDataLoader(
        {name: open_source(source) for name, source in job["sources"].items()},
        **(job["settings"] if job["plan"] is None else {"plan": job["plan"]}),
        batch_size=bw.Batching(job["batch_size"], **job["batching"]),
        epochs=None,
        framework="numpy",
        rank=rank,
        world_size=job["world_size"],
        delivery=bw.Delivery(prefetch=prefetch),
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


# In processes of their own


def read_rows(source: str, rank: int, world_size: int, state: Any, workers: int) -> None:
    """Say the rows of every step, until somebody stops it. A folder of raw files, instead of a store, is streamed."""
    is_raw = not (Path(source) / "batchwright.json").exists()
    raw = {"tokenizer": "bytes", "streaming": True, "shuffle": bw.Shuffle("window", pool_rows=100)} if is_raw else {}
    sizes = {"chunk_size": 16, "batch_size": 48, "rank": rank, "world_size": world_size}
    loader = bw.PretrainDataLoader(
        source, **sizes, seed=7, epochs=None, framework="numpy", delivery=bw.Delivery(workers=workers), **raw
    )
    if state is not None:
        loader.load_state_dict(state)
    for batch in batches(loader):
        hashes = [zlib.crc32(row.tobytes()) for row in batch.input_ids]
        say(step=loader.step - 1, hashes=hashes, state=loader.state_dict())
        time.sleep(0.002)


def train(folder: Path, job: dict[str, Any], rank: int) -> None:
    """Say what it is handed, amend when told, and wait for the other ranks after every step, as an all-reduce does.

    Rank 0 saves a state every few steps, when all have said them.
    """
    done = np.memmap(folder / "done", np.int64, "r+")
    loader = open_rank(job, rank)
    amend_if_due(loader, job["amendments"])
    for number, batch in enumerate(batches(loader), start=1):
        say(step=loader.step - 1, rows=handed(batch))
        done[rank] = number
        if number == job["most_steps"]:
            stand_still()
        while done.min() < number:
            time.sleep(0.0005)
        if rank == 0 and number % job["checkpoint_steps"] == 0:
            checkpoint = {"step": loader.step, "state": loader.state_dict()}
            write_whole(folder / "checkpoint.json", json.dumps(checkpoint).encode())
        if loader.step == job["stop_at_step"]:
            return
        amend_if_due(loader, job["amendments"])
        time.sleep(0.001)


# In the test


@dataclass
class Life:
    """What one generation of ranks did before it was killed, or until it was done."""

    first_step: int
    """The step at which it started."""
    recorded: list[list[dict[str, Any]]]
    """Of each rank, a line for every step: {"step", "rows": [[position, digest], ...]}."""
    saved_step: int
    state: dict[str, Any]
    """What rank 0 had saved last: all ranks had said the steps before `saved_step`."""

    @property
    def steps(self) -> list[tuple[int, list[list[Any]]]]:
        """(step, rows of all ranks) of each step that every rank had said."""
        return [
            (lines[0]["step"], [row for line in lines for row in line["rows"]])
            for lines in zip(*self.recorded, strict=False)
        ]


def live(
    processes: Processes,
    folder: Path,
    job: dict[str, Any],
    *,
    kill_after: tuple[int, int] | None = None,
    first_step: int = 0,
) -> Life:
    """Run the ranks of a job until they are done, or kill them all at some moment after (fewest, most steps)."""
    world_size = job["world_size"]
    folder.mkdir(parents=True)
    np.zeros(world_size, np.int64).tofile(folder / "done")
    defaults = {"settings": {}, "batching": {}, "plan": None, "state": None, "amendments": []}
    job = defaults | job | {"most_steps": kill_after and kill_after[1]}
    ranks = [f"{folder.name}-{rank}" for rank in range(world_size)]
    for rank, name in enumerate(ranks):
        processes.start(name, train, folder, job, rank)
    if kill_after is None:
        processes.finish(*ranks)
    else:
        processes.wait_for_lines(ranks, processes.chance.randint(*kill_after))
        processes.pause(0.005)
        processes.kill(*ranks)
    saved = json.loads((folder / "checkpoint.json").read_text())
    recorded = [processes.said(name) for name in ranks]
    return Life(first_step=first_step, recorded=recorded, saved_step=saved["step"], state=saved["state"])
