"""A dataset that changes while you train, with rows in blocks, versions, retention, replay, and a journal."""

from batchwright.buffer.batch import RowBatch
from batchwright.buffer.buffer import DatasetBuffer
from batchwright.buffer.contents import BufferDiff, VersionInfo
from batchwright.buffer.normalize import register_normalizer
from batchwright.buffer.reads import BufferVersion

__all__ = ["BufferDiff", "BufferVersion", "DatasetBuffer", "RowBatch", "VersionInfo", "register_normalizer"]
