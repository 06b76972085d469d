"""The adapter of torch: blocks as tensors, and loaders and pools as datasets for DataLoaders of torch and torchdata."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import MissingExtraError, SpecError
from batchwright.batches.ranks import Ranks

try:
    import torch
    from torch.utils.data import DataLoader as TorchDataLoader
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError:
    raise MissingExtraError(
        "batchwright.adapters.torch needs torch, which is not installed", remedy="pip install 'batchwright[torch]'"
    ) from None

if TYPE_CHECKING:
    from batchwright.batches.batch import Block
    from batchwright.batches.types import TrainingBatch
    from batchwright.loaders.loader import Loader
    from batchwright.pool.dataset import StreamingMixedShardDataset

__all__ = [
    "FollowingDataLoader",
    "PoolLoader",
    "TorchBatches",
    "TorchBlocks",
    "copied",
    "generator",
    "handed",
    "is_shared",
    "joined",
    "memory_for",
    "numbers",
    "picked",
    "pinned",
    "shared_ones",
]

K = TypeVar("K")


# Tensors


class TorchBlocks:
    """Blocks as tensors that share the blocks' memory. It corresponds to loaders.blocks.NumpyBlocks."""

    masks_are_writable = True

    def __call__(self, block: Block) -> None:
        """Turn the block's arrays into tensors."""
        if torch.is_inference_mode_enabled():  # the block's next batches may be for training
            with torch.inference_mode(False):
                self(block)
            return
        block.tokens = torch.from_numpy(block.tokens)
        block.extra = {name: torch.from_numpy(array) for name, array in block.extra.items()}

    def small(self, array: Any) -> Any:
        """Convert an array that belongs to one batch only."""
        return torch.from_numpy(array)

    def hand_over(self, batches: Any) -> Any:
        """Return the batches unchanged. They already consist of tensors."""
        return batches

    def masks(self, rows: int, tokens: int) -> tuple[Any, Any]:
        """(attention_mask, loss_mask) of ones, shared by all batches until one is written to."""
        return _ones("attention_mask", rows, tokens, _CPU), _ones("loss_mask", rows, tokens, _CPU)


_CPU = torch.device("cpu")
_MASK_TYPES = {"attention_mask": torch.int64, "loss_mask": torch.float32}
_MOST_MASKS = 64
_masks: dict[tuple[str, int, int, torch.device, bool], Any] = {}
_mask_versions: dict[int, tuple[Any, int]] = {}


def shared_ones(field: str, like: Any) -> Any:
    """A mask of ones with the shape, device and layout of `like`, shared by all batches.

    It is handed out until it is written to. torch counts writes, so a changed mask is never handed out again.
    """
    rows, tokens = like.shape
    return _ones(field, rows, tokens, like.device, like.device.type == "cpu" and like.is_pinned())


def is_shared(mask: Any) -> bool:
    """Whether a mask is one of the shared masks and unchanged."""
    known, version = _mask_versions.get(id(mask), (None, 0))
    return known is not None and known is mask and mask._version == version


def _ones(field: str, rows: int, tokens: int, device: torch.device, pinned: bool = False) -> Any:
    key = (field, rows, tokens, device, pinned)
    mask = _masks.get(key)
    if mask is None or not is_shared(mask):
        if len(_masks) >= _MOST_MASKS:
            _masks.clear()
            _mask_versions.clear()
        # All arguments are explicit, because a program may have set another default device, dtype or mode. `to` waits
        # for the copy, so that any stream may read the mask.
        with torch.inference_mode(False):
            mask = torch.ones(rows, tokens, dtype=_MASK_TYPES[field], device=_CPU)
            mask = mask.pin_memory() if pinned else mask.to(device)
        _masks[key] = mask
        _mask_versions[id(mask)] = (mask, mask._version)
    return mask


