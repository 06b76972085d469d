"""Many conversations at once through the fast encoder, cut at added tokens. Borders are found by counting bytes.

`tokenizers` encodes each piece of text between added tokens by itself, so cutting there changes nothing. A template's
text between two messages is mostly the same, so its tokens are cached. No work is done per token, and little per
conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.prepare.byte_level import bytes_of_tokens
from batchwright.prepare.chat.added import MOST_KEPT_GAPS, AddedTokens
from batchwright.prepare.chat.align import SpanTable, token_stops
from batchwright.prepare.chat.spans import Encoded, Rendered
from batchwright.prepare.tiktoken_encoder import FastEncoder

__all__ = ["FastConversationEncoder", "are_plain"]

Ids = NDArray[np.uint32]

_NO_TOKENS: Ids = np.empty(0, np.uint32)


def are_plain(added: AddedTokens, fast: FastEncoder) -> bool:
    """Whether each added token matches wherever its name occurs, takes in no more text, and leaves the rest alone."""
    normalizer = fast.backend.normalizer
    return not any(
        token.lstrip
        or token.rstrip
        or token.single_word
        or (normalizer is not None and token.normalized and normalizer.normalize_str(name) != name)
        for name, (_, token) in added.tokens.items()
    )


class _Middle(NamedTuple):
    """The template's text between two messages, from its first special token to its last."""

    start: int
    stop: int
    num_special: int
    ids: Ids


class _Cut(NamedTuple):
    """A conversation as plain texts, and the template's text between each two of them."""

    texts: list[str]
    middles: list[_Middle]


