"""Augmentations: the symmetries that ship, what a function of the user's own may return, and what is refused."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import batchwright
from batchwright.base.errors import SpecError
from batchwright.pool.augment import (
    Augmentation,
    apply,
    augmentation_for,
    dihedral8,
    hex4,
    register_augmentation,
)
from batchwright.pool.symmetries import Symmetry
from refusals import refused


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def every_element(augmentation, columns):
    """One position under every element: {column: [element, ...]}. The columns have one row."""
    repeated = {name: np.repeat(array, augmentation.factor, axis=0) for name, array in columns.items()}
    return apply(augmentation, repeated, np.arange(augmentation.factor))


def slow_dihedral(board, element):
    return np.rot90(np.fliplr(board) if element >= 4 else board, element % 4)


def slow_hex(board, element):
    """By coordinates: where the stone of each cell goes."""
    n = len(board)
    turned = np.empty_like(board)
    for row in range(n):
        for column in range(n):
            to = {
                0: (row, column),
                1: (n - 1 - row, n - 1 - column),
                2: (column, row),
                3: (n - 1 - column, n - 1 - row),
            }[element]
            turned[to] = board[row, column]
    return turned


SLOW = {"dihedral8": slow_dihedral, "hex4": slow_hex}


def only_turned(group):
    """The augmentation of a group that leaves colours alone, so that both groups can be tested alike."""
    return dihedral8() if group == "dihedral8" else hex4(boards="board", colours="mover")


# Groups


def composed_dihedral(first, then):
    (s, a), (t, b) = divmod(first, 4), divmod(then, 4)
    return 4 * (s ^ t) + (b - a if t else b + a) % 4


LAWS = {"dihedral8": composed_dihedral, "hex4": lambda first, then: first ^ then}


@pytest.mark.parametrize("group", ["dihedral8", "hex4"])
def test_one_element_after_another_is_the_element_that_the_law_says(group):
    augmentation = only_turned(group)
    columns = {"board": np.arange(16).reshape(1, 4, 4), "move": np.array([6])}
    once = every_element(augmentation, columns)
    assert len({board.tobytes() for board in once["board"]}) == augmentation.factor
    for then in range(augmentation.factor):
        twice = apply(augmentation, once, np.full(augmentation.factor, then))
        for first in range(augmentation.factor):
            both = LAWS[group](first, then)
            assert np.array_equal(twice["board"][first], once["board"][both]), (first, then)
            assert twice["move"][first] == once["move"][both]


@pytest.mark.parametrize(
    ("augmentation", "inverses"), [(dihedral8(), [0, 3, 2, 1, 4, 5, 6, 7]), (hex4(), [0, 1, 2, 3])]
)
def test_every_element_is_undone_by_its_inverse(rng, augmentation, inverses):
    columns = {
        "board": np.concatenate([rng.integers(0, 2, (1, 2, 4, 4)), np.ones((1, 1, 4, 4), int)], axis=1),
        "policy": rng.random((1, 17)),
        "move": np.array([6]),
        "player": np.array([1]),
    }
    undone = apply(augmentation, every_element(augmentation, columns), np.array(inverses))
    for name, array in columns.items():
        assert (undone[name] == array).all(), name


@pytest.mark.parametrize("group", ["dihedral8", "hex4"])
def test_element_0_changes_nothing(rng, group):
    columns = {
        "board": rng.integers(0, 2, (5, 2, 4, 4)),
        "policy": rng.random((5, 17)),
        "move": np.array([0, 5, 15, 16, -1]),
        "player": np.array([0, 1, 0, 1, 0]),
        "value": rng.random(5),
    }
    same = apply(augmentation_for(group), columns, np.zeros(5, int))
    for name, array in columns.items():
        assert np.array_equal(same[name], array)


@pytest.mark.parametrize("group", ["dihedral8", "hex4"])
@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [np.int8, np.float32, np.bool_])
def test_a_batch_is_turned_like_its_rows_one_by_one(rng, group, n, dtype):
    boards = rng.integers(0, 2, (40, 4, n, n)).astype(dtype)
    augmentation = dihedral8() if group == "dihedral8" else hex4(colours="mover")
    which = rng.integers(0, augmentation.factor, 40)
    turned = apply(augmentation, {"board": boards}, which)["board"]
    for row, element in enumerate(which):
        for plane in range(4):
            assert np.array_equal(turned[row, plane], SLOW[group](boards[row, plane], element))


@pytest.mark.parametrize("group", ["dihedral8", "hex4"])
def test_policies_and_moves_stay_with_their_cell(group):
    # On board, policies and move list the same cell is marked, and must be in all of them afterwards.
    n, marked = 5, np.arange(25)
    boards = (np.arange(25) == marked[:, None]).reshape(25, n, n).astype(np.int8)
    columns = {
        "board": boards,
        "policy": boards.reshape(25, 25).astype(np.float32),
        "with_pass": np.concatenate([boards.reshape(25, 25), np.full((25, 1), 7)], axis=1).astype(np.float16),
        "move": marked.astype(np.int16),
        "moves": np.stack([marked, np.full(25, -1), np.full(25, 25)], axis=1),
    }
    names = {"boards": "board", "policies": ("policy", "with_pass"), "moves": ("move", "moves")}
    augmentation = dihedral8(**names) if group == "dihedral8" else hex4(**names, colours="mover")
    for element in range(augmentation.factor):
        turned = apply(augmentation, columns, np.full(25, element))
        cell = turned["board"].reshape(25, 25).argmax(axis=1)
        assert np.array_equal(turned["policy"], turned["board"].reshape(25, 25))
        assert np.array_equal(turned["with_pass"][:, :25], turned["board"].reshape(25, 25))
        assert (turned["with_pass"][:, 25] == 7).all()
        assert np.array_equal(turned["move"], cell)
        assert np.array_equal(turned["moves"], np.stack([cell, np.full(25, -1), np.full(25, 25)], axis=1))


def test_flat_boards_are_turned_like_square_ones(rng):
    boards = rng.integers(-1, 2, (30, 5, 5)).astype(np.int8)
    which = rng.integers(0, 4, 30)
    square = apply(hex4(boards="b", colours="signs"), {"b": boards}, which)["b"]
    flat = apply(hex4(boards="b", colours="signs"), {"b": boards.reshape(30, 25)}, which)["b"]
    assert np.array_equal(flat.reshape(30, 5, 5), square)


def test_policies_without_a_board_know_its_size():
    policy = np.arange(10.0)[None]
    turned = every_element(dihedral8(boards=(), policies="p"), {"p": policy})["p"]
    for element in range(8):
        assert np.array_equal(turned[element, :9].reshape(3, 3), slow_dihedral(policy[0, :9].reshape(3, 3), element))
        assert turned[element, 9] == 9


@pytest.mark.parametrize("rows", [0, 1])
def test_batches_may_be_as_small_as_nothing(rows):
    columns = {"board": np.zeros((rows, 3, 4, 4)), "policy": np.zeros((rows, 16)), "move": np.zeros(rows, np.int8)}
    for augmentation in (dihedral8(), hex4()):
        turned = apply(augmentation, columns, np.full(rows, 3))
        assert {name: array.shape for name, array in turned.items()} == {n: a.shape for n, a in columns.items()}


def test_a_column_that_is_not_in_c_order_is_turned_too(rng):
    boards = rng.integers(0, 9, (5, 5, 6)).transpose(2, 1, 0)
    which = np.arange(6)
    turned = apply(dihedral8(), {"board": boards}, which)["board"]
    assert np.array_equal(turned, [slow_dihedral(boards[row], row) for row in range(6)])


# Hex


def winner(red, blue):
    """Who connects: "red" top and bottom, "blue" left and right, by flood fill. None where nobody does."""

    def connects(stones):
        """From row 0 to the last."""
        n = len(stones)
        reached = {(0, column) for column in range(n) if stones[0, column]}
        front = list(reached)
        while front:
            r, c = front.pop()
            for cell in ((r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1), (r - 1, c + 1), (r + 1, c - 1)):
                if min(cell) >= 0 and max(cell) < n and stones[cell] and cell not in reached:
                    reached.add(cell)
                    front.append(cell)
        return any(row == n - 1 for row, _ in reached)

    won = [name for name, stones in (("red", red), ("blue", np.asarray(blue).T)) if connects(np.asarray(stones))]
    assert len(won) <= 1, "both cannot connect in Hex"
    return won[0] if won else None


def full_boards(rng, n, count):
    """Boards without an empty cell: in Hex somebody has won on each."""
    red = rng.integers(0, 2, (count, n, n))
    return red, 1 - red


OTHER = {"red": "blue", "blue": "red"}


def test_the_winner_detector_knows_hex():
    assert winner([[1, 0], [1, 0]], [[0, 1], [0, 1]]) == "red"
    assert winner([[0, 1], [1, 0]], [[1, 0], [0, 1]]) == "red"  # the short diagonal touches
    assert winner([[1, 0], [0, 1]], [[0, 1], [1, 0]]) == "blue"
    assert winner(np.zeros((3, 3)), np.zeros((3, 3))) is None


@pytest.mark.parametrize("colours", ["planes", "signs", "1/2"])
def test_the_winner_stays_and_changes_colour_where_players_change_places(rng, colours):
    red, blue = full_boards(rng, 5, 60)
    boards = {"planes": np.stack([red, blue], axis=1), "signs": red - blue, "1/2": red + 2 * blue}[colours]
    winners = [winner(r, b) for r, b in zip(red, blue, strict=True)]
    assert {"red", "blue"} == set(winners)
    for element in range(4):
        turned = apply(hex4(boards="board", colours=colours), {"board": boards}, np.full(60, element))["board"]
        if colours == "planes":
            seen = [winner(*planes) for planes in turned]
        else:
            one, other = (1, -1) if colours == "signs" else (1, 2)
            seen = [winner(board == one, board == other) for board in turned]
        assert seen == ([OTHER[w] for w in winners] if element in (2, 3) else winners)


def test_turning_without_exchanging_colours_would_change_who_wins(rng):
    # Or the test above would prove nothing.
    red, blue = full_boards(rng, 5, 60)
    turned = apply(hex4(colours="mover"), {"board": np.stack([red, blue], axis=1)}, np.full(60, 2))["board"]
    assert [winner(*planes) for planes in turned] != [OTHER[winner(r, b)] for r, b in zip(red, blue, strict=True)]


def test_planes_signs_and_numbers_say_the_same(rng):
    red = rng.integers(0, 2, (30, 4, 4))
    blue = (1 - red) * rng.integers(0, 2, (30, 4, 4))
    which = rng.integers(0, 4, 30)
    planes = apply(hex4(), {"board": np.stack([red, blue], axis=1)}, which)["board"]
    signs = apply(hex4(colours="signs"), {"board": (red - blue).astype(np.float32)}, which)["board"]
    numbers = apply(hex4(colours="1/2"), {"board": (red + 2 * blue).astype(np.uint8)}, which)["board"]
    assert np.array_equal(signs, planes[:, 0] - planes[:, 1])
    assert np.array_equal(numbers, planes[:, 0] + 2 * planes[:, 1])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.bool_])
def test_the_plane_of_the_side_to_move_is_inverted_where_players_change_places(dtype):
    boards = np.zeros((2, 3, 3, 3), dtype)
    boards[1, 2] = 1
    for element, expected in enumerate([(0, 1), (0, 1), (1, 0), (1, 0)]):
        third = apply(hex4(), {"board": boards}, np.full(2, element))["board"][:, 2]
        assert [set(plane.ravel().tolist()) for plane in third] == [{expected[0]}, {expected[1]}]


def test_a_third_plane_that_is_kept_is_only_turned(rng):
    red = rng.integers(0, 2, (8, 4, 4))
    blue = (1 - red) * rng.integers(0, 2, (8, 4, 4))
    boards = np.stack([red, blue, 1 - red - blue], axis=1)
    turned = apply(hex4(third_plane="keep"), {"board": boards}, np.arange(8) % 4)["board"]
    assert np.array_equal(turned[:, 2], 1 - turned[:, 0] - turned[:, 1])
    assert not np.array_equal(turned[:, 2], boards[:, 2])


@pytest.mark.parametrize(
    ("colours", "players", "values", "before", "after"),
    [
        ("planes", "side", (), [0, 1], [1, 0]),
        ("mover", "side", (), [0, 1], [1, 0]),
        ("signs", "side", (), [1, -1], [-1, 1]),
        ("1/2", "side", (), [1, 2], [2, 1]),
        ("1/2", "side", (), [0, 2], [0, 1]),  # nobody's move, after the game
        ("planes", {"side": "signs"}, (), [1, -1], [-1, 1]),
        ("signs", {"side": "0/1"}, (), [0, 1], [1, 0]),
        ("planes", {"side": "1/2"}, (), [1.0, 2.0], [2.0, 1.0]),
        ("planes", "side", (), [False, True], [True, False]),
        ("planes", (), "side", [1.0, -0.5], [-1.0, 0.5]),
        ("planes", (), {"side": "0/1"}, [0.25, 1.0], [0.75, 0.0]),
        ("planes", (), {"side": "1/2"}, [2, 0], [1, 0]),
        ("planes", (), (), [1.0, -0.5], [1.0, -0.5]),  # seen from the side to move
    ],
)
def test_players_and_what_red_sees_are_exchanged_as_they_are_written(colours, players, values, before, after):
    shape = (8, 2, 3, 3) if colours in ("planes", "mover") else (8, 3, 3)
    names = {"boards": "b", "policies": (), "moves": (), "players": players, "values": values}
    augmentation = hex4(**names, colours=colours)
    columns = {"b": np.zeros(shape, np.int8), "side": np.array(before * 4)}
    turned = apply(augmentation, columns, np.repeat([0, 1, 2, 3], 2))["side"]
    assert turned.dtype == columns["side"].dtype
    assert turned.tolist() == [*before, *before, *after, *after]


# Names of columns


def test_columns_of_the_usual_names_need_not_be_named(rng):
    columns = {
        "board": rng.integers(0, 2, (12, 2, 4, 4)).astype(np.int8),
        "policy": rng.random((12, 16)),
        "move": rng.integers(-1, 16, 12).astype(np.int8),
        "player": rng.integers(0, 2, 12).astype(np.int8),
        "value": rng.random(12),
    }
    which = rng.integers(0, 4, 12)
    named = apply(hex4(boards="board", policies="policy", moves="move", players="player"), columns, which)
    for name, column in apply(augmentation_for("hex4"), columns, which).items():
        assert np.array_equal(column, named[name]), name
    assert np.array_equal(named["value"], columns["value"])
    turned = apply(augmentation_for("dihedral8"), columns, which)
    assert [name for name in columns if np.array_equal(turned[name], columns[name])] == ["player", "value"]


@pytest.mark.parametrize("column", ["last_move", "policies", "ply", "winner"])
@pytest.mark.parametrize("name", ["hex4", "dihedral8"])
def test_a_column_of_another_name_is_refused_until_all_kinds_are_named(name, column):
    columns = {"board": np.zeros((2, 2, 3, 3), np.int8), column: np.array([1, 5])}
    with refused(SpecError, repr(column), parameter="augmentation", column=column, remedy=f'{name}(boards="{column}"'):
        apply(augmentation_for(name), columns, np.array([2, 3]))
    all_named = {"hex4": hex4, "dihedral8": dihedral8}[name]
    settings = {"players": ()} if name == "hex4" else {}
    turned = apply(all_named(boards="board", policies=(), moves=(), **settings), columns, np.array([2, 3]))
    assert turned[column].tolist() == [1, 5]


BOARD = np.zeros((2, 2, 3, 3), np.int8)
WHOLE = np.zeros(2, np.int8)


@pytest.mark.parametrize(
    ("augmentation", "columns", "column", "named", "remedy"),
    [
        (dihedral8(), {"x": np.zeros((2, 7))}, None, "float64 [rows, 7]", 'boards="name"'),
        (hex4(), {"board": np.zeros((2, 3, 3))}, "board", "planes", "colours= says"),
        (dihedral8(boards=("a", "b")), {"a": BOARD, "b": np.zeros((2, 4, 4))}, "b", "3 x 3", "of one n"),
        (hex4(boards="bord"), {"board": BOARD}, "bord", "'bord'", "'board'"),
        (hex4(boards="a", policies="a"), {"a": BOARD}, "a", "named twice", True),
        (dihedral8(boards="x"), {"x": np.zeros((2, 7))}, None, "float64 [rows, 7]", "boards="),
        (dihedral8(boards="x"), {"x": np.zeros(2)}, None, "float64 [rows]", "boards="),
        (hex4(boards="x"), {"x": np.zeros((2, 4, 3, 3))}, "x", "[rows, 4, 3, 3]", "2 or 3 planes"),
        (hex4(boards="x", colours="signs"), {"x": np.zeros((2, 3, 3), np.uint8)}, "x", "uint8", "1/2"),
        (dihedral8(policies="p"), {"board": BOARD, "p": np.zeros((2, 11))}, "p", "3 x 3", "n * n + 1"),
        (dihedral8(boards=(), moves="m"), {"m": WHOLE}, None, "int8 [rows]", "boards="),
        (dihedral8(moves="m"), {"board": BOARD, "m": np.zeros(2)}, "m", "float64", "whole numbers"),
        (dihedral8(moves="m"), {"board": np.zeros((2, 13, 13)), "m": WHOLE}, "m", "int8", "whole numbers"),
        (hex4(players={"p": "signs"}), {"board": BOARD, "p": np.zeros(2, np.uint8)}, "p", "uint8", "0/1"),
    ],
)
def test_columns_that_cannot_be_what_they_are_named_are_refused(augmentation, columns, column, named, remedy):
    where = {"parameter": "augmentation", "augmentation": augmentation.name, "column": column}
    with refused(SpecError, named, remedy=remedy, **where):
        apply(augmentation, columns, np.array([1, 1]))


@pytest.mark.parametrize(
    ("augmentation", "columns", "column", "row", "named"),
    [
        (hex4(boards="b"), {"b": np.arange(54).reshape(2, 3, 3, 3)}, "b", 1, "third_plane="),
        (hex4(boards="b"), {"b": np.full((2, 3, 3, 3), 2)}, "b", 1, "third_plane="),
        (hex4(boards="b", players="p"), {"b": BOARD, "p": np.array([1, -1])}, "p", 1, " -1,"),
        (hex4(boards="b", players="p"), {"b": BOARD, "p": np.array([1, 0.5])}, "p", 1, " 0.5,"),
        (hex4(boards="b", values={"v": "0/1"}), {"b": BOARD, "v": np.array([1.0, -1])}, "v", 1, " -1.0,"),
    ],
)
def test_numbers_that_are_no_colours_are_refused_with_their_row(augmentation, columns, column, row, named):
    apply(augmentation, columns, np.array([0, 1]))  # where no colours change, they do not matter
    with refused(SpecError, named, parameter="augmentation", column=column, row=row, remedy="hex4("):
        apply(augmentation, columns, np.array([0, 2]))


@pytest.mark.parametrize(
    ("make", "parameter"),
    [
        (lambda: hex4(colours="rgb"), "colours"),
        (lambda: hex4(third_plane="flip"), "third_plane"),
        (lambda: hex4(players={"p": "a/b"}), "players"),
        (lambda: hex4(values=[1]), "values"),
        (lambda: dihedral8(boards=3), "boards"),
    ],
)
def test_settings_that_mean_nothing_are_refused_when_given(make, parameter):
    with refused(SpecError, parameter=parameter):
        make()


# Augmentations by name and by function


def doubled(columns, which):
    return {**columns, "x": columns["x"] * (1 + which).astype(columns["x"].dtype)}


@pytest.fixture
def registered():
    """A name that means `doubled`, for one test."""
    from batchwright.pool.augment import _augmentations

    register_augmentation("doubled", factor=2)(doubled)
    yield "doubled"
    del _augmentations._known["doubled"]


def test_a_registered_function_is_found_by_name_and_by_itself(registered):
    assert augmentation_for(registered) == Augmentation("doubled", 2, doubled)
    assert augmentation_for(doubled) == augmentation_for(registered)
    x = apply(augmentation_for(registered), {"x": np.array([3, 4])}, np.array([0, 1]))["x"]
    assert x.tolist() == [3, 8]


def test_none_is_no_augmentation_and_an_augmentation_is_itself():
    assert augmentation_for(None) is None
    mine = hex4(colours="signs")
    assert augmentation_for(mine) is mine


def test_a_callable_with_a_factor_is_an_augmentation():
    class Times:
        factor = 3

        def __call__(self, columns, which):
            return columns

    times = Times()
    found = augmentation_for(times)
    assert (found.factor, found.function) == (3, times)
    assert found.name.endswith("Times")


@pytest.mark.parametrize(
    ("given", "named", "remedy"),
    [
        (doubled, "'doubled'", "doubled.factor = 8"),
        (7, "augmentation=7", '"hex4"'),
        (np.zeros(3), "augmentation=array", '"hex4"'),
        ("hex5", "'hex5'", "'hex4'"),
        (Symmetry("hex4"), "'Symmetry'", ".factor = 8"),
    ],
)
def test_what_is_no_augmentation_is_refused(given, named, remedy):
    with refused(SpecError, named, parameter="augmentation", remedy=remedy):
        augmentation_for(given)


@pytest.mark.parametrize("factor", [0, -1, 2.0, True, "8"])
def test_a_factor_that_is_no_count_is_refused(factor):
    def wrong(columns, which):
        return columns

    wrong.factor = factor
    with refused(SpecError, repr(factor), parameter="augmentation", remedy=".factor = "):
        augmentation_for(wrong)


def test_a_factor_below_1_cannot_be_registered():
    with refused(SpecError, 0, parameter="factor"):
        register_augmentation("never", factor=0)(doubled)


def test_an_installed_package_offers_an_augmentation_by_name(tmp_path):
    (tmp_path / "mirroring.py").write_text(
        "from batchwright.pool.augment import register_augmentation\n\n"
        "@register_augmentation('mirror', factor=2)\ndef mirror(columns, which):\n    return columns\n"
    )
    about = tmp_path / "mirroring-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mirroring\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[batchwright.augmentations]\nmirror = mirroring\n")
    code = "from batchwright.pool.augment import augmentation_for; print(augmentation_for('mirror').factor)"
    path = os.pathsep.join([str(tmp_path), str(Path(batchwright.__file__).parents[1])])
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.stdout == "2\n", ran.stderr


def test_augmentations_travel_to_other_processes():
    for augmentation in (hex4(colours="signs", boards="b"), dihedral8()):
        assert pickle.loads(pickle.dumps(augmentation)) == augmentation
    local = Augmentation("local", 2, lambda columns, which: {"x": columns["x"] + which})
    back = pickle.loads(pickle.dumps(local))
    assert apply(back, {"x": np.array([1, 1])}, np.array([0, 1]))["x"].tolist() == [1, 2]


def test_the_name_of_a_symmetry_says_every_choice():
    assert (dihedral8().name, hex4().name) == ("dihedral8", "hex4")
    assert hex4(boards="b", colours="signs").name == "hex4(boards=('b',), colours='signs')"
    assert hex4(boards=["b"]) == hex4(boards="b")


# What a function may return


def applied(function, columns, which=(0, 1)):
    return apply(Augmentation("mine", 2, function), columns, np.array(which))


GIVEN = {"board": np.arange(8, dtype=np.int8).reshape(2, 2, 2), "value": np.ones(2, np.float32)}


@pytest.mark.parametrize(
    ("function", "column", "returned"),
    [
        (lambda c, w: {"board": c["board"]}, None, "board"),
        (lambda c, w: {**c, "more": w}, None, "board, value, more"),
        (lambda c, w: {**c, "board": c["board"][:1]}, "board", "int8 [1, 2, 2]"),
        (lambda c, w: {**c, "board": c["board"][:, :1]}, "board", "int8 [2, 1, 2]"),
        (lambda c, w: {**c, "board": c["board"] * 1.0}, "board", "float64 [2, 2, 2]"),
        (lambda c, w: {**c, "value": [1.0, 1.0]}, "value", "[1.0, 1.0]"),
        (lambda c, w: {**c, "value": np.array(1, "f4")}, "value", "float32 []"),
        (lambda c, w: None, None, "None"),
    ],
)
def test_columns_that_are_not_as_given_are_refused(function, column, returned):
    before = {name: array.copy() for name, array in GIVEN.items()}
    where = {"parameter": "augmentation", "augmentation": "mine", "column": column, "returned": returned}
    with refused(SpecError, **where) as caught:
        applied(function, GIVEN)
    if column is not None:
        assert caught.value.where["given"] == f"{GIVEN[column].dtype} {list(GIVEN[column].shape)}"
    assert all(np.array_equal(GIVEN[name], before[name]) for name in GIVEN)


def test_what_is_given_cannot_be_changed_in_place():
    board = np.zeros((2, 2, 2))

    def in_place(columns, which):
        columns["board"][0] = 1
        return columns

    with pytest.raises(ValueError, match="read-only") as caught:
        applied(in_place, {"board": board})
    assert caught.value.__notes__ == ["in augmentation 'mine', given 2 rows of read-only columns: board"]
    assert not board.any()
    assert board.flags.writeable


def test_what_a_function_raises_names_the_augmentation_and_the_rows():
    def broken(columns, which):
        return columns["bord"]

    with pytest.raises(KeyError, match="bord") as caught:
        apply(Augmentation("mine", 2, broken), GIVEN, np.array([0, 1]))
    assert caught.value.__notes__ == ["in augmentation 'mine', given 2 rows of read-only columns: board, value"]


def test_what_comes_back_can_be_written_and_is_in_c_order():
    def views(columns, which):
        return {"board": columns["board"][:, ::-1], "own": columns["own"].copy()[:, ::-1], "same": columns["same"]}

    columns = {name: np.arange(8).reshape(2, 2, 2) for name in ("own", "same", "board")}
    result = applied(views, columns)
    assert list(result) == ["own", "same", "board"]
    assert result["same"] is columns["same"]
    for array in result.values():
        assert array.flags.writeable
        assert array.flags.c_contiguous
    result["board"][:] = 9
    assert columns["board"].max() == 7
