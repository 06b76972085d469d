"""The loader over several stores: one stream, mixed by weights that may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchwright.batches.settings import Asked, Batching, Delivery, Fields, Mixture, Scope, Shuffle
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.loader import Loader, asked_of
from batchwright.loaders.planning import flatten, open_plan, plan_sources
from batchwright.loaders.stored import StoreStream, open_stores
from batchwright.order.plan import Plan
from batchwright.store.stream import TokenStream
from batchwright.typing import Framework, PlanLike, SourceLike, Split, WeightsLike

__all__ = ["plan_mixture"]


class MixedDataLoader(Loader[TrainingBatch]):
    """Rows of several stores (or loaders over stores) by weight.

    MixedDataLoader({"web": "web.store", "code": "code.store"}, {"web": 0.7, "code": 0.3}, chunk_size=2048)
    MixedDataLoader(sources, Mixture(weights, max_epochs={"code": 4}, num_tokens=10**10), chunk_size=2048)
    MixedDataLoader(sources, [(0, early), (1_000_000, late)], chunk_size=2048)    weights from a position on
    MixedDataLoader(sources, Mixture(temperature=3.3), chunk_size=2048)           sizes, flattened
    MixedDataLoader(sources, plan="3f2a91c04be7d155")                             exactly the rows of a run that was

    A loader as a source gives only its rows; its cursor, order and seed are not used. A nested mixture is flattened.
    Its sources are called outer/inner, and share their entry's weight.

    `Mixture(max_epochs=)` caps the passes over a source, by name, or with one number for all. `exhausted` selects what
    happens at the end of a source. "repeat": a source without a cap starts over, shuffled anew; at its cap it leaves,
    and the others share its place. "renormalise": it leaves at its cap, or after one epoch. "stop": the stream ends
    there. `num_rows`, `num_tokens` or `stop` ("first_exhausted", "all_exhausted") set another end.

    Without weights, temperature or caps an epoch is every row of every source once, in natural proportion.
    """

    def __init__(
        self,
        sources: Mapping[str, SourceLike] | Sequence[SourceLike] | SourceLike,
        weights: WeightsLike | Mixture | None = None,
        *,
        chunk_size: int | None = None,
        batch_size: int | Batching | None = None,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        framework: Framework | None = None,
        shuffle: bool | Scope | Shuffle | None = None,
        epochs: int | None = 1,
        split: Split | None = None,
        plan: PlanLike | None = None,
        fields: Fields | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        """Data: `sources` by name (with `plan`, also a list), each a store, its path or a loader. `weights` are their
        shares, or a `Mixture`. `split` is "train" or "val". Rows of text have `chunk_size` tokens each.

        Order: `seed`; `shuffle` is "global", "pool", "none", or a `Shuffle`. `plan` gives exactly the rows of another
        run. `epochs=None` never ends.

        Batches: `batch_size` rows over all ranks together (8), or a `Batching`; arrays of `framework`; with `fields`.
        `rank` and `world_size` are the launcher's by default. `delivery` controls threads and worker processes.
        docs/settings.md has all settings.
        """
        asked = asked_of(locals())
        asked.refuse(("check",), "is for ConversationDataLoader, which checks when it is opened")
        stream = _open(sources, plan, asked)
        super().__init__(stream, asked, rank=rank, world_size=world_size, epochs=epochs, framework=framework)


def _open(sources: Any, plan: PlanLike | None, asked: Asked) -> StoreStream:
    if plan is None:
        made, streams = plan_mixture(sources, asked)
        return open_stores(streams, made, asked)
    if isinstance(sources, Mapping):
        sources = list(sources.values())
    if not isinstance(sources, list | tuple):
        sources = [sources]
    return open_plan([store for source in sources for store in _stores_of(source)], plan, asked)


def _stores_of(source: Any) -> list[Any]:
    """The stores of a source, which is a store or a loader over stores."""
    if isinstance(source, Loader) and isinstance(source.stream, StoreStream):
        return list(source.stream.stores)
    return [source]


def plan_mixture(sources: Any, asked: Asked) -> tuple[Plan, dict[str, TokenStream]]:
    """(the plan of a loader with these settings, its streams). No tokens are read and nothing is stored."""
    members, shares = flatten(
        sources,
        chunk_size=asked["chunk_size"],
        split=asked.get("split", "train"),
        has_weights=asked["weights"] is not None or asked["temperature"] is not None,
    )
    return plan_sources(members, asked, shares, asked["pad"]), {member.name: member.stream for member in members}
