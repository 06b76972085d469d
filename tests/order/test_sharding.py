"""Which rank gets which rows of a batch: every row goes to exactly one, and a strategy that does not do so is named."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import batchwright as bw
from batchwright.base.errors import SpecError
from batchwright.order import sharding
from batchwright.order.sharding import row_numbers, sharding_of
from refusals import refused


@pytest.fixture(autouse=True)
def own_names(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(sharding._shardings, "_known", dict(sharding._shardings._known))


def shares(asked, num_rows, world, **given):
    return [list(sharding_of(asked).share(num_rows, rank=rank, world=world, **given)) for rank in range(world)]


def snake(num_rows, rank, world_size):
    """Forwards, then backwards: 0 1 2 2 1 0 0 1 2 ..."""
    turn = [*range(world_size), *reversed(range(world_size))]
    return [row for row in range(num_rows) if turn[row % len(turn)] == rank]


def test_contiguous_is_the_default():
    assert shares(None, 6, 2) == shares("contiguous", 6, 2) == [[0, 1, 2], [3, 4, 5]]


def test_strided_gives_rows_in_turn():
    assert shares("strided", 7, 3) == [[0, 3, 6], [1, 4], [2, 5]]


def test_a_function_is_a_strategy():
    assert shares(snake, 6, 3) == [[0, 5], [1, 4], [2, 3]]
    assert sharding_of(snake).name == "snake"


def test_a_registered_name_means_the_function():
    assert bw.register_sharding("snake")(snake) is snake
    assert shares("snake", 6, 3) == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize("asked", ["contiguous", "strided", snake])
@pytest.mark.parametrize(("num_rows", "world"), [(1, 1), (2, 5), (48, 7), (64, 8)])
def test_the_rank_of_a_row_is_the_one_that_gets_it(asked, num_rows, world):
    found = sharding_of(asked)
    for rank, rows in enumerate(shares(found, num_rows, world)):
        assert [found.rank_of(row, num_rows, world) for row in rows] == [rank] * len(rows)


def test_a_strategy_is_asked_once_for_each_batch_size():
    asked = []

    def counted(num_rows, rank, world_size):
        asked.append((num_rows, rank))
        return range(rank, num_rows, world_size)

    found = sharding_of(counted)
    for _ in range(3):
        for rank in range(2):
            found.share(4, rank=rank, world=2)
            found.share(6, rank=rank, world=2)
    assert asked == [(4, 0), (4, 1), (6, 0), (6, 1)]


def test_rows_may_be_any_sequence_of_whole_numbers():
    import numpy as np

    assert shares(lambda n, rank, world: np.arange(rank, n, world), 4, 2) == [[0, 2], [1, 3]]
    share = sharding_of(lambda n, rank, world: np.arange(rank, n, world)).share(4, rank=1, world=2)
    assert share == (1, 3)
    assert type(share[0]) is int
    assert row_numbers(share).dtype == row_numbers(range(2)).dtype == np.int64


def test_a_strategy_of_a_script_travels_to_other_processes():
    # A function that a spawned process cannot import, as a script's own.
    found = pickle.loads(pickle.dumps(sharding_of(lambda n, rank, world: range(rank, n, world))))
    assert shares(found, 4, 2) == [[0, 2], [1, 3]]
    default = pickle.loads(pickle.dumps(sharding_of("contiguous")))
    assert default.strategy is sharding_of("contiguous").strategy


# Strategies that cannot be right

BAD = {
    "twice": (
        lambda n, rank, world: [0, *range(rank, n, world)],
        {"row": 0},
    ),
    "to two": (
        lambda n, rank, world: [row for row in range(n) if row % world == rank or row == 3],
        {"row": 3},
    ),
    "to none": (
        lambda n, rank, world: [row for row in range(n) if row % world == rank and row != 4],
        {"row": 4},
    ),
    "too far": (
        lambda n, rank, world: range(rank * n, rank * n + n),
        {"row": 6},
    ),
    "negative": (
        lambda n, rank, world: [-1],
        {"row": 0},
    ),
    "no numbers": (
        lambda n, rank, world: ["a"],
        {"got": "['a']", "rank": 0},
    ),
    "nothing": (
        lambda n, rank, world: None,
        {"got": "None", "rank": 0},
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_strategy_that_does_not_give_every_row_once_is_refused_on_every_rank(what):
    strategy, where = BAD[what]
    bw.register_sharding("mine")(strategy)
    for rank in range(2):
        with refused(SpecError, "'mine'", parameter="sharding", remedy=True, **where) as caught:
            sharding_of("mine").share(6, rank=rank, world=2)
        assert caught.value.where.keys() == {"parameter", *where}


def test_unequal_shares_are_refused_unless_they_are_asked_for():
    def first_two(num_rows, rank, world_size):
        return range(2, num_rows) if rank else range(2)

    with refused(SpecError, "first_two", 8, 6, parameter="sharding", rank=1, remedy="uneven=True"):
        shares(first_two, 8, 2, uneven=False)
    assert shares(first_two, 8, 2, uneven=True) == [[0, 1], [2, 3, 4, 5, 6, 7]]


def test_what_a_strategy_raises_says_whose_rows_were_asked_for():
    def broken(num_rows, rank, world_size):
        return 1 // (1 - rank)

    with pytest.raises(ZeroDivisionError) as caught:
        sharding_of(lambda n, rank, world: [0] if rank == 0 else broken(n, rank, world)).share(2, rank=0, world=2)
    assert caught.value.__notes__[0].endswith("asked for the rows of rank 1 of 2")


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with refused(SpecError, "'stridden'", parameter="sharding", remedy="'strided'"):
        sharding_of("stridden")


def test_what_is_neither_a_name_nor_a_function_is_refused():
    with refused(SpecError, "sharding=3", parameter="sharding"):
        sharding_of(3)


def test_an_installed_package_offers_a_strategy_by_name(tmp_path):
    (tmp_path / "dealing").mkdir()
    (tmp_path / "dealing" / "__init__.py").write_text(
        "import batchwright as bw\n\n@bw.register_sharding('deal')\ndef deal(n, rank, world):\n"
        "    return range(rank, n, world)\n"
    )
    about = tmp_path / "dealing-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: dealing\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[batchwright.sharding]\ndeal = dealing\n")
    code = "from batchwright.order.sharding import sharding_of; print(sharding_of('deal').share(6, rank=1, world=2))"
    path = os.pathsep.join([str(tmp_path), str(Path(bw.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.stdout == "range(1, 6, 2)\n", ran.stderr
