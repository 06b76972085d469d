"""Pretraining: windows of tokens from a store, shuffled, mixed, resumable."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from batchwright.assemble.rows import PACKINGS, RowSpec
from batchwright.errors import SpecError
from batchwright.loaders.door import StoreDataLoader, check_tokenizer
from batchwright.loaders.planning import (
    Member,
    lanes_of,
    plan_members,
    refuse_conversations,
    refuse_other_settings,
    rounded_pool,
    segments_of,
    shuffle_of,
)
from batchwright.plan import Plan
from batchwright.plans import find_plan, streams_for_plan
from batchwright.spec import at_least, local_path, one_of
from batchwright.store.layout import is_store
from batchwright.store.reader import Store
from batchwright.store.stream import TokenStream
from batchwright.typing import (
    CorpusLike,
    EpochEnd,
    Framework,
    Mesh,
    OnError,
    Packing,
    PlanLike,
    ShardingLike,
    Split,
    StoreLike,
    TokenizerLike,
    WeightsLike,
)

__all__ = ["PretrainDataLoader", "make_plan", "packed_members"]

log: logging.Logger = logging.getLogger("batchwright")


class PretrainDataLoader(StoreDataLoader):
    """Rows of `chunk_size` tokens from a store, or from raw files and a tokenizer.

    PretrainDataLoader("corpus.store", chunk_size=2048, batch_size=32, seed=7)
    PretrainDataLoader("corpus.store", chunk_size=2048, weights={"web": 0.7, "code": 0.3}, num_tokens=10**9)
    PretrainDataLoader("corpus.store", chunk_size=2048, split="val")      unshuffled, once, last batch padded
    PretrainDataLoader("corpus.store", chunk_size=2048, shuffle="pool")   a store larger than memory: docs/cold.md
    PretrainDataLoader("corpus.store", chunk_size=2048, packing="best_fit")   whole documents: docs/packing.md
    PretrainDataLoader("corpus.store", plan="3f2a91c04be7d155")           exactly the rows of a run that was
    PretrainDataLoader("corpus/", "tokenizer.json", 2048)                 raw files: baked once, into a cache
    PretrainDataLoader("corpus/", "tokenizer.json", 2048, streaming=True) raw files: the first batch at once

    Without weights an epoch is every row of every source once, in natural proportion. With weights the stream has no
    end, unless num_rows, num_tokens or stop ends it; a source that runs out starts over, shuffled anew.

    `batch_size` is 8 rows over all ranks together if nothing else is said; with `plan=`, what that plan's run had.
    """

    def __new__(cls, *_: Any, streaming: bool = False, **settings: Any) -> PretrainDataLoader:
        if streaming and cls is PretrainDataLoader:
            from batchwright.streaming import StreamingPretrainDataLoader

            cls = StreamingPretrainDataLoader
        return super().__new__(cls, **settings)

    def __init__(
        self,
        path: CorpusLike,
        tokenizer: TokenizerLike | None = None,
        chunk_size: int | None = None,
        *,
        streaming: bool = False,
        batch_size: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Mesh | None = None,
        framework: Framework | None = None,
        shuffle: str | bool | None = None,
        shuffle_rows: int | None = None,
        pool_rows: int | None = None,
        lanes: int | None = None,
        epochs: int | None = 1,
        plan: PlanLike | None = None,
        weights: WeightsLike | None = None,
        num_rows: int | None = None,
        num_tokens: int | None = None,
        stop: str | None = None,
        split: Split = "train",
        epoch_end: EpochEnd | None = None,
        recut: bool = True,
        packing: Packing | None = None,
        pad: int | None = None,
        position_ids: bool | None = None,
        segment_ids: bool | None = None,
        cu_seqlens: bool | None = None,
        border_loss: bool = True,
        uneven: bool = False,
        sharding: ShardingLike = "contiguous",
        prefetch: int | None = None,
        workers: int = 0,
        read_ahead: bool | None = None,
        text: str = "text",
        format: str | None = None,
        options: Mapping[str, Any] | None = None,
        append_eos: bool = True,
        eos: int | str | None = None,
        on_error: OnError = "raise",
    ) -> None:
        """Data: `path` is a store, or raw files with a `tokenizer`; beside a store, the tokenizer must be the store's
        own. `split` is "train" or "val". `streaming` reads raw files without a bake.

        Rows: `chunk_size` tokens each. `packing` makes them of whole documents ("best_fit", "first_fit" or "greedy"),
        filled up with the token `pad`. `recut` cuts windows at other places in each epoch.

        Order: `seed`; `shuffle` is "global", "pool" (inside windows of `pool_rows`, with `lanes` of their own for
        ranks) or "none"; with streaming, inside windows of `shuffle_rows`. `plan` gives exactly the rows of another
        run.

        Length: `epochs` (None never ends). `weights` mix the sources; then `num_rows`, `num_tokens` or `stop`
        ("first_exhausted", "all_exhausted") end the stream. `epoch_end` says what an epoch's last, partial batch is:
        "drop", "short", "pad" or "wrap".

        Batches: `batch_size` rows, as arrays of `framework`. `position_ids`, `segment_ids` and `cu_seqlens` say which
        document a token is of. `border_loss=False` does not train a document's first token.

        Ranks: `rank` and `world_size`, or a torch DeviceMesh as `mesh`; by default what the launcher says. `sharding`
        says which rows of a batch a rank gets: "contiguous", "strided", or a function. `uneven=True` lets
        ranks have different numbers of rows.

        Speed: `prefetch` batches are made ahead; `workers` processes make them. `read_ahead` reads cold data before it
        is needed.

        Raw files: `text` is the column, `format` and its `options` as in `add_ingredient`; `append_eos` and `eos` as in
        `tokenize`; `on_error` as in `bake`.
        """
        if shuffle_rows is not None:
            raise SpecError(
                "shuffle_rows= is for streaming=True", parameter="shuffle_rows", remedy="leave it out, or pool_rows="
            )
        of_raw_files = {
            "text": text,
            "format": format,
            "options": options,
            "append_eos": append_eos,
            "eos": eos,
            "on_error": on_error,
        }
        path, tokenizer = _store_of(path, tokenizer, of_raw_files)
        if plan is not None:
            made = find_plan(path, plan)
            streams = streams_for_plan(path, made)
            store = next(iter(streams.values())).store
            refuse_other_settings(
                made,
                packing=(packing, None, dict(made.sources[0].rows).get("packing")),
                pad=(pad, None, made.pad),
                chunk_size=(chunk_size, None, made.row_tokens),
                seed=(seed, 0, made.seed),
                shuffle=(None if shuffle is None else shuffle_of(shuffle, split), None, made.shuffle),
                pool_rows=(rounded_pool(pool_rows), None, made.pool_rows),
                weights=(None if weights is None else segments_of(weights, store.names), None, made.schedule),
                lanes=(lanes, None, None if made.lanes is None else made.lanes[0]),
                num_rows=(num_rows, None, made.end_rows),
                num_tokens=(num_tokens, None, "no record of what it was made from"),
                stop=(stop, None, "no record of what it was made from"),
                split=(split, "train", made.sources[0].split),
                epoch_end=(epoch_end, None, made.epoch_end),
                recut=(recut, True, made.recut),
            )
        else:
            store = path if isinstance(path, Store) else Store(path)
            if chunk_size is None:
                raise SpecError("how long is a row?", parameter="chunk_size", remedy="chunk_size=2048")
            made = make_plan(
                store,
                chunk_size,
                seed=seed,
                shuffle=shuffle,
                pool_rows=pool_rows,
                lanes=lanes_of(lanes, batch_size),
                weights=weights,
                num_rows=num_rows,
                num_tokens=num_tokens,
                stop=stop,
                split=split,
                epoch_end=epoch_end,
                recut=recut,
                packing=packing,
                pad=pad,
            )
            streams = {source.name: store.stream(source.name, split) for source in made.sources}
        self.store: Store = store
        if tokenizer is not None:
            check_tokenizer(store, tokenizer)
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
            border_loss=border_loss,
            read_ahead=read_ahead,
            epochs=epochs,
            framework=framework,
            uneven=uneven,
            sharding=sharding,
            prefetch=prefetch,
            workers=workers,
        )

    __new__.__wrapped__ = __init__  # type: ignore[attr-defined]  # whose signature help() and inspect show


_OF_RAW_FILES = {
    "text": "text",
    "format": None,
    "options": None,
    "append_eos": True,
    "eos": None,
    "on_error": "raise",
}
"""Settings for raw files, and what means that they were not given."""


def _store_of(path: Any, tokenizer: Any, of_raw_files: dict[str, Any]) -> tuple[StoreLike, Any]:
    """(store, tokenizer to compare with it). Raw files with a tokenizer are baked into a cache, once."""
    if not isinstance(path, Store) and (
        not isinstance(path, str | os.PathLike) or (tokenizer is not None and not is_store(local_path(path=path)))
    ):
        from batchwright.streaming import bake_to_cache, recipe_of

        on_error = of_raw_files.pop("on_error")
        return bake_to_cache(recipe_of(path, tokenizer, **of_raw_files), on_error), None
    for name, value in of_raw_files.items():
        if value != _OF_RAW_FILES[name]:
            raise SpecError(
                f"{name}={value!r} is for raw files, and {path} is a store",
                parameter=name,
                remedy=f"leave out {name}=, or say it when baking",
            )
    return path, tokenizer


def make_plan(
    store: Store,
    chunk_size: int,
    *,
    weights: WeightsLike | None = None,
    split: str = "train",
    packing: str | None = None,
    pad: int | None = None,
    **settings: Any,
) -> Plan:
    """The plan that a loader with these settings runs. Looks at no tokens and keeps nothing: for asking beforehand.

    (Of rows that are packed it keeps the index: it is needed to count them.)
    """
    one_of(("train", "val"), split=split)
    chunk_size = at_least(1, chunk_size=chunk_size)
    refuse_conversations(store)
    segments = segments_of(weights, store.names)
    used = {name for _, pairs in segments for name, _ in pairs or ()} or store.names
    streams = [store.stream(name, split) for name in store.names if name in used]
    if packing is not None:
        return plan_members(
            packed_members(streams, chunk_size, packing, pad), split=split, segments=segments, **settings
        )
    if pad is not None:
        raise SpecError("pad= is for packing=: windows are full", parameter="pad", remedy="packing='best_fit'")
    if weights is None:
        # A source with too little text for one row is left out of a union; alone, it is an error that says so.
        long_enough = [s for s in streams if s.num_tokens > chunk_size]
        for short in [s for s in streams if s not in long_enough] if long_enough else []:
            log.warning(
                "source %r (%s) is left out: its %d tokens are too few for one row of %d",
                *(short.name, split, short.num_tokens, chunk_size),
            )
        streams = long_enough or streams
    members = [Member(stream.name, stream, chunk_size) for stream in streams]
    return plan_members(members, split=split, segments=segments, **settings)


def packed_members(streams: list[TokenStream], chunk_size: int, packing: str, pad: int | None) -> list[Member]:
    """Text as rows of whole documents, as a plan takes it."""
    rows = RowSpec(chunk_size, one_of(PACKINGS, packing=packing), "split")
    not_empty = [stream for stream in streams if stream.num_tokens] or streams[:1]  # which says that it has no rows
    return [Member(s.name, s, chunk_size, rows=rows, pad=_pad_of(s.store, pad)) for s in not_empty]


def _pad_of(store: Store, asked: int | None) -> int:
    """The token that fills up packed rows: any will do, because masks come from lengths."""
    if asked is None:
        return int(store.manifest.tokenizer["eos"] or 0)
    if not 0 <= asked < store.vocab_size:
        raise SpecError(
            f"pad={asked} is outside the vocabulary of {store.vocab_size:,} ids", parameter="pad", remedy="another id"
        )
    return asked
