"""The settings that a provider's source reads and does not set itself, found without running it.

A name is reported only where the source leaves no doubt: a class with bases from elsewhere, a module that writes its
own globals or attributes under computed names, a read behind a test or a `try` are let pass. A missing setting that
is overlooked here fails when it is read; a false alarm would stop a run that works.

>>> source = '''
... class P(DataProviderBase):
...     def sample_batch(self, split, rng):
...         return self.mask_probability + self.config.get("temperature", 1.0)
... '''
>>> names_read("from batchwright import DataProviderBase" + source, "prepare_streaming.py")
[NameRead(name='mask_probability', line=4, how='self.mask_probability')]
"""

from __future__ import annotations

import ast
import builtins
import inspect
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, TypeGuard

__all__ = [
    *("NameRead", "base_members", "base_names", "base_parameters"),
    *("builtins_called", "methods_written", "names_read"),
]

# What a provider has of the base class, besides what `dir()` of that class says.
_INSTANCE_NAMES = (
    *("data_dir", "batch_size", "block_size", "target_size", "batches_per_file", "max_backlog_files"),
    *("sleep_seconds", "seed", "verbose", "durable", "val_batches", "config", "reproducible", "rng_framework"),
    *("build_meta", "sample_batch", "input_files", "run", "stop", "batches"),
)
_FORGIVING = {"NameError", "KeyError", "AttributeError", "LookupError", "Exception", "BaseException"}
_PLAIN_BASES = {"object", "ABC", "Generic", "Protocol"}
_LOOKS_AT_GLOBALS = {"get", "keys", "items", "values", "copy", "__contains__"}

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class NameRead(NamedTuple):
    """A name that a provider reads, where it does so first, and how it is written there."""

    name: str
    line: int
    how: str


def names_read(source: str | bytes, file: str) -> list[NameRead]:
    """What the source reads as `self.NAME`, `self.config["NAME"]`, `globals()["NAME"]` or as a bare global, and neither
    sets nor gives a default. In the order of lines, each name once for each way of reading. SyntaxError as Python's.
    """
    tree = _parsed(source, file)
    reader = _Reader(_Facts(tree))
    reader.visit_all(tree.body, _Place())
    first: dict[tuple[str, str], NameRead] = {}
    for read in sorted([*reader.reads, *_demanded(reader.facts.providers)], key=lambda read: read.line):
        first.setdefault((read.name, read.how), read)
    return list(first.values())


def methods_written(source: str | bytes, file: str) -> dict[str, int]:
    """Methods and properties of the source's providers, and their lines: a setting of that name would be in the way.

    Not properties that can be set, and not what is decorated in other ways: a setting may be meant to replace it.
    """
    found: dict[str, int] = {}
    settable: set[str | None] = set()
    for node in _surely_providers(_parsed(source, file)):
        for part in node.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                settable |= {_last_name(d.value) for d in part.decorator_list if _is_attribute(d, "setter")}
                if {_last_name(d) for d in part.decorator_list} <= {"property", "staticmethod", "classmethod"}:
                    found[part.name] = part.lineno
    return {name: line for name, line in found.items() if name not in settable}


def builtins_called(source: str | bytes, file: str) -> dict[str, int]:
    """Functions of Python itself that the source calls, such as `max`, and the first line of each.

    A setting of that name takes its place. Not those that the source binds anywhere itself.
    """
    found: dict[str, int] = {}
    bound: set[str] = set()
    for node in ast.walk(_parsed(source, file)):
        match node:
            case ast.Call(func=ast.Name(id=name), lineno=line) if hasattr(builtins, name):
                found[name] = min(line, found.get(name, line))
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=given):
                bound.add(given or name)
    return {name: line for name, line in found.items() if name not in bound}


def _parsed(source: str | bytes, file: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python says them when the module is loaded; once is enough
        return ast.parse(source, filename=file)


# --- The base class ---------------------------------------------------------------------------------------------------


def _base_class() -> type:
    from batchwright.queue.provider import DataProviderBase  # when first asked: it brings the whole queue with it

    return DataProviderBase


@cache
def base_names() -> frozenset[str]:
    """Every attribute that a provider has without its subclass or its config doing anything."""
    return frozenset(_INSTANCE_NAMES) | frozenset(dir(_base_class()))


@cache
def base_members() -> frozenset[str]:
    """Methods and properties of the base class, `config` and `data_dir`: no setting may have such a name."""
    members = inspect.getmembers_static(_base_class())
    found = {name for name, value in members if callable(value) or hasattr(type(value), "__get__")}
    return frozenset(name for name in found if not name.startswith("_")) | {"config", "data_dir"}


@cache
def base_parameters() -> dict[str, Any]:
    """Parameters of the base class by name, with their defaults (`inspect.Parameter.empty` where there is none)."""
    parameters = inspect.signature(_base_class()).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != "data_dir"
    }


