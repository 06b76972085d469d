"""Train a model on a folder of text, in plain NumPy, and go on after any interruption. Run it, stop it, run it again.

    python train_numpy.py                          Python's own sources, 300 steps
    python train_numpy.py 'my_texts/*.txt' 1000    your files, 1,000 steps

The model is one table: for each byte, how likely each byte is to follow. Put yours in its place.
"""

import json
import os
import sys
import sysconfig

import numpy as np

import batchwright as bw

FILES = sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("stdlib") + "/*.py"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 300
CHECKPOINT = "checkpoint.npz"

# Files become a store: once. Run again over unchanged files, this takes a few milliseconds.
recipe = bw.DatasetRecipe(seed=0)
recipe.add_ingredient(FILES, format="text", name="text")
recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
store = bw.bake(recipe, to="train.store", on_error="skip")

loader = bw.PretrainDataLoader(store, chunk_size=128, batch_size=16, seed=7, epochs=None)
table = np.zeros((257, 257))  # 256 bytes, and the end of a document

if os.path.exists(CHECKPOINT):
    saved = np.load(CHECKPOINT)
    table = saved["table"]
    loader.load_state_dict(json.loads(str(saved["loader"])))
    print(f"going on at step {loader.step}")

while loader.step < STEPS:
    batch = loader.get_batch()
    seen, following = batch.input_ids.ravel(), batch.targets.ravel()
    logits = table[seen]
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    rows = np.arange(len(seen))
    loss = -np.log(probabilities[rows, following]).mean()

    gradient = probabilities
    gradient[rows, following] -= 1
    np.add.at(table, seen, -50 / len(seen) * gradient)

    step = loader.step
    if step % 20 == 0 or step == STEPS:
        stats = loader.stats()
        print(f"step {step}  loss {loss:.4f}  data wait {stats['data_wait_percent']:.1f} %", flush=True)
        # The data's part of a checkpoint is one small JSON value. Rename last: a kill never leaves half a file.
        np.savez("new.npz", table=table, loader=json.dumps(loader.state_dict()))
        os.replace("new.npz", CHECKPOINT)
