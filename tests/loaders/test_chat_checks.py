"""Bad conversations are refused before a run, in words: each kind of fault once, beside the same data without it."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import batchwright as bw
from batchwright.base.errors import SpecError
from batchwright.loaders.chat_checks import (
    CheckSettings,
    ConversationRows,
    Finding,
    facts_of,
    findings_of,
    place_in_words,
)
from batchwright.prepare.chat.spans import END, ROLES, SPAN_DTYPE, TEMPLATE, TEXT, LossPolicy
from batchwright.prepare.chat.step import chat
from refusals import refused

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>")
HEADER = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
CHATML = HEADER + "{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """Every byte a token, and the five special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def conversation(number: int, *before: tuple[str, str], answer: str | None = None) -> dict:
    turns = [*before, ("user", f"{number} + 1?"), ("assistant", f"{number + 1}." if answer is None else answer)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def forty(bad: int = 0, **fault) -> list[dict]:
    """40 rows; the rows from number 10 on have the fault, as many as are asked for."""
    rows = [conversation(number) for number in range(40)]
    for number in range(10, 10 + bad):
        rows[number] = conversation(number, *fault.get("before", ()), answer=fault.get("answer"))
        rows[number]["messages"] = rows[number]["messages"][: fault.get("turns")]
    return rows


def write(folder: Path, rows: list[dict]) -> Path:
    path = folder / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path, tokenizer, template="chatml", on_error=None, **settings):
    given = {"max_length": 64, "framework": "numpy", "shuffle": False} | settings
    if on_error is None:
        return bw.ConversationDataLoader(path, tokenizer, chat_template=template, **given)
    recipe = bw.DatasetRecipe(on_error=on_error).add_ingredient(path)
    return bw.ConversationDataLoader(recipe.prepare_step(bw.chat(tokenizer, template)), **given)


