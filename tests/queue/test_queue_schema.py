"""What a batch schema may say, and that a batch is exactly what its schema says."""

from __future__ import annotations

import subprocess
import sys
from collections import UserDict

import numpy as np
import pyarrow as pa
import pytest
import torch

from batchwright.base.errors import SampleError, SpecError
from batchwright.queue.schema import BatchField, checked, fields_of, is_pair

WHERE = "train file 118, batch 3"
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)


def entry(name="x", dtype="int64", shape=(2,), **more):
    return {"name": name, "dtype": dtype, "shape": list(shape), **more}


def schema(*entries):
    return fields_of({"batch_schema": list(entries)})


def values(dtype, shape):
    return (np.arange(np.prod(shape)).reshape(shape) % 2).astype(dtype)


# The schema


def test_a_schema_gives_its_fields_in_order():
    fields = schema(entry(role="input"), entry("y", "float32", [], role="target"))
    assert fields == (
        BatchField("x", np.dtype("int64"), (2,), "input"),
        BatchField("y", np.dtype("float32"), (), "target"),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_that_all_frameworks_have_is_allowed(dtype):
    (field,) = schema(entry(dtype=dtype))
    assert field.dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"vocab_size": 3}, "'batch_schema' is missing"),
        ({"batch_schema": "x, y"}, "must be a list with one dict per field, not str"),
        ({"batch_schema": None}, "must be a list with one dict per field, not None"),
        ({"batch_schema": []}, "'batch_schema' is empty"),
        ({"batch_schema": ["x"]}, "field number 0 must be a dict, not str"),
        ({"batch_schema": [{"name": "x"}]}, "field 'x' has no 'dtype' and no 'shape'"),
        ({"batch_schema": [{"dtype": "int64", "shape": []}]}, "field number 0 has no 'name'"),
        ({"batch_schema": [entry(), entry()]}, "field 'x' is there 2 times"),
        ({"batch_schema": [entry("")]}, "field number 0: name must be a word"),
        ({"batch_schema": [entry("a b")]}, "field 'a b': name must be a word"),
        ({"batch_schema": [entry("a\n")]}, r"field 'a\\n': name must be a word"),
        ({"batch_schema": [entry(7)]}, "field number 0: name must be a word that can be printed, got 7"),
        ({"batch_schema": [entry(dtype="bfloat16")]}, "field 'x': dtype must be one of bool, int8, .*, got 'bfloat16'"),
        ({"batch_schema": [entry(dtype="str")]}, "field 'x': dtype must be one of"),
        ({"batch_schema": [entry(dtype=np.int64)]}, "got <class 'numpy.int64'>"),
        (
            {"batch_schema": [entry(shape=[0])]},
            r"field 'x': shape must be a list of .* sizes of at least 1, .* got \[0\]",
        ),
        ({"batch_schema": [entry(shape=[4, -1])]}, r"sizes of at least 1, .* got \[4, -1\]"),
        ({"batch_schema": [entry(shape=[2.0])]}, r"sizes of at least 1, .* got \[2.0\]"),
        ({"batch_schema": [entry(shape=[True])]}, r"sizes of at least 1, .* got \[True\]"),
        ({"batch_schema": [{**entry(), "shape": 4}]}, "shape must be a list of at most 16 sizes"),
        ({"batch_schema": [entry(shape=[1] * 17)]}, "at most 16 sizes"),
        ({"batch_schema": [entry(shape=[1 << 40])]}, "is 8,796,093,022,208 bytes per row"),
        ({"batch_schema": [entry(role=3)]}, "field 'x': role must be text, got 3"),
    ],
)
def test_a_schema_that_cannot_be_is_refused_by_name(meta, says):
    with pytest.raises(SpecError, match=says) as caught:
        fields_of(meta)
    assert caught.value.where["parameter"] == "batch_schema"
    assert '"dtype": "int64"' in caught.value.remedy


