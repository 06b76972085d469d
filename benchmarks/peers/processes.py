"""Start a child for one task, watch its memory and that of its workers, end it when it takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["Watch", "run_child"]

_ROOT = Path(__file__).parents[2]
_LOOK_EVERY_SECONDS = 0.1


def run_child(task: dict[str, Any], *, limit_seconds: float = 600, env: dict[str, str] | None = None) -> dict[str, Any]:
    """What the child found, with "peak_mb" and "anonymous_mb" of it and its workers; or {"error": one line}."""
    with tempfile.TemporaryDirectory(prefix="batchwright-peers-") as scratch:
        out, task_file, log = Path(scratch, "out.json"), Path(scratch, "task.json"), Path(scratch, "log")
        with log.open("wb") as writer:
            spawned = time.monotonic()
            task_file.write_text(json.dumps({**task, "spawned": spawned, "out": str(out)}))
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers.child", str(task_file)],
                stdout=writer,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=_ROOT,
                env={**os.environ, **(env or {})},
            )
            watch = Watch(child.pid)
            watch.start()
            try:
                child.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                return {"error": f"not done after {limit_seconds:.0f} s", **watch.peaks()}
            finally:
                watch.is_over.set()
                _end_group(child)
        if not out.exists():
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            return {"error": f"exit code {child.returncode}: {lines[-1][:200] if lines else 'no output'}"}
        found: dict[str, Any] = json.loads(out.read_text())
        if "error" in found:
            sys.stderr.write(log.read_text(errors="replace")[-2000:])
        return {**found, **watch.peaks()}


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End the child and whatever workers it left: they are in a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, 9)
    child.wait()


class Watch(threading.Thread):
    """Looks at the memory of a process and its descendants now and then, and remembers the most."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.is_over = pid, threading.Event()
        self.resident_kb = self.anonymous_kb = 0

    def run(self) -> None:
        while not self.is_over.wait(_LOOK_EVERY_SECONDS):
            resident, anonymous = _memory_kb(self.pid)
            self.resident_kb, self.anonymous_kb = max(self.resident_kb, resident), max(self.anonymous_kb, anonymous)

    def peaks(self) -> dict[str, float]:
        return {"peak_mb": self.resident_kb * 1024 / 1e6, "anonymous_mb": self.anonymous_kb * 1024 / 1e6}


def _memory_kb(pid: int) -> tuple[int, int]:
    """(resident, anonymous) of a process and all its descendants. Memory that they share counts once for each."""
    resident = anonymous = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                resident += int(line.split()[1])
            elif line.startswith("RssAnon:"):
                anonymous += int(line.split()[1])
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except (OSError, ValueError):  # it is gone
        return resident, anonymous
    for child in children:
        more_resident, more_anonymous = _memory_kb(child)
        resident, anonymous = resident + more_resident, anonymous + more_anonymous
    return resident, anonymous
