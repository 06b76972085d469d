"""Cut the stream of rows into steps, and a step into ranks: arithmetic on positions, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import PlanError, SpecError
from penstock.spec import at_least, one_of

__all__ = ["Cut", "Steps", "position_of_step", "share", "step_of_position"]

Steps = Sequence[Sequence[int]]
"""[[from_step, from_position, rows_per_step], ...]: how a run cut batches."""


def share(n: int, *, rank: int, world: int) -> range:
    """Rows of a batch of `n` that rank `rank` of `world` gets: disjoint, complete, within one of each other in number.

    >>> share(10, rank=0, world=3), share(10, rank=2, world=3)
    (range(0, 3), range(6, 10))
    """
    return range(n * rank // world, n * (rank + 1) // world)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How steps of `rows_per_step` rows follow each other through epochs of `epoch_rows` positions.

    >>> drop = Cut(rows_per_step=4, epoch_rows=10, epoch_end="drop")
    >>> [drop.after(0, steps) for steps in range(4)]   # rows 8 and 9 of each epoch are dropped
    [0, 4, 10, 14]
    """

    rows_per_step: int
    epoch_rows: int | None
    """None: the stream has no epochs."""
    epoch_end: str = "drop"
    """`drop` leaves out an epoch's last, partial batch; `pad` fills it up; `wrap` lets it cross into the next epoch."""

    def __post_init__(self) -> None:
        at_least(1, batch_size=self.rows_per_step)
        one_of(("drop", "pad", "wrap"), epoch_end=self.epoch_end)
        if self.epoch_end == "drop" and self.epoch_rows is not None and self.epoch_rows < self.rows_per_step:
            raise SpecError(
                f"batch_size={self.rows_per_step} is more than an epoch, which has {self.epoch_rows} rows",
                parameter="batch_size",
                remedy=f"batch_size={self.epoch_rows} or less, or epoch_end='pad' or 'wrap'",
            )

    @property
    def is_linear(self) -> bool:
        return self.epoch_rows is None or self.epoch_end == "wrap"

    @property
    def steps_per_epoch(self) -> int:
        assert self.epoch_rows is not None
        return self._steps_in(self.epoch_rows)

    def _steps_in(self, rows: int) -> int:
        return rows // self.rows_per_step if self.epoch_end != "pad" else -(-rows // self.rows_per_step)

    def settle(self, position: int) -> int:
        """The position at which the next batch really starts: a tail too short for a batch is passed over."""
        if self.epoch_rows is None or self.epoch_end != "drop":
            return position
        left = self.epoch_rows - position % self.epoch_rows
        return position + left if left < self.rows_per_step else position

    def real_rows(self, position: int) -> int:
        """How many rows of the batch at a (settled) position are data; fewer than rows_per_step only with `pad`."""
        if self.is_linear:
            return self.rows_per_step
        assert self.epoch_rows is not None
        return min(self.rows_per_step, self.epoch_rows - position % self.epoch_rows)

    def after(self, position: int, num_steps: int) -> int:
        """The position after `num_steps` more steps."""
        if self.is_linear:
            return position + num_steps * self.rows_per_step
        assert self.epoch_rows is not None
        position = self.settle(position)
        epoch, within = divmod(position, self.epoch_rows)
        here = self._steps_in(self.epoch_rows - within)
        if num_steps < here:
            return position + num_steps * self.rows_per_step
        more, rest = divmod(num_steps - here, self.steps_per_epoch)
        return (epoch + 1 + more) * self.epoch_rows + rest * self.rows_per_step

    def is_over(self, position: int, end: int | None) -> bool:
        """Whether a run of `end` positions (None: without an end) has no batch left at a (settled) position."""
        return end is not None and (position >= end or (self.is_linear and position + self.rows_per_step > end))

    def last_simple(self, position: int) -> float:
        """The last position of this epoch from which the next step simply begins rows_per_step further on."""
        if self.is_linear:
            return float("inf")
        assert self.epoch_rows is not None
        return (position // self.epoch_rows + 1) * self.epoch_rows - 2 * self.rows_per_step

    def steps_until(self, position: int, later: int) -> int:
        """How many whole steps lead from one position to a later one."""
        if self.is_linear:
            return (later - position) // self.rows_per_step
        assert self.epoch_rows is not None
        position = self.settle(position)
        if later < position:
            return 0
        epoch, within = divmod(position, self.epoch_rows)
        later_epoch, later_within = divmod(later, self.epoch_rows)
        if later_epoch == epoch:
            return (later - position) // self.rows_per_step
        here = self._steps_in(self.epoch_rows - within)
        steps_there = min(later_within // self.rows_per_step, self.steps_per_epoch)
        return here + (later_epoch - epoch - 1) * self.steps_per_epoch + steps_there


def position_of_step(steps: Steps, step: int, *, epoch_rows: int | None, epoch_end: str) -> tuple[int, int]:
    """(position, rows_per_step) of a step, looked up in how the run cut batches.

    >>> position_of_step([[0, 0, 8], [100, 800, 16]], 102, epoch_rows=None, epoch_end="drop")
    (832, 16)
    """
    if step < 0:
        raise PlanError(f"step {step} does not exist", remedy="a step of 0 or more")
    from_step, from_position, rows = max((triple for triple in steps if triple[0] <= step), key=lambda t: t[0])
    cut = Cut(rows_per_step=rows, epoch_rows=epoch_rows, epoch_end=epoch_end)
    return cut.after(from_position, step - from_step), rows


def step_of_position(steps: Steps, position: int, *, epoch_rows: int | None, epoch_end: str) -> int:
    """The step that uses (or would use next) a position."""
    from_step, from_position, rows = max(
        (triple for triple in steps if triple[1] <= position), key=lambda t: (t[0], t[1])
    )
    cut = Cut(rows_per_step=rows, epoch_rows=epoch_rows, epoch_end=epoch_end)
    return from_step + cut.steps_until(from_position, position)
