"""A buffer's folder: one writer, many readers, and whatever kills the writer leaves a folder that opens."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from test_codec import COLUMNS, SCHEMA, same

from batchwright.base.errors import BusyError, OutOfSpaceError, SpecError, StoreError
from batchwright.base.journal import read_records
from batchwright.buffer.folder import POINTER, BufferFolder
from batchwright.buffer.schema import Field, Numbers, Schema
from harness import say
from refusals import refused
from shared import in_child

ALL = {name: column for name, (_, column) in COLUMNS.items()}
SMALL = Schema((Field("x", pa.int64()),))


@pytest.fixture
def folder(tmp_path: Path):
    folder = BufferFolder.create_or_open(tmp_path / "buffer")
    yield folder
    folder.close()


def files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def small(n: int) -> dict[str, Numbers]:
    return {"x": Numbers(np.array([n]))}


def numbers_in(path: Path) -> list[int]:
    """Every change that is there: those of the checkpoint, then those of the journal."""

    def load(document, journal):
        return [*(document or {"numbers": []})["numbers"], *(record.number for record in read_records(journal))]

    return BufferFolder.open_to_read(path).read(load)


# Opening


def test_a_new_folder_has_a_pointer_an_empty_journal_and_a_lock(folder):
    assert files(folder.path) == [POINTER, "journal-000000000001.log", "writer.lock"]
    assert folder.read(lambda document, journal: document) is None
    assert folder.read_versions() == []
    assert folder.journal.last_number == 0


def test_a_second_writer_is_refused_and_told_the_first(folder):
    with refused(BusyError, process=f"pid {os.getpid()}"):
        BufferFolder.create_or_open(folder.path)


def test_a_closed_folder_can_be_written_by_the_next(folder):
    folder.journal.write(1, b"one")
    folder.close()
    again = BufferFolder.create_or_open(folder.path)
    assert again.journal.last_number == 1
    assert again.buffer_id == folder.buffer_id
    again.close()


@pytest.mark.parametrize("name", ["notes.txt", "blocks/my.arrow", "versions/1.json", "sub/a", "journal-1.log"])
def test_a_folder_with_other_things_in_it_is_refused_and_left_alone(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine" * 100)
    with refused(SpecError, path=tmp_path, remedy="path=") as caught:
        BufferFolder.create_or_open(tmp_path)
    assert caught.value.where["found"].startswith(name.split("/")[0])
    assert files(tmp_path) == [name]


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with refused(SpecError, path=tmp_path / "file"):
        BufferFolder.create_or_open(tmp_path / "file")


def test_reading_where_there_is_no_buffer_says_so_and_makes_nothing(tmp_path):
    with refused(StoreError, folder=tmp_path / "none", missing=POINTER, remedy="read_only="):
        BufferFolder.open_to_read(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_reader_cannot_write(folder):
    reader = BufferFolder.open_to_read(folder.path)
    with refused(SpecError, folder=folder.path):
        reader.write_checkpoint(0, {})
    with refused(SpecError, folder=folder.path):
        reader.write_block(0, {}, {})


def test_what_killed_writers_left_is_removed_and_what_others_put_there_is_not(folder):
    kept = folder.write_block(0, small(1), {})
    also_kept = folder.write_block(1, small(2), {})
    folder.write_block(2, small(3), {})
    folder.write_version(1, {"segments": [{"file": kept}]})
    folder.write_checkpoint(0, {"deep": {"er": [[also_kept]]}})
    folder.close()
    path = folder.path
    for name in ("journal-000000000099.log", ".x.1.2.part", "blocks/.x.1.2.part", "checkpoints/000000000007.json"):
        (path / name).write_text("left behind")
    (path / "notes.txt").write_text("mine")
    BufferFolder.create_or_open(path).close()
    assert files(path) == [
        POINTER,
        *sorted([f"blocks/{kept}", f"blocks/{also_kept}"]),
        *("checkpoints/000000000000.json", "journal-000000000001.log", "notes.txt"),
        *("versions/00000001.json", "writer.lock"),
    ]


# Children


def test_a_child_cannot_write_and_does_not_keep_the_lock(folder):
    answer = in_child(lambda: folder.write_checkpoint(0, {}))
    assert answer.startswith("BusyError: this buffer can be written by the process that opened it")
    (waits, go), (begun, told) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:  # lives on after its parent let go
        os.write(told, b"x")
        os.read(waits, 1)
        os._exit(0)
    os.read(begun, 1)
    try:
        with pytest.raises(BusyError):
            BufferFolder.create_or_open(folder.path)
        folder.close()
        BufferFolder.create_or_open(folder.path).close()
    finally:
        os.write(go, b"x")
        os.waitpid(pid, 0)
        for descriptor in (waits, go, begun, told):
            os.close(descriptor)


# Blocks


def test_a_block_comes_back_with_all_kinds_of_columns(folder):
    extra = {"ids": np.arange(7), "live": np.array([0, 2]), "none": np.zeros(0, np.int64)}
    columns, found = folder.map_block(folder.write_block(3, ALL, extra), SCHEMA)
    same(columns, ALL)
    assert {name: array.tolist() for name, array in found.items()} == {"ids": [*range(7)], "live": [0, 2], "none": []}
    assert all(array.dtype == np.int64 and not array.flags.writeable for array in found.values())


@pytest.mark.parametrize("num_rows", [1, 3, 64, 1000])
def test_numbers_of_a_block_are_mapped_where_numpy_can_read_them_and_read_only(folder, num_rows):
    valid = np.arange(num_rows) % 2 == 0
    columns = {
        name: Numbers(
            np.resize(column.values, (num_rows, *column.values.shape[1:])), valid if column.valid is not None else None
        )
        for name, column in ALL.items()
        if isinstance(column, Numbers)
    }
    extra = {"ids": np.arange(num_rows), "live": np.arange(num_rows // 2 + 1)}
    found, mapped = folder.map_block(folder.write_block(0, columns, extra), SCHEMA)
    for array in (*(column.values for column in found.values()), *mapped.values()):
        assert array.flags.aligned
        assert not array.flags.writeable
        assert not array.flags.owndata
    for name, column in columns.items():
        np.testing.assert_array_equal(found[name].values, column.values)


def test_a_block_stays_mapped_after_its_file_is_gone(folder):
    columns, _ = folder.map_block(folder.write_block(0, small(5), {}), SMALL)
    folder.remove_blocks(folder.unused())
    assert files(folder.path / "blocks") == []
    assert columns["x"].values.tolist() == [5]


def test_a_block_can_have_some_columns_or_none(folder):
    columns, extra = folder.map_block(folder.write_block(0, {}, {"live": np.arange(3)}), SCHEMA)
    assert columns == {}
    assert extra["live"].tolist() == [0, 1, 2]
    columns, extra = folder.map_block(folder.write_block(0, {"int64": ALL["int64"]}, {}), SCHEMA)
    assert (list(columns), extra) == (["int64"], {})
    assert folder.map_block(folder.write_block(0, {}, {}), SCHEMA) == ({}, {})


def test_blocks_of_one_serial_number_have_names_of_their_own(folder):
    assert len({folder.write_block(7, small(n), {}) for n in range(3)}) == 3


def test_unused_blocks_are_removed_and_those_that_are_named_are_not(folder):
    names = [folder.write_block(n, small(n), {}) for n in range(4)]
    folder.write_checkpoint(0, {"blocks": [names[0]]})
    folder.write_version(1, {"blocks": [names[1]]})
    assert folder.unused() == {*names[2:]}
    folder.remove_blocks([names[3]])
    assert files(folder.path / "blocks") == sorted(names[:3])
    folder.remove_version(1)
    folder.remove_blocks(folder.unused())
    assert files(folder.path / "blocks") == names[:1]


def test_a_block_with_flipped_bytes_is_refused_by_name_or_has_valid_values(folder):
    some = {name: ALL[name] for name in ("int64", "some points", "booleans", "text", "lists", "structs", "words")}
    name = folder.write_block(0, some, {"ids": np.arange(4)})
    path = folder.path / "blocks" / name
    whole = path.read_bytes()
    refused = []
    for offset in range(0, len(whole), 19):
        # A new file each time: pages that are mapped would change under arrays of the round before.
        damaged = folder.path / "blocks" / f"1-{offset:x}.arrow"
        damaged.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0xFF]) + whole[offset + 1 :])
        try:
            columns, _ = folder.map_block(damaged.name, SCHEMA)
        except StoreError as error:
            refused.append(error.where["file"] == damaged)
            continue
        for column in columns.values():
            if isinstance(column, pa.Array):
                column.validate(full=True)
                column.to_pylist()
    assert len(refused) > 10
    assert all(refused)


@pytest.mark.parametrize("size", [0, 7, 100, -1, -100])
def test_a_block_that_was_cut_short_is_refused_by_name(folder, size):
    name = folder.write_block(0, ALL, {})
    path = folder.path / "blocks" / name
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with refused(StoreError, file=path):
        folder.map_block(name, SCHEMA)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("../secret.arrow", {"name": "'../secret.arrow'"}),
        ("/etc/passwd", {"name": "'/etc/passwd'"}),
        ("9-0.arrow", {"name": None}),
    ],
)
def test_a_block_that_is_not_there_or_not_inside_is_refused(folder, name, where):
    with refused(StoreError, name, **where):
        folder.map_block(name, SCHEMA)


@pytest.mark.parametrize(
    ("field", "reason"),
    [(Field("x", pa.float64()), "int64, not double"), (Field("y", pa.int64()), "'column:x' is not in the schema")],
)
def test_a_block_that_is_not_as_the_schema_says_is_refused(folder, field, reason):
    name = folder.write_block(0, small(1), {})
    with refused(StoreError, reason=reason):
        folder.map_block(name, Schema((field,)))


# Checkpoints and versions


def test_a_checkpoint_replaces_the_journal_and_the_checkpoint_before(folder):
    folder.journal.write(1, b"one")
    folder.write_checkpoint(1, {"numbers": [1]})
    folder.journal.write(2, b"two")
    folder.write_checkpoint(2, {"numbers": [1, 2]})
    folder.journal.write(3, b"three")
    assert files(folder.path) == [
        *(POINTER, "checkpoints/000000000002.json"),
        *("journal-000000000003.log", "writer.lock"),
    ]
    assert numbers_in(folder.path) == [1, 2, 3]


def test_a_checkpoint_twice_after_the_same_change_is_the_second_one(folder):
    folder.journal.write(1, b"one")
    folder.write_checkpoint(1, {"numbers": [1], "try": 1})
    folder.write_checkpoint(1, {"numbers": [1], "try": 2})
    folder.journal.write(2, b"two")
    assert folder.read(lambda document, journal: document) == {"numbers": [1], "try": 2}
    assert numbers_in(folder.path) == [1, 2]


def test_a_checkpoint_that_would_lose_a_change_is_refused(folder):
    folder.journal.write(1, b"one")
    with pytest.raises(ValueError, match="change 1"):
        folder.write_checkpoint(0, {})
    assert numbers_in(folder.path) == [1]


def test_versions_come_back_in_order_and_one_can_be_removed(folder):
    for ordinal in (2, 10, 1):
        folder.write_version(ordinal, {"ordinal": ordinal})
    assert [version["ordinal"] for version in folder.read_versions()] == [1, 2, 10]
    folder.remove_version(2)
    assert [version["ordinal"] for version in BufferFolder.open_to_read(folder.path).read_versions()] == [1, 10]


@pytest.mark.parametrize("step", range(9))
def test_an_error_at_any_step_of_a_checkpoint_loses_nothing(folder, monkeypatch, step):
    """Each rename and each removal in turn fails before it is done, or right after."""
    folder.journal.write(1, b"one")
    folder.write_checkpoint(1, {"numbers": [1]})
    folder.journal.write(2, b"two")
    calls = 0

    def failing(call):
        def fail(*arguments):
            nonlocal calls
            calls += 1
            if calls - 1 == step // 2 and not step % 2:
                raise OSError(errno.ENOSPC, "full")
            call(*arguments)
            if calls - 1 == step // 2:
                raise OSError(errno.EIO, "interrupted")

        return fail

    monkeypatch.setattr(os, "replace", failing(os.replace))
    monkeypatch.setattr(os, "unlink", failing(os.unlink))
    try:
        folder.write_checkpoint(2, {"numbers": [1, 2]})
        failed = False
    except OSError:
        failed = True
    monkeypatch.undo()
    assert failed == (step < 6)  # once the pointer is the new one, what is left of the old one harms nobody
    assert numbers_in(folder.path) == [1, 2]
    folder.journal.write(3, b"three")  # into the journal that counts
    assert numbers_in(folder.path) == [1, 2, 3]
    folder.close()
    again = BufferFolder.create_or_open(folder.path)
    assert numbers_in(again.path) == [1, 2, 3]
    again.write_checkpoint(3, {"numbers": [1, 2, 3]})
    again.close()
    assert files(again.path) == [
        *(POINTER, "checkpoints/000000000003.json"),
        *("journal-000000000004.log", "writer.lock"),
    ]


def test_a_disk_that_is_full_leaves_the_checkpoint_before(folder, monkeypatch):
    folder.write_checkpoint(0, {"numbers": []})
    before = files(folder.path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    for call in (
        lambda: folder.write_checkpoint(1, {}),
        lambda: folder.write_version(1, {}),
        lambda: folder.write_block(0, small(1), {}),
    ):
        with refused(OutOfSpaceError, folder=folder.path):
            call()
    assert files(folder.path) == before
    assert folder.read(lambda document, journal: document) == {"numbers": []}


@pytest.mark.parametrize("name", [POINTER, "checkpoints/000000000001.json", "versions/00000001.json"])
def test_a_document_with_a_flipped_byte_is_refused_by_name_and_nothing_is_removed(folder, name):
    folder.write_block(0, small(1), {})
    folder.journal.write(1, b"one")
    folder.write_checkpoint(1, {"numbers": [1]})
    folder.write_version(1, {"numbers": [1]})
    folder.close()
    whole = (folder.path / name).read_bytes()
    listed = files(folder.path)
    for offset in range(len(whole) - (name == POINTER)):  # the pointer ends in a line break that says nothing
        (folder.path / name).unlink()
        (folder.path / name).write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        with pytest.raises(StoreError):
            BufferFolder.create_or_open(folder.path).close()
        assert files(folder.path) == listed


def test_a_journal_of_another_buffer_is_refused(folder, tmp_path):
    other = BufferFolder.create_or_open(tmp_path / "other")
    other.close()
    folder.close()
    os.replace(other.journal_path, folder.path / "journal-000000000001.log")
    with refused(StoreError, file=folder.journal_path, expected=folder.buffer_id.hex()):
        BufferFolder.create_or_open(folder.path)


@pytest.mark.parametrize("missing", ["journal-000000000001.log", "checkpoints/000000000000.json"])
def test_a_missing_file_is_named(folder, missing):
    folder.write_checkpoint(0, {"numbers": []})
    folder.close()
    (folder.path / missing).unlink()
    with refused(StoreError, file=folder.path / missing):
        BufferFolder.create_or_open(folder.path)


# Readers beside a writer


def test_a_reader_sees_whole_states_while_checkpoints_replace_each_other(folder):
    path, seen, failed = folder.path, [], []

    def read_on() -> None:
        reader = BufferFolder.open_to_read(path)

        def load(document, journal):
            block = (document or {}).get("block")
            base = 0 if block is None else reader.map_block(block, SMALL)[0]["x"].values[0]
            return int(base) + sum(1 for _ in read_records(journal))

        try:
            while not done:
                seen.append(reader.read(load))
        except BaseException as error:
            failed.append(error)

    done: list[bool] = []
    thread = threading.Thread(target=read_on)
    thread.start()
    for number in range(1, 61):
        folder.journal.write(number, b"x")
        if number % 2 == 0:
            folder.write_checkpoint(number, {"block": folder.write_block(number, small(number), {})})
            folder.remove_blocks(folder.unused())
    done.append(True)
    thread.join()
    assert failed == []
    assert seen == sorted(seen)
    assert set(seen) <= set(range(61))


# kill -9


def write_until_killed(path: Path) -> None:
    """Changes 1, 2, 3, ..., each said once it is written; a checkpoint after every third."""
    folder = BufferFolder.create_or_open(path)
    numbers = numbers_in(path)
    while True:
        numbers.append(len(numbers) + 1)
        folder.journal.write(numbers[-1], b"x" * (numbers[-1] % 5000))
        say(number=numbers[-1])
        if numbers[-1] % 3 == 0:
            folder.write_checkpoint(numbers[-1], {"numbers": numbers})


@pytest.mark.parametrize("kills", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments_loses_no_change_that_was_written(processes, tmp_path, kills):
    path = tmp_path / "buffer"
    processes.start("writer", write_until_killed, path)
    for _ in range(kills):
        before = len(processes.said("writer"))
        processes.wait_for_lines(["writer"], before + processes.chance.randint(4, 10))  # a checkpoint is among them
        processes.pause(0.03)
        processes.kill("writer")
        acknowledged = processes.said("writer")[-1]["number"]
        found = numbers_in(path)
        assert found == list(range(1, len(found) + 1))
        assert len(found) in (acknowledged, acknowledged + 1)
        processes.start_again("writer")
    processes.kill("writer")
    BufferFolder.create_or_open(path).close()
    assert len(files(path)) <= 4  # nothing is left of those that were killed
