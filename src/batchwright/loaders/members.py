"""The members of a mixture: stores and loaders of this package, opened and flattened into single sources."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from batchwright.base.errors import SpecError
from batchwright.batches.row_index import RowSpec
from batchwright.batches.samples import SampleRows
from batchwright.batches.window import WindowRows
from batchwright.loaders.loader import Loader
from batchwright.loaders.packed import open_samples
from batchwright.loaders.stored import StoreStream, refuse_conversations, refuse_other_tokenizer
from batchwright.loaders.weights import Shares
from batchwright.order.plan import Plan
from batchwright.store.reader import Store
from batchwright.store.stream import TokenStream

__all__ = ["Member", "flatten", "without_short"]

log: logging.Logger = logging.getLogger("batchwright")


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
        raise SpecError(
            f"a {type(source).__name__} cannot be a source of a mixture",
            parameter="sources",
            source=name,
            remedy="sources={'web': 'web.store', ...}: stores, paths, or loaders over them, by name",
        )
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
        raise SpecError(
            f"{name!r} does not read stores, so it has no row numbers to mix by",
            parameter="sources",
            source=name,
            remedy="bake its data, and give the store",
        )
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
