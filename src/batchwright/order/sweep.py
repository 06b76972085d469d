"""Sweep through a plan's weights, caps and changes. The result is a list of legs, each with one mix.

A leg is a stretch of positions with one pattern (or natural proportion). Every leg has the number of rows that each
source gave before it. So the next leg continues where the last one stopped, without repeated or lost rows. The position
at which a cap binds is a result, never an input.

A leg does not begin with the first slot of its pattern, but with the slot of its position (modulo 65,536). Otherwise
weights that change often would use only the beginnings of patterns, in which rare sources never occur.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from batchwright.base.errors import SpecError
from batchwright.base.words import suggest
from batchwright.order.epochs import NEVER
from batchwright.order.mix import Natural, Pattern, build_pattern, integer_shares

__all__ = ["MixLeg"]

_PHASES = 1 << 16
"""Slots among which a leg may begin: those of the shortest patterns."""
_MOST_EPOCHS = 1 << 20
"""A cap above this never binds in any run that ends."""

Schedule = tuple[tuple[int, Mapping[str, float] | None], ...]
"""((from position, weights), ...); weights None: every row once, in natural proportion."""


class OrderChange(NamedTuple):
    """The change of an order by an amendment, from a position on."""

    at: int
    weights: Schedule | None = None
    """The weights that replace all weights from here on; None: no change."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Sources that join, and sources that have more rows now."""
    max_epochs: tuple[tuple[str, int], ...] = ()
    """Caps that are replaced."""
    num_rows: int | None = None

    @property
    def touches_the_mix(self) -> bool:
        return bool(self.weights or self.sizes or self.max_epochs)


class Size(NamedTuple):
    """The epoch size of a source, `num_rows`, from its row number `first_row` on, counted through epochs."""

    first_row: int
    first_epoch: int
    num_rows: int


class MixLeg(NamedTuple):
    start: int
    before: tuple[int, ...]
    """Rows that each source gave before."""
    mix: Pattern | Natural
    weights: tuple[float, ...] | None
    """Asked for, of the sources that are still there; None: natural proportion."""
    phase: int
    """The slot of the pattern with which the leg begins."""
    base: tuple[int, ...]
    """The rows to add to the draws of each source by the mix. The sum is all rows that the source gave."""

    @classmethod
    def begin(
        cls,
        start: int,
        before: Sequence[int],
        mix: Pattern | Natural,
        weights: tuple[float, ...] | None,
        phase: int = 0,
    ) -> MixLeg:
        base = tuple(before)
        if phase:
            base = tuple(b - p for b, p in zip(before, mix.counts(phase), strict=True))
        return cls(start, tuple(before), mix, weights, phase, base)

    def among(self, num_sources: int) -> MixLeg:
        """The same leg, with zero rows for sources that joined later."""
        later = (0,) * (num_sources - len(self.before))
        return self._replace(before=self.before + later, base=self.base + later)

    def after_row(self, source: int, ordinal: int) -> int:
        """The position after a row of a source, counted through its epochs; beyond the leg if it comes later."""
        assert isinstance(self.mix, Pattern)
        if not self.mix.counts_per_cycle[source]:  # the pattern was drawn only in part
            return self.start - self.phase + self.mix.num_slots
        slot = int(self.mix.position(source, np.array([ordinal - self.base[source]]))[0])
        return self.start - self.phase + slot + 1

    def counts(self, position: int) -> list[int]:
        """Rows that each source gave before a position of this leg."""
        given = self.mix.counts(position - self.start + self.phase)
        given += [0] * (len(self.before) - len(given))  # sources that joined later
        return [b + g for b, g in zip(self.base, given, strict=True)]


class Binding(NamedTuple):
    """A source that has given all its epochs. It is left out from this position on."""

    position: int
    source: str
    epochs: int


