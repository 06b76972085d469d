"""From a shared config to the provider that it means: the file is loaded, the class found, and made with the config."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import sys
import tokenize
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from batchwright.base.errors import BatchwrightError, SpecError
from batchwright.queue.names import base_parameters

if TYPE_CHECKING:
    from batchwright.queue.config import SharedConfig
    from batchwright.queue.provider import DataProviderBase

__all__ = ["PROVIDER_FILE", "load_provider_module", "open_provider", "provider_class", "refuse_direct_run"]

PROVIDER_FILE = "prepare_streaming.py"

_MODULE_NAME = "prepare_streaming_of_"

_opened: set[str] = set()
"""Data folders whose providers this process has loaded: files beside them may have the same names."""


def open_provider(config: SharedConfig) -> DataProviderBase:
    """The provider of the config's dataset, from `data/<dataset>/prepare_streaming.py`, made with the whole config.

    The file runs with the config's names as globals. It is loaded anew each time, and files beside it that it imports
    too: what was edited counts.
    """
    module = load_provider_module(Path(config.data_dir), config)
    return _made(provider_class(module), config)


# The module


def load_provider_module(folder: Path, names: Mapping[str, Any]) -> ModuleType:
    """`prepare_streaming.py` of a data folder, run with these names as its globals."""
    file = folder / PROVIDER_FILE
    text = _read(file)
    name = _MODULE_NAME + re.sub(r"\W", "_", folder.resolve().name)
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update(names)
    # What runs is what was read now: the file may be edited while the provider counts its characters.
    module.__dict__["__source__"] = text
    try:
        tree = _without_defaults(ast.parse(text), names)
        code = compile(tree, str(file.resolve()), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise SpecError(
            f"{file}{line}: {type(error).__name__}: {reason}",
            file=file,
            line=(error.text or "").strip() or None if isinstance(error, SyntaxError) else None,
            remedy=f"python -m py_compile {file} shows the same",
        ) from error
    _put_on_path(folder.resolve())
    sys.modules[name] = module  # where dataclasses, pickle and inspect look for it
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(error, file, "while it was loaded") from error
    return module


def _read(file: Path) -> str:
    try:
        with tokenize.open(file) as opened:  # in the encoding that it declares
            return opened.read()
    except FileNotFoundError:
        folder = file.parent
        there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None
        raise SpecError(
            f"there is no {file}" if there is not None else f"there is no folder {folder}",
            parameter="dataset",
            found=None if there is None else ", ".join(there[:20]) or "nothing",
            remedy=f"a file {PROVIDER_FILE} with a subclass of batchwright.DataProviderBase, or another dataset",
        ) from None
    except (SyntaxError, UnicodeError) as error:
        raise SpecError(f"{file} is not Python text: {error}", file=file, remedy="save it as UTF-8") from error


def _put_on_path(folder: Path) -> None:
    """Files beside a provider can be imported, before any others of their names, and as they are now."""
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


def _without_defaults(tree: ast.Module, names: Iterable[str]) -> ast.Module:
    """The module without assignments of constants, at its top, to names that the config sets: those are defaults.

    What is computed (`vocab_size = len(chars)`) stays. Lines keep their numbers.
    """
    given = set(names)
    tree.body = [kept for statement in tree.body for kept in _without_default(statement, given)]
    return tree


def _without_default(statement: ast.stmt, given: set[str]) -> Iterator[ast.stmt]:
    if isinstance(statement, ast.AnnAssign):
        is_default = statement.value is not None and _is_constant(statement.value)
        if is_default and isinstance(statement.target, ast.Name) and statement.target.id in given:
            statement.value = None  # `mask_probability: float` stays, and assigns nothing
        yield statement
    elif isinstance(statement, ast.Assign) and _is_constant(statement.value):
        for target in statement.targets:
            if isinstance(target, ast.Name) and target.id in given:
                continue
            value = _but_for_given(target, statement.value, given)
            yield ast.copy_location(ast.Assign([target], value), statement)
    else:
        yield statement


def _but_for_given(target: ast.expr, value: ast.expr, given: set[str]) -> ast.expr:
    """`a, b = 1, 2` with a in the config: as `a, b = a, 2`."""
    if not (isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List)):
        return value
    if len(target.elts) != len(value.elts) or any(isinstance(name, ast.Starred) for name in target.elts):
        return value
    pairs = zip(target.elts, value.elts, strict=True)
    elements = [
        ast.copy_location(ast.Name(name.id, ast.Load()), default)
        if isinstance(name, ast.Name) and name.id in given
        else default
        for name, default in pairs
    ]
    return ast.copy_location(ast.Tuple(elements, ast.Load()), value)


_OF_CONSTANTS = (
    *(ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp),
    *(ast.operator, ast.unaryop, ast.expr_context),
)


def _is_constant(value: ast.expr) -> bool:
    """Whether an expression is written in numbers, text and brackets alone: nothing is looked up or called."""
    return all(isinstance(node, _OF_CONSTANTS) for node in ast.walk(value))


def _failed(error: BaseException, file: Path, when: str) -> SpecError:
    """What a provider's own code raised: where in its folder, and what."""
    at = next(
        (
            f"{file.parent / Path(frame.filename).relative_to(file.parent.resolve())}:{frame.lineno}"
            for frame in reversed(traceback.extract_tb(error.__traceback__))
            if Path(frame.filename).is_relative_to(file.parent.resolve())
        ),
        str(file),
    )
    said = error.headline if isinstance(error, BatchwrightError) else str(error)
    remedy = "correct the file; nothing was made"
    if isinstance(error, BatchwrightError):
        remedy = error.remedy or remedy
    elif isinstance(error, ModuleNotFoundError) and error.name:
        remedy = f"pip install {error.name.partition('.')[0]}, or a file {error.name}.py beside {file}"
    elif isinstance(error, ImportError) and "relative import" in said:
        remedy = "import it without the dots: a file beside this one is found by its plain name"
    elif isinstance(error, NameError) and error.name:
        remedy = f"set {error.name} in the config, or in {file}"
    return SpecError(f"{at}: {type(error).__name__} {when}: {said}".rstrip(": "), file=file, remedy=remedy)


