"""Arrow and Parquet as formats of sources. The first such file imports pyarrow, which takes long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from batchwright.sources.formats import Malformed, Row, register_format

__all__: list[str] = []


@register_format("arrow", extensions=(".arrow", ".feather", ".ipc"), by_file=True, version="1")
def _read_arrow(
    path: Path, *, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
) -> Iterator[Row | Malformed]:
    from batchwright.sources.arrow import read_arrow

    return read_arrow(path, columns=columns, start=start, stop=stop)


@register_format("parquet", extensions=(".parquet", ".pq"), by_file=True, version="1")
def _read_parquet(
    path: Path, *, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
) -> Iterator[Row | Malformed]:
    from batchwright.sources.parquet import read_parquet

    return read_parquet(path, columns=columns, start=start, stop=stop)