SYSTEM = {"before": [("system", "Count.")]}
FAULTS = {
    # name: (kind, rows, template, settings, what is said, where the first one is)
    "empty mask": ("empty mask", forty(3, turns=1), CHATML, {}, "3 of 40 rows (7.5 %)", r"row 1[012]$"),
    "empty answer": (
        "empty answer",
        forty(3, answer=""),
        CHATML,
        {},
        "3 of 40 rows (7.5 %)",
        r"row 1[012], message 1$",
    ),
    "an answer of blanks": (
        "empty answer",
        forty(3, answer="\n "),
        CHATML,
        {},
        "3 of 40 rows (7.5 %)",
        r"row 1[012], message 1$",
    ),
    "over length": ("over length", forty(3, answer="x" * 80), CHATML, {}, "max_length=64", r"row 1[012]$"),
    "no end-of-turn marker": (
        "end of turn",
        forty(),
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        {},
        "writes no end-of-turn marker",
        r"row \d+, message 1$",
    ),
    "generation marks without the end of turn": (
        "end of turn",
        forty(),
        HEADER
        + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"
        "{% endif %}<|im_end|>\n{% endfor %}",
        {},
        "<|im_end|> is never trained",
        r"row \d+, message 1$",
    ),
    "double BOS": ("double BOS", forty(), "<s><s>" + CHATML, {}, "40 of 40 rows (100.0 %)", r"row \d+$"),
    "a template for another tokenizer": (
        "marker is not a token",
        forty(),
        "llama-3",
        {"max_length": 256},
        "<|start_header_id|> (19), <|end_header_id|> (17), <|eot_id|> (10)",
        "",
    ),
    "a template that drops messages": (
        "dropped by the template",
        forty(3, **SYSTEM),
        CHATML.replace("<|im_start|>", "{% if m.role == 'system' %}{% continue %}{% endif %}<|im_start|>"),
        {"on_error": "skip"},
        "3 of 40 rows (7.5 %) were left out",
        r"row 1[012], dropped by the template: its text is not in the rendered text \(message 0\)",
    ),
    "a template that reorders messages": (
        "reordered by the template",
        forty(3, **SYSTEM),
        CHATML.replace("in messages", "in messages | sort(attribute='role', reverse=true)"),
        {"on_error": "skip"},
        "3 of 40 rows (7.5 %) were left out",
        r"row 1[012], reordered by the template",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_nobody_can_mean_is_refused_with_row_and_remedy(name, tmp_path, tokenizer):
    kind, rows, template, settings, said, first = FAULTS[name]
    path = write(tmp_path, rows)
    with refused(SpecError, kind, remedy="batchwright doctor chat") as caught:
        opened(path, tokenizer, template, **settings)
    assert said in caught.value.where[kind]
    assert not first or re.search(rf"^first: {path}, {first}", caught.value.where[kind], re.MULTILINE)
    assert "check=False" in caught.value.remedy


@pytest.mark.parametrize("name", FAULTS)
def test_with_check_false_the_same_rows_are_opened(name, tmp_path, tokenizer):
    _, rows, template, settings, _, _ = FAULTS[name]
    loader = opened(write(tmp_path, rows), tokenizer, template, delivery=bw.Delivery(check=False), **settings)
    assert len(loader.get_batch(4)) == 4


def test_rows_in_memory_are_not_sent_to_the_doctor(tokenizer):
    with refused(SpecError, "empty mask", "<memory>", remedy="check=False"):
        opened(forty(3, turns=1), tokenizer)


def test_one_error_says_all_that_is_wrong(tmp_path, tokenizer):
    rows = forty(3, turns=1)
    rows[20:24] = forty(4, answer="x" * 80)[10:14]
    with refused(SpecError) as caught:
        opened(write(tmp_path, rows), tokenizer, "<s><s>" + CHATML)
    assert {"empty mask", "double BOS", "over length"} <= caught.value.where.keys()


@pytest.mark.parametrize("template", ["chatml", CHATML, "<s>" + CHATML])
def test_rows_without_a_fault_pass(template, tmp_path, tokenizer):
    opened(write(tmp_path, forty()), tokenizer, template)


@pytest.mark.parametrize("fault", [{"turns": 1}, {"answer": ""}, {"answer": "x" * 80}])
def test_one_row_in_twenty_with_a_fault_is_a_note(fault, tmp_path, tokenizer, caplog):
    caplog.set_level(logging.INFO, "batchwright")
    opened(write(tmp_path, forty(2, **fault)), tokenizer)
    assert "2 of 40 rows (5.0 %)" in caplog.text


def test_notes_say_format_shares_and_that_pad_is_eos(tmp_path, tokenizer, caplog):
    caplog.set_level(logging.INFO, "batchwright")
    opened(write(tmp_path, forty()), tokenizer, batch_size=bw.Batching(pad="<|im_end|>"))
    for words in ("'messages'", "%", "2.0 messages"):
        assert words in caplog.text
    assert "pad == eos" in caplog.text


def test_a_loss_without_end_of_turn_is_a_wish_and_is_noted(tmp_path, tokenizer, caplog):
    caplog.set_level(logging.INFO, "batchwright")
    opened(write(tmp_path, forty()), tokenizer, loss="assistant, without end of turn")
    assert "without end of turn" in caplog.text


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
def test_rows_that_are_cut_as_asked_for_are_noted(truncation, tmp_path, tokenizer, caplog):
    caplog.set_level(logging.INFO, "batchwright")
    opened(write(tmp_path, forty(20, answer="x" * 80)), tokenizer, truncation=truncation)
    assert f"truncation='{truncation}'" in caplog.text


def test_bytes_have_no_tokens_for_markers_and_that_is_a_note(tmp_path, caplog):
    caplog.set_level(logging.INFO, "batchwright")
    opened(write(tmp_path, forty()), "bytes", max_length=256)
    assert "'bytes'" in caplog.text


@pytest.fixture
def with_template(tokenizer, tmp_path):
    """with_template(source): the tokenizer, with a template of its own."""

    def write(source: str) -> Path:
        folder = tmp_path / "own"
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, "eos_token": "</s>"}))
        return folder

    return write


def test_markers_of_the_tokenizers_own_template_are_its_makers_choice(tmp_path, with_template, caplog):
    caplog.set_level(logging.INFO, "batchwright")
    opened(write(tmp_path, forty()), with_template(CHATML.replace("im_start", "role")), None)
    assert all(named in caplog.text for named in ("marker is not a token", "'own'", "<|role|> (8)"))


def test_an_end_of_turn_that_is_not_a_token_fails_even_there(tmp_path, with_template):
    with refused(SpecError, "<|done|>"):
        opened(write(tmp_path, forty()), with_template(CHATML.replace("im_end", "done")), None)


def test_a_marker_that_becomes_the_unknown_token_is_not_a_token(tmp_path):
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "<pad>": 2, "a": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<pad>", special=True)])
    words.save(str(tmp_path / "words.json"))
    template = "{% for m in messages %} <|role|> {{ m.content }} </s>{% endfor %}"
    with refused(SpecError, "<|role|>"):
        opened(write(tmp_path, forty()), tmp_path / "words.json", template)


def test_a_store_is_checked_as_its_files_are(tmp_path, tokenizer):
    recipe = bw.DatasetRecipe().add_ingredient(str(write(tmp_path, forty(3, turns=1))), name="sums")
    store = bw.bake(recipe.prepare_step(bw.chat(tokenizer, "chatml")), tmp_path / "sums.store", show_progress=False)
    with refused(SpecError, "empty mask"):
        bw.ConversationDataLoader(store, max_length=64)
    bw.ConversationDataLoader(store, max_length=64, loss="user")


