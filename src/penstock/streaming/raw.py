"""Raw files and a tokenizer as a recipe; and that recipe baked once, into a cache, for loaders that do not stream."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from penstock.baking import DatasetRecipe, bake
from penstock.errors import BusyError, SpecError
from penstock.files import home
from penstock.fingerprint import fingerprint
from penstock.prepare.tokenize import tokenize
from penstock.store.reader import Store

__all__ = ["bake_to_cache", "recipe_of"]

log = logging.getLogger("penstock")


def recipe_of(
    path: Any,
    tokenizer: Any,
    *,
    text: str,
    format: str | None,
    options: Mapping[str, Any] | None,
    append_eos: bool,
    eos: int | str | None,
) -> DatasetRecipe:
    """The recipe that raw files and a tokenizer mean, for streaming and for a cached store alike."""
    if isinstance(path, DatasetRecipe):
        if tokenizer is not None:
            raise SpecError("a recipe has its own tokenizer", parameter="tokenizer", remedy="leave tokenizer= out")
        return path
    if tokenizer is None:
        raise SpecError(
            "raw files need a tokenizer", parameter="tokenizer", remedy="tokenizer='tokenizer.json', or 'bytes'"
        )
    recipe = DatasetRecipe().add_ingredient(path, text, format=format, options=options)
    return recipe.prepare_step(tokenize(tokenizer, append_eos=append_eos, eos=eos))


def bake_to_cache(recipe: DatasetRecipe, on_error: str) -> Store:
    """The store of some raw files, baked once, and again when they change; found by where they lie and the recipe.

    Lies under $PENSTOCK_HOME. Ranks that open it at the same time wait for the one that bakes.
    """
    where = [[os.path.abspath(file.path) for file in ingredient.files()] for ingredient in recipe.ingredients]
    base = [os.path.commonpath(paths) if paths else None for paths in where]
    to = home() / "stores" / fingerprint([base, recipe.spec(), on_error])[:16]
    to.parent.mkdir(parents=True, exist_ok=True)
    said = False
    while True:
        try:
            return bake(recipe, to, on_error=on_error)
        except BusyError:
            if not said:
                log.info("waiting for another process that bakes %s", to)
                said = True
            time.sleep(0.2)
