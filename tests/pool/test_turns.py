"""Whose turn it is: the same for any number of processes, and for a run that is resumed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchwright.pool.plan import lane_sizes
from batchwright.pool.turns import even_ends, lanes_of_rank, lanes_of_worker, next_lane, take_turns

NEVER = 1 << 62
DRAWN = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def one_by_one(drawn, ends, lanes, num_turns, rows):
    drawn = list(drawn)
    for _ in range(num_turns):
        lane = next_lane(drawn, ends, lanes)
        if lane is not None:
            drawn[lane] += min(rows, ends[lane] - drawn[lane])
    return drawn


@given(DRAWN, st.integers(0, 60), st.integers(1, 20), st.data())
def test_many_turns_at_once_are_those_turns_one_by_one(drawn, num_turns, rows, data):
    ends = [at + data.draw(st.integers(0, 60)) for at in drawn]
    lanes = data.draw(st.lists(st.sampled_from(range(len(drawn))), min_size=1, unique=True))
    assert take_turns(drawn, ends, lanes, num_turns, rows) == one_by_one(drawn, ends, lanes, num_turns, rows)


@given(st.integers(1, 6), st.integers(0, 30), st.integers(0, 30), st.integers(1, 9))
def test_turns_may_be_interrupted_anywhere(lanes, before, after, rows):
    start, everyone, endless = [0] * lanes, list(range(lanes)), [NEVER] * lanes
    halfway = take_turns(start, endless, everyone, before, rows)
    assert take_turns(halfway, endless, everyone, after, rows) == take_turns(
        start, endless, everyone, before + after, rows
    )


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 40), st.integers(1, 9))
def test_ranks_that_take_steps_together_take_the_turns_of_one(world_size, per_rank, steps, rows):
    lanes = world_size * per_rank
    together = [0] * lanes
    for rank in range(world_size):
        after = take_turns([0] * lanes, [NEVER] * lanes, lanes_of_rank(lanes, rank, world_size), steps, rows)
        for lane in lanes_of_rank(lanes, rank, world_size):
            together[lane] = after[lane]
    assert together == take_turns([0] * lanes, [NEVER] * lanes, list(range(lanes)), steps * world_size, rows)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 20))
def test_workers_share_the_lanes_of_their_rank_in_the_order_of_turns(world_size, workers, per_worker, turns):
    lanes = world_size * workers * per_worker
    drawn = take_turns([0] * lanes, [NEVER] * lanes, list(range(lanes)), turns, 5)
    mine = lanes_of_rank(lanes, 0, world_size)
    of_workers = [lanes_of_worker(drawn, mine, worker, workers) for worker in range(workers)]
    assert sorted(lane for some in of_workers for lane in some) == mine
    assert next_lane(drawn, [NEVER] * lanes, of_workers[0]) == next_lane(
        drawn, [NEVER] * lanes, mine
    )  # torch asks worker 0 first


@given(st.integers(0, 200), st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(0, 12))
def test_even_ends_give_every_rank_as_many_whole_batches(num_rows, world_size, per_rank, rows, turns):
    lanes = world_size * per_rank
    sizes = lane_sizes(num_rows, lanes)
    drawn = take_turns([0] * lanes, [size // rows * rows for size in sizes], list(range(lanes)), turns, rows)
    ends = even_ends(drawn, sizes, rows, world_size)
    steps = {
        sum((ends[lane] - drawn[lane]) // rows for lane in lanes_of_rank(lanes, rank, world_size))
        for rank in range(world_size)
    }
    assert len(steps) == 1
    assert all(end <= size and (end - at) % rows == 0 for at, end, size in zip(drawn, ends, sizes, strict=True))
    if not turns:
        assert sum(sizes) - sum(ends) < lanes * (rows + 1)  # no more is left out than that


def test_lanes_differ_by_one_row_at_most():
    assert lane_sizes(11, 4, factor=2) == [6, 6, 6, 4]
