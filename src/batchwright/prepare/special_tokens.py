"""Encoding with chosen special tokens only: those of a chat template, or none.

`tokenizers` finds special tokens in any text. So a copy of the tokenizer gives them other names: as many characters as
the name has, none of them in the text. The chosen tokens are renamed in the text too, and any other name in it is
plain text. `tokenizers` does the rest on the whole text at once: other added tokens, blanks that tokens take in, spaces
put before words, the normalizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import TokenizerError

Ids = NDArray[np.uint32]
Marks = Sequence[tuple[int, str]]
"""(start, name) of the chosen special tokens of a text, in order."""

_PRIVATE, _LAST_PRIVATE = 0xF0000, 0x10FFFD
_PRIVATE_CHARACTER = re.compile(f"[{chr(_PRIVATE)}-{chr(_LAST_PRIVATE)}]")


class Offsets(NamedTuple):
    """The tokens of one text, and the characters [start, end) of each."""

    tokens: Ids
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class _RenamedTokenizer(NamedTuple):
    backend: Any
    name_of: dict[str, str]
    ids: Ids
    """The tokenizer's own id for each id of the copy."""


class SpecialTokenEncoder:
    def __init__(self, backend: Any) -> None:
        self._normalizer = backend.normalizer
        self._body = msgspec.json.decode(backend.to_str())
        ids = {token["content"]: token["id"] for token in self._body["added_tokens"] if token["special"]}
        self._special = list(ids)
        model = self._body["model"]
        self._unknown = model.get("unk_token")
        if model.get("unk_id") is not None:
            self._unknown = model["vocab"][model["unk_id"]][0]
        # The model gives the unknown token for unknown text: its id does not tell which name it came from.
        self._certain = np.array([number for name, number in ids.items() if name != self._unknown], np.uint32)
        self._renamed = lru_cache(maxsize=2)(self._rename)

    def encode(
        self, texts: Sequence[str], marks: Sequence[Marks], numbers: Sequence[int] | None = None
    ) -> list[Offsets]:
        """The tokens of each text. The `number` of a TokenizerError is that of its text, taken from `numbers`."""
        numbers = numbers or range(len(texts))
        groups: dict[int, list[int]] = {}
        for at, text in enumerate(texts):
            groups.setdefault(self._free_characters(text, numbers[at]), []).append(at)
        found: dict[int, Offsets] = {}
        for first, group in groups.items():
            renamed = self._renamed(first)
            some = [_with_names(texts[at], marks[at], renamed.name_of) for at in group]
            for at, encoding in zip(group, renamed.backend.encode_batch(some, add_special_tokens=False), strict=True):
                found[at] = _offsets(encoding, renamed.ids)
        for at, mine in enumerate(marks):
            self._check(found[at].tokens, mine, numbers[at])
        return [found[at] for at in range(len(texts))]

    def as_text(self, texts: Sequence[str], ids: Sequence[Ids]) -> list[Ids]:
        """The `ids` that `tokenizers` gave for texts, with names of special tokens in a text encoded as plain text."""
        unknown = self._unknown if self._unknown in self._special else None
        numbers = [
            number
            for number, (text, one) in enumerate(zip(texts, ids, strict=True))
            if np.isin(one, self._certain).any() or (unknown is not None and unknown in text)
        ]
        encoded = list(ids)
        plain = self.encode([texts[number] for number in numbers], [()] * len(numbers), numbers)
        for number, offsets in zip(numbers, plain, strict=True):
            encoded[number] = offsets.tokens
        return encoded

    def _check(self, tokens: Ids, marks: Marks, number: int) -> None:
        """Check that there are as many special tokens as were marked."""
        if int(np.isin(tokens, self._certain).sum()) != sum(name != self._unknown for _, name in marks):
            raise TokenizerError(
                "this tokenizer makes special tokens of plain text, or none of its own names: they could not be told "
                "apart",
                number=number,
                remedy="a tokenizer whose vocabulary has special tokens as added tokens only; for text that is not a "
                "conversation also tokenize(special='parse')",
            )

    def _free_characters(self, text: str, number: int) -> int:
        """The first of a run of private characters, one for each name, none of them in this text."""
        if not _PRIVATE_CHARACTER.search(text):
            return _PRIVATE
        first = _PRIVATE
        for point in [*sorted({ord(character) for character in text if ord(character) >= _PRIVATE}), _LAST_PRIVATE + 1]:
            if point - first >= len(self._special):
                return first
            first = point + 1
        raise TokenizerError(
            "this text has too many characters of private use", number=number, remedy="leave such rows out with where="
        )

    def _rename(self, first: int) -> _RenamedTokenizer:
        """The tokenizer with other names for special tokens: private characters from `first` on."""
        from tokenizers import Tokenizer

        body = self._body
        name_of = {name: chr(first + number) * len(name) for number, name in enumerate(self._special)}
        added = [dict(token) for token in body["added_tokens"]]
        for token in added:
            name = token["content"] = name_of.get(token["content"], token["content"])
            if self._normalizer is not None and token["special"] and name not in self._normalizer.normalize_str(name):
                token["normalized"] = False  # a normalizer drops these characters: they must be found before it
        changed = {
            "added_tokens": added,
            "model": _renamed_model(body["model"], name_of),
            **dict.fromkeys(("padding", "truncation", "post_processor")),  # these would change offsets
        }
        backend = Tokenizer.from_str(msgspec.json.encode({**body, **changed}).decode())
        ids = np.arange(max(backend.get_vocab(with_added_tokens=True).values(), default=0) + 1, dtype=np.uint32)
        for before, token in zip(body["added_tokens"], added, strict=True):
            ids[backend.token_to_id(token["content"])] = before["id"]
        return _RenamedTokenizer(backend, name_of, ids)


def _renamed_model(model: dict[str, Any], name_of: Mapping[str, str]) -> dict[str, Any]:
    """The model with the names in its vocabulary too. Some models look up a whole piece of plain text there."""
    vocab = model["vocab"]
    if isinstance(vocab, list):
        return {**model, "vocab": [[name_of.get(word, word), score] for word, score in vocab]}
    names = {name: name_of[name] for name in name_of.keys() & vocab.keys()}
    if names and model.get("merges"):
        for left, right in pairs_of(model["merges"]):
            for word in (left, right, left + right):
                names.pop(word, None)
    unknown = model.get("unk_token")
    renamed = {names.get(word, word): number for word, number in vocab.items()}
    return {**model, "vocab": renamed, "unk_token": names.get(unknown, unknown)}


def pairs_of(merges: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """The two parts of each merge, which newer files have as a list, and older files as one string."""
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def _with_names(text: str, marks: Marks, name_of: Mapping[str, str]) -> str:
    parts, at = [], 0
    for start, name in marks:
        parts += [text[at:start], name_of[name]]
        at = start + len(name)
    return "".join([*parts, text[at:]])


def _offsets(encoding: Any, ids: Ids) -> Offsets:
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    # Characters that a normalizer adds have no place of their own in the text.
    starts, ends = np.maximum.accumulate(offsets, axis=0).T
    return Offsets(ids[np.array(encoding.ids, np.uint32)], starts, ends)
