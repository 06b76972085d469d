"""Files that already hold tokens: in which format, of which type, where the ids lie, and where documents end.

Nothing here reads the ids themselves. Every number of a header or index is compared with the size of its file before
anything is allocated by it, and with the other numbers before it is believed.
"""

from __future__ import annotations

import contextlib
import glob
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import local_path, one_of
from batchwright.base.errors import SourceError, SpecError

__all__ = ["FORMATS", "Ends", "TokenFile", "list_token_files", "open_token_file", "token_dtype"]

FORMATS = ("bin", "npy", "megatron", "datatrove")
_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_REMEDY = "a .bin of raw ids, a .npy, a Megatron .idx with its .bin, or a datatrove .ds"


@dataclass(frozen=True, slots=True)
class Ends:
    """Where documents end, in tokens from the start of the file: ascending, the last is the number of tokens."""

    count: int
    at: Callable[[int, int], NDArray[np.int64]]
    """The ends of documents [first, last)."""

    def within(self, after: int, upto: int) -> NDArray[np.int64]:
        """Ends e with after < e <= upto. Looks at few others: the index may be larger than memory.

        >>> Ends(4, lambda first, last: np.array([0, 3, 3, 9])[first:last]).within(-1, 3).tolist()
        [0, 3, 3]
        """
        numbers, end_of = range(self.count), lambda number: int(self.at(number, number + 1)[0])
        first = bisect_right(numbers, after, key=end_of)
        return self.at(first, bisect_right(numbers, upto, lo=first, key=end_of))


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
    ends: Ends | None
    """None where the format does not say: an id ends a document then, or nothing does."""
    note: str = ""
    """What the user should know of how it was read."""

    @property
    def num_bytes(self) -> int:
        return self.offset + self.num_tokens * self.dtype.itemsize


# Which files are meant


