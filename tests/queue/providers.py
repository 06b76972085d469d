"""Providers for tests: one whose every row can be told from every other, and the plain x and y."""

from __future__ import annotations

import threading

import numpy as np

from batchwright import DataProviderBase


class Numbered(DataProviderBase):
    """Rows with an id: 1,000 * file + row. (x is what rng gave, so that bytes depend on it.)"""

    num_sampled = 0

    def build_meta(self):
        return {
            "vocab_size": 7,
            "batch_schema": [
                {"name": "id", "dtype": "int64", "shape": []},
                {"name": "x", "dtype": "int32", "shape": [self.block_size], "role": "input"},
            ],
        }

    def batches(self, split, number):
        self.number, self.index = number, 0
        return super().batches(split, number)

    def sample_batch(self, split, rng):
        first = 1000 * self.number + self.index * self.batch_size
        self.index += 1
        self.num_sampled += 1
        ids = np.arange(first, first + self.batch_size)
        return {"id": ids, "x": rng.integers(0, 7, (self.batch_size, self.block_size), dtype=np.int32)}


class Counting(Numbered):
    """It counts the validation files that it begins."""

    num_begun = 0

    def batches(self, split, number):
        self.num_begun += split == "val"
        return super().batches(split, number)


SETTINGS = {"batch_size": 4, "block_size": 3, "batches_per_file": 5, "sleep_seconds": 0.2}


class Pair(DataProviderBase):
    """The plain schema: x and y."""

    def build_meta(self):
        field = {"dtype": "int64", "shape": [self.block_size]}
        return {"batch_schema": [{"name": "x", **field, "role": "input"}, {"name": "y", **field, "role": "target"}]}

    def sample_batch(self, split, rng):
        x = rng.integers(0, 100, (self.batch_size, self.block_size))
        return {"x": x, "y": x + 1}


class Running:
    """A provider at work, in a thread."""

    def __init__(self, provider: DataProviderBase) -> None:
        self.provider = provider
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.provider.run()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.provider.stop()
        self.thread.join()
