"""Which text of a row is meant: columns, paths, templates, and what is said where there is none."""

from __future__ import annotations

import datetime
import pickle
from decimal import Decimal

import pytest

import batchwright as bw
from batchwright.prepare.documents import BadText, TextColumn
from refusals import refused

ROW = {
    "title": "Ahab",
    "score": 0.756,
    "none": None,
    "tags": ["sea", "whale"],
    "message": {"role": "user", "content": "Call me", "author": {"name": "Herman"}},
    "turns": [{"text": "hello", "meta": {"n": 1}}, {"text": "bye", "meta": {"n": 2}}],
    "a.b": "a dot in its name",
    "data": b"caf\xc3\xa9",
}


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("title", "Ahab"),
        ("message.content", "Call me"),
        ("message.author.name", "Herman"),
        ("turns.0.text", "hello"),
        ("turns.text", "hello\nbye"),
        ("tags", "sea\nwhale"),
        ("tags.1", "whale"),
        ("a.b", "a dot in its name"),
        ("data", "café"),
        ("{title}", "Ahab"),
        ("{title}: {message.content}!", "Ahab: Call me!"),
        ("{title}\n\n{tags}", "Ahab\n\nsea\nwhale"),
        ("{score:.2f} {title:>6}", "0.76   Ahab"),
        ("{{{title}}}", "{Ahab}"),
        ("[{none}]", "[]"),
        ("{a.b}", "a dot in its name"),
    ],
)
def test_the_text_of_a_row_is_what_text_says(spec, text):
    assert TextColumn(spec).of(ROW) == text


def test_a_column_that_is_literally_named_like_a_path_wins():
    row = {"message.content": "literal", "message": {"content": "nested", "x.y": "inner literal"}}
    assert TextColumn("message.content").of(row) == TextColumn("{message.content}").of(row) == "literal"
    assert TextColumn("message.x.y").of(row) == "inner literal"


def test_numbers_and_dates_are_shown_in_a_template_as_python_shows_them():
    row = {"n": 3, "price": Decimal("1.50"), "day": datetime.date(2026, 11, 15), "yes": True}
    assert TextColumn("{n} {price} {day} {yes}").of(row) == "3 1.50 2026-11-15 True"
    assert TextColumn("{day:%d.%m.}").of(row) == "15.11."


@pytest.mark.parametrize(
    ("spec", "kind", "reason"),
    [
        ("titel", "no column 'titel'", "this row has 'title', 'score', 'none', 'tags', "),
        ("titel", "no column 'titel'", "'data'; perhaps text='title'"),
        (
            "message.contnet",
            "no column 'message.contnet'",
            "'message' has 'role', 'content', 'author'; perhaps text='message.content'",
        ),
        ("mesage.content", "no column 'mesage.content'", "perhaps text='message.content'"),
        ("{titel}", "no column 'titel'", "perhaps text='title'"),
        ("{message.contnet}", "no column 'message.contnet'", "perhaps text='message.content'"),
        ("message.author.nam", "no column 'message.author.nam'", "perhaps text='message.author.name'"),
        ("title.text", "no column 'title.text'", "'title' is str, which has no columns in it"),
        ("turns.7.text", "no column 'turns.7.text'", "'turns' has 2 items"),
        ("turns.txt", "no column 'turns.txt'", "'turns.0' has 'text', 'meta'; perhaps text='turns.0.text'"),
        ("none", "column 'none' is null", ""),
        ("none.x", "column 'none.x' is null", ""),
        ("score", "column 'score' is not text", "it is float"),
        ("message", "column 'message' is not text", "it is dict with 'role', 'content', 'author'"),
        ("turns", "column 'turns' is not text", "item 0 of its list is dict with 'text', 'meta'"),
        ("{message}", "column 'message' is not text", "it is dict with"),
        ("{title:.2f}", "column 'title' cannot be shown as '.2f'", "Unknown format code 'f'"),
    ],
)
def test_a_row_without_text_says_why_and_what_is_near(spec, kind, reason):
    with refused(BadText, reason, kind=kind):
        TextColumn(spec).of(ROW)


def test_null_inside_a_list_is_a_fault_of_a_column_and_nothing_in_a_template():
    row = {"tags": ["a", None, "b"]}
    with refused(BadText, "item 1", "null", kind="column 'tags' is not text"):
        TextColumn("tags").of(row)
    assert TextColumn("{tags}").of(row) == "a\nb"


def test_bytes_that_are_not_utf8_are_named_with_the_byte():
    with refused(BadText, "'raw'", "0xe9 at 3", kind="not UTF-8"):
        TextColumn("raw").of({"raw": b"caf\xe9"})


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("", "text=''"),
        (7, "text=7"),
        ("{title", "expected '}' before end of string"),
        ("title}", "single '}' encountered"),
        ("{}", "{}"),
        ("{a..b}", "{a..b}"),
        ("{a[0]}", "{a[0]}"),
        ("{a!r}", "'!r'"),
        ("{a:{b}}", "{a}"),
        ("{{no column}}", "{{no column}}"),
    ],
)
def test_what_cannot_be_a_column_is_refused_when_it_is_said(spec, named):
    recipe = bw.DatasetRecipe()
    with refused(bw.SpecError, named, parameter="text"):
        recipe.add_ingredient(["a"], text=spec)
    assert recipe.ingredients == []


def test_a_template_reaches_no_attributes_of_python_objects():
    with refused(BadText, kind="no column '__class__.__name__'"):
        TextColumn("{__class__.__name__}").of({"text": "x"})


def test_the_columns_that_are_needed_are_known_without_a_row():
    assert TextColumn("text").columns == ("text",)
    assert TextColumn("message.content").columns == ("message", "message.content")
    assert TextColumn("{title} {a.b.c:>3}").columns == ("a", "a.b", "a.b.c", "title")
    assert TextColumn("version 1.").columns == ("version 1.",)


def test_a_text_column_travels_to_workers():
    assert pickle.loads(pickle.dumps(TextColumn("{title} {score:.1f}"))).of(ROW) == "Ahab 0.8"
