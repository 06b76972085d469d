"""One number for some steps: the same for any ranks, workers, batch cut and restart, and another for other data."""

from __future__ import annotations

import numpy as np
import pytest

import batchwright as bw
from batchwright.audit.digesting import combine, digest, digest_steps, row_hashes, sample_hashes
from batchwright.base.errors import PlanError
from refusals import refused


def of_loader(loader, steps):
    return [row_hashes(loader.get_batch().input_ids) for _ in range(steps)]


def test_the_number_is_pinned():
    # People write these numbers down and compare them years later, on other machines.
    assert combine([row_hashes([[0, 1, 2], [3, 4, 5]])]) == "e7ce16b2f4394136"


def test_row_hashes_do_not_depend_on_layout_or_type():
    ids = np.arange(12).reshape(3, 4)
    strided = ids.repeat(2, 1)[:, ::2]
    for same in (ids.astype(np.uint16), ids.astype(">i8"), np.asfortranarray(ids), strided, ids.tolist()):
        assert np.array_equal(row_hashes(same), row_hashes(ids))


def test_row_hashes_of_a_tensor_are_those_of_its_array():
    torch = pytest.importorskip("torch")
    ids = np.arange(12).reshape(3, 4)
    assert np.array_equal(row_hashes(torch.from_numpy(ids)), row_hashes(ids))


def test_steps_are_what_a_loader_hands_over(small_store, open_loader):
    loader = open_loader(small_store)
    steps = list(digest_steps(small_store, loader, 0, 9))
    handed = of_loader(loader, 10)
    assert [step.step for step in steps] == list(range(10))
    assert [step.position for step in steps] == list(range(0, 120, 12))
    for step, hashes in zip(steps, handed, strict=True):
        assert np.array_equal(step.row_hashes, hashes)
    assert combine(step.row_hashes for step in steps) == combine(handed)


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (3, 0), (5, 0), (2, 1)])
def test_ranks_together_give_the_same_number(small_store, open_loader, ranks, workers):
    loaders = [
        open_loader(
            small_store,
            rank=rank,
            world_size=ranks,
            batch_size=bw.Batching(12, uneven=True),
            delivery=bw.Delivery(workers=workers),
        )
        for rank in range(ranks)
    ]
    parts = zip(*(of_loader(loader, 4) for loader in loaders), strict=True)
    joined = combine(hashes for step in parts for hashes in step)
    assert joined == digest(small_store, loaders[0], 0, 3, batch_size=12)


def test_another_cut_of_the_same_positions_gives_the_same_number(small_store, open_loader):
    plan = open_loader(small_store).plan
    assert digest(small_store, plan, 0, 3, batch_size=12) == digest(small_store, plan, 0, 7, batch_size=6)


def test_options_that_only_change_targets_do_not_change_the_number(small_store, open_loader):
    plain, borders = open_loader(small_store), open_loader(small_store, fields=bw.Fields(border_loss=False))
    assert combine(of_loader(plain, 3)) == combine(of_loader(borders, 3))


def test_another_seed_gives_another_number(small_store, open_loader):
    one, two = (open_loader(small_store, seed=seed) for seed in (7, 8))
    assert digest(small_store, one, 0, 3) != digest(small_store, two, 0, 3)


def test_rows_over_the_border_of_shards_are_those_of_the_loader(sharded_store, open_loader):
    loader = open_loader(sharded_store)
    assert digest(sharded_store, loader, 3, 8) == combine(of_loader(loader, 9)[3:])


@pytest.mark.parametrize("epoch_end", ["drop", "short", "pad", "wrap"])
def test_steps_over_the_end_of_an_epoch_are_those_of_the_loader(small_store, open_loader, epoch_end):
    loader = open_loader(small_store, epochs=None, batch_size=bw.Batching(32, epoch_end=epoch_end))
    edge = loader.get_num_batches()
    loader.seek(step=edge - 2)
    handed = []
    for _ in range(5):
        batch = loader.get_batch()
        handed.append(row_hashes(batch.input_ids[batch.metadata["weight"] > 0]))
    assert digest(small_store, loader, edge - 2, edge + 2) == combine(handed)


