"""What tokens say, each and side by side: a character that one token begins and the next one ends is shown whole.

Byte-level and byte-fallback vocabularies, bytes and characters are spelled from the bytes of their tokens; where the
tokens asked for end inside a character, its bytes come out as escapes. Others are decoded by their own tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from batchwright.prepare.byte_level import bytes_of_tokens

__all__ = ["Said", "Spelling"]

_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


class Said(NamedTuple):
    """Some text, or the name of a token that stands for no text."""

    text: str
    is_special: bool


class Spelling:
    """The tokens of one tokenizer as text. `can` is False where it does not decode."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode: Callable[[Sequence[int]], str | None] = tokenizer.decode
        self._names = _names_of(tokenizer)
        self._bytes_of = _bytes_of(tokenizer)
        self.can: bool = self._bytes_of is not None or tokenizer.decode([]) is not None

    def says(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[Said]:
        """What some tokens say. `before` are a few tokens before them: some tokenizers need them to know of spaces."""
        said, context = [], list(before)
        for is_special, group in groupby(ids, key=self._names.__contains__):
            some = list(group)
            if is_special:
                said += [Said(self._names[token], True) for token in some]
            else:
                said.append(Said(self._text(some, context), False))
            context += some
        return said

    def is_inside(self, token: int) -> bool:
        """Whether a token begins in the middle of a character."""
        data = self._bytes_of(token) if self._bytes_of is not None and token not in self._names else b""
        return bool(data) and 0x80 <= data[0] < 0xC0

    def _text(self, ids: list[int], before: list[int]) -> str:
        if self._bytes_of is not None:
            return b"".join(map(self._bytes_of, ids)).decode("utf-8", "backslashreplace")
        head, whole = self._decode(before[-8:]) or "", self._decode([*before[-8:], *ids]) or ""
        text = whole[len(head) :] if whole.startswith(head) else self._decode(ids) or ""
        return text.replace("\ufffd", "\\ufffd")  # a part of a character


def _names_of(tokenizer: Any) -> dict[int, str]:
    """Tokens that are shown by their names."""
    if tokenizer.kind == "tokenizer.json":
        return {i: token.content for i, token in tokenizer.backend.get_added_tokens_decoder().items()}
    return {tokenizer.eos_id: "<eos>"} if tokenizer.kind in ("bytes", "chars") else {}


def _bytes_of(tokenizer: Any) -> Callable[[int], bytes] | None:
    """The bytes of each token; None where a vocabulary does not tell."""
    if tokenizer.kind == "bytes":
        return lambda token: bytes([token]) if 0 <= token < 256 else _no_token(token)
    if tokenizer.kind == "chars":
        chars = tokenizer.chars
        return lambda token: chars[token].encode() if 0 <= token < len(chars) else _no_token(token)
    if tokenizer.kind != "tokenizer.json":
        return None
    parts = msgspec.json.decode(tokenizer.json)
    kinds = _kinds(parts.get("decoder")) | _kinds(parts.get("pre_tokenizer"))
    if not kinds & {"ByteLevel", "ByteFallback"}:
        return None
    spell, name_of = _of_byte_level if "ByteLevel" in kinds else _of_fallback, tokenizer.backend.id_to_token

    @cache  # of the tokens that are seen: a vocabulary is long
    def bytes_of(token: int) -> bytes:
        name = name_of(token) if token >= 0 else None
        return _no_token(token) if name is None else spell(name)

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


def _kinds(part: Any) -> set[str]:
    """The types of a part of a tokenizer.json, and of the parts that it is made of.

    >>> sorted(_kinds({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}))
    ['ByteFallback', 'Fuse', 'Sequence']
    """
    if isinstance(part, dict):
        own = {part["type"]} if isinstance(part.get("type"), str) else set()
        return own.union(*map(_kinds, part.values()))
    return set().union(*map(_kinds, part)) if isinstance(part, list) else set()


def _no_token(token: int) -> bytes:
    return f"<no token {token}>".encode()
