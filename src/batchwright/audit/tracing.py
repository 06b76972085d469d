"""Traces in both directions: from a step to its documents, files and rows, and from a document to its steps."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.base.errors import PlanError, SourceError
from batchwright.base.words import suggest
from batchwright.batches.flow import Flow
from batchwright.batches.samples import SampleRows
from batchwright.batches.types import TraceRecord
from batchwright.batches.window import WindowRows
from batchwright.loaders.stored import open_flow
from batchwright.order.plan import Plan
from batchwright.order.sharding import sharding_of
from batchwright.order.split import Cut, position_of_step, step_of_position
from batchwright.store.plans import find_plan, streams_for_plan, with_state_read
from batchwright.store.reader import Store
from batchwright.store.stream import TokenStream
from batchwright.typing import PlanLike, ShardingLike, StoreLike

__all__ = ["find", "trace"]

RankOf = Callable[[int, int], int]
"""(row of a batch, rows of that batch) -> rank."""

_LINE_CHUNK = 4096
"""Tokens between the places at which newlines of a document are counted."""


def trace(
    store: StoreLike,
    plan: PlanLike,
    *,
    step: int | None = None,
    position: int | None = None,
    batch_size: int | None = None,
    world_size: int | None = None,
    sharding: ShardingLike | None = None,
) -> Iterator[TraceRecord]:
    """The contents of a step (or of one position) of a run: a record for each piece of a document, in reading order.

    `store` is any store that the plan reads. `plan` is a plan, its fingerprint or file, a state, or a loader;
    `batch_size` is needed if it has none. The spans of a row's records tile its window of chunk_size + 1 tokens (the
    last one is only a target). Ranks are those of the run if `plan` is a plan object or a loader. A plan's file and a
    state do not hold them, so pass `world_size` and `sharding`.
    """
    found = find_plan(store, plan, batch_size=batch_size)
    if (step is None) == (position is None):
        raise PlanError("trace takes step= or position=", remedy="trace(store, plan, step=100)")
    if step is not None:
        first, rows = position_of_step(found.steps, step, **found.epoch_spec)
        cut = Cut(rows_per_step=rows, **found.epoch_spec)
        first = cut.settle(first)
        positions = cut.positions(first, cut.real_rows(first))  # the rest only fills the batch up
    else:
        assert position is not None
        if position < 0:
            raise PlanError(f"position {position} does not exist", position=position, remedy="a position of 0 or more")
        positions = np.array([position])
    _refuse_what_is_past_the_end(found, int(positions[-1]))
    flow = open_flow(streams_for_plan(store, found), found)
    return _records(flow, found, positions, _ranks_of(found, world_size, sharding))


def find(
    store: StoreLike,
    plan: PlanLike,
    *,
    file: str | os.PathLike[str],
    row: int | None = None,
    batch_size: int | None = None,
    until: int | None = None,
) -> list[TraceRecord]:
    """Every use of a document (`row` of `file`, or all rows) in a run, in the order of the run.

    `store`, `plan` and `batch_size` are as in `trace`.

    The uses are found by inverting the order, without a scan. `until` is the end of the search. The default is one
    epoch, or the position of the given state or loader if that is later. For an endless mixture it is the first epoch
    of each source.
    """
    plan = with_state_read(plan)
    found = find_plan(store, plan, batch_size=batch_size)
    flow = open_flow(streams_for_plan(store, found), found)
    # An endless mixture has no epoch, so the first epoch of each source is used.
    first_epochs = until is None and found.epoch_rows is None
    if until is None:
        epochs = found.epoch_spec["epochs"]
        until = max(epochs.skips.position(epochs.end_of(1) or 0), _position_of(plan))
    numbers = _file_numbers([_stream(rows).store for rows in flow.stored], os.fspath(file))
    uses: set[tuple[int, int]] = set()
    for which, rows in enumerate(flow.stored):
        stream = _stream(rows)
        documents = [document for number in numbers[stream.store.path] for document in stream.find(number, row)]
        in_epochs = range(max(flow.order.epochs_begun(which, until), int(first_epochs)))
        for document, epoch in itertools.product(documents, in_epochs):
            found_at = _positions_of(flow, which, document, epoch)
            uses |= {(at, document) for at in found_at if at < until or (first_epochs and epoch == 0)}
    positions = np.array(sorted({position for position, _ in uses}), np.int64)
    return list(_records(flow, found, positions, _ranks_of(found), only=uses))


def _position_of(plan: Any) -> int:
    """The position of a state or a loader."""
    if isinstance(plan, dict):
        return int(plan.get("position", 0))
    return int(getattr(plan, "position", 0))


def _positions_of(flow: Flow, source: int, document: int, epoch: int) -> list[int]:
    """The positions of the rows of an epoch that have a part of a document."""
    rows = flow.stored[source]
    touching = rows.rows_touching(*_stream(rows).document_span(document), epoch)
    if not touching:
        return []
    return list(flow.order.positions(source, touching, epoch).tolist())


def _stream(rows: WindowRows | SampleRows) -> TokenStream:
    assert isinstance(rows.stream, TokenStream)
    return rows.stream


def _refuse_what_is_past_the_end(plan: Plan, position: int) -> None:
    end = plan.epoch_spec["epochs"].limit
    if end is not None and position >= end:
        what = f"position {position:,} does not exist: the stream of plan {plan.fingerprint} ends at {end:,}"
        raise PlanError(what, remedy=f"a position below {end:,}")


def _file_numbers(stores: list[Store], wanted: str) -> dict[Path, list[int]]:
    """The numbers of a raw file in each store, one for each ingredient that has the file."""
    paths = {store.path: [str(path) for path in store.files["path"].to_pylist()] for store in stores}
    known = {path for of_store in paths.values() for path in of_store}
    found = {path for path in known if path == wanted or os.path.abspath(path) == os.path.abspath(wanted)}
    if not found:
        found = {path for path in known if f"{os.sep}{path}".endswith(f"{os.sep}{wanted}")}
    if not found:
        near = suggest(wanted, known) or suggest(Path(wanted).name, [Path(path).name for path in known])
        remedy = f"perhaps {near}" if near else "`batchwright info` lists them"
        raise SourceError(f"{wanted} is not a file of this store", file=wanted, remedy=remedy)
    if len({os.path.abspath(path) for path in found}) > 1:
        what = f"{len(found)} files of this store end in {wanted}"
        raise SourceError(what, file=", ".join(sorted(found)[:4]), remedy="more of the path")
    return {store: [number for number, path in enumerate(files) if path in found] for store, files in paths.items()}


def _records(
    flow: Flow, plan: Plan, positions: Any, rank_of: RankOf, only: set[tuple[int, int]] | None = None
) -> Iterator[TraceRecord]:
    draw = flow.order.at(positions)
    lines = {number: _Lines(_stream(rows).store) for number, rows in enumerate(flow.stored)}
    places = (positions.tolist(), draw.source.tolist(), draw.index.tolist(), draw.epoch.tolist())
    for position, source, index, epoch in zip(*places, strict=True):
        rows = flow.stored[source]
        stream = _stream(rows)
        step, row_in_batch, rank = _place_in_run(plan, position, rank_of)
        for window_start, window_stop, document, document_start, begin in _pieces(rows, index, epoch):
            if only is not None and (position, document) not in only:
                continue
            stored = stream.document(document)
            span = (begin - document_start, begin - document_start + window_stop - window_start)
            yield TraceRecord(
                step=step,
                position=position,
                epoch=epoch,
                rank=rank,
                row_in_batch=row_in_batch,
                source=rows.name,
                file=stored.file,
                row=stored.row,
                window_span=(window_start, window_stop),
                document_span=span,
                is_skipped=position in flow.order.skips,
                text=stream.store.decode(stored.tokens[span[0] : span[1]]),
                lines=lines[source].of((stream.name, document), stored.tokens, span),
            )


def _pieces(rows: WindowRows | SampleRows, index: int, epoch: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(window start, window stop, document, start of the document in the stream, start of the piece in the stream)."""
    for at, begin, stop in rows.pieces_of(index, epoch):
        for document, document_start, document_stop in _stream(rows).documents_in(begin, stop):
            piece_start, piece_stop = max(document_start, begin), min(document_stop, stop)
            yield at + piece_start - begin, at + piece_stop - begin, document, document_start, piece_start


