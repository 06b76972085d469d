"""A buffer is a list of (id, row): after any sequence of calls both say the same, in memory, on disk, opened again."""

from __future__ import annotations

import math
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import batchwright as bw
from batchwright.buffer import blocks, durable
from batchwright.buffer.retain import drop, keep

Row = dict[str, Any]

FIRST = {"n": 0, "obs": np.zeros(3, np.float32), "text": None, "meta": {"a": 0, "b": None}, "later": None}
"""Says which columns there are: `text` and `later` are optional, and nobody knows yet what `later` is."""
OPTIONAL = ("text", "later", "score")


def plain(row: Row) -> Row:
    """A row that == compares: arrays as their type and values, NaN as a word."""
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    return "NaN" if isinstance(value, float) and value != value else value


class Model:
    """A buffer as a list, written without a look at the other one."""

    def __init__(self, max_size: int | None = None, drop_strategy: str = "oldest", seed: int = 0) -> None:
        self.max_size, self.drop_strategy, self.seed = max_size, drop_strategy, seed
        self.rows: list[tuple[int, Row]] = []
        self.columns: list[str] = []
        self.came: dict[int, tuple[int, str | None]] = {}
        """Number and origin of the append that a row came with."""
        self.next_id = self.number = 0
        self.versions: list[tuple[str, int, list[tuple[int, Row]], list[str]]] = []

    def copy(self, rows: list[tuple[int, Row]], **settings: Any) -> Model:
        made = Model(**({"seed": self.seed} | settings))
        made.rows, made.columns, made.came = list(rows), list(self.columns), dict(self.came)
        return made

    def plain(self) -> list[Row]:
        return [plain(row) for _, row in self.rows]

    @property
    def ids(self) -> list[int]:
        return [number for number, _ in self.rows]

    def add(self, new: list[Row], retain: float, by: str, origin: str | None = None) -> range:
        kept = max(math.floor(len(self.rows) * retain + 1e-9), 0)
        if not new and kept == len(self.rows):
            return range(self.next_id, self.next_id)
        self.number += 1
        if kept < len(self.rows):
            self.rows = [self.rows[n] for n in self._kept(kept, by)]
        for row in new:
            self.columns += [name for name in row if name not in self.columns]
        for row in new:
            self.rows.append((self.next_id, {name: row.get(name) for name in self.columns}))
            self.came[self.next_id] = self.number, origin
            self.next_id += 1
        self.cut()
        return range(self.next_id - len(new), self.next_id)

    def cut(self) -> None:
        over = 0 if self.max_size is None else len(self.rows) - self.max_size
        if over > 0:
            gone = set(self._gone(over))
            self.rows = [row for n, row in enumerate(self.rows) if n not in gone]

    def _kept(self, count: int, by: str) -> list[int]:
        n = len(self.rows)
        if by == "latest":
            return list(range(n - count, n))
        if by == "oldest":
            return list(range(count))
        if by == "random":  # which ones, tests of its own pin; here, that the seed and the number decide
            return np.arange(n)[keep(n, count, by, seed=self.seed, number=self.number)].tolist()
        return sorted(self._to_go(by.removeprefix("-"), largest=not by.startswith("-"))[n - count :])

    def _gone(self, count: int) -> list[int]:
        by = self.drop_strategy
        if by == "oldest":
            return list(range(count))
        if by == "random":
            n = len(self.rows)
            return np.arange(n)[drop(n, count, by, seed=self.seed, number=self.number)].tolist()
        return self._to_go(by.removeprefix("-"), largest=by.startswith("-"))[:count]

    def _to_go(self, column: str, *, largest: bool) -> list[int]:
        """Rows in the order in which they go: those without a value, then by value; of equal ones the older."""

        def rank(n: int) -> tuple[bool, float]:
            value = self.rows[n][1].get(column)
            if value is None or value != value:
                return False, 0.0
            return True, -value if largest else value

        return sorted(range(len(self.rows)), key=rank)

    def set(self, ids: list[int], values: dict[str, list[Any]]) -> None:
        if not ids:
            return
        self.number += 1
        self.columns += [name for name in values if name not in self.columns]
        new = {number: {name: column[n] for name, column in values.items()} for n, number in enumerate(ids)}
        self.rows = [(number, dict.fromkeys(self.columns) | row | new.get(number, {})) for number, row in self.rows]

    def drop(self, ids: list[int]) -> None:
        if ids:
            self.number += 1
            self.rows = [pair for pair in self.rows if pair[0] not in ids]

    def commit(self, name: str) -> None:
        self.versions.append((name, self.number, list(self.rows), list(self.columns)))

    def rollback(self, version: int) -> None:
        self.number += 1
        _, _, rows, columns = self.versions[version]
        self.rows, self.columns = list(rows), list(columns)


