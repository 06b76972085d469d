"""A batch in parts: every row once, under the cap, and losses that add up to that of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright.batches.types import cut_rows
from refusals import refused


def a_batch(framework: str = "numpy", **batching):
    rng = np.random.default_rng(3)
    rows = [
        {
            "prompt": [n + 1] * int(rng.integers(1, 9)),
            "response": (response := rng.integers(1, 99, int(rng.integers(1, 30))).tolist()),
            "reward": float(n % 3),
            "group": n // 4,
            "old_log_probs": [float(n)] * len(response),
        }
        for n in range(24)
    ]
    batching = bw.Batching(24, **batching)
    return bw.RolloutDataLoader(rows, None, True, batch_size=batching, framework=framework).get_batch()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(50, 300))
def test_every_row_is_in_one_part_and_no_part_is_over_the_cap(lengths, max_tokens):
    parts = cut_rows(np.array(lengths), max_tokens)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    assert all(len(part) * max(lengths[row] for row in part) <= max_tokens for part in parts)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "mlx"])
def test_parts_have_the_rows_of_the_batch_without_the_padding_that_they_do_not_need(framework, side):
    batch = a_batch(framework, padding_side=side)
    parts = batch.parts(max_tokens=100)
    whole = {int(row): number for number, row in enumerate(np.asarray(batch.metadata["row"]).tolist())}
    seen = []
    for part in parts:
        assert type(part.input_ids) is type(batch.input_ids)
        assert part.input_ids.shape[0] * part.input_ids.shape[1] <= 100
        for number, row in enumerate(np.asarray(part.metadata["row"]).tolist()):
            seen.append(row)
            at = whole[row]
            for name in ("input_ids", "targets", "loss_mask", "advantages", "old_log_probs"):
                of_part, of_batch = (
                    np.asarray(b.metadata[name] if name in b.metadata else getattr(b, name)) for b in (part, batch)
                )
                here, there = (np.asarray(b.attention_mask)[n] > 0 for b, n in ((part, number), (batch, at)))
                assert of_part[number][here].tolist() == of_batch[at][there].tolist()
            assert float(part.metadata["reward"][number]) == float(batch.metadata["reward"][at])
        assert part.metadata["global_tokens"] == batch.metadata["global_tokens"]
        assert part.metadata["state"] == batch.metadata["state"]
    assert sorted(seen) == list(range(24))
    assert len(parts) > 3


def test_losses_of_parts_add_up_to_that_of_the_whole():
    torch = pytest.importorskip("torch")
    batch = a_batch("torch")
    network = torch.nn.Embedding(100, 100, dtype=torch.float64)

    def loss_of(part):
        log_probs = torch.log_softmax(network(part.input_ids), -1)
        log_probs = log_probs.gather(-1, part.targets.clamp(min=0)[..., None])[..., 0]
        return -(log_probs * part.metadata["advantages"] * part.loss_mask).sum() / part.metadata["global_tokens"]

    loss_of(batch).backward()
    expected = network.weight.grad.clone()
    network.weight.grad = None
    for part in batch.parts(max_tokens=100):
        loss_of(part).backward()
    torch.testing.assert_close(network.weight.grad, expected)


def test_conversations_have_parts_too():
    rows = [
        {"messages": [{"role": "user", "content": "ab" * n}, {"role": "assistant", "content": "c"}]} for n in range(8)
    ]
    loader = bw.ConversationDataLoader(rows, "bytes", 128, "chatml", batch_size=8, framework="numpy")
    batch = loader.get_batch()
    parts = batch.parts(max_tokens=200)
    assert sum(part.loss_mask.sum() for part in parts) == batch.metadata["global_tokens"]
    assert [name for part in parts for name in part.metadata["source"]] == batch.metadata["source"]


def test_a_row_that_is_longer_than_a_part_is_named():
    with refused(bw.SpecError, 5, parameter="max_tokens", row=22, remedy="max_tokens=33"):
        a_batch().parts(max_tokens=5)
    with refused(bw.SpecError, parameter="max_tokens", remedy="max_tokens=1"):
        a_batch().parts(max_tokens=0)


def test_packed_rows_are_refused():
    rows = [
        {"messages": [{"role": "user", "content": "ab" * n}, {"role": "assistant", "content": "c"}]} for n in range(8)
    ]
    loader = bw.ConversationDataLoader(
        rows, "bytes", 256, "chatml", batch_size=2, packing="best_fit", framework="numpy"
    )
    with refused(bw.SpecError, parameter="max_tokens", remedy="cu_seqlens=False"):
        loader.get_batch().parts(max_tokens=100)
