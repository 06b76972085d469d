"""`batchwright info` and `batchwright look` for a buffer. They only read, and never disturb its writer."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.base.errors import SpecError
from batchwright.base.words import bytes_in_words, counted
from batchwright.cli.output import print_facts, print_json, printable
from batchwright.cli.plan_settings import settings_given

if TYPE_CHECKING:
    from batchwright.buffer.buffer import DatasetBuffer
    from batchwright.buffer.reads import Reads

__all__ = ["describe_buffer", "is_buffer", "look_at_rows"]

_ORIGINS_SHOWN = 10


def is_buffer(path: str) -> bool:
    from batchwright.buffer.folder import POINTER

    return os.path.isfile(os.path.join(path, POINTER))  # False also for what cannot be a path


def describe_buffer(path: str, *, version: str | None, as_json: bool) -> None:
    from batchwright.buffer.buffer import DatasetBuffer

    with DatasetBuffer(path=path, read_only=True) as buffer:
        facts = {"buffer": path, **_facts(path, buffer, _version(buffer, version))}
    print_facts(facts, _lines(facts, version), as_json=as_json)


def _version(buffer: DatasetBuffer, name: str | None) -> Reads:
    """A version by its name, or by its number where none has such a name; by default, what the buffer has now."""
    if name is None:
        return buffer
    if name.isdecimal() and name not in [version.name for version in buffer.versions()]:
        return buffer.at(int(name))
    return buffer.at(name)


def _facts(path: str, buffer: DatasetBuffer, rows: Reads) -> dict[str, Any]:
    journals, blocks = list(Path(path).glob("journal-*.log")), list(Path(path).glob("blocks/*.arrow"))
    return {
        "num_rows": len(rows),
        "number": rows.number,
        "kind": rows.kind,
        "fingerprint": rows.content_fingerprint(),
        "columns": [
            {"name": field.name, "type": str(field), "required": field.required} for field in rows._look().schema
        ],
        "origins": [
            {"name": found["values"], "num_rows": found["counts"]}
            for found in rows.provenance()["origin"].value_counts().to_pylist()
        ],
        "settings": {"max_size": buffer.max_size, "drop_strategy": buffer.drop_strategy, "seed": buffer.seed},
        "versions": [
            {"number": version.number, "name": version.name, "time": str(version.time), "num_rows": version.rows}
            for version in buffer.versions()
        ],
        "journal_bytes": sum(map(_size_of, journals)),
        "num_block_files": len(blocks),
        "block_bytes": sum(map(_size_of, blocks)),
    }


def _size_of(file: Path) -> int:
    """The size of a file that a writer may remove meanwhile."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _lines(facts: dict[str, Any], version: str | None) -> Iterator[str]:
    heading = f"buffer {facts['buffer']}"
    if version is not None:
        heading += f" at version {printable(version)!r}"
    yield f"{heading} ({facts['fingerprint'][:16]})"
    yield f"  rows       {facts['num_rows']:,}, after {counted(facts['number'], 'change')}"
    for column in facts["columns"]:
        line = f"  column     {printable(column['name'])}  {column['type']}"
        if not column["required"]:
            line += ", optional"
        yield line
    for origin in facts["origins"][:_ORIGINS_SHOWN]:
        if origin["name"] is not None:
            yield f"  origin     {counted(origin['num_rows'], 'row')} from {printable(origin['name'])!r}"
    yield f"  settings   {_settings_in_words(**facts['settings'])}"
    for kept in facts["versions"]:
        after = f"after change {kept['number']:,}, {kept['time'][:19]}"
        yield f"  version    {kept['name']}: {counted(kept['num_rows'], 'row')}, {after}"
    yield f"  journal    {bytes_in_words(facts['journal_bytes'])}"
    yield f"  blocks     {counted(facts['num_block_files'], 'file')}, {bytes_in_words(facts['block_bytes'])}"
    if len(facts["origins"]) > _ORIGINS_SHOWN:
        yield f"  and {len(facts['origins']) - _ORIGINS_SHOWN:,} more origins: --json has all"


def _settings_in_words(max_size: int | None, drop_strategy: str, seed: int) -> str:
    if max_size is None:
        return f"as many as come, seed {seed}"
    return f"at most {max_size:,}, dropping by {printable(drop_strategy)}, seed {seed}"


def look_at_rows(arguments: argparse.Namespace) -> None:
    """Some rows, with what they hold. Of `batchwright look`, --document, --count, --chars and --json apply."""
    _refuse_others(arguments)
    rows, places = _rows_to_show(arguments)
    if arguments.json:
        found = [{**place, "values": row} for place, row in zip(places, rows, strict=True)]
        print_json({"buffer": arguments.store, "rows": found})
        return
    for place, row in zip(places, rows, strict=True):
        came = f"id {place['id']:,}"
        if place["origin"] is not None:
            came += f", from {printable(place['origin'])!r}"
        print(f"row {place['row']:,} ({came})")
        for name, value in row.items():
            print(f"  {printable(name)}  {_value(value, arguments.chars)}")


def _rows_to_show(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows, for each its number, its id and where it came from)."""
    import numpy as np

    from batchwright.buffer.buffer import DatasetBuffer

    with DatasetBuffer(path=arguments.store, read_only=True) as buffer:
        begin, count = arguments.document or 0, arguments.count or 3
        index = np.arange(begin, max(begin, min(begin + count, len(buffer))))
        if begin and not len(index):
            buffer.get_batch([begin])  # says which rows there are
        origins = buffer.provenance(index).to_pylist()
        places = [
            {"row": number, "id": came["id"], "origin": came["origin"]}
            for number, came in zip(index.tolist(), origins, strict=True)
        ]
        return buffer.__getitems__(index.tolist()), places


def _refuse_others(arguments: argparse.Namespace) -> None:
    """Refuse options that are about a store."""
    others = [f"--{name}" for name in ("step", "source", "html") if getattr(arguments, name) is not None]
    if arguments.ids:
        others.append("--ids")
    others = others or settings_given(arguments)
    if arguments.plan is not None:
        others.append(arguments.plan)
    if others:
        raise SpecError(
            f"{others[0]} means nothing here: {arguments.store} is a buffer",
            remedy="--document for the first row, --count for how many",
        )


def _value(value: Any, most_characters: int) -> str:
    """A value in one line; an array as its type and its first numbers."""
    text = repr(value)
    if hasattr(value, "dtype") and value.shape:
        words = [f"{value.dtype}{list(value.shape)} ", *(f"{number:.4g}" for number in value.ravel()[:8])]
        if value.size > 8:
            words.append("...")
        text = " ".join(words)
    if most_characters and len(text) > most_characters:
        text = text[:most_characters] + "..."
    return printable(text)