def diff(old: list[tuple[int, Row]], new: list[tuple[int, Row]]) -> tuple[list[int], list[int], list[int]]:
    before, after = ({number: plain(row) for number, row in rows} for rows in (old, new))

    def known(row: Row) -> Row:
        return {name: value for name, value in row.items() if value is not None}

    return (
        sorted(after.keys() - before.keys()),
        sorted(before.keys() - after.keys()),
        sorted(n for n in after.keys() & before.keys() if known(before[n]) != known(after[n])),
    )


numbers = st.integers(-3, 3)
floats = st.one_of(st.sampled_from([0.0, 1.5, -2.0, math.nan]))
values_of: dict[str, st.SearchStrategy[Any]] = {
    "n": numbers,
    "obs": st.lists(numbers, min_size=3, max_size=3).map(lambda v: np.array(v, np.float32)),
    "text": st.one_of(st.none(), st.sampled_from(["", "a", "né", "long " * 9])),
    "meta": st.fixed_dictionaries({"a": numbers, "b": st.one_of(st.none(), st.sampled_from(["x", "y"]))}),
    "later": st.one_of(st.none(), floats),
    "score": st.one_of(st.none(), floats),
}


def arrays_of(values: dict[str, list[Any]]) -> dict[str, Any]:
    """Columns as somebody has them: arrays where no value is missing."""
    return {
        name: np.array(column, np.float32 if name == "obs" else None)
        if name in ("n", "obs") or (name in ("later", "score") and None not in column)
        else column
        for name, column in values.items()
    }


