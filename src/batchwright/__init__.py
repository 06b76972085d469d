"""batchwright: everything between raw data and `model(batch)`. Every batch is a pure function of (plan, position)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchwright.base import errors
from batchwright.base.errors import *  # noqa: F403  # small, and needed by all

if TYPE_CHECKING:  # what editors and type checkers see: the names of _NAMES again
    from batchwright.audit.digesting import digest as digest
    from batchwright.audit.drilling import drill as drill
    from batchwright.audit.tracing import find as find
    from batchwright.audit.tracing import trace as trace
    from batchwright.baking import DatasetRecipe as DatasetRecipe
    from batchwright.baking import add_ingredient as add_ingredient
    from batchwright.baking import bake as bake
    from batchwright.baking import explain as explain
    from batchwright.baking import prepare_step as prepare_step
    from batchwright.baking import train_tokenizer as train_tokenizer
    from batchwright.batches.looking import look as look
    from batchwright.batches.settings import Batching as Batching
    from batchwright.batches.settings import Delivery as Delivery
    from batchwright.batches.settings import Fields as Fields
    from batchwright.batches.settings import Mixture as Mixture
    from batchwright.batches.settings import Shuffle as Shuffle
    from batchwright.batches.types import TraceRecord as TraceRecord
    from batchwright.batches.types import TrainingBatch as TrainingBatch
    from batchwright.buffer import DatasetBuffer as DatasetBuffer
    from batchwright.buffer import register_normalizer as register_normalizer
    from batchwright.loaders import ConversationDataLoader as ConversationDataLoader
    from batchwright.loaders import DataLoader as DataLoader
    from batchwright.loaders import MixedDataLoader as MixedDataLoader
    from batchwright.loaders import PretrainDataLoader as PretrainDataLoader
    from batchwright.loaders import ramp as ramp
    from batchwright.loaders.rollout import RolloutDataLoader as RolloutDataLoader
    from batchwright.order.balance import register_balancing as register_balancing
    from batchwright.order.plan import Plan as Plan
    from batchwright.order.sharding import register_sharding as register_sharding
    from batchwright.pool.augment import dihedral8 as dihedral8
    from batchwright.pool.augment import hex4 as hex4
    from batchwright.pool.augment import register_augmentation as register_augmentation
    from batchwright.pool.dataset import StreamingMixedShardDataset as StreamingMixedShardDataset
    from batchwright.pool.dataset import create_datasets as create_datasets
    from batchwright.pool.shard_files import discover_and_split_multiple_data as discover_and_split_multiple_data
    from batchwright.prepare import tokenize as tokenize
    from batchwright.prepare.chat.step import chat as chat
    from batchwright.queue.config import load_config as load_config
    from batchwright.queue.consumer import DatasetConsumer as DatasetConsumer
    from batchwright.queue.provider import DataProviderBase as DataProviderBase
    from batchwright.rl.estimate import Advantages as Advantages
    from batchwright.rollouts.log import RolloutLog as RolloutLog
    from batchwright.sources import register_format as register_format
    from batchwright.store import Store as Store
    from batchwright.store import open_store as open_store
    from batchwright.store.adopt import adopt as adopt
    from batchwright.store.export_tokens import export as export

__version__ = "0.1.0"

# Where each public name lives. Names are imported when first used, so that `import batchwright` stays cheap.
_NAMES = {
    "store.adopt": ["adopt"],
    "baking": ["DatasetRecipe", "add_ingredient", "bake", "explain", "prepare_step", "train_tokenizer"],
    "buffer": ["DatasetBuffer", "register_normalizer"],
    "audit.digesting": ["digest"],
    "audit.drilling": ["drill"],
    "store.export_tokens": ["export"],
    "loaders": ["ConversationDataLoader", "DataLoader", "MixedDataLoader", "PretrainDataLoader", "ramp"],
    "pool.dataset": ["StreamingMixedShardDataset", "create_datasets"],
    "loaders.rollout": ["RolloutDataLoader"],
    "batches.looking": ["look"],
    "order.balance": ["register_balancing"],
    "order.sharding": ["register_sharding"],
    "order.plan": ["Plan"],
    "pool.augment": ["dihedral8", "hex4", "register_augmentation"],
    "prepare": ["tokenize"],
    "prepare.chat.step": ["chat"],
    "queue.config": ["load_config"],
    "queue.consumer": ["DatasetConsumer"],
    "queue.provider": ["DataProviderBase"],
    "rl.estimate": ["Advantages"],
    "rollouts.log": ["RolloutLog"],
    "batches.settings": ["Batching", "Delivery", "Fields", "Mixture", "Shuffle"],
    "pool.shard_files": ["discover_and_split_multiple_data"],
    "sources": ["register_format"],
    "store": ["Store", "open_store"],
    "audit.tracing": ["find", "trace"],
    "batches.types": ["TraceRecord", "TrainingBatch"],
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
