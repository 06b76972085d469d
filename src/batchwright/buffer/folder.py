"""A buffer's folder: a checkpoint, the journal of later changes, versions, and the blocks of rows that they name.

    batchwright-buffer.json        the names of the valid checkpoint and journal: written last
    journal-<number>.log        the changes from that number on
    checkpoints/<number>.json   all data except rows, after that change
    versions/<ordinal>.json     the same, of each version that was committed
    blocks/<serial>-<n>.arrow   rows; written once, never changed
    writer.lock                 held by the one process that writes

Files appear whole and are never changed. A file that the pointer does not reach was left by a killed writer.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from batchwright.base.errors import BusyError, SpecError, StoreError
from batchwright.base.files import (
    exclusive,
    inside,
    is_part,
    let_go_in_children,
    out_of_space_at,
    part_name,
    publish,
    sync_folder,
    write_whole,
)
from batchwright.base.fingerprint import fingerprint_file
from batchwright.base.journal import HEAD_BYTES, Journal, Record, read_head
from batchwright.base.words import first_line
from batchwright.buffer.codec import block_from_arrow, block_to_arrow
from batchwright.buffer.schema import Columns, Schema

__all__ = ["POINTER"]

POINTER = "batchwright-buffer.json"
_LOCK = "writer.lock"
_FOLDERS = ("blocks", "checkpoints", "versions")
_FORMAT = 1
_TRIES = 50
"""The number of times that a reader starts again while a writer replaces its files."""
_RESTORE = "restore the folder from a copy"
SALVAGE = f"{_RESTORE}, or keep what is before it: DatasetBuffer.salvage(path, to=...)"
"""The remedy for a damaged journal."""

_JOURNAL_NAME = re.compile(r"journal-(\d+)\.log")
_DOCUMENT_NAME = re.compile(r"(\d+)\.json")
_BLOCK_NAME = re.compile(r"\d+-[0-9a-f]+\.arrow")
_HASH_DIGITS = 16
"""Digits of a block's hash, at the end of its name."""
_NAMED_BLOCKS = re.compile(rb'"(\d+-[0-9a-f]+\.arrow)"')

Document = dict[str, Any]
T = TypeVar("T")


class Pointer(msgspec.Struct, frozen=True):
    format: int
    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    """16 bytes, in hexadecimal: the same in the journal's own header."""
    checkpoint: Annotated[str, msgspec.Meta(pattern=f"^{_DOCUMENT_NAME.pattern}$")] | None
    journal: Annotated[str, msgspec.Meta(pattern=f"^{_JOURNAL_NAME.pattern}$")]

    @property
    def files(self) -> list[str]:
        """Paths of the files in the folder."""
        return [self.journal] if self.checkpoint is None else [self.journal, f"checkpoints/{self.checkpoint}"]


class _Sealed(msgspec.Struct):
    """A document in its file, with a checksum: a damaged number is not believed."""

    format: int
    xxh3: str
    document: msgspec.Raw


P = TypeVar("P", Pointer, _Sealed)


class _Gone(StoreError):
    """A file is missing. For a reader, the writer may have replaced it."""