class FastConversationEncoder:
    added: AddedTokens
    fast: FastEncoder

    def __init__(self, fast: FastEncoder, added: AddedTokens) -> None:
        self.fast, self.added = fast, added
        self._num_bytes = np.zeros(max(fast.backend.get_vocab(with_added_tokens=True).values()) + 1, np.int64)
        of_bytes = bytes_of_tokens(fast.backend.get_vocab(with_added_tokens=False))
        self._num_bytes[list(of_bytes.values())] = [len(word) for word in of_bytes]
        self._is_special = np.zeros(len(self._num_bytes), bool)
        for name, (number, token) in added.tokens.items():
            self._num_bytes[number] = len(name.encode())
            self._is_special[number] = token.special
        self._middles: dict[str, _Middle | None] = {}

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded | None]:
        """Encode the conversations. The result is None for one that needs the slow way."""
        cuts = [self._cut(one) for one in rendered]
        has_names = self.added.any_special.search("\0".join(text for cut in cuts for text in cut.texts))
        ready = [
            number
            for number, (one, cut) in enumerate(zip(rendered, cuts, strict=True))
            if self._is_normal(one.text) and not (has_names and any(map(self.added.any_special.search, cut.texts)))
        ]
        ids = iter(self._encode_plain([text for number in ready for text in cuts[number].texts]))
        pieces = []
        for number in ready:
            pieces.append([next(ids)])
            for middle in cuts[number].middles:
                pieces[-1] += [middle.ids, next(ids)]
        num_special = [sum(middle.num_special for middle in cuts[number].middles) for number in ready]
        aligned = self._aligned([rendered[number] for number in ready], pieces, np.array(num_special, np.int64))
        found = dict(zip(ready, aligned, strict=True))
        return [found.get(number) for number in range(len(rendered))]

    def _is_normal(self, text: str) -> bool:
        """Whether the normalizer changes nothing, so that offsets are those of the text."""
        if not self.fast.proof.normalizes or text.isascii():
            return True
        return bool(self.fast.backend.normalizer.normalize_str(text) == text)

    # Cutting

    def _cut(self, rendered: Rendered) -> _Cut:
        """Cut at the template's special tokens."""
        text, at, begin = rendered.text, 0, 0
        cut = _Cut([], [])
        for start, stop in (*rendered.said, (len(text), len(text))):
            if at < start and (middle := self._middle(text[at:start])) is not None:
                cut.texts.append(text[begin : at + middle.start])
                cut.middles.append(middle)
                begin = at + middle.stop
            at = stop
        cut.texts.append(text[begin:])
        return cut

    def _middle(self, gap: str) -> _Middle | None:
        if gap in self._middles:
            return self._middles[gap]
        marks, middle = self.added.in_gap(gap), None
        if marks:
            texts, at = [], marks[0][0]
            for start, name in marks:
                texts.append(gap[at:start])
                at = start + len(name)
            pairs = zip(self._encode_plain(texts), (self._id_of(name) for _, name in marks), strict=True)
            middle = _Middle(marks[0][0], at, len(marks), np.concatenate(list(chain.from_iterable(pairs))))
        if len(self._middles) < MOST_KEPT_GAPS:
            self._middles[gap] = middle
        return middle

    # Encoding

    def _id_of(self, name: str) -> Ids:
        return np.array([self.added.tokens[name][0]], np.uint32)

    def _encode_plain(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of texts without special tokens. Other added tokens are recognised in them."""
        together = "\0".join(texts)
        if not any(pattern.search(together) for pattern in self.added.others):
            return list(self.fast.encode_batch(texts))
        parts = [self._split(text) for text in texts]
        ids = iter(self.fast.encode_batch([part for some in parts for part in some[::2]]))
        encoded = []
        for some in parts:
            arrays = [next(ids)]
            for name in some[1::2]:
                arrays += [self._id_of(name), next(ids)]
            encoded.append(np.concatenate(arrays))
        return encoded

    def _split(self, text: str) -> list[str]:
        """Split into text and names of added tokens in turn, with text first and last."""
        first, second = self.added.others
        parts = first.split(text)
        split = [second.split(text) for text in parts[::2]]
        for at, name in enumerate(parts[1::2]):
            split[at].append(name)
        return [part for some in split for part in some]

    # Borders

    def _aligned(
        self, rendered: Sequence[Rendered], pieces: Sequence[Sequence[Ids]], num_special: NDArray[np.int64]
    ) -> list[Encoded | None]:
        if not rendered:
            return []
        tokens = np.concatenate([_NO_TOKENS, *chain.from_iterable(pieces)])
        num_tokens = np.array([sum(map(len, some)) for some in pieces], np.int64)
        stops = np.append(0, np.cumsum(num_tokens))
        ends = np.append(0, np.cumsum(self._num_bytes[tokens]))
        specials = np.append(0, np.cumsum(self._is_special[tokens]))
        table = SpanTable([one.spans for one in rendered])
        borders, byte_stops = _in_bytes([one.text for one in rendered], table)
        # A model may make a special token of plain text: special_tokens.py handles that.
        fits = (np.diff(ends[stops]) == np.diff(byte_stops)) & (np.diff(specials[stops]) == num_special)
        if not fits.all():
            numbers = np.flatnonzero(fits).tolist()
            some = self._aligned([rendered[n] for n in numbers], [pieces[n] for n in numbers], num_special[fits])
            found = dict(zip(numbers, some, strict=True))
            return [found.get(number) for number in range(len(rendered))]
        spans = table.of_tokens(token_stops(ends[:-1], ends[1:], borders, table.ranks), num_tokens)
        at = stops.tolist()
        return [Encoded(tokens[at[n] : at[n + 1]], spans[n]) for n in range(len(rendered))]


def _in_bytes(texts: Sequence[str], table: SpanTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(end of each span, start of each text and the end of the last), in bytes of all texts end to end."""
    begins = np.cumsum([0, *map(len, texts)])
    borders = table.borders + np.repeat(begins[:-1], table.num_spans)
    together = "".join(texts)
    if together.isascii():
        return borders, begins
    data = np.frombuffer(together.encode(), np.uint8)
    of_characters = np.append(np.flatnonzero((data & 0xC0) != 0x80), len(data))
    return of_characters[borders], of_characters[begins]
