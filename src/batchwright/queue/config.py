"""The config shared by provider and trainer: Python files that are run, then settings of the command line.

    config = load_config("config/train_char_diffusion.py", ["--batch_size=64"])
    config.batch_size, config["learning_rate"], config.data_dir

`data/<dataset>/config/*.py` run first, by name. The shared config runs next, in the same namespace. It can use and
replace their settings. Each `--name=value` then replaces one value. Values that the files computed from the old one
stay. Config files are executed, with all the rights of your own programs.

All faults are reported together, in one SpecError with files, lines and remedies.
"""

from __future__ import annotations

import ast
import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, NoReturn, TypeGuard

from batchwright.base.checks import local_path
from batchwright.base.errors import SpecError
from batchwright.base.words import counted, listed, shortened, suggest, truncated
from batchwright.queue.provider import RESERVED
from batchwright.queue.provider_file import PROVIDER_FILE, Fault, fault_of
from batchwright.queue.settings import SETTINGS, checked_setting

__all__ = ["SharedConfig", "load_config"]

# The Python files of a config


_MODULE_NAME = "batchwright_config"


class _Namespace(dict[str, Any]):
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


def _run_file(file: Path, namespace: dict[str, Any]) -> Fault | None:
    """Run a file. Where it fails, the names that it had set before stay set."""
    sys.modules[_MODULE_NAME] = ModuleType(_MODULE_NAME)  # dataclasses look up the module that they are written in
    namespace.update(__name__=_MODULE_NAME, __file__=os.path.abspath(file))
    try:
        exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), namespace)
    except (Exception, SystemExit) as error:
        return fault_of(error, file)
    finally:
        sys.modules.pop(_MODULE_NAME, None)
    return None


def _literal_dataset(file: Path) -> str | None:
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


# Settings


_VALIDATOR_FILE = "validator.py"
_MOST_CHARS = 400
_REQUIRED = {"dataset": "'<folder under data/>'", "batch_size": "64", "block_size": "256"}


class SharedConfig(Mapping[str, Any]):
    """The settings of a run, by name and as attributes; read only.

    `path` is the shared config's file, `data_dir` the folder `data/<dataset>`. `origins` has the place where each name
    was set: "file:line", or "--name". `config["path"]` is the setting of that name, if there is one. Pickles if its
    values do.
    """

    path: Path
    data_dir: Path
    origins: dict[str, str]
    _values: dict[str, Any]

    def __init__(
        self, values: Mapping[str, Any], path: Path, data_dir: Path, origins: Mapping[str, str] | None = None
    ) -> None:
        own = {"_values": dict(values), "path": Path(path), "data_dir": Path(data_dir), "origins": dict(origins or {})}
        vars(self).update(own)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        near = suggest(name, self._values)
        hint = f"; did you mean {near}?" if near else ""
        raise AttributeError(f"{self.path} sets no {name}{hint}", name=name, obj=self)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a config is read only: set {name} in {self.path}, or give --{name}=...")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a config is read only: {name} stays")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedConfig, (self._values, self.path, self.data_dir, self.origins)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={self._values[name]!r}" for name in _REQUIRED if name in self._values)
        return f"SharedConfig({str(self.path)!r}, {shown}, {len(self)} settings)"


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, data: str | os.PathLike[str] = "data"
) -> SharedConfig:
    """Run the config files at `path` and check their settings. `data` is the folder of all datasets. `overrides` are
    `--name=value`, values as Python writes them.

    A config whose `dataset` is not a plain string (`dataset = 'name'`) is run twice: once alone, to find it.
    A `validator.py` beside the config may define `validate(config)`: the strings that it returns, or the ValueError
    that it raises, are reported with everything else that is wrong.
    """
    loading = _Loading(_config_file(path), local_path(data=data))
    wanted = loading.parse_overrides(overrides)
    loading._run_files(wanted.get("dataset"))
    loading.replace(wanted)
    loading.check_settings()
    loading.check_dataset()
    config = SharedConfig(
        loading.values, loading.path, loading.data / str(loading.values.get("dataset", "")), loading.origins
    )
    loading.ask_validator(config)
    if loading.problems:
        raise SpecError(
            f"{counted(len(loading.problems), 'problem')} in the config {loading.path}",
            problems="\n".join(f"{problem.at}: {problem.what}" for problem in loading.problems),
            remedy="\n".join(dict.fromkeys(problem.remedy for problem in loading.problems)),
        )
    return config