class _Lines:
    """Line numbers inside documents. Newlines are counted once, so that many pieces of one long document stay cheap."""

    def __init__(self, store: Store) -> None:
        self._decode = store.decode
        self._is_rendered = "chat" in store.manifest.tokenizer
        """Lines of rendered conversations are in no file: beside a file's name they would mislead."""
        self._newlines: dict[tuple[str, int], list[int]] = {}
        """For each document, how many newlines come before each of its chunks."""

    def of(self, document: tuple[str, int], tokens: Any, span: tuple[int, int]) -> tuple[int, int] | None:
        """First and last line of a piece. A line ends with its newline, so the next character begins the next line."""
        if self._is_rendered:
            return None
        piece = self._decode(tokens[span[0] : span[1]])
        if piece is None:
            return None
        first = 1 + self._before(document, tokens, span[0])
        if not piece:  # only the end of the document, which is on the line of the text before it
            return (last := first - (self._decode(tokens[: span[0]][-8:]) or "").endswith("\n"), last)
        return first, first + piece[:-1].count("\n")

    def _before(self, document: tuple[str, int], tokens: Any, stop: int) -> int:
        known = self._newlines.setdefault(document, [0])
        chunk = stop // _LINE_CHUNK
        while len(known) <= chunk:
            known.append(known[-1] + self._count(tokens, (len(known) - 1) * _LINE_CHUNK, len(known) * _LINE_CHUNK))
        return known[chunk] + self._count(tokens, chunk * _LINE_CHUNK, stop)

    def _count(self, tokens: Any, start: int, stop: int) -> int:
        return (self._decode(tokens[start:stop]) or "").count("\n")


def _ranks_of(plan: Plan, world_size: int | None = None, sharding: Any = None) -> RankOf:
    """The rank that gets a row of a batch, by default as in the run."""
    strategy, world = sharding_of(sharding or plan.sharding), world_size or plan.world_size
    return lambda row, rows: strategy.rank_of(row, rows, world)


def _place_in_run(plan: Plan, position: int, rank_of: RankOf) -> tuple[int | None, int, int]:
    """(step, row in the global batch, rank) of a position; no step if the plan has no record of steps."""
    if len(plan.runs) != 1:
        return None, 0, 0
    step = step_of_position(plan.steps, position, **plan.epoch_spec)
    first, rows = position_of_step(plan.steps, step, **plan.epoch_spec)
    rows = Cut(rows_per_step=rows, **plan.epoch_spec).shared_rows(first)
    skips = plan.epoch_spec["epochs"].skips
    row = skips.live(position) - skips.live(first)
    if position in skips or not 0 <= row < rows:
        return None, 0, 0  # skipped, or in the tail of an epoch that `drop` leaves out
    return step, row, rank_of(row, rows)
