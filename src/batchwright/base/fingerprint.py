"""Names for content: equal things get equal fingerprints on every machine; user functions are named by what they do.

A value becomes bytes in `canonical.encode`, and nowhere else: there its types, its order and its bits count.
"""

from __future__ import annotations

import builtins
import copyreg
import dis
import functools
import os
import re
import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from batchwright.base.canonical import attributes, encode
from batchwright.base.errors import SpecError

__all__ = [
    "fingerprint",
    "fingerprint_bytes",
    "fingerprint_file",
    "fingerprint_rows",
    "fingerprint_value",
    "function_fingerprint",
    "is_users",
]

_CHUNK_BYTES = 1 << 20
_BLOCK_ROWS = 8192
"""Rows that are encoded at once."""


def fingerprint(settings: Any) -> str:
    """The fingerprint of settings: 32 hex digits, the same before and after they were kept as JSON.

    >>> fingerprint({"a": 1, "b": [2.5, None]}) == fingerprint({"b": (2.5, None), "a": 1})
    True
    """
    return fingerprint_bytes(encode(settings, as_json=True))


def fingerprint_value(value: Any) -> str:
    """The fingerprint of a user's value: every type counts, and the order of every dict.

    >>> fingerprint_value({"a": 1, "b": 2}) == fingerprint_value({"b": 2, "a": 1})
    False
    """
    return fingerprint_bytes(encode(value))


def fingerprint_rows(rows: Sequence[Any], **source: str) -> str:
    """The fingerprint of rows from memory. A value that cannot be encoded is an error that names row and column."""
    digest = xxhash.xxh3_128()
    for first in range(0, len(rows), _BLOCK_ROWS):
        block = list(rows[first : first + _BLOCK_ROWS])
        try:
            digest.update(encode(block))
        except (TypeError, ValueError, RecursionError):
            raise _unencodable(block, first, source) from None
    return digest.hexdigest()


def _unencodable(rows: list[Any], first: int, source: dict[str, str]) -> SpecError:
    for number, row in enumerate(rows, first):
        columns = [(None, row)]
        if isinstance(row, dict):
            columns = list(row.items())
        for column, value in columns:
            try:
                encode({column: value})
            except (TypeError, ValueError, RecursionError) as error:
                holds = "itself" if isinstance(error, RecursionError) else str(error)
                return SpecError(
                    f"a value of a row cannot be compared: it is or holds {holds}",
                    **source,
                    row=number,
                    column=column,
                    remedy="rows of str, numbers, bytes, dates, arrays, tensors, images, lists and dicts",
                )
    raise AssertionError("together the rows cannot be encoded, but each can")