def _config_file(path: str | os.PathLike[str]) -> Path:
    file = local_path(path=path)
    if file.is_file():
        return file
    folders = dict.fromkeys([file if file.is_dir() else file.parent, Path("config"), Path()])
    there = [str(folder / name) for folder in folders for name in _python_files(folder)]
    near = _nearest_first(str(file), there)
    what = f"{file} is a folder, not a config file" if file.is_dir() else f"there is no config file {file}"
    remedy = near[0] if near else "go to the folder that holds config/ and data/, or give the file's whole path"
    raise SpecError(what, folder=Path.cwd(), files=listed(near) or None, remedy=remedy)


def _python_files(folder: Path) -> list[str]:
    """The config files of a folder, by name. Empty if the folder does not exist."""
    names = sorted(path.name for path in folder.glob("*.py"))
    return [name for name in names if name != _VALIDATOR_FILE and not name.startswith(".")]


def _nearest_first(wanted: str, names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (-difflib.SequenceMatcher(None, wanted, name).ratio(), name))


@dataclass(slots=True)
class _Loading:
    """A config while it is loaded: its settings so far, the places that set them, and the problems found."""

    path: Path
    data: Path
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Fault] = field(default_factory=list)
    has_failed: bool = False
    """A file did not run to its end: it might have set any name that is missing."""

    def _add(self, what: str, at: str, remedy: str) -> None:
        self.problems.append(Fault(truncated(" ".join(what.split()), _MOST_CHARS), at, remedy))

    def _at(self, name: str) -> str:
        return self.origins.get(name, str(self.path))

    # The files

    def _run_files(self, given: str | None) -> None:
        """Run the files of the dataset, then the shared config. `given`: the dataset of the command line."""
        dataset = self._find_dataset(given)
        files = []
        if _is_folder_name(dataset):
            folder = self.data / dataset / "config"
            files = [folder / name for name in _python_files(folder)]
        files = [*(file for file in files if not os.path.samefile(file, self.path)), self.path]
        namespace = _Namespace()
        failures = [problem for file in files if (problem := _run_file(file, namespace))]
        self.problems += failures
        self.has_failed = bool(failures)
        self.values = namespace.settings()
        self.origins = {name: namespace.lines.get(name, str(self.path)) for name in self.values}
        final = self.values.get("dataset", dataset)
        if given is None and final != dataset and not failures:
            what = f"dataset is {dataset!r} before and {final!r} after {self.data / str(dataset) / 'config'} was loaded"
            self._add(what, self._at("dataset"), f"dataset = {dataset!r}, as a plain string, in {self.path}")

    def _find_dataset(self, given: str | None) -> Any:
        if given is not None:
            return _plain_text(given)
        dataset = _literal_dataset(self.path)
        if dataset is not None:
            return dataset
        alone = _Namespace()
        _run_file(self.path, alone)
        return alone.get("dataset")

    # The command line

    def parse_overrides(self, overrides: Sequence[str]) -> dict[str, str]:
        """Name and text of each `--name=value`; the last one of a name counts."""
        wanted = {}
        for word in map(str, overrides):
            name, equals, text = word.removeprefix("--").partition("=")
            if word.startswith("--") and name and equals:
                wanted[name] = text
            else:
                self._add("is not of the form --name=value", word, "--batch_size=64, in one word without spaces")
        return wanted

    def replace(self, wanted: Mapping[str, str]) -> None:
        """Replace values of the files by those of the command line."""
        for name, text in wanted.items():
            if name in self.values or name in SETTINGS:
                self._replace(name, text)
            elif not self.has_failed:
                what = f"no config file sets {name}, so there is nothing to replace"
                near = suggest(name, [*self.values, *SETTINGS])
                self._add(what, f"--{name}", f"--{near}={text}" if near else f"{name} = {text} in {self.path}")

    def _replace(self, name: str, text: str) -> None:
        old = self.values.get(name)
        try:
            self.values[name] = _like(old, text)
        except TypeError as error:
            kind = type(old).__name__
            what = f"{error}; it would replace {shortened(old)}, which is of type {kind} ({self._at(name)})"
            self._add(what, f"--{name}={text}", f"--{name}=VALUE of type {kind}, or set {name} in {self.path}")
        else:
            self.origins[name] = f"--{name}"

    # The checks

    def check_settings(self) -> None:
        for name, example in _REQUIRED.items():
            if not self.has_failed and name not in self.values:
                self._add(f"{name} is not set", str(self.path), f"{name} = {example} in {self.path}")
        for name in sorted(RESERVED & self.values.keys()):
            what = f"{name} is a method or attribute that every provider has"
            self._add(what, self._at(name), f"rename {name}, e.g. to {name}_setting")
        for name in filter(self.values.__contains__, SETTINGS):
            try:
                checked_setting(name, self.values[name])
            except SpecError as error:
                option = "--" if self._at(name).startswith("--") else ""
                self._add(error.headline, self._at(name), f"{option}{error.remedy}")

    def check_dataset(self) -> None:
        """Check that the dataset has a folder, with a provider in it."""
        dataset, at = self.values.get("dataset"), self._at("dataset")
        if "dataset" not in self.values:
            return
        if not _is_folder_name(dataset):
            what = f"dataset={shortened(dataset)} must be the plain name of a folder under {self.data}"
            self._add(what, at, "dataset = 'name'")
        elif not (folder := self.data / dataset).is_dir():
            there = [path.name for path in self.data.glob("[!.]*") if path.is_dir()]
            near = listed(_nearest_first(dataset, there)) or f"nothing; this is {Path.cwd()}"
            remedy = f"make the folder {folder} with {PROVIDER_FILE}"
            if name := suggest(dataset, there):
                remedy = f"dataset = {name!r}, or {remedy}"
            self._add(f"there is no folder {folder}; {self.data} holds {near}", at, remedy)
        elif not (folder / PROVIDER_FILE).is_file():
            what = f"there is no {PROVIDER_FILE}; it holds {listed(_python_files(folder)) or 'no Python file'}"
            self._add(what, str(folder), f"write {folder / PROVIDER_FILE} with a DataProviderBase subclass")

    def ask_validator(self, config: SharedConfig) -> None:
        """Add the problems from `validate(config)` of a validator.py beside the config."""
        file = self.path.parent / _VALIDATOR_FILE
        if not file.is_file() or self.has_failed:  # the check of half a config could only repeat known problems
            return
        namespace: dict[str, Any] = {}
        if problem := _run_file(file, namespace):
            self.problems.append(problem)
            return
        try:
            said = namespace.get("validate", lambda config: ())(config) or ()
            texts = [said] if isinstance(said, str) else [str(text) for text in said]
        except ValueError as error:
            texts = [str(error) or "ValueError"]
        except (Exception, SystemExit) as error:
            if not self.problems:  # otherwise most likely a consequence of those
                problem = fault_of(error, file)
                self.problems.append(problem._replace(what=f"validate(config) failed: {problem.what}"))
            return
        for text in texts:
            self._add(" ".join(text.split()), str(file), f"change {self.path} as {file} asks")


def _is_folder_name(dataset: Any) -> TypeGuard[str]:
    if not isinstance(dataset, str) or not dataset.strip() or dataset.startswith("."):
        return False
    return len(os.fsencode(dataset)) < 256 and not {"/", "\\", "\0"} & set(dataset)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _plain_text(text: str) -> str:
    """`toy` of `toy` and of `'toy'`."""
    value = _literal(text)
    return value if isinstance(value, str) else text


def _like(old: Any, text: str) -> Any:
    """Return a value of the command line as the type of the value that it replaces.

    >>> _like(1e-3, "1"), _like("toy", "2024"), _like([1, 2], "(3, 4)")
    (1.0, '2024', [3, 4])
    """
    value = _literal(text)
    match old, value:
        case None, _:
            return value
        case str(), _:  # --dataset=2024 is the name, not the number
            return _plain_text(text)
        case PurePath(), _:
            return type(old)(_plain_text(text))
        case float(), int() if not isinstance(value, bool):
            return float(value)
        case list() | tuple(), list() | tuple():
            return type(old)(value)
    if type(value) is not type(old):
        raise TypeError(f"{shortened(value)} is of type {type(value).__name__}")
    return value
