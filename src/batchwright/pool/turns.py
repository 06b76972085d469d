"""Whose turn it is: lanes are drawn from in turns, so that processes that each have some of them stay in step.

The next turn is of the lane from which the fewest entries were drawn, the lowest number first. Nothing else is
remembered, so a run that is resumed, on as many processes or on fewer, takes the turns that would have come. Lane l
belongs to rank l mod R.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["even_ends", "lane_sizes", "lanes_of_rank", "lanes_of_worker", "next_lane", "take_turns", "worker_turns"]


def lane_sizes(num_rows: int, lanes: int, factor: int = 1) -> list[int]:
    """How many entries of an epoch each lane has.

    >>> lane_sizes(10, 4)
    [3, 3, 2, 2]
    """
    return [max(0, -(-(num_rows - lane) // lanes)) * factor for lane in range(lanes)]


def lanes_of_rank(lanes: int, rank: int, world_size: int) -> list[int]:
    return list(range(rank, lanes, world_size))


def lanes_of_worker(drawn: Sequence[int], mine: Sequence[int], worker: int, workers: int) -> list[int]:
    """Which lanes of its rank a worker has: torch asks worker 0 first, so it has the lane whose turn is next.

    >>> lanes_of_worker(drawn=[64, 64, 64, 0], mine=[1, 3], worker=0, workers=2)
    [3]
    """
    by_turn = sorted(mine, key=lambda lane: (drawn[lane], lane))
    return sorted(by_turn[worker::workers])


def next_lane(drawn: Sequence[int], ends: Sequence[int] | None, lanes: Sequence[int]) -> int | None:
    """The lane whose turn is next; None where all are at their end."""
    live = [lane for lane in lanes if ends is None or drawn[lane] < ends[lane]]
    return min(live, key=lambda lane: (drawn[lane], lane), default=None)


def take_turns(
    drawn: list[int], ends: Sequence[int] | None, lanes: Sequence[int], num_turns: int, rows: int
) -> list[int]:
    """What was drawn from each lane after some more turns of `rows` entries each. `ends` None: lanes do not end.

    >>> take_turns([64, 0, 0, 0], None, [0, 2], num_turns=2, rows=64)           # lane 2, then lane 0
    [128, 0, 64, 0]
    """
    drawn = list(drawn)
    while num_turns and (lane := next_lane(drawn, ends, lanes)) is not None:
        live = [other for other in lanes if ends is None or drawn[other] < ends[other]]
        rounds = num_turns // len(live)
        if ends is not None:
            rounds = min(rounds, *((ends[other] - drawn[other]) // rows for other in live))
        if rounds and max(drawn[other] for other in live) - drawn[lane] <= rows:  # then each has one turn in a round
            for other in live:
                drawn[other] += rounds * rows
            num_turns -= rounds * len(live)
        else:
            drawn[lane] += rows if ends is None else min(rows, ends[lane] - drawn[lane])
            num_turns -= 1
    return drawn


def worker_turns(
    drawn: Sequence[int], ends: Sequence[int] | None, lanes: Sequence[Sequence[int]], num_turns: int, rows: int
) -> list[int]:
    """`take_turns` where each worker has lanes of its own, and torch asks the workers one after another.

    That is the same, unless some lanes are far behind: one worker has those, and is asked no more often for it.

    >>> worker_turns([10, 0], None, [[1], [0]], num_turns=4, rows=4), take_turns([10, 0], None, [0, 1], 4, 4)
    ([18, 8], [14, 12])
    """
    most = [
        num_turns if ends is None else sum(-(-max(0, ends[lane] - drawn[lane]) // rows) for lane in mine)
        for mine in lanes
    ]
    turns = [0] * len(lanes)
    while num_turns and (live := [worker for worker, most_turns in enumerate(most) if turns[worker] < most_turns]):
        rounds = min(num_turns // len(live), *(most[worker] - turns[worker] for worker in live))
        for worker in live if rounds else live[:num_turns]:
            turns[worker] += max(1, rounds)
        num_turns -= rounds * len(live) or num_turns
    after = list(drawn)
    for mine, taken in zip(lanes, turns, strict=True):
        after = take_turns(after, ends, mine, taken, rows)
    return after


def even_ends(drawn: Sequence[int], sizes: Sequence[int], rows: int, world_size: int) -> list[int]:
    """Where lanes end if every batch is whole and every rank has equally many, from here to the end of the epoch.

    >>> even_ends([0, 0, 0], sizes=[31, 30, 29], rows=10, world_size=3)
    [20, 20, 20]
    """
    whole = min(sizes) // rows * rows
    ends = [max(whole, at) for at in drawn]
    left = [
        sum((ends[lane] - drawn[lane]) // rows for lane in _lanes(ends, rank, world_size)) for rank in range(world_size)
    ]
    for rank, steps in enumerate(left):
        for _ in range(steps - min(left)):  # after a change of ranks in mid-round some are a step ahead
            longest = max(_lanes(ends, rank, world_size), key=lambda lane: ends[lane] - drawn[lane])
            ends[longest] -= rows
    return [at + (end - at) // rows * rows for at, end in zip(drawn, ends, strict=True)]


def _lanes(ends: Sequence[int], rank: int, world_size: int) -> list[int]:
    return lanes_of_rank(len(ends), rank, world_size)
