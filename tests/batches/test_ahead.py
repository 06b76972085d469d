"""Work done ahead of need comes back in order, raises in place, and leaves nothing behind, whatever dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from itertools import islice

import numpy as np
import pytest

from batchwright.base.errors import SourceError, SpecError, WorkerError
from batchwright.base.machine import is_alive
from batchwright.batches.ahead import by_processes, by_threads
from harness import SECONDS, is_running, no_thread_left, say, stand_still, wait_for
from refusals import refused

SLOT_BYTES = 4096


def squares(number):
    """A task that says who did it."""
    return {"square": np.array([number * number]), "pid": np.array([os.getpid()])}


squares.__module__ = "__main__"  # by value: the workers need not import this file


def check_that_all_end(pids):
    """These processes end by themselves. Those that do not are killed here, and named."""
    left = lambda: [pid for pid in pids if is_running(pid)]
    try:
        wait_for("end of the workers", lambda: not left(), lambda: str(left()))
    finally:
        for pid in left():
            os.kill(pid, signal.SIGKILL)


def open_descriptors():
    gc.collect()  # what tests before this one left to the collector closes its files now, not between two counts
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def shared_memory_files():
    """Without semaphores, which other tests, running beside this one, make and remove; slots need none."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith("sem.")}


# Threads


@pytest.mark.parametrize("ahead", [0, 1, 3, 100])
def test_a_thread_gives_results_in_the_order_of_their_tasks(ahead):
    def later_is_faster(number):
        time.sleep(0.002 * (10 - number))
        return number * number

    assert list(by_threads(later_is_faster, range(10), ahead)) == [n * n for n in range(10)]


def test_threads_begin_no_more_tasks_than_they_may_be_ahead():
    begun = []
    results = by_threads(lambda task: begun.append(task) or task, range(100), ahead=3)
    next(results)
    wait_for("four tasks", lambda: len(begun) >= 4)
    time.sleep(0.05)  # for a fifth, if there were one
    assert begun == [0, 1, 2, 3]  # the one that was asked for, and three ahead
    results.close()


def test_an_error_in_a_thread_is_raised_where_its_result_would_have_been():
    def fail_at_two(task):
        if task == 2:
            raise SourceError("row 2 is broken", remedy="mend it")
        return task

    results = by_threads(fail_at_two, range(5), ahead=4)
    assert [next(results), next(results)] == [0, 1]
    with refused(SourceError, "row 2"):
        next(results)


def test_closing_early_ends_the_threads_and_begins_nothing_more():
    done = []
    results = by_threads(lambda task: done.append(task) or time.sleep(0.01), range(1000), ahead=2)
    with no_thread_left():
        next(results)
        results.close()
    assert len(done) <= 3


# Processes


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_processes_give_results_in_the_order_of_their_tasks_and_take_turns(workers):
    got = [(int(r["square"][0]), int(r["pid"][0])) for r in by_processes(squares, range(11), workers, SLOT_BYTES)]
    assert [square for square, _ in got] == [n * n for n in range(11)]
    pids = [pid for _, pid in got]
    assert len(set(pids)) == workers
    assert os.getpid() not in pids
    assert pids == [pids[n % workers] for n in range(11)]


@pytest.mark.parametrize("num_tasks", [0, 1])
def test_there_may_be_fewer_tasks_than_workers(num_tasks):
    results = by_processes(squares, range(num_tasks), 2, SLOT_BYTES)
    assert [int(r["square"][0]) for r in results] == list(range(num_tasks))


def test_arrays_of_every_shape_and_dtype_come_back_as_they_were():
    def many(seed):
        import numpy as np

        return {
            "matrix": np.arange(12, dtype=np.int64).reshape(3, 4) + seed,
            "odd": np.arange(5, dtype=np.uint8),
            "floats": np.linspace(0, 1, 7, dtype=np.float32),
            "none": np.empty((0, 3), np.int32),
        }

    expected = many(1)
    (got,) = by_processes(many, [1], 1, SLOT_BYTES)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array)
        assert got[name].dtype == array.dtype


def test_a_result_stays_valid_until_the_next_one_is_asked_for():
    results = by_processes(squares, range(50), 2, SLOT_BYTES, slots_each=1)
    for number in range(50):
        got = next(results)["square"]
        time.sleep(0.002)  # were the slot free already, a worker would write its next result into it now
        assert int(got[0]) == number * number


