"""Whether a queue was made by what would write into it now: by the same meta, code, settings and seed.

A comment, a docstring or a blank line is no change of the code, and a setting whose name the code does not hold (a new
learning rate) is no change of the data.
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
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from batchwright.base.canonical import encode
from batchwright.base.errors import QueueError
from batchwright.base.fingerprint import fingerprint_bytes, fingerprint_value, is_users

__all__ = ["Stamp", "differences", "normalised", "stamp_of"]

SETTINGS_THAT_ARE_NOT_DATA = frozenset(
    (
        *("batch_size", "batches_per_file", "val_batches", "max_backlog_files", "sleep_seconds"),
        *("verbose", "durable", "data_dir", "seed"),
    )
)
"""How much is made at a time, and when and where, is no part of what a row holds. (The seed is compared by itself.)"""

_DIFF_LINES, _KEYS_SHOWN, _VALUE_CHARS = 12, 5, 60
_DEPTH = 8
"""Settings are compared so deep."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the batches of a queue were made from. Equal stamps have equal fingerprints, in every process."""

    meta: dict[str, Any]
    source: dict[str, str]
    """Of each file (or class, where there is no file): its code, without comments and docstrings."""
    settings: dict[str, Any]
    seed: int
    inputs: dict[str, str] = field(default_factory=dict)
    """Of each raw file, in their order: the fingerprint of its content."""

    @property
    def fingerprint(self) -> str:
        return fingerprint_value({"meta": self.meta, **self.to_json()})

    def to_json(self) -> dict[str, Any]:
        """All but the meta, which a queue keeps beside it."""
        return {"source": self.source, "settings": self.settings, "seed": self.seed, "inputs": self.inputs}

    @classmethod
    def from_json(cls, value: Any, meta: dict[str, Any]) -> Stamp:
        if not (
            isinstance(value, Mapping)
            and all(isinstance(value.get(name), dict) for name in ("source", "settings", "inputs"))
            and type(value.get("seed")) is int
            and all(isinstance(text, str) for text in value["source"].values())
        ):
            raise QueueError(
                "this queue does not say what it was made from",
                remedy="remove it and have it made again: batchwright queue purge",
            )
        return cls(meta, dict(value["source"]), dict(value["settings"]), value["seed"], dict(value["inputs"]))


def stamp_of(provider: Any, meta: dict[str, Any], inputs: dict[str, str] | None = None) -> Stamp:
    """What this provider makes its batches from. `meta` is plain, as `check_meta` returns it."""
    source = _source_of(provider)
    mentioned = _names_in(source.values())
    settings = {
        name: _plain(value)
        for name, value in sorted(provider.config.items())
        if name not in SETTINGS_THAT_ARE_NOT_DATA and mentioned(name)
    }
    return Stamp(meta, source, settings, int(provider.seed), inputs or {})


# Code


def normalised(code: str) -> str:
    """Code as Python understands it: layout, comments and docstrings are gone.

    >>> print(normalised('def f(x):\\n    "Twice."\\n\\n    return x*2  # or x + x'))
    def f(x):
        return x * 2
    """
    return ast.unparse(_WithoutDocstrings().visit(ast.parse(code)))


