"""Hugging Face's Trainer: batches come from a loader, and checkpoints hold the loader's state.

    trainer = Trainer(model=model, args=TrainingArguments("run", max_steps=10_000, save_steps=500))
    feed(trainer, loader)
    trainer.train(resume_from_checkpoint=True)

Without this, the Trainer shards an IterableDataset once more, and resumes by reading and dropping all earlier batches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from batchwright.base.errors import MissingExtraError, PlanError, SpecError
from batchwright.batches.samples import SampleRows
from batchwright.loaders.stored import StoreStream

try:
    import torch
    import transformers
    from transformers import TrainerCallback
except ImportError:
    raise MissingExtraError(
        "batchwright.adapters.hf needs transformers and torch, which are not installed",
        remedy="pip install 'batchwright[trainers]'",
    ) from None

try:
    from transformers import masking_utils
except ImportError:
    masking_utils = None

if TYPE_CHECKING:
    from batchwright.loaders.loader import Loader

__all__ = ["LoaderState", "WholeRun", "feed"]

log: logging.Logger = logging.getLogger("batchwright")

_KEY = "batchwright.loader"


def feed(trainer: Any, loader: Loader[Any], **options: Any) -> None:
    """Let a Trainer train on a loader's batches, and keep the loader's state in its checkpoints.

    Works for any subclass of Trainer. The rank, the global batch size and the epochs are the loader's. Workers and
    pinned memory are set in TrainingArguments, or by torch's DataLoader options given here.

    The run is one pass that is counted in steps, so max_steps must be set. A resumed run reads nothing twice, seeks in
    O(1), and accumulates gradients across the end of an epoch like the uninterrupted run.

    The model gets `dict(batch)`, which keeps packed samples apart.
    """
    arguments = trainer.args
    if arguments.max_steps <= 0:
        remedy = f"TrainingArguments(max_steps=...); {_steps_of_run(loader, arguments.gradient_accumulation_steps)}"
        raise SpecError("the Trainer must count steps: max_steps is not set", parameter="max_steps", remedy=remedy)
    if arguments.world_size % loader.world_size:
        raise SpecError(
            f"the loader shares its batches among {loader.world_size} ranks, and the Trainer runs on "
            f"{arguments.world_size}",
            parameter="world_size",
            remedy="launch with torchrun (on CPUs with use_cpu=True, ddp_backend='gloo' in TrainingArguments), "
            "or open the loader with the Trainer's rank= and world_size=",
        )
    if "collate_fn" not in options:
        _check_samples(loader)
    options = {
        "num_workers": arguments.dataloader_num_workers,
        "pin_memory": arguments.dataloader_pin_memory and torch.cuda.is_available(),
        "persistent_workers": arguments.dataloader_persistent_workers,
        "prefetch_factor": arguments.dataloader_prefetch_factor,
        "collate_fn": dict,
    } | options
    batches = WholeRun(loader.torch().loader(**options))
    arguments.ignore_data_skip = True  # the state has the position
    trainer.get_train_dataloader = lambda: batches  # not prepared by accelerate: that would shard our share again
    trainer.add_callback(LoaderState(loader))


def _check_samples(loader: Loader[Any]) -> None:
    """Refuse rows of samples whose masks a Trainer would ignore."""
    if not isinstance(loader.stream, StoreStream):
        return
    flow = loader.stream.flow
    rows = [rows for rows in flow.rows if isinstance(rows, SampleRows)]
    if flow.sequences > 1:
        what = "these are preference pairs: the Trainer would learn the rejected answers too"
        remedy = "a trainer for pairs, with feed(..., collate_fn=...) that gives it what it takes"
        raise SpecError(what, parameter="loader", remedy=remedy)
    if any(r.spec.packing for r in rows):
        if not flow.fields.position_ids:
            what = "several samples are in a row, and only position_ids would tell transformers where each begins"
            raise SpecError(what, parameter="position_ids", remedy="leave out Fields(position_ids=False), or packing=")
        if not hasattr(masking_utils, "find_packed_sequence_indices"):
            what = f"transformers {transformers.__version__} lets samples of a row attend to each other"
            raise SpecError(what, parameter="packing", remedy="pip install -U transformers, or no packing=")
    if any(r.trained is not None and ((r.trained.weight > 0) & (r.trained.weight != 1)).any() for r in rows):
        log.warning("models of transformers know no weights: messages with a weight above 0 are learned with weight 1")


class WholeRun:
    """Every batch from the cursor to the end of the run, over all epochs, as one pass without a length.

    A Trainer that knows the length of an epoch ends the last accumulation early at the end of the epoch. After a resume
    inside the epoch it does not know the end any more.
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.dataset: Any = batches.dataset

    def __iter__(self) -> Iterator[Any]:
        while not self.dataset.source.is_over:
            yield from self.batches


class LoaderState(TrainerCallback):  # type: ignore[misc]
    """A callback that keeps the loader's state in the Trainer's state, so every trainer_state.json has it."""

    def __init__(self, loader: Loader[Any]) -> None:
        self.loader = loader

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        saved = state.stateful_callbacks.get(_KEY)
        if saved is not None:
            self.loader.load_state_dict(saved)
        elif state.global_step:
            batches = state.global_step * args.gradient_accumulation_steps
            raise PlanError(
                "this checkpoint holds no loader's state: it was saved by a Trainer without batchwright's feed()",
                step=state.global_step,
                remedy="train() without resume_from_checkpoint, after "
                f"loader.seek(step={batches}) if that run read the same stream",
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Note the state after the batches of this step were read, and before a checkpoint of this step is written."""
        state.stateful_callbacks[_KEY] = self.loader.state_dict()
        epoch_rows = self.loader.plan.epoch_rows
        if epoch_rows:
            state.epoch = self.loader.position / epoch_rows  # the Trainer would count from the resume


def _steps_of_run(loader: Loader[Any], batches_per_step: int) -> str:
    try:
        batches = loader.get_num_batches()
    except SpecError:
        return "this mixture has no end"
    return f"{batches // batches_per_step:,} are one epoch of this loader"
