"""From sources and settings to a plan, and from a kept plan back to its rows. Reads no tokens, and writes nothing."""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from batchwright.base.checks import at_least, one_of
from batchwright.base.errors import SpecError
from batchwright.batches.row_index import RowSpec
from batchwright.batches.samples import SampleRows
from batchwright.batches.settings import SETTINGS, Asked
from batchwright.batches.window import WindowRows
from batchwright.loaders.loader import Loader
from batchwright.loaders.stored import (
    StoreStream,
    open_samples,
    open_stores,
    plan_entry,
    refuse_conversations,
    refuse_other_tokenizer,
)
from batchwright.loaders.weights import Shares, caps_of, segments_of, shares_of, tempered
from batchwright.order.plan import Plan, PlanSource, Segments
from batchwright.order.windows import blocks_for
from batchwright.store.plans import find_plan, streams_for_plan
from batchwright.store.reader import Store
from batchwright.store.stream import TokenStream

__all__ = ["plan_sources"]

_POOL_BYTES = 1 << 30
"""Bytes of tokens in the windows of all sources together, where shuffle="pool" is not given pool_rows."""
_PAD_NAMES = ("<|pad|>", "<pad>", "<PAD>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>")

log: logging.Logger = logging.getLogger("batchwright")


# Members of a mixture: stores and loaders, opened and flattened into single sources


class Member(NamedTuple):
    """One single source of a mixture."""

    name: str
    stream: TokenStream
    row_tokens: int
    rows: RowSpec | None = None
    """Its rows of whole documents; None: its rows are windows over all of its tokens."""
    pad: int | None = None
    """The token that fills up such rows."""

    def open(self, *, seed: int = 0, recut: bool = True) -> WindowRows | SampleRows:
        if self.rows is not None:
            return open_samples(self.stream, self.rows, self.name)
        return WindowRows(self.stream, self.row_tokens, seed=seed, recut=recut, name=self.name)


def flatten(
    sources: Any, *, chunk_size: int | None, split: str, has_weights: bool = True
) -> tuple[list[Member], Shares]:
    """Every single source, and its share in its entry if the entry is a mixture.

    A store or a loader with several sources becomes name/source for each of them. A loader's own order, cursor and seed
    are not used. A single store without a name keeps the names of its sources. Without weights, a nested mixture by
    weights is refused, because its weights would be lost.
    """
    if not isinstance(sources, Mapping):
        members = _members_of(None, sources, chunk_size, split, has_weights)
        return members, dict.fromkeys(member.name for member in members)
    if not sources:
        raise SpecError("a mixture of no sources", parameter="sources", remedy="sources={'web': 'web.store', ...}")
    asked = chunk_size
    if chunk_size is None:  # the rows of stores are as long as those of loaders
        chunk_size = next((s.plan.row_tokens for s in sources.values() if _has_windows(s)), None)
    found: dict[str, Member] = {}
    shares: dict[str, float | None] = {}
    for name, source in sources.items():
        length = chunk_size
        if isinstance(source, Loader):
            length = asked
        members = _members_of(str(name), source, length, split, has_weights)
        for member, share in zip(members, _shares(source, members), strict=True):
            _add(found, shares, str(name), member, share)
    return list(found.values()), shares


def _add(found: dict[str, Member], shares: dict[str, float | None], entry: str, member: Member, share: Any) -> None:
    """Add a member under the name of its entry."""
    name = entry
    if share is not None:
        name = f"{entry}/{member.name}"
    if name in found:
        raise SpecError(f"two sources are called {name!r}", parameter="sources", source=name, remedy="rename one")
    if found:
        first = next(iter(found.values()))
        refuse_other_tokenizer(first.name, first.stream.store, name, member.stream.store)
    found[name], shares[name] = member._replace(name=name), share


def _shares(source: Any, members: list[Member]) -> list[float | None]:
    """The share of each member in its entry: by the weights of a loader, else by rows; None for a single member."""
    if len(members) == 1:
        return [None]
    weights = None
    if isinstance(source, Loader):
        weights = source.plan.weights
    if weights is None:
        weights = {member.name: float(member.open().num_rows) for member in members}
    total = sum(weights.values())
    return [weights.get(member.name, 0.0) / total for member in members]


def _has_windows(source: Any) -> bool:
    return isinstance(source, Loader) and not source.stream.has_lengths


