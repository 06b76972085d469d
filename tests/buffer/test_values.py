"""Types survive on the way in and out, and what does not fit is refused with the row, the column and both types."""

from __future__ import annotations

import datetime
import decimal
import io
import math
import uuid
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.base.errors import SampleError
from batchwright.buffer.arrow import equal_rows, from_arrow, pylist, to_arrow
from batchwright.buffer.plain_values import DTYPES
from batchwright.buffer.schema import Field, Numbers, Schema
from batchwright.buffer.values import (
    arrays_to_columns,
    column_for_set,
    infer_schema,
    rows_of,
    rows_to_columns,
    schema_of_arrow,
)
from refusals import refused

TENSOR = pa.fixed_shape_tensor(pa.float32(), [2])


class Box(NamedTuple):
    left: int
    right: int


def through(rows):
    """The rows, to columns and back."""
    columns, schema = rows_to_columns(rows, infer_schema(rows))
    return rows_of(schema, columns)


def type_of(*values):
    (field,) = infer_schema([{"x": value} for value in values])
    return str(field)


def fits(kind, value, nullable=True):
    """A value into a column of a type, and back."""
    field = Field("x", kind, nullable=nullable)
    columns, _ = rows_to_columns([{"x": value}], Schema((field,)))
    (back,) = pylist(columns["x"])
    return back


def assert_same(back, value):
    assert type(back) is type(value)
    if isinstance(value, np.ndarray):
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(back, value)
    elif isinstance(value, dict):
        assert back.keys() == value.keys()
        for name in value:
            assert_same(back[name], value[name])
    elif isinstance(value, list):
        assert len(back) == len(value)
        for mine, theirs in zip(back, value, strict=True):
            assert_same(mine, theirs)
    else:
        assert back == value or (back != back and value != value)


# Types


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([True, None], "bool"),
        ([1, -(2**63)], "int64"),
        ([1.5, math.nan], "float64"),
        ([1, 1.5], "float64"),
        (["a", "ä"], "string"),
        ([b"a", bytearray(b"b")], "binary"),
        ([np.int8(1)], "int8"),
        ([np.float16(1.5)], "float16"),
        ([np.int8(1), 2], "int64"),
        ([np.float32(1.5), np.float32(2)], "float32"),
        ([[1], []], "list<item: int64>"),
        ([(1, 2)], "list<item: int64>"),
        ([[]], "list<item: null>"),
        ([None], "null"),
        ([{"a": 1}, {"b": "x"}], "struct<a: int64, b: string>"),
        ([np.array(["a", "b"])], "list<item: string>"),
        ([np.array([1, "b"], object)[1:]], "list<item: string>"),
        ([np.zeros((2, 3), np.uint8)], "uint8[2, 3]"),
        ([np.zeros(3, ">f4")], "float32[3]"),
        ([np.array(1.5, np.float32)], "float32"),
        ([memoryview(b"ab")], "binary"),
        ([memoryview(np.arange(3))], "int64[3]"),
        ([Box(1, 2)], "struct<left: int64, right: int64>"),
        ([datetime.date(2020, 1, 1)], "date32[day]"),
        ([np.datetime64("2020-01-01", "s")], "timestamp[s]"),
        ([np.timedelta64(3, "s"), None], "duration[s]"),
    ],
)
def test_the_first_rows_decide_the_type(values, kind):
    assert type_of(*values) == kind
    rows_to_columns([{"x": value} for value in values], infer_schema([{"x": value} for value in values]))


def test_columns_are_in_the_order_in_which_they_are_first_named():
    assert infer_schema([{"b": 1, "c": 1}, {"a": 1, "c": 1}]).names == ["b", "c", "a"]


