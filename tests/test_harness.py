"""The harness itself: what was said is all there, a failure is told, and nothing runs on."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from harness import Processes, execute, is_running, say, stand_still


def count(up_to: int) -> None:
    for number in range(up_to):
        say(id=number)
    stand_still()


def fail() -> None:
    print("before it failed")
    raise ValueError("as it was meant to")


def count_and_end(up_to: int) -> None:
    for number in range(up_to):
        say(id=number)


def test_what_disturbed_processes_said_is_all_there(processes):
    for name in ("a", "b"):
        processes.start(name, count, 100)
    processes.disturb(["a", "b"], 5, signal.SIGKILL, signal.SIGTERM)
    for name in ("a", "b"):
        assert processes.wait_until_said(name, id=99)["pid"] == processes.pid(name)
        assert {line["id"] for line in processes.said(name)} == {*range(100)}
    assert len({line["pid"] for line in processes.said()}) <= 7


def test_a_process_that_fails_is_told_at_once(processes):
    processes.start("a", fail)
    with pytest.raises(AssertionError, match="failed instead of") as error:
        processes.wait_for("never", lambda: False)
    for told in (f"seed {processes.seed}", "before it failed", "Traceback", "as it was meant to"):
        assert told in str(error.value)
    with pytest.raises(AssertionError):
        processes.finish("a")


def test_a_process_that_ended_by_a_signal_of_the_test_has_not_failed(processes):
    processes.start("a", count, 1)
    processes.start("b", count_and_end, 1)
    processes.wait_until_said("a", id=0)
    processes.kill("a")
    processes.finish("b")
    assert (processes.exit_code("a"), processes.exit_code("b")) == (-signal.SIGKILL, 0)


def test_a_command_is_a_job(processes):
    processes.start("a", execute, sys.executable, "-c", "import batchwright, sys; print('hello'); sys.exit('well')")
    with pytest.raises(AssertionError, match="well"):
        processes.finish("a")
    assert (processes.printed("a"), processes.complained("a")) == ("hello\n", "well\n")


def test_everything_ends_with_the_test_also_what_was_stopped(tmp_path):
    with Processes(tmp_path) as processes:
        for name in ("a", "b"):
            processes.start(name, count, 1)
            processes.wait_until_said(name)
        processes.send("b", signal.SIGSTOP)
    assert not any(is_running(processes.pid(name)) for name in ("a", "b"))


def test_random_moments_come_from_the_seed(tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setenv("BATCHWRIGHT_TEST_SEED", "5")
    for _ in range(2):
        Processes(tmp_path).pause(1.0)
    Processes(tmp_path, seed=6).pause(1.0)
    assert pauses[0] == pauses[1] != pauses[2]
