"""Turn and mirror boards with all that belongs to them: policies, moves, and where the players change places, colours.

Which column is what is said by name, or found by shape where it can only be one thing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import isqrt
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.base.words import suggest

__all__ = ["FACTORS", "Symmetry"]

Columns = dict[str, NDArray[Any]]

FACTORS = {"dihedral8": 8, "hex4": 4}
_EXCHANGING = {"dihedral8": (), "hex4": (2, 3)}
"""The elements that exchange the players."""

_USUAL: dict[str, dict[str, Any]] = {
    "dihedral8": {},
    "hex4": {"players": None, "colours": "planes", "third_plane": "to_move"},
}
"""What a symmetry is asked for under its plain name, where that is not the default."""

_MOVE_NAMES = ("move", "last_move", "best_move", "action")
_POLICY_NAMES = ("policy", "visits", "legal", "legal_moves")
_PLAYER_NAMES = ("player", "to_move", "side_to_move", "turn")
_PLAIN_NAMES = ("value", "ply", "move_number", "game", "game_id", "id", "weight")
"""Numbers that no symmetry changes; a value is taken to be from the view of the side to move."""
_OUTCOME_NAMES = ("winner", "result", "outcome")
_COLOUR_NAMES = (*_PLAYER_NAMES, *_OUTCOME_NAMES)
"""Numbers about colours: they stay where colours do."""


class Role(NamedTuple):
    """What a column is to a symmetry."""

    kind: Literal["board", "policy", "move", "player", "value"]
    n: int = 0
    """The board has n x n cells."""
    written: str = ""
    """How a player or value is written: "signs", "0/1" or "1/2"."""


@dataclass(frozen=True, slots=True)
class Symmetry:
    """A function `f(columns, which) -> columns`. None for columns means: find them."""

    group: str
    boards: tuple[str, ...] | None = None
    moves: tuple[str, ...] | None = None
    policies: tuple[str, ...] | None = None
    players: tuple[tuple[str, str], ...] | None = ()
    """(column, how it is written, or "" for: like the stones)."""
    values: tuple[tuple[str, str], ...] = ()
    colours: str = "none"
    third_plane: str = "keep"

    @property
    def name(self) -> str:
        """Says every choice, so that two of one name do the same.

        >>> Symmetry("dihedral8").name, Symmetry("dihedral8", moves=("m",)).name
        ('dihedral8', "dihedral8(moves=('m',))")
        """
        usual = {"group": self.group, **_USUAL[self.group]}
        choices = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen = [f"{name}={value!r}" for name, value in choices.items() if value != usual.get(name, _DEFAULTS[name])]
        return f"{self.group}({', '.join(chosen)})" if chosen else self.group

    def __call__(self, columns: Columns, which: NDArray[np.int64]) -> Columns:
        roles = _roles(self, tuple((name, array.dtype, array.shape[1:]) for name, array in columns.items()))
        rows_of = [np.flatnonzero(which == element) for element in range(FACTORS[self.group])]
        changed = dict(columns)
        for name, role in roles.items():
            if role.kind == "move":
                changed[name] = _moved(columns[name], which, _destinations(self.group, role.n))
            elif role.kind in ("player", "value"):
                changed[name] = self._seen_by_the_other(name, columns[name], role, rows_of)
            else:
                changed[name] = self._turned(name, columns[name], role, rows_of)
        return changed

    def _turned(self, name: str, column: NDArray[Any], role: Role, rows_of: list[NDArray[np.intp]]) -> NDArray[Any]:
        """Boards or policies. One gather for each element: twice as fast as an index for each item of each row."""
        cells = role.n * role.n
        num_items = int(np.prod(column.shape[1:], dtype=np.int64))
        has_pass = role.kind == "policy" and column.shape[-1] == cells + 1
        exchanges_planes = role.kind == "board" and self.colours == "planes"
        sources = _sources(self.group, role.n, has_pass, num_items // (cells + has_pass), exchanges_planes)
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
        """Boards (flat, turned, their first two planes exchanged) with what else says a colour exchanged."""
        if self.colours in ("signs", "1/2"):
            return _exchange(block, self.colours)
        if len(shape) == 3 and shape[0] == 3 and self.third_plane == "to_move":
            plane = block[:, 2 * block.shape[1] // 3 :]
            first = plane[:, :1]
            bad = np.flatnonzero(((plane != first) | ((first != 0) & (first != 1))).any(axis=1))
            if bad.size:
                raise SpecError(
                    f"{self.name}: the third plane of column {name!r} does not say who is to move: "
                    "it is not all 0 or all 1",
                    parameter="augmentation",
                    augmentation=self.name,
                    column=name,
                    row=int(rows[bad[0]]),
                    remedy='hex4(third_plane="keep") where it says something else, such as which cells are empty',
                )
            plane[...] = _exchange(plane, "0/1")
        return block

    def _seen_by_the_other(
        self, name: str, column: NDArray[Any], role: Role, rows_of: list[NDArray[np.intp]]
    ) -> NDArray[Any]:
        rows = np.concatenate([rows_of[element] for element in _EXCHANGING[self.group]])
        before = column[rows]
        bad = np.argwhere(_is_written_otherwise(before, role))
        if bad.size:
            raise SpecError(
                f"{self.name}: column {name!r} has {before[tuple(bad[0])]}, which is not written as {role.written!r}",
                parameter="augmentation",
                augmentation=self.name,
                column=name,
                row=int(rows[bad[0][0]]),
                remedy=f'hex4({role.kind}s={{"{name}": ...}}) with "signs", "0/1" or "1/2": the way it is written',
            )
        changed = column.copy()
        changed[rows] = _exchange(before, role.written)
        return changed


_DEFAULTS = {field.name: field.default for field in fields(Symmetry)}


def _is_written_otherwise(numbers: NDArray[Any], role: Role) -> NDArray[np.bool_]:
    """Which numbers are no player's, or outside what a value can be."""
    if numbers.dtype.kind == "b":
        return np.zeros(numbers.shape, np.bool_)
    low, high = {"signs": (-1, 1), "0/1": (0, 1), "1/2": (0, 2)}[role.written]
    outside: NDArray[np.bool_] = (numbers < low) | (numbers > high)
    if role.kind == "player":
        outside |= numbers % 1 != 0
    elif role.written == "signs":  # values have any scale there
        outside[...] = False
    return outside


