"""Train with Accelerate, and go on from its checkpoint in the middle of an epoch, in a new process.

    python train_accelerate.py                     Python's own json package, 40 steps
    python train_accelerate.py 'my_texts/*.txt'    your files

The losses after the checkpoint must be those of the run that was not interrupted, bit for bit, dropout included.
"""

import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F

import batchwright as bw

FILES = sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("stdlib") + "/json/*.py"
STEPS = 40
SAVED_AT = 15


def train(checkpoint: str | None = None) -> dict[int, float]:
    """The loss of each step, from the beginning or after a checkpoint."""
    accelerator = Accelerator()
    recipe = bw.DatasetRecipe(seed=0)
    recipe.add_ingredient(FILES, format="text", name="text")
    recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
    with accelerator.main_process_first():
        store = bw.bake(recipe, to="train.store", on_error="skip", show_progress=False)

    set_seed(0)
    model = nn.Sequential(nn.Embedding(257, 32), nn.Dropout(0.1), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 257))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    # The loader is not prepared: it gives each rank its share already, and Accelerate would cut a share of that.
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = bw.PretrainDataLoader(store, chunk_size=128, batch_size=16, seed=7, epochs=None, framework="torch")
    accelerator.register_for_checkpointing(loader)  # it has state_dict and load_state_dict: nothing else is asked
    if checkpoint:
        accelerator.load_state(checkpoint)

    losses = {}
    while loader.step < STEPS:
        batch = loader.get_batch().to(accelerator.device)
        loss = F.cross_entropy(model(batch.input_ids).flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses[loader.step] = accelerator.reduce(loss.detach(), "mean").item()
        if loader.step == SAVED_AT:
            accelerator.save_state("checkpoint")
    return losses


if __name__ == "__main__":
    whole = train()  # leaves ./checkpoint
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as new_process:
        rest = new_process.submit(train, "checkpoint").result()
    expected = {step: loss for step, loss in whole.items() if step > SAVED_AT}
    if rest != expected:
        sys.exit(f"the losses differ after the checkpoint: {expected} and {rest}")
    print(f"steps {SAVED_AT + 1} to {STEPS}: exact; the loss went from {whole[1]:.4f} to {rest[STEPS]:.4f}")
