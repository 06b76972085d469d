"""Bad input for buffers: one clear error each, which names the thing and the remedy, and a buffer that is as before.

One case for each line of the promise, in memory and in a folder. The one test below asserts what the error is, what it
names and advises, that nothing of the call was kept, and that the folder, opened again, says the same.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import batchwright as bw
from refusals import refused

ROW = {"label": 1, "text": "one", "obs": np.ones(3, np.float32), "meta": {"a": 1}, "loss": 0.5}


def state_of(buffer: bw.DatasetBuffer) -> dict[str, Any]:
    return {
        "rows": len(buffer),
        "content": buffer.content_fingerprint(),
        "ids": buffer.ids.tolist(),
        "number": buffer.number,
        "next id": buffer._table.next_id,
        "schema": buffer.schema,
        "versions": buffer.versions(),
        "kind": buffer.kind,
        "settings": (buffer.max_size, buffer.drop_strategy, buffer.seed),
    }


def rows(count: int) -> list[dict[str, Any]]:
    return [ROW | {"label": n, "loss": float(n), "text": None if n == 2 else f"row {n}"} for n in range(count)]


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in ROW.items() if key != name}


@dataclass
class Case:
    call: Callable[[bw.DatasetBuffer], Any]
    error: type[Exception]
    names: list[str]
    """What the error names: in its text, or among the things in `where`."""
    advises: str
    and_these: list[type[Exception]] = field(default_factory=list)
    """Built-in classes that the error is one of as well."""


def add(*samples: Any, **settings: Any) -> Callable[[bw.DatasetBuffer], Any]:
    return lambda buffer: buffer.append(samples[0] if len(samples) == 1 else list(samples), **settings)


CASES = {
    "a row without a required column": Case(
        add(ROW, without("label")), bw.SampleError, ["label", "row 1"], "label", [ValueError]
    ),
    "a column that nobody knows": Case(add(ROW | {"lable": 3}), bw.SampleError, ["lable"], "label", [ValueError]),
    "another shape": Case(
        add(ROW | {"obs": np.ones(4, np.float32)}),
        bw.SampleError,
        ["obs", "float32[3]", "float32[4]"],
        "",
        [ValueError],
    ),
    "ragged shapes in one append": Case(
        add(ROW, ROW | {"obs": np.ones(2, np.float32)}),
        bw.SampleError,
        ["obs", "row 1", "float32[3]", "float32[2]"],
        "",
    ),
    "another dtype": Case(
        add(ROW | {"obs": np.ones(3, np.float64)}), bw.SampleError, ["obs", "float32[3]", "float64[3]"], "float32"
    ),
    "text where a number is": Case(add(ROW | {"label": "one"}), bw.SampleError, ["label", "int64", "str"], ""),
    "a fraction where a whole number is": Case(add(ROW | {"label": 0.5}), bw.SampleError, ["label", "int64"], ""),
    "a whole number that is too large": Case(add(ROW | {"label": 1 << 70}), bw.SampleError, ["label"], ""),
    "a struct with one more child": Case(add(ROW | {"meta": {"a": 1, "b": 2}}), bw.SampleError, ["meta", "b"], ""),
    "kinds mixed in one append": Case(add(ROW, np.ones(3, np.float32)), bw.SampleError, ["tensor", "dict"], ""),
    "a tensor in a buffer of rows": Case(add(np.ones(3, np.float32)), bw.SampleError, ["tensor", "dict"], "buffer"),
    "None": Case(add(None), bw.SampleTypeError, ["None"], "", [TypeError]),
    "a number": Case(add(3), bw.SampleTypeError, ["int"], "", [TypeError]),
    "a text": Case(add("a text"), bw.SampleTypeError, ["str"], "", [TypeError]),
    "a bare object": Case(add(object()), bw.SampleTypeError, ["object"], "dict", [TypeError]),
    "a generator": Case(
        lambda buffer: buffer.append(row for row in rows(2)), bw.SampleTypeError, ["generator"], "list", [TypeError]
    ),
    "None in a list": Case(add(ROW, None), bw.SampleTypeError, ["None", "1"], "", [TypeError]),
    "columns of different lengths": Case(
        lambda buffer: buffer.extend({"label": [1, 2], "obs": np.ones((3, 3), np.float32)}),
        bw.SampleError,
        ["label", "obs", "2", "3"],
        "each row",
    ),
    "extend with a row": Case(lambda buffer: buffer.extend(ROW), bw.SampleTypeError, ["label"], "append"),
    "extend without a required column": Case(lambda buffer: buffer.extend({"label": [1]}), bw.SampleError, ["obs"], ""),
    "a table with another type": Case(
        lambda buffer: buffer.extend(pa.table({name: [str(value)] for name, value in ROW.items()})),
        bw.SampleError,
        ["int64", "string"],
        "",
    ),
    "a failing append with retention": Case(
        add(ROW, without("label"), retain_prior=0.25, retain_prior_by="latest"), bw.SampleError, ["label"], "label"
    ),
    "an index beyond the end": Case(lambda b: b[6], bw.RowIndexError, ["6"], "from -6 to 5", [IndexError]),
    "an index before the beginning": Case(lambda b: b[-7], bw.RowIndexError, ["-7"], "from -6 to 5", [IndexError]),
    "a batch beyond the end": Case(
        lambda b: b.get_batch([0, 99]), bw.RowIndexError, ["99"], "from -6 to 5", [IndexError]
    ),
    "an update beyond the end": Case(
        lambda b: b.update(6, {"label": 1}), bw.RowIndexError, ["6"], "from -6 to 5", [IndexError]
    ),
    "an update with an unknown column": Case(lambda b: b.update(0, {"lable": 1}), bw.SampleError, ["lable"], "label"),
    "an update with another type": Case(lambda b: b.update(0, {"label": "one"}), bw.SampleError, ["label"], ""),
    "an update of two rows": Case(lambda b: b.update(0, [ROW, ROW]), bw.SpecError, ["row"], "set"),
    "an unknown id": Case(lambda b: b.set([0, 77], loss=[1.0, 2.0]), bw.RowIndexError, ["77"], "ids", [IndexError]),
    "an unknown id to drop": Case(lambda b: b.drop([77]), bw.RowIndexError, ["77"], "ids", [IndexError]),
    "an id that was dropped": Case(lambda b: b.drop([6]), bw.RowIndexError, ["6"], "dropped", [IndexError]),
    "an id twice": Case(
        lambda b: b.set([1, 1], loss=[1.0, 2.0]), bw.SpecError, ["ids", "1"], "return_index", [ValueError]
    ),
    "a path as data": Case(lambda b: bw.DatasetBuffer("rows"), bw.SampleTypeError, ["str"], "path='rows'", [TypeError]),
    "an id to drop twice": Case(lambda b: b.drop([4, 2, 4]), bw.SpecError, ["ids", "4"], "unique", [ValueError]),
    "an index twice": Case(lambda b: b.select([3, 0, -3]), bw.SpecError, ["indices", "3"], "unique", [ValueError]),
    "values for fewer rows than ids": Case(
        lambda b: b.set([0, 1, 2], loss=[1.0, 2.0]), bw.SampleError, ["loss", "3", "2"], "", [ValueError]
    ),
    "set with another type": Case(lambda b: b.set([0], loss=["high"]), bw.SampleError, ["loss"], ""),
    "set without a column": Case(lambda b: b.set([0]), bw.SpecError, ["column"], "loss="),
    "a mask for ids": Case(lambda b: b.drop(np.ones(6, bool)), bw.SpecError, ["ids", "bool"], "flatnonzero"),
    "retain_prior that is NaN": Case(
        add(ROW, retain_prior=math.nan), bw.SpecError, ["retain_prior", "NaN"], "retain_prior=1.0", [ValueError]
    ),
    "retain_prior over 1": Case(add(ROW, retain_prior=50), bw.SpecError, ["retain_prior", "50"], "0.5", [ValueError]),
    "retain_prior as text": Case(add(ROW, retain_prior="half"), bw.SpecError, ["retain_prior", "half"], "0.5"),
    "an unknown strategy": Case(
        add(ROW, retain_prior=0.5, retain_prior_by="newest"), bw.SpecError, ["retain_prior_by", "newest"], "latest"
    ),
    "retention by a column without numbers": Case(
        add(ROW, retain_prior=0.5, retain_prior_by="text"), bw.SpecError, ["retain_prior_by", "text"], "numbers"
    ),
    "a name that is a version's already": Case(lambda b: b.commit("empty"), bw.SpecError, ["empty"], "another name"),
    "an unknown version": Case(lambda b: b.rollback("stort"), bw.SpecError, ["stort"], "'start'", [ValueError]),
    "an unknown version to read": Case(lambda b: b.at(99), bw.SpecError, ["99", "start"], "one of them"),
    "a draw by an unknown column": Case(lambda b: b.sample(2, step=0, by="los"), bw.SpecError, ["los"], "loss"),
    "rows filtered by text": Case(lambda b: b.filter("loss > 1"), bw.SpecError, ["where", "'loss > 1'"], "lambda"),
    "a mask of another length": Case(lambda b: b.filter([True, False]), bw.SpecError, ["where", "6"], "select"),
}


@pytest.fixture(params=["in memory", "in a folder"])
def buffer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Six rows with ids 0 to 5; id 6 was dropped; the versions `empty` and `start`."""
    with bw.DatasetBuffer(path=tmp_path / "b" if request.param == "in a folder" else None, seed=2) as made:
        made.commit("empty")
        made.append(rows(6))
        made.commit("start")
        made.append(dict(ROW))
        made.drop([6])
        yield made