# --- What the module sets, asks about, and where nobody can know ------------------------------------------------------


class _Facts:
    """What is true of a whole module: names it binds, attributes it sets, names it asks about before reading."""

    def __init__(self, tree: ast.Module) -> None:
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.bound, _ = _bindings(tree.body, in_function=False)
        written = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        self.attributes: set[str] = set()
        self.asked: set[str] = set()
        self.globals_are_open = False
        self.attributes_are_open = False
        self.config_is_open = False
        selves = {
            function.args.args[0].arg
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for function in node.body
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.args.args
        }
        for node in ast.walk(tree):
            self._note(node)
            self.attributes_are_open |= isinstance(node, ast.Call) and _hands_out(node, selves, written)
        self.providers = set() if self.attributes_are_open else _surely_providers(tree)
        self.config_is_open |= "config" in self.attributes

    def _note(self, node: ast.AST) -> None:
        match node:
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                self.globals_are_open = True
            case ast.Attribute(attr="modules", value=ast.Name(id="sys")):
                self.globals_are_open = True
            case ast.Attribute(attr="__dict__"):
                self.attributes_are_open = True
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                if not isinstance(self.parents[node], ast.AugAssign):
                    self.attributes.add(node.attr)
            case ast.Subscript(ctx=ast.Store() | ast.Del(), value=value, slice=key):
                self._note_item_set(value, _text(key))
            case ast.AugAssign(target=ast.Attribute(attr="config")):
                self.config_is_open = True
            case ast.ClassDef():
                self.attributes |= _bindings(node.body, in_function=False)[0]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                stored, declared = _bindings(node.body, in_function=True)
                self.bound |= stored & declared
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()]):
                self._ask(_text(left))
            case ast.Call():
                self._note_call(node)

    def _note_item_set(self, value: ast.expr, key: str | None) -> None:
        if _is_globals(value):
            self.bound |= {key} if key is not None else set()
            self.globals_are_open |= key is None
        elif isinstance(value, ast.Attribute) and value.attr == "config":
            self._ask(key)
            self.config_is_open |= key is None

    def _note_call(self, call: ast.Call) -> None:
        texts = [_text(argument) for argument in call.args]
        match call.func, texts:
            case ast.Name(id="hasattr"), [_, name]:
                self._ask(name)
            case ast.Name(id="getattr"), [_, name, _]:
                self._ask(name)
            case (ast.Name(id="setattr"), [_, name, *_]) | (ast.Attribute(attr="__setattr__"), [_, name, *_]):
                self.attributes |= {name} if name is not None else set()
                self.attributes_are_open |= name is None
            case ((ast.Name(id="setattr") | ast.Attribute(attr="__setattr__")), _):
                self.attributes_are_open = True
            case ast.Name(id="vars"), [_]:
                self.attributes_are_open = True
            case ast.Name(id="exec" | "vars" | "locals"), _:
                self.globals_are_open = True
            case ast.Name(id="globals"), _:
                self.globals_are_open |= not self._is_only_looked_at(call)
            case ast.Attribute(attr="get" | "setdefault" | "pop"), [name, *_]:
                self._ask(name)
            case ast.Attribute(attr="update", value=ast.Attribute(attr="config")), _:
                self.config_is_open = True

    def _is_only_looked_at(self, call: ast.Call) -> bool:
        """Whether this `globals()` cannot set names that we do not see."""
        match self.parents.get(call):
            case ast.Subscript() | ast.Compare():
                return True
            case ast.Attribute(attr=attr):
                return attr in _LOOKS_AT_GLOBALS
        return False

    def _ask(self, name: str | None) -> None:
        if name is not None:
            self.asked.add(name)


