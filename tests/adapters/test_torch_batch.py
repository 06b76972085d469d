"""A batch of tensors: one block of tokens, masks shared until somebody writes into them, and copies in one piece."""

from __future__ import annotations

import copy
import pickle
import weakref

import numpy as np
import pytest
import torch

import batchwright as bw
from batchwright.batches.types import TrainingBatch
from shared import arrays_of


def storage_of(tensor):
    return tensor.untyped_storage()._cdata


# What it is


def test_fields_have_the_dtypes_of_the_contract(open_small):
    batch = open_small(fields=bw.Fields(position_ids=True, segment_ids=True, border_loss=False)).get_batch()
    arrays = arrays_of(batch)
    assert {name: array.dtype for name, array in arrays.items()} == {
        "input_ids": torch.int64,
        "attention_mask": torch.int64,
        "labels": torch.int64,
        "targets": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
        "segment_ids": torch.int64,
    }
    assert all(array.shape == (12, 16) for array in arrays.values())


@pytest.mark.parametrize("settings", [{}, {"fields": bw.Fields(border_loss=False)}, {"split": "val"}])
def test_tensors_hold_what_the_arrays_hold(open_small, settings):
    for ours, theirs in zip(open_small(**settings), open_small(**settings, framework="numpy"), strict=True):
        assert arrays_of(ours).keys() == arrays_of(theirs).keys()
        for name, array in arrays_of(ours).items():
            np.testing.assert_array_equal(array.numpy(), getattr(theirs, name))


@pytest.mark.parametrize("settings", [{}, {"fields": bw.Fields(border_loss=False)}, {"split": "val"}])
def test_labels_and_targets_can_be_viewed_flat(open_small, settings):
    batch = open_small(**settings).get_batch()
    assert batch.targets.view(-1).equal(batch.targets.flatten())
    assert batch.labels.view(-1).equal(batch.labels.flatten())
    assert batch.labels[:, 1:].equal(batch.targets[:, :-1])
    assert (batch.labels[:, 0] == -100).all()


# Moving


def test_a_copy_to_a_device_moves_the_tokens_once(open_small, monkeypatch):
    copied = []
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **k: copied.append(tuple(self.shape)) or to(self, *a, **k))
    first, second = (open_small().get_batch() for _ in range(2))
    first.to("meta")
    copied.clear()
    moved = second.to("meta")
    assert copied == [(12, 17)]  # [rows, tokens + 1], and no mask: those are there since the first batch
    assert all(array.device.type == "meta" for array in arrays_of(moved).values())


def test_a_moved_batch_says_the_same_about_itself(open_small, values):
    batch = open_small(fields=bw.Fields(border_loss=False, position_ids=True)).get_batch()
    assert values(batch.to("cpu")) == values(batch)


def test_a_moved_batch_does_not_hold_the_memory_that_was_copied():
    block = torch.arange(6).reshape(2, 3)
    metadata = (lambda kept: {"sum": 15}, block)
    batch = TrainingBatch(block[:, :-1], torch.ones(2, 2), targets=block[:, 1:], metadata=metadata)
    del metadata
    moved, block = batch.to("meta"), weakref.ref(block)
    del batch
    assert block() is None
    assert moved.metadata == {"sum": 15}


def test_a_field_that_was_assigned_is_what_moves(open_small):
    batch = open_small().get_batch()
    batch.targets = torch.full_like(batch.targets, -100)
    batch.input_ids = batch.input_ids.clone()
    batch.input_ids[:, 0] = 0
    moved = batch.to("cpu")
    assert (moved.targets == -100).all()
    assert (moved.input_ids[:, 0] == 0).all()
    assert pickle.loads(pickle.dumps(batch)).targets.equal(batch.targets)


def test_all_fields_move_and_what_is_no_tensor_stays(open_small):
    batch = open_small(fields=bw.Fields(position_ids=True, segment_ids=True, border_loss=False)).get_batch()
    batch.max_seqlen = 16
    moved = arrays_of(batch.to("meta"))
    assert moved.keys() == arrays_of(batch).keys()
    assert moved.pop("max_seqlen") == 16
    assert {array.device.type for array in moved.values()} == {"meta"}


def test_a_batch_of_arrays_says_why_it_cannot_move(open_small):
    with pytest.raises(TypeError, match="framework='torch'"):
        open_small(framework="numpy").get_batch().to("cpu")


def test_a_batch_built_by_hand_moves_too():
    ids = torch.arange(6).reshape(2, 3)
    batch = TrainingBatch(ids[:, :-1], torch.ones(2, 2), targets=ids[:, 1:])
    assert batch.to("meta").input_ids.device.type == "meta"
    assert batch.to("cpu", non_blocking=True).targets.equal(ids[:, 1:])


@pytest.mark.parametrize("again", [lambda b: pickle.loads(pickle.dumps(b)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_batch_copies_and_pickles_whole(open_small, values, framework, again):
    for settings in ({}, {"fields": bw.Fields(border_loss=False, position_ids=True)}):
        batch = open_small(framework=framework, **settings).get_batch()
        assert values(again(batch)) == values(batch)


# Masks


def test_batches_share_their_masks(open_small):
    loader = open_small()
    one, two = loader.get_batch(), loader.get_batch()
    assert one.attention_mask is two.attention_mask
    assert one.loss_mask is two.loss_mask


@pytest.mark.parametrize(
    "write",
    [
        lambda batch: batch.loss_mask.zero_(),
        lambda batch: batch.loss_mask.__setitem__((slice(None), 0), 0),
        lambda batch: batch.loss_mask[:, 3:].fill_(0),
        lambda batch: batch.loss_mask.detach().mul_(2),
        lambda batch: batch.attention_mask.masked_fill_(batch.input_ids > 100, 0),
    ],
)
def test_no_later_batch_sees_what_somebody_wrote_into_a_mask(open_small, write):
    loader = open_small()
    write(loader.get_batch())
    for batch in loader.get_iterator():  # among them those that lie in the same block as the first
        assert (batch.attention_mask == 1).all()
        assert (batch.loss_mask == 1).all()
    assert (open_small().get_batch().loss_mask == 1).all()


def test_a_mask_that_was_written_into_moves_as_it_is(open_small):
    batch = open_small().get_batch()
    batch.loss_mask[:, :4] = 0
    moved = batch.to("cpu")
    assert (moved.loss_mask[:, :4] == 0).all()
    assert (pickle.loads(pickle.dumps(batch)).loss_mask[:, :4] == 0).all()
    assert (open_small().get_batch().to("cpu").loss_mask == 1).all()


def test_masks_keep_their_place_and_type_under_other_defaults(open_small):
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            batch = open_small(batch_size=11).get_batch()
            arrays = arrays_of(batch)
    finally:
        torch.set_default_dtype(dtype)
    assert {array.device.type for array in arrays.values()} == {"cpu"}
    assert batch.loss_mask.dtype == torch.float32


def test_a_batch_taken_in_inference_mode_does_not_spoil_the_next_one_for_training(open_small):
    loader = open_small(batch_size=10)
    table = torch.nn.Embedding(257, 4)
    with torch.inference_mode():
        loader.get_batch()
    batch = loader.get_batch()  # of the same block, with the same masks
    (table(batch.input_ids) * batch.loss_mask[..., None]).sum().backward()
    assert table.weight.grad is not None
    with torch.inference_mode():
        loader.get_batch()
