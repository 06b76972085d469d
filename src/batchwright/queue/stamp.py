"""The stamp of a queue: the meta, source, settings, seed and raw files behind its batches.

Comments, docstrings and blank lines do not change the source. A setting counts if its name is a word of the source, so
a new learning rate does not change the data.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchwright.base.canonical import encode
from batchwright.base.errors import SpecError
from batchwright.base.fingerprint import fingerprint_value, function_fingerprint, is_users
from batchwright.base.words import shortened

_NOT_DATA = {
    *("batch_size", "batches_per_file", "val_batches", "max_backlog_files", "sleep_seconds"),
    *("verbose", "durable", "data_dir", "seed"),
}
"""These settings decide the amount, time and place of production, not the content of a row. (The seed is
compared by itself.)"""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The inputs of the batches of a queue. Equal stamps have equal fingerprints, in every process."""

    meta: dict[str, Any]
    source: dict[str, str]
    """The code of each file (or class, if there is no file), without comments and docstrings."""
    settings: dict[str, Any]
    seed: int
    inputs: dict[str, str] = field(default_factory=dict)
    """The fingerprint of each raw file's content, in the order of the files."""

    @property
    def fingerprint(self) -> str:
        return fingerprint_value({"meta": self.meta, **self.to_json()})

    def to_json(self) -> dict[str, Any]:
        """All but the meta, which a queue keeps beside it."""
        return {"source": self.source, "settings": self.settings, "seed": self.seed, "inputs": self.inputs}

    @classmethod
    def from_json(cls, value: Any, meta: dict[str, Any]) -> Stamp:
        source, settings, inputs = (dict(value[name]) for name in ("source", "settings", "inputs"))
        return cls(meta, source, settings, int(value["seed"]), inputs)


def stamp_of(provider: Any, meta: dict[str, Any], inputs: dict[str, str] | None = None) -> Stamp:
    """Return the stamp of a provider. `meta` is plain, as `check_meta` returns it."""
    source = _source_of(provider)
    is_mentioned = _words_of(source.values())
    settings = {
        name: _plain(value)
        for name, value in sorted(provider.config.items())
        if name not in _NOT_DATA and is_mentioned(name)
    }
    return Stamp(meta, source, settings, int(provider.seed), inputs or {})


def _words_of(sources: Iterable[str]) -> Callable[[str], bool]:
    """Return a test for words of the source. Composed names count: `train_stages`, of f"{split}_stages"."""
    words = set(re.findall(r"\w+", "\n".join(sources)))
    starts = tuple(word for word in words if len(word) > 2 and word.endswith("_"))
    ends = tuple(word for word in words if len(word) > 2 and word.startswith("_"))
    return lambda name: name in words or name.startswith(starts) or name.endswith(ends)


# Source


def normalised(code: str) -> str:
    """Code as Python understands it: layout, comments and docstrings are gone. Code with a wrong syntax stays.

    >>> print(normalised('def f(x):\\n    "Twice."\\n\\n    return x*2  # or x + x'))
    def f(x):
        return x * 2
    """
    try:
        return ast.unparse(_WithoutDocstrings().visit(ast.parse(code)))
    except (SyntaxError, ValueError):
        return code.strip()


class _WithoutDocstrings(ast.NodeTransformer):
    """Drops every string that is a statement of its own. A block that had no other statement becomes `pass`."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        blocks = [name for name in ("body", "orelse", "finalbody") if isinstance(getattr(node, name, None), list)]
        filled = [name for name in blocks if getattr(node, name)]
        super().generic_visit(node)
        for name in filled:
            if not getattr(node, name) and not isinstance(node, ast.Module):
                setattr(node, name, [ast.Pass()])
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else self.generic_visit(node)


def _source_of(provider: Any) -> dict[str, str]:
    """The code of a provider's class, of the user's classes that it inherits from, and of files beside it.

    Files are named from the data folder on, and others by their module, so that a project can move.
    """
    folder = Path(provider.data_dir).resolve()
    found: dict[str, str] = {}
    for kind in _own_classes(type(provider)):
        module = sys.modules.get(kind.__module__)
        path = Path(getattr(module, "__file__", None) or "").resolve()
        if kind.__module__ == "__main__" or path.suffix != ".py":
            # The rest of a notebook or of a training script is not the provider's.
            if text := _text_of(kind):
                found[f"class {kind.__qualname__}"] = text
        elif path.is_relative_to(folder):
            _add_file(path, folder, found, getattr(module, "__source__", None))
        else:
            found[f"{kind.__module__.replace('.', '/')}.py"] = normalised(_read(path))
    beside = folder / "prepare_streaming.py"
    if any(getattr(module, "__file__", None) == str(beside) for module in list(sys.modules.values())):
        _add_file(beside, folder, found)  # if it only imports the class, it may still set something
    return dict(sorted(found.items()))


def _own_classes(kind: type) -> list[type]:
    """The class and its bases, without DataProviderBase, the bases of that, and installed classes."""
    base = next((each for each in kind.__mro__ if each.__name__ == "DataProviderBase"), object)
    return [kind, *(each for each in kind.__mro__[1:] if each not in base.__mro__ and is_users(each.__module__))]


def _text_of(kind: type) -> str:
    try:
        return normalised(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, IndentationError, tokenize.TokenError):
        return ""


def _add_file(path: Path, folder: Path, found: dict[str, str], text: str | None = None) -> None:
    """Add a file of the data folder, and the files in the folder that it imports, at import time or later.
    The imports are read from the code. The loaded modules depend on the past of this process.
    """
    name = path.relative_to(folder).as_posix()
    if name in found:
        return
    found[name] = normalised(text or _read(path))
    imports = [line for line in found[name].splitlines() if "import" in line]
    for word in dict.fromkeys(re.findall(r"\w+", "\n".join(imports))):
        for parent in path.parents:
            if parent.is_relative_to(folder):
                for file in (parent / f"{word}.py", *sorted((parent / word).glob("*.py"))):
                    if file.is_file():
                        _add_file(file, folder, found)


def _read(path: Path) -> str:
    try:
        with tokenize.open(path) as file:  # in the encoding that the file declares
            return file.read()
    except (OSError, SyntaxError, UnicodeError):
        return ""


# Settings


def _plain(value: Any) -> Any:
    """A setting as JSON, to be shown and compared. What JSON does not have is shown by its type and fingerprint."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else repr(value)
        case list() | tuple():
            return [_plain(item) for item in value]
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        return f"{kind} {function_fingerprint(value, name='a setting')}"
    except SpecError:  # an open file, a lock
        return kind


# Differences between two stamps


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
    """The values inside of a meta, by their paths."""
    match value:
        case dict() if value or path == "meta":
            for key, item in value.items():
                yield from _values(item, f"{path}[{key!r}]")
        case list() if value:
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
