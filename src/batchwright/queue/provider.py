"""`DataProviderBase`. A subclass defines a batch; the base class makes as many files of batches as needed.

File number n of a split is a function of (seed, split, n): it has the same bytes in every process, each time it
is made. So n providers share one queue by taking numbers, any provider can replace a dead one, and a trainer that goes
back to an old number gets that file again.
"""

from __future__ import annotations

import inspect
import os
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least, local_path
from batchwright.base.errors import SpecError
from batchwright.base.fingerprint import fingerprint_file
from batchwright.base.machine import FolderWatch
from batchwright.base.seeds import key_of
from batchwright.base.words import suggest
from batchwright.batches.frameworks import adapter
from batchwright.queue.messages import file_in_words
from batchwright.queue.meta import Meta, check_meta
from batchwright.queue.production import produce
from batchwright.queue.schema import BatchField, checked, fields_of
from batchwright.queue.settings import checked_setting, wrong
from batchwright.queue.stamp import stamp_of

__all__ = ["DataProviderBase"]

_SPLITS = (("train",), ("val",), ("train", "val"), ("val", "train"))


class DataProviderBase:
    """Write `build_meta` and `sample_batch`. This class does folders, names, whole files, backlog, checks and stopping.

    `self.config` has every name of the shared config; each is an attribute too.
    """

    reproducible: ClassVar[bool] = True
    """Whether `sample_batch` draws everything from `rng`, so that a file can be made again."""
    rng_framework: ClassVar[str] = "numpy"
    """The kind of `rng`: a generator of "numpy", or of "torch"."""
    batch_size: int
    block_size: int | None
    target_size: int | None
    batches_per_file: int
    max_backlog_files: int
    sleep_seconds: float
    seed: int
    verbose: bool
    durable: bool
    val_batches: int | None

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        batch_size: int,
        block_size: int | None = None,
        target_size: int | None = None,
        batches_per_file: int = 100,
        max_backlog_files: int = 2,
        sleep_seconds: float = 2.0,
        seed: int = 1337,
        verbose: bool = False,
        *,
        durable: bool = False,
        val_batches: int | None = None,
        **config: Any,
    ) -> None:
        """`data_dir`: the dataset's folder. `batch_size`: rows of a batch; `block_size` and `target_size`: sizes of a
        row, for `sample_batch`. `batches_per_file`: batches of a file. `seed`: the seed of the batches. `verbose`:
        say more. `config`: all other names of the shared config.

        `max_backlog_files`: no new file is begun while this many of a split wait. `durable`: a power cut loses none.

        `val_batches`: the number of validation batches, made once and kept; None streams them like training batches.
        `sleep_seconds`: the longest time between two looks for work, where no change wakes it before.
        """
        given = dict(locals())
        self.data_dir: Path = local_path(data_dir=data_dir)
        self.config: dict[str, Any] = _Settings()
        for name in _DEFAULTS:
            value = checked_setting(name, given[name])
            setattr(self, name, value)
            if value is not None:
                self.config[name] = value
        checked_setting("rng_framework", self.rng_framework)
        for name, value in config.items():
            self._take(name, value)
        self._stopping = threading.Event()
        self._watch: FolderWatch | None = None
        self._knows: tuple[Meta, tuple[BatchField, ...]] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ == "__main__":
            _refuse_direct_run(cls)

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property that failed: its own error says more
            return object.__getattribute__(self, name)
        raise AttributeError(_not_set(name, vars(self).get("config", {}), type(self).__name__), name=name, obj=self)

    def _take(self, name: str, value: Any) -> None:
        """A name of the config, as `self.config[name]` and as an attribute."""
        own = inspect.getattr_static(type(self), name, None)
        is_own = inspect.isfunction(own) and not callable(value)
        if name in RESERVED or is_own or (isinstance(own, property) and own.fset is None):
            kind = "every provider" if name in RESERVED else type(self).__name__
            what = f"{name} is a part of {kind}, and cannot be a setting"
            raise SpecError(what, parameter=name, remedy=f"another name for {name} in the config")
        self.config[name] = value
        setattr(self, name, value)

    def _take_missing(self, config: Mapping[str, Any]) -> None:
        """Take the names of a config that an __init__ did not hand on. Attributes that it made of them stay."""
        for name, value in config.items():
            is_default = name in _DEFAULTS and getattr(self, name) == _DEFAULTS[name]
            if is_default or not (name in self.config or name in vars(self)):
                self._take(name, value)
            self.config.setdefault(name, value)

    # Methods that a subclass writes

    def build_meta(self) -> dict[str, Any]:
        """Return the facts for a trainer, as JSON: at least "batch_schema", a list of {name, dtype, shape, role}."""
        raise self._lacks("build_meta(self)")

    def sample_batch(self, split: str, rng: Any) -> Mapping[str, Any]:
        """One batch of `split`: a dict with an array [batch_size, *shape] for each field. Draw from `rng` only."""
        raise self._lacks("sample_batch(self, split, rng)")

    def _lacks(self, method: str) -> SpecError:
        name = method.partition("(")[0]
        what = f"{type(self).__name__} has no {name}"
        return SpecError(what, parameter=name, remedy=f"def {method}: return {{...}}")

    # Methods that a subclass may use

    def input_files(self) -> list[Path]:
        """The raw files of the dataset: `input.*` in its folder, by name. A subclass may name others.

        Their content is part of the stamp of a queue. Each provider reads them once when it starts.
        """
        found = sorted(path for path in self.data_dir.glob("input.*") if path.is_file())
        if not found:
            remedy = f"put the raw data there, as {self.data_dir / 'input.txt'} or another input.*"
            raise SpecError("there is no input file", folder=self.data_dir, remedy=remedy)
        return found

    # Batches

    @property
    def meta(self) -> Meta:
        """The checked result of `build_meta`, with the stamp of the batches."""
        return self._known()[0]

    # Public names are the user's, for settings. Names used by the modules beside this one are private too.

    def _known(self) -> tuple[Meta, tuple[BatchField, ...]]:
        if self._knows is None:
            inputs = _fingerprints_of(self)  # before they are read: a change in between is found by the next provider
            said = check_meta(self.build_meta())
            fields = fields_of(said)
            stamp = stamp_of(self, said, inputs)
            self._knows = Meta(said, stamp, self.reproducible, self.val_batches, self.batch_size), fields
        return self._knows

    def go_by(self, meta: Meta) -> None:
        """Make files of a queue whose `meta` is equivalent to this provider's, in another form."""
        self._knows = meta, fields_of(meta.said)

    def num_batches(self, split: str) -> int:
        """The number of batches in a file of a split."""
        if split == "val" and self.val_batches:
            return self.val_batches
        return self.batches_per_file

    def batches(self, split: str, number: int) -> Iterator[list[NDArray[Any]]]:
        """The batches of file `number` of a `split`: arrays in the order of the schema. The same ones every time."""
        fields = self._known()[1]
        rng = self._rng(split, number)
        is_kept = split == "val" and self.val_batches is not None
        file = file_in_words(split, None if is_kept else number)
        for index in range(self.num_batches(split)):
            batch = self.sample_batch(split, rng)
            yield checked(batch, fields, self.batch_size, where=f"{file}, batch {index}")

    def _rng(self, split: str, number: int) -> Any:
        key = key_of(self.seed, "queue", split, number)
        if self.rng_framework == "torch":
            return adapter("torch").generator(key)
        return np.random.Generator(np.random.PCG64(key))

    # Files

    def stop(self) -> None:
        """End `run` after the current batch. If none runs, the next `run` ends at once.

        From any thread, and from a signal handler.
        """
        self._stopping.set()
        if self._watch is not None:
            self._watch.wake()

    def run(
        self,
        splits: Sequence[str] = ("train", "val"),
        max_files: int | None = None,
        *,
        accept_change: bool = False,
    ) -> int:
        """Make files of `splits` while they are needed, until `stop`, SIGINT or SIGTERM. Returns how many were made.

        `max_files`: end after this many. `accept_change`: continue a queue that other code, settings, seed or raw
        files began; the change is recorded in its meta. An error of `sample_batch` or `build_meta` ends it, and is
        raised in every consumer that waits.
        """
        names = tuple(splits) if isinstance(splits, tuple | list) else ()
        if names not in _SPLITS:
            raise wrong("splits", splits, "a tuple of 'train' and 'val', or of one of them", '("train",)')
        if max_files is not None:
            at_least(0, max_files=max_files)
        try:
            if self._stopping.is_set():
                return 0
            return produce(self, names, max_files, accept_change=accept_change)
        finally:
            self._stopping.clear()  # not before: stop may have been called already

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.data_dir)!r}, batch_size={self.batch_size}, seed={self.seed})"


