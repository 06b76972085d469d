"""The production of files: the loop of a provider, and the steps of a number from taken to published or given up."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from batchwright.base.errors import BatchwrightError, QueueError, WorkerError
from batchwright.base.files import one_at_a_time, sync_folder
from batchwright.base.machine import FolderWatch
from batchwright.base.words import error_in_words
from batchwright.queue.batch_file import BatchFileWriter, DamagedFile, FileFacts, read_facts
from batchwright.queue.folder import EXTENSION, Listing, QueueFolder, SplitFolder, write_number
from batchwright.queue.members import Liveness, QueueMember, place_of
from batchwright.queue.messages import clear_errors, deleted, file_in_words, is_out_of_space, purge_command
from batchwright.queue.meta import Meta, read_meta, write_meta
from batchwright.queue.reading import Position
from batchwright.queue.stamp import differences

if TYPE_CHECKING:
    from batchwright.queue.provider import DataProviderBase

_LEASE_SECONDS = 30.0
_AFTER_A_FAILURE = (
    "mend sample_batch and start the provider again, with --accept-change where batches were taken already: "
    "it goes on with this file"
)
_READS = "reads what it makes batches of"


class _Stopped(BaseException):
    """A signal came while `build_meta` read its data, which then need not end."""


def produce(provider: DataProviderBase, splits: tuple[str, ...], max_files: int | None, *, accept_change: bool) -> int:
    """Make files until the provider is stopped. Returns how many were made."""
    queue = QueueFolder(provider.data_dir / "queue")
    wanted = [queue.path / "control" / split / "wanted" for split in splits]
    with _ended_by_signals(provider), clear_errors(queue.path):
        queue.make(splits)
        production = _Production(provider, queue, splits)
        provider._watch = FolderWatch(*(queue.path / split for split in splits), *wanted)
        try:
            return production.until_stopped(max_files, accept_change)
        except _Stopped:
            return 0
        finally:
            provider._watch.close()
            provider._watch = None
            production.member.leave()


class _Production:
    """The state of a provider at work."""

    def __init__(self, provider: DataProviderBase, queue: QueueFolder, splits: tuple[str, ...]) -> None:
        self.provider = provider
        self.queue = queue
        self.liveness = Liveness(queue.who)
        self.member = QueueMember(queue.who, "provider", _LEASE_SECONDS)
        self.folders = [queue.split(name, self.liveness) for name in splits]
        self.at: tuple[str | None, int | None] = (None, None)
        """The split and the number that are being made."""
        self.is_full = False

    def until_stopped(self, max_files: int | None, accept_change: bool) -> int:
        num_made = 0
        try:
            self._begin(accept_change)
            while not self.provider._stopping.is_set() and (max_files is None or num_made < max_files):
                num_made += self._make_next()
        except Exception as error:
            self._report(error)
            raise
        return num_made

    def _report(self, error: Exception) -> None:
        """Raise the error in consumers that wait; not if this provider was refused while others are at work."""
        living: set[str] = set()
        with contextlib.suppress(OSError):  # the error may keep us from looking too
            living = {facts.id for facts in self.liveness.living("provider")}
        if self.at != (None, None) or living <= {self.member.id}:
            self.member.died(error.__cause__ or error, *self.at)

    # The beginning

    def _begin(self, accept_change: bool) -> None:
        """Write the meta, or follow the existing one."""
        for path in self.queue.who.glob("*.died"):  # a provider is here again: consumers wait for its files
            path.unlink(missing_ok=True)
        self.member.say(_READS)
        with self._users_code("build_meta failed", "its traceback says where"):
            meta = self.provider.meta
        with one_at_a_time(self.queue.path):
            there = read_meta(self.queue.meta)
            if there is None:
                write_meta(self.queue.meta, meta)
            else:
                self._go_on(there, meta, accept_change)
            self.member.say("waits: begins")  # from here on others do not begin anew
            for path in self.queue.path.glob(".meta.json.*.part"):
                path.unlink(missing_ok=True)
        self.liveness.remove_dead()
        for folder in self.folders:
            folder.sweep()
        if self.provider.reproducible and not self.provider._stopping.is_set():
            self._check_is_reproducible()

    def _go_on(self, there: Meta, mine: Meta, accept_change: bool) -> None:
        """Make files for an existing queue, of the same provider or of a different one that is accepted."""
        changed = differences(there.stamp, mine.stamp)
        is_alone = not self._others_have_begun()
        if changed and is_alone and self._begins_anew():
            write_meta(self.queue.meta, mine)
            return
        meta = replace(there, reproducible=mine.reproducible, val_batches=mine.val_batches, batch_size=mine.batch_size)
        if changed:
            has_same_schema = there.said.get("batch_schema") == mine.said.get("batch_schema")
            if not (accept_change and has_same_schema and is_alone):
                raise _stale(self.queue, changed, can_be_accepted=has_same_schema, is_alone=is_alone)
            following = {folder.name: folder.listing().next for folder in self.folders}
            record = {"difference": changed, "next": following}
            meta = replace(meta, said=mine.said, stamp=mine.stamp, accepted=(*there.accepted, record))
        if meta != there:
            write_meta(self.queue.meta, meta)
        self.provider.go_by(meta)

    def _others_have_begun(self) -> bool:
        members = self.liveness.members("provider")
        others = [facts.id for facts, activity in members if activity.what != _READS and facts.id != self.member.id]
        return any(map(self.liveness.is_alive, others))

    def _begins_anew(self) -> bool:
        """Throw away the files if none of their batches was handed out. Otherwise return False and leave them."""
        names = ("train", "val")
        splits = [self.queue.split(name, self.liveness) for name in names if (self.queue.path / name).is_dir()]
        with contextlib.ExitStack() as locks:
            for split in splits:
                locks.enter_context(split.one_at_a_time())
            if any(_was_read(split) for split in splits):
                return False
            for split in splits:
                _begin_anew(split)
        return True

    # File after file

    def _make_next(self) -> bool:
        """Make one file, or wait for work. Whether one was made."""
        self._renew_membership()
        try:
            begun = self._begin_next()
            if begun is not None:
                return self._make(*begun)
        except OSError as error:
            if not is_out_of_space(error):
                raise
            self._wait_for_room(error.__cause__ or error)
            return False
        self.member.say("waits: enough is ready")
        if self.provider._watch is not None and not self.provider._stopping.is_set():
            self.provider._watch.wait(self.provider.sleep_seconds)
        return False

    def _renew_membership(self) -> None:
        """Join again if others took this process for dead: it was stopped for a while."""
        if self.member.is_here:
            return
        if not self.queue.who.is_dir() or not self.queue.meta.exists():
            raise deleted(self.queue.path)
        self.member.leave()
        self.member = QueueMember(self.queue.who, "provider", _LEASE_SECONDS)

    def _begin_next(self) -> tuple[SplitFolder, UnfinishedFile] | None:
        """Take a number to make: of the kept batches first, then of the split with the fewest waiting files."""
        streamed = []
        for folder in self.folders:
            if folder.name != "val" or not self.provider.val_batches:
                streamed.append(folder)
            elif self._is_due(folder.kept_path):
                part = _begin_kept(folder, self.member, self._is_due)
                if part is not None:
                    return folder, part
        for folder in sorted(streamed, key=SplitFolder.backlog):
            part = begin(folder, self.member, self.provider.max_backlog_files)
            if part is not None:
                return folder, part
        return None

    def _is_due(self, path: Path) -> bool:
        """Whether the kept batches are missing or outdated, and are this provider's to make.

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
        sizes = provider.batch_size, provider.num_batches(split)
        return FileFacts(provider.meta.fingerprint, split, number or 0, *sizes, provider._known()[1])

    # One file

    def _make(self, folder: SplitFolder, part: UnfinishedFile) -> bool:
        """Make one file. False if it was given up: to stop, or because it is no longer needed."""
        name = file_in_words(folder.name, part.number)
        self.at = folder.name, part.number
        self.member.say("makes" if part.number is not None else f"makes {name}", *self.at)
        began = time.perf_counter()
        try:
            if not self._write(folder, part):
                give_up(folder, part)
                self.at = None, None
                return False
            is_published = publish(folder, part, durable=self.provider.durable)
        except BaseException:
            with contextlib.suppress(OSError, QueueError):  # the first error is more helpful
                give_up(folder, part)
            raise
        self.is_full = False
        self.at = None, None
        if is_published and self.provider.verbose:
            seconds, num_batches = time.perf_counter() - began, self.provider.num_batches(folder.name)
            _print(f"{name}: {num_batches} batches in {seconds:.2f} s", sys.stdout)
        return is_published

    def _write(self, folder: SplitFolder, part: UnfinishedFile) -> bool:
        """Write all batches of a file. False if the provider was stopped before, or the file is no longer needed."""
        batches = self._batches(folder.name, part.number)
        try:
            writer = BatchFileWriter(part.path, self._facts(folder.name, part.number), is_there=True)
        except FileNotFoundError:  # its maker seemed dead, or a reader went back to before it
            return False
        with writer:
            while not self.provider._stopping.is_set():
                arrays = next(batches, None)
                if arrays is None:
                    writer.finish(durable=self.provider.durable)
                    return True
                writer.append(arrays)
        return False

    def _check_is_reproducible(self) -> None:
        """Make one batch twice: files must come out the same again."""
        split = self.folders[0].name
        self.at = split, 0
        first, again = ([array.tobytes() for array in next(self._batches(split, 0))] for _ in range(2))
        fields = self.provider._known()[1]
        wrong = [field.name for field, one, other in zip(fields, first, again, strict=True) if one != other]
        if wrong:
            raise WorkerError(
                f"sample_batch made the first batch of {file_in_words(split, 0)} twice, and not the same",
                provider=type(self.provider).__name__,
                field=", ".join(wrong),
                remedy="draw from rng, the second argument, and only from it; or say reproducible = False in the class",
            )
        self.at = None, None

    def _batches(self, split: str, number: int | None) -> Iterator[list[NDArray[Any]]]:
        """The batches of a file. An error of the user's code names the file and the place in the code."""
        said = f"sample_batch failed making {file_in_words(split, number)}"
        with self._users_code(said, _AFTER_A_FAILURE):
            yield from self.provider.batches(split, number or 0)

    @contextlib.contextmanager
    def _users_code(self, what: str, remedy: str) -> Iterator[None]:
        try:
            yield
        except BatchwrightError:
            raise
        except (Exception, SystemExit) as error:
            said = f"{what}: {error_in_words(error)}"
            kind, at = type(self.provider).__name__, place_of(error) or None
            raise WorkerError(said, provider=kind, at=at, remedy=remedy) from error

    def _wait_for_room(self, error: BaseException) -> None:
        said = f"waits: {os.strerror(getattr(error, 'errno', None) or errno.ENOSPC)}"
        self.member.say(said, *self.at)
        self.at = None, None
        if not self.is_full:  # once, not with every look
            _print(f"{self.queue.path}: {said}; goes on when there is room", sys.stderr)
        self.is_full = True
        self.provider._stopping.wait(self.provider.sleep_seconds)


