"""Several sources in one stream, by weights that may change: every row of every source is still counted and found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchwright.base.errors import SpecError
from batchwright.batches.settings import Asked, Batching, Delivery, Fields, Mixture, Scope, Shuffle
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.loader import Loader
from batchwright.loaders.sources import flatten, plan_sources, refuse_other_settings
from batchwright.loaders.stored import StoreStream, open_stores
from batchwright.order.plan import Plan
from batchwright.store.plans import find_plan, streams_for_plan
from batchwright.store.stream import TokenStream
from batchwright.typing import Framework, PlanLike, SourceLike, Split, WeightsLike

__all__ = ["MixedDataLoader", "plan_mixture"]


class MixedDataLoader(Loader[TrainingBatch]):
    """Rows of several stores (or loaders over stores) by weight.

    MixedDataLoader({"web": "web.store", "code": "code.store"}, {"web": 0.7, "code": 0.3}, chunk_size=2048)
    MixedDataLoader(sources, Mixture(weights, max_epochs={"code": 4}, num_tokens=10**10), chunk_size=2048)
    MixedDataLoader(sources, [(0, early), (1_000_000, late)], chunk_size=2048)    weights from a position on
    MixedDataLoader(sources, Mixture(temperature=3.3), chunk_size=2048)           sizes, flattened
    MixedDataLoader(sources, plan="3f2a91c04be7d155")                             exactly the rows of a run that was

    Of a loader only its rows are used: not its cursor, order or seed. A mixture inside is flattened: its sources are
    called outer/inner, and share their entry's weight.

    `Mixture(max_epochs=)` caps how often a source is read: by name, or one number for all. `exhausted` says what
    happens when a source has given its rows. "repeat": without a cap it starts over, shuffled anew; at its cap it
    leaves, and the others share its place. "renormalise": it leaves at its cap, or after one epoch. "stop": the stream
    ends there. `num_rows`, `num_tokens` or `stop` ("first_exhausted", "all_exhausted") end it anywhere else.

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
        `rank` and `world_size` are by default what the launcher says. `delivery` says how batches are made in time.
        docs/settings.md has all settings.
        """
        asked = Asked(
            weights=weights,
            chunk_size=chunk_size,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            split=split,
            fields=fields,
            delivery=delivery,
        )
        asked.refuse(("check",), "is for ConversationDataLoader, which checks when it is opened")
        stream = _open(sources, plan, asked)
        super().__init__(stream, asked, rank=rank, world_size=world_size, epochs=epochs, framework=framework)


def _open(sources: Any, plan: PlanLike | None, asked: Asked) -> StoreStream:
    if plan is None:
        made, streams = plan_mixture(sources, asked)
    else:
        listed = list(sources.values()) if isinstance(sources, Mapping) else sources
        listed = listed if isinstance(listed, list | tuple) else [listed]
        stores = [store for each in listed for store in _stores_of(each)]
        made = find_plan(stores, plan)
        streams = streams_for_plan(stores, made)
        names = [source.name for source in made.all_sources]
        refuse_other_settings(made, asked, names)
    return open_stores(streams, made, asked)


def _stores_of(source: Any) -> list[Any]:
    """What a source reads: a store, or a loader over some."""
    stream = source.stream if isinstance(source, Loader) else None
    return stream.stores if isinstance(stream, StoreStream) else [source]


def plan_mixture(sources: Any, asked: Asked) -> tuple[Plan, dict[str, TokenStream]]:
    """(the plan that a loader with these settings runs, its streams). Looks at no tokens and keeps nothing."""
    members, parts = flatten(
        sources,
        chunk_size=asked["chunk_size"],
        split=asked["split"] or "train",
        has_weights=asked["weights"] is not None or asked["temperature"] is not None,
    )
    pad = asked["pad"]
    if isinstance(pad, str):
        raise SpecError(
            f"pad={pad!r} is no id, and sources may have several tokenizers", parameter="pad", remedy="pad=0"
        )
    return plan_sources(members, asked, parts, pad), {member.name: member.stream for member in members}
