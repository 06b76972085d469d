"""Real processes that form one group, started as torchrun starts them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

# Without the interpreter's own end, in which threads of torch may abort a process that is done.
END = "\nimport os, sys; sys.stdout.flush(); sys.stderr.flush(); os._exit(0)\n"


@pytest.fixture(scope="session")
def launch() -> Callable[..., list[Any]]:
    """Run a script as each rank of a group; what each of them printed last, which is JSON."""

    def launched(script: str, world_size: int, *arguments: str) -> list[Any]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script) + END, *arguments],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
                    "OMP_NUM_THREADS": "1",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            outputs = [process.communicate(timeout=240) for process in started]
        finally:
            for process in started:
                process.kill()
        for process, (_, errors) in zip(started, outputs, strict=True):
            assert process.returncode == 0, errors
        return [json.loads(output.splitlines()[-1]) for output, _ in outputs]

    return launched
