"""What the torch tests share: a batch as plain values, and a loader that cuts its work into small pieces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batchwright as bw
from shared import arrays_of


def as_values(batch):
    """Everything a batch says, as lists and dicts that compare."""
    about = {name: getattr(value, "tolist", lambda value=value: value)() for name, value in batch.metadata.items()}
    return {name: array.tolist() for name, array in arrays_of(batch).items()} | about


@pytest.fixture(scope="session")
def values():
    return as_values


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of about three steps, and orders computed for about nine: a pass then takes many of both."""
    monkeypatch.setattr("batchwright.loaders.blocks._BLOCK_BYTES", 3 * 12 * 17 * 8)
    monkeypatch.setattr("batchwright.loaders.blocks._LOCATED_ROWS", 9 * 12)


@pytest.fixture
def open_small(open_loader: Callable[..., bw.PretrainDataLoader], small_store: Path) -> Callable[..., Any]:
    """A loader over the small store: 12 rows of 16 tokens in a batch, as tensors of torch unless told otherwise."""
    return lambda framework="torch", **given: open_loader(small_store, framework=framework, **given)