def test_a_column_is_required_if_every_first_row_has_a_value():
    schema = infer_schema([{"all": 1, "some": 1, "none": None}, {"all": 2, "some": None, "none": None}, {"all": 3}])
    assert [field.required for field in schema] == [True, False, False]


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_arrays_of_every_dtype_come_back(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    rows = [{"x": array, "in": {"y": array}, "many": [array, array]}, {"x": array[::-1], "in": None, "many": []}]
    for back, row in zip(through(rows), rows, strict=True):
        assert_same(back, row)


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": {"c": [1, None]}}},
        [[1.5], None, []],
        [{"a": np.ones((2, 2), np.int8), "b": "x"}],
        {"image": b"\x89PNG", "size": [3, 4]},
        datetime.datetime(2020, 1, 1, 12, 30, 1, 5),
        datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
        datetime.date(2020, 1, 1),
        datetime.time(12, 30),
        datetime.timedelta(seconds=3),
        decimal.Decimal("1.50"),
        uuid.UUID(int=7),
        "",
        b"",
    ],
    ids=str,
)
def test_values_of_all_kinds_come_back_beside_a_null(value):
    rows = [{"x": value}, {"x": None}, {"x": value}]
    for back, row in zip(through(rows), rows, strict=True):
        assert_same(back, row)


def test_a_float32_of_84_comes_back_as_one_with_memory_of_its_own():
    obs = np.arange(84, dtype=np.float32)
    (back,) = through([{"obs": obs}])
    assert_same(back["obs"], obs)
    back["obs"][0] = 7
    assert obs[0] == 0


def test_tensors_and_images_inside_rows_are_kept():
    import torch
    from PIL import Image

    image = Image.new("LA", (2, 2), (3, 4))
    (back,) = through([{"t": torch.ones(2, 3, requires_grad=True), "s": torch.tensor(3), "deep": {"image": image}}])
    assert_same(back["t"], np.ones((2, 3), np.float32))
    assert back["s"] == 3
    opened = Image.open(io.BytesIO(back["deep"]["image"]))
    assert (opened.mode, opened.tobytes()) == ("LA", image.tobytes())


def columns_of(kinds):
    """Columns of lists, of dicts and of arrays of what is already there."""
    return kinds.map(lambda kind: st.lists(st.none() | kind, max_size=3)) | st.dictionaries(
        st.sampled_from("abc"), kinds, min_size=1
    ).map(lambda members: st.fixed_dictionaries({name: st.none() | kind for name, kind in members.items()}))


def arrays(dtype, shape):
    size = math.prod(shape)
    return st.lists(st.integers(0, 100), min_size=size, max_size=size).map(
        lambda numbers: np.array(numbers).astype(dtype).reshape(shape)
    )


leaves = st.sampled_from(
    [
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(),
        st.text(st.characters(codec="utf-8")),
        st.binary(),
        st.dates(),
        st.uuids(),
        arrays(np.float32, (2,)),
        arrays(bool, (1, 2)),
    ]
)
kinds_of_value = st.recursive(leaves, columns_of, max_leaves=4)
rows_of_one_schema = st.dictionaries(st.sampled_from("xyz"), kinds_of_value, min_size=1).flatmap(
    lambda columns: st.lists(
        st.fixed_dictionaries({name: st.none() | kind for name, kind in columns.items()}), min_size=1, max_size=5
    )
)


@settings(max_examples=60, deadline=None)
@given(rows_of_one_schema)
def test_any_rows_come_back_as_they_went_in(rows):
    columns, schema = rows_to_columns(rows, infer_schema(rows))
    assert_same(rows_of(schema, columns), rows)
    for field in schema:
        assert_same(pylist(from_arrow(field, to_arrow(field, columns[field.name]))), [r[field.name] for r in rows])


@settings(max_examples=30, deadline=None)
@given(rows_of_one_schema)
def test_rows_one_by_one_are_the_rows_at_once(rows):
    schema = infer_schema(rows)
    found = []
    for row in rows:
        one, unchanged = rows_to_columns([row], schema)
        assert unchanged is schema
        found += rows_of(schema, one)
    assert_same(found, rows)


