"""A recipe becomes a buffer: the same rows as everywhere else, with their types, in the order of the sources."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchwright as bw
from batchwright.sources.memory import table_rows
from refusals import refused

QUIET = {"workers": 0, "show_progress": False}


def numbered(count):
    return [{"text": f"row {n}", "n": n} for n in range(count)]


def is_even(row):
    return row["n"] % 2 == 0


def test_bake_without_a_place_gives_the_rows_in_the_order_of_ingredients_and_rows():
    recipe = bw.DatasetRecipe().add_ingredient(numbered(3), name="one", where=is_even)
    recipe.add_ingredient([{"text": "last", "n": 9}], name="two").prepare_step(lambda row: {**row, "n": row["n"] + 1})
    buffer = bw.bake(recipe, **QUIET)
    assert isinstance(buffer, bw.DatasetBuffer)
    assert buffer.to_pydict() == {"text": ["row 0", "row 2", "last"], "n": [1, 3, 10]}
    assert buffer.provenance()["origin"].to_pylist() == ["one", "one", "two"]


def test_rows_need_no_text_and_are_taken_as_they_are():
    rows = [{"a": 1, "b": None, "c": {"d": [1.5]}}, {"a": 2, "b": "x", "c": {"d": []}}]
    assert bw.bake(bw.DatasetRecipe().add_ingredient(rows), **QUIET).to_table().to_pylist() == rows


def test_a_column_that_is_named_as_the_text_is_found_as_text():
    recipe = bw.DatasetRecipe().add_ingredient([{"title": "a", "body": "b"}], "{title}: {body}")
    assert bw.bake(recipe, **QUIET)[0] == {"title": "a", "body": "b", "text": "a: b"}


def test_a_quantity_chooses_the_rows_that_it_chooses_for_a_store(tmp_path, quiet_bake):
    recipe = bw.DatasetRecipe(seed=5).add_ingredient(numbered(50), name="one", where=is_even, quantity=7)
    rows = bw.bake(recipe, **QUIET).to_pydict()["n"]
    store = quiet_bake(recipe.prepare_step(bw.tokenize("bytes")), tmp_path / "a.store")
    assert sorted(rows) == rows
    assert sorted(row.row for row in store.rows()) == rows


def test_files_give_the_same_rows_for_any_number_of_workers(raw, small_units):
    recipe = bw.DatasetRecipe().add_ingredient(raw / "web", name="web", where=is_even_number, quantity=0.5)
    recipe.prepare_step(lambda row: {**row, "half": row["number"] // 2}).add_ingredient(raw / "code", name="code")
    recipe.prepare_step(lambda row: {**row, "size": len(row["text"])}, name="size")
    buffer = bw.bake(recipe, **QUIET)
    assert bw.bake(recipe, workers=2, show_progress=False).to_pydict() == buffer.to_pydict()
    assert len(buffer) == 30 + 10
    assert buffer[0]["half"] == buffer[0]["number"] // 2
    assert buffer[-1]["half"] is None


def is_even_number(row):
    return row["number"] % 2 == 0


@pytest.mark.parametrize("as_table", [list, pa.Table.from_pylist])
def test_a_column_that_one_ingredient_has_and_another_lacks_is_null_there(as_table):
    recipe = bw.DatasetRecipe().add_ingredient(as_table([{"url": "a", "n": 1}]), name="web")
    recipe.add_ingredient(as_table([{"n": 2, "author": "b"}]), name="books")
    buffer = bw.bake(recipe, **QUIET)
    assert buffer.to_pydict() == {"url": ["a", None], "n": [1, 2], "author": [None, "b"]}


def test_bake_into_a_buffer_adds_to_what_is_there(tmp_path):
    with bw.DatasetBuffer(path=tmp_path / "rows") as buffer:
        buffer.append({"text": "first", "n": 7})
        assert bw.bake(bw.DatasetRecipe().add_ingredient(numbered(2)), into=buffer, **QUIET) is buffer
    with bw.DatasetBuffer(path=tmp_path / "rows") as again:
        assert again.to_pydict()["n"] == [7, 0, 1]


def test_what_was_dropped_is_said_with_its_reasons(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\nno json\n{"n": 3}\n{"n": 4}\n')
    recipe = bw.DatasetRecipe().add_ingredient(tmp_path / "a.jsonl", name="a", where=lambda row: row["n"] > 1)
    recipe.prepare_step(lambda row: None if row["n"] == 4 else row, name="no fours")
    with caplog.at_level(logging.INFO, "batchwright"):
        buffer = bw.bake(recipe, on_error="skip", **QUIET)
    assert buffer.to_pydict() == {"n": [2, 3]}
    assert caplog.messages[-1].splitlines()[0] == "a buffer: 2 rows"
    for count in ("2 of 5", "1 dropped by step 'no fours'", "1 malformed row", "1 not where"):
        assert count in caplog.messages[-1].splitlines()[1]
    assert f"{tmp_path / 'a.jsonl'}, row 2" in caplog.messages[-1]


# Types


def tensors(count):
    values = np.arange(count * 6, dtype=np.float32).reshape(count, 2, 3)
    return pa.table(
        {"obs": pa.FixedShapeTensorArray.from_numpy_ndarray(values), "n": pa.array(range(count), pa.int8())}
    )


def with_pandas(table):
    return pytest.importorskip("pandas").DataFrame(table.drop_columns("obs").to_pydict()).astype({"n": "int8"})


def with_polars(table):
    return pytest.importorskip("polars").from_arrow(table.drop_columns("obs"))


def with_datasets(table):
    return pytest.importorskip("datasets").Dataset(table.drop_columns("obs"))


def with_buffer(table):
    return bw.DatasetBuffer.from_table(table)


@pytest.mark.parametrize("kind", [lambda table: table, with_buffer, with_pandas, with_polars, with_datasets])
@pytest.mark.parametrize("settings", [{}, {"where": is_even}, {"quantity": 3}])
def test_tables_go_through_as_columns_with_their_types(kind, settings):
    buffer = bw.bake(bw.DatasetRecipe().add_ingredient(kind(tensors(6)), **settings), **QUIET)
    assert buffer.to_numpy()["n"].dtype == np.int8
    assert buffer.schema.field("n").type == pa.int8()
    assert len(buffer) == (3 if settings else 6)
    if "where" in settings:
        assert buffer.to_pydict()["n"] == [0, 2, 4]
    if "obs" in buffer.column_names:
        assert buffer[-1]["obs"].shape == (2, 3)
        assert buffer[-1]["obs"].dtype == np.float32
        assert buffer[-1]["obs"][0, 0] == 6 * buffer[-1]["n"]


def write_parquet(table, path):
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=2)


def write_arrow(table, path):
    with pa.ipc.new_file(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, 2)


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_files_that_have_types_keep_them(tmp_path, write):
    table = tensors(5).append_column("flag", pa.array([True, None, False, True, None]))
    write(table, tmp_path / "a")
    buffer = bw.bake(bw.DatasetRecipe().add_ingredient(tmp_path, where=is_even), **QUIET)
    assert buffer.schema.field("n").type == pa.int8()
    assert buffer.to_pydict()["flag"] == [True, False, None]
    assert buffer.to_numpy()["obs"].dtype == np.float32
    assert buffer.to_numpy()["obs"].tolist() == tensors(5)["obs"].combine_chunks().to_numpy_ndarray()[::2].tolist()


def test_files_of_several_types_give_python_numbers(tmp_path):
    for number, kind in enumerate((pa.int8(), pa.int16())):
        pq.write_table(pa.table({"n": pa.array([number], kind)}), tmp_path / f"{number}.parquet")
    buffer = bw.bake(bw.DatasetRecipe().add_ingredient(tmp_path), **QUIET)
    assert buffer.schema.field("n").type == pa.int64()
    assert buffer.to_pydict() == {"n": [0, 1]}


def test_a_step_gets_an_array_from_a_column_of_tensors():
    recipe = bw.DatasetRecipe().add_ingredient(tensors(3)).prepare_step(lambda row: {"sum": row["obs"].sum(axis=0)})
    sums = bw.bake(recipe, **QUIET).to_numpy()["sum"]
    assert sums.dtype == np.float32
    assert sums.tolist() == [[3, 5, 7], [15, 17, 19], [27, 29, 31]]


def test_a_column_of_tensors_is_arrays_in_a_worker_too():
    sent = pickle.loads(pickle.dumps(table_rows(tensors(3).slice(1))))
    assert [row["obs"].shape for row in sent.read(None)] == [(2, 3), (2, 3)]
    assert next(sent.read(None))["obs"].tolist() == [[6, 7, 8], [9, 10, 11]]


def test_a_table_of_tensors_is_named_by_their_shape():
    flat = np.arange(6, dtype=np.float32)
    columns = [pa.FixedShapeTensorArray.from_numpy_ndarray(flat.reshape(1, *shape)) for shape in ((2, 3), (3, 2))]
    tables = [pa.table({"x": column}) for column in columns]
    assert len({bw.DatasetRecipe().add_ingredient(table).fingerprint for table in tables}) == 2


def test_a_null_in_a_column_of_tensors_is_none():
    kind = pa.fixed_shape_tensor(pa.int32(), [2])
    column = pa.ExtensionArray.from_storage(kind, pa.array([[1, 2], None], pa.list_(pa.int32(), 2)))
    first, second = table_rows(pa.table({"x": column})).read(None)
    assert first["x"].dtype == np.int32
    assert second["x"] is None


@pytest.mark.parametrize("step", [None, lambda row: row])
def test_rows_from_memory_may_hold_arrays_tensors_bytes_and_nothing(step):
    torch = pytest.importorskip("torch")
    rows = [{"a": np.zeros(2, np.int16), "t": torch.ones(3), "b": b"\x00\xff", "none": None, "s": "x"}] * 2
    recipe = bw.DatasetRecipe().add_ingredient(rows)
    row = bw.bake(recipe if step is None else recipe.prepare_step(step, name="same"), **QUIET)[0]
    assert row["a"].dtype == np.int16
    assert row["t"].tolist() == [1, 1, 1]
    assert (row["b"], row["none"], row["s"]) == (b"\x00\xff", None, "x")


def test_images_go_through():
    image = pytest.importorskip("PIL.Image").new("L", (2, 3), 7)
    buffer = bw.bake(bw.DatasetRecipe().add_ingredient([{"image": image, "label": 1}]), **QUIET)
    assert buffer[0]["label"] == 1
    assert bytes(buffer[0]["image"]).startswith(b"\x89PNG")


def test_a_step_does_not_change_the_rows_that_it_was_given_from_memory():
    rows = numbered(2)

    def changes(row):
        row["n"] += 10
        return row

    assert bw.bake(bw.DatasetRecipe().add_ingredient(rows).prepare_step(changes), **QUIET).to_pydict()["n"] == [10, 11]
    assert rows == numbered(2)


# Tokens


def test_a_recipe_with_tokens_gives_the_documents_of_its_store_in_its_order(raw, tmp_path, quiet_bake):
    recipe = bw.DatasetRecipe().add_ingredient(raw / "web", name="web", quantity=50)
    recipe.add_ingredient(raw / "code", name="code").prepare_step(bw.tokenize("bytes", append_eos=True)).holdout(0.2)
    store = quiet_bake(recipe, tmp_path / "a.store")
    buffer = bw.bake(recipe, **QUIET)
    assert len(buffer) == len(store) == 60
    assert buffer.schema.field("tokens").type.value_type == pa.uint16()
    for number, document in enumerate(store.rows()):
        row = buffer[number]
        assert np.array_equal(row.pop("tokens"), document.tokens)
        expected = {name: getattr(document, name) for name in ("source", "file", "row", "split")}
        assert row == expected
    assert buffer.provenance()["origin"].to_pylist() == buffer.to_pydict()["source"]


def test_conversations_come_as_tokens_too(tmp_path, quiet_bake):
    rows = [
        {"messages": [{"role": "user", "content": f"hi {n}"}, {"role": "assistant", "content": "yes"}]} for n in (1, 2)
    ]
    recipe = bw.DatasetRecipe().add_ingredient(rows).prepare_step(bw.chat("bytes", "plain"))
    store = quiet_bake(recipe, tmp_path / "a.store")
    buffer = bw.bake(recipe, **QUIET)
    assert [row["tokens"][0].as_py() for row in buffer] == [row.tokens.tolist() for row in store.rows()]


# Into a folder


def counting(rows, read):
    return bw.DatasetRecipe().add_ingredient(rows, name="one", where=lambda row: read.append(1) or True, version="1")


def test_a_recipe_without_tokens_gives_a_buffer_in_a_folder_with_the_same_rows(tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(numbered(4), name="one", quantity=3)
    buffer = bw.bake(recipe, tmp_path / "rows", **QUIET)
    assert buffer.to_pydict() == bw.bake(recipe, **QUIET).to_pydict()
    with bw.DatasetBuffer(path=tmp_path / "rows", read_only=True) as again:
        assert again.to_pydict() == buffer.to_pydict()


def test_baked_again_unchanged_nothing_is_read(tmp_path, caplog):
    read = []
    first = bw.bake(counting(numbered(3), read), tmp_path / "rows", **QUIET)
    with caplog.at_level(logging.INFO, "batchwright"):
        second = bw.bake(counting(numbered(3), read), tmp_path / "rows", **QUIET)
    assert len(read) == 3
    assert second.number == first.number
    assert caplog.messages == [f"{tmp_path / 'rows'}: up to date (3 rows)"]


def test_a_changed_file_replaces_the_rows_and_the_old_ones_stay_a_version(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    recipe = bw.DatasetRecipe().add_ingredient(tmp_path / "a.jsonl")
    old = bw.bake(recipe, tmp_path / "rows", **QUIET).versions()[-1]
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    buffer = bw.bake(recipe, tmp_path / "rows", **QUIET)
    assert buffer.to_pydict() == {"n": [1, 2]}
    assert buffer.at(old).to_pydict() == {"n": [1]}


def test_another_recipe_may_give_other_columns_and_the_first_one_is_gone_back_to_unread(tmp_path):
    read = []
    bw.bake(counting(numbered(3), read), tmp_path / "rows", **QUIET)
    other = bw.bake(bw.DatasetRecipe().add_ingredient([{"n": "text now"}]), tmp_path / "rows", **QUIET)
    assert other.to_pydict() == {"n": ["text now"]}
    back = bw.bake(counting(numbered(3), read), tmp_path / "rows", **QUIET)
    assert back.to_pydict()["n"] == [0, 1, 2]
    assert len(read) == 3
    assert bw.bake(counting(numbered(3), read), tmp_path / "rows", **QUIET).number == back.number


def test_rows_that_somebody_added_since_stay_a_version(tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(numbered(2))
    bw.bake(recipe, tmp_path / "rows", **QUIET)
    with bw.DatasetBuffer(path=tmp_path / "rows") as buffer:
        buffer.append({"text": "mine", "n": 9})
        number = buffer.number
    assert bw.bake(recipe, tmp_path / "rows", **QUIET).to_pydict()["n"] == [0, 1]
    with bw.DatasetBuffer(path=tmp_path / "rows") as buffer:
        assert buffer.at(number).to_pydict()["n"] == [0, 1, 9]


def test_a_malformed_row_that_was_left_out_is_raised_when_that_is_asked_for(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\nno json\n')
    recipe = bw.DatasetRecipe().add_ingredient(tmp_path / "a.jsonl")
    assert len(bw.bake(recipe, tmp_path / "rows", on_error="skip", **QUIET)) == 1
    with refused(bw.SourceError, "JSON", file=tmp_path / "a.jsonl", line=2):
        bw.bake(recipe, tmp_path / "rows", **QUIET)
    with bw.DatasetBuffer(path=tmp_path / "rows", read_only=True) as buffer:
        assert buffer.to_pydict() == {"n": [1]}


KILLED = """
    import os, signal, sys
    import batchwright as bw
    from batchwright.baking import into_buffer

    append = into_buffer._append

    def append_one_and_die(buffer, part):
        append(buffer, part)
        if buffer.versions():  # the one in the folder, not the one that only shows whether all rows fit
            os.kill(os.getpid(), signal.SIGKILL)

    into_buffer._append = append_one_and_die
    recipe = bw.DatasetRecipe().add_ingredient([{"n": 1}], name="one").add_ingredient([{"n": 2}], name="two")
    bw.bake(recipe, sys.argv[1], workers=0)