def _exchange(numbers: NDArray[Any], written: str) -> NDArray[Any]:
    """Red as blue and blue as red. What is neither stays.

    >>> _exchange(np.array([0, 1, 2, 3]), "1/2").tolist()
    [0, 2, 1, 3]
    """
    result: NDArray[Any]
    if numbers.dtype.kind == "b":
        result = ~numbers
    elif written == "signs":
        result = -numbers
    elif written == "0/1":
        result = 1 - numbers
    else:
        result = np.where((numbers == 1) | (numbers == 2), 3 - numbers, numbers)
    return result


def _moved(column: NDArray[Any], which: NDArray[np.int64], destinations: NDArray[np.intp]) -> NDArray[Any]:
    """Moves (cell numbers) as they are on the turned board. Other numbers, such as -1 and the pass, stay."""
    on_board = (column >= 0) & (column < destinations.shape[1])
    element = np.broadcast_to(which.reshape(-1, *[1] * (column.ndim - 1)), column.shape)
    moved = column.copy()
    moved[on_board] = destinations[element[on_board], column[on_board]]
    return moved


# Tables


def _grids(group: str, n: int) -> list[NDArray[np.intp]]:
    """For each element what it makes of a board whose cells are numbered: where each cell comes from."""
    cells = np.arange(n * n, dtype=np.intp).reshape(n, n)
    if group == "dihedral8":
        return [np.rot90(cells[:, ::-1] if element >= 4 else cells, element % 4) for element in range(8)]
    half_turn = cells[::-1, ::-1]
    return [cells, half_turn, cells.T, half_turn.T]


@lru_cache(maxsize=64)
def _sources(group: str, n: int, has_pass: bool, num_planes: int, exchanges_planes: bool) -> NDArray[np.intp]:
    """[element, item]: the item of a row that comes to be this one, for so many boards or policies in a row."""
    tables = []
    for element, grid in enumerate(_grids(group, n)):
        cells = np.append(grid, n * n) if has_pass else grid.ravel()  # the pass move comes from itself
        planes = np.arange(num_planes)
        if exchanges_planes and element in _EXCHANGING[group]:
            planes[:2] = 1, 0
        tables.append((planes[:, None] * len(cells) + cells).ravel())
    return np.stack(tables)


@lru_cache(maxsize=64)
def _destinations(group: str, n: int) -> NDArray[np.intp]:
    """[element, cell]: where a stone on this cell goes: the inverse of where cells come from."""
    return np.argsort(_sources(group, n, False, 1, False), axis=1)


# Which column is what


