"""Batches of JAX and MLX arrays: what NumPy's hold, in memory of their own, made by whoever takes them."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest

import batchwright as bw
from batchwright.adapters.jax import JaxBlocks  # where one is missing, this says what to install
from batchwright.adapters.mlx import MlxBlocks
from harness import wait_for
from shared import arrays_of

BLOCKS = {"jax": JaxBlocks, "mlx": MlxBlocks}
MODULES = {"jax": "jaxlib", "mlx": "mlx"}
SETTINGS = {
    "tokens": {},
    "borders": {"fields": bw.Fields(border_loss=False, position_ids=True, segment_ids=True)},
    "padded": {"batch_size": bw.Batching(100, epoch_end="pad")},
    "rank": {"rank": 1, "world_size": 3},
    "prefetch": {"delivery": bw.Delivery(prefetch=2)},
    "workers": {"delivery": bw.Delivery(workers=2)},
}
AHEAD = {"": {}, "prefetch": SETTINGS["prefetch"], "workers": SETTINGS["workers"]}

every_framework = pytest.mark.parametrize("framework", BLOCKS)


def copies(batch):
    arrays = arrays_of(batch) | {name: batch.metadata[name] for name in ("position", "weight")}
    return {name: np.asarray(array).copy() for name, array in arrays.items()}


# What they hold


@every_framework
@pytest.mark.parametrize("settings", SETTINGS)
def test_an_epoch_holds_what_numpys_holds(open_small, values, framework, settings, small_blocks):
    given = SETTINGS[settings]
    expected = open_small("numpy", **given | {"delivery": None})
    for ours, theirs in zip(open_small(framework, **given), expected, strict=True):
        assert {type(a).__module__.partition(".")[0] for a in arrays_of(ours).values()} == {MODULES[framework]}
        assert values(ours) == values(theirs)


@every_framework
def test_raw_files_stream_into_them_too(open_loader, raw, values, framework):
    given = {"tokenizer": "bytes", "streaming": True}
    ours = open_loader(raw / "code" / "*.txt", framework=framework, **given)
    theirs = open_loader(raw / "code" / "*.txt", **given)
    assert [values(batch) for batch in ours] == [values(batch) for batch in theirs]


@every_framework
def test_metadata_stays_numpy(open_small, framework):
    metadata = open_small(framework).get_batch().metadata
    assert type(metadata["position"]) is type(metadata["weight"]) is np.ndarray
    assert set(metadata["source"]) <= {"web", "code", "notes"}


@every_framework
def test_a_rank_without_rows_gets_one_of_weight_0(open_small, framework):
    batch = open_small(framework, batch_size=bw.Batching(2, uneven=True), rank=0, world_size=3).get_batch()
    assert batch.input_ids.shape == batch.loss_mask.shape == (1, 16)
    assert batch.metadata["weight"].tolist() == [0]
    assert not np.asarray(batch.loss_mask).any()


# Memory


@every_framework
@pytest.mark.parametrize(
    ("batch_size", "ahead"),  # several batches in a block of memory, or one
    [(3, ""), (96, ""), (3, "prefetch"), (96, "prefetch"), (96, "workers")],
)
def test_100_kept_batches_of_copies_stay_unchanged(long_store, open_loader, framework, batch_size, ahead):
    loader = open_loader(
        long_store, chunk_size=512, batch_size=batch_size, framework=framework, epochs=None, **AHEAD[ahead]
    )
    kept = [(batch, copies(batch)) for batch in (loader.get_batch() for _ in range(100))]
    for number, (batch, expected) in enumerate(kept):
        found = copies(batch)
        for name, array in expected.items():
            assert np.array_equal(found[name], array), f"{name} of batch {number} has changed"
    loader.reset()


@every_framework
def test_kept_batches_do_not_hold_the_memory_they_were_copied_from(long_store, open_loader, framework):
    loader = open_loader(long_store, chunk_size=512, batch_size=96, framework=framework, epochs=None)
    addresses, take = [], loader.stream.pool.take

    def noting(rows, width):
        block = take(rows, width)
        addresses.append(block.ctypes.data)
        return block

    loader.stream.pool.take = noting
    kept = [loader.get_batch() for _ in range(50)]
    assert len(addresses) >= 10
    assert len(set(addresses)) <= 4
    assert kept[0].metadata["state"]["position"] == 96


@every_framework
@pytest.mark.parametrize("ahead", AHEAD)
def test_arrays_are_made_on_the_thread_that_takes_the_batch(open_small, monkeypatch, framework, ahead):
    made_on = []
    made = BLOCKS[framework].copies
    monkeypatch.setattr(
        BLOCKS[framework], "copies", lambda self, arrays: made_on.append(threading.get_ident()) or made(self, arrays)
    )
    loader = open_small(framework, **AHEAD[ahead])
    batches = [loader.get_batch()]
    taker = threading.Thread(target=lambda: batches.append(loader.get_batch()))
    taker.start()
    taker.join()
    assert {made_on[0], made_on[-1]} == {threading.get_ident(), taker.ident}
    assert (batches[1].loss_mask.sum() == 12 * 16).item()  # and it can be used here
    loader.reset()


# Going on


@every_framework
def test_a_state_goes_between_frameworks(open_small, values, framework):
    ours, theirs = open_small(framework), open_small("numpy")
    for _ in range(5):
        ours.get_batch()
    theirs.load_state_dict(ours.state_dict())
    expected = values(theirs.get_batch())
    assert values(ours.get_batch()) == expected
    again = open_small(framework)
    again.load_state_dict(theirs.state_dict())
    assert values(again.get_batch()) == values(theirs.get_batch())


@every_framework
def test_a_loader_pickles_and_goes_on(open_small, values, framework):
    loader = open_small(framework)
    loader.get_batch()
    again = pickle.loads(pickle.dumps(loader))
    assert values(again.get_batch()) == values(loader.get_batch())


@every_framework
@pytest.mark.parametrize("again", [lambda b: pickle.loads(pickle.dumps(b)), copy.copy, copy.deepcopy])
def test_a_converted_batch_copies_and_pickles_whole(open_small, values, framework, again):
    for settings in ("tokens", "borders"):
        batch = open_small(framework, **SETTINGS[settings]).get_batch()
        assert values(again(batch)) == values(batch)
        assert type(again(batch).targets) is type(batch.targets)


@every_framework
@pytest.mark.parametrize("ahead", ["", "prefetch"])
def test_where_a_conversion_fails_no_batch_and_no_thread_is_left_over(
    open_small, values, monkeypatch, framework, ahead
):
    threads = set(threading.enumerate())
    loader, expected = open_small(framework, **AHEAD[ahead]), open_small("numpy")
    assert values(loader.get_batch()) == values(expected.get_batch())
    before = loader.state_dict()

    def fail(self, arrays):
        raise MemoryError("the device is full")

    with monkeypatch.context() as patch:
        patch.setattr(BLOCKS[framework], "copies", fail)
        with pytest.raises(MemoryError, match="the device is full") as kept:  # an error keeps what was under way
            loader.get_batch()
    assert kept.tb is not None
    wait_for("end of threads", lambda: set(threading.enumerate()) <= threads)
    assert loader.state_dict() == before
    assert values(loader.get_batch()) == values(expected.get_batch())
    loader.reset()


@every_framework
def test_such_a_loader_is_a_torch_dataset_too(open_small, values, framework):
    loader = open_small(framework)
    batch = next(iter(loader.torch()))
    assert type(batch.input_ids).__module__ == "torch"
    assert values(batch) == values(open_small("numpy").get_batch())
    assert loader.step == 1
