"""CSV and TSV: rows as RFC 4180 has them, and every bad row located and passed over."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright.sources import format_for, read_unit
from batchwright.sources.units import EndOfSpan, Malformed, Span, Unit
from refusals import refused


def read(folder: Path, data: str | bytes, name: str = "a.csv", columns=None, **options) -> list:
    """The rows of a file, and what is wrong with it."""
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    kind = format_for(name).with_options(options)
    unit = Unit((Span(0, str(path), kind.name),), 1)
    return [row for _, _, row in read_unit(unit, {kind.name: kind}, columns) if not isinstance(row, EndOfSpan)]


def test_the_header_names_the_columns_and_every_value_is_text(tmp_path):
    assert read(tmp_path, "id,text\n1,one\n2,\n") == [{"id": "1", "text": "one"}, {"id": "2", "text": ""}]


def test_a_quoted_value_may_hold_delimiters_line_ends_and_quotes(tmp_path):
    rows = read(tmp_path, 'id,text\n1,"two\nlines, and ""quotes"""\n"2","a\r\nb"\n')
    assert rows == [{"id": "1", "text": 'two\nlines, and "quotes"'}, {"id": "2", "text": "a\r\nb"}]


def test_a_byte_order_mark_windows_line_ends_and_blank_lines_are_no_data(tmp_path):
    assert read(tmp_path, '\ufeff"id",text\r\n\r\n1,one\r\n\r\n') == [{"id": "1", "text": "one"}]


def test_tabs_separate_a_tsv_file(tmp_path):
    assert read(tmp_path, "id\ttext\n1\tone, two\n", "a.tsv") == [{"id": "1", "text": "one, two"}]


def test_options_name_delimiter_quote_and_columns(tmp_path):
    assert read(tmp_path, "id;text\n1;'a;b'\n", delimiter=";", quotechar="'") == [{"id": "1", "text": "a;b"}]
    assert read(tmp_path, "1,one\n", header=["id", "text"]) == [{"id": "1", "text": "one"}]
    assert read(tmp_path, 'text\n5" pipe\n"quoted"\n', quotechar=None) == [{"text": '5" pipe'}, {"text": '"quoted"'}]


@given(st.lists(st.lists(st.text("ab ,;\"'\t\né", max_size=5), min_size=2, max_size=2), max_size=6))
def test_what_pythons_writer_writes_comes_back(tmp_path_factory, table):
    out = io.StringIO(newline="")
    csv.writer(out).writerows([["id", "text"], *table])
    rows = read(tmp_path_factory.mktemp("csv"), out.getvalue())
    assert rows == [{"id": a, "text": b} for a, b in table]


def test_a_ragged_row_is_located_and_the_rows_around_it_are_good(tmp_path):
    rows = read(tmp_path, 'id,text\n1,"two\nlines"\n2,x,3\n3,good\n4\n5,good\n')
    assert rows[1::2] == [
        Malformed("ragged row", "line 4 has 3 fields, and there are 2 columns"),
        Malformed("ragged row", "line 6 has 1 field, and there are 2 columns"),
    ]
    assert [row["id"] for row in rows[::2]] == ["1", "3", "5"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('2,"he said "hi" there"', """line 3: ',' expected after '"'"""),
        ('2,"he said "hi" and\nmore"', """line 3: ',' expected after '"'"""),
        ("2,a\0b", "line 3: a NUL byte"),
        ("2,a\rb", "line 3: a carriage return that does not end a line"),
        ('2,"a\nb\0"', "line 4: a NUL byte (the row begins in line 3)"),
    ],
)
def test_a_row_that_cannot_be_read_is_one_fault(tmp_path, bad, reason):
    rows = read(tmp_path, f"id,text\n1,good\n{bad}\n3,good\n")
    assert rows == [{"id": "1", "text": "good"}, Malformed("malformed row", reason), {"id": "3", "text": "good"}]


def test_a_row_that_is_not_utf8_is_one_fault(tmp_path):
    rows = read(tmp_path, b'id,text\n1,caf\xe9\n2,"two\ncaf\xe9 lines"\n3,good\n')
    assert rows == [
        Malformed("not UTF-8", "line 2: byte 0xe9 at 5"),
        Malformed("not UTF-8", "line 4: byte 0xe9 at 3 (the row begins in line 3)"),
        {"id": "3", "text": "good"},
    ]


