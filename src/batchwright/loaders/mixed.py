"""Several sources in one stream, by weights that may change: every row of every source is still counted and found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchwright.errors import SpecError
from batchwright.loaders.base import DataLoader
from batchwright.loaders.door import StoreDataLoader, padding_of
from batchwright.loaders.planning import (
    Member,
    is_weight,
    lanes_of,
    plan_members,
    refuse_other_settings,
    rounded_pool,
    segments_of,
    shuffle_of,
)
from batchwright.loaders.sources import Parts, caps_of_entries, flatten, hand_down
from batchwright.plan import Plan, Segments
from batchwright.plans import find_plan, streams_for_plan
from batchwright.spec import at_least, one_of
from batchwright.store.stream import TokenStream
from batchwright.typing import EpochEnd, Framework, Mesh, PadTo, PlanLike, ShardingLike, SourceLike, Split, WeightsLike

__all__ = ["MixedDataLoader", "plan_mixture"]


class MixedDataLoader(StoreDataLoader):
    """Rows of several stores (or loaders over stores) by weight.

    MixedDataLoader({"web": "web.store", "code": "code.store"}, {"web": 0.7, "code": 0.3}, chunk_size=2048)
    MixedDataLoader(sources, weights, max_epochs={"code": 4}, num_tokens=10**10, chunk_size=2048)
    MixedDataLoader(sources, [(0, early), (1_000_000, late)], chunk_size=2048)    weights from a position on
    MixedDataLoader(sources, temperature=3.3, chunk_size=2048)                    sizes, flattened
    MixedDataLoader(sources, plan="3f2a91c04be7d155")                             exactly the rows of a run that was

    Of a loader only its rows are used: not its cursor, order or seed. A mixture inside is flattened: its sources are
    called outer/inner, and share their entry's weight. `by` says what weights are shares of: "rows" or "tokens".

    `max_epochs` caps how often a source is read: by name, or one number for all. `exhausted` says what happens when a
    source has given its rows. "repeat": without a cap it starts over, shuffled anew; at its cap it leaves, and the
    others share its place. "renormalise": it leaves at its cap, or after one epoch. "stop": the stream ends there.
    `num_rows`, `num_tokens` or `stop` ("first_exhausted", "all_exhausted") end it anywhere else.

    Without weights, temperature or caps an epoch is every row of every source once, in natural proportion.
    """

    def __init__(
        self,
        sources: Mapping[str, SourceLike] | Sequence[SourceLike] | SourceLike,
        weights: WeightsLike | None = None,
        *,
        chunk_size: int | None = None,
        by: str = "rows",
        temperature: float | None = None,
        max_epochs: Mapping[str, int] | None = None,
        exhausted: str = "repeat",
        num_rows: int | None = None,
        num_tokens: int | None = None,
        stop: str | None = None,
        pad: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Mesh | None = None,
        framework: Framework | None = None,
        shuffle: str | bool | None = None,
        pool_rows: int | None = None,
        lanes: int | None = None,
        epochs: int | None = 1,
        plan: PlanLike | None = None,
        split: Split = "train",
        epoch_end: EpochEnd | None = None,
        recut: bool = True,
        pad_to: PadTo = "max_length",
        position_ids: bool | None = None,
        segment_ids: bool | None = None,
        cu_seqlens: bool | None = None,
        show_roles: bool = False,
        border_loss: bool = True,
        uneven: bool = False,
        sharding: ShardingLike = "contiguous",
        prefetch: int | None = None,
        workers: int = 0,
        read_ahead: bool | None = None,
    ) -> None:
        """Data: `sources` by name (with `plan`, also a list), each a store, its path or a loader. `split` is "train" or
        "val".

        Mixture: `weights` of the sources, as shares of rows or tokens (`by`); without them, sizes flattened by a
        `temperature`. `max_epochs` caps sources; `exhausted`: what happens when one has given its rows.

        Rows: `chunk_size` tokens each; shorter ones are filled up with the token `pad`, as wide as `pad_to` says.
        `recut` cuts windows at other places in each epoch.

        Order: `seed`; `shuffle` is "global", "pool" (inside windows of `pool_rows`, with `lanes` of their own for
        ranks) or "none". `plan` gives exactly the rows of another run.

        Length: `epochs` (None never ends); `num_rows`, `num_tokens` or `stop`. `epoch_end` says what an epoch's last,
        partial batch is: "drop", "short", "pad" or "wrap".

        Batches: `batch_size` rows, as arrays of `framework`. `position_ids`, `segment_ids` and `cu_seqlens` say which
        sample a token is of; `show_roles` says who speaks. `border_loss=False` does not train a document's first token.

        Ranks: `rank` and `world_size`, or a torch DeviceMesh as `mesh`; by default what the launcher says. `sharding`
        says which rows of a batch a rank gets: "contiguous", "strided", or a function. `uneven=True` lets
        ranks have different numbers of rows.

        Speed: `prefetch` batches are made ahead; `workers` processes make them. `read_ahead` reads cold data before it
        is needed.
        """
        one_of(("train", "val"), split=split)
        if plan is not None:
            made, streams = _of_plan(sources, plan)
            names = [source.name for source in made.all_sources]
            refuse_other_settings(
                made,
                weights=(None if weights is None else segments_of(weights, names), None, made.schedule),
                chunk_size=(chunk_size, None, made.row_tokens),
                by=(by, "rows", made.by),
                temperature=(temperature, None, "no record of what it was made from"),
                max_epochs=(None if max_epochs is None else caps_of_entries(max_epochs, names), None, made.caps),
                exhausted=(exhausted, "repeat", made.exhausted),
                num_rows=(num_rows, None, made.end_rows),
                num_tokens=(num_tokens, None, "no record of what it was made from"),
                stop=(stop, None, "no record of what it was made from"),
                pad=(pad, None, made.pad),
                seed=(seed, 0, made.seed),
                shuffle=(None if shuffle is None else shuffle_of(shuffle, split), None, made.shuffle),
                pool_rows=(rounded_pool(pool_rows), None, made.pool_rows),
                lanes=(lanes, None, None if made.lanes is None else made.lanes[0]),
                split=(split, "train", made.sources[0].split),
                epoch_end=(epoch_end, None, made.epoch_end),
                recut=(recut, True, made.recut),
            )
        else:
            made, streams = plan_mixture(
                sources,
                weights,
                chunk_size=chunk_size,
                split=split,
                seed=seed,
                shuffle=shuffle,
                pool_rows=pool_rows,
                lanes=lanes_of(lanes, batch_size),
                by=by,
                temperature=temperature,
                max_epochs=max_epochs,
                exhausted=exhausted,
                num_rows=num_rows,
                num_tokens=num_tokens,
                stop=stop,
                epoch_end=epoch_end,
                recut=recut,
                pad=pad,
            )
        super().__init__(
            streams,
            made,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            mesh=mesh,
            position_ids=position_ids,
            segment_ids=segment_ids,
            cu_seqlens=cu_seqlens,
            roles=show_roles,
            padding=padding_of(pad_to, "right", made.row_tokens),
            border_loss=border_loss,
            read_ahead=read_ahead,
            epochs=epochs,
            framework=framework,
            uneven=uneven,
            sharding=sharding,
            prefetch=prefetch,
            workers=workers,
        )


def plan_mixture(
    sources: Any,
    weights: WeightsLike | None = None,
    *,
    chunk_size: int | None = None,
    split: str = "train",
    by: str = "rows",
    temperature: float | None = None,
    max_epochs: Mapping[str, int] | None = None,
    **settings: Any,
) -> tuple[Plan, dict[str, TokenStream]]:
    """(the plan that a loader with these settings runs, its streams). Looks at no tokens and keeps nothing."""
    if chunk_size is not None:
        at_least(1, chunk_size=chunk_size)
    has_weights = weights is not None or temperature is not None
    members, parts = flatten(sources, chunk_size=chunk_size, split=split, has_weights=has_weights)
    plan = plan_members(
        members,
        split=split,
        segments=_segments(members, parts, weights, temperature, by),
        by=by,
        max_epochs=None if max_epochs is None else caps_of_entries(max_epochs, list(parts)),
        **settings,
    )
    return plan, {member.name: member.stream for member in members}


def _of_plan(sources: Any, plan: Any) -> tuple[Plan, Any]:
    """(the plan, its streams): sources may be stores, or loaders over them."""
    listed = list(sources.values()) if isinstance(sources, Mapping) else sources
    listed = listed if isinstance(listed, list | tuple) else [listed]
    stores = [store for each in listed for store in (each._stores() if isinstance(each, DataLoader) else [each])]
    made = find_plan(stores, plan)
    return made, streams_for_plan(stores, made)


def _segments(members: list[Member], parts: Parts, weights: Any, temperature: float | None, by: str) -> Segments:
    """Weights as asked for entries, handed down to their single sources; flattened by a temperature."""
    names = [member.name for member in members]
    if weights is None and temperature is None:
        return ((0, None),)
    if weights is None:
        sizes = {m.name: float(m.num_tokens) for m in members}
        if by == "rows":
            sizes = {m.name: float(m.num_rows) for m in members}
        return segments_of(_tempered(sizes, temperature), names)
    handed = hand_down(weights, parts)
    if temperature is not None and isinstance(handed, Mapping):
        handed = _tempered(handed, temperature)
    elif temperature is not None:
        handed = [(at, _tempered(mapping, temperature)) for at, mapping in handed]
    return segments_of(handed, names)


def _tempered(weights: Mapping[str, Any], temperature: Any) -> dict[str, Any]:
    """Weights to the power 1 / temperature: above 1 they come nearer to each other."""
    if not is_weight(temperature) or not temperature:
        raise SpecError(
            f"temperature is {temperature!r}", parameter="temperature", remedy="a number above 0; 1 changes nothing"
        )
    total = sum(w for w in weights.values() if is_weight(w)) or 1.0
    return {n: (w / total) ** (1 / temperature) if is_weight(w) and w else w for n, w in weights.items()}