def test_pairs_are_checked_side_by_side(tmp_path, tokenizer):
    pairs = [{"prompt": "?", "chosen": "yes", "rejected": "no" * (60 if n < 3 else 1)} for n in range(40)]
    with refused(SpecError, "over length", "max_length=64"):
        opened(write(tmp_path, pairs), tokenizer)
    opened(write(tmp_path, pairs), tokenizer, max_length=160)


# Masks that are wrong on purpose


@pytest.fixture(scope="module")
def right(tokenizer) -> tuple[ConversationRows, CheckSettings, object]:
    """(40 rows as they should be, settings, facts of template and tokenizer)."""
    step = chat(tokenizer, "chatml", format="messages")
    encoded = step.encode([step.prepare(row) for row in forty()])
    spans = np.concatenate([one.spans for one in encoded])
    rows = ConversationRows(
        np.concatenate([one.tokens for one in encoded]),
        np.cumsum([0, *(len(one.tokens) for one in encoded)]),
        np.cumsum([0, *(len(one.spans) for one in encoded)]),
        {name: spans[name].copy() for name in spans.dtype.names},
        lambda number: {"file": "sft.jsonl", "row": number},
    )
    return rows, CheckSettings(LossPolicy.of("assistant"), 64), facts_of(step.info(), step.tokenizer)


def failures(rows: ConversationRows, settings: CheckSettings, facts: object) -> list[Finding]:
    return [finding for finding in findings_of(rows, facts, settings) if finding.is_failure]


def broken(rows: ConversationRows, **fields: np.ndarray) -> ConversationRows:
    return ConversationRows(rows.tokens, rows.borders, rows.starts, {**rows.spans, **fields}, rows.where)


def test_the_right_mask_passes(right):
    assert failures(*right) == []


def test_a_note_of_rows_that_are_cut_names_the_first(right):
    rows, settings, facts = right
    found = findings_of(rows, facts, replace(settings, max_length=1, truncation="keep_end"))
    (note,) = (finding for finding in found if finding.kind == "over length")
    assert not note.is_failure
    assert note.examples == ({"file": "sft.jsonl", "row": 0},)


def test_a_mask_without_the_end_of_turn_fails(right):
    rows, settings, facts = right
    part = np.where(rows.spans["part"] == END, TEMPLATE, rows.spans["part"])
    (found,) = failures(broken(rows, part=part), settings, facts)
    assert found.headline == "<|im_end|> is never trained: a model would never stop"
    assert found.examples == ({"file": "sft.jsonl", "row": 0, "turn": 1},)


def test_a_mask_over_the_wrong_role_fails(right):
    rows, settings, facts = right
    role = np.where(rows.spans["role"] == ROLES.index("assistant"), ROLES.index("user"), rows.spans["role"])
    (found,) = failures(broken(rows, role=role), settings, facts)
    assert found.kind == "empty mask"


def test_a_mask_that_begins_at_the_header_fails(right):
    rows, settings, facts = right
    is_header = (rows.spans["role"] == ROLES.index("assistant")) & (rows.spans["part"] == TEMPLATE)
    (found,) = failures(broken(rows, part=np.where(is_header, TEXT, rows.spans["part"])), settings, facts)
    assert found.headline == "<|im_start|> is inside of what an assistant said, where only the template writes it"
    assert place_in_words(found.examples[0]) == "sft.jsonl, row 0, message 1"


def test_a_mask_that_goes_on_past_the_end_of_turn_fails(right):
    rows, settings, facts = right
    is_end = (rows.spans["role"] == ROLES.index("assistant")) & (rows.spans["part"] == END)
    found = failures(broken(rows, part=np.where(is_end, TEXT, rows.spans["part"])), settings, facts)
    assert {finding.kind for finding in found} == {"end of turn", "marker in an answer"}


def test_a_trained_token_that_nothing_can_predict_is_not_trained(right):
    _, settings, facts = right
    spans = np.array(
        [(1, 0, ROLES.index("assistant"), TEXT, 0, np.nan), (3, 1, ROLES.index("user"), TEXT, 0, np.nan)], SPAN_DTYPE
    )
    fields = {name: spans[name] for name in SPAN_DTYPE.names}
    rows = ConversationRows(
        np.array([5, 6, 7]), np.array([0, 3]), np.array([0, 2]), fields, lambda number: {"row": number}
    )
    assert "empty mask" in [finding.kind for finding in failures(rows, settings, facts)]