class _WithoutDocstrings(ast.NodeTransformer):
    """Drops every string that stands for itself; a block that was nothing else becomes `pass`."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        filled = [name for name, value in ast.iter_fields(node) if _is_block(value)]
        super().generic_visit(node)
        for name in filled:
            if not getattr(node, name) and not isinstance(node, ast.Module):
                setattr(node, name, [ast.Pass()])
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else self.generic_visit(node)


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], ast.stmt)


def _source_of(provider: Any) -> dict[str, str]:
    """The code of a provider: of its class, of the user's classes that it inherits from, and of files beside it.

    Files are named from the data folder on, and others by their module, so that a project can move.
    """
    folder = Path(provider.data_dir).resolve()
    found: dict[str, str] = {}
    for kind in _own_classes(type(provider)):
        module = sys.modules.get(kind.__module__)
        file = getattr(module, "__file__", None)
        if module is None or file is None or kind.__module__ == "__main__":
            # The rest of a notebook or of a training script is not the provider's.
            text = _text_of_object(kind)
            found |= {} if text is None else {f"class {kind.__qualname__}": text}
        elif (path := Path(file).resolve()).is_relative_to(folder):
            _add_file(path, folder, found, getattr(module, "__source__", None))
        else:
            text = _normalised_or_raw(_read(path)) if path.suffix == ".py" else None
            found |= {} if text is None else {f"{kind.__module__.replace('.', '/')}.py": text}
    beside = folder / "prepare_streaming.py"
    if any(_is_file(module, beside) for module in list(sys.modules.values())):
        _add_file(beside, folder, found)  # where it only imports the class, it may still set something
    return dict(sorted(found.items()))


def _own_classes(kind: type) -> list[type]:
    """The class and what it inherits, without DataProviderBase, what that inherits, and what is installed."""
    base = next((each for each in kind.__mro__ if each.__name__ == "DataProviderBase"), object)
    return [kind, *(each for each in kind.__mro__[1:] if each not in base.__mro__ and is_users(each.__module__))]


def _is_file(module: Any, path: Path) -> bool:
    file = getattr(module, "__file__", None) if isinstance(module, types.ModuleType) else None
    return isinstance(file, str) and file.endswith(path.name) and Path(file).resolve() == path


def _add_file(path: Path, folder: Path, found: dict[str, str], text: str | None = None) -> None:
    """A file of the data folder, and all in the folder that it imports: also what it imports only when it runs.

    Found in the code, not among what is loaded: that depends on what else this process did before.
    """
    name = path.relative_to(folder).as_posix()
    if name in found or path.suffix != ".py":
        return
    raw = _read(path) if text is None else text
    if raw is None:
        return
    found[name] = _normalised_or_raw(raw)
    try:
        tree = ast.parse(raw)
    except (SyntaxError, ValueError):
        return
    for package, dotted in _imports(tree, path.parent, folder):
        for file in (package / f"{dotted}.py", package / dotted / "__init__.py"):
            if file.is_file() and file.resolve().is_relative_to(folder):
                _add_file(file.resolve(), folder, found)


def _imports(tree: ast.AST, here: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """(folder to start from, path below it) of each module that may be meant by an import, packages on the way too."""
    for node in ast.walk(tree):
        names: list[str] = []
        start = folder  # a data folder is on sys.path while its provider runs
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = [folder, here, *here.parents][node.level]
            module = [node.module] if node.module else []
            names = [*module, *(".".join([*module, alias.name]) for alias in node.names)]
        elif isinstance(node, ast.Call) and node.args and _called(node) in ("import_module", "__import__"):
            first = node.args[0]
            names = [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
        for name in names:
            parts = name.split(".")
            yield from ((start, "/".join(parts[:n])) for n in range(1, len(parts) + 1) if all(parts))


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _read(path: Path) -> str | None:
    try:
        with tokenize.open(path) as file:  # in the encoding that the file declares
            return file.read()
    except (OSError, SyntaxError, UnicodeError):
        return None


def _text_of_object(value: Any) -> str | None:
    """The code of a class or a function, where Python still knows it."""
    try:
        return _normalised_or_raw(textwrap.dedent(inspect.getsource(value)))
    except (OSError, TypeError, IndentationError, tokenize.TokenError):
        return None


def _normalised_or_raw(code: str | None) -> str:
    try:
        return normalised(code or "")
    except (SyntaxError, ValueError):
        return (code or "").strip()  # a lambda in the middle of a line


def _names_in(sources: Iterable[str]) -> Callable[[str], bool]:
    """Whether a name occurs in code: as a name, an attribute, an argument or a string.

    Also where it is put together: with f"{split}_stages" in the code, `train_stages` occurs.
    """
    names: set[str] = set()
    parts: set[str] = set()
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            names |= set(re.findall(r"\w+", source))
            continue
        for node in ast.walk(tree):
            names |= _words(node)
            if isinstance(node, ast.JoinedStr | ast.BinOp):
                parts |= {word for child in ast.iter_child_nodes(node) for word in _words(child, ("value",))}
    ends = tuple(part for part in parts if len(part) > 2 and part.startswith("_"))
    starts = tuple(part for part in parts if len(part) > 2 and part.endswith("_"))
    return lambda name: name in names or name.endswith(ends) or name.startswith(starts)


def _words(node: ast.AST, where: tuple[str, ...] = ("id", "attr", "arg", "value", "name")) -> set[str]:
    return {word for word in (getattr(node, part, None) for part in where) if isinstance(word, str)}


# Values


def _plain(value: Any, depth: int = 0) -> Any:
    """A setting as JSON, to be shown and compared: text that is the same in every process and version of Python."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if depth > _DEPTH:
        return "..."  # it may hold itself
    inside = partial(_plain, depth=depth + 1)
    if isinstance(value, list | tuple):
        return [inside(item) for item in value]
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): inside(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):  # Python shows them in another order every time
        return sorted((inside(item) for item in value), key=encode)
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):  # shown, a long array would be cut
        if getattr(value, "shape", None) == ():
            return inside(value.item())
        return f"{value.dtype}{list(value.shape)} {fingerprint_bytes(value.tobytes())}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, types.MethodType):
        return [inside(value.__func__), inside(value.__self__)]
    if isinstance(value, partial):
        return [inside(value.func), inside(value.args), inside(value.keywords)]
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return _plain_code(value, inside)
    is_told = not _is_shown_by_default(value) or not is_users(type(value).__module__)
    held = {} if is_told else {name: inside(part) for name, part in sorted(getattr(value, "__dict__", {}).items())}
    kind = None if is_told else inside(type(value))
    text = _without_address(repr(value))
    return text if is_told or (not held and isinstance(kind, str)) else {"object of": kind, **held}


