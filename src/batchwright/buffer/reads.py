"""Reads of a buffer, now or at a version: rows, batches, draws, conversions, provenance."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.base.errors import BatchwrightError, SpecError
from batchwright.base.words import counted
from batchwright.buffer.arrow import as_table, equal_rows, pylist, to_dataset
from batchwright.buffer.batch import RowBatch, converted
from batchwright.buffer.contents import Contents
from batchwright.buffer.normalize import normalize
from batchwright.buffer.retain import BufferSettings, check_by
from batchwright.buffer.sample import Priorities, draw, weights
from batchwright.buffer.schema import Numbers, Row
from batchwright.buffer.values import rows_of, rows_to_columns
from batchwright.buffer.view import View, refuse_twice
from batchwright.typing import Array, Framework

if TYPE_CHECKING:
    from batchwright.batches.settings import Batching, Scope, Shuffle
    from batchwright.buffer.buffer import DatasetBuffer
    from batchwright.loaders.buffer_rows import RowDataLoader

__all__ = ["Reads"]

_ROWS_AT_ONCE = 1024


class Reads(ABC):
    """Rows of a buffer, to read."""

    _lock: AbstractContextManager[Any] = nullcontext()
    """Held while rows are changed in place, and by reads that copy rows: a row is from before a `set`, or after it."""

    @property
    @abstractmethod
    def kind(self) -> str | None:
        """The kind of samples: "dict", "tensor" or "image". None before the first sample."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """The seed of draws."""

    @abstractmethod
    def _look(self) -> View:
        """The current rows, for a read that copies them."""

    def _hold(self) -> View:
        """The rows, to keep: later changes to the buffer do not affect them."""
        with self._lock:
            return self._look().share()

    # Content

    def __len__(self) -> int:
        return len(self._look())

    @property
    def number(self) -> int:
        """The journal number: how many changes there were."""
        return self._look().number

    @property
    def ids(self) -> NDArray[np.int64]:
        """The ids of the rows. An id never changes."""
        return self._look().ids.copy()

    def index_of(self, ids: Array) -> NDArray[np.int64]:
        """The row numbers that these ids have now: `buffer[int(buffer.index_of(7)[0])]`."""
        return self._look().index_of(ids)

    @property
    def schema(self) -> pa.Schema:
        """The columns, as Arrow has them: arrays of one shape are `fixed_shape_tensor`."""
        return self._look().schema.arrow

    @property
    def column_names(self) -> list[str]:
        return self._look().schema.names

    def provenance(self, indices: Array | None = None, *, ids: Array | None = None) -> pa.Table:
        """The id of each row, and the journal number, time and origin of its append. For all rows, or those of some
        `indices` or `ids`."""
        view = self._look()
        if ids is not None:
            return view.provenance(view.index_of(ids))
        if indices is not None:
            return view.provenance(view.checked(indices))
        return view.provenance(np.arange(len(view)))

    def content_fingerprint(self) -> str:
        """Names the rows: equal rows give the same, however they came."""
        with self._lock:
            return self._look().content_fingerprint()

    # Rows

    def __getitem__(self, index: Any) -> Any:
        """A row as a dict; a slice is a table."""
        with self._lock:
            view = self._look()
            if isinstance(index, slice):
                return _table(view, np.arange(*index.indices(len(view))))
            try:
                wanted = operator.index(index)
            except TypeError:
                raise TypeError(f"a row is found by its number, got {index!r}: buffer[0], buffer[-1]") from None
            return rows_of(view.schema, view.columns_at(view.checked(wanted)))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """Return some rows as dicts, with one gather. torch's DataLoader calls it."""
        with self._lock:
            view = self._look()
            return rows_of(view.schema, view.columns_at(view.checked(indices)))

    def __iter__(self) -> Iterator[pa.Table]:
        """Yield one-row tables of the version at the start of the iteration."""
        view = self._hold()

        def rows() -> Iterator[pa.Table]:
            for index in view.pieces(_ROWS_AT_ONCE):
                table = _table(view, index)
                yield from (table.slice(row, 1) for row in range(table.num_rows))

        return rows()

    def __contains__(self, sample: Any) -> bool:
        """Whether some row equals this one. A column that it lacks is null."""
        with self._lock:
            view = self._look()
            try:
                found = normalize(sample)
                if found.kind != self.kind or len(found.rows) != 1 or not len(view):
                    return False
                one, schema = rows_to_columns(found.rows, view.schema)
            except BatchwrightError:
                return False
            if schema != view.schema:
                return False
            equal = np.ones(len(view), bool)
            for field in schema:
                equal &= equal_rows(view.column(field.name), one[field.name])
            return bool(equal.any())

    def get_batch(self, indices: Array) -> pa.Table:
        """The rows at `indices` as a table, in this order, with one gather. Negative numbers count from the end."""
        with self._lock:
            view = self._look()
            return _table(view, view.checked(indices))

    def select(self, indices: Array) -> DatasetBuffer:
        """A buffer in memory with the rows at `indices`, in this order. Both share them while neither changes them."""
        from batchwright.buffer.buffer import buffer_of

        view = self._hold()
        index = view.checked(indices)
        refuse_twice(index, "indices")
        contents = Contents.of(view, self.kind, BufferSettings(seed=self.seed))
        contents.select(view, index)
        return buffer_of(contents)

    def filter(self, where: Callable[[Row], object] | Array | pa.compute.Expression) -> DatasetBuffer:
        """A buffer with the rows for which `where(row)` is true; or a mask of booleans, or an Arrow expression."""
        view = self._hold()
        if isinstance(where, pa.compute.Expression):
            return self.select(_matching(view, where))
        if not callable(where):
            mask = np.asarray(where)
            if mask.dtype != bool or mask.shape != (len(view),):
                got = f"{mask.dtype} of shape {list(mask.shape)}" if mask.ndim else repr(where)
                what = f"where= is a function of a row, an Arrow expression, or {len(view):,} booleans; got {got}"
                remedy = "buffer.filter(lambda row: row['loss'] > 1), or buffer.select(indices)"
                raise SpecError(what, parameter="where", remedy=remedy)
            return self.select(np.flatnonzero(mask))
        return self.select(_passing(view, where))

    # Draws

    def sample(
        self,
        n: int,
        *,
        step: int,
        by: str = "uniform",
        power: float = 1.0,
        beta: float = 1.0,
        half_life: float | None = None,
        replace: bool = True,
        seed: int | None = None,
    ) -> RowBatch:
        """n rows: a function of (journal number, seed, step) alone.

        by="uniform", "recent" (a row half as often every `half_life` rows of age), or a column of priorities: then a
        row is drawn in proportion to its value ** `power`, and never if that is 0 or null. A row may come twice,
        unless `replace=False`. `batch.weights` are (rows * probability) ** -beta, the largest
        of them 1. Weight a loss with them to undo the choice.
        """
        with self._lock:
            view = self._look()
            if by != "uniform":
                check_by(by, view.schema.numeric, view.schema.not_numeric, parameter="by")
            priorities = None
            if by not in ("uniform", "recent"):
                priorities = self._priorities(view, by, power)
            drawn = draw(
                len(view),
                n,
                seed=self.seed if seed is None else seed,
                number=view.number,
                step=step,
                by=by,
                priorities=priorities,
                half_life=half_life,
                replace=replace,
            )
            weighed = np.ones(n) if by == "uniform" else weights(drawn.probability, beta)
            return RowBatch(view.schema, *view.rows_at(drawn.index), drawn.index, weighed)

    _sums: tuple[Any, Priorities] | None = None

    def _priorities(self, view: View, by: str, power: float) -> Priorities:
        key = (view.number, by, power)
        if self._sums is None or self._sums[0] != key:
            column = view.column(by)
            assert isinstance(column, Numbers)
            self._sums = key, Priorities(column.values, column.valid, power, column=by)
        return self._sums[1]

    def loader(
        self,
        batch_size: int | Batching = 8,
        seed: int = 0,
        *,
        columns: Sequence[str] | None = None,
        shuffle: bool | Scope | Shuffle = True,
        epochs: int | None = 1,
        rank: int | None = None,
        world_size: int | None = None,
        framework: Framework = "numpy",
    ) -> RowDataLoader:
        """Batches of `batch_size` rows over the current rows, shuffled by `seed`. Resume is instant, and the number of
        ranks may change.

        With `columns` batches have only these, and a saved state fits as long as these are unchanged. Losses that are
        written back in mid-epoch do not matter then. `shuffle` is "global" or "none"; `epochs=None` never ends.
        `rank` and `world_size` default to the launcher's. Batches are arrays of `framework`. Every row
        comes in each epoch: its last batch is short, unless `Batching(epoch_end=)` says otherwise.
        """
        from batchwright.loaders.buffer_rows import RowDataLoader

        view = self._hold()
        if columns is not None:
            view = view.only(columns)
        return RowDataLoader(
            view,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            epochs=epochs,
            rank=rank,
            world_size=world_size,
            framework=framework,
        )

    # Conversions

    def to_table(self) -> pa.Table:
        """All rows as an Arrow table: over the same memory if they are in one block."""
        view = self._hold()
        return as_table(view.schema, view.columns())

    def to_pydict(self) -> dict[str, list[Any]]:
        """All rows as lists, by column. An array is an array in its list."""
        with self._lock:
            view = self._look()
            columns = view.columns_at(np.arange(len(view)))
            return {field.name: pylist(columns[field.name]) for field in view.schema}

    def to_numpy(self) -> dict[str, Any]:
        """An array for each column of numbers (a view, to read, where rows lie in one run), a list for the others."""
        return self._converted("numpy")

    def to_torch(self) -> dict[str, Any]:
        """A tensor for each column of numbers, a list for the others.

        If rows are contiguous in memory, a tensor shares the buffer's own memory. Write into a `clone()` of it.
        """
        return self._converted("torch", share=True)

    def to_jax(self) -> dict[str, Any]:
        """A JAX array for each column of numbers, a list for the others."""
        return self._converted("jax")

    def to_mlx(self) -> dict[str, Any]:
        """An MLX array for each column of numbers, a list for the others."""
        return self._converted("mlx")

    def _converted(self, framework: str, **options: Any) -> dict[str, Any]:
        view = self._hold()
        return converted(view.schema, view.columns(), framework, **options)

    def to_hf_dataset(self) -> Any:
        """A `datasets.Dataset` of all rows."""
        return to_dataset(self.to_table())

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.to_table().__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        view = self._look()
        return f"{type(self).__name__}({counted(len(view), 'row')}: {str(view.schema) or 'no columns yet'})"


