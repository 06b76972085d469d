"""StreamingMixedShardDataset: positions from many shards, mixed in a pool in memory, each once per epoch.

The door: it checks what it was given, says which lanes this process draws from, and hands out rows or batches.
`order/refills.py` says what is drawn when, and `pool/` draws it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from os import PathLike
from typing import Any

from batchwright.base.checks import at_least, one_of
from batchwright.base.errors import MemoryLimitError, PlanError, SpecError
from batchwright.batches.frameworks import adapter
from batchwright.batches.ranks import Ranks, find_ranks
from batchwright.columns.shard import Schema
from batchwright.order.mixing_report import MixingReport
from batchwright.order.refills import NoRoom
from batchwright.pool.augment import Augmentation, apply, augmentation_for
from batchwright.pool.checks import (
    checked_memory,
    checked_most_rows,
    checked_result,
    checked_threshold,
    checked_transform,
    differs,
    seed_for,
)
from batchwright.pool.draws import Draws
from batchwright.pool.lane import Columns
from batchwright.pool.memory import MachineFull, MemoryReport
from batchwright.pool.plan import PoolPlan, TracedPosition
from batchwright.pool.positions import positions
from batchwright.pool.progress import Process, Progress
from batchwright.pool.refused import limit_error, smaller_pool
from batchwright.pool.shard_files import ShardFile, discover_and_split_multiple_data, find_shards, shard_sequence
from batchwright.pool.shards import ShardSet
from batchwright.pool.shared import ToldByWorkers
from batchwright.pool.state import Cursor, ShardNames, State, cursor_of, state_of
from batchwright.pool.turns import lanes_of_rank, next_lane

__all__ = ["StreamingMixedShardDataset", "create_datasets"]

log: logging.Logger = logging.getLogger("batchwright")

_ROWS_AT_ONCE = 1024
"""Rows that are drawn at once where they are handed out one by one."""


class StreamingMixedShardDataset:
    """Positions from shards in several directories, mixed in a pool: each once per epoch, in bounded memory.

        ds = StreamingMixedShardDataset(["selfplay", "human"], ["0-99", "all"], random_seed=7)
        for batch in ds.batches(1024):        # dicts of NumPy columns: the fast way
        for position in ds:                   # dicts, one position each
        ds.loader(num_workers=2)              # a torch DataLoader that moves the cursor

    A pass goes from the cursor to the end of its epoch, and the next pass reads the next epoch. The stream is a
    function of (shards, pool, seed, rows drawn): `state_dict()` continues exactly there. For torch, it is an
    IterableDataset.
    """

    def __init__(
        self,
        data_dirs: Sequence[str | PathLike[str]],
        shard_ranges: Sequence[str],
        pool_size: int = 2_000_000,
        refill_threshold: int | None = 1_500_000,
        max_memory_gb: float = 5.0,
        enable_augmentation: bool = True,
        max_examples_unaugmented: int | None = None,
        verbose: bool = False,
        random_seed: int | None = None,
        *,
        allow_pickle: bool = False,
        columns: Sequence[str] | None = None,
        transform: Callable[[Columns], Mapping[str, Any]] | None = None,
        augmentation: str | Augmentation | Callable[..., Any] | None = None,
        batch_size: int | None = None,
        is_validation: bool = False,
        on_memory_limit: str = "raise",
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """`data_dirs` hold the shards; `shard_ranges` says which of each directory: "0-99", or "all". `columns` reads
        only these. `allow_pickle` also reads pickles: they can run code. `max_examples_unaugmented` ends each shard
        early.

        `pool_size` and `refill_threshold` count entries over all ranks and workers: `factor` for each position, if
        it is augmented. refill_threshold=None is three quarters of the pool. `max_memory_gb` is for each rank; at the
        limit, `on_memory_limit` is "raise" or "stop". `random_seed` fixes the stream.

        `augmentation` is a name or a function; `enable_augmentation=False` leaves it out, and so does `is_validation`,
        which also keeps the order of the shards. `transform(columns) -> columns` is applied to every batch afterwards.

        `batch_size` makes the dataset give batches in place of positions. `drop_last` leaves out what does not fill a
        batch on every rank, so that all ranks have equally many. `rank` and `world_size` are by default what the
        launcher says. `verbose` logs more.
        """
        _register_with_torch()
        if verbose:
            _show_log()
        self.pool_size: int = at_least(1, pool_size=pool_size)
        self.batch_size: int | None = None if batch_size is None else self._checked_batch(batch_size)
        self.on_memory_limit: str = one_of(("raise", "stop"), on_memory_limit=on_memory_limit)
        self.transform: Callable[[Columns], Mapping[str, Any]] | None = checked_transform(transform)
        self.is_validation: bool = bool(is_validation)
        self.drop_last: bool = bool(drop_last)
        most_rows = checked_most_rows(max_examples_unaugmented)
        self.max_examples_unaugmented: int | None = most_rows
        is_augmented = enable_augmentation and not is_validation
        self._augmentation = augmentation_for(augmentation) if is_augmented else None
        if is_augmented and self._augmentation is None:
            log.info("no augmentation is given: each position is one entry")
        threshold, memory = checked_threshold(refill_threshold, self.pool_size), checked_memory(max_memory_gb)
        found = find_shards(data_dirs, shard_ranges)
        self.data_dirs: list[str] = [str(directory) for directory in data_dirs]
        shards = ShardSet(
            shard_sequence(found), allow_pickle=allow_pickle, columns=columns, most_rows=most_rows, budget=memory
        )
        self._plan = PoolPlan(
            shards=shards,
            seed=seed_for(random_seed),
            factor=self.factor,
            pool_entries=self.pool_size,
            threshold=threshold,
            max_memory_bytes=memory,
            in_order=self.is_validation,
            verbose=bool(verbose),
        )
        self._is_seed_given = random_seed is not None
        self._names = ShardNames.of(shards.files, shards.marks, len(found))
        self._given_ranks = None if rank is None and world_size is None else find_ranks(rank, world_size)
        self.stopped_early: bool = False
        """Whether the last pass ended at the memory limit, before its epoch did (on_memory_limit="stop")."""
        self._progress = Progress()
        self._pass = 0
        """Counts passes: a newer one ends the one before."""
        self._draws: Draws | None = None
        self._has_warned = False
        self._told = ToldByWorkers()
        self._tells_of_stops = False
        """In a worker: whether whoever reads from it learns that it stopped early."""
        for name, share in self.directory_weights.items():
            log.log(logging.INFO if verbose else logging.DEBUG, "%s: %.1f %% of the shards", name, 100 * share)

    # What there is

    @property
    def schema(self) -> Schema:
        """The columns of a position, by name: dtype and shape."""
        return self._plan.shards.schema

    @property
    def shards(self) -> list[ShardFile]:
        """The shards of an epoch, in the order in which they are read."""
        return list(self._plan.shards.files)

    @property
    def directory_weights(self) -> dict[str, float]:
        """The share of each directory, by its number of shards."""
        counts = [0] * len(self.data_dirs)
        for file in self._plan.shards.files:
            counts[file.directory] += 1
        shares: dict[str, float] = {}
        for name, count in zip(self.data_dirs, counts, strict=True):
            shares[name] = shares.get(name, 0.0) + count / len(self._plan.shards.files)
        return shares

    @property
    def factor(self) -> int:
        """Entries that each position gives."""
        return 1 if self._augmentation is None else self._augmentation.factor

    @property
    def num_entries(self) -> int:
        """Entries of an epoch, over all ranks: rows times `factor`. Shards that must be decoded to tell are counted."""
        return self._plan.shards.num_rows * self.factor

    @property
    def random_seed(self) -> int:
        """The seed that was given, or the one that was drawn."""
        return self._plan.seed

    @property
    def epoch(self) -> int:
        return self._progress.cursor.epoch

    def __len__(self) -> int:
        """What a pass over a whole epoch yields on this rank: positions, or batches where there is a batch_size."""
        if self.batch_size is None:
            ranks = self._ranks()
            return self._plan.lane_sizes(ranks.world_size)[ranks.rank]
        return self.num_batches(self.batch_size)

    def num_batches(self, batch_size: int, *, drop_last: bool | None = None, num_workers: int = 0) -> int:
        """Batches of `batch_size` in a whole epoch on this rank, if `num_workers` draw them: each lane may end with a
        short one, unless `drop_last`."""
        rows, ranks = self._checked_batch(batch_size), self._ranks()
        chosen = ranks.world_size * max(1, num_workers)
        lanes = self._progress.lanes_for(chosen)
        sizes = self._plan.lane_sizes(lanes)
        if self.drop_last if drop_last is None else drop_last:
            return min(sizes) // rows * (lanes // ranks.world_size)
        return sum(-(-sizes[lane] // rows) for lane in lanes_of_rank(lanes, ranks.rank, ranks.world_size))

    def __repr__(self) -> str:
        rows = self._plan.shards.known_rows
        directories = f"{len(self.data_dirs)} director{'y' if len(self.data_dirs) == 1 else 'ies'}"
        return (
            f"StreamingMixedShardDataset({len(self._plan.shards.files):,} shards in {directories}, "
            f"{'?' if rows is None else f'{rows:,}'} rows, factor {self.factor}, pool {self.pool_size:,}, "
            f"seed {self._plan.seed}, epoch {self.epoch}, {sum(self._progress.cursor.drawn):,} drawn)"
        )

    # Passes

    def __iter__(self) -> Iterator[Any]:
        """The positions from the cursor to the end of the epoch, or batches of `batch_size`."""
        return self._positions() if self.batch_size is None else self.batches()

    def batches(self, batch_size: int | None = None, *, drop_last: bool | None = None) -> Iterator[Columns]:
        """Batches from the cursor to the end of the epoch: dicts of columns whose first axis is rows.

        `batch_size` and `drop_last` are those of the dataset, if not given.
        """
        if batch_size is None and self.batch_size is None:
            raise SpecError("how large shall batches be?", parameter="batch_size", remedy="ds.batches(1024)")
        rows = self._checked_batch(self.batch_size if batch_size is None else batch_size)
        is_even = self.drop_last if drop_last is None else bool(drop_last)
        return (columns for _, columns in self._turns(rows, is_even))

    def loader(
        self, num_workers: int = 0, *, batch_size: int | None = None, drop_last: bool | None = None, **options: Any
    ) -> Any:
        """A torch DataLoader of column batches as tensors, whose `state_dict()` is of what was handed over.

        `num_workers` processes make them; `batch_size` and `drop_last` are as in `batches`. `options` are torch's:
        pin_memory, prefetch_factor, persistent_workers, multiprocessing_context, ...
        """
        rows = self._checked_batch(batch_size if batch_size is not None else self.batch_size or _ROWS_AT_ONCE)
        is_even = self.drop_last if drop_last is None else bool(drop_last)
        return adapter("torch_pool").PoolLoader(self, rows, is_even, num_workers=num_workers, **options)

    def reset(self, epoch: int = 0) -> None:
        """Go to the beginning of an epoch. A pass that is under way ends."""
        self._go_to(Cursor(at_least(0, epoch=epoch)), is_loaded=False)

    def set_epoch(self, epoch: int) -> None:
        """`reset(epoch)`, as trainers call it before each pass; inside that epoch already, the cursor stays."""
        if epoch != self.epoch:
            self.reset(epoch)

    def __getitem__(self, index: object) -> Any:
        raise SpecError(
            "a mixed stream has no random access; torch asks for it if it was imported after the dataset was made",
            parameter="dataset",
            remedy="import torch before making the dataset, or use ds.loader(...)",
        )

    def _turns(self, rows: int, is_even: bool) -> Iterator[tuple[int, Columns]]:
        """(lane, batch) of each turn of this process, until the end of the epoch."""
        with self._passing(rows, is_even) as (draws, mine):
            number, drawn, ends = self._pass, self._progress.cursor.drawn, self._progress.ends
            while (lane := next_lane(drawn, ends, mine)) is not None:
                if number != self._pass:
                    raise _ended_by_newer()
                columns, count = self._finished(draws, lane, rows)
                if count < rows and not draws.is_at_end(lane):  # something stopped the reader, which this raises
                    self._finished(draws, lane, rows)
                if number != self._pass:
                    raise _ended_by_newer()
                if not count:
                    mine.remove(lane)
                    continue
                drawn[lane] += count
                yield lane, columns

    def _positions(self) -> Iterator[dict[str, Any]]:
        with self._passing(1, is_even=False) as (draws, mine):
            number, drawn = self._pass, self._progress.cursor.drawn
            drawn_ahead: dict[int, Iterator[dict[str, Any]]] = {lane: iter(()) for lane in mine}
            while (lane := next_lane(drawn, None, mine)) is not None:
                most = None if len(mine) == 1 else 1  # lanes take turns, a position each
                at = drawn[lane]
                for position in islice(drawn_ahead[lane], most):
                    if number != self._pass:
                        raise _ended_by_newer()
                    drawn[lane] += 1
                    yield position
                if drawn[lane] == at or most is None:
                    if number != self._pass:
                        raise _ended_by_newer()
                    columns, count = self._finished(draws, lane, _ROWS_AT_ONCE)
                    drawn_ahead[lane] = iter(positions(columns))
                    if not count:
                        mine.remove(lane)

    def _finished(self, draws: Draws, lane: int, most: int) -> tuple[Columns, int]:
        """The next entries of a lane, augmented and transformed; and how many they are."""
        try:
            columns, which = draws.take(lane, most)
        except (NoRoom, MachineFull, MemoryError) as refused:
            raise _OutOfMemory(refused) from None
        count = len(next(iter(columns.values())))
        if count and self._augmentation is not None and which is not None:
            columns = apply(self._augmentation, columns, which)
        if count and self.transform is not None:
            columns = checked_result(self.transform(columns), count)
        return columns, count

    @contextmanager
    def _passing(self, rows: int, is_even: bool) -> Iterator[tuple[Draws, list[int]]]:
        """A pass of this process: its pools, and its lanes that are not at their end. At its end comes the next epoch.

        Where memory ends it, that is raised or logged, and the cursor stays where it is.
        """
        process = self._process()
        mine = self._begin(process, rows, is_even)
        self._end_pass()
        number, self.stopped_early, draws = self._pass, False, None
        is_plain_worker = process.worker == 0 and not self._tells_of_stops
        if is_plain_worker:
            self._tell_of_pass()
        try:
            draws = self._draws = self._plan.open(self._progress.cursor, mine, self._lanes_here)
            yield draws, mine
        except _OutOfMemory as stop:
            error = self._limit_reached(stop.refused)
            if self.on_memory_limit == "raise" or (process.worker is not None and not self._tells_of_stops):
                raise error from None
            self.stopped_early = True
            log.warning("the stream ends before its epoch does: %s", error)
            return
        finally:
            if draws is not None:
                draws.close()
            if self._draws is draws:
                self._draws = None
        if number == self._pass:
            if is_plain_worker:
                self._told.finished(self.epoch)
            self._progress.end_epoch()

    def _tell_of_pass(self) -> None:
        """As a worker of a plain DataLoader: say that it draws, and warn if it draws what was drawn before."""
        if self._told.num_epochs > self.epoch and self._progress.cursor.is_at_start:
            log.warning(
                "epoch %d was read before by workers of this DataLoader: call ds.set_epoch(n) before each pass, or use "
                "ds.loader(...), which goes on to the next epoch by itself",
                self.epoch,
            )
        self._told.begun()

    def _follow(self, turns: Iterator[tuple[int, int, Any]]) -> Generator[Any, None, bool]:
        """Hand over batches that workers draw, (lane, rows, columns) each; the cursor moves with them.

        Returns whether this pass came to the end of its epoch.
        """
        self._end_pass()
        number, self.stopped_early = self._pass, False
        try:
            for lane, rows, columns in turns:
                if number != self._pass:
                    raise _ended_by_newer()
                if lane < 0:
                    self.stopped_early = True
                    return False
                self._progress.cursor.drawn[lane] += rows
                yield columns
        except Exception as error:  # one name that is still there when an interpreter ends in mid-pass
            if isinstance(error, MemoryLimitError):
                error.state = self.state_dict()  # torch makes a worker's error anew, from its text
            raise
        if number != self._pass:
            return False
        self._progress.end_epoch()
        return True

    # Lanes

    def _begin(self, process: Process, rows: int, is_even: bool) -> list[int]:
        """Begin a pass. Returns the lanes that this process draws from."""
        if not self._is_seed_given and process.world_size > 1:
            raise SpecError(
                f"random_seed=None with {process.world_size} ranks: each would draw a seed of its own",
                parameter="random_seed",
                remedy="random_seed=0, or another number, the same on all ranks",
            )
        mine = self._progress.begin(self._plan, process, rows, is_even)
        if not self._has_warned and (process.worker is None or (process.worker == 0 and not self._tells_of_stops)):
            self._has_warned = True
            self._warn(process, rows, is_even)
        return mine

    def _warn(self, process: Process, rows: int, is_even: bool) -> None:
        """Say before anything is read what will end badly."""
        cursor = self._progress.cursor
        batches = [] if rows == 1 or is_even or self.is_validation else self._batches_of_ranks(process, rows)
        if len(set(batches)) > 1:
            log.warning(
                "ranks have from %d to %d batches in an epoch: training that waits for all of them (DDP) would hang; "
                "drop_last=True gives all as many",
                *(min(batches), max(batches)),
            )
        stop = self._plan.foreseen_stop(cursor)
        if stop is not None:
            error = limit_error(self._plan, stop[1], cursor, self._lanes_here, 0)
            log.warning("after %s draws of a lane this epoch will end for lack of memory: %s", f"{stop[0]:,}", error)
        elif smaller := smaller_pool(self._plan, cursor, self._lanes_here):
            log.warning("%s", smaller)

    def _batches_of_ranks(self, process: Process, rows: int) -> list[int]:
        if self._plan.shards.known_rows is None or process.world_size == 1:
            return []
        lanes = self._progress.cursor.lanes
        of_lanes = [-(-size // rows) for size in self._plan.lane_sizes(lanes)]
        ranks = range(process.world_size)
        return [sum(of_lanes[lane] for lane in lanes_of_rank(lanes, rank, process.world_size)) for rank in ranks]

    @property
    def _lanes_here(self) -> int:
        """Lanes of this rank."""
        return max(1, self._progress.cursor.lanes // self._ranks().world_size)

    def _process(self) -> Process:
        ranks = self._ranks()
        return Process(ranks.rank, ranks.world_size, *_torch_worker())

    def _ranks(self) -> Ranks:
        return self._given_ranks or find_ranks()

    # State

    def state_dict(self) -> State:
        """Where the stream is: JSON. It is the same on every rank, if all have taken as many batches."""
        process = self._process()
        if process.worker is None and self._told.num_passes and not any(self._progress.cursor.drawn):
            log.warning(
                "workers of a DataLoader draw from this dataset, and what they drew is not in this state: use "
                "ds.loader(...), or torchdata's StatefulDataLoader and its state_dict()"
            )
        cursor, own_lanes = self._progress.to_save(self._plan, process), self._progress.own_lanes
        state = state_of(cursor, self._names, seed=self._plan.seed, **self._settings())
        return state if own_lanes is None else state | {"own_lanes": own_lanes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at `state`, exactly where a dataset over the same shards was. Another pool or memory limit is fine
        from here on; so is another number of ranks and workers that divides the number of lanes."""
        cursor = cursor_of(state)
        self._names.refuse_others(state["shards"], self._plan.shards.files)
        if self._is_seed_given and state["seed"] != self._plan.seed:
            raise differs("random_seed", state["seed"], self._plan.seed)
        for name, now in self._settings().items():
            if state.get(name) != now:
                raise differs(name, state.get(name), now)
        if self._plan.shards.known_rows is not None:
            sizes = self._plan.lane_sizes(cursor.lanes) if cursor.lanes else []
            if any(at > size for at, size in zip(cursor.drawn, sizes, strict=True)):
                raise PlanError(
                    f"this state has {sum(cursor.drawn):,} draws of an epoch, which has {sum(sizes):,}",
                    parameter="state",
                    remedy="what state_dict() returned",
                )
        self._plan, self._is_seed_given = replace(self._plan, seed=int(state["seed"])), True
        self._go_to(cursor, is_loaded=True, own_lanes=state.get("own_lanes"))

    def _settings(self) -> dict[str, Any]:
        """What must be the same where a state is loaded, besides shards and seed."""
        return {
            "augmentation": None if self._augmentation is None else self._augmentation.name,
            "factor": self.factor,
            "max_examples_unaugmented": self.max_examples_unaugmented,
            "is_validation": self.is_validation,
        }

    def _go_to(self, cursor: Cursor, *, is_loaded: bool, own_lanes: list[int] | None = None) -> None:
        self._end_pass()
        self._told.forget()
        self._progress.go_to(cursor, is_loaded=is_loaded, own_lanes=own_lanes)
        self.stopped_early = False

    def _end_pass(self) -> None:
        """End a pass that is under way, if there is one: its pools are let go of, whoever still holds it."""
        self._pass += 1
        if self._draws is not None:
            self._draws.close()
            self._draws = None

    def __getstate__(self) -> dict[str, Any]:
        # What workers are sent. A script's own function travels by value; ranks are known here, not there.
        import cloudpickle

        sent = {**self.__dict__, "_draws": None, "_given_ranks": self._ranks(), "_progress": deepcopy(self._progress)}
        return sent | {"transform": None if self.transform is None else cloudpickle.dumps(self.transform)}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        import cloudpickle

        self.__dict__.update(sent)
        if self.transform is not None:
            self.transform = cloudpickle.loads(sent["transform"])
        _register_with_torch()

    # Reports

    def memory_report(self) -> MemoryReport:
        """What the pools of this process hold now."""
        pool = self._draws.num_bytes if self._draws is not None else 0
        shards = self._plan.shards.decode_bytes * self._lanes_here
        return MemoryReport.now(limit=self._plan.max_memory_bytes, pool=pool, shards=shards)

    def mixing_report(self, block: int = 1024, *, most_draws: int = 8_000_000) -> MixingReport:
        """How well this epoch is mixed, computed from numbers: directory shares and blockwise correlation (of `block`
        draws) of the stream, of sequential reading and of a perfect shuffle. Of a long epoch, the first `most_draws`
        draws."""
        return self._plan.mixing(self._planned(), at_least(2, block=block), at_least(1, most_draws=most_draws))

    def trace(self, draw: int, count: int = 1, *, lane: int = 0) -> list[TracedPosition]:
        """Which rows of which files `count` draws of a lane are, from number `draw` on, in the epoch of the cursor.
        Nothing is read."""
        cursor = self._planned()
        if not 0 <= lane < cursor.lanes:
            raise SpecError(f"there is no lane {lane}", parameter="lane", remedy=f"0 to {cursor.lanes - 1}")
        return self._plan.trace(cursor, lane, at_least(0, draw=draw), at_least(1, count=count))

    def _planned(self) -> Cursor:
        """The cursor, as it is or as it will be when a pass begins."""
        cursor, ranks = self._progress.cursor.copy(), self._ranks()
        cursor.drawn = cursor.drawn or [0] * ranks.world_size
        size = self._plan.size(cursor.drawn, max(1, cursor.lanes // ranks.world_size))
        if not cursor.sizes or not cursor.sizes[-1].is_like(size):
            cursor.sizes.append(size)
        return cursor

    def _limit_reached(self, refused: BaseException) -> MemoryLimitError:
        pool_bytes = 0 if self._draws is None else self._draws.num_bytes
        error = limit_error(self._plan, refused, self._progress.cursor, self._lanes_here, pool_bytes)
        error.state = self.state_dict()
        return error

    def _checked_batch(self, batch_size: Any) -> int:
        rows = at_least(1, batch_size=batch_size)
        if rows > self.pool_size:
            raise SpecError(
                f"a pool of {self.pool_size:,} entries is smaller than a batch of {rows:,}",
                parameter="pool_size",
                remedy=f"pool_size={rows * 4}, or smaller batches",
            )
        return rows


class _OutOfMemory(Exception):
    """A refill was refused."""

    def __init__(self, refused: BaseException) -> None:
        self.refused = refused


def create_datasets(
    data_dirs: Sequence[str | PathLike[str]],
    shard_ranges: Sequence[str],
    validation_split: float = 0.1,
    *,
    split_seed: int = 0,
    random_seed: int | None = None,
    **settings: Any,
) -> tuple[StreamingMixedShardDataset, StreamingMixedShardDataset | None]:
    """A dataset for training and one for validation, which share no shard. `data_dirs`, `shard_ranges` and `settings`
    are those of `StreamingMixedShardDataset`, for both; validation reads all of its positions, also with drop_last.

    The split depends on `split_seed` alone: another `random_seed` is another order of the same training data. With
    validation_split=0 the second is None.
    """
    split = discover_and_split_multiple_data(data_dirs, shard_ranges, validation_split, split_seed)
    train = StreamingMixedShardDataset(
        list(split.data_dirs),
        list(split.train_ranges),
        random_seed=random_seed,
        **settings | {"is_validation": False},
    )
    if not split.validation_shards:
        return train, None
    validation = StreamingMixedShardDataset(
        list(split.data_dirs),
        list(split.validation_ranges),
        random_seed=train.random_seed,
        **settings | {"is_validation": True, "drop_last": False},
    )
    return train, validation


def _ended_by_newer() -> PlanError:
    return PlanError(
        "this pass was ended: another one was begun over the same dataset, or its cursor was moved",
        remedy="one pass at a time; make a second dataset to read twice",
    )


def _torch_worker() -> tuple[int | None, int]:
    """(number of this worker, number of workers) in a worker of torch's DataLoader; else (None, 0)."""
    torch = sys.modules.get("torch.utils.data")
    info = None if torch is None else torch.get_worker_info()
    return (None, 0) if info is None else (info.id, info.num_workers)


def _register_with_torch() -> None:
    """Be an IterableDataset for torch, which asks by isinstance, without importing torch where nobody has."""
    torch = sys.modules.get("torch.utils.data")
    if torch is not None:
        torch.IterableDataset.register(StreamingMixedShardDataset)


def _show_log() -> None:
    """Let what is logged be seen, in a program that has set up no logging."""
    if not log.isEnabledFor(logging.INFO):
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())


_register_with_torch()
