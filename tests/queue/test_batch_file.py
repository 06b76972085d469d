"""Files of batches: they come back as they were written, or are refused by name and reason."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.base.memory import BlockPool
from batchwright.queue import batch_file
from batchwright.queue.batch_file import BatchFileWriter, DamagedFile, FileFacts, pooled, read_batches, read_facts
from batchwright.queue.schema import DTYPES, fields_of

BATCH_SIZE, NUM_BATCHES = 2, 3


def facts_of(*fields, batch_size=BATCH_SIZE, num_batches=NUM_BATCHES, number=7):
    schema = [{"name": name, "dtype": dtype, "shape": shape, "role": None} for name, dtype, shape in fields]
    return FileFacts("stamp", "train", number, batch_size, num_batches, fields_of({"batch_schema": schema}))


FACTS = facts_of(("x", "int16", [3]), ("keep", "bool", []))


def batches_of(facts, seed=0):
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(0, 2, (facts.batch_size, *field.shape)).astype(field.dtype) for field in facts.fields]
        for _ in range(facts.num_batches)
    ]


def write(path, facts=FACTS, batches=None, **settings):
    with BatchFileWriter(path, facts) as writer:
        for arrays in batches if batches is not None else batches_of(facts):
            writer.append(arrays)
        writer.finish(**settings)
    return path


def fresh(num_bytes):
    return np.empty(num_bytes, np.uint8)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "00000007.batches")


def with_header(text: bytes, body: bytes) -> bytes:
    """A file whose header says anything, with a checksum that is right."""
    text += b" " * (-(24 + len(text)) % 64)
    start = b"BATCHWRT" + (1).to_bytes(4, "little") + len(text).to_bytes(4, "little")
    return start + xxhash.xxh3_64_intdigest(start + text).to_bytes(8, "little") + text + body


def parts_of(data: bytes) -> tuple[bytes, bytes]:
    """(header, body) of a file."""
    end = 24 + int.from_bytes(data[12:16], "little")
    return data[24:end], data[end:]


def reason_of(path: Path) -> str:
    """Why a file is refused: by both readers where the header is to blame."""
    with pytest.raises(DamagedFile) as caught:
        read_batches(path, fresh)
    assert caught.value.where["file"] == str(path)
    assert path.name in caught.value.headline
    assert caught.value.remedy
    return caught.value.reason


# What was written comes back


def test_a_file_gives_back_its_facts_and_every_row(path):
    facts, found = read_batches(path, fresh)
    assert facts == read_facts(path) == FACTS
    assert facts.num_rows == 6
    for number, arrays in enumerate(batches_of(FACTS)):
        rows = slice(number * BATCH_SIZE, (number + 1) * BATCH_SIZE)
        for field, array in zip(FACTS.fields, arrays, strict=True):
            assert found[field.name].dtype == field.dtype
            assert np.array_equal(found[field.name][rows], array)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [[], [5], [3, 1, 2]])
def test_every_dtype_and_shape_comes_back(tmp_path, dtype, shape):
    facts = facts_of(("a", dtype, shape), ("b", "float64", [2]))
    batches = batches_of(facts)
    found_facts, found = read_batches(write(tmp_path / "f", facts, batches), fresh)
    assert found_facts == facts
    for place, field in enumerate(facts.fields):
        assert np.array_equal(found[field.name], np.concatenate([arrays[place] for arrays in batches]))


def test_the_same_batches_give_the_same_bytes(tmp_path, path):
    assert write(tmp_path / "again").read_bytes() == path.read_bytes()


def test_the_bytes_of_a_file_are_pinned(path):
    # Queues of running jobs hold such files: if this changes, the version of the format does too.
    data = path.read_bytes()
    header, body = parts_of(data)
    assert data[:12] == b"BATCHWRT\1\0\0\0"
    about = {"stamp": "stamp", "split": "train", "number": 7, "batch_size": 2, "num_batches": 3, "byte_order": "little"}
    assert json.loads(header) == about | {
        "fields": [
            {"name": "x", "dtype": "int16", "shape": [3], "role": None, "xxh3_64": xxhash.xxh3_64_hexdigest(body[:64])},
            {
                "name": "keep",
                "dtype": "bool",
                "shape": [],
                "role": None,
                "xxh3_64": xxhash.xxh3_64_hexdigest(body[64:]),
            },
        ],
    }
    x = np.concatenate([arrays[0] for arrays in batches_of(FACTS)])
    assert body[:64] == x.tobytes().ljust(64, b"\0")
    assert len(data) % 64 == 0


def test_fields_are_aligned_and_any_run_of_rows_is_a_view(tmp_path):
    facts = facts_of(("a", "uint8", [7]), ("b", "int64", [3]), batch_size=3, num_batches=5)
    taken = []

    def memory(num_bytes):
        taken.append(pooled(BlockPool())(num_bytes))
        return taken[0]

    _, found = read_batches(write(tmp_path / "f", facts), memory)
    assert taken[0].nbytes == facts.num_bytes
    for array in found.values():
        assert array.ctypes.data % 64 == 0
        assert np.shares_memory(array[2:11], taken[0])


def test_a_descriptor_is_read_and_stays_open(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert read_batches(descriptor, fresh)[0] == read_facts(descriptor) == FACTS
        os.truncate(path, 30)
        with pytest.raises(DamagedFile, match="damaged"):
            read_facts(descriptor)
        os.fstat(descriptor)
    finally:
        os.close(descriptor)


def test_pooled_memory_is_used_again_only_when_nothing_refers_to_it(path):
    memory = pooled(BlockPool())
    _, kept = read_batches(path, memory)
    before = kept["x"].copy()
    row = kept["x"][1:2]
    address = kept["x"].ctypes.data
    del kept
    addresses = {read_batches(path, memory)[1]["x"].ctypes.data for _ in range(20)}
    assert address not in addresses
    assert np.array_equal(row, before[1:2])
    del row
    again = [read_batches(path, memory)[1]["x"] for _ in range(4)]
    assert address in {array.ctypes.data for array in again}


def test_pooled_memory_is_the_pools_own():
    memory = pooled(BlockPool())
    memory(1001)[:] = 7
    assert memory(1001).tolist() == [7] * 1001


def test_a_long_header_is_read_whole(tmp_path):
    facts = facts_of(*((f"field_{number:04}", "uint8", [1]) for number in range(500)))
    _, found = read_batches(write(tmp_path / "f", facts), fresh)
    assert len(found) == 500


def test_large_fields_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_file, "_CHUNK_BYTES", 100)
    facts = facts_of(("x", "int64", [50]))
    batches = batches_of(facts)
    _, found = read_batches(write(tmp_path / "f", facts, batches), fresh)
    assert np.array_equal(found["x"], np.concatenate([arrays[0] for arrays in batches]))


def test_a_write_in_several_parts_is_whole(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, memoryview(data).cast("B")[:5], at))
    path = write(tmp_path / "f")
    monkeypatch.undo()
    assert np.array_equal(read_batches(path, fresh)[1]["x"], np.concatenate([a[0] for a in batches_of(FACTS)]))


def test_only_a_durable_file_is_forced_to_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    write(tmp_path / "f")
    assert synced == []
    write(tmp_path / "f", durable=True)
    assert len(synced) == 1


# Writers that do not finish


@pytest.mark.parametrize("num_appended", range(NUM_BATCHES + 1))
def test_a_file_that_was_not_finished_is_refused(tmp_path, num_appended):
    path = tmp_path / "f"
    with BatchFileWriter(path, FACTS) as writer:
        for arrays in batches_of(FACTS)[:num_appended]:
            writer.append(arrays)
    assert "did not finish" in reason_of(path) or "inside its header" in reason_of(path)


def test_a_file_that_should_be_there_and_is_gone_is_not_made_again(tmp_path):
    """Its inode may be given to the new file at once: nothing would tell the two apart."""
    with pytest.raises(FileNotFoundError):
        BatchFileWriter(tmp_path / "gone", FACTS, is_there=True)
    assert not list(tmp_path.iterdir())


def test_a_writer_finishes_only_with_all_its_batches(tmp_path):
    with BatchFileWriter(tmp_path / "f", FACTS) as writer:
        writer.append(batches_of(FACTS)[0])
        with pytest.raises(AssertionError, match="1 of 3 batches"):
            writer.finish()
        writer.append(batches_of(FACTS)[1])
        writer.append(batches_of(FACTS)[2])
        with pytest.raises(AssertionError, match="more than 3 batches"):
            writer.append(batches_of(FACTS)[2])


def test_a_disk_without_room_is_known_before_the_first_batch(tmp_path, monkeypatch):
    def full(descriptor, num_bytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(batch_file, "reserve", full)
    open_before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with pytest.raises(OSError, match="No space left"):
        BatchFileWriter(tmp_path / "f", FACTS)
    if open_before is not None:
        assert set(os.listdir("/proc/self/fd")) == open_before


def test_a_file_system_that_cannot_reserve_is_written_to(tmp_path, monkeypatch):
    def cannot(descriptor, num_bytes):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(batch_file, "reserve", cannot)
    assert read_batches(write(tmp_path / "f"), fresh)[0] == FACTS


def test_a_full_disk_is_the_systems_error(tmp_path):
    code = f"""if True:
        import resource, signal, sys
        import numpy as np
        from batchwright.queue.batch_file import BatchFileWriter, FileFacts
        from batchwright.queue.schema import fields_of
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        fields = fields_of({{"batch_schema": [{{"name": "x", "dtype": "int64", "shape": [64]}}]}})
        try:
            BatchFileWriter({str(tmp_path / "f")!r}, FileFacts("s", "train", 0, 2, 3, fields))
        except OSError as error:
            print(error.errno)
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(errno.EFBIG)]


