"""The stream over stores. A flow assembles its rows in the order of a plan, which is kept with the stores.

Rows of whole documents have a row index. It is a function of the documents and a RowSpec. Its file is in the store's
folder, named by a hash of both. A missing or damaged index is made again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.base.checks import local_path
from batchwright.base.errors import PlanError, SpecError
from batchwright.base.files import home
from batchwright.base.fingerprint import fingerprint
from batchwright.base.memory import BlockPool
from batchwright.base.words import first_line
from batchwright.batches.batch import Padding
from batchwright.batches.flow import Flow
from batchwright.batches.row_index import RowIndex, RowSpec, SpanWeights, plan_rows
from batchwright.batches.samples import SampleRows
from batchwright.batches.settings import Asked, Fields
from batchwright.batches.types import TrainingBatch
from batchwright.batches.window import WindowRows
from batchwright.loaders.blocks import BlockStream, CountedBatches, PlannedBatches
from batchwright.loaders.interface import Making, Record
from batchwright.loaders.loader import Loader
from batchwright.loaders.read_ahead import start_read_ahead
from batchwright.loaders.run import Run
from batchwright.order.plan import Plan, with_record
from batchwright.store.layout import is_store
from batchwright.store.plans import find_plan, keep_plan, with_places
from batchwright.store.reader import Store
from batchwright.store.stream import TokenStream

__all__ = ["StoreStream", "open_flow", "open_samples", "spec_of_entry"]

log: logging.Logger = logging.getLogger("batchwright")

_INDEX_FORMAT = 1
_COLUMNS = ("start", "length", "document", "goes_on")


class StoreStream(BlockStream):
    """Rows of token streams. Lengths are those of samples; windows have none."""

    def __init__(self, plan: Plan, flow: Flow) -> None:
        self.plan: Plan = plan
        self.flow: Flow = flow
        self.pool: BlockPool = BlockPool()
        if flow.has_samples:  # besides tokens there are weights, targets, masks, ids and a scratch
            self.pool = BlockPool(7)
        self.sequences: int = flow.sequences
        self.has_lengths: bool = flow.has_samples
        self.pad_to: Any = flow.padding.as_json
        self.tokenizer: str | None = next((str(store.folder / "tokenizer.json") for store in self.stores), None)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreStream, (self.plan, self.flow)

    def open(self, run: Run, rows: int, record: Record, making: Making) -> CountedBatches | PlannedBatches:
        if run.is_planned:
            return PlannedBatches(self, run, rows, record, making, self.flow)
        return CountedBatches(self, run, rows, record, making, self.flow)

    # Lengths

    def lengths_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.flow.lengths(positions)

    def widths_of(self, longest: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.flow.padding.widths(longest, self.flow.row_tokens)

    def longest_row(self) -> tuple[int, dict[str, Any]] | None:
        samples = [rows for rows in self.flow.rows if isinstance(rows, SampleRows)]
        if len(samples) < len(self.flow.rows):
            return None
        rows, (row, tokens) = max(((rows, rows.longest()) for rows in samples), key=lambda pair: pair[1][1])
        return tokens, {"row": row, "source": rows.name}

    # Plans

    @property
    def stores(self) -> list[Store]:
        """The stores that the stream reads."""
        return list({stream.store.path: stream.store for stream in self._streams.values()}.values())

    @property
    def _streams(self) -> dict[str, TokenStream]:
        return {rows.name: rows.stream for rows in self.flow.stored if isinstance(rows.stream, TokenStream)}

    def known_plan(self, fingerprint: str) -> Plan | None:
        try:
            return find_plan(self.stores, fingerprint)
        except PlanError:
            return None

    def keep(self, plan: Plan) -> Self:
        """Write the plan beside its stores, so that a run can be traced from the stores alone."""
        found = with_places(plan, self._streams)
        for store in self.stores:
            keep_plan(store.path, found)
        return type(self)(with_record(self.plan, places=found.places), self.flow)

    def start_background_work(self, loader: Loader[TrainingBatch], asked: Asked) -> None:
        start_read_ahead(loader, asked["read_ahead"])

    def amended(self, cursor: int, epochs: int | None, **asked: Any) -> Self:
        from batchwright.loaders.amending import amend_flow

        plan, flow = amend_flow(self.plan, self.flow, cursor, epochs, **asked)
        return type(self)(plan, flow)

    # Reports

    def stats(self, position: int) -> dict[str, Any]:
        tokens = [
            round(count * _tokens_per_row(rows, self.flow.row_tokens))
            for count, rows in zip(self.flow.order.given(position), self.flow.rows, strict=True)
        ]
        return {"tokens": sum(tokens), "tokens_per_source": dict(zip(self.flow.order.names, tokens, strict=True))}

    @property
    def row_in_words(self) -> str:
        return f"x {self.flow.width_in_words}"


def open_stores(
    streams: Mapping[str, TokenStream], plan: Plan, asked: Asked, pad_to: str = "max_length"
) -> StoreStream:
    """The stream of a plan, with the requested fields. `pad_to` is the default for rows that are not packed.

    For packed rows, the default fields keep the samples of a row apart.
    """
    is_packed = any(dict(source.rows).get("packing") for source in plan.all_sources)
    if is_packed:
        pad_to = "max_length"
    fields = Fields(**asked.some(*Fields.names())).with_defaults(is_packed)
    padding = padding_of(asked.get("pad_to", pad_to), asked.get("padding_side", "right"), plan.row_tokens)
    flow = open_flow(streams, plan, fields, padding)
    if not flow.has_samples:
        asked.refuse(("cu_seqlens", "roles"), "is for packed rows and conversations, and these are windows of text")
    return StoreStream(plan, flow)


def open_flow(
    streams: Mapping[str, TokenStream], plan: Plan, fields: Fields | None = None, padding: Padding | None = None
) -> Flow:
    """The rows and the order of a plan, over streams with the same content."""
    first = plan.sources[0].name
    for name, stream in streams.items():
        refuse_other_tokenizer(first, streams[first].store, name, stream.store)
    rows: list[WindowRows | SampleRows] = []
    for number, source in enumerate(plan.all_sources):
        stream = streams[source.name]
        if source.rows:
            rows.append(open_samples(stream, spec_of_entry(source.rows), source.name))
            continue
        row_tokens, growth = source.row_tokens or plan.row_tokens, _growth(plan, number)
        rows.append(
            WindowRows(stream, row_tokens, seed=plan.seed, recut=plan.recut, name=source.name, num_tokens=growth)
        )
    return Flow(rows, plan.order, fields, row_tokens=plan.row_tokens, pad=plan.pad, padding=padding)


def _growth(plan: Plan, number: int) -> tuple[tuple[int, int], ...]:
    """(first epoch, tokens of the source in it): one entry, and another for each time it grew."""
    name = plan.all_sources[number].name
    versions = [source for source in plan.sources if source.name == name]
    versions += [source for amendment in plan.amendments for source in amendment.add if source.name == name]
    if number >= len(plan.order.growth):
        return ((0, versions[-1].num_tokens),)
    tokens = {source.num_rows: source.num_tokens for source in reversed(versions)}
    return tuple((size.first_epoch, tokens[size.num_rows]) for size in plan.order.growth[number])


def padding_of(pad_to: Any, padding_side: str, row_tokens: int) -> Padding:
    """The padding of batches, from checked settings.

    >>> padding_of([512, 128], "right", 2048)
    Padding(to=(128, 512), left=False)
    """
    is_left = padding_side == "left"
    if pad_to in ("longest", "max_length") or (isinstance(pad_to, int) and not isinstance(pad_to, bool)):
        return Padding(pad_to, is_left)
    if not isinstance(pad_to, list) or not pad_to:
        remedy = "'longest', 'max_length', a number that widths are multiples of, or a list of widths"
        raise SpecError(f"pad_to={pad_to!r} is no width", parameter="pad_to", remedy=remedy)
    buckets = tuple(sorted(pad_to))
    if buckets[-1] > row_tokens:
        what = f"a bucket of {buckets[-1]:,} tokens is longer than any row, which has {row_tokens:,} at most"
        raise SpecError(what, parameter="pad_to", remedy=f"buckets of {row_tokens:,} or less")
    return Padding(buckets, is_left)


def _tokens_per_row(rows: Any, of_flow: int) -> float:
    """The tokens of a row: exact for windows, the mean for rows of whole documents."""
    if isinstance(rows, SampleRows):
        return rows.num_tokens / rows.num_rows
    return float(getattr(rows, "row_tokens", of_flow))


def refuse_conversations(store: Store) -> None:
    """Refuse to read a store of conversations as text. User turns and the template would be learned too."""
    if "chat" in store.manifest.tokenizer:
        raise SpecError(
            f"{store.path} holds conversations, whose tokens are not all to be learned",
            parameter="path",
            file=store.path,
            remedy="ConversationDataLoader(path, max_length=2048), also as a source of a mixture; "
            "its loss='all' learns everything",
        )


def refuse_other_tokenizer(name: str, store: Store, other_name: str, other: Store) -> None:
    one, two = store.manifest.tokenizer, other.manifest.tokenizer
    if (one["kind"], one["fingerprint"]) != (two["kind"], two["fingerprint"]):
        what = f"{other_name!r} was tokenized by {two['name']}, {name!r} by {one['name']}: the same id is another word"
        remedy = "bake both with one tokenizer"
        raise SpecError(what, parameter="sources", source=other_name, file=other.path, remedy=remedy)


def store_at(path: Any, tokenizer: Any) -> Store | None:
    """The store at a path; None for raw files and recipes. A `tokenizer` must be the one of the store."""
    if isinstance(path, Store):
        store = path
    elif isinstance(path, str | os.PathLike) and is_store(local_path(path=path)):
        store = Store(path)
    else:
        return None
    if tokenizer is not None:
        _check_tokenizer(store, tokenizer)
    return store


def _check_tokenizer(store: Store, tokenizer: Any) -> None:
    """Refuse a tokenizer that is not the one of the store."""
    from batchwright.prepare.tokenizers import resolve_tokenizer

    resolved = resolve_tokenizer(tokenizer, vocab_size=store.manifest.tokenizer["vocab_size"])
    stored = store.manifest.tokenizer
    is_any_chars = resolved.kind == stored["kind"] == "chars" and resolved.chars is None
    if not is_any_chars and resolved.fingerprint != stored["fingerprint"]:
        what = f"this tokenizer ({resolved.name}) is not the one that {store.path} was baked with"
        remedy = "leave tokenizer= out, or bake again with this one"
        raise SpecError(what, parameter="tokenizer", baked_with=stored["name"], remedy=remedy)


# The row index


def plan_entry(spec: RowSpec) -> tuple[tuple[str, Any], ...]:
    """A RowSpec as an entry of a plan."""
    return tuple(sorted(spec.spec().items()))


def spec_of_entry(rows: tuple[tuple[str, Any], ...]) -> RowSpec:
    """The RowSpec of a plan's entry."""
    given = dict(rows)
    if given.pop("version") != RowSpec(1, None, "drop").spec()["version"]:
        raise SpecError(
            "these rows were packed by a batchwright that packs otherwise", remedy="that release of batchwright"
        )
    return RowSpec(**{"packing": None, **given})


