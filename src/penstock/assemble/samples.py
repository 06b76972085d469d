"""Rows of whole samples: documents packed side by side, or one in a row, and what that means for every token.

A row index says which pieces of which documents a row is made of. It is planned over all documents at once, before
the order, so packed rows are numbers like any others: shuffled, mixed, resumed and traced in the same way.

tokens         a a a a b b b c c .        three samples in a row of nine places, one of them empty
segment_ids    1 1 1 1 2 2 2 3 3 0        no token attends to another sample
position_ids   0 1 2 3 0 1 2 0 1 0        and each sample begins at 0
cu_seqlens     0 4 7 9 10                 the same, as variable-length attention takes it; padding is a part of its own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.assemble.gather import tokens_at
from penstock.assemble.pack import PACK_VERSION, pack
from penstock.errors import SpecError
from penstock.spec import at_least, one_of

__all__ = ["PACKINGS", "TRUNCATIONS", "Laid", "RowIndex", "RowSpec", "SampleRows", "Trained", "join_laid", "plan_rows", "ragged"]

PACKINGS = ("best_fit", "first_fit", "greedy")
TRUNCATIONS = ("split", "drop", "keep_start", "keep_end", "raise")


@dataclass(frozen=True, slots=True)
class RowSpec:
    """How rows are made of documents. With the documents' content it decides every row."""

    row_tokens: int
    packing: str | None
    """None: one sample in each row."""
    truncation: str
    """What becomes of a sample that is longer than a row: "split" cuts it into several."""
    loss: str | None = None
    """Which tokens are trained, as `LossPolicy` writes it; None: all."""
    pairs: bool = False
    """Whether a document is two samples, chosen and rejected, that come together."""

    def spec(self) -> dict[str, Any]:
        """What names the rows, as JSON."""
        given = {"packing": self.packing, "truncation": self.truncation, "loss": self.loss}
        return {"row_tokens": self.row_tokens, "version": PACK_VERSION} | {
            name: value for name, value in given.items() if value is not None
        } | ({"pairs": True} if self.pairs else {})


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Which pieces of documents each row is made of: row r has the pieces [row_starts[r], row_starts[r + 1])."""

    row_starts: NDArray[np.int64]
    start: NDArray[np.int64]
    """Token of the stream at which a piece begins."""
    length: NDArray[np.int32]
    document: NDArray[np.int64]
    goes_on: NDArray[np.uint8]
    """1 for a piece that fills a row and is not the last of its document: the next token is its last label."""
    counts: dict[str, int] = field(default_factory=dict)
    """What became of documents: "documents", and "over length", "empty mask", ... for those that are in no row."""

    @property
    def num_rows(self) -> int:
        return len(self.row_starts) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum(dtype=np.int64))


def plan_rows(
    borders: NDArray[np.int64],
    spec: RowSpec,
    *,
    trained: Trained | None = None,
    sides: NDArray[np.int64] | None = None,
    source: str = "",
) -> RowIndex:
    """The rows of documents that begin and end at these borders of a stream.

    `trained` counts trained tokens: documents without any are in no row. `sides` is how many of a document's tokens are
    its first sample, for pairs.
    """
    one_of(TRUNCATIONS, truncation=spec.truncation)
    capacity = at_least(1, max_length=spec.row_tokens)
    lengths = np.diff(borders)
    counts = {"documents": len(lengths)}
    if sides is not None:
        return _plan_pairs(borders, spec, sides, trained, counts, source)
    document = np.flatnonzero(lengths)
    _count(counts, "no tokens", len(lengths) - len(document))
    start, length = borders[document], lengths[document]
    goes_on = np.zeros(len(document), np.uint8)
    if spec.truncation == "split":
        document, start, length, goes_on = _split(document, start, length, capacity)
    else:
        is_over = length > capacity
        _refuse_over(spec, is_over, length, document, source)
        if spec.truncation == "drop":
            _count(counts, "over length", int(is_over.sum()))
            document, start, length, goes_on = (a[~is_over] for a in (document, start, length, goes_on))
        else:
            _count(counts, "cut", int(is_over.sum()))
            start = np.where(is_over & (spec.truncation == "keep_end"), start + length - capacity, start)
            length = np.minimum(length, capacity)
        if trained is not None:
            begin = start - borders[document]
            teaches = trained.count(document, begin + 1, begin + length) > 0  # the first token is never predicted
            _count(counts, "empty mask", int((~teaches).sum()))
            document, start, length, goes_on = (a[teaches] for a in (document, start, length, goes_on))
    if spec.packing is None:
        items, row_starts = np.arange(len(length)), np.arange(len(length) + 1)
    else:
        items, row_starts = pack(length, capacity, one_of(PACKINGS, packing=spec.packing))
    return RowIndex(
        row_starts.astype(np.int64),
        start[items],
        length[items].astype(np.int32),
        document[items],
        goes_on[items],
        counts,
    )


def _count(counts: dict[str, int], what: str, number: int) -> None:
    if number:
        counts[what] = number


def _refuse_over(
    spec: RowSpec, is_over: NDArray[np.bool_], length: NDArray[np.int64], document: NDArray[np.int64], source: str
) -> None:
    if spec.truncation == "raise" and is_over.any():
        first = int(np.flatnonzero(is_over)[0])
        raise SpecError(
            f"{int(is_over.sum()):,} of {len(is_over):,} samples of {source!r} have more than "
            f"max_length={spec.row_tokens:,} tokens, the first is document {int(document[first]):,} with "
            f"{int(length[first]):,}",
            parameter="max_length",
            source=source,
            document=int(document[first]),
            remedy=f"max_length={int(length.max())}, or truncation='drop', 'keep_start' or 'keep_end'",
        )


def _split(
    document: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Pieces of at most `capacity` tokens: all of a document but its last fill a row."""
    pieces = -(-length // capacity)
    which = np.repeat(np.arange(len(length)), pieces)
    number = ragged(np.zeros(len(length), np.int64), pieces)
    left = length[which] - number * capacity
    return (
        document[which],
        start[which] + number * capacity,
        np.minimum(left, capacity),
        (left > capacity).astype(np.uint8),
    )


def _plan_pairs(
    borders: NDArray[np.int64],
    spec: RowSpec,
    sides: NDArray[np.int64],
    trained: Trained | None,
    counts: dict[str, int],
    source: str,
) -> RowIndex:
    if spec.packing is not None:
        raise SpecError(
            "preference pairs cannot be packed: each is two rows of a batch, chosen and rejected",
            parameter="packing",
            remedy="leave out packing=",
        )
    document = np.arange(len(sides))
    begin = np.stack([np.zeros_like(sides), sides], axis=1)
    length = np.stack([sides, np.diff(borders) - sides], axis=1)
    is_over = (length > spec.row_tokens).any(axis=1)
    _refuse_over(spec, is_over, length.max(axis=1, initial=0), document, source)
    if spec.truncation == "drop":
        _count(counts, "over length", int(is_over.sum()))
        kept = ~is_over
    else:
        _count(counts, "cut", int(is_over.sum()))
        kept = np.ones(len(document), bool)
        over = np.maximum(length - spec.row_tokens, 0)
        begin += over * (spec.truncation == "keep_end")
        length -= over
    if trained is not None:
        both = [trained.count(document, begin[:, s] + 1, begin[:, s] + length[:, s]) > 0 for s in (0, 1)]
        empty = kept & ~(both[0] & both[1])
        _count(counts, "empty mask", int(empty.sum()))
        kept &= ~empty
    document, begin, length = document[kept], begin[kept], length[kept]
    return RowIndex(
        2 * np.arange(len(document) + 1),
        (begin + borders[document][:, None]).ravel(),
        length.ravel().astype(np.int32),
        np.repeat(document, 2),
        np.zeros(2 * len(document), np.uint8),
        counts,
    )


def ragged(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """starts[0], starts[0] + 1, ... counts[0] numbers; then those from starts[1] on; and so on.

    >>> ragged(np.array([10, 50]), np.array([3, 2])).tolist()
    [10, 11, 12, 50, 51]
    """
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(starts - before, counts)


class Trained:
    """The weight of every token of documents that say what their tokens are: a lookup in their spans."""

    def __init__(
        self, starts: NDArray[np.integer], stop: NDArray[np.int32], weight: NDArray[np.float32]
    ) -> None:
        """Document d has the spans [starts[d], starts[d + 1]); a span ends at token `stop` of it, and has a weight."""
        self.starts, self.stop, self.weight = starts, stop, weight

    def _cut(
        self, document: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(span, how many of its tokens, spans of each piece) of tokens [begin, end) of documents."""
        first = self.starts[document].astype(np.int64)
        counts = self.starts[document + 1] - first
        span = ragged(first, counts)
        low, high = np.repeat(begin, counts), np.repeat(end, counts)
        stop = np.clip(self.stop[span], low, high)
        is_first = np.zeros(len(span), bool)
        is_first[(np.cumsum(counts) - counts)[counts > 0]] = True
        before = np.where(is_first, low, np.roll(stop, 1))
        return span, stop - before, counts

    def count(
        self, document: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """How many of the tokens [begin, end) of each document have a weight above 0."""
        span, tokens, counts = self._cut(document, begin, np.maximum(end, begin))
        sums = np.concatenate([[0], np.cumsum(np.where(self.weight[span] > 0, tokens, 0))])
        ends = np.cumsum(counts)
        return sums[ends] - sums[ends - counts]

    def expand(
        self, values: NDArray[Any], document: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64]
    ) -> NDArray[Any]:
        """What `values` says of the span of each token [begin, end) of documents, end to end."""
        span, tokens, _ = self._cut(document, begin, end)
        return np.repeat(values[span], tokens)


@dataclass(frozen=True, slots=True)
class Laid:
    """Rows of samples, laid out: [sequences, width + 1] each, aligned with tokens (not with labels)."""

    tokens: NDArray[np.int64]
    weight: NDArray[np.float32]
    """Of each token as something to predict: 0 where it is nothing's label."""
    begins: NDArray[np.bool_]
    """Where a sample begins."""
    length: NDArray[np.int64]
    """Tokens of each sequence that are inputs."""
    offset: NDArray[np.int64]
    """Where they begin: not at 0 where the left is padded."""
    widths: NDArray[np.int64]
    """Tokens of the batch that each sequence is in; what is beyond is cut off."""
    shown: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Fields of spans for each token, -1 where there is none."""


def join_laid(parts: list[tuple[NDArray[np.int64], Laid]], out: NDArray[np.int64]) -> Laid:
    """Rows that were laid out apart, each part with the numbers that its rows have in `out`."""
    shape, count = out.shape, len(out)
    joined = Laid(
        out,
        np.zeros(shape, np.float32),
        np.zeros(shape, bool),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        {name: np.full(shape, -1, np.int16) for _, laid in parts for name in laid.shown},
    )
    for rows, laid in parts:
        for name in ("tokens", "weight", "begins", "length", "offset", "widths"):
            getattr(joined, name)[rows] = getattr(laid, name)
        for name, values in laid.shown.items():
            joined.shown[name][rows] = values
    return joined


class Stream(Protocol):
    """What rows of samples need of a stream of documents."""

    name: str
    split: str
    fingerprint: str
    dtype: np.dtype[Any]

    def addresses(
        self, starts: NDArray[np.int64], length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[Any]]: ...


class SampleRows:
    """Rows that a row index makes of the documents of a stream. Safe to use from several threads."""

    def __init__(
        self,
        stream: Stream,
        index: RowIndex,
        spec: RowSpec,
        borders: NDArray[np.int64],
        trained: Trained | None = None,
        columns: Mapping[str, NDArray[Any]] | None = None,
        *,
        name: str | None = None,
        reopen: tuple[Any, ...] | None = None,
    ) -> None:
        """`columns` are fields of spans that batches can show, such as role and turn.

        `reopen` is (function, arguments): how another process opens the same rows, if not by value.
        """
        self._reopen = reopen
        self.stream, self.index, self.spec, self.trained = stream, index, spec, trained
        self.columns = columns or {}
        self.borders = borders
        self.name, self.split, self.fingerprint = name or stream.name, stream.split, stream.fingerprint
        self.row_tokens, self.num_rows, self.num_tokens = spec.row_tokens, index.num_rows, index.num_tokens
        self.sequences = 2 if spec.pairs else 1
        """Rows of a batch that one row is: two for a pair."""
        if not self.num_rows:
            raise SpecError(
                f"source {self.name!r} ({self.split}) has no rows: "
                + (", ".join(f"{n:,} {what}" for what, n in index.counts.items()) or "no documents"),
                parameter="max_length",
                source=self.name,
                remedy="a longer max_length, another loss=, or other data",
            )
        piece_sums = np.concatenate([[0], np.cumsum(index.length, dtype=np.int64)])
        self._row_length = (
            np.maximum.reduceat(index.length, index.row_starts[:-1]).astype(np.int64)
            if spec.pairs
            else piece_sums[index.row_starts[1:]] - piece_sums[index.row_starts[:-1]]
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen or super().__reduce__()  # type: ignore[return-value]

    def lengths(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each row: of the longer one of a pair."""
        return self._row_length[index]

    def pieces_of(self, index: int, epoch: int = 0) -> list[tuple[int, int, int]]:
        """(offset in the row, start in the stream, stop) of a row's pieces; of a pair, one after the other."""
        found, at = [], 0
        for piece in range(int(self.index.row_starts[index]), int(self.index.row_starts[index + 1])):
            start, length = int(self.index.start[piece]), int(self.index.length[piece] + self.index.goes_on[piece])
            found.append((at, start, start + length))
            at += length
        return found

    def rows_touching(self, start: int, stop: int, epoch: int = 0) -> list[int]:
        """Rows that have tokens of [start, stop) of the stream."""
        index = self.index
        ends = index.start + index.length + index.goes_on
        pieces = np.flatnonzero((index.start < stop) & (ends > start))
        rows: list[int] = np.unique(np.searchsorted(index.row_starts, pieces, side="right") - 1).tolist()
        return rows

    def gather(self, index: NDArray[np.int64], epoch: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        self.lay(index, np.full(len(index), self.row_tokens), out, pad=0)

    def lay(
        self,
        index: NDArray[np.int64],
        widths: NDArray[np.int64],
        out: NDArray[np.int64],
        *,
        pad: int,
        left: bool = False,
        show: bool = False,
    ) -> Laid:
        """Rows one below the other in `out`, [sequences, width + 1]; `widths` of the batch that each row is in.

        With `show`, fields of spans too, for each token.
        """
        table = self.index
        first = table.row_starts[index]
        num_pieces = table.row_starts[index + 1] - first
        piece = ragged(first, num_pieces)
        start, inputs = table.start[piece], table.length[piece].astype(np.int64)
        length = inputs + table.goes_on[piece]
        if self.sequences == 2:
            row, column = np.arange(len(piece)), np.zeros(len(piece), np.int64)
            row_length, widths = inputs, np.repeat(widths, 2)
        else:
            row = np.repeat(np.arange(len(index)), num_pieces)
            before = np.cumsum(inputs) - inputs
            column = before - before[np.cumsum(num_pieces) - num_pieces][row]
            row_length = self._row_length[index]
        offset = widths - row_length if left else np.zeros(len(row_length), np.int64)
        width = out.shape[1]
        total = int(length.sum())
        ends = np.cumsum(length)
        # Where each token goes, and where it comes from: a piece is one run in both.
        run = np.arange(total)
        to = run + np.repeat(row * width + column + offset[row] - (ends - length), length)
        address, _, _held = self.stream.addresses(start, 1)
        out[:] = pad
        flat = out.reshape(-1)
        flat[to] = tokens_at(address, length, run, ends, self.stream.dtype)
        weight = np.zeros(out.shape, np.float32)
        shown: dict[str, NDArray[Any]] = {}
        if self.trained is None:
            weight.reshape(-1)[to] = 1
        else:
            document = table.document[piece]
            begin = start - self.borders[document]
            weight.reshape(-1)[to] = self.trained.expand(self.trained.weight, document, begin, begin + length)
            for name, values in self.columns.items() if show else ():
                shown[name] = np.full(out.shape, -1, np.int16)
                shown[name].reshape(-1)[to] = self.trained.expand(values, document, begin, begin + length)
        begins = np.zeros(out.shape, bool)
        at = row * width + column + offset[row]
        begins.reshape(-1)[at] = True
        weight.reshape(-1)[at] = 0  # nothing comes before it that could predict it
        return Laid(out, weight, begins, row_length, offset, widths, shown)

