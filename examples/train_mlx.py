"""Train with MLX, and go on from a checkpoint in the middle of an epoch, in a new process.

    python train_mlx.py                     Python's own json package, 40 steps
    python train_mlx.py 'my_texts/*.txt'    your files

The losses after the checkpoint must be those of the run that was not interrupted, bit for bit.
"""

import json
import os
import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import mlx.core as mx
from mlx import nn, optimizers
from mlx.utils import tree_flatten, tree_unflatten

import batchwright as bw

FILES = sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("stdlib") + "/json/*.py"
STEPS = 40
SAVED_AT = 15


def loss_of(model: nn.Module, batch: bw.TrainingBatch) -> mx.array:
    # targets[t] is what position t must predict, and -100 where loss_mask is 0.
    losses = nn.losses.cross_entropy(model(batch.input_ids), mx.maximum(batch.targets, 0))
    return (losses * batch.loss_mask).sum() / batch.loss_mask.sum()


def train(checkpoint: str | None = None) -> dict[int, float]:
    """The loss of each step, from the beginning or after a checkpoint."""
    recipe = bw.DatasetRecipe(seed=0)
    recipe.add_ingredient(FILES, format="text", name="text")
    recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
    store = bw.bake(recipe, to="train.store", on_error="skip", show_progress=False)
    loader = bw.PretrainDataLoader(store, chunk_size=64, batch_size=8, seed=7, epochs=None, framework="mlx")

    mx.random.seed(0)
    model = nn.Sequential(nn.Embedding(257, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 257))
    optimizer = optimizers.AdamW(learning_rate=5e-3)
    if checkpoint:
        saved, about = mx.load(checkpoint, return_metadata=True)
        loader.load_state_dict(json.loads(about["loader"]))
        saved = tree_unflatten(list(saved.items()))
        model.update(saved["model"])
        optimizer.state = saved["optimizer"]

    losses = {}
    loss_and_gradients = nn.value_and_grad(model, loss_of)
    while loader.step < STEPS:
        loss, gradients = loss_and_gradients(model, loader.get_batch())
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)  # nothing was computed until here
        losses[loader.step] = loss.item()
        if loader.step == SAVED_AT:
            # The data's part of a checkpoint is one small JSON value. Rename last: a kill never leaves half a file.
            arrays = dict(tree_flatten({"model": model.parameters(), "optimizer": optimizer.state}))
            mx.save_safetensors("new.safetensors", arrays, {"loader": json.dumps(loader.state_dict())})
            os.replace("new.safetensors", "checkpoint.safetensors")
    return losses


if __name__ == "__main__":
    whole = train()  # leaves checkpoint.safetensors
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as new_process:
        rest = new_process.submit(train, "checkpoint.safetensors").result()
    expected = {step: loss for step, loss in whole.items() if step > SAVED_AT}
    if rest != expected:
        sys.exit(f"the losses differ after the checkpoint: {expected} and {rest}")
    print(f"steps {SAVED_AT + 1} to {STEPS}: exact; the loss went from {whole[1]:.4f} to {rest[STEPS]:.4f}")
