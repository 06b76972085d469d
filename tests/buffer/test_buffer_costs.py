"""What a row costs: bytes written and copied for each are below one bound, however many rows there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import batchwright as bw
from batchwright.buffer import blocks

OBS = np.zeros(4, np.float32)
ROW_BYTES = 8 + OBS.nbytes
TEXT = "sixteen letters."


@pytest.fixture(autouse=True)
def from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks.costs, "written", 0)
    monkeypatch.setattr(blocks.costs, "copied", 0)


def costs(num_rows: int) -> tuple[float, float]:
    """(written, copied) in bytes for each row that this test has added."""
    return blocks.costs.written / num_rows, blocks.costs.copied / num_rows


def block_bytes(buffer: bw.DatasetBuffer) -> int:
    """Memory of all blocks: of rows that are live or gone. What they have room for is not touched, and is no memory."""
    columns = {
        id(column): (segment.block.num_rows, column)
        for segment in buffer._table.segments()
        for column in segment.columns.values()
    }
    return sum(
        column.values[:num_rows].nbytes if hasattr(column, "values") else sum(piece.nbytes for piece in column._pieces)
        for num_rows, column in columns.values()
    )


def add_one_by_one(buffer: bw.DatasetBuffer, num_rows: int) -> None:
    for n in range(num_rows):
        buffer.append({"label": n, "obs": OBS})


def add_hundreds(buffer: bw.DatasetBuffer, num_rows: int, retain: float = 1.0, by: str = "random") -> None:
    columns = {"label": np.arange(100), "obs": np.zeros((100, 4), np.float32)}
    for _ in range(num_rows // 100):
        buffer.extend(columns, retain, by)


@pytest.mark.parametrize(
    ("num_rows", "add"),
    [(10**4, add_one_by_one), (10**5, add_one_by_one), (10**4, add_hundreds), (10**6, add_hundreds)],
)
@pytest.mark.parametrize("max_size", [None, 5000], ids=["all stay", "the oldest go"])
def test_a_row_is_written_once_and_never_copied(num_rows, add, max_size):
    buffer = bw.DatasetBuffer(max_size=max_size)
    add(buffer, num_rows)
    assert len(buffer) == (max_size or num_rows)
    assert costs(num_rows) == (ROW_BYTES, 0)
    assert block_bytes(buffer) <= (1 if max_size is None else 2) * len(buffer) * ROW_BYTES
    assert len(buffer._table.segments()) <= 40


def test_of_a_large_buffer_at_most_a_quarter_of_the_memory_is_of_rows_that_are_gone():
    buffer, columns = bw.DatasetBuffer(max_size=20_000), {"obs": np.zeros((1000, 1024), np.float32)}
    most = 0.0
    for _ in range(70):
        buffer.extend(columns)
        most = max(most, block_bytes(buffer) / (len(buffer) * 4096))
    assert len(buffer) == 20_000
    assert 1 < most <= 1.3
    assert blocks.costs.copied == 0


@pytest.mark.parametrize("num_rows", [10**4, 10**5])
def test_text_is_written_once_and_copied_a_few_times_at_most(num_rows):
    buffer = bw.DatasetBuffer()
    for n in range(num_rows):
        buffer.append({"label": n, "text": TEXT})
    written, copied = costs(num_rows)
    value_bytes = len(TEXT) + 4  # and where it begins
    assert written <= 8 + 1.1 * value_bytes
    assert copied <= 2 * value_bytes
    assert block_bytes(buffer) <= 1.3 * num_rows * (8 + value_bytes)


@pytest.mark.parametrize("by", ["random", "oldest", "latest", "label", "-label"])
@pytest.mark.parametrize("num_rows", [5000, 2 * 10**4])
def test_retention_between_appends_costs_a_bounded_number_of_copies(num_rows, by):
    buffer = bw.DatasetBuffer()
    add_hundreds(buffer, num_rows, 0.98, by)
    written, copied = costs(num_rows)
    assert written == ROW_BYTES
    assert copied <= 4 * ROW_BYTES
    assert block_bytes(buffer) <= 2.5 * len(buffer) * ROW_BYTES
    assert len(buffer._table.segments()) <= 60


@pytest.mark.parametrize("by", ["random", "label"])
@pytest.mark.parametrize("num_rows", [500, 1500])
def test_a_full_buffer_that_drops_here_and_there_stays_in_few_blocks(num_rows, by):
    buffer = bw.DatasetBuffer(max_size=300, drop_strategy=by)
    for n in range(num_rows):
        buffer.append({"label": n % 97, "obs": OBS})
    written, copied = costs(num_rows)
    assert written == ROW_BYTES
    assert copied <= 4 * ROW_BYTES
    assert len(buffer._table.segments()) <= 60


def test_few_rows_that_are_kept_of_many_do_not_hold_the_memory_of_all():
    for by in ("latest", "oldest", "random", "label"):
        buffer = bw.DatasetBuffer()
        add_hundreds(buffer, 10**5)
        buffer.append({"label": 0, "obs": OBS}, retain_prior=0.01, retain_prior_by=by)
        assert block_bytes(buffer) <= 2.5 * len(buffer) * ROW_BYTES, by


@pytest.mark.parametrize("num_rows", [10**3, 10**4])
def test_the_journal_has_a_bounded_number_of_bytes_for_each_row(num_rows, tmp_path):
    with bw.DatasetBuffer(path=tmp_path / "b") as buffer:
        add_one_by_one(buffer, num_rows)
        one = buffer._disk.folder.journal.num_bytes
        add_hundreds(buffer, num_rows)
        assert one / num_rows <= 300
        assert (buffer._disk.folder.journal.num_bytes - one) / num_rows <= 2 * ROW_BYTES


def test_a_batch_is_read_without_a_copy_of_what_was_not_asked_for():
    """Nothing that was written is copied by reading it, in whatever order."""
    buffer = bw.DatasetBuffer()
    add_hundreds(buffer, 10**4)
    before = costs(1)
    buffer.get_batch([5, 9999, 0])
    buffer.sample(10, step=0)
    buffer.to_numpy()
    assert costs(1) == before


def test_changing_rows_that_nobody_else_sees_copies_nothing():
    buffer: Any = bw.DatasetBuffer()
    add_hundreds(buffer, 10**4)
    for n in range(50):
        buffer.set(np.arange(n * 100, n * 100 + 100), label=np.zeros(100, np.int64))
    assert costs(1)[1] == 0
    buffer.commit("seen")
    buffer.set([0], label=[1])
    assert 0 < costs(1)[1] <= 10**4 * 8
