"""Read the one config that provider and trainer share: Python files that are run, then settings from the command line.

    config = load_config("config/train_char_diffusion.py", ["--batch_size=64"])
    config.batch_size, config["learning_rate"], config.data_dir

`data/<dataset>/config/*.py` run first, by name; then the shared config, in the same namespace, so that it may use and
replace what they set; then each `--name=value` replaces one value (what the files computed from the old one stays).
Config files are executed: they can do what any program of yours can.

Everything that is wrong is said at once, in one SpecError: with files, lines and what to do.
"""

from __future__ import annotations

import ast
import difflib
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import CodeType, ModuleType
from typing import Any, NamedTuple, NoReturn

from batchwright.base.checks import local_path
from batchwright.base.errors import SpecError
from batchwright.base.words import suggest
from batchwright.queue.names import base_members, base_parameters, builtins_called, methods_written, names_read

__all__ = ["PROVIDER_FILE", "VALIDATOR_FILE", "SharedConfig", "load_config"]

PROVIDER_FILE = "prepare_streaming.py"
VALIDATOR_FILE = "validator.py"
_REQUIRED = {"dataset": "'<folder under data/>'", "batch_size": "64", "block_size": "256"}
_SIZES = ("batch_size", "block_size", "target_size", "batches_per_file", "max_backlog_files", "val_batches")
_MAY_BE_NONE = ("target_size", "val_batches")
_FLAGS = ("verbose", "durable", "reproducible")
_MODULE_NAME = "batchwright_config"
_SHOWN = 80
"""So many characters of a value are shown."""
_LISTED = 8
"""So many names are listed where one is looked for; the rest is a number."""


class SharedConfig(Mapping[str, Any]):
    """The settings of a run, by name and as attributes; read only.

    `path` is the shared config's file, `data_dir` the folder `data/<dataset>`, `origins` says of each name where it was
    set: "file:line", or "--name". `config["path"]` is the setting of that name, where there is one. Pickles if its
    values do.
    """

    __slots__ = ("_values", "data_dir", "origins", "path")

    path: Path
    data_dir: Path
    origins: dict[str, str]
    _values: dict[str, Any]

    def __init__(
        self, values: Mapping[str, Any], path: Path, data_dir: Path, origins: Mapping[str, str] | None = None
    ) -> None:
        for name, value in {"_values": dict(values), "path": Path(path), "data_dir": Path(data_dir)}.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "origins", dict(origins or {}))

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
    """Run the config files at `path` and check what they set. The dataset's folder is looked for in `data`. `overrides`
    are `--name=value`, values as Python writes them.

    A config whose `dataset` is not a plain string (`dataset = 'name'`) is run twice: once alone, to find it.
    A `validator.py` beside the config may have a function `validate(config)`: the strings that it returns, or the
    ValueError that it raises, are listed with everything else that is wrong.
    """
    path = _config_file(path)
    folder = local_path(data=data)
    loading = _Loading(path, folder)
    wanted = loading.parse_overrides(overrides)
    dataset = loading.run_files(wanted)
    loading.apply(wanted)
    loading.check_settings()
    loading.check_dataset()
    if dataset is not None:
        loading.check_provider(dataset)
    config = SharedConfig(loading.values, path, folder / str(loading.values.get("dataset", "")), loading.origins)
    loading.ask_validator(config)
    if loading.problems:
        raise _all_at_once(path, loading.problems)
    return config


# --- Problems ---------------------------------------------------------------------------------------------------------


class _Problem(NamedTuple):
    what: str
    at: str
    remedy: str


def _all_at_once(path: Path, problems: Sequence[_Problem]) -> SpecError:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    remedies = dict.fromkeys(problem.remedy for problem in problems)
    return SpecError(
        f"{count} in the config {path}",
        problems="\n".join(f"{problem.at}: {problem.what}" for problem in problems),
        remedy="\n".join(remedies),
    )


