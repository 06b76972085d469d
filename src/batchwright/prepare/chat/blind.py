"""Whether a chat template prints what messages say without looking at it: then only their roles decide on the rest.

This is read off the template's syntax. What messages say may be printed, put together with other text, stripped of
blanks, kept in a variable, asked for its type, and asked whether it is empty. Everything else (comparing, splitting,
counting, passing it or a whole message on) is looking, and so is every construct that is not known here.
"""

from __future__ import annotations

from typing import Any

import jinja2
from jinja2 import nodes

__all__ = ["is_blind"]

_PLAIN, _SAID, _MESSAGE, _MESSAGES, _NAMESPACE = range(5)
"""What an expression may be: nothing of a message's text; (with) such a text; a message; a list of messages; a
namespace, which is followed under the one name that it was made for."""

_ASKS_FOR_TYPE = frozenset(
    ("string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "number", "boolean", "true", "false")
)


class _Looks(Exception):
    """The template looks at what was said, or may."""


def is_blind(source: str) -> bool:
    """Whether the text of a template is its own words, by the roles of messages, with their contents in between.

    >>> is_blind("{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}")
    True
    >>> is_blind("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}")
    False
    >>> is_blind("{% for m in messages %}{% if m.content == 'x' %}y{% endif %}{{ m | tojson }}{% endfor %}")
    False
    """
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        reader = _Reader()
        before: dict[Any, int] | None = None
        while before != reader.kinds:  # a variable may be used before the line that sets it, in a loop
            before = dict(reader.kinds)
            reader.body(tree.body)
    except (_Looks, jinja2.TemplateError, RecursionError):
        return False
    return True


class _Reader:
    def __init__(self) -> None:
        self.kinds: dict[Any, int] = {"messages": _MESSAGES}
        """Of variables, by name, and of what a namespace holds, by (name, attribute)."""

    def set(self, target: nodes.Node, kind: int) -> None:
        if isinstance(target, nodes.Name) and target.name != "loop":
            key: Any = target.name
        elif isinstance(target, nodes.NSRef) and self.kinds.get(target.name) == _NAMESPACE:
            key = (target.name, target.attr)
        else:
            raise _Looks
        known = self.kinds.get(key, _PLAIN)
        if known != kind and _PLAIN not in (known, kind):
            raise _Looks
        self.kinds[key] = max(known, kind)

    # Statements

    def body(self, statements: list[nodes.Node]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.Output):
            for part in node.nodes:
                if not isinstance(part, nodes.TemplateData) and self.kind(part) not in (_PLAIN, _SAID):
                    raise _Looks
        elif isinstance(node, nodes.If):
            self.kind(node.test)  # no content is empty, so for the same roles it is always as true
            self.body([*node.body, *node.elif_, *node.else_])
        elif isinstance(node, nodes.For):
            self.loop(node)
        elif isinstance(node, nodes.Assign):
            kind = self.kind(node.node)
            if kind == _NAMESPACE and not isinstance(node.node, nodes.Call):
                raise _Looks  # a second name for it
            self.set(node.target, kind)
        elif isinstance(node, nodes.ExprStmt):
            self.plain(node.node)
        elif not isinstance(node, nodes.Break | nodes.Continue):
            raise _Looks

    def loop(self, node: nodes.For) -> None:
        kind = self.kind(node.iter)
        if kind not in (_PLAIN, _MESSAGES) or node.recursive:
            raise _Looks
        self.set(node.target, _MESSAGE if kind == _MESSAGES else _PLAIN)
        if node.test is not None:
            self.kind(node.test)
        self.body(node.body)
        self.body(node.else_)

    # Expressions

    def plain(self, node: nodes.Node | None) -> int:
        """An expression that must have nothing of what was said."""
        if node is not None and self.kind(node) != _PLAIN:
            raise _Looks
        return _PLAIN

    def kind(self, node: nodes.Node) -> int:
        known = getattr(self, f"_{type(node).__name__.lower()}", None)
        if known is None:
            raise _Looks
        kind: int = known(node)
        return kind

    def _const(self, node: nodes.Const) -> int:
        return _PLAIN

    def _name(self, node: nodes.Name) -> int:
        if node.name == "loop":
            raise _Looks  # it has messages inside: only its attributes are followed
        return self.kinds.get(node.name, _PLAIN)

    def _getattr(self, node: nodes.Getattr) -> int:
        if isinstance(node.node, nodes.Name):
            if node.node.name == "loop":
                return _MESSAGE if node.attr in ("previtem", "nextitem") else _PLAIN
            if self.kinds.get(node.node.name) == _NAMESPACE:
                return self.kinds.get((node.node.name, node.attr), _PLAIN)
        return self._of(self.kind(node.node), node.attr)

    def _getitem(self, node: nodes.Getitem) -> int:
        kind = self.kind(node.node)
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            return self._of(kind, node.arg.value)
        if isinstance(node.arg, nodes.Slice):
            for part in (node.arg.start, node.arg.stop, node.arg.step):
                self.plain(part)
            return self._among(kind, _MESSAGES)
        self.plain(node.arg)
        return self._among(kind, _MESSAGE)

    def _of(self, kind: int, key: str) -> int:
        if kind == _MESSAGE and not hasattr(dict, key):  # message.items() has all of it
            return _SAID if key == "content" else _PLAIN
        if kind == _PLAIN:
            return _PLAIN
        raise _Looks

    def _among(self, kind: int, found: int) -> int:
        if kind == _MESSAGES:
            return found
        if kind == _PLAIN:
            return _PLAIN
        raise _Looks

    def _add(self, node: nodes.BinExpr) -> int:
        kinds = {self.kind(node.left), self.kind(node.right)}
        if kinds - {_PLAIN, _SAID}:
            raise _Looks
        return max(kinds)

    def _concat(self, node: nodes.Concat) -> int:
        kinds = {self.kind(part) for part in node.nodes}
        if kinds - {_PLAIN, _SAID}:
            raise _Looks
        return max(kinds, default=_PLAIN)

    def _arithmetic(self, node: nodes.BinExpr) -> int:
        return max(self.plain(node.left), self.plain(node.right))

    _sub = _mul = _mod = _floordiv = _div = _arithmetic

    def _condexpr(self, node: nodes.CondExpr) -> int:
        self.kind(node.test)
        kinds = {self.kind(node.expr1), _PLAIN if node.expr2 is None else self.kind(node.expr2)}
        if len(kinds - {_PLAIN}) > 1:
            raise _Looks
        return max(kinds)

    def _not(self, node: nodes.Not) -> int:
        self.kind(node.node)
        return _PLAIN

    def _either(self, node: nodes.BinExpr) -> int:
        kinds = {self.kind(node.left), self.kind(node.right)}
        if len(kinds - {_PLAIN}) > 1:
            raise _Looks
        return max(kinds)  # `a or b` is one of them

    _and = _or = _either

    def _compare(self, node: nodes.Compare) -> int:
        self.plain(node.expr)
        for operand in node.ops:
            if not (operand.op in ("in", "notin") and self.kind(operand.expr) == _MESSAGE):  # whether it has a key
                self.plain(operand.expr)
        return _PLAIN

    def _test(self, node: nodes.Test) -> int:
        self._arguments(node)
        if self.kind(node.node) != _PLAIN and node.name not in _ASKS_FOR_TYPE:
            raise _Looks
        return _PLAIN

    def _filter(self, node: nodes.Filter) -> int:
        if node.node is None:
            raise _Looks
        kind = self.kind(node.node)
        self._arguments(node)
        has_arguments = bool(node.args or node.kwargs)
        if kind == _PLAIN or (kind == _SAID and node.name == "trim" and not has_arguments):
            return kind
        if kind == _MESSAGES and not has_arguments:
            found = {"length": _PLAIN, "count": _PLAIN, "first": _MESSAGE, "last": _MESSAGE, "list": _MESSAGES}
            if node.name in found:
                return found[node.name]
        if kind == _MESSAGES and node.name in ("selectattr", "rejectattr"):
            by = node.args[0] if node.args else None
            if isinstance(by, nodes.Const) and by.value == "role":
                return _MESSAGES
        raise _Looks

    def _call(self, node: nodes.Call) -> int:
        name = node.node.name if isinstance(node.node, nodes.Name) else None
        if name == "raise_exception" and name not in self.kinds:
            return _PLAIN
        self.plain(node.node)
        self._arguments(node)
        return _NAMESPACE if name == "namespace" else _PLAIN

    def _arguments(self, node: Any) -> None:
        for argument in node.args:
            self.plain(argument)
        for pair in node.kwargs:
            self.plain(pair.value)
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _Looks

    def _several(self, node: Any) -> int:
        for item in node.items:
            self.plain(item)
        return _PLAIN

    _list = _tuple = _several

    def _dict(self, node: nodes.Dict) -> int:
        for pair in node.items:
            self.plain(pair.key)
            self.plain(pair.value)
        return _PLAIN
