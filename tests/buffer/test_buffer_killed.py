"""kill -9 at any moment: every change that was acknowledged is there, whole, and at most one more.

What a buffer holds is a function of its number here (see writing.py), so a copy in memory says what must be there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from writing import SETTINGS, fault_in, keep_versions, step, version_at, write_until_killed

import batchwright as bw


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


@pytest.mark.parametrize("kills", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_writers_that_are_killed_lose_nothing_and_double_nothing(processes, tmp_path, kills):
    reference, at = Reference(), 0
    for number in range(kills):
        writer = f"writer-{number}"
        processes.start(writer, write_until_killed, tmp_path / "b")
        processes.wait_for_lines([writer], processes.chance.randint(1, 12))
        processes.pause(0.02)
        processes.kill(writer)
        before, at = at, reference.check(tmp_path / "b", processes.said(writer)[-1]["number"])
        assert at > before
    assert at > kills
