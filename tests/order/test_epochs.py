"""Epochs that change their length, and positions that are skipped."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.order.epochs import Epochs, Skips
from batchwright.order.split import Cut, position_of_step, step_of_position

SPANS = st.lists(st.tuples(st.integers(0, 80), st.integers(1, 12)).map(lambda s: (s[0], s[0] + s[1])), max_size=4)


@given(SPANS)
def test_live_numbers_count_what_is_not_skipped(spans):
    skips = Skips(spans)
    live = [p for p in range(200) if not any(first <= p < stop for first, stop in spans)]
    assert skips.positions(np.arange(100)).tolist() == live[:100]
    assert [skips.live(p) for p in range(120)] == [sum(q < p for q in live) for p in range(120)]
    assert [p in skips for p in range(120)] == [p not in live for p in range(120)]


@st.composite
def streams(draw):
    """Epochs whose length changes, and skips; with the live rows of each epoch, one by one."""
    eras, lengths, start = [], [], 0
    for _ in range(draw(st.integers(1, 3))):
        rows, count = draw(st.integers(8, 25)), draw(st.integers(1, 3))
        eras.append((start, rows))
        lengths += [rows] * count
        start += rows * count
    lengths += [eras[-1][1]] * 30
    spans = draw(SPANS)
    starts = np.cumsum([0, *lengths])
    is_live = [not any(first <= p < stop for first, stop in spans) for p in range(int(starts[-1]))]
    rows = [[p for p in range(int(a), int(b)) if is_live[p]] for a, b in pairwise(starts)]
    return Epochs(tuple(eras), skips=Skips(spans)), rows


@given(streams(), st.integers(1, 8), st.sampled_from(["drop", "short", "pad", "wrap"]))
def test_steps_are_what_a_walk_over_the_rows_gives(stream, rows_per_step, epoch_end):
    epochs, rows = stream
    if epoch_end == "wrap":
        flat = [p for epoch in rows for p in epoch]
        steps = [flat[i : i + rows_per_step] for i in range(0, len(flat), rows_per_step)]
    else:
        steps = [epoch[i : i + rows_per_step] for epoch in rows for i in range(0, len(epoch), rows_per_step)]
        steps = [step for step in steps if epoch_end in ("short", "pad") or len(step) == rows_per_step]
    cut = Cut(rows_per_step=rows_per_step, epochs=epochs, epoch_end=epoch_end)
    spec = {"epochs": epochs, "epoch_end": epoch_end}
    position = 0
    for number, step in enumerate(steps[:25]):
        position = cut.settle(position)
        assert position == step[0]
        assert cut.positions(position, cut.real_rows(position)).tolist() == step
        assert cut.settle(position_of_step([[0, 0, rows_per_step]], number, **spec)[0]) == position
        assert step_of_position([[0, 0, rows_per_step]], position, **spec) == number
        position = cut.settle(cut.after(position, 1))


@given(streams())
def test_the_number_of_an_epoch_and_its_end_are_what_a_walk_finds(stream):
    epochs, rows = stream
    for number, epoch in enumerate(rows[:6]):
        for position in epoch:
            assert epochs.number(position) == number
        if epoch:
            assert epochs.begin_of(number) == epoch[0]
    ends = np.cumsum([len(epoch) for epoch in rows])
    assert [epochs.end_of(n) for n in range(1, 6)] == ends[:5].tolist()


def test_a_limit_ends_every_number_of_epochs():
    epochs = Epochs(((0, 10),), limit=25)
    assert [epochs.end_of(n) for n in (1, 2, 3, None)] == [10, 20, 25, 25]


@pytest.mark.parametrize("num_epochs", [1, 7, None])
def test_a_stream_without_epochs_never_ends(num_epochs):
    assert Epochs.of(None).end_of(num_epochs) is None
