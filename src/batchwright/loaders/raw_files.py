"""Raw files and a tokenizer as a recipe; and that recipe baked once, into a cache, for loaders that do not stream."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from batchwright.baking import DatasetRecipe, bake
from batchwright.base.checks import local_path
from batchwright.base.errors import BusyError, SpecError, StoreError, TokenizerError
from batchwright.base.files import home
from batchwright.base.fingerprint import fingerprint
from batchwright.prepare.chat.step import Chat, chat
from batchwright.prepare.tokenize import tokenize
from batchwright.store.reader import Store

__all__ = ["bake_to_cache", "recipe_of", "recipe_of_conversations"]

log: logging.Logger = logging.getLogger("batchwright")


def recipe_of(path: Any, tokenizer: Any) -> DatasetRecipe:
    """The recipe that raw files and a tokenizer mean, for streaming and for a cached store alike."""
    if isinstance(path, DatasetRecipe):
        if isinstance(path.tokenize, Chat):
            raise SpecError(
                "this recipe makes conversations", parameter="path", remedy="ConversationDataLoader, over the recipe"
            )
        return _with_its_own(path, tokenizer=tokenizer)
    if tokenizer is None:
        raise SpecError(
            "raw files need a tokenizer", parameter="tokenizer", remedy="tokenizer='tokenizer.json', or 'bytes'"
        )
    try:
        return DatasetRecipe().add_ingredient(path).prepare_step(tokenize(tokenizer, append_eos=True))
    except TokenizerError as error:
        if error.where.get("parameter") != "vocab_size":
            raise
        remedy = "a recipe in place of the path, with prepare_step(bw.tokenize(function, vocab_size=50257))"
        raise TokenizerError(error.headline, **error.where, remedy=remedy) from None


def recipe_of_conversations(
    path: Any, tokenizer: Any, chat_template: str | None, keep_newest: int | None
) -> DatasetRecipe:
    """The recipe that raw conversations and a tokenizer mean."""
    if isinstance(path, DatasetRecipe):
        if not isinstance(path.tokenize, Chat):
            raise SpecError(
                "this recipe makes plain text", parameter="path", remedy="PretrainDataLoader, over the recipe"
            )
        return _with_its_own(path, tokenizer=tokenizer, chat_template=chat_template)
    if tokenizer is None:
        raise SpecError(
            "raw conversations need a tokenizer", parameter="tokenizer", remedy="tokenizer='tokenizer.json', or 'bytes'"
        )
    step = chat(tokenizer, chat_template, keep_newest=keep_newest)
    return DatasetRecipe().add_ingredient(path, name="conversations").prepare_step(step)


def _with_its_own(recipe: DatasetRecipe, **given: Any) -> DatasetRecipe:
    for name, value in given.items():
        if value is not None:
            raise SpecError(f"a recipe has its own {name}", parameter=name, remedy=f"leave {name}= out")
    return recipe


def bake_to_cache(recipe: DatasetRecipe) -> Store:
    """The store of some raw files in their order, baked once, and again when they change; found by where they lie and
    the recipe.

    Lies under $BATCHWRIGHT_HOME. Ranks that open it at the same time wait for the one that bakes.
    """
    # By what the user named, not by the files found: new ones are baked into the store that is there.
    where = [None if ingredient.is_memory else _named(ingredient.source) for ingredient in recipe.ingredients]
    to = home() / "stores" / fingerprint([where, recipe.spec(), recipe.on_error, "in order"])[:16]
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            "there is no place for a cache",
            folder=to.parent,
            reason=os.strerror(error.errno or 0),
            remedy="BATCHWRIGHT_HOME=FOLDER names another one; or streaming=True, which needs none",
        ) from None
    said = False
    while True:
        try:
            store: Store = bake(recipe, to, shuffle=False)
            return store
        except BusyError:
            if not said:
                log.info("waiting for another process that bakes %s", to)
                said = True
            time.sleep(0.2)


def _named(source: Any) -> list[str]:
    """Paths, folders or globs as they were given, wherever the program was started."""
    parts = [source] if isinstance(source, str | os.PathLike) else source
    return [os.path.abspath(local_path(source=part)) for part in parts]