def open_samples(stream: TokenStream, spec: RowSpec, name: str | None = None) -> SampleRows:
    """The rows of a stream's documents by a spec. Opening them again costs nothing."""
    opened = stream.__dict__.setdefault("_opened_samples", {})
    if spec not in opened:
        opened[spec] = _open(stream, spec, name or stream.name)
    return SampleRows(stream, *opened[spec], name=name, reopen=(open_samples, (stream, spec, name)))


def _open(stream: TokenStream, spec: RowSpec, name: str) -> tuple[Any, ...]:
    """(index, spec, borders of documents, their masks, further columns of their spans)."""
    borders = stream.document_borders()
    trained = sides = None
    columns: dict[str, Any] = {}
    if spec.loss is not None:
        from batchwright.prepare.chat.spans import LossPolicy  # plain text does not need it

        starts, fields = stream.token_spans()
        trained = SpanWeights(starts, fields["stop"], LossPolicy.of(spec.loss).weights(starts, fields))
        columns = {"role": fields["role"], "turn": fields["turn"]}
        if spec.pairs:
            sides = _first_sides(starts, fields, borders)
    key = fingerprint([_INDEX_FORMAT, stream.fingerprint, len(borders) - 1, spec.spec()])[:16]
    index = _find(stream.store.path, key, borders)
    if index is None:
        try:
            index = plan_rows(borders, spec, trained=trained, sides=sides, source=name)
        except SpecError as error:
            if isinstance(number := error.where.pop("document", None), int):
                stored = stream.document(number)
                error.where |= {"file": stored.file, "row": stored.row}
            raise
        if index.num_rows:
            _keep(stream.store.path, key, index)
    return index, spec, borders, trained, columns