def _is_shown_by_default(value: Any) -> bool:
    """As `<Thing object>`, which says nothing of what it holds."""
    return getattr(type(value), "__repr__", None) is getattr(object, "__repr__", None)


def _plain_code(value: Any, inside: Callable[[Any], Any]) -> Any:
    """A function or a class: its code, or what the class has where Python does not know that: of one in a config."""
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if not is_users(getattr(value, "__module__", None)):
        return name
    if (text := _text_of_object(value)) is not None:
        return text
    parts = vars(value).items() if isinstance(value, type) else ()
    held = {
        part: inside(getattr(what, "__func__", None) or getattr(what, "fget", None) or what)
        for part, what in sorted(parts)
        if not (part.startswith("__") and part.endswith("__")) or isinstance(what, types.FunctionType)
    }
    return {"class": name, **held} if held else name


def _without_address(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


# Differences


def differences(old: Stamp, new: Stamp) -> list[str]:
    """What changed, one line each: empty when nothing did."""
    lines = [*_schema_differences(old.meta, new.meta)]
    lines += _value_differences(
        {key: value for key, value in old.meta.items() if key != "batch_schema" or not _is_schema(value)},
        {key: value for key, value in new.meta.items() if key != "batch_schema" or not _is_schema(value)},
        "meta",
    )
    for name in sorted(old.settings.keys() | new.settings.keys()):
        was, is_now = old.settings.get(name, _ABSENT), new.settings.get(name, _ABSENT)
        if was is _ABSENT or is_now is _ABSENT or encode(was) != encode(is_now):
            lines.append(_changed(f"config {name}", was, is_now))
    if old.seed != new.seed:
        lines.append(_changed("seed", old.seed, new.seed))
    for file in {**old.inputs, **new.inputs}:
        if old.inputs.get(file) != new.inputs.get(file):
            what = "is new" if file not in old.inputs else "is gone" if file not in new.inputs else "has other content"
            lines.append(f"raw file {file} {what}")
    if list(old.inputs) != list(new.inputs) and old.inputs == new.inputs:
        lines.append("raw files have another order")
    for file in sorted(old.source.keys() | new.source.keys()):
        lines += _source_differences(file, old.source.get(file), new.source.get(file))
    return lines


_ABSENT = object()


def _changed(what: str, was: Any, is_now: Any) -> str:
    if was is _ABSENT:
        return f"{what} is new: {_short(is_now)}"
    if is_now is _ABSENT:
        return f"{what} is gone: it was {_short(was)}"
    return f"{what} was {_short(was)}, and is {_short(is_now)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE_CHARS else f"{text[: _VALUE_CHARS - 10]}...{text[-7:]}"


def _is_schema(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(f, dict) and isinstance(f.get("name"), str) for f in value)


def _schema_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The fields that changed, by their names."""
    schemas = [meta.get("batch_schema", []) for meta in (old, new)]
    if not all(map(_is_schema, schemas)):
        return []
    was, is_now = ({field["name"]: field for field in schema} for schema in schemas)
    lines = []
    for name in {**was, **is_now}:
        if name not in was or name not in is_now:
            field = {key: value for key, value in (was.get(name) or is_now[name]).items() if key != "name"}
            lines.append(_changed(f"field {name!r}", *((field, _ABSENT) if name in was else (_ABSENT, field))))
            continue
        for key in {**was[name], **is_now[name]}:
            values = was[name].get(key, _ABSENT), is_now[name].get(key, _ABSENT)
            if _ABSENT in values or encode(values[0]) != encode(values[1]):
                lines.append(_changed(f"field {name!r}: {key}", *values))
    if not lines and list(was) != list(is_now):
        lines.append(f"the order of fields was {', '.join(was)}, and is {', '.join(is_now)}")
    return lines


def _value_differences(was: Any, is_now: Any, path: str) -> list[str]:
    if encode(was) == encode(is_now):
        return []
    if isinstance(was, dict) and isinstance(is_now, dict):
        per_key = []
        for key in {**was, **is_now}:
            if key in was and key in is_now:
                per_key.append(_value_differences(was[key], is_now[key], f"{path}[{key!r}]"))
            else:
                per_key.append([_changed(f"{path}[{key!r}]", was.get(key, _ABSENT), is_now.get(key, _ABSENT))])
        changed = [lines for lines in per_key if lines]
        if not changed:
            return [f"the keys of {path} have another order"]
        more = len(changed) - _KEYS_SHOWN
        shown = [line for lines in changed[:_KEYS_SHOWN] for line in lines]
        return [*shown, f"and {more:,} more of {path}"] if more > 0 else shown
    if isinstance(was, list) and isinstance(is_now, list) and len(_short(was)) + len(_short(is_now)) > _VALUE_CHARS:
        lines = [f"{path} had {len(was):,} items, and has {len(is_now):,}"] if len(was) != len(is_now) else []
        both = enumerate(zip(was, is_now, strict=False))
        apart = [i for i, (one, other) in both if encode(one) != encode(other)]
        if apart:
            lines += _value_differences(was[apart[0]], is_now[apart[0]], f"{path}[{apart[0]}]")
            lines += [f"and {len(apart) - 1:,} more of {path}"] if len(apart) > 1 else []
        return lines
    return [_changed(path, was, is_now)]


def _source_differences(file: str, was: str | None, is_now: str | None) -> list[str]:
    if was is None or is_now is None:
        return [f"{file} is {'new' if was is None else 'gone'}"]
    # Both in the words of this Python: another version writes the same code a little differently.
    before, after = _normalised_or_raw(was), _normalised_or_raw(is_now)
    if before == after:
        return []
    diff = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm=""))[2:]
    lines = ["..." if line.startswith("@@") else line for line in diff if line.strip()]
    lines = lines[1:] if lines[0] == "..." else lines
    more = len(lines) - _DIFF_LINES
    told = [*lines[:_DIFF_LINES], f"... and {more:,} more"] if more > 0 else lines
    return [f"{file} changed:", *(f"  {line}" for line in told)]
