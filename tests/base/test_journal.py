"""A journal: records that are whole or not there, whatever happened to the writer or to the file."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchwright.base import journal as module
from batchwright.base.errors import BusyError, OutOfSpaceError, StoreError
from batchwright.base.journal import HEAD_BYTES, Journal, read_head, read_records
from refusals import refused
from shared import in_child

ID = bytes(range(16))
PAYLOADS = [b"first", b"", b"a third one"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Records 1 to 3."""
    path = tmp_path / "journal.log"
    write(path, PAYLOADS)
    return path


def write(path: Path, payloads: list[bytes], first_number: int = 1) -> None:
    journal = Journal.create(path, first_number, ID)
    for number, payload in enumerate(payloads, first_number):
        journal.write(number, payload)
    journal.close()


def payloads(path: Path) -> list[bytes]:
    return [record.payload for record in read_records(path)]


# Writing and reading


def test_records_come_back_with_their_numbers_and_where_they_end(path):
    records = list(read_records(path))
    assert [(record.number, record.payload) for record in records] == list(enumerate(PAYLOADS, 1))
    assert records[-1].end_offset == path.stat().st_size
    assert list(read_records(path, records[0].end_offset)) == records[1:]


def test_the_head_says_whose_journal_it_is_and_where_numbers_begin(tmp_path):
    write(tmp_path / "a.log", [], first_number=41)
    assert read_head(tmp_path / "a.log") == (ID, 41)
    assert (tmp_path / "a.log").stat().st_size == HEAD_BYTES


def test_a_payload_in_parts_is_the_parts_joined(tmp_path):
    journal = Journal.create(tmp_path / "a.log", 1, ID)
    journal.write(1, [b"ab", memoryview(b"cd"), b""])
    journal.write(2, [bytes([n % 256]) for n in range(2000)])
    journal.close()
    assert payloads(tmp_path / "a.log") == [b"abcd", bytes(n % 256 for n in range(2000))]


def test_a_payload_larger_than_what_is_read_at_once_comes_back(tmp_path):
    large = os.urandom(3 << 20)
    write(tmp_path / "a.log", [b"before", large, b"after"])
    assert payloads(tmp_path / "a.log") == [b"before", large, b"after"]


def test_a_number_that_does_not_follow_is_refused_and_nothing_is_written(path):
    journal = Journal.open_to_append(path)
    with pytest.raises(ValueError, match="record 5 cannot follow record 3"):
        journal.write(5, b"too early")
    journal.close()
    assert payloads(path) == PAYLOADS


def test_a_journal_goes_on_where_it_ended(path):
    journal = Journal.open_to_append(path)
    assert (journal.last_number, journal.num_bytes) == (3, path.stat().st_size)
    journal.write(4, b"fourth")
    journal.sync()
    journal.close()
    assert payloads(path) == [*PAYLOADS, b"fourth"]


def test_a_journal_goes_on_after_a_record_that_was_read_already(path):
    first, *_ = read_records(path)
    journal = Journal.open_to_append(path, after=first)
    assert journal.last_number == 3
    journal.close()
    with refused(StoreError, "record 2", file=path, record=6):
        Journal.open_to_append(path, after=first._replace(number=5))


def test_a_closed_journal_takes_nothing(path):
    journal = Journal.open_to_append(path)
    journal.close()
    with refused(StoreError, "closed", file=path):
        journal.write(4, b"late")


# Cut off


def test_a_journal_cut_at_any_byte_of_its_last_record_has_those_before_it_and_goes_on(tmp_path, path, caplog):
    whole = path.read_bytes()
    last_begins = list(read_records(path))[1].end_offset
    for size in range(last_begins, len(whole)):
        cut = tmp_path / "cut.log"
        cut.write_bytes(whole[:size])
        assert payloads(cut) == PAYLOADS[:2]
        caplog.clear()
        with caplog.at_level(logging.WARNING, "batchwright"):
            journal = Journal.open_to_append(cut)
        assert [f"removed {size - last_begins} bytes" in text for text in caplog.messages] == [True] * (
            size > last_begins
        )
        journal.write(3, b"again")
        journal.close()
        assert payloads(cut) == [*PAYLOADS[:2], b"again"]


