"""Reuse of older bakes: units with unchanged inputs, and tokens of texts that were encoded before.

A version keeps a table of its units: for each its key (a fingerprint of its inputs), its report, and the place of its
documents in the shards. A unit of a new bake with the same key consists of those documents.

A version also keeps the hashes of its texts (`store/texts.py`). The home folder lists, for each tokenizer, the versions
that were baked with it: tokenized/<tokenizer>/<version>.json, a few bytes each. A text that one of them has, encoded
with the same tokenizer, is copied from there. There is no second copy of the tokens. A store has the same bytes whether
anything is found or not. Versions that cannot be read are skipped.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchwright.baking.documents import Documents
from batchwright.baking.unit import SPLITS
from batchwright.baking.unit_rows import UnitReport
from batchwright.base.errors import StoreError
from batchwright.base.files import home, write_whole
from batchwright.base.fingerprint import fingerprint
from batchwright.prepare.chat.step import Chat
from batchwright.prepare.tokenize import Tokenize
from batchwright.store.reader import Store
from batchwright.store.stream import MappedShard
from batchwright.store.texts import TextHashes, find_texts, texts_by_document
from batchwright.store.versions import list_versions, open_versions

# Units

Range = tuple[str, int, int]
"""(shard, number of the first document in it, number of documents)."""


@dataclass(slots=True)
class UnitPlace:
    """The place of one unit's documents in a version."""

    report: UnitReport
    files: list[int]
    """The version's number of each span's raw file."""
    first_rows: list[int]
    """The number of each span's first row in its file."""
    ranges: list[Range] = field(default_factory=lambda: [("", 0, 0)] * len(SPLITS))
    """For each split."""
    is_whole: bool = True
    """False if a split of the unit is in several shards: such a unit is not reused."""

    def put(self, side: int, documents: Range) -> None:
        self.is_whole &= not self.ranges[side][2]
        self.ranges[side] = documents


def units_table(places: list[UnitPlace]) -> dict[str, Any]:
    """The table of a version's units, as columns."""
    places = [place for place in places if place.is_whole]
    columns: dict[str, Any] = {
        "key": [place.report.key for place in places],
        "report": [msgspec.json.encode(place.report).decode() for place in places],
        "files": [place.files for place in places],
        "first_rows": [place.first_rows for place in places],
    }
    for side, split in enumerate(SPLITS):
        for part, name in enumerate(("shard", "first", "count")):
            columns[f"{split}_{name}"] = [place.ranges[side][part] for place in places]
    return columns


@dataclass(frozen=True, slots=True)
class ReusedUnit:
    """A unit whose documents are in the shards of an older version."""

    report: UnitReport
    version: _OldVersion
    row: int
    """In the version's table of units."""

    def documents(self, side: int) -> Documents:
        return self.version.documents(self.row, side)


def find_reusable(to: Path, wanted: set[str]) -> dict[str, ReusedUnit]:
    """The wanted units that versions of this store have, by key. Damaged shards are not used."""
    found: dict[str, ReusedUnit] = {}
    for version in list_versions(to):
        if wanted <= found.keys():
            break
        with contextlib.suppress(StoreError):
            found |= _OldVersion(Store(to, version=version), to / "work").find(wanted - found.keys())
    return found