@pytest.mark.parametrize("rest", ["3,b\n4,c\n", '3,"b"\n4,c\n', "", "3,b\n" * 1000])
def test_a_quote_that_never_closes_is_located_where_it_opens(tmp_path, rest):
    rows = read(tmp_path, f'id,text\n1,"one\nmore"\n"2\n",good,"open\n{rest}', max_row_bytes=1000)
    assert rows[0] == {"id": "1", "text": "one\nmore"}
    assert rows[1:] == [
        Malformed("unclosed quote", "a quote opens in line 5, and the rest of the file is inside it", rest=True)
    ]


@pytest.mark.parametrize("long", ["2," + "x" * 99, '2,"' + "y\n" * 60 + '"'])
def test_a_row_beyond_the_limit_is_one_fault(tmp_path, long):
    rows = read(tmp_path, f"id,text\n1,{'x' * 98}\n{long}\n3,good\n", max_row_bytes=100)
    assert [rows[0]["id"], rows[2]["id"]] == ["1", "3"]
    assert rows[1].kind == "row too long"
    assert "line 3" in rows[1].reason
    assert 'options={"max_row_bytes": 200}' in rows[1].remedy
    assert len(rows) == 3


def test_a_field_larger_than_pythons_limit_is_read(tmp_path):
    (row,) = read(tmp_path, "text\n" + "x" * 200_000 + "\n")
    assert len(row["text"]) == 200_000


@pytest.mark.parametrize(
    ("header", "place"),
    [("id,text,id", "'id'"), (",text", "column 1 of 2"), ("id,text,", "column 3 of 3")],
)
def test_a_header_names_every_column_once(tmp_path, header, place):
    (fault,) = read(tmp_path, f"{header}\n1,2,3\n")
    assert (fault.kind, fault.rest) == ("bad header", True)
    assert fault.reason.startswith("line 1")
    assert place in fault.reason
    assert fault.remedy


def test_a_header_that_cannot_be_read_loses_the_file(tmp_path):
    (fault,) = read(tmp_path, "id,text\r1,a\r2,b\r")
    assert (fault.reason, fault.rest) == ("line 1: a carriage return that does not end a line", True)
    assert read(tmp_path, "\n\n") == [Malformed("empty file", "no header row", rows=0)]


@pytest.mark.parametrize(
    ("name", "header", "delimiter"),
    [("a.csv", "id;text", ";"), ("a.csv", "id\ttext", r"\t"), ("a.csv", "id|text", "|"), ("a.tsv", "id,text", ",")],
)
@pytest.mark.parametrize("columns", [None, ["text"]])
def test_a_header_with_another_delimiter_is_told_which(tmp_path, name, header, delimiter, columns):
    (fault,) = read(tmp_path, f"{header}\n1;x\n", name, columns)
    assert fault.kind == "wrong delimiter"
    assert fault.rest
    assert f'options={{"delimiter": "{delimiter}"}}' in fault.remedy


def test_one_column_is_good_if_it_is_the_one_that_is_wanted(tmp_path):
    assert read(tmp_path, "a;b\nx\n", columns=["a;b"]) == [{"a;b": "x"}]
    assert read(tmp_path, "text\nx\n", columns=["other"]) == [{"text": "x"}]


def test_rows_with_another_delimiter_than_a_header_that_was_given_are_told_which(tmp_path):
    (fault,) = read(tmp_path, "1;x\n", header=["id", "text"])
    assert fault.kind == "ragged row"
    assert 'options={"delimiter": ";"}' in fault.remedy


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"delimiter": ";;"}, "delimiter=';;'"),
        ({"delimiter": ""}, "delimiter=''"),
        ({"quotechar": "\n"}, r"quotechar='\n'"),
        ({"delimiter": '"'}, "delimiter and quotechar"),
        ({"header": "text"}, "header='text'"),
        ({"header": ["a", "a"]}, "'a'"),
        ({"delimeter": ";"}, "'delimeter'"),
        ({"max_row_bytes": 0}, "max_row_bytes"),
    ],
)
def test_an_option_that_cannot_be_is_refused_and_never_skipped(tmp_path, options, named):
    with refused(bw.SpecError, named):
        read(tmp_path, "text\nx\n", **options)
