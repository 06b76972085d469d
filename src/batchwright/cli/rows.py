"""What `batchwright info` and `batchwright look` say of a buffer. They only read, and never disturb its writer."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.base.errors import SpecError
from batchwright.base.words import bytes_in_words, counted
from batchwright.cli.output import print_json, printable
from batchwright.cli.plan_settings import settings_given

if TYPE_CHECKING:
    from batchwright.buffer.buffer import DatasetBuffer
    from batchwright.buffer.reads import Reads

__all__ = ["describe_buffer", "is_buffer", "look_at_rows"]

_ORIGINS_SHOWN = 10


def is_buffer(path: str) -> bool:
    from batchwright.buffer.folder import POINTER

    return os.path.isfile(os.path.join(path, POINTER))  # False also for what cannot be a path


def describe_buffer(path: str, *, version: str | None, as_json: bool) -> int:
    from batchwright.buffer.buffer import DatasetBuffer

    with DatasetBuffer(path=path, read_only=True) as buffer:
        facts = {"buffer": path, **_facts(path, buffer, buffer if version is None else _version(buffer, version))}
    if as_json:
        print_json(facts)
    else:
        print(_render(facts, version))
    return 0


def _version(buffer: DatasetBuffer, name: str) -> Reads:
    """A version by its name, or by its number where none has such a name."""
    names = [version.name for version in buffer.versions()]
    return buffer.at(int(name) if name not in names and name.isdecimal() else name)


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


def _render(facts: dict[str, Any], version: str | None) -> str:
    settings = facts["settings"]
    most = "as many as come" if settings["max_size"] is None else f"at most {settings['max_size']:,}"
    dropped = "" if settings["max_size"] is None else f", dropping by {printable(settings['drop_strategy'])}"
    at = "" if version is None else f" at version {printable(version)!r}"
    lines = [
        f"buffer {facts['buffer']}{at} ({facts['fingerprint'][:16]})",
        f"  rows       {facts['num_rows']:,}, after {counted(facts['number'], 'change')}",
        *(
            f"  column     {printable(column['name'])}  {column['type']}{'' if column['required'] else ', optional'}"
            for column in facts["columns"]
        ),
        *(
            f"  origin     {counted(origin['num_rows'], 'row')} from {printable(origin['name'])!r}"
            for origin in facts["origins"][:_ORIGINS_SHOWN]
            if origin["name"] is not None
        ),
        f"  settings   {most}{dropped}, seed {settings['seed']}",
        *(
            f"  version    {version['name']}: {counted(version['num_rows'], 'row')}, "
            f"after change {version['number']:,}, {version['time'][:19]}"
            for version in facts["versions"]
        ),
        f"  journal    {bytes_in_words(facts['journal_bytes'])}",
        f"  blocks     {counted(facts['num_block_files'], 'file')}, {bytes_in_words(facts['block_bytes'])}",
    ]
    if len(facts["origins"]) > _ORIGINS_SHOWN:
        lines.append(f"  and {len(facts['origins']) - _ORIGINS_SHOWN:,} more origins: --json has all")
    return "\n".join(lines)


def look_at_rows(arguments: argparse.Namespace) -> int:
    """Some rows, with what they hold. Of `batchwright look`, --document, --count, --chars and --json apply."""
    import numpy as np

    from batchwright.buffer.buffer import DatasetBuffer

    others = [f"--{name}" for name in ("step", "source", "html") if getattr(arguments, name) is not None]
    others += ["--ids"] if arguments.ids else []
    if arguments.plan is not None or others or (others := settings_given(arguments)):
        raise SpecError(
            f"{others[0] if others else arguments.plan} means nothing here: {arguments.store} is a buffer",
            remedy="--document for the first row, --count for how many",
        )
    with DatasetBuffer(path=arguments.store, read_only=True) as buffer:
        begin, count = arguments.document or 0, 3 if arguments.count is None else arguments.count
        index = np.arange(begin, max(begin, min(begin + count, len(buffer))))
        if begin and not len(index):
            buffer.get_batch([begin])  # says which rows there are
        rows, origins = buffer.__getitems__(index.tolist()), buffer.provenance(index).to_pylist()
    if arguments.json:
        found = [
            {"row": int(number), "id": came["id"], "origin": came["origin"], "values": row}
            for number, came, row in zip(index, origins, rows, strict=True)
        ]
        print_json({"buffer": arguments.store, "rows": found})
        return 0
    for number, came, row in zip(index, origins, rows, strict=True):
        origin = "" if came["origin"] is None else f", from {printable(came['origin'])!r}"
        print(f"row {number:,} (id {came['id']:,}{origin})")
        for name, value in row.items():
            print(f"  {printable(name)}  {_value(value, arguments.chars)}")
    return 0


def _value(value: Any, most_characters: int) -> str:
    """A value in one line; an array as its type and its first numbers."""
    if hasattr(value, "dtype") and value.shape:
        text = f"{value.dtype}{list(value.shape)}  {' '.join(f'{number:.4g}' for number in value.ravel()[:8])}"
        text += " ..." if value.size > 8 else ""
    else:
        text = repr(value)
    return printable(text if not most_characters or len(text) <= most_characters else text[:most_characters] + "...")