@lru_cache(maxsize=64)
def _roles(symmetry: Symmetry, schema: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> dict[str, Role]:
    """What each column is that a symmetry changes. Raises where that is not clear."""
    return _Finder(symmetry, schema).roles()


class _Finder:
    """Says what each column is: as named, else by its shape; where it can be two things it refuses to guess."""

    def __init__(self, symmetry: Symmetry, schema: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> None:
        self.asked = symmetry
        self.schema = {name: (dtype, shape) for name, dtype, shape in schema}
        self.has_colours = bool(_EXCHANGING[symmetry.group])
        self.like_stones = symmetry.colours if symmetry.colours in ("signs", "1/2") else "0/1"
        self.named = [
            *(symmetry.boards or ()),
            *(symmetry.moves or ()),
            *(symmetry.policies or ()),
            *(name for name, _ in symmetry.players or ()),
            *(name for name, _ in symmetry.values),
        ]

    def roles(self) -> dict[str, Role]:
        self._check_names()
        asked = self.asked
        boards = self._boards() if asked.boards is None else asked.boards
        n = self._board_size(boards)
        roles = {name: Role("board", n) for name in boards}
        roles |= {name: Role("policy", n) for name in asked.policies or ()}
        roles |= {name: Role("move", n) for name in asked.moves or ()}
        roles |= {name: Role("player", written=how or self.like_stones) for name, how in asked.players or ()}
        roles |= {name: Role("value", written=how or "signs") for name, how in asked.values}
        roles |= {name: role for name in self.schema if name not in roles and (role := self._guessed(name, n))}
        for name, role in roles.items():
            self._check(name, role)
        return roles

    def _check_names(self) -> None:
        for name in self.named:
            if name not in self.schema:
                near = suggest(name, self.schema)
                self._refuse(
                    f"there is no column {name!r}", name, repr(near) if near else "one of the columns there are"
                )
            if self.named.count(name) > 1:
                self._refuse(f"column {name!r} is named twice", name, "each column once, as what it is")

    def _boards(self) -> tuple[str, ...]:
        """Columns that can only be boards."""
        group, needs_planes = self.asked.group, self.asked.colours == "planes"
        square = [name for name, (_, shape) in self.schema.items() if _is_square(shape) and name not in self.named]
        found = [name for name in square if not needs_planes or _has_colour_planes(self.schema[name][1])]
        if not found and (self.has_colours or not self.asked.policies):
            shape = "[rows, 2 or 3, n, n]" if needs_planes else "[rows, ..., n, n]"
            more = ', colours="signs" or "1/2"' if needs_planes else ""
            self._refuse(f"no column has boards {shape}", None, f'{group}(boards="name"{more}), or boards=() for none')
        if self.has_colours and not needs_planes and len(found) > 1:
            self._refuse(f"{' or '.join(found)} can be the board", found[0], f'{group}(boards="{found[0]}", ...)')
        return tuple(found)

    def _board_size(self, boards: tuple[str, ...]) -> int:
        """n, of boards and else of policies; 0 where there are neither."""
        sizes = {name: self._size(name, 0) for name in boards}
        if not boards:
            sizes = {name: self._size(name, 0, 1) for name in self.asked.policies or ()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {n} x {n}" for name, n in sizes.items())
            self._refuse(
                f"boards of different sizes: {listed}",
                next(iter(sizes)),
                f'boards of one size: {self.asked.group}(boards="{next(iter(sizes))}", policies=...)',
            )
        return next(iter(sizes.values()), 0)

    def _size(self, name: str, *extra_items: int) -> int:
        """n of [..., n, n], or of a last axis of n * n items and some extra ones."""
        shape = self.schema[name][1]
        if len(shape) >= 2 and shape[-1] == shape[-2] > 0:
            return shape[-1]
        last = shape[-1] if shape else 0
        for extra in extra_items:
            n = isqrt(max(last - extra, 0))
            if n and n * n + extra == last:
                return n
        what = f"column {name!r} is {self._type_of(name)}, no board"
        raise self._error(what, name, "[rows, ..., n, n], or a last axis of n * n")

    def _guessed(self, name: str, n: int) -> Role | None:
        """What a column is that nobody named; None for one that stays."""
        asked, (dtype, shape) = self.asked, self.schema[name]
        is_like_policy = bool(n) and shape in ((n, n), (n * n,), (n * n + 1,))
        if asked.policies is None and is_like_policy:
            if not self.has_colours or dtype.kind in "fb" or name in _POLICY_NAMES:
                return Role("policy", n)
            self._refuse_to_guess(name)  # whole numbers can be stones too
        if asked.policies is None and name in _POLICY_NAMES and n:
            self._refuse(
                f"column {name!r} is {self._type_of(name)}, no policy for {n} x {n} cells",
                name,
                f"a last axis of {n * n}, or {n * n + 1} with the pass move last; policies=() if it is none",
            )
        if (
            self.has_colours
            and asked.players is None
            and name in _OUTCOME_NAMES
            and dtype.kind == "f"
            and not asked.values
        ):
            self._refuse_to_guess(name)
        if asked.policies is None and _is_square(shape) and (asked.boards is None or shape[-1] == n):
            self._refuse_to_guess(name)
        if is_like_policy or name in _PLAIN_NAMES or (not self.has_colours and name in _COLOUR_NAMES):
            return None
        if asked.moves is None and name in _MOVE_NAMES:
            return Role("move", n)
        if self.has_colours and asked.players is None and name in _PLAYER_NAMES:
            return Role("player", written=self.like_stones)
        can_be_moves = asked.moves is None and dtype.kind in "iu"
        can_be_players = self.has_colours and asked.players is None and dtype.kind in "iub" and not shape
        if can_be_moves or can_be_players:
            self._refuse_to_guess(name)
        return None

    def _check(self, name: str, role: Role) -> None:
        (dtype, shape), n, colours = self.schema[name], role.n, self.asked.colours
        if role.kind == "board" and colours == "planes" and not _has_colour_planes(shape):
            self._refuse(
                f"board {name!r} is {self._type_of(name)}, without a plane for each colour",
                name,
                '[rows, 2 or 3, n, n]; or colours="signs" for stones 1 and -1, "1/2" for 1 and 2',
            )
        written = {"board": colours}.get(role.kind, role.written)
        if (written == "signs" and dtype.kind in "ub") or (written == "1/2" and dtype.kind == "b"):
            self._refuse(
                f"column {name!r} is {dtype}, which cannot be written as {written!r}", name, 'another of "0/1", "1/2"'
            )
        if role.kind == "policy" and not (shape[-2:] == (n, n) or shape[-1:] in ((n * n,), (n * n + 1,))):
            self._refuse(
                f"column {name!r} is {self._type_of(name)}, no policy for {n} x {n} cells",
                name,
                f"a last axis of {n * n}, or {n * n + 1} with the pass move last",
            )
        if role.kind == "move" and not n:
            self._refuse("moves without a board", name, f'{self.asked.group}(boards="name"), which says its size')
        if role.kind == "move" and (dtype.kind not in "iu" or np.iinfo(dtype).max < n * n - 1):
            self._refuse(
                f"column {name!r} is {dtype}, which cannot hold the number of any of {n * n} cells",
                name,
                f"store moves as {np.min_scalar_type(-n * n)}",
            )

    def _refuse_to_guess(self, name: str) -> NoReturn:
        dtype, shape = self.schema[name]
        can_be = []
        if shape:
            can_be += [f'boards="{name}" for stones', f'policies="{name}" for a number per cell']
        if dtype.kind in "iu":
            can_be.append(f'moves="{name}" for cell numbers')
        if self.has_colours and not shape:
            can_be += [f'players="{name}" for who is to move', f'values="{name}" for what red sees']
        others = "moves=(), players=()" if self.has_colours else "moves=()"
        if shape:
            others = f"policies=(), {others}"
        self._refuse(
            f"column {name!r}, {self._type_of(name)}, can be several things",
            name,
            f"{self.asked.group}({', or '.join(can_be)}), or {others} for none of them",
        )

    def _refuse(self, what: str, column: str | None, remedy: str) -> NoReturn:
        raise self._error(what, column, remedy)

    def _error(self, what: str, column: str | None, remedy: str) -> SpecError:
        return SpecError(
            f"{self.asked.name}: {what}",
            parameter="augmentation",
            augmentation=self.asked.name,
            column=column,
            columns="\n".join(f"{name} {self._type_of(name)}" for name in self.schema),
            remedy=remedy,
        )

    def _type_of(self, name: str) -> str:
        """
        >>> symmetry = Symmetry("hex4")
        >>> _Finder(symmetry, (("policy", np.dtype("f4"), (121,)),))._type_of("policy")
        'float32 [rows, 121]'
        """
        dtype, shape = self.schema[name]
        return f"{dtype} [{', '.join(['rows', *map(str, shape)])}]"


def _is_square(shape: tuple[int, ...]) -> bool:
    return len(shape) >= 2 and shape[-1] == shape[-2] >= 2


def _has_colour_planes(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] in (2, 3)
