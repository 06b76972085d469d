"""Symmetries of a square board, applied to batches of columns: boards, policies, moves and players' colours."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, fields
from functools import lru_cache
from math import isqrt
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.base.words import suggest
from batchwright.columns.shard import Column

Columns = dict[str, NDArray[Any]]

FACTORS = {"dihedral8": 8, "hex4": 4}
_EXCHANGING = {"dihedral8": (), "hex4": (2, 3)}
"""The elements that exchange the players."""


class Role(NamedTuple):
    """The role of a column in a symmetry."""

    kind: Literal["board", "policy", "move", "player", "value"]
    written: str = ""
    """The encoding of a player or a value: "signs", "0/1" or "1/2"."""


@dataclass(frozen=True, slots=True)
class Symmetry:
    """A function `f(columns, which) -> columns`. A kind of column that is None has its usual name, if it is there."""

    group: str
    boards: tuple[str, ...] | None = None
    moves: tuple[str, ...] | None = None
    policies: tuple[str, ...] | None = None
    players: tuple[tuple[str, str], ...] | None = ()
    """(column, how it is encoded, or "" for: like the stones)."""
    values: tuple[tuple[str, str], ...] = ()
    colours: str = "none"
    third_plane: str = "keep"

    @property
    def name(self) -> str:
        """The group with every setting that is not the usual one: symmetries of one name do the same.

        >>> Symmetry("dihedral8").name, Symmetry("dihedral8", moves=("m",)).name
        ('dihedral8', "dihedral8(moves=('m',))")
        """
        names = [field.name for field in fields(self)][1:]
        settings = [(name, getattr(self, name)) for name in names]
        chosen = [f"{name}={value!r}" for name, value in settings if value != getattr(_USUAL[self.group], name)]
        if not chosen:
            return self.group
        return f"{self.group}({', '.join(chosen)})"

    def __call__(self, columns: Columns, which: NDArray[np.int64]) -> Columns:
        schema = tuple((name, Column(array.dtype, array.shape[1:])) for name, array in columns.items())
        n, roles = _roles(self, schema)
        rows_of = [np.flatnonzero(which == element) for element in range(FACTORS[self.group])]
        changed = dict(columns)
        for name, role in roles.items():
            match role.kind:
                case "move":
                    changed[name] = _moved(columns[name], which, _destinations(self.group, n))
                case "player" | "value":
                    changed[name] = self._exchanged(name, columns[name], role, rows_of)
                case _:
                    changed[name] = self._turned(name, columns[name], role, n, rows_of)
        return changed

    def _turned(
        self, name: str, column: NDArray[Any], role: Role, n: int, rows_of: list[NDArray[np.intp]]
    ) -> NDArray[Any]:
        """Boards or policies. One gather for each element: twice as fast as an index for each item of each row."""
        cells = n * n
        num_items = int(np.prod(column.shape[1:], dtype=np.int64))
        has_pass = role.kind == "policy" and column.shape[-1] == cells + 1
        exchanges_planes = role.kind == "board" and self.colours == "planes"
        sources = _sources(self.group, n, has_pass, num_items // (cells + has_pass), exchanges_planes)
        flat = column.reshape(len(column), num_items)
        turned = np.empty(flat.shape, flat.dtype)
        for element, rows in enumerate(rows_of):
            block = flat[rows]
            if element:
                block = block.take(sources[element], axis=1)
            if role.kind == "board" and element in _EXCHANGING[self.group]:
                block = self._recoloured(name, block, column.shape[1:], rows)
            turned[rows] = block
        return turned.reshape(column.shape)

    def _recoloured(
        self, name: str, block: NDArray[Any], shape: tuple[int, ...], rows: NDArray[np.intp]
    ) -> NDArray[Any]:
        """Flat, turned boards whose first two planes are exchanged, with every other trace of a colour exchanged."""
        if self.colours in ("signs", "1/2"):
            return _other_colour(block, self.colours)
        if len(shape) == 3 and shape[0] == 3 and self.third_plane == "to_move":
            plane = block[:, 2 * block.shape[1] // 3 :]
            first = plane[:, :1]
            bad = np.flatnonzero(((plane != first) | ((first != 0) & (first != 1))).any(axis=1))
            if bad.size:
                self.refuse(
                    f"the third plane of column {name!r} does not say who is to move: it is not all 0 or all 1",
                    name,
                    'hex4(third_plane="keep") where it says something else, such as which cells are empty',
                    row=int(rows[bad[0]]),
                )
            plane[...] = _other_colour(plane, "0/1")
        return block

    def _exchanged(self, name: str, column: NDArray[Any], role: Role, rows_of: list[NDArray[np.intp]]) -> NDArray[Any]:
        """Players or values, seen by the other player if the element exchanges the two."""
        rows = np.concatenate([rows_of[element] for element in _EXCHANGING[self.group]])
        before = column[rows]
        bad = np.argwhere(_is_encoded_otherwise(before, role))
        if bad.size:
            self.refuse(
                f"column {name!r} has {before[tuple(bad[0])]}, which is not written as {role.written!r}",
                name,
                f'hex4({role.kind}s={{"{name}": ...}}) with "signs", "0/1" or "1/2": the way it is written',
                row=int(rows[bad[0][0]]),
            )
        changed = column.copy()
        changed[rows] = _other_colour(before, role.written)
        return changed

    def refuse(self, what: str, column: str | None, remedy: str, **where: Any) -> NoReturn:
        where = {"parameter": "augmentation", "augmentation": self.name, "column": column} | where
        raise SpecError(f"{self.name}: {what}", **where, remedy=remedy)


_USUAL = {
    "dihedral8": Symmetry("dihedral8"),
    "hex4": Symmetry("hex4", players=None, colours="planes", third_plane="to_move"),
}
"""Each symmetry under its plain name."""


def _is_encoded_otherwise(numbers: NDArray[Any], role: Role) -> NDArray[np.bool_]:
    """The numbers that encode no player, or are outside the range of a value."""
    is_scale_free = role.kind == "value" and role.written == "signs"
    if numbers.dtype.kind == "b" or is_scale_free:
        return np.zeros(numbers.shape, np.bool_)
    low, high = {"signs": (-1, 1), "0/1": (0, 1), "1/2": (0, 2)}[role.written]
    outside: NDArray[np.bool_] = (numbers < low) | (numbers > high)
    if role.kind == "player":
        outside |= numbers % 1 != 0
    return outside


def _other_colour(numbers: NDArray[Any], written: str) -> NDArray[Any]:
    """Red as blue and blue as red. Numbers that are neither stay.

    >>> _other_colour(np.array([0, 1, 2, 3]), "1/2").tolist()
    [0, 2, 1, 3]
    """
    if numbers.dtype.kind == "b":
        return ~numbers
    if written == "signs":
        return -numbers
    if written == "0/1":
        return 1 - numbers
    return np.where((numbers == 1) | (numbers == 2), 3 - numbers, numbers)


def _moved(column: NDArray[Any], which: NDArray[np.int64], destinations: NDArray[np.intp]) -> NDArray[Any]:
    """Moves (cell numbers) on the turned board. Other numbers, such as -1 and the pass, stay."""
    on_board = (column >= 0) & (column < destinations.shape[1])
    element = np.broadcast_to(which.reshape(-1, *[1] * (column.ndim - 1)), column.shape)
    moved = column.copy()
    moved[on_board] = destinations[element[on_board], column[on_board]]
    return moved


# Tables


def _grids(group: str, n: int) -> list[NDArray[np.intp]]:
    """The board that each element makes of numbered cells, with the source of each cell."""
    cells = np.arange(n * n, dtype=np.intp).reshape(n, n)
    if group == "dihedral8":
        return [np.rot90(board, turns) for board in (cells, cells[:, ::-1]) for turns in range(4)]
    half_turn = cells[::-1, ::-1]
    return [cells, half_turn, cells.T, half_turn.T]


@lru_cache(maxsize=64)
def _sources(group: str, n: int, has_pass: bool, num_planes: int, exchanges_planes: bool) -> NDArray[np.intp]:
    """[element, item]: the item of a row that takes this place; a row has `num_planes` boards or policies."""
    tables = []
    for element, grid in enumerate(_grids(group, n)):
        cells = grid.ravel()
        if has_pass:
            cells = np.append(cells, n * n)  # the pass move comes from itself
        planes = np.arange(num_planes)
        if exchanges_planes and element in _EXCHANGING[group]:
            planes[:2] = 1, 0
        tables.append((planes[:, None] * len(cells) + cells).ravel())
    return np.stack(tables)


@lru_cache(maxsize=64)
def _destinations(group: str, n: int) -> NDArray[np.intp]:
    """[element, cell]: where a stone on this cell goes: the inverse of where cells come from."""
    return np.argsort(_sources(group, n, False, 1, False), axis=1)


# Columns and their roles


_TYPES = {
    "board": "[rows, ..., n, n] or [rows, ..., n * n], of one n for all; with 2 or 3 planes unless colours= says how "
    'numbers tell red from blue: "signs" (1 and -1) or "1/2"',
    "policy": "a last axis of n * n, or n * n + 1 with the pass move last, or [rows, ..., n, n]",
    "move": "whole numbers that hold n * n - 1",
    "player": 'numbers that can be written so; "0/1" and "1/2" need no sign',
    "value": 'numbers that can be written so; "0/1" and "1/2" need no sign',
}
"""The required form of a column of each kind."""


@lru_cache(maxsize=64)
def _roles(symmetry: Symmetry, schema: tuple[tuple[str, Column], ...]) -> tuple[int, dict[str, Role]]:
    """(n, the role of each column that a symmetry changes). Raises if names are missing or do not fit."""
    return _Assignment(symmetry, dict(schema)).roles()


class _Assignment(NamedTuple):
    """The roles of columns, as named or under their usual names, checked against their types."""

    asked: Symmetry
    schema: dict[str, Column]

    def roles(self) -> tuple[int, dict[str, Role]]:
        named = self._named()
        roles = dict(named)
        for name, role in named:
            if name not in self.schema:
                self._refuse(f"there is no column {name!r}", name, repr(suggest(name, self.schema) or [*self.schema]))
            if roles[name] != role:
                self._refuse(f"column {name!r} is named twice", name, "each column once, as what it is")
        n = next((self._size(name) for name, role in named if role.kind in ("board", "policy")), 0)
        if not n:
            self._refuse("no column is a board of n x n cells", None, self._call("name"))
        for name, role in named:
            if not self._fits(self.schema[name], role, n):
                type_, as_what = self._type_of(name), f"a {role.kind} of {n} x {n} cells {role.written}".rstrip()
                self._refuse(f"column {name!r} is {type_}, which cannot be {as_what}", name, _TYPES[role.kind])
        asked = self.asked
        if None in (asked.boards, asked.policies, asked.moves, asked.players):
            self._refuse_unnamed(self.schema.keys() - roles.keys() - {"player", "value"})
        return n, roles

    def _refuse_unnamed(self, others: Set[str]) -> None:
        if others:
            name = min(others)  # it may have to change, too: only the user knows
            self._refuse(f"column {name!r}, {self._type_of(name)}, is not named", name, self._call(name))

    def _named(self) -> list[tuple[str, Role]]:
        """Every column that is named, or has its usual name. Boards and policies come first."""
        asked = self.asked
        like_stones = asked.colours
        if like_stones not in ("signs", "1/2"):
            like_stones = "0/1"
        players = asked.players
        if players is None:
            players = tuple((name, "") for name in self.schema if name == "player")
        return [
            *self._with_role(Role("board", asked.colours), asked.boards),
            *self._with_role(Role("policy"), asked.policies),
            *self._with_role(Role("move"), asked.moves),
            *((name, Role("player", how or like_stones)) for name, how in players),
            *((name, Role("value", how or "signs")) for name, how in asked.values),
        ]

    def _with_role(self, role: Role, given: Iterable[str] | None) -> list[tuple[str, Role]]:
        """The columns that are named, or the one of the usual name."""
        if given is None:
            given = self.schema.keys() & {role.kind}
        return [(name, role) for name in given]

    def _size(self, name: str) -> int:
        """The n of [..., n, n], of a last axis of n * n items, or of one more. 0 if the shape has none."""
        shape = (0, 0, *self.schema[name].shape)
        if shape[-1] == shape[-2]:
            return shape[-1]
        n = isqrt(shape[-1])
        return n * (shape[-1] in (n * n, n * n + 1))

    def _fits(self, column: Column, role: Role, n: int) -> bool:
        """Whether a column fits the role of its name."""
        dtype, shape = column.dtype, column.shape
        fits = dtype.kind not in {"signs": "ub", "1/2": "b"}.get(role.written, "")
        match role.kind:
            case "board":
                has_planes = len(shape) == 3 and shape[0] in (2, 3)
                fits &= shape[-2:] == (n, n) or shape[-1:] == (n * n,)
                fits &= has_planes or role.written != "planes"
            case "policy":
                fits &= shape[-2:] == (n, n) or shape[-1:] in ((n * n,), (n * n + 1,))
            case "move":
                fits &= dtype.kind in "iu" and np.iinfo(dtype).max >= n * n - 1
        return fits

    def _call(self, name: str) -> str:
        kinds = ["boards", "policies", "moves"]
        if _EXCHANGING[self.asked.group]:
            kinds.append("players")
        settings = ", ".join(f'{kind}="{name}"' for kind in kinds)
        return f"{self.asked.group}({settings}), each a name, several, or () for none: when all are given, others stay"

    def _refuse(self, what: str, column: str | None, remedy: str) -> NoReturn:
        self.asked.refuse(
            what, column, remedy, columns="\n".join(f"{name} {self._type_of(name)}" for name in self.schema)
        )

    def _type_of(self, name: str) -> str:
        dtype, shape = self.schema[name].dtype, self.schema[name].shape
        return f"{dtype} [{', '.join(['rows', *map(str, shape)])}]"
