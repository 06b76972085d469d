"""batchwright: everything between raw data and `model(batch)`. Every batch is a pure function of (plan, position)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Where each public name lives. Names are imported when first used, so that `import batchwright` stays cheap.
_HOME = {
    "BusyError": "errors",
    "ConversationDataLoader": "loaders",
    "DataLoader": "loaders",
    "DataProviderBase": "queue.provider",
    "DatasetBuffer": "buffer",
    "DatasetConsumer": "queue.consumer",
    "DatasetRecipe": "baking",
    "EndOfRun": "errors",
    "MemoryLimitError": "errors",
    "MissingExtraError": "errors",
    "MissingQueueError": "errors",
    "MixedDataLoader": "loaders",
    "NotReadyError": "errors",
    "OutOfSpaceError": "errors",
    "BatchwrightError": "errors",
    "Plan": "plan",
    "PlanError": "errors",
    "PretrainDataLoader": "loaders",
    "QueueError": "errors",
    "RolloutDataLoader": "loaders.rollout",
    "RolloutLog": "rollout_log",
    "RowIndexError": "errors",
    "SampleError": "errors",
    "SampleTypeError": "errors",
    "SourceError": "errors",
    "SpecError": "errors",
    "Store": "store",
    "StoreError": "errors",
    "StreamingMixedShardDataset": "loaders.mixed_shards",
    "SyncError": "errors",
    "TokenizerError": "errors",
    "TraceRecord": "types",
    "TrainingBatch": "types",
    "WorkerError": "errors",
    "add_ingredient": "baking",
    "adopt": "adopting",
    "bake": "baking",
    "chat": "prepare.chat.step",
    "create_datasets": "loaders.mixed_shards",
    "dihedral8": "pool.augment",
    "discover_and_split_multiple_data": "shards.find",
    "explain": "baking",
    "export": "exporting",
    "find": "tracing",
    "hex4": "pool.augment",
    "load_config": "queue.config",
    "look": "looking",
    "open_store": "store",
    "prepare_step": "baking",
    "ramp": "loaders",
    "register_augmentation": "pool.augment",
    "register_format": "sources",
    "register_normalizer": "buffer",
    "register_sharding": "order",
    "tokenize": "prepare",
    "trace": "tracing",
    "train_tokenizer": "baking",
}

__all__ = sorted(["__version__", *_HOME])


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'batchwright' has no attribute {name!r}")
    value = getattr(import_module(f"batchwright.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