@settings(max_examples=30, deadline=None)
@given(rows_of_one_schema)
def test_a_type_that_is_learnt_row_by_row_holds_all_of_them(rows):
    schema = infer_schema(rows[:1])
    kept = []
    for row in rows:
        columns, schema = rows_to_columns([row], schema)
        kept.append(columns)
    assert [field.type for field in schema] == [field.type for field in infer_schema(rows)]
    for field in schema:
        as_learnt = [
            values if isinstance(values, Numbers) else from_arrow(field, values)
            for values in (columns[field.name] for columns in kept)
        ]
        assert_same([pylist(one)[0] for one in as_learnt], [row[field.name] for row in rows])


def test_arrays_inside_a_row_do_not_share_the_users_memory():
    mine = np.zeros(3)
    rows = [{"x": {"t": mine}, "many": [mine]}]
    columns, schema = rows_to_columns(rows, infer_schema(rows))
    mine[:] = 7
    (back,) = rows_of(schema, columns)
    assert back["x"]["t"].tolist() == back["many"][0].tolist() == [0, 0, 0]


def test_decimals_of_later_rows_may_have_more_digits_before_the_point():
    schema = infer_schema([{"price": decimal.Decimal("1.50")}])
    columns, _ = rows_to_columns([{"price": decimal.Decimal("1234.50")}], schema)
    assert rows_of(schema, columns) == [{"price": decimal.Decimal("1234.50")}]


# What fits a column


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int8(), 127),
        (pa.uint64(), 2**64 - 1),
        (pa.float32(), 2**24),
        (pa.float32(), 0.5),
        (pa.float32(), math.nan),
        (pa.float32(), -math.inf),
        (pa.float64(), 2**53),
        (pa.float64(), np.float32(0.1)),
        (pa.int64(), np.uint32(7)),
        (pa.bool_(), np.True_),
        (pa.large_string(), "a"),
        (pa.list_(pa.float32()), np.ones(3, np.float32)),
        (pa.list_(pa.int64(), 2), [1, 2]),
        (pa.int64(), None),
        (TENSOR, None),
        (pa.decimal128(5, 2), decimal.Decimal("1.50")),
        (pa.map_(pa.string(), pa.int64()), [("a", 1)]),
    ],
    ids=str,
)
def test_a_value_that_the_column_holds_exactly_fits(kind, value):
    back = fits(kind, value)
    expected = list(value) if isinstance(value, np.ndarray) else value
    assert back == expected or (back != back and value != value)


@pytest.mark.parametrize(
    ("kind", "value", "has", "got"),
    [
        (pa.int64(), 1.0, "int64", "float"),
        (pa.int64(), True, "int64", "bool"),
        (pa.int64(), 2**63, "int64", "int"),
        (pa.int8(), 128, "int8", "int"),
        (pa.uint8(), -1, "uint8", "int"),
        (pa.int64(), "1", "int64", "str"),
        (pa.int32(), np.int64(1), "int32", "np.int64"),
        (pa.bool_(), 1, "bool", "int"),
        (pa.float32(), 1e300, "float32", "float"),
        (pa.float32(), 2**24 + 1, "float32", "int"),
        (pa.float32(), np.float64(0.5), "float32", "np.float64"),
        (pa.float64(), 2**53 + 1, "float64", "int"),
        (pa.float64(), 10**400, "float64", "int"),
        (pa.float64(), False, "float64", "bool"),
        (pa.string(), 1, "string", "int"),
        (pa.string(), b"a", "string", "bytes"),
        (pa.string(), "\ud800", "string", "str"),
        (pa.binary(), "a", "binary", "str"),
        (TENSOR, np.ones(3, np.float32), "float32[2]", "float32[3]"),
        (TENSOR, np.ones(2), "float32[2]", "float64[2]"),
        (TENSOR, np.ones((1, 2), np.float32), "float32[2]", "float32[1, 2]"),
        (TENSOR, [1.0, 2.0], "float32[2]", "list"),
        (pa.list_(pa.int64()), 1, "list<item: int64>", "int"),
        (pa.list_(pa.int64()), "text", "list<item: int64>", "str"),
        (pa.list_(pa.int64(), 2), [1], "fixed_size_list<item: int64>[2]", "list of 1"),
        (pa.struct([("a", pa.int64())]), {"b": 1}, "struct<a: int64>", "dict with 'b'"),
        (pa.struct([("a", pa.int64())]), [("a", 1)], "struct<a: int64>", "list"),
        (pa.struct([("a", pa.int64())]), {1: 1}, "struct<a: int64>", "dict with 1"),
        (pa.date32(), datetime.datetime(2020, 1, 1, 12), "date32[day]", "datetime.datetime"),
        (pa.timestamp("us"), datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), "timestamp[us]", "datetime.datetime"),
        (pa.timestamp("s"), datetime.datetime(2020, 1, 1, microsecond=5), "timestamp[s]", "datetime.datetime"),
        (pa.decimal128(5, 2), decimal.Decimal("1.505"), "decimal128(5, 2)", "decimal.Decimal"),
    ],
    ids=str,
)
def test_a_value_that_the_column_does_not_hold_is_refused(kind, value, has, got):
    field = Field("x", kind)
    with refused(SampleError, row=1, column="x", has=has, got=got):
        rows_to_columns([{"x": None}, {"x": value}], Schema((field,)))