RESERVED = frozenset(
    {"config", "data_dir", "self"}
    | {name for name in vars(DataProviderBase) if not name.startswith("_")} - {"reproducible", "rng_framework"}
)
"""Names that no setting may have."""

_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(DataProviderBase).parameters.items()
    if name not in ("data_dir", "config")
}


class _Settings(dict[str, Any]):
    """The settings of a provider. One that is missing is an error with the nearest name."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(_not_set(name, self, "the config"))


def _not_set(name: str, config: Mapping[str, Any], owner: str) -> str:
    near = suggest(name, config)
    hint = f" (did you mean {near}?)" if near else ""
    return f"{owner} has no {name}{hint}: set {name} in the config"


def _fingerprints_of(provider: DataProviderBase) -> dict[str, str]:
    """The raw files of a provider, in its order, with the fingerprints of their content."""
    try:
        files = [Path(file) for file in provider.input_files()]
    except SpecError:  # there are none
        return {}
    try:
        # Named from the data folder on, so that a project can move.
        return {os.path.relpath(file, provider.data_dir): fingerprint_file(file) for file in files}
    except OSError as error:
        raise SpecError(
            f"input_files() names a file that cannot be read: {error.strerror}",
            parameter="input_files()",
            file=error.filename,
            remedy="return files that are there, or put this one there",
        ) from error


def _refuse_direct_run(kind: type) -> None:
    """End a process whose main file is a provider's: without the config it would make other data."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(file, str) and Path(file).name == "prepare_streaming.py":
        config = shlex.quote(next((word for word in sys.argv[1:] if word.endswith(".py")), "CONFIG"))
        raise SystemExit(
            f"batchwright: {file} is not run by itself: {kind.__qualname__} needs the shared config\n"
            f"  try        batchwright prepare {config}, or python prepare.py {config}"
        )