class BufferAndList(RuleBasedStateMachine):
    """Some buffers, each with its list: the first on disk or in memory; others were selected, filtered or pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.folder = Path(tempfile.mkdtemp(prefix="buffer-model-"))
        self.pairs: list[tuple[bw.DatasetBuffer, Model]] = []
        self.held: list[tuple[Any, Model]] = []
        self.iterators: list[tuple[Iterator[pa.Table], list[Row]]] = []
        self.next_name = 0
        self.path: Path | None = None
        self.reader: bw.DatasetBuffer | None = None

    @initialize(
        on_disk=st.booleans(),
        small_blocks=st.booleans(),
        many_checkpoints=st.booleans(),
        max_size=st.sampled_from([None, None, 3, 9]),
        drop_strategy=st.sampled_from(["oldest", "random", "n", "-n"]),
        seed=st.integers(0, 3),
    )
    def begin(
        self,
        on_disk: bool,
        small_blocks: bool,
        many_checkpoints: bool,
        max_size: int | None,
        drop_strategy: str,
        seed: int,
    ) -> None:
        if many_checkpoints:
            self.patch.setattr(durable, "_CHECKPOINT_RECORDS", 3)
        if small_blocks:  # so that a few rows are many blocks and pieces
            for name, value in (("_SMALLEST_ROWS", 2), ("_LARGEST_ROWS", 4), ("_PENDING_ROWS", 3), ("_FAN", 2)):
                self.patch.setattr(blocks, name, value)
        given = {"max_size": max_size, "drop_strategy": drop_strategy, "seed": seed}
        self.path = self.folder / "buffer" if on_disk else None
        buffer, model = bw.DatasetBuffer(path=self.path, **given), Model(**given)
        self.pairs.append((buffer, model))
        assert buffer.append(dict(FIRST)) == model.add([FIRST], 1.0, "random")

    def teardown(self) -> None:
        self.pairs[0][0].close() if self.pairs else None
        self.patch.undo()
        shutil.rmtree(self.folder, ignore_errors=True)

    # What rules draw

    def pair(self, data: st.DataObject) -> tuple[bw.DatasetBuffer, Model]:
        return self.pairs[data.draw(st.integers(0, len(self.pairs) - 1), label="which buffer")]

    def row(self, data: st.DataObject, model: Model) -> Row:
        row = {name: data.draw(values_of[name], label=name) for name in model.columns}
        for name in OPTIONAL:
            if row.get(name) is None and data.draw(st.booleans(), label=f"{name} left out"):
                row.pop(name, None)
        return row

    def some_ids(self, data: st.DataObject, model: Model) -> list[int]:
        chosen = data.draw(st.lists(st.integers(0, max(len(model.rows) - 1, 0)), unique=True, max_size=4), label="rows")
        return [model.rows[n][0] for n in chosen] if model.rows else []

    def by(self, data: st.DataObject, model: Model, new: list[Row]) -> str:
        known = [name for name in ("later", "score") if name in model.columns and any(row.get(name) for row in new)]
        columns = ["n", *known]
        return data.draw(
            st.sampled_from(["latest", "oldest", "random", *columns, *(f"-{name}" for name in columns)]), label="by"
        )

    # Changes

    @rule(data=st.data(), retain=st.sampled_from([1.0, 1.0, 1.0, 0.8, 0.5, 0.3, 0, -1]))
    def append_one(self, data: st.DataObject, retain: float) -> None:
        buffer, model = self.pair(data)
        row = self.row(data, model)
        by = self.by(data, model, [row])
        origin = data.draw(st.sampled_from([None, "a", "b"]), label="origin")
        assert buffer.append(dict(row), retain, by, origin=origin) == model.add([row], retain, by, origin)

    @rule(data=st.data(), count=st.integers(1, 6))
    def append_one_by_one(self, data: st.DataObject, count: int) -> None:
        buffer, model = self.pair(data)
        for _ in range(count):
            row = {name: data.draw(values_of[name]) for name in model.columns}
            assert buffer.append(dict(row)) == model.add([row], 1.0, "random")

    @rule(data=st.data(), count=st.integers(0, 7), retain=st.sampled_from([1.0, 1.0, 0.7, 0.2, 0.0]))
    def append_many(self, data: st.DataObject, count: int, retain: float) -> None:
        buffer, model = self.pair(data)
        rows = [self.row(data, model) for _ in range(count)]
        by = self.by(data, model, rows)
        assert buffer.append([dict(row) for row in rows], retain, by) == model.add(rows, retain, by)

    @rule(data=st.data(), count=st.integers(1, 7), retain=st.sampled_from([1.0, 1.0, 0.5]))
    def extend(self, data: st.DataObject, count: int, retain: float) -> None:
        buffer, model = self.pair(data)
        values = {name: [data.draw(values_of[name]) for _ in range(count)] for name in model.columns}
        rows = [{name: column[n] for name, column in values.items()} for n in range(count)]
        by = self.by(data, model, rows)
        for name in OPTIONAL:
            if name in values and values[name] == [None] * count and data.draw(st.booleans()):
                del values[name]
        assert buffer.extend(arrays_of(values), retain, by) == model.add(rows, retain, by)

    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        buffer, model = self.pair(data)
        if not model.rows:
            return
        at = data.draw(st.integers(-len(model.rows), len(model.rows) - 1))
        names = data.draw(st.lists(st.sampled_from(model.columns), min_size=1, unique=True))
        row = {name: data.draw(values_of[name]) for name in names}
        buffer.update(at, dict(row))
        model.set([model.rows[at][0]], {name: [value] for name, value in row.items()})

    @rule(data=st.data(), names=st.lists(st.sampled_from(list(values_of)), min_size=1, max_size=3, unique=True))
    def set(self, data: st.DataObject, names: list[str]) -> None:
        """Of columns that are there, and of `score`, which is not at first."""
        buffer, model = self.pair(data)
        ids = self.some_ids(data, model)
        values = {name: [data.draw(values_of[name]) for _ in ids] for name in names}
        if "score" in values and all(value is None for value in values["score"]):
            values["score"] = [0.5 for _ in ids]
        buffer.set(ids, **arrays_of(values)) if ids else buffer.set([], n=np.zeros(0, np.int64))
        model.set(ids, values)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        buffer, model = self.pair(data)
        ids = self.some_ids(data, model)
        buffer.drop(ids)
        model.drop(ids)

    # Versions

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        buffer, model = self.pair(data)
        name = f"version {self.next_name}"
        self.next_name += 1
        info = buffer.commit(name)
        assert (info.name, info.number, info.rows) == (name, model.number, len(model.rows))
        model.commit(name)

    @rule(data=st.data())
    def at(self, data: st.DataObject) -> None:
        buffer, model = self.pair(data)
        if model.versions:
            name, number, rows, _ = data.draw(st.sampled_from(model.versions))
            version = buffer.at(name)
            assert version.number == number
            same(version, model.copy(rows))

    @rule(data=st.data())
    def diff(self, data: st.DataObject) -> None:
        buffer, model = self.pair(data)
        if model.versions:
            older = data.draw(st.sampled_from(model.versions))
            newer = data.draw(st.sampled_from([*model.versions, None]))
            found = buffer.diff(older[0], None if newer is None else newer[0])
            expected = diff(older[2], model.rows if newer is None else newer[2])
            assert (sorted(found.added), sorted(found.removed), sorted(found.changed)) == expected

    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        buffer, model = self.pair(data)
        if model.versions:
            at = data.draw(st.integers(0, len(model.versions) - 1))
            buffer.rollback(model.versions[at][0])
            model.rollback(at)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        buffer, model = self.pair(data)
        if model.versions:
            at = data.draw(st.integers(0, len(model.versions) - 1))
            buffer.forget(model.versions.pop(at)[0])

    # Reading, and buffers made of this one

    @rule(data=st.data())
    def get_batch(self, data: st.DataObject) -> None:
        buffer, model = self.pair(data)
        count = len(model.rows)
        index = data.draw(st.lists(st.integers(-count, count - 1), max_size=9)) if count else []
        expected = [plain(model.rows[n][1]) for n in index]
        assert rows_of_table(buffer.get_batch(index)) == expected
        assert [plain(row) for row in buffer.__getitems__(index)] == expected

    @rule(data=st.data(), step=st.integers(0, 5), by=st.sampled_from(["uniform", "recent"]))
    def sample(self, data: st.DataObject, step: int, by: str) -> None:
        buffer, model = self.pair(data)
        if model.rows:
            drawn, again = (buffer.sample(5, step=step, by=by) for _ in range(2))
            assert drawn.ids.tolist() == again.ids.tolist() == [model.rows[n][0] for n in drawn.index]
            for name in ("n", "obs"):
                assert drawn[name].tolist() == [np.asarray(model.rows[n][1][name]).tolist() for n in drawn.index]

    @precondition(lambda self: len(self.pairs) < 4)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        buffer, model = self.pair(data)
        count = len(model.rows)
        index = data.draw(st.lists(st.integers(0, count - 1), unique=True)) if count else []
        if data.draw(st.booleans()):
            index.sort()
        self.take(buffer.select(index), model.copy([model.rows[n] for n in index]))

    @precondition(lambda self: len(self.pairs) < 4)
    @rule(data=st.data(), least=numbers, how=st.sampled_from(["function", "mask", "expression"]))
    def filter(self, data: st.DataObject, least: int, how: str) -> None:
        buffer, model = self.pair(data)
        where: Any = lambda row: row["n"] >= least
        if how == "mask":
            where = np.array([row["n"] >= least for _, row in model.rows], bool)
        if how == "expression":
            where = pa.compute.field("n") >= least
        self.take(buffer.filter(where), model.copy([pair for pair in model.rows if pair[1]["n"] >= least]))

    @precondition(lambda self: len(self.pairs) < 4)
    @rule(data=st.data())
    def pickled(self, data: st.DataObject) -> None:
        buffer, model = self.pair(data)
        given = {"max_size": model.max_size, "drop_strategy": model.drop_strategy}
        self.take(pickle.loads(pickle.dumps(buffer)), model.copy(model.rows, **given))

    def take(self, buffer: bw.DatasetBuffer, model: Model) -> None:
        model.number, model.next_id = buffer.number, buffer._table.next_id
        assert model.next_id > max(model.ids, default=-1)
        self.pairs.append((buffer, model))

    @precondition(lambda self: len(self.pairs) > 1)
    @rule()
    def let_go(self) -> None:
        self.pairs.pop()

    @precondition(lambda self: len(self.held) < 3)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """Whoever reads goes on with the rows there were."""
        buffer, model = self.pair(data)
        self.held.append((buffer.snapshot(), model.copy(model.rows)))
        self.iterators.append((iter(buffer), model.plain()))
        self.numpy = buffer.to_numpy(), model.plain()

    @precondition(lambda self: self.iterators)
    @rule(count=st.integers(1, 4))
    def go_on_reading(self, count: int) -> None:
        rows, expected = self.iterators[0]
        for _ in range(count):
            found = next(rows, None)
            if found is None:
                assert not expected
                self.iterators.pop(0)
                return
            assert rows_of_table(found) == [expected.pop(0)]

    # On disk

    @precondition(lambda self: self.path)
    @rule()
    def close_and_open(self) -> None:
        buffer, model = self.pairs[0]
        buffer.close()
        self.pairs[0] = bw.DatasetBuffer(path=self.path), model
        assert [info.name for info in self.pairs[0][0].versions()] == [version[0] for version in model.versions]

    @precondition(lambda self: self.path)
    @rule()
    def checkpoint(self) -> None:
        buffer = self.pairs[0][0]
        buffer.checkpoint()

    @precondition(lambda self: self.path)
    @rule()
    def read_beside(self) -> None:
        if self.reader is None:
            self.reader = bw.DatasetBuffer(path=self.path, read_only=True)
        self.reader.refresh()
        buffer, model = self.pairs[0]
        same(self.reader, model)
        assert self.reader.versions() == buffer.versions()
        assert self.reader.number == model.number
        for name, _, rows, _ in model.versions:
            same(self.reader.at(name), model.copy(rows))

    @invariant()
    def each_buffer_is_its_list(self) -> None:
        for buffer, model in self.pairs:
            same(buffer, model)
            assert buffer.number == model.number
            assert buffer._table.next_id == model.next_id
        for version, model in self.held:
            same(version, model)
        if hasattr(self, "numpy"):
            arrays, rows = self.numpy
            assert arrays["n"].tolist() == [row["n"] for row in rows]
            assert arrays["obs"].tolist() == [row["obs"][1] for row in rows]


def rows_of_table(table: pa.Table) -> list[Row]:
    columns = {}
    for name in table.column_names:
        column = table.column(name)
        if name == "obs":
            values = column.combine_chunks()
            values = values.chunk(0) if isinstance(values, pa.ChunkedArray) else values
            columns[name] = list(values.to_numpy_ndarray()) if len(values) else []
        else:
            columns[name] = column.to_pylist()
    return [plain(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def same(buffer: Any, model: Model) -> None:
    expected = model.plain()
    assert len(buffer) == len(expected)
    assert buffer.ids.tolist() == model.ids
    came = buffer.provenance()
    assert list(zip(came["number"].to_pylist(), came["origin"].to_pylist(), strict=True)) == [
        model.came[number] for number in model.ids
    ]
    columns = buffer.to_pydict()
    assert [plain(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)] == expected
    if expected:
        assert plain(buffer[0]) == expected[0]
        assert plain(buffer[-1]) == expected[-1]
        assert rows_of_table(buffer.to_table()) == expected


BufferAndList.TestCase.settings = settings(max_examples=20, stateful_step_count=30)
TestABufferIsAList = BufferAndList.TestCase
