"""A batch: names say what arrays are aligned with; a dataclass; a mapping of what a model of Hugging Face accepts."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Mapping

import numpy as np
import pytest
import torch

import batchwright as bw
from batchwright.base.errors import SpecError
from refusals import refused
from shared import arrays_of

EVERY_KIND = pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "mlx"])


@pytest.fixture
def batch(open_loader, small_store):
    return open_loader(small_store).get_batch()


@pytest.fixture
def packed(open_loader, small_store):
    return open_loader(small_store, chunk_size=64, packing="best_fit", framework="torch").get_batch()


# Names


@EVERY_KIND
@pytest.mark.parametrize("settings", [{}, {"fields": bw.Fields(border_loss=False)}, {"packing": "best_fit"}])
def test_labels_belong_to_their_token_and_targets_to_the_place_before(open_loader, small_store, framework, settings):
    batch = open_loader(small_store, framework=framework, **settings).get_batch()
    arrays = {name: np.asarray(array) for name, array in arrays_of(batch).items() if name != "max_seqlen"}
    ids, labels, targets, loss = (arrays[name] for name in ("input_ids", "labels", "targets", "loss_mask"))
    assert (labels[:, 0] == -100).all()
    np.testing.assert_array_equal(labels[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(labels[labels != -100], ids[labels != -100])
    np.testing.assert_array_equal(targets != -100, loss > 0)
    np.testing.assert_array_equal(np.asarray(batch.last_targets), targets[:, -1])


def test_a_packed_sample_has_no_label_at_its_first_token(packed):
    begins = packed.position_ids == 0
    assert begins[:, 1:].any()
    assert (packed.labels[begins] == -100).all()


def test_labels_and_targets_are_made_once(batch):
    assert batch.labels is batch.labels
    assert batch.targets is batch.targets
    assert batch.labels.flags.c_contiguous
    assert batch.targets.flags.c_contiguous


def test_new_labels_make_new_targets_and_keep_the_last_of_each_row(batch):
    last = batch.targets[:, -1].copy()
    mine = np.where(np.arange(16) % 3 == 0, -100, batch.labels)
    batch.labels = mine
    assert batch.labels is mine
    np.testing.assert_array_equal(batch.targets[:, :-1], mine[:, 1:])
    np.testing.assert_array_equal(batch.targets[:, -1], last)


def test_new_targets_make_new_labels(batch):
    batch.targets = np.full((12, 16), -100)
    assert (batch.labels == -100).all()
    assert (batch.last_targets == -100).all()


def test_the_loss_mask_follows_new_targets_and_keeps_weights(batch):
    batch.loss_mask = np.full((12, 16), 0.5, np.float32)
    batch.labels = np.where(np.arange(16) < 8, -100, batch.labels)
    np.testing.assert_array_equal(batch.loss_mask, np.where(batch.targets != -100, 0.5, 0))
    batch.targets = np.full((12, 16), 3)
    assert (batch.loss_mask == 0.5).all()


def test_new_inputs_leave_labels_and_targets_as_they_were(batch):
    targets = batch.targets.copy()
    batch.input_ids = np.zeros_like(batch.input_ids)  # masked language modelling does this
    np.testing.assert_array_equal(batch.targets, targets)
    np.testing.assert_array_equal(batch.labels[:, 1:], targets[:, :-1])


def test_a_batch_made_by_hand_needs_tokens_alone():
    ids = np.array([[5, 6, 7]])
    assert bw.TrainingBatch(ids).targets.tolist() == [[-100, -100, -100]]
    made = bw.TrainingBatch(ids, labels=np.array([[-100, 6, 7]]))
    assert made.targets.tolist() == [[6, 7, -100]]
    assert made.loss_mask.tolist() == [[1, 1, 0]]
    assert made.attention_mask.tolist() == [[1, 1, 1]]
    assert made.metadata == {}
    with pytest.raises(AttributeError, match="no_such"):
        made.no_such  # noqa: B018
    with pytest.raises(AttributeError, match="metadata"):
        made.lables = ids
    with pytest.raises(TypeError, match="collate_fn=dict"):
        type(made)({**made})  # what Trainers of Hugging Face do to a mapping


@pytest.mark.parametrize("elsewhere", [lambda b: b.to("cpu"), lambda b: pickle.loads(pickle.dumps(b)), copy.copy])
def test_what_a_batch_shows_is_what_moves(open_loader, small_store, elsewhere):
    batch = open_loader(small_store, framework="torch").get_batch()
    batch["labels"][:, :4] = -100  # written in place: targets do not follow, but nothing is undone
    assert elsewhere(batch).labels.equal(batch.labels)
    labels = torch.full_like(batch.input_ids, -100)
    labels[:, 0] = batch.input_ids[:, 0]  # an encoder learns at the first place too
    batch.labels, batch.input_ids = labels, batch.input_ids.clone()
    assert elsewhere(batch).labels.equal(labels)
    assert elsewhere(batch).loss_mask.equal(batch.loss_mask)


def test_the_setting_that_said_what_labels_are_aligned_with_is_refused(open_loader, small_store):
    with refused(SpecError, parameter="alignment", remedy="batch.targets"):
        open_loader(small_store, alignment="same")
    with refused(SpecError, parameter="alignment", remedy="batch.targets"):
        bw.RolloutDataLoader([], alignment="next")


# A dataclass


def test_the_fields_of_the_document_come_first():
    names = [field.name for field in dataclasses.fields(bw.TrainingBatch)]
    assert names[:5] == ["input_ids", "attention_mask", "labels", "loss_mask", "metadata"]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_replace_changes_what_is_named_and_nothing_else(open_loader, small_store, framework):
    batch = open_loader(small_store, framework=framework).get_batch()
    same = dataclasses.replace(batch, metadata={"mine": 1})
    assert same.metadata == {"mine": 1}
    assert same.targets.tolist() == batch.targets.tolist()  # the last target of a row too, which no label has
    ignored = dataclasses.replace(batch, labels=batch.labels * 0 - 100)
    assert (ignored.targets[:, :-1] == -100).all()
    assert ignored.targets[:, -1].tolist() == batch.targets[:, -1].tolist()
    shifted = dataclasses.replace(batch, targets=batch.targets * 0 + 3)
    assert (shifted.labels[:, 1:] == 3).all()
    assert len(batch) == len(same) == 12


def test_asdict_has_every_field(packed):
    made = dataclasses.asdict(packed)
    assert made.keys() == {field.name for field in dataclasses.fields(packed)}
    assert made["labels"].equal(packed.labels)
    assert made["metadata"]["source"] == packed.metadata["source"]


def test_batches_are_equal_only_to_themselves(batch):
    assert batch == batch
    assert batch != dataclasses.replace(batch)
    assert batch in {batch}


# A mapping


def test_plain_rows_map_to_tokens_mask_and_labels(batch):
    assert isinstance(batch, Mapping)
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert batch["labels"] is batch.labels
    assert "targets" not in batch
    with pytest.raises(KeyError):
        batch["loss_mask"]


def test_packed_rows_map_to_what_keeps_samples_apart(packed):
    assert {**packed}.keys() == {
        *("input_ids", "labels", "position_ids", "use_cache"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    }
    assert packed["cu_seq_lens_q"] is packed.cu_seqlens
    assert packed["use_cache"] is False


def test_an_item_can_be_replaced_and_not_deleted(batch):
    batch["labels"] = batch.labels * 0 - 100
    assert (batch.targets[:, :-1] == -100).all()
    with pytest.raises(KeyError):
        batch["loss_mask"] = batch.loss_mask
    with pytest.raises(TypeError, match="dict"):
        del batch["labels"]


def test_packed_rows_without_position_ids_are_not_mapped(open_loader, small_store):
    fields = bw.Fields(position_ids=False)
    batch = open_loader(small_store, chunk_size=64, packing="best_fit", fields=fields).get_batch()
    with refused(SpecError, parameter="position_ids", remedy="position_ids=True"):
        dict(batch)


def test_preference_pairs_are_not_the_input_of_one_model():
    pairs = [{"prompt": "?", "chosen": "yes", "rejected": "no"}] * 8
    loader = bw.ConversationDataLoader(
        pairs, "bytes", 192, "chatml", delivery=bw.Delivery(check=False), framework="torch"
    )
    batch = loader.get_batch()
    with refused(SpecError, parameter="batch", remedy="chosen"):
        dict(**batch)
    assert rows_that_lightning_finds(batch) == 16


def rows_that_lightning_finds(batch):
    from lightning.pytorch.utilities.data import extract_batch_size  # takes seconds: not while tests are collected

    return extract_batch_size(batch)


def test_lightning_finds_the_number_of_rows(open_loader, small_store, packed):
    assert rows_that_lightning_finds(open_loader(small_store, framework="torch").get_batch()) == 12
    assert isinstance(packed.input_ids, torch.Tensor)