@pytest.mark.parametrize("num_zeros", [1, 31, 32, 33, 5000])
def test_zeros_after_the_last_record_are_a_record_that_was_cut_off(path, num_zeros):
    size = path.stat().st_size
    os.truncate(path, size + num_zeros)
    assert payloads(path) == PAYLOADS
    Journal.open_to_append(path).close()
    assert path.stat().st_size == size


def test_a_last_record_of_which_later_sectors_are_zeros_was_cut_off(tmp_path):
    path = tmp_path / "a.log"
    write(path, [b"kept", b"x" * 4000])
    size = path.stat().st_size
    os.truncate(path, 1024)
    os.truncate(path, size)
    assert payloads(path) == [b"kept"]


def test_a_payload_of_zeros_with_a_flipped_byte_is_damage_not_cut_off(tmp_path):
    path = tmp_path / "a.log"
    write(path, [b"kept", bytes(4000)])
    flip(path, 700)
    with refused(StoreError, file=path, byte=113, record=2):
        payloads(path)


def test_a_reader_that_meets_half_a_record_goes_on_once_it_is_whole(tmp_path, path):
    whole = path.read_bytes()
    growing = tmp_path / "growing.log"
    growing.write_bytes(whole[:-4])
    seen = list(read_records(growing))
    assert [record.payload for record in seen] == PAYLOADS[:2]
    growing.write_bytes(whole)
    assert [record.payload for record in read_records(growing, seen[-1].end_offset)] == PAYLOADS[2:]


def test_a_reader_beside_a_writer_sees_every_record_once_and_whole(tmp_path):
    path = tmp_path / "a.log"
    Journal.create(path, 1, ID).close()
    script = (
        "import sys; from pathlib import Path; from batchwright.base.journal import Journal\n"
        "journal = Journal.open_to_append(Path(sys.argv[1]))\n"
        "for n in range(1, 3001): journal.write(n, str(n).encode() * (n % 700))\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, str(path)])
    numbers: list[int] = []
    offset = None
    while True:
        ended = writer.poll() is not None
        for record in read_records(path, offset):
            assert record.payload == str(record.number).encode() * (record.number % 700)
            numbers.append(record.number)
            offset = record.end_offset
        if ended:
            break
    assert writer.returncode == 0
    assert numbers == list(range(1, 3001))


# Damage


def flip(path: Path, offset: int, mask: int = 0xFF) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_no_flipped_byte_ever_gives_a_wrong_record(tmp_path, path, mask, monkeypatch):
    monkeypatch.setattr(module, "_LOOKS", 1)
    whole = path.read_bytes()
    begins = [HEAD_BYTES, *(record.end_offset for record in read_records(path))]
    for offset in range(len(whole)):
        flip(path, offset, mask)
        num_before = sum(end <= offset for end in begins[1:])
        with pytest.raises(StoreError) as damage:
            payloads(path)
        assert damage.value.where["file"] == path
        if offset >= HEAD_BYTES:
            assert [record.payload for record in read_records(path, whole_file=False)] == PAYLOADS[:num_before]
            assert begins[num_before] <= damage.value.where["byte"] <= offset
            assert damage.value.where["record"] == num_before + 1
        flip(path, offset, mask)
    assert path.read_bytes() == whole


def test_damage_names_file_byte_record_and_remedy_and_is_not_removed(path):
    second = next(read_records(path)).end_offset
    flip(path, second + 1)
    before = path.read_bytes()
    with refused(StoreError, file=path, byte=second, record=2, remedy="do this"):
        Journal.open_to_append(path, remedy="do this")
    assert path.read_bytes() == before


def test_a_record_of_another_owner_does_not_fit(tmp_path, path):
    other = Journal.create(tmp_path / "other.log", 1, ID[::-1])
    other.write(1, b"theirs")
    other.close()
    records = (tmp_path / "other.log").read_bytes()[HEAD_BYTES:]
    path.write_bytes(path.read_bytes()[:HEAD_BYTES] + records)
    with refused(StoreError, file=path, byte=HEAD_BYTES, record=1):
        payloads(path)


def test_a_record_that_is_missing_among_others_is_damage(path):
    data = path.read_bytes()
    ends = [HEAD_BYTES, *(record.end_offset for record in read_records(path))]
    path.write_bytes(data[: ends[1]] + data[ends[2] :])
    with refused(StoreError, "record 3", file=path, record=2):
        payloads(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "shorter"), (b"bwJOU", "shorter"), (b"x" * 100, "no journal")],
)
def test_a_file_that_is_no_journal_is_refused(tmp_path, content, reason):
    (tmp_path / "a.log").write_bytes(content)
    with refused(StoreError, reason, file=tmp_path / "a.log", byte=0):
        payloads(tmp_path / "a.log")