@pytest.mark.parametrize(
    ("kind", "value", "column"),
    [
        (pa.struct([("a", pa.list_(pa.int64()))]), {"a": [1, "x"]}, "x.a[]"),
        (pa.struct([pa.field("a", pa.int64(), nullable=False)]), {}, "x.a"),
        (pa.list_(pa.field("item", pa.int64(), nullable=False)), [None], "x[]"),
    ],
    ids=str,
)
def test_an_error_names_the_place_inside_a_value(kind, value, column):
    with refused(SampleError, column=column, row=0):
        fits(kind, value)


def test_none_is_refused_where_a_value_must_be():
    with refused(SampleError, row=0, column="x", has="int64", got="null"):
        fits(pa.int64(), None, nullable=False)


def test_a_struct_without_a_member_has_null_there():
    assert fits(pa.struct([("a", pa.int64()), ("b", pa.string())]), {"a": 1}) == {"a": 1, "b": None}


CYCLE: list = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ({}, "{}"),
        ({"a": {}}, "{}"),
        ({1: 2}, "key of type int"),
        ({"": 2}, "key of type str"),
        (CYCLE, "list"),
        (object(), "object"),
        ({1, 2}, "set"),
        (1j, "complex"),
        (np.longdouble(1), f"np.{np.longdouble(1).dtype}"),
        (np.ones(2, complex), "complex128[2]"),
        (np.ones(2, [("a", "i4")]), "[('a', '<i4')][2]"),
        (np.ones(0), "float64[0]"),
        (np.ma.masked_array([1, 2], [True, False]), "int64[2]"),
        (2**63, "int"),
        ([1, "a"], "str"),
        ([np.ones(2), np.ones(3)], "float64[3]"),
        ("\udc80", "str"),
    ],
)
def test_a_value_that_cannot_be_kept_is_refused_with_its_row(value, got):
    rows = [{"x": None}, {"x": value}]
    with refused(SampleError, row=1, got=got) as caught:
        rows_to_columns(rows, infer_schema(rows))
    assert caught.value.where["column"].startswith("x")


def test_ragged_first_rows_are_refused_with_both_shapes():
    rows = [{"x": np.ones(2)}] * 5 + [{"x": np.ones(3)}] + [{"x": np.ones(2)}] * 5
    with refused(SampleError, row=5, column="x", has="float64[2]", got="float64[3]"):
        infer_schema(rows)


@pytest.mark.parametrize("name", [1, "", None, "\ud800"])
def test_a_column_without_a_proper_name_is_refused(name):
    with refused(SampleError, row=1, column=repr(name)):
        infer_schema([{"x": 1}, {"x": 1, name: 2}])


def test_a_row_without_columns_is_refused():
    with refused(SampleError, row=1):
        infer_schema([{"x": 1}, {}])