class BufferFolder:
    """The files of one buffer: `create_or_open` for its one writer, `open_to_read` for any number of readers."""

    def __init__(self, path: Path, pointer: Pointer, lock: contextlib.ExitStack | None) -> None:
        self.path = path
        self.is_read_only: bool = lock is None
        self._pointer = pointer
        self._lock = lock
        self._journal: Journal | None = None
        self._process = os.getpid()
        if lock is not None:
            let_go_in_children(self)

    # Opening

    @classmethod
    def create_or_open(cls, path: Path | str) -> BufferFolder:
        """For the writer: holds the lock until `close`, and removes what killed writers left behind.

        A folder with other files is refused, and stays unchanged.
        """
        path = Path(path)
        if not (path / POINTER).exists():
            _check_free(path)
        with contextlib.ExitStack() as stack:
            with out_of_space_at(path):
                stack.enter_context(_writing(path))
                for name in _FOLDERS:
                    (path / name).mkdir(exist_ok=True)
                pointer = _read_pointer(path) if (path / POINTER).exists() else _begin(path)
            folder = cls(path, pointer, stack.pop_all())
        try:
            folder._check_journal()
            folder._remove_leftovers()
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def open_to_read(cls, path: Path | str) -> BufferFolder:
        """Open a folder for a reader, without locks or writes."""
        path = Path(path)
        if not (path / POINTER).is_file():
            remedy = "look for a mistake in the path; DatasetBuffer(path=...) without read_only=True makes a new one"
            raise StoreError("there is no buffer here", folder=path, missing=POINTER, remedy=remedy)
        return cls(path, _read_pointer(path), None)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        if self._lock is not None:
            self._lock.close()  # closes the file, and so releases the lock
            self._lock = None

    def let_go(self) -> None:
        """In a child process: the lock belongs to the parent, and ends with it."""
        self.close()

    @property
    def is_writer(self) -> bool:
        return self._lock is not None and self._process == os.getpid()

    def check_writer(self) -> None:
        if self.is_writer:
            return
        if self.is_read_only:
            remedy = "DatasetBuffer(path=...) without read_only=True, in the one process that writes"
            raise SpecError("this buffer was opened to read", parameter="read_only", folder=self.path, remedy=remedy)
        if self._process != os.getpid():
            what = "this buffer can be written by the process that opened it, not by a child of it"
            remedy = "write in that process; here, open the folder with read_only=True"
            raise BusyError(what, folder=self.path, process=f"pid {self._process}", remedy=remedy)
        raise SpecError("this buffer was closed", folder=self.path, remedy="DatasetBuffer(path=...) opens it again")

    # Content

    @property
    def pointer(self) -> Pointer:
        """The pointer: the last one written, for the writer; the one on disk now, for a reader."""
        if self._lock is None:
            self._pointer = _read_pointer(self.path)
        return self._pointer

    @property
    def buffer_id(self) -> bytes:
        return bytes.fromhex(self._pointer.id)

    @property
    def journal_path(self) -> Path:
        return self.path / self.pointer.journal

    @property
    def journal(self) -> Journal:
        """The writer's journal. `write_checkpoint` replaces it: ask each time."""
        return self._journal if self._journal is not None else self.open_journal()

    def open_journal(self, after: Record | None = None) -> Journal:
        """Open the journal to continue it, `after` a record that was read already, if given."""
        self.check_writer()
        if self._journal is not None:
            self._journal.close()
        self._journal = Journal.open_to_append(self.journal_path, after, remedy=SALVAGE)
        return self._journal

    def read(self, load: Callable[[Document | None, Path], T]) -> T:
        """`load(checkpoint, journal file)`, begun again if the writer replaced files while they were read."""
        for attempt in range(_TRIES):
            pointer = self.pointer
            try:
                self._check_journal()
                return load(self._checkpoint(pointer), self.path / pointer.journal)
            except (_Gone, FileNotFoundError):
                if self._lock is not None or _read_pointer(self.path) == pointer:
                    raise
                time.sleep(0.001 * attempt)
        what = "the writer replaces this buffer's files faster than they can be read"
        raise StoreError(what, folder=self.path, remedy="try again")

    def _checkpoint(self, pointer: Pointer) -> Document | None:
        if pointer.checkpoint is None:
            return None
        return _decoded(_unsealed(self.path / "checkpoints" / pointer.checkpoint))

    def _check_journal(self) -> None:
        path = self.path / self._pointer.journal
        try:
            found = read_head(path)
        except FileNotFoundError:
            raise _gone(path) from None
        if found.owner_id != self.buffer_id:
            what, owner = "this journal belongs to another buffer", found.owner_id.hex()
            raise StoreError(what, file=path, buffer=owner, expected=self._pointer.id, remedy=_RESTORE)

    # Checkpoints and versions

    def write_checkpoint(self, number: int, document: Document) -> None:
        """The state after change `number`, and an empty journal for those from the next on.

        Killed at any moment, the folder is at the old checkpoint with its journal, or at the new one.
        After an error, `journal` is the valid one.
        """
        self.check_writer()
        first_number = number + 1
        if self._journal is not None and self._journal.last_number >= first_number:
            raise ValueError(f"a checkpoint after change {number} would lose change {self._journal.last_number}")
        old = self._pointer
        new = Pointer(_FORMAT, old.id, f"{number:012}.json", f"journal-{first_number:012}.log")
        journal = self._journal
        try:
            with out_of_space_at(self.path, then="try again: the buffer is as it was"):
                write_whole(self.path / "checkpoints" / f"{number:012}.json", _sealed(document))
                if new.journal != old.journal:
                    journal = Journal.create(self.path / new.journal, first_number, self.buffer_id)
                if new != old:
                    write_whole(self.path / POINTER, _encoded(new))
        except BaseException:
            if new != old and _read_pointer(self.path) == new:
                self._use(new, journal)  # the error came after the pointer got its name
            else:
                if journal is not None and journal is not self._journal:
                    journal.close()
                self._remove_files_of(new, but_not_of=old)
            raise
        self._use(new, journal)
        self._remove_files_of(old, but_not_of=new)

    def _remove_files_of(self, pointer: Pointer, *, but_not_of: Pointer) -> None:
        """Remove files that are not needed any more. If this fails or is cut short, the next writer finds them."""
        for name in set(pointer.files) - set(but_not_of.files):
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def _use(self, pointer: Pointer, journal: Journal | None) -> None:
        if self._journal is not None and self._journal is not journal:
            self._journal.close()
        self._pointer, self._journal = pointer, journal

    def write_version(self, ordinal: int, document: Document) -> None:
        self.check_writer()
        with out_of_space_at(self.path, then="commit again"):
            write_whole(self._version(ordinal), _sealed(document))

    def read_versions(self) -> list[Document]:
        """Return the documents of the versions, by ordinal."""
        found = []
        for ordinal in self._ordinals():
            with contextlib.suppress(_Gone):  # removed since they were listed
                found.append(_decoded(_unsealed(self._version(ordinal))))
        return found

    def missing_version(self, ordinal: int) -> StoreError:
        return _gone(self._version(ordinal))

    def remove_version(self, ordinal: int) -> None:
        self.check_writer()
        self._version(ordinal).unlink(missing_ok=True)
        sync_folder(self.path / "versions")

    def _version(self, ordinal: int) -> Path:
        return self.path / "versions" / f"{ordinal:08}.json"

    def _ordinals(self) -> list[int]:
        names = map(_DOCUMENT_NAME.fullmatch, _listed(self.path / "versions"))
        return sorted(int(name[1]) for name in names if name)

    # Blocks

    def write_block(self, serial: int, columns: Columns, extra: dict[str, NDArray[np.int64]]) -> str:
        """Rows and arrays of integers as an Arrow file, on disk when this returns. Its name is never used again."""
        self.check_writer()
        batch = block_to_arrow(columns, extra)
        part = part_name(self.path / "blocks" / f"{serial:08}.arrow")
        with out_of_space_at(self.path, then="try again: the buffer is as it was"):
            try:
                with open(part, "wb") as file:
                    with pa.ipc.new_file(pa.PythonFile(file, "w"), batch.schema) as writer:
                        writer.write_batch(batch)
                    file.flush()
                    os.fsync(file.fileno())
                name = f"{serial:08}-{os.urandom(5).hex()}{fingerprint_file(part)[:_HASH_DIGITS]}.arrow"
                publish(part, part.with_name(name))
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        return name

    def damaged_blocks(self) -> Iterator[tuple[Path, str]]:
        """Reads every block that counts, and gives those whose bytes are not the ones that were written, and why."""
        for name in sorted(self._named_blocks()):
            path = inside(self.path / "blocks", name)
            try:
                found = fingerprint_file(path)[:_HASH_DIGITS]
            except OSError as error:
                yield path, error.strerror or str(error)
                continue
            if found != path.stem[-_HASH_DIGITS:]:
                yield path, "its bytes are not those that were written"

    def map_block(
        self, name: str, schema: Schema, columns: Collection[str] | None = None, extra: Collection[str] = ()
    ) -> tuple[Columns, dict[str, NDArray[np.int64]]]:
        """Map the columns given to `write_block`, read-only, over the file's own memory: all columns, or some.

        Requested columns, and arrays in `extra`, must exist.
        """
        path = inside(self.path / "blocks", name)
        try:
            with pa.memory_map(str(path)) as file:
                found, arrays = block_from_arrow(file, schema, columns)
            if missing := {*(columns or ()), *extra} - {*found, *arrays}:
                raise ValueError(f"{min(missing)!r} is not in it")
            return found, arrays
        except FileNotFoundError:
            raise _gone(path) from None
        except (ValueError, TypeError, pa.ArrowException, OSError) as error:
            raise _damaged(path, str(error)) from error

    def damaged_block(self, name: str, reason: str) -> StoreError:
        return _damaged(self.path / "blocks" / name, reason)

    def unused(self) -> set[str]:
        """The blocks that neither the checkpoint nor a version names."""
        return set(filter(_BLOCK_NAME.fullmatch, _listed(self.path / "blocks"))) - self._named_blocks()

    def remove_blocks(self, names: Collection[str]) -> None:
        self.check_writer()
        for name in names:
            (self.path / "blocks" / name).unlink(missing_ok=True)

    def _named_blocks(self) -> set[str]:
        """Found by their pattern, wherever they are in a document."""
        names = [f"versions/{ordinal:08}.json" for ordinal in self._ordinals()]
        if self._pointer.checkpoint is not None:
            names.append(f"checkpoints/{self._pointer.checkpoint}")
        return {found.decode() for name in names for found in _NAMED_BLOCKS.findall(_unsealed(self.path / name))}

    def _remove_leftovers(self) -> None:
        """Remove the files that killed writers left. Only files with our own names, after all valid files were read."""
        self.remove_blocks(self.unused())
        journals = filter(_JOURNAL_NAME.fullmatch, _listed(self.path))
        checkpoints = filter(_DOCUMENT_NAME.fullmatch, _listed(self.path / "checkpoints"))
        old = {*journals, *(f"checkpoints/{name}" for name in checkpoints)} - set(self._pointer.files)
        parts = (
            f"{folder}/{name}" for folder in (".", *_FOLDERS) for name in _listed(self.path / folder) if is_part(name)
        )
        for name in (*old, *parts):
            (self.path / name).unlink(missing_ok=True)


