"""The doors: one loader per kind of data, all with the same cursor, state and batches."""

from penstock.loaders.base import DataLoader
from penstock.loaders.conversation import ConversationDataLoader
from penstock.loaders.mixed import MixedDataLoader
from penstock.loaders.planning import ramp
from penstock.loaders.pretrain import PretrainDataLoader

__all__ = ["ConversationDataLoader", "DataLoader", "MixedDataLoader", "PretrainDataLoader", "ramp"]
