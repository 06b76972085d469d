"""The interfaces of this folder: a loader, the stream of rows that it reads, and the batches of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import EndOfRun, PlanError, SpecError
from batchwright.batches.types import TrainingBatch
from batchwright.order.plan import Plan, State

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from batchwright.batches.settings import Asked
    from batchwright.loaders.loader import Loader
    from batchwright.loaders.run import Run
    from batchwright.loaders.steps import Budget

    B = TypeVar("B", default=TrainingBatch)
    B_co = TypeVar("B_co", covariant=True, default=TrainingBatch)
else:  # type checkers need the default
    from typing import TypeVar

    B = TypeVar("B")
    B_co = TypeVar("B_co", covariant=True)

__all__ = ["Made"]

Record = list[list[int]]
"""The record of a run's steps: [[from_step, from_position, rows_per_step], ...]."""
Made = Generator[tuple[B, int], None, None]
"""(batch, position after it), and so on."""


def state_at(position: int, plan: str, record: Record) -> State:
    """The core of every state: `state_dict()` and the "state" in a batch's metadata. `plan` is a fingerprint."""
    return {"position": position, "plan": plan, "steps": [list(entry) for entry in record]}


class DataLoader(ABC, Generic[B_co]):
    """The interface of every loader. Your own class becomes a loader with these four methods.

    >>> class Twice(DataLoader):
    ...     def __init__(self, rows): self.rows, self.at = rows, 0
    ...     def get_batch(self, batch_size=None):
    ...         self.at += batch_size or 1
    ...         return self.rows[self.at - (batch_size or 1) : self.at]
    ...     def get_iterator(self): return (self.get_batch() for _ in range(self.get_num_batches()))
    ...     def get_num_batches(self, batch_size=None): return len(self.rows) // (batch_size or 1)
    ...     def reset(self, epoch=0): self.at = 0
    >>> [batch for batch in Twice(["a", "b"])]
    [['a'], ['b']]
    """

    @abstractmethod
    def get_batch(self, batch_size: int | None = None) -> B_co:
        """The next batch, of `batch_size` rows over all ranks together."""

    @abstractmethod
    def get_iterator(self) -> Iterator[B_co]:
        """Batches from here to the end of the epoch."""

    @abstractmethod
    def get_num_batches(self, batch_size: int | None = None) -> int:
        """The number of batches of `batch_size` rows in an epoch, the same on every rank."""

    @abstractmethod
    def reset(self, epoch: int = 0) -> None:
        """Go back to the first row of an `epoch`."""

    def __iter__(self) -> Iterator[B_co]:
        return self.get_iterator()


@dataclass(frozen=True, slots=True)
class Making:
    """The settings for making batches. They do not change the contents of batches."""

    framework: str
    prefetch: int = 0
    workers: int = 0


class Batches(Protocol[B_co]):
    """One rank's batches of a run with fixed batch settings, as a function of their first position."""

    record: Record
    """The record of the run's steps, these batches included."""

    def batches(self, position: int, skipped: int = 0, every: int = 1, stop: int | None = None) -> Made[B_co]:
        """(batch, position after it): batches number skipped, skipped + every, ... from a position to the end of the
        run, or up to position `stop`."""
        ...


