"""Turns of lanes: the order of draws from lanes. Processes that each have some of the lanes stay in step.

The next turn belongs to the lane with the fewest entries drawn, the lowest number first. No other state is kept, so a
resumed run, on the same number of processes or on fewer, takes the same turns as the original run. Lane l
belongs to rank l mod R.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

__all__ = ["even_ends", "lane_sizes", "lanes_of_rank", "lanes_of_worker", "next_lane", "take_turns", "worker_turns"]


def lane_sizes(num_rows: int, lanes: int, factor: int = 1) -> list[int]:
    """The number of entries of an epoch in each lane.

    >>> lane_sizes(10, 4)
    [3, 3, 2, 2]
    """
    return [max(0, -(-(num_rows - lane) // lanes)) * factor for lane in range(lanes)]


def lanes_of_rank(lanes: int, rank: int, world_size: int) -> list[int]:
    return list(range(rank, lanes, world_size))


def lanes_of_worker(drawn: Sequence[int], mine: Sequence[int], worker: int, workers: int) -> list[int]:
    """The lanes of one worker of a rank: torch asks worker 0 first, so it has the lane whose turn is next.

    >>> lanes_of_worker(drawn=[64, 64, 64, 0], mine=[1, 3], worker=0, workers=2)
    [3]
    """
    by_turn = sorted(mine, key=lambda lane: (drawn[lane], lane))
    return sorted(by_turn[worker::workers])


def next_lane(drawn: Sequence[int], ends: Sequence[int], lanes: Sequence[int]) -> int | None:
    """The lane whose turn is next; None if all are at their end."""
    live = [lane for lane in lanes if drawn[lane] < ends[lane]]
    return min(live, key=lambda lane: (drawn[lane], lane), default=None)


def take_turns(drawn: Sequence[int], ends: Sequence[int], lanes: Sequence[int], num_turns: int, rows: int) -> list[int]:
    """Entries drawn from each lane after `num_turns` more turns of `rows` entries.

    >>> take_turns([64, 0, 0, 0], [999] * 4, [0, 2], num_turns=2, rows=64)           # lane 2, then lane 0
    [128, 0, 64, 0]
    """
    after = list(drawn)
    while num_turns and (lane := next_lane(after, ends, lanes)) is not None:
        live = [other for other in lanes if after[other] < ends[other]]
        rounds = min(num_turns // len(live), *((ends[other] - after[other]) // rows for other in live))
        is_in_step = max(after[other] for other in live) - after[lane] <= rows  # then each has one turn in a round
        if rounds and is_in_step:
            for other in live:
                after[other] += rounds * rows
            num_turns -= rounds * len(live)
        else:
            after[lane] += min(rows, ends[lane] - after[lane])
            num_turns -= 1
    return after


def worker_turns(
    drawn: Sequence[int], ends: Sequence[int], workers: Sequence[Sequence[int]], num_turns: int, rows: int
) -> list[int]:
    """`take_turns` where each of the workers has some lanes, and torch asks the workers one after another.

    The two differ where some lanes are far behind: one worker has those, and is asked no more often for it.

    >>> worker_turns([10, 0], [999] * 2, [[1], [0]], num_turns=4, rows=4)
    [18, 8]
    >>> take_turns([10, 0], [999] * 2, [0, 1], num_turns=4, rows=4)
    [14, 12]
    """
    most = [sum(-(-max(0, ends[lane] - drawn[lane]) // rows) for lane in lanes) for lanes in workers]
    rounds = bisect_right(range(num_turns + 1), num_turns, key=lambda each: sum(min(own, each) for own in most)) - 1
    left = num_turns - sum(min(own, rounds) for own in most)
    after = list(drawn)
    for lanes, own in zip(workers, most, strict=True):
        has_one_more = own > rounds and left > 0
        left -= has_one_more
        after = take_turns(after, ends, lanes, min(own, rounds) + has_one_more, rows)
    return after


def even_ends(drawn: Sequence[int], sizes: Sequence[int], rows: int, world_size: int) -> list[int]:
    """The ends of lanes if every batch is full and every rank has equally many, from here to the end of the epoch.

    >>> even_ends([0, 0, 0], sizes=[31, 30, 29], rows=10, world_size=3)
    [20, 20, 20]
    """
    full = min(sizes) // rows * rows
    ends = [max(full, at) for at in drawn]
    ranks = [lanes_of_rank(len(ends), rank, world_size) for rank in range(world_size)]
    left = [sum((ends[lane] - drawn[lane]) // rows for lane in lanes) for lanes in ranks]
    for lanes, steps in zip(ranks, left, strict=True):
        for _ in range(steps - min(left)):  # after a change of ranks in mid-round some are a step ahead
            longest = max(lanes, key=lambda lane: ends[lane] - drawn[lane])
            ends[longest] -= rows
    return [at + (end - at) // rows * rows for at, end in zip(drawn, ends, strict=True)]
