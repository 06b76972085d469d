"""Conversations: rendered by a chat template, one or several in a row, with loss where it belongs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from batchwright.assemble.rows import PACKINGS, RowSpec
from batchwright.assemble.samples import SampleRows
from batchwright.errors import SpecError
from batchwright.loaders.door import StoreDataLoader, check_tokenizer, padding_of
from batchwright.loaders.planning import (
    Member,
    plan_members,
    refuse_other_settings,
    rounded_pool,
    segments_of,
    shuffle_of,
)
from batchwright.plan import Segments
from batchwright.plans import find_plan, streams_for_plan
from batchwright.spec import at_least, local_path, one_of
from batchwright.store.layout import is_store
from batchwright.store.reader import Store
from batchwright.typing import (
    Balance,
    Data,
    EpochEnd,
    Framework,
    Mesh,
    OnError,
    Packing,
    PadTo,
    PlanLike,
    ShardingLike,
    Split,
    StoreLike,
    TokenizerLike,
    WeightsLike,
)

__all__ = ["ConversationDataLoader", "members_of", "pad_token_of"]

log: logging.Logger = logging.getLogger("batchwright")

_TRUNCATIONS = ("drop", "keep_start", "keep_end", "drop_oldest", "raise")
_PAD_NAMES = ("<|pad|>", "<pad>", "<PAD>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>")
_OF_RAW_FILES: dict[str, Any] = {
    "chat_template": None,
    "format": None,
    "columns": None,
    "roles": None,
    "template_args": None,
    "holdout": None,
    "on_error": "raise",
}
"""Settings for raw files, and what means that they were not given."""


class ConversationDataLoader(StoreDataLoader):
    """Conversations as batches: from a file, rows in memory, or a store that was baked with `bw.chat`.

    ConversationDataLoader("sft.jsonl", tokenizer, 2048)                           the tokenizer's own template
    ConversationDataLoader("sft.jsonl", tokenizer, 2048, "chatml", packing="best_fit")
    ConversationDataLoader("sft.store", max_length=4096, loss="last")              other masks over the same store
    ConversationDataLoader("pairs.jsonl", tokenizer, 2048)                         rows 0::2 chosen, 1::2 rejected

    `loss` says which tokens are learned: "assistant" turns (default), the "last" one, "all", or roles such as
    "user+assistant"; messages with "weight" or "train" say so themselves. The end-of-turn token is learned too, unless
    end_of_turn=False. Conversations over `max_length` tokens are dropped, unless `truncation` is "keep_start",
    "keep_end", "drop_oldest" (turns) or "raise".

    `packing` ("best_fit", "first_fit", "greedy") puts several conversations into a row; they do not see each other.
    Otherwise a batch is as wide as `pad_to` says: its "longest" row, "max_length", a multiple, or the next of a list.

    `batch_tokens` in place of batch_size cuts batches by tokens, padding included, which none exceeds. `balance` shares
    rows among ranks by their cost.
    """

    def __init__(
        self,
        path: StoreLike | Data,
        tokenizer: TokenizerLike | None = None,
        max_length: int | None = None,
        chat_template: str | None = None,
        *,
        loss: str | Sequence[str] | None = None,
        end_of_turn: bool = True,
        truncation: str | None = None,
        packing: Packing | None = None,
        pad_to: PadTo | None = None,
        padding_side: str = "right",
        pad: int | str | None = None,
        format: str | None = None,
        columns: Mapping[str, str | None] | None = None,
        roles: Mapping[str, str] | None = None,
        template_args: Mapping[str, Any] | None = None,
        holdout: float | None = None,
        check: bool = True,
        batch_size: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Mesh | None = None,
        framework: Framework | None = None,
        shuffle: str | bool | None = None,
        pool_rows: int | None = None,
        epochs: int | None = 1,
        plan: PlanLike | None = None,
        weights: WeightsLike | None = None,
        num_rows: int | None = None,
        num_tokens: int | None = None,
        stop: str | None = None,
        split: Split = "train",
        epoch_end: EpochEnd | None = None,
        position_ids: bool | None = None,
        segment_ids: bool | None = None,
        cu_seqlens: bool | None = None,
        show_roles: bool = False,
        uneven: bool = False,
        sharding: ShardingLike = "contiguous",
        prefetch: int | None = None,
        workers: int = 0,
        on_error: OnError = "raise",
        batch_tokens: int | None = None,
        row_multiple: int | None = None,
        balance: Balance | None = None,
        equal_counts: bool = True,
    ) -> None:
        """Data: `path` is a store, or raw files or rows with a `tokenizer`. `split` is "train" or "val"; of raw data,
        `holdout` is the share that "val" reads. `check` looks at the first rows for what would be trained wrong.

        Conversations: `chat_template` with `template_args`, `format`, `columns` and `roles` as in `bw.chat`; `on_error`
        as in `bake`.

        Rows: `max_length` tokens at most, else `truncation`; `packing`; padded with the token `pad` on `padding_side`
        ("right" or "left"), as wide as `pad_to` says. `loss` and `end_of_turn` say what is learned.

        Order: `seed`; `shuffle` is "global", "pool" (inside windows of `pool_rows`) or "none". `plan` gives exactly the
        rows of another run.

        Length: `epochs` (None never ends). `weights` mix the sources; then `num_rows`, `num_tokens` or `stop`
        ("first_exhausted", "all_exhausted") end the stream. `epoch_end` says what an epoch's last, partial batch is:
        "drop", "short", "pad" or "wrap".

        Batches: `batch_size` rows or `batch_tokens` tokens, in multiples of `row_multiple` rows, as arrays of
        `framework`. `position_ids`, `segment_ids` and `cu_seqlens` say which conversation a token is of; `show_roles`
        says who speaks.

        Ranks: `rank` and `world_size`, or a torch DeviceMesh as `mesh`; by default what the launcher says. `sharding`
        says which rows of a batch a rank gets: "contiguous", "strided", or a function. `uneven=True` lets
        ranks have different numbers of rows. `balance` gives ranks equal work: a row costs its tokens (True), or
        a * length + b * length ** 2 for (a, b). Ranks get equal numbers of rows unless `equal_counts=False`.

        Speed: `prefetch` batches are made ahead; `workers` processes make them.
        """
        one_of(("train", "val"), split=split)
        drops_are_meant, truncation = truncation is not None, truncation or "drop"
        one_of(_TRUNCATIONS, truncation=truncation)
        of_raw_files = {
            "chat_template": chat_template,
            "format": format,
            "columns": columns,
            "roles": roles,
            "template_args": template_args,
            "holdout": holdout,
            "on_error": on_error,
        }
        if max_length is not None:
            at_least(2, max_length=max_length)
        elif plan is None:
            raise SpecError("how long may a conversation be?", parameter="max_length", remedy="max_length=2048")
        keep_newest = max_length if truncation == "drop_oldest" else None
        store = _store_of(path, tokenizer, keep_newest, of_raw_files)
        _refuse_text(store)
        _refuse_other_length(store, truncation, max_length)
        if plan is not None:
            made = find_plan(store, plan)
            streams = streams_for_plan(store, made)
            rows = dict(made.sources[0].rows)
            planned = rows.get("loss")
            asked = None if loss is None else _policy(loss, end_of_turn)
            fills = None if pad is None else _pad_of(store, pad)
            refuse_other_settings(
                made,
                max_length=(max_length, None, made.row_tokens),
                loss=(asked, None, planned),
                end_of_turn=(end_of_turn, True, _learns_ends(planned)),
                truncation=(_stored_truncation(truncation), "drop", rows.get("truncation")),
                packing=(packing, None, rows.get("packing")),
                pad=(fills, None, made.pad),
                seed=(seed, 0, made.seed),
                shuffle=(None if shuffle is None else shuffle_of(shuffle, split), None, made.shuffle),
                pool_rows=(rounded_pool(pool_rows), None, made.pool_rows),
                weights=(None if weights is None else segments_of(weights, store.names), None, made.schedule),
                num_rows=(num_rows, None, made.end_rows),
                num_tokens=(num_tokens, None, "no record of what it was made from"),
                stop=(stop, None, "no record of what it was made from"),
                split=(split, "train", made.sources[0].split),
                epoch_end=(epoch_end, None, made.epoch_end),
            )
        else:
            assert max_length is not None
            segments = segments_of(weights, store.names)
            members = members_of(
                store,
                max_length,
                split=split,
                segments=segments,
                loss=loss,
                end_of_turn=end_of_turn,
                truncation=truncation,
                packing=packing,
                pad=pad,
            )
            streams = {member.name: member.stream for member in members}
            made = plan_members(
                members,
                split=split,
                seed=seed,
                shuffle=shuffle,
                pool_rows=pool_rows,
                segments=segments,
                num_rows=num_rows,
                num_tokens=num_tokens,
                stop=stop,
                epoch_end=epoch_end,
            )
        self.store = store
        is_packed = any(dict(source.rows).get("packing") for source in made.sources)
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
            padding=padding_of(
                ("max_length" if is_packed else "longest") if pad_to is None else pad_to,
                padding_side,
                made.row_tokens,
            ),
            read_ahead=False,
            epochs=epochs,
            framework=framework,
            uneven=uneven,
            sharding=sharding,
            prefetch=prefetch,
            workers=workers,
            batch_tokens=batch_tokens,
            row_multiple=row_multiple,
            balance=balance,
            equal_counts=equal_counts,
        )
        self._say_what_is_left_out()
        if check and plan is None:  # a plan was checked when it was made
            from batchwright.loaders.chat_checks import refuse_bad

            refuse_bad(self, drops_are_meant=drops_are_meant)

    def _say_what_is_left_out(self) -> None:
        for rows in self._flow.stored:
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


def members_of(
    store: Store,
    max_length: int,
    *,
    split: str = "train",
    segments: Segments = ((0, None),),
    loss: str | Sequence[str] | None = None,
    end_of_turn: bool = True,
    truncation: str = "drop",
    packing: str | None = None,
    pad: int | str | None = None,
) -> list[Member]:
    """The conversations of a store, as a plan takes them: of all sources, or of those that have weights."""
    one_of(("train", "val"), split=split)
    one_of(_TRUNCATIONS, truncation=truncation)
    at_least(2, max_length=max_length)
    _refuse_other_length(store, truncation, max_length)
    used = {name for _, pairs in segments for name, _ in pairs or ()} or set(store.names)
    fills = _pad_of(store, pad)
    members = []
    for name in [name for name in store.names if name in used]:
        stream = store.stream(name, split)
        pairs = stream.has_spans and bool(stream.token_spans()[1]["side"].any())
        asked = ("last" if pairs else "assistant") if loss is None else loss
        spec = RowSpec(
            row_tokens=max_length,
            packing=None if packing is None else one_of(PACKINGS, packing=packing),
            truncation=_stored_truncation(truncation),
            loss=_policy(asked, end_of_turn),
            pairs=pairs,
        )
        members.append(Member(name, stream, max_length, rows=spec, pad=fills))
    return members


def _policy(loss: str | Sequence[str], end_of_turn: bool) -> str:
    """A loss policy as plans write it."""
    from batchwright.prepare.chat.policy import LossPolicy  # loaders of plain text do without

    return str(LossPolicy.of(loss, end_of_turn))


def _learns_ends(policy: str | None) -> bool:
    from batchwright.prepare.chat.policy import LossPolicy  # loaders of plain text do without

    return policy is None or LossPolicy.parse(policy).end_of_turn


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


def _refuse_other_length(store: Store, truncation: str, max_length: int | None) -> None:
    baked = store.manifest.tokenizer.get("chat", {}).get("keep_newest")
    if (truncation == "drop_oldest" or baked) and max_length is not None and baked != max_length:
        raise SpecError(
            f"{store.path} was baked with keep_newest={baked}, and max_length={max_length} asks for another",
            parameter="max_length",
            file=store.path,
            remedy=f"bw.chat(..., keep_newest={max_length}) in its recipe, or the raw files in place of the store",
        )


def _store_of(path: Any, tokenizer: Any, keep_newest: int | None, of_raw_files: dict[str, Any]) -> Store:
    """The store to read. Raw files and rows in memory are baked into a cache, once."""
    if isinstance(path, Store) or (isinstance(path, str | os.PathLike) and is_store(local_path(path=path))):
        for name, value in of_raw_files.items():
            if value != _OF_RAW_FILES[name]:
                raise SpecError(
                    f"{name}={value!r} is for raw files, and {path} is a store",
                    parameter=name,
                    remedy=f"leave out {name}=, or say it when baking: bw.chat(...)",
                )
        store = path if isinstance(path, Store) else Store(path)
        if tokenizer is not None:
            check_tokenizer(store, tokenizer)
        return store
    if tokenizer is None:
        raise SpecError(
            "raw conversations need a tokenizer", parameter="tokenizer", remedy="tokenizer='tokenizer.json', or 'bytes'"
        )
    from batchwright.prepare.chat.step import chat
    from batchwright.streaming import bake_conversations_to_cache

    given = dict(of_raw_files)
    on_error, holdout = given.pop("on_error"), given.pop("holdout")
    step = chat(tokenizer, given.pop("chat_template"), keep_newest=keep_newest, **given)
    return bake_conversations_to_cache(path, step, on_error, holdout)


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
