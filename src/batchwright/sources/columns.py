"""The types that a file gives its columns, and rows of it as columns of these types again.

Rows are Python values on their way through functions, and a Python number does not say that it was an int8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from batchwright.sources.formats import Row

__all__ = ["FORMATS_WITH_TYPES", "columns_of_rows", "schema_of_files"]

FORMATS_WITH_TYPES = frozenset({"arrow", "parquet"})


def schema_of_files(paths: Iterable[str], kind: str) -> Any:
    """The Arrow schema that all of these files have; None where they differ, or one cannot be read."""
    import pyarrow as pa

    found: Any = None
    for path in paths:
        try:
            schema = _schema_of(path, kind).remove_metadata()
        except (pa.ArrowException, OSError, ValueError):
            return None
        if found is not None and not schema.equals(found):
            return None
        found = schema
    return found


def _schema_of(path: str, kind: str) -> Any:
    import pyarrow as pa

    if kind == "parquet":
        import pyarrow.parquet as pq

        return pq.read_schema(path)
    with pa.memory_map(path) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        return (pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)).schema


def columns_of_rows(rows: Sequence[Row], schema: Any) -> Any:
    """Rows that were read from files of this schema, as a table; None where they do not fit it."""
    import pyarrow as pa

    try:
        arrays = [_column([row[field.name] for row in rows], field.type) for field in schema]
    except (pa.ArrowException, KeyError, TypeError, ValueError, OverflowError):
        return None
    fields = [field.with_type(array.type) for field, array in zip(schema, arrays, strict=True)]
    return pa.table(arrays, schema=pa.schema(fields))


def _column(values: list[Any], kind: Any) -> Any:
    import pyarrow as pa

    if not isinstance(kind, pa.FixedShapeTensorType):
        return pa.array(values, kind)
    # Rows have the axes in the order that is meant, which a file may only say beside another one.
    axes = kind.permutation or range(len(kind.shape))
    tensor = pa.fixed_shape_tensor(kind.value_type, [kind.shape[axis] for axis in axes])
    flat = [None if value is None else np.ravel(value) for value in values]
    return pa.ExtensionArray.from_storage(tensor, pa.array(flat, tensor.storage_type))