def _print(text: str, to: Any) -> None:
    with contextlib.suppress(OSError):  # it may go to a file on a disk that is full
        print(text, file=to, flush=True)


def _stale(queue: QueueFolder, changed: list[str], *, can_be_accepted: bool, is_alone: bool) -> QueueError:
    ways = ["undo the change"]
    if can_be_accepted:
        stop = "" if is_alone else ", once the providers that run now are stopped"
        ways.append(f"--accept-change (in Python run(accept_change=True)) makes the next files with it{stop}")
    return QueueError(
        "the queue was made by something else than this provider",
        folder=queue.path,
        difference="\n".join(changed),
        remedy="; ".join([*ways, "or throw its files away:"]) + f"\n{purge_command(queue.path)}",
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
        if provider._knows is None and provider._watch is not None:
            raise _Stopped
        if sys.stderr.isatty():
            print("stops after this batch; Ctrl-C again: at once", file=sys.stderr)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# A number: taken, then published or given up


@dataclass(frozen=True, slots=True)
class UnfinishedFile:
    """A number that a provider makes, and the file that it writes."""

    number: int | None
    """None for the kept batches."""
    path: Path
    """It is made once, when the number is taken. A file that is gone belongs to nobody, and is not made again."""


def begin(folder: SplitFolder, provider: QueueMember, max_backlog_files: int) -> UnfinishedFile | None:
    """Take the number of a file to make. None if no file is needed now."""
    with folder.one_at_a_time():
        there = folder.listing()
        abandoned = {number for number, maker in there.making.items() if not folder.lives(maker, provider)}
        for number in sorted({*there.wanted, *abandoned}):
            is_made = number in there.making and number not in abandoned
            if is_made or number in there.ready or number in there.claimed:
                folder.forget_wanted(number)
            elif number > there.next:  # all before it come first
                continue
            elif number not in abandoned or _take_over(folder, number, there.making[number]):
                return _begin(folder, number, provider, there)
        if sum(number < there.next for number in there.ready) >= max_backlog_files:
            return None
        return _begin(folder, there.next, provider, there)


def _begin(folder: SplitFolder, number: int, provider: QueueMember, there: Listing) -> UnfinishedFile:
    part = folder.part_path(number, provider.id)
    part.touch()
    try:
        if number >= there.next:
            write_number(folder.path / "next", number + 1)
    except OSError:  # a full disk: the number must not seem to be made here
        part.unlink(missing_ok=True)
        raise
    folder.forget_wanted(number)
    return UnfinishedFile(number, part)


def _take_over(folder: SplitFolder, number: int, maker: str) -> bool:
    """Throw away the unfinished file of a dead provider. False if it was not dead, and has just finished."""
    folder.want(number)  # or a kill right here would lose it
    try:
        folder.part_path(number, maker).unlink()
    except FileNotFoundError:
        folder.forget_wanted(number)
        return False
    return True


def _begin_kept(folder: SplitFolder, provider: QueueMember, is_due: Callable[[Path], bool]) -> UnfinishedFile | None:
    """Like `begin`, for the kept batches, if they are due and no other provider makes them."""
    with folder.one_at_a_time():
        if not is_due(folder.kept_path):
            return None
        for maker in folder.makers_of_kept():
            if maker != provider.id and folder.liveness.is_alive(maker):
                return None
            folder.part_path(None, maker).unlink(missing_ok=True)
        part = folder.part_path(None, provider.id)
        part.touch()
        return UnfinishedFile(None, part)


def publish(folder: SplitFolder, part: UnfinishedFile, *, durable: bool = False) -> bool:
    """Give a finished file its name. False if it is no longer needed: its maker seemed dead, or a reader went back
    to before it."""
    try:
        os.rename(part.path, folder.ready_path(part.number))
    except FileNotFoundError:
        if not folder.path.is_dir():
            raise deleted(folder.queue.path) from None
        return False
    if durable:
        sync_folder(folder.path)
    return True


def give_up(folder: SplitFolder, part: UnfinishedFile) -> None:
    """Leave a number that was begun to another provider."""
    with folder.one_at_a_time():
        if part.number is not None and part.path.exists():
            folder.want(part.number)  # first: a kill between the two must not lose it
        part.path.unlink(missing_ok=True)


def _was_read(folder: SplitFolder) -> bool:
    """Whether a batch was handed out, as far as it was recorded."""
    there, of_ranks = folder.listing(), folder.records.left_off()
    if of_ranks is not None and of_ranks.handed > Position(0, 0):
        return True
    return bool(there.taken or there.claimed or there.returned or folder.kept_seen_path.exists())


def _begin_anew(folder: SplitFolder) -> None:
    """Throw away all files. The first file is made next. For a split that was never read."""
    for path in [*folder.path.glob(f"*{EXTENSION}"), *folder.path.glob(".*.part"), *folder.wanted.iterdir()]:
        path.unlink(missing_ok=True)
    (folder.path / "next").unlink(missing_ok=True)
