"""The loaders: one for each kind of data, all with the same cursor, state and batches."""

from batchwright.loaders.conversation import ConversationDataLoader
from batchwright.loaders.interface import DataLoader
from batchwright.loaders.mixed import MixedDataLoader
from batchwright.loaders.pretrain import PretrainDataLoader
from batchwright.loaders.weights import ramp

__all__ = ["ConversationDataLoader", "DataLoader", "MixedDataLoader", "PretrainDataLoader", "ramp"]
