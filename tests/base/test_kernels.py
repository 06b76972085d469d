"""numba is asked for at every call, may be turned off, and compiles also where nothing can be kept."""

from __future__ import annotations

import pytest

from batchwright.base import kernels
from batchwright.base.kernels import jit, numba_or_none

needs_numba = pytest.mark.skipif(numba_or_none() is None, reason="numba is not installed, or turned off")


def doubled(number):
    return 2 * number


def test_an_environment_variable_turns_numba_off(monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_NUMBA", "0")
    assert numba_or_none() is None
    assert jit(doubled) is None


def test_without_numba_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(kernels, "_import_numba", lambda: None)
    assert numba_or_none() is None
    assert jit(doubled) is None


@needs_numba
def test_a_function_is_compiled_once():
    compiled = jit(doubled)
    assert compiled is jit(doubled)
    assert compiled(21) == 42


@needs_numba
def test_a_function_without_a_place_for_its_machine_code_is_compiled_anyway():
    names: dict[str, object] = {}
    exec("def tripled(number):\n    return 3 * number", names)  # of no file, so that nothing can lie beside it
    compiled = jit(names["tripled"])
    assert compiled(2) == 6
