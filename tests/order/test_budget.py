"""Batches by tokens: every row once, never over the budget, the same on every rank, and exact where it changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.base.errors import SpecError
from batchwright.order.budget import BLOCK_ROWS, Blocks, BudgetCut, block_batches, cut_block, refuse_wide_rows
from batchwright.order.epochs import Epochs, Skips
from refusals import refused

widths_of_blocks = st.lists(st.integers(1, 60), min_size=0, max_size=80).map(lambda w: np.array(w, np.int64))


def rows_in(batches):
    return sorted(row for batch in batches for row in batch.tolist())


def lists(batches):
    return [batch.tolist() for batch in batches]


def filled(count, multiple):
    return -(-count // multiple) * multiple


# One block


@settings(max_examples=200, deadline=None)
@given(widths_of_blocks, st.integers(1, 5), st.integers(0, 400), st.integers(0, 2**64 - 1))
def test_a_cut_has_every_row_once_and_no_batch_over_the_budget(widths, multiple, spare, key):
    budget = int(widths.max(initial=1)) * multiple + spare
    batches = cut_block(widths, budget, row_multiple=multiple, key=key)
    assert rows_in(batches) == list(range(len(widths)))
    assert all(filled(len(batch), multiple) * widths[batch].max() <= budget for batch in batches)
    assert sum(len(batch) % multiple > 0 for batch in batches) <= 1
    assert all((np.diff(batch) > 0).all() for batch in batches)
    assert lists(cut_block(widths.copy(), budget, row_multiple=multiple, key=key)) == lists(batches)


@settings(max_examples=200, deadline=None)
@given(widths_of_blocks, st.data())
def test_a_block_whose_budget_changes_on_the_way_loses_and_repeats_nothing(widths, data):
    longest, count = int(widths.max(initial=1)), len(widths)
    offsets = sorted(data.draw(st.sets(st.integers(0, max(count - 1, 0)), max_size=3)) | {0})
    record = [(at, longest * 3 + data.draw(st.integers(0, 99)), data.draw(st.integers(1, 3))) for at in offsets]
    batches = block_batches(widths, record, key=7)
    assert rows_in(batches) == list(range(count))
    borders = np.cumsum([0, *(len(batch) for batch in batches)]).tolist()
    assert set(offsets) <= {*borders, 0}
    for number, batch in enumerate(batches):
        _, budget, multiple = next(entry for entry in reversed(record) if entry[0] <= borders[number])
        assert filled(len(batch), multiple) * widths[batch].max() <= budget


@settings(max_examples=100, deadline=None)
@given(widths_of_blocks.filter(len), st.integers(0, 10**6))
def test_a_change_at_the_end_of_a_batch_leaves_the_batches_before_as_they_were(widths, pick):
    budget = int(widths.max()) * 2
    batches = cut_block(widths, budget, key=5)
    handed = pick % len(batches) + 1
    offset = sum(len(batch) for batch in batches[:handed])
    changed = block_batches(widths, [(0, budget, 1), (offset, budget * 3, 2)], key=5)
    assert lists(changed[:handed]) == lists(batches[:handed])
    assert rows_in(changed) == list(range(len(widths)))


def test_rows_of_similar_width_come_together():
    widths = np.array([10, 1, 9, 1, 10, 1, 1, 9])
    assert sorted(lists(cut_block(widths, 20, key=0))) == [[0, 4], [1, 3, 5, 6], [2, 7]]


def test_the_order_of_batches_depends_on_the_key_and_is_not_from_short_to_long():
    widths = np.arange(1, 200)
    one, two = (lists(cut_block(widths, 400, key=key)) for key in (1, 2))
    assert sorted(one) == sorted(two)
    assert one != two
    assert one != sorted(one)


def test_the_cut_is_pinned():
    # Positions saved by running jobs lie in this cut: if it changes, they point at other rows.
    widths = np.array([3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9, 7])
    assert lists(cut_block(widths, 25, key=42)) == [[5, 9, 11], [2], [0, 4, 6, 7, 8], [1], [3, 10]]


@pytest.mark.parametrize(("budget", "multiple"), [(14, 1), (29, 2), (59, 4)])
def test_a_row_that_no_batch_has_room_for_is_refused_and_named(budget, multiple):
    with refused(SpecError, parameter="batch_tokens", row=1, tokens=15, remedy=f"batch_tokens={15 * multiple}"):
        refuse_wide_rows(np.array([3, 15, 2]), budget, multiple)


# A stream


def stream(rows, *, epochs=None, budget=300, multiple=1, record=None):
    """Rows of an epoch with lengths that the position decides: 1 to 50."""
    asked = []

    def lengths_at(positions):
        asked.append(len(positions))
        return (positions * 7919 % 50) + 1

    spec = epochs or Epochs.of(rows)
    cut = BudgetCut(record or [[0, 0, budget, multiple]], Blocks(spec, 3, lengths_at, lambda lengths: lengths))
    return cut, asked


def walk(cut, end):
    position, batches = cut.settle(0), []
    while not cut.is_over(position, end):
        batches.append((position, cut.batch(position)))
        assert cut.after(position, 1) == batches[-1][1].after
        position = cut.settle(batches[-1][1].after)
    return batches


def test_batches_stay_inside_blocks_and_epochs_and_have_every_row_once():
    rows = BLOCK_ROWS + 1000
    batches = walk(stream(rows)[0], 2 * rows)
    positions = np.concatenate([batch.positions for _, batch in batches])
    assert sorted(positions.tolist()) == list(range(2 * rows))
    blocks = [(position // rows, position % rows // BLOCK_ROWS) for position, _ in batches]
    for block, (_, batch) in zip(blocks, batches, strict=True):
        assert {(p // rows, p % rows // BLOCK_ROWS) for p in batch.positions.tolist()} == {block}
    assert blocks == sorted(blocks)
    assert len(set(blocks)) == 4


def test_blocks_and_epochs_of_equal_lengths_have_their_batches_in_orders_of_their_own(monkeypatch):
    # Positions saved by running jobs lie in these orders: if they change, they point at other rows.
    monkeypatch.setattr("batchwright.order.budget.BLOCK_ROWS", 6)
    blocks = Blocks(Epochs.of(12), 3, lambda positions: positions % 6 + 1, lambda lengths: lengths)
    orders = [[], [], [], []]  # two blocks in each of two epochs
    for position, batch in walk(BudgetCut([[0, 0, 6, 1]], blocks), 24):
        orders[position // 6].append((batch.positions % 6).tolist())
    assert orders == [
        [[3], [0, 1], [2], [4], [5]],
        [[5], [0, 1], [4], [2], [3]],
        [[4], [2], [3], [5], [0, 1]],
        [[4], [5], [2], [3], [0, 1]],
    ]


def test_a_position_says_block_and_batch():
    rows = BLOCK_ROWS + 1000
    cut, _ = stream(rows)
    batches = walk(cut, rows)
    for number, (position, batch) in enumerate(batches):
        assert cut.steps_until(0, position) == number
        assert batch.after_in_block == (cut.in_block(batch.after) if batch.after < rows else 0)
    assert cut.after(0, len(batches)) == rows
    assert cut.steps_of_epoch(0) == cut.most_steps_of_epoch(5) == len(batches)
    inside = next(position + 1 for position, batch in batches if len(batch.positions) > 1)
    assert cut.in_block(inside) is None


def test_skipped_positions_are_never_in_a_batch():
    epochs = Epochs(((0, 500),), skips=Skips([(100, 140)]))
    batches = walk(stream(500, epochs=epochs)[0], 1000)
    positions = sorted(p for _, batch in batches for p in batch.positions.tolist())
    assert positions == [p for p in range(1000) if not 100 <= p < 140]


def test_the_end_of_a_stream_ends_its_last_block():
    epochs = Epochs(((0, 500),), limit=720)
    cut, _ = stream(500, epochs=epochs)
    batches = walk(cut, 1000)
    assert sorted(p for _, batch in batches for p in batch.positions.tolist()) == list(range(720))
    assert cut.after(0, 10_000) == 720


def test_rows_that_fill_a_batch_up_are_not_counted_as_positions():
    batches = walk(stream(101, multiple=4)[0], 101)
    assert all(batch.num_rows % 4 == 0 for _, batch in batches)
    assert sum(len(batch.positions) for _, batch in batches) == 101
    assert sum(batch.num_rows for _, batch in batches) == 104


def test_lengths_of_a_block_are_looked_up_once():
    cut, asked = stream(3000)
    walk(cut, 3000)
    assert asked == [3000]