def _members_of(name: Any, source: Any, chunk_size: int | None, split: str, has_weights: bool) -> list[Member]:
    if isinstance(source, Loader):
        return _members_of_loader(name, source, chunk_size, has_weights)
    if isinstance(source, list) and source and all(isinstance(member, Member) for member in source):
        return source  # opened already, as `batchwright plan` does
    if not isinstance(source, str | os.PathLike | Store):
        what = f"a {type(source).__name__} cannot be a source of a mixture"
        remedy = "sources={'web': 'web.store', ...}: stores, paths, or loaders over them, by name"
        raise SpecError(what, parameter="sources", source=name, remedy=remedy)
    if chunk_size is None:
        raise SpecError("how long is a row?", parameter="chunk_size", source=name, remedy="chunk_size=2048")
    store = source
    if not isinstance(store, Store):
        store = Store(store)
    refuse_conversations(store)
    streams = without_short([store.stream(stream, split) for stream in store.names], chunk_size)
    return [Member(stream.name, stream, chunk_size) for stream in streams]


def without_short(streams: list[TokenStream], chunk_size: int) -> list[TokenStream]:
    """The streams that have a row. If none has a row, all streams are returned, and opening one raises the error."""
    long_enough = [stream for stream in streams if stream.num_tokens > chunk_size]
    if not long_enough:
        return streams
    for short in streams:
        if short not in long_enough:
            log.warning(
                "source %r (%s) is left out: its %d tokens are too few for one row of %d",
                *(short.name, short.split, short.num_tokens, chunk_size),
            )
    return long_enough


def _members_of_loader(name: Any, loader: Loader[Any], chunk_size: int | None, has_weights: bool) -> list[Member]:
    plan, stream = loader.plan, loader.stream
    if not isinstance(stream, StoreStream):
        what = f"{name!r} does not read stores, so it has no row numbers to mix by"
        raise SpecError(what, parameter="sources", source=name, remedy="bake its data, and give the store")
    members = []
    for rows in stream.flow.stored:
        assert isinstance(rows.stream, TokenStream)
        member = Member(rows.name, rows.stream, rows.row_tokens)
        if isinstance(rows, SampleRows):
            member = member._replace(rows=rows.spec, pad=stream.flow.pad)
        elif chunk_size not in (None, rows.row_tokens):
            raise SpecError(
                f"chunk_size={chunk_size} was asked for, and the loader of {name!r} has rows of {plan.row_tokens} "
                "tokens",
                parameter="chunk_size",
                source=name,
                remedy=f"chunk_size={plan.row_tokens}, or leave it out",
            )
        members.append(member)
    _refuse_what_does_not_flatten(name, plan, has_weights)
    return members


def _refuse_what_does_not_flatten(name: Any, plan: Plan, has_weights: bool) -> None:
    for what, is_there in (
        ("weights, and this mixture has none", plan.weights is not None and not has_weights),
        ("weights that change", len(plan.schedule) > 1),
        ("amendments", bool(plan.amendments)),
        ("capped sources", bool(plan.max_epochs) or plan.exhausted != "repeat"),
    ):
        if is_there:
            raise SpecError(
                f"the loader of {name!r} has {what}, which cannot be a part of another mixture",
                parameter="sources",
                source=name,
                remedy="say it in the outer mixture, over the single sources",
            )


# Plans


def plan_sources(members: Sequence[Member], asked: Asked, shares: Shares | None = None, pad: int | None = None) -> Plan:
    """The plan of some sources, mixed by the settings. `shares` has every name that weights may use."""
    names = [member.name for member in members]
    split, seed, recut = asked.get("split", "train"), asked.get("seed", 0), asked.get("recut", True)
    shuffle = shuffle_of(asked["shuffle"], split)
    segments = _segments(members, asked, shares or dict.fromkeys(names))
    has_weights = segments[0][1] is not None
    ends = {name: asked[name] for name in ("num_rows", "num_tokens", "stop")}
    refuse_ends(has_weights, "this loader", "weights=, or epochs=", **ends)
    caps, exhausted = caps_of(asked["max_epochs"], names), asked.get("exhausted", "repeat")
    if not has_weights:
        refuse_caps("weights=, or epochs=", max_epochs=caps, exhausted=exhausted != "repeat")
    row_tokens = _row_tokens(members, pad)
    rows = [member.open(seed=seed, recut=recut) for member in members]
    _refuse_pairs_beside_others(members)
    plan = Plan(
        row_tokens=row_tokens,
        seed=seed,
        shuffle=shuffle,
        sources=tuple(source_of(each, row_tokens) for each in rows),
        segments=segments,
        recut=recut and split == "train",
        epoch_end=asked.get("epoch_end", {"val": "short"}.get(split, "drop")),
        pool=_pool(shuffle, asked["pool_rows"], [each.stream.dtype.itemsize * each.row_tokens for each in rows]),
        lanes=_lanes(asked, shuffle, is_capped=bool(caps) or exhausted != "repeat"),
        by=asked.get("by", "rows"),
        max_epochs=tuple(caps.items()),
        exhausted=exhausted,
        pad=_pad(members, row_tokens, pad),
    )
    ends_at = end_of_mixture(plan, **ends)
    if ends_at is None:
        return plan
    return replace(plan, num_rows=ends_at)


