"""Prove on your own plan that nothing is lost, doubled or changed: real processes, killed with SIGKILL, restarted.

First one process reads the steps without a break. Then the same steps are read again in legs: each leg starts its ranks
as processes of their own, from the last checkpoint, with another number of ranks and workers than the leg before; at a
random step all ranks are killed with signal 9, in the middle of what they do, and the next leg begins. Every row that
any rank of any leg was handed (tokens, targets, masks, position, weight; of whole documents also where each begins) and
every state are compared with the uninterrupted run.

Ranks go in step with each other, as the gradient exchange of a training job makes them: a step is over when every rank
has it, and a checkpoint is the state after a step, as JSON. Steps after the last checkpoint are read twice, as they
would be in a real job, and must be the same twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.audit.digesting import check_steps, combine, row_hashes, sample_hashes
from batchwright.base.checks import at_least
from batchwright.base.errors import BatchwrightError, WorkerError
from batchwright.base.processes import Worker
from batchwright.base.words import counted
from batchwright.batches.batch import Padding
from batchwright.batches.settings import Asked, Batching, Delivery, Fields
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.loader import Loader
from batchwright.loaders.planning import open_flow
from batchwright.loaders.stored import StoreStream
from batchwright.order.plan import Plan, State
from batchwright.order.split import share
from batchwright.store.plans import find_plan, streams_for_plan
from batchwright.store.reader import Store
from batchwright.typing import PlanLike, StoreLike

__all__ = ["Difference", "DrillReport", "Leg", "LegResult", "OpenRank", "drill", "legs_over", "open_rank"]

_COMPARED = ("targets", "loss_mask")
_COMPARED_OF_SAMPLES = (*_COMPARED, "input_ids", "attention_mask", "position_ids", "segment_ids")
"""With padding, which the hashes of samples leave out."""
_MOST_WAIT_SECONDS = 0.003
"""A kill comes this long or less after the ranks were told to go on, so that it finds them at work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """How a part of the drilled run is read."""

    ranks: int
    workers: int = 0
    """Worker processes of each rank."""
    prefetch: int = 0

    def __str__(self) -> str:
        ahead = f", prefetch {self.prefetch}" if self.prefetch else ""
        return f"{counted(self.ranks, 'rank')}, {counted(self.workers, 'worker')}{ahead}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The place where a leg was not what the uninterrupted run is."""

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
    """Of the uninterrupted run: what `batchwright digest` says of these steps."""
    legs: tuple[LegResult, ...]

    @property
    def first_difference(self) -> Difference | None:
        found = [difference for leg in self.legs for difference in leg.differences]
        return min(found, key=lambda d: (d.step, d.leg, d.rank)) if found else None

    @property
    def ok(self) -> bool:
        return self.first_difference is None


@dataclass(frozen=True, slots=True)
class Opening:
    """What a rank needs to open its loader. Travels to its process by value."""

    stores: tuple[tuple[str, str], ...]
    """(path, version) of the stores that have the plan's sources."""
    plan: Plan
    batch_size: int
    leg: Leg
    rank: int


OpenRank = Callable[[Opening], Loader[TrainingBatch]]


class _DrilledStream(StoreStream):
    """Leaves no record of a run with the plan: a drill is not one."""

    def keep(self, plan: Plan) -> Self:
        return self


class _DrilledLoader(Loader[TrainingBatch]):
    def _warn_of_dropped_rows(self) -> None:
        """Nobody trains on what a drill reads."""