def _nearest(wanted: str, names: Iterable[str]) -> str:
    """Names in one line, the ones most like `wanted` first."""
    alike = sorted(names, key=lambda name: (-difflib.SequenceMatcher(None, wanted, name).ratio(), name))
    more = f" and {len(alike) - _LISTED} more" if len(alike) > _LISTED else ""
    return ", ".join(alike[:_LISTED]) + more


def _entries(folder: Path, *, folders: bool) -> list[str]:
    """Names of the folders, or of the Python files, in a folder; none where it cannot be read."""
    try:
        with os.scandir(folder) as found:
            kept = [e.name for e in found if (e.is_dir() if folders else e.name.endswith(".py"))]
    except (OSError, ValueError):
        return []
    return sorted(name for name in kept if not name.startswith("."))


def _config_file(path: str | os.PathLike[str]) -> Path:
    file = local_path(path=path)
    if os.path.isfile(file):
        return file
    if os.path.isdir(file):
        headline, folders = f"{file} is a folder, not a config file", [file]
    else:
        headline, folders = (
            f"there is no config file {file}",
            list(dict.fromkeys([file.parent, Path("config"), Path()])),
        )
    near = [str(folder / name) for folder in folders for name in _entries(folder, folders=False)]
    near = [name for name in near if PurePath(name).name != VALIDATOR_FILE]
    remedy = "go to the folder that holds config/ and data/, or give the file's whole path"
    if near:
        remedy = "one of its files" if file in folders else str(_first_like(str(file), near))
    raise SpecError(headline, folder=Path.cwd(), files=_nearest(str(file), near) if near else None, remedy=remedy)


def _first_like(wanted: str, names: Iterable[str]) -> str | None:
    return max(names, key=lambda name: difflib.SequenceMatcher(None, wanted, name).ratio(), default=None)


# --- Running files ----------------------------------------------------------------------------------------------------


