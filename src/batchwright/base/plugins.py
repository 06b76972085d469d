"""Code of users: what plug-ins must do, the names under which they are registered, and Python files that are run.

Nothing here needs to be inherited. Entry points are loaded when an unknown name or a list of names is asked for, never
at import. They do not replace registered names: the meaning of a name does not depend on earlier lookups.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.base.words import suggest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["Registry", "Rows", "Tokenizer", "by_value", "module_for", "run_file"]

T = TypeVar("T")


class Registry(Generic[T]):
    """What there is of one kind of plug-in. A later registration of a name replaces the earlier one.

    Entry points of the `group` are plug-ins too. Each is named like the plug-in that loading it registers; it may
    register others beside it.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind: str = kind
        self.group: str = group
        self.failed: dict[str, Exception] = {}
        """Entry points that could not be loaded, and why."""
        self._known: dict[str, T] = {}
        self._offered: dict[str, T] = {}
        self._waiting: list[EntryPoint] | None = None
        self.loading: str | None = None
        """The package whose entry point is being loaded."""
        self._lock = threading.RLock()

    def add(self, name: str, plugin: T) -> T:
        if self.loading is not None:
            self._offered.setdefault(name, plugin)
        else:
            self._known[name] = plugin
        return plugin

    def get(self, name: str) -> T:
        if name in self._known:
            return self._known[name]
        self._load(name)
        if name not in self._offered:
            self._load()
        if name in self._offered:
            return self._offered[name]
        every = [*self._known, *self._offered]
        remedy = f"one of the known names, or register a {self.kind} of your own"
        near = suggest(name, every)
        if near:
            remedy = repr(near)
        raise SpecError(
            f"no {self.kind} named {name!r}",
            parameter=self.kind,
            known=", ".join(sorted(every)),
            failed=self.failures(),
            remedy=remedy,
        )

    def known(self) -> list[T]:
        """What was registered by code that ran."""
        return list(self._known.values())

    def offered(self) -> list[T]:
        """What installed packages offer beside that: loads them all. Those that cannot be loaded are in `failed`."""
        self._load()
        return [plugin for name, plugin in self._offered.items() if name not in self._known]

    def failures(self) -> str | None:
        """The entry points that could not be loaded, one in a line; None where there are none."""
        lines = [f"{what} ({type(error).__name__}: {error})" for what, error in self.failed.items()]
        return "\n".join(lines) or None

    def _load(self, name: str | None = None) -> None:
        """Load the entry points of one name, whose failure is an error; or all, whose failures are kept."""
        with self._lock:
            if self._waiting is None:
                self._waiting = _entry_points(self.group)
            for entry in [entry for entry in self._waiting if name in (None, entry.name)]:
                self.loading = _package_of(entry)
                try:
                    entry.load()
                except Exception as error:  # whatever an installed package raises when it is imported
                    self.failed[_about(entry)] = error
                    if name is not None:
                        raise SpecError(
                            f"the {self.kind} {name!r} of an installed package cannot be loaded: "
                            f"{type(error).__name__}: {error}",
                            entry_point=_about(entry),
                            remedy="mend the package, or uninstall it",
                        ) from error
                    continue
                finally:
                    self.loading = None
                self._waiting.remove(entry)
                self.failed.pop(_about(entry), None)
                if entry.name not in self._offered and entry.name not in self._known:
                    self.failed[_about(entry)] = LookupError(f"it registers no {self.kind} named {entry.name!r}")


def module_for(file: Path, name: str) -> ModuleType:
    """An empty module for a Python file, in sys.modules, where dataclasses, pickle and inspect find it."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    return module


def run_file(module: ModuleType, change: Callable[[ast.Module], ast.Module] = lambda tree: tree) -> None:
    """Run the present text of a module's file. `change` may edit its syntax tree.

    No `__pycache__` is read or written: an edit of the same size in the same second would not count.
    """
    file = str(module.__file__)
    source = Path(file).read_bytes()
    tree = ast.parse(source, file)  # of bytes: the error of one that is not text has a line
    # The text that runs: the file may be edited before it is fingerprinted.
    module.__dict__["__source__"] = importlib.util.decode_source(source)
    exec(compile(change(tree), file, "exec", dont_inherit=True), module.__dict__)


def by_value(rebuild: Callable[..., Any], *arguments: Any, function: Any) -> tuple[Any, ...]:
    """The answer of `__reduce__` for an object with a function that a script may define.

    The function travels by value, as functions travel to workers: `rebuild(*arguments, function)` makes the object.
    """
    return _rebuilt, (rebuild, arguments, cloudpickle.dumps(function))


def _rebuilt(rebuild: Callable[..., Any], arguments: tuple[Any, ...], packed: bytes) -> Any:
    return rebuild(*arguments, cloudpickle.loads(packed))


def _entry_points(group: str) -> list[EntryPoint]:
    from importlib.metadata import entry_points  # takes longer than most programs need it

    return sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value))


def _about(entry: EntryPoint) -> str:
    """
    >>> from importlib.metadata import EntryPoint
    >>> _about(EntryPoint("shout", "loud.formats", "batchwright.formats"))
    'shout = loud.formats'
    """
    return f"{entry.name} = {entry.value}, of {_package_of(entry)}".removesuffix(", of ")


def _package_of(entry: EntryPoint) -> str:
    if entry.dist is None:
        return ""
    return f"{entry.dist.name} {entry.dist.version}"


# The methods of plug-ins, and their duties


@runtime_checkable
class Rows(Protocol):
    """Rows of equal length that one source offers, by number. Called from several threads; same number, same row.

    >>> class Counting:
    ...     name, num_rows, row_tokens, fingerprint = "counting", 10**12, 4, "counting-v1"
    ...     def gather(self, index, epoch, out):
    ...         out[:] = index[:, None] + range(out.shape[1])
    >>> isinstance(Counting(), Rows)
    True
    """

    @property
    def name(self) -> str: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def row_tokens(self) -> int:
        """Tokens that a row trains on. `gather` gives one more: the last target."""
        ...

    @property
    def fingerprint(self) -> str:
        """Names the content: other content, another fingerprint."""
        ...

    def gather(self, index: NDArray[np.int64], epoch: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        """Write row index[i] of the source's epoch epoch[i] to out[i], which has row_tokens + 1 places."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids. Called in several processes; same text, same ids."""

    @property
    def vocab_size(self) -> int:
        """Every id is below this."""
        ...

    @property
    def fingerprint(self) -> str: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Any]:
        """The ids of each text, as anything NumPy takes."""
        ...

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text of some ids, or None where that cannot be known."""
        ...
