"""What tests of many areas do the same way: bake something small, and read back what is in a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batchwright as bw


def slow(*values: Any) -> Any:
    """Values of `parametrize` that run with `make test-all`: one more of a kind that `make test` has."""
    return pytest.param(*values, marks=pytest.mark.slow)


def quiet_bake(recipe: bw.DatasetRecipe, to: Path | str, **settings: Any) -> bw.Store:
    """`bw.bake` in this process, without progress."""
    return bw.bake(recipe, to, **({"workers": 0, "show_progress": False} | settings))


def bake_source(
    to: Path | str, source: Any, step: Any = None, *, name: str = "text", seed: int = 3, **settings: Any
) -> bw.Store:
    """A store of one source, by one step: bytes, if none is given."""
    recipe = bw.DatasetRecipe(seed=seed).add_ingredient(source, name=name)
    return quiet_bake(recipe.prepare_step(step or bw.tokenize("bytes")), to, **settings)


def texts(store: bw.Store, source: str | None = None, split: str = "train") -> list[str]:
    """The documents of one source, in the order of the store."""
    stream = store.stream(source or store.names[0], split)
    return [str(store.decode(stream.document(n).tokens)) for n in range(stream.num_documents)]


def sorted_texts(store: bw.Store) -> list[str]:
    """The documents of all sources."""
    return sorted(str(store.decode(row.tokens)) for row in store.rows())


BATCH_ARRAYS = (
    "input_ids",
    "attention_mask",
    "labels",
    "targets",
    "loss_mask",
    "position_ids",
    "segment_ids",
    "cu_seqlens",
    "max_seqlen",
)


def arrays_of(batch: bw.TrainingBatch) -> dict[str, Any]:
    """Every array of a batch, also those that its mapping leaves out."""
    return {name: value for name in BATCH_ARRAYS if (value := getattr(batch, name)) is not None}


def in_child(call: Callable[[], Any]) -> str:
    """The repr of what a call returns in a forked child, or its error."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answer = repr(call())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with open(read, "rb") as answers:
        return answers.read().decode()
