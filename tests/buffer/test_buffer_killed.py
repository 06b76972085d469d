"""kill -9 at any moment: every change that was acknowledged is there, whole, and at most one more.

What a buffer holds is a function of its number here (see writing.py), so a copy in memory says what must be there.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

import batchwright as bw

sys.path.insert(0, str(Path(__file__).parent))
from writing import SETTINGS, fault_in, keep_versions, step, version_at, write_until_killed


class Reference:
    """The same changes in memory."""

    def __init__(self) -> None:
        self.buffer = bw.DatasetBuffer(**SETTINGS)

    def check(self, path: Path, acknowledged: int) -> int:
        """Open the folder and compare everything. The number at which it is."""
        mine = self.buffer
        with bw.DatasetBuffer(path=path) as found:
            assert acknowledged <= found.number <= acknowledged + 1
            while mine.number < found.number:
                step(mine)
            assert found.ids.tolist() == mine.ids.tolist()
            assert found.content_fingerprint() == mine.content_fingerprint()
            assert fault_in(found.to_pydict()) is None
            origins = ["id", "number", "origin"]
            assert found.provenance().select(origins) == mine.provenance().select(origins)
            names = [info.name for info in found.versions()]
            keep_versions(mine)
            kept = [info.name for info in mine.versions()]
            unfinished = {version_at(found.number), version_at(found.number - 21)} if found.number % 7 == 0 else set()
            assert {*names} ^ {*kept} <= unfinished
            for name in {*names} & {*kept}:
                assert found.at(name).content_fingerprint() == mine.at(name).content_fingerprint()
            return found.number


def killed(begin: Callable[[int], int], seconds: float) -> int:
    """Begin a writer that says its numbers into a pipe, let it write for a moment, kill it. The last that it said."""
    listen, say = os.pipe()
    process = begin(say)
    os.close(say)
    with open(listen, "rb") as said:
        first = said.readline()
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
        lines = (first + said.read()).split(b"\n")
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL, b"\n".join(lines).decode()
    return int(lines[-2])


def test_fifty_writers_that_are_killed_lose_nothing_and_double_nothing(tmp_path):
    reference, chance, at = Reference(), random.Random(0), 0

    def begin(say: int) -> int:
        process = os.fork()
        if process:
            return process
        try:
            write_until_killed(str(tmp_path / "b"), say)
        except BaseException:
            os.write(say, traceback.format_exc().encode())
        os._exit(1)

    for _ in range(50):
        before, at = at, reference.check(tmp_path / "b", killed(begin, chance.random() * 0.02))
        assert at > before
    assert at > 100


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05])
def test_a_writer_in_an_interpreter_of_its_own_that_is_killed_loses_nothing(tmp_path, seconds):
    script = Path(__file__).parent / "writing.py"

    def begin(say: int) -> int:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, str(script), str(tmp_path / "b")],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, say, 1)],
        )

    Reference().check(tmp_path / "b", killed(begin, seconds))