# Damage


def test_every_flipped_bit_is_found(path):
    data = path.read_bytes()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        assert reason_of(path)


def test_a_file_that_ends_anywhere_is_refused(path):
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert reason_of(path)
        with pytest.raises(DamagedFile):
            read_facts(path)


@pytest.mark.parametrize("num_more", [1, 63, 64, 4096])
def test_a_file_that_goes_on_is_refused(path, num_more):
    with path.open("ab") as file:
        file.write(bytes(num_more))
    assert "bytes, and its header says" in reason_of(path)


def test_fields_that_changed_places_are_found(path):
    data = path.read_bytes()
    header, body = parts_of(data)
    path.write_bytes(data[: 24 + len(header)] + body[64:] + body[:64])
    assert reason_of(path) == "the bytes of field 'x' do not match their checksum"


def test_a_file_under_another_files_name_says_which_it_is(tmp_path):
    other = write(tmp_path / "00000008.batches", facts_of(("x", "int16", [3]), number=9))
    assert read_batches(other, fresh)[0].number == read_facts(other).number == 9


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"number": -1}, "number -1 with 3 batches"),
        ({"batch_size": 0}, "3 batches of 0 rows"),
        ({"num_batches": -3}, "-3 batches"),
        ({"num_batches": 2**62}, "bytes, and its header says"),
        ({"batch_size": 2**62, "num_batches": 2**62}, "bytes, and its header says"),
        ({"fields": []}, "'batch_schema' is empty"),
        ({"stamp": 7}, "Expected `str`"),
        ({"byte_order": "big"}, "byte order 'big'"),
        ({"more": 1}, "unknown field `more`"),
        ({"fields": [{"name": "x", "dtype": "int16", "shape": [3], "role": None}]}, "missing required field"),
        ({"fields": [{"name": "x", "dtype": "O", "shape": [], "role": None, "xxh3_64": "0"}]}, "dtype must be one of"),
        ({"fields": [{"name": "x", "dtype": "int8", "shape": [0], "role": None, "xxh3_64": "0"}]}, "at least 1"),
        ({"fields": [{"name": "x", "dtype": "int8", "shape": [9], "role": None, "xxh3_64": "z"}]}, "invalid literal"),
        (
            {"fields": [{"name": "x", "dtype": "int8", "shape": [2**39, 2**39], "role": None, "xxh3_64": "0"}]},
            "bytes per row",
        ),
    ],
)
def test_a_header_that_says_what_cannot_be_is_refused_before_memory_is_taken(path, change, says):
    header, body = parts_of(path.read_bytes())
    path.write_bytes(with_header(json.dumps(json.loads(header) | change).encode(), body))

    def memory(num_bytes):
        raise AssertionError(f"{num_bytes} bytes were asked for")

    for read in (read_facts, lambda path: read_batches(path, memory)):
        with pytest.raises(DamagedFile) as caught:
            read(path)
        assert says in caught.value.reason


