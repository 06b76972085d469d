"""Where things lie in a store's folder, and what its manifest says.

corpus.store/
  batchwright.json              the pointer: which version is current; null until the first bake is complete
  versions/<id>/
    manifest.json            written last: its existence means that the version is complete
    shards.arrow             one row per shard: file, source, split, documents, tokens, bytes, hashes
    files.arrow              one row per raw file: path, size, time, content hash
    units.arrow              one row per unit of work: what went in, and where its documents lie; for the next bake
    texts.arrow              one row per document: the hash of its text, sorted; for bakes of other recipes
    inputs.json              what the version was baked from: tells at once that it is up to date
    tokenizer.json           enough to decode (and for most tokenizers to encode) without the original
    <source>-<split>-00000.arrow
  plans/<fingerprint>.json   what runs over this store were
  rows/<fingerprint>.arrow   how documents were packed into rows, for one length of row and one way; made again if gone
  work/                      units of an unfinished bake
  .lock                      held by the process that bakes

Of a store that adopted tokens, <source>-<split>-00000.arrow has only the borders of documents: its lists are of nulls,
and the tokens lie in the user's file that shards.arrow (data_file, data_offset) and files.arrow (path, beside) name.
Only a manifest that says `adopted` may point outside of the store's folder.

The pointer and the manifest carry a checksum of what they say: no damage to them can change what is trained on.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.base.errors import StoreError
from batchwright.base.files import inside, write_whole
from batchwright.base.fingerprint import fingerprint

__all__ = [
    "REBAKE",
    "REPAIR_ADOPTED",
    "Manifest",
    "Shard",
    "StreamInfo",
    "content_digest",
    "current_version",
    "is_adopted",
    "is_store",
    "mark_as_store",
    "point_to",
    "sealed",
    "stream_fingerprint",
    "version_folder",
]

POINTER = "batchwright.json"
STORE_FORMAT = 1
ADOPTED_FORMAT = 2
"""Of manifests that point to the user's own files: a release that does not know them refuses the format by name."""
REBAKE = "bake again, or copy the store again from where it came"
"""What to do about a store that is damaged."""
REPAIR_ADOPTED = "`batchwright adopt` the same files again: the same bytes give the same plan"
"""What to do about a store of adopted tokens that is damaged."""


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
    """Of tokens and document borders alone, so that it does not depend on where the raw files lay."""


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
    """Of its tokens, where sources of a store differ; otherwise empty, and the manifest says it for all."""


