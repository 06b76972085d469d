"""A mixed stream in torch's DataLoader: batches of tensors, and a cursor that follows the handed over batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from batchwright.base.errors import MissingExtraError, SpecError

try:
    import torch
    from torch.utils.data import DataLoader as TorchDataLoader
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError:
    raise MissingExtraError(
        "ds.loader() needs torch, which is not installed", remedy="pip install 'batchwright[torch]'"
    ) from None

from batchwright.adapters.torch import pinned

if TYPE_CHECKING:
    from batchwright.pool.dataset import StreamingMixedShardDataset

__all__ = ["PoolLoader"]


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
                raise SpecError(
                    f"{name}= is not for a mixed stream: it has its own order and batches",
                    parameter=name,
                    remedy="ds.loader(num_workers=2, batch_size=1024); the dataset's transform= changes batches",
                )
        if not options.get("in_order", True):
            raise SpecError(
                "in_order=False would hand over batches in another order, which no state can describe",
                parameter="in_order",
                remedy="leave in_order= out",
            )
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
