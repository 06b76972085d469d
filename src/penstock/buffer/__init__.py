"""A dataset that changes while you train: rows in blocks, versions, retention, replay, a journal."""

from penstock.buffer.batch import RowBatch
from penstock.buffer.buffer import DatasetBuffer
from penstock.buffer.normalize import register_normalizer
from penstock.buffer.reads import BufferVersion
from penstock.buffer.versions import BufferDiff, VersionInfo

__all__ = ["BufferDiff", "BufferVersion", "DatasetBuffer", "RowBatch", "VersionInfo", "register_normalizer"]
