"""Conversations go through the bake like text: the same bytes for any workers, only what changed again."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise

import numpy as np
import pytest

import batchwright as bw
from batchwright.store.versions import verify_store
from refusals import refused
from shared import quiet_bake


def conversation(n):
    turns = [
        {"role": "user", "content": f"question {n}" + "?" * (n % 7)},
        {"role": "assistant", "content": f"answer {n}"},
    ]
    return {"messages": turns * (1 + n % 3)}


@pytest.fixture
def raw(tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    for part in range(3):
        rows = [json.dumps(conversation(100 * part + n)) for n in range(40)]
        (folder / f"part-{part}.jsonl").write_text("\n".join(rows))
    return folder


def recipe_of(raw, **settings):
    recipe = bw.DatasetRecipe(seed=2).add_ingredient(raw, name="chat")
    return recipe.prepare_step(bw.chat("bytes", "chatml", **settings))


def spans_of(store, split="train"):
    starts, fields = store.stream("chat", split).token_spans()
    return starts.tolist(), {name: values.tolist() for name, values in fields.items() if name != "weight"}


def test_the_bytes_do_not_depend_on_workers(raw, tmp_path):
    one, two = (
        quiet_bake(recipe_of(raw), tmp_path / "one.store"),
        quiet_bake(recipe_of(raw), tmp_path / "two.store", workers=2),
    )
    assert one.fingerprint == two.fingerprint
    assert one.shards["file_hash"].to_pylist() == two.shards["file_hash"].to_pylist()


def test_spans_tile_every_conversation(raw, tmp_path):
    store = quiet_bake(recipe_of(raw), tmp_path / "chat.store")
    stream = store.stream("chat")
    starts, fields = stream.token_spans()
    lengths = np.diff(stream.document_borders())
    assert fields["stop"][starts[1:] - 1].tolist() == lengths.tolist()
    assert all((np.diff(fields["stop"][a:b]) > 0).all() for a, b in pairwise(starts))
    assert not list(verify_store(store))


def test_only_what_changed_is_rendered_again(raw, tmp_path, capfd):
    quiet_bake(recipe_of(raw), tmp_path / "chat.store")
    rows = (raw / "part-1.jsonl").read_text().splitlines()
    rows[5] = json.dumps(conversation(7777))
    (raw / "part-1.jsonl").write_text("\n".join(rows))
    changed = quiet_bake(recipe_of(raw), tmp_path / "chat.store")
    anew = quiet_bake(recipe_of(raw), tmp_path / "anew.store")
    assert changed.fingerprint == anew.fingerprint
    assert spans_of(changed) == spans_of(anew)


def test_units_of_an_older_version_keep_their_spans(raw, tmp_path, monkeypatch):
    monkeypatch.setattr("batchwright.sources.units.UNIT_BYTES", 2000)  # several of them lie in one shard
    first = quiet_bake(recipe_of(raw), tmp_path / "chat.store")
    (raw / "part-9.jsonl").write_text(json.dumps(conversation(9)))
    shutil.rmtree(tmp_path / "chat.store" / "work", ignore_errors=True)
    grown = quiet_bake(recipe_of(raw), tmp_path / "chat.store")
    anew = quiet_bake(recipe_of(raw), tmp_path / "anew.store")
    assert grown.num_rows == first.num_rows + 1
    assert spans_of(grown) == spans_of(anew)


def test_another_mask_is_another_content(tmp_path):
    """The same tokens with other spans are not the same rows: a plan must tell them apart."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    weighted = [turns[0], {**turns[1], "weight": 0.5}]
    one, two = (
        quiet_bake(
            bw.DatasetRecipe().add_ingredient([{"messages": m}], name="chat").prepare_step(bw.chat("bytes", "chatml")),
            tmp_path / name,
        )
        for name, m in (("one", turns), ("two", weighted))
    )
    assert one[0].tokens.tolist() == two[0].tokens.tolist()
    assert one.fingerprint != two.fingerprint


def test_a_holdout_keeps_spans_with_their_conversations(raw, tmp_path):
    store = quiet_bake(recipe_of(raw).holdout(0.3), tmp_path / "chat.store")
    for split in ("train", "val"):
        stream = store.stream("chat", split)
        starts, fields = stream.token_spans()
        assert fields["stop"][np.array(starts[1:]) - 1].tolist() == np.diff(stream.document_borders()).tolist()
    settings = {"max_length": 400, "framework": "numpy", "delivery": bw.Delivery(check=False)}
    train = bw.ConversationDataLoader(store, **settings)
    val = bw.ConversationDataLoader(store, **settings, split="val")
    assert train.plan.epoch_rows + val.plan.epoch_rows == 120


def test_small_shards_give_the_same_spans(raw, tmp_path, monkeypatch):
    whole = quiet_bake(recipe_of(raw), tmp_path / "whole.store", shuffle=False)
    monkeypatch.setattr("batchwright.baking.run._SHARD_BYTES", 6000)
    cut = quiet_bake(recipe_of(raw), tmp_path / "cut.store", shuffle=False)
    assert len(cut.shards["file"]) > 3
    assert spans_of(cut)[1] == spans_of(whole)[1]
    settings = {"max_length": 300, "packing": "best_fit", "shuffle": False, "framework": "numpy"}
    loaders = [bw.ConversationDataLoader(s, **settings, delivery=bw.Delivery(check=False)) for s in (whole, cut)]
    for one, two in zip(*loaders, strict=True):
        assert one.targets.tolist() == two.targets.tolist()


def test_each_ingredient_has_its_own_format(raw, tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(raw, name="chat")
    recipe.add_ingredient([{"prompt": "a?", "completion": "A"}], name="pairs").prepare_step(bw.chat("bytes", "chatml"))
    store = quiet_bake(recipe, tmp_path / "chat.store")
    assert store.report["layouts"]["chat"].startswith("messages")
    assert store.report["layouts"]["pairs"].startswith("prompt_completion")


def test_a_step_before_may_make_the_conversation(tmp_path):
    def as_messages(row):
        return {"messages": [{"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["a"]}]}

    recipe = bw.DatasetRecipe().add_ingredient([{"q": "a?", "a": "A"}], name="chat").prepare_step(as_messages)
    store = quiet_bake(recipe.prepare_step(bw.chat("bytes", "chatml")), tmp_path / "chat.store")
    assert "a?" in store.decode(store[0].tokens)


def test_nothing_follows_chat(raw):
    with refused(bw.SpecError, parameter="step", remedy="tokenize"):
        recipe_of(raw).prepare_step(bw.tokenize("bytes"))


def test_plain_text_is_not_taken_from_conversations(tmp_path):
    """The token cache finds texts that were tokenised before; a rendered conversation is not one of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["a question and an answer"] * 10, trainer)
    forged = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "no"}]
    chat = bw.DatasetRecipe().add_ingredient([{"messages": forged}], name="chat")
    conversations = quiet_bake(chat.prepare_step(bw.chat(tokenizer, "chatml")), tmp_path / "chat.store")
    rendered = conversations.decode(conversations[0].tokens)
    assert rendered.startswith("<|im_start|>user\n<|im_end|><|im_end|>\n")
    text = (
        bw.DatasetRecipe().add_ingredient([rendered], name="text").prepare_step(bw.tokenize(tokenizer, special="parse"))
    )
    plain = quiet_bake(text, tmp_path / "chat.store")  # into the store that has the conversation, as an older version
    assert plain[0].tokens.tolist() == tokenizer.encode(rendered, add_special_tokens=False).ids
    assert plain[0].tokens.tolist() != conversations[0].tokens.tolist()