def test_a_header_longer_than_its_file_is_refused(path):
    data = path.read_bytes()
    path.write_bytes(data[:12] + (2**32 - 24).to_bytes(4, "little") + data[16:])
    assert "a header of 4,294,967,272 bytes in a file of" in reason_of(path)


def test_a_later_version_is_refused_by_its_number(path):
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\2" + data[9:])
    assert reason_of(path) == "it has version 2 of the format, and this batchwright reads version 1"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([b"", b"BATCHWRT", b"BATCHWRT\1\0\0\0"]))
def test_garbage_is_refused(tmp_path_factory, garbage, start):
    path = tmp_path_factory.getbasetemp() / "garbage"
    path.write_bytes(start + garbage)
    assert reason_of(path)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_with_a_right_checksum_is_refused(tmp_path_factory, garbage):
    path = tmp_path_factory.getbasetemp() / "garbage"
    path.write_bytes(with_header(garbage, b""))
    assert reason_of(path).startswith("its header is wrong")


def test_a_header_of_many_brackets_is_refused(path):
    path.write_bytes(with_header(b"[" * 100_000, b""))
    assert "its header is wrong" in reason_of(path)


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(path):
    def memory(num_bytes):
        os.truncate(path, path.stat().st_size - 64)
        return fresh(num_bytes)

    with pytest.raises(DamagedFile, match="became shorter while it was read"):
        read_batches(path, memory)


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert reason_of(tmp_path / "pipe") == "it is not a file"
    (tmp_path / "folder").mkdir()
    assert reason_of(tmp_path / "folder") == "it is not a file"


def test_a_disk_that_cannot_read_a_file_damages_it(path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    assert "the disk cannot read it" in reason_of(path)


def test_a_file_that_is_not_there_is_the_systems_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_batches(tmp_path / "f", fresh)


def test_the_error_crosses_process_borders_with_its_reason(path):
    path.write_bytes(b"x" * 100)
    with pytest.raises(DamagedFile) as caught:
        read_facts(path)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is DamagedFile
    assert again.reason == "it does not begin as a file of batches"