def fingerprint_bytes(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def fingerprint_file(path: Path, start: int = 0, stop: int | None = None) -> str:
    """The fingerprint of a file's bytes [start, stop), read in pieces."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        file.seek(start)
        left = sys.maxsize
        if stop is not None:
            left = stop - start
        while left > 0 and (piece := file.read(min(left, _CHUNK_BYTES))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def function_fingerprint(function: Any, *, name: str, version: str | None = None) -> str:
    """What a user's function does, as a name: bytecode, constants, defaults, closure and the globals that it uses.

    Two lambdas written alike on different lines are equal; a changed constant, default, captured value, or a changed
    function or class of the user's own that it calls, is not. The order of a dict counts, what was set on a function,
    and all that an object holds, also where its `__getstate__` leaves something out. What comes from Python itself or
    from an installed package is named, not followed. Where the answer cannot be known (a captured object without a
    stable value, such as an open file), the error asks for `version=`. Modules imported inside the function are not
    seen.
    """
    if version is not None:
        return fingerprint({"name": name, "version": version})
    return fingerprint_value(_Describer(name).describe(function))


class _Describer:
    """Turns values into plain ones that are equal when they do the same. Remembers what it met: code is a graph."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path: list[int] = []
        """Objects that are being described now: meeting one again is a cycle."""
        self.done: dict[int, Any] = {}
        self.kept: list[Any] = []  # so that no id is used twice

    def describe(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if id(value) in self.done:
            return self.done[id(value)]
        if id(value) in self.path:
            return ["again", self.path.index(id(value))]
        self.kept.append(value)
        self.path.append(id(value))
        try:
            described = self._compound(value)
        except RecursionError:
            raise self._unknown(value) from None
        finally:
            self.path.pop()
        if isinstance(value, types.FunctionType | type):  # met often, from many sides: by its fingerprint from now on
            described = self.done[id(value)] = ["code of", fingerprint_value(described)]
        return described

    def _compound(self, value: Any) -> Any:
        describe = self.describe
        match value:
            case tuple() | list() if type(value) in (tuple, list):
                return [type(value).__name__, *map(describe, value)]
            case set() | frozenset():
                return self._set(value)
            case dict() | types.MappingProxyType() if type(value) in (dict, types.MappingProxyType):
                return ["dict", *([describe(k), describe(v)] for k, v in value.items())]
            case types.MethodType():
                return ["method", describe(value.__func__), describe(value.__self__)]
            case types.ModuleType():
                return self._module(value)
            case types.CodeType():
                return self._code(value)
            case staticmethod() | classmethod():
                return [type(value).__name__, describe(value.__func__)]
            case property():
                return ["property", describe(value.fget), describe(value.fset), describe(value.fdel)]
            case re.Pattern():
                return ["regex", describe(value.pattern), value.flags]
            case functools.cached_property():
                return ["cached_property", describe(value.func)]
        return self._callable(value)

    def _set(self, value: Any) -> Any:
        items, kind = value, type(value).__name__
        if not set(map(type, value)) <= _PLAIN:
            items = {fingerprint_value(self.describe(item)) for item in value}
        if type(value) not in (set, frozenset):
            kind = self.describe(type(value))
        return ["set", kind, frozenset(items), self.describe(attributes(value))]

    def _callable(self, value: Any) -> Any:
        """Functions and classes: the user's own by what they do, others by name. Any other object by what it holds."""
        if isinstance(value, types.FunctionType | type) and is_users(value.__module__):
            if isinstance(value, type):
                return self._class(value)
            return self._function(value)
        if isinstance(value, type):
            return _named(value)
        if isinstance(value, types.FunctionType):
            named = _named(value)
            if "<locals>" in value.__qualname__:
                # What an installed package made at run time does what it was made of: make_filter(3) is not
                # make_filter(4).
                named += [self._cell("", cell, []) for cell in value.__closure__ or ()]
            return named
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            owner = getattr(value, "__self__", None)  # "{}".format: what it is bound to decides what it does
            if isinstance(owner, types.ModuleType):
                owner = None
            return [*_named(value), self.describe(owner)]
        if isinstance(value, _DESCRIPTORS):
            return ["descriptor", value.__qualname__]
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None and type(value).__module__ == "functools":  # lru_cache
            return ["wrapped", self.describe(wrapped), self._attributes(value)]
        return self._object(value)

    def _object(self, value: Any) -> Any:
        """Any other object, by its class and what pickle would store of it."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            if reduce is None:
                parts: Any = value.__reduce_ex__(2)
            else:
                parts = reduce(value)
        except Exception:  # whatever an object raises when it has no stable value
            raise self._unknown(value) from None
        if isinstance(parts, str):
            parts = "global", type(value).__module__, parts
        parts = [list(part) if isinstance(part, Iterator) else part for part in parts]
        if _may_hide(type(value)):
            parts.append(attributes(value))
        return ["object", self.describe(type(value)), *map(self.describe, parts)]

    def _attributes(self, value: Any) -> list[Any]:
        """What was set on a function: `function.limit = 3`."""
        skipped = {*_NOT_WHAT_A_CLASS_DOES, "__name__", "__wrapped__"}
        return [[name, self.describe(held)] for name, held in sorted(vars(value).items()) if name not in skipped]

    def _unknown(self, value: Any) -> SpecError:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return SpecError(
            f"cannot tell when {self.name} has changed: it uses a {kind}",
            function=self.name,
            remedy="give it a version, e.g. version='1', and change that when the function changes",
        )

    def _function(self, function: types.FunctionType) -> Any:
        code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        of_globals, of_closure = (sorted(set(_dotted_names(code, opnames))) for opnames in (_GLOBAL, _CLOSURE))
        return [
            "function",
            self._code(code),
            self.describe(function.__defaults__),
            self.describe(function.__kwdefaults__),
            [described for name, cell in cells for described in self._cell(name, cell, of_closure)],
            [
                described
                for name in sorted({path[0] for path in of_globals})
                for described in self._global(function, name, of_globals)
            ],
            self._attributes(function),
        ]

    def _cell(self, name: str, cell: types.CellType, paths: list[tuple[str, ...]]) -> Any:
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            return [[name, ["empty"]]]
        return self._named_value(name, content, paths)

    def _global(self, function: types.FunctionType, name: str, paths: list[tuple[str, ...]]) -> Any:
        if name in function.__globals__:
            return self._named_value(name, function.__globals__[name], paths)
        kind = "builtin" if hasattr(builtins, name) else "undefined"
        return [[name, [kind, name]]]

    def _named_value(self, name: str, value: Any, paths: list[tuple[str, ...]]) -> Any:
        """[name, what it is]; for a module of the user's own, what the code takes out of it, each by its dotted name.

        The module's file would not do: it does not say what other modules define, nor what a program set in it.
        """
        if not _is_users_module(value) or not paths:
            return [[name, self.describe(value)]]
        taken: dict[str, Any] = {}
        for path in paths:
            if path[0] == name:
                found, depth = value, 1
                while _is_users_module(found) and depth < len(path) and hasattr(found, path[depth]):
                    found, depth = getattr(found, path[depth]), depth + 1
                taken[".".join(path[:depth])] = found
        return [[dotted, self.describe(found)] for dotted, found in sorted(taken.items())]

    def _code(self, code: types.CodeType) -> Any:
        return [
            "code",
            fingerprint_bytes(code.co_code),
            fingerprint_bytes(code.co_exceptiontable),
            code.co_argcount,
            code.co_posonlyargcount,
            code.co_kwonlyargcount,
            code.co_flags & _FLAGS_THAT_MATTER,
            list(code.co_names),
            list(code.co_varnames),
            [*map(self.describe, code.co_consts)],
        ]

    def _class(self, described: type) -> Any:
        members = [
            [name, self.describe(member)]
            for name, member in sorted(vars(described).items())
            if name not in _NOT_WHAT_A_CLASS_DOES
        ]
        made_by = [self.describe(base) for base in (type(described), *described.__bases__)]
        return ["class", described.__qualname__, made_by, members]

    def _module(self, module: types.ModuleType) -> Any:
        if _is_users_module(module) and (file := getattr(module, "__file__", None)):
            return ["module", module.__name__, fingerprint_file(Path(file))]
        return ["module", module.__name__]


_NOT_WHAT_A_CLASS_DOES = frozenset(
    (
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__firstlineno__"),
        *("__static_attributes__", "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
        *("__conditional_annotations__", "__orig_bases__", "__parameters__", "__type_params__"),
        *("__dataclass_fields__", "__dataclass_params__", "_abc_impl"),
        *("__pydantic_core_schema__", "__pydantic_serializer__", "__pydantic_validator__"),
    )
)
"""Where a class was written, what its annotations say, and what is made of these."""
_DESCRIPTORS = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
# *args, **kwargs, generator, coroutine, async generator. The others say where a function was written, not what it does.
_FLAGS_THAT_MATTER = 0x04 | 0x08 | 0x20 | 0x80 | 0x200


_PLAIN = {type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented)}


def _may_hide(kind: type) -> bool:
    """Whether objects of a user's class are pickled in a way of their own, which may leave out what decides."""
    own = any(getattr(kind, n) is not getattr(object, n) for n in ("__getstate__", "__reduce__", "__reduce_ex__"))
    return is_users(kind.__module__) and (own or kind in copyreg.dispatch_table)


def _named(value: Any) -> list[Any]:
    return ["named", getattr(value, "__module__", None), value.__qualname__]


_GLOBAL, _CLOSURE = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_DEREF",)


def _dotted_names(code: types.CodeType, opnames: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Names that code, and the code inside it (comprehensions, inner functions), looks up among globals or closures.

    Each with the attributes that are read from it at once: ("helpers", "clean") for helpers.clean(text).
    """
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if path and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*path, instruction.argval)
            continue
        if path:
            yield path
        path = ()
        if instruction.opname in opnames:
            path = (instruction.argval,)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _dotted_names(constant, opnames)


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {site.getusersitepackages(), str(Path(__file__).parent)}
    return tuple(os.path.realpath(folder) + os.sep for folder in folders)


def _is_users_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and is_users(value.__name__)


def is_users(module_name: str | None) -> bool:
    """Whether a module is the user's own: not Python's, and not an installed package's."""
    if module_name is None or module_name == "__main__":
        return True
    if module_name in sys.builtin_module_names:
        return False
    module = sys.modules.get(module_name)
    if module is None:
        return True
    file = getattr(module, "__file__", None)
    if file is None:  # frozen into the interpreter, or made by hand
        return getattr(getattr(module, "__spec__", None), "origin", None) != "frozen"
    return not os.path.realpath(file).startswith(_installed_folders())
