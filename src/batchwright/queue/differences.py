"""The differences between two stamps, as readable lines."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from batchwright.base.canonical import encode
from batchwright.base.words import shortened
from batchwright.queue.stamp import Stamp, normalised

__all__ = ["differences"]

_DIFF_LINES = 12
_LINES_OF_META = 8
_VALUE_CHARS = 60


def differences(old: Stamp, new: Stamp) -> list[str]:
    """The changes between two stamps. Empty if they are equal."""
    settings = [{f"config {name}": value for name, value in stamp.settings.items()} for stamp in (old, new)]
    lines = [*_of_meta(old.meta, new.meta), *_changes(*settings), *_changes({"seed": old.seed}, {"seed": new.seed})]
    changed = [file for file in {**old.inputs, **new.inputs} if old.inputs.get(file) != new.inputs.get(file)]
    lines += [f"raw file {file} {_change(file, old.inputs, new.inputs)}" for file in changed]
    if list(old.inputs) != list(new.inputs) and old.inputs == new.inputs:
        lines.append("raw files have another order")
    for file in sorted(old.source.keys() | new.source.keys()):
        lines += _of_source(file, old.source, new.source)
    return lines


def _change(name: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    if name not in old:
        return "is new"
    if name not in new:
        return "is gone"
    return "has other content"


def _of_meta(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    if encode(old) == encode(new):
        return []
    lines = _changes(dict(_values(old, "meta")), dict(_values(new, "meta")))
    more = len(lines) - _LINES_OF_META
    if more > 0:
        return [*lines[:_LINES_OF_META], f"and {more:,} more of the meta"]
    return lines or ["the keys of the meta have another order"]


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The values inside of a meta, by their paths. Fields of a schema have their names as paths."""
    match value:
        case dict():
            for key, item in value.items():
                yield from _values(item, f"{path}[{key!r}]")
        case [{"name": _}, *_] if path == "meta['batch_schema']":
            for number, field in enumerate(value):
                name = f"field {field.get('name')!r}"
                yield f"{name}: place", number
                yield from ((f"{name}: {key}", item) for key, item in field.items() if key != "name")
        case list() if len(repr(value)) > _VALUE_CHARS:
            for number, item in enumerate(value):
                yield from _values(item, f"{path}[{number}]")
        case _:
            yield path, value


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    lines = []
    for name in {**old, **new}:
        if name not in old:
            lines.append(f"{name} is new: {shortened(new[name], _VALUE_CHARS)}")
        elif name not in new:
            lines.append(f"{name} is gone: it was {shortened(old[name], _VALUE_CHARS)}")
        elif encode(old[name]) != encode(new[name]):  # True is not 1, and the order of a dict counts
            was, is_now = (shortened(value, _VALUE_CHARS) for value in (old[name], new[name]))
            lines.append(f"{name} was {was}, and is {is_now}")
    return lines


def _of_source(file: str, old: dict[str, str], new: dict[str, str]) -> list[str]:
    if file not in old or file not in new:
        return [f"{file} {_change(file, old, new)}"]
    # Both in the words of this Python: another version writes the same code a little differently.
    before, after = (normalised(source[file]).splitlines() for source in (old, new))
    diff = [line for line in difflib.unified_diff(before, after, n=1, lineterm="") if line.strip()][2:]
    if not diff:
        return []
    lines = [f"  {line}" for line in diff if not line.startswith("@@")]
    more = len(lines) - _DIFF_LINES
    if more > 0:
        lines = [*lines[:_DIFF_LINES], f"  ... and {more:,} more"]
    return [f"{file} changed:", *lines]
