"""Tables as a `datasets.Dataset`. Arrays become nested lists of fixed lengths."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from batchwright.base.errors import MissingExtraError
from batchwright.buffer.arrow import joined

__all__ = ["to_dataset"]


def to_dataset(table: pa.Table) -> Any:
    """Rows as a Dataset: `float32[84]` is `List(Value("float32"), length=84)` there."""
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingExtraError(
            "to_hf_dataset needs the package datasets", remedy="pip install 'datasets>=3'"
        ) from error
    columns = {name: _as_lists(joined(table.column(name))) for name in table.column_names}
    return Dataset(pa.table(columns))


def _as_lists(array: pa.Array) -> pa.Array:
    """An array without tensors: each becomes lists of a fixed length, over the same memory."""
    kind, count = array.type, len(array)
    if isinstance(kind, pa.FixedShapeTensorType):
        size = kind.storage_type.list_size
        inner = array.storage.values.slice(array.storage.offset * size, count * size)
        for length in reversed(kind.shape[1:]):
            inner = pa.FixedSizeListArray.from_arrays(inner, length)
        return pa.FixedSizeListArray.from_arrays(inner, kind.shape[0], mask=array.storage.is_null())
    if pa.types.is_struct(kind):
        children = [_as_lists(array.field(number)) for number in range(kind.num_fields)]
        fields = [field.with_type(child.type) for field, child in zip(kind, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
    return array