def test_a_row_without_a_required_column_is_refused():
    schema = infer_schema([{"text": "a", "loss": 1.0}])
    with refused(SampleError, row=1, column="loss", has="float64", got="nothing"):
        rows_to_columns([{"text": "b", "loss": 2.0}, {"text": "c"}], schema)


def test_a_row_without_an_optional_column_is_null_there():
    schema = infer_schema([{"a": 1, "b": 1}, {"a": 1}])
    columns, _ = rows_to_columns([{"a": 2}], schema)
    assert rows_of(schema, columns) == [{"a": 2, "b": None}]


def test_an_unknown_column_is_refused_with_the_nearest_known_name():
    schema = infer_schema([{"label": 1}])
    with refused(SampleError, row=1, column="lable", has="label", remedy="'label'") as caught:
        rows_to_columns([{"label": 1}, {"label": 1, "lable": 2}], schema)
    assert "set(ids, lable=...)" in caught.value.remedy


@pytest.mark.parametrize(
    ("nothing", "value"),
    [
        (None, 1.5),
        (None, np.ones(2, np.float32)),
        ([], ["a"]),
        ({"a": None}, {"a": np.ones(2)}),
        ([{"a": []}], [{"a": [1]}]),
        ([None], [[1]]),
    ],
    ids=str,
)
def test_a_column_without_a_type_gets_it_from_the_first_value(nothing, value):
    rows = [{"x": nothing}, {"x": value}]
    first, schema = rows_to_columns(rows[:1], infer_schema(rows[:1]))
    second, learnt = rows_to_columns(rows[1:], schema)
    assert learnt == Schema((Field("x", infer_schema(rows).fields[0].type, required=nothing is not None),))
    assert_same(rows_of(learnt, second)[0], rows[1])
    kept = from_arrow(learnt.fields[0], first["x"])  # what was there before, in the new type
    assert_same(pylist(kept)[0], nothing)


def test_a_schema_that_learns_nothing_stays_the_same_object():
    schema = infer_schema([{"x": None}])
    assert rows_to_columns([{"x": None}], schema)[1] is schema


# Arrow


def test_an_arrow_schema_says_what_is_required():
    schema = schema_of_arrow(
        pa.schema([pa.field("id", pa.int64(), nullable=False), ("vector", pa.list_(pa.float32(), 3)), ("t", TENSOR)])
    )
    assert [(f.name, f.required, f.nullable) for f in schema] == [
        ("id", True, False),
        ("vector", False, True),
        ("t", False, True),
    ]
    assert [f.type for f in schema] == [pa.int64(), pa.list_(pa.float32(), 3), TENSOR]


@pytest.mark.parametrize(
    ("schema", "column"),
    [
        (pa.schema([("a", pa.int64()), ("a", pa.int64())]), "a"),
        (pa.schema([("", pa.int64())]), "''"),
        (pa.schema([("a", pa.fixed_shape_tensor(pa.string(), [2]))]), "a"),
    ],
)
def test_an_arrow_schema_that_cannot_be_kept_is_refused(schema, column):
    with refused(SampleError, column=column):
        schema_of_arrow(schema)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_numbers_are_not_copied_on_the_way_to_arrow_and_back(shape):
    values = np.arange(4 * math.prod(shape), dtype=np.float32).reshape(4, *shape)
    field = arrays_to_columns({"x": values}, None)[1].fields[0]
    array = to_arrow(field, Numbers(values))
    assert array.type == field.type
    back = from_arrow(field, array)
    assert np.shares_memory(back.values, values)
    np.testing.assert_array_equal(back.values, values)


@pytest.mark.parametrize("dtype", [bool, np.int16, np.float64])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_nulls_survive_the_way_to_arrow_and_back(dtype, shape):
    values = np.arange(3 * math.prod(shape)).reshape(3, *shape).astype(dtype)
    field = arrays_to_columns({"x": values}, None)[1].fields[0]
    array = to_arrow(field, Numbers(values, np.array([True, False, True])))
    assert array.is_null().to_pylist() == [False, True, False]
    for part, rows in ((array, [0, 1, 2]), (array[1:], [1, 2]), (pa.chunked_array([array[:1], array[2:]]), [0, 2])):
        back = from_arrow(field, part)
        expected = [None if row == 1 else values[row].tolist() for row in rows]
        assert [None if v is None else np.asarray(v).tolist() for v in pylist(back)] == expected


