"""Raw files: batches while they are read, or a store that is baked once."""

from batchwright.streaming.raw import bake_to_cache, recipe_of, recipe_of_conversations
from batchwright.streaming.stream import open_raw

__all__ = ["bake_to_cache", "open_raw", "recipe_of", "recipe_of_conversations"]
