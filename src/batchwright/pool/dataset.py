"""StreamingMixedShardDataset: positions from many shards, mixed in a pool in memory, each once per epoch."""

from __future__ import annotations

import logging
import math
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from os import PathLike
from typing import Any

import numpy as np

from batchwright.base.checks import at_least, one_of, whole_number
from batchwright.base.errors import SpecError
from batchwright.base.words import counted
from batchwright.batches.frameworks import adapter
from batchwright.batches.ranks import Ranks, find_ranks
from batchwright.columns.shard import Schema
from batchwright.order.mixing_report import MixingReport
from batchwright.pool.augment import Augmentation, augmentation_for
from batchwright.pool.memory import MemoryReport
from batchwright.pool.passes import Passes, Transform
from batchwright.pool.plan import PoolPlan, TracedPosition
from batchwright.pool.shard_files import ShardFile, discover_and_split_multiple_data, find_shards, shard_sequence
from batchwright.pool.shards import Columns, ShardSet
from batchwright.pool.state import Cursor, State
from batchwright.pool.turns import lanes_of_rank

__all__ = ["StreamingMixedShardDataset", "create_datasets"]

log: logging.Logger = logging.getLogger("batchwright")
_LOADER_ROWS = 1024
"""Batch size of a loader that is not given one."""