def test_all_problems_of_a_schema_are_said_at_once():
    with pytest.raises(SpecError, match="4 problems") as caught:
        schema(entry("a", "int"), {"name": "b", "dtype": "int64"}, entry("c", shape=[0]), entry("a"))
    said = caught.value.where["problems"].splitlines()
    assert [problem.split(":")[0] for problem in said] == [
        "field 'a'",
        "field 'b' has no 'shape'",
        "field 'c'",
        "field 'a' is there 2 times",
    ]


@pytest.mark.parametrize(
    ("names", "pair"), [("xy", True), ("yx", True), ("x", False), ("xyz", False), (("x", "labels"), False)]
)
def test_exactly_x_and_y_are_a_pair(names, pair):
    assert is_pair(schema(*map(entry, names))) is pair


# A batch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_every_dtype_and_shape_comes_as_it_was_from_numpy_torch_and_arrow(dtype, shape):
    fields = schema(entry("n", dtype, shape), entry("t", dtype, shape), entry("a", dtype, shape))
    array = values(dtype, (4, *shape))
    arrow = pa.array(array.reshape(-1))
    for size in reversed(shape):
        arrow = pa.FixedSizeListArray.from_arrays(arrow, size)
    arrays = checked({"t": torch.from_numpy(array), "a": arrow, "n": array}, fields, 4, where=WHERE)
    for found in arrays:
        assert found.dtype == np.dtype(dtype)
        assert found.flags.c_contiguous
        assert np.array_equal(found, array)


def test_good_arrays_and_tensors_are_not_copied():
    array, tensor = np.zeros((4, 2), np.int64), torch.zeros(4, 2, dtype=torch.int64)
    x, y = checked({"x": array, "y": tensor}, schema(entry(), entry("y")), 4, where=WHERE)
    assert x is array
    assert y.ctypes.data == tensor.data_ptr()


TURNED = np.arange(8).reshape(2, 4).T


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (TURNED, "int64"),
        (TURNED.astype(">i8"), "int64"),
        (torch.from_numpy(TURNED), "int64"),
        (torch.from_numpy(TURNED).float().requires_grad_(), "float32"),
        (torch.view_as_complex(torch.stack([torch.from_numpy(-TURNED).double()] * 2, -1)).conj().imag, "float64"),
        (np.ma.asarray(TURNED), "int64"),
        (np.stack([TURNED, TURNED], -1)[..., 0], "int64"),
    ],
    ids=["transposed", "other byte order", "tensor", "with gradient", "negated view", "masked nowhere", "every second"],
)
def test_what_lies_otherwise_in_memory_is_brought_into_order(given, dtype):
    (found,) = checked({"x": given}, schema(entry(dtype=dtype)), 4, where=WHERE)
    assert type(found) is np.ndarray
    assert found.dtype == np.dtype(dtype)
    assert found.flags.c_contiguous
    assert np.array_equal(found, TURNED)


def test_any_mapping_is_a_batch():
    batch = UserDict(x=np.zeros((4, 2), np.int64))  # as tokenizers return
    assert len(checked(batch, schema(entry()), 4, where=WHERE)) == 1


def test_arrow_tensors_and_lists_of_one_length_are_arrays():
    numbers = np.arange(24).reshape(4, 2, 3)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(numbers)
    turned = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int64(), [3, 2], permutation=[1, 0]),
        pa.FixedSizeListArray.from_arrays(pa.array(numbers.transpose(0, 2, 1).reshape(-1)), 6),
    )
    lists = pa.array([row.tolist() for row in numbers])
    for given in (tensors, turned, lists, pa.concat_arrays([lists, lists])[2:6]):
        (found,) = checked({"x": given}, schema(entry(shape=[2, 3])), 4, where=WHERE)
        assert sorted(found.tolist()) == numbers.tolist()


GOOD = np.zeros((4, 2), np.int64)