def open_plan(
    stores: Any, plan: Any, asked: Asked, names: Sequence[str] = (), *, pad_to: str = "max_length", **meant: Any
) -> StoreStream:
    """The stream of a kept plan. Settings that contradict the plan are refused."""
    made = find_plan(stores, plan)
    streams = streams_for_plan(stores, made)
    refuse_other_settings(made, asked, names, **meant)
    return open_stores(streams, made, asked, pad_to)


def source_of(rows: WindowRows | SampleRows, row_tokens: int) -> PlanSource:
    """Rows as a source of a plan whose rows have `row_tokens` tokens."""
    source = PlanSource(
        name=rows.name,
        split=rows.split,
        fingerprint=rows.fingerprint,
        num_rows=rows.num_rows,
        num_tokens=rows.num_tokens,
    )
    if rows.row_tokens != row_tokens:
        source = replace(source, row_tokens=rows.row_tokens)
    if isinstance(rows, SampleRows):
        source = replace(source, rows=plan_entry(rows.spec))
    return source


def refuse_other_settings(plan: Plan, asked: Asked, names: Sequence[str] = (), **meant: Any) -> None:
    """Refuse settings that contradict a plan. `names`: further sources that weights may name; `meant` as in
    `Asked`."""
    sources = [source.name for source in plan.all_sources]
    if asked["weights"] is not None:
        meant["weights"] = segments_of(asked["weights"], list(dict.fromkeys([*sources, *names])), shares_of(plan))
    if asked["max_epochs"] is not None:
        meant["max_epochs"] = caps_of(asked["max_epochs"], sources)
    if asked["pool_rows"] is not None:
        meant["pool_rows"] = math.prod(blocks_for(asked["pool_rows"]))
    meant["shuffle"] = shuffle_of(asked["shuffle"], plan.sources[0].split)
    asked.refuse_other_than(plan, **meant)


def shuffle_of(asked: str | bool | None, split: str) -> str:
    """The scope of the shuffle."""
    match asked:
        case None:
            return {"val": "none"}.get(split, "global")
        case True:
            return "global"
        case False:
            return "none"
    return one_of(("global", "pool", "none"), shuffle=asked)


