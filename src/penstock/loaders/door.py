"""What the doors over stores have in common: rows of some streams by a plan, kept with its stores, read ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.assemble.batch import Fields
from penstock.deliver.ranks import find_ranks
from penstock.loaders.base import DataLoader
from penstock.loaders.planning import DEFAULT_BATCH, open_flow
from penstock.loaders.read_ahead import start_read_ahead
from penstock.plan import Plan
from penstock.store.stream import TokenStream

__all__ = ["StoreDataLoader"]


class StoreDataLoader(DataLoader):
    """Rows of token streams, in the order of a plan. Opened through PretrainDataLoader or MixedDataLoader."""

    def __init__(
        self,
        streams: Mapping[str, TokenStream],
        plan: Plan,
        *,
        batch_size: int | None,
        rank: int | None,
        world_size: int | None,
        mesh: Any,
        position_ids: bool,
        segment_ids: bool,
        border_loss: bool,
        read_ahead: bool | None,
        prefetch: int | None,
        **delivery: Any,
    ) -> None:
        """`batch_size`: where it is not given, what the plan's run had. `delivery` is what DataLoader takes."""
        if batch_size is None:
            batch_size = plan.steps[-1][2] if len(plan.runs) == 1 else DEFAULT_BATCH
        fields = Fields(position_ids=position_ids, segment_ids=segment_ids, border_loss=border_loss)
        super().__init__(
            open_flow(streams, plan, fields),
            plan,
            batch_size=batch_size,
            ranks=find_ranks(rank, world_size, mesh),
            prefetch=prefetch or 0,
            **delivery,
        )
        self._keep_plan()
        start_read_ahead(self, read_ahead)
