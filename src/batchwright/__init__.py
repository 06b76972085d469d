"""batchwright: everything between raw data and `model(batch)`. Every batch is a pure function of (plan, position)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchwright import errors
from batchwright.errors import *  # noqa: F403  # small, and needed by all

if TYPE_CHECKING:  # what editors and type checkers see: the names of _NAMES again
    from batchwright.adopting import adopt as adopt
    from batchwright.baking import DatasetRecipe as DatasetRecipe
    from batchwright.baking import add_ingredient as add_ingredient
    from batchwright.baking import bake as bake
    from batchwright.baking import explain as explain
    from batchwright.baking import prepare_step as prepare_step
    from batchwright.baking import train_tokenizer as train_tokenizer
    from batchwright.buffer import DatasetBuffer as DatasetBuffer
    from batchwright.buffer import register_normalizer as register_normalizer
    from batchwright.digesting import digest as digest
    from batchwright.drilling import drill as drill
    from batchwright.exporting import export as export
    from batchwright.loaders import ConversationDataLoader as ConversationDataLoader
    from batchwright.loaders import DataLoader as DataLoader
    from batchwright.loaders import MixedDataLoader as MixedDataLoader
    from batchwright.loaders import PretrainDataLoader as PretrainDataLoader
    from batchwright.loaders import ramp as ramp
    from batchwright.loaders.mixed_shards import StreamingMixedShardDataset as StreamingMixedShardDataset
    from batchwright.loaders.mixed_shards import create_datasets as create_datasets
    from batchwright.loaders.rollout import RolloutDataLoader as RolloutDataLoader
    from batchwright.looking import look as look
    from batchwright.order.balance import register_balancing as register_balancing
    from batchwright.order.sharding import register_sharding as register_sharding
    from batchwright.plan import Plan as Plan
    from batchwright.pool.augment import dihedral8 as dihedral8
    from batchwright.pool.augment import hex4 as hex4
    from batchwright.pool.augment import register_augmentation as register_augmentation
    from batchwright.prepare import tokenize as tokenize
    from batchwright.prepare.chat.step import chat as chat
    from batchwright.queue.config import load_config as load_config
    from batchwright.queue.consumer import DatasetConsumer as DatasetConsumer
    from batchwright.queue.provider import DataProviderBase as DataProviderBase
    from batchwright.rl.estimate import Advantages as Advantages
    from batchwright.rollout_log import RolloutLog as RolloutLog
    from batchwright.settings import Batching as Batching
    from batchwright.settings import Delivery as Delivery
    from batchwright.settings import Fields as Fields
    from batchwright.settings import Mixture as Mixture
    from batchwright.settings import Shuffle as Shuffle
    from batchwright.shards.find import discover_and_split_multiple_data as discover_and_split_multiple_data
    from batchwright.sources import register_format as register_format
    from batchwright.store import Store as Store
    from batchwright.store import open_store as open_store
    from batchwright.tracing import find as find
    from batchwright.tracing import trace as trace
    from batchwright.types import TraceRecord as TraceRecord
    from batchwright.types import TrainingBatch as TrainingBatch

__version__ = "0.1.0"

# Where each public name lives. Names are imported when first used, so that `import batchwright` stays cheap.
_NAMES = {
    "adopting": ["adopt"],
    "baking": ["DatasetRecipe", "add_ingredient", "bake", "explain", "prepare_step", "train_tokenizer"],
    "buffer": ["DatasetBuffer", "register_normalizer"],
    "digesting": ["digest"],
    "drilling": ["drill"],
    "exporting": ["export"],
    "loaders": ["ConversationDataLoader", "DataLoader", "MixedDataLoader", "PretrainDataLoader", "ramp"],
    "loaders.mixed_shards": ["StreamingMixedShardDataset", "create_datasets"],
    "loaders.rollout": ["RolloutDataLoader"],
    "looking": ["look"],
    "order.balance": ["register_balancing"],
    "order.sharding": ["register_sharding"],
    "plan": ["Plan"],
    "pool.augment": ["dihedral8", "hex4", "register_augmentation"],
    "prepare": ["tokenize"],
    "prepare.chat.step": ["chat"],
    "queue.config": ["load_config"],
    "queue.consumer": ["DatasetConsumer"],
    "queue.provider": ["DataProviderBase"],
    "rl.estimate": ["Advantages"],
    "rollout_log": ["RolloutLog"],
    "settings": ["Batching", "Delivery", "Fields", "Mixture", "Shuffle"],
    "shards.find": ["discover_and_split_multiple_data"],
    "sources": ["register_format"],
    "store": ["Store", "open_store"],
    "tracing": ["find", "trace"],
    "types": ["TraceRecord", "TrainingBatch"],
}
_HOME = {name: home for home, names in _NAMES.items() for name in names}

__all__ = sorted(["__version__", *errors.__all__, *_HOME])

if not TYPE_CHECKING:  # there, it would make every name exist

    def __getattr__(name: str) -> Any:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'batchwright' has no attribute {name!r}")
        value = getattr(import_module(f"batchwright.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