def _bindings(body: Iterable[ast.AST], *, in_function: bool) -> tuple[set[str], set[str]]:
    """Names that statements bind in their own scope, and those that they declare global."""
    bound: set[str] = set()
    declared: set[str] = set()
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        bound.update(parameter.name for parameter in getattr(node, "type_params", ()))
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
                continue
            case ast.Lambda():
                continue
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                walrus = (part.target for part in ast.walk(node) if isinstance(part, ast.NamedExpr))
                bound.update(target.id for target in walrus)
                continue
            case ast.AnnAssign(value=None) if not in_function:
                continue  # `x: int` says what x is and gives it no value
            case ast.Global(names=names):
                declared.update(names)
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                bound.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                bound.update(alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound.add(name)
            case ast.MatchMapping(rest=str(name)):
                bound.add(name)
        waiting.extend(ast.iter_child_nodes(node))
    return bound, declared


def _surely_providers(tree: ast.Module) -> set[ast.ClassDef]:
    """Classes that are or serve providers, and of which the module shows everything that they inherit."""
    imported = _imports(tree)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    by_name = {node.name: node for node in classes if node.name not in imported}
    bases = {node: [b.value if isinstance(b, ast.Subscript) else b for b in node.bases] for node in classes}

    def is_ours(base: ast.expr, node: ast.ClassDef) -> bool:
        return isinstance(base, ast.Name) and base.id in by_name and base.id != node.name

    def is_the_base(base: ast.expr) -> bool:
        match base:
            case ast.Name(id=name) if name in imported:
                return imported[name].startswith("batchwright") and imported[name].endswith(".DataProviderBase")
            case ast.Name(id=name):
                return name == "DataProviderBase" and name not in by_name
            case ast.Attribute(attr="DataProviderBase", value=ast.Name(id=module)):
                return imported.get(module, "").startswith("batchwright")
        return False

    def is_clear(node: ast.ClassDef) -> bool:
        methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        is_known = (is_ours(b, node) or is_the_base(b) or _last_name(b) in _PLAIN_BASES for b in bases[node])
        hooks = methods & {"__getattr__", "__getattribute__"}
        return all(is_known) and not node.decorator_list and not node.keywords and not hooks

    families = {node: {node} for node in classes}
    for node in classes:
        for base in bases[node]:
            if isinstance(base, ast.Name) and is_ours(base, node):
                together = families[node] | families[by_name[base.id]]
                families.update(dict.fromkeys(together, together))
    serving = {node for node in classes if any(is_the_base(b) for other in families[node] for b in bases[other])}
    return {node for node in serving if all(map(is_clear, families[node]))}


def _imports(tree: ast.Module) -> dict[str, str]:
    """Names that are imported anywhere in a module, and what from: "package.module", or "package.module.name"."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _demanded(providers: set[ast.ClassDef]) -> Iterator[NameRead]:
    """What `__init__` of the only provider takes without a default."""
    makers = [part for node in providers for part in node.body if getattr(part, "name", None) == "__init__"]
    if len(providers) != 1 or not makers or not isinstance(makers[0], ast.FunctionDef):
        return
    arguments = makers[0].args
    taken = [*arguments.posonlyargs, *arguments.args]
    needed = taken[1 : len(taken) - len(arguments.defaults)]
    needed += [a for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None]
    for argument in needed:
        if argument.arg not in base_names() and not argument.arg.startswith("_"):
            yield NameRead(argument.arg, argument.lineno, f"{argument.arg} in __init__")


# --- Reads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scope:
    bound: frozenset[str]
    declared: frozenset[str] = frozenset()
    is_class: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in the module a node stands."""

    scopes: tuple[_Scope, ...] = ()
    self_name: str | None = None
    is_class_of_provider: bool = False
    is_forgiven: bool = False
    """A name that is missing here is caught by the source itself."""

    def is_global(self, name: str) -> bool:
        for depth, scope in enumerate(reversed(self.scopes)):
            if name in scope.declared:
                return True
            if name in scope.bound and (depth == 0 or not scope.is_class):
                return False
        return True


@dataclass(slots=True)
class _Reader:
    """Walks a module in the scopes that Python would, and keeps the reads that nothing in it answers."""

    facts: _Facts
    reads: list[NameRead] = field(default_factory=list)

    def visit_all(self, nodes: Iterable[ast.AST | None], place: _Place) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node, place)

    def visit(self, node: ast.AST, place: _Place) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                self._visit_function(node, place)
            case ast.ClassDef():
                self.visit_all([*node.decorator_list, *node.bases, *node.keywords], place)
                bound, declared = _bindings(node.body, in_function=False)
                scope = _Scope(frozenset(bound), frozenset(declared), is_class=True)
                inner = replace(place, scopes=(*place.scopes, scope), self_name=None)
                self.visit_all(node.body, replace(inner, is_class_of_provider=node in self.facts.providers))
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                targets = {name for part in node.generators for name in _bindings([part.target], in_function=True)[0]}
                inner = replace(place, scopes=(*place.scopes, _Scope(frozenset(targets))))
                self.visit(node.generators[0].iter, place)  # Python evaluates it outside: names of a class body count
                self.visit_all([part.iter for part in node.generators[1:]], inner)
                self.visit_all([test for part in node.generators for test in part.ifs], inner)
                values = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                self.visit_all(values, inner)
            case ast.Try() | ast.TryStar():
                forgives = any(handler.type is None or _forgives(handler.type) for handler in node.handlers)
                self.visit_all(node.body, replace(place, is_forgiven=place.is_forgiven or forgives))
                self.visit_all([*node.handlers, *node.orelse, *node.finalbody], place)
            case ast.With() | ast.AsyncWith():
                self.visit_all(node.items, place)
                forgives = any(_suppresses(item.context_expr) for item in node.items)
                self.visit_all(node.body, replace(place, is_forgiven=place.is_forgiven or forgives))
            case ast.If(test=test, orelse=orelse) if _is_never_true_here(test):
                self.visit_all(orelse, place)
            case ast.AnnAssign(target=target, value=value):
                self.visit_all([target, value], place)  # not the annotation: it is no setting
            case _:
                self._keep(self._read_of(node, place), place)
                self.visit_all(ast.iter_child_nodes(node), place)

    def _visit_function(self, node: _Function, place: _Place) -> None:
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        extra = [a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None]
        body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        self.visit_all([*decorators, *arguments.defaults, *arguments.kw_defaults], place)

        stored, declared = _bindings(body, in_function=True)
        bound = {
            *stored,
            *(a.arg for a in named),
            *extra,
            *(p.name for p in getattr(node, "type_params", ())),
        } - declared
        self_name = None if place.self_name in bound else place.self_name
        is_method = place.is_class_of_provider and not isinstance(node, ast.Lambda)
        if is_method and named and not {"staticmethod", "classmethod"} & {_last_name(d) for d in decorators}:
            first = named[0].arg
            self_name = first if first not in stored else None
        scope = _Scope(frozenset(bound), frozenset(declared))
        inner = replace(place, scopes=(*place.scopes, scope), self_name=self_name, is_class_of_provider=False)
        self.visit_all(body, inner)

    def _read_of(self, node: ast.AST, place: _Place) -> NameRead | None:
        """What this one node reads, if it is of a kind that settings are read by."""
        facts = self.facts
        match node:
            case ast.Name(id=name, ctx=ast.Load(), lineno=line) if place.is_global(name):
                if not facts.globals_are_open and name not in facts.bound and not hasattr(builtins, name):
                    return NameRead(name, line, name)
            case ast.Subscript(value=value, slice=ast.Constant(value=str(name)), ctx=ast.Load(), lineno=line):
                if _is_globals(value) and not facts.globals_are_open and name not in facts.bound:
                    return NameRead(name, line, f'globals()["{name}"]')
                if self._is_self(value, place, attribute="config") and not facts.config_is_open:
                    return NameRead(name, line, f'self.config["{name}"]')
            case ast.Attribute(value=value, attr=name, lineno=line) if self._is_self(value, place):
                is_read = isinstance(node.ctx, ast.Load) or isinstance(facts.parents[node], ast.AugAssign)
                return self._attribute_read(name, line) if is_read else None
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name))], lineno=line):
                return self._attribute_read(name, line) if self._is_self(value, place) else None
        return None

    def _attribute_read(self, name: str, line: int) -> NameRead | None:
        if name in self.facts.attributes or name in base_names():
            return None
        return NameRead(name, line, f"self.{name}")

    def _keep(self, read: NameRead | None, place: _Place) -> None:
        # A config cannot set names with an underscore before them, so that none is a setting that is missing.
        if read and not place.is_forgiven and not read.name.startswith("_") and read.name not in self.facts.asked:
            self.reads.append(read)

    @staticmethod
    def _is_self(node: ast.expr, place: _Place, attribute: str | None = None) -> bool:
        if attribute is not None:
            return isinstance(node, ast.Attribute) and node.attr == attribute and _Reader._is_self(node.value, place)
        return isinstance(node, ast.Name) and node.id == place.self_name


