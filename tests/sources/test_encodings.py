"""Text is UTF-8: another encoding is one clear fault of the file, and limits hold for every format."""

from __future__ import annotations

import codecs
import gzip
import tracemalloc
from pathlib import Path

import pytest

from batchwright.sources import cut_files, format_for, read_unit
from batchwright.sources.formats import encoding_fault
from batchwright.sources.units import EndOfSpan, Malformed

CONTENT = {
    "jsonl": '{"text": "one"}\n{"text": "two"}\n',
    "json": '[{"text": "one"}, {"text": "two"}]',
    "csv": "text,id\none,1\ntwo,2\n",
    "tsv": "text\tid\none\t1\ntwo\t2\n",
    "text": "one\ntwo\n",
    "lines": "one\ntwo\n",
}


def read(path: Path, kind: str, unit_bytes: int = 1000, **options) -> list:
    formats = {kind: format_for("", kind).with_options(options)}
    units = cut_files([(0, str(path), path.stat().st_size)], kind, unit_bytes)
    return [row for unit in units for _, _, row in read_unit(unit, formats) if not isinstance(row, EndOfSpan)]


@pytest.mark.parametrize("kind", CONTENT)
def test_a_byte_order_mark_is_no_text(tmp_path, kind):
    path = tmp_path / "a"
    path.write_text(CONTENT[kind], encoding="utf-8")
    plain = read(path, kind)
    path.write_text(CONTENT[kind], encoding="utf-8-sig")
    assert read(path, kind) == plain
    assert [row["text"] for row in plain] == (["one\ntwo\n"] if kind == "text" else ["one", "two"])


@pytest.mark.parametrize("kind", CONTENT)
@pytest.mark.parametrize("has_mark", [True, False])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        ("utf-16-le", "UTF-16, little-endian"),
        ("utf-16-be", "UTF-16, big-endian"),
        ("utf-32-le", "UTF-32, little-endian"),
        ("utf-32-be", "UTF-32, big-endian"),
    ],
)
def test_another_encoding_is_one_fault_that_names_it_and_the_remedy(
    tmp_path, kind, has_mark, compressed, encoding, name
):
    data = (("\ufeff" if has_mark else "") + CONTENT[kind]).encode(encoding)
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(data) if compressed else data)
    codec = name.split(",")[0] if has_mark else encoding.replace("-le", "LE").replace("-be", "BE").upper()
    remedy = f"iconv -f {codec} -t UTF-8 FILE > NEW_FILE"
    assert read(path, kind) == [Malformed("not UTF-8", f"this file is {name}", rest=True, remedy=remedy)]
    assert data.decode(codec) == CONTENT[kind]  # the remedy is right


def test_a_large_file_in_another_encoding_is_one_fault_and_not_one_for_each_range(tmp_path):
    path = tmp_path / "a"
    path.write_text("one line\n" * 100, encoding="utf-16")
    assert len(cut_files([(0, str(path), path.stat().st_size)], "lines", 100)) == 19
    (fault,) = read(path, "lines", 100)
    assert fault.reason == "this file is UTF-16, little-endian"


@pytest.mark.parametrize("text", ["", "a", "a\0", "\0", "text with a \0 in it", "a\0b", "é\0é\0", "日本語"])
def test_text_is_not_taken_for_another_encoding(text):
    assert encoding_fault(text.encode()) is None


def test_a_byte_of_latin_1_is_located_and_the_lines_around_it_are_good(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"one\ncaf\xe9\nthree\n")
    assert read(path, "lines") == [{"text": "one"}, Malformed("not UTF-8", "byte 0xe9 at 3"), {"text": "three"}]


def test_every_mark_that_python_knows_is_known():
    for mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        assert encoding_fault(mark) is not None
    assert encoding_fault(codecs.BOM_UTF8 + b"text") is None


# Limits


def test_a_line_beyond_the_limit_is_one_fault_in_bounded_memory(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"good\n" + bytes(40 << 20) + b"\ngood\n")
    tracemalloc.start()
    try:
        before, fault, after = read(path, "lines", 1 << 40, max_row_bytes=4 << 20)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
    assert before == after == {"text": "good"}
    assert (fault.kind, fault.reason) == ("line too long", "over 4,194,304 bytes")
    assert 'options={"max_row_bytes": 8388608}' in fault.remedy


def test_the_limit_counts_the_line_without_its_end(tmp_path):
    path = tmp_path / "a"
    path.write_text("x" * 10 + "\n" + "y" * 11 + "\n" + "z" * 10)
    assert read(path, "lines", max_row_bytes=10) == [
        {"text": "x" * 10},
        Malformed("line too long", "over 10 bytes", remedy='options={"max_row_bytes": 20} or more, if it is meant so'),
        {"text": "z" * 10},
    ]


def test_a_text_file_beyond_the_limit_is_not_a_document(tmp_path):
    path = tmp_path / "a"
    path.write_text("x" * 11)
    assert read(path, "text", max_row_bytes=11) == [{"text": "x" * 11}]
    (fault,) = read(path, "text", max_row_bytes=10)
    assert (fault.kind, fault.reason, fault.rest) == ("document too long", "over 10 bytes", True)