def check_error(error: Any, case: Case) -> None:
    for also in case.and_these:
        assert isinstance(error, also)
    text = str(error)
    things = [f"{thing} {value}" for thing, value in error.where.items()]
    for name in case.names:
        assert name in text or name in things, f"{name!r} is not named in: {text}"
    assert error.remedy, "no remedy"
    assert case.advises in error.remedy, error.remedy


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input_is_one_clear_error_and_the_buffer_is_as_it_was(buffer, case):
    before = state_of(buffer)
    with pytest.raises(case.error) as caught:
        case.call(buffer)
    check_error(caught.value, case)
    assert state_of(buffer) == before
    if buffer._disk is not None:
        assert state_of(bw.DatasetBuffer(path=buffer._disk.folder.path, read_only=True)) == before
    assert buffer.append(dict(ROW)) == range(7, 8)


# A buffer that is not there yet


MAKING = {
    "max_size below 1": Case(
        lambda _: bw.DatasetBuffer(max_size=-3), bw.SpecError, ["max_size", "-3"], "", [ValueError]
    ),
    "max_size that is no number": Case(lambda _: bw.DatasetBuffer(max_size="3"), bw.SpecError, ["max_size"], ""),
    "an unknown drop strategy": Case(
        lambda _: bw.DatasetBuffer([{"n": 1}], max_size=3, drop_strategy="oldst"),
        bw.SpecError,
        ["drop_strategy", "oldst"],
        "oldest",
    ),
    "a drop strategy that is no text": Case(
        lambda _: bw.DatasetBuffer(drop_strategy=3), bw.SpecError, ["drop_strategy", "3"], "oldest"
    ),
    "a drop strategy by text": Case(
        lambda _: bw.DatasetBuffer([{"n": "a"}], max_size=3, drop_strategy="n"),
        bw.SpecError,
        ["drop_strategy"],
        "oldest",
    ),
    "a seed that is no number": Case(lambda _: bw.DatasetBuffer(seed=0.5), bw.SpecError, ["seed"], ""),
    "a schema of another library": Case(lambda _: bw.DatasetBuffer(schema={"n": int}), bw.SpecError, ["schema"], "pa."),
    "a reader of nothing": Case(lambda _: bw.DatasetBuffer(read_only=True), bw.SpecError, ["read_only", "path"], ""),
    "ragged first rows": Case(
        lambda _: bw.DatasetBuffer([{"x": np.ones(2)}, {"x": np.ones(3)}]), bw.SampleError, ["x", "row 1"], ""
    ),
    "first rows of two types": Case(
        lambda _: bw.DatasetBuffer([{"x": 1}, {"x": "1"}]), bw.SampleError, ["x", "row 1", "str"], ""
    ),
    "None where the schema says that there is none": Case(
        lambda _: bw.DatasetBuffer([{"n": None}], schema=pa.schema([pa.field("n", pa.int64(), nullable=False)])),
        bw.SampleError,
        ["n", "row 0"],
        "",
    ),
    "kinds mixed at first": Case(
        lambda _: bw.DatasetBuffer([{"x": 1}, np.ones(3)]), bw.SampleError, ["dict", "tensor"], ""
    ),
}


