"""Prove on your own plan that nothing is lost, doubled or changed, with real processes, killed with SIGKILL.

First one process reads the steps without a break. Then the same steps are read again in legs. Each leg starts its ranks
as separate processes, from the last checkpoint, with other numbers of ranks and workers than the leg before. At a
random step all ranks are killed with signal 9, in the middle of their work, and the next leg begins. Every row that any
rank of any leg was handed (tokens, targets, masks, position, weight; for whole documents also their first tokens) and
every state are compared with the uninterrupted run.

Ranks run in lockstep, as in a training job with gradient exchange. A step is over when every rank has it, and a
checkpoint is the state after a step, as JSON. Steps after the last checkpoint are read twice, as in a real job, and
must be the same twice.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.audit.digesting import check_steps, combine, row_hashes, sample_hashes
from batchwright.base.checks import at_least
from batchwright.base.errors import BatchwrightError, WorkerError
from batchwright.base.processes import Worker
from batchwright.base.words import counted, error_in_words, first_line
from batchwright.batches.batch import Padding
from batchwright.batches.settings import Asked, Batching, Delivery, Fields
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.loader import Loader
from batchwright.loaders.stored import StoreStream, open_flow
from batchwright.order.plan import Plan, State
from batchwright.order.split import share
from batchwright.store.plans import find_plan, streams_for_plan
from batchwright.store.reader import Store
from batchwright.typing import PlanLike, StoreLike

__all__ = ["Difference", "DrillReport", "Leg", "LegResult", "OpenRank", "drill", "legs_over", "open_rank"]

_COMPARED = ("targets", "loss_mask", "input_ids", "attention_mask", "position_ids", "segment_ids")
"""With padding, which the hashes of samples leave out."""
_MOST_WAIT_SECONDS = 0.003
"""A kill comes at most this long after the ranks were told to go on, so that it finds them at work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """The ranks, workers and prefetching for a part of the drilled run."""

    ranks: int
    workers: int = 0
    """Worker processes of each rank."""
    prefetch: int = 0

    def __str__(self) -> str:
        text = f"{counted(self.ranks, 'rank')}, {counted(self.workers, 'worker')}"
        if self.prefetch:
            text += f", prefetch {self.prefetch}"
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A place where a leg differs from the uninterrupted run."""

    step: int
    leg: int
    rank: int
    what: str

    def __str__(self) -> str:
        return f"step {self.step:,} differs: {self.what} (leg {self.leg}, rank {self.rank})"


@dataclass(frozen=True, kw_only=True, slots=True)
class LegResult:
    number: int
    leg: Leg
    first_step: int
    num_steps: int
    """Steps that all ranks finished."""
    killed_in_step: int | None
    """None: the leg reached the end of the drill, or stopped at an error."""
    repeated_steps: int
    """Steps that an earlier leg had finished, after its last checkpoint."""
    differences: tuple[Difference, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillReport:
    plan: str
    batch_size: int
    row_tokens: int
    first_step: int
    num_steps: int
    kill_seed: int
    """The same seed kills in the same steps."""
    digest: str
    """The digest of the uninterrupted run, as `batchwright digest` prints it for these steps."""
    legs: tuple[LegResult, ...]

    @property
    def first_difference(self) -> Difference | None:
        found = (difference for leg in self.legs for difference in leg.differences)
        return min(found, key=lambda difference: (difference.step, difference.leg, difference.rank), default=None)

    @property
    def ok(self) -> bool:
        return self.first_difference is None


@dataclass(frozen=True, slots=True)
class Opening:
    """The arguments of a rank's loader. They travel to its process by value."""

    stores: tuple[tuple[str, str], ...]
    """(path, version) of the stores that have the plan's sources."""
    plan: Plan
    batch_size: int
    leg: Leg
    rank: int


OpenRank = Callable[[Opening], Loader[TrainingBatch]]


class _DrilledStream(StoreStream):
    """A stream that stores no plan, because a drill is not a run."""

    def keep(self, plan: Plan) -> Self:
        return self


class _DrilledLoader(Loader[TrainingBatch]):
    def _warn_of_dropped_rows(self) -> None:
        """Log nothing, because a drill does not train."""


