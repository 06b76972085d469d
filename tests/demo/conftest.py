"""A whole demo in a process of its own, where neither torch nor the network is there."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import SECONDS

# Found first by the demo and by every process that it starts.
SITE = {
    "torch.py": "raise AssertionError('the demo imported torch')",
    "sitecustomize.py": """
import socket
def refuse(*_):
    raise AssertionError('the demo used the network')
socket.socket.connect = socket.getaddrinfo = refuse
""",
}


@pytest.fixture(scope="session")
def run_demo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Path]]:
    """run_demo("demo spike --steps 160"), in an empty folder: what it printed, and the folder that it made."""

    def ran(line: str) -> tuple[str, Path]:
        here, site = tmp_path_factory.mktemp("demo"), tmp_path_factory.mktemp("site")
        for name, text in SITE.items():
            (site / name).write_text(text)
        search = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-m", "batchwright", *shlex.split(line)],
            cwd=here,
            env={**os.environ, "PYTHONPATH": search},
            capture_output=True,
            text=True,
            timeout=2 * SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        return done.stdout, here / ".demo"

    return ran
