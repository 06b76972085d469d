"""Offline: a recipe becomes a store, or rows of a buffer."""

from batchwright.baking.explain import Explanation, explain
from batchwright.baking.recipe import DatasetRecipe, Ingredient, add_ingredient, prepare_step
from batchwright.baking.run import bake
from batchwright.baking.train import train_tokenizer

__all__ = [
    "DatasetRecipe",
    "Explanation",
    "Ingredient",
    "add_ingredient",
    "bake",
    "explain",
    "prepare_step",
    "train_tokenizer",
]
