"""The exact wording of a few errors of preparation, in one place. Other tests say what an error names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import batchwright as bw
from batchwright.prepare.chat.messages import ChatError
from batchwright.prepare.chat.render import find_template
from batchwright.prepare.documents import BadText, TextColumn
from batchwright.prepare.tokenizers import BytesTokenizer

WORDING: dict[str, tuple[Callable[[], object], str]] = {
    "a function without its vocabulary": (
        lambda: bw.tokenize(lambda text: [1]),
        (
            "a function as tokenizer needs vocab_size=: it decides how many bytes an id takes\n"
            "  parameter  vocab_size\n"
            "  try        tokenize(function, vocab_size=50257)"
        ),
    ),
    "a type of ids that is none": (
        lambda: bw.tokenize("bytes", dtype="int32"),
        ("dtype='int32' is not a type of token ids\n  parameter  dtype\n  try        'uint8', 'uint16' or 'uint32'"),
    ),
    "a folder without a tokenizer": (
        lambda: bw.tokenize("nothing"),
        (
            "no tokenizer file\n"
            "  file       nothing\n"
            "  try        the path of a tokenizer.json; "
            "for the name of a model, transformers' AutoTokenizer.from_pretrained"
        ),
    ),
    "a template of another name": (
        lambda: find_template("chatlm", BytesTokenizer()),
        (
            "no chat template 'chatlm'\n"
            "  parameter  chat_template\n"
            "  names      chatml, gemma, llama-3, mistral, plain, qwen, zephyr\n"
            "  try        'chatml'"
        ),
    ),
    "a tokenizer without a template": (
        lambda: find_template(None, BytesTokenizer()),
        (
            "the tokenizer 'bytes' has no chat template\n"
            "  parameter  chat_template\n"
            "  names      chatml, gemma, llama-3, mistral, plain, qwen, zephyr\n"
            "  try        chat_template='chatml', another of these names, or a Jinja string"
        ),
    ),
    "an unknown role": (
        lambda: find_template("chatml", BytesTokenizer()).rendered(SAID),
        "unknown role: role 'usr' (message 0)",
    ),
    "a column that is not there": (
        lambda: TextColumn("titel").of({"title": "a"}),
        "no column 'titel': this row has 'title'; perhaps text='title'",
    ),
    "a column that is no name": (
        lambda: TextColumn(7),
        ("text=7 is not the name of a column\n  parameter  text\n  try        text='content'"),
    ),
}
SAID = {"messages": [{"role": "usr", "content": "a"}]}


@pytest.mark.parametrize(("act", "text"), WORDING.values(), ids=WORDING)
def test_errors_of_preparation_read_like_this(act, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((bw.BatchwrightError, BadText, ChatError)) as caught:
        act()
    assert str(caught.value) == text
