"""Tokens and spans of rendered conversations: the ids of the whole text, without special tokens from messages.

The ids are those of `tokenizers` for the whole text, without the tokens that it would add. Special tokens are the only
difference. The template's own are recognised. Their names inside of messages are plain text. A name that is written in
part by the template and in part by a message is plain text too. Other added tokens are recognised everywhere, as in
`tokenizers`.

If tiktoken is proved for a `tokenizer.json`, tiktoken encodes many conversations at once. Texts are cut at the added
tokens: `tokenizers` encodes each piece between them by itself, so cutting there changes nothing. The places of tokens
follow from their bytes. A template's text between two messages is mostly the same, so its tokens are cached. No work is
done per token, and little per conversation.

Other texts go through special_tokens.py, which is also the reference in tests of the fast way. Bytes, characters,
functions and users' own tokenizers have no special tokens and no offsets. They encode span by span, so no token crosses
a border.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import TokenizerError
from batchwright.prepare.chat.spans import Encoded, Rendered, SpanTable
from batchwright.prepare.tiktoken_encoder import FastEncoder, any_of
from batchwright.prepare.token_text import bytes_of_tokens
from batchwright.prepare.tokenizers import CharsTokenizer, JsonTokenizer

__all__ = ["ConversationEncoder"]


Ids = NDArray[np.uint32]

_MOST_KEPT_GAPS = 4096
"""The number of texts between messages to cache. Few occur, unless a template writes dates or counts."""


class ConversationEncoder:
    """Encodes conversations with one of the tokenizers of prepare/tokenizers.py. A pickle of it is the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        if isinstance(tokenizer, CharsTokenizer) and tokenizer.chars is None:
            raise TokenizerError(
                "a vocabulary of characters is made from text, and conversations need theirs before",
                parameter="tokenizer",
                remedy="'bytes', or a tokenizer.json",
            )
        self.tokenizer = tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer}

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Tokens and spans of each conversation. The `number` of a TokenizerError is that of the conversation."""
        if not isinstance(self.tokenizer, JsonTokenizer):
            return _encode_spans(self.tokenizer, rendered)
        encoded: dict[int, Encoded] = {}
        if self._fast is not None:
            encoded = self._fast.encode(rendered)
        left = [number for number in range(len(rendered)) if number not in encoded]
        if left:
            encoded |= self._encode_whole({number: rendered[number] for number in left})
        return [encoded[number] for number in range(len(rendered))]

    @cached_property
    def _added(self) -> _AddedTokens:
        return _AddedTokens(self.tokenizer.backend.get_added_tokens_decoder())

    @cached_property
    def _fast(self) -> _FastConversationEncoder | None:
        fast = self.tokenizer.fast
        if fast is None or not _are_plain(self._added, fast):
            return None
        return _FastConversationEncoder(fast, self._added)

    def _encode_whole(self, rendered: Mapping[int, Rendered]) -> dict[int, Encoded]:
        texts = [one.text for one in rendered.values()]
        marks = [self._added.in_template(one) for one in rendered.values()]
        found = self.tokenizer.special_encoder.encode(texts, marks, list(rendered))
        encoded = {}
        for (number, one), (tokens, starts, ends) in zip(rendered.items(), found, strict=True):
            table = SpanTable([one.spans])
            stops = table.token_stops(starts, ends, table.borders)
            stops[-1:] = len(tokens)
            (spans,) = table.of_tokens(stops, np.array([len(tokens)]))
            encoded[number] = Encoded(tokens, spans)
        return encoded


def _encode_spans(tokenizer: Any, rendered: Sequence[Rendered]) -> list[Encoded]:
    """Encode each span by itself, for tokenizers without offsets."""
    table = SpanTable([one.spans for one in rendered])
    ids = list(tokenizer.encode_batch([one.text[span.start : span.stop] for one in rendered for span in one.spans]))
    arrays = [np.asarray(one) for one in ids]
    stops = np.cumsum([len(array) for array in arrays], dtype=np.int64)
    of_spans = np.append(0, np.cumsum(table.num_spans)).tolist()
    tokens = [np.concatenate(arrays[a:b] or [np.empty(0, np.uint32)]) for a, b in pairwise(of_spans)]
    num_tokens = np.array([len(one) for one in tokens], np.int64)
    return list(map(Encoded, tokens, table.of_tokens(stops, num_tokens)))


class _AddedTokens:
    """Finds the added tokens of a tokenizer. If names overlap, the first one counts; at one place, the longest one."""

    def __init__(self, added: dict[int, Any]) -> None:
        self.tokens = {token.content: (number, token) for number, token in added.items() if token.content}
        tokens = [token for _, token in self.tokens.values()]
        self.special = frozenset(token.content for token in tokens if token.special)
        self.any_special = any_of(self.special)
        self._any = any_of(self.tokens)
        # `tokenizers` searches for the two kinds in turn: the second kind after its normalizer.
        self.others = [
            any_of(token.content for token in tokens if not token.special and token.normalized == normalized)
            for normalized in (False, True)
        ]

    def in_template(self, rendered: Rendered) -> list[tuple[int, str]]:
        """(start, name) of the special tokens that the template itself has written."""
        return [(at + mark, name) for at, gap in _gaps(rendered) for mark, name in self.in_gap(gap)]

    def in_gap(self, gap: str) -> list[tuple[int, str]]:
        """(start, name) of the special tokens in the template's text between two messages."""
        return [(match.start(), match[0]) for match in self._any.finditer(gap) if match[0] in self.special]