def numbers(arrays: Mapping[K, NDArray[Any]], *, share: bool = False) -> dict[K, Any]:
    """Tensors of the same types over the arrays' memory. A read-only array is copied.

    With `share`, read-only memory is shared too, unless it is a file's. torch has no read-only tensors, so these must
    not be written to.
    """
    return {name: torch.from_numpy(_writable(array, share)) for name, array in arrays.items()}


def _writable(array: NDArray[Any], share: bool) -> NDArray[Any]:
    if array.flags.writeable:
        return array
    is_memory = isinstance(array.base, np.ndarray) and array.base.flags.writeable  # a write to a mapped file crashes
    return np.asarray(_SameMemory(array)) if share and is_memory else array.copy()


def joined(left: Any, right: Any) -> Any:
    """[rows, a] and [rows, b] as [rows, a + b]."""
    return torch.cat((left, right), 1)


def picked(tensor: Any, rows: NDArray[np.int64]) -> Any:
    """Some rows of a tensor."""
    return tensor[torch.from_numpy(rows).to(tensor.device)]


class _SameMemory:
    """An array's memory without its read-only mark, for which torch would warn at every call."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the memory alive
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def pinned(tensor: Any) -> Any:
    """A tensor in page-locked memory, copied by this thread alone.

    torch's own copy wakes its thread pool. On a busy host, a thread that wakes late stalls the step: waits of 7 ms
    were seen in one batch of five on a machine with 16 cores, against 0.4 ms at most with one thread.
    """
    if tensor.is_cuda or not torch.cuda.is_available():
        return tensor.pin_memory()  # raises torch's own error
    locked = torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU, pin_memory=True)
    np.copyto(locked.numpy(), tensor.detach().numpy())
    return locked


def copied(tensor: Any, device: Any, non_blocking: bool) -> Any:
    """A tensor on a device. Its source memory is not reused until the copy is done."""
    if not non_blocking or tensor.device.type != "cpu":
        return tensor.to(device, non_blocking=non_blocking)
    target = torch.device(device)
    if target.type == "cpu" or tensor.is_pinned():  # torch itself waits before it uses pinned memory again
        return tensor.to(target, non_blocking=True)
    if target.type != "cuda":  # some devices (MPS) read ordinary memory after the call has returned
        return tensor.to(target)
    on_device = tensor.to(target, non_blocking=True)
    _hold_until_copied(tensor, on_device.device)
    return on_device


_in_flight: deque[tuple[Any, Any]] = deque()
_in_flight_lock = threading.Lock()


def _hold_until_copied(tensor: Any, device: torch.device) -> None:
    """Keep a tensor, or several, referenced until the queued copies are done. No block returns to its pool before that.

    On most machines CUDA has read ordinary memory before a copy call returns, but it does not guarantee this.
    """
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    with _in_flight_lock:
        while _in_flight and _in_flight[0][0].query():
            _in_flight.popleft()
        _in_flight.append((done, tensor))


# Batches of a queue


def handed(arrays: dict[str, NDArray[Any]], device: Any | None) -> dict[str, Any]:
    """A batch's arrays as tensors on a device: on a CPU, over the same memory.

    On CUDA they are copied from page-locked memory, without waiting for the copies. The arrays' memory stays referenced
    until the copies are done, because torch itself only tracks memory that it pinned as whole tensors, and these are
    parts of a file.
    """
    target = _target(device)
    tensors: dict[str, Any] = numbers(arrays)
    if target.type == "cpu":
        return tensors
    if target.type != "cuda":
        return {name: copied(tensor, target, False) for name, tensor in tensors.items()}
    locked = {name: tensor if tensor.is_pinned() else pinned(tensor) for name, tensor in tensors.items()}
    there = {name: tensor.to(target, non_blocking=True) for name, tensor in locked.items()}
    _hold_until_copied(tuple(locked.values()), target)
    return there


def memory_for(device: Any | None) -> Callable[[int], NDArray[np.uint8]] | None:
    """Memory to read files into, for `handed`: page-locked for CUDA; None if any memory will do."""
    return _page_locked if _target(device).type == "cuda" else None


def _page_locked(num_bytes: int) -> NDArray[np.uint8]:
    locked: NDArray[np.uint8] = torch.empty(num_bytes, dtype=torch.uint8, device=_CPU, pin_memory=True).numpy()
    return locked  # when it is not referenced any more, torch keeps it for the next file


@lru_cache(maxsize=64)  # called for every batch
def _target(device: Any | None) -> torch.device:
    if device is None:
        return _CPU
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        what = f"torch knows no device {device!r}: {str(error).splitlines()[0]}"
        raise SpecError(what, parameter="device", remedy='device="cpu", device="cuda" or device="cuda:0"') from None
    if target.type == "cuda" and (target.index or 0) >= (num_devices := torch.cuda.device_count()):
        what = f"device={str(target)!r} is not here: torch sees {num_devices} CUDA devices"
        remedy = 'device="cpu", or a torch that is built for CUDA, on a machine with a GPU'
        raise SpecError(what, parameter="device", remedy=remedy)
    return target


_NUM_STATE_WORDS = 624
_STATE_WORDS_AT = 24


def generator(seed: int) -> Any:
    """torch's random generator for CPUs, from all 64 bits of a key.

    torch's own `manual_seed` uses the lower 32 bits alone. Among 100,000 keys, two equal ones would then be more likely
    than not. So the state is filled from the whole key, as NumPy does it for the same generator.
    """
    made = torch.Generator(device="cpu").manual_seed(seed)
    state = made.get_state()
    words = state.numpy()[_STATE_WORDS_AT:][: 8 * _NUM_STATE_WORDS].view(np.uint64)
    assert words[0] == seed % (1 << 32), "this torch keeps the state of its generator otherwise"
    words[:] = np.random.SeedSequence(seed).generate_state(_NUM_STATE_WORDS, np.uint32)
    words[0] = 0x80000000  # never all zeros, a state that the generator could not leave
    return made.set_state(state)


# Datasets


class TorchBatches(IterableDataset):  # type: ignore[misc]
    """A loader's batches as a dataset: `torch.utils.data.DataLoader(ds, batch_size=None, num_workers=k)`.

    Worker w of k computes whole steps w, w + k, ..., and torch asks the workers in turn. So the stream is the loader's
    for any k. One pass goes from the loader's cursor to the end of its epoch.

    ds.loader(num_workers=k)                 a DataLoader that moves the cursor and has its state: use this one
    DataLoader(ds, batch_size=None)          moves the cursor too
    DataLoader(ds, ..., num_workers=k)       cannot: the checkpoint is the last batch's metadata["state"], and
                                             ds.set_epoch(n) before each pass says which epoch it is for
    StatefulDataLoader(ds, ...)              likewise, with its own state_dict()
    """

    def __init__(self, loader: Loader[Any]) -> None:
        self.source: Loader[Any] = loader
        self._taken = 0
        self._passes = 0

    def __iter__(self) -> Iterator[TrainingBatch]:
        info = get_worker_info()
        if info is None:
            _check_ranks(self.source)
            if self.source.framework == "torch":
                return self.source.get_iterator()
            return self.source.follow(self._as_tensors)
        if not self._passes:
            self.source = self.source.twin("torch", alone=True)
        else:  # a persistent worker in a later pass
            self.source.go_to(_after_pass(self.source), self.source.record)
            self._taken = 0
        self._passes += 1
        return self._turns(info.id, info.num_workers)

    def _as_tensors(self) -> Iterator[Any]:
        """A pass of a loader of another framework, with batches converted to tensors."""
        twin = self.source.twin("torch")
        yield from twin.get_iterator()
        self.source.learn_from(twin)

    def _turns(self, worker: int, workers: int) -> Iterator[TrainingBatch]:
        for batch in self.source.turns(worker, workers, self._taken):
            self._taken += 1
            yield batch

    def __len__(self) -> int:
        """The maximal number of batches of an epoch."""
        source = self.source
        len(source)  # raises TypeError for an endless one, as torch's datasets do
        return source.this_run.cut(source.batch_size, source.record).most_steps_of_epoch(source.position)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass read this epoch. The cursor does not move if it is already inside the epoch."""
        source = self.source
        run, record = source.this_run, source.record
        here, _ = run.begin(source.position, record)
        begin = run.epochs.begin_of(epoch)
        if begin is None or run.epochs.number(here) == epoch:
            return
        step = run.step_of(record, begin)
        step += run.position_of(record, step) < begin  # begun in the epoch before, with `wrap`
        source.seek(step=step)

    def state_dict(self) -> dict[str, Any]:
        """The state for torchdata's StatefulDataLoader, which keeps one for each worker."""
        return {"loader": self.source.state_dict(), "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state["loader"])
        self._taken, self._passes = int(state["taken"]), 0

    def loader(self, num_workers: int = 0, **options: Any) -> FollowingDataLoader:
        """A torch DataLoader over this dataset whose `state_dict()` follows the handed over batches.

        `options` are torch's: pin_memory, prefetch_factor, persistent_workers, multiprocessing_context, ...
        """
        _check_in_order(options)
        # torch draws a seed for workers whenever a pass begins. If it came from the program's random numbers, a run
        # that resumes inside an epoch would draw once more than an uninterrupted run, and its dropout would differ.
        own = torch.Generator(torch.get_default_device()).manual_seed(torch.initial_seed())
        options.setdefault("generator", own)
        options.setdefault("collate_fn", _as_it_is)  # torch's default would copy each batch, item by item
        return FollowingDataLoader(self, batch_size=None, num_workers=num_workers, **options)


def _check_in_order(options: Mapping[str, Any]) -> None:
    if not options.get("in_order", True):
        what = "in_order=False would hand over steps in another order, which no state can describe"
        raise SpecError(what, parameter="in_order", remedy="leave in_order= out")


def _as_it_is(batch: Any) -> Any:
    return batch


class FollowingDataLoader(TorchDataLoader):  # type: ignore[misc]
    """A torch DataLoader that moves the loader's cursor with each batch, for any number of workers."""

    dataset: TorchBatches
    _iterator: Any
    _kept_workers_at: dict[str, Any]

    def __iter__(self) -> Iterator[Any]:
        source = self.dataset.source
        if not self.num_workers:
            return super().__iter__()  # type: ignore[no-any-return]  # the loader's own iterator, and its cursor
        _check_ranks(source)
        if source.begin_pass()[1]:
            return source.get_iterator()  # empty, or an error
        # Persistent workers continue with the next epoch by themselves. If the cursor has jumped, new ones are started.
        return source.follow(self._begin)

    def _begin(self) -> Iterator[Any]:
        """A pass of the workers from the cursor on."""
        source = self.dataset.source
        if self._iterator is not None and self._kept_workers_at != _place_of(source):
            self._iterator = None
        batches = super().__iter__()
        self._kept_workers_at = {**_place_of(source), "position": _after_pass(source)}
        return batches  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last batch handed over. Batches that workers made ahead do not count."""
        return self.dataset.source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.source.load_state_dict(state)


def _check_ranks(loader: Loader[Any]) -> None:
    """Refuse a loader that was opened before its process knew of other ranks. Each rank would get every row.

    Trainers that start their ranks themselves (Lightning) do so after a program has opened its loader.
    """
    is_alone = loader.this_run.ranks == Ranks(0, 1, "nothing says otherwise")
    distributed = torch.distributed
    if not is_alone or not distributed.is_available() or not distributed.is_initialized():
        return
    ranks = distributed.get_world_size()
    if ranks > 1:
        raise SpecError(
            f"this loader was opened before torch.distributed was initialised, as rank 0 of 1; now there are {ranks} "
            "ranks, and each would get every row",
            parameter="rank",
            remedy="open it where the process group exists (Lightning: in train_dataloader()), start with torchrun, or "
            "pass rank= and world_size= (0 and 1 if all ranks shall read the same)",
        )


def _place_of(loader: Loader[Any]) -> dict[str, Any]:
    """A loader's state, without the entries that follow from the position."""
    return {name: value for name, value in loader.state_dict().items() if name != "batch_in_block"}


def _after_pass(loader: Loader[Any]) -> int:
    """The position of the pass after the one that begins at the cursor."""
    return loader.this_run.after_pass(loader.position, loader.record)


# A mixed stream of the pool


class _Turns(IterableDataset):  # type: ignore[misc]
    """The turns of a worker: (lane, rows, columns). A lane of -1 means that memory ended the turns."""

    def __init__(self, source: StreamingMixedShardDataset, rows: int, is_even: bool) -> None:
        self.source, self.rows, self.is_even = source, rows, is_even

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        passes = self.source.passes
        passes.reports_stops = True
        yield from passes.turns(self.rows, self.is_even)
        if passes.stopped_early and get_worker_info() is not None:
            yield -1, 0, {}


class PoolLoader(TorchDataLoader):  # type: ignore[misc]
    """A torch DataLoader over a mixed stream that moves the dataset's cursor, with any number of workers.

    One pass goes from the cursor to the end of the epoch; the next pass reads the next epoch.
    """

    dataset: _Turns
    _iterator: Any
    _kept_workers_at: Any
    """The cursor of persistent workers; None if unknown."""

    def __init__(self, source: StreamingMixedShardDataset, rows: int, is_even: bool, **options: Any) -> None:
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "collate_fn"):
            if name in options:
                what = f"{name}= is not for a mixed stream: it has its own order and batches"
                remedy = "ds.loader(num_workers=2, batch_size=1024); the dataset's transform= changes batches"
                raise SpecError(what, parameter=name, remedy=remedy)
        _check_in_order(options)
        self._kept_workers_at = None
        # Without workers, torch would pin in the loop with its own thread pool: 13 to 19 ms for 1 MB were seen.
        self._pins = bool(options.get("pin_memory")) and not options.get("num_workers") and torch.cuda.is_available()
        if self._pins:
            options["pin_memory"] = False
        super().__init__(_Turns(source, rows, is_even), batch_size=None, **options)

    def __iter__(self) -> Iterator[Any]:
        if self.num_workers:
            yield from self._follow_workers()
            return
        for _, _, columns in super().__iter__():
            if self._pins:
                columns = {name: pinned(column) for name, column in columns.items()}
            yield columns

    def _follow_workers(self) -> Iterator[Any]:
        turns, passes = self.dataset, self.dataset.source.passes
        passes.begin(turns.rows, turns.is_even, workers=self.num_workers)
        if self._kept_workers_at != passes.run.cursor:
            self._iterator = None  # persistent workers continue with the next epoch, unless the cursor has jumped
        batches, is_at_end = super().__iter__(), False
        self._kept_workers_at = None
        # Without this, workers would keep their pools as long as the error that ended them is referenced.
        end_workers = getattr(batches, "_shutdown_workers", lambda: None)
        try:
            is_at_end = yield from passes.follow(batches)
        finally:
            if is_at_end:
                self._kept_workers_at = passes.run.cursor.copy()
            else:  # inside an epoch, workers are ahead of the cursor by an unknown number of batches
                self._iterator = None
                end_workers()

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        turns = self.dataset
        return turns.source.num_batches(turns.rows, drop_last=turns.is_even, num_workers=self.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """The stream's state after the last batch handed over. Rows that workers drew ahead do not count."""
        return self.dataset.source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.source.load_state_dict(state)
