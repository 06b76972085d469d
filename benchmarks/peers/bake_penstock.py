"""penstock: `ps.bake` into a new store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tiktoken  # noqa: F401

import penstock as ps
import penstock.baking.join
import penstock.baking.work

PACKAGE = "penstock"


def bake(documents: Path, tokenizer: Path, folder: Path, workers: int) -> None:
    kind = "bytes" if tokenizer.stem == "bytes" else tokenizer
    recipe = ps.DatasetRecipe(seed=0)
    recipe.add_ingredient(documents, name="documents").prepare_step(ps.tokenize(kind, append_eos=True))
    ps.bake(recipe, to=folder, workers=workers, show_progress=False)


def read_back(folder: Path) -> list[np.ndarray]:
    store = ps.open_store(folder)
    return [store[number].tokens for number in range(store.num_rows)]
