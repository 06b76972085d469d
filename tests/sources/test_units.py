"""Reading in units: every line exactly once, with its right number, wherever the cuts fall."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright.sources import cut_files, cut_rows, format_for, read_unit
from batchwright.sources import units as units_module
from batchwright.sources.units import EndOfSpan, Malformed, Span, Unit
from refusals import refused


def read_file(path: Path, unit_bytes: int, kind: str = "lines") -> list[tuple[int, object]]:
    """(row in the file, row) of all units of one file, in order."""
    found, first = [], 0
    for unit in cut_files([(0, str(path), path.stat().st_size)], kind, unit_bytes):
        for _, number, row in read_unit(unit, {kind: format_for("", kind)}):
            if isinstance(row, EndOfSpan):
                first += number
            else:
                found.append((first + number, row))
    return found


def numbered_texts(rows) -> list[tuple[int, str]]:
    return [(number, row["text"]) for number, row in rows]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["", "newline", "blank lines"])
@pytest.mark.parametrize("unit_bytes", [1, 2, 3, 5, 8, 13, 1000])
def test_every_line_is_read_once_with_its_number(tmp_path, newline, end, unit_bytes):
    lines = ["zero", "", "two", "three three", "   ", "", "six", "é → ü", "eight"]
    tail = {"": "", "newline": newline, "blank lines": newline * 3}[end]
    path = tmp_path / "a"
    path.write_bytes((newline.join(lines) + tail).encode())
    expected = [(number, line) for number, line in enumerate(lines) if line.strip()]
    assert numbered_texts(read_file(path, unit_bytes)) == expected


@given(st.lists(st.text(alphabet="ab\r \né", max_size=6)), st.integers(1, 30))
def test_cuts_never_change_what_is_read(tmp_path_factory, pieces, unit_bytes):
    path = tmp_path_factory.mktemp("cut") / "a"
    path.write_bytes("\n".join(pieces).encode() or b"\n")
    assert read_file(path, unit_bytes) == read_file(path, 1 << 20)


def test_a_line_longer_than_many_units_belongs_to_the_unit_it_starts_in(tmp_path):
    path = tmp_path / "a"
    path.write_text("short\n" + "long" * 100 + "\nlast\n")
    units = cut_files([(0, str(path), path.stat().st_size)], "lines", 10)
    counts = [sum(not isinstance(row, EndOfSpan) for _, _, row in read_unit(u, _lines())) for u in units]
    assert len(units) == 42
    assert [i for i, count in enumerate(counts) if count] == [0, 40]
    assert counts[0] == 2


def test_passing_over_a_line_of_another_unit_reads_no_further_than_its_own(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 10_000)
    monkeypatch.setattr(units_module, "_SKIP_BYTES", 100)
    stream = open(path, "rb")  # noqa: SIM115
    with stream:
        at = units_module._first_line_start(stream, Span(0, str(path), "lines", 1000, 2000))
        assert at >= 2000
        assert stream.tell() < 2200


def _lines():
    return {"lines": format_for("", "lines")}


def test_small_files_share_a_unit_and_large_ones_by_line_are_cut():
    files = [(0, "a.txt", 40), (1, "b.txt", 40), (2, "c.txt", 40), (3, "d.jsonl", 250), (4, "e.txt", 10)]
    units = cut_files(files, None, 100)
    assert [[(s.file, s.start, s.stop) for s in unit.spans] for unit in units] == [
        [(0, 0, None), (1, 0, None)],
        [(2, 0, None)],
        [(3, 0, 100)],
        [(3, 100, 200)],
        [(3, 200, None)],
        [(4, 0, None)],
    ]
    assert [unit.num_bytes for unit in units] == [80, 40, 100, 100, 50, 10]


def test_text_files_and_archives_are_never_cut():
    units = cut_files([(0, "a.txt", 1000), (1, "b.jsonl.gz", 1000), (2, "c.jsonl.zst", 1000)], None, 100)
    assert [[(s.file, s.start, s.stop) for s in unit.spans] for unit in units] == [
        [(0, 0, None)],
        [(1, 0, None)],
        [(2, 0, None)],
    ]


def test_rows_from_memory_are_cut_and_counted_on():
    units = cut_rows(["a", {"text": "b"}, "c"], 2)
    assert [(unit.rows, unit.first_row) for unit in units] == [(("a", {"text": "b"}), 0), (("c",), 2)]


def test_a_row_from_memory_is_given_as_a_copy():
    row = {"text": "a", "tags": ["x"]}
    (_, _, given), _ = read_unit(Unit((), 1, (row,)), {})
    given["tags"].append("y")
    assert row == {"text": "a", "tags": ["x"]}


@pytest.mark.parametrize("kind", ["json", "csv", "tar"])
def test_an_empty_stream_is_one_fault(tmp_path, kind):
    path = tmp_path / "a"
    path.write_bytes(b"")
    assert read_file(path, 1000, kind) == [(0, Malformed("empty file", rows=0))]


def test_an_empty_object_is_a_row_and_not_the_end(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{}\n{"text": "b"}\n')
    assert read_file(path, 1000, "jsonl") == [(0, {"text": "a"}), (1, {}), (2, {"text": "b"})]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"{", Malformed("malformed row")),
        (b"[1]", Malformed("malformed row", "expected an object, got an array")),
        (b'"text"', Malformed("malformed row", "expected an object, got a string")),
        (b"null", Malformed("malformed row", "expected an object, got null")),
        (b'{"text": "\xff"}', Malformed("not UTF-8", "byte 0xff at 10")),
        (b"[" * 100_000, Malformed("malformed row", "nested too deeply")),
        (b'{"text": "\\ud800"}', Malformed("malformed row")),
    ],
)
def test_a_bad_line_is_located_and_the_lines_around_it_are_good(tmp_path, line, fault):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    rows = read_file(path, 1 << 20, "jsonl")
    assert [number for number, _ in rows] == [0, 1, 2]
    assert rows[0][1] == {"text": "a"}
    assert rows[2][1] == {"text": "b"}
    assert rows[1][1].kind == fault.kind
    assert rows[1][1].reason.startswith(fault.reason)  # where the JSON library says why, its words are its own


@pytest.mark.parametrize("kind", ["jsonl", "lines", "text"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".xz"])
def test_an_empty_file_is_one_fault(tmp_path, kind, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"")
    ((number, fault),) = read_file(path, 1000, kind)
    assert (number, fault.kind) == (0, "empty file")


def test_a_file_that_is_gone_is_one_fault(tmp_path):
    unit = Unit((Span(0, str(tmp_path / "gone"), "lines"), Span(1, str(tmp_path / "gone.gz"), "lines")), 10)
    assert [row for _, _, row in read_unit(unit, _lines())] == [
        Malformed("unreadable file", "No such file or directory", rest=True),
        EndOfSpan(),
        Malformed("unreadable file", "No such file or directory", rest=True),
        EndOfSpan(),
    ]


@pytest.mark.usefixtures("_small_units")
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_row_numbers_in_a_store_are_line_numbers_of_the_file(tmp_path, newline):
    lines = [json.dumps({"text": f"row {n}"}) if n % 5 else "" for n in range(60)]
    (tmp_path / "a.jsonl").write_bytes(newline.join(lines).encode())
    compressed = pa.compress(newline.join(lines).encode(), "zstd", asbytes=True)
    (tmp_path / "b.jsonl.zst").write_bytes(compressed)
    recipe = bw.DatasetRecipe().add_ingredient(tmp_path).prepare_step(bw.tokenize("bytes"))
    store = bw.bake(recipe, tmp_path / "a.store", workers=0, show_progress=False)
    assert store.num_rows == 2 * 48
    for row in store.rows():
        assert store.decode(row.tokens) == f"row {row.row}"
    assert {row.file for row in store.rows()} == {str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.zst")}


@pytest.mark.usefixtures("_small_units")
def test_the_line_of_an_error_is_right_behind_a_cut_in_the_middle_of_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    for bad in (0, 1, 7, 8, 9, 29):
        lines = [json.dumps({"text": "x" * n}) for n in range(30)]
        lines[bad] = "{broken"
        path.write_text("\n".join(lines))
        recipe = bw.DatasetRecipe().add_ingredient(path).prepare_step(bw.tokenize("bytes"))
        with refused(bw.SourceError, "JSON", file=path, line=bad + 1):
            bw.bake(recipe, tmp_path / "a.store", workers=0, show_progress=False)


@pytest.fixture
def _small_units(monkeypatch):
    monkeypatch.setattr(units_module, "UNIT_BYTES", 100)
