"""The sandbox for chat templates, which are untrusted code: Jinja as in transformers, with limits on work.

There are two limits. Every round of a loop and every call checks the CPU clock: an endless template becomes an error,
without signals, threads or another process. And every operation that may make much text, or go through nested lists,
checks its size first. No text depends on the time or on chance: the same template and conversation give the same text
on every day, or the error that a limit was reached.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.visitor import NodeTransformer

from batchwright.base.errors import SpecError
from batchwright.prepare.chat.locate import tags_of
from batchwright.prepare.chat.messages import ChatError

MAX_SECONDS = 0.5
"""CPU time of one render, on top of the time for a long conversation. Real templates take a thousandth of it."""
MAX_CHARACTERS = 16_000_000
"""Characters of one text that a template makes, on top of eight times those of the conversation."""
MAX_MADE = 16 * MAX_CHARACTERS
"""Characters of all texts that one render makes, intermediate ones included."""
MAX_ITEMS = 200_000
"""Items inside one list or mapping that is printed, compared or passed on."""
MAX_INTEGER = 1_000_000
"""The largest integer argument. No chat template pads, repeats or indents by more."""
MAX_BITS = 4096

_GENERATION_TAGS = tags_of(0)
"""The start and the stop of `{% generation %}` blocks, in renders that ask for them."""

_MULTIPLIES = {
    *("replace", "join", "format", "format_map", "%", "expandtabs", "translate", "indent", "tojson", "batch", "slice"),
    "wordwrap",
}
"""Filters, methods and operators whose result may be as long as two of their arguments multiplied."""
_TICKS = 16
"""Rounds and calls between two checks of the clock."""
_CONTAINERS = (dict, list, tuple, set, frozenset, jinja2.utils.Namespace)
# Names of filters that no template can write
_ROUNDS, _JOINED, _MARK, _SIZED = "\0rounds", "\0joined", "\0mark", "\0sized"


class _Limit(Exception):
    """The error for a template that needs too much work."""


class _Budget:
    """The work that one render may do. If threads share a template, the last one to begin is timed."""

    def __init__(self) -> None:
        self.start(0, 0)

    def start(self, num_messages: int, num_characters: int) -> None:
        self.ticks = self.made = 0
        self.thread, self.began = threading.get_ident(), time.thread_time()
        self.max_seconds = MAX_SECONDS + num_messages * 1e-2 + num_characters * 1e-6
        self.max_characters = MAX_CHARACTERS + 8 * num_characters
        self.max_made = MAX_MADE + 64 * num_characters

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks % _TICKS or threading.get_ident() != self.thread:
            return
        if time.thread_time() - self.began > self.max_seconds:
            raise _Limit(f"it takes more than {self.max_seconds:.1f} s of CPU time: a loop or recursion without end")

    def make(self, num_characters: int) -> None:
        """Check the size of a text or list before it is made."""
        self.made += num_characters
        if num_characters > self.max_characters or self.made > self.max_made:
            raise _Limit(f"it makes texts of more than {self.max_characters:,} characters")

    def size(self, value: Any) -> int:
        """The approximate number of characters of a value when printed."""
        if isinstance(value, str | bytes):
            return len(value)
        if not isinstance(value, _CONTAINERS):
            return 20
        size, left, seen = 0, [value], 0
        while left:
            seen += 1
            if seen > MAX_ITEMS:
                raise _Limit(f"it goes through a list or mapping of more than {MAX_ITEMS:,} things")
            item = left.pop()
            if isinstance(item, jinja2.utils.Namespace):
                item = item._Namespace__attrs
            if isinstance(item, dict):
                left.extend(item.values())
                size += sum(len(str(key)) for key in item)
            elif isinstance(item, _CONTAINERS):
                left.extend(item)
            elif isinstance(item, str | bytes):
                size += len(item)
            else:
                size += 20
        return size


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with a budget for operators, calls and filters."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=self._printed,
        )
        self.budget: _Budget = _Budget()
        self.concat = self._concat  # type: ignore[method-assign]
        for chance in ("random", "pprint"):  # the first is not reproducible; the second takes minutes for nested lists
            del self.filters[chance]
        del self.globals["lipsum"]  # not reproducible either
        self.filters["tojson"] = _tojson
        self.filters = {name: self._counted(name, function) for name, function in self.filters.items()}
        self.filters |= {_ROUNDS: self._rounds, _JOINED: self._joined, _SIZED: self._sized, _MARK: _mark}
        self.globals |= {"raise_exception": _raise_exception, "dict": _dict, "namespace": _Namespace}

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        # Jinja would print nothing for `{{ ''.__class__ }}`. An attempt should be an error.
        raise SecurityError(f"{attribute!r} of a {type(obj).__name__}")

    def _concat(self, parts: Iterable[str]) -> str:
        size, texts = 0, []
        for part in parts:
            size += len(part)
            if size > self.budget.max_characters:
                break
            texts.append(part)
        self.budget.make(size)
        return "".join(texts)

    def _printed(self, value: Any) -> Any:
        if not isinstance(value, str):
            self.budget.make(self.budget.size(value))
        return value

    def _rounds(self, iterable: Any) -> Iterator[Any]:
        for item in iterable:
            self.budget.tick()
            yield item

    def _joined(self, parts: list[Any]) -> str:
        self.budget.make(sum(map(self.budget.size, parts)))
        return "".join(map(str, parts))

    def _sized(self, value: Any) -> Any:
        """Check the size of a value that is compared or hashed. Lists nested many times would take forever."""
        self.budget.size(value)
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is type(right) is str:  # nearly always
            self.budget.make(len(left) + len(right))
            return left + right
        match operator:
            case "+" if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                self.budget.make(len(left) + len(right))
            case "*" | "**" if isinstance(left, int) and isinstance(right, int):
                _check_bits(operator, left, right)
            case "*":
                for many, times in ((left, right), (right, left)):
                    if isinstance(times, int) and isinstance(many, str | bytes | list | tuple):
                        self.budget.make(len(many) * times)
            case "%" if isinstance(left, str | bytes):
                self._allow("%", left, right if isinstance(right, tuple) else (right,))
        return self.binop_table[operator](left, right)

    def call(*arguments: Any, **kwargs: Any) -> Any:
        self, context, function, *args = arguments  # names of their own could meet a keyword of the template
        self.budget.tick()
        if not isinstance(function, jinja2.runtime.Macro | jinja2.runtime.LoopContext):
            args = self._allow_call(function, args, own_values(kwargs))
        result = super(TemplateEnvironment, self).call(context, function, *args, **kwargs)
        if isinstance(result, str | bytes | list):
            self.budget.make(len(result))
        return result

    def _allow_call(self, function: Any, args: list[Any], more: list[Any]) -> list[Any]:
        """Check a call. Returns its arguments."""
        name = getattr(function, "__name__", "")
        value = getattr(function, "__self__", None)
        if isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):  # a sandboxed str.format
            name, value = "format", getattr(function.__wrapped__, "__self__", "")
        if name == "join" and args:
            items = list(args[0])
            self._allow(name, items, (value,))
            return [items]
        if args or more:
            self._allow(name, value, [*args, *more])
        return args

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        num_passed = int(jinja2.utils._PassArg.from_obj(function) is not None)

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            value, others = args[num_passed], args[num_passed + 1 :]
            if isinstance(value, Generator | map | filter):
                value = list(value)
            return self.filter(name, functools.partial(function, *args[:num_passed]), value, others, kwargs)

        return counted

    def filter(
        self, name: str, function: Callable[..., Any], value: Any, others: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Apply the filter `name` to a value."""
        self.budget.tick()
        if name not in ("default", "d"):
            self._allow(name, value, (*others, *kwargs.values()))
        result = function(value, *others, **kwargs)
        if isinstance(result, str):
            self.budget.make(len(result))
        return result

    def _allow(self, name: str, value: Any, others: Sequence[Any]) -> None:
        """Raise if the filter, method or operator `name` may make too much of a value and its other arguments."""
        if name not in _MULTIPLIES and all(type(each) is str for each in (value, *others)):
            return
        numbers = [abs(other) for other in others if isinstance(other, int | float)]
        if max(numbers, default=0) > MAX_INTEGER:
            raise _Limit(f"it calls a function with {max(numbers):.6g}; more than {MAX_INTEGER:,} is not allowed")
        size = self._largest_result(name, value, others, numbers)
        if size > self.budget.max_characters:
            self.budget.make(size)

    def _largest_result(self, name: str, value: Any, others: Sequence[Any], numbers: Sequence[float]) -> int:
        """The largest number of characters that the filter, method or operator `name` may make."""
        size, sizes = self.budget.size(value), [self.budget.size(other) for other in others]
        match name:
            case "replace" if len(others) > 1 and isinstance(value, str) and isinstance(others[0], str):
                return size + value.count(others[0]) * sizes[1]
            case "join" if others:
                return size + len(value) * sizes[0]
            case "format" | "format_map" | "%" if isinstance(value, str | bytes):
                return _formatted_size(value, name, max(sizes, default=0))
            case "expandtabs" | "translate" | "indent" | "tojson" | "batch" | "slice" | "wordwrap":
                return size * max(int(max([*sizes, *numbers], default=0)), 1)
        return size


