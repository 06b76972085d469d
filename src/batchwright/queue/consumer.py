"""`DatasetConsumer`: batches of a queue for a trainer, in any framework, on a device, exactly where it was.

Which rows come next is decided by a stream for each split: of claimed files (one or several consumers), of files that
ranks share, of kept validation batches, or of a provider in this process. Here is what a trainer sees of them.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from batchwright.base.checks import local_path
from batchwright.base.errors import BatchwrightError, MissingQueueError, PlanError, QueueError, SpecError, WorkerError
from batchwright.batches.frameworks import adapter
from batchwright.queue.claimed import ClaimedStream, Counts
from batchwright.queue.direct import DirectStream
from batchwright.queue.folder import QueueFolder
from batchwright.queue.kept import KeptStream
from batchwright.queue.members import Census, read_deaths
from batchwright.queue.meta_file import Meta, read_meta
from batchwright.queue.reading import Arrays, FileShape, Position, Reader
from batchwright.queue.refused import named
from batchwright.queue.schema import fields_of, is_pair
from batchwright.queue.seat import Seat
from batchwright.queue.striped import StripedStream
from batchwright.queue.waiting import Waiter
from batchwright.typing import Device, Framework

if TYPE_CHECKING:
    from batchwright.queue.provider import DataProviderBase

__all__ = ["DatasetConsumer"]

_SPLITS = ("train", "val")
_FRAMEWORKS = ("numpy", "torch", "mlx", "jax")
_LOOK_SECONDS = 0.05
_START_SECONDS = 1.0
"""Between making its folder and being seen in it, a provider may take so long."""


class _Stream(Protocol):
    counts: Counts

    def peek(self, num_rows: int | None) -> tuple[Arrays, Any]: ...
    def move(self, taken: Any) -> None: ...
    def record(self) -> None: ...
    def position(self) -> tuple[Position, FileShape | None] | None: ...
    def seek(self, position: Position, shape: FileShape | None, *, can_be_made_again: bool) -> None: ...
    def release(self, *, record: bool) -> None: ...
    def drop(self) -> None: ...
    def forget_lost_files(self) -> None: ...


class DatasetConsumer:
    """Blocks until a batch is there, and hands it out: `(X, Y)` for a schema of x and y, otherwise a dict."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        block_size: int | None = None,
        target_size: int | None = None,
        device: Device | None = None,
        timeout_seconds: float = 60,
        framework: Framework | None = None,
        delete: str = "consumed",
        *,
        provider: DataProviderBase | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        lease_seconds: float = 30.0,
    ) -> None:
        """`data_dir`: the dataset's folder. `device`: where batches go. `timeout_seconds`: how long to wait for a
        batch. `batch_size`: rows of a batch; None, those of the provider. `block_size`, `target_size`: checked, if
        given.

        `framework`: None is torch in a program that has imported it (or names a device), otherwise NumPy. `delete`:
        "consumed", files are deleted when they were read; "checkpoint", when `commit` is called. `provider`: made
        batches come from it, in this process, and there are no files. `rank`, `world_size`: this consumer gets every
        world_size-th batch, in an order that is the same in every run. `lease_seconds`: how long a consumer that does
        not move keeps its file, where nobody can see that it died.
        """
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        _check_positive(batch_size=batch_size, block_size=block_size, target_size=target_size)
        if not isinstance(timeout_seconds, int | float) or not timeout_seconds >= 0:
            raise _bad("timeout_seconds", timeout_seconds, "seconds, at least 0", "timeout_seconds=60")
        if not isinstance(lease_seconds, int | float) or not 0 < lease_seconds < float("inf"):
            raise _bad("lease_seconds", lease_seconds, "seconds above 0", "lease_seconds=30")
        if delete not in ("consumed", "checkpoint"):
            raise _bad("delete", delete, "'consumed' or 'checkpoint'", "delete='consumed'")
        self._rank, self._world_size = _checked_ranks(rank, world_size)
        self._framework = _checked_framework(framework, device)
        self._device = device
        self._batch_size = batch_size
        self._delete = delete
        self._lease_seconds = float(lease_seconds)
        self._provider = provider
        self._lock = threading.RLock()
        self._streams: dict[str, _Stream] = {}
        self._waits: dict[str, Waiter] = {}
        self._is_closed = False
        self._pid = os.getpid()
        if provider is not None:
            self._meta = provider.meta
            self.data_dir: Path = provider.data_dir if data_dir is None else local_path(data_dir=data_dir)
        elif data_dir is None:
            raise SpecError(
                "a consumer needs the folder of its dataset",
                parameter="data_dir",
                remedy="DatasetConsumer('data/<dataset>'), or provider=",
            )
        else:
            self.data_dir = local_path(data_dir=data_dir)
            self._queue = QueueFolder(Path(os.path.abspath(self.data_dir)) / "queue")
            self._census = Census(self._queue.who)
            self._meta = self._wait_for_meta(timeout_seconds)
        self.timeout_seconds = timeout_seconds
        self._fingerprint = self._meta.fingerprint
        self._said = copy.deepcopy(self._meta.said)  # the caller's, who may change it
        self._fields = fields_of(self._meta.said)
        self._names = [field.name for field in self._fields]
        self._is_pair = is_pair(self._fields)
        _check_sizes(self._fields, block_size, target_size)
        self._handed: Any = None if self._framework == "numpy" else adapter(self._framework).handed
        self._seats: list[Seat] = []
        self._last_state: dict[str, Any] = {"queue": self._fingerprint}
        self._last_stats: dict[str, Any] = {}
        _consumers.add(self)
        weakref.finalize(self, _let_go, self._streams, self._waits, self._seats)

    def _wait_for_meta(self, timeout_seconds: float) -> Meta:
        """What the provider wrote before its first file. One that has just started may still read its data."""
        began = time.monotonic()
        deadline = began + timeout_seconds
        while True:
            if not self._queue.path.is_dir():
                raise MissingQueueError(
                    f"Queue directory not found: {self._queue.path}",
                    folder=self._queue.path,
                    remedy="batchwright prepare CONFIG (python prepare.py CONFIG), with the config of this trainer",
                )
            meta = read_meta(self._queue.meta)
            if meta is not None:
                return meta
            deaths = read_deaths(self._queue.who)
            if deaths:
                raise WorkerError(
                    deaths[-1].headline,
                    traceback=deaths[-1].traceback,
                    remedy="mend it, and run batchwright prepare CONFIG again",
                )
            living = self._census.living("provider")
            now = time.monotonic()
            if now > deadline or (not living and now > began + _START_SECONDS):
                said = f"provider, pid {living[0].pid}, has not written it yet" if living else "no provider is running"
                raise MissingQueueError(
                    f"Queue directory not found: {self._queue.path} has no meta.json, and {said}",
                    folder=self._queue.path,
                    remedy="batchwright prepare CONFIG (python prepare.py CONFIG), with the config of this trainer",
                )
            time.sleep(_LOOK_SECONDS)

    # What the batches are

    @property
    def meta(self) -> dict[str, Any]:
        """What the provider's `build_meta` said."""
        return self._said

    def schema(self, split: str) -> list[dict[str, Any]] | None:
        """The fields of a batch of `split`: name, dtype, shape, role."""
        return self.meta.get("batch_schema")

    # Batches

    def get_batch(self, split: str, device: Device | None = None) -> Any:
        """The next batch of a split, on `device`. Waits for it, at most `timeout_seconds`; nothing is taken where this
        raises."""
        with self._lock:
            stream = self._streams.get(split)
            if stream is None or self._pid != os.getpid() or self._is_closed:
                stream = self._stream(split)
            if self._seats and self._seats[0].was_silent:
                self._come_back()
            if device is not None and self._handed is None:
                raise _no_device(device)
            try:
                arrays, taken = stream.peek(self._batch_size)
                batch: dict[str, Any] = dict(zip(self._names, arrays, strict=True))
                if self._handed is not None:
                    batch = self._handed(batch, self._device if device is None else device)
                handed = (batch["x"], batch["y"]) if self._is_pair else batch
                counts = stream.counts
                counts.rows += len(arrays[0])
                counts.batches += 1
                if split == "train":
                    self._begin_validation_again()
                stream.move(taken)  # last: until here nothing was taken
            except OSError as error:
                clear = self._named(error)
                if clear is None:
                    raise
                raise clear from error
        return handed

    def _begin_validation_again(self) -> None:
        validation = self._streams.get("val")
        if isinstance(validation, KeptStream | DirectStream):
            validation.begin_again()

    def _stream(self, split: str) -> _Stream:
        """The stream of a split, made when it is first asked for; anew in a child process that was forked."""
        if self._is_closed:
            raise SpecError(
                "this consumer is closed", parameter="consumer", remedy="DatasetConsumer(...) opens the queue again"
            )
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._streams.clear()
            self._waits.clear()
            self._seats.clear()
        if not isinstance(split, str) or split not in _SPLITS:
            raise _bad("split", split, "'train' or 'val'", "consumer.get_batch('train')")
        if split not in self._streams and not self._has(split):
            raise QueueError(
                f"this queue has no {split} files: its provider makes others only",
                folder=self._queue.path,
                split=split,
                remedy="run(splits=('train', 'val')), which is the default",
            )
        if split not in self._streams:
            self._streams[split] = self._new_stream(split)
        return self._streams[split]

    def _new_stream(self, split: str) -> _Stream:
        if self._provider is not None:
            return DirectStream(self._provider, split, self._rank or 0, self._world_size or 1)
        folder = self._queue.split(split, self._census)
        self._waits[split] = waiter = Waiter(self._queue, self._census, self.timeout_seconds)
        if split == "val" and self._meta.val_batches:
            return KeptStream(folder, waiter, self._fingerprint)
        folder.sweep()
        seat, reader, at_once = self._seat(), Reader(self._memory()), self._delete == "consumed"
        if self._rank is None or self._world_size is None:
            return ClaimedStream(folder, seat, waiter, reader, at_once=at_once)
        return StripedStream(folder, seat, waiter, reader, self._rank, self._world_size, at_once=at_once)

    def _memory(self) -> Any:
        """Where files are read to: memory of the device's own kind, if there is one."""
        return adapter("torch").memory_for(self._device) if self._framework == "torch" else None

    def _seat(self) -> Seat:
        if not self._seats:
            self._seats.append(Seat(self._queue, self._meta, self._lease_seconds, self._rank, self._world_size))
        return self._seats[0]

    def _come_back(self) -> None:
        """This process was stopped for a while, and others may have taken it for dead."""
        self._seats[0].stay()
        self._seats[0].member.come_back()
        for stream in self._streams.values():
            stream.forget_lost_files()

    # Where it is

    def commit(self) -> None:
        """Everything that was handed out is used, and does not come again; files that were read are deleted.

        With delete="checkpoint", call it when a checkpoint is safe: nothing is deleted otherwise.
        """
        with self._lock:
            try:
                for stream in self._streams.values():
                    stream.record()
            except OSError as error:
                clear = self._named(error)
                if clear is None:
                    raise
                raise clear from error

    def _named(self, error: OSError) -> BatchwrightError | None:
        """An error of the system, as one of the queue; that of a provider in this process is its own."""
        return named(error, self._queue.path) if self._provider is None else None

    def state_dict(self) -> dict[str, Any]:
        """Where each split is: the file and the batch in it that comes next. Small, and JSON."""
        with self._lock:
            return copy.deepcopy(self._last_state) if self._is_closed else self._opened_state()

    def _opened_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"queue": self._fingerprint}
        cut: dict[str, list[int]] = {}
        for split in _SPLITS:
            found = self._stream(split).position() if split in self._streams or self._has(split) else None
            if found is None:
                continue
            position, shape = found
            batch, row = divmod(position.row, shape.batch_size if shape is not None else 1)
            state[split] = {"file": position.file, "batch": batch}
            if row:  # batches of another size than the provider's
                state[split]["row"] = row
            if shape is not None:
                cut[split] = [*shape]
        return state | {"cut": cut}

    def _has(self, split: str) -> bool:
        """Whether the queue has a split: a provider may have been told to make one only."""
        return self._provider is not None or (self._queue.path / split).is_dir()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go where a state says, in every split that it names. Files that were deleted since are made again."""
        places = self._checked_state(state)
        with self._lock:
            for split, (position, shape) in places.items():
                stream = self._stream(split)
                try:
                    stream.seek(position, shape, can_be_made_again=self._meta.reproducible)
                except OSError as error:
                    clear = self._named(error)
                    if clear is None:
                        raise
                    raise clear from error

    def _checked_state(self, state: Mapping[str, Any]) -> dict[str, tuple[Position, FileShape | None]]:
        if not isinstance(state, Mapping) or not isinstance(state.get("queue"), str):
            raise PlanError(
                "this is not the state of a consumer",
                parameter="state",
                remedy="load_state_dict takes what consumer.state_dict() gave",
            )
        if state["queue"] != self._fingerprint:
            raise PlanError(
                "this state is of another queue: its schema, code, settings, raw files or seed differ",
                parameter="state",
                state=state["queue"],
                queue=self._fingerprint,
                remedy="prepare with what the state was saved with; or begin at the queue's first batch, without it",
            )
        cut = state.get("cut", {})
        places = {}
        for split, place in state.items():
            if split in ("queue", "cut"):
                continue
            if split not in _SPLITS or not isinstance(place, Mapping) or not isinstance(cut, Mapping):
                raise _bad_place(split, place)
            shape = cut.get(split)
            numbers = [place.get("file"), place.get("batch"), place.get("row", 0), *([] if shape is None else shape)]
            if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
                raise _bad_place(split, place)
            file, batch, row, *sizes = numbers
            if (not sizes and (batch or row)) or (sizes and len(sizes) != len(FileShape._fields)):
                raise _bad_place(split, place)
            rows = FileShape(*sizes) if sizes else None
            places[split] = Position(file, batch * (rows.batch_size if rows is not None else 1) + row), rows
        return places

    def stats(self) -> dict[str, Any]:
        """What happened, for each split: batches, rows and files, waits in seconds, what came again and why."""
        if self._is_closed:
            return copy.deepcopy(self._last_stats)
        told: dict[str, Any] = {}
        for split, stream in [*self._streams.items()]:
            told[split] = asdict(stream.counts)
            waiter = self._waits.get(split)
            if waiter is not None:
                told[split] |= {"wait_seconds": waiter.seconds, "longest_wait_seconds": waiter.longest_seconds}
                with contextlib.suppress(OSError):
                    told[split]["backlog_files"] = self._queue.split(split, self._census).backlog()
        return told

    # The end

    def close(self) -> None:
        """What was handed out counts as used (with delete="consumed"); the rest is there for others. Twice is fine."""
        self._close(record=self._delete == "consumed")

    def _close(self, *, record: bool) -> None:
        for waiter in [*self._waits.values()]:
            waiter.stop()  # before the lock, which a thread that waits holds
        with self._lock:
            if self._is_closed:
                return
            if self._pid != os.getpid():
                self._is_closed = True
                return
            with contextlib.suppress(OSError, QueueError):  # the folder may be gone
                self._last_state = self._opened_state()
            self._last_stats = self.stats()
            self._is_closed = True
            for stream in self._streams.values():
                with contextlib.suppress(OSError):
                    stream.release(record=record)
            _let_go(self._streams, self._waits, self._seats)

    def __enter__(self) -> DatasetConsumer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Where a step failed, the batch that it worked on may not have been used: it comes again.
        self._close(record=kind is None and self._delete == "consumed")

    def __reduce__(self) -> Any:
        """For other processes: a consumer of their own, on the same queue."""
        return _opened_again, (self._arguments,)

    def __repr__(self) -> str:
        return f"DatasetConsumer({str(self.data_dir)!r})"


def _let_go(streams: dict[str, _Stream], waits: dict[str, Waiter], seats: list[Seat]) -> None:
    """Leave the queue without taking its lock: a collector may call this anywhere. Others find that nobody holds what
    was held; the batch that was handed out last comes again, since nobody said that it was used."""
    pid = os.getpid()
    if any(seat.pid != pid for seat in seats):  # a forked child: all this is its parent's
        return
    for stream in streams.values():
        stream.drop()
    for waiter in waits.values():
        waiter.close()
    for seat in seats:
        seat.leave()
    streams.clear()
    waits.clear()
    seats.clear()


def _opened_again(arguments: dict[str, Any]) -> DatasetConsumer:
    return DatasetConsumer(**arguments)


_consumers: weakref.WeakSet[DatasetConsumer] = weakref.WeakSet()


def _unlock_all() -> None:
    """In a forked child: the lock may be that of a thread which is not here."""
    for consumer in _consumers:
        consumer._lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock_all)


def _checked_framework(framework: str | None, device: Any) -> str:
    if framework is None:
        return "torch" if device is not None or "torch" in sys.modules else "numpy"
    if framework not in _FRAMEWORKS:
        raise _bad("framework", framework, "'numpy', 'torch', 'mlx' or 'jax'", "framework='torch'")
    if framework == "numpy" and device is not None:
        raise _no_device(device)
    return framework


def _no_device(device: Any) -> SpecError:
    return _bad("device", device, "None for NumPy arrays, which lie in this machine's memory", "framework='torch'")


def _checked_ranks(rank: int | None, world_size: int | None) -> tuple[int | None, int | None]:
    if (rank is None) != (world_size is None):
        raise SpecError(
            "rank and world_size belong together",
            parameter="rank" if rank is None else "world_size",
            remedy="rank=0, world_size=4; or neither, and each file goes to one of the consumers",
        )
    if rank is None or world_size is None:
        return None, None
    _check_positive(world_size=world_size)
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < world_size:
        raise _bad("rank", rank, f"a whole number from 0 to {world_size - 1}", "rank=0")
    return rank, world_size


def _check_positive(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise _bad(name, size, "a whole number of at least 1", f"{name}=64")


def _check_sizes(fields: Any, block_size: int | None, target_size: int | None) -> None:
    """That what a trainer expects is what the queue has."""
    shapes = {field.name: field.shape for field in fields}
    for name, parameter, size in (("x", "block_size", block_size), ("y", "target_size", target_size)):
        if size is not None and name in shapes and shapes[name][:1] != (size,):
            raise SpecError(
                f"{parameter}={size}, and the queue's {name} has shape {list(shapes[name])}",
                parameter=parameter,
                remedy=f"leave {parameter} out; or prepare the queue with the config of this trainer",
            )


def _bad(parameter: str, value: Any, allowed: str, remedy: str) -> SpecError:
    return SpecError(f"{parameter} must be {allowed}; got {value!r}", parameter=parameter, remedy=remedy)


def _bad_place(split: str, place: Any) -> PlanError:
    return PlanError(
        f"the state has no place in {split!r}: {place!r}",
        parameter="state",
        remedy="load_state_dict takes what consumer.state_dict() gave",
    )
