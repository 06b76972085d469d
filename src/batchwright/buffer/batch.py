"""Batches of rows, by column: the result of sampling and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from batchwright.batches.frameworks import Movable, adapter, adapter_of
from batchwright.buffer.arrow import as_table, pylist
from batchwright.buffer.schema import Columns, Numbers, Schema

__all__ = ["RowBatch"]

Metadata = dict[str, Any] | Callable[[], dict[str, Any]]


class RowBatch(Movable):
    """Rows by column: `batch["obs"]` is float32 [rows, 84], `batch["text"]` a list. Like a dict, but `len` is its rows.

    A column of numbers is an array of its dtype and shape, also where rows lack a value: floats are NaN there, other
    numbers 0 or False. `missing[name]` is the mask of those rows. Other columns are lists of Python values, made
    when first read, with None for null.

    `ids` are the rows' ids, `index` their numbers in the version that was read, `weights` the importance weights of
    prioritized replay (else None). In a batch of a loader, `metadata["state"]` is the state *after* this batch and
    `metadata["position"]` each row's position.

    batch.torch(), batch.jax(), batch.mlx()   the same rows, with number columns as that framework's arrays
    batch.torch().to("cuda")                  on a device
    batch.to_table()                          an Arrow table, with nulls
    """

    def __init__(
        self,
        schema: Schema,
        columns: Columns,
        ids: ArrayLike,
        index: ArrayLike,
        weights: Any = None,
        metadata: Metadata | None = None,
    ) -> None:
        """`metadata` may be a function that makes it. The batch owns its columns: do not write into them."""
        self.schema = schema
        self.ids: NDArray[np.int64] = np.asarray(ids, np.int64)
        self.index: NDArray[np.int64] = np.asarray(index, np.int64)
        self.weights = weights
        self._columns = columns
        self._metadata = metadata
        self._made: dict[str, Any] = {}
        """Columns in their public form, once they were read."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Made on first use, because most steps never read it."""
        if callable(self._metadata):
            self._metadata = self._metadata()
        elif self._metadata is None:
            self._metadata = {}
        return self._metadata

    @property
    def missing(self) -> dict[str, NDArray[np.bool_]]:
        """The mask of rows without a value, for each column of numbers."""
        return {name: ~column.has_value for name, column in _numbers_of(self._columns).items()}

    def keys(self) -> list[str]:
        return list(self._columns)

    def __getitem__(self, name: str) -> Any:
        made = self._made.get(name)
        if made is None:
            column = self._columns[name]
            made = filled(column) if isinstance(column, Numbers) else pylist(column)
            self._made[name] = made
        return made

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self._columns:
            return default
        return self[name]

    def values(self) -> list[Any]:
        return [self[name] for name in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        return [(name, self[name]) for name in self.keys()]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Rows."""
        return len(self.ids)

    def to_table(self) -> pa.Table:
        """These rows as an Arrow table, with nulls where they have no value."""
        return as_table(self.schema, self._with_values(lambda name, column: np.asarray(column.values)))

    def _with_values(self, make: Callable[[str, Numbers], Any]) -> Columns:
        """The columns, with other arrays for those of numbers."""
        made = {name: Numbers(make(name, column), column.valid) for name, column in _numbers_of(self._columns).items()}
        return {**self._columns, **made}

    def torch(self) -> Self:
        """These rows with tensors for the columns of numbers. They share memory with this batch's arrays."""
        return self._as("torch")

    def jax(self) -> Self:
        """These rows with JAX arrays for the columns of numbers: 64-bit ones have 32 bits, unless x64 is on."""
        return self._as("jax")

    def mlx(self) -> Self:
        """These rows with MLX arrays for the columns of numbers."""
        return self._as("mlx")

    def _as(self, framework: str) -> Self:
        arrays = {name: np.asarray(array) for name, array in self._arrays().items()}
        return self._with(adapter(framework).numbers(arrays))

    def _arrays(self) -> dict[str | None, Any]:
        """The columns of numbers as users get them, and the weights under None, which is not the name of a column."""
        arrays: dict[str | None, Any] = {name: self[name] for name in _numbers_of(self._columns)}
        if self.weights is not None:
            arrays[None] = self.weights
        return arrays

    def _moved(self, move: Callable[[Any], Any]) -> Self:
        arrays = self._arrays()
        if any(adapter_of(array) is None for array in arrays.values()):
            raise TypeError("a batch of NumPy arrays cannot move: batch.torch().to(device), or framework='torch'")
        return self._with({name: move(array) for name, array in arrays.items()})

    def _with(self, arrays: dict[str | None, Any]) -> Self:
        """This batch, with other arrays for its columns of numbers and its weights."""
        columns = self._with_values(lambda name, column: arrays[name])
        batch = type(self)(self.schema, columns, self.ids, self.index, arrays.get(None), self._metadata)
        batch._made = {name: arrays.get(name, made) for name, made in self._made.items()}
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_metadata": self.metadata}  # made now: its maker may not travel

    def __repr__(self) -> str:
        return f"RowBatch({len(self)} rows: {self.schema})"


def filled(column: Numbers) -> NDArray[Any]:
    """A column's values with NaN (of floats), 0 or False in rows that have none.

    >>> filled(Numbers(np.array([1.0, 5.0]), np.array([True, False]))).tolist()
    [1.0, nan]
    """
    values, valid = column
    if valid is None or valid.all() or not isinstance(values, np.ndarray):  # a framework got them filled
        return values
    values = values.copy()
    values[~valid] = 0
    if _has_nan(column):
        values[~valid] = np.nan
    return values


def converted(schema: Schema, columns: Columns, framework: str, **options: Any) -> dict[str, Any]:
    """Columns as plain values: a framework's arrays for numbers, lists for the others.

    Missing floats are NaN. Integers and booleans have no such value, so a column of them with missing values is a list.
    `options` are those of the adapter's `numbers`.
    """
    arrays = {
        name: filled(column)
        for name, column in _numbers_of(columns).items()
        if column.valid is None or _has_nan(column) or column.valid.all()
    }
    if framework != "numpy":
        arrays = adapter(framework).numbers(arrays, **options)
    found = {name: pylist(column) for name, column in columns.items() if name not in arrays} | arrays
    return {name: found[name] for name in schema.names}


def _numbers_of(columns: Columns) -> dict[str, Numbers]:
    return {name: column for name, column in columns.items() if isinstance(column, Numbers)}


def _has_nan(column: Numbers) -> bool:
    return column.values.dtype.kind == "f"
