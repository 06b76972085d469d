"""Loaders of token rows: batches that a flow assembles, from one cursor over the stream of its rows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.assemble.samples import SampleRows
from batchwright.deliver.ranks import Ranks
from batchwright.errors import PlanError, SpecError
from batchwright.flow import Flow
from batchwright.loaders.cursor import CursorLoader, Stream
from batchwright.loaders.planned import PlannedStream
from batchwright.loaders.stream import Batches, BatchStream, NumpyBlocks
from batchwright.memory import BlockPool
from batchwright.plan import Plan
from batchwright.plans import find_plan, keep_plan, with_places
from batchwright.spec import at_least
from batchwright.store.reader import Store
from batchwright.store.stream import TokenStream
from batchwright.types import TrainingBatch
from batchwright.typing import Balance, Framework, ShardingLike, Skip, SourceLike, WeightsLike

__all__ = ["DataLoader"]


class DataLoader(CursorLoader[TrainingBatch]):
    """Batches from one cursor. `get_batch`, `get_iterator`, `get_num_batches`, `reset`; `state_dict` and back.

    `batch_size` is global: each rank gets its share of every batch, contiguous rows unless `sharding` says others.
    Loaders are opened through a door such as `PretrainDataLoader`; all doors share this interface.
    """

    def __init__(
        self,
        flow: Flow,
        plan: Plan,
        *,
        batch_size: int | None = None,
        ranks: Ranks | None = None,
        epochs: int | None = 1,
        framework: Framework | None = None,
        uneven: bool = False,
        sharding: ShardingLike | None = None,
        prefetch: int = 0,
        workers: int = 0,
        batch_tokens: int | None = None,
        row_multiple: int | None = None,
        balance: Balance | None = None,
        equal_counts: bool = True,
    ) -> None:
        """`flow` assembles the rows of a `plan`. `batch_size` rows or `batch_tokens` tokens make a batch, in multiples
        of `row_multiple` rows, as arrays of `framework`. `epochs=None` never ends.

        `ranks` says which rank this is, of how many. `sharding`, `balance`, `equal_counts` and `uneven` say how a batch
        is shared. `prefetch` batches are made ahead; `workers` processes make them.
        """
        self._flow = flow
        self._sequences = flow.sequences
        self.prefetch: int = at_least(0, prefetch=prefetch)
        self.workers: int = at_least(0, workers=workers)
        super().__init__(
            plan,
            batch_size=batch_size,
            ranks=ranks,
            epochs=epochs,
            framework=framework,
            uneven=uneven,
            sharding=sharding,
            batch_tokens=batch_tokens,
            row_multiple=row_multiple,
            balance=balance,
            equal_counts=equal_counts,
        )
        self._pool, self._adapt = _pool_for(flow), _adapter(self.framework)

    def _batches(self, rows: int) -> Stream[TrainingBatch]:
        making: dict[str, Any] = {
            "flow": self._flow,
            "plan": self._plan.fingerprint,
            "adapt": self._adapt,
            "pool": self._pool,
            "prefetch": self.prefetch,
            "workers": self.workers,
            "tokenizer": next((str(store.folder / "tokenizer.json") for store in self._stores()), None),
        }
        if self._is_planned:
            return PlannedStream(steps=self._steps_of(rows), most_tokens=self._most_tokens(rows), **making)
        return BatchStream(cut=self._cut_by_count(rows), share=self._share, end=self._end, **making)

    def _most_tokens(self, rows: int) -> int:
        """Of a batch on all ranks together, padding included."""
        return self.batch_tokens or rows * self._sequences * self._flow.row_tokens

    # Rows of samples have lengths

    def _lengths_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._flow.lengths(positions)

    def _widths_of(self, longest: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self._flow.has_samples:
            return super()._widths_of(longest)
        return self._flow.padding.widths(longest, self._flow.row_tokens)

    def _longest_row(self) -> tuple[int, dict[str, Any]] | None:
        samples = [rows for rows in self._flow.rows if isinstance(rows, SampleRows)]
        if len(samples) < len(self._flow.rows):
            return None
        rows, (row, tokens) = max(((rows, rows.longest()) for rows in samples), key=lambda pair: pair[1][1])
        return tokens, {"row": row, "source": rows.name}

    def _pad_to(self) -> Any:
        to = self._flow.padding.to
        return list(to) if isinstance(to, tuple) else to

    def _hand_over(self, made: Batches) -> Batches:
        handed: Batches = self._adapt.hand_over(made)
        return handed

    def _known_plan(self, fingerprint: str) -> Plan | None:
        """A plan by its name, where plans are kept."""
        try:
            return find_plan(self._stores(), fingerprint)
        except PlanError:
            return None

    def _stores(self) -> list[Store]:
        """The stores that it reads."""
        streams = [rows.stream for rows in self._flow.stored]
        return list({s.store.path: s.store for s in streams if isinstance(s, TokenStream)}.values())

    def _keep_plan(self) -> None:
        """Write the plan beside its stores: what a run did can be found out from them alone."""
        streams = {r.name: r.stream for r in self._flow.stored if isinstance(r.stream, TokenStream)}
        self._plan = with_places(self._plan, streams)
        for store in self._stores():
            keep_plan(store.path, self.plan)

    def amend(
        self,
        *,
        at: int | None = None,
        weights: WeightsLike | None = None,
        add: Mapping[str, SourceLike] | None = None,
        skip: Skip | None = None,
        max_epochs: Mapping[str, int] | None = None,
        num_rows: int | None = None,
        num_tokens: int | None = None,
    ) -> Plan:
        """Change the plan from the cursor on (or from a later position `at`), and go on with it. Returns the new plan.

        `weights` as when opening, from `at` on. `add` has sources that join or have grown, by name. `skip` is (first,
        last), a position, or a list of these. `max_epochs` sets caps anew, `num_rows` or `num_tokens` where the stream
        ends, counted from its beginning. docs/mixing.md has a table.

        Nothing before changes, every source goes on where it is, and states that were saved before still load. An
        iteration that is under way goes on with the amended plan. Call it on every rank alike: `check_sync` proves it.
        """
        from batchwright.loaders.amending import amend_flow

        if self._budget is not None:
            raise SpecError(
                "a run with batch_tokens cannot be amended: rows of the block in which it is would change, of which it "
                "has handed over some",
                parameter="batch_tokens",
                remedy="batch_size=, or a new run",
            )
        asked = {"weights": weights, "add": add, "skip": skip, "max_epochs": max_epochs}
        asked |= {"num_rows": num_rows, "num_tokens": num_tokens}
        step = self.step
        self._plan, self._flow = amend_flow(self._plan, self._flow, self._position, self.epochs, at=at, **asked)
        self._close_stream()
        self._count_on(step)
        self._keep_plan()
        return self.plan

    # What was seen

    def stats(self) -> dict[str, Any]:
        """Where the run is, from the position alone (so also right after a resume), and how long the caller waited."""
        tokens = [
            round(count * _tokens_per_row(rows, self._flow.row_tokens))
            for count, rows in zip(self._flow.order.given(self._position), self._flow.rows, strict=True)
        ]
        elapsed = 0.0 if self._started_seconds is None else time.perf_counter() - self._started_seconds
        return {
            "step": self.step,
            "position": self._position,
            "epoch": self.epoch,
            "tokens": sum(tokens),
            "tokens_per_source": dict(zip(self._flow.order.names, tokens, strict=True)),
            "data_wait_percent": 100 * self._wait_seconds / elapsed if elapsed else 0.0,
        }

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_pool", "_adapt"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pool, self._adapt = _pool_for(self._flow), _adapter(self.framework)

    def __repr__(self) -> str:
        mine = "" if self._is_planned else f" gets {len(self._share(self.batch_size))}"
        rank = f", rank {self.rank} of {self.world_size}{mine}" if self.world_size > 1 else ""
        rows = self._plan.epoch_rows
        epochs = (
            "endless"
            if self.epochs is None or (rows is None and self._plan.weights is not None)
            else f"{self.epochs} epoch{'s' if self.epochs != 1 else ''}"
        )
        steps = "" if rows is None else f", {self._steps_in_words()}"
        size = f"{self.batch_size}{' pairs' * (self._flow.sequences > 1)} x {self._flow.width_in_words}"
        if self._budget is not None:
            size = f"up to {self._budget.batch_tokens:,} tokens, in rows of {self._flow.width_in_words}"
        size += ", balanced" * (self._cost is not None)
        return (
            f"{type(self).__name__}: batches of {size} ({self.framework}){rank}, "
            f"{epochs}{steps}, at step {self.step:,} (position {self._position:,})\n{self.plan!r}"
        )


def _pool_for(flow: Flow) -> BlockPool:
    """Memory for blocks: tokens alone, or for rows of samples also weights, targets, masks, ids and a scratch."""
    return BlockPool(7 if getattr(flow, "has_samples", False) else 1)


def _tokens_per_row(rows: Any, of_flow: int) -> float:
    """Exact for windows; the mean for rows that are made of whole documents."""
    if isinstance(rows, SampleRows):
        return rows.num_tokens / rows.num_rows
    return float(getattr(rows, "row_tokens", of_flow))


def _adapter(framework: str) -> Any:
    if framework == "torch":
        from batchwright.adapters.torch import TorchBlocks

        return TorchBlocks()
    if framework == "jax":
        from batchwright.adapters.jax import JaxBlocks

        return JaxBlocks()
    if framework == "mlx":
        from batchwright.adapters.mlx import MlxBlocks

        return MlxBlocks()
    return NumpyBlocks()
