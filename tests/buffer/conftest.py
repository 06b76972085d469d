"""What tests of buffers share: rows that one can check by eye, and a buffer's whole state as one value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import batchwright as bw


def state_of(buffer: bw.DatasetBuffer) -> dict[str, Any]:
    """All that a call which fails may not change."""
    return {
        "rows": len(buffer),
        "content": buffer.content_fingerprint(),
        "ids": buffer.ids.tolist(),
        "number": buffer.number,
        "next id": buffer._table.next_id,
        "schema": buffer.schema,
        "versions": buffer.versions(),
        "kind": buffer.kind,
        "provenance": buffer.provenance(),
        "settings": (buffer.max_size, buffer.drop_strategy, buffer.seed),
    }


@pytest.fixture
def state() -> Callable[[bw.DatasetBuffer], dict[str, Any]]:
    return state_of


@pytest.fixture
def eight() -> bw.DatasetBuffer:
    """Eight rows with ids 0 to 7, `loss` 0.0 to 7.0."""
    return bw.DatasetBuffer([{"text": f"example {n}", "loss": float(n)} for n in range(8)])
