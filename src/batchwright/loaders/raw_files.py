"""Raw files as a recipe, and the cache of stores that are baked from such recipes."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from batchwright.baking import DatasetRecipe, Ingredient, bake
from batchwright.base.checks import local_path
from batchwright.base.errors import BusyError, SpecError, StoreError, TokenizerError
from batchwright.base.files import home
from batchwright.base.fingerprint import fingerprint
from batchwright.prepare.chat.step import Chat, chat
from batchwright.prepare.tokenize import tokenize
from batchwright.store.reader import Store

log: logging.Logger = logging.getLogger("batchwright")


def recipe_of(path: Any, tokenizer: Any) -> DatasetRecipe:
    """The recipe of raw files and a tokenizer, for streaming and for a cached store alike."""
    if isinstance(path, DatasetRecipe):
        return _own(path, is_chat=False, tokenizer=tokenizer)
    _need_tokenizer(tokenizer, "raw files need a tokenizer")
    try:
        return DatasetRecipe().add_ingredient(path).prepare_step(tokenize(tokenizer, append_eos=True))
    except TokenizerError as error:
        if error.where.get("parameter") == "vocab_size":
            error.remedy = "a recipe in place of the path, with prepare_step(bw.tokenize(function, vocab_size=50257))"
        raise


def recipe_of_conversations(
    path: Any, tokenizer: Any, chat_template: str | None, keep_newest: int | None
) -> DatasetRecipe:
    """The recipe of raw conversations and a tokenizer."""
    if isinstance(path, DatasetRecipe):
        return _own(path, is_chat=True, tokenizer=tokenizer, chat_template=chat_template)
    _need_tokenizer(tokenizer, "raw conversations need a tokenizer")
    step = chat(tokenizer, chat_template, keep_newest=keep_newest)
    return DatasetRecipe().add_ingredient(path, name="conversations").prepare_step(step)


def _need_tokenizer(tokenizer: Any, why: str) -> None:
    if tokenizer is None:
        raise SpecError(why, parameter="tokenizer", remedy="tokenizer='tokenizer.json', or 'bytes'")


def _own(recipe: DatasetRecipe, *, is_chat: bool, **beside: Any) -> DatasetRecipe:
    """The user's own recipe, which has its tokenizer and template."""
    if isinstance(recipe.tokenize, Chat) != is_chat:
        what, remedy = "this recipe makes conversations", "ConversationDataLoader, over the recipe"
        if is_chat:
            what, remedy = "this recipe makes plain text", "PretrainDataLoader, over the recipe"
        raise SpecError(what, parameter="path", remedy=remedy)
    for name, value in beside.items():
        if value is not None:
            raise SpecError(f"a recipe has its own {name}", parameter=name, remedy=f"leave {name}= out")
    return recipe


def bake_to_cache(recipe: DatasetRecipe) -> Store:
    """The store of some raw files in their order, under $BATCHWRIGHT_HOME. It is baked once, and again on changes.

    The recipe and the paths of the files give its name. Ranks that open it at the same time wait for the rank that
    bakes.
    """
    # By the paths as the user gave them, not by the files found: new files are baked into the same store.
    where = [_paths(ingredient) for ingredient in recipe.ingredients]
    to = home() / "stores" / fingerprint([where, recipe.spec(), recipe.on_error, "in order"])[:16]
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = "there is no place for a cache"
        remedy = "BATCHWRIGHT_HOME=FOLDER names another one; or streaming=True, which needs none"
        raise StoreError(what, folder=to.parent, reason=os.strerror(error.errno or 0), remedy=remedy) from None
    is_first_try = True
    while True:
        try:
            store: Store = bake(recipe, to, shuffle=False)
            return store
        except BusyError:
            if is_first_try:
                log.info("waiting for another process that bakes %s", to)
            is_first_try = False
            time.sleep(0.2)


def _paths(ingredient: Ingredient) -> list[str] | None:
    """The user's paths, folders or globs, made absolute; None for rows in memory."""
    if ingredient.is_memory:
        return None
    paths = ingredient.source
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    return [os.path.abspath(local_path(source=path)) for path in paths]
