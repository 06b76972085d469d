"""Tokens as text, one by one or joined. A character that spans two tokens is shown whole.

Byte-level and byte-fallback vocabularies, bytes and characters are spelled from the bytes of their tokens. If the
requested tokens end inside a character, its bytes are shown as escapes. Others are decoded by their own tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np

__all__ = ["TokenSpelling", "TokenText", "bytes_of_tokens"]

_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenText(NamedTuple):
    """Some text, or the name of a token without text."""

    text: str
    is_special: bool


class TokenSpelling:
    """The tokens of one tokenizer as text. `can_decode` is False for a function that has no inverse."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode: Callable[[Sequence[int]], str | None] = tokenizer.decode
        self._names = _names_of(tokenizer)
        self._bytes_of = _bytes_of(tokenizer)
        self.can_decode: bool = self._bytes_of is not None or tokenizer.decode([]) is not None

    def text_of(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[TokenText]:
        """The text of tokens. `before` holds a few tokens before them, which some tokenizers need for spaces."""
        parts, context = [], list(before)
        for is_special, group in groupby(ids, key=self._names.__contains__):
            some = list(group)
            if is_special:
                parts += [TokenText(self._names[token], True) for token in some]
            else:
                parts.append(TokenText(self._text(some, context), False))
            context += some
        return parts

    def is_inside(self, token: int) -> bool:
        """Whether a token begins in the middle of a character."""
        if self._bytes_of is None or token in self._names:
            return False
        data = self._bytes_of(token)
        return bool(data) and 0x80 <= data[0] < 0xC0

    def _text(self, ids: list[int], before: list[int]) -> str:
        if self._bytes_of is not None:
            return b"".join(map(self._bytes_of, ids)).decode("utf-8", "backslashreplace")
        head, together = self._decode(before[-8:]) or "", self._decode([*before[-8:], *ids]) or ""
        text = together.removeprefix(head) if together.startswith(head) else self._decode(ids) or ""
        return text.replace("\ufffd", "\\ufffd")  # a part of a character


def _names_of(tokenizer: Any) -> dict[int, str]:
    """The names of tokens that are shown by name."""
    if tokenizer.kind == "tokenizer.json":
        return {i: token.content for i, token in tokenizer.backend.get_added_tokens_decoder().items()}
    return {tokenizer.eos_id: "<eos>"} if tokenizer.kind in ("bytes", "chars") else {}


def _bytes_of(tokenizer: Any) -> Callable[[int], bytes] | None:
    """The bytes of each token; None if the vocabulary does not tell them."""
    spell: Callable[[int], bytes | None] | None = None
    match tokenizer.kind:
        case "bytes":
            spell = {number: bytes([number]) for number in range(256)}.get
        case "chars":
            spell = {number: character.encode() for number, character in enumerate(tokenizer.chars)}.get
        case "tokenizer.json":
            spell = _bytes_of_json(tokenizer)
    if spell is None:
        return None
    return lambda token: spell(token) or f"<no token {token}>".encode()


def _bytes_of_json(tokenizer: Any) -> Callable[[int], bytes | None] | None:
    parts = msgspec.json.decode(tokenizer.json)
    described = msgspec.json.encode([parts.get("decoder"), parts.get("pre_tokenizer")])
    if b'"type":"ByteLevel"' in described:
        by_name = _of_byte_level
    elif b'"type":"ByteFallback"' in described:
        by_name = _of_fallback
    else:
        return None

    @cache  # of the tokens seen so far: a vocabulary is long
    def bytes_of(token: int) -> bytes | None:
        name = tokenizer.backend.id_to_token(token) if token >= 0 else None
        return None if name is None else by_name(name)

    return bytes_of


def _of_byte_level(name: str) -> bytes:
    """
    >>> _of_byte_level("Ġa"), _of_byte_level("<▁>")
    (b' a', b'<\\xe2\\x96\\x81>')
    """
    return next(iter(bytes_of_tokens({name: 0})), name.encode())


def _of_fallback(name: str) -> bytes:
    """
    >>> _of_fallback("<0xC3>"), _of_fallback("▁caf")
    (b'\\xc3', b' caf')
    """
    match = _FALLBACK.fullmatch(name)
    return bytes([int(match[1], 16)]) if match else name.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte. A printable byte stands for itself."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
_TO_LATIN = str.maketrans({character: chr(byte) for character, byte in BYTE_OF.items()})


def bytes_of_tokens(vocab: Mapping[str, int]) -> dict[bytes, int]:
    """The vocabulary by bytes. Tokens that cannot occur in a text are left out.

    >>> bytes_of_tokens({"Ġa": 7, "<▁>": 8})
    {b' a': 7}
    """
    names = names_of_bytes(vocab)
    data = "".join(names).translate(_TO_LATIN).encode("latin-1")  # all at once: a vocabulary is long
    ends = np.cumsum([len(name) for name in names]).tolist()
    starts = [0, *ends][:-1]
    return {data[start:end]: vocab[name] for name, start, end in zip(names, starts, ends, strict=True)}


def names_of_bytes(vocab: Iterable[str]) -> list[str]:
    """The tokens that are made of bytes."""
    names, alphabet = list(vocab), BYTE_OF.keys()
    if alphabet >= set("".join(names)):  # all at once
        return names
    return [name for name in names if alphabet >= set(name)]
