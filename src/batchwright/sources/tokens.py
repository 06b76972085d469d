"""Files of token ids from other tools: their format, the type and place of the ids, and the ends of documents.

Every number of a header or index is compared with the size of its file before anything is allocated by it. An index
takes eight bytes of memory for each document. `TokenScan` then reads the ids once, in order.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.base.checks import local_path, one_of
from batchwright.base.errors import SourceError, SpecError
from batchwright.base.words import first_line
from batchwright.columns.flat import read_npy_header
from batchwright.sources.listing import check_name

__all__ = ["Range", "TokenFile", "TokenScan", "list_token_files", "open_token_file", "token_dtype"]

FORMATS = ("bin", "npy", "megatron", "datatrove")
_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_REMEDY = "a .bin of raw ids, a .npy, a Megatron .idx with its .bin, or a datatrove .ds"


@dataclass(frozen=True, slots=True)
class TokenFile:
    """One file of ids, as its format describes it."""

    path: str
    """Absolute."""
    format: str
    dtype: np.dtype[Any]
    offset: int
    """Bytes before the first id."""
    num_tokens: int
    ends: NDArray[np.int64] | None
    """The ends of documents, in tokens from the start of the file. None if an id ends a document, or none is known."""
    note: str = ""
    """Notes for the user on the reading of the file."""

    @property
    def num_bytes(self) -> int:
        return self.offset + self.num_tokens * self.dtype.itemsize


# The files of a source


def list_token_files(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Absolute paths of the files that hold tokens, each once, in the order of their path bytes.

    A folder stands for the token files in it (not below it), a glob for its matches. Either of Megatron's two files, or
    the common part of their names, stands for the `.bin`.
    """
    parts = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not parts:
        raise SourceError("no input: an empty list of files", parameter="path", remedy=_REMEDY)
    found = {os.path.abspath(path) for part in parts for path in _expand(part)}
    return sorted(found, key=os.fsencode)


def _expand(path: str | os.PathLike[str]) -> list[str]:
    expanded = str(local_path(path=path))
    if os.path.isdir(expanded):
        return _in_folder(expanded, path)
    if os.path.exists(expanded):
        return [_data_file(expanded)]
    if os.path.isfile(f"{expanded}.idx") or os.path.isfile(f"{expanded}.bin"):  # Megatron names both by their stem
        return [_data_file(f"{expanded}.bin")]
    matches = [match for match in glob.glob(expanded, recursive=True) if os.path.isfile(match)]
    if not matches:
        what = "this pattern matches no file" if glob.has_magic(expanded) else "this file does not exist"
        raise SourceError(f"no input: {what}", file=path, remedy=_REMEDY)
    return [_data_file(match) for match in matches if not match.endswith(".offsets.npy")]


def _in_folder(folder: str, path: str | os.PathLike[str]) -> list[str]:
    if os.path.isfile(os.path.join(folder, "batchwright.json")):
        raise SourceError(f"{path} is a store already", file=path, remedy="open it with a loader")
    names = [entry.name for entry in os.scandir(folder) if entry.is_file() and _is_token_file(entry.name)]
    if not names:
        raise SourceError("no input: this folder holds no token files", file=path, remedy=_REMEDY)
    return [os.path.join(folder, name) for name in names]


def _is_token_file(name: str) -> bool:
    return name.endswith((".bin", ".npy", ".ds")) and not name.endswith(".offsets.npy") and not name.startswith(".")


def _data_file(path: str) -> str:
    data = path[: -len(".idx")] + ".bin" if path.endswith(".idx") else path
    if not os.path.exists(data):
        raise SourceError("this Megatron index has no data beside it", file=path, missing=data, remedy="its .bin too")
    if not os.path.isfile(data):  # reading a pipe could wait for ever
        raise SourceError("no input: this is no regular file", file=path, remedy=_REMEDY)
    return data


# Formats


def token_dtype(asked: Any) -> np.dtype[Any]:
    """A user's dtype, checked.

    >>> token_dtype("uint16")
    dtype('uint16')
    """
    dtype: np.dtype[Any] | None = None
    with contextlib.suppress(TypeError):
        dtype = np.dtype(asked)
    if dtype is None or dtype.name not in _DTYPES or not dtype.isnative:
        raise SpecError(f"dtype={asked!r} is not a type of token ids", parameter="dtype", remedy="'uint16' or 'uint32'")
    return dtype


