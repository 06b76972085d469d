"""`DatasetConsumer` gives a trainer the batches of a queue, in any framework, on a device, and resumes exactly.

One stream per split decides the next rows. They come from claimed files (one or several consumers), from files that
ranks share, from kept validation batches, or from a provider in this process.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from batchwright.base.checks import at_least, local_path, one_of
from batchwright.base.errors import MissingQueueError, PlanError, QueueError, SpecError
from batchwright.batches.frameworks import adapter
from batchwright.queue.batch_file import FileShape
from batchwright.queue.claimed_stream import ClaimedStream
from batchwright.queue.folder import QueueFolder
from batchwright.queue.members import Liveness, Membership
from batchwright.queue.messages import clear_errors
from batchwright.queue.meta import Meta, read_meta
from batchwright.queue.rank_stream import RankStream
from batchwright.queue.reading import Position
from batchwright.queue.schema import BatchField, fields_of, is_pair
from batchwright.queue.settings import is_seconds, wrong
from batchwright.queue.streams import BatchStream, SplitReader, Waiter, closed
from batchwright.queue.unrecorded_streams import InProcessStream, ValidationStream
from batchwright.typing import Device, Framework

if TYPE_CHECKING:
    from batchwright.queue.provider import DataProviderBase

__all__ = ["DatasetConsumer"]

_SPLITS = ("train", "val")
_LOOK_SECONDS = 0.05
_START_SECONDS = 1.0
"""A provider may take this long between making its folder and being seen in it."""


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
        """`data_dir`: the dataset's folder. `device`: the device of the batches. `timeout_seconds`: the longest wait
        for a batch. `batch_size`: rows of a batch; None, the provider's. `block_size`, `target_size`: checked,
        if given.

        `framework`: None is torch in a program that has imported it (or names a device), otherwise NumPy. `delete`:
        "consumed", files are deleted when they were read; "checkpoint", when `commit` is called. `provider`: batches
        are made by it, in this process, without files. `rank`, `world_size`: this consumer gets every world_size-th
        batch, in an order that is the same in every run. `lease_seconds`: how long a consumer that does not move keeps
        its file, where its death cannot be seen.
        """
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        _check_sizes(batch_size=batch_size, block_size=block_size, target_size=target_size)
        _check_seconds(timeout_seconds, lease_seconds)
        one_of(("consumed", "checkpoint"), delete=delete)
        _check_ranks(rank, world_size)
        self._rank, self._world_size = rank, world_size
        self._framework = _checked_framework(framework, device)
        self._device = device
        self._batch_size = batch_size
        self._delete = delete
        self._lease_seconds = float(lease_seconds)
        self._provider = provider
        self.timeout_seconds = timeout_seconds
        self._open(data_dir)
        self._fingerprint = self._meta.fingerprint
        self._said = copy.deepcopy(self._meta.said)  # the caller's, who may change it
        fields = fields_of(self._meta.said)
        _check_shapes(fields, block_size, target_size)
        self._names = [field.name for field in fields]
        self._is_pair = is_pair(fields)
        self._converted: Any = None
        if self._framework != "numpy":
            self._converted = adapter(self._framework).handed
        self._lock = threading.RLock()
        self._streams: dict[str, BatchStream] = {}
        self._memberships: list[Membership] = []
        """The one of this process, from its first batch on."""
        self._is_closed = False
        self._pid = os.getpid()
        self._last_state: dict[str, Any] = {"queue": self._fingerprint}
        self._last_stats: dict[str, Any] = {}
        _consumers.add(self)
        weakref.finalize(self, _close_all, self._streams, self._memberships)

    def _open(self, data_dir: str | os.PathLike[str] | None) -> None:
        if self._provider is not None:
            self._meta = self._provider.meta
            self.data_dir: Path = self._provider.data_dir
            if data_dir is not None:
                self.data_dir = local_path(data_dir=data_dir)
            return
        if data_dir is None:
            raise SpecError(
                "a consumer needs the folder of its dataset",
                parameter="data_dir",
                remedy="DatasetConsumer('data/<dataset>'), or provider=",
            )
        self.data_dir = local_path(data_dir=data_dir)
        self._queue = QueueFolder(Path(os.path.abspath(self.data_dir)) / "queue")
        self._liveness = Liveness(self._queue.who)
        self._meta = self._wait_for_meta()

    def _wait_for_meta(self) -> Meta:
        """The meta, which a provider writes before its first file, and after it has read its data."""
        began = time.monotonic()
        while True:
            if not self._queue.path.is_dir():
                raise self._missing(f"Queue directory not found: {self._queue.path}")
            meta = read_meta(self._queue.meta)
            if meta is not None:
                return meta
            self._liveness.raise_failure("mend it, and run batchwright prepare CONFIG again")
            living = self._liveness.living("provider")
            waited = time.monotonic() - began
            if waited > self.timeout_seconds or (not living and waited > _START_SECONDS):
                said = "no provider is running"
                if living:
                    said = f"provider, pid {living[0].pid}, has not written it yet"
                raise self._missing(f"Queue directory not found: {self._queue.path} has no meta.json, and {said}")
            time.sleep(_LOOK_SECONDS)

    def _missing(self, headline: str) -> MissingQueueError:
        return MissingQueueError(
            headline,
            folder=self._queue.path,
            remedy="batchwright prepare CONFIG (python prepare.py CONFIG), with the config of this trainer",
        )

    # Facts about the batches

    @property
    def meta(self) -> dict[str, Any]:
        """The meta that the provider's `build_meta` returned."""
        return self._said

    def schema(self, split: str) -> list[dict[str, Any]] | None:
        """The fields of a batch of `split`: name, dtype, shape, role."""
        return self.meta.get("batch_schema")

    # Batches

    def get_batch(self, split: str, device: Device | None = None) -> Any:
        """Return the next batch of a split, on `device`. Waits at most `timeout_seconds`. If this raises, no batch was
        taken."""
        with self._lock:
            stream = self._streams.get(split)
            if stream is None or self._pid != os.getpid() or self._is_closed:
                stream = self._stream(split)
            if self._memberships and self._memberships[0].was_silent:
                self._come_back()
            try:
                arrays, taken = stream.peek(self._batch_size)
                batch = self._on_device(dict(zip(self._names, arrays, strict=True)), device)
                stream.counts.rows += len(arrays[0])
                stream.counts.batches += 1
                if split == "train" and "val" in self._streams:
                    self._streams["val"].begin_again()
                stream.move(taken)  # last: an error before this line takes no batch
            except OSError as error:
                with self._clear_errors():
                    raise error
        if self._is_pair:
            return batch["x"], batch["y"]
        return batch

    def _on_device(self, batch: dict[str, Any], device: Device | None) -> dict[str, Any]:
        if self._converted is not None:
            converted: dict[str, Any] = self._converted(batch, self._device if device is None else device)
            return converted
        if device is not None:
            raise _no_device(device)
        return batch

    def _clear_errors(self) -> contextlib.AbstractContextManager[None]:
        """Turn errors of the system into errors of the queue. A provider in this process has errors of its own."""
        if self._provider is not None:
            return contextlib.nullcontext()
        return clear_errors(self._queue.path)

    def _stream(self, split: str) -> BatchStream:
        """The stream of a split, made on first use, and again in a forked child process."""
        if self._is_closed:
            raise closed("this consumer is closed")
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._streams.clear()
            self._memberships.clear()
        one_of(_SPLITS, split=split)
        if split not in self._streams:
            if not self._has(split):
                raise QueueError(
                    f"this queue has no {split} files: its provider makes others only",
                    folder=self._queue.path,
                    split=split,
                    remedy="run(splits=('train', 'val')), which is the default",
                )
            self._streams[split] = self._new_stream(split)
        return self._streams[split]

    def _new_stream(self, split: str) -> BatchStream:
        if self._provider is not None:
            return InProcessStream(self._provider, split, self._rank or 0, self._world_size or 1)
        folder = self._queue.split(split, self._liveness)
        waiter = Waiter(folder, self.timeout_seconds)
        if split == "val" and self._meta.val_batches:
            return ValidationStream(SplitReader(folder, waiter, self._fingerprint))
        folder.sweep()
        if not self._memberships:
            self._memberships.append(
                Membership(self._queue, self._meta, self._lease_seconds, self._rank, self._world_size)
            )
        membership, at_once = self._memberships[0], self._delete == "consumed"
        memory = None
        if self._framework == "torch":  # pinned memory, if the device needs it
            memory = adapter("torch").memory_for(self._device)
        source = SplitReader(folder, waiter, self._fingerprint, memory)
        if self._rank is None or self._world_size is None:
            return ClaimedStream(source, membership, at_once=at_once)
        return RankStream(source, membership, self._rank, self._world_size, at_once=at_once)

    def _come_back(self) -> None:
        """This process was stopped for a while, and others may have taken it for dead."""
        self._memberships[0].renew()
        self._memberships[0].member.come_back()
        for stream in self._streams.values():
            stream.forget_lost_files()

    # Position

    def commit(self) -> None:
        """Everything that was handed out is used, and does not come again; files that were read are deleted.

        With delete="checkpoint", call it when a checkpoint is safe. Files are deleted only then.
        """
        with self._lock, self._clear_errors():
            for stream in self._streams.values():
                stream.record()

    def state_dict(self) -> dict[str, Any]:
        """The position of each split: the file and the batch in it that comes next. Small, and JSON."""
        with self._lock:
            if self._is_closed:
                return copy.deepcopy(self._last_state)
            return self._opened_state()

    def _opened_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"queue": self._fingerprint}
        cut: dict[str, list[int]] = {}
        for split in _SPLITS:
            if split not in self._streams and not self._has(split):
                continue
            found = self._stream(split).position()
            if found is not None:
                position, shape = found
                state[split] = _place_in_state(position, shape)
                if shape is not None:
                    cut[split] = [*shape]
        return state | {"cut": cut}

    def _has(self, split: str) -> bool:
        """Whether the queue has a split: a provider may have been told to make one only."""
        return self._provider is not None or (self._queue.path / split).is_dir()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state, in every split that it names. Files that were deleted since are made again."""
        places = _checked_state(state, self._fingerprint)
        with self._lock:
            for split, (position, shape) in places.items():
                stream = self._stream(split)
                with self._clear_errors():
                    stream.seek(position, shape, can_be_made_again=self._meta.reproducible)

    def stats(self) -> dict[str, Any]:
        """Counts of each split: batches, rows and files, waits in seconds, repeated batches and the reasons."""
        if self._is_closed:
            return copy.deepcopy(self._last_stats)
        stats: dict[str, Any] = {}
        for split, stream in [*self._streams.items()]:
            stats[split] = asdict(stream.counts)
            if (waiter := stream.waiter) is not None:
                stats[split] |= {"wait_seconds": waiter.seconds, "longest_wait_seconds": waiter.longest_seconds}
                with contextlib.suppress(OSError):
                    stats[split]["backlog_files"] = waiter.folder.backlog()
        return stats

    # The end

    def close(self) -> None:
        """Close the consumer. Batches that were handed out count as used (with delete="consumed"); others can read the
        rest. A second call does nothing."""
        self._close(record=self._delete == "consumed")

    def _close(self, *, record: bool) -> None:
        for stream in [*self._streams.values()]:
            if stream.waiter is not None:
                stream.waiter.stop()  # before the lock, which a thread that waits holds
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
            _close_all(self._streams, self._memberships)

    def __enter__(self) -> DatasetConsumer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A step that failed may not have used its batch: the batch comes again.
        self._close(record=kind is None and self._delete == "consumed")

    def __reduce__(self) -> Any:
        """Pickle for another process, which gets its own consumer on the same queue."""
        return partial(DatasetConsumer, **self._arguments), ()

    def __repr__(self) -> str:
        return f"DatasetConsumer({str(self.data_dir)!r})"


def _close_all(streams: dict[str, BatchStream], memberships: list[Membership]) -> None:
    """Leave the queue without taking its lock: a garbage collector may call this anywhere. The last batch comes again,
    since it was not recorded as used."""
    pid = os.getpid()
    if any(membership.pid != pid for membership in memberships):  # a forked child: all this is its parent's
        return
    for stream in streams.values():
        stream.drop()
        if stream.waiter is not None:
            stream.waiter.close()
    for membership in memberships:
        membership.leave()
    streams.clear()
    memberships.clear()


_consumers: weakref.WeakSet[DatasetConsumer] = weakref.WeakSet()


def _unlock_all() -> None:
    """Replace the locks in a forked child. A thread that does not exist there may hold them."""
    for consumer in _consumers:
        consumer._lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock_all)


# The state


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Place(msgspec.Struct, frozen=True):
    file: _Count
    batch: _Count
    row: _Count = 0
    """Above 0 only in the middle of a batch of the provider's."""


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """{"queue": "4f2a...", "train": {"file": 7, "batch": 5}, "cut": {"train": [8, 100]}}"""

    queue: str
    train: _Place | None = None
    val: _Place | None = None
    cut: dict[str, tuple[_Count, _Count]] = {}
    """The batch size and the number of batches of each split's file: a place counts in these batches."""


