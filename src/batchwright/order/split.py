"""Steps of a stream of rows, and ranks of a step: arithmetic on positions, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least, one_of
from batchwright.base.errors import PlanError, SpecError
from batchwright.order.epochs import NEVER, Epochs

__all__ = ["EPOCH_ENDS", "Cut", "position_of_step", "share", "step_of_position"]

EPOCH_ENDS = ("drop", "short", "pad", "wrap")
"""Ways to treat an epoch's last, partial batch: see `Cut.epoch_end`."""

Steps = Sequence[Sequence[int]]
"""[[from_step, from_position, rows_per_step], ...]: how a run cut batches."""


def share(n: int, *, rank: int, world: int) -> range:
    """Rows of a batch of `n` that rank `rank` of `world` gets.

    Shares are disjoint and complete, and their sizes differ by at most one.

    >>> share(10, rank=0, world=3), share(10, rank=2, world=3)
    (range(0, 3), range(6, 10))
    """
    return range(n * rank // world, n * (rank + 1) // world)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Steps of `rows_per_step` rows through the epochs of a stream. Arguments and results are positions.

    >>> drop = Cut(rows_per_step=4, epochs=Epochs.of(10), epoch_end="drop")
    >>> [drop.after(0, steps) for steps in range(4)]   # rows 8 and 9 of each epoch are dropped
    [0, 4, 10, 14]
    """

    rows_per_step: int
    epochs: Epochs
    epoch_end: str = "drop"
    """`drop` leaves out an epoch's last, partial batch; `short` has it with the rows that are left; `pad` fills it up
    with rows of weight 0; `wrap` lets it cross into the next epoch."""

    def __post_init__(self) -> None:
        at_least(1, batch_size=self.rows_per_step)
        one_of(EPOCH_ENDS, epoch_end=self.epoch_end)
        rows = self.epochs.most_rows
        if self.epoch_end == "drop" and rows is not None and rows < self.rows_per_step:
            raise SpecError(
                f"batch_size={self.rows_per_step} is more than an epoch, which has {rows} rows",
                parameter="batch_size",
                remedy=f"batch_size={rows} or less, or epoch_end='short', 'pad' or 'wrap'",
            )

    @property
    def is_linear(self) -> bool:
        return self.epoch_end == "wrap" or all(rows is None for _, rows in self.epochs.eras)

    def steps_of_epoch(self, live: int) -> int:
        """Steps of the epoch of a live row, from its beginning."""
        _, start, stop = self.epochs.span(live)
        assert stop is not None
        return self._steps_in(stop - start)

    def most_steps_of_epoch(self, position: int) -> int:
        """The largest number of steps that may begin in an epoch: one more if steps cross the ends of epochs."""
        _, start, stop = self.epochs.span(self.epochs.skips.live(position))
        assert stop is not None
        if self.is_linear:
            return -(-(stop - start) // self.rows_per_step)
        return self._steps_in(stop - start)

    def _steps_in(self, rows: int) -> int:
        if self.epoch_end in ("short", "pad"):
            return -(-rows // self.rows_per_step)
        return rows // self.rows_per_step

    def settle(self, position: int) -> int:
        """The position at which the next batch really starts, after skipped rows and a tail too short for a batch.

        The end of the stream is returned unchanged.
        """
        return self.epochs.skips.position(self._settle(self.epochs.skips.live(position)))

    def _settle(self, live: int) -> int:
        if self.is_linear or self.epoch_end != "drop":
            return live
        while True:
            stop = self.epochs.span(live)[2] or NEVER
            if stop - live >= self.rows_per_step or self._is_too_small_for_ever(live):
                return live
            live = stop

    def _is_too_small_for_ever(self, live: int) -> bool:
        """Whether no epoch from here on holds a batch, and incomplete batches are dropped."""
        _, rows, following = self.epochs.era(live)
        return self.epoch_end == "drop" and following is None and rows is not None and rows < self.rows_per_step

    def real_rows(self, position: int) -> int:
        """Data rows of the batch at a (settled) position. `short` and `pad` can have fewer than rows_per_step."""
        live = self.epochs.skips.live(position)
        return min(self.rows_per_step, self._border(live) - live)

    def shared_rows(self, position: int) -> int:
        """Rows of the batch at a (settled) position that ranks share, with the rows that fill it up."""
        if self.epoch_end == "short":
            return self.real_rows(position)
        return self.rows_per_step

    def whole_steps_left(self, position: int) -> int | None:
        """Whole steps from a (settled) position to the end of its epoch; None if it has no end."""
        live = self.epochs.skips.live(position)
        border = self._border(live)
        if border == NEVER:
            return None
        return (border - live) // self.rows_per_step

    def _border(self, live: int) -> int:
        """The border that a step from this row does not cross; NEVER if there is none."""
        if self.is_linear:
            return NEVER
        return self.epochs.span(live)[2] or NEVER

    def positions(self, position: int, num_rows: int) -> NDArray[np.int64]:
        """The positions of `num_rows` rows from a position on."""
        live = self.epochs.skips.live(position)
        return self.epochs.skips.positions(np.arange(live, live + num_rows))

    def after(self, position: int, num_steps: int) -> int:
        """The position after `num_steps` more steps."""
        return self.epochs.skips.position(self._after(self.epochs.skips.live(position), num_steps))

    def _after(self, live: int, num_steps: int) -> int:
        if self.is_linear:
            return live + num_steps * self.rows_per_step
        live = self._settle(live)
        while True:
            stop = self.epochs.span(live)[2] or NEVER
            here = self._steps_in(stop - live)
            if num_steps < here or (not here and self._is_too_small_for_ever(live)):
                return live + num_steps * self.rows_per_step
            live, num_steps = stop, num_steps - here
            live, steps = self._whole_epochs(live, NEVER, num_steps)  # many epochs at once
            num_steps -= steps
            if not num_steps:
                return live
            live = self._settle(live)

    def _whole_epochs(self, live: int, until: int, most_steps: int) -> tuple[int, int]:
        """(row, steps) after whole epochs of one era, from the beginning of an epoch, within these bounds."""
        start, rows, following = self.epochs.era(live)
        if not rows or (live - start) % rows or self._is_too_small_for_ever(live):
            return live, 0
        per_epoch = self._steps_in(rows)
        epochs = max(min(until, following or NEVER) - live, 0) // rows
        if per_epoch:
            epochs = min(epochs, most_steps // per_epoch)
        return live + epochs * rows, epochs * per_epoch

    def is_over(self, position: int, end: int | None) -> bool:
        """Whether a run that ends at a position (None: never) has no batch left at a (settled) position."""
        live, end_live = self.epochs.skips.live(position), NEVER
        if end is not None:
            end_live = self.epochs.skips.live(end)
        if self.is_linear:
            return live >= end_live or live + self.rows_per_step > end_live
        never_fits = self._is_too_small_for_ever(live) and self._border(live) - live < self.rows_per_step
        return live >= end_live or never_fits

    def steps_until(self, position: int, later: int) -> int:
        """The number of whole steps from one position to a later one."""
        live, goal = self.epochs.skips.live(position), self.epochs.skips.live(later)
        if self.is_linear:
            return (goal - live) // self.rows_per_step
        live, steps = self._settle(live), 0
        while live <= goal:
            stop = self.epochs.span(live)[2] or NEVER
            if goal < stop:
                return steps + min((goal - live) // self.rows_per_step, self._steps_in(stop - live))
            steps, live = steps + self._steps_in(stop - live), stop
            live, more = self._whole_epochs(live, goal, NEVER)
            steps += more
        return steps


def position_of_step(steps: Steps, step: int, *, epochs: Epochs, epoch_end: str) -> tuple[int, int]:
    """(position, rows_per_step) of a step, from the record of the run's steps.

    >>> position_of_step([[0, 0, 8], [100, 800, 16]], 102, epochs=Epochs.of(None), epoch_end="drop")
    (832, 16)
    """
    if step < 0:
        raise PlanError(f"step {step} does not exist", step=step, remedy="a step of 0 or more")
    from_step, from_position, rows = max((triple for triple in steps if triple[0] <= step), key=lambda t: t[0])
    cut = Cut(rows_per_step=rows, epochs=epochs, epoch_end=epoch_end)
    return cut.after(from_position, step - from_step), rows


def step_of_position(steps: Steps, position: int, *, epochs: Epochs, epoch_end: str) -> int:
    """The step that uses (or would use next) a position."""
    from_step, from_position, rows = max(
        (triple for triple in steps if triple[1] <= position), key=lambda t: (t[0], t[1])
    )
    cut = Cut(rows_per_step=rows, epochs=epochs, epoch_end=epoch_end)
    return from_step + cut.steps_until(from_position, position)