def end_of_mixture(plan: Plan, *, num_rows: int | None, num_tokens: int | None, stop: str | None) -> int | None:
    """The number of rows after which a mixture ends; None for an endless mixture."""
    if num_rows is not None:
        return at_least(1, num_rows=num_rows)
    if stop is not None:
        first = one_of(("first_exhausted", "all_exhausted"), stop=stop) == "first_exhausted"
        return plan.order.exhausted_at(first=first)
    if num_tokens is None:
        return None
    at_least(plan.row_tokens, num_tokens=num_tokens)
    if plan.pad is None:
        return num_tokens // plan.row_tokens
    widths = [plan.tokens_per_row(source) for source in plan.all_sources]

    def tokens_in(rows: int) -> float:
        """Tokens of the first rows, without padding."""
        return sum(width * count for width, count in zip(widths, plan.order.given(rows), strict=True))

    return bisect_right(range(int(num_tokens // min(widths)) + 1), float(num_tokens), key=tokens_in) - 1


def refuse_ends(has_weights: bool, whose: str, remedy: str, **ends: Any) -> None:
    """Refuse ends without a mixture, and two ends at once."""
    given = [name for name, value in ends.items() if value is not None]
    if given and not has_weights:
        raise SpecError(f"{given[0]}= ends a mixture; {whose} has no weights", parameter=given[0], remedy=remedy)
    if len(given) > 1:
        raise SpecError(f"{' and '.join(given)} both end the stream", parameter=given[1], remedy="give one of them")


def _segments(members: Sequence[Member], asked: Asked, shares: Shares) -> Segments:
    """Requested weights of entries, by single source. Without weights, sizes are flattened by a temperature."""
    weights, temperature = asked["weights"], asked["temperature"]
    if weights is not None or temperature is None:
        return segments_of(weights, list(shares), shares, temperature=temperature)
    rows = {member.name: member.open() for member in members}
    sizes = {name: float(each.num_rows) for name, each in rows.items()}
    if asked["by"] == "tokens":
        sizes = {name: float(each.num_tokens) for name, each in rows.items()}
    return segments_of(tempered(sizes, temperature), list(shares))


def refuse_caps(remedy: str, **given: Any) -> None:
    """Refuse the given caps of a plan without weights."""
    for parameter, value in given.items():
        if value:
            what = "without weights every source is read equally often, so none can be capped"
            raise SpecError(what, parameter=parameter, remedy=remedy)


def _refuse_pairs_beside_others(members: Sequence[Member]) -> None:
    pairs = [member for member in members if member.rows is not None and member.rows.pairs]
    other = next((member for member in members if member not in pairs), None)
    if pairs and other is not None:
        what = f"{pairs[0].name!r} has preference pairs, and {other.name!r} has not: a batch is of one kind"
        raise SpecError(what, parameter="sources", source=other.name, remedy="mix pairs with pairs alone")


def _row_tokens(members: Sequence[Member], pad: int | None) -> int:
    """Tokens of a row. All sources have the same number, unless shorter rows are padded."""
    longest = max(members, key=lambda member: member.row_tokens)
    if pad is not None:
        at_least(0, pad=pad)
        return longest.row_tokens
    other = next((member for member in members if member.row_tokens != longest.row_tokens), None)
    if other is not None and all(member.rows is None for member in members):  # rows of samples are padded in any case
        what = f"{longest.name!r} has rows of {longest.row_tokens:,} tokens, {other.name!r} of {other.row_tokens:,}"
        remedy = "one chunk_size for all, or pad= with the token id that fills up the shorter rows"
        raise SpecError(what, parameter="chunk_size", source=other.name, remedy=remedy)
    return longest.row_tokens


def _pad(members: Sequence[Member], row_tokens: int, pad: int | None) -> int | None:
    """The token that fills up rows, if some rows are shorter than others."""
    of_samples = next((member.pad or 0 for member in members if member.rows is not None), None)
    if of_samples is None and all(member.row_tokens == row_tokens for member in members):
        return None
    if pad is None:
        return of_samples
    return pad


def pad_of(store: Store, asked: int | str | None) -> int:
    """The token that fills up rows of a store."""
    vocab: Mapping[str, int] = {}
    if not isinstance(asked, int):
        vocab = getattr(store.tokenizer, "vocab", {})
    return pad_token_of(store.manifest.tokenizer, vocab, asked)


def pad_token_of(tokenizer: Mapping[str, Any], vocab: Mapping[str, int], asked: int | str | None) -> int:
    """The id that fills up rows. Any id works, because masks come from lengths, but it must be chosen explicitly.

    `tokenizer` is the manifest's entry. For text, the end of a document is the default.
    """
    name = tokenizer["name"]
    if isinstance(asked, int):
        if asked < tokenizer["vocab_size"]:
            return asked
        what = f"pad={asked} is outside the vocabulary of {tokenizer['vocab_size']:,} ids"
        raise SpecError(what, parameter="pad", remedy="an id of the vocabulary")
    if asked is None and ("chat" not in tokenizer or tokenizer["kind"] == "bytes"):
        return int(tokenizer["eos"] or 0)
    if asked is not None:
        names, what = [asked], f"pad={asked!r} is no token of {name}"
    else:
        own = tokenizer["chat"]["special_tokens"].get("pad_token")
        names, what = [own, *_PAD_NAMES], f"{name} has no token for padding"
    found = [vocab[token] for token in names if token in vocab]
    if not found:
        remedy = "pad= with a token or an id; any will do, because masks come from lengths"
        raise SpecError(what, parameter="pad", remedy=remedy)
    return int(found[0])


def _pool(shuffle: str, pool_rows: int | None, row_bytes: list[int]) -> tuple[int, int] | None:
    """(rows of a block, blocks of a window) of each source. `row_bytes` are the sizes of their rows."""
    if shuffle == "pool":
        return blocks_for(pool_rows or max(_POOL_BYTES // sum(row_bytes), 1))
    if pool_rows is not None:
        what = f"pool_rows= is for shuffle='pool'; this is shuffle={shuffle!r}"
        raise SpecError(what, parameter="pool_rows", remedy="shuffle='pool', or leave out pool_rows=")
    return None


def _lanes(asked: Asked, shuffle: str, *, is_capped: bool) -> tuple[int, int] | None:
    """(lanes, rows of each lane in a batch)."""
    lanes, rows = asked["lanes"], asked.get("batch_size", SETTINGS["batch_size"].default)
    if lanes is None:
        return None
    if shuffle != "pool" or is_capped:
        what = f"lanes= is for shuffle='pool' without capped sources; this is shuffle={shuffle!r}"
        raise SpecError(what, parameter="lanes", remedy="shuffle='pool' without caps, or leave out lanes=")
    if rows % lanes:
        raise SpecError(
            f"batch_size={rows} does not divide by lanes={lanes}",
            parameter="lanes",
            remedy="as many lanes as there will be machines (or ranks), and a batch_size that is a multiple",
        )
    return lanes, rows // lanes
