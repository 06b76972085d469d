"""Columns, schemas and changes as bytes: what went in comes out, and bytes that do not fit are refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.base.errors import SampleError, StoreError
from batchwright.buffer import codec
from batchwright.buffer.schema import Columns, Field, Numbers, Schema
from refusals import refused

POINT = pa.fixed_shape_tensor(pa.float32(), [3])
STRUCT = pa.struct([("a", pa.int32()), ("point", POINT), ("yes", pa.bool_())])
VALID = np.array([True, True, False, True])


def points() -> pa.Array:
    return pa.ExtensionArray.from_storage(
        POINT, pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype="f4")), 3)
    )


def structs() -> pa.Array:
    children = [pa.array([1, 2, None, 4], pa.int32()), points(), pa.array([True, None, False, True])]
    return pa.StructArray.from_arrays(children, fields=list(STRUCT), mask=pa.array([False, True, False, False]))


COLUMNS: dict[str, tuple[pa.DataType, Numbers | pa.Array]] = {
    "int64": (pa.int64(), Numbers(np.arange(4))),
    "uint8": (pa.uint8(), Numbers(np.arange(4, dtype=np.uint8))),
    "float16": (pa.float16(), Numbers(np.arange(4, dtype=np.float16))),
    "some numbers": (pa.float64(), Numbers(np.arange(4.0), VALID)),
    "points": (POINT, Numbers(np.arange(12, dtype=np.float32).reshape(4, 3))),
    "some points": (POINT, Numbers(np.arange(12, dtype=np.float32).reshape(4, 3), VALID)),
    "grids": (pa.fixed_shape_tensor(pa.bool_(), [2, 2]), Numbers(np.arange(16).reshape(4, 2, 2) % 3 == 0)),
    "booleans": (pa.bool_(), Numbers(np.array([True, False, True, True]), VALID)),
    "text": (pa.string(), pa.array(["a", None, "é", ""])),
    "large text": (pa.large_string(), pa.array(["a", None, "é", ""], pa.large_string())),
    "bytes": (pa.binary(), pa.array([b"a", None, b"\xff", b""])),
    "large bytes": (pa.large_binary(), pa.array([b"a", None, b"\xff", b""], pa.large_binary())),
    "lists": (pa.list_(pa.int16()), pa.array([[1], None, [], [2, None]], pa.list_(pa.int16()))),
    "structs": (STRUCT, structs()),
    "nothing": (pa.null(), pa.nulls(4)),
    "words": (pa.dictionary(pa.int32(), pa.string()), pa.array(["x", "y", None, "x"]).dictionary_encode()),
    "times": (pa.timestamp("us", "UTC"), pa.array([1, 2, None, 4], pa.timestamp("us", "UTC"))),
}
SCHEMA = Schema(tuple(Field(name, kind) for name, (kind, _) in COLUMNS.items()))


def same(found: Columns, expected: Columns) -> None:
    assert list(found) == list(expected)
    for name, column in expected.items():
        if isinstance(column, Numbers):
            values, valid = found[name]
            assert values.dtype == column.values.dtype
            np.testing.assert_array_equal(values, column.values)
            assert (valid is None) == (column.valid is None)
            assert valid is None or valid.tolist() == column.valid.tolist()
        else:
            assert found[name].type == column.type
            assert found[name].equals(column)


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_comes_back_as_it_was(name):
    columns = {name: COLUMNS[name][1]}
    same(codec.decode_columns(SCHEMA, codec.encode_columns(SCHEMA, columns), 4), columns)


@pytest.mark.parametrize("name", COLUMNS)
def test_a_part_of_a_column_comes_back_without_the_rest(name):
    column = COLUMNS[name][1]
    if isinstance(column, Numbers):
        part = Numbers(column.values[1:3], None if column.valid is None else column.valid[1:3])
    else:
        part = column[1:3]
    same(codec.decode_columns(SCHEMA, codec.encode_columns(SCHEMA, {name: part}), 2), {name: part})


@pytest.mark.parametrize("name", COLUMNS)
def test_no_rows_come_back_as_no_rows(name):
    column = COLUMNS[name][1]
    none = Numbers(column.values[:0]) if isinstance(column, Numbers) else column[:0]
    same(codec.decode_columns(SCHEMA, codec.encode_columns(SCHEMA, {name: none}), 0), {name: none})


@pytest.mark.parametrize("num_rows", [1, 16, 17, 1000])
def test_few_and_many_texts_come_back(num_rows):
    schema = Schema((Field("text", pa.string()),))
    columns = {"text": pa.array([None if n % 5 == 4 else f"row {n}" for n in range(num_rows)])}
    same(codec.decode_columns(schema, codec.encode_columns(schema, columns), num_rows), columns)


def test_numbers_are_read_only_views_of_the_bytes():
    data = codec.encode_columns(SCHEMA, {"points": COLUMNS["points"][1]})
    values = codec.decode_columns(SCHEMA, data, 4)["points"].values
    assert not values.flags.writeable
    assert np.shares_memory(values, np.frombuffer(data, np.uint8))


def test_numbers_that_are_not_contiguous_come_back():
    schema = Schema((Field("x", POINT),))
    values = np.arange(600, dtype=np.float32).reshape(100, 6)[:, ::2]
    same(
        codec.decode_columns(schema, codec.encode_columns(schema, {"x": Numbers(values)}), 100), {"x": Numbers(values)}
    )


def test_numbers_of_another_type_than_the_schema_says_are_not_encoded():
    with pytest.raises(ValueError, match="column 'int64': float64"):
        codec.encode_columns(SCHEMA, {"int64": Numbers(np.arange(4.0))})


def test_a_schema_comes_back_with_what_is_required():
    schema = Schema((*SCHEMA.fields, Field("optional", pa.int8(), required=False, nullable=False)))
    assert codec.decode_schema(codec.encode_schema(schema)) == schema
    assert codec.decode_schema(codec.encode_schema(Schema())) == Schema()


def test_equal_schemas_are_equal_after_columns_were_encoded():
    again = codec.decode_schema(codec.encode_schema(SCHEMA))
    codec.encode_columns(again, {})
    assert again == SCHEMA


@pytest.mark.parametrize(
    "operation",
    [
        codec.Append(1, 1_700_000_000_000_000, b"columns", 1, 0.5, "-loss", "hard negatives", "row", None),
        codec.Append(1, 2, b"columns", 1, float("-inf"), "random", None, "row", b"schema"),
        codec.SetValues(2, 3, codec.encode_ids(np.array([1, 2])), b"columns", None),
        codec.DropRows(3, 4, codec.encode_ids(np.array([], np.int64))),
        codec.Rollback(4, 5, 0),
        codec.SettingsChange(5, 6, None, "oldest", (1 << 64) - 1),
    ],
)
def test_a_change_comes_back_as_it_was(operation):
    assert codec.decode(codec.encode(operation)) == operation


def test_ids_are_little_endian_int64():
    assert codec.encode_ids(np.array([1, -2], np.int32)) == b"\1" + bytes(7) + b"\xfe" + b"\xff" * 7
    assert codec.decode_ids(codec.encode_ids(np.array([1, -2]))).tolist() == [1, -2]


# Bytes that do not fit


def raw(values: dict, valid: dict | None = None) -> bytes:
    return msgspec.msgpack.encode((values, valid or {}))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (b"\xc1", "malformed"),
        (raw({"other": b""}), "no such column"),
        (raw({"int64": bytes(31)}), "31 bytes"),
        (raw({"int64": bytes(40)}), "40 bytes"),
        (raw({"int64": [1, 2, 3, 4]}), "a list, where"),
        (raw({"int64": bytes(32)}, {"int64": b"\1\1\1"}), "3 bytes, where bool[4]"),
        (raw({"int64": bytes(32)}, {"int64": b"\1\1\1\2"}), "neither true nor false"),
        (raw({"booleans": b"\0\1\2\0"}), "neither true nor false"),
        (raw({"text": ["a", "b", "c"]}), "3 rows, not 4"),
        (raw({"text": ["a", "b", "c", b"d"]}), "string"),
        (raw({"text": ["a", "b", "c", 4]}), ""),
        (raw({"bytes": ["a"]}), "binary"),
        (raw({"lists": [1]}), ""),
        (raw({"lists": b""}), ""),
        (raw({"lists": b"\xff" * 100}), ""),
        (raw({"words": b"\xff" * 100}), ""),
        (raw({"words": b""}), ""),
    ],
)
def test_bytes_that_are_no_such_columns_are_refused(data, reason):
    with refused(StoreError, remedy="batchwright") as caught:
        codec.decode_columns(SCHEMA, data, 4)
    assert reason in caught.value.where["reason"]


@pytest.mark.parametrize("name", ["lists", "structs", "words", "text"])
def test_flipped_bytes_of_a_message_are_refused_or_give_valid_values(name):
    column = COLUMNS[name][1]
    column = pa.concat_arrays([column] * 5)
    data = codec.encode_columns(SCHEMA, {name: column})
    for offset in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[offset] ^= 0xFF
        try:
            found = codec.decode_columns(SCHEMA, bytes(damaged), 20)
        except StoreError:
            continue
        for array in found.values():
            array.validate(full=True)
            array.to_pylist()


@pytest.mark.parametrize("data", [b"", b"\x93\x01\xc0\xc0", msgspec.msgpack.encode([1, b"no schema", []])])
def test_bytes_that_are_no_schema_are_refused(data):
    with refused(StoreError, "schema"):
        codec.decode_schema(data)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_change_are_refused(data):
    try:
        operation = codec.decode(data)
    except StoreError:
        return
    assert codec.decode(codec.encode(operation)) == operation


def test_ids_of_broken_length_are_refused():
    with refused(StoreError, reason="12 bytes"):
        codec.decode_ids(bytes(12))


def test_more_than_a_record_can_count_is_refused_with_what_to_do():
    too_large = Numbers(np.zeros(1 << 32, np.uint8))  # memory that nobody touches is not there yet
    with refused(SampleError, f"{(1 << 32) - 1:,} bytes"):
        codec.encode_columns(SCHEMA, {"uint8": too_large})


def test_arrow_columns_lie_where_arrow_wants_them_whatever_lies_before():
    schema = Schema((Field("x", pa.uint8()), Field("y", pa.list_(pa.int64()))))
    lists = pa.array([[1, 2]] * 9)
    for num_rows in range(1, 9):
        columns = {"x": Numbers(np.zeros(num_rows, np.uint8)), "y": lists[:num_rows]}
        found = codec.decode_columns(schema, codec.encode_columns(schema, columns), num_rows)["y"]
        assert {buffer.address % 8 for buffer in found.buffers() if buffer is not None} == {0}