def content_digest(tokens: NDArray[Any], offsets: NDArray[np.int32], *spans: NDArray[Any]) -> str:
    """Names the content of a shard: its tokens, where its documents begin and end, and what their spans are."""
    digest = xxhash.xxh3_128()
    for array in (tokens, offsets, *spans):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def stream_fingerprint(dtype: str, shards: list[list[Any]]) -> str:
    """Names the content of a stream, from [documents, tokens, content hash] of its shards."""
    return fingerprint([dtype, shards])[:16]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Small and JSON; the long tables lie beside it in Arrow."""

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
    """Empty where there is no such table: stores of earlier releases, and adopted ones."""
    format: int = STORE_FORMAT
    made_by: str = field(default="batchwright")
    adopted: bool = False
    """Whether the tokens lie in files of the user's own, outside of the store."""

    @property
    def fingerprint(self) -> str:
        """Names the content: tokenizer and all streams."""
        return fingerprint([self.tokenizer["fingerprint"], [[s.source, s.split, s.fingerprint] for s in self.streams]])[
            :16
        ]

    def dtype_of(self, stream: StreamInfo) -> str:
        return stream.dtype or self.token_dtype

    @property
    def repair(self) -> str:
        """What to do about damage."""
        return REPAIR_ADOPTED if self.adopted else REBAKE

    def save(self, folder: Path) -> None:
        write_whole(folder / "manifest.json", sealed(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        path = folder / "manifest.json"
        try:
            manifest = msgspec.convert(_unsealed(path.read_bytes()), cls)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(
                f"no complete store version at {folder}",
                folder=folder,
                remedy="run the bake again: it continues what is there",
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError("the manifest is damaged", file=path, reason=error, remedy=REBAKE) from None
        if manifest.format != (ADOPTED_FORMAT if manifest.adopted else STORE_FORMAT):
            raise StoreError(
                f"this store has format {manifest.format}; this batchwright reads format {STORE_FORMAT}",
                file=path,
                remedy="a batchwright release that knows this format",
            )
        return manifest


def sealed(content: dict[str, Any]) -> bytes:
    """A small file as JSON, with a checksum of what it says."""
    content = msgspec.to_builtins(content)
    return msgspec.json.format(msgspec.json.encode({**content, "checksum": fingerprint(content)}), indent=1)


def _unsealed(data: bytes) -> dict[str, Any]:
    content = msgspec.json.decode(data, type=dict[str, Any])
    if content.pop("checksum", None) != fingerprint(content):
        raise msgspec.ValidationError("its content does not fit its checksum")
    return content


def is_store(folder: Path) -> bool:
    return (folder / POINTER).is_file()


def is_adopted(folder: Path) -> bool:
    """Whether a folder is a store of adopted tokens (also one that is not complete yet): bakes stay out of it."""
    try:
        return bool(_unsealed((folder / POINTER).read_bytes()).get("adopted"))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False


def mark_as_store(folder: Path, *, adopted: bool = False) -> None:
    """Make an (empty or new) folder a store that is not complete yet."""
    folder.mkdir(parents=True, exist_ok=True)
    if not is_store(folder):
        write_whole(folder / POINTER, _pointer(None, adopted))


def point_to(folder: Path, version: str, *, adopted: bool = False) -> None:
    """Make a complete version the current one. The last act of a bake."""
    write_whole(folder / POINTER, _pointer(version, adopted))


def _pointer(version: str | None, adopted: bool) -> bytes:
    pointer = {"batchwright_store": STORE_FORMAT, "current": version}
    return sealed(pointer | {"adopted": True} if adopted else pointer)


def current_version(folder: Path) -> str | None:
    """The current version's id; None for a store whose first bake is not complete."""
    path = folder / POINTER
    try:
        pointer = _unsealed(path.read_bytes())
        store_format, version = pointer["batchwright_store"], pointer["current"]
    except FileNotFoundError:
        if not folder.exists():
            raise StoreError(
                f"no store at {folder}", folder=folder, remedy="bw.bake(recipe, to=...) makes one"
            ) from None
        is_buffer = (folder / "batchwright-buffer.json").exists()
        raise StoreError(
            f"{folder} is not a store: it has no {POINTER}",
            folder=folder,
            remedy="it is a buffer: bw.DatasetBuffer(path=...), `batchwright info` and `batchwright look` open it"
            if is_buffer
            else "if it holds raw files: tokenizer= for a loader, or `batchwright bake FOLDER --to NAME.store`",
        ) from None
    except (NotADirectoryError, PermissionError) as error:
        raise StoreError(
            f"{folder} is not a store: {os.strerror(error.errno or 0)}", folder=folder, remedy="a store's folder"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
        raise StoreError("the store's pointer is damaged", file=path, remedy=_NEW_FOLDER) from None
    if store_format != STORE_FORMAT:
        raise StoreError(
            f"this store has format {store_format}; this batchwright reads format {STORE_FORMAT}",
            file=path,
            remedy="a batchwright release that knows this format",
        )
    if version is not None and not isinstance(version, str):
        raise StoreError("the store's pointer is damaged", file=path, remedy=_NEW_FOLDER)
    return version


_NEW_FOLDER = "bake to a new folder, or copy the store again from where it came"


def version_folder(folder: Path, version: str) -> Path:
    return inside(folder / "versions", version)
