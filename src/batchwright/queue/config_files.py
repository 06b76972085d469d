"""The Python files of a config: running them, and finding the line that last set a name."""

from __future__ import annotations

import ast
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["Namespace", "Problem", "literal_dataset", "problem_of", "run_file"]

_MODULE_NAME = "batchwright_config"


class Problem(NamedTuple):
    """One thing that is wrong with a config."""

    what: str
    at: str
    """A file and line, or an option of the command line."""
    remedy: str


class Namespace(dict[str, Any]):
    """The globals of a config file while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, str] = {}
        """The file and line that set each name last."""

    def __setitem__(self, name: str, value: Any) -> None:
        frame = sys._getframe(1)
        self.lines[name] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        super().__setitem__(name, value)

    def settings(self) -> dict[str, Any]:
        """Public names and their values, without imported modules, functions and classes."""
        return {name: value for name, value in self.items() if not name.startswith("_") and not _is_tool(name, value)}


def _is_tool(name: str, value: Any) -> bool:
    if isinstance(value, ModuleType):
        return True
    is_imported = getattr(value, "__module__", None) != _MODULE_NAME
    return callable(value) and is_imported and getattr(value, "__name__", None) == name


def run_file(file: Path, namespace: dict[str, Any]) -> Problem | None:
    """Run a file. Where it fails, the names that it had set before stay set."""
    before = sys.modules.get(_MODULE_NAME)
    sys.modules[_MODULE_NAME] = ModuleType(_MODULE_NAME)  # dataclasses look up the module that they are written in
    namespace.update(__name__=_MODULE_NAME, __file__=os.path.abspath(file))
    try:
        exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), namespace)
    except (Exception, SystemExit) as error:
        return problem_of(error, file)
    finally:
        del sys.modules[_MODULE_NAME]
        if before is not None:
            sys.modules[_MODULE_NAME] = before
    return None


def problem_of(error: BaseException, file: Path) -> Problem:
    """The error of a config file as a problem, with the last line of the file that ran."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == str(file)]
    what = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines = [error.lineno or 1]
        what = f"{type(error).__name__}: {error.msg}: {(error.text or '').strip()}".removesuffix(": ")
    at = ":".join(map(str, [file, *lines[-1:]]))
    remedy = f"correct {at}"
    if isinstance(error, SystemExit):
        what, remedy = f"the file ends the program ({what})", f"take the exit out of {at}"
    elif isinstance(error, ModuleNotFoundError) and error.name:
        remedy = f"install {error.name.partition('.')[0]}, or put the folder that holds it on PYTHONPATH"
    return Problem(what, at, remedy)


def literal_dataset(file: Path) -> str | None:
    """The value of a plain `dataset = '...'`; None if another line might set that name too."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return None
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "dataset"]
    if sum(isinstance(name.ctx, ast.Store) for name in names) != 1:
        return None
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="dataset")], value=ast.Constant(value=str(value))):
                return value
    return None
