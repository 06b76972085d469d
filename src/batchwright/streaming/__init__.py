"""Loaders over raw files: batches while they are read, or a store that is baked once."""

from batchwright.streaming.loader import StreamingPretrainDataLoader
from batchwright.streaming.raw import bake_conversations_to_cache, bake_to_cache, recipe_of

__all__ = ["StreamingPretrainDataLoader", "bake_conversations_to_cache", "bake_to_cache", "recipe_of"]
