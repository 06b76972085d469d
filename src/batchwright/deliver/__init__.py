"""Batch -> the loop, on time: work ahead of need, and who gets which rows."""

from batchwright.deliver.ahead import by_processes, by_threads
from batchwright.deliver.ranks import Ranks, find_ranks

__all__ = ["Ranks", "by_processes", "by_threads", "find_ranks"]
