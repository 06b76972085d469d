"""The provider of a shared config. `prepare_streaming.py` is run, and its class is found and made with the config."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from batchwright.base.errors import BatchwrightError, SpecError
from batchwright.base.plugins import module_for, run_file
from batchwright.base.words import listed
from batchwright.queue.provider import DataProviderBase

if TYPE_CHECKING:
    from batchwright.queue.config import SharedConfig

__all__ = ["open_provider"]

PROVIDER_FILE = "prepare_streaming.py"
_MODULE_NAME = "prepare_streaming_of_"

_opened: set[str] = set()
"""Data folders whose providers this process has loaded: files beside them may have the same names."""


def open_provider(config: SharedConfig) -> DataProviderBase:
    """The provider of the config's dataset, from `data/<dataset>/prepare_streaming.py`, made with the whole config.

    The file runs with the config's names as globals. It is loaded anew each time, with the files beside it that it
    imports: edits count.
    """
    module = _load(Path(config.data_dir), config)
    return _make(_provider_class(module), config)


# The module


def _load(folder: Path, names: Mapping[str, Any]) -> ModuleType:
    file = folder / PROVIDER_FILE
    name = _MODULE_NAME + re.sub(r"\W", "_", folder.resolve().name)
    _put_on_path(folder.resolve())
    module = module_for(file.resolve(), name)
    module.__dict__.update(names)
    try:
        run_file(module, lambda tree: _without_defaults(tree, names))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(error, file, "while it was loaded") from error
    return module


def _put_on_path(folder: Path) -> None:
    """Let files beside a provider be imported, before other files of the same names, in their current state."""
    _opened.add(str(folder) + os.sep)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_providers = name == "__main__" or name.startswith(_MODULE_NAME)
        if isinstance(file, str) and file.startswith(tuple(_opened)) and not is_providers:
            del sys.modules[name]
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def _without_defaults(tree: ast.Module, names: Mapping[str, Any]) -> ast.Module:
    """The module, whose assignments of constants to names that the config sets go to another name: they are defaults.

    Computed values (`vocab_size = len(chars)`) stay. Lines keep their numbers.
    """
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and _is_constant(statement.value):
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names:
                    node.id = "_default"
    return tree


_OF_CONSTANTS = (
    *(ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp),
    *(ast.operator, ast.unaryop, ast.expr_context),
)


def _is_constant(value: ast.expr | None) -> bool:
    """Whether an expression has only numbers, text and brackets, without names or calls."""
    return value is not None and all(isinstance(node, _OF_CONSTANTS) for node in ast.walk(value))


class Fault(NamedTuple):
    """One thing that is wrong with a config or with a provider's file."""

    what: str
    at: str
    """A file and line, or an option of the command line."""
    remedy: str


def fault_of(error: BaseException, file: Path, when: str = "") -> Fault:
    """The error of a user's file. Its place is the last line that ran in the folder of the file."""
    folder, at = file.parent.resolve(), str(file)
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((str(error.filename), error.lineno or 1))
    for name, line in places:
        is_theirs = "site-packages" not in name and Path(name).is_relative_to(folder)  # an environment may lie there
        if name == str(file) or is_theirs:
            at = f"{name.replace(str(folder), str(file.parent), 1)}:{line}"
    said, remedy = " ".join(str(error).split()), f"correct {at}"
    match error:
        case BatchwrightError():
            said, remedy = error.headline, error.remedy or remedy
        case SyntaxError():
            said = f"{error.msg}: {(error.text or '').strip()}"
        case SystemExit():
            remedy = f"take the exit out of {at}"
        case ModuleNotFoundError(name=str(name)):
            remedy = f"pip install {name.partition('.')[0]}, or put the folder that has it on PYTHONPATH"
        case ImportError() if "relative import" in said:
            remedy = "import it without the dots: a file beside this one is found by its plain name"
        case NameError(name=str(name)):
            remedy = f"correct {at}, or set {name} in the config"
    kind = f"{type(error).__name__} {when}".strip()
    return Fault(f"{kind}: {said}".rstrip(": "), at, remedy)


def _failed(error: BaseException, file: Path, when: str) -> SpecError:
    fault = fault_of(error, file, when)
    return SpecError(f"{fault.at}: {fault.what}", file=file, remedy=fault.remedy)


# The class


def _provider_class(module: ModuleType) -> type[DataProviderBase]:
    """The symbol `Provider`, or else the only subclass of DataProviderBase that the module defines."""
    kinds = {name: value for name, value in vars(module).items() if _is_provider(value)}
    own = {value.__qualname__: value for value in kinds.values() if value.__module__ == module.__name__}
    if "Provider" in kinds:
        return kinds["Provider"]
    if len(own) == 1 and "Provider" not in vars(module):
        return next(iter(own.values()))
    file = Path(str(module.__file__))
    imported = [f"{one} (imported from {kind.__module__})" for one, kind in kinds.items() if one not in own]
    raise SpecError(
        f"{file.parent.name}/{file.name} needs one subclass of DataProviderBase, or one with the name Provider",
        file=file,
        found=listed([*own, *imported]) or "no subclass of DataProviderBase",
        remedy=f"Provider = {next(iter(kinds), 'YourSubclass')} at its end, for a class YourSubclass(DataProviderBase)",
    )


def _is_provider(value: Any) -> TypeGuard[type[DataProviderBase]]:
    return isinstance(value, type) and issubclass(value, DataProviderBase) and value is not DataProviderBase


def _make(kind: type[DataProviderBase], config: SharedConfig) -> DataProviderBase:
    """The provider, with every name of the config: those that its __init__ takes are given to it."""
    settings: dict[str, Any] = {**config, "data_dir": config.data_dir}
    file = Path(config.data_dir) / PROVIDER_FILE
    parameters = inspect.signature(kind).parameters
    named = {name: one for name, one in parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    missing = [name for name, one in named.items() if one.default is one.empty and name not in settings]
    if missing:
        raise SpecError(
            f"{kind.__qualname__}.__init__ takes {', '.join(missing)}, which the config does not set",
            parameter=missing[0],
            config=config.path,
            file=file,
            remedy=f"{missing[0]} = ... in the config, or a default in __init__",
        )
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    given = {name: value for name, value in settings.items() if takes_all or name in named}
    try:
        provider = kind(**given)
    except BatchwrightError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(error, file, f"in {kind.__qualname__}.__init__") from error
    if "config" not in vars(provider):
        what = f"{kind.__qualname__}.__init__ does not call the __init__ of DataProviderBase"
        remedy = "def __init__(self, **settings): super().__init__(**settings), and then your own"
        raise SpecError(what, parameter="__init__", file=file, remedy=remedy)
    provider._take_missing(config)
    return provider
