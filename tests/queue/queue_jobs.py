"""Providers and consumers as real processes over one queue, and what is promised of the batches they hand out.

Every row has an id that says where it is from: row 5 of file 7 is 7005. Whatever a consumer is handed is a line of the
log: a batch in no line was never handed out, one in two lines was handed out twice.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.base.files import write_whole
from batchwright.queue.consumer import DatasetConsumer
from batchwright.queue.provider import DataProviderBase
from harness import Processes, say, wait_for

BATCH = 3
BATCHES_PER_FILE = 4
FILE_ROWS = BATCH * BATCHES_PER_FILE
LEASE_SECONDS = 600.0
"""Longer than any test: on a busy machine a living process may not move for a minute."""


class Rows(DataProviderBase):
    """x is a row's id, y is drawn: whether a file was made as it should be shows in y. A file has some 7,000 bytes."""

    pause_seconds = 0.0
    fork_at: int | None = None

    def build_meta(self) -> dict[str, Any]:
        sizes = {"x": 1, "y": 64}
        return {"batch_schema": [{"name": n, "dtype": "int64", "shape": [s], "role": None} for n, s in sizes.items()]}

    def batches(self, split: str, number: int) -> Iterator[Any]:
        self.next_id = number * 1000
        if number == Rows.fork_at:
            Rows.fork_at = None
            if not os.fork():
                (self.data_dir.parent / "forked").write_text(str(os.getpid()))
        return super().batches(split, number)

    def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
        time.sleep(Rows.pause_seconds)
        first, self.next_id = self.next_id, self.next_id + BATCH
        return {"x": np.arange(first, first + BATCH)[:, None], "y": rng.integers(0, 1 << 40, (BATCH, 64))}


def rows_provider(data_dir: Path | str, **given: Any) -> Rows:
    settings = {"batches_per_file": BATCHES_PER_FILE, "max_backlog_files": 2, "sleep_seconds": 0.05, "seed": 7}
    return Rows(data_dir, BATCH, **(settings | given))


@cache
def rows_of(number: int, split: str = "train") -> dict[int, int]:
    """What a file holds: id to what was drawn."""
    made: dict[int, int] = {}
    for x, y in rows_provider("nowhere").batches(split, number):
        made |= dict(zip(x[:, 0].tolist(), y[:, 0].tolist(), strict=True))
    return made


def ids_below(number: int) -> list[int]:
    """Every id of the files before one, in order."""
    return [id for file in range(number) for id in rows_of(file)]


# In processes of their own


def provide(data_dir: str, job: dict[str, Any]) -> None:
    """Make files until a signal ends it."""
    _prepare(job)
    Rows.pause_seconds = job.get("pause_seconds", 0.001)
    Rows.fork_at = job.get("fork_at")
    say(event="began")
    rows_provider(data_dir, **job.get("settings", {})).run(("train",))


def consume(data_dir: str, job: dict[str, Any]) -> None:
    """Write down what is handed out, until the file `end` names a number that is reached.

    `commit_every`: commit after so many batches. `save_every`: write `state` after so many, and begin at it.
    """
    _prepare(job)
    rng = random.Random(os.getpid())
    saved, end = Path(job["state"]), Path(data_dir).parent / "end"
    settings = {"timeout_seconds": 240, "lease_seconds": LEASE_SECONDS} | job.get("settings", {})
    with DatasetConsumer(data_dir, framework="numpy", **settings) as consumer:
        begins = None
        if job.get("save_every") and saved.exists():
            state = json.loads(saved.read_text())
            consumer.load_state_dict(state)
            begins = state["train"]["file"] * 1000 + state["train"]["batch"] * BATCH + state["train"].get("row", 0)
        say(event="began", at=begins)
        num_batches = 0
        while True:
            x, y = consumer.get_batch("train")
            num_batches += 1
            told = consumer.stats()["train"]
            names = ("redelivered_batches", "quarantined_files", "lost_claims")
            say(ids=x[:, 0].tolist(), drawn=y[:, 0].tolist(), **{key: told[key] for key in names})
            if end.exists() and int(x[-1, 0]) // 1000 >= int(end.read_text()):
                break
            if job.get("commit_every") and num_batches % job["commit_every"] == 0:
                say(event="commits", after=int(x[-1, 0]))
                consumer.commit()
                say(event="committed", after=int(x[-1, 0]))
            if job.get("save_every") and num_batches % job["save_every"] == 0:
                write_whole(saved, json.dumps(consumer.state_dict()).encode())
                consumer.commit()  # a checkpoint that is safe
            time.sleep(rng.uniform(0.3, 1) * job.get("pause_seconds", 0.002))


def _prepare(job: dict[str, Any]) -> None:
    if "uid" in job:
        DatasetConsumer(provider=rows_provider("nowhere"), framework="numpy").get_batch("train")  # imports all it needs
        os.setgroups([])
        os.setgid(job["uid"])
        os.setuid(job["uid"])
    if "clock_seed" in job:
        rng, now = random.Random(job["clock_seed"]), time.time
        time.time = lambda: now() + rng.uniform(-1, 1) * 24 * 3600


# In the test