def sweep(
    sizes: Mapping[str, int],
    schedule: Schedule,
    *,
    max_epochs: Mapping[str, int],
    exhausted: str,
    num_rows: int | None,
    changes: Sequence[OrderChange],
) -> Sweep:
    """Go through all changes once."""
    run = Sweep(sizes, max_epochs, exhausted, num_rows)
    for change in changes:
        if change.weights is not None:
            schedule = (*(segment for segment in schedule if segment[0] < change.at), *change.weights)
    asked = dict(schedule)
    mixing = {*asked, *(change.at for change in changes if change.touches_the_mix)}
    for mark in sorted({*mixing, *(change.at for change in changes)}):
        for change in changes:
            if change.at == mark:
                run.apply(change)
        if mark in asked:
            run.weights, run.is_changed = asked[mark], True
        run.go(mark, min((other for other in mixing if other > mark), default=NEVER))
        if run.limit is not None:
            break
    run.finish()
    return run


class Sweep:
    """The legs and epochs of a stream, as far as the sweep has come."""

    def __init__(
        self, sizes: Mapping[str, int], max_epochs: Mapping[str, int], exhausted: str, num_rows: int | None
    ) -> None:
        self.names: list[str] = list(sizes)
        self.sizes: list[list[Size]] = [[Size(0, 0, n)] for n in sizes.values()]
        self.caps, self.exhausted, self.num_rows = dict(max_epochs), exhausted, num_rows
        self.weights: Mapping[str, float] | None = None
        self.is_changed: bool = True
        self.joining: dict[str, int] = {}
        self.legs: list[MixLeg] = []
        self.bindings: list[Binding] = []
        self.eras: list[tuple[int, int | None]] = []
        """(from position, rows of an epoch): as `Epochs` takes it."""
        self.limit: int | None = None
        """The position at which no row is left."""

    def apply(self, change: OrderChange) -> None:
        self.joining.update(change.sizes)
        self.caps.update(change.max_epochs)
        self.bindings = [b for b in self.bindings if b.epochs >= self.caps.get(b.source, b.epochs)]
        self.is_changed |= change.touches_the_mix
        if change.num_rows is not None:
            self.num_rows = change.num_rows
            if self.eras and self.weights is not None:
                self._begin_era(self._epoch_start(change.at), change.num_rows)

    def go(self, mark: int, following: int) -> None:
        """Go from a mark to the following one."""
        if not self.is_changed:
            return
        if self.weights is None:
            self._go_naturally(mark, following)
        else:
            self._go_by_weights(mark, following, self.weights)

    def _go_naturally(self, mark: int, following: int) -> None:
        """Give every row of every source once in an epoch. Sources that join or grow wait for the next epoch."""
        boundary = mark
        if self.legs:
            leg = self.legs[-1]
            assert isinstance(leg.mix, Natural)
            boundary = leg.start + -(-(mark - leg.start) // leg.mix.num_rows) * leg.mix.num_rows
            if boundary >= following:
                return  # still to be done, at the next mark
        before = self._admit_at(boundary)
        mix = Natural(tuple(sizes[-1].num_rows for sizes in self.sizes))
        self.legs.append(MixLeg.begin(boundary, before, mix, None))
        self.eras.append((boundary, mix.num_rows))
        self.is_changed = False

    def _go_by_weights(self, mark: int, following: int, weights: Mapping[str, float]) -> None:
        """Add legs from cap to cap."""
        before = self._admit_at(mark)
        if not self.eras:
            self.eras.append((0, self.num_rows))
        elif self.legs[-1].weights is None:
            self._begin_era(self._epoch_start(mark), self.num_rows)
        self.is_changed = False
        check_weights(weights, self.names)
        asked = [weights.get(name, 0.0) for name in self.names]
        integer_shares(asked, self.names)  # refuses impossible weights, also of a source that has left
        position = mark
        while position < following:
            position = self._go_to_a_cap(position, before, asked, following)
            if position < following:
                before = self.legs[-1].counts(position)

    def _go_to_a_cap(self, position: int, before: list[int], asked: list[float], following: int) -> int:
        """Add a leg of the sources that may still give rows. Return the next leg's position; NEVER if there is none.

        Only needed slots of its pattern are drawn. The leg ends at the next mark, or when the first source has given
        its last row, at the latest when that row is due.
        """
        ends = [self._rows_allowed(source) for source in range(len(self.names))]
        active = tuple(weight * (given < end) for weight, given, end in zip(asked, before, ends, strict=True))
        self._bind(position, [source for source, weight in enumerate(asked) if weight and not active[source]])
        if not any(active) or (self.exhausted == "stop" and active != tuple(asked)):
            self.limit = position
            return NEVER
        counts = tuple(integer_shares(active, self.names)[1])
        self._refuse_empty(counts)
        capped = {source: end for source, end in enumerate(ends) if end < NEVER and active[source]}
        longest = following - position
        for source, end in capped.items():
            longest = min(longest, (end - before[source] + 1) * sum(counts) // counts[source] + 1)
        phase = position % _PHASES
        mix = build_pattern(counts, min(phase + longest, sum(counts)))
        leg = MixLeg.begin(position, before, mix, active, phase)
        self.legs.append(leg)
        return min((leg.after_row(source, end - 1) for source, end in capped.items()), default=NEVER)

    def _bind(self, position: int, sources: list[int]) -> None:
        """Record the sources that have reached their caps."""
        known = {binding.source for binding in self.bindings}
        for name in (self.names[source] for source in sources):
            if name not in known:
                self.bindings.append(Binding(position, name, self.caps.get(name, 1)))

    def _rows_allowed(self, source: int) -> int:
        """Rows that a source may give in all, counted through its epochs; NEVER if it repeats for ever."""
        usual = _MOST_EPOCHS + 1
        if self.exhausted != "repeat":
            usual = 1
        epochs = self.caps.get(self.names[source], usual)
        if epochs > _MOST_EPOCHS:
            return NEVER
        size = next(s for s in reversed(self.sizes[source]) if s.first_epoch < epochs or s.first_epoch == 0)
        return size.first_row + (epochs - size.first_epoch) * size.num_rows

    def _admit_at(self, position: int) -> list[int]:
        """Admit new sources, and the new rows of sources that grew, after their current epochs.

        Return the rows that each source has given by then.
        """
        given = [0] * len(self.names)
        if self.legs:
            given = next(leg for leg in reversed(self.legs) if leg.start <= position).counts(position)
            given += [0] * (len(self.names) - len(given))
        for name, num_rows in self.joining.items():
            if name not in self.names:
                self.names.append(name)
                self.sizes.append([Size(0, 0, num_rows)])
                continue
            source = self.names.index(name)
            last = self.sizes[source][-1]
            if num_rows != last.num_rows:
                epochs = -(-max(given[source] - last.first_row, 0) // last.num_rows)
                if not epochs:
                    self.sizes[source].pop()
                self.sizes[source].append(
                    Size(last.first_row + epochs * last.num_rows, last.first_epoch + epochs, num_rows)
                )
        self.joining = {}
        return given + [0] * (len(self.names) - len(given))

    def _refuse_empty(self, counts: tuple[int, ...]) -> None:
        for name, sizes, count in zip(self.names, self.sizes, counts, strict=True):
            if count and not sizes[-1].num_rows:
                raise SpecError(
                    f"source {name!r} has a weight but no rows",
                    parameter="weights",
                    source=name,
                    remedy=f"weights without {name!r}",
                )

    def _epoch_start(self, position: int) -> int:
        """The first row of the epoch of the last row before a position."""
        start, rows = next(era for era in reversed(self.eras) if era[0] < position or era[0] == 0)
        if rows is None or position <= start:
            return start
        return start + (position - start - 1) // rows * rows

    def _begin_era(self, start: int, end: int | None) -> None:
        rows = None
        if end is not None:
            rows = end - start
        self.eras = [*(era for era in self.eras if era[0] < start), (start, rows)]

    def finish(self) -> None:
        self.legs = [leg.among(len(self.names)) for leg in self.legs]
        if self.limit is not None:  # the last era ends with the stream
            start, rows = self.eras[-1]
            if rows is None or self.limit < start + rows or (self.limit - start) % rows:
                self._begin_era(self._epoch_start(self.limit), self.limit)


def check_weights(weights: Mapping[str, float], names: Sequence[str]) -> None:
    for name in weights:
        if name not in names:
            raise SpecError(
                f"weights= names a source {name!r} that is not there",
                parameter="weights",
                source=name,
                sources=", ".join(names),
                remedy=f"{suggest(name, names) or names[0]!r}",
            )
