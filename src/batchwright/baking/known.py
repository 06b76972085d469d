"""Tokens that were made before: a text that some store has, made with the same tokenizer, is copied from there.

Every version keeps the hashes of its texts (`store/texts.py`). The home folder knows, for each tokenizer, which
versions were baked with it: tokenized/<tokenizer>/<version>.json, a few bytes each. There is no second copy of tokens.
Nothing depends on what is found: a store has the same bytes either way, and what cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import StoreError
from batchwright.base.files import home, write_whole
from batchwright.base.fingerprint import fingerprint
from batchwright.prepare.chat.step import Chat
from batchwright.prepare.tokenize import Tokenize
from batchwright.store.reader import Store
from batchwright.store.texts import TextHashes, find_texts
from batchwright.store.verify import CheckedShards
from batchwright.store.versions import list_versions

__all__ = ["KnownTokens", "find_known", "is_off", "remember"]

_MAX_VERSIONS = 64
"""Versions that a bake looks into, the newest first: each costs a search for every batch of texts."""
_WORTH_CHECKING = 256
"""A shard is read whole, to check it, before its first use. That is done once the text that was found in it, times
this, is as large as the shard: encoding so much text would take longer."""


class KnownTokens:
    """Finds the tokens of texts in versions that were baked before. Travels to workers without what it has open."""

    def __init__(self, versions: Sequence[tuple[Path, str]] = (), stores: Sequence[Store] = ()) -> None:
        self.versions = versions
        self._stores = stores
        """The versions, open, where they are: while they are, nobody removes them."""
        self._known: list[_KnownVersion] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return KnownTokens, (self.versions,)

    def find(self, tokenize: Tokenize, texts: Sequence[str], hashes: TextHashes) -> list[NDArray[Any] | None]:
        """What `tokenize.encode` would give for each text; None for a text that is not known."""
        found: list[NDArray[Any] | None] = [None] * len(texts)
        if self._known is None:
            self._known = list(_known(self._stores or _opened(self.versions), tokenize))
        missing = np.arange(len(texts))
        for version in self._known:
            if not len(missing):
                break
            documents = find_texts(version.texts, hashes[missing])
            there = documents >= 0
            version.read(documents[there], missing[there], texts, tokenize, found)
            missing = np.array([number for number in missing.tolist() if found[number] is None], np.int64)
        return found


def _opened(versions: Sequence[tuple[Path, str]]) -> Iterator[Store]:
    for path, version in versions:
        with contextlib.suppress(StoreError, OSError):  # gone since: then it is of no use
            yield Store(path, version=version)


def _known(stores: Iterable[Store], tokenize: Tokenize) -> Iterator[_KnownVersion]:
    for store in stores:
        with contextlib.suppress(StoreError, OSError):  # a table of it is damaged
            known = _KnownVersion(store)
            if known.vocab_size <= max(int(tokenize.tokenizer.vocab_size), (known.eos or 0) + 1):
                yield known


class _KnownVersion:
    """The documents of one version, by the hash of their text."""

    def __init__(self, store: Store) -> None:
        self.texts = store.texts or {}
        self.checked = CheckedShards(store)
        self.num_bytes = store.shards["num_bytes"]
        self.asked_bytes = np.zeros(len(self.num_bytes), np.int64)
        """Of each shard, how much text was found in it."""
        self.starts = np.concatenate([[0], np.cumsum(store.shards["num_documents"])])
        self.eos: int | None = store.manifest.tokenizer["eos"]
        self.vocab_size = int(store.manifest.tokenizer["vocab_size"])

    def read(
        self,
        documents: NDArray[np.int64],
        numbers: NDArray[np.int64],
        texts: Sequence[str],
        tokenize: Tokenize,
        found: list[NDArray[Any] | None],
    ) -> None:
        """Put the tokens of documents into `found`, at the numbers of their texts. Leaves out what is not sound."""
        shards = np.searchsorted(self.starts, documents, side="right") - 1
        for row in np.unique(shards).tolist():
            mine = shards == row
            self.asked_bytes[row] += sum(len(texts[number]) for number in numbers[mine].tolist())
            is_worth_it = self.asked_bytes[row] * _WORTH_CHECKING >= self.num_bytes[row]
            shard = self.checked.shard(row) if is_worth_it else None
            if shard is None:
                continue
            local = documents[mine] - self.starts[row]
            first, last = shard.offsets[local].astype(np.int64), shard.offsets[local + 1].astype(np.int64)
            is_as_it_is = (self.eos, shard.tokens.dtype) == (tokenize.eos_id, tokenize.dtype)
            if not is_as_it_is and self.eos is not None:
                last = last - 1
            for number, begin, end in zip(numbers[mine].tolist(), first.tolist(), last.tolist(), strict=True):
                tokens = shard.tokens[begin:end]
                found[number] = tokens if is_as_it_is else _ended(tokens, tokenize)


def _ended(tokens: NDArray[Any], tokenize: Tokenize) -> NDArray[Any]:
    """Tokens of a document in a step's own type, with its own end."""
    ended = np.empty(len(tokens) + (tokenize.eos_id is not None), tokenize.dtype)
    ended[: len(tokens)] = tokens
    if tokenize.eos_id is not None:
        ended[-1] = tokenize.eos_id
    return ended