def _gaps(rendered: Rendered) -> Iterator[tuple[int, str]]:
    """(start, text) of the template's text around messages."""
    text, at = rendered.text, 0
    for start, stop in (*rendered.said, (len(text), len(text))):
        if at < start:
            yield at, text[at:start]
        at = stop


def _are_plain(added: _AddedTokens, fast: FastEncoder) -> bool:
    """Whether each added token matches wherever its name occurs, takes in no more text, and leaves the rest alone."""
    for name, (_, token) in added.tokens.items():
        if token.lstrip or token.rstrip or token.single_word:
            return False
        if fast.proof.normalizes and token.normalized and fast.backend.normalizer.normalize_str(name) != name:
            return False
    return True


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


class _FastConversationEncoder:
    def __init__(self, fast: FastEncoder, added: _AddedTokens) -> None:
        self.fast, self.added = fast, added
        self._num_bytes = np.zeros(max(fast.backend.get_vocab(with_added_tokens=True).values()) + 1, np.int64)
        of_bytes = bytes_of_tokens(fast.backend.get_vocab(with_added_tokens=False))
        self._num_bytes[list(of_bytes.values())] = [len(word) for word in of_bytes]
        self._is_special = np.zeros(len(self._num_bytes), bool)
        for name, (number, token) in added.tokens.items():
            self._num_bytes[number] = len(name.encode())
            self._is_special[number] = token.special
        self._middles: dict[str, _Middle | None] = {}

    def encode(self, rendered: Sequence[Rendered]) -> dict[int, Encoded]:
        """Encode the conversations, by their numbers. Those that need the slow way are left out."""
        cuts = {number: self._cut(one) for number, one in enumerate(rendered) if self._is_normal(one.text)}
        names = self.added.any_special
        if names.search("\0".join(text for cut in cuts.values() for text in cut.texts)):
            cuts = {number: cut for number, cut in cuts.items() if not any(map(names.search, cut.texts))}
        ids = iter(self._encode_plain([text for cut in cuts.values() for text in cut.texts]))
        pieces = []
        for cut in cuts.values():
            pieces.append([next(ids)])
            for middle in cut.middles:
                pieces[-1] += [middle.ids, next(ids)]
        num_special = [sum(middle.num_special for middle in cut.middles) for cut in cuts.values()]
        encoded = self._aligned([rendered[number] for number in cuts], pieces, num_special)
        return dict(zip(cuts, encoded, strict=False))

    def _is_normal(self, text: str) -> bool:
        """Whether the normalizer changes nothing, so that offsets are those of the text."""
        if not self.fast.proof.normalizes or text.isascii():
            return True
        return bool(self.fast.backend.normalizer.normalize_str(text) == text)

    def _cut(self, rendered: Rendered) -> _Cut:
        """Cut at the template's special tokens."""
        begin = 0
        cut = _Cut([], [])
        for at, gap in _gaps(rendered):
            if (middle := self._middle(gap)) is not None:
                cut.texts.append(rendered.text[begin : at + middle.start])
                cut.middles.append(middle)
                begin = at + middle.stop
        cut.texts.append(rendered.text[begin:])
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
        if len(self._middles) < _MOST_KEPT_GAPS:
            self._middles[gap] = middle
        return middle

    def _id_of(self, name: str) -> Ids:
        return np.array([self.added.tokens[name][0]], np.uint32)

    def _encode_plain(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of texts without special tokens. Other added tokens are recognised in them."""
        together = "\0".join(texts)
        if not any(pattern.search(together) for pattern in self.added.others):
            return self.fast.encode_batch(texts)
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

    def _aligned(
        self, rendered: Sequence[Rendered], pieces: Sequence[Sequence[Ids]], num_special: Sequence[int]
    ) -> list[Encoded]:
        """The tokens and spans of all conversations; nothing if the places of tokens cannot be counted in bytes."""
        if not rendered:
            return []
        tokens = np.concatenate(list(chain.from_iterable(pieces)))
        num_tokens = np.array([sum(map(len, some)) for some in pieces], np.int64)
        stops = np.append(0, np.cumsum(num_tokens))
        ends = np.append(0, np.cumsum(self._num_bytes[tokens]))
        specials = np.append(0, np.cumsum(self._is_special[tokens]))
        table = SpanTable([one.spans for one in rendered])
        borders, byte_stops = _in_bytes([one.text for one in rendered], table)
        if (ends[stops] != byte_stops).any() or (np.diff(specials[stops]) != num_special).any():
            return []  # a model may make a special token of plain text: special_tokens.py handles that
        spans = table.of_tokens(table.token_stops(ends[:-1], ends[1:], borders), num_tokens)
        return [Encoded(tokens[a:b], some) for (a, b), some in zip(pairwise(stops.tolist()), spans, strict=True)]


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
