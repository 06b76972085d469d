"""What forked workers tell the process that they were forked from: that they draw, and which epoch they finished.

A torch DataLoader copies its dataset into every worker, and the copies keep what they do to themselves. A few bytes
that are shared with them are enough to notice two mistakes that nothing else shows. Spawned workers share nothing.
"""

from __future__ import annotations

import mmap

import numpy as np

__all__ = ["ToldByWorkers"]


class ToldByWorkers:
    """Two numbers in memory that a fork shares. Pickled, it is a new one."""

    def __init__(self) -> None:
        self._numbers = np.frombuffer(mmap.mmap(-1, 16), np.int64)

    def __reduce__(self) -> tuple[type[ToldByWorkers], tuple[()]]:
        return ToldByWorkers, ()

    @property
    def num_passes(self) -> int:
        """Passes that workers have begun."""
        return int(self._numbers[0])

    @property
    def num_epochs(self) -> int:
        """Epochs that are behind a worker: one more than the last one that it finished."""
        return int(self._numbers[1])

    def begun(self) -> None:
        self._numbers[0] += 1

    def finished(self, epoch: int) -> None:
        self._numbers[1] = epoch + 1

    def forget(self) -> None:
        self._numbers[:] = 0