# --- Shapes of source -------------------------------------------------------------------------------------------------


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _last_name(node: ast.expr) -> str | None:
    """`DataProviderBase` of `batchwright.DataProviderBase` and of `DataProviderBase[int]`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return _last_name(value)
    return None


def _is_attribute(node: ast.expr, attr: str) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr == attr


def _hands_out(call: ast.Call, selves: set[str], written: set[str]) -> bool:
    """Whether a provider is passed to code that we do not see: that may set attributes of it."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if not any(isinstance(value, ast.Name) and value.id in selves for value in given):
        return False
    name = _last_name(call.func) or ""
    is_method = isinstance(call.func, ast.Attribute)
    return name not in written and not (name.startswith("__") if is_method else hasattr(builtins, name))


def _is_globals(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "globals"


def _exception_names(node: ast.expr) -> Iterator[str | None]:
    if isinstance(node, ast.Tuple):
        for part in node.elts:
            yield from _exception_names(part)
    else:
        yield _last_name(node)


def _forgives(node: ast.expr) -> bool:
    return any(name in _FORGIVING for name in _exception_names(node))


def _suppresses(node: ast.expr) -> bool:
    """Whether this is `contextlib.suppress(NameError)` or the like."""
    return isinstance(node, ast.Call) and _last_name(node.func) == "suppress" and any(map(_forgives, node.args))


def _is_never_true_here(test: ast.expr) -> bool:
    """`if __name__ == "__main__"` and `if TYPE_CHECKING`: what stands there does not run when a provider is loaded."""
    match test:
        case ast.Compare(left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant(value="__main__")]):
            return True
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return True
    return False
