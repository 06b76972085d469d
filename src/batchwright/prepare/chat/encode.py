"""Tokens and spans of rendered conversations: the ids of the whole text, without special tokens from messages.

The ids are those of `tokenizers` for the whole text, without the tokens that it would add. Special tokens are the only
difference. The template's own are recognised. Their names inside of messages are plain text. A name that is written in
part by the template and in part by a message is plain text too. Other added tokens are recognised everywhere, as in
`tokenizers`.

If tiktoken is proved for a `tokenizer.json`, tiktoken encodes. Texts are cut at the added tokens, as `tokenizers` cuts
them, and the places of tokens follow from their bytes. Other texts go through special_tokens.py, which is also the
reference in tests of the fast way. Bytes, characters, functions and users' own tokenizers have no special tokens and no
offsets. They encode span by span, so no token crosses a border.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import TokenizerError
from batchwright.prepare.chat.added import AddedTokens
from batchwright.prepare.chat.align import SpanTable, token_stops
from batchwright.prepare.chat.fast_encode import FastConversationEncoder, are_plain
from batchwright.prepare.chat.spans import Encoded, Rendered
from batchwright.prepare.tokenizers import CharsTokenizer, JsonTokenizer

__all__ = ["ConversationEncoder"]


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
        encoded: list[Encoded | None] = [None] * len(rendered)
        if self._fast is not None:
            encoded = self._fast.encode(rendered)
        left = [number for number, one in enumerate(encoded) if one is None]
        for number, one in zip(left, self._encode_whole([rendered[number] for number in left], left), strict=True):
            encoded[number] = one
        return encoded  # type: ignore[return-value]

    @cached_property
    def _added(self) -> AddedTokens:
        return AddedTokens(self.tokenizer.backend.get_added_tokens_decoder())

    @cached_property
    def _fast(self) -> FastConversationEncoder | None:
        fast = self.tokenizer.fast
        return FastConversationEncoder(fast, self._added) if fast is not None and are_plain(self._added, fast) else None

    def _encode_whole(self, rendered: Sequence[Rendered], numbers: Sequence[int]) -> list[Encoded]:
        if not rendered:
            return []
        marked = [self._added.in_template(one) for one in rendered]
        pieces = self.tokenizer.special_encoder.encode([one.text for one in rendered], marked, numbers)
        return [_aligned(one, *found) for one, found in zip(rendered, pieces, strict=True)]


def _aligned(rendered: Rendered, tokens: NDArray[Any], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Encoded:
    table = SpanTable([rendered.spans])
    stops = token_stops(starts, ends, table.borders, table.ranks)
    stops[-1:] = len(tokens)
    (spans,) = table.of_tokens(stops, np.array([len(tokens)]))
    return Encoded(tokens, spans)


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