def test_columns_of_tensors_inside_structs_can_be_joined_taken_and_written():
    rows = [{"x": {"t": np.full((2, 2), n, np.int16), "many": [np.full(3, n)] * n}} for n in range(4)]
    columns, schema = rows_to_columns(rows, infer_schema(rows))
    array = columns["x"]
    turned = pa.concat_arrays([array[2:], array[:2]]).take(pa.array([2, 3, 0, 1]))
    batch = pa.record_batch([turned], schema=schema.arrow)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    read = pa.ipc.open_stream(sink.getvalue()).read_next_batch().column(0)
    assert_same(pylist(read), [row["x"] for row in rows])
    assert_same(pylist(read[1:3]), [row["x"] for row in rows[1:3]])


def test_a_tensor_whose_axes_lie_in_another_order_is_the_same_tensor():
    kind = pa.fixed_shape_tensor(pa.int64(), [2, 3], permutation=[1, 0])
    storage = pa.array([list(range(6)), list(range(6, 12))], kind.storage_type)
    array = pa.ExtensionArray.from_storage(kind, storage)
    columns, schema = arrays_to_columns({"x": array}, None)
    assert str(schema.fields[0]) == "int64[3, 2]"
    np.testing.assert_array_equal(columns["x"].values, array.to_numpy_ndarray())
    inside = pa.StructArray.from_arrays([array], ["tensor"])
    with pytest.raises(SampleError, match="a column of another type"):
        arrays_to_columns({"x": inside}, None)


# Columns


def test_arrays_become_columns_without_a_copy():
    obs, label = np.zeros((5, 84), np.float32), np.arange(5)
    columns, schema = arrays_to_columns({"obs": obs, "label": label, "text": list("abcde")}, None)
    assert [str(field) for field in schema] == ["float32[84]", "int64", "string"]
    assert np.shares_memory(columns["obs"].values, obs)
    assert np.shares_memory(columns["label"].values, label)
    again, same = arrays_to_columns({"label": label, "obs": obs, "text": pa.array(list("abcde"))}, schema)
    assert same is schema
    assert list(again) == ["obs", "label", "text"]


def test_arrow_memory_that_a_user_can_still_change_is_copied():
    values = np.arange(4)
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 4], pa.int32()), pa.array(values))
    columns, _ = arrays_to_columns({"x": lists, "when": pa.array(values[:2].view("M8[s]"))}, None)
    values[:] = 9
    assert columns["x"].to_pylist() == [[0, 1], [2, 3]]
    assert columns["when"].cast(pa.int64()).to_pylist() == [0, 1]


@pytest.mark.parametrize(
    ("array", "kind", "values"),
    [
        (pa.array(["a", None]).dictionary_encode(), "string", ["a", None]),
        (
            pa.DictionaryArray.from_arrays([0, 0], pa.array(["a"], pa.string_view())),
            "large_string",
            ["a", "a"],
        ),
        (pa.array(["a", "b"], pa.string_view()), "large_string", ["a", "b"]),
        (pa.array([[1], None], pa.list_view(pa.int64())), "list<item: int64>", [[1], None]),
        (pa.array([{"a": "x"}, None]), "struct<a: string>", [{"a": "x"}, None]),
        (pa.RunEndEncodedArray.from_arrays([2], pa.array(["a"])), "string", ["a", "a"]),
        (pa.chunked_array([[1], [2]]), "int64", [1, 2]),
        (pa.chunked_array([], pa.string()), "string", []),
        (pa.nulls(2), "null", [None, None]),
        (np.array(["a", "b"]), "string", ["a", "b"]),
        (np.array(["a", None], object), "string", ["a", None]),
        (np.array([["a"], ["b"]]), "list<item: string>", [["a"], ["b"]]),
    ],
    ids=str,
)
def test_columns_of_every_layout_are_taken(array, kind, values):
    columns, schema = arrays_to_columns({"x": array}, None)
    assert str(schema.fields[0]) == kind
    assert pylist(columns["x"]) == values