class StreamingMixedShardDataset:
    """Positions from shards in several directories, mixed in a pool: each once per epoch, in bounded memory.

        ds = StreamingMixedShardDataset(["selfplay", "human"], ["0-99", "all"], random_seed=7)
        for batch in ds.batches(1024):        # dicts of NumPy columns: the fast way
        for position in ds:                   # dicts, one position each
        ds.loader(num_workers=2)              # a torch DataLoader that moves the cursor

    A pass goes from the cursor to the end of its epoch, and the next pass reads the next epoch. The stream is a
    function of (shards, pool, seed, rows drawn): `state_dict()` continues exactly there. For torch, it is an
    IterableDataset.

    Shards: `data_dirs` hold them; `shard_ranges` has a range for each directory: "0-99", or "all". `columns` reads
    only these. `allow_pickle` also reads pickles: they can run code. `max_examples_unaugmented` ends an epoch early.

    Pool: `pool_size` and `refill_threshold` count entries over all ranks and workers: `factor` for each position, if
    it is augmented. refill_threshold=None is three quarters of the pool. `max_memory_gb` is for each rank; at the
    limit, `on_memory_limit` is "raise" or "stop". `random_seed` fixes the stream.

    Positions: `augmentation` is a name or a function; `enable_augmentation=False` leaves it out, and so does
    `is_validation`, which also keeps the order of the shards. `transform(columns) -> columns` is applied to every batch
    afterwards.

    Batches: `batch_size` makes the dataset give batches in place of positions. `drop_last` leaves out
    rows that do not fill a batch on every rank, so that all ranks have the same number of batches. `rank` and
    `world_size` default to the launcher's. `verbose` logs more.
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
        transform: Transform | None = None,
        augmentation: str | Augmentation | Callable[..., Any] | None = None,
        batch_size: int | None = None,
        is_validation: bool = False,
        on_memory_limit: str = "raise",
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        _register_with_torch()
        if verbose:
            _show_log()
        self.data_dirs: list[str] = [str(directory) for directory in data_dirs]
        self.pool_size: int = at_least(1, pool_size=pool_size)
        self.batch_size: int | None = batch_size
        self._check(batch_size, max_examples_unaugmented, transform, on_memory_limit)
        self.is_validation: bool = bool(is_validation)
        self.drop_last: bool = bool(drop_last)
        chosen = _augmentation(augmentation, enable_augmentation and not is_validation)
        threshold, memory = _checked_threshold(refill_threshold, self.pool_size), _checked_memory(max_memory_gb)
        files = shard_sequence(find_shards(data_dirs, shard_ranges))
        shards = ShardSet(
            files, allow_pickle=allow_pickle, columns=columns, most_rows=max_examples_unaugmented, budget=memory
        )
        plan = PoolPlan(
            shards=shards,
            seed=_seed(random_seed),
            factor=1 if chosen is None else chosen.factor,
            pool_entries=self.pool_size,
            threshold=threshold,
            max_memory_bytes=memory,
            in_order=self.is_validation,
            verbose=bool(verbose),
        )
        self.passes: Passes = Passes(
            plan=plan,
            num_directories=len(self.data_dirs),
            augmentation=chosen,
            transform=transform,
            is_seed_given=random_seed is not None,
            can_stop=on_memory_limit == "stop",
            given_ranks=_given_ranks(rank, world_size),
        )
        """The stream behind this dataset, for adapters."""
        self._log_weights()

    # Properties

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
        files = self._plan.shards.files
        shares = dict.fromkeys(self.data_dirs, 0)
        for file in files:
            shares[self.data_dirs[file.directory]] += 1
        return {name: count / len(files) for name, count in shares.items()}

    def _log_weights(self) -> None:
        level = logging.INFO if self._plan.verbose else logging.DEBUG
        for name, share in self.directory_weights.items():
            log.log(level, "%s: %.1f %% of the shards", name, 100 * share)

    @property
    def factor(self) -> int:
        """Entries that each position gives."""
        return self._plan.factor

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
        return self._cursor.epoch

    @property
    def stopped_early(self) -> bool:
        """Whether the last pass ended at the memory limit, before its epoch did (on_memory_limit="stop")."""
        return self.passes.stopped_early

    @property
    def _plan(self) -> PoolPlan:
        return self.passes.plan

    @property
    def _cursor(self) -> Cursor:
        return self.passes.run.cursor

    def __len__(self) -> int:
        """The length of a whole epoch on this rank: positions, or batches if there is a batch_size."""
        if self.batch_size is not None:
            return self.num_batches(self.batch_size)
        ranks = self.passes.ranks
        return self._plan.lane_sizes(ranks.world_size)[ranks.rank]

    def num_batches(self, batch_size: int, *, drop_last: bool | None = None, num_workers: int = 0) -> int:
        """Batches of `batch_size` in a whole epoch on this rank, if `num_workers` draw them: each lane may end with a
        short one, unless `drop_last`."""
        rows, ranks = self._checked_batch(batch_size), self.passes.ranks
        lanes = self.passes.run.lanes_for(ranks.world_size * max(1, num_workers))
        sizes = self._plan.lane_sizes(lanes)
        if self._is_even(drop_last):
            return min(sizes) // rows * (lanes // ranks.world_size)
        return sum(-(-sizes[lane] // rows) for lane in lanes_of_rank(lanes, ranks.rank, ranks.world_size))

    def __repr__(self) -> str:
        shards = counted(len(self._plan.shards.files), "shard")
        directories = counted(len(self.data_dirs), "directory", "directories")
        return (
            f"StreamingMixedShardDataset({shards} in {directories}, factor {self.factor}, pool {self.pool_size:,}, "
            f"seed {self._plan.seed}, epoch {self.epoch}, {sum(self._cursor.drawn):,} drawn)"
        )

    # Passes

    def __iter__(self) -> Iterator[Any]:
        """The positions from the cursor to the end of the epoch, or batches of `batch_size`."""
        if self.batch_size is None:
            return self.passes.positions()
        return self.batches()

    def batches(self, batch_size: int | None = None, *, drop_last: bool | None = None) -> Iterator[Columns]:
        """Batches from the cursor to the end of the epoch: dicts of columns whose first axis is rows.

        `batch_size` and `drop_last` default to those of the dataset.
        """
        if batch_size is None:
            batch_size = self.batch_size
        if batch_size is None:
            raise SpecError("batches need a batch_size", parameter="batch_size", remedy="ds.batches(1024)")
        turns = self.passes.turns(self._checked_batch(batch_size), self._is_even(drop_last))
        return (columns for _, _, columns in turns)

    def loader(
        self, num_workers: int = 0, *, batch_size: int | None = None, drop_last: bool | None = None, **options: Any
    ) -> Any:
        """A torch DataLoader of column batches as tensors. Its `state_dict()` counts the batches that were handed over.

        `num_workers` processes make them; `batch_size` and `drop_last` are as in `batches`. `options` are torch's:
        pin_memory, prefetch_factor, persistent_workers, multiprocessing_context, ...
        """
        if batch_size is None:
            batch_size = self.batch_size or _LOADER_ROWS
        rows, is_even = self._checked_batch(batch_size), self._is_even(drop_last)
        return adapter("torch").PoolLoader(self, rows, is_even, num_workers=num_workers, **options)

    def _is_even(self, drop_last: bool | None) -> bool:
        if drop_last is None:
            return self.drop_last
        return bool(drop_last)

    def reset(self, epoch: int = 0) -> None:
        """Go to the beginning of an epoch. A pass that is under way ends."""
        self.passes.go_to(Cursor(at_least(0, epoch=epoch)), is_loaded=False)

    def set_epoch(self, epoch: int) -> None:
        """`reset(epoch)`, as trainers call it before each pass; inside that epoch already, the cursor stays."""
        if epoch != self.epoch:
            self.reset(epoch)

    def __getitem__(self, index: object) -> Any:
        what = "a mixed stream has no random access; torch asks for it if it was imported after the dataset was made"
        remedy = "import torch before making the dataset, or use ds.loader(...)"
        raise SpecError(what, parameter="dataset", remedy=remedy)

    # State

    def state_dict(self) -> State:
        """The place in the stream, as JSON. It is the same on every rank, if all have taken as many batches."""
        return self.passes.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at `state`, exactly where a dataset over the same shards was. Another pool or memory limit is fine
        from here on; so is another number of ranks and workers that divides the number of lanes."""
        self.passes.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has a cursor of its own.
        return {**self.__dict__, "passes": copy(self.passes)}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        self.__dict__.update(sent)
        _register_with_torch()

    # Reports

    def memory_report(self) -> MemoryReport:
        """Memory of the pools of this process now."""
        shards = self._plan.shards.decode_bytes * self.passes.lanes_here
        return MemoryReport.now(limit=self._plan.max_memory_bytes, pool=self.passes.pool_bytes, shards=shards)

    def mixing_report(self, block: int = 1024, *, most_draws: int = 8_000_000) -> MixingReport:
        """Measure the mixing of this epoch: directory shares and blockwise correlation (of `block` draws) of the
        stream, of sequential reading and of a perfect shuffle. Computed from numbers; of a long epoch, only the
        first `most_draws` draws count."""
        cursor = self.passes.planned_cursor()
        return self._plan.mixing(cursor, at_least(2, block=block), at_least(1, most_draws=most_draws))

    def trace(self, draw: int, count: int = 1, *, lane: int = 0) -> list[TracedPosition]:
        """The rows of files that `count` draws of a lane are, from number `draw` on, in the epoch of the cursor.
        Nothing is read."""
        cursor = self.passes.planned_cursor()
        if not 0 <= lane < cursor.lanes:
            raise SpecError(f"there is no lane {lane}", parameter="lane", remedy=f"0 to {cursor.lanes - 1}")
        return self._plan.trace(cursor, lane, at_least(0, draw=draw), at_least(1, count=count))

    # Checks

    def _check(self, batch_size: Any, max_examples_unaugmented: Any, transform: Any, on_memory_limit: Any) -> None:
        if batch_size is not None:
            self._checked_batch(batch_size)
        if max_examples_unaugmented is not None:
            at_least(1, max_examples_unaugmented=max_examples_unaugmented)
        one_of(("raise", "stop"), on_memory_limit=on_memory_limit)
        if transform is not None and not callable(transform):
            what, remedy = f"transform={transform!r} is not a function", "a function f(columns) -> columns"
            raise SpecError(what, parameter="transform", remedy=f"{remedy}, applied to every batch")

    def _checked_batch(self, batch_size: Any) -> int:
        rows = at_least(1, batch_size=batch_size)
        if rows > self.pool_size:
            what = f"a pool of {self.pool_size:,} entries is smaller than a batch of {rows:,}"
            raise SpecError(what, parameter="pool_size", remedy=f"pool_size={rows * 4}, or smaller batches")
        return rows


