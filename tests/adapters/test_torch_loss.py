"""The loss that a Hugging Face model computes from our batches is the one computed by hand: shifted once, not twice."""

from __future__ import annotations

import pytest
import torch

import batchwright as bw

VOCABULARY = 257


@pytest.fixture
def opened(open_loader, small_store):
    return lambda **given: open_loader(small_store, **({"framework": "torch", "batch_size": 4} | given))


def logits_of(ids):
    """What a language model would say after each token: a fixed, random opinion about every token and place."""
    generator = torch.Generator().manual_seed(0)
    opinions = torch.randn(VOCABULARY, ids.shape[1], VOCABULARY, generator=generator)
    return opinions[ids, torch.arange(ids.shape[1])]


def shifted_loss(logits, labels):
    """The loss of a Hugging Face model, which shifts the labels."""
    from transformers.loss.loss_utils import ForCausalLMLoss  # takes seconds: not while tests are collected

    return ForCausalLMLoss(logits=logits, labels=labels, vocab_size=VOCABULARY)


def loss_by_hand(logits, tokens, counts):
    """Mean of -log p(next token), over every place t whose next token, tokens[t + 1], counts."""
    total, number, logits = 0.0, 0, logits.detach()
    for row in range(len(tokens)):
        for place in range(tokens.shape[1] - 1):
            if counts[row, place]:
                total -= float(torch.log_softmax(logits[row, place], -1)[tokens[row, place + 1]])
                number += 1
    return total / number


def test_a_model_that_shifts_gets_the_loss_computed_by_hand_from_labels(opened):
    batch = opened().get_batch()
    logits = logits_of(batch.input_ids)
    loss = shifted_loss(logits, batch.labels)
    assert float(loss) == pytest.approx(loss_by_hand(logits, batch.input_ids, torch.ones(4, 15)), rel=1e-5)


def test_targets_would_be_shifted_twice_by_such_a_model(opened):
    batch = opened().get_batch()
    logits = logits_of(batch.input_ids)
    right = loss_by_hand(logits, batch.input_ids, torch.ones(4, 15))
    twice = shifted_loss(logits, batch.targets)
    assert float(twice) != pytest.approx(right, rel=1e-3)


def test_a_loop_that_does_not_shift_gets_the_loss_computed_by_hand_from_targets(opened):
    batch = opened().get_batch()
    logits = logits_of(batch.input_ids)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.view(-1))
    tokens = torch.cat([batch.input_ids, batch.targets[:, -1:]], dim=1)
    assert float(loss) == pytest.approx(loss_by_hand(logits, tokens, torch.ones(4, 16)), rel=1e-5)


def test_documents_are_not_predicted_from_one_another_either_way(opened):
    batch = opened(fields=bw.Fields(border_loss=False)).get_batch()
    logits = logits_of(batch.input_ids)
    counts = batch.loss_mask
    assert 0 < counts.sum() < counts.numel()
    tokens = torch.cat([batch.input_ids, opened().get_batch().targets[:, -1:]], dim=1)
    own_loop = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    assert float(own_loop) == pytest.approx(loss_by_hand(logits, tokens, counts), rel=1e-5)
    shifting = shifted_loss(logits, batch.labels)
    assert float(shifting) == pytest.approx(loss_by_hand(logits, batch.input_ids, counts[:, :-1]), rel=1e-5)


def test_a_real_model_gives_the_same_loss_and_learns_from_the_batch(opened):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    batch = opened().get_batch()
    made = model(**batch)
    by_hand = loss_by_hand(made.logits, batch.input_ids, torch.ones(4, 15))
    assert made.loss.item() == pytest.approx(by_hand, rel=1e-4)
    made.loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0