@pytest.mark.parametrize(
    ("array", "kind", "values"),
    [
        (np.array([1, 2], np.int32), pa.int64(), [1, 2]),
        (np.array([1, 2]), pa.float64(), [1.0, 2.0]),
        (pa.array([1, None], pa.int16()), pa.int64(), [1, None]),
        (pa.array(["a"], pa.large_string()), pa.string(), ["a"]),
        (pa.array(["a"]).dictionary_encode(), pa.string(), ["a"]),
        (pa.nulls(2), pa.struct([("a", pa.int64())]), [None, None]),
        (pa.array([{"a": 1}, None]), pa.struct([("b", pa.string()), ("a", pa.int64())]), [{"b": None, "a": 1}, None]),
        (pa.array([[1], None, [2, 3]])[1:], pa.large_list(pa.int64()), [None, [2, 3]]),
        (pa.array([[1, 2]], pa.list_(pa.int32(), 2)), pa.list_(pa.int64()), [[1, 2]]),
        (np.array([[1, 2]]), pa.list_(pa.int64()), [[1, 2]]),
        (np.array([1, 2]), pa.null(), [1, 2]),
    ],
    ids=str,
)
def test_a_column_of_another_type_with_the_same_values_fits(array, kind, values):
    columns, _ = arrays_to_columns({"x": array}, Schema((Field("x", kind),)))
    assert pylist(columns["x"]) == values


def test_a_python_float_is_rounded_to_a_column_of_smaller_floats():
    assert fits(pa.float32(), 0.1) == np.float32(0.1)


def test_lists_of_fixed_lengths_are_tensors_of_their_shape_in_a_new_buffer():
    array = pa.array([[[1, 2], [3, 4]], None], pa.list_(pa.list_(pa.int16(), 2), 2))
    columns, schema = arrays_to_columns({"x": array}, None)
    assert str(schema.by_name["x"]) == "int16[2, 2]"
    first, none = pylist(columns["x"])
    assert_same(first, np.array([[1, 2], [3, 4]], np.int16))
    assert none is None


def test_a_list_of_a_fixed_length_with_a_null_inside_stays_a_list():
    array = pa.array([[1, None]], pa.list_(pa.int16(), 2))
    columns, _ = arrays_to_columns({"x": array}, None)
    assert pylist(columns["x"]) == [[1, None]]


def test_a_fixed_size_list_fits_a_tensor_column_of_its_shape():
    array = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.float32(), 2))[1:]
    field = Field("x", TENSOR)
    columns, _ = arrays_to_columns({"x": array}, Schema((field,)))
    none, last = pylist(columns["x"])
    assert none is None
    assert_same(last, np.array([3, 4], np.float32))


@pytest.mark.parametrize(
    ("array", "kind", "has", "got"),
    [
        (np.ones(2), pa.float32(), "float32", "float64"),
        (np.ones(2, bool), pa.int64(), "int64", "bool"),
        (np.array([2**53 + 1]), pa.float64(), "float64", "int64"),
        (np.ones((2, 3)), pa.fixed_shape_tensor(pa.float64(), [4]), "float64[4]", "float64[3]"),
        (np.ones((2, 3)), pa.int64(), "int64", "float64[3]"),
        (np.ones(2), TENSOR, "float32[2]", "float64"),
        (pa.array(["1"]), pa.int64(), "int64", "string"),
        (pa.array([1]), pa.string(), "string", "int64"),
        (pa.array([b"a"]), pa.string(), "string", "binary"),
        (
            pa.array([{"a": 1, "b": 2}]),
            pa.struct([("a", pa.int64())]),
            "struct<a: int64>",
            "struct<a: int64, b: int64>",
        ),
        (pa.array([[1.5]]), pa.list_(pa.int64()), "list<item: int64>", "list<item: double>"),
        (["a", 1], pa.string(), "string", "int"),
    ],
    ids=str,
)
def test_a_column_that_does_not_fit_is_refused(array, kind, has, got):
    with refused(SampleError, column="x") as caught:
        arrays_to_columns({"x": array}, Schema((Field("x", kind),)))
    assert (caught.value.where["has"], caught.value.where["got"]) == (has, got)