# The folder and its pointer


def _listed(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _check_free(path: Path) -> None:
    """Refuse a folder unless it is empty, or was left by a writer that was killed while making it."""
    if not path.exists():
        return
    if not path.is_dir():
        raise SpecError("path= is a file, not a folder", path=path, remedy="path=... of a folder for this buffer alone")
    found = list(_foreign(path))
    if found:
        remedy = "path=... of a folder for this buffer alone: a new one, or an empty one"
        what = "path= is a folder with other things in it"
        raise SpecError(what, path=path, found=", ".join(found[:5]), remedy=remedy)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Hold the one writer's lock."""
    try:
        with exclusive(path / _LOCK, doing="writing to the buffer"):
            yield
    except BusyError as error:
        if error.where.get("process") == f"pid {os.getpid()}":  # a notebook's cell that ran twice, say
            error.headline = f"this process has the buffer {path} open already"
            error.remedy = "use that one, or close() it before; read_only=True looks on beside it"
        raise


def _foreign(path: Path) -> Iterator[str]:
    for name in _listed(path):
        if name in _FOLDERS:
            yield from (f"{name}/{inner}" for inner in _listed(path / name) if not is_part(inner))
        elif _JOURNAL_NAME.fullmatch(name):
            # A writer that was killed while it made the folder has left a journal without a record in it.
            if (path / name).stat().st_size > HEAD_BYTES:
                yield name
        elif name != _LOCK and not is_part(name):
            yield name


def _begin(path: Path) -> Pointer:
    pointer = Pointer(_FORMAT, os.urandom(16).hex(), None, f"journal-{1:012}.log")
    Journal.create(path / pointer.journal, 1, bytes.fromhex(pointer.id)).close()
    write_whole(path / POINTER, _encoded(pointer))
    sync_folder(path.parent)
    return pointer


def _encoded(pointer: Pointer) -> bytes:
    return msgspec.json.encode(pointer) + b"\n"


def _read_pointer(path: Path) -> Pointer:
    return _read_json(path / POINTER, Pointer)


def _read_json(path: Path, kind: type[P]) -> P:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise _gone(path) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error
    if found.format != _FORMAT:
        what = f"this buffer has format {found.format}, and this batchwright reads format {_FORMAT}"
        raise StoreError(what, file=path, remedy="use the version of batchwright that wrote it")
    return found


# Documents


def _sealed(document: Document) -> bytes:
    raw = msgspec.json.encode(document)
    return msgspec.json.encode(_Sealed(_FORMAT, xxhash.xxh3_128_hexdigest(raw), msgspec.Raw(raw)))


def _unsealed(path: Path) -> bytes:
    """The bytes of a document that fit their checksum."""
    found = _read_json(path, _Sealed)
    raw = bytes(found.document)
    if found.xxh3 != xxhash.xxh3_128_hexdigest(raw):
        raise _damaged(path, "its content does not fit its checksum")
    return raw


def _decoded(raw: bytes) -> Document:
    document: Document = msgspec.json.decode(raw)
    return document


def _damaged(path: Path, reason: str) -> StoreError:
    return StoreError("a file of this buffer is damaged", file=path, reason=first_line(reason), remedy=_RESTORE)


def _gone(path: Path) -> _Gone:
    return _Gone("a file of this buffer is missing", file=path, remedy=_RESTORE)