def own_values(kwargs: Mapping[str, Any]) -> list[Any]:
    """The keyword arguments of a call, without those that Jinja adds inside of loops."""
    return [value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")]


def _formatted_size(form: str | bytes, name: str, biggest: int) -> int:
    """The largest number of characters that a format can give, with fields of at most `biggest`, and widths."""
    text = form if isinstance(form, str) else form.decode("latin-1")
    widths = [int(width) for width in re.findall(r"\d{4,19}", text)]
    if max(widths, default=0) > MAX_INTEGER:
        raise _Limit("it formats with a width of millions of characters")
    return len(text) + text.count("%" if name == "%" else "{") * biggest + sum(widths)


def _check_bits(operator: str, left: int, right: int) -> None:
    """Refuse long numbers: one with millions of digits takes minutes."""
    bits = left.bit_length() + right.bit_length()
    if operator == "**":
        bits = left.bit_length() * right
    if bits > MAX_BITS:
        raise _Limit(f"it makes a number of more than {MAX_BITS:,} bits")


@jinja2.pass_context
def _mark(context: Any, mark: str) -> str:
    return mark if context.parent.get(_MARK) else ""


class _Counters(NodeTransformer):
    """Count the rounds of every loop. Check sizes before `~` makes a text and before `==` goes through lists."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _ROUNDS)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), _JOINED)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filtered(node.key, _SIZED)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        # Comparing with a constant is quick for any value, but `x in "words"` reads x.
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        has_constant = any(isinstance(side, nodes.Const) for side in sides)
        if not has_constant or (node.ops[0].op in ("in", "notin") and not isinstance(node.expr, nodes.Const)):
            node.expr = _filtered(node.expr, _SIZED)
        if not has_constant:
            for operand in node.ops:
                operand.expr = _filtered(operand.expr, _SIZED)
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: the text that the model must learn, by the template's author."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own way)

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [
            nodes.Output([_filtered(nodes.Const(mark, lineno=lineno), _MARK)], lineno=lineno)
            for mark in _GENERATION_TAGS
        ]
        return nodes.Scope([marks[0], *body, marks[1]], lineno=lineno)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without attributes that start with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name!r} here")
        super().__setitem__(name, value)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class _Refused(Exception):
    """The error that a template raised with `raise_exception`."""


def _raise_exception(message: object = "") -> None:
    raise _Refused(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own `tojson` escapes for HTML, which no model has seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)
"""Python's errors for a template that needs something that a conversation does not have."""


class CompiledTemplate:
    """A template, ready to render."""

    def __init__(self, source: str, name: str, environment: TemplateEnvironment) -> None:
        self.name = name
        self._environment = environment
        try:
            tree = _Counters().visit(environment.parse(source))
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            lines = source.splitlines() or [""]
            line = lines[min(error.lineno, len(lines)) - 1].strip()
            raise self._refused(
                f"is not valid Jinja: {error.message}",
                "mend that line; chat_template= takes a name, a Jinja string or the path of a .jinja file",
                line=f"{error.lineno}: {line[:100]}",
            ) from None
        except RecursionError:
            raise self._refused("is nested too deeply", "a simpler template") from None
        self.has_generation: bool = any(node.name == _MARK for node in tree.find_all(nodes.Filter))

    def render(self, variables: Mapping[str, Any], *, num_characters: int = 0, marks: bool = False) -> str:
        """The text. `num_characters` is the number of characters of the conversation: limits grow with it."""
        self._environment.budget.start(len(variables.get("messages", ())), num_characters)
        variables = {**variables, _MARK: marks}
        if "strftime_now" in variables:
            variables["strftime_now"] = self._fixed_date(variables["strftime_now"])
        try:
            return self._environment.concat(self._template.root_render_func(self._template.new_context(variables)))
        except _Refused as error:
            reason, remedy = f"{self.name!r} says: {error}", "mend the conversation, or another chat template"
            raise ChatError("refused by the template", reason, remedy=remedy) from None
        except RecursionError:
            raise self._endless("it calls itself too deeply") from None
        except (_Limit, MemoryError, OverflowError) as error:
            raise self._endless(str(error)) from None
        except SecurityError as error:
            remedy = "do not use this template; it reaches for Python's internals"
            raise self._refused(f"tries to leave its sandbox: {error}", remedy) from None
        except (jinja2.TemplateError, *_FAILURES) as error:
            if isinstance(error, jinja2.UndefinedError) and "'strftime_now'" in str(error):
                what = "writes today's date: the same data would give another text tomorrow"
                raise self._refused(what, "a fixed day: args={'strftime_now': '2025-01-31'}") from None
            reason, remedy = (
                f"{self.name!r}: {error or type(error).__name__}",
                "a conversation that has what the template asks for",
            )
            raise ChatError("the template fails", reason, remedy=remedy) from None

    def _refused(self, what: str, remedy: str, line: str | None = None) -> SpecError:
        return SpecError(f"the chat template {self.name!r} {what}", template=self.name, line=line, remedy=remedy)

    def _endless(self, what: str) -> SpecError:
        return self._refused(f"does not end: {what}", "mend its loops; for a trusted template this is a bug of its own")

    def _fixed_date(self, date: object) -> Callable[[str], str]:
        """The function `strftime_now` for a day that the user chose. Today's date would change the text every day."""
        try:
            return datetime.datetime.fromisoformat(str(date)).strftime
        except ValueError:
            raise SpecError(
                f"strftime_now={date!r} is not a date",
                parameter="strftime_now",
                template=self.name,
                remedy="'2025-01-31'",
            ) from None


@functools.lru_cache(maxsize=64)
def compile_template(source: str, name: str) -> CompiledTemplate:
    return CompiledTemplate(source, name, TemplateEnvironment())
