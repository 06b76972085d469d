"""Arrow IPC files, and datasets that Hugging Face's library saved: the rows that the same data has as JSON."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pytest

import batchwright as bw
from batchwright.sources import list_files
from batchwright.sources.arrow import read_arrow
from batchwright.sources.formats import Malformed
from refusals import refused


def write(path: Path, table: pa.Table, kind: str = "file", rows: int = 7, **options: object) -> Path:
    start = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, start(sink, table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.fixture(params=["file", "stream"])
def file(request, tmp_path, rows) -> Path:
    """Sixty rows in record batches of seven, in both formats."""
    return write(tmp_path / "rows.arrow", pa.Table.from_pylist(rows), request.param)


@pytest.mark.parametrize("text", ["text", "{turns.text} {number:03d} {message.content}"])
def test_the_documents_are_those_of_the_same_rows_as_json(file, as_jsonl, documents_of, small_units, text):
    assert documents_of(file, text) == documents_of(as_jsonl, text)


@pytest.mark.parametrize("unit_bytes", [200, 1000, 5000, 1_000_000])
def test_ranges_that_tile_a_file_give_every_row_once_in_order(file, unit_bytes):
    starts = list(range(0, file.stat().st_size, unit_bytes))
    stops = [*starts[1:], None]
    numbers = [
        row["number"]
        for start, stop in zip(starts, stops, strict=True)
        for row in read_arrow(file, columns=("number",), start=start, stop=stop)
    ]
    assert numbers == list(range(60))


def test_a_range_holds_only_its_part_of_the_file(file):
    half = file.stat().st_size // 2
    first, second = (len(list(read_arrow(file, start=a, stop=b))) for a, b in ((0, half), (half, None)))
    assert first + second == 60
    assert 20 < first < 40


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_batches_and_dictionaries_are_read(tmp_path, kind, compression):
    table = pa.table({"text": pa.array([f"word {n % 3}" for n in range(20)]).dictionary_encode()})
    options = pa.ipc.IpcWriteOptions(compression=compression, unify_dictionaries=True)
    path = write(tmp_path / "a.arrow", table, kind, options=options)
    assert [row["text"] for row in read_arrow(path)] == table["text"].to_pylist()


def test_a_feather_file_is_read(tmp_path):
    import pyarrow.feather

    pyarrow.feather.write_feather(pa.table({"text": ["a", "b"]}), tmp_path / "a.feather")
    assert list(read_arrow(tmp_path / "a.feather")) == [{"text": "a"}, {"text": "b"}]


def test_a_truncated_stream_gives_the_rows_before_and_is_located(tmp_path, rows, documents_of):
    path = write(tmp_path / "rows.arrow", pa.Table.from_pylist(rows), "stream")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with refused(bw.SourceError, "record batch 4", file=path, row=28, remedy="on_error='skip'"):
        documents_of(path)
    assert [row for row, _ in documents_of(path, on_error="skip")] == list(range(28))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"hello, this is not Arrow at all", "not an Arrow IPC file"),
        (b"ARROW1\0\0 cut off", "truncated or damaged Arrow file"),
        (b"FEA1 an old one", "not an Arrow IPC file"),
    ],
)
def test_what_is_no_arrow_file_is_one_fault(tmp_path, data, kind):
    (tmp_path / "a.arrow").write_bytes(data)
    (fault,) = read_arrow(tmp_path / "a.arrow")
    assert (fault.kind, fault.rest) == (kind, True)
    assert fault.reason


def test_turned_bits_are_faults_of_rows_and_never_end_the_process(file):
    whole, kinds = file.read_bytes(), set()
    draw = random.Random(0)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(3):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        kinds |= {row.kind for row in read_arrow(file) if isinstance(row, Malformed)}
    assert {"not UTF-8", "malformed row"} <= kinds


def test_text_that_is_not_utf8_is_a_fault_of_its_row(tmp_path):
    bad = pa.array([b"good", b"caf\xe9", b"also good"]).view(pa.string())
    path = write(tmp_path / "a.arrow", pa.table({"text": bad}))
    first, fault, last = read_arrow(path)
    assert (first, last) == ({"text": "good"}, {"text": "also good"})
    assert fault == Malformed("not UTF-8", "column 'text', byte 0xe9 at 3")


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_a_table_without_rows_is_one_fault(tmp_path, kind):
    path = write(tmp_path / "a.arrow", pa.table({"text": pa.array([], pa.string())}), kind)
    assert list(read_arrow(path)) == [Malformed("empty file", "a table without rows", rows=0)]


# Datasets on disk


@pytest.fixture
def saved(tmp_path, rows) -> Path:
    """A dataset of sixty rows in three files, as `save_to_disk` writes it."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "ds" / "train", num_shards=3)
    return tmp_path / "ds" / "train"


def test_a_saved_dataset_is_a_source_by_its_folder(saved, as_jsonl, documents_of):
    texts = [text for _, text in documents_of(saved, "turns.text")]
    assert texts == [text for _, text in documents_of(as_jsonl, "turns.text")]


def test_only_the_files_that_the_dataset_lists_are_read_and_in_its_order(saved):
    state = json.loads((saved / "state.json").read_text())
    state["_data_files"] = state["_data_files"][:0:-1]
    (saved / "state.json").write_text(json.dumps(state))
    names = ["data-00002-of-00003.arrow", "data-00001-of-00003.arrow"]
    assert [file.name for file in list_files(saved)] == names
    assert [file.name for file in list_files(saved.parent)] == names
    assert [Path(file.path).name for file in list_files([saved, saved / "state.json"])][:2] == names


def test_a_dataset_with_several_splits_names_them(tmp_path, saved):
    (saved.parent / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with refused(bw.SourceError, file=saved.parent, splits="'train', 'test'", remedy=saved):
        list_files(saved.parent)


@pytest.mark.parametrize(
    ("state", "file", "named"),
    [
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "", "flatten_indices()"),
        ({"_data_files": [{"filename": "../other.arrow"}]}, "state.json", "../other.arrow"),
        ("not JSON {", "state.json", "JSON"),
        ({"_data_files": []}, "", "'data/**/*.jsonl'"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "gone.arrow", "No such file"),
    ],
    ids=["indices", "escapes", "no JSON", "no files", "a file is gone"],
)
def test_a_dataset_that_cannot_be_read_says_why(saved, state, file, named):
    (saved / "state.json").write_text(state if isinstance(state, str) else json.dumps(state))
    with refused(bw.SourceError, named, file=saved / file):
        list_files(saved)


def test_a_name_of_a_column_that_is_not_utf8_is_one_fault(tmp_path):
    path = write(tmp_path / "a.arrow", pa.table({"textual": pa.array(["one", "two"])}))
    path.write_bytes(path.read_bytes().replace(b"textual", b"text\xe9al"))
    (fault,) = read_arrow(path)
    assert fault == Malformed("truncated or damaged Arrow file", "the name of a column is not UTF-8", rest=True)