"""


def test_a_bake_that_was_killed_between_two_ingredients_is_done_by_the_same_call(tmp_path):
    script = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "rows")]
    done = subprocess.run(script, env={**os.environ, "PYTHONPATH": str(Path(bw.__file__).parents[1])}, check=False)
    assert done.returncode == -signal.SIGKILL
    with bw.DatasetBuffer(path=tmp_path / "rows", read_only=True) as half:
        assert half.to_pydict() == {"n": [1]}
    recipe = bw.DatasetRecipe().add_ingredient([{"n": 1}], name="one").add_ingredient([{"n": 2}], name="two")
    assert bw.bake(recipe, tmp_path / "rows", **QUIET).to_pydict() == {"n": [1, 2]}


# Bad input


def test_a_store_of_tokens_is_not_written_into(tmp_path, quiet_bake, version_files):
    tokens = bw.DatasetRecipe().add_ingredient(["a"]).prepare_step(bw.tokenize("bytes"))
    quiet_bake(tokens, tmp_path / "a.store")
    before = version_files(tmp_path / "a.store")
    with refused(bw.SpecError, tmp_path / "a.store", parameter="to", remedy="bw.tokenize"):
        quiet_bake(bw.DatasetRecipe().add_ingredient(["a"]), tmp_path / "a.store")
    assert version_files(tmp_path / "a.store") == before


def test_a_buffer_that_was_not_baked_is_left_as_it_is(tmp_path):
    with bw.DatasetBuffer(path=tmp_path / "mine") as mine:
        mine.append({"n": 1})
    with refused(bw.SpecError, tmp_path / "mine", parameter="to", remedy="into=bw.DatasetBuffer"):
        bw.bake(bw.DatasetRecipe().add_ingredient([{"n": 2}]), tmp_path / "mine", **QUIET)
    with bw.DatasetBuffer(path=tmp_path / "mine") as mine:
        assert mine.to_pydict() == {"n": [1]}


def test_a_folder_of_other_files_is_left_as_it_is(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(bw.BatchwrightError) as caught:
        bw.bake(bw.DatasetRecipe().add_ingredient([{"n": 2}]), tmp_path / "notes", **QUIET)
    assert caught.value.remedy
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("bake", "parameter"),
    [
        (lambda recipe, to: bw.bake(recipe, to, into=bw.DatasetBuffer(), **QUIET), "into"),
        (lambda recipe, to: bw.bake(recipe, into=[], **QUIET), "into"),
        (lambda recipe, to: bw.bake(recipe.prepare_step(bw.tokenize("bytes")), into=str(to), **QUIET), "into"),
        (lambda recipe, to: bw.bake(bw.DatasetRecipe(), **QUIET), "recipe"),
        (lambda recipe, to: bw.bake(recipe.holdout(0.5), **QUIET), "recipe"),
        (lambda recipe, to: bw.bake("recipe", **QUIET), "recipe"),
        (lambda recipe, to: bw.bake(recipe, to.parent / "file", **QUIET), "to"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(bake, parameter, tmp_path):
    (tmp_path / "file").touch()
    with refused(bw.SpecError, parameter=parameter):
        bake(bw.DatasetRecipe().add_ingredient(numbered(1)), tmp_path / "rows")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_rows_of_two_ingredients_that_do_not_fit_are_named_and_the_buffer_is_as_it_was(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"n": 1}) + "\n\n" + json.dumps({"n": "two"}) + "\n")
    recipe = bw.DatasetRecipe().add_ingredient([{"n": 1}], name="one").add_ingredient(tmp_path / "a.jsonl", name="two")
    buffer = bw.DatasetBuffer([{"n": 0}])
    with pytest.raises(bw.SampleError) as caught:
        bw.bake(recipe, into=buffer, **QUIET)
    where = caught.value.where
    assert (where["ingredient"], where["file"], where["line"]) == ("two", str(tmp_path / "a.jsonl"), 3)
    assert (where["column"], where["has"]) == ("n", "int64")
    assert "row" not in where
    assert buffer.to_pydict() == {"n": [0]}


def test_rows_that_do_not_fit_leave_a_folder_as_it_was(tmp_path):
    good = bw.DatasetRecipe().add_ingredient([{"n": 7}], name="one")
    bw.bake(good, tmp_path / "rows", **QUIET)
    bad = bw.DatasetRecipe().add_ingredient([{"n": 1}], name="one").add_ingredient([{"n": "two"}], name="two")
    with refused(bw.SampleError, ingredient="two", file="<memory>", row=0):
        bw.bake(bad, tmp_path / "rows", **QUIET)
    with bw.DatasetBuffer(path=tmp_path / "rows", read_only=True) as buffer:
        assert buffer.to_pydict() == {"n": [7]}
        assert bw.bake(good, tmp_path / "rows", **QUIET).number == buffer.number


def test_a_step_that_returns_no_row_is_refused_with_its_place():
    recipe = bw.DatasetRecipe().add_ingredient(numbered(2)).prepare_step(lambda row: row["n"], name="number")
    with refused(bw.SourceError, "int", step="number", file="<memory>", row=0):
        bw.bake(recipe, **QUIET)


def test_a_recipe_that_drops_everything_says_why():
    recipe = bw.DatasetRecipe().add_ingredient(numbered(3), name="one", where=lambda row: False)
    with refused(bw.SourceError, dropped="one: 3 not where", remedy="where="):
        bw.bake(recipe, **QUIET)


@pytest.mark.parametrize("chosen", [{"quantity": 3}, {"where": lambda row: row["n"] % 2}])
def test_some_rows_of_a_polars_frame_with_text_are_taken(chosen):
    frame = pytest.importorskip("polars").DataFrame({"text": [*"abcdef"], "words": [["x", "y"]] * 6, "n": [*range(6)]})
    buffer = bw.bake(bw.DatasetRecipe(seed=1).add_ingredient(frame, **chosen), show_progress=False)
    assert len(buffer) == 3
    columns = buffer.to_pydict()
    assert columns["text"] == ["abcdef"[n] for n in columns["n"]]
    assert columns["words"] == [["x", "y"]] * 3
