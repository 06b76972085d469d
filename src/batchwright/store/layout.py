"""The layout of a store's folder: its pointer, its versions, and the manifest of a version.

corpus.store/
  batchwright.json              the pointer: which version is current; null until the first bake is complete
  versions/<id>/
    manifest.json            written last: its existence means that the version is complete
    shards.arrow             one row per shard: file, source, split, documents, tokens, bytes, hashes
    files.arrow              one row per raw file: path, size, time, content hash
    units.arrow              one row per unit of work: its inputs, and the place of its documents; for the next bake
    texts.arrow              one row per document: the hash of its text, sorted; for bakes of other recipes
    inputs.json              a key of the inputs: shows without reading them that the version is up to date
    tokenizer.json           enough to decode (and for most tokenizers to encode) without the original
    <source>-<split>-00000.arrow
  plans/<fingerprint>.json   the plans of runs over this store
  rows/<fingerprint>.arrow   an index of packed rows, for one row length and policy; rebuilt when missing
  work/                      units of an unfinished bake
  .lock                      held by the process that bakes

In a store of adopted tokens, <source>-<split>-00000.arrow holds only the borders of documents: its lists are of nulls.
The tokens are in the user's file that shards.arrow (data_file, data_offset) and files.arrow (path, beside) name.
Only a manifest with `adopted` set may point outside the store's folder.

The pointer and the manifest carry a checksum of their content: damage to them cannot change what is trained on.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.base.errors import SpecError, StoreError
from batchwright.base.files import inside, is_part, write_whole
from batchwright.base.fingerprint import fingerprint

__all__ = [
    "REBAKE",
    "Manifest",
    "Shard",
    "check_source_name",
    "content_digest",
    "current_version",
    "is_store",
    "mark_as_store",
    "point_to",
    "refuse_other_folders",
    "version_folder",
]

POINTER = "batchwright.json"
STORE_FORMAT = 1
ADOPTED_FORMAT = 2
"""The format of manifests that point to the user's own files: releases without them refuse it by number."""
REBAKE = "bake again, or copy the store again from where it came"
"""The remedy for a damaged store."""
REPAIR_ADOPTED = "`batchwright adopt` the same files again: the same bytes give the same plan"
"""The remedy for a damaged store of adopted tokens."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One Arrow file: documents of one source and split, one record batch, `tokens` as a list column."""

    file: str
    source: str
    split: str
    num_documents: int
    num_tokens: int
    num_bytes: int
    file_hash: str
    content_hash: str
    """Of tokens and document borders alone: the location of the raw files does not count."""


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """The documents of one source and split, end to end."""

    source: str
    split: str
    num_documents: int
    num_tokens: int
    num_shards: int
    fingerprint: str
    dtype: str = ""
    """The dtype of its tokens, in a store whose sources differ. Otherwise empty: the manifest has it."""


