"""The loader of conversations: rendered by a chat template, one or several in a row, with their loss masks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from batchwright.base.errors import SpecError
from batchwright.batches.row_index import RowSpec
from batchwright.batches.samples import SampleRows
from batchwright.batches.settings import Asked, Batching, Delivery, Fields, Mixture, Scope, Shuffle
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.loader import Loader, asked_of
from batchwright.loaders.planning import Member, open_plan, pad_of, plan_sources
from batchwright.loaders.stored import StoreStream, open_stores, store_at
from batchwright.loaders.weights import used_names
from batchwright.store.reader import Store
from batchwright.typing import CorpusLike, Framework, Packing, PlanLike, Split, TokenizerLike, Truncation, WeightsLike

__all__ = ["members_of"]

log: logging.Logger = logging.getLogger("batchwright")


class ConversationDataLoader(Loader[TrainingBatch]):
    """Conversations as batches: from a file, rows in memory, a recipe, or a store that was baked with `bw.chat`.

    ConversationDataLoader("sft.jsonl", tokenizer, 2048)                           the tokenizer's own template
    ConversationDataLoader("sft.jsonl", tokenizer, 2048, "chatml", packing="best_fit")
    ConversationDataLoader("sft.store", max_length=4096, loss="last")              other masks over the same store
    ConversationDataLoader("pairs.jsonl", tokenizer, 2048)                         rows 0::2 chosen, 1::2 rejected
    ConversationDataLoader("sft.store", max_length=4096, batch_size=Batching(tokens=65_536, balance=True))

    `loss` selects the learned tokens: "assistant" turns (default), the "last" one, "all", or roles such as
    "user+assistant". A message's "weight" or "train" overrides it. The end-of-turn token is learned too:
    "assistant, without end of turn" leaves it out. Conversations over `max_length` tokens are dropped, unless
    `truncation` is "keep_start", "keep_end", "drop_oldest" (turns) or "raise".

    `packing` ("best_fit", "first_fit", "greedy") puts several conversations into a row; they do not see each other.
    """

    def __init__(
        self,
        path: CorpusLike,
        tokenizer: TokenizerLike | None = None,
        max_length: int | None = None,
        chat_template: str | None = None,
        *,
        loss: str | Sequence[str] | None = None,
        truncation: Truncation | None = None,
        packing: Packing | None = None,
        batch_size: int | Batching | None = None,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        framework: Framework | None = None,
        shuffle: bool | Scope | Shuffle | None = None,
        epochs: int | None = 1,
        split: Split | None = None,
        weights: WeightsLike | Mixture | None = None,
        plan: PlanLike | None = None,
        fields: Fields | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        """Data: `path` is a store, raw files or rows with a `tokenizer` and its `chat_template`, or a recipe that ends
        in `bw.chat`. `split` is "train" or "val".

        Rows: `max_length` tokens at most, else `truncation`; `packing`. `loss` selects the learned tokens.

        Order: `seed`; `shuffle` is "global", "pool", "none", or a `Shuffle`. `plan` gives exactly the rows of another
        run. `weights` mix the sources, by name, or as a `Mixture`. `epochs=None` never ends.

        Batches: `batch_size` rows over all ranks together (8), or a `Batching`; arrays of `framework`; with `fields`.
        `rank` and `world_size` are the launcher's by default. `delivery` controls threads and worker processes.
        docs/settings.md has all settings.
        """
        asked = asked_of(locals())
        asked.refuse(("lanes", "recut", "border_loss"), "is for rows of text, and these are conversations")
        if max_length is None and plan is None:
            raise SpecError("how long may a conversation be?", parameter="max_length", remedy="max_length=2048")
        self.store: Store = _store_of(path, tokenizer, chat_template, asked)
        stream = _open(self.store, plan, asked)
        super().__init__(stream, asked, rank=rank, world_size=world_size, epochs=epochs, framework=framework)
        _log_rows_left_out(stream)
        if asked["check"] is not False and plan is None:  # a plan was checked when it was made
            from batchwright.loaders.chat_checks import refuse_bad

            refuse_bad(stream, drops_are_meant=truncation is not None)


def _open(store: Store, plan: PlanLike | None, asked: Asked) -> StoreStream:
    _refuse_text(store)
    if plan is None:
        members = members_of(store, asked)
        made = plan_sources(members, asked, dict.fromkeys(store.names))
        return open_stores({member.name: member.stream for member in members}, made, asked, "longest")
    _refuse_other_length(store, asked)
    meant: dict[str, Any] = {}  # the plan's own words
    if asked["loss"] is not None:
        meant["loss"] = _policy(asked["loss"])
    if asked["pad"] is not None:
        meant["pad"] = pad_of(store, asked["pad"])
    if asked["truncation"] is not None:
        meant["truncation"] = _stored_truncation(asked["truncation"])
    return open_plan(store, plan, asked, store.names, pad_to="longest", **meant)


def _log_rows_left_out(stream: StoreStream) -> None:
    for rows in stream.flow.stored:
        if not isinstance(rows, SampleRows):
            continue
        counts = dict(rows.index.counts)
        total = counts.pop("documents")
        over = f"over max_length={rows.row_tokens}"
        words = {"over length": f"{over}: dropped", "cut": f"{over}: cut", "empty mask": "nothing to learn: dropped"}
        for what, number in counts.items():
            share = f"{number:,} of {total:,} rows, {100 * number / total:.1f} %"
            log.warning("%s: %s, %s", rows.name, share, words.get(what, f"{what}: dropped"))


def members_of(store: Store, asked: Asked) -> list[Member]:
    """The conversations of a store as members of a plan: all sources, or those that have weights."""
    _refuse_other_length(store, asked)
    fills = pad_of(store, asked["pad"])
    members = []
    for name in used_names(asked["weights"], store.names):
        stream = store.stream(name, asked.get("split", "train"))
        pairs = stream.has_spans and bool(stream.token_spans()[1]["side"].any())
        spec = RowSpec(
            row_tokens=asked["max_length"],
            packing=asked["packing"],
            truncation=_stored_truncation(asked.get("truncation", "drop")),
            loss=_policy(asked.get("loss", {True: "last", False: "assistant"}[pairs])),
            pairs=pairs,
        )
        members.append(Member(name, stream, asked["max_length"], rows=spec, pad=fills))
    return members


def _policy(loss: str | Sequence[str]) -> str:
    """A loss policy as plans write it."""
    from batchwright.prepare.chat.spans import LossPolicy  # loaders of plain text do without

    return str(LossPolicy.of(loss))


def _stored_truncation(truncation: str) -> str:
    return truncation.replace("drop_oldest", "drop")  # too long conversations lose their oldest turns


def _refuse_text(store: Store) -> None:
    if "chat" not in store.manifest.tokenizer:
        what = f"{store.path} holds plain text: its tokens have no roles"
        remedy = "bake conversations with bw.chat(...), or PretrainDataLoader for text"
        raise SpecError(what, parameter="path", file=store.path, remedy=remedy)


def _refuse_other_length(store: Store, asked: Asked) -> None:
    baked, asked_length = store.manifest.tokenizer.get("chat", {}).get("keep_newest"), asked["max_length"]
    is_shortened = asked["truncation"] == "drop_oldest" or baked
    if is_shortened and asked_length is not None and baked != asked_length:
        what = f"{store.path} was baked with keep_newest={baked}, and max_length={asked_length} asks for another"
        remedy = f"bw.chat(..., keep_newest={asked_length}) in its recipe, or the raw files in place of the store"
        raise SpecError(what, parameter="max_length", file=store.path, remedy=remedy)


def _store_of(path: Any, tokenizer: Any, chat_template: str | None, asked: Asked) -> Store:
    """The store to read. Raw files and rows in memory are baked into a cache, once."""
    store = store_at(path, tokenizer)
    if store is None:
        from batchwright.loaders.raw_files import bake_to_cache, recipe_of_conversations

        keep_newest = None
        if asked["truncation"] == "drop_oldest":
            keep_newest = asked["max_length"]
        return bake_to_cache(recipe_of_conversations(path, tokenizer, chat_template, keep_newest))
    if chat_template is not None:
        what = f"chat_template={chat_template!r} is for raw files, and {path} is a store"
        remedy = "leave out chat_template=, or say it when baking: bw.chat(...)"
        raise SpecError(what, parameter="chat_template", remedy=remedy)
    return store
