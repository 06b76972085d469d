"""tar files: members of one key are one row, nothing leaves the archive, and damage is noticed."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from batchwright.sources import format_for, read_unit
from batchwright.sources.units import EndOfSpan, Malformed, Span, Unit


def tar(*members: tuple, kind: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar file of (name, data) or (name, data, attributes of its header)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as archive:
        for name, data, *attributes in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for attribute, value in (attributes[0] if attributes else {}).items():
                setattr(info, attribute, value)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def read(folder: Path, data: bytes, name: str = "a.tar", columns=None, **options) -> list:
    path = folder / name
    path.write_bytes(data)
    kind = format_for(name).with_options(options)
    unit = Unit((Span(0, str(path), kind.name),), 1)
    return [row for _, _, row in read_unit(unit, {"tar": kind}, columns) if not isinstance(row, EndOfSpan)]


ONE, TWO, THREE = ("s/1.txt", b"one"), ("s/2.txt", b"two"), ("s/3.txt", b"three")


def texts_and_faults(rows: list) -> list:
    return [row if isinstance(row, Malformed) else row["txt"] for row in rows]


def test_members_of_one_key_are_the_columns_of_one_row(tmp_path):
    members = [ONE, ("s/1.json", b'{"a": [1]}'), ("s/1.seg.png", b"\x89"), ("s/2.TXT", b"caf\xc3\xa9")]
    assert read(tmp_path, tar(*members)) == [
        {"__key__": "s/1", "txt": "one", "json": {"a": [1]}, "seg.png": b"\x89"},
        {"__key__": "s/2", "txt": "café"},
    ]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_dialect_of_tar_is_read_with_long_names(tmp_path, kind):
    name = "folder/" * 14 + "n" * 90 if kind == tarfile.USTAR_FORMAT else "folder/" * 30 + "ü" * 150
    (row,) = read(tmp_path, tar((f"{name}.txt", b"one"), kind=kind))
    assert row == {"__key__": name, "txt": "one"}


def test_a_compressed_tar_is_read_by_either_of_its_names(tmp_path):
    for name in ("a.tgz", "a.tar.gz", "b.tar"):
        assert texts_and_faults(read(tmp_path, gzip.compress(tar(ONE, TWO)), name)) == ["one", "two"]


def test_only_the_columns_that_are_needed_are_read(tmp_path):
    members = [("1.jpg", bytes(2000)), ("1.txt", b"one"), ("1.json", b"{not read")]
    assert read(tmp_path, tar(*members), columns=["txt"], max_row_bytes=1600) == [
        {"__key__": "1", "jpg": None, "txt": "one", "json": None}
    ]


def test_a_key_that_comes_again_after_others_is_another_row(tmp_path):
    rows = read(tmp_path, tar(ONE, TWO, ("s/1.json", b"{}")))
    assert rows[2] == {"__key__": "s/1", "json": {}}


def test_folders_hidden_files_and_notes_of_the_archive_are_no_rows(tmp_path):
    folder = ("s", b"", {"type": tarfile.DIRTYPE})
    members = [folder, ("./s/1.txt", b"one"), ("s/.DS_Store", b"x"), ("s/._1.txt", b"x"), ("__index__", b"x")]
    assert read(tmp_path, tar(*members, ("s/1.json", b"{}"))) == [{"__key__": "s/1", "txt": "one", "json": {}}]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (("../2.txt", b"x"), "member '../2.txt' leads out of the archive"),
        (("s/../../2.txt", b"x"), "member 's/../../2.txt' leads out of the archive"),
        (("/etc/2.txt", b"x"), "member '/etc/2.txt' leads out of the archive"),
        (("C:\\2.txt", b"x"), r"member 'C:\\2.txt' leads out of the archive"),
        (
            ("2.txt", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
            "member '2.txt' is a link, to '/etc/passwd'",
        ),
        (("2.txt", b"", {"type": tarfile.LNKTYPE, "linkname": "s/1.txt"}), "member '2.txt' is a link, to 's/1.txt'"),
        (("2.txt", b"", {"type": tarfile.CHRTYPE}), "member '2.txt' is a device or a pipe, not a file"),
        (("2.txt", b"", {"type": tarfile.FIFOTYPE}), "member '2.txt' is a device or a pipe, not a file"),
        (("README", b"x"), "member 'README' has no extension, which would be its column"),
        (("2.json", b"{"), "member '2.json': Input data was truncated"),
        (("2\udce9.txt", b"x"), r"the name of member '2\udce9.txt' is not UTF-8"),
    ],
)
def test_a_member_that_is_none_of_a_rows_is_named_and_the_rows_around_it_are_good(tmp_path, bad, reason):
    rows = texts_and_faults(read(tmp_path, tar(ONE, bad, THREE, kind=tarfile.GNU_FORMAT)))
    assert rows == ["one", Malformed("malformed row", reason), "three"]


def test_a_name_in_an_extended_header_that_is_not_utf8_is_named(tmp_path):
    data = tar(("s/" + "ü" * 150 + ".txt", b"x"), THREE)
    rows = texts_and_faults(read(tmp_path, data.replace("ü".encode() * 150, b"\xff" * 300)))
    assert rows[0].reason.startswith(r"the name of member 's/\udcff")
    assert rows[1] == "three"


def test_a_sparse_member_is_named(tmp_path):
    data = bytearray(tar(ONE, ("s/2.txt", b"x" * 600), THREE, kind=tarfile.GNU_FORMAT))
    header = data[1024:1536]
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:410] = b"%011o\0%011o\0" % (0, 600)
    header[483:495] = b"%011o\0" % (1 << 32)
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    data[1024:1536] = header
    assert texts_and_faults(read(tmp_path, bytes(data))) == [
        "one",
        Malformed("malformed row", "member 's/2.txt' is sparse"),
        "three",
    ]


def test_text_that_is_not_utf8_is_named_with_its_member(tmp_path):
    rows = texts_and_faults(read(tmp_path, tar(ONE, ("s/2.txt", b"caf\xe9"), THREE)))
    assert rows == ["one", Malformed("not UTF-8", "member 's/2.txt': byte 0xe9 at 3"), "three"]


def test_a_column_that_comes_twice_in_a_row_is_a_fault(tmp_path):
    rows = texts_and_faults(read(tmp_path, tar(ONE, TWO, ("s/2.txt", b"again"), THREE)))
    assert rows == ["one", Malformed("malformed row", "member 's/2.txt' comes twice in one row"), "three"]


def test_a_member_beyond_the_limit_is_passed_over_without_being_read(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tar(ONE, ("s/2.txt", bytes(20 << 20)), THREE))
    kind = format_for("a.tar").with_options({"max_row_bytes": 1 << 20})
    tracemalloc.start()
    try:
        rows = [row for _, _, row in read_unit(Unit((Span(0, str(path), "tar"),), 1), {"tar": kind})][:-1]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert [rows[0]["txt"], rows[2]["txt"]] == ["one", "three"]
    assert rows[1].kind == "row too long"
    assert rows[1].reason == "with member 's/2.txt' the row has over 1,048,576 bytes"


def test_many_members_of_one_row_count_too(tmp_path):
    rows = read(tmp_path, tar(*[(f"1.x{n}", b"") for n in range(100)], ("2.txt", b"two")), max_row_bytes=10_000)
    assert rows[0].kind == "row too long"
    assert rows[1]["txt"] == "two"


@pytest.mark.parametrize("num_bytes", [10, 512, 600, 1024, 1100, 1536, 2048, 2049, 3072])
def test_a_tar_that_was_cut_anywhere_is_noticed_and_keeps_the_whole_rows_before(tmp_path, num_bytes):
    rows = texts_and_faults(read(tmp_path, tar(ONE, TWO, THREE)[:num_bytes]))
    assert rows[:-1] == ["one", "two", "three"][: max(num_bytes - 512, 0) // 1024]
    assert rows[-1].kind == "damaged archive"
    assert rows[-1].rest


def test_a_damaged_header_is_noticed_where_tarfile_would_stop_in_silence(tmp_path):
    data = bytearray(tar(ONE, TWO, THREE))
    data[2048 + 5] ^= 1
    rows = texts_and_faults(read(tmp_path, bytes(data)))
    assert rows[0] == "one"
    assert rows[1].reason == "this tar file is truncated or damaged in the row with key 's/2' (bad checksum)"


def test_more_after_the_end_is_noticed(tmp_path):
    rows = texts_and_faults(read(tmp_path, tar(ONE) + tar(TWO)))
    assert rows[0] == "one"
    assert "there is more after its end" in rows[1].reason


@pytest.mark.parametrize("data", [b"no tar file at all", b"x" * 2000])
def test_a_file_that_is_no_tar_is_one_fault(tmp_path, data):
    (fault,) = read(tmp_path, data)
    assert (fault.kind, fault.rest) == ("damaged archive", True)


def test_a_cut_off_compressed_tar_keeps_the_rows_before(tmp_path):
    members = [(f"{n}.txt", bytes([65 + n]) * 30_000) for n in range(20)]
    import random

    noise = random.Random(0)
    members = [(name, noise.randbytes(15_000).hex().encode()) for name, _ in members]
    data = gzip.compress(tar(*members))
    rows = read(tmp_path, data[: len(data) // 2], "a.tgz")
    assert 5 < len(rows) < 15
    assert all(row["txt"] == members[n][1].decode() for n, row in enumerate(rows[:-1]))
    assert rows[-1].kind == "damaged archive"
