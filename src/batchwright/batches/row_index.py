"""The pieces of documents in each row, planned over all documents at once, before the order.

So rows of whole documents are numbers like all other rows, and are shuffled, mixed, resumed and traced in the same way.
Only this module decides which documents are left out (too long, nothing to learn), and counts them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least, one_of
from batchwright.base.errors import SpecError
from batchwright.batches.pack import PACK_VERSION, PACKINGS, pack

__all__ = ["RowIndex", "RowSpec", "SpanWeights", "plan_rows"]

TRUNCATIONS = ("split", "drop", "keep_start", "keep_end", "raise")

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowSpec:
    """The settings of rows. Together with the documents they fix every row."""

    row_tokens: int
    packing: str | None
    """None: one sample in each row."""
    truncation: str
    """The treatment of a sample that is longer than a row. "split" cuts it into several."""
    loss: str | None = None
    """The tokens that are trained, as `LossPolicy` writes them; None: all."""
    pairs: bool = False
    """Whether a document is a pair of samples, chosen and rejected."""

    def spec(self) -> dict[str, Any]:
        """The settings as JSON, without defaults."""
        spec = {"row_tokens": self.row_tokens, "truncation": self.truncation, "version": PACK_VERSION}
        optional = {"packing": self.packing, "loss": self.loss, "pairs": self.pairs}
        return spec | {name: value for name, value in optional.items() if value}


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Pieces of documents, row by row: row r has the pieces [row_starts[r], row_starts[r + 1])."""

    row_starts: Numbers
    start: Numbers
    """The first token of each piece, by its number in the stream."""
    length: NDArray[np.int32]
    document: Numbers
    goes_on: NDArray[np.uint8]
    """1 for a piece that fills a row and is not the last of its document. The next token is its last target."""
    counts: dict[str, int] = field(default_factory=dict)
    """The number of documents, and the numbers of those left out, by reason."""

    @property
    def num_rows(self) -> int:
        return len(self.row_starts) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum(dtype=np.int64))


class _Pieces(NamedTuple):
    """Parts of documents, before they are put in rows. `begin` counts from the document's first token."""

    document: Numbers
    begin: Numbers
    length: Numbers
    goes_on: NDArray[np.uint8]

    def where(self, which: NDArray[np.bool_]) -> _Pieces:
        return _Pieces(self.document[which], self.begin[which], self.length[which], self.goes_on[which])


def plan_rows(
    borders: Numbers,
    spec: RowSpec,
    *,
    trained: SpanWeights | None = None,
    sides: Numbers | None = None,
    source: str = "",
) -> RowIndex:
    """Plan the rows of the documents between these borders of a stream.

    `trained` counts trained tokens. Samples without any are left out. For pairs, `sides` is the number of tokens in
    each document's first sample. If one sample of a pair is left out, so is the other.

    >>> plan_rows(np.array([0, 3, 4, 12]), RowSpec(4, "best_fit", "split")).start.tolist()
    [4, 8, 0, 3]
    """
    one_of(TRUNCATIONS, truncation=spec.truncation)
    at_least(1, max_length=spec.row_tokens)
    counts = {"documents": len(borders) - 1}
    pieces, per_row = _whole(borders, sides), 1 + (sides is not None)
    if per_row == 2 and spec.packing is not None:
        raise SpecError(
            "preference pairs cannot be packed: each is two rows of a batch, chosen and rejected",
            parameter="packing",
            remedy="leave out packing=",
        )
    pieces = _left_out(pieces, pieces.length == 0, "no tokens", counts, per_row)
    if spec.truncation == "split":
        pieces = _split(pieces, spec.row_tokens)
    else:
        pieces = _truncated(pieces, spec, counts, per_row, source)
    if trained is not None:
        # The first token of a sample is never predicted.
        learned = trained.count(pieces.document, pieces.begin + 1, pieces.begin + pieces.length)
        pieces = _left_out(pieces, learned == 0, "empty mask", counts, per_row)
    if spec.packing is None:
        items, row_starts = np.arange(len(pieces.length)), np.arange(0, len(pieces.length) + 1, per_row)
    else:
        items, row_starts = pack(pieces.length, spec.row_tokens, one_of(PACKINGS, packing=spec.packing))
    document = pieces.document[items]
    return RowIndex(
        row_starts.astype(np.int64),
        borders[document] + pieces.begin[items],
        pieces.length[items].astype(np.int32),
        document,
        pieces.goes_on[items],
        counts,
    )


def _whole(borders: Numbers, sides: Numbers | None) -> _Pieces:
    """Whole documents, or both sides of each pair."""
    length = np.diff(borders)
    document, begin = np.arange(len(length)), np.zeros(len(length), np.int64)
    if sides is not None:
        document = np.repeat(document, 2)
        begin = np.stack([begin, sides], axis=1).ravel()
        length = np.stack([sides, length - sides], axis=1).ravel()
    return _Pieces(document, begin, length, np.zeros(len(length), np.uint8))


