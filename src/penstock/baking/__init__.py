"""Offline: a recipe becomes a store."""

from penstock.baking.recipe import DatasetRecipe, Ingredient
from penstock.baking.run import bake

__all__ = ["DatasetRecipe", "Ingredient", "bake"]
