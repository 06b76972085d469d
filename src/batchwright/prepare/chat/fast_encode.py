"""Many conversations at once through the fast encoder: cut at added tokens, with borders found by counting bytes.

Between added tokens `tokenizers` encodes each piece of text by itself, so cutting there changes nothing. What a
template writes between two messages is mostly the same, so its tokens are remembered. No work is done per token, and
little per conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest
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
    """Whether each added token is found wherever its name is, takes in no more than that, and leaves what follows."""
    normalizer = fast.backend.normalizer
    return not any(
        token.lstrip
        or token.rstrip
        or token.single_word
        or (normalizer is not None and token.normalized and normalizer.normalize_str(name) != name)
        for name, (_, token) in added.tokens.items()
    )


class _Middle(NamedTuple):
    """What a template writes between two messages, from its first special token to its last."""

    start: int
    stop: int
    num_special: int
    ids: Ids | None


class _Cut(NamedTuple):
    """A conversation as pieces: tokens of the template, and plain texts by their numbers."""

    pieces: list[Ids | int | None]
    num_special: int


class FastConversationEncoder:
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
        """None for each conversation that is not plain enough."""
        plain: list[str] = []
        cuts = [self._cut(one, plain) for one in rendered]
        ids = self._encode_plain(plain)
        pieces = [[ids[piece] if isinstance(piece, int) else piece for piece in cut.pieces] for cut in cuts]
        ready = [number for number, some in enumerate(pieces) if all(piece is not None for piece in some)]
        found: list[Encoded | None] = [None] * len(rendered)
        for number, one in zip(
            ready,
            self._aligned(
                [rendered[number] for number in ready],
                [pieces[number] for number in ready],  # type: ignore[misc]
                np.array([cuts[number].num_special for number in ready], np.int64),
            ),
            strict=True,
        ):
            found[number] = one
        return found

    # Cutting

    def _cut(self, rendered: Rendered, plain: list[str]) -> _Cut:
        """Cut at the template's special tokens; what is between goes to `plain`."""
        text, at, begin, num_special = rendered.text, 0, 0, 0
        pieces: list[Ids | int | None] = []
        for start, stop in (*rendered.said, (len(text), len(text))):
            middle = self._middle(text[at:start]) if at < start else None
            if middle is not None:
                if begin < at + middle.start:
                    pieces.append(len(plain))
                    plain.append(text[begin : at + middle.start])
                pieces.append(middle.ids)
                begin, num_special = at + middle.stop, num_special + middle.num_special
            at = stop
        if begin < len(text):
            pieces.append(len(plain))
            plain.append(text[begin:])
        return _Cut(pieces, num_special)

    def _middle(self, gap: str) -> _Middle | None:
        if gap in self._middles:
            return self._middles[gap]
        middle = self._new_middle(gap)
        if len(self._middles) < MOST_KEPT_GAPS:
            self._middles[gap] = middle
        return middle

    def _new_middle(self, gap: str) -> _Middle | None:
        marks = self.added.in_gap(gap)
        if not marks:
            return None
        texts, at = [], marks[0][0]
        for start, name in marks:
            texts.append(gap[at:start])
            at = start + len(name)
        pieces: list[Ids | None] = []
        for (_, name), before in zip(marks, self._encode_plain(texts), strict=True):
            pieces += [before, np.array([self.added.tokens[name][0]], np.uint32)]
        return _Middle(marks[0][0], at, len(marks), _joined(pieces))

    # Encoding

    def _encode_plain(self, texts: Sequence[str]) -> list[Ids | None]:
        """The ids of texts in which no special token counts; None where this is not the place to find them."""
        together = "\0".join(texts)
        patterns = [self.added.any_special, *self.added.others]
        is_changed = self.fast.proof.normalizes and not together.isascii()
        if not is_changed and not any(pattern.search(together) for pattern in patterns):
            return list(self.fast.encode_batch(texts))
        parts = [self._split(text) for text in texts]
        ids = iter(self.fast.encode_batch([part for some in parts if some for part in some[::2]]))
        return [None if some is None else self._with_names(some, ids) for some in parts]

    def _with_names(self, parts: Sequence[str], ids: Iterator[Ids]) -> Ids:
        """The ids of each text, as they come, and those of the names between them."""
        arrays = list(islice(ids, len(parts[::2])))
        names = [np.array([self.added.tokens[name][0]], np.uint32) for name in parts[1::2]]
        return np.concatenate([array for pair in zip_longest(arrays, names, fillvalue=_NO_TOKENS) for array in pair])

    def _split(self, text: str) -> list[str] | None:
        """Text and the names of added tokens in turn, text first and last. None where a special name is in it."""
        if self.added.any_special.search(text):
            return None
        first, second = self.added.others
        parts = first.split(text)
        normalizer = self.fast.backend.normalizer
        if normalizer is not None:
            texts = [part for part in parts[::2] if not part.isascii()]
            if any(normalizer.normalize_str(part) != part for part in texts):
                return None
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
        # A model may make a special token of plain text: special_tokens.py knows what to do.
        fits = (np.diff(ends[stops]) == np.diff(byte_stops)) & (np.diff(specials[stops]) == num_special)
        if not fits.all():
            numbers = np.flatnonzero(fits).tolist()
            some = self._aligned([rendered[n] for n in numbers], [pieces[n] for n in numbers], num_special[fits])
            found = dict(zip(numbers, some, strict=True))
            return [found.get(number) for number in range(len(rendered))]
        spans = table.of_tokens(token_stops(ends[:-1], ends[1:], borders, table.ranks), num_tokens)
        at = stops.tolist()
        return [Encoded(tokens[at[n] : at[n + 1]], spans[n]) for n in range(len(rendered))]


def _joined(pieces: Iterable[Ids | None]) -> Ids | None:
    arrays = []
    for piece in pieces:
        if piece is None:
            return None
        arrays.append(piece)
    return np.concatenate([_NO_TOKENS, *arrays])


def _in_bytes(texts: Sequence[str], table: SpanTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(where each span ends, where each text begins, and at last the end of all), in bytes of all texts in a row."""
    begins = np.cumsum([0, *map(len, texts)])
    borders = table.borders + np.repeat(begins[:-1], table.num_spans)
    together = "".join(texts)
    if together.isascii():
        return borders, begins
    data = np.frombuffer(together.encode(), np.uint8)
    of_characters = np.append(np.flatnonzero((data & 0xC0) != 0x80), len(data))
    return of_characters[borders], of_characters[begins]
