"""Whatever holds rollouts -> columns: rows and tables, files, buffers; text, token ids, messages and turns."""

from batchwright.rollouts.read import read_rollouts

__all__ = ["read_rollouts"]