class _OldVersion:
    """The units and shards of one version. `folder` is for a temporary file."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.table, self.text_table, self.folder = store, store.units, store.texts, folder
        self.shard_rows = {name: row for row, name in enumerate(store.shards["file"].to_pylist())}
        self.first_document = np.concatenate([[0], np.cumsum(store.shards["num_documents"])])
        """The number of the first document in each shard, counted through all shards."""

    def find(self, wanted: set[str]) -> dict[str, ReusedUnit]:
        if self.text_table is None:  # a release without it wrote this version
            return {}
        return {
            key: ReusedUnit(msgspec.json.decode(self._value("report", row), type=UnitReport), self, row)
            for row, key in enumerate(self.table["key"].to_pylist())
            if key in wanted and self._is_undamaged(row)
        }

    def _is_undamaged(self, row: int) -> bool:
        ranges = [self._range(row, side) for side in range(len(SPLITS))]
        shards = [self.shard_rows.get(shard) for shard, _, count in ranges if count]
        # Damage must not be copied into a new version, where it would get a valid hash.
        return all(shard is not None and self.store.undamaged_shard(shard) for shard in shards)

    def documents(self, row: int, side: int) -> Documents:
        """The documents of one split of a unit."""
        name, first, count = self._range(row, side)
        if not count:
            empty = np.empty(0, np.int64)
            return Documents(empty, empty, empty, empty, self._texts[:0])
        last, shard_row = first + count, self.shard_rows[name]
        shard = self.store.undamaged_shard(shard_row)
        assert shard is not None
        offsets = shard.offsets[first : last + 1].astype(np.int64)
        span = np.searchsorted(np.array(self._value("files", row)), shard.file[first:last])
        number = shard.row[first:last] - np.array(self._value("first_rows", row), np.int64)[span]
        tokens = shard.tokens[offsets[0] : offsets[-1]]
        first_text = int(self.first_document[shard_row]) + first
        texts = self._texts[first_text : first_text + count]
        documents = Documents(tokens, np.diff(offsets), span, number, texts)
        if shard.spans is None:
            return documents
        starts, fields = shard.spans
        return documents.marked(starts[first : last + 1], fields)

    def _range(self, row: int, side: int) -> Range:
        shard, first, count = (self._value(f"{SPLITS[side]}_{name}", row) for name in ("shard", "first", "count"))
        return shard, int(first), int(count)

    def _value(self, column: str, row: int) -> Any:
        value = self.table[column][row]
        return value.as_py() if hasattr(value, "as_py") else value

    @cached_property
    def _texts(self) -> TextHashes:
        assert self.text_table is not None
        return texts_by_document(self.text_table, self.folder)


# Tokens

_MAX_VERSIONS = 64
"""Versions that a bake searches, the newest first. Each costs a search for every batch of texts."""
_WORTH_CHECKING = 256
"""A shard is read and checked before its first use. That pays once the text found in it, times this, is as large as the
shard: encoding that much text would take longer."""


class TokenCache:
    """The tokens of texts, in older versions."""

    def __init__(self, stores: Sequence[Store] = ()) -> None:
        self.stores = stores
        """Open versions, which garbage collection does not remove."""
        self._versions: list[_CachedVersion] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, ([(store.path, store.version) for store in self.stores],)

    def find(self, tokenize: Tokenize, texts: Sequence[str], hashes: TextHashes) -> list[NDArray[Any] | None]:
        """The result of `tokenize.encode` for each text; None for a text that is in no version."""
        found: list[NDArray[Any] | None] = [None] * len(texts)
        if self._versions is None:
            self._versions = list(_cached_versions(self.stores))
        missing = np.arange(len(texts))
        for version in self._versions:
            if not len(missing):
                break
            documents = find_texts(version.texts, hashes[missing])
            there = documents >= 0
            version.read(documents[there], missing[there], texts, tokenize, found)
            missing = np.array([number for number in missing.tolist() if found[number] is None], np.int64)
        return found


def _reopened(places: Iterable[tuple[Path, str]]) -> TokenCache:
    """The cache of another process. A version that was deleted by hand since is left out."""
    return TokenCache(list(open_versions(places)))


def _cached_versions(stores: Iterable[Store]) -> Iterator[_CachedVersion]:
    for store in stores:
        with contextlib.suppress(StoreError, OSError):  # one of its tables is damaged
            yield _CachedVersion(store)


class _CachedVersion:
    """The documents of one version, by the hash of their text."""

    def __init__(self, store: Store) -> None:
        self.texts = store.texts or {}
        self.store = store
        self.num_bytes = store.shards["num_bytes"]
        self.found_bytes = np.zeros(len(self.num_bytes), np.int64)
        """The amount of text found in each shard."""
        self.starts = np.concatenate([[0], np.cumsum(store.shards["num_documents"])])
        self.eos: int | None = store.manifest.tokenizer["eos"]

    def read(
        self,
        documents: NDArray[np.int64],
        numbers: NDArray[np.int64],
        texts: Sequence[str],
        tokenize: Tokenize,
        found: list[NDArray[Any] | None],
    ) -> None:
        """Put the tokens of documents into `found`, at the numbers of their texts."""
        shards = np.searchsorted(self.starts, documents, side="right") - 1
        for row in np.unique(shards).tolist():
            mine = shards == row
            of_texts = numbers[mine].tolist()
            shard = self._shard(row, sum(len(texts[number]) for number in of_texts))
            if shard is None:
                continue
            local = documents[mine] - self.starts[row]
            first, last = shard.offsets[local].tolist(), shard.offsets[local + 1].tolist()
            for number, begin, end in zip(of_texts, first, last, strict=True):
                found[number] = self._adapted(shard.tokens[begin:end], tokenize)

    def _shard(self, row: int, num_bytes: int) -> MappedShard | None:
        """A shard, if it is undamaged and worth reading."""
        self.found_bytes[row] += num_bytes
        if self.found_bytes[row] * _WORTH_CHECKING < self.num_bytes[row]:
            return None
        return self.store.undamaged_shard(row)

    def _adapted(self, tokens: NDArray[Any], tokenize: Tokenize) -> NDArray[Any]:
        """The tokens of a document in a step's own type, with its own end-of-sequence token."""
        if (self.eos, tokens.dtype) == (tokenize.eos_id, tokenize.dtype):
            return tokens
        if self.eos is not None:
            tokens = tokens[:-1]
        tokens = tokens.astype(tokenize.dtype)
        if tokenize.eos_id is None:
            return tokens
        return np.append(tokens, tokenize.dtype.type(tokenize.eos_id))


