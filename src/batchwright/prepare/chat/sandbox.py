"""Chat templates come from strangers: Jinja as transformers sets it up, in the immutable sandbox, with limits on work.

A template is made to count what it does (loop rounds weighed by what is in the loop, calls, characters made), so that
an endless one ends in an error, without signals, threads or another process. No text depends on the time or on chance:
the same template and conversation give the same one on every day, or the error that a limit was met.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import time
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes
from jinja2.exceptions import SecurityError

from batchwright.base.errors import SpecError
from batchwright.prepare.chat.faults import ChatError

__all__ = ["GENERATION_CLOSE", "GENERATION_OPEN", "MAX_CHARACTERS", "MAX_STEPS", "Compiled", "compile_template"]

MAX_STEPS = 2_000_000
"""Work of one render: nodes of the template that loops and calls ran. Real templates need some hundreds a message."""
MAX_CHARACTERS = 16_000_000
"""Characters of one text that a template makes, beyond what the conversation brought (eight times over)."""
MAX_MADE = 16 * MAX_CHARACTERS
"""Characters of all texts that one render makes on its way."""
MAX_ITEMS = 200_000
"""Things inside one list or mapping that is printed, and items of a list that is repeated."""
MAX_INTEGER = 1_000_000
"""Integers as arguments: what pads, repeats or indents by more is not a chat template."""
MAX_SECONDS = 0.5
"""CPU time of one render, beyond what a long conversation may take: the last net, for work that no count sees
(searching a long text in a loop). Real templates take a thousandth of it."""

GENERATION_OPEN, GENERATION_CLOSE = "\ufdd0\ufdd4\ufde0\ufde0\ufde0\ufde0", "\ufdd0\ufdd5\ufde0\ufde0\ufde0\ufde0"
"""Where `{% generation %}` blocks start and stop, in renders that ask for it."""

_CHECK_STEPS = 500
_WIDTH = re.compile(r"\d{7,}")


class _Limit(Exception):
    """A template that asks for too much work."""


class _Meter:
    """What one render did so far. Threads that share a template share it: limits are looser then, texts the same."""

    def __init__(self) -> None:
        self.start(0, 0, 0)

    def start(self, num_nodes: int, num_messages: int, num_characters: int) -> None:
        self.steps = self.made = 0
        self.max_steps = MAX_STEPS + 4 * num_nodes * num_messages
        self.max_seconds = MAX_SECONDS + num_messages * 1e-2 + num_characters * 1e-6
        self.max_characters = MAX_CHARACTERS + 8 * num_characters
        self.max_made = MAX_MADE + 64 * num_characters
        self.check_at, self.seconds = _CHECK_STEPS, -1.0

    def step(self, steps: int) -> None:
        self.steps += steps
        if self.steps > self.check_at:
            self._check()

    def _check(self) -> None:
        if self.steps > self.max_steps:
            raise _Limit(f"it takes more than {self.max_steps:,} steps: a loop or recursion without end")
        self.check_at = self.steps + _CHECK_STEPS
        now = time.thread_time()
        if self.seconds < 0:
            self.seconds = now
        elif now - self.seconds > self.max_seconds:
            raise _Limit(f"it takes more than {self.max_seconds:.1f} s of CPU time")

    def will_make(self, num_characters: int) -> None:
        """Asked before anything that may be large is made."""
        self.made += num_characters
        if num_characters > self.max_characters or self.made > self.max_made:
            raise _Limit(f"it makes texts of more than {self.max_characters:,} characters")

    def text_size(self, value: Any) -> int:
        """About how many characters a value has when printed."""
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, dict | list | tuple | set | frozenset | jinja2.utils.Namespace):
            return self._size_inside(value)
        return 20

    def _size_inside(self, value: Any) -> int:
        size, left, seen = 0, [value], 0
        while left:
            seen += 1
            if seen > MAX_ITEMS:
                raise _Limit(f"it prints a list or mapping of more than {MAX_ITEMS:,} things")
            item = left.pop()
            if isinstance(item, jinja2.utils.Namespace):
                item = item._Namespace__attrs
            if isinstance(item, dict):
                left.extend(item.values())
                size += sum(map(len, map(str, item)))
            elif isinstance(item, list | tuple | set | frozenset):
                left.extend(item)
            else:
                size += len(item) if isinstance(item, str | bytes) else 20
        self.step(seen)
        return size

    def check_integers(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, int | float) and abs(value) > MAX_INTEGER:
                raise _Limit(f"it calls a function with {value:.6g}; more than {MAX_INTEGER:,} is not allowed")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The immutable sandbox, whose operators, calls and filters are counted."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=self._printed,
        )
        self.meter = _Meter()
        self.num_nodes = 0
        self.concat = self._concat  # type: ignore[method-assign]
        for chance in ("random", "pprint"):  # one is not reproducible, the other takes minutes for nested lists
            del self.filters[chance]
        del self.globals["lipsum"]  # chance again
        self.filters["tojson"] = _tojson
        self.filters = {name: self._counted_filter(name, function) for name, function in self.filters.items()}
        self.filters |= {_ROUNDS: self._rounds, _JOINED: self._joined, _MARK: self._mark, _SIZED: self._sized}
        self.globals |= {"raise_exception": _raise_exception, "dict": _dict, "namespace": _Namespace}

    def parse_counted(self, source: str) -> nodes.Template:
        """The tree of a template, with counters put in."""
        tree = self.parse(source)
        self.num_nodes = _count_nodes(tree)
        _put_counters(tree)
        return tree

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        # Jinja would print nothing for `{{ ''.__class__ }}`: who tries, should hear it.
        raise SecurityError(f"{attribute!r} of a {type(obj).__name__}")

    # What templates do, counted

    def _concat(self, parts: Iterable[str]) -> str:
        meter, size, texts = self.meter, 0, []
        for part in parts:
            size += len(part)
            if size > meter.max_characters:
                break
            texts.append(part)
        meter.will_make(size)
        return "".join(texts)

    def _printed(self, value: Any) -> Any:
        if not isinstance(value, str):
            self.meter.will_make(self.meter.text_size(value))
        return value

    @staticmethod
    @jinja2.pass_context
    def _rounds(context: Any, iterable: Any, weight: int) -> Iterator[Any]:
        step = context.environment.meter.step
        for item in iterable:
            step(weight)
            yield item

    @staticmethod
    @jinja2.pass_context
    def _joined(context: Any, parts: list[Any]) -> str:
        meter = context.environment.meter
        meter.will_make(sum(map(meter.text_size, parts)))
        return "".join(map(str, parts))

    @staticmethod
    @jinja2.pass_context
    def _sized(context: Any, value: Any) -> Any:
        """What is compared or hashed: lists that have each other inside many times over would take for ever."""
        if isinstance(value, list | tuple | dict):
            context.environment.meter.text_size(value)
        return value

    @staticmethod
    @jinja2.pass_context
    def _mark(context: Any, mark: str) -> str:
        return mark if context.parent.get(_MARK) else ""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = self.meter
        if operator == "+":
            if type(left) is str and type(right) is str:
                meter.made += len(left) + len(right)
                if meter.made > MAX_CHARACTERS:
                    meter.made -= len(left) + len(right)
                    meter.will_make(len(left) + len(right))
                return left + right
            if isinstance(left, str | list | tuple | bytes) and isinstance(right, str | list | tuple | bytes):
                meter.will_make(len(left) + len(right))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(many, str | bytes | list | tuple):
                    if not isinstance(many, str | bytes) and len(many) * times > MAX_ITEMS:
                        raise _Limit(f"it makes a list of more than {MAX_ITEMS:,} things")
                    meter.will_make(len(many) * times)
            _check_power(left, right, 1)
        elif operator == "**":
            _check_power(left, right, None)
        elif isinstance(left, str | bytes):
            meter.check_integers(right if isinstance(right, tuple) else (right,))
            self._check_format(left, "%", (right,))
        return self.binop_table[operator](left, right)

    def _check_format(self, form: str | bytes, sign: str, values: Iterable[Any]) -> None:
        if isinstance(form, bytes):
            form = form.decode("latin-1")
        if _WIDTH.search(form):
            raise _Limit("it formats with a width of millions of characters")
        biggest = max(map(self.meter.text_size, values), default=0)
        num_widths = sum(map(int, re.findall(r"\d{4,6}", form)))
        self.meter.will_make(len(form) + form.count(sign) * biggest + num_widths)

    def call(*arguments: Any, **kwargs: Any) -> Any:
        self, context, function, *args = arguments  # names of their own could meet a keyword of the template
        meter = self.meter
        if isinstance(function, jinja2.runtime.Macro | jinja2.runtime.LoopContext):
            meter.step(self.num_nodes + 30)  # a call takes longer than most nodes
        else:
            meter.step(1)
            if args or kwargs:
                self._check_call(function, args, kwargs)
        result = super(_Environment, self).call(context, function, *args, **kwargs)
        if isinstance(result, range):
            meter.step(len(result) // 8)
        elif isinstance(result, str | bytes | list):
            meter.will_make(len(result))
        return result

    def _check_call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        meter = self.meter
        if function is not jinja2.sandbox.safe_range:  # which has a limit of its own
            meter.check_integers((*args, *kwargs.values()))
        owner = getattr(function, "__self__", None)
        if isinstance(owner, list | tuple | dict):  # index(), count(), get()
            for value in (owner, *args):
                meter.text_size(value)
        if isinstance(owner, str | bytes):
            meter.step(len(owner) >> 8)
            name = function.__name__
            if name == "join" and args and not isinstance(args[0], str | bytes):
                args[0] = items = list(args[0])
                meter.will_make(sum(map(meter.text_size, items)) + len(owner) * len(items))
            elif name == "replace" and len(args) >= 2 and isinstance(args[1], type(owner)):
                meter.will_make(len(owner) + owner.count(args[0]) * len(args[1]))
            elif name in ("expandtabs", "translate"):
                widest = max(a if isinstance(a, int) else meter.text_size(a) for a in (*args, *kwargs.values()))
                meter.will_make(len(owner) * widest)
        elif isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):  # a sandboxed str.format
            form = getattr(function.__wrapped__, "__self__", "")
            if isinstance(form, str):
                self._check_format(form, "{", (*args, *kwargs.values()))

    def _counted_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passed = jinja2.utils._PassArg.from_obj(function) is not None
        meter = self.meter

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            first, *others = args[1:] if passed else args
            if isinstance(first, Generator | map | filter):
                first = list(first)
                args = (args[0], first, *others) if passed else (first, *others)
            if isinstance(first, str | bytes | list | tuple | dict | range):
                meter.step(
                    1 + (len(first) >> 8 if isinstance(first, str | bytes) else 16 * len(first))
                )  # map and select take long
            if name not in ("default", "d", "int", "float", "round", "abs"):
                self._check_filter(name, first, (*others, *kwargs.values()))
            result = function(*args, **kwargs)
            if isinstance(result, str):
                meter.will_make(len(result))
            return result

        return counted

    def _check_filter(self, name: str, value: Any, others: tuple[Any, ...]) -> None:
        meter = self.meter
        if others:
            meter.check_integers(others)
        size = meter.text_size(value)
        if name == "tojson" and any(isinstance(other, int) and other > 100 for other in others):
            raise _Limit("it writes JSON with an indent of more than 100")
        if name == "format":
            self._check_format(str(value), "%", others)
        elif name == "replace" and len(others) >= 2 and isinstance(value, str):
            old, new = str(others[0]), str(others[1])
            meter.will_make(size + value.count(old) * len(new))
        elif others and name in ("indent", "wordwrap", "join", "batch", "slice"):
            count = len(value) if isinstance(value, list | tuple | dict) else size
            count = value.count("\n") + 1 if name == "indent" and isinstance(value, str) else count
            widest = max(o if isinstance(o, int) else len(o) if isinstance(o, str) else 0 for o in others)
            meter.will_make(size + count * widest)
        elif isinstance(value, dict | list | tuple):
            meter.will_make(size)


def _check_power(left: Any, right: Any, times: int | None) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if times is None else left.bit_length() + right.bit_length()
        if bits > 4096:
            raise _Limit("it makes a number of more than 4,096 bits")


# Names that no template can write
_ROUNDS, _JOINED, _MARK, _SIZED = "\0rounds", "\0joined", "\0mark", "\0sized"


def _count_nodes(node: nodes.Node) -> int:
    return 1 + sum(map(_count_nodes, node.iter_child_nodes()))


def _put_counters(node: nodes.Node) -> None:
    """Count the rounds of every loop; let `~` ask before it makes a text, and `==` before it goes through lists."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            for at, child in enumerate(value):
                if isinstance(child, nodes.Node):
                    _put_counters(child)
                    value[at] = _joining(child)
        elif isinstance(value, nodes.Node):
            _put_counters(value)
            setattr(node, name, _joining(value))
    if isinstance(node, nodes.For):
        weight = sum(map(_count_nodes, [*node.body, *([node.test] if node.test else [])])) + 3
        node.iter = _filtered(node.iter, _ROUNDS, nodes.Const(weight))
    elif isinstance(node, nodes.Compare):
        if not any(isinstance(side, nodes.Const) for side in (node.expr, *(operand.expr for operand in node.ops))):
            node.expr = _filtered(node.expr, _SIZED)
            for operand in node.ops:
                operand.expr = _filtered(operand.expr, _SIZED)
    elif isinstance(node, nodes.Pair) and not isinstance(node.key, nodes.Const):
        node.key = _filtered(node.key, _SIZED)