@pytest.mark.parametrize(
    ("batch", "field", "says"),
    [
        ({}, "x", "field 'x' is missing"),
        ({"x": GOOD, "z": GOOD}, "z", "field 'z' is not in the schema, which has x"),
        ({"x": GOOD.astype(np.int32)}, "x", "field 'x' is int32, and its schema says int64; nothing is cast"),
        ({"x": GOOD[:3]}, "x", r"field 'x' has shape \[3, 2\], and its schema says \[4, 2\]"),
        ({"x": GOOD[0]}, "x", r"has shape \[2\]"),
        ({"x": GOOD.tolist()}, "x", "field 'x' is no array but list"),
        ({"x": None}, "x", "field 'x' is no array but None"),
        ({"x": GOOD.astype(object)}, "x", "field 'x' is object"),
        ({"x": np.ma.masked_equal(GOOD, 0)}, "x", "field 'x' has masked values"),
        ({"x": torch.zeros(4, 2)}, "x", "field 'x' is torch.float32, and its schema says int64"),
        ({"x": torch.zeros(4, 2, dtype=torch.bfloat16)}, "x", "field 'x' is torch.bfloat16"),
        ({"x": torch.zeros(4, 2).long().to_sparse()}, "x", "without plain memory"),
        ({"x": torch.zeros(4, 2, device="meta").long()}, "x", "without plain memory"),
        ({"x": torch.zeros(4, 3).long()}, "x", r"has shape \[4, 3\]"),
        ({"x": pa.array([1, None])}, "x", "field 'x' cannot be an array: row 1 has no value"),
        ({"x": pa.array([[1, None]] * 4)}, "x", "field 'x' cannot be an array: row 0 has no value"),
        ({"x": pa.array([[1], [1, 2]])}, "x", r"row 1 .* has shape \(2,\)"),
        ({"x": pa.chunked_array([[[1]], [[1, 2]]])}, "x", r"row 1 .* has shape \(2,\)"),
        ({"x": pa.array(["a"] * 4)}, "x", "field 'x' cannot be an array: .* holds string"),
        (pa.table({"x": pa.array([1])}), None, "sample_batch must return a dict of arrays, not Table"),
        ((GOOD, GOOD), None, "sample_batch must return a dict of arrays, not tuple"),
        (None, None, "sample_batch must return a dict of arrays, not None"),
        ({"x": GOOD, 3: GOOD}, "3", "field 3 is not in the schema"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_field_and_place(batch, field, says):
    with pytest.raises(SampleError, match=says) as caught:
        checked(batch, schema(entry()), 4, where=WHERE)
    assert caught.value.where.get("field") == field
    assert caught.value.where["batch"] == WHERE
    assert "batch_schema" in caught.value.remedy


def test_all_problems_of_a_batch_are_said_at_once():
    fields = schema(entry("a"), entry("b"), entry("c"), entry("d"))
    batch = {"a": GOOD.astype(np.float32), "b": GOOD[:, :1], "c": GOOD, "e": GOOD}
    with pytest.raises(SampleError, match="4 problems") as caught:
        checked(batch, fields, 4, where=WHERE)
    assert caught.value.where["field"] == "a, b, d, e"
    assert len(caught.value.where["problems"].splitlines()) == 4


def test_checking_a_batch_loads_neither_torch_nor_arrow():
    code = """if True:
        import sys
        import numpy as np
        from batchwright.queue.schema import checked
        from batchwright.queue.schema import fields_of
        fields = fields_of({"batch_schema": [{"name": "x", "dtype": "int64", "shape": []}]})
        checked({"x": np.zeros(4, np.int64)}, fields, 4, where="here")
        try:
            checked({"x": [1]}, fields, 4, where="here")
        except ValueError as error:
            print(error.headline, sorted({"torch", "pyarrow"} & sys.modules.keys()))
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "field 'x' is no array but list []"