# Which versions there are


def is_off() -> bool:
    """Whether BATCHWRIGHT_TOKEN_CACHE says that texts are to be tokenised anew."""
    return os.environ.get("BATCHWRIGHT_TOKEN_CACHE", "").lower() in ("off", "0", "no", "false")


def find_known(tokenize: Tokenize | Chat, to: Path) -> KnownTokens:
    """What was tokenised before as this step does: in the store that is baked into, and by any bake of this user."""
    if is_off() or isinstance(tokenize, Chat):
        return KnownTokens()
    if tokenize.tokenizer.kind == "bytes":  # copying bytes is no faster than making them
        return KnownTokens()
    there: dict[tuple[Path, str], Store] = {}
    for store in itertools.chain(_versions_of(to), _remembered(tokenize)):
        if len(there) == _MAX_VERSIONS:
            break
        if store.manifest.texts_hash and _is_of(store, tokenize):
            there.setdefault((store.path, store.version), store)
    return KnownTokens(list(there), list(there.values()))


def _versions_of(path: Path) -> Iterator[Store]:
    for version in list_versions(path):
        with contextlib.suppress(StoreError, OSError):
            yield Store(path, version=version)


def _is_of(store: Store, tokenize: Tokenize) -> bool:
    """Whether a store's tokens are this tokenizer's."""
    said, tokenizer = store.manifest.tokenizer, tokenize.tokenizer
    is_text = "chat" not in said  # conversations are encoded otherwise: what is said in them has no special tokens
    is_same = (said["kind"], said["fingerprint"]) == (tokenizer.kind, tokenizer.fingerprint)
    # Stores of releases that did not say it have parsed them.
    return is_text and is_same and (said.get("special") or "parse") == (tokenize.special or "parse")


def remember(tokenize: Tokenize | Chat, store: Store) -> None:
    """Let later bakes find the tokens of a version. A home that cannot be written is no matter."""
    if is_off() or isinstance(tokenize, Chat) or tokenize.tokenizer.kind == "bytes" or tokenize.needs_fit:
        return
    with contextlib.suppress(OSError, RuntimeError):
        folder = _folder(tokenize)
        folder.mkdir(parents=True, exist_ok=True)
        entry = {"store": str(store.path), "version": store.version}
        path = folder / f"{fingerprint(entry)[:16]}.json"
        if not path.exists():
            write_whole(path, msgspec.json.encode(entry))


def _remembered(tokenize: Tokenize) -> Iterator[Store]:
    """Versions that the home folder knows, the newest first. What is not there any more is forgotten."""
    with contextlib.suppress(OSError, RuntimeError):
        for entry in sorted(_folder(tokenize).glob("*.json"), key=_modified, reverse=True):
            with contextlib.suppress(OSError):
                store = _named(entry)
                if store is not None and _is_of(store, tokenize):
                    yield store
                else:
                    entry.unlink()


def _modified(entry: Path) -> float:
    try:
        return entry.stat().st_mtime
    except OSError:  # another bake has just forgotten it
        return 0.0


def _named(entry: Path) -> Store | None:
    """The version that an entry names; None where there is no such version any more."""
    try:
        place = msgspec.json.decode(entry.read_bytes(), type=dict[str, str])
        return Store(place["store"], version=place["version"])
    except (StoreError, msgspec.DecodeError, UnicodeDecodeError, KeyError):
        return None


def _folder(tokenize: Tokenize) -> Path:
    """Where versions that were baked with a tokenizer are remembered.

    A fingerprint that a user gave (`version=`, or a tokenizer class of their own) tells versions of one program apart,
    and not two programs: there it counts where the code lies, too.
    """
    tokenizer = tokenize.tokenizer
    named = [tokenizer.kind, tokenizer.fingerprint, int(tokenizer.vocab_size), *filter(None, [tokenize.special])]
    if tokenizer.kind == "plugin":
        named += _home_of(tokenizer.tokenizer)
    elif getattr(tokenizer, "_version", None) is not None:
        named += _home_of(tokenizer.function)
    return home() / "tokenized" / fingerprint(named)


def _home_of(function: Any) -> list[str]:
    """Module, name and file of a function, or of an object's class."""
    code = function if hasattr(function, "__qualname__") else type(function)
    file = getattr(sys.modules.get(code.__module__), "__file__", None)
    if file is None:  # a notebook's cell, or standard input
        file = getattr(getattr(code, "__code__", None), "co_filename", None)
    return [code.__module__, code.__qualname__, os.path.abspath(file or "")]
