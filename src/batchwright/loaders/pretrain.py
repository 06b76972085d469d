"""Pretraining: windows of tokens from a store, shuffled, mixed, resumable."""

from __future__ import annotations

import os

from batchwright.base.errors import SpecError
from batchwright.batches.row_index import RowSpec
from batchwright.batches.settings import SETTINGS, Asked, Batching, Delivery, Fields, Mixture, Scope, Shuffle
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.interface import Stream
from batchwright.loaders.loader import Loader, asked_of
from batchwright.loaders.planning import Member, open_plan, pad_of, plan_sources, without_short
from batchwright.loaders.stored import StoreStream, open_stores, refuse_conversations, store_at
from batchwright.loaders.weights import used_names
from batchwright.order.plan import Plan
from batchwright.store.reader import Store
from batchwright.store.stream import TokenStream
from batchwright.typing import CorpusLike, Framework, Packing, PlanLike, Split, TokenizerLike, WeightsLike

__all__ = ["make_plan", "packed_members"]


class PretrainDataLoader(Loader[TrainingBatch]):
    """Rows of `chunk_size` tokens from a store, or from raw files and a tokenizer.

    PretrainDataLoader("corpus.store", chunk_size=2048, batch_size=32, seed=7)
    PretrainDataLoader("corpus.store", chunk_size=2048, weights=Mixture({"web": 0.7, "code": 0.3}, num_tokens=10**9))
    PretrainDataLoader("corpus.store", chunk_size=2048, split="val")      unshuffled, the last batch short
    PretrainDataLoader("corpus.store", chunk_size=2048, shuffle="pool")   a store larger than memory: docs/cold.md
    PretrainDataLoader("corpus.store", chunk_size=2048, packing="best_fit")   whole documents: docs/packing.md
    PretrainDataLoader("corpus.store", plan="3f2a91c04be7d155")           exactly the rows of a run that was
    PretrainDataLoader("corpus/", "tokenizer.json", 2048)                 raw files: baked once, into a cache
    PretrainDataLoader("corpus/", "tokenizer.json", 2048, streaming=True) raw files: the first batch at once
    PretrainDataLoader(recipe, chunk_size=2048)                           raw files as a DatasetRecipe says

    Without weights an epoch is every row of every source once, in natural proportion. With weights the stream has no
    end, unless the mixture sets one. A source that runs out starts over, shuffled anew.
    """

    def __init__(
        self,
        path: CorpusLike,
        tokenizer: TokenizerLike | None = None,
        chunk_size: int | None = None,
        *,
        streaming: bool = False,
        batch_size: int | Batching | None = None,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        framework: Framework | None = None,
        shuffle: bool | Scope | Shuffle | None = None,
        epochs: int | None = 1,
        split: Split | None = None,
        weights: WeightsLike | Mixture | None = None,
        packing: Packing | None = None,
        plan: PlanLike | None = None,
        fields: Fields | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        """Data: `path` is a store, raw files with a `tokenizer`, or a recipe; beside a store, the tokenizer must be the
        store's own. `split` is "train" or "val". `streaming` reads raw files without a bake.

        Rows: `chunk_size` tokens each. `packing` ("best_fit", "first_fit" or "greedy") makes rows of whole documents.

        Order: `seed`; `shuffle` is "global", "pool", "none", or a `Shuffle`. `plan` gives exactly the rows of another
        run. `weights` mix the sources, by name, or as a `Mixture`. `epochs=None` never ends.

        Batches: `batch_size` rows over all ranks together (8), or a `Batching`; arrays of `framework`; with `fields`.
        `rank` and `world_size` are the launcher's by default. `delivery` controls threads and worker processes.
        docs/settings.md has all settings.
        """
        asked = asked_of(locals())
        asked.refuse(("check",), "is for conversations, and these are rows of text")
        if chunk_size is None and plan is None:
            raise SpecError("how long is a row?", parameter="chunk_size", remedy="chunk_size=2048")
        stream: Stream[TrainingBatch]
        if SETTINGS["streaming"].checked(streaming):
            from batchwright.loaders.raw_stream import open_raw

            asked.refuse_for_a_stream()
            stream = open_raw(path, tokenizer, asked)
        else:
            stream = stored = _open(path, tokenizer, plan, asked)
            self.store: Store = stored.stores[0]
        super().__init__(stream, asked, rank=rank, world_size=world_size, epochs=epochs, framework=framework)


def _open(path: CorpusLike, tokenizer: TokenizerLike | None, plan: PlanLike | None, asked: Asked) -> StoreStream:
    store = _store_of(path, tokenizer)
    if plan is not None:
        return open_plan(store, plan, asked, store.names)
    made = make_plan(store, asked)
    streams = {source.name: store.stream(source.name, source.split) for source in made.sources}
    return open_stores(streams, made, asked)


def _store_of(path: CorpusLike, tokenizer: TokenizerLike | None) -> Store:
    """The store to read. Raw files with a tokenizer are baked into a cache, once."""
    if tokenizer is None and isinstance(path, str | os.PathLike):
        return Store(path)
    store = store_at(path, tokenizer)
    if store is None:
        from batchwright.loaders.raw_files import bake_to_cache, recipe_of

        store = bake_to_cache(recipe_of(path, tokenizer))
    return store


def make_plan(store: Store, asked: Asked) -> Plan:
    """The plan of a loader with these settings. No tokens are read and nothing is stored.

    (The index of packed rows is stored, because it is needed to count them.)
    """
    refuse_conversations(store)
    chunk_size, split = asked["chunk_size"], asked.get("split", "train")
    streams = [store.stream(name, split) for name in used_names(asked["weights"], store.names)]
    if asked["packing"] is not None:
        members = packed_members(streams, asked)
    else:
        asked.refuse(("pad",), "is for packing=: windows are full")
        if asked["weights"] is None and asked["temperature"] is None:
            streams = without_short(streams, chunk_size)
        members = [Member(stream.name, stream, chunk_size) for stream in streams]
    return plan_sources(members, asked, dict.fromkeys(store.names))


def packed_members(streams: list[TokenStream], asked: Asked) -> list[Member]:
    """The members of text as rows of whole documents."""
    chunk_size, pad = asked["chunk_size"], asked["pad"]
    rows = RowSpec(chunk_size, asked["packing"], "split")
    not_empty = [stream for stream in streams if stream.num_tokens] or streams[:1]  # its error says that it has no rows
    return [Member(s.name, s, chunk_size, rows=rows, pad=pad_of(s.store, pad)) for s in not_empty]
