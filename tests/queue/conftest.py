"""A provider at work while a test reads its queue: in a thread of the test, or in processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from providers import SETTINGS, Numbered, Running

from batchwright import DataProviderBase
from harness import wait_for


@pytest.fixture
def running(tmp_path) -> Iterator:
    """Start providers; all are stopped at the end."""
    started: list[Running] = []

    def start(kind: type[DataProviderBase] = Numbered, **settings) -> Running:
        started.append(Running(kind(tmp_path / "data", **(SETTINGS | settings))))
        meta = tmp_path / "data/queue/meta.json"
        wait_for("queue", lambda: meta.exists() or started[-1].error is not None)
        return started[-1]

    yield start
    for one in started:
        one.stop()


if sys.platform == "linux":
    from queue_jobs import Run

    @pytest.fixture
    def run(tmp_path: Path) -> Iterator[Run]:
        with Run(tmp_path) as started:
            yield started
            print(started.told())
