"""Child processes that get a function by value, then tasks, one after another.

They are new interpreters: not forks, and not `multiprocessing` children, which would import the user's script again.
So workers need no `__main__` guard and work from a pasted script, a notebook or `python -`, on every system. They end
with their parent, however it ends, and their errors are raised in it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from typing import Any

import cloudpickle

from batchwright.base.errors import BatchwrightError, SpecError, WorkerError
from batchwright.base.machine import die_with_parent

__all__ = ["Worker", "python_command"]


def python_command(code: str) -> list[str]:
    """A new Python that runs some code.

    It finds modules where this process does, and nowhere else: not in the folder in which it happens to start.
    """
    paths = [path or os.getcwd() for path in sys.path]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}; {code}"]


class Worker:
    """One child process. Tasks are answered in the order in which they were sent."""

    def __init__(self, function: Callable[..., Any], *, doing: str, share: Sequence[int] = ()) -> None:
        """`share`: file descriptors that the child may use, under the same numbers."""
        self.doing = doing
        packed = _pack(function)
        self.connection, theirs = Pipe()
        code = f"from batchwright.base.processes import _main; _main({theirs.fileno()}, {os.getpid()})"
        with theirs:
            self.process: subprocess.Popen[bytes] = _launch(
                python_command(code),
                pass_fds=[theirs.fileno(), *share],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal is for the parent, which ends its workers without tracebacks
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},  # one process a core already
            )
        self._send(packed)

    def send(self, *task: Any) -> None:
        self._send(_pack(task))

    def _send(self, packed: bytes) -> None:
        # A worker that is gone shows when it is asked for its answer.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(packed)

    def receive(self) -> Any:
        """The answer to the oldest task that has none yet. Raises what the task raised."""
        try:
            answer = cloudpickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise WorkerError(
                f"a worker {self.doing} (pid {self.process.pid}) died: {self._how()}",
                remedy="if memory ran out, use fewer workers",
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _how(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code < 0:
            return f"killed by signal {-code}"
        return f"exit code {code}"

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pack(what: Any) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps(what)
    except Exception as error:  # whatever an object raises when it cannot be copied
        raise SpecError(
            f"this cannot be sent to worker processes: {error}",
            parameter="workers",
            remedy="workers=0, or functions that do not hold open files, locks or connections",
        ) from error
    return packed


class _Launcher(threading.Thread):
    """Starts child processes, from one thread that lives as long as this process.

    Linux ends a child when the *thread* that started it ends; a caller's thread may end long before its workers' work.
    """

    def __init__(self) -> None:
        super().__init__(name="batchwright-launcher", daemon=True)
        self.pid = os.getpid()
        self.requests: queue.SimpleQueue[tuple[Future[Any], Any, Any]] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            started, command, options = self.requests.get()
            if not started.set_running_or_notify_cancel():
                continue
            try:
                started.set_result(subprocess.Popen(command, **options))
            except BaseException as error:
                started.set_exception(error)
            del started


_launcher: _Launcher | None = None
_launcher_lock = threading.Lock()


def _launch(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    global _launcher
    with _launcher_lock:
        if _launcher is None or _launcher.pid != os.getpid():  # threads do not survive a fork
            _launcher = _Launcher()
            _launcher.start()
    started: Future[subprocess.Popen[bytes]] = Future()
    _launcher.requests.put((started, command, options))
    try:
        return started.result()
    except BaseException:  # Ctrl-C: without this, a process would start after its descriptors were closed here
        if not started.cancel() and started.exception() is None:
            started.result().kill()
            started.result().wait()
        raise


def _main(descriptor: int, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its workers
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(Connection(descriptor))


def _serve(connection: Connection) -> None:
    packed_function = connection.recv_bytes()
    function: Callable[..., Any] | None = None
    while True:
        packed_task = connection.recv_bytes()
        try:
            if function is None:
                function = cloudpickle.loads(packed_function)
            answer = cloudpickle.dumps(function(*cloudpickle.loads(packed_task)))
        except Exception as error:
            answer = cloudpickle.dumps(_to_send(error))
        connection.send_bytes(answer)


def _to_send(error: Exception) -> Exception:
    """An error that the parent can surely rebuild, and that says no less."""
    if isinstance(error, BatchwrightError):
        plain = {name: str(value) for name, value in error.where.items() if not isinstance(value, str | int | float)}
        error.where |= plain
        return error
    if isinstance(error, OSError) and error.errno is not None:  # disk full and the like keep their number
        return OSError(error.errno, error.strerror, error.filename)
    remedy = None
    if isinstance(error, ModuleNotFoundError):
        remedy = "define the function in the script itself, put its module on sys.path, or use workers=0"
    return WorkerError(f"{type(error).__name__}: {error}", traceback=traceback.format_exc().rstrip(), remedy=remedy)