def _checked_threshold(refill_threshold: Any, pool_size: int) -> int:
    usual = pool_size * 3 // 4
    if refill_threshold is None:
        return usual
    threshold = at_least(0, refill_threshold=refill_threshold)
    if threshold >= pool_size:
        raise SpecError(
            f"refill_threshold={threshold:,} is not below pool_size={pool_size:,}: the pool would be refilled for ever",
            parameter="refill_threshold",
            remedy=f"refill_threshold={usual}, three quarters of the pool; or None, which is that",
        )
    return threshold


def _checked_memory(max_memory_gb: Any) -> int:
    is_number = isinstance(max_memory_gb, int | float | np.number) and not isinstance(max_memory_gb, bool)
    if not is_number or not 0 < max_memory_gb < math.inf:
        what = f"max_memory_gb must be a number above 0, got {max_memory_gb!r}"
        raise SpecError(what, parameter="max_memory_gb", remedy="max_memory_gb=5.0")
    return int(max_memory_gb * 10**9)


def _given_ranks(rank: int | None, world_size: int | None) -> Ranks | None:
    """None: those of the launcher, when they are needed."""
    if rank is None and world_size is None:
        return None
    return find_ranks(rank, world_size)


def _augmentation(given: Any, is_on: bool) -> Augmentation | None:
    if not is_on:
        return None
    augmentation = augmentation_for(given)
    if augmentation is None:
        log.info("no augmentation is given: each position is one entry")
    return augmentation


