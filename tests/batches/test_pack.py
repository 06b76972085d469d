"""Packing puts every whole item into one row, never more than fits, and the same way on every machine."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.batches.pack import PACK_VERSION, Packing, pack

METHODS = ["best_fit", "first_fit", "greedy"]


@st.composite
def inputs(draw) -> tuple[list[int], int]:
    """Lengths and a capacity that takes each. Few distinct lengths are as likely as many."""
    capacity = draw(st.integers(1, 60))
    longest = draw(st.integers(1, capacity))
    return draw(st.lists(st.integers(1, longest), max_size=120)), capacity


def packed_rows(packing: Packing) -> list[list[int]]:
    return [packing.row(number).tolist() for number in range(packing.num_rows)]


def decreasing(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda item: -lengths[item])  # equal lengths stay in the order of items


def plain_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Item by item. Of rows with equal room, the one that has had it for longest."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room, since when)
    for now, item in enumerate(decreasing(lengths)):
        fits = [row for row, (free, _) in enumerate(room) if free >= lengths[item]]
        row = min(fits, key=lambda row: room[row], default=len(rows))
        if row == len(rows):
            rows.append([])
            room.append((capacity, now))
        rows[row].append(item)
        room[row] = (room[row][0] - lengths[item], now)
    return rows


def plain_first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[int] = []
    for item in decreasing(lengths):
        row = next((row for row, free in enumerate(room) if free >= lengths[item]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(item)
        room[row] -= lengths[item]
    return rows


def plain_greedy(lengths: list[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room = 0
    for item, length in enumerate(lengths):
        if length > room:
            rows.append([])
            room = capacity
        rows[-1].append(item)
        room -= length
    return rows


PLAIN = {"best_fit": plain_best_fit, "first_fit": plain_first_fit, "greedy": plain_greedy}


def scattered(num_items: int, most: int) -> np.ndarray:
    """Lengths of 1 to `most` by a formula, so that no random generator has to stay as it is."""
    item = np.arange(num_items, dtype=np.uint64)
    mixed = (item * np.uint64(0x9E3779B97F4A7C15)) ^ (item * item)
    return ((mixed >> np.uint64(20)) % np.uint64(most) + np.uint64(1)).astype(np.int64)


def digest(packing: Packing) -> str:
    return hashlib.sha256(b"".join(part.astype("<i8").tobytes() for part in packing)).hexdigest()[:16]


@pytest.mark.parametrize("method", METHODS)
@given(inputs())
def test_every_item_is_in_exactly_one_row(method, given_inputs):
    lengths, capacity = given_inputs
    packing = pack(np.array(lengths, np.int64), capacity, method)
    assert sorted(packing.items.tolist()) == list(range(len(lengths)))
    assert packing.row_starts[0] == 0
    assert packing.row_starts[-1] == len(lengths)
    assert (np.diff(packing.row_starts) > 0).all(), "an empty row"


@pytest.mark.parametrize("method", METHODS)
@given(inputs())
def test_no_row_holds_more_than_its_capacity(method, given_inputs):
    lengths, capacity = given_inputs
    rows = packed_rows(pack(np.array(lengths, np.int64), capacity, method))
    assert all(sum(lengths[item] for item in row) <= capacity for row in rows)


@pytest.mark.parametrize("method", METHODS)
@given(inputs())
def test_rows_are_those_of_the_plain_algorithm(method, given_inputs):
    lengths, capacity = given_inputs
    assert packed_rows(pack(np.array(lengths, np.int64), capacity, method)) == PLAIN[method](lengths, capacity)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("most", "capacity"), [(1000, 1000), (300, 1000), (7, 50), (70_000, 140_000)])
def test_many_rows_are_those_of_the_plain_algorithm(method, most, capacity):
    lengths = scattered(900, most)
    assert packed_rows(pack(lengths, capacity, method)) == PLAIN[method](lengths.tolist(), capacity)


@pytest.mark.parametrize("method", METHODS)
def test_more_rows_than_16_bits_can_count_stay_apart(method):
    packing = pack(np.full(150_000, 3), 7, method)
    assert np.array_equal(packing.items, np.arange(150_000))
    assert np.array_equal(packing.row_starts, np.arange(0, 150_001, 2))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.uint64, ">i4"])
def test_rows_do_not_depend_on_the_dtype(method, dtype):
    lengths = scattered(500, 100)
    for ours, wanted in zip(pack(lengths.astype(dtype), 300, method), pack(lengths, 300, method), strict=True):
        assert ours.dtype == np.int64
        assert np.array_equal(ours, wanted)


@pytest.mark.parametrize("method", METHODS)
def test_lengths_are_not_changed(method):
    lengths = scattered(500, 100)
    before = lengths.copy()
    pack(lengths, 300, method)
    assert np.array_equal(lengths, before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [np.array([], np.int32), np.array([])])
def test_no_items_give_no_rows(method, lengths):
    packing = pack(lengths, 8, method)
    assert packing.num_rows == 0
    assert packing.items.tolist() == []
    assert packing.row_starts.tolist() == [0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("capacity", [10, 2**31, 10**30])
def test_a_capacity_for_all_gives_one_row(method, capacity):
    assert packed_rows(pack(np.array([4, 3, 2, 1]), capacity, method)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("method", "rows"),
    [
        ("best_fit", [[0, 2], [1], [3, 5, 4]]),  # the 1 goes where the 4 left room for it, before the 2 did elsewhere
        ("first_fit", [[0, 2, 4], [1], [3, 5]]),
        ("greedy", [[0], [1, 2], [3, 4, 5]]),
    ],
)
def test_rows_of_a_small_example_are_pinned(method, rows):
    # Positions that running jobs saved point into these rows: if they change, so must PACK_VERSION.
    assert PACK_VERSION == 1
    assert packed_rows(pack(np.array([7, 7, 2, 5, 1, 4]), 10, method)) == rows


@pytest.mark.parametrize(
    ("method", "num_rows", "pinned"),
    [
        ("best_fit", 2936, "c62d316a3a93cf6d"),
        ("first_fit", 2936, "95676a67f0c48b8b"),
        ("greedy", 3439, "8293f9fe1cc79b4e"),
    ],
)
def test_rows_of_a_large_example_are_pinned(method, num_rows, pinned):
    # As above. Items and lengths of more than 16 bits, lengths that repeat and lengths that do not.
    assert PACK_VERSION == 1
    packing = pack(np.concatenate([scattered(70_000, 4096), scattered(3_000, 100_000)]), 100_000, method)
    assert (packing.num_rows, digest(packing)) == (num_rows, pinned)


@pytest.mark.parametrize("lengths", [[3, 0, 0], [3, 2, -1], [3, 9]])
def test_items_that_no_row_can_have_do_not_reach_the_packing(lengths):
    with pytest.raises(AssertionError):
        pack(np.array(lengths), 8)