# The class


def provider_class(module: ModuleType) -> type[DataProviderBase]:
    """The symbol `Provider`, or else the only subclass of DataProviderBase that the module defines."""
    from batchwright.queue.provider import DataProviderBase

    kinds = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, DataProviderBase) and value is not DataProviderBase
    }
    own = {value.__qualname__: value for value in kinds.values() if value.__module__ == module.__name__}
    imported = {name: value for name, value in kinds.items() if value.__module__ != module.__name__}
    file = Path(str(module.__file__))
    lines = _class_lines(str(vars(module)["__source__"]))
    found = [f"{name} (line {lines[name]})" if name in lines else name for name in own]
    found += [f"{name} (imported from {value.__module__}, which does not count)" for name, value in imported.items()]
    where = {"file": file, "found": "\n".join(found) or "no subclass of DataProviderBase"}
    if "Provider" in vars(module):
        if "Provider" in kinds:
            return kinds["Provider"]
        raise SpecError(
            f"Provider in {file.parent.name}/{file.name} is no subclass of DataProviderBase: "
            f"{_shown(vars(module)['Provider'])}",
            **where,
            remedy=f"Provider = {next(iter(own), 'YourSubclass')}, or call that symbol something else",
        )
    if len(own) == 1:
        return next(iter(own.values()))
    chosen = next(iter({**own, **imported}), None)
    headline = f"several subclasses of DataProviderBase in {file.parent.name}/{file.name}: which one is meant?"
    if not own:
        headline = f"no subclass of DataProviderBase in {file.parent.name}/{file.name}"
    raise SpecError(
        headline,
        **where,
        remedy=f"Provider = {chosen} at its end" if chosen else "class MyProvider(batchwright.DataProviderBase): ...",
    )


def _class_lines(text: str) -> dict[str, int]:
    return {node.name: node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _made(kind: type[DataProviderBase], config: SharedConfig) -> DataProviderBase:
    """The provider, with every name of the config: those that its __init__ takes are given to it."""
    settings: dict[str, Any] = {**config, "data_dir": config.data_dir}
    file = Path(config.data_dir) / PROVIDER_FILE
    parameters = inspect.signature(kind).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    taken = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    missing = [each.name for each in taken if each.default is each.empty and each.name not in settings]
    if missing:
        raise SpecError(
            f"{kind.__qualname__}.__init__ takes {', '.join(missing)}, and the config does not set "
            f"{'it' if len(missing) == 1 else 'them'}",
            parameter=missing[0],
            config=config.path,
            file=file,
            remedy=f"{missing[0]} = ... in the config, or a default in __init__",
        )
    names = {each.name for each in taken}
    given = settings if takes_all else {name: value for name, value in settings.items() if name in names}
    try:
        provider = kind(**given)
    except BatchwrightError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(error, file, f"in {kind.__qualname__}.__init__") from error
    if "config" not in vars(provider):
        raise SpecError(
            f"{kind.__qualname__}.__init__ does not call the __init__ of DataProviderBase",
            parameter="__init__",
            file=file,
            remedy="def __init__(self, **settings): super().__init__(**settings), and then your own",
        )
    # What an __init__ did not hand on to the base class. What it made of its own arguments stays.
    kept_back = {
        name
        for name, default in base_parameters().items()
        if name in config and name not in names and getattr(provider, name, default) == default
    }
    own = {name: value for name, value in vars(provider).items() if name in given and name not in kept_back}
    unknown = kept_back | {name for name in config if name not in provider.config}
    provider._take_config({name: value for name, value in config.items() if name in unknown})
    vars(provider).update(own)
    return provider


def refuse_direct_run(kind: type) -> None:
    """End a process that runs a provider's file by itself: without the config it would make other data."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(file, str) and Path(file).name == PROVIDER_FILE:
        given = shlex.quote(next((word for word in sys.argv[1:] if word.endswith(".py")), "CONFIG"))
        raise SystemExit(
            f"batchwright: {file} is not run by itself: {kind.__qualname__} needs the shared config\n"
            f"  try        batchwright prepare {given}, or python prepare.py {given}"
        )
