"""Child processes that get a function by value, then tasks, one after another.

They run `python -m penstock.processes`: not forks, and not `multiprocessing` children, which would import the user's
script again. So workers need no `__main__` guard and work from a pasted script, a notebook or `python -`, on every
system. They end with their parent, however it ends, and their errors are raised in it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

import cloudpickle

from penstock.errors import PenstockError, WorkerError
from penstock.machine import die_with_parent

__all__ = ["Worker"]


class Worker:
    """One child process. Tasks are answered in the order in which they were sent."""

    def __init__(self, function: Callable[..., Any], *, doing: str, share: Sequence[int] = ()) -> None:
        """`share`: file descriptors that the child may use, under the same numbers."""
        self.doing = doing
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock.processes", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno(), *share],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "TOKENIZERS_PARALLELISM": "false",  # one process a core already
                    "PYTHONPATH": os.pathsep.join([path or os.getcwd() for path in sys.path]),
                },
            )
        self._send(function)

    def send(self, *task: Any) -> None:
        self._send(task)

    def _send(self, what: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # a worker that is gone shows when it is asked for its answer
            self.connection.send_bytes(cloudpickle.dumps(what))

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
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(connection: Connection) -> None:
    function = cloudpickle.loads(connection.recv_bytes())
    while True:
        task = cloudpickle.loads(connection.recv_bytes())
        answer: object
        try:
            answer = function(*task)
        except PenstockError as error:
            answer = error
        except OSError as error:  # disk full and the like keep their number
            answer = OSError(error.errno, error.strerror, error.filename)
        except Exception as error:
            answer = WorkerError(f"{type(error).__name__}: {error}", where=traceback.format_exc())
        connection.send_bytes(cloudpickle.dumps(answer))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError, ConnectionResetError):
        _serve(Connection(int(sys.argv[1])))