@pytest.mark.parametrize("case", MAKING.values(), ids=MAKING)
def test_a_buffer_that_cannot_be_is_refused_with_the_parameter(case):
    with pytest.raises(case.error) as caught:
        case.call(None)
    check_error(caught.value, case)


# Folders


def second_writer(path: Path) -> Any:
    with bw.DatasetBuffer(path=path):
        return bw.DatasetBuffer(path=path)


def with_data_again(path: Path) -> Any:
    return bw.DatasetBuffer(rows(2), path=path)


def by_text(path: Path) -> Any:
    return bw.DatasetBuffer(path=path, max_size=2, drop_strategy="text")


def by_nothing(path: Path) -> Any:
    return bw.DatasetBuffer(path=path, max_size=2, drop_strategy="los")


def with_another_schema(path: Path) -> Any:
    return bw.DatasetBuffer(path=path, schema=pa.schema([("label", pa.string())]))


def written_by_a_reader(path: Path) -> Any:
    return bw.DatasetBuffer(path=path, read_only=True).append({"no": "such row"})


def committed_by_a_reader(path: Path) -> Any:
    return bw.DatasetBuffer(path=path, read_only=True).commit("mine")


def written_after_close(path: Path) -> Any:
    buffer = bw.DatasetBuffer(path=path)
    buffer.close()
    buffer.append(dict(ROW))


