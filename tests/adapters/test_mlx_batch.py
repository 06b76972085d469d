"""A batch of MLX arrays: its types, and masks that are each batch's own."""

from __future__ import annotations

import mlx.core as mx
import pytest

import batchwright as bw
from shared import arrays_of


def test_mlx_arrays_have_the_types_of_the_contract(open_small):
    batch = open_small("mlx", fields=bw.Fields(position_ids=True, segment_ids=True, border_loss=False)).get_batch()
    integers = ("input_ids", "attention_mask", "labels", "targets", "position_ids", "segment_ids")
    assert {name: array.dtype for name, array in arrays_of(batch).items()} == dict.fromkeys(integers, mx.int64) | {
        "loss_mask": mx.float32
    }


@pytest.mark.parametrize("field", ["input_ids", "labels", "targets", "attention_mask", "loss_mask"])
def test_writing_into_an_mlx_batch_changes_no_other(open_small, values, field):
    loader, unwritten = open_small("mlx"), open_small("mlx")
    first = loader.get_batch()
    for _ in range(3):
        batch = loader.get_batch()
        array = getattr(batch, field)
        array[:, 3:] = 0
        assert getattr(batch, field)[:, 3:].sum().item() == 0
    assert values(first) == values(unwritten.get_batch())
    for _ in range(3):
        unwritten.get_batch()
    assert values(loader.get_batch()) == values(unwritten.get_batch())


@pytest.mark.parametrize(
    ("move", "named"),
    [
        (lambda batch: batch.to("gpu"), "MLX .* device"),
        (lambda batch: batch.pin_memory(), "MLX .* page-locked"),
    ],
)
def test_a_batch_of_mlx_arrays_has_nowhere_to_move(open_small, move, named):
    with pytest.raises(TypeError, match=named):
        move(open_small("mlx").get_batch())
