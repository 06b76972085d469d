"""Which samples become which rows, and what is no sample."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import io
import logging
import math
import pathlib
import subprocess
import sys
import types

import numpy as np
import pyarrow as pa
import pytest

from batchwright.base.errors import SampleError, SampleTypeError
from batchwright.buffer import normalize as module
from batchwright.buffer.arrow import to_arrow
from batchwright.buffer.normalize import columns_to_extend, normalize, register_normalizer
from batchwright.buffer.values import arrays_to_columns
from refusals import refused


@pytest.fixture(autouse=True)
def no_normalizers_stay(monkeypatch):
    monkeypatch.setattr(module, "_NORMALIZERS", {})


class Sample:
    def __init__(self, text, score):
        self.text, self.score = text, score


class Special(Sample):
    pass


class Slotted:
    __slots__ = ("text",)

    def __init__(self, text):
        self.text = text


@dataclasses.dataclass
class Record:
    text: str
    box: tuple[int, int]


Pair = collections.namedtuple("Pair", "text score")


@pytest.fixture
def dataset():
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"n": [0, 1, 2, 3], "text": list("abcd"), "v": [[0.5, 1.5]] * 4})


def rows_of(samples):
    kind, rows, columns = normalize(samples)
    assert columns is None
    return kind, rows


def table_of(samples):
    """The columns of a table, as a buffer gets them."""
    kind, rows, found = normalize(samples)
    assert (kind, rows) == ("dict", [])
    columns, schema = arrays_to_columns(found, None)
    return pa.Table.from_arrays([to_arrow(field, columns[field.name]) for field in schema], schema=schema.arrow)


# One sample


@pytest.mark.parametrize(
    ("sample", "row"),
    [
        ({"text": "a"}, {"text": "a"}),
        (collections.OrderedDict(text="a"), {"text": "a"}),
        (collections.UserDict(text="a"), {"text": "a"}),
        (types.MappingProxyType({"text": "a"}), {"text": "a"}),
        (Record("a", (1, 2)), {"text": "a", "box": (1, 2)}),
        (Pair("a", 1), {"text": "a", "score": 1}),
        (Sample("a", 1), {"text": "a", "score": 1}),
        (Slotted("a"), {"text": "a"}),
        (types.SimpleNamespace(text="a"), {"text": "a"}),
        (argparse.Namespace(text="a"), {"text": "a"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_sample_is_one_row(sample, row):
    assert rows_of(sample) == ("dict", [row])
    assert rows_of([sample, sample]) == ("dict", [row, row])
    assert rows_of((sample,)) == ("dict", [row])


def test_a_list_without_samples_has_no_rows():
    assert rows_of([]) == ("dict", [])


def test_a_tensor_is_one_row_of_its_shape_and_type():
    import torch

    for tensor in (torch.arange(3, dtype=torch.int16), torch.ones(3, requires_grad=True), np.arange(3.0)):
        kind, (row,) = rows_of(tensor)
        assert (kind, list(row)) == ("tensor", ["tensor"])
        assert isinstance(row["tensor"], np.ndarray)
        assert str(row["tensor"].dtype) == str(tensor.dtype).removeprefix("torch.")
        assert row["tensor"].tolist() == tensor.tolist()
    assert [len(rows) for _, rows in (rows_of(torch.ones(4, 2)), rows_of(list(torch.ones(4, 2))))] == [1, 4]


def test_a_jax_array_is_a_tensor():
    jnp = pytest.importorskip("jax.numpy")
    kind, (row,) = rows_of(jnp.arange(3))
    assert (kind, row["tensor"].tolist(), str(row["tensor"].dtype)) == ("tensor", [0, 1, 2], "int32")


def test_the_first_tensor_with_rows_of_its_own_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(module, "_logged", set())
    with caplog.at_level(logging.INFO, "batchwright"):
        normalize(np.ones(3))
        normalize([np.ones((3, 2))])
        assert not caplog.records
        normalize(np.ones((3, 2)))
        normalize(np.ones((3, 2)))
    (record,) = caplog.records
    assert record.name == "batchwright"
    assert "shape [3, 2] as ONE row" in record.message
    assert "extend" in record.message


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_an_image_is_a_png_that_opens_in_its_own_mode(mode):
    from PIL import Image

    image = Image.new(mode, (3, 2))
    image.putpixel((1, 1), {"LA": (3, 4), "RGB": (1, 2, 3), "RGBA": (1, 2, 3, 4)}.get(mode, 1))
    kind, (row,) = rows_of(image)
    opened = Image.open(io.BytesIO(row["image"]))
    assert kind == "image"
    assert (opened.format, opened.mode, opened.tobytes()) == ("PNG", mode, image.tobytes())


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "LAB", "I", "F", "PA", "RGBX", "I;16B"])
def test_an_image_that_png_cannot_keep_is_refused(mode):
    from PIL import Image

    with refused(SampleError, mode, remedy='image.convert("RGB")'):
        normalize(Image.new(mode, (3, 2)))


# No samples


def numbers():
    yield 1


NO_SAMPLES = [
    *(None, object(), 1, 1.5, "text", b"bytes", True, np.float32(1), Sample, len, numbers, sys, numbers(), {1}),
    *(range(3), pathlib.Path("a"), datetime.date(2020, 1, 1), np.array(3), pa.array([1]), {}.keys(), ValueError("x")),
]


@pytest.mark.parametrize("sample", NO_SAMPLES, ids=lambda value: type(value).__name__)
def test_what_is_no_sample_is_refused_by_its_type(sample):
    with refused(SampleTypeError):
        normalize(sample)
    with refused(SampleTypeError, row=1):
        normalize([{"a": 1}, sample])


@pytest.mark.parametrize("inner", [[1], [{"a": 1}], (1, 2)])
def test_a_list_inside_a_list_is_refused(inner):
    with refused(SampleTypeError, row=1, got=type(inner).__name__):
        normalize([{"a": 1}, inner])


def test_other_libraries_things_without_rows_of_their_own_are_refused(dataset):
    import torch

    pandas, polars, datasets = map(pytest.importorskip, ("pandas", "polars", "datasets"))
    for sample in (
        pandas.Series([1]),
        polars.Series([1]),
        polars.LazyFrame({"a": [1]}),
        datasets.DatasetDict(train=dataset),
        dataset.to_iterable_dataset(),
        torch.utils.data.TensorDataset(torch.ones(2)),
        [dataset],
        [pandas.DataFrame({"a": [1]})],
    ):
        with refused(SampleTypeError):
            normalize(sample)


@pytest.mark.parametrize(
    ("samples", "row", "kinds"),
    [
        ([{"a": 1}, np.ones(2)], 1, ("dict", "tensor")),
        ([np.ones(2), np.ones(2), {"a": 1}], 2, ("tensor", "dict")),
    ],
    ids=str,
)
def test_samples_of_two_kinds_are_refused_with_the_row(samples, row, kinds):
    with refused(SampleError, row=row, has=kinds[0], got=kinds[1]):
        normalize(samples)


def test_a_tensor_that_cannot_be_kept_is_refused_with_a_remedy():
    import torch

    with refused(SampleError, row=1, remedy="tensor.float()"):
        normalize([torch.ones(2), torch.ones(2, dtype=torch.bfloat16)])
    for tensor in (torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta"), np.array(["a"]), torch.ones(2, 0)):
        with refused(SampleError):
            normalize(tensor)


# Normalizers


def test_the_normalizer_of_the_own_class_comes_first_then_the_newest_that_fits():
    register_normalizer(Special)(lambda sample: {"by": "own class"})
    register_normalizer(object)(lambda sample: {"by": "object"})
    register_normalizer(Sample)(lambda sample: {"by": "base"})
    assert normalize(Special("a", 1)).rows == [{"by": "own class"}]

    class Deeper(Special):
        pass

    assert normalize([Deeper("a", 1), Slotted("a")]).rows == [{"by": "base"}, {"by": "object"}]
    register_normalizer(Special)(lambda sample: {"by": "newest"})
    assert normalize(Deeper("a", 1)).rows == [{"by": "newest"}]


def test_a_normalizer_may_give_many_rows_and_is_returned_as_it_was():
    @register_normalizer(Sample)
    def rows_of_sample(sample):
        return [{"text": sample.text}] * sample.score

    assert rows_of_sample(Sample("a", 1)) == [{"text": "a"}]
    assert rows_of([Sample("a", 2), Sample("b", 0), {"text": "c"}]) == ("dict", [{"text": t} for t in "aac"])


def test_a_normalizer_comes_before_what_is_built_in():
    register_normalizer(np.ndarray)(lambda array: {"mean": float(array.mean())})
    register_normalizer(pa.Table)(lambda table: {"rows": table.num_rows})
    assert rows_of(np.ones(3)) == ("dict", [{"mean": 1.0}])
    assert rows_of(pa.table({"a": [1, 2]})) == ("dict", [{"rows": 2}])


def test_an_error_inside_a_normalizer_names_it_and_the_row():
    @register_normalizer(Sample)
    def halves(sample):
        return {"half": 1 / sample.score}

    with refused(SampleError, "ZeroDivisionError", row=1) as caught:
        normalize([Sample("a", 1), Sample("b", 0)])
    assert "halves" in caught.value.where["normalizer"]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("given", [None, 1, "text", [1], (1, 2), Pair(1, 2)])
def test_a_normalizer_that_gives_no_dict_is_refused(given):
    register_normalizer(Sample)(lambda sample: given)
    with refused(SampleTypeError, row=0) as caught:
        normalize(Sample("a", 1))
    assert "lambda" in caught.value.where["normalizer"]


def test_only_classes_have_normalizers():
    with refused(SampleTypeError, "str", remedy="@register_normalizer"):
        register_normalizer("Sample")
    with refused(SampleTypeError, "int", remedy="@register_normalizer"):
        register_normalizer(Sample)(3)


# Tables


def test_a_table_keeps_its_columns():
    table = pa.table({"n": [1, 2], "text": ["a", None]})
    reader = pa.RecordBatchReader.from_batches(table.schema, table.to_batches())
    for source in (table, table.to_batches()[0], reader):
        assert table_of(source).to_pydict() == table.to_pydict()


def test_a_data_frame_is_many_rows():
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    columns = {"n": [1, 2], "x": [0.5, math.nan], "text": ["a", None], "lists": [[1], [2, 3]]}
    for frame in (pandas.DataFrame(columns)[::-1], polars.DataFrame(columns)[::-1]):
        found = table_of(frame).to_pydict()
        assert math.isnan(found.pop("x")[0])
        assert found == {"n": [2, 1], "text": [None, "a"], "lists": [[2, 3], [1]]}


def test_an_index_with_a_name_is_a_column_and_one_without_is_not():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"key": ["a", "b"], "n": [1, 2]})
    assert table_of(frame[1:]).to_pydict() == {"key": ["b"], "n": [2]}
    assert table_of(frame.set_index("key")).to_pydict() == {"key": ["a", "b"], "n": [1, 2]}


def test_a_frame_whose_columns_have_no_names_or_mixed_values_is_refused():
    pandas = pytest.importorskip("pandas")
    with refused(SampleError, column=0):
        normalize(pandas.DataFrame([[1, 2]]))
    with refused(SampleError, row=1, column="x", has="int", got="str"):
        table_of(pandas.DataFrame({"x": pandas.Series([1, "a"], dtype=object)}))
    with refused(SampleError, column="a"):
        normalize(pa.table([[1], [2]], ["a", "a"]))


def test_a_dataset_keeps_its_own_order_of_rows(dataset):
    assert table_of(dataset).to_pydict() == dataset.to_dict()
    chosen = dataset.select([3, 0, 2])
    assert chosen._indices is not None
    assert table_of(chosen)["n"].to_pylist() == [3, 0, 2]
    assert table_of(dataset.select([])).num_rows == 0


def test_a_dataset_shows_what_its_format_shows(dataset):
    assert table_of(dataset.with_format("numpy", columns=["v"])).schema == pa.schema(
        [("v", pa.fixed_shape_tensor(pa.float32(), [2]))]
    )
    shown = table_of(dataset.with_format("torch"))  # which shows floats as float32, and so does numpy
    assert shown.schema.field("v").type == pa.fixed_shape_tensor(pa.float32(), [2])
    assert shown["text"].to_pylist() == list("abcd")
    everything = dataset.with_format("numpy", columns=["v"], output_all_columns=True)
    assert table_of(everything).column_names == ["n", "text", "v"]
    transformed = dataset.with_transform(lambda batch: {"double": [2 * n for n in batch["n"]]})
    assert table_of(transformed).to_pydict() == {"double": [0, 2, 4, 6]}
    assert columns_to_extend(transformed).columns == {"double": [0, 2, 4, 6]}


def test_a_datasets_arrays_and_images_keep_their_types():
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    values = np.arange(18, dtype=np.int16).reshape(3, 2, 3)
    image = Image.new("L", (2, 2), 7)
    made = datasets.Dataset.from_dict(
        {"m": values.tolist(), "image": [image] * 3},
        features=datasets.Features({"m": datasets.Array2D((2, 3), "int16"), "image": datasets.Image()}),
    )
    columns, schema = arrays_to_columns(columns_to_extend(made.select([2, 0])).columns, None)
    assert str(schema.by_name["m"]) == "int16[2, 3]"
    np.testing.assert_array_equal(columns["m"].values, values[[2, 0]])
    opened = Image.open(io.BytesIO(columns["image"][0].as_py()["bytes"]))
    assert (opened.mode, opened.tobytes()) == ("L", image.tobytes())


def test_an_array_that_is_missing_in_a_dataset_is_null_among_arrays():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"m": datasets.Array2D((1, 2), "int32")})
    found = normalize(datasets.Dataset.from_dict({"m": [None, [[1, 2]]]}, features=features))
    columns, schema = arrays_to_columns(found.columns, None)
    assert str(schema.fields[0]) == "int32[1, 2]"
    assert (columns["m"].valid.tolist(), columns["m"].values[1].tolist()) == ([False, True], [[1, 2]])


# Columns


class Stream:
    def __arrow_c_stream__(self, requested_schema=None):
        return pa.table({"n": [1, 2]}).__arrow_c_stream__(requested_schema)


def test_columns_are_found_in_whatever_has_some(dataset):
    import torch

    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    table = pa.table({"n": [1, 2]})
    sources = [
        *({"n": [1, 2]}, {"n": np.array([1, 2])}, {"n": torch.tensor([1, 2])}, {"n": pa.array([1, 2])}, {"n": (1, 2)}),
        *(table, table.to_batches()[0], Stream(), pa.RecordBatchReader.from_batches(table.schema, table.to_batches())),
        *(pandas.DataFrame({"n": [1, 2]}), polars.DataFrame({"n": [1, 2]}), {"n": pandas.Series([1, 2])}),
        {"n": polars.Series([1, 2])},
        dataset.select([1, 2]).select_columns("n"),
    ]
    for source in sources:
        kind, _, arrays = columns_to_extend(source)
        columns, schema = arrays_to_columns(arrays, None)
        assert (kind, str(schema.fields[0]), columns["n"].values.tolist()) == ("dict", "int64", [1, 2])


def test_a_tensor_is_a_column_of_its_rows():
    import torch

    tensor = torch.ones(4, 2)
    kind, _, arrays = columns_to_extend(tensor)
    assert (kind, list(arrays)) == ("tensor", ["tensor"])
    assert arrays["tensor"].shape == (4, 2)
    assert np.shares_memory(arrays["tensor"], tensor.numpy())


@pytest.mark.parametrize(
    ("source", "error", "named", "remedy"),
    [
        ({"a": 1}, SampleTypeError, "'a'", "append"),
        ({"a": "text"}, SampleTypeError, "str", "append"),
        ({"a": [1], "b": np.ones((2, 3))}, SampleError, "b: 2 rows", True),
        ({}, SampleError, "dict", "extend({"),
        ([{"a": 1}], SampleTypeError, "list", "append"),
        (None, SampleTypeError, "null", "extend"),
        (pa.array([1]), SampleTypeError, "Int64Array", "extend"),
        (np.array(1), SampleTypeError, "int64[]", "[rows"),
        (np.array(["a"]), SampleError, "<U1[1]", "extend"),
    ],
    ids=str,
)
def test_what_has_no_columns_is_refused(source, error, named, remedy):
    with refused(error, named, remedy=remedy):
        columns_to_extend(source)


def test_recognising_samples_imports_no_library():
    code = (
        "import sys; from batchwright.buffer.normalize import normalize; import numpy; "
        "normalize([{'a': numpy.ones(2)}]);"
        "print(*sys.modules.keys() & {'torch', 'PIL', 'pandas', 'polars', 'datasets', 'jax', 'mlx'})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
