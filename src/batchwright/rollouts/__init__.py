"""Rollouts from lists, files, tables and buffers, as columns. Rows hold text, token ids, messages or turns."""

from batchwright.rollouts.read import read_rollouts

__all__ = ["read_rollouts"]
