"""Batches to look at: conversations, documents of a store, or the rows of a step, with their trained tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.batches.settings import Fields
from batchwright.batches.types import TraceRecord, TrainingBatch
from batchwright.cli.output import piece_in_words
from batchwright.loaders.stored import open_flow
from batchwright.order.plan import Plan
from batchwright.prepare.chat.spans import LossPolicy
from batchwright.store.plans import streams_for_plan
from batchwright.store.stream import TokenStream

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
    spans = {name: values[int(starts[number]) : int(starts[number + 1])] for name, values in fields.items()}
    policy = LossPolicy.of(loss or default_loss(is_pair=bool(spans["side"].any())))
    yield from rows_of_conversation(tokens, spans, policy, stream.name, words)


def default_loss(*, is_pair: bool) -> str:
    return "last" if is_pair else "assistant"


def rows_of_conversation(
    tokens: NDArray[Any], spans: Mapping[str, NDArray[Any]], policy: LossPolicy, source: str, words: str = ""
) -> Iterator[DocumentRow]:
    """A conversation, or the two of a preference pair, by the fields of its spans."""
    weights = policy.weights(np.array([0, len(spans["stop"])]), dict(spans))
    counts = np.diff(spans["stop"], prepend=0)
    weight, side, role, turn = (
        np.repeat(values, counts) for values in (weights, spans["side"], spans["role"], spans["turn"])
    )
    sides: tuple[str | None, ...] = (None,)
    if side.any():
        sides = _SIDES
    for which, name in enumerate(sides):
        mine = np.flatnonzero(side == which)
        learned = weight[mine] * _can_be_predicted(mine)
        yield DocumentRow(words, source, name, tokens[mine], learned, role[mine], turn[mine])


def _can_be_predicted(tokens: NDArray[Any]) -> NDArray[np.float32]:
    return (np.arange(len(tokens)) > 0).astype(np.float32)


def batch_of_documents(rows: Sequence[DocumentRow]) -> TrainingBatch:
    lengths = np.array([len(row.tokens) for row in rows], np.int64)
    is_real = np.arange(lengths.max(initial=0)) < lengths[:, None]

    def padded(name: str, fill: int, dtype: type) -> NDArray[Any]:
        out: NDArray[Any] = np.full(is_real.shape, fill, dtype)
        if rows:
            out[is_real] = np.concatenate([getattr(row, name) for row in rows])
        return out

    def ahead(name: str, fill: int, dtype: type) -> NDArray[Any]:
        """The field of the token that each position predicts."""
        return np.append(padded(name, fill, dtype)[:, 1:], np.full((len(rows), 1), fill, dtype), axis=1)

    metadata: dict[str, Any] = {
        "source": [row.source for row in rows],
        "role": ahead("role", -1, np.int64),
        "turn": ahead("turn", -1, np.int64),
    }
    sides, origins = [row.side or "" for row in rows], [[row.words] for row in rows]
    if any(sides):
        metadata["side"] = sides
    if any(words for (words,) in origins):
        metadata["origins"] = origins
    weight = ahead("weight", 0, np.float32)
    targets = np.where(weight != 0, ahead("tokens", 0, np.int64), -100)
    tokens = padded("tokens", 0, np.int64)
    return TrainingBatch(tokens, is_real.astype(np.int64), None, weight, metadata, targets=targets)


def batch_of_step(where: str, plan: Plan, rows: Sequence[Sequence[TraceRecord]]) -> TrainingBatch:
    """The rows of a step, each given by the pieces that `trace` finds in it, as a loader would hand them over.

    One sample in each row: as wide as the longest.
    """
    flow = open_flow(streams_for_plan(where, plan), plan, Fields(segment_ids=True, roles=True).with_defaults(False))
    positions = np.array([row[0].position for row in rows], np.int64)
    block = flow.at(positions, lambda count, width: np.empty((count, width), np.int64))
    tokens, extra = block.tokens, dict(block.extra)
    ones = np.ones((len(tokens), tokens.shape[1] - 1), np.int64)
    attention = extra.get("attention_mask", ones)
    width = attention.shape[1]
    is_packed = any(dict(source.rows).get("packing") for source in plan.all_sources)
    if flow.has_samples and not is_packed:
        width = int(np.flatnonzero(attention.any(axis=0)).max(initial=0)) + 1
    segments = extra.get("segment_ids")
    if segments is not None:
        segments = segments[:, :width]
    metadata = _places(rows, positions, flow.sequences)
    metadata |= {name: values[:, 1 : width + 1] for name, values in block.shown.items()}
    return TrainingBatch(
        tokens[:, :-1][:, :width],
        attention[:, :width],
        None,
        extra.get("loss_mask", ones.astype(np.float32))[:, :width],
        metadata,
        targets=extra.get("targets", tokens[:, 1:])[:, :width],
        segment_ids=segments,
    )


def _places(rows: Sequence[Sequence[TraceRecord]], positions: NDArray[np.int64], per_row: int) -> dict[str, Any]:
    """Metadata of rows that are a sequence each, or a preference pair of one document for each side."""
    metadata: dict[str, Any] = {
        "source": [row[0].source for row in rows for _ in range(per_row)],
        "position": np.repeat(positions, per_row),
        "epoch": [row[0].epoch for row in rows for _ in range(per_row)],
    }
    origins = [[piece_in_words(piece) for piece in row] for row in rows]
    if per_row > 1:
        metadata["side"] = list(_SIDES) * len(rows)
        origins = [[origin] for of_row in origins for origin in of_row]
    return {**metadata, "origins": origins}
