"""A report on the mixing of a stream of rows, beside sequential reading and a perfect shuffle of the same rows.

>>> directory, place = np.arange(4096) // 2048, np.arange(4096)          # two directories, one after the other
>>> report = mixing_report(directory, place, block=256)
>>> report.stream == report.sequential, round(report.stream.correlation, 3), round(report.shuffle.correlation, 3)
(True, 0.996, -0.002)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.order.permute import permutation

__all__ = ["MixingReport", "mixing_report"]

_SHUFFLED_AT_ONCE = 1 << 20
"""Draws of the perfect shuffle that are computed at once: bounds the memory of the permutation."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """Numbers about one order of rows. Places are ranks: the i-th row of sequential reading has place i."""

    share_deviation: float
    """The largest difference of a directory's share in a block from its share in all draws: 0 to 1."""
    correlation: float
    """The intraclass correlation of places in a block. 1: a block has neighbours only; 0: as if drawn at random."""
    autocorrelation: float
    """The correlation of the place of a draw with that of the next draw."""
    spread: float
    """The part of all places that the middle nine tenths of a block cover, on average: about 0.9 if drawn at random."""


@dataclass(frozen=True, slots=True)
class MixingReport:
    """The mixing of a stream, of the same rows read in sequence, and of a perfect shuffle of them.

    Blocks are `block` consecutive draws; the last block includes the remaining draws. A stream of fewer than two
    blocks has no correlation of blocks. This and every other number that a stream is too short for are given as 0.
    """

    draws: int
    block: int
    blocks: int
    shares: dict[int, float]
    """The share of each directory, by its number."""
    stream: Mixing
    sequential: Mixing
    shuffle: Mixing

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON, whose keys are strings only."""
        return {**asdict(self), "shares": {str(number): share for number, share in self.shares.items()}}

    def __str__(self) -> str:
        shares = ", ".join(f"{number}: {share:.1%}" for number, share in self.shares.items())
        rows = [("stream", self.stream), ("sequential", self.sequential), ("shuffle", self.shuffle)]
        return "\n".join(
            [
                f"{self.draws:,} draws in {self.blocks:,} blocks of {self.block:,}",
                f"directories  {shares or 'none'}",
                f"{'':<12} {'correlation':>11} {'next draw':>11} {'spread':>11} {'share off by':>13}",
                *(
                    f"{name:<12} {m.correlation:>11.4f} {m.autocorrelation:>11.4f} {m.spread:>11.4f} "
                    f"{m.share_deviation:>12.2%}".rstrip()
                    for name, m in rows
                ),
            ]
        )


def mixing_report(directory: ArrayLike, place: ArrayLike, *, block: int = 1024, seed: int = 0) -> MixingReport:
    """Report the mixing of a stream. Draw i is a row of `directory[i]`, number `place[i]` of the epoch.

    Only the order of the places matters, not the gaps between them. A row that is drawn several times has one place.
    `seed` keys the perfect shuffle that the stream is compared with. The report takes about a second and 45 MB for
    each million draws.
    """
    directories, places = np.asarray(directory, np.int64), np.asarray(place, np.int64)
    num_draws = len(places)
    in_sequence = np.argsort(places, kind="stable")
    ranks = _ranks(places, in_sequence)
    shuffled = np.empty_like(in_sequence)
    for first in range(0, num_draws, _SHUFFLED_AT_ONCE):
        some = np.arange(first, min(first + _SHUFFLED_AT_ONCE, num_draws))
        shuffled[some] = in_sequence[permutation(num_draws, seed, "mixing").at(some)]
    counts = np.bincount(directories)
    return MixingReport(
        draws=num_draws,
        block=block,
        blocks=len(_starts(num_draws, block)),
        shares={number: counts[number] / num_draws for number in np.flatnonzero(counts).tolist()},
        stream=_mixing(directories, ranks, block),
        sequential=_mixing(directories[in_sequence], ranks[in_sequence], block),
        shuffle=_mixing(directories[shuffled], ranks[shuffled], block),
    )


def _ranks(places: NDArray[np.int64], in_sequence: NDArray[np.intp]) -> NDArray[np.float64]:
    """The rank of each place, from 0. Equal places have the mean of their ranks.

    >>> places = np.array([30, 10, 30, 20])
    >>> _ranks(places, np.argsort(places, kind="stable")).tolist()
    [2.5, 0.0, 2.5, 1.0]
    """
    ranks = np.empty(len(places), np.float64)
    if len(places):
        ordered = places[in_sequence]
        firsts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        lengths = np.diff(firsts, append=len(places))
        ranks[in_sequence] = np.repeat(firsts + (lengths - 1) / 2, lengths)
    return ranks


def _starts(num_draws: int, block: int) -> NDArray[np.int64]:
    """The first draws of blocks. The last block includes the remaining draws.

    >>> _starts(11, 4).tolist(), _starts(3, 4).tolist(), _starts(0, 4).tolist()
    ([0, 4], [0], [])
    """
    return np.arange(max(num_draws // block, min(num_draws, 1)), dtype=np.int64) * block


def _mixing(directories: NDArray[np.int64], ranks: NDArray[np.float64], block: int) -> Mixing:
    if not len(ranks):
        return Mixing(0.0, 0.0, 0.0, 0.0)
    starts = _starts(len(ranks), block)
    return Mixing(
        share_deviation=_share_deviation(directories, starts),
        correlation=_intraclass_correlation(ranks, starts),
        autocorrelation=_autocorrelation(ranks),
        spread=_spread(ranks, starts, block),
    )


def _share_deviation(directories: NDArray[np.int64], starts: NDArray[np.int64]) -> float:
    lengths = np.diff(starts, append=len(directories))
    worst = 0.0
    for number in np.flatnonzero(np.bincount(directories)):
        is_here = directories == number
        shares = np.add.reduceat(is_here, starts, dtype=np.int64) / lengths
        worst = max(worst, float(np.abs(shares - is_here.mean()).max()))
    return worst


def _intraclass_correlation(values: NDArray[np.float64], starts: NDArray[np.int64]) -> float:
    """The part of the variance that lies between blocks, from the mean squares of a one-way analysis of variance.

    (MSB - MSW) / (MSB + (m - 1) MSW) with m values in a block. It is 0 on average if blocks are drawn at random; the
    plain ratio of variances would be 1 / m. k blocks of unequal length have m = (N - sum of squares / N) / (k - 1).
    """
    num_values, num_blocks = len(values), len(starts)
    if num_blocks < 2:
        return 0.0
    lengths = np.diff(starts, append=num_values)
    centred = values - values.mean()
    means = np.add.reduceat(centred, starts) / lengths
    between = float(lengths @ means**2)
    within = max(float(centred @ centred) - between, 0.0)
    mean_between, mean_within = between / (num_blocks - 1), within / (num_values - num_blocks)
    m = (num_values - float(lengths @ lengths) / num_values) / (num_blocks - 1)
    return _ratio(mean_between - mean_within, mean_between + (m - 1) * mean_within)


def _autocorrelation(values: NDArray[np.float64]) -> float:
    centred = values - values.mean()
    return _ratio(float(centred[1:] @ centred[:-1]), float(centred @ centred))


def _ratio(part: float, total: float) -> float:
    if total <= 0:
        return 0.0
    return part / total


def _spread(ranks: NDArray[np.float64], starts: NDArray[np.int64], block: int) -> float:
    """The mean range between the 5 % and 95 % quantiles of a block's ranks, as a fraction of all ranks."""
    total = 0.0
    for blocks in (ranks[: starts[-1]].reshape(-1, block), ranks[None, starts[-1] :]):
        low, high = np.quantile(blocks, [0.05, 0.95], axis=1)
        total += float((high - low).sum())
    return total / len(starts) / len(ranks)
