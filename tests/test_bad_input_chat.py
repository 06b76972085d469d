"""Bad conversations: one clear error that says what, where and what to do; or a count, with on_error='skip'."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import batchwright as bw
from refusals import refused

GOOD = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
ASK = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}


def said(*messages, **others):
    return json.dumps({"messages": list(messages), **others})


def write(tmp_path, *lines):
    path = tmp_path / "sft.jsonl"
    path.write_text("\n".join([json.dumps(GOOD), json.dumps(GOOD), *lines, json.dumps(GOOD)]))
    return path


OF_BATCHES = ("pad", "pad_to", "padding_side")
OF_THE_STEP = ("format", "columns", "template_args")


def open_loader(path, tokenizer="bytes", template="chatml", on_error="raise", **settings):
    of_batches, of_the_step = (
        {name: settings.pop(name) for name in names if name in settings} for names in (OF_BATCHES, OF_THE_STEP)
    )
    recipe = bw.DatasetRecipe(on_error=on_error).add_ingredient(path, name="conversations")
    return bw.ConversationDataLoader(
        recipe.prepare_step(bw.chat(tokenizer, template, **of_the_step)),
        max_length=200,
        batch_size=bw.Batching(1, **of_batches),
        delivery=bw.Delivery(check=False),
        framework="numpy",
        **settings,
    )


BAD_ROWS = [
    # (line, kind, words of the headline, turn, words of the remedy)
    (said(ASK, {"role": "assistent", "content": "4"}), "unknown role", "assistent", 1, "roles="),
    (said(ASK, {"role": "assistant"}), "missing content", "", 1, "mend the row|content"),
    (said(ASK, {"role": "system", "content": "late"}, ANSWER), "role order", "system", 1, "on_error='skip'"),
    (said(ASK, {"role": "tool", "content": "4"}, ANSWER), "role order", "tool", 1, "on_error='skip'"),
    (said(), "empty conversation", "messages", None, "on_error='skip'"),
    (said(ASK, {"role": "assistant", "content": 4}), "content is not text", "int", 1, "on_error='skip'"),
    (
        json.dumps({"prompt": "2 + 2?", "completion": "4"}),
        "another format",
        "prompt_completion",
        None,
        "on_error='skip'",
    ),
    (
        '{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}',
        "duplicate keys",
        "role",
        0,
        "on_error='skip'",
    ),
    (said(ASK, "4"), "not a message", "", 1, "on_error='skip'"),
    (said(ASK, {**ANSWER, "weight": -1}), "bad weight", "-1", 1, "on_error='skip'"),
    (
        said(ASK, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "DEEP"}]}).replace(
            '"DEEP"', '{"a":' * 900 + "1" + "}" * 900
        ),
        "nested too deeply",
        "",
        None,
        "on_error='skip'",
    ),
]


@pytest.mark.parametrize(
    ("line", "kind", "words", "turn", "remedy"), BAD_ROWS, ids=[row[1] + str(i) for i, row in enumerate(BAD_ROWS)]
)
def test_a_bad_row_is_named_with_its_file_line_and_turn(line, kind, words, turn, remedy, tmp_path):
    path = write(tmp_path, line)
    with pytest.raises(bw.SourceError, match=kind) as caught:
        open_loader(path)
    assert words in caught.value.headline
    assert caught.value.where["file"] == str(path)
    assert caught.value.where["line"] == 3
    assert caught.value.where.get("turn") == turn
    assert any(part in caught.value.remedy for part in remedy.split("|"))
    # Nothing is lost: with skip the others are there, and this one is counted.
    loader = open_loader(path, on_error="skip")
    assert loader.store.report["ingredients"]["conversations"]["dropped"] == {kind: 1}
    assert loader.store.num_rows == 3
    ((file, row, reason),) = loader.store.report["examples"]
    assert (file, row) == (str(path), 2)
    assert reason.startswith(kind)


def test_a_template_that_refuses_a_conversation_is_an_error_of_its_row(tmp_path):
    path = write(tmp_path, said({"role": "system", "content": "Be brief."}, ASK, ANSWER))
    with refused(bw.SourceError, "gemma", file=path, line=3):
        open_loader(path, template="gemma")
    loader = open_loader(path, template="gemma", on_error="skip")
    assert loader.store.report["ingredients"]["conversations"]["dropped"] == {"refused by the template": 1}


def test_a_message_that_the_template_leaves_out_is_named(tmp_path):
    path = write(tmp_path, said({"role": "system", "content": "Be brief."}, ASK, ANSWER))
    template = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    with refused(bw.SourceError, "dropped by the template", file=path, line=3, turn=0):
        open_loader(path, template=template)


BAD_TEMPLATES = [
    ("{% for m in messages %}{{ m.content }}", "end|tag"),
    ("{{ ''.__class__.__mro__ }}{% for m in messages %}{{ m.content }}{% endfor %}", "unsafe|sandbox|not allowed"),
    (
        "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}{% endfor %}{% endfor %}"
        "{% endfor %}{{ messages[0].content }}",
        "loop|steps|iterations",
    ),
    ("{{ 'x' * 10**12 }}{% for m in messages %}{{ m.content }}{% endfor %}", "long|large|characters|big"),
]


@pytest.mark.parametrize(("template", "words"), BAD_TEMPLATES, ids=["syntax", "escape", "endless", "bomb"])
def test_a_bad_template_is_one_error_whatever_on_error_says(template, words, tmp_path):
    path = write(tmp_path)
    for on_error in ("raise", "skip"):
        with pytest.raises(bw.SpecError) as caught:
            open_loader(path, template=template, on_error=on_error)
        assert any(word in str(caught.value) for word in words.split("|")), str(caught.value)
        assert caught.value.where["template"]
        assert caught.value.remedy


def test_a_template_that_does_not_end_names_the_row_that_it_was_given(tmp_path):
    template = (
        "{% for m in messages %}{{ m.content }}{% if 'loop' in m.content %}{{ '.' * 10**9 }}{% endif %}{% endfor %}"
    )
    with refused(bw.SpecError, template="inline", line=3, remedy="loops"):
        open_loader(write(tmp_path, said(ASK, {**ANSWER, "content": "loop"})), template=template)


def test_an_unknown_template_suggests_a_near_one(tmp_path):
    with refused(bw.SpecError, "'chatlm'", parameter="chat_template", remedy="chatml"):
        open_loader(write(tmp_path), template="chatlm")


def tokenizer_without_pad():
    tokenizer = Tokenizer(models.BPE({chr(c): c - 32 for c in range(32, 127)} | {"Ċ": 95, "Ġ": 96}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def test_a_tokenizer_without_pad_asks_for_one(tmp_path):
    path = write(tmp_path)
    with refused(bw.SpecError, parameter="pad", remedy="pad="):
        open_loader(path, tokenizer_without_pad())
    assert open_loader(path, tokenizer_without_pad(), pad=3).plan.pad == 3
    assert open_loader(path, tokenizer_without_pad(), pad="A").plan.pad == ord("A") - 32


BAD_SETTINGS = [
    ({"loss": "asistant"}, "loss", "assistant"),
    ({"loss": []}, "loss", "assistant"),
    ({"truncation": "cut"}, "truncation", "drop"),
    ({"packing": "bestfit"}, "packing", "best_fit"),
    ({"pad_to": "longst"}, "pad_to", "longest"),
    ({"pad_to": [100, 300]}, "pad_to", "200"),
    ({"pad_to": 0}, "pad_to", "1"),
    ({"padding_side": "top"}, "padding_side", "left"),
    ({"pad": "<|nothing|>"}, "pad", "pad="),
    ({"pad": 5000}, "pad", "vocabulary"),
    ({"format": "chat"}, "format", "messages"),
    ({"columns": {"messages": "dialog"}}, None, "dialog"),
    ({"template_args": "enable_thinking"}, "template_args", "mapping"),
    ({"template_args": {"days": {1}}}, "template_args", "JSON"),
    ({"template_args": {"add_generation_prompt": True}}, "template_args", "leave out"),
]


@pytest.mark.parametrize(("settings", "parameter", "words"), BAD_SETTINGS, ids=lambda value: str(value))
def test_a_bad_setting_is_named(settings, parameter, words, tmp_path):
    with pytest.raises(bw.BatchwrightError) as caught:
        open_loader(write(tmp_path), **settings)
    assert isinstance(caught.value, bw.SpecError if parameter else bw.SourceError)
    assert parameter is None or caught.value.where["parameter"] == parameter
    assert words in str(caught.value)


def test_a_source_of_which_no_row_can_be_read_names_the_first(tmp_path):
    with refused(bw.SourceError, "list", file="<memory>", row=0):
        open_loader([[ASK, ANSWER]])


def test_max_length_must_be_said(tmp_path):
    with refused(bw.SpecError, parameter="max_length", remedy="max_length="):
        bw.ConversationDataLoader(write(tmp_path), "bytes", chat_template="chatml")


def test_conversations_are_not_read_as_text(tmp_path):
    store = open_loader(write(tmp_path)).store
    for door in (
        lambda: bw.PretrainDataLoader(store, chunk_size=8),
        lambda: bw.MixedDataLoader({"chat": store}, chunk_size=8),
    ):
        with refused(bw.SpecError, parameter="path", file=store.path, remedy="ConversationDataLoader"):
            door()


def test_text_is_not_read_as_conversations(tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(["some text"] * 3).prepare_step(bw.tokenize("bytes"))
    store = bw.bake(recipe, to=tmp_path / "text.store", workers=0, show_progress=False)
    with refused(bw.SpecError, parameter="path", file=store.path, remedy="bw.chat"):
        bw.ConversationDataLoader(store, max_length=100, framework="numpy")


def test_nothing_that_fits_says_why(tmp_path):
    with refused(bw.SpecError, "3 over length", parameter="max_length", source="conversations"):
        bw.ConversationDataLoader(write(tmp_path), "bytes", 10, "chatml", framework="numpy")