class Stream(ABC, Generic[B]):
    """Rows of a store, raw files, a buffer or a rollout log, in an order that a plan fixes.

    A run cuts them into batches, and a loader has the cursor. The rows at a position never change. A stream may cache,
    and over raw files or a log it learns facts while it is read. `copy.copy(stream)` has its own memory.
    """

    plan: Plan
    prefetch: int = 0
    """Batches that are made ahead, by default."""
    sequences: int = 1
    """Rows of a batch that one row of the order is: two for preference pairs."""
    budget: Budget | None = None
    """A token budget that the stream applies itself, because its rows are not known beforehand."""
    of_another_plan: str = "open the loader with the settings of that run, or with plan= (its fingerprint or file)"
    """The remedy for a state of another plan."""

    @abstractmethod
    def open(self, run: Run, rows: int, record: Record, making: Making) -> Batches[B]:
        """Batches of `rows` rows over all ranks together, in a run with the steps of `record`."""

    def check_workers(self, run: Run) -> None:
        """Refuse to be read by worker processes that take turns, if the stream cannot."""

    # Lengths of rows. A stream that has them can be cut by tokens, and balanced

    has_lengths: bool = False
    pad_to: Any = None
    """The rule from lengths to widths, as JSON. A state loads only if the rule is the same."""

    def lengths_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of the rows at some positions."""
        raise self.without_lengths()

    def widths_of(self, longest: NDArray[np.int64]) -> NDArray[np.int64]:
        """The width of a batch, from the length of its longest row. It is at least this length, and monotonic."""
        raise self.without_lengths()

    def longest_row(self) -> tuple[int, dict[str, Any]] | None:
        """(tokens of the longest row, its place for an error), if that is known without a scan."""
        return None

    def without_lengths(self) -> SpecError:
        what = "these rows have no lengths of their own: their batches are cut by count, and not balanced"
        remedy = "batch_size=8; tokens= and balance= are for packed text, conversations, rollouts and their mixtures"
        return SpecError(what, parameter="batch_tokens", remedy=remedy)

    # States

    def extra_state(self, position: int) -> dict[str, Any]:
        """The entries of a state besides position, plan and steps."""
        return {}

    def for_state(self, state: Mapping[str, Any]) -> Self:
        """The stream in its saved state. Raises if the state belongs to another stream.

        Position, plan and steps of the state are already checked.
        """
        return self

    def known_plan(self, fingerprint: str) -> Plan | None:
        """A kept plan, by its fingerprint."""
        return None

    # Facts learned by reading

    def why_uncounted(self) -> SpecError | None:
        """The error that says why the number of batches is not known yet."""
        return None

    def with_facts_learned(self) -> Self:
        """The stream with the facts learned by reading."""
        return self

    def note_batch(self, batch: Any) -> int | None:
        """Note a batch that another process made. Returns the position after it, if only the batch holds it."""
        return None

    def end_of_run(self, position: int) -> EndOfRun | None:
        """The reason for the end of the run, if it is not the end of the plan."""
        return None

    # Records and reports

    def start_background_work(self, loader: Loader[B], asked: Asked) -> None:
        """Start background work for a loader over the stream."""

    def keep(self, plan: Plan) -> Self:
        """Store the plan, with the loader's steps, beside the data. Return the stream of the stored plan."""
        return self

    def amended(self, cursor: int, epochs: int | None, **asked: Any) -> Self:
        """The stream with an amended plan."""
        raise SpecError("this loader does not read stores, so it has no plan to amend", remedy="bake its data")

    def stats(self, position: int) -> dict[str, Any]:
        return {}

    def settings_to_compare(self) -> dict[str, Any]:
        """Further settings that must be equal on all ranks, by name."""
        return {}

    def part_to_compare(self, batch: B) -> Any:
        """The part of a batch that `check_sync` compares."""
        return batch

    @property
    def row_in_words(self) -> str:
        return "rows"

    def in_words(self, plan: Plan) -> str:
        """The lines of a loader's repr about its data. `plan` has the record of its steps."""
        return repr(plan)


class UnkeptStream(Stream[B]):
    """A stream whose plan is not stored. States hold the settings of their plan themselves, under `mark`."""

    mark: str
    of_another_plan = "open the loader with the settings of that run"

    def settings(self) -> dict[str, Any]:
        """The settings that a state belongs to. "content" (or "log") names the rows."""
        plan = self.plan
        content = plan.sources[0].fingerprint
        return {"content": content, "seed": plan.seed, "shuffle": plan.shuffle, "epoch_end": plan.epoch_end}

    @abstractmethod
    def of_other_content(self, theirs: Mapping[str, Any]) -> PlanError:
        """The error for a state of other rows."""

    def extra_state(self, position: int) -> dict[str, Any]:
        return {self.mark: self.settings()}

    def for_state(self, state: Mapping[str, Any]) -> Self:
        theirs = state.get(self.mark)
        if state["plan"] == self.plan.fingerprint or not isinstance(theirs, Mapping):
            return self
        for name, mine in self.settings().items():
            if name == "version" or mine == theirs.get(name):
                continue
            if name in ("content", "log"):
                raise self.of_other_content(theirs)
            what = f"this state belongs to a loader with {name}={theirs.get(name)!r}, and this one has {mine!r}"
            raise PlanError(what, parameter=name, remedy=self.of_another_plan)
        return self

    @property
    def order_in_words(self) -> str:
        if self.plan.shuffle == "global":
            return f"shuffled by seed {self.plan.seed}"
        return "in order"