def test_an_absurd_length_allocates_nothing(tmp_path):
    path = tmp_path / "a.log"
    write(path, [b"one"])
    checked = module._CHECKED.pack(1 << 60, 2, 0)
    with path.open("ab") as file:
        file.write(checked + module._checksum(checked, module._seed_of(ID)).to_bytes(8, "little") + b"abc")
    assert payloads(path) == [b"one"]


def test_a_journal_that_got_shorter_is_not_read_on(path):
    *_, last = read_records(path)
    os.truncate(path, HEAD_BYTES)
    with refused(StoreError, file=path, byte=last.end_offset):
        list(read_records(path, last.end_offset))


# A disk that does not take it


def test_a_full_disk_leaves_the_journal_as_it_was_and_it_goes_on_later(tmp_path):
    # A limit of the system on the size of files: it writes what fits, then says EFBIG.
    script = """
import resource, signal, sys
from pathlib import Path
from batchwright.base.journal import Journal, read_records
from batchwright.base.errors import OutOfSpaceError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
journal = Journal.create(path, 1, bytes(16))
journal.write(1, b"small")
size = path.stat().st_size
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, hard))
for payload in (bytes(5000), [bytes(500), bytes(900)], bytes(1000 - 32)):
    try:
        journal.write(2, payload)
    except OutOfSpaceError as error:
        assert error.where["folder"] == path.parent and "free some space" in error.remedy
    else:
        raise SystemExit("no error")
    assert path.stat().st_size == journal.num_bytes == size and journal.last_number == 1
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
journal.write(2, b"later")
print([record.payload for record in read_records(path)])
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.log")], capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.stderr) == ("[b'small', b'later']\n", "")


def failing(error: BaseException):
    def fail(*_: object) -> int:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "full"), OutOfSpaceError),
        (OSError(errno.EIO, "io"), OSError),
        (KeyboardInterrupt(), None),
    ],
)
def test_whatever_stops_a_write_in_the_middle_the_file_is_as_it_was(path, monkeypatch, error, kind):
    journal = Journal.open_to_append(path)
    monkeypatch.setattr(module.os, "writev", lambda descriptor, parts: os.write(descriptor, parts[0]))
    monkeypatch.setattr(Journal, "_write_rest", failing(error))
    with pytest.raises(kind or KeyboardInterrupt):
        journal.write(4, b"lost")
    monkeypatch.undo()
    assert payloads(path) == PAYLOADS
    assert path.stat().st_size == journal.num_bytes
    journal.write(4, b"fourth")
    journal.close()
    assert payloads(path) == [*PAYLOADS, b"fourth"]


def test_a_short_write_goes_on_until_all_is_written(path, monkeypatch):
    journal = Journal.open_to_append(path)
    monkeypatch.setattr(module.os, "writev", lambda descriptor, parts: os.write(descriptor, b"".join(parts)[:40]))
    journal.write(4, [b"in", b"several", b"pieces"])
    journal.close()
    assert payloads(path)[3] == b"inseveralpieces"


def test_a_journal_that_cannot_even_be_cut_back_refuses_further_writes(path, monkeypatch):
    journal = Journal.open_to_append(path)
    monkeypatch.setattr(module.os, "writev", failing(OSError(errno.EIO, "bad disk")))
    monkeypatch.setattr(module.os, "ftruncate", failing(OSError(errno.EIO, "bad disk")))
    with pytest.raises(OSError, match="bad disk"):
        journal.write(4, b"lost")
    monkeypatch.undo()
    with refused(StoreError, "bad disk", file=path):
        journal.write(4, b"again")
    journal.close()
    assert payloads(path) == PAYLOADS


def test_a_failed_sync_is_not_forgotten(path, monkeypatch):
    journal = Journal.open_to_append(path)
    monkeypatch.setattr(module, "_sync", failing(OSError(errno.EIO, "bad disk")))
    with pytest.raises(OSError, match="bad disk"):
        journal.sync()
    monkeypatch.undo()
    with refused(StoreError, "bad disk", file=path):
        journal.write(4, b"again")
    journal.close()


# Children


def test_a_child_cannot_write_and_is_told_who_can(path):
    journal = Journal.open_to_append(path)
    answer = in_child(lambda: journal.write(4, b"from the child"))
    assert answer.startswith(f"{BusyError.__name__}: this journal can be written by the process that opened it")
    assert f"pid {os.getpid()}" in answer
    journal.write(4, b"from the parent")
    journal.close()
    assert payloads(path) == [*PAYLOADS, b"from the parent"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="lists open files by /proc")
def test_a_child_does_not_hold_the_file(path):
    journal = Journal.open_to_append(path)
    held = lambda: [str(path) for name in os.listdir("/proc/self/fd") if opened(name) == str(path)]
    assert held() == [str(path)]
    assert in_child(held) == "[]"
    journal.close()


def opened(name: str) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # that of the listing itself
        return None


# Several writers, one at a time


def shared_pair(path: Path) -> tuple[Journal, Journal]:
    *_, last = read_records(path)
    return Journal.open_shared(path, after=last), Journal.open_shared(path, after=last)


def test_writers_that_catch_up_before_they_write_see_all_records_in_one_order(path):
    one, two = shared_pair(path)
    one.write(4, b"by one")
    assert [(record.number, record.payload) for record in two.catch_up()] == [(4, b"by one")]
    two.write(5, b"by two")
    assert [record.payload for record in one.catch_up()] == [b"by two"]
    assert (one.catch_up(), two.catch_up()) == ([], [])
    one.close()
    two.close()
    assert payloads(path) == [*PAYLOADS, b"by one", b"by two"]


def test_a_shared_journal_is_read_from_its_first_record_where_none_was_read_before(path):
    journal = Journal.open_shared(path)
    assert [record.payload for record in journal.catch_up()] == PAYLOADS
    journal.close()


def test_catching_up_removes_what_a_killed_writer_left_at_any_byte(path):
    *_, last = read_records(path)
    whole = path.stat().st_size
    one, two = shared_pair(path)
    one.write(4, b"cut off")
    data = path.read_bytes()
    for size in range(whole + 1, len(data)):
        path.write_bytes(data[:size])
        two.num_bytes, two.last_number = last.end_offset, last.number
        assert two.catch_up() == []
        two.write(4, b"after it")
        assert payloads(path) == [*PAYLOADS, b"after it"]
    one.close()
    two.close()


def test_a_whole_record_of_a_shared_journal_stays_where_an_interrupt_hit_its_writer(path, monkeypatch):
    # Readers take no lock: one may have seen it.
    one, two = shared_pair(path)
    writev = os.writev

    def interrupted(descriptor, parts):
        writev(descriptor, parts)
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "writev", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.write(4, b"there")
    monkeypatch.undo()
    assert [record.payload for record in one.catch_up()] == [b"there"]
    assert [record.payload for record in two.catch_up()] == [b"there"]
    one.close()
    two.close()


def test_one_record_is_read_by_where_it_begins(path):
    first, second, _ = read_records(path)
    with path.open("rb") as file:
        assert module.read_record(path, file.fileno(), ID, first.end_offset) == second
        for offset, reason in ((first.end_offset + 1, "checksum"), (path.stat().st_size, "cut off")):
            with refused(StoreError, reason, file=path, byte=offset):
                module.read_record(path, file.fileno(), ID, offset)
