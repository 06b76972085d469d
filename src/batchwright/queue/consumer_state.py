"""The state of a consumer: a file and a batch number for each split, and the cut of files into batches.

{"queue": "4f2a...", "train": {"file": 7, "batch": 5}, "val": {"file": 0, "batch": 0}, "cut": {"train": [8, 100]}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.base.errors import PlanError
from batchwright.queue.reading import FileShape, Position

__all__ = ["checked_state", "place_in_state"]

_SPLITS = ("train", "val")
_REMEDY = "load_state_dict takes what consumer.state_dict() gave"


def place_in_state(position: Position, shape: FileShape | None) -> dict[str, int]:
    """A position as a state has it. `row` is there only in the middle of a batch of the provider's."""
    if shape is None:
        return {"file": position.file, "batch": position.row}
    batch, row = divmod(position.row, shape.batch_size)
    place = {"file": position.file, "batch": batch}
    if row:
        place["row"] = row
    return place


def checked_state(state: Mapping[str, Any], fingerprint: str) -> dict[str, tuple[Position, FileShape | None]]:
    """The position of each split, and how its file was cut."""
    if not isinstance(state, Mapping) or not isinstance(state.get("queue"), str):
        raise PlanError("this is not the state of a consumer", parameter="state", remedy=_REMEDY)
    if state["queue"] != fingerprint:
        raise PlanError(
            "this state is of another queue: its schema, code, settings, raw files or seed differ",
            parameter="state",
            state=state["queue"],
            queue=fingerprint,
            remedy="prepare with what the state was saved with; or begin at the queue's first batch, without it",
        )
    cut = state.get("cut", {})
    places = {}
    for split, place in state.items():
        if split not in ("queue", "cut"):
            found = _place(split, place, cut)
            if found is None:
                what = f"the state has no place in {split!r}: {place!r}"
                raise PlanError(what, parameter="state", remedy=_REMEDY)
            places[split] = found
    return places


def _place(split: str, place: Any, cut: Any) -> tuple[Position, FileShape | None] | None:
    """None if it is not a place of a split."""
    if split not in _SPLITS or not isinstance(place, Mapping) or not isinstance(cut, Mapping):
        return None
    sizes = cut.get(split) or ()
    numbers = [place.get("file"), place.get("batch"), place.get("row", 0), *sizes]
    if not all(type(number) is int and number >= 0 for number in numbers):
        return None
    file, batch, row = numbers[:3]
    if len(sizes) == len(FileShape._fields):
        shape = FileShape(*sizes)
        return Position(file, batch * shape.batch_size + row), shape
    if sizes or batch or row:
        return None
    return Position(file, 0), None
