"""The benchmark of the queue runs, and notices a batch that is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import queue as program  # noqa: E402
from benchmarks.peers import queues  # noqa: E402


def test_a_batch_is_known_by_its_number():
    ring = queues.prepared()
    queues.check(ring[3], queues.RING + 3)
    with pytest.raises(AssertionError, match=r"\(3, 3, 4\)"):
        queues.check(ring[3], 4)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="CPU time of others is read from /proc")
@pytest.mark.parametrize("name", [program.LIMIT, program.ARRAYS, "batchwright, arrays, calls"])
def test_batches_cross_from_one_process_to_another(name, tmp_path):
    way = next(way for way in program.WAYS if way.name == name)
    found = program.run_way(way, tmp_path, is_quick=True)
    assert found.get("error") is None
    assert list(tmp_path.iterdir()) == []
