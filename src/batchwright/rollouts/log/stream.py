"""The prompts of a log, their stream, and the stream of uses. Both streams follow from the first event of the log.

A group may be used several times, in rounds of groups: several passes over each round. The first pass of a round is in
the order of the journal, as groups come in. Each later pass has an order of its own.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least, whole_number
from batchwright.base.errors import PlanError, SampleError, SpecError
from batchwright.base.fingerprint import fingerprint, fingerprint_rows
from batchwright.order.permute import permutation
from batchwright.rollouts.log.groups import checked_prompt
from batchwright.rollouts.log.ledger import Begin
from batchwright.rollouts.table import rows_of_units
from batchwright.sources.formats import Format, format_for, known_extensions
from batchwright.sources.listing import list_files, looks_like_paths
from batchwright.sources.memory import table_rows
from batchwright.sources.units import Unit, cut_files, cut_rows

Row = dict[str, Any]

_DEFAULTS = {"seed": 0, "shuffle": True, "epochs": 1, "samples_per_insert": 1, "round_groups": None}


# Prompts


class Prompts:
    """Checked rows of prompts, with a fingerprint of their content."""

    column: str

    def __init__(self, rows: list[Row], column: str, vocab_size: int | None = None) -> None:
        self._rows, self.column = rows, column
        for number, row in enumerate(rows):
            _check(number, row, column, vocab_size)
        self.fingerprint: str = fingerprint([column, fingerprint_rows(rows, parameter="prompts")])

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Row:
        """A copy, which the caller may change."""
        row: Row = pickle.loads(pickle.dumps(self._rows[number]))  # ten times as fast as deepcopy
        return row


def read_prompts(
    source: Any, column: str = "prompt", format: str | None = None, vocab_size: int | None = None
) -> Prompts:
    """The prompts of a path, folder, glob or list of them; of rows (dicts or strings); or of a table."""
    if not isinstance(column, str) or not column:
        raise SpecError(
            f"prompt_column={column!r} is not the name of a column", parameter="prompt_column", remedy="'prompt'"
        )
    rows = list(_rows_of(source, column, format))
    if not rows:
        raise SpecError("there are no prompts", parameter="prompts", remedy="at least one")
    return Prompts(rows, column, vocab_size)


def _rows_of(source: Any, column: str, format: str | None) -> Iterable[Row]:
    if isinstance(source, str | os.PathLike):
        return _rows_of_files(source, format)
    table = table_rows(source)
    if table is not None:
        return _rows_of_units(cut_rows(table), {})
    if isinstance(source, bytes | bytearray | Mapping) or not hasattr(source, "__iter__"):
        what = f"a {type(source).__name__} is not a source of prompts"
        raise SpecError(what, parameter="prompts", remedy="a path, rows (dicts or strings), or a table")
    rows = list(source)
    if format is not None or looks_like_paths(rows, known_extensions()):
        return _rows_of_files(rows, format)
    return [_row(number, row, column) for number, row in enumerate(rows)]


def _row(number: int, row: Any, column: str) -> Row:
    if isinstance(row, Mapping):
        return copy.deepcopy(dict(row))
    if isinstance(row, str):
        return {column: row}
    what = f"a prompt is a dict or text, got a {type(row).__name__}"
    raise SampleError(what, row=number, column=column, remedy=f"{{{column!r}: ...}} with text, token ids or messages")


def _rows_of_files(source: Any, format: str | None) -> Iterator[Row]:
    files = list_files(source)
    formats = {kind.name: kind for kind in (format_for(file.path, format) for file in files)}
    return _rows_of_units(cut_files([(n, file.path, file.num_bytes) for n, file in enumerate(files)], format), formats)


def _rows_of_units(units: Iterable[Unit], formats: Mapping[str, Format]) -> Iterator[Row]:
    remedy = "mend the row: a prompt that cannot be read would be lost"
    return (row for *_, row in rows_of_units(units, formats, remedy))


def _check(number: int, row: Row, column: str, vocab_size: int | None) -> None:
    if column not in row:
        what = f"a row without {column!r}"
        remedy = "prompt_column= with the name of the column that holds the prompt"
        raise SampleError(what, row=number, column=column, columns=", ".join(map(repr, row)) or "none", remedy=remedy)
    try:
        checked_prompt(row[column], vocab_size)
    except ValueError as error:
        what = f"a prompt cannot be used: {error}"
        remedy = "text, token ids, or messages ({'role': ..., 'content': ...})"
        raise SampleError(what, row=number, column=column, remedy=remedy) from None


def rows_of(ordinals: list[int], begin: Begin) -> tuple[list[int], list[int]]:
    """(epochs, rows) of prompts: every row once in each epoch, in an order of its own.

    >>> begin = Begin("", 4, 2, 0, False, None, 1, None)
    >>> rows_of([0, 3, 6], begin)
    ([0, 0, 1], [0, 3, 2])
    """
    epoch, number = np.divmod(np.array(ordinals, np.int64), begin.num_prompts)
    if begin.shuffle:
        for each in np.unique(epoch).tolist():
            mine = epoch == each
            number[mine] = permutation(begin.num_prompts, begin.seed, "prompts", each).at(number[mine])
    return epoch.tolist(), number.tolist()


# Settings


def given_settings(
    *, seed: Any, shuffle: bool | None, epochs: int | EllipsisType | None, **counts: Any
) -> dict[str, Any]:
    """The settings that were given, checked. `epochs` is ... if it was not given, because None never ends."""
    given = {name: at_least(1, **{name: count}) for name, count in counts.items() if count is not None}
    if seed is not None:
        given["seed"] = whole_number(seed=seed)
    if shuffle is not None:
        given["shuffle"] = bool(shuffle)
    if epochs is None:
        return {**given, "epochs": None}
    if epochs is not ...:
        given["epochs"] = at_least(1, epochs=epochs)
    return given


def first_event(prompts: Prompts, given: dict[str, Any]) -> Begin:
    """The first event of a new log."""
    settings = _DEFAULTS | given
    if "group_size" not in settings:
        raise SpecError(
            "a new log needs the number of responses to each prompt", parameter="group_size", remedy="group_size=8"
        )
    if settings["samples_per_insert"] > 1 and settings["round_groups"] is None:
        what = "groups that are used several times are used in rounds"
        remedy = "round_groups=64: the trainer passes samples_per_insert times over each 64 groups"
        raise SpecError(what, parameter="round_groups", remedy=remedy)
    return Begin(prompts=prompts.fingerprint, num_prompts=len(prompts), **settings)


def refuse_other_stream(begin: Begin, given: dict[str, Any], prompts: Prompts | None, path: Path) -> None:
    """Raise a PlanError that names the differences between a log and the given prompts and settings."""
    if prompts is not None and prompts.fingerprint != begin.prompts:
        raise PlanError(
            "this log is of other prompts",
            folder=path,
            prompts=f"{prompts.fingerprint[:16]} ({len(prompts):,} rows)",
            expected=f"{begin.prompts[:16]} ({begin.num_prompts:,} rows)",
            remedy="the prompts that it was made with, unchanged; or another folder for these",
        )
    for name, value in given.items():
        recorded = getattr(begin, name)
        if value != recorded:
            what = f"this log was made with {name}={recorded}, not {value}"
            remedy = f"{name}={recorded}, or leave it out; or another folder"
            raise PlanError(what, folder=path, parameter=name, remedy=remedy)


# Uses


class Rounds(NamedTuple):
    """`passes` over each round of `round_groups` groups. With one pass, use number n is group number n.

    `last_group` is the final number of groups, once it is known. The last round may be short.
    """

    passes: int
    round_groups: int
    seed: int

    def groups_needed(self, last_use: int, last_group: int | None = None) -> int:
        """The number of groups that must be there before uses [0, last_use) are known.

        >>> [Rounds(2, 3, 0).groups_needed(n) for n in (1, 3, 4, 6, 7)]
        [1, 3, 3, 3, 4]
        >>> Rounds(2, 3, 0).groups_needed(8, last_group=4)
        4
        """
        full, left = divmod(last_use, self.passes * self.round_groups)
        needed = full * self.round_groups + min(left, self.round_groups)
        if last_group is None:
            return needed
        return min(needed, last_group)

    def num_uses(self, num_groups: int, is_last: bool) -> int:
        """The number of uses that are known once `num_groups` are there. `is_last`: no group will follow.

        >>> [Rounds(2, 3, 0).num_uses(n, False) for n in (1, 3, 4)], Rounds(2, 3, 0).num_uses(4, True)
        ([1, 6, 7], 8)
        """
        if is_last:
            return num_groups * self.passes
        full, left = divmod(num_groups, self.round_groups)
        return full * self.round_groups * self.passes + left

    def group_of(self, use: NDArray[np.int64], last_group: int | None = None) -> NDArray[np.int64]:
        """The number of the group of each use.

        >>> Rounds(2, 3, 0).group_of(np.arange(12)).tolist()
        [0, 1, 2, 1, 0, 2, 3, 4, 5, 4, 5, 3]
        """
        if self.passes == 1:
            return use
        round_uses = self.passes * self.round_groups
        number, in_round = np.divmod(use, round_uses)
        group = np.empty_like(use)
        for each in np.unique(number).tolist():
            begin = each * self.round_groups
            width = self.round_groups
            if last_group is not None:
                width = min(width, last_group - begin)
            mine = np.flatnonzero(number == each)
            passes, places = np.divmod(in_round[mine], width)
            for later in np.unique(passes[passes > 0]).tolist():
                now = passes == later
                places[now] = permutation(width, self.seed, "uses", each, later).at(places[now])
            group[mine] = begin + places
        return group


def rounds_of(begin: Begin) -> Rounds:
    """The rounds of a log, by its first event."""
    return Rounds(begin.samples_per_insert, begin.round_groups or 1, begin.seed)
