"""The types that files give their columns, and rows of such files as typed columns again.

Rows are Python values on their way through functions, and a Python number does not keep its type, such as int8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from batchwright.columns.arrow import read_schema
from batchwright.sources.formats import Row

__all__ = ["FORMATS_WITH_TYPES", "columns_of_rows", "schema_of_files"]

FORMATS_WITH_TYPES = frozenset({"arrow", "parquet"})


def schema_of_files(paths: Iterable[str], kind: str) -> Any:
    """The Arrow schema that all of these files have; None if they differ, or one cannot be read."""
    import pyarrow as pa

    try:
        first, *others = (read_schema(path, kind).remove_metadata() for path in paths)
    except (pa.ArrowException, OSError, ValueError):
        return None
    return first if all(schema.equals(first) for schema in others) else None


def columns_of_rows(rows: Sequence[Row], schema: Any) -> Any:
    """Rows that were read from files of this schema, as a table; None if they do not fit it."""
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