class BufferVersion(Reads):
    """A buffer as it was, to read; `buffer.rollback(version)` goes back to it."""

    def __init__(self, view: View, seed: int, kind: str | None) -> None:
        self._view, self._seed, self._kind = view.share(), seed, kind

    @property
    def kind(self) -> str | None:
        return self._kind

    @property
    def seed(self) -> int:
        """The buffer's seed of draws."""
        return self._seed

    def _look(self) -> View:
        return self._view


def _table(view: View, index: NDArray[np.int64]) -> pa.Table:
    return as_table(view.schema, view.columns_at(index))


def _matching(view: View, where: Any) -> NDArray[np.int64]:
    """The rows for which an Arrow expression is true."""
    found = [np.empty(0, np.int64)]
    for index in view.pieces(16 * _ROWS_AT_ONCE):
        table = _table(view, index).append_column("", pa.array(index))
        found.append(table.filter(where).column("").to_numpy())
    return np.concatenate(found)


def _passing(view: View, where: Callable[[Row], Any]) -> NDArray[np.int64]:
    """The rows for which a function is true."""
    passing: list[int] = []
    for index in view.pieces(_ROWS_AT_ONCE):
        rows = rows_of(view.schema, view.columns_at(index))
        passing += [number for number, row in zip(index.tolist(), rows, strict=True) if where(row)]
    return np.array(passing, np.int64)