def _first_sides(starts: Any, fields: dict[str, Any], borders: Any) -> Any:
    """The number of tokens of each document's chosen side."""
    chosen = SpanWeights(starts, fields["stop"], (fields["side"] == 0).astype(np.float32))
    documents = np.arange(len(borders) - 1)
    return chosen.count(documents, np.zeros(len(documents), np.int64), np.diff(borders))


def _folders(store: Path, key: str) -> list[Path]:
    return [store / "rows" / f"{key}.arrow", home() / "rows" / f"{key}.arrow"]


def _find(store: Path, key: str, borders: Any) -> RowIndex | None:
    for path in _folders(store, key):
        try:
            return _read(path, int(borders[-1]), len(borders) - 1)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, LookupError, AttributeError, TypeError, ValueError) as error:  # Arrow's are ValueErrors
            log.warning("the row index %s is made again: %s", path, first_line(error))
    return None


def _read(path: Path, num_tokens: int, num_documents: int) -> RowIndex:
    """An index, memory-mapped from its file. Its numbers become addresses, so its hash must be right."""
    import pyarrow as pa

    from batchwright.columns.arrow import records_of

    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        batch, metadata = reader.get_batch(0), reader.schema.metadata
    batch.validate()
    said = msgspec.json.decode(metadata[b"index"])
    row_starts, pieces = records_of(batch.column("pieces"))
    index = RowIndex(row_starts, **{name: pieces[name] for name in _COLUMNS}, counts=said["counts"])
    if _digest(index) != said["digest"]:
        raise ValueError("its hash differs")
    if len(index.start):
        end = int((index.start + index.length + index.goes_on).max())
        if end > num_tokens or int(index.document.max()) >= num_documents:
            raise ValueError("it is of another store")
    return index


def _keep(store: Path, key: str, index: RowIndex) -> None:
    """Write an index beside its store, or under $BATCHWRIGHT_HOME if the store is read-only."""
    import pyarrow as pa

    from batchwright.columns.arrow import records_to_arrow
    from batchwright.store.writer import write_arrow

    pieces = {name: getattr(index, name) for name in _COLUMNS}
    batch = pa.RecordBatch.from_arrays([records_to_arrow(index.row_starts, pieces)], names=["pieces"])
    said = {"counts": index.counts, "digest": _digest(index)}
    batch = batch.replace_schema_metadata({"index": msgspec.json.encode(said)})
    for path in _folders(store, key):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_arrow(path, batch)
            return
        except OSError as error:
            log.debug("the row index cannot be kept in %s: %s", path.parent, os.strerror(error.errno or 0))


def _digest(index: RowIndex) -> str:
    digest = xxhash.xxh3_128()
    for array in (index.row_starts, *(getattr(index, name) for name in _COLUMNS)):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()
