"""torch at the edge: blocks as tensors, and a loader as a dataset for torch's DataLoader and torchdata's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingExtraError

try:
    import torch
    from torch.utils.data import DataLoader as TorchDataLoader
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError:
    raise MissingExtraError(
        "penstock.adapters.torch needs torch, which is not installed", remedy="pip install 'penstock[torch]'"
    ) from None

if TYPE_CHECKING:
    from penstock.assemble.batch import Block
    from penstock.loaders.base import DataLoader
    from penstock.types import TrainingBatch

__all__ = ["FollowingDataLoader", "TorchBatches", "TorchBlocks"]


class TorchBlocks:
    """Blocks as tensors that share their memory."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int], tuple[Any, Any]] = {}

    def __call__(self, block: Block) -> Block:
        block.tokens = torch.from_numpy(block.tokens)
        block.extra = {name: torch.from_numpy(array) for name, array in block.extra.items()}
        return block

    def masks(self, rows: int, tokens: int) -> tuple[Any, Any]:
        """Masks of ones, shared by all batches. One that somebody wrote into is replaced, never handed out again."""
        masks = self._masks.get((rows, tokens))
        if masks is None or masks[0]._version or masks[1]._version:
            masks = torch.ones(rows, tokens, dtype=torch.int64), torch.ones(rows, tokens)
            self._masks[rows, tokens] = masks
        return masks

    def same_alignment(self, inputs: Any, loss: Any) -> tuple[Any, Any]:
        """(labels, loss_mask) where labels are the inputs and the model shifts them: each mask moves with its token."""
        shifted = torch.ones(inputs.shape, dtype=torch.float32)
        if loss is not None:
            shifted[:, 1:] = loss[:, :-1]
        shifted[:, 0] = 0  # the first token is never predicted
        return torch.where(shifted > 0, inputs, -100) if loss is not None else inputs, shifted


class TorchBatches(IterableDataset):  # type: ignore[misc]
    """A loader's batches as a dataset: `torch.utils.data.DataLoader(ds, batch_size=None, num_workers=k)`.

    Worker w of k computes whole steps w, w + k, ..., and torch asks the workers in turn, so the stream is the loader's
    own whatever k is. One pass goes from the loader's cursor to the end of its epoch. Without workers the cursor moves
    as batches are handed over. With a plain DataLoader and workers it cannot: the checkpoint is the last batch's
    `metadata["state"]`, and `loader.load_state_dict(...)` with it begins the next epoch. `ds.loader(num_workers=k)`
    is a DataLoader that does this by itself.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.source = loader
        if loader.framework != "torch":
            from copy import copy

            self.source = copy(loader)
            self.source.framework = "torch"
            self.source.__setstate__(self.source.__getstate__())
        self._taken = 0
        self._resume_at: int | None = None

    def __iter__(self) -> Iterator[TrainingBatch]:
        info = get_worker_info()
        if info is None:
            yield from self.source.get_iterator()
            return
        first, self._resume_at = self._resume_at, None
        yield from self._every(info.id, info.num_workers, first or 0)

    def _every(self, worker: int, workers: int, taken: int) -> Iterator[TrainingBatch]:
        """Steps worker, worker + workers, ... of the epoch, counted from the cursor."""
        from copy import copy

        start = copy(self.source)
        start.__setstate__(start.__getstate__())
        cut = start._cut(start.batch_size)
        position = cut.settle(start.position)
        epoch_rows = start.plan.epoch_rows
        end = None if epoch_rows is None else (position // epoch_rows + 1) * epoch_rows
        step = worker + taken * workers
        self._taken = taken
        while True:
            here = cut.settle(cut.after(position, step))
            if (end is not None and here >= end) or start._is_over(here, cut):
                return
            start.seek(position=here)
            start._steps = self.source._steps
            batch = start.get_batch()
            self._taken += 1
            yield batch
            step += workers

    def state_dict(self) -> dict[str, Any]:
        """For torchdata's StatefulDataLoader, which keeps one such state per worker."""
        return {"loader": self.source.state_dict(), "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state["loader"])
        self._resume_at = int(state["taken"])

    def loader(self, num_workers: int = 0, **options: Any) -> FollowingDataLoader:
        """A torch DataLoader over this dataset whose `state_dict()` follows what was handed over."""
        return FollowingDataLoader(self, batch_size=None, num_workers=num_workers, **options)


class FollowingDataLoader(TorchDataLoader):  # type: ignore[misc]
    """A torch DataLoader that moves the loader's cursor as batches come out of it, with any number of workers."""

    dataset: TorchBatches

    def __iter__(self) -> Iterator[TrainingBatch]:
        source = self.dataset.source
        for batch in super().__iter__():
            if self.num_workers:
                state = batch.metadata["state"]
                source._go_to(state["position"], state["steps"])
                source._handed_any = True
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.source.load_state_dict(state)


@lru_cache(maxsize=1)
def version() -> str:
    return str(torch.__version__)
