"""Loops compiled by numba, where it is installed (`pip install 'batchwright[fast]'`). Callers fall back to NumPy.

>>> def count_up(n):
...     total = 0
...     for i in range(n):
...         total += i
...     return total
>>> fast = jit(count_up)            # None without numba, or with BATCHWRIGHT_NUMBA=0
>>> (fast or count_up)(4)
6

numba is imported when a loop is first asked for, never with the package: that takes as long as all the rest together.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["jit", "numba_or_none"]


def numba_or_none() -> Any:
    """The module, or None where it is not installed or `BATCHWRIGHT_NUMBA=0` turns it off. Asked at every call."""
    if os.environ.get("BATCHWRIGHT_NUMBA") == "0":
        return None
    return _import_numba()


def jit(function: Callable[..., Any], signature: Any = None) -> Callable[..., Any] | None:
    """A function of numbers and arrays, compiled (once for a process), or None without numba.

    With a `signature` it is compiled for these types now, and takes no others; else for those of each call. The machine
    code is kept for later processes where a folder for it can be written. It runs without the GIL, and in the order
    of operations that is written: nothing is fused or reordered, so NumPy can give the same bits.
    """
    if numba_or_none() is None:
        return None
    return _compile(function, signature)


@cache
def _import_numba() -> Any:
    try:
        numba = import_module("numba")
    except ImportError:  # not installed, or not for this NumPy
        return None
    if numba.config.DISABLE_JIT:  # as Python its loops would take longer than NumPy
        return None
    return numba


@cache
def _compile(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    numba = _import_numba()
    try:
        compiled: Callable[..., Any] = numba.jit(signature, nopython=True, nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "cannot cache function" not in str(error):  # neither beside the module nor in the user's home
            raise
        compiled = numba.jit(signature, nopython=True, nogil=True)(function)
    return compiled
