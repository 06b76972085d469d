"""Formats are plug-ins: a function of a line or of a stream, known by name or extension."""

from __future__ import annotations

from pathlib import Path

import pytest

import batchwright as bw
from batchwright.sources import Malformed, Unit, format_for, read_unit
from batchwright.sources import formats as formats_module
from batchwright.sources.units import Span
from refusals import refused


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(formats_module._formats, "_known", dict(formats_module._formats._known))


def bake(source, tmp_path: Path, **settings) -> bw.Store:
    recipe = bw.DatasetRecipe().add_ingredient(source, name="a").prepare_step(bw.tokenize("bytes"))
    return bw.bake(recipe, tmp_path / "a.store", workers=0, show_progress=False, **settings)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a.jsonl", "jsonl"),
        ("a.ndjson", "jsonl"),
        ("A.JSONL.GZ", "jsonl"),
        ("a.jsonl.zst", "jsonl"),
        ("a.txt", "text"),
        ("a.md.gz", "text"),
        ("a.csv.xz", "csv"),
        ("a.tsv.bz2", "tsv"),
        ("a.json.lz4", "json"),
        ("a.tar", "tar"),
        ("a.tgz", "tar"),
        ("a.tar.zst", "tar"),
    ],
)
def test_an_extension_says_the_format(path, name):
    assert format_for(path).name == name


@pytest.mark.parametrize("path", ["a.docx", "a", "a.gz", "a.txt.bak"])
def test_an_unknown_extension_asks_for_a_format(path):
    with refused(bw.SourceError, ".jsonl", file=path, parameter="format", remedy="format='text'"):
        format_for(path)


def test_a_file_is_a_document_or_a_line_is(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    whole = bake(tmp_path / "a.txt", tmp_path)
    assert [whole.decode(row.tokens) for row in whole.rows()] == ["one\ntwo\n"]
    recipe = bw.DatasetRecipe().add_ingredient(tmp_path / "a.txt", format="lines").prepare_step(bw.tokenize("bytes"))
    lines = bw.bake(recipe, tmp_path / "b.store", workers=0, show_progress=False)
    assert sorted((row.row, lines.decode(row.tokens)) for row in lines.rows()) == [(0, "one"), (1, "two")]


def test_a_format_of_a_stream_gives_rows_and_says_which_are_bad(tmp_path):
    @bw.register_format("para", extensions=(".para",))
    def read_paragraphs(stream):
        for paragraph in stream.read().decode().split("\n\n"):
            yield {"text": paragraph} if paragraph else Malformed("empty paragraph")

    (tmp_path / "a.para").write_text("one\ntwo\n\n\n\nthree")
    with refused(bw.SourceError, "empty paragraph", file=tmp_path / "a.para", row=1):
        bake(tmp_path / "a.para", tmp_path)
    store = bake(tmp_path / "a.para", tmp_path, on_error="skip")
    assert sorted((row.row, store.decode(row.tokens)) for row in store.rows()) == [(0, "one\ntwo"), (2, "three")]


def test_a_format_is_given_the_columns_it_asks_for_and_the_options_it_names(tmp_path):
    @bw.register_format("own", extensions=(".own",))
    def read_own(stream, *, columns=None, suffix="!"):
        yield {"text": f"{columns} {stream.read().decode()}{suffix}"}

    (tmp_path / "a.own").write_text("one")
    unit = Unit((Span(0, str(tmp_path / "a.own"), "own"),), 1)
    kind = format_for("a.own")
    for given, columns, text in ((kind, None, "None one!"), (kind.with_options({"suffix": "?"}), ["a"], "['a'] one?")):
        (_, _, row), _ = read_unit(unit, {"own": given}, columns)
        assert row == {"text": text}
    assert kind.with_options({"suffix": "?"}).fingerprint != kind.fingerprint


def test_an_option_that_a_format_does_not_have_is_refused_with_the_nearest():
    known = "delimiter, header, max_row_bytes, quotechar"
    with refused(bw.SpecError, "'csv'", "'delimter'", parameter="options", known=known, remedy="'delimiter'"):
        format_for("", "csv").with_options({"delimter": ";"})
    for name in ("columns", "start"):
        with refused(bw.SpecError, "'csv'", f"'{name}'", parameter="options", known=known):
            format_for("", "csv").with_options({name: []})


def test_a_format_can_take_one_extension_as_a_string_and_in_capitals():
    bw.register_format("own", extensions=".Own", by_line=True)(lambda line: {"text": "x"})
    assert format_for("a.own").name == "own"
    assert format_for("a.OWN.gz").name == "own"


def test_a_later_format_wins_an_extension_and_a_name():
    bw.register_format("mine", extensions=(".txt",))(lambda stream: [])
    assert format_for("a.txt").name == "mine"
    assert format_for("a.txt", "text").name == "text"


def test_a_value_error_in_a_format_is_a_malformed_row(tmp_path):
    @bw.register_format("number", extensions=(".number",), by_line=True)
    def read_number(line):
        return {"text": str(int(line))}

    (tmp_path / "a.number").write_text("1\ntwo\n3\n")
    with refused(bw.SourceError, "invalid literal for int() with base 10: b'two'", file=tmp_path / "a.number", line=2):
        bake(tmp_path / "a.number", tmp_path)
    assert bake(tmp_path / "a.number", tmp_path, on_error="skip").num_rows == 2


@pytest.mark.parametrize("by_line", [True, False])
def test_any_other_error_in_a_format_is_located_and_never_skipped(tmp_path, by_line):
    def read(line_or_stream):
        if by_line:
            return {"text": "a"} if line_or_stream == b"good" else {}["key"]
        return iter([{"text": "a"}, {}["key"]])

    bw.register_format("wrong", extensions=(".wrong",), by_line=by_line)(read)
    (tmp_path / "a.wrong").write_text("good\nbad\n")
    with refused(bw.WorkerError, "'wrong'", "KeyError: 'key'", file=tmp_path / "a.wrong") as caught:
        bake(tmp_path / "a.wrong", tmp_path, on_error="skip")
    assert caught.value.where.get("line", 2) == 2
    assert caught.value.where["at"].startswith(__file__)


def test_a_format_that_gives_no_rows_is_told_so(tmp_path):
    bw.register_format("none", extensions=(".none",), by_line=True)(lambda line: None)
    (tmp_path / "a.none").write_text("x\n")
    with refused(bw.SourceError, "NoneType", file=tmp_path / "a.none", line=1):
        bake(tmp_path / "a.none", tmp_path)


def test_the_limit_of_a_row_is_an_option_of_every_format(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "twenty bytes and more"}\n')
    (tmp_path / "a.txt").write_text("twenty bytes and more")
    for name in ("a.jsonl", "a.txt"):

        def recipe(name: str, limit: int) -> bw.DatasetRecipe:
            made = bw.DatasetRecipe().add_ingredient(tmp_path / name, options={"max_row_bytes": limit})
            return made.prepare_step(bw.tokenize("bytes"))

        with refused(bw.SourceError, "20 bytes", file=tmp_path / name, remedy='options={"max_row_bytes": 40}'):
            bw.bake(recipe(name, 20), tmp_path / f"{name}.store", workers=0, show_progress=False)
        assert bw.bake(recipe(name, 40), tmp_path / f"{name}.store", workers=0, show_progress=False).num_rows == 1
