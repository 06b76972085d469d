"""Conversations: rendered by a chat template, one or several in a row, with loss where it belongs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from batchwright.base.checks import local_path
from batchwright.base.errors import SpecError
from batchwright.batches.row_index import RowSpec
from batchwright.batches.samples import SampleRows
from batchwright.batches.settings import Asked, Batching, Delivery, Fields, Mixture, Scope, Shuffle
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.loader import Loader
from batchwright.loaders.planning import Member, used_names
from batchwright.loaders.sources import plan_sources, refuse_other_settings
from batchwright.loaders.stored import StoreStream, check_tokenizer, open_stores
from batchwright.store.layout import is_store
from batchwright.store.plans import find_plan, streams_for_plan
from batchwright.store.reader import Store
from batchwright.typing import (
    CorpusLike,
    Framework,
    Packing,
    PlanLike,
    Split,
    TokenizerLike,
    Truncation,
    WeightsLike,
)

__all__ = ["ConversationDataLoader", "members_of", "pad_token_of"]

log: logging.Logger = logging.getLogger("batchwright")

_PAD_NAMES = ("<|pad|>", "<pad>", "<PAD>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>")


class ConversationDataLoader(Loader[TrainingBatch]):
    """Conversations as batches: from a file, rows in memory, a recipe, or a store that was baked with `bw.chat`.

    ConversationDataLoader("sft.jsonl", tokenizer, 2048)                           the tokenizer's own template
    ConversationDataLoader("sft.jsonl", tokenizer, 2048, "chatml", packing="best_fit")
    ConversationDataLoader("sft.store", max_length=4096, loss="last")              other masks over the same store
    ConversationDataLoader("pairs.jsonl", tokenizer, 2048)                         rows 0::2 chosen, 1::2 rejected
    ConversationDataLoader("sft.store", max_length=4096, batch_size=Batching(tokens=65_536, balance=True))

    `loss` says which tokens are learned: "assistant" turns (default), the "last" one, "all", or roles such as
    "user+assistant"; messages with "weight" or "train" say so themselves. The end-of-turn token is learned too:
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

        Rows: `max_length` tokens at most, else `truncation`; `packing`. `loss` says what is learned.

        Order: `seed`; `shuffle` is "global", "pool", "none", or a `Shuffle`. `plan` gives exactly the rows of another
        run. `weights` mix the sources, by name, or as a `Mixture`. `epochs=None` never ends.

        Batches: `batch_size` rows over all ranks together (8), or a `Batching`; arrays of `framework`; with `fields`.
        `rank` and `world_size` are by default what the launcher says. `delivery` says how batches are made in time.
        docs/settings.md has all settings.
        """
        asked = Asked(
            max_length=max_length,
            loss=loss,
            truncation=truncation,
            packing=packing,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            split=split,
            weights=weights,
            fields=fields,
            delivery=delivery,
        )
        asked.refuse(("lanes", "recut", "border_loss"), "is for rows of text, and these are conversations")
        if max_length is None and plan is None:
            raise SpecError("how long may a conversation be?", parameter="max_length", remedy="max_length=2048")
        self.store: Store = _store_of(path, tokenizer, chat_template, asked)
        stream = _open(self.store, plan, asked)
        super().__init__(stream, asked, rank=rank, world_size=world_size, epochs=epochs, framework=framework)
        _say_what_is_left_out(stream)
        if asked["check"] is not False and plan is None:  # a plan was checked when it was made
            from batchwright.loaders.chat_refusal import refuse_bad

            refuse_bad(stream, drops_are_meant=truncation is not None)


def _open(store: Store, plan: PlanLike | None, asked: Asked) -> StoreStream:
    _refuse_text(store)
    _refuse_other_length(store, asked)
    if plan is None:
        members = members_of(store, asked)
        streams = {member.name: member.stream for member in members}
        made = plan_sources(members, asked, dict.fromkeys(store.names))
    else:
        made = find_plan(store, plan)
        streams = streams_for_plan(store, made)
        meant: dict[str, Any] = {}
        if asked["loss"] is not None:
            meant["loss"] = _policy(asked["loss"])
        if asked["pad"] is not None:
            meant["pad"] = _pad_of(store, asked["pad"])
        if asked["truncation"] is not None:
            meant["truncation"] = _stored_truncation(asked["truncation"])
        refuse_other_settings(made, asked, store.names, **meant)
    is_packed = any(dict(source.rows).get("packing") for source in made.sources)
    return open_stores(streams, made, asked, "max_length" if is_packed else "longest")


def _say_what_is_left_out(stream: StoreStream) -> None:
    for rows in stream.flow.stored:
        if not isinstance(rows, SampleRows):
            continue
        counts = dict(rows.index.counts)
        total = counts.pop("documents")
        over = f"over max_length={rows.row_tokens}"
        words = {
            "over length": f"{over}: dropped",
            "cut": f"{over}: cut",
            "empty mask": "nothing to learn: dropped",
        }
        for what, number in counts.items():
            share = f"{number:,} of {total:,} rows, {100 * number / total:.1f} %"
            log.warning("%s: %s, %s", rows.name, share, words.get(what, f"{what}: dropped"))


def members_of(store: Store, asked: Asked) -> list[Member]:
    """The conversations of a store, as a plan takes them: of all sources, or of those that have weights."""
    _refuse_other_length(store, asked)
    fills = _pad_of(store, asked["pad"])
    members = []
    for name in used_names(asked["weights"], store.names):
        stream = store.stream(name, asked["split"] or "train")
        pairs = stream.has_spans and bool(stream.token_spans()[1]["side"].any())
        spec = RowSpec(
            row_tokens=asked["max_length"],
            packing=asked["packing"],
            truncation=_stored_truncation(asked["truncation"] or "drop"),
            loss=_policy(asked.get("loss", "last" if pairs else "assistant")),
            pairs=pairs,
        )
        members.append(Member(name, stream, asked["max_length"], rows=spec, pad=fills))
    return members


def _policy(loss: str | Sequence[str]) -> str:
    """A loss policy as plans write it."""
    from batchwright.prepare.chat.policy import LossPolicy  # loaders of plain text do without

    return str(LossPolicy.parse(loss) if isinstance(loss, str) else LossPolicy.of(loss))


def _pad_of(store: Store, pad: int | str | None) -> int:
    vocab = {} if isinstance(pad, int) else getattr(store.tokenizer, "vocab", {})
    return pad_token_of(store.manifest.tokenizer, vocab, pad)


def _stored_truncation(truncation: str) -> str:
    return "drop" if truncation == "drop_oldest" else truncation  # what is still too long without its oldest turns


def _refuse_text(store: Store) -> None:
    if "chat" not in store.manifest.tokenizer:
        raise SpecError(
            f"{store.path} holds plain text: its tokens have no roles",
            parameter="path",
            file=store.path,
            remedy="bake conversations with bw.chat(...), or PretrainDataLoader for text",
        )


def _refuse_other_length(store: Store, asked: Asked) -> None:
    baked, asked_length = store.manifest.tokenizer.get("chat", {}).get("keep_newest"), asked["max_length"]
    is_shortened = asked["truncation"] == "drop_oldest" or baked
    if is_shortened and asked_length is not None and baked != asked_length:
        raise SpecError(
            f"{store.path} was baked with keep_newest={baked}, and max_length={asked_length} asks for another",
            parameter="max_length",
            file=store.path,
            remedy=f"bw.chat(..., keep_newest={asked_length}) in its recipe, or the raw files in place of the store",
        )


def _store_of(path: Any, tokenizer: Any, chat_template: str | None, asked: Asked) -> Store:
    """The store to read. Raw files and rows in memory are baked into a cache, once."""
    if isinstance(path, Store) or (isinstance(path, str | os.PathLike) and is_store(local_path(path=path))):
        if chat_template is not None:
            raise SpecError(
                f"chat_template={chat_template!r} is for raw files, and {path} is a store",
                parameter="chat_template",
                remedy="leave out chat_template=, or say it when baking: bw.chat(...)",
            )
        store = path if isinstance(path, Store) else Store(path)
        if tokenizer is not None:
            check_tokenizer(store, tokenizer)
        return store
    from batchwright.loaders.raw_files import bake_to_cache, recipe_of_conversations

    keep_newest = asked["max_length"] if asked["truncation"] == "drop_oldest" else None
    return bake_to_cache(recipe_of_conversations(path, tokenizer, chat_template, keep_newest))


def pad_token_of(tokenizer: Mapping[str, Any], vocab: Mapping[str, int], asked: int | str | None) -> int:
    """The id that fills up rows. Any will do, because masks come from lengths; but it must be one that was meant.

    `tokenizer` is what a manifest says of it.
    """
    if isinstance(asked, int) and not isinstance(asked, bool):
        if not 0 <= asked < tokenizer["vocab_size"]:
            raise SpecError(
                f"pad={asked} is outside the vocabulary of {tokenizer['vocab_size']:,} ids",
                parameter="pad",
                remedy="an id of the vocabulary",
            )
        return asked
    if tokenizer["kind"] == "bytes" and asked is None:
        return int(tokenizer["eos"])
    own = tokenizer.get("chat", {}).get("special_tokens", {}).get("pad_token")
    names = (asked,) if asked is not None else (own, *_PAD_NAMES)
    found = next((int(vocab[name]) for name in names if isinstance(name, str) and name in vocab), None)
    if found is not None:
        return found
    raise SpecError(
        f"{asked!r} is no token of {tokenizer['name']}" if asked else f"{tokenizer['name']} has no token for padding",
        parameter="pad",
        remedy="pad= with a token or an id; any will do, because masks come from lengths",
    )
