"""Offline: a recipe becomes a store."""

from penstock.baking.recipe import DatasetRecipe, Ingredient
from penstock.baking.run import bake
from penstock.baking.train import train_tokenizer

__all__ = ["DatasetRecipe", "Ingredient", "bake", "train_tokenizer"]
