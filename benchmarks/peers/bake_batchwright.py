"""batchwright: `bw.bake` into a new store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tiktoken  # noqa: F401

import batchwright as bw
import batchwright.baking.join
import batchwright.baking.work

PACKAGE = "batchwright"


def bake(documents: Path, tokenizer: Path, folder: Path, workers: int) -> None:
    kind = "bytes" if tokenizer.stem == "bytes" else tokenizer
    recipe = bw.DatasetRecipe(seed=0)
    recipe.add_ingredient(documents, name="documents").prepare_step(bw.tokenize(kind, append_eos=True))
    bw.bake(recipe, to=folder, workers=workers, show_progress=False)


def read_back(folder: Path) -> list[np.ndarray]:
    store = bw.open_store(folder)
    return [store[number].tokens for number in range(store.num_rows)]
