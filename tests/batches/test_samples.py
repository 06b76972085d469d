"""Rows of samples laid out: what every token is, checked against rows that are put together one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batches.batch import Block, Padding, add_sample_fields, seqlens_of
from batchwright.batches.row_index import RowSpec, SpanWeights, plan_rows
from batchwright.batches.samples import SampleRows
from batchwright.batches.settings import Fields

PAD = 999


class Tokens:
    """A stream in two shards: tokens 0, 1, 2, ... as they are numbered."""

    name, split, fingerprint, dtype = "numbers", "train", "numbers", np.dtype(np.uint16)

    def __init__(self, count, shard):
        self.shards = [np.arange(shard, dtype=np.uint16), np.arange(shard, count, dtype=np.uint16)]
        self.first = np.array([0, shard])

    def addresses(self, starts, length):
        which = np.searchsorted(self.first, starts, side="right") - 1
        base = np.array([shard.ctypes.data for shard in self.shards])[which]
        return base + 2 * (starts - self.first[which]), np.ones(len(starts), bool), self.shards


def rows_over(lengths, spec, masks=None, split_at=0):
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    index = plan_rows(borders, spec, trained=masks)
    return SampleRows(Tokens(int(borders[-1]), int(borders[split_at])), index, spec, borders, masks)


def laid_out(rows, index, width=None, **how):
    width = rows.row_tokens if width is None else width
    out = np.full((len(index), width + 1), -7, np.int64)
    return rows.padded(np.array(index), np.full(len(index), width), out, pad=PAD, **how)


def fields_of(laid, **fields):
    rows = len(laid.tokens)
    block = Block(laid.tokens, np.zeros(rows, np.int32), np.arange(rows), None)
    add_sample_fields(block, laid, Fields(**fields).with_defaults(False))
    return block


def test_a_packed_row_token_by_token():
    # Documents of 4, 3 and 2 tokens in rows of 10: one row, and one place empty.
    rows = rows_over([4, 3, 2], RowSpec(10, "best_fit", "drop"))
    block = fields_of(laid_out(rows, [0]), segment_ids=True, position_ids=True, cu_seqlens=True)
    assert block.tokens[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, PAD, PAD]
    assert block.extra["targets"][0].tolist() == [1, 2, 3, -100, 5, 6, -100, 8, -100, -100]
    assert block.extra["loss_mask"][0].tolist() == [1, 1, 1, 0, 1, 1, 0, 1, 0, 0]
    assert block.extra["attention_mask"][0].tolist() == [1] * 9 + [0]
    assert block.extra["segment_ids"][0].tolist() == [1, 1, 1, 1, 2, 2, 2, 3, 3, 0]
    assert block.extra["position_ids"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 0]
    borders, longest = seqlens_of(block.seams)
    assert borders.tolist() == [0, 4, 7, 9, 10]
    assert longest == 4


def test_a_full_piece_of_a_cut_document_predicts_the_next_token():
    rows = rows_over([10], RowSpec(4, "best_fit", "split"))
    block = fields_of(laid_out(rows, [0, 1, 2]))
    assert block.extra["targets"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, -100, -100, -100]]


def test_totals_count_the_target_that_follows_a_full_piece():
    rows = rows_over([10], RowSpec(4, "best_fit", "split"))  # pieces of 4, 4 and 2 tokens
    index = np.arange(rows.num_rows)
    assert rows.totals(index) == (laid_out(rows, index).weight.sum(), 3) == (9, 3)


def test_left_padding_moves_rows_to_the_right():
    rows = rows_over([2, 4], RowSpec(5, None, "drop"))
    block = fields_of(laid_out(rows, [0, 1], left=True), position_ids=True)
    assert block.tokens.tolist() == [[PAD, PAD, PAD, 0, 1, PAD], [PAD, 2, 3, 4, 5, PAD]]
    assert block.extra["targets"].tolist() == [[-100, -100, -100, 1, -100], [-100, 3, 4, 5, -100]]
    assert block.extra["attention_mask"].tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]
    assert block.extra["position_ids"].tolist() == [[0, 0, 0, 0, 1], [0, 0, 1, 2, 3]]


def test_a_weight_belongs_to_the_token_that_is_predicted():
    # Tokens 2 and 3 of the document weigh 0.5, so labels 1 and 2 do.
    masks = SpanWeights(np.array([0, 3]), np.array([2, 4, 6], np.int32), np.array([0, 0.5, 0], np.float32))
    rows = rows_over([6], RowSpec(6, None, "drop", "assistant"), masks)
    block = fields_of(laid_out(rows, [0]))
    assert block.extra["loss_mask"][0].tolist() == [0, 0.5, 0.5, 0, 0, 0]
    assert block.extra["targets"][0].tolist() == [-100, 2, 3, -100, -100, -100]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_are_their_documents_side_by_side(data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=20))
    capacity = data.draw(st.integers(1, 15))
    packing = data.draw(st.sampled_from(["best_fit", "first_fit", "greedy", None]))
    spec = RowSpec(capacity, packing, "split")
    rows = rows_over(lengths, spec, split_at=data.draw(st.integers(0, len(lengths) - 1)))
    index = data.draw(st.lists(st.integers(0, rows.num_rows - 1), min_size=1, max_size=6))
    left = data.draw(st.booleans())
    laid = laid_out(rows, index, left=left)
    block = fields_of(laid, segment_ids=True, position_ids=True)
    for row, number in enumerate(index):
        pieces = [range(a, b) for _, a, b in rows.pieces_of(number)]
        length = int(rows.lengths(np.array([number]))[0])
        inputs = [token for piece in pieces for token in piece][
            :length
        ]  # the label of a piece that goes on is one more
        at = capacity - length if left else 0
        real = slice(at, at + length)
        assert block.tokens[row, :-1][real].tolist() == inputs
        assert block.extra["attention_mask"][row].sum() == length
        segments, positions, labels = [], [], []
        for segment, piece in enumerate(pieces, 1):
            count = min(len(piece), capacity)
            segments += [segment] * count
            positions += range(count)
            labels += [*piece[1:], -100] if len(piece) <= capacity else piece[1:]
        assert block.extra["segment_ids"][row][real].tolist() == segments
        assert block.extra["position_ids"][row][real].tolist() == positions
        assert block.extra["targets"][row][real].tolist() == labels
        outside = np.ones(capacity, bool)
        outside[real] = False
        assert (block.tokens[row, :-1][outside] == PAD).all()
        assert (block.extra["targets"][row][outside] == -100).all()
        assert not block.extra["segment_ids"][row][outside].any()


@pytest.mark.parametrize(
    ("to", "widths"),
    [
        ("longest", [3, 64, 65]),
        ("max_length", [100, 100, 100]),
        (32, [32, 64, 96]),
        (64, [64, 64, 100]),
        ((16, 70), [16, 70, 70]),
        ((16,), [16, 100, 100]),
    ],
)
def test_widths_of_batches(to, widths):
    assert Padding(to).widths(np.array([3, 64, 65]), 100).tolist() == widths


def test_rows_that_touch_a_document_are_found():
    rows = rows_over([4, 9, 3], RowSpec(4, "best_fit", "split"))
    starts = [0, 4, 13, 16]
    for document, length in enumerate([4, 9, 3]):
        expected = [
            row
            for row in range(rows.num_rows)
            if any(a < starts[document] + length and b > starts[document] for _, a, b in rows.pieces_of(row))
        ]
        assert rows.rows_touching(starts[document], starts[document] + length) == expected
