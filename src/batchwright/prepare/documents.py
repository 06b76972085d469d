"""Documents from rows of raw files, for baking and streaming. Each has its text, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchwright.base.errors import BatchwrightError
from batchwright.prepare.text_column import BadText, TextColumn
from batchwright.sources.formats import Format, Malformed
from batchwright.sources.units import EndOfSpan, Unit, failure_of, read_unit

__all__ = ["read_documents"]

Row = dict[str, Any]
Document = tuple[int, int, str | Malformed | EndOfSpan, Row]


def read_documents(
    unit: Unit, formats: Mapping[str, Format], text: TextColumn | None, columns: Sequence[str] | None = None
) -> Iterator[Document]:
    """Yield (span, row in span, text or the reason for none, row), in order. The row has its text as `row["text"]` too.

    Without `text`, rows are unchanged and their text is "". Each span ends with (span, number of rows, EndOfSpan, {}).
    `columns` names the columns that are needed; None means all, for functions that get the row.
    `batchwright.sources.units` turns malformed rows into errors.
    """
    from_memory = unit.rows is not None
    for span, row_number, row in _read(unit, formats, columns):
        if isinstance(row, EndOfSpan | Malformed):
            yield span, row_number, row, {}
        elif not isinstance(row, dict):
            fault = Malformed("malformed row", f"the format gave a {type(row).__name__}, not a row")
            yield span, row_number, fault, {}
        elif text is None:
            yield span, row_number, "", row
        else:
            try:
                found = text.of(row)
            except BadText as bad:
                yield span, row_number, Malformed(bad.kind, bad.reason), row
                continue
            fault_or_none = _surrogate(found) if from_memory and not found.isascii() else None
            row["text"] = found
            yield span, row_number, fault_or_none or found, row


def _read(unit: Unit, formats: Mapping[str, Format], columns: Sequence[str] | None) -> Iterator[tuple[int, int, Any]]:
    """Yield the rows of `read_unit`. An error in a user's format names its place: after the last good row."""
    last_span, last_row = 0, -1
    try:
        for span, row_number, row in read_unit(unit, formats, columns):
            last_span, last_row = span, row_number
            if isinstance(row, EndOfSpan):
                last_span, last_row = span + 1, -1
            yield span, row_number, row
    except BatchwrightError:
        raise
    except Exception as error:
        kind = unit.spans[min(last_span, len(unit.spans) - 1)].format if unit.spans else "memory"
        raise failure_of(f"format {kind!r}", error, unit, last_span, last_row + 1, formats) from error


def _surrogate(text: str) -> Malformed | None:
    """Check for half a surrogate pair. Text from a file was decoded, so it can be encoded; text from memory may not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Malformed("not UTF-8", f"half a surrogate pair at character {error.start:,}")
    return None