class _Namespace(dict[str, Any]):
    """The globals of a config file while it runs; it remembers which line set a name last."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, tuple[str, int]] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        frame = sys._getframe(1)
        self.lines[name] = (frame.f_code.co_filename, frame.f_lineno)
        super().__setitem__(name, value)


@dataclass(slots=True)
class _File:
    """A Python file that was read: compiled, or with what is wrong with it."""

    path: Path
    tree: ast.Module | None = None
    code: CodeType | None = None
    problem: _Problem | None = None

    @property
    def imports(self) -> set[tuple[int, str]]:
        """Lines of its import statements, each with the names that it binds (or a star)."""
        nodes = ast.walk(self.tree) if self.tree else ()
        return {
            (line, alias.asname or alias.name.partition(".")[0])
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }

    @property
    def names(self) -> set[str] | None:
        """Every name that it might set; None where that cannot be known."""
        if self.tree is None or any(
            isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(self.tree)
        ):
            return None
        return {
            node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }


def _read(path: Path) -> _File:
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
        return _File(path, tree, compile(tree, str(path), "exec", dont_inherit=True))
    except SyntaxError as error:
        return _File(path, problem=_syntax_problem(path, error))
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        return _File(path, problem=_Problem(what, str(path), f"make {path} a file that you may read"))
    except (ValueError, RecursionError, MemoryError) as error:
        what = f"is no Python source: {error}"
        return _File(path, problem=_Problem(what, str(path), f"write {path} as Python: name = value"))


def _syntax_problem(path: Path, error: SyntaxError) -> _Problem:
    at = f"{path}:{error.lineno}" if error.lineno else str(path)
    line = f": {error.text.strip()}" if error.text and error.text.strip() else ""
    return _Problem(f"{type(error).__name__}: {error.msg}{line}", at, f"correct {at}")


def _run(file: _File, namespace: dict[str, Any]) -> _Problem | None:
    """Run a file; what it raised, if it did. Names that it set before stay set."""
    if file.code is None:
        return file.problem
    namespace.update(__name__=_MODULE_NAME, __file__=os.path.abspath(file.path))
    before = sys.modules.get(_MODULE_NAME)
    sys.modules[_MODULE_NAME] = ModuleType(_MODULE_NAME)  # dataclasses look up the module that they are written in
    try:
        exec(file.code, namespace)
    except (Exception, SystemExit) as error:
        return _raised(error, file.path)
    finally:
        del sys.modules[_MODULE_NAME]
        if before is not None:
            sys.modules[_MODULE_NAME] = before
    return None


def _raised(error: BaseException, file: Path, doing: str = "") -> _Problem:
    """The problem of a file that raised while it ran, at the last of its own lines that was running."""
    frames = traceback.walk_tb(error.__traceback__)
    own = [line for frame, line in frames if frame.f_code.co_filename == str(file)]
    at = f"{file}:{own[-1]}" if own else str(file)
    said = " ".join(str(error).split())
    if isinstance(error, SystemExit):
        what, remedy = f"the file ends the program ({type(error).__name__}: {said})", f"take the exit out of {at}"
    elif isinstance(error, ModuleNotFoundError) and error.name:
        what = f"{type(error).__name__}: {said}"
        remedy = f"install {error.name.partition('.')[0]}, or put the folder that holds it on PYTHONPATH"
    else:
        what, remedy = f"{type(error).__name__}: {said}" if said else type(error).__name__, f"correct {at}"
    return _Problem(doing + what, at, remedy)


def _literal_dataset(tree: ast.Module | None) -> str | None:
    """The value of `dataset = '...'` where nothing else in the file could set that name."""
    if tree is None:
        return None
    found: list[str] = []
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="dataset")], value=ast.Constant(value=str(text))):
                found.append(text)
            case ast.AnnAssign(target=ast.Name(id="dataset"), value=ast.Constant(value=str(text))):
                found.append(text)
    stored = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "dataset" and isinstance(node.ctx, ast.Store)
    ]
    return found[-1] if found and len(stored) == len(found) else None


# --- One load ---------------------------------------------------------------------------------------------------------


class _Override(NamedTuple):
    name: str
    text: str


@dataclass(slots=True)
class _Loading:
    """A config on its way: what is set so far, where, and what is wrong with it."""

    path: Path
    data: Path
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[_Problem] = field(default_factory=list)
    perhaps: set[str] | None = field(default_factory=set)
    """Names that a file that failed might have set: not called missing. None: it might have set any."""
    has_failed: bool = False
    """A config file did not run to its end."""

    def add(self, what: str, at: str, remedy: str) -> None:
        self.problems.append(_Problem(what, at, remedy))

    def at(self, name: str) -> str:
        return self.origins.get(name, str(self.path))

    # The command line

    def parse_overrides(self, overrides: Sequence[str]) -> list[_Override]:
        """`--name=value` of each; the last one of a name counts."""
        if isinstance(overrides, str):
            overrides = overrides.split()
        wanted: dict[str, _Override] = {}
        waiting = [str(word) for word in overrides]
        while waiting:
            word = waiting.pop(0)
            name, equals, text = word.removeprefix("--").partition("=")
            is_named = word.startswith("--") and bool(name)
            if is_named and equals:
                wanted[name] = _Override(name, text)
            elif is_named:
                value = waiting.pop(0) if waiting and not waiting[0].startswith("--") else "VALUE"
                self.add("has no value", word, f"--{name}={value}")
            else:
                self.add("is not of the form --name=value", word, "--batch_size=64, in one word without spaces")
        return list(wanted.values())

    def apply(self, wanted: Sequence[_Override]) -> None:
        for name, text in wanted:
            if name in {*_REQUIRED, *base_parameters()}:
                self._replace(name, text, "" if name == "dataset" else None)  # what these must be is checked below
            elif name in self.values:
                self._replace(name, text, self.values[name])
            elif self.perhaps is not None and name not in self.perhaps:
                known = {*self.values, *base_parameters(), *_REQUIRED} - base_members()
                near = difflib.get_close_matches(name.replace("-", "_"), known, n=3)
                what = f"no config file sets {name}, so there is nothing to replace"
                what += f"; near are {', '.join(near)}" if near else ""
                self.add(
                    what,
                    f"--{name}",
                    f"--{near[0]}={text}" if near else f"{name.replace('-', '_')} = {text} in {self.path}",
                )

    def _replace(self, name: str, text: str, old: object) -> None:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = text
        fits, value = _fitted(value, text, old)
        if fits:
            self.values[name] = value
            self.origins[name] = f"--{name}"
        else:
            is_bool = isinstance(old, bool)
            example = "True" if is_bool else _shown(old) if isinstance(old, int | float | list | tuple | dict) else None
            remedy = f"--{name}={example}, or another {type(old).__name__}" if example else f"set {name} in {self.path}"
            what = (
                f"{_shown(value)} is {_a(value)}; it would replace {_shown(old)}, which is {_a(old)} ({self.at(name)})"
            )
            self.add(what, f"--{name}={text}", remedy)

    # The files

    def run_files(self, wanted: Sequence[_Override]) -> str | None:
        """Run all config files in order. Returns the dataset's name, where it is one that can be a folder's."""
        shared = _read(self.path)
        given = next((_plain_text(o.text) for o in wanted if o.name == "dataset"), None)
        dataset: Any = given if given is not None else _literal_dataset(shared.tree)
        namespace = _Namespace()
        failures: list[_Problem | None] = []
        ran_alone = dataset is None
        if ran_alone:
            failures = [_run(shared, namespace)]
            dataset = namespace.get("dataset")
        folder = self.data / dataset if _why_no_name(dataset) is None else None
        before = [_read(folder / "config" / name) for name in self._dataset_configs(folder)] if folder else []
        if before or not ran_alone:
            namespace = _Namespace()
            failures = [_run(file, namespace) for file in [*before, shared]]
        self._keep_settings(namespace, [*before, shared])
        for file, problem in zip([*before, shared], failures, strict=True):
            if problem is not None:
                self._failed(file, problem, has_folder=folder is not None and os.path.isdir(folder))
        if folder is None:
            return None
        final = self.values.get("dataset")
        if given is None and isinstance(final, str) and final != dataset:
            what = f"dataset is {dataset!r} before and {final!r} after {folder / 'config'} was loaded"
            self.add(what, self.at("dataset"), f"dataset = {dataset!r}, as a plain string, in {self.path}")
        return str(dataset)

    def _dataset_configs(self, folder: Path) -> list[str]:
        names = [n for n in _entries(folder / "config", folders=False) if n != VALIDATOR_FILE]
        return [n for n in names if not _is_same_file(folder / "config" / n, self.path)]

    def _failed(self, file: _File, problem: _Problem, *, has_folder: bool) -> None:
        if not has_folder and problem.what.startswith("NameError"):
            remedy = (
                f"correct {problem.at}, or set dataset to a folder under {self.data}: its config/*.py set names before"
            )
            problem = problem._replace(remedy=remedy)
        self.problems.append(problem)
        self.has_failed = True
        names = file.names
        self.perhaps = None if names is None or self.perhaps is None else self.perhaps | names

    def _keep_settings(self, namespace: _Namespace, files: Sequence[_File]) -> None:
        """Public names with values. Modules are none, nor are imported functions and classes: they are tools."""
        imports = {str(file.path): file.imports for file in files}
        for name, value in namespace.items():
            where, line = namespace.lines.get(name, (str(self.path), 0))
            if name.startswith("_") or isinstance(value, ModuleType):
                continue
            if callable(value) and (where not in imports or {(line, name), (line, "*")} & imports[where]):
                continue
            self.values[name] = value
            self.origins[name] = f"{where}:{line}" if line else where

    # The checks

    def check_settings(self) -> None:
        for name, example in _REQUIRED.items():
            if name not in self.values and self.perhaps is not None and name not in self.perhaps:
                self.add(f"{name} is not set", str(self.path), f"{name} = {example} in {self.path}")
        for name in sorted(base_members() & self.values.keys()):
            what = f"{name} is a method or attribute that every provider has (DataProviderBase.{name})"
            self.add(what, self.at(name), f"rename {name}, e.g. to {name}_setting")
        for name in _SIZES:
            if name in self.values and not (self.values[name] is None and name in _MAY_BE_NONE):
                self._check(name, _whole(1))
        self._check("seed", _whole(0))
        self._check("sleep_seconds", _seconds)
        for name in _FLAGS:
            self._check(name, _flag)
        self._check("rng_framework", _framework)
        if "self" in self.values:
            self.add("self is what a provider calls itself", self.at("self"), "rename self, e.g. to self_setting")

    def _check(self, name: str, wrong: Callable[[Any], tuple[str, str] | None]) -> None:
        if name in self.values and (found := wrong(self.values[name])):
            must, example = found
            self.add(
                f"{name} must be {must}, got {_shown(self.values[name])}", self.at(name), self._setting(name, example)
            )

    def _setting(self, name: str, value: str) -> str:
        """How the value is written where the name is set."""
        return f"--{name}={value}" if self.at(name) == f"--{name}" else f"{name} = {value}"

    def check_dataset(self) -> None:
        if "dataset" not in self.values:
            return
        dataset, at = self.values["dataset"], self.at("dataset")
        there = _entries(self.data, folders=True)
        listed = f"{self.data} holds {_nearest(str(dataset), there)}" if there else f"{self.data} holds no folders"
        if not os.path.isdir(self.data):
            listed = f"there is no folder {self.data} in {Path.cwd()}"
        if why := _why_no_name(dataset):
            last = PurePath(str(dataset).replace("\\", "/")).name
            name = last if last in there else _first_like(str(dataset), there) or "name"
            self.add(f"dataset={_shown(dataset)} {why}; {listed}", at, self._setting("dataset", repr(name)))
        elif not os.path.isdir(self.data / dataset):
            near = suggest(dataset, there)
            make = f"make the folder {self.data / dataset} with {PROVIDER_FILE}"
            if not os.path.isdir(self.data):
                make = f"go to the folder that holds {self.data}, or {make}"
            what = f"there is no folder {self.data / dataset}; {listed}"
            self.add(what, at, f"{self._setting('dataset', repr(near))}, or {make}" if near else make)

    def check_provider(self, dataset: str) -> None:
        folder = self.data / dataset
        file = folder / PROVIDER_FILE
        if not os.path.isdir(folder):
            return
        if not os.path.isfile(file):
            there = _entries(folder, folders=False)
            listed = f"it holds {_nearest(PROVIDER_FILE, there)}" if there else "it holds no Python file"
            self.add(
                f"there is no {PROVIDER_FILE}; {listed}", str(folder), f"write {file} with a DataProviderBase subclass"
            )
            return
        source = _read(file)
        if source.problem is not None:
            self.problems.append(source.problem)
            return
        told: set[str] = set()
        text = file.read_bytes()
        unread = [name for name in self.values if name not in base_parameters() and name.encode() not in text]
        for name, line, how in names_read(text, str(file)):
            is_global = not how.startswith("self.")
            is_set = name in self.values or (name in base_parameters() and not is_global)
            if is_set or name in told or self.perhaps is None or name in self.perhaps:
                continue
            told.add(name)
            self.add(f"the provider reads {how}, which nobody sets", f"{file}:{line}", self._how_to_set(name, unread))

        for name, line in methods_written(text, str(file)).items():
            if name in self.values and name not in base_members() and not callable(self.values[name]):
                what = f"{name} is a setting ({self.at(name)}) and a method or property of the provider"
                self.add(what, f"{file}:{line}", f"rename one of them, e.g. the setting to {name}_setting")

        for name, line in builtins_called(text, str(file)).items():
            if name in self.values and not callable(self.values[name]):
                what = f"the provider calls {name}(), and the setting of that name ({self.at(name)}) is in its way"
                self.add(what, f"{file}:{line}", f"rename the setting {name}, e.g. to {name}_setting")

    def _how_to_set(self, name: str, unread: Sequence[str]) -> str:
        """By renaming a setting that the provider does not read, where one is much like it: a name misspelt."""
        if name == "DataProviderBase":
            return "from batchwright import DataProviderBase"
        if near := suggest(name, unread):
            return f"rename {near} to {name} ({self.at(near)}), or set {name} in {self.path}"
        return f"{name} = ... in {self.path}, or read it with self.config.get({name!r}, DEFAULT)"

    def ask_validator(self, config: SharedConfig) -> None:
        """What `validate(config)` of a validator.py beside the config says, where there is one."""
        file = self.path.parent / VALIDATOR_FILE
        if not os.path.isfile(file) or _is_same_file(file, self.path):
            return
        namespace: dict[str, Any] = {}
        if problem := _run(_read(file), namespace):
            self.problems.append(problem)
            return
        validate = namespace.get("validate")
        if self.has_failed or not callable(validate):
            return  # with half a config it could only repeat what is said already
        try:
            said = validate(config)
            is_one = isinstance(said, str) or not isinstance(said, Iterable)
            found = [] if said is None else [said] if is_one else list(said)
        except ValueError as error:
            found = [" ".join(str(error).split()) or "ValueError"]
        except (Exception, SystemExit) as error:
            if not self.problems:  # otherwise most likely a consequence of those
                self.problems.append(_raised(error, file, "validate(config) failed: "))
            return
        for text in found:
            if isinstance(text, str):
                self.add(" ".join(text.split()), str(file), f"change {self.path} as {file} asks")
            else:
                self.add(
                    f"validate(config) gave {_shown(text)}, which is {_a(text)}",
                    str(file),
                    "return a list of strings, or None",
                )


# --- Values -----------------------------------------------------------------------------------------------------------


def _fitted(value: Any, text: str, old: object) -> tuple[bool, Any]:
    """Whether a value from the command line can stand where `old` stood, and the value as that type."""
    if old is None:
        return True, value
    if isinstance(old, str):
        return True, value if isinstance(value, str) else text  # --dataset=2024 is the name, not the number
    if isinstance(old, PurePath):
        return True, type(old)(_plain_text(text))
    if isinstance(old, bool) or isinstance(value, bool):
        return isinstance(old, bool) and isinstance(value, bool), value
    if isinstance(old, float):
        return isinstance(value, int | float), float(value) if isinstance(value, int) else value
    if isinstance(old, list | tuple) and isinstance(value, list | tuple):
        return True, list(value) if isinstance(old, list) else tuple(value)
    return type(value) is type(old), value


def _plain_text(text: str) -> str:
    """`toy` of `toy` and of `'toy'`."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, str) else text


