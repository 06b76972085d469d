"""Raw files and a tokenizer as a recipe; and that recipe baked once, into a cache, for loaders that do not stream."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from batchwright.baking import DatasetRecipe, bake
from batchwright.errors import BusyError, SpecError, StoreError, TokenizerError
from batchwright.files import home
from batchwright.fingerprint import fingerprint
from batchwright.prepare.chat.step import Chat
from batchwright.prepare.tokenize import tokenize
from batchwright.spec import local_path
from batchwright.store.reader import Store
from batchwright.typing import OnError

__all__ = ["bake_conversations_to_cache", "bake_to_cache", "recipe_of"]

log: logging.Logger = logging.getLogger("batchwright")


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
        given: dict[str, tuple[Any, Any]] = {
            "text": (text, "text"),
            "format": (format, None),
            "options": (options, None),
        }
        given |= {"append_eos": (append_eos, True), "eos": (eos, None)}
        for name, (value, default) in given.items():
            if value != default:
                where = "bw.tokenize(...)" if name in ("append_eos", "eos") else "add_ingredient(...)"
                raise SpecError(
                    f"a recipe says itself what {name} is", parameter=name, remedy=f"{name}= of {where}, in the recipe"
                )
        if isinstance(path.tokenize, Chat):
            raise SpecError(
                "this recipe makes conversations", parameter="path", remedy="ConversationDataLoader, over bake(recipe)"
            )
        return path
    if tokenizer is None:
        raise SpecError(
            "raw files need a tokenizer", parameter="tokenizer", remedy="tokenizer='tokenizer.json', or 'bytes'"
        )
    recipe = DatasetRecipe().add_ingredient(path, text, format=format, options=options)
    try:
        return recipe.prepare_step(tokenize(tokenizer, append_eos=append_eos, eos=eos))
    except TokenizerError as error:
        if error.where.get("parameter") != "vocab_size":
            raise
        remedy = "a recipe in place of the path, with prepare_step(bw.tokenize(function, vocab_size=50257))"
        raise TokenizerError(error.headline, **error.where, remedy=remedy) from None


def bake_conversations_to_cache(path: Any, step: Chat, on_error: OnError, holdout: float | None = None) -> Store:
    """The store of some conversations, as `bake_to_cache` has it."""
    recipe = DatasetRecipe().add_ingredient(path, name="conversations").prepare_step(step)
    return bake_to_cache(recipe if holdout is None else recipe.holdout(holdout), on_error)


def bake_to_cache(recipe: DatasetRecipe, on_error: OnError) -> Store:
    """The store of some raw files, baked once, and again when they change; found by where they lie and the recipe.

    Lies under $BATCHWRIGHT_HOME. Ranks that open it at the same time wait for the one that bakes.
    """
    # By what the user named, not by the files found: new ones are baked into the store that is there.
    where = [None if ingredient.is_memory else _named(ingredient.source) for ingredient in recipe.ingredients]
    to = home() / "stores" / fingerprint([where, recipe.spec(), on_error])[:16]
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
            store: Store = bake(recipe, to, on_error=on_error)
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
