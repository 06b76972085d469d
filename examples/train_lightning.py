"""Train with Lightning, and go on from its checkpoint in the middle of an epoch, in a new process.

    python train_lightning.py                     Python's own json package, 40 steps
    python train_lightning.py 'my_texts/*.txt'    your files

The losses after the checkpoint must be those of the run that was not interrupted, bit for bit.
"""

import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F

import batchwright as bw

FILES = sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("stdlib") + "/json/*.py"
STEPS = 40
SAVED_AT = 15


class Model(lightning.LightningModule):
    """Each byte, one hidden layer, the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Embedding(257, 32), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 257))
        self.losses: dict[int, float] = {}

    def training_step(self, batch: bw.TrainingBatch, batch_number: int) -> torch.Tensor:
        loss = F.cross_entropy(self.network(batch.input_ids).flatten(0, 1), batch.targets.flatten())
        self.losses[self.global_step + 1] = loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def train(checkpoint: str | None = None) -> dict[int, float]:
    """The loss of each step, from the beginning or after a checkpoint."""
    recipe = bw.DatasetRecipe(seed=0)
    recipe.add_ingredient(FILES, format="text", name="text")
    recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
    store = bw.bake(recipe, to="train.store", on_error="skip", show_progress=False)
    loader = bw.PretrainDataLoader(store, chunk_size=128, batch_size=16, seed=7, epochs=None)

    lightning.seed_everything(0, verbose=False)
    model = Model()
    trainer = lightning.Trainer(
        max_steps=STEPS,
        callbacks=[ModelCheckpoint("run", filename="{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Lightning saves the state of a data loader that has state_dict(), and gives it back before the first batch.
    trainer.fit(model, loader.torch().loader(), ckpt_path=checkpoint)
    return model.losses


if __name__ == "__main__":
    whole = train()  # leaves run/step=15.ckpt
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as new_process:
        rest = new_process.submit(train, f"run/step={SAVED_AT}.ckpt").result()
    expected = {step: loss for step, loss in whole.items() if step > SAVED_AT}
    if rest != expected:
        sys.exit(f"the losses differ after the checkpoint: {expected} and {rest}")
    print(f"steps {SAVED_AT + 1} to {STEPS}: exact; the loss went from {whole[1]:.4f} to {rest[STEPS]:.4f}")
