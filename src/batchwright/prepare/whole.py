"""Encode a whole text with `tokenizers`, where only chosen special tokens count: a chat template's own, or none.

`tokenizers` finds special tokens in any text. So they get other names here, in a copy of the tokenizer: characters that
no text has, as many as the name is long. The chosen ones are renamed in the text, and any other name in it stays what
it is: text. All else is done by `tokenizers`, on the whole text at once: other added tokens, blanks that
tokens take in, spaces that are put before, the normalizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import TokenizerError

__all__ = ["Pieces", "WholeEncoder"]

_PRIVATE, _LAST_PRIVATE = 0xF0000, 0x10FFFD
_PRIVATE_CHARACTER = re.compile(f"[{chr(_PRIVATE)}-{chr(_LAST_PRIVATE)}]")


class Pieces(NamedTuple):
    """The tokens of one text, and the characters [start, end) of each."""

    tokens: NDArray[np.uint32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class _Copy(NamedTuple):
    backend: Any
    name_of: dict[str, str]
    ids: NDArray[np.uint32] | None
    """The tokenizer's own id for each of the copy, where they are not the same."""


class WholeEncoder:
    def __init__(self, backend: Any) -> None:
        self._normalizer = backend.normalizer
        self._body = msgspec.json.decode(backend.to_str())
        self._special = [token["content"] for token in self._body["added_tokens"] if token["special"]]
        self._ids = {token["content"]: token["id"] for token in self._body["added_tokens"]}
        model = self._body["model"]
        unknown_id = model.get("unk_id")
        unknown = model.get("unk_token") if unknown_id is None else model["vocab"][unknown_id][0]
        # The model gives the unknown token for what it does not know: this one says nothing of where it came from.
        self._told = np.array([self._ids[name] for name in self._special if name != unknown], np.uint32)
        self._unknown = unknown
        self._copies: dict[int, _Copy] = {}

    def encode(
        self, texts: Sequence[str], marked: Sequence[Sequence[tuple[int, str]]], known_as: Sequence[int] | None = None
    ) -> list[Pieces]:
        """`marked` are the special tokens of each text that count: (start, name), in order.

        A TokenizerError says by `number` which text it is about; `known_as` are other numbers for them.
        """
        known_as = known_as or range(len(texts))
        groups: dict[int, list[int]] = {}
        for number, text in enumerate(texts):
            groups.setdefault(self._free_characters(text, known_as[number]), []).append(number)
        found: dict[int, Pieces] = {}
        for first, numbers in groups.items():
            copy = self._copy(first)
            renamed = [_renamed(texts[number], marked[number], copy.name_of) for number in numbers]
            encodings = copy.backend.encode_batch(renamed, add_special_tokens=False)
            found.update(zip(numbers, (_pieces(encoding, copy.ids) for encoding in encodings), strict=True))
        for number, names in enumerate(marked):
            self._check(found[number], names, known_as[number])
        return [found[number] for number in range(len(texts))]

    def as_text(self, texts: Sequence[str], ids: Sequence[NDArray[np.uint32]]) -> list[NDArray[np.uint32]]:
        """`ids` of texts, as `tokenizers` gave them, but without any special token that it found in a text."""
        unknown = self._unknown if self._unknown in self._special else None
        found = [
            number
            for number, (text, one) in enumerate(zip(texts, ids, strict=True))
            if np.isin(one, self._told).any() or (unknown is not None and unknown in text)
        ]
        plain = self.encode([texts[number] for number in found], [()] * len(found), found)
        kept = list(ids)
        for number, pieces in zip(found, plain, strict=True):
            kept[number] = pieces.tokens
        return kept

    def _check(self, pieces: Pieces, marked: Sequence[tuple[int, str]], number: int) -> None:
        """That there are as many special tokens as were marked."""
        told = np.isin(pieces.tokens, self._told)
        if int(told.sum()) != sum(name != self._unknown for _, name in marked):
            raise TokenizerError(
                "this tokenizer makes special tokens of plain text, or none of its own names: they could not be told "
                "apart",
                number=number,
                remedy="a tokenizer whose vocabulary has special tokens as added tokens only; for text that is not a "
                "conversation also tokenize(special='parse')",
            )

    def _free_characters(self, text: str, number: int) -> int:
        """The first of as many private characters as there are names, none of them in this text."""
        if not _PRIVATE_CHARACTER.search(text):
            return _PRIVATE
        used = sorted({ord(character) for character in text if ord(character) >= _PRIVATE})
        first = _PRIVATE
        for point in [*used, _LAST_PRIVATE + 1]:
            if point - first >= len(self._special):
                return first
            first = point + 1
        raise TokenizerError(
            "this text has too many characters of private use", number=number, remedy="leave such rows out with where="
        )

    def _copy(self, first: int) -> _Copy:
        if first not in self._copies:
            if len(self._copies) > 1:  # the usual one stays; another is for few texts
                del self._copies[max(self._copies)]
            self._copies[first] = _copied(self._body, self._special, first, self._normalizer)
        return self._copies[first]


def _copied(body: dict[str, Any], special: Sequence[str], first: int, normalizer: Any) -> _Copy:
    from tokenizers import Tokenizer

    name_of = {name: chr(first + number) * len(name) for number, name in enumerate(special)}
    added = [{**token, "content": name_of.get(token["content"], token["content"])} for token in body["added_tokens"]]
    for token in added:
        name = token["content"]
        if normalizer is not None and token["special"] and name not in normalizer.normalize_str(name):
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
    return _Copy(backend, name_of, None if np.array_equal(ids, np.arange(len(ids))) else ids)


def _renamed_model(model: dict[str, Any], name_of: dict[str, str]) -> dict[str, Any]:
    """The model with the names in its vocabulary too: some models look up a piece of plain text there, whole."""
    vocab = model["vocab"]
    if isinstance(vocab, list):
        return {**model, "vocab": [[name_of.get(word, word), score] for word, score in vocab]}
    names = {name for name in name_of if name in vocab}
    if names and model.get("merges"):
        names -= _merged(model["merges"])
    if not names:
        return model
    renamed = {name_of[word] if word in names else word: number for word, number in vocab.items()}
    unknown = model.get("unk_token")
    return {**model, "vocab": renamed, "unk_token": name_of[unknown] if unknown in names else unknown}


def _merged(merges: Iterable[Any]) -> set[str]:
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    return {word for left, right in pairs for word in (left, right, left + right)}


def _renamed(text: str, marked: Iterable[tuple[int, str]], name_of: dict[str, str]) -> str:
    parts, at = [], 0
    for start, name in marked:
        parts += [text[at:start], name_of[name]]
        at = start + len(name)
    return "".join([*parts, text[at:]])


def _pieces(encoding: Any, ids: NDArray[np.uint32] | None) -> Pieces:
    tokens = np.array(encoding.ids, np.uint32)
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    return Pieces(
        tokens if ids is None else ids[tokens],
        np.maximum.accumulate(offsets[:, 0]),  # what a normalizer puts in has no place of its own in the text
        np.maximum.accumulate(offsets[:, 1]),
    )
