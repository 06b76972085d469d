"""What a test may say of an error: its class, the things it names, and that it says what to do. Never its wording.

Wording is pinned in one table per area, `test_*_wording.py`, so that a sentence can be improved in one place.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import batchwright as bw

__all__ = ["refused"]


@contextmanager
def refused(
    kind: type[Exception] | tuple[type[Exception], ...], /, *named: object, remedy: str | bool = True, **where: object
) -> Iterator[Any]:
    """The block raises `kind`. The error names each of `named`, its `where` holds the pairs given, and it has a remedy.

    For errors that are not of the package, the pairs are attributes, and there is no remedy to check.

    `named` are files, rows, parameters and values, not sentences. `remedy="batch_size="` says what the remedy names;
    `remedy=False` means that a user can do nothing. What is yielded has the error as `.value` afterwards.
    """
    caught: Any = SimpleNamespace(value=None)
    with pytest.raises(kind) as info:
        yield caught
    error = caught.value = info.value
    text = "".join(traceback.format_exception_only(error))  # with the notes of workers
    for thing in named:
        assert str(thing) in text, f"{thing!r} is not named in:\n{text}"
    is_ours = isinstance(error, bw.BatchwrightError)
    places = error.where if is_ours else vars(error)
    for name, value in where.items():
        assert str(places.get(name)) == str(value), f"{name} is {places.get(name)!r} in:\n{text}"
    if not is_ours:
        return
    assert bool(error.remedy) is (remedy is not False), f"the remedy is {error.remedy!r} in:\n{text}"
    if isinstance(remedy, str):
        assert remedy in error.remedy, f"{remedy!r} is not in the remedy of:\n{text}"
