"""Parquet: the rows that the same data has as JSON, only the columns that are needed, a bad row group at a time."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchwright as bw
from batchwright.sources import arrow
from batchwright.sources.arrow import read_parquet
from batchwright.sources.formats import Malformed
from refusals import refused


@pytest.fixture
def file(tmp_path, rows) -> Path:
    """Sixty rows in row groups of seven."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7, use_dictionary=False)
    return path


def damage(path: Path, row_group: int) -> None:
    """Turn bits in the middle of the first column of a row group."""
    column = pq.ParquetFile(path).metadata.row_group(row_group).column(0)
    data = bytearray(path.read_bytes())
    middle = column.data_page_offset + column.total_compressed_size - 20
    data[middle : middle + 12] = bytes(255 - byte for byte in data[middle : middle + 12])
    path.write_bytes(data)


@pytest.mark.parametrize("text", ["text", "turns.text", "{number:03d} {message.role} {turns.1.who}"])
def test_the_documents_are_those_of_the_same_rows_as_json(file, as_jsonl, documents_of, small_units, text):
    assert documents_of(file, text) == documents_of(as_jsonl, text)


@pytest.mark.parametrize("unit_bytes", [1, 100, 1000, 1_000_000])
def test_ranges_that_tile_a_file_give_every_row_once_in_order(file, unit_bytes):
    size = file.stat().st_size
    starts = list(range(0, size, unit_bytes)) if unit_bytes > 1 else [0, 1, 2, size - 1]
    stops = [*starts[1:], None]
    numbers = [
        row["number"]
        for start, stop in zip(starts, stops, strict=True)
        for row in read_parquet(file, columns=("number",), start=start, stop=stop)
    ]
    assert numbers == list(range(60))


def test_a_large_file_is_cut_into_several_units(file, documents_of, small_units):
    from batchwright.sources import units

    cut = units.cut_files([(0, str(file), file.stat().st_size)], None)
    assert len(cut) > 3
    read = [units.read_unit(unit, {"parquet": units.format_for("a.parquet")}) for unit in cut]
    with_rows = [n for unit in read if (n := sum(isinstance(row, dict) for _, _, row in unit))]
    assert len(with_rows) > 3
    assert sum(with_rows) == 60


def test_only_the_columns_and_leaves_that_are_needed_are_read(file):
    assert next(read_parquet(file, columns=("message", "message.content"))) == {"message": {"content": "said 0"}}
    assert next(read_parquet(file, columns=("turns", "turns.0", "turns.0.who"))) == {
        "turns": [{"who": "a"}, {"who": "b"}]
    }
    assert list(next(read_parquet(file))) == ["text", "number", "message", "turns"]


def test_damage_in_a_column_that_is_not_needed_is_not_met(file, documents_of):
    damage(file, 2)
    assert len(documents_of(file, "message.content")) == 60


def test_a_path_into_what_is_no_struct_is_located(file, documents_of):
    with refused(bw.SourceError, "'text.inner'", "'text'", "str", file=file, row=0, remedy="text="):
        documents_of(file, "text.inner")


def test_a_column_that_is_missing_names_the_nearest_one_also_inside_a_struct(file, documents_of):
    with refused(bw.SourceError, "'txet'", "'text', 'number'", "text='text'"):
        documents_of(file, "txet")
    with refused(bw.SourceError, "'message.contnet'", "'role', 'content'", "text='message.content'"):
        documents_of(file, "message.contnet")


def test_where_gets_the_whole_row(file, documents_of):
    def where(row):
        return row["message"]["role"] == "user" and row["number"] in (3, 50)

    assert [row for row, _ in documents_of(file, "turns.text", where=where)] == [3, 50]


