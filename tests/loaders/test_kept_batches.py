"""Batches that a program keeps stay as they were, though their memory comes from a pool."""

from __future__ import annotations

import numpy as np
import pytest

import batchwright as bw
from shared import arrays_of, slow

AHEAD = {"": None, "prefetch": bw.Delivery(prefetch=2), "workers": bw.Delivery(workers=2)}


def copies(batch):
    arrays = arrays_of(batch) | {name: batch.metadata[name] for name in ("position", "weight")}
    return {name: np.asarray(array).copy() for name, array in arrays.items()}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("batch_size", [3, slow(8), 96])  # several batches in a block of memory, or one
def test_100_kept_batches_stay_unchanged(long_store, open_loader, framework, ahead, batch_size):
    loader = open_loader(
        long_store, chunk_size=1024, batch_size=batch_size, framework=framework, epochs=None, delivery=AHEAD[ahead]
    )
    kept = [(batch, copies(batch)) for batch in (loader.get_batch() for _ in range(100))]
    for number, (batch, expected) in enumerate(kept):
        found = copies(batch)
        for name, array in expected.items():
            assert np.array_equal(found[name], array), f"{name} of batch {number} has changed"
    loader.reset()


def test_a_kept_slice_keeps_its_memory(long_store, open_loader):
    loader = open_loader(long_store, chunk_size=1024, batch_size=8, epochs=None)
    slices = []
    for _ in range(100):
        batch = loader.get_batch()
        slices.append((batch.targets[3, 5:9], batch.targets[3, 5:9].copy()))
        del batch
    assert all(np.array_equal(part, expected) for part, expected in slices)


def test_memory_of_batches_that_nobody_holds_is_used_again(long_store, open_loader):
    loader = open_loader(long_store, chunk_size=1024, batch_size=96, epochs=None)
    addresses = {loader.get_batch().input_ids.ctypes.data for _ in range(50)}
    assert len(addresses) <= 4


def test_writing_into_a_batch_changes_no_other(long_store, open_loader):
    one = open_loader(long_store, chunk_size=64, batch_size=4, epochs=None)
    two = open_loader(long_store, chunk_size=64, batch_size=4, epochs=None)
    for _ in range(50):
        batch = one.get_batch()
        assert np.array_equal(batch.input_ids, two.get_batch().input_ids)
        batch.input_ids[:] = -1
