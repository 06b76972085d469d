"""Batches to look at: conversations, documents of a store, or the rows of a step, with their trained tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.batches.settings import Fields
from batchwright.batches.types import TraceRecord, TrainingBatch
from batchwright.loaders.stored import open_flow
from batchwright.order.plan import Plan
from batchwright.prepare.chat.policy import LossPolicy
from batchwright.store.plans import streams_for_plan
from batchwright.store.stream import TokenStream

__all__ = ["DocumentRow", "batch_of_documents", "batch_of_step", "rows_of_conversation", "rows_of_document"]

_SIDES = ("chosen", "rejected")


class DocumentRow(NamedTuple):
    """A document, or one side of a preference pair: what each of its tokens is."""

    words: str
    """Where it is from, for a line of its own; empty where `source` says it."""
    source: str
    side: str | None
    tokens: NDArray[Any]
    weight: NDArray[np.float32]
    role: NDArray[np.int64]
    turn: NDArray[np.int64]


def rows_of_document(stream: TokenStream, number: int, words: str, loss: str | None = None) -> Iterator[DocumentRow]:
    """A document with the weights that a loss policy gives its tokens. Of text, every token that can be predicted."""
    tokens = np.asarray(stream.document(number).tokens)
    if not stream.has_spans:
        nothing = np.full(len(tokens), -1)
        yield DocumentRow(words, stream.name, None, tokens, _can_be_predicted(tokens), nothing, nothing)
        return
    starts, fields = stream.token_spans()
    first, last = int(starts[number]), int(starts[number + 1])
    spans = {name: values[first:last] for name, values in fields.items()}
    is_pair = bool(spans["side"].any())
    policy = LossPolicy.parse(loss or ("last" if is_pair else "assistant"))
    yield from rows_of_conversation(tokens, spans, policy, stream.name, words)


def rows_of_conversation(
    tokens: NDArray[Any], spans: Mapping[str, NDArray[Any]], policy: LossPolicy, source: str, words: str = ""
) -> Iterator[DocumentRow]:
    """A conversation, or the two of a preference pair, by the fields of its spans."""
    is_pair = bool(spans["side"].any())
    weights = policy.weights(np.array([0, len(spans["stop"])]), dict(spans))
    counts = np.diff(spans["stop"], prepend=0)
    weight, side, role, turn = (
        np.repeat(values, counts) for values in (weights, spans["side"], spans["role"], spans["turn"])
    )
    for which, name in enumerate(_SIDES if is_pair else (None,)):
        mine = np.flatnonzero(side == which)
        learned = weight[mine] * _can_be_predicted(mine)
        yield DocumentRow(words, source, name, tokens[mine], learned, role[mine], turn[mine])


def _can_be_predicted(tokens: NDArray[Any]) -> NDArray[np.float32]:
    return (np.arange(len(tokens)) > 0).astype(np.float32)


def batch_of_documents(rows: Sequence[DocumentRow]) -> TrainingBatch:
    length = max((len(row.tokens) for row in rows), default=0)

    def padded(name: str, fill: int, dtype: type) -> NDArray[Any]:
        out: NDArray[Any] = np.full((len(rows), length), fill, dtype)
        for number, row in enumerate(rows):
            out[number, : len(row.tokens)] = getattr(row, name)
        return out

    def ahead(name: str, fill: int, dtype: type) -> NDArray[Any]:
        """What is said of the token that each position predicts."""
        return np.append(padded(name, fill, dtype)[:, 1:], np.full((len(rows), 1), fill, dtype), axis=1)

    tokens, weight = padded("tokens", 0, np.int64), ahead("weight", 0, np.float32)
    is_real = np.arange(length) < np.array([len(row.tokens) for row in rows])[:, None]
    metadata = {
        "source": [row.source for row in rows],
        "role": ahead("role", -1, np.int64),
        "turn": ahead("turn", -1, np.int64),
        **({"side": [row.side or "" for row in rows]} if any(row.side for row in rows) else {}),
        **({"origins": [[row.words] for row in rows]} if any(row.words for row in rows) else {}),
    }
    targets = np.where(weight != 0, ahead("tokens", 0, np.int64), -100)
    return TrainingBatch(tokens, is_real.astype(np.int64), None, weight, metadata, targets=targets)


def batch_of_step(where: str, plan: Plan, rows: Sequence[Sequence[TraceRecord]]) -> TrainingBatch:
    """The rows of a step, each given by the pieces that `trace` finds in it, as a loader would hand them over.

    One sample in each row: as wide as the longest.
    """
    flow = open_flow(streams_for_plan(where, plan), plan, Fields(segment_ids=True, roles=True).with_defaults(False))
    positions = np.array([row[0].position for row in rows], np.int64)
    block = flow.at(positions, lambda count, width: np.empty((count, width), np.int64))
    per, extra = flow.sequences, dict(block.extra)
    tokens = block.tokens
    ones = np.ones((len(tokens), tokens.shape[1] - 1), np.int64)
    attention, targets = extra.pop("attention_mask", ones), extra.pop("targets", tokens[:, 1:])
    is_packed = not flow.has_samples or any(dict(source.rows).get("packing") for source in plan.all_sources)
    width = attention.shape[1] if is_packed else int(np.flatnonzero(attention.any(axis=0)).max(initial=0)) + 1
    metadata = {
        "source": [row[0].source for row in rows for _ in range(per)],
        "position": np.repeat(positions, per),
        **({"side": list(_SIDES) * len(rows)} if per > 1 else {}),
        **{name: values[:, 1 : width + 1] for name, values in block.shown.items()},
        "origins": [
            origins
            for row in rows
            for origins in ([[_origin(p)] for p in row] if per > 1 else [[_origin(p) for p in row]])
        ],
    }
    mask = extra.pop("loss_mask", ones.astype(np.float32))
    segments = extra.get("segment_ids")
    return TrainingBatch(
        tokens[:, :-1][:, :width],
        attention[:, :width],
        None,
        mask[:, :width],
        metadata,
        targets=targets[:, :width],
        segment_ids=None if segments is None else segments[:, :width],
    )


def _origin(piece: TraceRecord) -> str:
    start, stop = piece.document_span
    return f"{piece.file}, row {piece.row:,}, tokens {start:,}-{stop:,}"
