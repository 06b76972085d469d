"""`DataProviderBase`: a subclass says what a batch is; this makes files of them, as many as are needed.

File number n of a split is a function of (seed, split, n): whoever makes it, and however often, it has the same bytes.
So n providers share one queue by taking numbers, one that died is replaced by any other, and a trainer that goes back
to an old number gets that file again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import local_path
from batchwright.base.errors import BatchwrightError, OutOfSpaceError, QueueError, SpecError, WorkerError
from batchwright.base.files import one_at_a_time
from batchwright.base.fingerprint import fingerprint_file
from batchwright.base.machine import FolderWatch
from batchwright.base.seeds import key_of
from batchwright.batches.frameworks import adapter
from batchwright.queue.batch_file import BatchFileWriter, DamagedFile, FileFacts, read_facts
from batchwright.queue.folder import Part, QueueFolder, SplitFolder
from batchwright.queue.members import Census, Facts, Member, place_of
from batchwright.queue.meta import check_meta
from batchwright.queue.meta_file import Meta, read_meta, write_meta
from batchwright.queue.refused import FULL, deleted, named, purge_command
from batchwright.queue.schema import Field, checked, fields_of
from batchwright.queue.stale import differences, stamp_of

__all__ = ["DataProviderBase"]

_LEASE_SECONDS = 30.0
_SPLITS = ("train", "val")
_READS = "reads what it makes batches of"


class DataProviderBase:
    """Write `build_meta` and `sample_batch`; directories, names, whole files, backlog, checks and stopping are done.

    `self.config` has every name of the shared config; each is an attribute too.
    """

    reproducible: ClassVar[bool] = True
    """Whether `sample_batch` draws everything from `rng`, so that a file can be made again."""
    rng_framework: ClassVar[str] = "numpy"
    """What `rng` is: a generator of "numpy", or of "torch"."""

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
        """`data_dir`: the dataset's folder. `batch_size`: rows of a batch; `block_size` and `target_size`: what a row
        has, for `sample_batch`. `batches_per_file`: batches of a file. `seed`: what batches are drawn from. `verbose`:
        say more. `config`: all other names of the shared config.

        `max_backlog_files`: no new file is begun while so many of a split wait. `durable`: a power cut loses none.

        `val_batches`: so many validation batches, made once and kept; None streams them like training batches.
        `sleep_seconds`: the longest time between two looks for work, where no change wakes it before.
        """
        sizes = {"batch_size": batch_size, "batches_per_file": batches_per_file, "max_backlog_files": max_backlog_files}
        optional = {"block_size": block_size, "target_size": target_size, "val_batches": val_batches}
        for name, value in (sizes | {name: size for name, size in optional.items() if size is not None}).items():
            if not _is_whole(value, 1):
                raise SpecError(
                    f"{name} must be a whole number of at least 1, got {value!r}",
                    parameter=name,
                    remedy=f"set {name} in the shared config",
                )
        if not _is_whole(seed, 0):
            raise SpecError(
                f"seed must be a whole number of at least 0, got {seed!r}", parameter="seed", remedy="seed = 1337"
            )
        is_number = isinstance(sleep_seconds, int | float) and not isinstance(sleep_seconds, bool)
        if not is_number or not 0 < sleep_seconds < float("inf"):
            raise SpecError(
                f"sleep_seconds must be above 0, got {sleep_seconds!r}",
                parameter="sleep_seconds",
                remedy="sleep_seconds = 2.0",
            )
        if self.rng_framework not in ("numpy", "torch"):
            raise SpecError(
                f"rng_framework must be 'numpy' or 'torch', got {self.rng_framework!r}",
                parameter="rng_framework",
                remedy='rng_framework = "numpy"',
            )
        self.data_dir: Path = local_path(data_dir=data_dir)
        self.batch_size = batch_size
        self.block_size = block_size
        self.target_size = target_size
        self.batches_per_file = batches_per_file
        self.max_backlog_files = max_backlog_files
        self.sleep_seconds = sleep_seconds
        self.seed = seed
        self.verbose = verbose
        self.durable = durable
        self.val_batches = val_batches
        own = {
            name: getattr(self, name)
            for name in (*sizes, *optional, "sleep_seconds", "seed", "verbose", "durable")
            if getattr(self, name) is not None
        }
        self.config: dict[str, Any] = {}
        self._take_config(own | config)
        self._stopping = threading.Event()
        self._watch: FolderWatch | None = None
        self._knows: tuple[Meta, tuple[Field, ...]] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ == "__main__":
            from batchwright.queue.find import refuse_direct_run

            refuse_direct_run(cls)

    def _take_config(self, config: Mapping[str, Any]) -> None:
        """Every name of the config, as `self.config[name]` and as an attribute."""
        for name, value in config.items():
            if name in vars(DataProviderBase) and not name.startswith("_") and name not in _SETTABLE:
                raise SpecError(
                    f"{name} is a part of every provider, and cannot be a setting",
                    parameter=name,
                    remedy=f"another name for {name} in the config",
                )
            self.config[name] = value
            setattr(self, name, value)

    # What a subclass writes

    def build_meta(self) -> dict[str, Any]:
        """What a trainer must know, as JSON: at least "batch_schema", a list of {name, dtype, shape, role}."""
        raise SpecError(
            f"{type(self).__name__} has no build_meta",
            parameter="build_meta",
            remedy="def build_meta(self): return {...}",
        )

    def sample_batch(self, split: str, rng: Any) -> Mapping[str, Any]:
        """One batch of `split`: a dict with an array [batch_size, *shape] for each field. Draw from `rng` only."""
        raise SpecError(
            f"{type(self).__name__} has no sample_batch",
            parameter="sample_batch",
            remedy="def sample_batch(self, split, rng): return {...}",
        )

    # What a subclass may use

    def input_files(self) -> list[Path]:
        """The raw files of the dataset: `input.*` in its folder, by name. A subclass may name others.

        Their content is part of what a queue was made from: each provider reads them once when it starts.
        """
        found = sorted(path for path in self.data_dir.glob("input.*") if path.is_file())
        if not found:
            raise SpecError(
                "there is no input file",
                folder=self.data_dir,
                remedy=f"put the raw data there, as {self.data_dir / 'input.txt'} or another input.*",
            )
        return found

    # Batches

    @property
    def meta(self) -> Meta:
        """What `build_meta` says, checked, with the stamp of what the batches are made from."""
        return self._known()[0]

    def _known(self) -> tuple[Meta, tuple[Field, ...]]:
        if self._knows is None:
            inputs = _fingerprints_of(self)  # before they are read: a change in between is found by the next provider
            said = check_meta(self.build_meta())
            fields = fields_of(said)
            stamp = stamp_of(self, said, inputs)
            self._knows = Meta(said, stamp, self.reproducible, self.val_batches, self.batch_size), fields
        return self._knows

    def go_by(self, meta: Meta) -> None:
        """Make files of a queue whose `meta` says the same as this provider, in other words."""
        self._knows = meta, fields_of(meta.said)

    def num_batches(self, split: str) -> int:
        """How many batches a file of a split has."""
        return self.val_batches if split == "val" and self.val_batches else self.batches_per_file

    def batches(self, split: str, number: int) -> Iterator[list[NDArray[Any]]]:
        """The batches of file `number` of a `split`: arrays in the order of the schema. The same ones whenever it is
        asked for."""
        _, fields = self._known()
        rng = self._rng(split, number)
        for index in range(self.num_batches(split)):
            batch = self.sample_batch(split, rng)
            yield checked(batch, fields, self.batch_size, where=f"{_called(self, split, number)}, batch {index}")

    def _rng(self, split: str, number: int) -> Any:
        key = key_of(self.seed, "queue", split, number)
        if self.rng_framework == "torch":
            return adapter("torch").generator(key)
        return np.random.Generator(np.random.PCG64(key))

    # Files

    def stop(self) -> None:
        """End `run` after the batch that is being made; the next one at once, where none runs.

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

        `max_files`: end after so many. `accept_change`: go on with a queue that other code, settings, seed or raw files
        began; the change is recorded in its meta. An error of `sample_batch` or `build_meta` ends it, and is raised in
        every consumer that waits.
        """
        names = _checked_splits(splits)
        if max_files is not None and not _is_whole(max_files, 0):
            raise SpecError(
                f"max_files must be a whole number of at least 0, or None, got {max_files!r}",
                parameter="max_files",
                remedy="run(max_files=4); run() makes files until it is stopped",
            )
        try:
            return 0 if self._stopping.is_set() else _run(self, names, max_files, accept_change)
        finally:
            self._stopping.clear()  # not before: stop may have been called already

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.data_dir)!r}, batch_size={self.batch_size}, seed={self.seed})"


_SETTABLE = ("reproducible", "rng_framework")


class _Stopped(BaseException):
    """A signal came while `build_meta` read its data: it need not do so to its end."""


def _run(provider: DataProviderBase, splits: tuple[str, ...], max_files: int | None, accept_change: bool) -> int:
    queue = QueueFolder(provider.data_dir / "queue")
    try:
        queue.make(splits)
        work = _Work(provider, queue, splits)
    except OSError as error:
        raise named(error, queue.path) or error from None
    provider._watch = FolderWatch(
        *(queue.path / split for split in splits), *(queue.path / "control" / split / "wanted" for split in splits)
    )
    try:
        with _ended_by_signals(provider), contextlib.closing(provider._watch):
            return work.until_stopped(max_files, accept_change)
    except _Stopped:
        return 0
    finally:
        provider._watch = None
        work.member.leave()


class _Work:
    """One provider at work on one queue."""

    def __init__(self, provider: DataProviderBase, queue: QueueFolder, splits: tuple[str, ...]) -> None:
        self.provider = provider
        self.queue = queue
        self.census = Census(queue.who)
        self.member = Member(queue.who, "provider", _LEASE_SECONDS)
        self.folders = [queue.split(name, self.census) for name in splits]
        self.at: tuple[str | None, int | None] = (None, None)
        self.is_full = False
        self.is_checked = not provider.reproducible

    def until_stopped(self, max_files: int | None, accept_change: bool) -> int:
        num_made = 0
        try:
            self._begin(accept_change)
            while not self.provider._stopping.is_set() and (max_files is None or num_made < max_files):
                self._stay()
                try:
                    begun = self._next()
                except OutOfSpaceError as error:
                    self._tell_full(error.__cause__ or error)
                    self.provider._stopping.wait(self.provider.sleep_seconds)
                    continue
                if begun is None:
                    self.member.say("waits: enough is ready")
                    self._sleep()
                elif self._make(*begun):
                    num_made += 1
        except Exception as error:
            others: list[Facts] = []
            with contextlib.suppress(OSError):  # whatever it was, it may keep us from looking too
                others = [facts for facts in self.census.living("provider") if facts.id != self.member.id]
            if self.at != (None, None) or not others:  # one that is refused at the door ends nobody's training
                self.member.died(error.__cause__ or error, *self.at)
            clear = named(error, self.queue.path) if isinstance(error, OSError) else None
            raise clear or error  # noqa: B904 (its cause stays what it was)
        return num_made

    def _begin(self, accept_change: bool) -> None:
        """Write the meta, or go by the one that is there."""
        for path in self.queue.who.glob("*.died"):  # somebody is here again: consumers wait for what it does
            path.unlink(missing_ok=True)
        self.member.say(_READS)
        try:
            meta = self.provider.meta
        except BatchwrightError:
            raise
        except (Exception, SystemExit) as error:
            raise WorkerError(
                f"build_meta failed: {_in_words(error)}",
                provider=type(self.provider).__name__,
                remedy="its traceback says where",
            ) from error
        with one_at_a_time(self.queue.path):
            there = read_meta(self.queue.meta)
            if there is None:
                write_meta(self.queue.meta, meta)
            else:
                self._go_on(there, meta, accept_change)
            self.member.say("waits: begins")  # from here on others do not begin anew
            for path in self.queue.path.glob(".meta.json.*.part"):
                path.unlink(missing_ok=True)
        self.census.bury_the_dead()
        for folder in self.folders:
            folder.sweep()

    def _go_on(self, there: Meta, mine: Meta, accept_change: bool) -> None:
        """Make files for a queue that is there: of the same provider, or of one that differs and may."""
        changed = differences(there.stamp, mine.stamp)
        is_alone = not any(
            facts.id != self.member.id and doing.what != _READS and self.census.is_alive(facts.id)
            for facts, doing in self.census.look("provider")
        )
        if changed and is_alone and self._begins_anew():
            write_meta(self.queue.meta, mine)
            return
        meta = replace(there, reproducible=mine.reproducible, val_batches=mine.val_batches, batch_size=mine.batch_size)
        if changed:
            is_readable = there.said.get("batch_schema") == mine.said.get("batch_schema")
            if not (accept_change and is_readable and is_alone):
                raise _stale(self.queue, changed, can_be_accepted=is_readable, is_alone=is_alone)
            following = {folder.name: folder.listing().next for folder in self.folders}
            record = {"difference": changed, "next": following}
            meta = replace(meta, said=mine.said, stamp=mine.stamp, accepted=(*there.accepted, record))
        if meta != there:
            write_meta(self.queue.meta, meta)
        self.provider.go_by(meta)

    def _begins_anew(self) -> bool:
        """Throw away what was made for nobody yet. False where a batch was read: then nothing is touched."""
        splits = [self.queue.split(name, self.census) for name in _SPLITS if (self.queue.path / name).is_dir()]
        with contextlib.ExitStack() as locks:
            for split in splits:
                locks.enter_context(split.one_at_a_time())
            if any(split.was_read() for split in splits):
                return False
            for split in splits:
                split.begin_anew()
        return True

    def _stay(self) -> None:
        """Be seen: others may have taken a process for dead that was stopped for a while."""
        if self.member.is_here:
            return
        if not self.queue.who.is_dir() or not self.queue.meta.exists():
            raise deleted(self.queue.path)
        self.member.leave()
        self.member = Member(self.queue.who, "provider", _LEASE_SECONDS)

    def _next(self) -> tuple[SplitFolder, Part] | None:
        """A number to make: of the kept batches first, then of the split of which the fewest files wait."""
        waiting = []
        for folder in self.folders:
            if folder.name == "val" and self.provider.val_batches:
                part = folder.begin_kept(self.member, self._is_due) if self._is_due(folder.kept_path) else None
                if part is not None:
                    return folder, part
            else:
                waiting.append(folder)
        try:
            waiting.sort(key=SplitFolder.backlog)
        except FileNotFoundError:
            raise deleted(self.queue.path) from None
        for folder in waiting:
            part = folder.begin(self.member, self.provider.max_backlog_files)
            if part is not None:
                return folder, part
        return None

    def _is_due(self, path: Path) -> bool:
        """Whether kept batches are missing, or others than this provider makes, and it is its to make them.

        Of providers that differ, the one that started last makes them: two would undo each other's work for ever.
        """
        with contextlib.suppress(DamagedFile, FileNotFoundError):
            if read_facts(path) == self._facts("val", None):
                return False
        last = read_meta(self.queue.meta)
        mine = self.provider.meta.fingerprint, self.provider.val_batches, self.provider.batch_size
        return last is not None and (last.fingerprint, last.val_batches, last.batch_size) == mine

    def _facts(self, split: str, number: int | None) -> FileFacts:
        provider = self.provider
        meta, fields = provider._known()
        return FileFacts(meta.fingerprint, split, number or 0, provider.batch_size, provider.num_batches(split), fields)

    def _make(self, folder: SplitFolder, part: Part) -> bool:
        """Make one file. False where it was given up: to stop, for want of space, or because nobody needs it now."""
        self.at = folder.name, part.number
        if part.number is None:
            self.member.say(f"makes {_called(self.provider, folder.name, None)}", folder.name)
        else:
            self.member.say("makes", folder.name, part.number)
        began = time.perf_counter()
        try:
            if not self._write(folder, part):
                folder.give_up(part)
                return False
            is_there = folder.publish(part, durable=self.provider.durable)
        except OSError as error:
            self._give_up(folder, part)
            if error.errno not in FULL and not isinstance(error, OutOfSpaceError):
                raise named(error, self.queue.path) or error from error
            self._tell_full(error, folder.name, -1 if part.number is None else part.number)
            self.provider._stopping.wait(self.provider.sleep_seconds)
            return False
        except BaseException:
            self._give_up(folder, part)
            raise
        self.is_full = False
        self.at = None, None
        if is_there and self.provider.verbose:
            seconds, num_batches = time.perf_counter() - began, self.provider.num_batches(folder.name)
            with contextlib.suppress(OSError):  # it may go to a file on a disk that is full now
                made = _called(self.provider, folder.name, part.number)
                print(f"{made}: {num_batches} batches in {seconds:.2f} s", flush=True)
        return is_there

    def _write(self, folder: SplitFolder, part: Part) -> bool:
        stopping = self.provider._stopping
        with BatchFileWriter(part.path, self._facts(folder.name, part.number)) as writer:
            batches = self.provider.batches(folder.name, part.number or 0)
            first: list[bytes] = []
            while True:
                if stopping.is_set():
                    return False
                try:
                    if not self.is_checked:
                        first = [array.tobytes() for array in next(batches)]
                        batches = self.provider.batches(folder.name, part.number or 0)
                    arrays = next(batches, None)
                except (BatchwrightError, GeneratorExit):
                    raise
                except (Exception, SystemExit) as error:
                    raise _failed(error, self.provider, folder.name, part.number) from error
                if arrays is None:
                    break
                if not self.is_checked:
                    self._check_again(first, arrays, folder.name, part.number)
                writer.append(arrays)
            writer.finish(durable=self.provider.durable)
        return True

    def _check_again(self, first: list[bytes], again: list[NDArray[Any]], split: str, number: int | None) -> None:
        """That the first batch of this process, made twice, is the same: or its files could not be made again."""
        names = [field.name for field in self.provider._known()[1]]
        wrong = [name for name, one, other in zip(names, first, again, strict=True) if one != other.tobytes()]
        if wrong:
            raise WorkerError(
                f"sample_batch made the first batch of {_called(self.provider, split, number)} twice, and not the same",
                provider=type(self.provider).__name__,
                field=", ".join(wrong),
                remedy="draw from rng, the second argument, and only from it; or say reproducible = False in the class",
            )
        self.is_checked = True

    def _give_up(self, folder: SplitFolder, part: Part) -> None:
        with contextlib.suppress(OSError, QueueError):  # whatever ended the making says more
            folder.give_up(part)

    def _tell_full(self, error: BaseException, split: str = "", number: int = -1) -> None:
        said = f"waits: {os.strerror(getattr(error, 'errno', None) or errno.ENOSPC)}"
        self.member.say(said, split, number)
        if not self.is_full:  # once, not with every look
            with contextlib.suppress(OSError):  # it may go to a file on the same disk
                print(f"{self.queue.path}: {said}; goes on when there is room", file=sys.stderr, flush=True)
        self.is_full = True

    def _sleep(self) -> None:
        if self.provider._watch is not None and not self.provider._stopping.is_set():
            self.provider._watch.wait(self.provider.sleep_seconds)


def _fingerprints_of(provider: DataProviderBase) -> dict[str, str]:
    """The raw files of a provider, in its order, by what is in them."""
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


def _is_whole(value: Any, smallest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= smallest


def _checked_splits(splits: Any) -> tuple[str, ...]:
    names = tuple(splits) if isinstance(splits, tuple | list) else ()
    if not names or any(names.count(name) > 1 or name not in _SPLITS for name in names):
        raise SpecError(
            f"splits must be a tuple of 'train' and 'val', or of one of them, got {splits!r}",
            parameter="splits",
            remedy='run(splits=("train",))',
        )
    return names


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _called(provider: DataProviderBase, split: str, number: int | None) -> str:
    """A file, in words. Kept batches have no number, and `batches` counts them as those of file 0."""
    is_kept = number is None or (split == "val" and provider.val_batches is not None)
    return f"kept {split} batches" if is_kept else f"{split} file {number}"


def _failed(error: BaseException, provider: DataProviderBase, split: str, number: int | None) -> WorkerError:
    place = place_of(error)
    return WorkerError(
        f"sample_batch failed making {_called(provider, split, number)}: {_in_words(error)}",
        provider=type(provider).__name__,
        at=place or None,
        remedy="mend sample_batch and start the provider again, with --accept-change where batches were taken already: "
        "it goes on with this file",
    )


def _stale(queue: QueueFolder, changed: list[str], *, can_be_accepted: bool, is_alone: bool) -> QueueError:
    go_on = "--accept-change (in Python run(accept_change=True)) makes the next files with it"
    stop = "" if is_alone else ", once the providers that run now are stopped"
    ways = ["undo the change", *([go_on + stop] if can_be_accepted else []), "or throw its files away:"]
    return QueueError(
        "the queue was made by something else than this provider",
        folder=queue.path,
        difference="\n".join(changed),
        remedy="; ".join(ways) + f"\n{purge_command(queue.path)}",
    )


@contextlib.contextmanager
def _ended_by_signals(provider: DataProviderBase) -> Iterator[None]:
    """SIGINT and SIGTERM stop the provider after its batch; the second one at once, and before the first batch too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if provider._stopping.is_set():
            raise KeyboardInterrupt
        provider.stop()
        if provider._knows is None:
            raise _Stopped
        if sys.stderr.isatty():
            print("stops after this batch; Ctrl-C again: at once", file=sys.stderr)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
