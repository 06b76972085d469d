"""Conversations in Hugging Face's Trainer: its loss is the one computed by hand, and no sample sees another."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers  # its attributes are imported when they are used: the trainer takes seconds
from torch.nn.functional import log_softmax, scaled_dot_product_attention

import batchwright as bw
from batchwright.adapters import hf
from batchwright.adapters.hf import feed
from batchwright.base.errors import SpecError
from refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # torch counts this machine's cores

MAX_LENGTH = 192
UNCHECKED = bw.Delivery(check=False)


def question(n):
    return f"{n} + {n}" + "?" * (n % 5)


def answer(n):
    return f"{2 * n}" + "!" * (n % 3)


CONVERSATIONS = [
    {"messages": [{"role": "user", "content": question(n)}, {"role": "assistant", "content": answer(n)}]}
    for n in range(23)
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """These models are small: on a busy machine, threads that wait for each other take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    store = tmp_path_factory.mktemp("sft") / "sft.store"
    recipe = bw.DatasetRecipe().add_ingredient(CONVERSATIONS, name="sums")
    bw.bake(recipe.prepare_step(bw.chat("bytes", "chatml")), to=store, workers=0, show_progress=False)
    fixed = {"max_length": MAX_LENGTH, "batch_size": 4, "delivery": UNCHECKED}
    return lambda **given: bw.ConversationDataLoader(store, **(fixed | given))


def model(attention="sdpa"):
    transformers.set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = {"vocab_size": 257, "initializer_range": 0.4, "attn_implementation": attention} | sizes
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def trainer_of(network, loader, folder, **given):
    fixed = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, **(fixed | given))
    trainer = transformers.Trainer(model=network, args=arguments)
    trainer.remove_callback(transformers.PrinterCallback)
    feed(trainer, loader)
    return trainer


def mean_loss_by_hand(network):
    """Of all conversations: each spelled out here and read alone, and what the assistant says and its end learned."""
    losses = []
    for n in range(len(CONVERSATIONS)):
        before = f"<|im_start|>user\n{question(n)}<|im_end|>\n<|im_start|>assistant\n".encode()
        learned = f"{answer(n)}<|im_end|>".encode()
        with torch.no_grad():
            opinions = log_softmax(network(torch.tensor([list(before + learned)])).logits[0], -1)
        losses += [-float(opinions[len(before) + i - 1, token]) for i, token in enumerate(learned)]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("packing", [None, "best_fit"])
def test_the_loss_of_a_step_is_the_mean_over_trained_tokens_computed_by_hand(opened, tmp_path, packing, accumulated):
    num_rows = opened(packing=packing).plan.epoch_rows
    assert num_rows == 23 if packing is None else num_rows < 15
    batching = bw.Batching(-(-num_rows // accumulated), epoch_end="pad")  # a step is an epoch
    loader = opened(packing=packing, batch_size=batching)
    network = model()
    by_hand = mean_loss_by_hand(network)
    trainer = trainer_of(network, loader, tmp_path, gradient_accumulation_steps=accumulated)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(by_hand, rel=1e-5)


# Samples of a row


def worst_difference(network, batch, logits):
    """Between the logits of the samples of a batch and those of each sample alone."""
    worst = 0.0
    for row in range(len(batch)):
        for sample in range(1, int(batch.segment_ids[row].max()) + 1):
            is_mine = batch.segment_ids[row] == sample
            alone = network(batch.input_ids[row][is_mine][None], use_cache=False).logits[0]
            worst = max(worst, float((alone - logits[row][is_mine]).abs().max()))
    return worst


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_packed_sample_has_the_logits_that_it_has_alone(opened, attention):
    batch = opened(packing="best_fit", framework="torch").get_batch()
    assert int(batch.segment_ids.max()) > 1
    network = model(attention).double().eval()
    assert worst_difference(network, batch, network(**batch).logits) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("given", ["attention_mask", "use_cache"])
def test_with_an_attention_mask_or_a_cache_transformers_would_let_samples_see_each_other(opened, given):
    # Why a batch leaves out both. Where a release does otherwise, it need not any more.
    batch = opened(packing="best_fit", framework="torch").get_batch()
    network = model().double().eval()
    inputs = dict(batch) | {given: True if given == "use_cache" else batch.attention_mask}
    assert worst_difference(network, batch, network(**inputs).logits) > 0.01


@torch.no_grad()
def test_flash_attention_is_told_where_samples_begin(opened, monkeypatch):
    flash = transformers.modeling_flash_attention_utils

    # It needs a GPU, so slow functions stand in for its own; all that leads to them is transformers'.
    def plain(q, k, v, causal=False, **others):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

    def of_parts(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, **others):
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        parts = zip(*(x.tensor_split(cu_seqlens_k[1:-1].long()) for x in (q, k, v)), strict=True)
        return torch.cat([plain(*(x[None] for x in part), causal=causal)[0] for part in parts])

    batch = opened(packing="best_fit", framework="torch").get_batch()
    network = model().double().eval()
    network.config._attn_implementation = "flash_attention_2"
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *_, **__: (plain, of_parts, None, None, None))
    logits = network(**batch).logits
    network.config._attn_implementation = "sdpa"
    assert worst_difference(network, batch, logits) < 1e-5


# What is refused


def test_preference_pairs_are_refused(tmp_path):
    pairs = [{"prompt": question(n), "chosen": answer(n), "rejected": "no"} for n in range(8)]
    loader = bw.ConversationDataLoader(pairs, "bytes", MAX_LENGTH, "chatml", delivery=UNCHECKED)
    with refused(SpecError, parameter="loader", remedy="collate_fn"):
        trainer_of(model(), loader, tmp_path)
    assert loader.position == 0


def test_packed_rows_without_position_ids_are_refused(opened, tmp_path):
    loader = opened(packing="best_fit", fields=bw.Fields(position_ids=False))
    with refused(SpecError, parameter="position_ids", remedy="packing="):
        trainer_of(model(), loader, tmp_path)
    assert loader.position == 0


def test_packed_rows_are_refused_by_a_transformers_that_does_not_keep_samples_apart(opened, tmp_path, monkeypatch):
    monkeypatch.delattr(hf.masking_utils, "find_packed_sequence_indices")
    loader = opened(packing="best_fit")
    with refused(SpecError, parameter="packing", remedy="pip install -U transformers"):
        trainer_of(model(), loader, tmp_path)
    assert loader.position == 0


def test_a_weight_that_the_trainer_does_not_know_is_said(tmp_path, caplog):
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "weight": 0.5}]
    loader = bw.ConversationDataLoader([{"messages": said}] * 8, "bytes", MAX_LENGTH, "chatml", delivery=UNCHECKED)
    with caplog.at_level(logging.WARNING, "batchwright"):
        trainer_of(model(), loader, tmp_path)
    assert "weight 1" in caplog.text