def list_token_files(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[str]:
    """Absolute paths of the files that hold tokens, each once, in the order of their path bytes.

    A folder means the token files in it (not below it), a glob what it matches. Of Megatron's two files, either one or
    what their names share means the `.bin`.
    """
    parts = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not parts:
        raise SourceError("no input: an empty list of files", parameter="path", remedy=_REMEDY)
    found = {os.path.abspath(path) for part in parts for path in _expand(part)}
    return sorted(found, key=os.fsencode)


def _expand(path: str | os.PathLike[str]) -> list[str]:
    expanded = str(local_path(path=path))
    if os.path.isdir(expanded):
        if os.path.isfile(os.path.join(expanded, "batchwright.json")):
            raise SourceError(f"{path} is a store already", file=path, remedy="open it with a loader")
        names = [entry.name for entry in os.scandir(expanded) if entry.is_file() and _is_token_file(entry.name)]
        if not names:
            raise SourceError("no input: this folder holds no token files", file=path, remedy=_REMEDY)
        return [os.path.join(expanded, name) for name in names]
    if os.path.exists(expanded):
        return [_data_file(expanded)]
    if os.path.isfile(f"{expanded}.idx") or os.path.isfile(f"{expanded}.bin"):  # Megatron names both by what they share
        return [_data_file(f"{expanded}.bin")]
    matches = [match for match in glob.glob(expanded, recursive=True) if os.path.isfile(match)]
    if not matches:
        what = "this pattern matches no file" if glob.has_magic(expanded) else "this file does not exist"
        raise SourceError(f"no input: {what}", file=path, remedy=_REMEDY)
    return [_data_file(match) for match in matches if not match.endswith(".offsets.npy")]


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
    """What lies in a file. `dtype` is for files of raw ids, which do not say."""
    kind = _format_of(path) if format is None else one_of(FORMATS, format=format)
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        _refuse("the name of this file is not UTF-8", ascii(path), "rename it: a store keeps file names as text")
    try:
        found = _READERS[kind](path, dtype)
    except OSError as error:
        _refuse(
            "this file cannot be read",
            error.filename or path,
            "mend it, or leave it out",
            reason=os.strerror(error.errno or 0),
        )
    if not found.num_tokens:
        _refuse("there are no tokens in this file", path, "leave it out")
    return found


def _format_of(path: str) -> str:
    kind = {".npy": "npy", ".ds": "datatrove", ".bin": "bin"}.get(os.path.splitext(path)[1])
    if kind is None:
        _refuse("this is not a format of tokens that is known by its extension", path, f"{_REMEDY}; or format='bin'")
    return "megatron" if kind == "bin" and os.path.isfile(f"{path[:-4]}.idx") else kind


def _refuse(what: str, path: str, remedy: str, **where: object) -> NoReturn:
    raise SourceError(what, file=path, remedy=remedy, **where)


def _count(path: str, num_bytes: int, dtype: np.dtype[Any]) -> int:
    """How many ids so many bytes are."""
    if num_bytes % dtype.itemsize:
        _refuse(
            f"{num_bytes:,} bytes are not a whole number of {dtype.name} ids",
            path,
            "dtype= as the file was written with; or the file was cut short",
        )
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
    magic, version, count = struct.unpack("<3i", head[:12]) if len(head) == _HEADER_BYTES else (0, 0, 0)
    if magic == _EVAL_MAGIC:
        _refuse("this is an evaluation file of llm.c, not a stream of tokens", path, "its train and val files")
    if magic not in _HEADERS:
        return TokenFile(path, "bin", dtype, 0, _count(path, size, dtype), None)
    known_version, name = _HEADERS[magic]
    dtype = np.dtype(name)
    if version != known_version:
        _refuse(
            f"the header says version {version}; version {known_version} of {magic} is known", path, "write it again"
        )
    found = _count(path, size - _HEADER_BYTES, dtype)
    if count != found:
        _refuse(
            f"the header says {count:,} tokens, and {found:,} of {name} follow it",
            path,
            "copy it again: it was cut short, or is not what it seems",
        )
    return TokenFile(path, "bin with header", dtype, _HEADER_BYTES, found, None)


# NumPy

_NPY_MAGIC_BYTES = 8
_NPY_HEADER_BYTES = 10_000
"""What NumPy itself takes for safe; looked at before so much is read."""


def _npy_header(path: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """(dtype, shape, where the data starts) of a .npy file. Nothing in it is unpickled."""
    again = "np.save of a one-dimensional array of whole numbers"
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            readers = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }
            if version not in readers:
                raise ValueError(f"version {version[0]}.{version[1]}")
            length = int.from_bytes(file.read(2 * version[0]), "little")
            if length > _NPY_HEADER_BYTES:
                raise ValueError(f"a header of {length:,} bytes")
            file.seek(_NPY_MAGIC_BYTES)
            shape, is_fortran, dtype = readers[version](file)
        except (ValueError, SyntaxError, TypeError, UnicodeError) as error:
            _refuse(
                "this is not a .npy file of numbers",
                path,
                f"{again}; for raw ids under this name, format='bin'",
                reason=str(error).splitlines()[0],
            )
        offset = file.tell()
    if dtype.kind not in "iu" or dtype.names is not None:
        _refuse(f"this array is of {dtype}, not of whole numbers", path, again)
    if not dtype.isnative:
        _refuse(f"this array is big-endian ({dtype.str})", path, "array.astype(array.dtype.newbyteorder('<')), saved")
    if len(shape) not in (1, 2) or (len(shape) == 2 and is_fortran):
        order = " in Fortran order" if is_fortran else ""
        _refuse(
            f"this array has shape {shape}{order}",
            path,
            "one dimension, or two in C order, where each row is a document",
        )
    expected, found = int(np.prod(shape, dtype=object)) * dtype.itemsize, os.path.getsize(path) - offset
    if min(shape) < 0 or expected != found:
        _refuse(
            f"the header says {expected:,} bytes of {dtype.name}, and {found:,} follow it",
            path,
            "write or copy it again",
        )
    if offset % dtype.itemsize:
        _refuse(f"its data begins at byte {offset}, which is not aligned for {dtype.name}", path, again)
    return dtype, shape, offset


def _open_npy(path: str, dtype: np.dtype[Any]) -> TokenFile:
    dtype, shape, offset = _npy_header(path)
    count = int(np.prod(shape, dtype=object))
    if len(shape) == 2:
        rows, width = shape
        ends = Ends(rows, lambda first, last: np.arange(first + 1, last + 1, dtype=np.int64) * width)
        return TokenFile(path, "npy", dtype, offset, count, ends)
    beside = f"{path[: -len('.npy')]}.offsets.npy"
    borders = _borders_beside(beside, path, count) if path.endswith(".npy") and os.path.isfile(beside) else None
    return TokenFile(path, "npy", dtype, offset, count, borders)


def _borders_beside(path: str, tokens: str, num_tokens: int) -> Ends:
    """Document borders as `batchwright export --to npy` writes them: 0, then the end of every document."""
    dtype, shape, offset = _npy_header(path)
    if len(shape) != 1 or shape[0] < 2:
        _refuse(f"borders of documents have shape {shape}", path, "0 and the end of every document")
    borders = np.memmap(path, dtype, "r", offset, shape)
    if int(borders[0]) != 0:
        _refuse(f"the first border is {int(borders[0])}, not 0", path, "0 and the end of every document")
    ends = Ends(len(borders) - 1, lambda first, last: np.asarray(borders[first + 1 : last + 1]).astype(np.int64))
    _check_ends(ends, num_tokens, path, tokens)
    return ends


def _check_ends(ends: Ends, num_tokens: int, index: str, tokens: str) -> None:
    """Ends must ascend to the number of tokens."""
    before = 0
    for first in range(0, ends.count, _AT_ONCE):
        some = ends.at(first, min(first + _AT_ONCE, ends.count))
        falls = np.flatnonzero(np.diff(some, prepend=before) < 0)
        if len(falls):
            wrong = int(falls[0])
            _refuse(
                f"document {first + wrong} ends at token {int(some[wrong]):,}, before the one in front of it",
                index,
                _AGAIN,
                tokens=tokens,
            )
        before = int(some[-1])
    if before != num_tokens:
        _refuse(
            f"the last document ends at token {before:,}, and the data has {num_tokens:,} tokens",
            index,
            _AGAIN,
            tokens=tokens,
        )


_AT_ONCE = 1 << 20
"""Entries of an index that are looked at together."""
_AGAIN = "copy or write both files again: they are not of one run"


# Megatron: <prefix>.bin has the ids, <prefix>.idx says where sequences lie and which of them are one document

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_MEGATRON_FLOATS = {6: "float64", 7: "float32"}


def _open_megatron(path: str, dtype: np.dtype[Any]) -> TokenFile:
    index = f"{path.removesuffix('.bin')}.idx"
    size = os.path.getsize(index)
    with open(index, "rb") as file:
        head = file.read(_MEGATRON_HEADER.size)
    if len(head) < _MEGATRON_HEADER.size or not head.startswith(_MEGATRON_MAGIC):
        _refuse("this is not a Megatron index: it does not begin with MMIDIDX", index, _AGAIN)
    _, version, code, sequences, entries = _MEGATRON_HEADER.unpack(head)
    if version != 1:
        _refuse(f"this Megatron index has version {version}; version 1 is known", index, "write it with megatron-core")
    if code not in _MEGATRON_DTYPES:
        what = f"ids of {_MEGATRON_FLOATS[code]}" if code in _MEGATRON_FLOATS else f"the unknown type code {code}"
        _refuse(f"this Megatron index says {what}", index, "ids as whole numbers")
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    expected = _MEGATRON_HEADER.size + 12 * sequences + 8 * entries
    if size not in (expected, expected + sequences):
        _refuse(
            f"the index says {sequences:,} sequences and {entries:,} document borders, which take {expected:,} bytes; "
            f"it has {size:,}",
            index,
            _AGAIN,
        )
    if not sequences or entries < 2:
        _refuse(f"the index has {sequences:,} sequences and {entries:,} document borders", index, "leave it out")
    at = _MEGATRON_HEADER.size
    sizes = np.memmap(index, "<i4", "r", at, (sequences,))
    pointers = np.memmap(index, "<i8", "r", at + 4 * sequences, (sequences,))
    borders = np.memmap(index, "<i8", "r", at + 12 * sequences, (entries,))
    if size != expected and np.memmap(index, "i1", "r", expected, (sequences,)).any():
        _refuse(
            "this Megatron dataset has sequences of a second kind (modes): it is not text alone", index, "text only"
        )
    count = _check_sequences(sizes, pointers, dtype, index, path)
    if int(borders[0]) != 0 or int(borders[-1]) != sequences:
        _refuse(
            f"the documents go from sequence {int(borders[0])} to {int(borders[-1]):,}, of {sequences:,} sequences",
            index,
            _AGAIN,
        )
    for first in range(0, entries, _AT_ONCE):
        falls = np.flatnonzero(np.diff(borders[first : first + _AT_ONCE + 1]) < 0)
        if len(falls):
            document = first + int(falls[0])
            _refuse(
                f"document {document} goes from sequence {int(borders[document])} to {int(borders[document + 1])}",
                index,
                _AGAIN,
            )

    def ends(first: int, last: int) -> NDArray[np.int64]:
        # Pointers are running sums of sizes, as was checked: no sums of our own, whatever the size of the index.
        after = np.asarray(borders[first + 1 : last + 1])
        inner = np.asarray(pointers[np.minimum(after, sequences - 1)]) // dtype.itemsize
        return np.where(after == sequences, count, inner).astype(np.int64)

    return TokenFile(path, "megatron", dtype, 0, count, Ends(entries - 1, ends))


def _check_sequences(sizes: Any, pointers: Any, dtype: np.dtype[Any], index: str, path: str) -> int:
    """Sequences must lie end to end, as their sizes say, and fill the data. Returns the number of tokens."""
    expected = 0
    for first in range(0, len(sizes), _AT_ONCE):
        some = np.asarray(sizes[first : first + _AT_ONCE]).astype(np.int64)
        if (some < 0).any():
            wrong = int(np.flatnonzero(some < 0)[0])
            _refuse(f"sequence {first + wrong} has {int(some[wrong])} tokens", index, _AGAIN)
        stops = expected + np.cumsum(some) * dtype.itemsize
        said, follows = np.asarray(pointers[first : first + _AT_ONCE]), stops - some * dtype.itemsize
        if (said != follows).any():
            wrong = int(np.flatnonzero(said != follows)[0])
            _refuse(
                f"sequence {first + wrong} lies at byte {int(said[wrong]):,}; "
                f"by the sizes of those before it, at {int(follows[wrong]):,}",
                index,
                _AGAIN,
            )
        expected = int(stops[-1])
    found = os.path.getsize(path)
    if expected != found:
        _refuse(
            f"the index describes {expected:,} bytes of {dtype.name}, and the data has {found:,}",
            path,
            _AGAIN,
            index=index,
        )
    return expected // dtype.itemsize


# datatrove: <name>.ds has the ids, <name>.ds.index the end of every document as uint64


def _open_datatrove(path: str, dtype: np.dtype[Any]) -> TokenFile:
    index, size = f"{path}.index", os.path.getsize(path)
    if not os.path.isfile(index):
        _refuse("this .ds file has no .ds.index beside it", path, "its index; or format='bin' for ids without one")
    entries, rest = divmod(os.path.getsize(index), 8)
    if rest or not entries:
        _refuse(f"an index of {os.path.getsize(index):,} bytes is not a list of 64-bit numbers", index, _AGAIN)
    stored = np.memmap(index, "<u8", "r", 0, (entries,))
    count = int(stored[-1])
    said, said_count = _datatrove_metadata(f"{path}.metadata")
    token_bytes = said or (size // count if count and size == count * (size // count) else 0)
    if token_bytes not in (2, 4) or size != count * token_bytes:
        _refuse(
            f"the last document ends at token {count:,}, and the data has {size:,} bytes"
            + (f" of {said}-byte ids" if said else ": neither 2 nor 4 for each"),
            index,
            _AGAIN,
            tokens=path,
        )
    if said_count is not None and said_count != count:
        _refuse(f"the metadata says {said_count:,} tokens, and the index {count:,}", f"{path}.metadata", _AGAIN)
    ends = Ends(entries, lambda first, last: np.asarray(stored[first:last]).astype(np.int64))
    _check_ends(ends, count, index, path)
    has_loss = os.path.isfile(f"{path}.loss")
    note = f"{os.path.basename(path)}.loss is not used: every token counts in the loss" if has_loss else ""
    return TokenFile(path, "datatrove", np.dtype("uint16" if token_bytes == 2 else "uint32"), 0, count, ends, note)


def _datatrove_metadata(path: str) -> tuple[int | None, int | None]:
    """(bytes of an id, number of tokens) as far as a .ds.metadata says them: `tokenizer|2`, the count, the count."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read(4096).splitlines()
    except FileNotFoundError:
        return None, None
    token_bytes = lines[0].rpartition("|")[2] if lines and "|" in lines[0] else ""
    count = lines[1] if len(lines) > 1 else ""
    return (
        int(token_bytes) if token_bytes.isdecimal() else None,
        int(count) if count.isdecimal() else None,
    )


_READERS: dict[str, Callable[[str, np.dtype[Any]], TokenFile]] = {
    "bin": _open_bin,
    "npy": _open_npy,
    "megatron": _open_megatron,
    "datatrove": _open_datatrove,
}
