"""Values of other libraries as plain values: arrays, bytes, dicts, lists, numbers. Imports none of these libraries."""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import BatchwrightError, SampleError, SampleTypeError
from batchwright.base.words import first_line

DTYPES = frozenset(np.dtype(name) for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"))
"""The types of the arrays that are kept, in this machine's byte order."""
SIMPLE = frozenset((type(None), bool, int, float, str, bytes, *(dtype.type for dtype in DTYPES)))
_DEEPEST = 64


@dataclass(eq=False)
class Misfit(Exception):
    """A value that cannot be kept. Its row is not known yet."""

    what: str
    has: str | None = None
    got: str | None = None
    remedy: str | None = None
    kind: type[BatchwrightError] = SampleError
    path: str = ""

    def inside(self, step: str) -> Misfit:
        """The same, named from one level further out."""
        self.path = step + self.path
        return self

    def error(self, row: int | None = None, column: str = "") -> BatchwrightError:
        """The error for users."""
        where = column + self.path or None
        return self.kind(self.what, row=row, column=where, has=self.has, got=self.got, remedy=self.remedy)


def kind_of(cls: type[Any]) -> str | None:
    """The kind of a class of another library: "tensor", "array", "image", "dataset", "pandas", "polars", or None."""
    return _kind_of(cls)  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _kind_of(cls: Any) -> str | None:
    for base in cls.__mro__:
        known = _CLASSES.get((base.__module__.partition(".")[0], base.__name__))
        if known is not None and (known != "dataset" or hasattr(base, "with_format")):  # users have such modules too
            return known
    return None


_CLASSES = {
    ("torch", "Tensor"): "tensor",
    ("jax", "Array"): "array",
    ("jaxlib", "ArrayImpl"): "array",
    ("mlx", "array"): "array",
    ("PIL", "Image"): "image",
    ("torch", "Dataset"): "stream",
    ("torch", "DataLoader"): "stream",
    ("datasets", "Dataset"): "dataset",
    ("datasets", "DatasetDict"): "splits",
    ("datasets", "IterableDataset"): "stream",
    ("datasets", "IterableDatasetDict"): "splits",
    ("pandas", "DataFrame"): "pandas",
    ("pandas", "Series"): "series",
    ("polars", "DataFrame"): "polars",
    ("polars", "Series"): "series",
    ("polars", "LazyFrame"): "lazy",
}
"""Kinds of classes, by the library and the name of the class. No other facts are visible without an import."""


def is_name(name: Any) -> bool:
    """Whether this is Unicode text, not empty: a name of a column or of a member."""
    return isinstance(name, str) and name != "" and not any("\ud800" <= letter <= "\udfff" for letter in name)


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or kind_of(type(value)) in ("tensor", "array")


def rows_of_tensor(tensor: Any, remedy: str) -> NDArray[Any]:
    """A tensor of numbers with at least one dimension; `remedy` is the advice for a value without one."""
    array = array_of_tensor(tensor)
    if not array.ndim:
        what = "a tensor without dimensions is a number"
        raise Misfit(what, got=describe(tensor), remedy=remedy, kind=SampleTypeError)
    if array.dtype not in DTYPES:
        what = f"a tensor of {array.dtype}: only numbers and bool are kept"
        remedy = 'numbers, or extend({"name": array}) for texts and objects'
        raise Misfit(what, got=describe(tensor), remedy=remedy)
    return array


def array_of_tensor(tensor: Any) -> NDArray[Any]:
    """A tensor or array of any library as NumPy, in this machine's byte order; shares memory if possible."""
    if type(tensor) is np.ndarray and tensor.dtype in DTYPES:
        return tensor
    if isinstance(tensor, np.ma.MaskedArray):
        remedy = "array.filled(value), and the mask as a column of its own"
        raise Misfit("a masked array: its mask would be lost", got=describe(tensor), remedy=remedy)
    if "bfloat16" in str(tensor.dtype):  # frameworks fail in different ways and words
        remedy = ".float()" if kind_of(type(tensor)) == "tensor" else ".astype('float32')"
        raise Misfit("bfloat16 has no place in NumPy or Arrow", got=describe(tensor), remedy=f"tensor{remedy}")
    array: NDArray[Any]
    try:
        if kind_of(type(tensor)) == "tensor":
            array = tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
        else:
            array = np.asarray(tensor)
    except (TypeError, RuntimeError, ValueError, NotImplementedError) as error:
        what = f"this tensor cannot be turned into NumPy: {first_line(error)}"
        remedy = "a dense tensor of ordinary numbers, e.g. tensor.to_dense().float()"
        raise Misfit(what, got=describe(tensor), remedy=remedy) from None
    native = array.dtype.newbyteorder("=")
    if native in DTYPES:
        return array.astype(native, copy=False)
    return array


def png(image: Any) -> bytes:
    """An image as a PNG file that opens with the same mode and the same pixels."""
    if image.mode not in _PNG_MODES:
        got, remedy = f"image of mode {image.mode}", 'image.convert("RGB")'
        raise Misfit(f"PNG cannot keep an image of mode {image.mode!r}", got=got, remedy=remedy)
    file = io.BytesIO()
    try:
        image.save(file, "PNG")
    except (OSError, ValueError, KeyError, SystemError) as error:
        what, got = f"this image cannot be written as PNG: {first_line(error)}", f"image of mode {image.mode}"
        raise Misfit(what, got=got, remedy="an image that is loaded, and has at least one pixel") from None
    return file.getvalue()


_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes that a PNG keeps. Older versions of Pillow read mode I as I;16, cut to 16 bits."""


def plain(value: Any, depth: int = 0) -> Any:
    """A value of a row as None, bool, number, str, bytes, number array, list or dict. Other values stay unchanged."""
    kind = type(value)
    if kind in SIMPLE:
        return value
    if kind is np.ndarray and value.dtype in DTYPES and value.ndim and value.size:
        return array_of_tensor(value)
    if kind is list and SIMPLE.issuperset(map(type, value)):
        return value
    if depth > _DEEPEST:
        what = f"nested more than {_DEEPEST} levels deep, or inside itself"
        raise Misfit(what, got=describe(value), remedy="a flatter value")
    members = members_of(value)
    if members is not None:
        return {key: _inside(f".{key}", member, depth) for key, member in members.items()}
    if isinstance(value, list | tuple):
        return [_inside("[]", member, depth) for member in value]
    return _plain_leaf(value, depth)


def _plain_leaf(value: Any, depth: int) -> Any:
    if isinstance(value, memoryview):
        if value.format in ("B", "b", "c"):
            return bytes(value)
        value = np.array(value)
    if is_array(value):
        return _array(array_of_tensor(value), depth)
    if kind_of(type(value)) == "image":
        return png(value)
    return value


def members_of(value: Any) -> dict[Any, Any] | None:
    """The members of a dict, a dataclass or a named tuple; None of other values."""
    if isinstance(value, dict):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    names = getattr(type(value), "_fields", None)
    return dict(zip(names, value, strict=True)) if names is not None and isinstance(value, tuple) else None


def _array(array: NDArray[Any], depth: int) -> Any:
    if not array.ndim:
        return plain(array.item() if array.dtype.kind == "O" else array[()], depth + 1)
    if array.dtype.kind in "OUSTMm":  # texts, objects, dates: lists of them
        return [_inside("[]", value, depth) for value in array]
    if array.dtype not in DTYPES:
        remedy = _REMEDIES.get(array.dtype.kind, "array.astype(np.float64)")
        raise Misfit(f"arrays of {array.dtype} have no Arrow type", got=describe(array), remedy=remedy)
    if not array.size:
        what, remedy = "an array without elements has no fixed shape", "a list ([]), or None where there is nothing"
        raise Misfit(what, got=describe(array), remedy=remedy)
    return array


_REMEDIES = {
    "c": "np.stack([array.real, array.imag], -1)",
    "V": "array.astype(np.float32), or one column for each of its fields",
}
"""The remedy for arrays of complex numbers and of records."""


def _inside(step: str, value: Any, depth: int) -> Any:
    if type(value) in SIMPLE:
        return value
    try:
        return plain(value, depth + 1)
    except Misfit as misfit:
        raise misfit.inside(step) from None


def describe(value: Any) -> str:
    """The name of a value's type in an error: `float32[84]`, `int`, `str`, `null`.

    >>> describe(np.zeros((2, 3), np.float32)), describe(1), describe(np.int8(1)), describe(None)
    ('float32[2, 3]', 'int', 'np.int8', 'null')
    """
    if value is None:
        return "null"
    kind = type(value)
    if is_array(value):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, np.generic):
        return f"np.{value.dtype}"
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