def _joining(node: nodes.Node) -> nodes.Node:
    return _filtered(nodes.List(node.nodes), _JOINED) if isinstance(node, nodes.Concat) else node


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: what the template's author says that the model must learn."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own way)

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [
            nodes.Output([_filtered(nodes.Const(mark, lineno=lineno), _MARK)], lineno=lineno)
            for mark in (GENERATION_OPEN, GENERATION_CLOSE)
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
    """What a template said with `raise_exception`."""


def _raise_exception(message: object = "") -> None:
    raise _Refused(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own escapes for HTML, which no model has seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _fixed_date(name: str, date: object) -> Callable[[str], str]:
    """What `strftime_now` is: a day that the user chose. Today's would make another text of the same data tomorrow."""
    try:
        day = datetime.datetime.fromisoformat(str(date))
    except ValueError:
        raise SpecError(
            f"strftime_now={date!r} is not a date", parameter="strftime_now", template=name, remedy="'2025-01-31'"
        ) from None
    return lambda form: day.strftime(form)


class Compiled:
    """A template, ready to render."""

    def __init__(self, source: str, name: str) -> None:
        self.name = name
        self._environment = _Environment()
        try:
            tree = self._environment.parse_counted(source)
            self._template = self._environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            lines = source.splitlines() or [""]
            line = lines[min(error.lineno, len(lines)) - 1].strip()
            raise SpecError(
                f"the chat template {name!r} is not valid Jinja: {error.message}",
                template=name,
                line=f"{error.lineno}: {line[:100]}",
                remedy="mend that line; chat_template= takes a name, a Jinja string or the path of a .jinja file",
            ) from None
        except RecursionError:
            raise SpecError(
                f"the chat template {name!r} is nested too deeply", template=name, remedy="a simpler template"
            ) from None
        self.has_generation: bool = any(
            isinstance(node, nodes.Filter) and node.name == _MARK for node in tree.find_all(nodes.Filter)
        )

    def render(self, variables: Mapping[str, Any], *, num_characters: int = 0, marks: bool = False) -> str:
        """The text. `num_characters` is how much the conversation itself brought: limits grow with it."""
        environment, template = self._environment, self._template
        num_messages = len(variables.get("messages", ()))
        environment.meter.start(environment.num_nodes, num_messages, num_characters)
        variables = {**variables, _MARK: marks}
        if "strftime_now" in variables:
            variables["strftime_now"] = _fixed_date(self.name, variables["strftime_now"])
        try:
            return environment.concat(template.root_render_func(template.new_context(variables)))
        except _Refused as error:
            reason = f"{self.name!r} says: {error}"
            raise ChatError(
                "refused by the template", reason, remedy="mend the conversation, or another chat template"
            ) from None
        except (_Limit, RecursionError, MemoryError, OverflowError) as error:
            what = "it calls itself too deeply" if isinstance(error, RecursionError) else str(error)
            raise SpecError(
                f"the chat template {self.name!r} does not end: {what}",
                template=self.name,
                remedy="mend its loops; for a trusted template this is a bug of its own",
            ) from None
        except SecurityError as error:
            raise SpecError(
                f"the chat template {self.name!r} tries to leave its sandbox: {error}",
                template=self.name,
                remedy="do not use this template; it reaches for Python's internals",
            ) from None
        except jinja2.UndefinedError as error:
            if "'strftime_now'" in str(error):
                raise SpecError(
                    f"the chat template {self.name!r} writes today's date: the same data would give another text "
                    "tomorrow",
                    template=self.name,
                    remedy="a fixed day: args={'strftime_now': '2025-01-31'}",
                ) from None
            raise self._failed(error) from None
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            AssertionError,
        ) as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> ChatError:
        reason = f"{self.name!r}: {error or type(error).__name__}"
        return ChatError("the template fails", reason, remedy="a conversation that has what the template asks for")


@functools.lru_cache(maxsize=64)
def compile_template(source: str, name: str) -> Compiled:
    return Compiled(source, name)
