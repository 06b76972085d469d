"""A buffer in a folder: opened again it is as it was, whatever was cut off; what is damaged is not read around."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batchwright as bw
from batchwright.base.errors import BusyError, OutOfSpaceError, SpecError, StoreError
from refusals import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six rows, the last two added after a commit and a checkpoint; and a column that came later."""
    path = tmp_path / "buffer"
    with bw.DatasetBuffer(path=path, seed=3) as buffer:
        buffer.append([{"n": n, "text": f"row {n}", "obs": np.full(2, n, np.float32)} for n in range(4)])
        buffer.commit("four")
        buffer.set([1, 2], loss=[0.5, np.nan])
        buffer.checkpoint()
        buffer.append([{"n": n, "text": None, "obs": np.zeros(2, np.float32)} for n in (4, 5)], origin="late")
    return path


def opened(path: Path, **settings: Any) -> bw.DatasetBuffer:
    return bw.DatasetBuffer(path=path, **settings)


def journal_of(path: Path) -> Path:
    (found,) = path.glob("journal-*.log")
    return found


ROW = {"n": 7, "text": "seven", "obs": np.ones(2, np.float32), "loss": 0.25}

CHANGES: dict[str, Callable[[bw.DatasetBuffer], Any]] = {
    "a row": lambda buffer: buffer.append(dict(ROW)),
    "rows, and half of the others": lambda buffer: buffer.append([ROW, ROW], 0.5, "random", origin="both"),
    "columns": lambda buffer: buffer.extend({"n": [1], "text": ["x"], "obs": np.ones((1, 2), np.float32)}),
    "nothing but retention": lambda buffer: buffer.append([], 0.5, "n"),
    "an update": lambda buffer: buffer.update(-1, {"text": "other"}),
    "a new column": lambda buffer: buffer.set(buffer.ids[[0, -1]], score=["a", None]),
    "a drop": lambda buffer: buffer.drop(buffer.ids[1:3]),
    "a rollback": lambda buffer: buffer.rollback("four"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_journal_cut_at_any_byte_of_its_last_record_has_all_of_that_change_or_nothing(folder, state, change):
    journal = journal_of(folder)
    with opened(folder) as buffer:
        before, first = state(buffer), journal.stat().st_size
        change(buffer)
        after = state(buffer)
    whole = journal.read_bytes()
    assert len(whole) > first
    assert before != after
    step = 1 if len(whole) - first < 800 else 3  # one that brings a column has 1,700 bytes, mostly Arrow's schema
    for cut in range(first, len(whole), step):
        journal.write_bytes(whole[:cut])
        reader = opened(folder, read_only=True)
        assert reader.number == before["number"], cut
        if (cut - first) % 48 == 0 or cut > len(whole) - 3:
            assert state(reader) == before, cut
            with opened(folder) as writer:
                assert state(writer) == before, cut
                change(writer)
                assert writer.content_fingerprint() == after["content"]
            assert opened(folder, read_only=True).content_fingerprint() == after["content"]
    journal.write_bytes(whole)
    with opened(folder) as buffer:
        assert state(buffer) == after


@pytest.mark.parametrize("checkpoint", [False, True], ids=["from the journal", "from a checkpoint"])
def test_a_buffer_that_is_opened_again_is_as_it_was(folder, state, checkpoint):
    for change in CHANGES.values():
        with opened(folder) as buffer:
            change(buffer)
            if checkpoint:
                buffer.checkpoint()
            expected, rows = state(buffer), buffer.to_pydict()
        with opened(folder) as again:
            assert state(again) == expected
            assert str(again.to_pydict()) == str(rows)
            assert str(again.at("four").to_pydict()["n"]) == "[0, 1, 2, 3]"


def test_a_damaged_journal_is_refused_with_the_file_and_the_byte(folder, tmp_path):
    journal = journal_of(folder)
    with opened(folder) as buffer:
        begin = journal.stat().st_size
        buffer.append(dict(ROW))
        end = journal.stat().st_size
        buffer.append(dict(ROW))
    whole = journal.read_bytes()
    for at in range(begin, end, 11):
        journal.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        for settings in ({}, {"read_only": True}):
            with refused(StoreError, file=journal) as caught:
                opened(folder, **settings)
            assert begin <= caught.value.where["byte"] <= at
    saved = bw.DatasetBuffer.salvage(folder, tmp_path / "saved")
    assert saved.to_pydict()["n"] == [0, 1, 2, 3, 4, 5]
    saved.close()
    with opened(tmp_path / "saved") as again:
        assert again.append(dict(ROW)) == range(6, 7)


def test_salvage_does_not_write_into_a_buffer_that_is_there(folder, tmp_path, state):
    with opened(tmp_path / "other") as other:
        other.append({"n": 1})
        expected = state(other)
    with refused(SpecError, tmp_path / "other", parameter="to"):
        bw.DatasetBuffer.salvage(folder, tmp_path / "other")
    with opened(tmp_path / "other") as other:
        assert state(other) == expected


def test_settings_at_their_defaults_are_those_of_the_folder_and_others_replace_them(tmp_path):
    with opened(tmp_path / "b", max_size=5, drop_strategy="n", seed=4) as buffer:
        buffer.append([{"n": n} for n in range(9)])
    with opened(tmp_path / "b") as buffer:
        assert (buffer.max_size, buffer.drop_strategy, buffer.seed) == (5, "n", 4)
        assert buffer.to_pydict()["n"] == [4, 5, 6, 7, 8]
    with opened(tmp_path / "b", max_size=2) as buffer:
        assert buffer.to_pydict()["n"] == [7, 8]
    with opened(tmp_path / "b") as buffer:
        assert (buffer.max_size, buffer.drop_strategy, buffer.seed, len(buffer)) == (2, "n", 4, 2)


def test_a_version_costs_what_changed_since_the_one_before(tmp_path):
    with opened(tmp_path / "b") as buffer:
        buffer.extend({"obs": np.zeros((10_000, 16)), "loss": np.zeros(10_000)})
        buffer.commit("first")
        once = bytes_of(tmp_path / "b" / "blocks")
        buffer.commit("nothing new")
        assert bytes_of(tmp_path / "b" / "blocks") == once
        buffer.set(range(10_000), loss=np.ones(10_000))
        buffer.commit("losses")
        assert bytes_of(tmp_path / "b" / "blocks") - once < 100_000


def bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def test_files_that_only_a_forgotten_version_had_are_removed(tmp_path):
    with opened(tmp_path / "b") as buffer:
        buffer.extend({"obs": np.zeros((10_000, 16))})
        buffer.commit("large")
        buffer.append([], retain_prior=0)
        buffer.checkpoint()
        assert bytes_of(tmp_path / "b" / "blocks") > 1_000_000
        buffer.forget("large")
        assert bytes_of(tmp_path / "b" / "blocks") < 10_000


def test_a_checkpoint_does_not_name_a_file_that_was_removed(tmp_path):
    """Rows that came to a version's block after it, went, and had a file that nothing names any more."""
    with opened(tmp_path / "b") as buffer:
        buffer.append([{"n": n} for n in range(5)])
        buffer.commit("five")
        assert len(buffer.at("five")) == 5
        buffer.append([{"n": n} for n in range(5, 8)])
        buffer.checkpoint()
        buffer.append({"n": -1}, retain_prior=0)
        buffer.checkpoint()
        buffer.rollback("five")
        buffer.checkpoint()
    with opened(tmp_path / "b") as again:
        assert again.to_pydict() == {"n": [0, 1, 2, 3, 4]}


def test_the_files_of_a_column_are_put_together_in_the_order_of_their_rows(tmp_path):
    """A version's first file is met after its second, which the checkpoint has for another column."""
    with opened(tmp_path / "b") as buffer:
        buffer.append([{"n": 0}, {"n": 1}])
        buffer.checkpoint()
        buffer.set([0, 1], loss=[0.0, 1.0])
        buffer.checkpoint()
        buffer.append({"n": 2, "loss": 2.0})
        buffer.commit("losses")
        buffer.set([0, 1, 2], loss=[9.0, 9.0, 9.0])
        buffer.checkpoint()
    with opened(tmp_path / "b") as buffer:
        buffer.rollback("losses")
        buffer.checkpoint()
    with opened(tmp_path / "b") as again:
        assert again.to_pydict() == {"n": [0, 1, 2], "loss": [0.0, 1.0, 2.0]}


def test_a_long_journal_becomes_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("batchwright.buffer.durable._CHECKPOINT_BYTES", 2000)
    with opened(tmp_path / "b") as buffer:
        for n in range(200):
            buffer.append({"n": n})
        assert journal_of(tmp_path / "b").stat().st_size < 10_000
    with opened(tmp_path / "b") as buffer:
        assert buffer.to_pydict()["n"] == list(range(200))
        assert buffer.provenance()["number"].to_pylist() == list(range(1, 201))


def test_rows_know_where_they_came_from_though_others_went_between_checkpoints(tmp_path):
    with opened(tmp_path / "b") as buffer:
        for n in range(8):
            buffer.append({"n": n})
        buffer.append([], retain_prior=0.5, retain_prior_by="oldest")
        buffer.checkpoint()
        for n in range(8, 16):
            buffer.append({"n": n}, origin=f"{n}")
        buffer.checkpoint()
        expected = buffer.provenance()
    assert expected["number"].to_pylist() == [1, 2, 3, 4, *range(10, 18)]
    with opened(tmp_path / "b") as again:
        assert again.provenance() == expected


# One writer, many readers


def test_a_reader_stays_at_its_version_until_it_refreshes(folder):
    with opened(folder) as writer:
        reader = opened(folder, read_only=True)
        rows = iter(reader)
        writer.append(dict(ROW))
        assert len(reader) == 6
        assert len(reader.refresh()) == 7
        assert sum(1 for _ in rows) == 6
        writer.commit("seven")
        writer.checkpoint()
        writer.rollback("four")
        assert (len(reader), len(reader.refresh())) == (7, 4)
        assert len(reader.at("seven")) == 7


def test_a_reader_forgets_the_versions_that_the_writer_forgot(folder):
    with opened(folder) as writer:
        writer.checkpoint()
        reader = opened(folder, read_only=True)
        writer.forget("four")
        writer.commit("six")  # in the place of the other
        assert [v.name for v in reader.refresh().versions()] == ["six"]
        writer.append(dict(ROW))
        writer.rollback("six")
        assert reader.refresh().to_pydict()["n"] == [0, 1, 2, 3, 4, 5]


def test_a_reader_that_cannot_refresh_stays_at_its_version(folder, state):
    writer = opened(folder)
    reader = opened(folder, read_only=True)
    expected = state(reader)
    writer.append(dict(ROW))
    writer.checkpoint()
    writer.append(dict(ROW))
    writer.append(dict(ROW))
    writer.close()
    data = bytearray(journal_of(folder).read_bytes())
    data[-200] ^= 1
    journal_of(folder).write_bytes(data)
    with refused(StoreError, file=journal_of(folder)):
        reader.refresh()
    assert state(reader) == expected


def test_a_second_writer_is_told_the_process_of_the_first(folder):
    with opened(folder), refused(BusyError, process=f"pid {os.getpid()}", folder=folder):
        opened(folder)
    opened(folder).close()


def test_a_child_cannot_write_and_does_not_hold_the_lock_of_its_parent(folder):
    """The parent is killed, its child lives on: the folder can be opened."""
    script = f"""
import os, signal, sys, time
import numpy as np
import batchwright as bw
buffer = bw.DatasetBuffer(path={str(folder)!r})
ready, go = os.pipe()
if not os.fork():
    for write in (lambda: buffer.append({{"n": 1, "text": "", "obs": np.zeros(2, np.float32)}}),
                  lambda: buffer.set([0], n=[5]), lambda: buffer.commit("mine"), lambda: buffer.drop([1])):
        try:
            write()
            print("written", flush=True)
        except bw.BusyError as error:
            print("refused", flush=True)
    print(len(buffer), flush=True)
    os.write(go, b".")
    time.sleep(600)
    os._exit(0)
os.read(ready, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            lines = [process.stdout.readline().decode().strip() for _ in range(5)]
            assert process.wait(240) == -9
            assert lines == ["refused"] * 4 + ["6"]
            with opened(folder) as buffer:
                assert len(buffer) == 6
        finally:
            os.killpg(process.pid, 9)


# A full disk


FULL = """
import contextlib, resource, signal, sys
import numpy as np
import batchwright as bw
from batchwright.buffer import durable
sys.path.insert(0, {here!r})
from conftest import state_of
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

@contextlib.contextmanager
def full(bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

rows = {{"obs": np.ones((2000, 4)), "text": ["x" * 10] * 2000}}
row = {{"obs": np.ones(4), "text": "one"}}
buffer = bw.DatasetBuffer(path={folder!r})
buffer.extend(rows)
size = buffer._disk.folder.journal.num_bytes
calls = {{
    "append": (size + 5, lambda: buffer.append(row)),
    "append of another type": (size + 40, lambda: buffer.append([row, row], 0.5)),
    "extend": (size + 5000, lambda: buffer.extend(rows, 0.25, "latest")),
    "set": (size + 300, lambda: buffer.set(buffer.ids, loss=np.zeros(len(buffer)))),
    "commit": (1000, lambda: buffer.commit("c")),
    "checkpoint": (1000, lambda: buffer.checkpoint()),
}}
for name, (limit, call) in calls.items():
    before = state_of(buffer)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(full(limit))
            try:
                call()
            finally:
                stack.close()
        print(name, "no error")
    except bw.OutOfSpaceError as error:
        print(name, "full", state_of(buffer) == before, "remedy" if error.remedy else "")
    with bw.DatasetBuffer(path={folder!r}, read_only=True) as reader:
        assert state_of(reader) == before, name
for call in ("append", "commit", "set", "checkpoint"):
    calls[call][1]()
after = state_of(buffer)
buffer.close()
print("works after", state_of(bw.DatasetBuffer(path={folder!r})) == after)
"""


def test_a_full_disk_ends_the_call_and_the_buffer_is_as_it_was(tmp_path):
    script = FULL.format(here=str(Path(__file__).parent), folder=str(tmp_path / "b"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        *(
            f"{name} full True remedy"
            for name in ("append", "append of another type", "extend", "set", "commit", "checkpoint")
        ),
        "works after True",
    ]


def test_a_checkpoint_that_finds_no_room_does_not_end_the_call_that_it_came_with(tmp_path, monkeypatch, caplog, state):
    """The row is written down: an error would say that it is not."""
    monkeypatch.setattr("batchwright.buffer.durable._CHECKPOINT_BYTES", 500)
    with opened(tmp_path / "b") as buffer:

        def no_room(*_: Any, **__: Any) -> None:
            raise OutOfSpaceError("no space left", folder=tmp_path)

        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "batchwright"):
            patch.setattr(buffer._disk.folder, "write_checkpoint", no_room)
            for n in range(40):
                buffer.append({"n": n})
        assert "checkpoint" in caplog.text
        expected = state(buffer)
    with opened(tmp_path / "b") as again:
        assert state(again) == expected


def test_a_copy_of_the_folder_is_a_buffer_of_its_own(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    with opened(folder) as one, opened(tmp_path / "copy") as other:
        one.append(dict(ROW))
        assert (len(one), len(other)) == (7, 6)


def test_verify_names_a_block_whose_values_were_changed(tmp_path):
    with bw.DatasetBuffer({"n": np.arange(1000)}, path=tmp_path / "buffer") as buffer:
        buffer.commit("one")
        buffer.verify()
        (file,) = (tmp_path / "buffer" / "blocks").iterdir()
        data = bytearray(file.read_bytes())
        data[data.index(np.arange(500, 510).tobytes())] ^= 1
        file.write_bytes(data)
        with refused(StoreError, file.name):
            buffer.verify()


def test_verify_names_a_block_that_is_gone(tmp_path):
    with bw.DatasetBuffer({"n": np.arange(10)}, path=tmp_path / "buffer") as buffer:
        buffer.commit("one")
        (file,) = (tmp_path / "buffer" / "blocks").iterdir()
        file.unlink()
        with refused(StoreError, file.name):
            buffer.verify()


def test_rows_are_not_dropped_by_a_column_that_a_rollback_took_away(tmp_path):
    with bw.DatasetBuffer([{"n": 0}, {"n": 1}], path=tmp_path / "buffer") as buffer:
        buffer.commit("plain")
        buffer.set(buffer.ids, loss=1.0)
    with bw.DatasetBuffer(path=tmp_path / "buffer", max_size=2, drop_strategy="loss") as buffer:
        buffer.rollback("plain")
        with refused(SpecError, "drop_strategy='loss'", parameter="drop_strategy"):
            buffer.append({"n": 2})
        assert buffer.to_numpy()["n"].tolist() == [0, 1]