def test_an_error_in_a_worker_is_raised_in_its_place_with_what_the_worker_said():
    def fail_at_three(task):
        import numpy as np

        if task == 3:
            raise ValueError("row 3 has no text")
        return {"task": np.array([task])}

    results = by_processes(fail_at_three, range(9), 2, SLOT_BYTES)
    assert [int(r["task"][0]) for r in islice(results, 3)] == [0, 1, 2]
    with refused(WorkerError, "ValueError: row 3 has no text", "fail_at_three", remedy=False):
        next(results)


def test_an_error_of_ours_arrives_whole():
    def refuse(task):
        from batchwright.base.errors import SpecError

        raise SpecError("no such column", parameter="text", remedy="text='body'")

    with refused(SpecError, parameter="text", remedy="text='body'"):
        next(by_processes(refuse, [0], 1, SLOT_BYTES))


def test_a_result_larger_than_its_slot_says_both_sizes():
    def large(_):
        import numpy as np

        return {"x": np.zeros(2000)}

    with refused(WorkerError, "16,000", "4,096", remedy=False):
        next(by_processes(large, [0], 1, SLOT_BYTES))


def test_a_function_that_cannot_travel_is_refused_before_anything_starts():
    lock = threading.Lock()
    before = open_descriptors()
    with refused(SpecError, parameter="workers"):
        next(by_processes(lambda task: lock, [0], 2, SLOT_BYTES))
    assert open_descriptors() == before


def test_closing_early_leaves_no_process_no_shared_memory_and_no_descriptor():
    by_processes(squares, [], 1, SLOT_BYTES).close()
    for _ in range(3):
        files, descriptors = shared_memory_files(), open_descriptors()
        results = by_processes(squares, range(1000), 2, SLOT_BYTES)
        pids = {int(next(results)["pid"][0]) for _ in range(2)}
        results.close()
        assert all(not is_alive(pid) for pid in pids)  # ended and collected: not even a zombie is left
        wait_for("closed descriptors", lambda before=descriptors: open_descriptors() <= before)
        wait_for("end of shared memory", lambda before=files: shared_memory_files() <= before)


def test_dropping_the_iterator_ends_its_workers():
    results = by_processes(squares, range(1000), 2, SLOT_BYTES)
    pids = {int(next(results)["pid"][0]) for _ in range(2)}
    del results
    assert all(not is_alive(pid) for pid in pids)


def test_a_worker_that_is_killed_gives_an_error_that_names_it_and_ends_the_others():
    results = by_processes(squares, range(10_000), 2, SLOT_BYTES)
    first, second = (int(next(results)["pid"][0]) for _ in range(2))
    os.kill(first, signal.SIGKILL)
    with refused(WorkerError, f"pid {first}", "signal 9", remedy="workers"):
        list(islice(results, 10))
    assert not is_alive(second)


def test_workers_outlive_the_thread_that_started_them():
    results = by_processes(squares, range(20), 2, SLOT_BYTES)
    got = []
    thread = threading.Thread(target=lambda: got.append(next(results)))
    thread.start()
    thread.join()
    time.sleep(0.1)  # for a worker to end, if it ended with the thread
    assert [int(r["square"][0]) for r in results] == [n * n for n in range(1, 20)]


def ask_workers(then):
    """A job that says who works for it, and then what is to be done."""

    def task(number):
        if number >= 4:
            time.sleep(600)  # busy in user code when the parent goes: nobody reads the pipe
        return {"pid": np.array([os.getpid()])}

    results = by_processes(task, range(100), 2, SLOT_BYTES)
    pids = [*{int(next(results)["pid"][0]) for _ in range(4)}]
    say(workers=pids)
    then()


@pytest.mark.parametrize("portable", ["0", "1"], ids=["Linux", "portable half"])
def test_killing_the_parent_leaves_no_orphan(portable, processes, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_PORTABLE", portable)
    processes.start("parent", ask_workers, stand_still)
    pids = processes.wait_until_said("parent")["workers"]
    assert len(pids) == 2
    assert all(map(is_running, pids))
    processes.kill("parent")
    check_that_all_end(pids)


def test_a_parent_that_exits_in_the_middle_leaves_no_orphan(processes):
    processes.start("parent", ask_workers, sys.exit)
    processes.finish("parent")
    check_that_all_end(processes.wait_until_said("parent")["workers"])


def test_a_forks_copy_of_the_iterator_does_not_end_the_parents_workers():
    code = """
        import os, numpy as np
        from batchwright.batches.ahead import by_processes

        results = by_processes(lambda n: {"n": np.array([n])}, range(40), 2, 4096)
        next(results)
        child = os.fork()
        if not child:
            results.close()       # as when a forked DataLoader worker lets go of what it inherited
            os._exit(0)
        os.waitpid(child, 0)
        assert [int(r["n"][0]) for r in results] == list(range(1, 40))
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True, timeout=SECONDS)
