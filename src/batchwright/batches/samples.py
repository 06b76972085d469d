"""Rows of whole samples: documents packed side by side, or one in a row, with the fields of every token.

tokens         a a a a b b b c c .        three samples in a row of ten places, one of them empty
segment_ids    1 1 1 1 2 2 2 3 3 0        no token attends to another sample
position_ids   0 1 2 3 0 1 2 0 1 0        and each sample begins at 0
cu_seqlens     0 4 7 9 10                 the same, for variable-length attention; padding is a separate part
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.batches.gather import Allocate, copy_runs, floats, fresh
from batchwright.batches.row_index import RowIndex, RowSpec, SpanWeights, ragged
from batchwright.store.stream import TokenStream

__all__ = ["SampleRows"]


@dataclass(frozen=True, slots=True)
class PaddedSamples:
    """Rows of samples. Arrays are [sequences, width + 1], aligned with tokens (not with targets)."""

    tokens: NDArray[np.int64]
    weight: NDArray[np.float32]
    """The loss weight of predicting each token; 0 for a token that is not a target."""
    begins: NDArray[np.bool_]
    """Whether a sample begins here."""
    length: NDArray[np.int64]
    """The number of input tokens of each sequence."""
    offset: NDArray[np.int64]
    """The start of each sequence: not 0 if the left is padded."""
    widths: NDArray[np.int64]
    """The width of each sequence's batch in tokens, to which arrays are cut."""
    shown: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Fields of spans for each token; -1 for tokens without a span."""


def join_padded(parts: list[tuple[NDArray[np.int64], PaddedSamples]], out: NDArray[np.int64]) -> PaddedSamples:
    """Join parts that were padded separately. Each comes with the numbers of its rows in `out`."""
    shape, count = out.shape, len(out)
    joined = PaddedSamples(
        out,
        np.zeros(shape, np.float32),
        np.zeros(shape, bool),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        {name: np.full(shape, -1, np.int16) for _, padded in parts for name in padded.shown},
    )
    for rows, padded in parts:
        for name in ("tokens", "weight", "begins", "length", "offset", "widths"):
            getattr(joined, name)[rows] = getattr(padded, name)
        for name, values in padded.shown.items():
            joined.shown[name][rows] = values
    return joined


class SampleRows:
    """The rows of a stream's documents, by a row index. Safe to use from several threads."""

    def __init__(
        self,
        stream: TokenStream,
        index: RowIndex,
        spec: RowSpec,
        borders: NDArray[np.int64],
        trained: SpanWeights | None = None,
        columns: Mapping[str, NDArray[Any]] | None = None,
        *,
        name: str | None = None,
        reopen: tuple[Any, ...] | None = None,
    ) -> None:
        """`columns` holds fields of spans that batches can show, such as role and turn.

        `reopen` is a (function, arguments) with which another process opens the same rows. Without it they are copied.
        """
        self._reopen = reopen
        self.stream: TokenStream = stream
        self.index: RowIndex = index
        self.spec: RowSpec = spec
        self.trained: SpanWeights | None = trained
        self.columns: Mapping[str, NDArray[Any]] | dict[str, NDArray[Any]] = columns or {}
        self.borders = borders
        self.name: str = name or stream.name
        self.split: str = stream.split
        self.fingerprint: str = stream.fingerprint
        self.row_tokens: int = spec.row_tokens
        self.num_rows: int = index.num_rows
        self.num_tokens: int = index.num_tokens
        self.sequences: int = 1 + spec.pairs
        """The number of batch rows for one row: two for a pair."""
        if not self.num_rows:
            counts = ", ".join(f"{n:,} {what}" for what, n in index.counts.items()) or "no documents"
            raise SpecError(
                f"source {self.name!r} ({self.split}) has no rows: {counts}",
                parameter="max_length",
                source=self.name,
                remedy="a longer max_length, another loss=, or other data",
            )
        combine = np.maximum if spec.pairs else np.add
        self._row_length = combine.reduceat(index.length, index.row_starts[:-1], dtype=np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen or super().__reduce__()  # type: ignore[return-value]

    def lengths(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The length of each row in tokens. The longer sample of a pair counts."""
        return self._row_length[index]

    def longest(self) -> tuple[int, int]:
        """(number, tokens) of the longest row."""
        row = int(np.argmax(self._row_length))
        return row, int(self._row_length[row])

    def totals(self, index: NDArray[np.int64]) -> tuple[float, int]:
        """(sum of the loss masks, samples) of some rows together, from the index alone."""
        table = self.index
        first = table.row_starts[index]
        piece = ragged(first, table.row_starts[index + 1] - first)
        length = table.length[piece].astype(np.int64) + table.goes_on[piece]
        if self.trained is None:
            return float((length - 1).sum()), len(piece)
        document = table.document[piece]
        begin = table.start[piece] - self.borders[document]
        return float(self.trained.total(document, begin + 1, begin + length).sum()), len(piece)

    def pieces_of(self, index: int, epoch: int = 0) -> list[tuple[int, int, int]]:
        """(offset in the row, start in the stream, stop) of a row's pieces. Those of a pair follow each other."""
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
        self.padded(index, np.full(len(index), self.row_tokens), out, pad=0)

    def padded(
        self,
        index: NDArray[np.int64],
        widths: NDArray[np.int64],
        out: NDArray[np.int64],
        *,
        pad: int,
        left: bool = False,
        show: bool = False,
        allocate: Allocate = fresh,
    ) -> PaddedSamples:
        """Copy rows into `out`, [sequences, width + 1]. `widths` has the width of each row's batch.

        `show` adds fields of spans for each token. `allocate` gives memory for the weights.
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
        at = row * width + column + offset[row]
        address, _, _held = self.stream.addresses(start, 1)
        out[:] = pad
        copy_runs(address, length, self.stream.dtype, out.reshape(-1), at)
        place = np.arange(width)
        end = offset + row_length
        end[row[length > inputs]] += 1  # a piece with a successor fills its row, and has one target more
        is_token = place < end[:, None]
        if left:
            is_token &= place >= offset[:, None]
        shown: dict[str, NDArray[Any]] = {}
        weight = floats(allocate, *out.shape)
        if self.trained is None:
            weight[:] = is_token
        else:
            weight[:] = 0
            document = table.document[piece]
            begin = start - self.borders[document]
            weight[is_token] = self.trained.expand(self.trained.weight, document, begin, begin + length)
            for name, values in self.columns.items() if show else ():
                shown[name] = np.full(out.shape, -1, np.int16)
                shown[name][is_token] = self.trained.expand(values, document, begin, begin + length)
        begins = np.zeros(out.shape, bool)
        begins.reshape(-1)[at] = True
        weight[row, column + offset[row]] = 0  # no token before it could predict it
        return PaddedSamples(out, weight, begins, row_length, offset, widths, shown)
