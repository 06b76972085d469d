"""tar files in the layout of WebDataset. Consecutive members with one key are the columns of one row.

The key is a member's path up to the first dot of its name, and the column is the rest: `shard/0001.txt` and
`shard/0001.json` are {"__key__": "shard/0001", "txt": "...", "json": {...}}. Read as a stream, nothing is written to
disk. A key that comes again later, after others, is another row. Python's tarfile takes a damaged header for the end of
the archive; here that is an error.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from io import BufferedReader
from typing import Any

import msgspec

from batchwright.sources.formats import MAX_ROW_BYTES, Malformed, Row, bad_byte, register_format, too_long

_TEXT = ("txt", "text", "md", "html", "htm", "xml", "csv", "tsv", "jsonl", "cls", "transcript")
_SKIP_BYTES = 1 << 20
_HEADER_BYTES = 512


@register_format("tar", extensions=(".tar",), version="1")
def _read_tar(
    stream: BufferedReader, *, columns: Sequence[str] | None = None, max_row_bytes: int = MAX_ROW_BYTES
) -> Iterator[Row | Malformed]:
    sample: _Sample | None = None
    try:
        with tarfile.open(
            fileobj=stream, mode="r|", tarinfo=_Member, encoding="utf-8", errors="surrogateescape"
        ) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep every header of a large archive
                key, column, fault = _key_of(member)
                if key is None:
                    continue
                if sample is None or key != sample.key:
                    if sample is not None:
                        yield sample.row()
                    sample = _Sample(key, columns, max_row_bytes)
                sample.add(archive, member, column, fault)
            if sample is not None:
                yield sample.row()
                sample = None
            _expect_nothing(archive.fileobj)
    except (tarfile.TarError, _Damaged) as error:
        # The row in progress may lack members that came later.
        at = "" if sample is None else f" in the row with key {sample.key!r}"
        yield Malformed("damaged archive", f"this tar file is truncated or damaged{at} ({error})", rest=True)


class _Damaged(Exception):
    """A tar file with a damaged header, without an end, or with more data after its end."""


class _Member(tarfile.TarInfo):
    """A member whose header must not be damaged."""

    @classmethod
    def fromtarfile(cls, tarfile_: Any) -> _Member:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # two blocks of zeros: the end, as it should be
            raise
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            raise _Damaged("it has no end: it was cut off, or what wrote it was never closed") from None
        except tarfile.HeaderError as error:
            raise _Damaged(str(error)) from None


def _expect_nothing(stream: Any) -> None:
    """After the end of the archive there are only zeros."""
    while data := stream.read(_SKIP_BYTES):
        if data.count(0) != len(data):
            raise _Damaged("there is more after its end; tar --concatenate joins archives, cat does not")


def _key_of(member: tarfile.TarInfo) -> tuple[str | None, str, Malformed | None]:
    """(key, column, fault) of a member; no key if it does not belong to a row."""
    path = member.name.removeprefix("./")
    folder, slash, name = path.rpartition("/")
    stem, dot, column = name.partition(".")
    key = folder + slash + stem
    fault = _fault_of(member)
    if fault is None and (member.isdir() or not stem or (name.startswith("__") and name.endswith("__"))):
        return None, "", None  # a folder, a hidden file, or a note of the archive's own
    if fault is None and not dot:
        fault = f"member {path!r} has no extension, which would be its column"
    if fault is None:
        return key, column.lower(), None
    return key, column.lower(), Malformed("malformed row", fault)


def _fault_of(member: tarfile.TarInfo) -> str | None:
    """The reason why a member is not read, for any content."""
    try:
        member.name.encode("utf-8")
    except UnicodeEncodeError:
        return f"the name of member {member.name!a} is not UTF-8"
    parts = member.name.replace("\\", "/").split("/")
    if member.name.startswith(("/", "\\")) or ".." in parts or parts[0][1:] == ":":
        return f"member {member.name!r} leads out of the archive"
    if member.issym() or member.islnk():
        return f"member {member.name!r} is a link, to {member.linkname!r}"
    if member.issparse():
        return f"member {member.name!r} is sparse"
    if not member.isfile() and not member.isdir():
        return f"member {member.name!r} is a device or a pipe, not a file"
    return None


class _Sample:
    """The row that is being read: its columns so far, or its fault."""

    def __init__(self, key: str, columns: Sequence[str] | None, max_row_bytes: int) -> None:
        self.key, self._columns, self._max_row_bytes = key, columns, max_row_bytes
        self._row: Row = {"__key__": key}
        self._fault: Malformed | None = None
        self._num_bytes = 0

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo, column: str, fault: Malformed | None) -> None:
        self._fault = self._fault or fault
        if self._fault is not None:
            return
        if column in self._row:
            self._fault = Malformed("malformed row", f"member {member.name!r} comes twice in one row")
            return
        self._num_bytes += _HEADER_BYTES
        self._row[column] = None
        if self._columns is not None and column not in self._columns:
            return
        self._num_bytes += member.size
        if self._num_bytes > self._max_row_bytes:
            self._row.clear()
            self._fault = too_long(self._max_row_bytes, where=f"with member {member.name!r} the row has ")
            return
        file = archive.extractfile(member)
        assert file is not None, "only files get here"
        try:
            self._row[column] = _value(file.read(), column)
        except UnicodeDecodeError as error:
            self._fault = Malformed("not UTF-8", f"member {member.name!r}: {bad_byte(error)}")
        except (msgspec.DecodeError, RecursionError) as error:
            self._fault = Malformed("malformed row", f"member {member.name!r}: {error}")

    def row(self) -> Row | Malformed:
        return self._fault or self._row


def _value(data: bytes, column: str) -> Any:
    """Text, JSON or bytes, by the last part of the extension."""
    kind = column.rpartition(".")[2]
    if kind in _TEXT:
        return data.decode("utf-8-sig")
    if kind == "json":
        text = data.decode("utf-8-sig")  # names the place of a bad byte, which the JSON library does not
        return msgspec.json.decode(text)
    return data
