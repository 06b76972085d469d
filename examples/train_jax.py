"""Train with JAX, and go on from a checkpoint in the middle of an epoch, in a new process.

    python train_jax.py                     Python's own json package, 40 steps
    python train_jax.py 'my_texts/*.txt'    your files

The losses after the checkpoint must be those of the run that was not interrupted, bit for bit.
"""

import json
import os
import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import jax
import jax.numpy as jnp
import numpy as np

import batchwright as bw

FILES = sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("stdlib") + "/json/*.py"
STEPS = 40
SAVED_AT = 15


def new_model() -> dict[str, jax.Array]:
    """Each byte, one hidden layer, the next byte: weights, and the momentum of each."""
    shapes = {"embedding": (257, 32), "hidden": (32, 128), "output": (128, 257)}
    random = np.random.default_rng(0)
    weights = {name: random.normal(0, shape[0] ** -0.5, shape) for name, shape in shapes.items()}
    return in_jax(weights | {f"{name} momentum": np.zeros(shape) for name, shape in shapes.items()})


def in_jax(arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}


def loss_of(weights: dict[str, jax.Array], input_ids: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(weights["embedding"][input_ids] @ weights["hidden"])
    log_probabilities = jax.nn.log_softmax(hidden @ weights["output"])
    targets = jnp.maximum(targets, 0)  # -100 where the mask is 0
    of_targets = jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
    return -(of_targets * mask).sum() / mask.sum()


@jax.jit
def step(model: dict[str, jax.Array], *batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    weights = {name: array for name, array in model.items() if "momentum" not in name}
    loss, gradients = jax.value_and_grad(loss_of)(weights, *batch)
    momentum = {name: 0.9 * model[f"{name} momentum"] + gradients[name] for name in weights}
    moved = {name: weights[name] - 0.3 * momentum[name] for name in weights}
    return moved | {f"{name} momentum": array for name, array in momentum.items()}, loss


def train(checkpoint: str | None = None) -> dict[int, float]:
    """The loss of each step, from the beginning or after a checkpoint."""
    recipe = bw.DatasetRecipe(seed=0)
    recipe.add_ingredient(FILES, format="text", name="text")
    recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
    store = bw.bake(recipe, to="train.store", on_error="skip", show_progress=False)
    loader = bw.PretrainDataLoader(store, chunk_size=128, batch_size=16, seed=7, epochs=None, framework="jax")

    model = new_model()
    if checkpoint:
        saved = dict(np.load(checkpoint))
        loader.load_state_dict(json.loads(str(saved.pop("loader"))))
        model = in_jax(saved)

    losses = {}
    while loader.step < STEPS:
        batch = loader.get_batch()
        model, loss = step(model, batch.input_ids, batch.targets, batch.loss_mask)
        losses[loader.step] = loss.item()
        if loader.step == SAVED_AT:
            # The data's part of a checkpoint is one small JSON value. Rename last: a kill never leaves half a file.
            np.savez("new.npz", **model, loader=json.dumps(loader.state_dict()))
            os.replace("new.npz", "checkpoint.npz")
    return losses


if __name__ == "__main__":
    whole = train()  # leaves checkpoint.npz
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as new_process:
        rest = new_process.submit(train, "checkpoint.npz").result()
    expected = {step: loss for step, loss in whole.items() if step > SAVED_AT}
    if rest != expected:
        sys.exit(f"the losses differ after the checkpoint: {expected} and {rest}")
    print(f"steps {SAVED_AT + 1} to {STEPS}: exact; the loss went from {whole[1]:.4f} to {rest[STEPS]:.4f}")