def _left_out(pieces: _Pieces, which: NDArray[np.bool_], why: str, counts: dict[str, int], per_row: int) -> _Pieces:
    """The pieces without those marked in `which`, which are counted. A pair is left out as a whole."""
    is_left_out = which.reshape(-1, per_row).any(axis=1)
    if is_left_out.any():
        counts[why] = int(is_left_out.sum())
    return pieces.where(~np.repeat(is_left_out, per_row))


def _truncated(pieces: _Pieces, spec: RowSpec, counts: dict[str, int], per_row: int, source: str) -> _Pieces:
    is_over = pieces.length > spec.row_tokens
    if spec.truncation == "drop" or not is_over.any():
        return _left_out(pieces, is_over, "over length", counts, per_row)
    if spec.truncation == "raise":
        first = int(np.flatnonzero(is_over)[0])
        raise SpecError(
            f"{int(is_over.sum()):,} of {len(is_over):,} samples of {source!r} have more than "
            f"max_length={spec.row_tokens:,} tokens, the first is document {int(pieces.document[first]):,} with "
            f"{int(pieces.length[first]):,}",
            parameter="max_length",
            source=source,
            document=int(pieces.document[first]),
            remedy=f"max_length={int(pieces.length.max())}, or truncation='drop', 'keep_start' or 'keep_end'",
        )
    counts["cut"] = int(is_over.sum())
    over = np.maximum(pieces.length - spec.row_tokens, 0)
    pieces = pieces._replace(length=pieces.length - over)
    if spec.truncation == "keep_end":
        return pieces._replace(begin=pieces.begin + over)
    return pieces


def _split(pieces: _Pieces, capacity: int) -> _Pieces:
    """Pieces of at most `capacity` tokens. All pieces of a document but the last one fill a row."""
    parts = -(-pieces.length // capacity)
    which = np.repeat(np.arange(len(parts)), parts)
    number = ragged(np.zeros(len(parts), np.int64), parts)
    left = pieces.length[which] - number * capacity
    return _Pieces(
        pieces.document[which],
        pieces.begin[which] + number * capacity,
        np.minimum(left, capacity),
        (left > capacity).astype(np.uint8),
    )


def ragged(starts: Numbers, counts: Numbers) -> Numbers:
    """The ranges of counts[i] numbers from starts[i] on, end to end.

    >>> ragged(np.array([10, 50]), np.array([3, 2])).tolist()
    [10, 11, 12, 50, 51]
    """
    before = np.cumsum(counts) - counts
    numbers: Numbers = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
    return numbers


class SpanWeights:
    """Weights of tokens by span. Every token has the weight of its span."""

    def __init__(self, starts: NDArray[Any], stop: NDArray[Any], weight: NDArray[np.float32]) -> None:
        """Document d has the spans [starts[d], starts[d + 1]). A span ends at token `stop` of its document."""
        self.starts: NDArray[Any] = starts
        self.stop: NDArray[Any] = stop
        self.weight: NDArray[np.float32] = weight

    def count(self, document: Numbers, begin: Numbers, end: Numbers) -> Numbers:
        """The number of tokens [begin, end) of each document with a weight above 0."""
        return self._sums((self.weight > 0).astype(np.int64), document, begin, end)

    def total(self, document: Numbers, begin: Numbers, end: Numbers) -> NDArray[np.float64]:
        """The sum of the weights of the tokens [begin, end) of each document."""
        return self._sums(self.weight.astype(np.float64), document, begin, end)

    def _sums(self, weight: NDArray[Any], document: Numbers, begin: Numbers, end: Numbers) -> NDArray[Any]:
        span, tokens, counts = self._cut(document, begin, np.maximum(end, begin))
        sums = np.append(0, np.cumsum(weight[span] * tokens))
        ends = np.cumsum(counts)
        found: NDArray[Any] = sums[ends] - sums[ends - counts]
        return found

    def expand(self, values: NDArray[Any], document: Numbers, begin: Numbers, end: Numbers) -> NDArray[Any]:
        """The `values` of the spans of all tokens [begin, end) of documents, end to end."""
        span, tokens, _ = self._cut(document, begin, end)
        return np.repeat(values[span], tokens)

    def _cut(self, document: Numbers, begin: Numbers, end: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """(spans of all documents, the number of tokens of [begin, end) in each, spans of each document)."""
        first = self.starts[document].astype(np.int64)
        counts = self.starts[document + 1].astype(np.int64) - first
        span = ragged(first, counts)
        low = np.repeat(begin, counts)
        stop = np.clip(self.stop[span].astype(np.int64), low, np.repeat(end, counts))
        before = np.roll(stop, 1)
        first_spans = (np.cumsum(counts) - counts)[counts > 0]
        before[first_spans] = low[first_spans]
        return span, stop - before, counts
