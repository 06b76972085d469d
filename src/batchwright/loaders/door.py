"""What the doors over stores have in common: rows of some streams by a plan, kept with its stores, read ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.assemble.batch import Fields, Padding
from batchwright.deliver.ranks import find_ranks
from batchwright.errors import SpecError
from batchwright.loaders.base import DataLoader
from batchwright.loaders.planning import DEFAULT_BATCH, open_flow
from batchwright.loaders.read_ahead import start_read_ahead
from batchwright.plan import Plan
from batchwright.spec import at_least, one_of
from batchwright.store.reader import Store
from batchwright.store.stream import TokenStream

__all__ = ["StoreDataLoader", "check_tokenizer", "padding_of"]


class StoreDataLoader(DataLoader):
    """Rows of token streams, in the order of a plan. Opened through one of the doors."""

    def __init__(
        self,
        streams: Mapping[str, TokenStream],
        plan: Plan,
        *,
        batch_size: int | None,
        rank: int | None,
        world_size: int | None,
        mesh: Any,
        position_ids: bool | None,
        segment_ids: bool | None,
        read_ahead: bool | None,
        prefetch: int | None,
        border_loss: bool = True,
        cu_seqlens: bool | None = None,
        roles: bool = False,
        padding: Padding | None = None,
        **delivery: Any,
    ) -> None:
        """`batch_size`: where it is not given, what the plan's run had. `delivery` is what DataLoader takes.

        What says which sample a token is of (position_ids, segment_ids, cu_seqlens) is given where rows are packed, if
        nothing else is asked.
        """
        if batch_size is None and delivery.get("batch_tokens") is None:
            batch_size = plan.steps[-1][2] if len(plan.runs) == 1 else DEFAULT_BATCH
        is_packed = any(dict(source.rows).get("packing") for source in plan.all_sources)
        fields = Fields(
            position_ids=is_packed if position_ids is None else position_ids,
            segment_ids=is_packed if segment_ids is None else segment_ids,
            border_loss=border_loss,
            cu_seqlens=is_packed if cu_seqlens is None else cu_seqlens,
            roles=roles,
        )
        super().__init__(
            open_flow(streams, plan, fields, padding),
            plan,
            batch_size=batch_size,
            ranks=find_ranks(rank, world_size, mesh),
            prefetch=prefetch or 0,
            **delivery,
        )
        self._keep_plan()
        start_read_ahead(self, read_ahead)


def padding_of(pad_to: Any, padding_side: str, row_tokens: int) -> Padding:
    """What `pad_to` and `padding_side` ask for.

    >>> padding_of([512, 128], "right", 2048)
    Padding(to=(128, 512), left=False)
    """
    left = one_of(("right", "left"), padding_side=padding_side) == "left"
    if pad_to in ("longest", "max_length"):
        return Padding(pad_to, left)
    if isinstance(pad_to, int) and not isinstance(pad_to, bool):
        return Padding(at_least(1, pad_to=pad_to), left)
    if isinstance(pad_to, list | tuple) and pad_to:
        buckets = tuple(sorted(at_least(1, pad_to=width) for width in pad_to))
        if buckets[-1] > row_tokens:
            raise SpecError(
                f"a bucket of {buckets[-1]:,} tokens is longer than any row, which has {row_tokens:,} at most",
                parameter="pad_to",
                remedy=f"buckets of {row_tokens:,} or less",
            )
        return Padding(buckets, left)
    raise SpecError(
        f"pad_to={pad_to!r} is no width",
        parameter="pad_to",
        remedy="'longest', 'max_length', a number that widths are multiples of, or a list of widths",
    )


def check_tokenizer(store: Store, tokenizer: Any) -> None:
    """Refuse a tokenizer that is not the one of the store."""
    from batchwright.prepare.tokenizers import resolve_tokenizer

    resolved = resolve_tokenizer(tokenizer, vocab_size=store.manifest.tokenizer["vocab_size"])
    if resolved.kind == "chars" and resolved.chars is None:
        matches = store.manifest.tokenizer["kind"] == "chars"
    else:
        matches = resolved.fingerprint == store.manifest.tokenizer["fingerprint"]
    if not matches:
        raise SpecError(
            f"this tokenizer ({resolved.name}) is not the one that {store.path} was baked with",
            parameter="tokenizer",
            baked_with=store.manifest.tokenizer["name"],
            remedy="leave tokenizer= out, or bake again with this one",
        )
