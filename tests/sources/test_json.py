"""JSON files: an array, objects one after the other, or one object; read a piece at a time."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.sources import format_for, read_unit
from batchwright.sources import json as json_module
from batchwright.sources.units import EndOfSpan, Malformed, Span, Unit

A, B = {"text": "a"}, {"text": "b"}


def read(folder: Path, data: str | bytes, **options) -> list:
    path = folder / "a.json"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    kind = format_for("a.json").with_options(options)
    unit = Unit((Span(0, str(path), "json"),), 1)
    return [row for _, _, row in read_unit(unit, {"json": kind}) if not isinstance(row, EndOfSpan)]


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        ('[{"text": "a"}, {"text": "b"}]', [A, B]),
        ('\ufeff [\n  {"text": "a"},\n  {"text": "b"}\n]\n', [A, B]),
        ('{"text": "a"}\n{"text": "b"}\n', [A, B]),
        ('{"text": "a"}{"text": "b"}', [A, B]),
        ('{\n  "text": "a"\n}\n', [A]),
        ("[]", []),
        ("[{}]", [{}]),
    ],
)
def test_every_object_is_a_row(tmp_path, data, rows):
    assert read(tmp_path, data) == rows


scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(max_size=5)
values = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.text(max_size=2), scalars, max_size=2)
tables = st.lists(st.dictionaries(st.text(max_size=2), values, max_size=2), max_size=4)


@given(tables, st.sampled_from([None, 2]), st.booleans(), st.integers(1, 40))
def test_where_the_pieces_end_never_changes_what_is_read(tmp_path_factory, rows, indent, is_array, piece_bytes):
    parts = [json.dumps(row, ensure_ascii=False, indent=indent) for row in rows]
    data = f"[{','.join(parts)}]" if is_array else "\n".join(parts) or " "
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_module, "_PIECE_BYTES", piece_bytes)
        assert read(tmp_path_factory.mktemp("json"), data) == rows


def test_an_item_that_is_no_object_is_one_fault(tmp_path):
    rows = read(tmp_path, '[{"text": "a"},\n 5,\n {"text": "\\ud800"},\n {"text": "b"}]')
    assert [rows[0], rows[3]] == [A, B]
    assert rows[1] == Malformed("malformed row", "line 2: expected an object, got a number")
    assert rows[2].reason.startswith("line 3: ")
    assert not rows[2].rest


def test_a_number_that_goes_on_in_the_next_piece_is_one_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(json_module, "_PIECE_BYTES", 3)
    number = Malformed("malformed row", "line 1: expected an object, got a number")
    assert read(tmp_path, '[123456, {"text": "a"}, 7]') == [number, A, number]


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ('{"text": "b"', "line 3: the file ends inside it"),
        ('{"text": "b', "line 3: the file ends inside it"),
        ('{"text": "b"}', "line 3: expected another object after ',', or ']' without it"),
        ('{"text": "b"} {"text": "c"}]', "line 3: expected another object after ',', or ']' without it"),
        ("]", "line 3: expected another object after ',', or ']' without it"),
        ('{"text": "b"}] {}', "line 3: there is more after the array"),
        ('{"text": b, "more": "than enough text"}]', "line 3: Expecting value"),
        ("[" * 100_000, "line 3: nested too deeply"),
    ],
)
def test_what_cannot_be_parsed_loses_the_rest_and_is_located(tmp_path, after, reason):
    rows = read(tmp_path, '[\n{"text": "a"},\n' + after)
    assert rows[0] == A
    assert rows[-1] == Malformed("malformed row", reason, rest=True)


def test_a_byte_that_is_not_utf8_is_located_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(json_module, "_PIECE_BYTES", 8)
    rows = read(tmp_path, b'[{"text": "a"}, {"text": "caf\xe9"}]')
    assert rows == [A, Malformed("not UTF-8", "byte 0xe9 at 29", rest=True)]


def test_an_object_beyond_the_limit_is_located(tmp_path):
    rows = read(tmp_path, '[{"text": "a"},\n{"text": "' + "x" * 100 + '"}, {"text": "b"}]', max_row_bytes=50)
    assert rows[0] == A
    assert rows[1].kind == "row too long"
    assert "line 2" in rows[1].reason
    assert 'options={"max_row_bytes": 100}' in rows[1].remedy


def test_memory_does_not_grow_with_the_array(tmp_path, monkeypatch):
    monkeypatch.setattr(json_module, "_PIECE_BYTES", 10_000)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "x" * 1000}] * 3000))
    unit = Unit((Span(0, str(path), "json"),), 1)
    formats = {"json": format_for("a.json")}
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_unit(unit, formats)) == 3001
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()