def _place_in_state(position: Position, shape: FileShape | None) -> dict[str, int]:
    if shape is None:
        return {"file": position.file, "batch": position.row}
    batch, row = divmod(position.row, shape.batch_size)
    place = {"file": position.file, "batch": batch}
    if row:
        place["row"] = row
    return place


def _checked_state(state: Mapping[str, Any], fingerprint: str) -> dict[str, tuple[Position, FileShape | None]]:
    """The position of each split, and how its file was cut."""
    try:
        loaded = msgspec.convert(state, _State)
    except msgspec.ValidationError as error:
        raise _no_state(str(error)) from None
    if loaded.queue != fingerprint:
        raise PlanError(
            "this state is of another queue: its schema, code, settings, raw files or seed differ",
            parameter="state",
            state=loaded.queue,
            queue=fingerprint,
            remedy="prepare with what the state was saved with; or begin at the queue's first batch, without it",
        )
    places: dict[str, tuple[Position, FileShape | None]] = {}
    for split, place in (("train", loaded.train), ("val", loaded.val)):
        if place is None:
            continue
        if split in loaded.cut:
            shape = FileShape(*loaded.cut[split])
            places[split] = Position(place.file, place.batch * shape.batch_size + place.row), shape
        elif place.batch or place.row:
            raise _no_state(f"a batch of {split} without its cut")
        else:
            places[split] = Position(place.file, 0), None
    return places