def open_rank(opening: Opening) -> Loader[TrainingBatch]:
    """The loader of one rank."""
    leg = opening.leg
    stores = [Store(path, version=version) for path, version in opening.stores]
    fields = padding = None
    if _has_samples(opening.plan):
        # As wide as the longest row, so that a rank that looks at its own rows alone is detected.
        fields, padding = Fields(position_ids=True, segment_ids=True).with_defaults(False), Padding("longest")
    flow = open_flow(streams_for_plan(stores, opening.plan), opening.plan, fields, padding)
    return _DrilledLoader(
        _DrilledStream(opening.plan, flow),
        Asked(
            batch_size=Batching(opening.batch_size, uneven=True),
            delivery=Delivery(workers=leg.workers, prefetch=leg.prefetch, read_ahead=False),
        ),
        rank=opening.rank,
        world_size=leg.ranks,
        epochs=None,
        framework="numpy",
    )


def legs_over(ranks: Sequence[int] = (1, 3, 8), workers: Sequence[int] = (0, 2)) -> list[Leg]:
    """Every number of ranks with every number of workers; without workers, every other leg prefetches.

    >>> [str(leg) for leg in legs_over((1, 3), (0, 2))]
    ['1 rank, 0 workers', '3 ranks, 0 workers, prefetch 2', '1 rank, 2 workers', '3 ranks, 2 workers']
    """
    legs = []
    for number_of_workers in workers:
        for number, number_of_ranks in enumerate(ranks):
            leg = Leg(ranks=at_least(1, ranks=number_of_ranks), workers=at_least(0, workers=number_of_workers))
            if not leg.workers and number % 2:
                leg = replace(leg, prefetch=2)
            legs.append(leg)
    return legs


def drill(
    store: StoreLike,
    plan: PlanLike,
    *,
    steps: int = 200,
    first_step: int = 0,
    batch_size: int | None = None,
    legs: Sequence[Leg] | None = None,
    checkpoint_every: int = 10,
    kill_seed: int | None = None,
    timeout_seconds: float = 120.0,
    on_leg: Callable[[LegResult], None] | None = None,
    open_loader: OpenRank = open_rank,
) -> DrillReport:
    """Read `steps` steps of a plan without a break, then in legs that are killed, and compare.

    `store` is any store that the plan reads. `plan` is a plan, its fingerprint or file, a state, or a loader;
    `batch_size` is needed if it has none. The steps begin at `first_step`. `legs` are by default those of
    `legs_over()`. A checkpoint comes every `checkpoint_every` steps, and `kill_seed` selects the steps in which ranks
    are killed. A leg never has more ranks than a batch has rows. `timeout_seconds` is the time limit for opening a rank
    and for a step. `on_leg` is called with each finished leg. `open_loader` runs in the rank's process; pass your own
    to drill a wrapped loader.
    """
    found = find_plan(store, plan, batch_size=batch_size)
    rows = batch_size or found.steps[-1][2]
    legs = [replace(leg, ranks=min(leg.ranks, rows)) for leg in legs or legs_over()]
    stop = at_least(0, first_step=first_step) + at_least(len(legs), steps=steps)
    at_least(1, checkpoint_every=checkpoint_every)
    check_steps(found.cut_as([[0, 0, rows]]), first_step, stop - 1)
    if kill_seed is None:
        kill_seed = random.SystemRandom().randrange(10**6)
    chance = random.Random(kill_seed)
    kills = sorted(chance.sample(range(first_step + 1, stop), len(legs) - 1))
    stores = {stream.store for stream in streams_for_plan(store, found).values()}
    versions = tuple(sorted((str(store.path.absolute()), store.version) for store in stores))
    opening = Opening(versions, found, rows, Leg(ranks=1), rank=0)
    run = _DrilledRun(opening, open_loader, timeout_seconds, checkpoint_every, first_step, first_step)
    run.read_without_break(stop)
    results: list[LegResult] = []
    for number, (leg, until) in enumerate(zip(legs, [*kills, stop], strict=True), 1):
        result = run.go(number, leg, until, is_killed=until < stop, chance=chance.random())
        results.append(result)
        if on_leg is not None:
            on_leg(result)
        if result.first_step + result.num_steps < until:
            break  # a rank failed
    return DrillReport(
        plan=found.fingerprint,
        batch_size=rows,
        row_tokens=found.row_tokens,
        first_step=first_step,
        num_steps=steps,
        kill_seed=kill_seed,
        digest=combine(record.tokens[record.is_real] for record in run.truth.values()),
        legs=tuple(results),
    )