def open_rank(opening: Opening) -> Loader[TrainingBatch]:
    """The loader of one rank."""
    leg = opening.leg
    stores = [Store(path, version=version) for path, version in opening.stores]
    fields = padding = None
    if _has_samples(opening.plan):
        # As wide as the longest row: a rank that looked at its own rows alone would be found.
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
    return [
        Leg(ranks=at_least(1, ranks=r), workers=at_least(0, workers=w), prefetch=2 if w == 0 and number % 2 else 0)
        for w in workers
        for number, r in enumerate(ranks)
    ]


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
    `batch_size` is needed where it has none. The steps begin at `first_step`. `legs` are by default those of
    `legs_over()`; a checkpoint comes every `checkpoint_every` steps, and `kill_seed` chooses where ranks are killed. A
    leg never has more ranks than a batch has rows. `timeout_seconds` is how long a rank may take to open, or for a
    step. `on_leg` gets each leg when it is over. `open_loader` runs in the rank's process: give your own to drill a
    loader that you wrap.
    """
    found = find_plan(store, plan, batch_size=batch_size)
    stores = {stream.store for stream in streams_for_plan(store, found).values()}
    opened = tuple(sorted((str(store.path.absolute()), store.version) for store in stores))
    rows = batch_size or found.steps[-1][2]
    legs = legs_over() if legs is None else list(legs)
    legs = [Leg(ranks=min(leg.ranks, rows), workers=leg.workers, prefetch=leg.prefetch) for leg in legs]
    at_least(len(legs), steps=steps)
    at_least(0, first_step=first_step)
    at_least(1, checkpoint_every=checkpoint_every)
    check_steps(found.cut_as([[0, 0, rows]]), first_step, first_step + steps - 1)
    if kill_seed is None:
        kill_seed = random.SystemRandom().randrange(10**6)
    chance = random.Random(kill_seed)
    last_step = first_step + steps
    kills: list[int | None] = [*sorted(chance.sample(range(first_step + 1, last_step), len(legs) - 1)), None]

    def opening(leg: Leg, rank: int) -> Opening:
        return Opening(opened, found, rows, leg, rank)

    with _crew([opening(Leg(ranks=1), 0)], open_loader, timeout_seconds) as crew:
        checkpoint, truth = _read_without_break(crew, range(first_step, last_step))
    results: list[LegResult] = []
    at = reached = first_step
    for number, (leg, kill) in enumerate(zip(legs, kills, strict=True), 1):
        began = time.monotonic()
        run = _LegRun(number, leg, rows, truth, at, checkpoint, checkpoint_every)
        with _crew([opening(leg, rank) for rank in range(leg.ranks)], open_loader, timeout_seconds) as crew:
            run.go(crew, last_step if kill is None else kill, kill is not None, chance.random())
        result = LegResult(
            number=number,
            leg=leg,
            first_step=at,
            num_steps=run.step - at,
            killed_in_step=kill if not run.has_stopped else None,
            repeated_steps=min(reached, run.step) - at,
            differences=tuple(run.differences),
            seconds=time.monotonic() - began,
        )
        results.append(result)
        if on_leg is not None:
            on_leg(result)
        if run.has_stopped:
            break
        checkpoint, at, reached = run.checkpoint, run.checkpoint_step, max(reached, run.step)
    return DrillReport(
        plan=found.fingerprint,
        batch_size=rows,
        row_tokens=found.row_tokens,
        first_step=first_step,
        num_steps=steps,
        kill_seed=kill_seed,
        digest=combine(truth[step].tokens[truth[step].is_real] for step in range(first_step, last_step)),
        legs=tuple(results),
    )


def _read_without_break(crew: _Crew, steps: range) -> tuple[State, dict[int, _Record]]:
    """(the state before the first step, what each step is)."""
    truth: dict[int, _Record] = {}
    try:
        (start,) = crew.open(None, steps.start)
        for step in steps:
            (truth[step],) = crew.step()
    except _RankError as error:
        where = f"at step {steps.start + len(truth):,}"
        raise WorkerError(
            f"the uninterrupted run stopped {where}: {error}", remedy="`batchwright verify STORE` finds damage"
        ) from None
    return start, truth


@dataclass(frozen=True, slots=True)
class _Record:
    """What one rank was handed in one step."""

    tokens: NDArray[np.uint64]
    """Hash of each row, as `batchwright digest` has it."""
    rest: NDArray[np.uint64]
    """Hash of each row's other fields, whole."""
    is_real: NDArray[np.bool_]
    sequences: int
    """Rows of the batch that one row of the order is: two for preference pairs."""
    state: State
    """The loader's, after the step."""
    batch_state: State
    """The one in the batch's metadata."""