def _shown(value: object) -> str:
    """A value in one line that is not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _a(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def _whole(smallest: int) -> Callable[[Any], tuple[str, str] | None]:
    """What is wrong with a number that must be whole and not less: what it must be, and an example."""

    def wrong(value: Any) -> tuple[str, str] | None:
        if isinstance(value, int) and not isinstance(value, bool) and value >= smallest:
            return None
        return f"a whole number, at least {smallest}", str(max(_near_whole(value), smallest, 1))

    return wrong


def _near_whole(value: Any) -> int:
    """The whole number that 64.0, "64" or a NumPy 64 stands for; 0 where there is none."""
    try:
        return int(value) if int(value) == float(value) else 0
    except (TypeError, ValueError, OverflowError):
        return 0


def _seconds(value: Any) -> tuple[str, str] | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if is_number and value > 0 and math.isfinite(value) else ("a number of seconds above 0", "2.0")


def _flag(value: Any) -> tuple[str, str] | None:
    return None if isinstance(value, bool) else ("True or False", str(bool(value)))


def _framework(value: Any) -> tuple[str, str] | None:
    return None if value in ("numpy", "torch") else ("'numpy' or 'torch'", "'numpy'")


def _why_no_name(dataset: object) -> str | None:
    """Why a value cannot be the name of a folder under data/; None where it can."""
    if not isinstance(dataset, str):
        return f"is {_a(dataset)}, and must be the name of a folder"
    if not dataset.strip():
        return "is empty, and must be the name of a folder"
    if "\0" in dataset:
        return "has a zero byte in it"
    if "/" in dataset or "\\" in dataset or ".." in dataset:
        return "has a path in it, and must be the plain name of a folder"
    if dataset.startswith("."):
        return "begins with a dot: such folders are hidden"
    return None


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