def content_digest(tokens: NDArray[Any], offsets: NDArray[np.int32], *spans: NDArray[Any]) -> str:
    """The identity of a shard's content: tokens, borders of documents, and spans."""
    digest = xxhash.xxh3_128()
    for array in (tokens, offsets, *spans):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def stream_fingerprint(dtype: str, shards: list[list[Any]]) -> str:
    """The identity of a stream's content, from [documents, tokens, content hash] of its shards."""
    return fingerprint([dtype, shards])[:16]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a version, as JSON. Its long tables are Arrow files beside it."""

    version: str
    streams: list[StreamInfo]
    token_dtype: str
    tokenizer: dict[str, Any]
    recipe: dict[str, Any]
    report: dict[str, Any]
    shards_hash: str
    files_hash: str
    units_hash: str
    tokenizer_hash: str
    texts_hash: str = ""
    """Empty without such a table: stores of earlier releases, and adopted ones."""
    format: int = STORE_FORMAT
    made_by: str = "batchwright"
    adopted: bool = False
    """Whether the tokens are in the user's own files, outside the store."""

    @property
    def fingerprint(self) -> str:
        """The identity of the content: tokenizer and all streams."""
        streams = [[stream.source, stream.split, stream.fingerprint] for stream in self.streams]
        return fingerprint([self.tokenizer["fingerprint"], streams])[:16]

    def dtype_of(self, stream: StreamInfo) -> str:
        return stream.dtype or self.token_dtype

    @property
    def repair(self) -> str:
        """The remedy for damage."""
        if self.adopted:
            return REPAIR_ADOPTED
        return REBAKE

    def save(self, folder: Path) -> None:
        write_whole(folder / "manifest.json", sealed(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        path = folder / "manifest.json"
        try:
            manifest = msgspec.convert(_unsealed(path.read_bytes()), cls)
        except (FileNotFoundError, NotADirectoryError):
            remedy = "run the bake again: it continues where it stopped"
            raise StoreError(f"no complete store version at {folder}", folder=folder, remedy=remedy) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError("the manifest is damaged", file=path, reason=error, remedy=REBAKE) from None
        if manifest.format != (ADOPTED_FORMAT if manifest.adopted else STORE_FORMAT):
            raise _unknown_format(path, manifest.format)
        return manifest


def sealed(content: dict[str, Any]) -> bytes:
    """A small file as JSON, with a checksum of its content."""
    content = msgspec.to_builtins(content)
    return msgspec.json.format(msgspec.json.encode({**content, "checksum": fingerprint(content)}), indent=1)


def _unsealed(data: bytes) -> dict[str, Any]:
    content = msgspec.json.decode(data, type=dict[str, Any])
    if content.pop("checksum", None) != fingerprint(content):
        raise msgspec.ValidationError("its content does not fit its checksum")
    return content


def _unknown_format(path: Path, found: int) -> StoreError:
    what = f"this store has format {found}; this batchwright reads format {STORE_FORMAT}"
    return StoreError(what, file=path, remedy="a batchwright release that knows this format")


class _Pointer(msgspec.Struct, omit_defaults=True):
    batchwright_store: int
    current: str | None
    adopted: bool = False


def _read_pointer(folder: Path) -> _Pointer:
    return msgspec.convert(_unsealed((folder / POINTER).read_bytes()), _Pointer)


def is_store(folder: Path) -> bool:
    return (folder / POINTER).is_file()


def is_adopted(folder: Path) -> bool:
    """Whether a folder is a store of adopted tokens, complete or not. Bakes do not write into it."""
    try:
        return _read_pointer(folder).adopted
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False


def refuse_other_folders(to: Path, *, adopted: bool) -> None:
    """Refuse to make a store in a folder that holds something else, or a store of the other kind."""
    remedy = "a new folder, such as to='corpus.store'"
    if to.exists() and not to.is_dir():
        raise SpecError(f"{to} is a file", parameter="to", remedy=remedy)
    has_files = to.is_dir() and any(path.name != ".lock" and not is_part(path.name) for path in to.iterdir())
    # Asked second: another process may be making this store now, and it writes the pointer before anything else.
    if has_files and not is_store(to):
        raise SpecError(f"{to} is a folder that is not a store, and is left as it is", parameter="to", remedy=remedy)
    if is_store(to) and is_adopted(to) is not adopted:
        kind = "a store that was baked" if adopted else "a store of adopted tokens"
        raise SpecError(f"{to} is {kind}, and is left as it is", parameter="to", remedy="a folder of its own")


def check_source_name(name: Any, taken: Collection[str] = (), *, called: str = "a source") -> str:
    """A name that can be part of a file's name on every system. Raises for any other, and for one that is `taken`."""
    if not isinstance(name, str):
        why = "a name is text"
    elif not name:
        why = "it is empty"
    elif len(name.encode("utf-8", "replace")) > 100:
        why = "it is longer than 100 bytes"
    elif name.startswith("."):
        why = "it begins with '.'"
    elif "/" in name or not name.isprintable():
        why = "it holds '/' or a character that cannot be printed"
    elif name.casefold() in map(str.casefold, taken):  # some file systems do not distinguish capitals
        why = "that name is taken"
    else:
        return name
    remedy = "a short name of its own, such as 'web'"
    raise SpecError(f"{called} cannot be named {name!r}: {why}", parameter="name", remedy=remedy)


def mark_as_store(folder: Path, *, adopted: bool = False) -> None:
    """Make a new or empty folder a store without a complete version."""
    folder.mkdir(parents=True, exist_ok=True)
    if not is_store(folder):
        point_to(folder, None, adopted=adopted)


def point_to(folder: Path, version: str | None, *, adopted: bool = False) -> None:
    """Make a complete version the current one. The last act of a bake."""
    write_whole(folder / POINTER, sealed(msgspec.to_builtins(_Pointer(STORE_FORMAT, version, adopted))))


def current_version(folder: Path) -> str | None:
    """The current version's id; None for a store whose first bake is not complete."""
    path = folder / POINTER
    try:
        pointer = _read_pointer(folder)
    except FileNotFoundError:
        raise _not_a_store(folder) from None
    except (NotADirectoryError, PermissionError) as error:
        what = f"{folder} is not a store: {os.strerror(error.errno or 0)}"
        raise StoreError(what, folder=folder, remedy="a store's folder") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        remedy = "bake to a new folder, or copy the store again from where it came"
        raise StoreError("the store's pointer is damaged", file=path, remedy=remedy) from None
    if pointer.batchwright_store != STORE_FORMAT:
        raise _unknown_format(path, pointer.batchwright_store)
    return pointer.current


def _not_a_store(folder: Path) -> StoreError:
    if not folder.exists():
        return StoreError(f"no store at {folder}", folder=folder, remedy="bw.bake(recipe, to=...) makes one")
    remedy = "if it holds raw files: tokenizer= for a loader, or `batchwright bake FOLDER --to NAME.store`"
    if (folder / "batchwright-buffer.json").exists():
        remedy = "it is a buffer: bw.DatasetBuffer(path=...), `batchwright info` and `batchwright look` open it"
    return StoreError(f"{folder} is not a store: it has no {POINTER}", folder=folder, remedy=remedy)


def version_folder(folder: Path, version: str) -> Path:
    return inside(folder / "versions", version)
