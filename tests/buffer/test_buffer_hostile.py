"""What a user does to a buffer at a bad moment: Ctrl-C anywhere, threads that read while others write."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from inspect import CO_GENERATOR
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batchwright as bw
from batchwright.base.errors import SampleError, SpecError, StoreError
from batchwright.buffer.view import View
from harness import is_running, wait_for
from refusals import refused

Step = Callable[[bw.DatasetBuffer], object]


def row(number: int) -> dict[str, Any]:
    return {"n": number, "text": str(number), "a": 0, "b": 0}


def interrupted_at(moment: int, step: Step, buffer: bw.DatasetBuffer) -> bool:
    """Run `step`, with Ctrl-C after that many function calls; False where it ended before.

    Python looks for signals when a function was called, so these are the moments at which a real one arrives.
    """
    left = moment

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        code = frame.f_code
        if event in ("return", "c_return") and "batchwright" in code.co_filename and not code.co_flags & CO_GENERATOR:
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        step(buffer)
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def check(buffer: bw.DatasetBuffer) -> None:
    columns = buffer.to_pydict()
    assert columns["text"] == [str(number) for number in columns["n"]]
    assert columns["a"] == columns["b"]
    assert len(columns["n"]) == len(buffer) == len(buffer.ids)


STEPS: dict[str, tuple[dict[str, Any], Step]] = {
    "a row": ({}, lambda b: b.append(row(100))),
    "a row above max_size": ({"max_size": 6}, lambda b: b.append(row(100))),
    "a row above max_size, at random": ({"max_size": 6, "drop_strategy": "random"}, lambda b: b.append(row(100))),
    "rows and retention": ({}, lambda b: b.append([row(100), row(101)], retain_prior=0.5)),
    "rows without a value": ({}, lambda b: b.append([{**row(100), "a": None, "b": None}])),
    "two columns": ({}, lambda b: b.set(b.ids, a=np.full(len(b), 7), b=np.full(len(b), 7))),
    "a drop": ({}, lambda b: b.drop(b.ids[::2])),
}


@pytest.mark.parametrize("what", STEPS)
def test_an_interrupted_change_is_made_or_not(what: str) -> None:
    settings, step = STEPS[what]
    moment = 0
    while True:
        moment += 1 if what.startswith("a row") else 3
        buffer = bw.DatasetBuffer([row(number) for number in range(5)], **settings)
        buffer.append(row(5))
        before = buffer.to_pydict()
        was_interrupted = interrupted_at(moment, step, buffer)
        check(buffer)
        after = buffer.to_pydict()
        if after != before:  # then it is as if it had not been interrupted
            whole = bw.DatasetBuffer([row(number) for number in range(5)], **settings)
            whole.append(row(5))
            step(whole)
            assert after == whole.to_pydict()
        buffer.append(row(200))
        check(buffer)
        assert buffer[-1] == row(200)
        if not was_interrupted:
            break
    assert moment > 5


@pytest.mark.parametrize("what", ["a row above max_size, at random", "two columns"])
def test_an_interrupted_change_of_a_folder_is_the_same_when_it_is_opened_again(what: str, tmp_path: Path) -> None:
    settings, step = STEPS[what]
    for moment in range(1, 500, 5):
        path = tmp_path / str(moment)
        with bw.DatasetBuffer([row(number) for number in range(5)], path=path, **settings) as buffer:
            buffer.append(row(5))
            was_interrupted = interrupted_at(moment, step, buffer)
            try:
                buffer.append(row(200))
            except StoreError as error:
                if "interrupted" not in error.headline:
                    raise
                buffer.append(row(200))
            check(buffer)
            rows, ids = buffer.to_pydict(), buffer.ids.tolist()
        with bw.DatasetBuffer(path=path) as again:
            assert again.to_pydict() == rows
            assert again.ids.tolist() == ids
        if not was_interrupted:
            return
    raise AssertionError("it was never finished")


def test_a_fork_while_another_thread_appends_can_read_the_buffer() -> None:
    """torch's workers are such forks. The child would wait for ever for a lock that its parent's thread holds."""
    buffer = bw.DatasetBuffer([row(number) for number in range(50)], max_size=500, drop_strategy="random")
    stop = threading.Event()

    def add_rows() -> None:
        number = 50
        while not stop.is_set():
            buffer.append(row(number))
            number += 1

    thread = threading.Thread(target=add_rows)
    thread.start()
    try:
        for _ in range(5):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # forks with threads: what DataLoader does
                child = os.fork()
            if not child:
                try:
                    check(buffer)
                    os._exit(0)
                finally:
                    os._exit(1)
            assert exit_code(child) == 0
    finally:
        stop.set()
        thread.join()


def exit_code(child: int) -> int:
    try:
        wait_for("end of the child", lambda: not is_running(child))
    finally:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


def test_a_relative_path_means_the_same_folder_when_the_current_one_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with bw.DatasetBuffer([row(0)], path="mine") as buffer:
        monkeypatch.chdir(tmp_path / "other")
        buffer.append(row(1))
        buffer.commit("one")
    assert list((tmp_path / "other").iterdir()) == []
    assert len(bw.DatasetBuffer(path=tmp_path / "mine", read_only=True).at("one")) == 2


def folder_with_few_rows_left(path: Path) -> Path:
    with bw.DatasetBuffer([row(number) for number in range(20)], path=path) as buffer:
        buffer.drop([3, 7])
        buffer.commit("some")
    return path


def test_a_reader_refuses_the_journal_of_another_buffer(tmp_path: Path) -> None:
    mine, others = (folder_with_few_rows_left(tmp_path / name) for name in ("mine", "others"))
    (journal,) = mine.glob("journal-*.log")
    journal.write_bytes((others / journal.name).read_bytes())
    with refused(StoreError, file=journal):
        bw.DatasetBuffer(path=mine, read_only=True)


def test_a_damaged_list_of_rows_is_refused_with_its_file(tmp_path: Path) -> None:
    """Rows are read at the places that it names."""
    folder = folder_with_few_rows_left(tmp_path / "buffer")
    rows_left = np.delete(np.arange(20), [3, 7]).tobytes()
    (file,) = (path for path in folder.glob("blocks/*.arrow") if rows_left in path.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(rows_left) + 5 * 8 + 3] = 1  # row 6 is now far out of the block
    file.write_bytes(data)
    version = bw.DatasetBuffer(path=folder, read_only=True)
    with refused(StoreError, file=file):
        version.at("some")


def test_a_normalizer_for_dicts_is_used_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchwright.buffer.normalize._NORMALIZERS", {})
    buffer = bw.DatasetBuffer([{"n": 1}])
    bw.register_normalizer(dict)(lambda sample: {"n": sample["n"] + 100})
    buffer.append({"n": 2})
    buffer.append([{"n": 3}])
    assert buffer.to_pydict() == {"n": [1, 102, 103]}


@pytest.mark.parametrize("read", ["get_batch", "sample", "to_pydict"])
def test_a_read_sees_a_change_by_another_thread_whole_or_not_at_all(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = bw.DatasetBuffer([row(number) for number in range(5)])
    threads: list[threading.Thread] = []
    gather = View._gather

    def gather_and_be_disturbed(self: View, field: Any, *where: Any) -> Any:
        found = gather(self, field, *where)
        if field.name == "a" and not threads:  # "b" is read after this
            threads.append(
                threading.Thread(target=buffer.set, args=(np.arange(5),), kwargs={"a": [1] * 5, "b": [1] * 5})
            )
            threads[0].start()
            threads[0].join(0.2)
        return found

    monkeypatch.setattr(View, "_gather", gather_and_be_disturbed)
    found = {
        "get_batch": lambda: buffer.get_batch(range(5)).to_pydict(),
        "sample": lambda: buffer.sample(5, step=0),
        "to_pydict": buffer.to_pydict,
    }[read]()
    threads[0].join()
    assert list(found["a"]) == list(found["b"])
    assert buffer[0]["a"] == buffer[0]["b"] == 1


def test_no_samples_are_of_any_kind() -> None:
    tensors = bw.DatasetBuffer([np.zeros(3), np.ones(3)])
    assert tensors.append([]) == range(2, 2)
    tensors.append([], retain_prior=0.5, retain_prior_by="latest")
    tensors.append(np.full(3, 2.0))
    assert [array.max() for array in tensors.to_pydict()["tensor"]] == [1, 2]


def test_an_origin_that_is_half_a_character_is_refused() -> None:
    buffer = bw.DatasetBuffer([row(0)])
    with refused(SpecError, "origin=", parameter="origin"):
        buffer.append(row(1), origin="\ud800")
    assert len(buffer) == len(buffer.provenance()) == 1


def test_a_pickled_buffer_gives_no_id_twice() -> None:
    buffer = bw.DatasetBuffer([row(number) for number in range(3)])
    buffer.drop([2])
    assert pickle.loads(pickle.dumps(buffer)).append(row(3)) == buffer.append(row(3)) == range(3, 4)


def test_a_new_origin_is_not_looked_for_among_all_others() -> None:
    looks = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return str.__eq__(self, other)

    buffer = bw.DatasetBuffer([row(0)])
    for number in range(1, 201):
        buffer.append(row(number), origin=Name(f"file {number}"))
    assert looks < 2000
    assert buffer.provenance()["origin"].to_pylist() == [None, *(f"file {number}" for number in range(1, 201))]


def test_a_nested_key_that_is_half_a_character_is_refused() -> None:
    with refused(SampleError, row=0, column="meta"):
        bw.DatasetBuffer([{"meta": {"\ud800": 1}}])
