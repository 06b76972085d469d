"""A provider at work while a test reads its queue."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from providers import SETTINGS, Numbered, Running

from batchwright import DataProviderBase


@pytest.fixture
def running(tmp_path) -> Iterator:
    """Start providers; all are stopped at the end."""
    started: list[Running] = []

    def start(kind: type[DataProviderBase] = Numbered, **settings) -> Running:
        started.append(Running(kind(tmp_path / "data", **(SETTINGS | settings))))
        deadline = time.monotonic() + 20
        while not (tmp_path / "data/queue/meta.json").exists() and started[-1].error is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return started[-1]

    yield start
    for one in started:
        one.stop()
