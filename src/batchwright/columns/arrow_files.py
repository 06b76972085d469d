"""Opening of Arrow IPC and Parquet files, the same for every reader.

pyarrow is imported by the first call: it takes longer to import than everything else.
"""

from __future__ import annotations

from typing import Any

__all__ = ["open_ipc", "open_parquet", "read_schema", "read_table"]

_IPC_FILE_MAGIC = b"ARROW1"


def open_ipc(source: Any, options: Any = None) -> Any:
    """A reader of Arrow's file format or of its stream format, told by the first bytes of a seekable source."""
    import pyarrow as pa

    is_file = source.read(len(_IPC_FILE_MAGIC)) == _IPC_FILE_MAGIC
    source.seek(0)
    return pa.ipc.open_file(source, options=options) if is_file else pa.ipc.open_stream(source, options=options)


def open_parquet(path: Any) -> Any:
    """A Parquet file that is read a megabyte of a column at a time. Checksums of pages are checked if there are any."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)


def read_schema(path: str, kind: str) -> Any:
    """The Arrow schema of a file; `kind` is "arrow" or "parquet"."""
    import pyarrow as pa

    if kind == "parquet":
        with open_parquet(path) as file:
            return file.schema_arrow
    with pa.memory_map(path) as source:
        return open_ipc(source).schema


def read_table(path: str, kind: str) -> Any:
    """All of a file as one table. Arrow is mapped, and not checked: call `validate(full=True)` before using it."""
    import pyarrow as pa

    if kind == "parquet":
        with open_parquet(path) as file:
            return file.read()
    with pa.memory_map(path) as source:
        return open_ipc(source).read_all()
