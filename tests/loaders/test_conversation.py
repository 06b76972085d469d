"""Conversations as batches: what is trained, what is left out, widths, pairs, mixtures. By eye where possible."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

import batchwright as bw
from refusals import refused

THREE = [
    [("system", "S"), ("user", "a?"), ("assistant", "A!"), ("user", "b?"), ("assistant", "B!")],
    [("user", "c?"), ("assistant", "C!")],
    [("user", "d?"), ("assistant", ""), ("user", "e?"), ("assistant", "E!")],
]
# A template that one can read: no markers but the end of a turn.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def as_messages(conversations):
    return [{"messages": [{"role": r, "content": c} for r, c in turns]} for turns in conversations]


UNCHECKED = {"delivery": bw.Delivery(check=False)}


def open_loader(rows, max_length=60, **settings):
    given = {"batch_size": 1, "framework": "numpy", "shuffle": False, **UNCHECKED} | settings
    return bw.ConversationDataLoader(rows, "bytes", max_length, TEMPLATE, **given)


def text(ids):
    return bytes(i for i in ids if i < 256).decode()


def trained(batch, row=0):
    """The labels of a row as text, one dot for each that is not learned."""
    return "".join("." if label == -100 else chr(label) for label in batch.targets[row].tolist())


def by_text(loader):
    """{rendered text: what is trained of it} of all rows, one to a row."""
    found = {}
    for batch in loader:
        for row in range(len(batch)):
            real = batch.attention_mask[row] == 1
            found[text(batch.input_ids[row][real])] = trained(batch, row)[: int(real.sum())]
    return found


@pytest.mark.parametrize(
    ("loss", "learned"),
    [
        ("assistant", ["A!</s>", "B!</s>"]),
        ("last", ["B!</s>"]),
        ("user", ["a?</s>", "b?</s>"]),
        (["user", "assistant"], ["a?</s>", "A!</s>", "b?</s>", "B!</s>"]),
        ("user+assistant", ["a?</s>", "A!</s>", "b?</s>", "B!</s>"]),
    ],
)
def test_which_tokens_are_trained(loss, learned):
    ((rendered, mask),) = by_text(open_loader(as_messages(THREE[:1]), loss=loss)).items()
    assert rendered == "s:S</s>u:a?</s>a:A!</s>u:b?</s>a:B!</s>"
    assert mask.replace(".", " ").split() == learned
    for piece in learned:  # and each where it stands: a label is the token that comes next
        assert mask.index(piece) == rendered.index(piece) - 1


def test_all_trains_every_token_but_the_first():
    ((rendered, mask),) = by_text(open_loader(as_messages(THREE[1:2]), loss="all")).items()
    assert mask == rendered[1:] + "."


def test_the_end_of_a_turn_can_be_left_out():
    ((_, mask),) = by_text(open_loader(as_messages(THREE[1:2]), loss="assistant, without end of turn")).items()
    assert mask.replace(".", "") == "C!"


def test_an_empty_answer_still_teaches_to_stop():
    ((_, mask),) = by_text(open_loader(as_messages(THREE[2:3]))).items()
    assert mask.replace(".", " ").split() == ["</s>", "E!</s>"]


def test_messages_say_themselves_what_is_learned():
    turns = [
        {"role": "user", "content": "a?", "train": True},
        {"role": "assistant", "content": "A!", "weight": 0},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": "B!", "weight": 0.5},
    ]
    batch = open_loader([{"messages": turns}]).get_batch()
    assert trained(batch).replace(".", " ").split() == ["a?</s>", "B!</s>"]
    weights = batch.loss_mask[0][batch.targets[0] != -100].tolist()
    assert weights == [1.0] * 6 + [0.5] * 6


def test_roles_and_turns_are_those_of_the_labels():
    batch = open_loader(as_messages(THREE[1:2]), fields=bw.Fields(roles=True)).get_batch()
    said = [chr(c) if c < 256 else "" for c in [*batch.input_ids[0][1:], 256]]
    roles, turns = batch.metadata["role"][0], batch.metadata["turn"][0]
    from batchwright.prepare.chat.spans import ROLES

    assert [ROLES[roles[said.index(c)]] for c in ("c", "C")] == ["user", "assistant"]
    assert [int(turns[said.index(c)]) for c in ("c", "C")] == [0, 1]
    assert roles[-1] == -1  # after the last token there is none to predict


def test_what_is_too_long_is_dropped_and_said(caplog):
    with caplog.at_level(logging.WARNING, "batchwright"):
        loader = open_loader(as_messages(THREE), max_length=29)
    assert "2 of 3 rows, 66.7 %, over max_length=29" in caplog.text
    assert list(by_text(loader)) == ["u:c?</s>a:C!</s>"]


@pytest.mark.parametrize(
    ("truncation", "rendered"),
    [
        ("keep_start", "s:S</s>u:a?</s>a:A!</s>u:b?</s"),
        ("keep_end", "u:a?</s>a:A!</s>u:b?</s>a:B!</s>"[-30:]),
        ("drop_oldest", "s:S</s>u:b?</s>a:B!</s>"),
    ],
)
def test_other_ways_with_what_is_too_long(truncation, rendered):
    loader = open_loader(as_messages(THREE[:1]), max_length=30, truncation=truncation)
    assert list(by_text(loader)) == [rendered]


def test_an_answer_that_was_cut_off_with_nothing_left_to_learn_is_in_no_row(caplog):
    long_question = [("user", "x" * 50), ("assistant", "A!")]
    with caplog.at_level(logging.WARNING, "batchwright"):
        loader = open_loader(as_messages([long_question, THREE[1]]), max_length=30, truncation="keep_start")
    assert "1 of 2 rows, 50.0 %" in caplog.text
    assert loader.plan.epoch_rows == 1


def test_raise_says_how_many_and_which():
    with refused(bw.SpecError, "2 of 3 samples", file="<memory>", parameter="max_length") as caught:
        open_loader(as_messages(THREE), max_length=29, truncation="raise")
    assert caught.value.where["row"] in (0, 2)


# Widths


def test_a_length_that_no_row_has_takes_no_memory():
    assert open_loader(as_messages(THREE), max_length=2**40, batch_size=3).get_batch().input_ids.shape == (3, 39)


def test_a_batch_is_as_wide_as_its_longest_row():
    loader = open_loader(as_messages(THREE), batch_size=3)
    batch = loader.get_batch()
    assert batch.input_ids.shape == (3, 39)
    assert sorted(batch.attention_mask.sum(1).tolist()) == [16, 30, 39]


@pytest.mark.parametrize(("pad_to", "widths"), [(16, [16, 32, 48]), ([20, 40], [20, 40, 40]), ("max_length", [60] * 3)])
def test_widths_in_steps(pad_to, widths):
    loader = open_loader(as_messages(THREE), batch_size=bw.Batching(1, pad_to=pad_to))
    assert sorted(batch.input_ids.shape[1] for batch in loader) == widths


def test_left_padding_ends_every_row_at_the_same_place():
    batch = open_loader(as_messages(THREE), batch_size=bw.Batching(3, padding_side="left")).get_batch()
    assert batch.attention_mask[:, -1].tolist() == [1, 1, 1]
    assert {text(row[mask == 1])[-4:] for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True)} == {
        "</s>"
    }


def test_all_ranks_get_the_width_of_the_global_batch():
    shapes, rows = set(), []
    for rank in range(3):
        batch = open_loader(as_messages(THREE), batch_size=3, rank=rank, world_size=3).get_batch()
        shapes.add(batch.input_ids.shape)
        rows.append(batch.targets[0].tolist())
    assert shapes == {(1, 39)}
    assert rows == open_loader(as_messages(THREE), batch_size=3).get_batch().targets.tolist()


# Packing


def test_packed_conversations_do_not_see_each_other():
    loader = open_loader(as_messages(THREE), packing="best_fit", max_length=60)
    batch = loader.get_batch()
    segments = batch.segment_ids[0]
    texts = [text(batch.input_ids[0][segments == s]) for s in range(1, segments.max() + 1)]
    alone = by_text(open_loader(as_messages(THREE)))
    assert len(texts) == 2
    for number, rendered in enumerate(texts, 1):
        mine = segments == number
        assert "".join(np.array(list(trained(batch)))[mine]) == alone[rendered]
        assert batch.position_ids[0][mine].tolist() == list(range(len(rendered)))
    assert batch.cu_seqlens.tolist() == [0, len(texts[0]), len(texts[0]) + len(texts[1]), 60]


# Pairs


def test_a_pair_is_two_rows_of_a_batch():
    rows = [{"prompt": f"q{n}", "chosen": "yes" * n, "rejected": "no"} for n in range(1, 5)]
    loader = open_loader(rows, batch_size=2)
    batch = loader.get_batch()
    assert batch.metadata["side"] == ["chosen", "rejected"] * 2
    assert batch.metadata["position"].tolist() == [0, 0, 1, 1]
    chosen, rejected = text(batch.input_ids[0]), text(batch.input_ids[1])
    assert chosen.partition("a:")[0] == rejected.partition("a:")[0]  # the same prompt
    assert trained(batch, 0).replace(".", "") == chosen.partition("a:")[2]
    assert trained(batch, 1).replace(".", "") == "no</s>"
    assert loader.position == 2


def test_ranks_do_not_split_a_pair():
    rows = [{"prompt": f"q{n}", "chosen": "yes", "rejected": "no"} for n in range(8)]
    whole = open_loader(rows, batch_size=4).get_batch()
    parts = [open_loader(rows, batch_size=4, rank=r, world_size=2).get_batch() for r in range(2)]
    assert np.concatenate([p.input_ids for p in parts]).tolist() == whole.input_ids.tolist()
    assert parts[1].metadata["side"] == ["chosen", "rejected"] * 2


def test_both_of_a_pair_lose_the_same_oldest_turns():
    prompt = [{"role": r, "content": c} for r, c in (("user", "a?"), ("assistant", "A!"), ("user", "b?"))]
    row = {"prompt": prompt, "chosen": "B!", "rejected": "B" * 9}
    loader = open_loader([row], max_length=32, truncation="drop_oldest")  # the chosen one alone would fit
    assert list(by_text(loader)) == ["u:b?</s>a:B!</s>", "u:b?</s>a:BBBBBBBBB</s>"]


# Stores, plans, mixtures


def test_one_store_serves_other_lengths_and_masks(tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(as_messages(THREE), name="chat").prepare_step(bw.chat("bytes", TEMPLATE))
    bw.bake(recipe, to=tmp_path / "sft.store", workers=0, show_progress=False)
    for settings in ({}, {"loss": "last"}, {"packing": "greedy"}):
        loader = bw.ConversationDataLoader(
            tmp_path / "sft.store", max_length=60, framework="numpy", batch_size=1, **UNCHECKED, **settings
        )
        assert loader.plan.sources[0].name == "chat"


def test_a_plan_opens_the_same_rows_again():
    first = open_loader(as_messages(THREE * 9), batch_size=2, shuffle=True, packing="best_fit", seed=5)
    first.get_batch()
    state = json.loads(json.dumps(first.state_dict()))
    again = bw.ConversationDataLoader(first.store, plan=state["plan"], framework="numpy", **UNCHECKED)
    again.load_state_dict(state)
    assert again.get_batch().targets.tolist() == first.get_batch().targets.tolist()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("loss", {"loss": "last"}),
        ("loss", {"loss": "assistant, without end of turn"}),
        ("packing", {"packing": "greedy"}),
        ("max_length", {"max_length": 50}),
        ("pad", {"batch_size": bw.Batching(pad=5)}),
    ],
)
def test_a_plan_with_other_settings_is_refused(name, settings):
    first = open_loader(as_messages(THREE))
    with refused(bw.SpecError, parameter=name):
        bw.ConversationDataLoader(first.store, plan=first.plan, framework="numpy", **UNCHECKED, **settings)


@pytest.mark.parametrize(
    "settings", [{"loss": "last"}, {"packing": "greedy"}, {"max_length": 50}, {"truncation": "keep_end"}]
)
def test_a_state_of_other_rows_is_refused(settings):
    state = open_loader(as_messages(THREE)).state_dict()
    with refused(bw.PlanError, next(iter(settings))):
        open_loader(as_messages(THREE), **settings).load_state_dict(state)


def test_conversations_mix_with_text(tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(["some words " * 30] * 5, name="web")
    store = bw.bake(
        recipe.prepare_step(bw.tokenize("bytes", append_eos=True)), to=tmp_path / "s", workers=0, show_progress=False
    )
    chat = open_loader(as_messages(THREE * 5))
    mixed = bw.MixedDataLoader(
        {"web": store, "chat": chat}, {"web": 0.5, "chat": 0.5}, chunk_size=40, batch_size=8, framework="numpy", seed=3
    )
    assert mixed.plan.row_tokens == 60
    masks = {**by_text(open_loader(as_messages(THREE)))}
    batch = mixed.get_batch()
    assert batch.input_ids.shape == (8, 60)
    assert sorted(batch.metadata["source"]) == ["chat"] * 4 + ["web"] * 4
    for row, source in enumerate(batch.metadata["source"]):
        real = int(batch.attention_mask[row].sum())
        if source == "web":
            assert real == 40
            assert (batch.targets[row, :40] != -100).all()
        else:
            assert trained(batch, row)[:real] == masks[text(batch.input_ids[row, :real])]
        assert (batch.targets[row, real:] == -100).all()


def test_pairs_mix_with_nothing_else():
    pairs = open_loader([{"prompt": "q", "chosen": "yes", "rejected": "no"}] * 4)
    with refused(bw.SpecError, source="chat", parameter="sources"):
        bw.MixedDataLoader({"chat": open_loader(as_messages(THREE)), "dpo": pairs}, framework="numpy")


def test_a_source_of_conversations_does_not_grow():
    mixed = bw.MixedDataLoader({"chat": open_loader(as_messages(THREE))}, framework="numpy", batch_size=1, epochs=None)
    with refused(bw.SpecError, source="chat", parameter="add"):
        mixed.amend(add={"chat": open_loader(as_messages(THREE * 2))})


def test_trace_leads_from_a_step_to_the_rows_of_the_file(tmp_path):
    path = tmp_path / "sft.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in as_messages(THREE)))
    loader = open_loader(path, packing="best_fit", max_length=60)
    loader.get_batch()
    records = list(bw.trace(loader.store, loader, step=0))
    assert {(r.file, r.row) for r in records} == {(str(path), 1), (str(path), 0)}
    assert {r.lines for r in records} == {None}
    assert [r.text for r in records] == ["s:S</s>u:a?</s>a:A!</s>u:b?</s>a:B!</s>", "u:c?</s>a:C!</s>"]
    (use,) = bw.find(loader.store, loader.plan, file=path, row=2)
    assert use.position == 1


def test_a_holdout_of_raw_conversations_is_the_validation_split():
    rows = as_messages([[("user", f"q{n}"), ("assistant", "A!")] for n in range(60)])
    recipe = bw.DatasetRecipe().add_ingredient(rows).prepare_step(bw.chat("bytes", TEMPLATE)).holdout(0.2)
    train, val = (
        bw.ConversationDataLoader(recipe, max_length=60, split=split, framework="numpy", **UNCHECKED)
        for split in ("train", "val")
    )
    assert train.plan.epoch_rows + val.plan.epoch_rows == 60
    assert not by_text(train).keys() & by_text(val).keys()
    with refused(bw.SpecError, "'val'", remedy="holdout"):
        open_loader(rows, split="val")


def test_dropping_much_must_be_said():
    rows = as_messages(THREE)
    with refused(bw.SpecError, "truncation='drop'"):
        open_loader(rows, max_length=29, delivery=None)
    loader = open_loader(rows, max_length=29, delivery=None, truncation="drop", loss="last")
    assert loader.plan.epoch_rows == 1


def test_repr_says_that_widths_differ():
    assert "1 x up to 60 (numpy)" in repr(open_loader(as_messages(THREE)))
    assert "1 x 60 (numpy)" in repr(open_loader(as_messages(THREE), batch_size=bw.Batching(1, pad_to="max_length")))
