"""Rows by column: what a batch has of a column, where values are missing, and what becomes of it elsewhere."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest

from batchwright.buffer.batch import RowBatch, converted
from batchwright.buffer.schema import Field, Numbers, Schema

SCHEMA = Schema(
    (
        Field("obs", pa.fixed_shape_tensor(pa.float32(), [2])),
        Field("label", pa.int64()),
        Field("done", pa.bool_()),
        Field("text", pa.string()),
    )
)


def three_rows(**given):
    """Rows 4, 0 and 2 of a buffer. The second one has nothing but an obs, the third has no obs."""
    has_obs, has_others = np.array([True, True, False]), np.array([True, False, True])
    columns = {
        "obs": Numbers(np.array([[1, 2], [3, 4], [7, 7]], np.float32), has_obs),
        "label": Numbers(np.array([5, 9, 6]), has_others),
        "done": Numbers(np.array([True, True, False]), has_others),
        "text": pa.array(["a", None, "c"]),
    }
    return RowBatch(SCHEMA, columns, ids=[14, 10, 12], index=[4, 0, 2], **given)


def test_a_batch_is_asked_by_column_and_counts_rows():
    batch = three_rows()
    assert len(batch) == 3
    assert list(batch) == batch.keys() == ["obs", "label", "done", "text"]
    assert dict(batch).keys() == dict(batch.items()).keys()
    assert "obs" in batch
    assert "loss" not in batch
    assert batch.get("loss", 1) == 1
    assert batch.ids.tolist() == [14, 10, 12]
    assert batch.index.tolist() == [4, 0, 2]
    assert batch.weights is None


def test_an_unknown_column_is_a_key_error():
    with pytest.raises(KeyError, match="loss"):
        three_rows()["loss"]


def test_numbers_keep_their_type_where_values_are_missing():
    batch = three_rows()
    assert batch["obs"].dtype == np.float32
    np.testing.assert_array_equal(batch["obs"], [[1, 2], [3, 4], [np.nan, np.nan]])
    assert (batch["label"].dtype, batch["label"].tolist()) == (np.int64, [5, 0, 6])
    assert (batch["done"].dtype, batch["done"].tolist()) == (bool, [True, False, False])


def test_what_stands_for_a_missing_value_is_not_written_into_the_columns():
    values = np.array([1.0, 5.0])
    columns = {"x": Numbers(values, np.array([True, False]))}
    assert np.isnan(RowBatch(Schema((Field("x", pa.float64()),)), columns, [0, 1], [0, 1])["x"][1])
    assert values.tolist() == [1, 5]


def test_missing_says_which_rows_have_no_value():
    missing = three_rows().missing
    assert {name: rows.tolist() for name, rows in missing.items()} == {
        "obs": [False, False, True],
        "label": [False, True, False],
        "done": [False, True, False],
    }
    full = RowBatch(Schema((Field("n", pa.int64()),)), {"n": Numbers(np.arange(2))}, [0, 1], [0, 1])
    assert full.missing["n"].tolist() == [False, False]


def test_what_is_no_number_is_a_list_of_python_values():
    assert three_rows()["text"] == ["a", None, "c"]


def test_a_list_that_was_changed_stays_changed():
    batch = three_rows()
    batch["text"][0] = "mine"
    assert batch["text"][0] == "mine"


def test_a_table_has_nulls_and_the_types_of_the_buffer():
    table = three_rows().to_table()
    table.validate(full=True)
    assert table.schema.equals(SCHEMA.arrow)
    assert table.to_pydict() == {
        "obs": [[1, 2], [3, 4], None],
        "label": [5, None, 6],
        "done": [True, None, False],
        "text": ["a", None, "c"],
    }


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (0,)])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64"])
def test_a_table_has_arrays_of_every_type_and_shape(dtype, shape):
    value_type = pa.from_numpy_dtype(dtype)
    field = Field("x", pa.fixed_shape_tensor(value_type, shape) if shape else value_type)
    values = np.ones((2, *shape), dtype)
    table = RowBatch(Schema((field,)), {"x": Numbers(values)}, [0, 1], [0, 1]).to_table()
    table.validate(full=True)
    assert table.num_rows == 2
    assert table["x"].to_pylist() == [values[0].ravel().tolist() if shape else 1] * 2


def test_metadata_is_made_when_it_is_first_asked_for():
    made = []
    batch = three_rows(metadata=lambda: made.append(1) or {"step": 3})
    assert not made
    assert batch.metadata == batch.metadata == {"step": 3}
    assert made == [1]
    assert three_rows().metadata == {}


def test_a_batch_travels_to_another_process():
    batch = three_rows(weights=np.ones(3, np.float32), metadata=lambda: {"step": 3})
    there = pickle.loads(pickle.dumps(batch))
    assert there.to_table().equals(batch.to_table())
    assert there.metadata == {"step": 3}
    assert there.weights.tolist() == [1, 1, 1]
    assert there.ids.tolist() == batch.ids.tolist()


def test_a_batch_of_numpy_arrays_says_how_it_can_move():
    with pytest.raises(TypeError, match=r"batch\.torch\(\)\.to\(device\)"):
        three_rows().to("cpu")


def test_columns_are_plain_values_with_a_list_where_integers_are_missing():
    batch = three_rows()
    found = converted(SCHEMA, batch._columns, "numpy")
    np.testing.assert_array_equal(found["obs"], [[1, 2], [3, 4], [np.nan, np.nan]])
    assert (found["label"], found["done"], found["text"]) == ([5, None, 6], [True, None, False], ["a", None, "c"])


def test_it_prints_its_columns_and_types():
    assert repr(three_rows()) == "RowBatch(3 rows: obs float32[2], label int64, done bool, text string)"
