"""Providers and consumers as processes of their own, for tests that kill them, and the log of what was handed out.

Every row has an id that says where it is from: row 5 of file 7 is 7005. Each function runs in a process that `Run`
forks from a server, so that one that was killed is there again at once. Whatever a consumer is handed is a line of one
file that all append to; a batch that is in no line was never handed out, one that is in two was handed out twice.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from batchwright.files import write_whole
from batchwright.queue.consumer import DatasetConsumer
from batchwright.queue.provider import DataProviderBase

BATCH = 3
BATCHES_PER_FILE = 4
FILE_ROWS = BATCH * BATCHES_PER_FILE
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pytest", "batchwright.queue.provider", "batchwright.queue.consumer"])
T = TypeVar("T")


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


def provide(folder: str, name: str, job: dict[str, Any]) -> None:
    """Make files until a signal ends it."""
    out = _prepare(folder, name, job)
    Rows.pause_seconds = job.get("pause_seconds", 0.001)
    Rows.fork_at = job.get("fork_at")
    _say(out, name, event="began")
    try:
        rows_provider(job["data_dir"], **job.get("settings", {})).run(("train",))
    except Exception as error:
        _say_error(out, name, error)


def consume(folder: str, name: str, job: dict[str, Any]) -> None:
    """Write down what is handed out, until the file `end` names a number that is reached.

    `commit_every`: commit after so many batches. `save_every`: write the state after so many, and begin at it.
    """
    out = _prepare(folder, name, job)
    rng = random.Random(os.getpid())
    saved, end = Path(folder) / f"{name}.state", Path(folder) / "end"
    try:
        with DatasetConsumer(
            job["data_dir"], framework="numpy", **({"timeout_seconds": 20} | job.get("settings", {}))
        ) as consumer:
            begins = None
            if job.get("save_every") and saved.exists():
                state = json.loads(saved.read_text())
                consumer.load_state_dict(state)
                begins = state["train"]["file"] * 1000 + state["train"]["batch"] * BATCH + state["train"].get("row", 0)
            _say(out, name, event="began", at=begins)
            num_batches = 0
            while True:
                x, y = consumer.get_batch("train")
                num_batches += 1
                told = consumer.stats()["train"]
                names = ("redelivered_batches", "quarantined_files", "lost_claims")
                _say(out, name, ids=x[:, 0].tolist(), drawn=y[:, 0].tolist(), **{key: told[key] for key in names})
                if end.exists() and int(x[-1, 0]) // 1000 >= int(end.read_text()):
                    break
                if job.get("commit_every") and num_batches % job["commit_every"] == 0:
                    consumer.commit()
                    _say(out, name, event="committed", after=int(x[-1, 0]))
                if job.get("save_every") and num_batches % job["save_every"] == 0:
                    write_whole(saved, json.dumps(consumer.state_dict()).encode())
                    consumer.commit()  # a checkpoint that is safe
                time.sleep(rng.uniform(0.3, 1) * job.get("pause_seconds", 0.002))
    except Exception as error:
        _say_error(out, name, error)


def _prepare(folder: str, name: str, job: dict[str, Any]) -> int:
    os.dup2(os.open(Path(folder) / f"{name}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), 2)
    out = os.open(Path(folder) / "log.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    if "uid" in job:
        DatasetConsumer(provider=rows_provider("nowhere"), framework="numpy").get_batch("train")  # imports all it needs
        os.setgroups([])
        os.setgid(job["uid"])
        os.setuid(job["uid"])
    if "clock_seed" in job:
        rng, now = random.Random(job["clock_seed"]), time.time
        time.time = lambda: now() + rng.uniform(-1, 1) * 24 * 3600
    return out


def _say(out: int, name: str, **told: Any) -> None:
    # One write: a line is there or it is not, but for one that a kill tore. Nothing is glued to that one.
    os.write(out, b"\n" + json.dumps({"who": name, "pid": os.getpid(), **told}).encode() + b"\n")


def _say_error(out: int, name: str, error: Exception) -> None:
    _say(out, name, event="error", kind=type(error).__name__, text=str(error))


# In the test


class Run:
    """Processes over one queue: started, killed, started again; and what they wrote down."""

    def __init__(self, folder: Path, seed: int, **settings: Any) -> None:
        self.folder = folder
        self.data_dir = folder / "data"
        self.data_dir.mkdir(exist_ok=True)
        self.queue = self.data_dir / "queue"
        self.seed = seed
        self.rng = random.Random(seed)
        self.settings = settings
        self.processes: list[Any] = []
        self.jobs: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {}
        self.at: dict[str, Any] = {}
        self._log: list[dict[str, Any]] = []
        self._log_bytes = 0
        self.expects_errors = False

    def start(self, function: Callable[..., None], name: str, **job: Any) -> Any:
        """A process with a name. The same name again: the same job, in a new process."""
        if function is not provide:
            self.wait_for("queue", (self.queue / "meta.json").exists)
        self.jobs[name] = function, {"data_dir": str(self.data_dir)} | self.settings | job
        return self.start_again(name)

    def start_again(self, name: str) -> Any:
        function, job = self.jobs[name]
        process = _CONTEXT.Process(target=function, args=(str(self.folder), name, job), name=name)
        process.start()
        self.processes.append(process)
        self.at[name] = process
        return process

    def send(self, name: str, number: int) -> None:
        os.kill(self.at[name].pid, number)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.send(name, number)
        self.at[name].join()

    def disturb(self, names: list[str], times: int, *signals: int, longest_seconds: float = 0.03) -> None:
        """Signals to one of them after the other, at random moments; each is started again."""
        for _ in range(times):
            name = self.rng.choice(names)
            if self.rng.random() < 0.9:  # the others while they start
                self.wait_for("beginning", lambda pid=self.at[name].pid: any(line["pid"] == pid for line in self.log()))
            time.sleep(self.rng.uniform(0, longest_seconds))
            self.kill(name, self.rng.choice(signals or (signal.SIGKILL,)))
            self.start_again(name)

    def limit_file_bytes(self, name: str, num_bytes: int) -> None:
        """What a process may write: less than a file has is a full disk, for it."""
        resource.prlimit(self.at[name].pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    # What they wrote down

    def log(self) -> list[dict[str, Any]]:
        path = self.folder / "log.jsonl"
        if path.exists():
            with open(path, "rb") as file:
                file.seek(self._log_bytes)
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            self._log_bytes += len(new)
            for line in new.splitlines():
                with suppress(ValueError):  # torn: as if its writer had been killed just before
                    self._log.append(json.loads(line))
        return self._log

    def handed(self, *names: str) -> list[dict[str, Any]]:
        return [line for line in self.log() if "ids" in line and (not names or line["who"] in names)]

    def errors(self) -> list[dict[str, Any]]:
        return [line for line in self.log() if line.get("event") == "error"]

    def last_file(self) -> int:
        return max((line["ids"][-1] // 1000 for line in self.handed()), default=-1)

    def wait_for(self, what: str, look: Callable[[], T], seconds: float = 60) -> T:
        """What `look` gives, once it gives something."""
        until = time.monotonic() + seconds
        while not (found := look()):
            assert time.monotonic() < until, f"no {what} after {seconds} s\n{self.told()}"
            assert not self.errors() or self.expects_errors, f"an error instead of {what}\n{self.told()}"
            time.sleep(0.005)
        return found

    def wait_for_batches(self, num_batches: int = 1) -> None:
        """Until so many more were handed out."""
        enough = len(self.handed()) + num_batches
        self.wait_for("batches", lambda: len(self.handed()) >= enough)

    def finish(self, *consumers: str, more_files: int = 2) -> int:
        """Let consumers come to the end of a file that nobody has begun, and stop all. That file's number."""
        end = max(self.last_file(), 0) + more_files
        write_whole(self.folder / "end", str(end).encode())
        os.chmod(self.folder / "end", 0o644)
        for name in consumers:
            self.at[name].join(60)
            assert self.at[name].exitcode == 0, self.told()
        self.stop_providers()
        assert not self.errors(), self.told()
        return end

    def stop_providers(self) -> None:
        providers = [name for name, (function, _) in self.jobs.items() if function is provide]
        for name in providers:
            self.send(name, signal.SIGTERM)
        for name in providers:
            self.at[name].join(20)
            assert self.at[name].exitcode in (0, -signal.SIGTERM), self.told()  # the second: before it ran

    def told(self) -> str:
        """For a failure: the seed, who said what, and what lies there."""
        said = [f"seed {self.seed}"]
        said += [f"{name}: {process.exitcode}" for name, process in self.at.items()]
        said += [
            f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.err") if path.stat().st_size
        ]
        said += [json.dumps(line) for line in self.log()[-30:]]
        said += sorted(str(path.relative_to(self.folder)) for path in self.queue.rglob("*") if path.is_file())
        return "\n".join(said)

    def close(self) -> None:
        forked = self.folder / "forked"
        if forked.exists():  # no child of ours
            with suppress(ProcessLookupError):
                os.kill(int(forked.read_text()), signal.SIGKILL)
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()

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