def open_token_file(path: str, *, dtype: np.dtype[Any], format: str | None = None) -> TokenFile:
    """A file as its header and index describe it. `dtype` is for files of raw ids, which do not say."""
    kind = _format_of(path) if format is None else one_of(FORMATS, format=format)
    check_name(path)
    try:
        found = _READERS[kind](path, dtype)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        _refuse("this file cannot be read", error.filename or path, "mend it, or leave it out", reason=reason)
    if not found.num_tokens:
        _refuse("there are no tokens in this file", path, "leave it out")
    return found


def _format_of(path: str) -> str:
    kind = {".npy": "npy", ".ds": "datatrove", ".bin": "bin"}.get(os.path.splitext(path)[1])
    if kind is None:
        _refuse("this is not a format of tokens that is known by its extension", path, f"{_REMEDY}; or format='bin'")
    if kind == "bin" and os.path.isfile(f"{path[:-4]}.idx"):
        return "megatron"
    return kind


def _refuse(what: str, path: str, remedy: str, **where: object) -> NoReturn:
    raise SourceError(what, file=path, remedy=remedy, **where)


def _count(path: str, num_bytes: int, dtype: np.dtype[Any]) -> int:
    """The number of ids in `num_bytes`."""
    if num_bytes % dtype.itemsize:
        remedy = "dtype= as the file was written with; or the file was cut short"
        _refuse(f"{num_bytes:,} bytes are not a whole number of {dtype.name} ids", path, remedy)
    return num_bytes // dtype.itemsize


# Raw ids: nanoGPT, and the same behind the header of llm.c

