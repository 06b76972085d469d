"""Files appear whole or not at all; one writer at a time; names stay inside their folder."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import batchwright as bw
from batchwright.base.files import (
    exclusive,
    inside,
    is_in_use,
    is_part,
    out_of_space_at,
    part_name,
    shared,
    unused,
    write_whole,
)
from harness import stand_still
from refusals import refused


def test_a_file_is_written_whole_and_nothing_else_is_left(tmp_path):
    write_whole(tmp_path / "a", b"one")
    write_whole(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["a"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    write_whole(tmp_path / "a", b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_reader_never_sees_a_part(tmp_path):
    write_whole(tmp_path / "a", b"0" * 100_000)
    stop = threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            number += 1
            write_whole(tmp_path / "a", str(number % 10).encode() * 100_000)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            data = (tmp_path / "a").read_bytes()
            assert len(data) == 100_000
            assert len(set(data)) == 1
    finally:
        stop.set()
        writer.join()


def test_temporary_names_are_hidden_unique_and_known(tmp_path):
    names = [part_name(tmp_path / "a").name for _ in range(3)]
    assert len(set(names)) == 3
    assert all(name.startswith(".") and is_part(name) for name in names)
    assert not is_part("a.arrow")
    assert not is_part(".lock")


def hold_exclusive(path: Path) -> None:
    with exclusive(path, doing="baking into"):
        stand_still(held=True)


def hold_shared(path: Path) -> None:
    descriptor = shared(path)
    stand_still(held=descriptor >= 0)


@pytest.fixture
def hold(processes):
    """hold(job, path): another process, "other", that holds a lock until it is killed. Its id."""

    def start(job: Callable[[Path], None], path: Path) -> int:
        processes.start("other", job, path)
        processes.wait_until_said("other", held=True)
        return processes.pid("other")

    return start


def test_a_second_writer_is_told_who_the_first_is(tmp_path, hold):
    other = hold(hold_exclusive, tmp_path / ".lock")
    with (
        refused(bw.BusyError, "baking", folder=tmp_path, process=f"pid {other}"),
        exclusive(tmp_path / ".lock", doing="baking into"),
    ):
        pass


def test_the_lock_ends_with_its_process_however_it_ends(tmp_path, hold, processes):
    hold(hold_exclusive, tmp_path / ".lock")
    processes.kill("other")
    with exclusive(tmp_path / ".lock", doing="baking into"):
        assert (tmp_path / ".lock").read_text() == f"pid {os.getpid()}"


def test_a_lock_is_free_again_after_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="in the block"), exclusive(tmp_path / ".lock", doing="x"):
        raise RuntimeError("in the block")
    with exclusive(tmp_path / ".lock", doing="x"):
        pass


def test_a_file_is_in_use_while_any_process_says_so(tmp_path, hold, processes):
    path = tmp_path / "manifest.json"
    path.write_text("")
    assert not is_in_use(path)
    mine = shared(path)
    hold(hold_shared, path)
    os.close(mine)
    assert is_in_use(path)
    processes.kill("other")
    assert not is_in_use(path)


def test_who_comes_while_a_file_is_removed_finds_it_gone(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text("")
    found: list[object] = []

    def come():
        try:
            found.append(shared(path))
        except FileNotFoundError as error:
            found.append(error)

    with unused(path) as free:
        assert free
        reader = threading.Thread(target=come)
        reader.start()
        reader.join(timeout=0.2)  # for it to come, if it did not wait
        assert found == []  # it waits
        path.unlink()
    reader.join()
    assert isinstance(found[0], FileNotFoundError)


@pytest.mark.parametrize("name", ["a", "a/b.arrow", "..a", "a..b", ".hidden"])
def test_names_inside_a_folder(tmp_path, name):
    assert inside(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize("name", ["..", "../a", "a/../b", "a/..", "/etc/passwd", "a\0b", ""])
def test_names_that_leave_a_folder_are_refused(tmp_path, name):
    with refused(bw.StoreError, folder=tmp_path, name=repr(name)):
        inside(tmp_path, name)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_one_clear_error(tmp_path, number):
    with refused(bw.OutOfSpaceError, folder=tmp_path, reason=os.strerror(number)), out_of_space_at(tmp_path):
        raise OSError(number, os.strerror(number))


def test_other_errors_of_the_system_stay_what_they_are(tmp_path):
    with pytest.raises(PermissionError), out_of_space_at(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")
