"""Offline: a recipe becomes a store, or rows of a buffer."""

from penstock.baking.explain import Explanation, explain
from penstock.baking.instructions import Ingredient, add_ingredient, prepare_step
from penstock.baking.recipe import DatasetRecipe
from penstock.baking.run import bake
from penstock.baking.train import train_tokenizer

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
