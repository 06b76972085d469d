"""From a position to batches: workers that take turns give together what one reader gives; no step is made twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchwright.base.errors import EndOfRun


def read(loader):
    """(rows, weights, state) of every batch of an epoch."""
    return [_what(batch) for batch in loader.get_iterator()]


def _what(batch):
    return batch.input_ids[:, 0].tolist(), batch.metadata["weight"].tolist(), batch.metadata["state"]


@given(
    num_rows=st.integers(12, 80),
    batch_size=st.integers(1, 12),
    epoch_end=st.sampled_from(["drop", "short", "pad", "wrap"]),
    workers=st.integers(1, 5),
    taken=st.integers(0, 3),
    before=st.integers(0, 12),
)
def test_workers_that_take_turns_give_together_what_one_reader_gives(
    open_numbers, num_rows, batch_size, epoch_end, workers, taken, before
):
    given_settings = {"batch_size": batch_size, "epoch_end": epoch_end, "epochs": 2, "shuffle": "global"}
    loader = open_numbers(num_rows, **given_settings)
    try:
        for _ in range(before):
            loader.get_batch()
    except EndOfRun:
        return
    state = loader.state_dict()
    turns = [[_what(batch) for batch in loader.turns(worker, workers, taken)] for worker in range(workers)]
    assert loader.state_dict() == state  # the cursor stays where it is
    expected = read(loader) if not loader.is_over else []
    assert turns == [expected[worker + taken * workers :: workers] for worker in range(workers)]


def test_turns_of_an_endless_mixture_have_no_end(open_numbers):
    loader = open_numbers({"a": 50, "b": 20}, weights={"a": 0.5, "b": 0.5})
    turns = [loader.turns(worker, 3) for worker in range(3)]
    for step in range(200):
        assert _what(next(turns[step % 3])) == _what(loader.get_batch())


def test_a_block_is_gathered_once_for_all_its_batches(open_numbers):
    loader = open_numbers(4000, batch_size=4)
    for _ in range(1000):
        loader.get_batch()
    gathered = loader.stream.flow.rows[0].gathered
    assert gathered == list(range(4000))


def test_positions_in_metadata_follow_the_batches(open_numbers):
    loader = open_numbers(4000, batch_size=4, prefetch=2)
    positions = np.concatenate([batch.metadata["position"] for batch in loader])
    assert positions.tolist() == list(range(4000))
