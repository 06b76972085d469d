"""The benchmark of the queue hands the same batches through every queue, notices one that is lost, and compares within
a round."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import queue as program  # noqa: E402
from benchmarks.peers import queues  # noqa: E402
from benchmarks.peers.table import Row  # noqa: E402

needs_proc = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="CPU time of others is read from /proc")


def way_called(name: str) -> program.Way:
    return next(way for way in program.WAYS if way.name == name)


def test_a_batch_is_known_by_its_number():
    ring = queues.prepared()
    queues.check(ring[3], queues.RING + 3)
    with pytest.raises(AssertionError, match=r"\(3, 3, 4\)"):
        queues.check(ring[3], 4)


def test_a_file_that_is_lost_is_noticed():
    assert queues.FILE_BATCHES % queues.RING


def test_memory_that_is_read_into_begins_a_page():
    memory = queues.aligned(100)
    assert (len(memory), memory.dtype, memory.ctypes.data % 4096) == (100, np.uint8, 0)


@needs_proc
@pytest.mark.parametrize(
    "name",
    [
        program.LIMIT,
        program.ARRAYS,
        pytest.param(program.ONE_FILE, marks=pytest.mark.slow),
        pytest.param(program.TENSORS, marks=pytest.mark.slow),
        pytest.param(program.TORCH_QUEUE, marks=pytest.mark.slow),
        pytest.param("multiprocessing.Queue, arrays", marks=pytest.mark.slow),
        pytest.param("batchwright, two providers", marks=pytest.mark.slow),
        pytest.param("batchwright, durable=True", marks=pytest.mark.slow),
    ],
)
def test_batches_cross_from_one_process_to_another(name, tmp_path):
    found = program.run_way(way_called(name), tmp_path, is_quick=True)
    assert found.get("error") is None
    assert found["batches_s"] > 0
    assert list(tmp_path.iterdir()) == []


@needs_proc
def test_calls_are_timed_inside_of_files_and_between_them(tmp_path):
    found = program.run_way(way_called("batchwright, arrays, calls"), tmp_path, is_quick=True)
    assert found.get("error") is None
    assert 0 < found["median_us"] <= found["p99_us"] <= found["longest_us"]


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("name", ["batchwright, inotify", "batchwright, BATCHWRIGHT_PORTABLE=1"])
def test_a_consumer_that_waits_is_timed(name, tmp_path):
    found = program.run_way(way_called(name), tmp_path, is_quick=True)
    assert found.get("error") is None
    assert found["waited_s"] >= 1


def test_a_way_that_fails_keeps_its_row_and_says_why():
    assert "| ImportError: no such thing |" in program.show_rates([Row("x", why_not="ImportError: no such thing")])


def rate_row(name: str, *rates: float) -> Row:
    return Row(name, {"batches_s": list(rates), "producer_us": [1.0] * len(rates), "consumer_us": [1.0] * len(rates)})


def test_ours_is_compared_with_theirs_of_the_same_round():
    rows = [rate_row(program.ARRAYS, 6.0, 8.0), rate_row(program.LIMIT, 3.0, 2.0)]
    assert "| 3.00 (2.00 - 4.00) |" in program.show_rates(rows)


@pytest.mark.parametrize(("ours", "said"), [(7.0, "| 0.70 | yes |"), (6.9, "| 0.69 | **no** |")])
def test_a_goal_that_is_missed_is_said_to_be(ours, said):
    assert said in program.show_goals([rate_row(program.ARRAYS, ours), rate_row(program.LIMIT, 10.0)])


def test_the_file_system_of_a_folder_is_named(tmp_path):
    assert program.file_system(tmp_path)