class Run(Processes):
    """Processes over one queue, and what they were handed. `jobs`: what each process is told besides its own."""

    def __init__(self, folder: Path, **jobs: Any) -> None:
        super().__init__(folder)
        self.data_dir = folder / "data"
        self.data_dir.mkdir(exist_ok=True)
        self.queue = self.data_dir / "queue"
        self.jobs = jobs
        self.providers: set[str] = set()

    def provide(self, *names: str, **job: Any) -> None:
        for name in names:
            self.providers.add(name)
            self.start(name, provide, str(self.data_dir), self.jobs | job)

    def consume(self, *names: str, **job: Any) -> None:
        self.wait_for("queue", (self.queue / "meta.json").exists)
        for name in names:
            self.start(name, consume, str(self.data_dir), {"state": str(self.state(name))} | self.jobs | job)

    def state(self, name: str) -> Path:
        return self.folder / f"{name}.state"

    def limit_file_bytes(self, name: str, num_bytes: int) -> None:
        """What a process may write: less than a file has is a full disk, for it."""
        resource.prlimit(self.pid(name), resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    def handed(self, *names: str) -> list[dict[str, Any]]:
        return [line for line in self.said(*names) if "ids" in line]

    def last_file(self) -> int:
        return max((line["ids"][-1] // 1000 for line in self.handed()), default=-1)

    def wait_for_batches(self, num_batches: int = 1, *names: str) -> None:
        """Until so many more were handed out: together, or to each of these as it runs now."""
        if not names:
            enough = len(self.handed()) + num_batches
            self.wait_for("batches", lambda: len(self.handed()) >= enough)
        for name in names:
            mine = lambda name=name: [line for line in self.handed(name) if line["pid"] == self.pid(name)]
            self.wait_for(f"batches of {name}", lambda mine=mine: len(mine()) >= num_batches)

    def error_of(self, name: str) -> dict[str, Any]:
        """The error with which a process ends by itself: its kind and text."""
        self._signalled.add(self.pid(name))  # it may fail
        wait_for(f"end of {name}", lambda: self.exit_code(name) is not None, self.told)
        said = [line for line in self.said(name) if line["pid"] == self.pid(name) and line.get("event") == "error"]
        assert said, f"{name} ended with no error\n{self.told()}"
        return said[-1]

    def come_to_an_end(self, *consumers: str, more_files: int = 2) -> int:
        """Let consumers come to the end of a file that nobody has begun, and stop all. That file's number."""
        end = max(self.last_file(), 0) + more_files
        (self.folder / "end.part").write_text(str(end))
        os.replace(self.folder / "end.part", self.folder / "end")
        self.finish(*consumers)
        self.stop_providers()
        return end

    def stop_providers(self) -> None:
        providers = self._running(sorted(self.providers))
        self.kill(*providers, number=signal.SIGTERM)
        codes = [self.exit_code(name) for name in providers]
        assert {*codes} <= {0, -signal.SIGTERM}, self.told()  # the second: before it ran

    def told(self) -> str:
        lying = sorted(str(path.relative_to(self.folder)) for path in self.queue.rglob("*") if path.is_file())
        return "\n".join([super().told(), *lying])

    def __exit__(self, *error: object) -> None:
        forked = self.folder / "forked"
        if forked.exists():  # no child of ours
            with suppress(ProcessLookupError):
                os.kill(int(forked.read_text()), signal.SIGKILL)
        super().__exit__(*error)

    # What is promised

    def check_rows(self) -> None:
        """Every row that was handed out is the one that an undisturbed provider makes."""
        for line in self.handed():
            for id, drawn in zip(line["ids"], line["drawn"], strict=True):
                assert rows_of(id // 1000)[id] == drawn, (line, self.told())

    def num_repeats(self, end: int) -> int:
        """How many batches came more than once. Every id came, none was made up, and each repeat was counted."""
        seen: dict[int, int] = {}
        repeats: dict[int, int] = {}
        for line in self.handed():
            again = [id for id in line["ids"] if seen.get(id, line["pid"]) != line["pid"]]
            assert not any(seen.get(id) == line["pid"] for id in line["ids"]), f"twice to one: {line}\n{self.told()}"
            if again:
                repeats[line["pid"]] = repeats.get(line["pid"], 0) + 1
                assert repeats[line["pid"]] <= line["redelivered_batches"], f"not counted: {line}\n{self.told()}"
            seen |= dict.fromkeys(line["ids"], line["pid"])
        lost = sorted(set(ids_below(end)) - seen.keys())
        assert not lost, f"lost: {lost}\n{self.told()}"
        made_up = [id for id in seen if id not in rows_of(id // 1000)]
        assert not made_up, f"made up: {made_up}\n{self.told()}"
        self.check_rows()
        return sum(repeats.values())

    def check_nothing_is_left(self) -> None:
        """No members, no files of the dead, no work in progress."""
        patterns = ("who/*", "*/.*", "control/**/.*", "who/.*", "control/*/claimed/*", "quarantine/.*")
        left = {str(path.relative_to(self.queue)) for pattern in patterns for path in self.queue.glob(pattern)}
        assert not left, f"left: {sorted(left)}\n{self.told()}"


if sys.platform != "linux":  # signals, limits and watches of other systems differ in detail
    raise ImportError("these processes are for Linux")
