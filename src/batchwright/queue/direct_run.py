"""Refuses to run a provider's file by itself: without the config it would make other data."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

__all__ = ["refuse_direct_run"]


def refuse_direct_run(kind: type) -> None:
    """End a process whose main file is a provider's."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(file, str) and Path(file).name == "prepare_streaming.py":
        config = shlex.quote(next((word for word in sys.argv[1:] if word.endswith(".py")), "CONFIG"))
        raise SystemExit(
            f"batchwright: {file} is not run by itself: {kind.__qualname__} needs the shared config\n"
            f"  try        batchwright prepare {config}, or python prepare.py {config}"
        )