def committed_after_close(path: Path) -> Any:
    buffer = bw.DatasetBuffer(path=path)
    buffer.close()
    buffer.commit("late")


FOLDERS = {
    "two writers": Case(second_writer, bw.BusyError, [f"pid {os.getpid()}"], "close"),
    "data for a folder that has rows": Case(with_data_again, bw.SpecError, ["data", "6 rows"], "append"),
    "a drop strategy by text": Case(by_text, bw.SpecError, ["drop_strategy", "text"], "numbers"),
    "an unknown drop strategy": Case(by_nothing, bw.SpecError, ["drop_strategy", "los"], "loss"),
    "another schema": Case(with_another_schema, bw.SpecError, ["schema", "string"], "schema="),
    "a reader that writes": Case(written_by_a_reader, bw.SpecError, ["read_only"], "without read_only"),
    "a reader that commits": Case(committed_by_a_reader, bw.SpecError, ["read_only"], "without read_only"),
    "a write after close": Case(written_after_close, bw.SpecError, ["closed"], "opens it again"),
    "a commit after close": Case(committed_after_close, bw.SpecError, ["closed"], "opens it again"),
}


@pytest.mark.parametrize("case", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_that_is_used_wrongly_is_as_it_was(case, tmp_path):
    with bw.DatasetBuffer(path=tmp_path / "b") as buffer:
        buffer.append(rows(6))
        before = state_of(buffer)
    with pytest.raises(case.error) as caught:
        case.call(tmp_path / "b")
    check_error(caught.value, case)
    with bw.DatasetBuffer(path=tmp_path / "b") as buffer:
        assert state_of(buffer) == before
        assert buffer.append(dict(ROW)) == range(6, 7)


def test_a_folder_with_other_things_is_refused_and_nothing_is_written(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with refused(bw.SpecError, path=tmp_path, found="thesis.tex", remedy="path="):
        bw.DatasetBuffer(path=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with refused(bw.SpecError, path=tmp_path / "thesis.tex", remedy="path="):
        bw.DatasetBuffer(path=tmp_path / "thesis.tex")


def test_a_reader_of_a_folder_that_is_not_there_makes_none(tmp_path):
    with refused(bw.StoreError, folder=tmp_path / "b", remedy="DatasetBuffer(path=...)"):
        bw.DatasetBuffer(path=tmp_path / "b", read_only=True)
    assert not (tmp_path / "b").exists()


def test_a_corrupt_journal_is_refused_with_the_file_and_the_byte_and_is_not_written_to(tmp_path):
    with bw.DatasetBuffer(path=tmp_path / "b") as buffer:
        for row in rows(6):
            buffer.append(row)
    (journal,) = (tmp_path / "b").glob("journal-*")
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 0xFF
    journal.write_bytes(data)
    for settings in ({}, {"read_only": True}):
        with pytest.raises(bw.StoreError) as caught:
            bw.DatasetBuffer(path=tmp_path / "b", **settings)
        assert Path(caught.value.where["file"]) == journal
        assert 0 < caught.value.where["byte"] <= len(data) // 2
        assert "salvage" in caught.value.remedy
    assert journal.read_bytes() == data
    saved = bw.DatasetBuffer.salvage(tmp_path / "b", tmp_path / "saved")
    assert 0 < len(saved) < 6
    assert saved.to_pydict()["label"] == list(range(len(saved)))
    saved.close()