@dataclass(frozen=True, slots=True)
class _Record:
    """The batch of one rank in one step, and the states after it."""

    tokens: NDArray[np.uint64]
    """Hash of each row, as in `batchwright digest`."""
    rest: NDArray[np.uint64]
    """Hash of each row's other fields."""
    is_real: NDArray[np.bool_]
    sequences: int
    """Rows of the batch that one row of the order is: two for preference pairs."""
    state: State
    """The loader's, after the step."""
    batch_state: State
    """The one in the batch's metadata."""


@dataclass(slots=True)
class _DrilledRun:
    """A run that is read leg after leg, each from the last checkpoint."""

    opening: Opening
    """Of its first process: others differ in leg and rank."""
    open_loader: OpenRank
    timeout_seconds: float
    checkpoint_every: int
    checkpoint_step: int
    reached: int
    """The first step that no leg has finished."""
    checkpoint: State = field(default_factory=dict)
    truth: dict[int, _Record] = field(default_factory=dict)
    """The records of the uninterrupted run."""

    @contextlib.contextmanager
    def crew(self, leg: Leg) -> Iterator[_Crew]:
        """The processes of a leg."""
        with contextlib.ExitStack() as stack:
            ranks = [_Rank(replace(self.opening, leg=leg, rank=rank), self.open_loader) for rank in range(leg.ranks)]
            workers = [stack.enter_context(Worker(rank, doing="of the drill")) for rank in ranks]
            yield _Crew(workers, self.timeout_seconds)

    def read_without_break(self, stop: int) -> None:
        first_step = self.checkpoint_step
        with self.crew(self.opening.leg) as crew:
            try:
                (self.checkpoint,) = crew.ask("open", None, first_step)
                for step in range(first_step, stop):
                    (self.truth[step],) = crew.ask("step")
            except _RankError as error:
                where = f"at step {first_step + len(self.truth):,}"
                raise WorkerError(
                    f"the uninterrupted run stopped {where}: {error}", remedy="`batchwright verify STORE` finds damage"
                ) from None

    def go(self, number: int, leg: Leg, until: int, *, is_killed: bool, chance: float) -> LegResult:
        """Read up to a step in a leg, and kill its ranks there."""
        began = time.monotonic()
        step = first_step = self.checkpoint_step
        differences: list[Difference] = []
        killed_in_step = None
        with self.crew(leg) as crew:
            try:
                crew.ask("open", self.checkpoint, None)
                while step < until:
                    records = crew.ask("step")
                    found = _differences(self.truth[step], records, leg.ranks)
                    differences += [Difference(step=step, leg=number, rank=rank, what=what) for rank, what in found]
                    step += 1
                    if step % self.checkpoint_every == 0:
                        self.checkpoint_step = step
                        self.checkpoint = json.loads(json.dumps(records[0].state))  # as in a checkpoint file
                if is_killed:
                    killed_in_step = until
                    crew.kill_in_mid_step(chance * _MOST_WAIT_SECONDS)
            except _RankError as error:
                differences.append(Difference(step=step, leg=number, rank=error.rank, what=str(error)))
        repeated = min(self.reached, step) - first_step
        self.reached = max(self.reached, step)
        return LegResult(
            number=number,
            leg=leg,
            first_step=first_step,
            num_steps=step - first_step,
            killed_in_step=killed_in_step,
            repeated_steps=repeated,
            differences=tuple(differences),
            seconds=time.monotonic() - began,
        )