def test_a_second_epoch_of_a_mixture_with_an_end_is_followed(small_store, open_loader):
    loader = open_loader(small_store, weights=bw.Mixture({"web": 0.5, "code": 0.5}, num_rows=50), epochs=2)
    assert loader.get_num_batches() == 4
    assert digest(small_store, loader, 0, 7) == combine(of_loader(loader, 8))


def test_a_run_that_changed_its_batch_size_is_followed(small_store, open_loader):
    loader = open_loader(small_store)
    handed = of_loader(loader, 3)
    handed += [row_hashes(loader.get_batch(5).input_ids) for _ in range(4)]
    state = loader.state_dict()
    steps = list(digest_steps(small_store, state, 0, 6))
    assert [len(step.row_hashes) for step in steps] == [12, 12, 12, 5, 5, 5, 5]
    assert combine(step.row_hashes for step in steps) == combine(handed)


def test_many_steps_are_hashed_in_parts_that_join(long_store, monkeypatch):
    from batchwright.audit import digesting

    plan = bw.PretrainDataLoader(long_store, chunk_size=64, batch_size=16, framework="numpy").plan
    at_once = digest(long_store, plan, 0, 99)
    monkeypatch.setattr(digesting, "_TOKENS_AT_ONCE", 3000)
    assert digest(long_store, plan, 0, 99) == at_once


def test_backward_steps_are_refused_at_once(small_store, open_loader):
    with refused(PlanError, "5-3", remedy="3-5"):
        digest_steps(small_store, open_loader(small_store), 5, 3)


def test_a_negative_step_is_refused(small_store, open_loader):
    with refused(PlanError, "step -1"):
        digest_steps(small_store, open_loader(small_store), -1, 3)


# Rows of whole documents


def open_talk(store, **given):
    settings = {"max_length": 120, "batch_size": 6, "framework": "numpy", "epochs": None}
    return bw.ConversationDataLoader(store, delivery=bw.Delivery(check=False), **settings | given)


def of_samples(loader, steps):
    return [sample_hashes(loader.get_batch()) for _ in range(steps)]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"batch_size": bw.Batching(6, pad_to=32)},
        {"batch_size": bw.Batching(6, pad_to="max_length", padding_side="left")},
        {"max_length": 256, "packing": "best_fit"},
    ],
    ids=["longest", "a multiple", "left", "packed"],
)
def test_conversations_have_the_number_of_what_a_loader_hands_over_however_it_pads(chat_store, given):
    loader = open_talk(chat_store, **given)
    assert combine(of_samples(loader, 9)) == digest(chat_store, loader, 0, 8)


def test_packed_text_has_the_number_of_what_a_loader_hands_over(small_store, open_loader):
    loader = open_loader(small_store, chunk_size=64, packing="best_fit", epochs=None)
    assert combine(of_samples(loader, 20)) == digest(small_store, loader, 0, 19)


def test_preference_pairs_have_a_hash_for_each_side():
    rows = [{"prompt": f"q{n}", "chosen": f"good {n}", "rejected": "bad" * (n % 5 + 1)} for n in range(20)]
    loader = open_talk(rows, tokenizer="bytes", chat_template="chatml")
    (step,) = digest_steps(loader.store, loader, 0, 0)
    assert np.array_equal(step.row_hashes, sample_hashes(loader.get_batch()))
    assert len(step.row_hashes) == 2 * 6


def test_ranks_together_give_the_same_number_of_conversations_as_wide_as_their_longest(chat_store):
    batching = bw.Batching(6, uneven=True)
    loaders = [open_talk(chat_store, rank=rank, world_size=4, batch_size=batching) for rank in range(4)]
    parts = zip(*(of_samples(loader, 7) for loader in loaders), strict=True)
    assert combine(hashes for step in parts for hashes in step) == digest(chat_store, loaders[0], 0, 6, batch_size=6)


def test_another_mask_over_the_same_tokens_gives_another_number(chat_store):
    one, two = (open_talk(chat_store, loss=loss) for loss in ("assistant", "assistant, without end of turn"))
    ids = [batch.input_ids for batch in (one.get_batch(), two.get_batch())]
    assert np.array_equal(*ids)
    assert digest(chat_store, one, 0, 3) != digest(chat_store, two, 0, 3)


def test_tokens_are_counted_without_padding(chat_store):
    loader = open_talk(chat_store)
    (step,) = digest_steps(chat_store, loader, 0, 0)
    assert step.num_tokens == loader.get_batch().attention_mask.sum()
