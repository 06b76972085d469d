"""Augmentations: functions that make several entries of one position, such as the symmetries of a board.

An augmentation is a function `f(columns, which) -> columns` with a factor. `columns` are arrays whose first axis is
rows, `which` holds one number per row, from 0 to factor - 1: row i is transformed by element `which[i]`, and element 0
changes nothing. Names, shapes and dtypes stay, and the given arrays are read-only.

>>> @register_augmentation("mirror", factor=2)
... def mirror(columns, which):
...     boards = columns["board"]
...     return {**columns, "board": np.where(which[:, None, None] == 1, boards[:, :, ::-1], boards)}
>>> columns = {"board": np.array([[[1, 2], [3, 4]], [[1, 2], [3, 4]]])}
>>> apply(augmentation_for("mirror"), columns, np.array([0, 1]))["board"].tolist()
[[[1, 2], [3, 4]], [[2, 1], [4, 3]]]

Two come with the package: `dihedral8` for boards where every turn and mirror image is the same game (Go, Othello), and
`hex4` for Hex.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least, one_of
from batchwright.base.errors import SpecError
from batchwright.base.plugins import Registry, by_value
from batchwright.base.words import shortened
from batchwright.pool.symmetries import FACTORS, Symmetry

__all__ = ["dihedral8", "hex4", "register_augmentation"]

Columns = dict[str, NDArray[Any]]
Function = Callable[[Columns, NDArray[np.int64]], Any]
F = TypeVar("F", bound=Callable[..., Any])
Names = str | Iterable[str] | None
"""A column, several, () for none, or None for the one of the usual name, if it is there."""
Written = Literal["signs", "0/1", "1/2"]
"""The encodings of red and blue in a column: 1 and -1, 0 and 1 (or a chance between them), 1 and 2."""
Encoded = Names | Mapping[str, Written]
Colours = Literal["planes", "signs", "1/2", "mover"]
ThirdPlane = Literal["to_move", "keep"]


@dataclass(frozen=True, slots=True)
class Augmentation:
    """A function of columns with its name and its factor: the number of entries that each position gives."""

    name: str
    factor: int
    function: Function

    def __post_init__(self) -> None:
        at_least(1, factor=self.factor)

    def __reduce__(self) -> tuple[Any, ...]:
        return by_value(Augmentation, self.name, self.factor, function=self.function)


_augmentations: Registry[Augmentation] = Registry("augmentation", group="batchwright.augmentations")


def register_augmentation(name: str, factor: int) -> Callable[[F], F]:
    """Make a function `f(columns, which) -> columns` an augmentation with `factor` variants: `augmentation=name` means
    it."""

    def register(function: F) -> F:
        _augmentations.add(name, Augmentation(name, factor, function))
        return function

    return register


def augmentation_for(given: Any) -> Augmentation | None:
    """Return the augmentation that is given: a registered name, an `Augmentation`, or a function with an int `.factor`.

    >>> augmentation_for("hex4").factor, augmentation_for(hex4).factor, augmentation_for(None)
    (4, 4, None)
    """
    if given is None or isinstance(given, Augmentation):
        return given
    if given is dihedral8 or given is hex4:
        given = given.__name__
    if isinstance(given, str):
        return _augmentations.get(given)
    if not callable(given):
        what = f"augmentation={shortened(given, 60)} is neither a name nor a function"
        remedy = '"hex4", "dihedral8", or a function f(columns, which) -> columns with an int .factor'
        raise SpecError(what, parameter="augmentation", remedy=remedy)
    registered = next((known for known in _augmentations.known() if known.function is given), None)
    return registered or _with_its_factor(given)


def _with_its_factor(function: Any) -> Augmentation:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    factor = getattr(function, "factor", None)
    if not isinstance(factor, int | np.integer) or isinstance(factor, bool) or factor < 1:
        raise SpecError(
            f"augmentation {name!r} has no factor of 1 or more, got {shortened(factor, 60)}: how many entries does a "
            "position give?",
            parameter="augmentation",
            remedy=f"{name}.factor = 8, or @register_augmentation({name!r}, factor=8) above it",
        )
    return Augmentation(name, int(factor), function)


def apply(augmentation: Augmentation, columns: Mapping[str, NDArray[Any]], which: NDArray[np.int64]) -> Columns:
    """The columns of these rows, row i transformed by element `which[i]`: arrays that can be written, in C order.

    The result is checked: same columns, same shapes, same dtypes. The function sees the given arrays read-only.
    """
    seen = {name: _read_only(array) for name, array in columns.items()}
    try:
        result = augmentation.function(dict(seen), _read_only(which))
    except Exception as error:
        names = ", ".join(seen)
        error.add_note(f"in augmentation {augmentation.name!r}, given {len(which)} rows of read-only columns: {names}")
        raise
    if not isinstance(result, Mapping) or result.keys() != seen.keys():
        raise SpecError(
            f"augmentation {augmentation.name!r} did not return the columns that it was given",
            parameter="augmentation",
            augmentation=augmentation.name,
            given=", ".join(seen),
            returned=", ".join(map(str, result)) if isinstance(result, Mapping) else shortened(result, 60),
            remedy="{**columns, 'board': turned}; add or leave out columns with transform= instead",
        )
    return {name: _checked(augmentation, name, columns[name], seen[name], result[name]) for name in seen}


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def _checked(augmentation: Augmentation, name: str, given: NDArray[Any], seen: NDArray[Any], got: Any) -> NDArray[Any]:
    """A column that was returned, as an array that the caller may write."""
    if got is seen:
        return given
    if not isinstance(got, np.ndarray) or got.shape != given.shape or got.dtype != given.dtype:
        raise SpecError(
            f"augmentation {augmentation.name!r} changed the shape or the dtype of column {name!r}",
            parameter="augmentation",
            augmentation=augmentation.name,
            column=name,
            given=_type_of(given),
            returned=_type_of(got),
            remedy="a NumPy array of the same shape and dtype: only transform= may change them",
        )
    if not got.flags.writeable:
        got = got.copy()
    # Views of the given arrays cannot be written, and frameworks take no arrays with negative strides.
    return np.ascontiguousarray(got)


def _type_of(column: Any) -> str:
    if not isinstance(column, np.ndarray):
        return shortened(column, 60)
    return f"{column.dtype} {list(column.shape)}"


# The augmentations of the package


def dihedral8(boards: Names = None, moves: Names = None, policies: Names = None) -> Augmentation:
    """The 8 symmetries of a square board, for games that no turn or mirror changes: Go, Othello, tic-tac-toe.

    Element e < 4 is e quarter turns counter-clockwise, `np.rot90(board, e)`; element 4 + e mirrors left and right
    first, `np.rot90(np.fliplr(board), e)`. Element 4s + a and then 4t + b are together 4(s xor t) + c, with
    c = (b + a) mod 4 where t is 0 and (b - a) mod 4 where it is 1. The inverse of a < 4 is (4 - a) mod 4; each of
    4 to 7 is its own.

    `boards`      [rows, ..., n, n], or a last axis of n * n: turned
    `policies`    a last axis of n * n, or n * n + 1 with the pass move last, or [rows, ..., n, n]: each number
                  stays with its cell, and the pass where it is
    `moves`       cell numbers from 0 to n * n - 1, counted along the board's rows: the cell's new number; others
                  (-1, the pass) stay

    Each is a name, several, or () for none. Where all three are given, other columns stay. A kind that is not given is
    the column `board`, `policy` or `move`, if there is one, and then no other columns may be there but `value` and
    `player`: one that had to be turned and was not would make false positions.

    >>> columns = {"board": np.array([[[1, 2], [3, 4]]]), "move": np.array([1])}      # a move to where the 2 is
    >>> turned = apply(dihedral8(), columns, np.array([1]))
    >>> turned["board"].tolist(), turned["move"].tolist()
    ([[[2, 4], [1, 3]]], [0])
    """
    return _augmentation(Symmetry("dihedral8", _names(boards=boards), _names(moves=moves), _names(policies=policies)))


def hex4(
    boards: Names = None,
    moves: Names = None,
    policies: Names = None,
    players: Encoded = None,
    values: Encoded = (),
    colours: Colours = "planes",
    third_plane: ThirdPlane = "to_move",
) -> Augmentation:
    """The 4 symmetries of Hex. Two of them exchange the players: red's sides of the board come to be blue's.

    0 nothing; 1 half a turn; 2 the mirror image in the main diagonal, `board.T`; 3 that in the other diagonal.
    Elements 2 and 3 carry red's two sides onto blue's, so they are symmetries of the game only with the colours
    exchanged. Element a and then b are together element a xor b; each is its own inverse. It makes no difference
    which colour is called red, which pair of sides it connects, nor to which side the rows of cells are shifted.

    `boards`, `policies` and `moves` are named and turned as in `dihedral8`. Elements 2 and 3 exchange colours besides:

    `colours`     how boards tell red from blue. "planes": [rows, 2 or 3, n, n], planes 0 and 1 change places;
                  "signs": 1 and -1, the sign changes; "1/2": 1 and 2 change places, other numbers stay; "mover": mine
                  and theirs, no stone changes, for the side to move is the same player under another colour
    `third_plane` of boards with 3 planes (colours "planes" or "mover"). "to_move": all 0 or all 1, the colour to move:
                  inverted, and refused where it is neither; "keep": only turned (say, which cells are empty)
    `players`     whose move it is, by colour: exchanged. Encoded like the stones ("planes" and "mover": 0 and 1),
                  unless given as {"column": "signs", "0/1" or "1/2"}. If not given, it is the column `player`
    `values`      what is seen from red: the sign changes; or {"column": "0/1"} for the chance that red wins, which
                  becomes 1 - value, and {"column": "1/2"} for the number of the winner

    A value from the view of the side to move stays: under its other colour that side is as well off as before. So
    does each value that `values` does not name.

    Where neither a plane nor a column says who is to move, a network must count stones: elements 2 and 3 then look like
    a game that blue began.

    >>> red, blue = [[1, 0], [1, 0]], [[0, 1], [0, 0]]                    # red has won, from top to bottom
    >>> columns = {"board": np.array([[red, blue]]), "player": np.array([1]), "value": np.array([-1.0])}
    >>> seen = apply(hex4(), columns, np.array([2]))                      # now blue has, from left to right
    >>> seen["board"].tolist(), seen["player"].tolist(), seen["value"].tolist()
    ([[[[0, 0], [1, 0]], [[1, 1], [0, 0]]]], [0], [-1.0])
    """
    one_of(get_args(Colours), colours=colours)
    one_of(get_args(ThirdPlane), third_plane=third_plane)
    symmetry = Symmetry(
        "hex4",
        _names(boards=boards),
        _names(moves=moves),
        _names(policies=policies),
        _encodings(players=players),
        _encodings(values=values) or (),
        colours,
        third_plane,
    )
    return _augmentation(symmetry)


def _augmentation(symmetry: Symmetry) -> Augmentation:
    return Augmentation(symmetry.name, FACTORS[symmetry.group], symmetry)


def _names(**parameter: Any) -> tuple[str, ...] | None:
    """The one named parameter as names of columns."""
    ((called, given),) = parameter.items()
    if given is None:
        return None
    names = (given,)
    if not isinstance(given, str) and isinstance(given, Iterable):
        names = tuple(given)
    if not all(isinstance(name, str) for name in names):
        what, remedy = "does not name columns", f'{called}="name", or ("one", "other"), or () for none'
        raise SpecError(f"{called}={shortened(given, 60)} {what}", parameter=called, remedy=remedy)
    return names


def _encodings(**parameter: Any) -> tuple[tuple[str, str], ...] | None:
    """The one named parameter as (column, encoding, or "" for the usual one)."""
    ((called, given),) = parameter.items()
    if not isinstance(given, Mapping):
        names = _names(**parameter)
        if names is None:
            return None
        return tuple((name, "") for name in names)
    for how in given.values():
        one_of(get_args(Written), **{called: how})
    return tuple(given.items())


_augmentations.add("dihedral8", dihedral8())
_augmentations.add("hex4", hex4())