_HEADER_BYTES = 1024
_HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""First number -> (version, type of the ids)."""
_EVAL_MAGIC = 20240522


def _open_bin(path: str, dtype: np.dtype[Any]) -> TokenFile:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(_HEADER_BYTES)
    magic = version = count = 0
    if len(head) == _HEADER_BYTES:
        magic, version, count = struct.unpack("<3i", head[:12])
    if magic == _EVAL_MAGIC:
        _refuse("this is an evaluation file of llm.c, not a stream of tokens", path, "its train and val files")
    if magic not in _HEADERS:
        return TokenFile(path, "bin", dtype, 0, _count(path, size, dtype), None)
    known_version, name = _HEADERS[magic]
    dtype = np.dtype(name)
    if version != known_version:
        what = f"the header says version {version}; version {known_version} of {magic} is known"
        _refuse(what, path, "write it again")
    found = _count(path, size - _HEADER_BYTES, dtype)
    if count != found:
        remedy = "copy it again: it was cut short, or is not what it seems"
        _refuse(f"the header says {count:,} tokens, and {found:,} of {name} follow it", path, remedy)
    return TokenFile(path, "bin with header", dtype, _HEADER_BYTES, found, None)


# NumPy


def _npy_header(path: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """(dtype, shape, offset of the data) of a .npy file with one dimension, or two in C order."""
    again = "np.save of a one-dimensional array of whole numbers"
    with open(path, "rb") as file:
        try:
            dtype, shape, is_fortran = read_npy_header(file)
        except ValueError as error:
            remedy = f"{again}; for raw ids under this name, format='bin'"
            _refuse("this is not a .npy file of numbers", path, remedy, reason=first_line(error))
        offset = file.tell()
    if dtype.kind not in "iu":
        _refuse(f"this array is of {dtype}, not of whole numbers", path, again)
    if not dtype.isnative:
        _refuse(f"this array is big-endian ({dtype.str})", path, "array.astype(array.dtype.newbyteorder('<')), saved")
    if len(shape) not in (1, 2) or (len(shape) == 2 and is_fortran):
        order = " in Fortran order" if is_fortran else ""
        remedy = "one dimension, or two in C order, where each row is a document"
        _refuse(f"this array has shape {shape}{order}", path, remedy)
    expected, found = math.prod(shape) * dtype.itemsize, os.path.getsize(path) - offset
    if expected != found:
        what = f"the header says {expected:,} bytes of {dtype.name}, and {found:,} follow it"
        _refuse(what, path, "write or copy it again")
    if offset % dtype.itemsize:
        _refuse(f"its data begins at byte {offset}, which is not aligned for {dtype.name}", path, again)
    return dtype, shape, offset


def _open_npy(path: str, dtype: np.dtype[Any]) -> TokenFile:
    dtype, shape, offset = _npy_header(path)
    count, beside = math.prod(shape), f"{path.removesuffix('.npy')}.offsets.npy"
    ends = None
    if len(shape) == 2:
        ends = np.arange(1, shape[0] + 1, dtype=np.int64) * shape[1]
    elif os.path.isfile(beside):
        ends = _ends_beside(beside, path, count)
    return TokenFile(path, "npy", dtype, offset, count, ends)


def _ends_beside(path: str, tokens: str, num_tokens: int) -> NDArray[np.int64]:
    """Ends of documents as `batchwright export --to npy` writes them, after a 0."""
    dtype, shape, offset = _npy_header(path)
    borders = np.fromfile(path, dtype, offset=offset).astype(np.int64)
    if len(shape) != 1 or len(borders) < 2 or borders[0] != 0:
        _refuse(f"borders of documents have shape {shape}, or do not begin with 0", path, "0 and every document's end")
    return _checked_ends(borders[1:], num_tokens, path, tokens)


def _checked_ends(ends: NDArray[np.int64], num_tokens: int, index: str, tokens: str) -> NDArray[np.int64]:
    """Ends that ascend to the number of tokens."""
    falls = np.flatnonzero(np.diff(ends, prepend=0) < 0)
    if len(falls):
        what = f"document {falls[0]} ends at token {ends[falls[0]]:,}, before the one in front of it"
        _refuse(what, index, _AGAIN, tokens=tokens)
    if ends[-1] != num_tokens:
        what = f"the last document ends at token {ends[-1]:,}, and the data has {num_tokens:,} tokens"
        _refuse(what, index, _AGAIN, tokens=tokens)
    return ends


_AGAIN = "copy or write both files again: they are not of one run"


# Megatron: <prefix>.bin has the ids, <prefix>.idx the places of sequences, and which of them are one document

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_MEGATRON_FLOATS = {6: "ids of float64", 7: "ids of float32"}


def _open_megatron(path: str, dtype: np.dtype[Any]) -> TokenFile:
    index = f"{path.removesuffix('.bin')}.idx"
    dtype, sequences, entries = _megatron_header(index)
    at = _MEGATRON_HEADER.size
    sizes = np.fromfile(index, "<i4", sequences, offset=at).astype(np.int64)
    pointers = np.fromfile(index, "<i8", sequences, offset=at + 4 * sequences)
    borders = np.fromfile(index, "<i8", entries, offset=at + 12 * sequences)
    if np.fromfile(index, "i1", offset=at + 12 * sequences + 8 * entries).any():
        what = "this Megatron dataset has sequences of a second kind (modes): it is not text alone"
        _refuse(what, index, "text only")
    if (sizes < 0).any():
        wrong = int(np.argmax(sizes < 0))
        _refuse(f"sequence {wrong} has {sizes[wrong]} tokens", index, _AGAIN)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    expected = starts * dtype.itemsize
    if (pointers != expected[:-1]).any():
        wrong = int(np.argmax(pointers != expected[:-1]))
        follows = f"by the sizes of those before it, at {expected[wrong]:,}"
        _refuse(f"sequence {wrong} lies at byte {pointers[wrong]:,}; {follows}", index, _AGAIN)
    found = os.path.getsize(path)
    if expected[-1] != found:
        what = f"the index describes {expected[-1]:,} bytes of {dtype.name}, and the data has {found:,}"
        _refuse(what, path, _AGAIN, index=index)
    if borders[0] != 0 or borders[-1] != sequences:
        what = f"the documents go from sequence {borders[0]} to {borders[-1]:,}, of {sequences:,} sequences"
        _refuse(what, index, _AGAIN)
    falls = np.flatnonzero(np.diff(borders) < 0)
    if len(falls):
        begin, end = borders[falls[0] : falls[0] + 2]
        _refuse(f"document {falls[0]} goes from sequence {begin} to {end}", index, _AGAIN)
    return TokenFile(path, "megatron", dtype, 0, int(starts[-1]), starts[borders[1:]])


def _megatron_header(index: str) -> tuple[np.dtype[Any], int, int]:
    """(type of the ids, sequences, borders of documents) of an index whose length matches its header."""
    with open(index, "rb") as file:
        head, size = file.read(_MEGATRON_HEADER.size), os.fstat(file.fileno()).st_size
    if len(head) < _MEGATRON_HEADER.size or not head.startswith(_MEGATRON_MAGIC):
        _refuse("this is not a Megatron index: it does not begin with MMIDIDX", index, _AGAIN)
    _, version, code, sequences, entries = _MEGATRON_HEADER.unpack(head)
    if version != 1:
        _refuse(f"this Megatron index has version {version}; version 1 is known", index, "write it with megatron-core")
    if code not in _MEGATRON_DTYPES:
        what = _MEGATRON_FLOATS.get(code, f"the unknown type code {code}")
        _refuse(f"this Megatron index says {what}", index, "ids as whole numbers")
    expected = _MEGATRON_HEADER.size + 12 * sequences + 8 * entries
    if size not in (expected, expected + sequences):  # with a mode for each sequence
        said = f"{sequences:,} sequences and {entries:,} document borders, which take {expected:,} bytes"
        _refuse(f"the index says {said}; it has {size:,}", index, _AGAIN)
    if not sequences or entries < 2:
        _refuse(f"the index has {sequences:,} sequences and {entries:,} document borders", index, "leave it out")
    return np.dtype(_MEGATRON_DTYPES[code]), sequences, entries


# datatrove: <name>.ds has the ids, <name>.ds.index the end of every document as uint64


def _open_datatrove(path: str, dtype: np.dtype[Any]) -> TokenFile:
    index, size = f"{path}.index", os.path.getsize(path)
    if not os.path.isfile(index):
        _refuse("this .ds file has no .ds.index beside it", path, "its index; or format='bin' for ids without one")
    index_bytes = os.path.getsize(index)
    if index_bytes % 8 or not index_bytes:
        _refuse(f"an index of {index_bytes:,} bytes is not a list of 64-bit numbers", index, _AGAIN)
    ends = np.fromfile(index, "<i8")
    count = int(ends[-1])
    fits = [dtype for dtype in ("uint16", "uint32") if size == count * np.dtype(dtype).itemsize]
    if not fits:
        what = f"the last document ends at token {count:,}, and the data has {size:,} bytes: neither 2 nor 4 for each"
        _refuse(what, index, _AGAIN, tokens=path)
    note = ""
    if os.path.isfile(f"{path}.loss"):
        note = f"{os.path.basename(path)}.loss is not used: every token counts in the loss"
    return TokenFile(path, "datatrove", np.dtype(fits[0]), 0, count, _checked_ends(ends, count, index, path), note)


_READERS: dict[str, Callable[[str, np.dtype[Any]], TokenFile]] = {
    "bin": _open_bin,
    "npy": _open_npy,
    "megatron": _open_megatron,
    "datatrove": _open_datatrove,
}


_READ_BYTES = 8 << 20


@dataclass(slots=True)
class Range:
    """Documents that lie end to end in a file."""

    start: int
    """The first token, counted from the first id of the file, as all numbers here."""
    ends: NDArray[np.int64]
    """The end of each document."""
    first_row: int
    """The number of the first document in its file."""
    is_whole: bool
    """False for a piece of a document that is too long for one range. The next range continues it, under its number."""
    content: Any
    """The hash (xxh3, 128 bits) of the tokens, which more can be added to."""


class TokenScan:
    """One pass over a file, in memory that does not depend on its size.

    >>> scan = TokenScan(file, vocab_size=257, eos=256)           # doctest: +SKIP
    >>> for documents in scan.ranges(max_tokens=2**31 - 1): ...   # doctest: +SKIP
    >>> scan.content_hash, scan.modified_ns                       # doctest: +SKIP
    """

    def __init__(
        self,
        file: TokenFile,
        *,
        vocab_size: int,
        eos: int | None,
        eos_first: bool = False,
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self.file: TokenFile = file
        self.vocab_size: int = vocab_size
        self.eos: int | None = eos
        self.eos_first: bool = eos_first
        self.content_hash: str = ""
        self.modified_ns: int = 0
        """Facts of the whole file, known when all ranges were taken."""
        self.begins_with_eos: bool = False
        self._advance = advance
        self._digest, self._hashed_bytes = xxhash.xxh3_128(), 0
        self._buffer = bytearray(_READ_BYTES)

    def ranges(self, *, max_tokens: int) -> Iterator[Range]:
        """The file's documents, in ranges of at most `max_tokens`. Only what follows a cut is read twice."""
        with open(self.file.path, "rb", buffering=0) as raw:
            before = _identity(os.fstat(raw.fileno()))
            if before[0] != self.file.num_bytes:
                raise self._changed()
            self._read(raw, 0, self.file.offset)
            start = row = 0
            while start < self.file.num_tokens:
                found = self._range(raw, start, min(start + max_tokens, self.file.num_tokens), row)
                yield found
                start, row = int(found.ends[-1]), row + len(found.ends) - (not found.is_whole)
            if _identity(os.fstat(raw.fileno())) != before or _identity(os.stat(self.file.path)) != before:
                raise self._changed()
        self.content_hash = self._digest.hexdigest()
        self.modified_ns = before[1]

    def _range(self, raw: BinaryIO, start: int, stop: int, row: int) -> Range:
        is_last, content, at_border = stop == self.file.num_tokens, xxhash.xxh3_128(), None
        found: list[NDArray[np.int64]] = []
        tokens_at_once = _READ_BYTES // self.file.dtype.itemsize
        for begin in range(start, stop, tokens_at_once):
            tokens = self._tokens(raw, begin, min(begin + tokens_at_once, stop))
            ends = self._ends(tokens, begin, start)
            done = 0
            if len(ends) and not is_last:  # a cut may be made here: the hash up to here is kept
                done = int(ends[-1]) - begin
                content.update(tokens[:done].view(np.uint8).data)
                at_border = content.copy()
            content.update(tokens[done:].view(np.uint8).data)
            found.append(ends)
        every = np.concatenate(found)
        if is_last and not (len(every) and every[-1] == stop):
            every = np.append(every, stop)  # the last document has no end of its own
        if not is_last and at_border is None:
            return Range(start, np.array([stop], np.int64), row, False, content)
        return Range(start, every, row, True, at_border or content)

    def _ends(self, tokens: NDArray[Any], begin: int, start: int) -> NDArray[np.int64]:
        """Ends of documents that these tokens (from `begin`) show, in a range from `start`."""
        if self.file.ends is not None:
            limits = [begin - (not begin), begin + len(tokens)]  # a document that ends at 0 is empty, and counts
            first, last = np.searchsorted(self.file.ends, limits, side="right")
            return self.file.ends[first:last]
        if self.eos is None:
            return np.empty(0, np.int64)
        hits = np.flatnonzero(tokens == self.eos).astype(np.int64) + begin
        if not self.eos_first:
            return hits + 1
        return hits[hits > start]

    def _tokens(self, raw: BinaryIO, begin: int, end: int) -> NDArray[Any]:
        dtype = self.file.dtype
        data = self._read(raw, self.file.offset + begin * dtype.itemsize, (end - begin) * dtype.itemsize)
        tokens = np.frombuffer(data, dtype)
        smallest = 0 if dtype.kind == "u" else int(tokens.min())
        if smallest < 0 or int(tokens.max()) >= self.vocab_size:
            wrong = int(np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[0])
            number, found = begin + wrong, int(tokens[wrong])
            what = f"token {number:,} of this file has id {found:,}, outside the vocabulary of {self.vocab_size:,}"
            remedy = "the tokenizer that the file was made with; or dtype=, if its ids are of another type"
            raise SourceError(what, file=self.file.path, token=number, read_as=dtype.name, remedy=remedy)
        if begin == 0 and self.eos is not None:
            self.begins_with_eos = int(tokens[0]) == self.eos
        return tokens

    def _read(self, raw: BinaryIO, position: int, num_bytes: int) -> memoryview:
        view = memoryview(self._buffer)[:num_bytes]
        raw.seek(position)
        done = 0
        while done < num_bytes:
            count = raw.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise self._changed()
            done += count
        if position + num_bytes > self._hashed_bytes:
            self._digest.update(view[self._hashed_bytes - position :])
            self._advance(position + num_bytes - self._hashed_bytes)
            self._hashed_bytes = position + num_bytes
        return view

    def _changed(self) -> SourceError:
        what, remedy = "this file changed while it was read", "run it again when nobody writes to it"
        return SourceError(what, file=self.file.path, remedy=remedy)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino
