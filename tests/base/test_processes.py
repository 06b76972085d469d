"""Worker processes: a function by value, tasks in order, errors that arrive whole, and no orphan."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import batchwright as bw
from batchwright.base.processes import Worker
from refusals import refused


def ask(worker: Worker, *task: object) -> object:
    worker.send(*task)
    return worker.receive()


def test_a_worker_answers_tasks_in_order_and_keeps_what_it_captured():
    captured = {"factor": 10}
    with Worker(lambda n: (n * captured["factor"], os.getpid()), doing="here") as worker:
        for n in range(3):
            worker.send(n)
        answers = [worker.receive() for _ in range(3)]
    assert [value for value, _ in answers] == [0, 10, 20]
    assert {pid for _, pid in answers} == {worker.process.pid}


def test_a_worker_finds_the_modules_that_its_parent_finds(tmp_path, monkeypatch):
    (tmp_path / "module_of_a_test.py").write_text("VALUE = 5\n")
    monkeypatch.syspath_prepend(tmp_path)

    def read():
        import module_of_a_test

        return module_of_a_test.VALUE, sys.path

    with Worker(read, doing="here") as worker:
        assert ask(worker) == (5, [path or os.getcwd() for path in sys.path])


def test_a_worker_takes_nothing_from_standard_input_and_keeps_the_environment(monkeypatch):
    monkeypatch.setenv("OWN_VARIABLE", "5")
    with Worker(lambda: (sys.stdin.read(), os.environ["OWN_VARIABLE"]), doing="here") as worker:
        assert ask(worker) == ("", "5")


def test_an_error_of_ours_arrives_with_all_it_says():
    def fail():
        raise bw.SourceError("bad row", file="a.jsonl", line=3, remedy="mend it")

    with (
        Worker(fail, doing="here") as worker,
        refused(bw.SourceError, "bad row", file="a.jsonl", line=3, remedy="mend it"),
    ):
        ask(worker)


def test_an_error_of_the_system_keeps_its_number():
    def fail():
        raise OSError(errno.ENOSPC, "No space left on device", "/a/b")

    with Worker(fail, doing="here") as worker:
        with pytest.raises(OSError, match="No space left") as caught:
            ask(worker)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/a/b")


@pytest.mark.parametrize("error", [ValueError("bad value"), OSError("no number"), KeyError("key")])
def test_any_other_error_says_its_kind_its_text_and_where_it_was_raised(error):
    def fail():
        raise error

    with Worker(fail, doing="here") as worker:
        with pytest.raises(bw.WorkerError) as caught:
            ask(worker)
        assert caught.value.headline == f"{type(error).__name__}: {error}"
        assert "in fail" in caught.value.where["traceback"]
        worker.send()  # it goes on working
        with pytest.raises(bw.WorkerError):
            worker.receive()


def test_an_error_or_answer_that_cannot_travel_is_an_error_that_can():
    class Unpicklable(Exception):
        def __reduce__(self):
            raise TypeError("no")

    def fail(kind):
        if kind == "answer":
            return threading.Lock()
        raise Unpicklable("own text")

    with Worker(fail, doing="here") as worker:
        with refused(bw.WorkerError, "Unpicklable: own text", remedy=False):
            ask(worker, "error")
        with refused(bw.WorkerError, "TypeError: cannot pickle", remedy=False):
            ask(worker, "answer")


def test_a_module_that_a_worker_cannot_find_is_named(tmp_path, monkeypatch):
    (tmp_path / "module_that_goes.py").write_text("def function(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import module_that_goes

    monkeypatch.undo()
    with (
        Worker(module_that_goes.function, doing="here") as worker,
        refused(bw.WorkerError, "'module_that_goes'", remedy="workers=0"),
    ):
        ask(worker)
    del sys.modules["module_that_goes"]


def test_what_cannot_be_sent_is_refused_before_a_process_starts(monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    lock = threading.Lock()
    with refused(bw.SpecError, "lock", parameter="workers", remedy="workers=0"):
        Worker(lambda: lock, doing="here")


def test_a_worker_that_dies_says_how():
    with Worker(lambda: os.kill(os.getpid(), signal.SIGKILL), doing="of this test") as worker:
        with refused(bw.WorkerError, "of this test", "pid", "signal 9"):
            ask(worker)
        worker.send()  # no error: the next answer says it
        with refused(bw.WorkerError, "signal 9"):
            worker.receive()
    with Worker(lambda: os._exit(3), doing="here") as worker, refused(bw.WorkerError, "exit code 3"):
        ask(worker)


def test_closing_ends_a_worker_that_is_busy():
    worker = Worker(time.sleep, doing="here")
    worker.send(600)
    worker.close()
    assert worker.process.returncode == -signal.SIGKILL


def test_an_interrupt_from_the_keyboard_does_not_reach_a_worker():
    with Worker(lambda: os.kill(os.getpid(), signal.SIGINT) or "still here", doing="here") as worker:
        assert ask(worker) == "still here"


def test_a_worker_outlives_the_thread_that_started_it():
    started: list[Worker] = []

    def start() -> None:
        started.append(Worker(lambda n: n + 1, doing="here"))
        ask(started[0], 0)  # the worker runs, and has asked to end with its parent

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    time.sleep(0.1)
    with started[0] as worker:
        assert ask(worker, 1) == 2


def test_an_interrupt_while_a_worker_starts_leaves_no_process(monkeypatch):
    started, start = [], subprocess.Popen

    def interrupted(*command, **options):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        started.append(start(*command, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Worker(lambda: None, doing="here")
    assert [process.returncode for process in started] == [-signal.SIGKILL]