def _no_state(reason: str) -> PlanError:
    return PlanError(
        f"this is not the state of a consumer: {reason}",
        parameter="state",
        remedy="load_state_dict takes what consumer.state_dict() gave",
    )


# Checks


def _checked_framework(framework: str | None, device: Any) -> str:
    if framework is None:
        is_torch = device is not None or "torch" in sys.modules
        return "torch" if is_torch else "numpy"
    one_of(("numpy", "torch", "mlx", "jax"), framework=framework)
    if framework == "numpy" and device is not None:
        raise _no_device(device)
    return framework


def _no_device(device: Any) -> SpecError:
    return SpecError(
        f"device must be None for NumPy arrays, which are in this machine's memory; got {device!r}",
        parameter="device",
        remedy="framework='torch'",
    )


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None:
            at_least(1, **{name: size})


def _check_seconds(timeout_seconds: float, lease_seconds: float) -> None:
    if not isinstance(timeout_seconds, int | float) or not timeout_seconds >= 0:
        raise wrong("timeout_seconds", timeout_seconds, "seconds, at least 0", "60")
    if not is_seconds(lease_seconds):
        raise wrong("lease_seconds", lease_seconds, "seconds above 0", "30")


def _check_ranks(rank: int | None, world_size: int | None) -> None:
    if rank is None and world_size is None:
        return
    if rank is None or world_size is None:
        raise SpecError(
            "rank and world_size belong together",
            parameter="rank" if rank is None else "world_size",
            remedy="rank=0, world_size=4; or neither, and each file goes to one of the consumers",
        )
    if at_least(0, rank=rank) >= at_least(1, world_size=world_size):
        raise wrong("rank", rank, f"a whole number from 0 to {world_size - 1}", "0")


def _check_shapes(fields: tuple[BatchField, ...], block_size: int | None, target_size: int | None) -> None:
    """Check that the queue has the shapes that a trainer expects."""
    shapes = {field.name: field.shape for field in fields}
    for name, parameter, size in (("x", "block_size", block_size), ("y", "target_size", target_size)):
        if size is not None and name in shapes and shapes[name][:1] != (size,):
            raise SpecError(
                f"{parameter}={size}, and the queue's {name} has shape {list(shapes[name])}",
                parameter=parameter,
                remedy=f"leave {parameter} out; or prepare the queue with the config of this trainer",
            )
