"""Tables from memory: kept as Arrow, cut by size, named by content, and the rows that the same data has as JSON."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchwright as bw
from batchwright.prepare.documents import TextColumn
from batchwright.sources import memory, units
from batchwright.sources.memory import TableRows, table_rows
from refusals import refused

datasets = pytest.importorskip("datasets")
pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")


def chunked(table: pa.Table, rows: int) -> pa.Table:
    return pa.Table.from_batches(table.to_batches(max_chunksize=rows))


class OnlyAStream:
    """What any other library of tables offers."""

    schema = None

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


KINDS = {
    "pyarrow": pa.Table.from_pylist,
    "record batch": lambda rows: pa.RecordBatch.from_pylist(rows),
    "reader": lambda rows: pa.Table.from_pylist(rows).to_reader(max_chunksize=7),
    "polars": lambda rows: pl.DataFrame(rows),
    "pandas": lambda rows: pd.DataFrame(rows),
    "datasets": lambda rows: datasets.Dataset.from_list(rows),
    "any stream": lambda rows: OnlyAStream(pa.Table.from_pylist(rows)),
    "list": list,
    "generator": lambda rows: (row for row in rows),
}


EVERYTHING = "{text} {number:03d} {message.content} {turns.text} {turns.1.who}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_documents_are_those_of_the_same_rows_as_dicts(rows, documents_of, small_units, kind):
    texts = [TextColumn(EVERYTHING).of(row) for row in rows]
    assert documents_of(KINDS[kind](rows), EVERYTHING) == list(enumerate(texts))


def test_workers_read_tables_and_files_of_tables_into_the_same_bytes(rows, tmp_path, small_units):
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=7)
    recipe = bw.DatasetRecipe().add_ingredient(pl.DataFrame(rows), name="frame")
    recipe.add_ingredient(tmp_path / "rows.parquet", "turns.text", name="file").prepare_step(bw.tokenize("bytes"))
    one, two = (
        bw.bake(recipe, tmp_path / f"{workers}.store", workers=workers, show_progress=False) for workers in (0, 2)
    )
    shards = [path.name for path in one.folder.glob("*-train-*.arrow")]
    assert len(shards) == 2
    assert all((one.folder / name).read_bytes() == (two.folder / name).read_bytes() for name in shards)
    assert one.num_rows == 120


@pytest.mark.parametrize("kind", ["pyarrow", "polars", "pandas", "datasets"])
def test_a_table_is_not_turned_into_python_rows_when_it_is_added(rows, kind):
    ingredient = bw.DatasetRecipe().add_ingredient(KINDS[kind](rows)).ingredients[0]
    assert isinstance(ingredient.source, TableRows)
    assert len(ingredient.source) == 60


def test_units_are_parts_of_a_table_by_size(rows, small_units):
    cut = units.cut_rows(table_rows(pa.Table.from_pylist(rows)))
    assert len(cut) > 3
    assert [unit.first_row for unit in cut] == np.cumsum([0, *(len(unit.rows) for unit in cut[:-1])]).tolist()
    assert sum(len(unit.rows) for unit in cut) == 60


@pytest.mark.parametrize("kind", ["pyarrow", "polars", "datasets"])
def test_a_part_travels_without_the_rest_of_its_table(monkeypatch, kind):
    monkeypatch.setattr(units, "UNIT_BYTES", 20_000)
    monkeypatch.setattr(memory, "_PIECE_ROWS", 8)
    table = table_rows(KINDS[kind]([{"text": f"document {n} " * 100} for n in range(100)]))
    whole, parts = len(pickle.dumps(table)), [unit.rows for unit in units.cut_rows(table)]
    sizes = [len(pickle.dumps(part)) for part in parts]
    assert len(parts) > 4
    assert max(sizes) < whole / 3
    arrived = [row["text"] for part in parts for row in pickle.loads(pickle.dumps(part)).read(None)]
    assert arrived == [f"document {n} " * 100 for n in range(100)]


def test_the_fingerprint_is_that_of_the_values_and_not_of_the_chunks(rows, monkeypatch):
    monkeypatch.setattr(memory, "_PIECE_ROWS", 8)
    table = pa.Table.from_pylist(rows)
    names = {
        table_rows(other).fingerprint
        for other in (
            table,
            chunked(table, 1),
            chunked(table, 13),
            pa.concat_tables([table.slice(0, 5), table.slice(5)]),
        )
    }
    assert len(names) == 1
    rows[40]["text"] += "!"
    assert table_rows(pa.Table.from_pylist(rows)).fingerprint not in names
    assert table_rows(table.slice(1)).fingerprint not in names
    assert table_rows(table.rename_columns(["text", "n", "message", "turns"])).fingerprint not in names


def test_a_dictionary_and_what_it_stands_for_have_one_fingerprint():
    words = pa.array(["a", "b", "a", None])
    plain, encoded = pa.table({"text": words}), pa.table({"text": words.dictionary_encode()})
    assert table_rows(plain).fingerprint == table_rows(encoded).fingerprint


def test_a_recipe_over_an_equal_table_is_up_to_date(rows, tmp_path):
    def recipe(table):
        return bw.DatasetRecipe().add_ingredient(table, name="x").prepare_step(bw.tokenize("bytes"))

    table = pa.Table.from_pylist(rows)
    first = bw.bake(recipe(table), tmp_path / "x.store", workers=0, show_progress=False)
    assert bw.bake(recipe(chunked(table, 9)), tmp_path / "x.store", show_progress=False).version == first.version
    again = bw.bake(recipe(table.slice(0, 59)), tmp_path / "x.store", workers=0, show_progress=False)
    assert again.version != first.version


def test_the_selection_and_order_of_a_dataset_are_kept(rows, documents_of, small_units):
    chosen = [50, 3, 3, 7, 59, 0, *range(20, 30)]
    dataset = datasets.concatenate_datasets(
        [datasets.Dataset.from_list(rows[:33]), datasets.Dataset.from_list(rows[33:])]
    )
    assert [text for _, text in documents_of(dataset.select(chosen))] == [rows[n]["text"] for n in chosen]
    shuffled = dataset.shuffle(seed=1)
    assert [text for _, text in documents_of(shuffled)] == shuffled["text"]


def test_a_dataset_without_a_table_is_read_once_like_any_iterable(documents_of):
    class IterableDataset:  # a stand-in: making a real one imports torch
        __module__ = "datasets.iterable_dataset"

        def __iter__(self):
            return iter([{"text": "a"}, {"text": "b"}])

    assert documents_of(IterableDataset()) == [(0, "a"), (1, "b")]


def test_a_fault_in_a_table_is_located_by_row(documents_of, small_units):
    texts = [f"document {n}" for n in range(30)]
    texts[21] = None
    with refused(bw.SourceError, "'text'", "null", file="<memory>", row=21):
        documents_of(pa.table({"text": texts}))
    assert [row for row, _ in documents_of(pa.table({"text": texts}), on_error="skip")] == [*range(21), *range(22, 30)]


def test_a_series_of_text_is_rows_of_text(documents_of):
    assert documents_of(pl.Series(["a", "b"])) == documents_of(pd.Series(["a", "b"])) == [(0, "a"), (1, "b")]


def generate():
    yield {"text": "a"}


@pytest.mark.parametrize(
    ("source", "error", "named"),
    [
        (lambda: pl.LazyFrame({"text": ["a"]}), bw.SpecError, "frame.collect()"),
        (
            lambda: datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": "a"}])),
            bw.SpecError,
            "dataset['train']",
        ),
        (lambda: generate, bw.SpecError, "a function"),
        (lambda: pa.table({"text": pa.array([], pa.string())}), bw.SpecError, "rows"),
        (lambda: pa.table([["a"], ["b"]], names=["text", "text"]), bw.SpecError, "'text'"),
        (
            lambda: pd.DataFrame({"n": [1, 2, 3], "text": pd.Series(["a", None, 3], dtype=object)}),
            bw.SourceError,
            "frame['text'].astype(str)",
        ),
    ],
    ids=["LazyFrame", "DatasetDict", "function", "empty", "twice", "mixed"],
)
def test_what_is_not_one_table_says_what_to_do(source, error, named):
    recipe = bw.DatasetRecipe()
    with refused(error, named):
        recipe.add_ingredient(source())
    assert recipe.ingredients == []


def test_mixed_types_in_a_frame_name_the_column():
    frame = pd.DataFrame({"text": pd.Series(["a", None, 3, "b"], dtype=object)})
    with refused(bw.SourceError, "'int'", file="<memory>", column="text", remedy="astype(str)"):
        bw.DatasetRecipe().add_ingredient(frame)


def test_options_are_for_files():
    with refused(bw.SpecError, "in memory", parameter="options"):
        bw.DatasetRecipe().add_ingredient(["a"], options={"delimiter": ";"})


def test_a_column_of_mixed_types_whose_name_is_a_number_is_named_so():
    frame = pd.DataFrame({"text": ["a", "b"], 1: [1, "x"]})
    with refused(bw.SourceError, "mixed types in column 1", column=1, remedy="frame[1].astype(str)"):
        table_rows(frame)


def test_a_frame_with_whole_numbers_beyond_64_bits_is_refused():
    with refused(bw.SpecError, "too large", parameter="source"):
        table_rows(pd.DataFrame({"text": ["a"], "k": [10**30]}))
