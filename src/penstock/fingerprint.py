"""Names for content: equal things get equal fingerprints on every machine; user functions are named by what they do."""

from __future__ import annotations

import functools
import inspect
import types
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from penstock.errors import SpecError

__all__ = ["fingerprint", "fingerprint_bytes", "fingerprint_file", "function_fingerprint"]

_CHUNK_BYTES = 1 << 20


def fingerprint(value: Any) -> str:
    """The fingerprint of a JSON-like value: 32 hex digits, independent of the order of keys.

    >>> fingerprint({"a": 1, "b": [2.5, None]}) == fingerprint({"b": [2.5, None], "a": 1})
    True
    """
    return fingerprint_bytes(msgspec.json.encode(value, order="deterministic"))


def fingerprint_bytes(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def fingerprint_file(path: Path, start: int = 0, stop: int | None = None) -> str:
    """The fingerprint of a file's bytes [start, stop), read in pieces."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        file.seek(start)
        left = stop - start if stop is not None else None
        while left is None or left > 0:
            piece = file.read(_CHUNK_BYTES if left is None else min(left, _CHUNK_BYTES))
            if not piece:
                break
            digest.update(piece)
            left = None if left is None else left - len(piece)
    return digest.hexdigest()


def function_fingerprint(function: Any, *, name: str, version: str | None = None) -> str:
    """What a user's function does, as a name: bytecode, constants, defaults and closure.

    Two lambdas written alike on different lines are equal; a changed constant, default or captured value is not.
    Module-level functions that it calls are followed within its own module. Where the answer cannot be known (a
    captured object without a stable value), the error asks for `version=`.
    """
    if version is not None:
        return fingerprint({"name": name, "version": version})
    return fingerprint(_describe(function, name, seen=set()))


def _describe(value: Any, name: str, seen: set[int]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value if not isinstance(value, float) else ["float", value.hex()]
    if isinstance(value, bytes):
        return ["bytes", fingerprint_bytes(value)]
    if id(value) in seen:
        return ["again", getattr(value, "__qualname__", type(value).__name__)]
    if isinstance(value, tuple | list):
        return [type(value).__name__, *[_describe(item, name, seen) for item in value]]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(fingerprint(_describe(item, name, seen)) for item in value)]
    if isinstance(value, dict):
        pairs = [[_describe(k, name, seen), _describe(v, name, seen)] for k, v in value.items()]
        return ["dict", *sorted(pairs, key=fingerprint)]
    if isinstance(value, functools.partial):
        return ["partial", *[_describe(v, name, seen) for v in (value.func, value.args, value.keywords)]]
    if isinstance(value, types.MethodType):
        return ["method", _describe(value.__func__, name, seen), _describe(value.__self__, name, seen)]
    if isinstance(value, types.FunctionType):
        return _describe_function(value, name, seen | {id(value)})
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if isinstance(value, types.BuiltinFunctionType | type | types.MethodDescriptorType):
        return ["builtin", getattr(value, "__module__", None), value.__qualname__]
    if hasattr(value, "pattern") and hasattr(value, "flags"):
        return ["regex", str(value.pattern), int(value.flags)]
    described = getattr(value, "__dict__", None)
    if callable(value) and described is not None and "__call__" in vars(type(value)):
        call = vars(type(value))["__call__"]
        return ["callable", _describe(call, name, seen | {id(value)}), _describe(described, name, seen | {id(value)})]
    raise SpecError(
        f"cannot tell when {name} has changed: it uses a {type(value).__module__}.{type(value).__qualname__}",
        function=name,
        remedy="give the step a version, e.g. version='1', and change it when the function changes",
    )


def _describe_function(function: types.FunctionType, name: str, seen: set[int]) -> Any:
    code = function.__code__
    captured = inspect.getclosurevars(function)
    used_globals = {
        key: value
        for key, value in captured.globals.items()
        # A module stands for itself; what is defined beside the function is followed, what is imported is named.
        if not isinstance(value, types.ModuleType)
    }
    followed = {
        key: _describe(value, name, seen)
        if getattr(value, "__module__", function.__module__) == function.__module__
        else ["imported", getattr(value, "__module__", None), getattr(value, "__qualname__", repr(type(value)))]
        for key, value in used_globals.items()
    }
    return [
        "function",
        _describe_code(code, name, seen),
        _describe(function.__defaults__ or (), name, seen),
        _describe(function.__kwdefaults__ or {}, name, seen),
        _describe(dict(captured.nonlocals), name, seen),
        _describe(followed, name, seen),
    ]


def _describe_code(code: types.CodeType, name: str, seen: set[int]) -> Any:
    constants = [
        _describe_code(c, name, seen) if isinstance(c, types.CodeType) else _describe(_plain(c), name, seen)
        for c in code.co_consts
    ]
    return ["code", fingerprint_bytes(code.co_code), constants, list(code.co_names), list(code.co_varnames)]


def _plain(constant: Any) -> Any:
    return repr(constant) if isinstance(constant, complex | type(Ellipsis)) else constant