def test_a_tokenizer_step_of_another_column_has_that_column(file, tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(str(file)).prepare_step(bw.tokenize("bytes", text="other"))
    with refused(bw.SourceError, "'other'", "'text', 'number'", file=file, row=0, remedy="tokenize("):
        bw.bake(recipe, tmp_path / "x.store", workers=0, show_progress=False)


def test_a_corrupt_row_group_is_named_with_its_rows(file, documents_of, small_units):
    damage(file, 2)
    with refused(bw.SourceError, "row group 2", file=file, rows="14 to 20", remedy="on_error='skip'"):
        documents_of(file)


def test_only_the_rows_of_a_corrupt_row_group_are_lost(file, tmp_path, documents_of, small_units):
    damage(file, 2)
    kept = documents_of(file, on_error="skip")
    assert [row for row, _ in kept] == [*range(14), *range(21, 60)]
    assert [text for row, text in kept if row == 21] == ["document 21, and more"]
    report = bw.open_store(tmp_path / "0.store").report
    assert report["ingredients"]["x"]["dropped"] == {"corrupt row group": 7}
    assert report["ingredients"]["x"]["rows_read"] == 60
    assert report["errors"] == 7
    ((_, row, reason),) = report["examples"]
    assert row == 14
    assert reason.startswith("corrupt row group: row group 2: ")


def test_a_checksum_finds_damage_that_still_decodes(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["abcdefghij" * 30] * 20})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    damage(path, 0)
    (fault,) = read_parquet(path)
    assert fault.kind == "corrupt row group"
    assert "CRC checksum verification failed" in fault.reason


def test_rows_are_read_a_few_at_a_time(file, monkeypatch):
    monkeypatch.setattr(arrow, "_BATCH_BYTES", 1)
    seen = []
    monkeypatch.setattr(arrow, "rows_of", lambda batch: seen.append(batch.num_rows) or iter(()))
    assert list(read_parquet(file)) == []
    assert seen == [1] * 60


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (pa.array(["a"]).dictionary_encode(), "a"),
        (pa.array(["a"], pa.large_string()), "a"),
        (pa.array(["a"], pa.string_view()), "a"),
        (pa.array([b"a"], pa.binary()), b"a"),
        (pa.array([Decimal("1.50")]), Decimal("1.50")),
        (
            pa.array([datetime.datetime(2026, 11, 15, 12, 0, 0, 5)], pa.timestamp("ns")),
            datetime.datetime(2026, 11, 15, 12, 0, 0, 5),
        ),
        (pa.array([datetime.date(2026, 11, 15)]), datetime.date(2026, 11, 15)),
        (pa.array([["a", "b"]]), ["a", "b"]),
        (pa.array([{"x": 1}]), {"x": 1}),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), {"k": 1}),
        (pa.array([None], pa.string()), None),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_every_kind_of_column_is_a_value_that_python_has(tmp_path, column, value):
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    (row,) = read_parquet(tmp_path / "a.parquet")
    assert row == {"x": value}
    assert type(row["x"]) is type(value)


def test_text_that_is_not_utf8_is_a_fault_of_its_row(tmp_path):
    bad = pa.array([b"good", b"caf\xe9", b"also good"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet", store_schema=False)
    first, fault, last = read_parquet(tmp_path / "a.parquet")
    assert (first, last) == ({"text": "good"}, {"text": "also good"})
    assert fault == Malformed("not UTF-8", "column 'text', byte 0xe9 at 3")


@pytest.mark.parametrize("kind", ["whole", "empty row group"])
def test_a_table_without_rows_is_one_fault(tmp_path, kind):
    table = pa.table({"text": pa.array([], pa.string())})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        if kind == "empty row group":
            writer.write_table(table)
    assert list(read_parquet(tmp_path / "a.parquet")) == [Malformed("empty file", "a table without rows", rows=0)]


def test_a_damaged_footer_never_ends_the_process(tmp_path, file):
    # Where pyarrow is asked for what a damaged footer says of a column, it calls abort().
    whole = file.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    places = [match.start() for match in re.finditer(rb"\x02", whole[footer:-8])]
    kinds = set()
    for at in places[:: max(1, len(places) // 150)]:
        (tmp_path / "b.parquet").write_bytes(whole[: footer + at] + b"\x06" + whole[footer + at + 1 :])
        kinds |= {row.kind for row in read_parquet(tmp_path / "b.parquet") if isinstance(row, Malformed)}
    assert {"corrupt row group", "unsupported row group"} <= kinds
