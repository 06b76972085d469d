"""Values as bytes: equal for equal values in every process, and different for any other."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import itertools
import math
import os
import pathlib
import subprocess
import sys
import types
import uuid
import zoneinfo
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import batchwright as bw
from batchwright.base.canonical import encode
from refusals import refused


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    ONE = 1


class Text(str):
    pass


@dataclasses.dataclass
class Point:
    x: int = 1


@dataclasses.dataclass(slots=True)
class Slotted:
    x: int = 1


class Struct(msgspec.Struct):
    x: int = 1


Pair = collections.namedtuple("Pair", "a b")
MOMENT = datetime.datetime(2024, 10, 27, 2, 30)
PARIS = zoneinfo.ZoneInfo("Europe/Paris")

ALL_DIFFERENT = {
    "nothing": [None, math.nan, math.inf, -math.inf, ..., NotImplemented, "", b"", [], (), {}, set(), frozenset()],
    "one": [1, True, 1.0, 1 + 0j, "1", b"1", decimal.Decimal(1), decimal.Decimal("1.0"), Size.ONE, np.int64(1)],
    "zero": [0, False, 0.0, -0.0, np.float32(0), np.float64(0), np.False_, decimal.Decimal("-0")],
    "large": [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2.0**63, str(2**63)],
    "bytes": [b"hi", "aGk=", "hi", bytearray(b"hi"), np.bytes_(b"hi"), memoryview(b"hi")],
    "text": ["a", Text("a"), np.str_("a"), "ä", "a\u0308", "\ud800", "\ud801", "a\0", pathlib.PurePosixPath("a")],
    "dates": [MOMENT, MOMENT.isoformat(), MOMENT.replace(fold=1), MOMENT.date(), "2024-10-27", MOMENT.time()],
    "zones": [MOMENT.replace(tzinfo=PARIS), MOMENT.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=2)))],
    "ids": [uuid.UUID(int=1), str(uuid.UUID(int=1)), 1, datetime.timedelta(1), datetime.timedelta(0, 1), range(1)],
    "dicts": [
        {"a": 1, "b": 2},
        {"b": 2, "a": 1},
        {"a": 1},
        {"a": 2},
        {"b": 1},
        [["a", 1], ["b", 2]],
        {1: 1},
        {True: 1},
    ],
    "kinds of dict": [{"a": 1}, collections.OrderedDict(a=1), collections.Counter("a"), [("a", 1)]],
    "lists": [[1, 2], (1, 2), [2, 1], [[1, 2]], [[1], [2]], [[1], 2], {1, 2}, frozenset((1, 2)), Pair(1, 2)],
    "nested": [
        [[], [1]],
        [[1], []],
        [[None], []],
        [["a", "bc"]],
        [["ab", "c"]],
        [["a"], ["bc"]],
        [{"a": [1]}, {"a": []}],
    ],
    "rows": [
        [{"a": 1}, {"a": None}],
        [{"a": 1}, {}],
        [{"a": None}, {"a": 1}],
        [{"a": 1}, {"a": 0}],
        [{"a": 1}, {"b": 1}],
    ],
    "enums": [Colour.RED, "red", "RED"],
    "objects": [Point(), Point(2), Slotted(), Struct(), Struct(2), {"x": 1}],
    "arrays": [
        *(np.arange(4), np.arange(4, dtype=np.int32), np.arange(4).reshape(2, 2), np.arange(4).tobytes(), [0, 1, 2, 3]),
        *(np.array(["a"], object), np.array(["a"]), np.zeros(1, [("a", "i4")]), np.zeros(1, [("b", "i4")])),
        *(np.datetime64(1, "s"), np.datetime64(1, "ms"), np.zeros((0, 2)), np.zeros((2, 0))),
    ],
    "Arrow": [
        *(pa.array([1, None]), pa.array([1, None], pa.int32()), pa.array([1, 0]), pa.scalar(1), pa.table({"a": [1]})),
        *(pa.table({"b": [1]}), pa.table({"a": [1, 1]}), pa.table({"a": pa.array([1], pa.int8())})),
    ],
}


@pytest.mark.parametrize("values", ALL_DIFFERENT.values(), ids=ALL_DIFFERENT.keys())
@pytest.mark.parametrize("place", [lambda v: v, lambda v: [v], lambda v: {"a": v, "b": 1}, lambda v: [None, 1, v, "x"]])
def test_values_that_differ_have_different_bytes(values, place):
    written = [encode(place(value)) for value in values]
    same = [pair for pair in itertools.combinations(range(len(values)), 2) if len({written[n] for n in pair}) == 1]
    assert [(values[one], values[two]) for one, two in same] == []


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (set("abc"), set("cba")),
        ({1, "a", (2, None)}, {(2, None), "a", 1}),
        (np.arange(6)[::2], np.array([0, 2, 4])),
        (np.arange(4).reshape(2, 2), np.asfortranarray(np.arange(4).reshape(2, 2))),
        (pa.chunked_array([[1], [2, 3]]), pa.chunked_array([[1, 2], [3]])),
        (pa.table({"a": [0, 1, 2]}).slice(1), pa.table({"a": [1, 2]})),
        (["x" * 3], ["xxx"]),
    ],
)
def test_values_that_are_equal_have_equal_bytes(one, two):
    assert encode(one) == encode(two)


def test_settings_are_the_same_after_a_trip_through_json():
    settings = {"b": (1, 2.0, None), "a": {"y": True, "x": ["t", Size.ONE]}, "big": 1e16, "small": -0.0}
    again = msgspec.json.decode(msgspec.json.encode(settings, order="sorted"))
    assert encode(settings, as_json=True) == encode(again, as_json=True)
    assert encode(settings) != encode(again)


@pytest.mark.parametrize("value", [b"a", {1}, MOMENT, np.int64(1)])
def test_settings_are_json_alone(value):
    with pytest.raises(TypeError):
        encode([value], as_json=True)


@pytest.mark.parametrize("value", [object(), lambda: 1, types, iter([1])])
def test_what_has_no_value_is_named_by_its_class(value):
    with pytest.raises(TypeError, match=type(value).__name__):
        encode({"a": [value]})


def test_tensors_and_images_have_their_types():
    torch = pytest.importorskip("torch")
    image = pytest.importorskip("PIL.Image")
    values = [
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(1, 2),
    ]
    red = image.new("P", (1, 1))
    red.putpalette([255, 0, 0])
    values += [image.new("L", (1, 2)), image.new("L", (2, 1)), image.new("P", (1, 1)), red]
    assert len(set(map(encode, values))) == len(values)


def test_the_bytes_are_the_same_in_every_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import datetime, decimal, numpy as np\nfrom batchwright.base.canonical import encode\n"
        "words = {'a', 'b', 'c', (1, 'd'), None, 2.5, frozenset('xyz')}\n"
        "more = {'a': words, 'b': {1: decimal.Decimal(1)}, 'c': np.arange(3), 'd': datetime.date(2024, 1, 1)}\n"
        "print(encode([words, more]).hex())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(bw.__file__).parents[1])}
    runs = {
        subprocess.run(
            [sys.executable, script], env={**environment, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "2", "random")
    }
    assert len(runs) == 1


WITHOUT_A_PART = {
    "a masked array": lambda: np.ma.array([1, 2], mask=[0, 1]),
    "a series": lambda: pytest.importorskip("pandas").Series([1, 2], index=["a", "b"]),
    "a sparse tensor": lambda: pytest.importorskip("torch").eye(2).to_sparse(),
    "a tensor without data": lambda: pytest.importorskip("torch").empty(2, device="meta"),
}


@pytest.mark.parametrize("make", WITHOUT_A_PART.values(), ids=WITHOUT_A_PART.keys())
def test_a_value_whose_array_leaves_out_a_part_is_named(make):
    with refused(bw.SpecError, row=0, column="v"):
        bw.DatasetRecipe().add_ingredient([{"text": "a", "v": make()}], name="x").fingerprint  # noqa: B018