def _differences(true: _Record, records: list[_Record], ranks: int) -> Iterator[tuple[int, str]]:
    """(rank, the first difference of its batch in words)."""
    per = true.sequences
    for rank, record in enumerate(records):
        mine = share(len(true.tokens) // per, rank=rank, world=ranks)
        what = _what_differs(true, record, slice(mine.start * per, mine.stop * per))
        if what is not None:
            yield rank, what


def _what_differs(true: _Record, record: _Record, mine: slice) -> str | None:
    """The first difference in words; None if all is equal."""
    expected, rows = len(true.tokens[mine]), len(record.tokens)
    if not expected and not record.is_real.any():
        rows = 0  # a rank without a row has one of weight 0
    if rows != expected:
        return f"{counted(rows, 'row')} instead of {expected}"
    for name, one, two in (
        ("tokens", true.tokens, record.tokens),
        ("targets, masks or position", true.rest, record.rest),
    ):
        wrong = np.flatnonzero(one[mine] != two[:rows])
        if len(wrong):
            return f"{name} of row {int(wrong[0]) + mine.start} of the batch, and {len(wrong) - 1} more rows"
    for name, state in (("state", record.state), ("state in the batch", record.batch_state)):
        if state != true.state:
            return f"the {name} is {state}, and should be {true.state}"
    return None


class _RankError(Exception):
    """A rank raised, died or did not answer."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(what)
        self.rank = rank


class _Crew:
    """The processes of one leg."""

    def __init__(self, ranks: list[Worker], timeout_seconds: float) -> None:
        self.ranks, self.timeout_seconds = ranks, timeout_seconds

    def ask(self, *task: Any) -> list[Any]:
        """Give all ranks a task. Return their answers."""
        for rank in self.ranks:
            rank.send(*task)
        answers = []
        for number, rank in enumerate(self.ranks):
            if not rank.connection.poll(self.timeout_seconds):
                raise _RankError(number, f"no answer within {self.timeout_seconds:g} s")
            try:
                answers.append(rank.receive())
            except BatchwrightError as error:
                raise _RankError(number, first_line(error)) from error
            except OSError as error:
                raise _RankError(number, error_in_words(error)) from error
        return answers

    def kill_in_mid_step(self, wait_seconds: float) -> None:
        """Tell the ranks to continue, and kill all of them during the step."""
        for rank in self.ranks:
            rank.send("step")
        time.sleep(wait_seconds)
        for rank in self.ranks:
            os.kill(rank.process.pid, signal.SIGKILL)


class _Rank:
    """The function of a rank's process. It opens a loader, then reads one step at a time."""

    loader: Loader[TrainingBatch]
    batches: Iterator[TrainingBatch]

    def __init__(self, opening: Opening, open_loader: OpenRank) -> None:
        self.opening, self.open_loader = opening, open_loader

    def __call__(self, command: str, *of: Any) -> Any:
        if command == "open":
            return self._open(*of)
        return _record(next(self.batches), self.loader, self.opening.plan)

    def _open(self, state: State | None, step: int | None) -> State:
        self.loader = self.open_loader(self.opening)
        if state is not None:
            self.loader.load_state_dict(state)
        elif step:
            self.loader.seek(step=step)
        passes = iter(self.loader.get_iterator, None)
        self.batches = itertools.chain.from_iterable(passes)
        return self.loader.state_dict()


def _record(batch: TrainingBatch, loader: Loader[TrainingBatch], plan: Plan) -> _Record:
    facts, state = batch.metadata, batch.metadata["state"]
    tokens = row_hashes(batch.input_ids)
    if _has_samples(plan):
        tokens = sample_hashes(batch)
    fields = [value for name in _COMPARED if (value := getattr(batch, name)) is not None]
    rest = [
        xxhash.xxh3_64_intdigest(b"".join(np.ascontiguousarray(part).tobytes() for part in row))
        for row in zip(*fields, facts["position"], facts["weight"], strict=True)
    ]
    return _Record(
        tokens=tokens,
        rest=np.array(rest, np.uint64),
        is_real=np.asarray(facts["weight"]) > 0,
        sequences=1 + ("side" in facts),
        state=loader.state_dict(),
        batch_state=state | {"steps": [list(entry) for entry in state["steps"]]},
    )


def _has_samples(plan: Plan) -> bool:
    return any(source.rows for source in plan.all_sources)