def test_a_null_in_a_column_that_must_have_values_is_refused_with_its_row():
    schema = Schema((Field("x", pa.int64(), nullable=False),))
    with refused(SampleError, row=2, column="x"):
        arrays_to_columns({"x": pa.array([1, 2, None])}, schema)


def test_columns_that_lack_a_required_one_or_bring_a_new_one_are_refused():
    schema = infer_schema([{"a": 1, "b": 1, "c": None}])
    with refused(SampleError, column="b", got="nothing"):
        arrays_to_columns({"a": [1]}, schema)
    with refused(SampleError, column="d", has="a, b, c"):
        arrays_to_columns({"a": [1], "b": [1], "d": [1]}, schema)
    columns, _ = arrays_to_columns({"a": [1], "b": [1]}, schema)
    assert rows_of(schema, columns) == [{"a": 1, "b": 1, "c": None}]


# Writing back


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([1.0, 2.0]), [1.0, 2.0]),
        ([1.0, None], [1.0, None]),
        (pa.array([1.0, 2.0]), [1.0, 2.0]),
        (0.5, [0.5, 0.5]),
        (None, [None, None]),
        (np.float64(0.5), [0.5, 0.5]),
    ],
    ids=str,
)
def test_a_column_is_written_by_an_array_a_list_or_one_value_for_all(values, expected):
    field = Field("loss", pa.float64())
    found, same = column_for_set("loss", values, 2, field)
    assert same is field
    assert pylist(found) == expected


def test_a_new_column_is_inferred_and_not_required():
    found, field = column_for_set("tag", "hard", 3, None)
    assert (str(field), field.required, pylist(found)) == ("string", False, ["hard"] * 3)
    found, field = column_for_set("embedding", np.zeros((3, 4), np.float32), 3, None)
    assert (str(field), field.required) == ("float32[4]", False)


def test_a_tensor_is_written_back_as_one_value_for_each_row():
    import torch

    found, _ = column_for_set("loss", torch.ones(2, requires_grad=True), 2, Field("loss", pa.float32()))
    assert found.values.tolist() == [1.0, 1.0]


def test_another_number_of_values_is_refused():
    with refused(SampleError, column="loss", has="2 rows", got="3 values"):
        column_for_set("loss", np.zeros(3), 2, None)


# Equal rows


@pytest.mark.parametrize(
    ("values", "wanted", "mask"),
    [
        ([1, 2, None, 1], 1, [True, False, False, True]),
        ([1, 2, None], None, [False, False, True]),
        ([1.5, math.nan], math.nan, [False, True]),
        (["a", None, "b"], "b", [False, False, True]),
        (["a", None, "b"], None, [False, True, False]),
        ([[1.0, math.nan], [1.0], None], [1.0, math.nan], [True, False, False]),
        ([{"a": np.ones(2)}, {"a": np.zeros(2)}, {"a": None}], {"a": np.zeros(2)}, [False, True, False]),
        ([np.array([1.0, math.nan]), np.array([1.0, 2.0])], np.array([1.0, math.nan]), [True, False]),
        ([datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)], datetime.date(2020, 1, 2), [False, True]),
        ([uuid.UUID(int=1), uuid.UUID(int=2)], uuid.UUID(int=2), [False, True]),
        ([True, False], True, [True, False]),
    ],
    ids=str,
)
def test_rows_are_equal_where_values_nulls_and_nans_are(values, wanted, mask):
    rows = [{"x": value} for value in values]
    columns, schema = rows_to_columns(rows, infer_schema(rows))
    one, _ = rows_to_columns([{"x": wanted}], schema)
    found = equal_rows(columns["x"], one["x"])
    assert found.dtype == bool
    assert found.tolist() == mask
