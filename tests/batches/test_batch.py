"""Fields of a batch: masks that are shared, and what document borders and padding mean for labels and loss."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.batches.batch import Block, add_border_fields, constant_mask, mask_padding
from batchwright.batches.settings import Fields


def block_of(tokens, weight=None):
    tokens = np.array(tokens, np.int64)
    rows = len(tokens)
    weight = None if weight is None else np.array(weight, np.float32)
    return Block(tokens, np.zeros(rows, np.int32), np.arange(rows), weight)


def test_a_constant_mask_is_shared_and_cannot_be_written():
    mask = constant_mask(3, 4, "float32")
    assert mask is constant_mask(3, 4, "float32")
    assert mask.tolist() == [[1.0] * 4] * 3
    with pytest.raises(ValueError, match="read-only"):
        mask[0, 0] = 0


def test_borders_restart_positions_and_segments_and_mask_the_first_token_of_a_document():
    block = block_of([[10, 11, 20, 21, 22, 30]])  # documents begin at the third and the last place
    fields = Fields(position_ids=True, segment_ids=True, border_loss=False).with_defaults(False)
    add_border_fields(block, [np.array([2, 5])], fields)
    assert block.extra["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert block.extra["segment_ids"].tolist() == [[1, 1, 2, 2, 2]]
    assert block.extra["targets"].tolist() == [[11, -100, 21, 22, -100]]
    assert block.extra["loss_mask"].tolist() == [[1, 0, 1, 1, 0]]
    assert {name: array.dtype.name for name, array in block.extra.items()} == {
        "position_ids": "int64",
        "segment_ids": "int64",
        "targets": "int64",
        "loss_mask": "float32",
    }


@given(st.lists(st.sets(st.integers(1, 8)), min_size=1, max_size=5))
def test_border_fields_equal_a_loop_over_tokens(borders):
    block = block_of(np.arange(9 * len(borders)).reshape(-1, 9))
    add_border_fields(
        block,
        [np.array(sorted(b), np.int64) for b in borders],
        Fields(position_ids=True, segment_ids=True, border_loss=False).with_defaults(False),
    )
    for row, begins in enumerate(borders):
        place, segment = -1, 1
        for t in range(8):
            place, segment = (0, segment + 1) if t in begins else (place + 1, segment)
            assert block.extra["position_ids"][row, t] == place
            assert block.extra["segment_ids"][row, t] == segment
            assert block.extra["loss_mask"][row, t] == (t + 1 not in begins)
            assert block.extra["targets"][row, t] == (-100 if t + 1 in begins else block.tokens[row, t + 1])


def test_only_what_was_asked_for_is_made():
    block = block_of([[1, 2, 3]])
    add_border_fields(block, [np.array([1])], Fields(position_ids=True).with_defaults(False))
    assert list(block.extra) == ["position_ids"]
    assert not Fields().need_borders
    assert not Fields().with_defaults(False).need_borders


def test_rows_of_weight_0_teach_nothing():
    block = block_of([[1, 2, 3], [4, 5, 6]], weight=[1, 0])
    mask_padding(block)
    assert block.extra["targets"].tolist() == [[2, 3], [-100, -100]]
    assert block.extra["loss_mask"].tolist() == [[1, 1], [0, 0]]
    assert block.extra["loss_mask"].dtype == np.float32


def test_padding_keeps_what_borders_masked():
    block = block_of([[1, 2, 3], [4, 5, 6]], weight=[1, 0])
    add_border_fields(block, [np.array([2]), np.array([], np.int64)], Fields(border_loss=False).with_defaults(False))
    mask_padding(block)
    assert block.extra["targets"].tolist() == [[2, -100], [-100, -100]]
    assert block.extra["loss_mask"].tolist() == [[1, 0], [0, 0]]


def test_a_block_without_padding_is_left_alone():
    block = block_of([[1, 2, 3]])
    mask_padding(block)
    assert block.extra == {}
