"""Rows of whole documents over a store: the row index, read from its file or planned anew, and the masks.

The index is a function of the documents and a RowSpec. Its file is in the store's folder, named by a hash of both. A
missing or damaged index is made again.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from batchwright.base.errors import SpecError
from batchwright.base.files import home
from batchwright.base.fingerprint import fingerprint
from batchwright.base.words import first_line
from batchwright.batches.row_index import RowIndex, RowSpec, SpanWeights, plan_rows
from batchwright.batches.samples import SampleRows
from batchwright.store.stream import TokenStream

__all__ = ["open_samples", "plan_entry", "spec_of_entry"]

log: logging.Logger = logging.getLogger("batchwright")

_INDEX_FORMAT = 1
_COLUMNS = ("start", "length", "document", "goes_on")


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
        from batchwright.prepare.chat.policy import LossPolicy  # plain text does not need it

        starts, fields = stream.token_spans()
        trained = SpanWeights(starts, fields["stop"], LossPolicy.parse(spec.loss).weights(starts, fields))
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