@dataclass(slots=True)
class _LegRun:
    """One leg, while it runs."""

    number: int
    leg: Leg
    batch_size: int
    truth: dict[int, _Record]
    step: int
    """The next one."""
    checkpoint: State
    checkpoint_every: int
    checkpoint_step: int = 0
    has_stopped: bool = False
    differences: list[Difference] = field(default_factory=list)

    def go(self, crew: _Crew, until: int, is_killed: bool, chance: float) -> None:
        self.checkpoint_step = self.step
        try:
            crew.open(self.checkpoint, None)
            while self.step < until:
                self._check(crew.step())
                self.step += 1
                if self.step % self.checkpoint_every == 0:
                    self.checkpoint_step = self.step
            if is_killed:
                crew.kill_in_mid_step(chance * _MOST_WAIT_SECONDS)
        except _RankError as error:
            self.has_stopped = True
            self.differences.append(self._difference(error.rank, str(error)))

    def _check(self, records: list[_Record]) -> None:
        true = self.truth[self.step]
        per = true.sequences
        for rank, record in enumerate(records):
            mine = share(len(true.tokens) // per, rank=rank, world=self.leg.ranks)
            what = _what_differs(true, record, slice(mine.start * per, mine.stop * per))
            if what is not None:
                self.differences.append(self._difference(rank, what))
        if (self.step + 1) % self.checkpoint_every == 0:
            self.checkpoint = json.loads(json.dumps(records[0].state))  # as a job's checkpoint file would keep it

    def _difference(self, rank: int, what: str) -> Difference:
        return Difference(step=self.step, leg=self.number, rank=rank, what=what)


def _what_differs(true: _Record, record: _Record, mine: slice) -> str | None:
    """In words; None where all is equal."""
    expected = len(true.tokens[mine])
    rows = len(record.tokens) if expected or record.is_real.any() else 0  # a rank without a row has one of weight 0
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

    def open(self, state: State | None, step: int | None) -> list[State]:
        """Open all loaders, at a state or a step. Returns their states."""
        return self._ask("open", state, step)

    def step(self) -> list[_Record]:
        return self._ask("step")

    def _ask(self, *task: Any) -> list[Any]:
        for rank in self.ranks:
            rank.send(*task)
        answers = []
        for number, rank in enumerate(self.ranks):
            if not rank.connection.poll(self.timeout_seconds):
                raise _RankError(number, f"no answer within {self.timeout_seconds:g} s")
            try:
                answers.append(rank.receive())
            except (BatchwrightError, OSError) as error:
                raise _RankError(number, _in_words(error)) from error
        return answers

    def kill_in_mid_step(self, wait_seconds: float) -> None:
        """Tell the ranks to go on, and kill them all while they do."""
        for rank in self.ranks:
            rank.send("step")
        time.sleep(wait_seconds)
        for rank in self.ranks:
            os.kill(rank.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _crew(openings: list[Opening], open_loader: OpenRank, timeout_seconds: float) -> Iterator[_Crew]:
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Worker(_Rank(opening, open_loader), doing="of the drill")) for opening in openings]
        yield _Crew(ranks, timeout_seconds)


class _Rank:
    """Runs in a rank's process: opens a loader, then gives one step at a time."""

    def __init__(self, opening: Opening, open_loader: OpenRank) -> None:
        self.opening, self.open_loader = opening, open_loader
        self.loader: Loader[TrainingBatch] | None = None

    def __call__(self, command: str, *of: Any) -> Any:
        if command == "open":
            return self._open(*of)
        return _record(next(self.batches), self._opened, self.opening.plan)

    @property
    def _opened(self) -> Loader[TrainingBatch]:
        assert self.loader is not None
        return self.loader

    def _open(self, state: State | None, step: int | None) -> State:
        self.loader = self.open_loader(self.opening)
        if state is not None:
            self.loader.load_state_dict(state)
        elif step:
            self.loader.seek(step=step)
        self.batches = _epoch_after_epoch(self.loader)
        return self.loader.state_dict()


def _epoch_after_epoch(loader: Loader[TrainingBatch]) -> Iterator[TrainingBatch]:
    while True:
        yield from loader.get_iterator()


def _record(batch: TrainingBatch, loader: Loader[TrainingBatch], plan: Plan) -> _Record:
    facts = batch.metadata
    is_samples = _has_samples(plan)
    names = _COMPARED_OF_SAMPLES if is_samples else _COMPARED
    fields = [value for name in names if (value := getattr(batch, name)) is not None]
    rest = [
        xxhash.xxh3_64_intdigest(b"".join(np.ascontiguousarray(part).tobytes() for part in row))
        for row in zip(*fields, facts["position"], facts["weight"], strict=True)
    ]
    return _Record(
        tokens=sample_hashes(batch) if is_samples else row_hashes(batch.input_ids),
        rest=np.array(rest, np.uint64),
        is_real=np.asarray(facts["weight"]) > 0,
        sequences=2 if "side" in facts else 1,
        state=loader.state_dict(),
        batch_state={**facts["state"], "steps": [list(triple) for triple in facts["state"]["steps"]]},
    )


def _has_samples(plan: Plan) -> bool:
    return any(source.rows for source in plan.all_sources)


def _in_words(error: Exception) -> str:
    if isinstance(error, WorkerError):
        return error.headline
    return str(error).splitlines()[0] if isinstance(error, BatchwrightError) else f"{type(error).__name__}: {error}"