# The versions of a tokenizer


def _is_cached(tokenize: Tokenize | Chat) -> bool:
    """Whether tokens of this step are looked up: not if BATCHWRIGHT_TOKEN_CACHE turns it off."""
    if os.environ.get("BATCHWRIGHT_TOKEN_CACHE", "").lower() in ("off", "0", "no", "false"):
        return False
    # Copying bytes is no faster than encoding them.
    return not isinstance(tokenize, Chat) and tokenize.tokenizer.kind != "bytes"


def find_cache(tokenize: Tokenize | Chat, to: Path) -> TokenCache:
    """The tokens of this step in versions of the store `to`, and in versions of any bake of this user."""
    if not _is_cached(tokenize):
        return TokenCache()
    assert isinstance(tokenize, Tokenize)
    stores: dict[tuple[Path, str], Store] = {}
    own = open_versions((to, version) for version in list_versions(to))
    for store in itertools.chain(own, _remembered(tokenize)):
        if len(stores) == _MAX_VERSIONS:
            break
        if store.manifest.texts_hash and _is_of(store, tokenize):
            stores.setdefault((store.path, store.version), store)
    return TokenCache(list(stores.values()))


def _is_of(store: Store, tokenize: Tokenize) -> bool:
    """Whether a store's tokens are this tokenizer's."""
    said, tokenizer = store.manifest.tokenizer, tokenize.tokenizer
    if "chat" in said:  # conversations are encoded differently: special tokens in messages are text
        return False
    is_same = (said["kind"], said["fingerprint"]) == (tokenizer.kind, tokenizer.fingerprint)
    # Releases that did not store `special` have parsed the names of special tokens.
    is_same &= (said.get("special") or "parse") == (tokenize.special or "parse")
    return is_same and int(said["vocab_size"]) <= max(int(tokenizer.vocab_size), (said["eos"] or 0) + 1)


def remember(tokenize: Tokenize | Chat, store: Store) -> None:
    """Let later bakes find the tokens of a version. Ignores a home folder that cannot be written."""
    if not _is_cached(tokenize) or tokenize.needs_fit:
        return
    assert isinstance(tokenize, Tokenize)
    with contextlib.suppress(OSError, RuntimeError):
        folder = _folder(tokenize)
        folder.mkdir(parents=True, exist_ok=True)
        entry = {"store": str(store.path), "version": store.version}
        path = folder / f"{fingerprint(entry)[:16]}.json"
        if not path.exists():
            write_whole(path, msgspec.json.encode(entry))


def _remembered(tokenize: Tokenize) -> Iterator[Store]:
    """Versions in the home folder, the newest first. Entries of missing versions are removed."""
    with contextlib.suppress(OSError, RuntimeError):
        # Another bake may remove an entry right now: nothing is found then, and texts are encoded again.
        for entry in sorted(_folder(tokenize).glob("*.json"), key=os.path.getmtime, reverse=True):
            with contextlib.suppress(OSError):
                store = _store_of(entry)
                if store is not None and _is_of(store, tokenize):
                    yield store
                else:
                    entry.unlink()


def _store_of(entry: Path) -> Store | None:
    """The version of an entry; None if it is missing."""
    try:
        place = msgspec.json.decode(entry.read_bytes(), type=dict[str, str])
        return Store(place["store"], version=place["version"])
    except (StoreError, msgspec.DecodeError, UnicodeDecodeError, KeyError):
        return None


def _folder(tokenize: Tokenize) -> Path:
    """The folder of a tokenizer's entries.

    A fingerprint that a user gave (`version=`, or a tokenizer class of their own) is unique in one program only, so the
    file of the code counts too.
    """
    tokenizer = tokenize.tokenizer
    identity = [tokenizer.kind, tokenizer.fingerprint, int(tokenizer.vocab_size), *filter(None, [tokenize.special])]
    if tokenizer.kind == "plugin":
        identity += _home_of(tokenizer.tokenizer)
    elif getattr(tokenizer, "_version", None) is not None:
        identity += _home_of(tokenizer.function)
    return home() / "tokenized" / fingerprint(identity)


def _home_of(function: Any) -> list[str]:
    """Module, name and file of a function, or of an object's class."""
    code = function if hasattr(function, "__qualname__") else type(function)
    file = getattr(sys.modules.get(code.__module__), "__file__", None)
    if file is None:  # a notebook's cell, or standard input
        file = getattr(getattr(code, "__code__", None), "co_filename", None)
    return [code.__module__, code.__qualname__, os.path.abspath(file or "")]
