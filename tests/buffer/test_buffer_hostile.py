"""What a user does to a buffer at a bad moment: Ctrl-C anywhere, threads that read while others write."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import CO_GENERATOR
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import StoreError

Step = Callable[[ps.DatasetBuffer], object]


def row(number: int) -> dict[str, Any]:
    return {"n": number, "text": str(number), "a": 0, "b": 0}


def interrupted_at(moment: int, step: Step, buffer: ps.DatasetBuffer) -> bool:
    """Run `step`, with Ctrl-C after that many function calls; False where it ended before.

    Python looks for signals when a function was called, so these are the moments at which a real one arrives.
    """
    left = moment

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        code = frame.f_code
        if event in ("return", "c_return") and "penstock" in code.co_filename and not code.co_flags & CO_GENERATOR:
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        step(buffer)
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def check(buffer: ps.DatasetBuffer) -> None:
    columns = buffer.to_pydict()
    assert columns["text"] == [str(number) for number in columns["n"]]
    assert columns["a"] == columns["b"]
    assert len(columns["n"]) == len(buffer) == len(buffer.ids)


STEPS: dict[str, tuple[dict[str, Any], Step]] = {
    "a row": ({}, lambda b: b.append(row(100))),
    "a row above max_size": ({"max_size": 6}, lambda b: b.append(row(100))),
    "a row above max_size, at random": ({"max_size": 6, "drop_strategy": "random"}, lambda b: b.append(row(100))),
    "rows and retention": ({}, lambda b: b.append([row(100), row(101)], retain_prior=0.5)),
    "rows without a value": ({}, lambda b: b.append([{**row(100), "a": None, "b": None}])),
    "two columns": ({}, lambda b: b.set(b.ids, a=np.full(len(b), 7), b=np.full(len(b), 7))),
    "a drop": ({}, lambda b: b.drop(b.ids[::2])),
}


@pytest.mark.parametrize("what", STEPS)
def test_an_interrupted_change_is_made_or_not(what: str) -> None:
    settings, step = STEPS[what]
    moment = 0
    while True:
        moment += 1
        buffer = ps.DatasetBuffer([row(number) for number in range(5)], **settings)
        buffer.append(row(5))
        before = buffer.to_pydict()
        was_interrupted = interrupted_at(moment, step, buffer)
        check(buffer)
        after = buffer.to_pydict()
        if after != before:  # then it is as if it had not been interrupted
            whole = ps.DatasetBuffer([row(number) for number in range(5)], **settings)
            whole.append(row(5))
            step(whole)
            assert after == whole.to_pydict()
        buffer.append(row(200))
        check(buffer)
        assert buffer[-1] == row(200)
        if not was_interrupted:
            break
    assert moment > 5


@pytest.mark.parametrize("what", ["a row above max_size, at random", "two columns"])
def test_an_interrupted_change_of_a_folder_is_the_same_when_it_is_opened_again(what: str, tmp_path: Path) -> None:
    settings, step = STEPS[what]
    for moment in range(1, 400, 3):
        path = tmp_path / str(moment)
        with ps.DatasetBuffer([row(number) for number in range(5)], path=path, **settings) as buffer:
            buffer.append(row(5))
            was_interrupted = interrupted_at(moment, step, buffer)
            try:
                buffer.append(row(200))
            except StoreError as error:
                assert "interrupted" in error.headline
                buffer.append(row(200))
            check(buffer)
            rows, ids = buffer.to_pydict(), buffer.ids.tolist()
        with ps.DatasetBuffer(path=path) as again:
            assert again.to_pydict() == rows
            assert again.ids.tolist() == ids
        if not was_interrupted:
            return
    raise AssertionError("it was never finished")