def _seed(random_seed: Any) -> int:
    if random_seed is not None:
        return whole_number(random_seed=random_seed)
    seed = secrets.randbits(31)
    log.info("random_seed=None: drew the seed %d; it is kept in the state", seed)
    return seed


def create_datasets(
    data_dirs: Sequence[str | PathLike[str]],
    shard_ranges: Sequence[str],
    validation_split: float = 0.1,
    *,
    split_seed: int = 0,
    random_seed: int | None = None,
    **settings: Any,
) -> tuple[StreamingMixedShardDataset, StreamingMixedShardDataset | None]:
    """Return a dataset for training and one for validation, without common shards. `data_dirs`, `shard_ranges` and
    `settings` are those of `StreamingMixedShardDataset`, for both. Validation reads all of its positions, even with
    drop_last.

    The split depends on `split_seed` alone: another `random_seed` is another order of the same training data. With
    validation_split=0 the second is None.
    """
    split = discover_and_split_multiple_data(data_dirs, shard_ranges, validation_split, split_seed)
    directories = list(split.data_dirs)
    settings |= {"random_seed": random_seed, "is_validation": False}
    train = StreamingMixedShardDataset(directories, list(split.train_ranges), **settings)
    if not split.validation_shards:
        return train, None
    settings |= {"random_seed": train.random_seed, "is_validation": True, "drop_last": False}
    return train, StreamingMixedShardDataset(directories, list(split.validation_ranges), **settings)


def _register_with_torch() -> None:
    """Be an IterableDataset for torch, which asks by isinstance. Torch is not imported for this."""
    torch = sys.modules.get("torch.utils.data")
    if torch is not None:
        torch.IterableDataset.register(StreamingMixedShardDataset)


def _show_log() -> None:
    """Show log lines, in a program that has set up no logging."""
    if not log.isEnabledFor(logging.INFO):
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())


_register_with_torch()
