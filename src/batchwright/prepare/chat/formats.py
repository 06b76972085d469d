"""The normal form of a conversation, from rows in any of five formats, or an error that locates the fault in a row.

>>> row = {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}
>>> print(layout := detect(row))
sharegpt: turns in 'conversations' (from, value)
>>> layout.normalise(row)["messages"]
[{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}]

The normal form is {"messages": [...], "tools": [...]}, plain values only. A message has

- `role`, one of system, developer, user, assistant, tool;
- `content`, always a string ("" where an assistant only calls tools);
- `tool_calls` of an assistant, if it has any: [{"type": "function", "function": {"name", "arguments"}}], with
  "id" if it was given; the arguments are a dict;
- `weight`, a float, if the message has "weight" or "train";
- its other fields (`reasoning_content`, `name`, `tool_call_id`, ...), for the template. Null counts as absent, because
  a table has every field in every row. Values that JSON cannot hold (bytes, dates) are left out.

Messages that need no change are the row's own objects, not copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, NoReturn

from batchwright.base.checks import one_of
from batchwright.base.errors import SpecError
from batchwright.base.words import suggest
from batchwright.prepare.chat.messages import (
    MESSAGES_ROLES,
    ROLES,
    SHAREGPT_ROLES,
    ChatError,
    Message,
    Turns,
    at_turn,
    check_order,
    likely_role,
    names_in_words,
    read_turns,
    text_of,
    tools_of,
    what_is,
)

__all__ = ["Layout", "detect", "layout_of"]

Row = Mapping[str, Any]
Conversation = dict[str, Any]


class _Format(NamedTuple):
    main: tuple[str, ...]
    """Columns that every row must have."""
    names: tuple[str, ...]
    """All columns of the format, and the fields of a turn. Rows have the same names unless `names` says otherwise."""


_TURN = ("role", "content")
FORMATS = {
    "messages": _Format(("messages",), ("messages", "system", "tools", *_TURN)),
    "sharegpt": _Format(("conversations",), ("conversations", "system", "tools", "from", "value")),
    "alpaca": _Format(("instruction", "output"), ("instruction", "input", "output", "system", "history")),
    "prompt_completion": _Format(("prompt", "completion"), ("prompt", "completion", "system", "tools", *_TURN)),
    "preference": _Format(("chosen", "rejected"), ("prompt", "chosen", "rejected", "system", "tools", *_TURN)),
}
TURN_FIELDS = (*_TURN, "from", "value")
_LISTS = ("messages", "conversation", "conversations")
"""Columns in which detection searches for a list of messages."""
_PAIRS = list(product(("prompt", "question", "query"), ("response", "answer", "output")))
"""Names that an error suggests for a prompt and a completion. Detection does not accept them."""
_LOOKED_FOR = (
    "messages, conversation or conversations; instruction and output; prompt and completion; chosen and rejected"
)


@dataclass(frozen=True)
class Layout:
    """The format of a source's rows, and their columns. A value with plain fields."""

    format: str
    columns: tuple[tuple[str, str], ...]
    """(the format's name, the rows' name) of columns, and of fields of a turn."""
    roles: tuple[tuple[str, str], ...] = ()
    """(the rows' name of a role, the role), as the user gave them."""

    @classmethod
    def of(cls, format: str, columns: Mapping[str, str | None], roles: Iterable[tuple[str, str]] = ()) -> Layout:
        """A format with some other names for its columns; None leaves one out."""
        names = {name: columns.get(name, name) for name in FORMATS[format].names}
        return cls(format, tuple((name, column) for name, column in names.items() if column), tuple(roles))

    def spec(self) -> dict[str, Any]:
        """The layout as JSON, for fingerprints and manifests."""
        return {"format": self.format, "columns": dict(self.columns), "roles": dict(self.roles)}

    @cached_property
    def main(self) -> tuple[str, ...]:
        """The columns that every row must have."""
        return tuple(self._column[name] for name in FORMATS[self.format].main)

    @cached_property
    def _column(self) -> dict[str, str]:
        return dict(self.columns)

    @cached_property
    def _turns(self) -> Turns:
        """The fields and the roles of a turn."""
        role, content, roles = (*_TURN, MESSAGES_ROLES)
        if self.format == "sharegpt":
            role, content, roles = "from", "value", SHAREGPT_ROLES
        renamed = {name: column for name, column in self.columns if name != column}
        role, content = self._column.get(role, role), self._column.get(content, content)
        return Turns(role, content, roles | dict(self.roles), self.format, renamed)

    def _value(self, row: Row, name: str) -> Any:
        column = self._column.get(name)
        return None if column is None else row.get(column)

    def normalise(self, row: Row) -> Conversation | tuple[Conversation, Conversation]:
        """The conversation of a row in the normal form. A preference has two: (chosen, rejected)."""
        if any(row.get(column) is None for column in self.main):
            self._raise_not_there(row)
        tools = tools_of(self._value(row, "tools"))
        if self.format == "preference":
            chosen, rejected = (self._side(row, column) for column in self.main)
            return {"messages": chosen, "tools": tools}, {"messages": rejected, "tools": tools}
        messages = self._system(row)
        has_system = bool(messages)
        if self.format == "alpaca":
            self._read_alpaca(row, messages)
        elif self.format == "prompt_completion":
            prompt, completion = self.main
            self._read_part(row[prompt], "user", messages, prompt)
            messages = [_not_learned(message) for message in messages]
            self._read_part(row[completion], "assistant", messages, completion)
        else:
            self._read_list(row, messages)
        return {"messages": _checked(messages, has_system), "tools": tools}

    def _side(self, row: Row, column: str) -> list[Message]:
        """One of the two conversations of a preference."""
        prompt = self._value(row, "prompt")
        asked: list[Message] = []
        answer: list[Message] = []
        if prompt is not None:
            self._read_part(prompt, "user", asked, self._column["prompt"])
        elif isinstance(row[column], str):
            raise ChatError(
                "no prompt",
                f"{column!r} is text, and there is no prompt before it",
                remedy="format='preference', columns={'prompt': 'COLUMN'}, or make messages of it in a step before",
            )
        self._read_part(row[column], "assistant", answer, column)
        if prompt is None or _contains(answer, asked, prompt):
            asked = []
        elif answer[0]["role"] not in ("assistant", "tool"):
            raise ChatError(
                "prompt does not fit",
                f"{column!r} begins with a {answer[0]['role']} message, and not with the prompt",
                remedy="format='preference', columns={'prompt': None}, if both are whole conversations",
            )
        system = self._system(row)
        return _checked([*system, *asked, *answer], bool(system))

    def _system(self, row: Row) -> list[Message]:
        """The system message that a row has as a column of its own."""
        text = self._value(row, "system")
        if text is None or text == "":
            return []
        return [{"role": "system", "content": self._text(text, "system", 0)}]

    def _text(self, value: Any, name: str, turn: int) -> str:
        with at_turn(turn):
            return text_of(value, f"column {self._column[name]!r}")

    def _read_list(self, row: Row, messages: list[Message]) -> None:
        (column,) = self.main
        turns = row[column]
        if not isinstance(turns, list | tuple):
            raise ChatError(
                "no messages",
                f"{column!r} is {what_is(turns)}, not a list of messages",
                remedy="decode it in a step before",
            )
        if not turns:
            raise ChatError("empty conversation", f"{column!r} has no messages")
        first = turns[0]  # tells messages from ShareGPT if both have the same column name
        if isinstance(first, dict) and first.get(self._turns.role) is None:
            self._refuse_another(row)
        read_turns(turns, self._turns, messages)

    def _read_alpaca(self, row: Row, messages: list[Message]) -> None:
        past = self._value(row, "history") or []
        for pair in past if isinstance(past, list | tuple) else [past]:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                reason = f"an item of {self._column['history']!r} is {what_is(pair)}, not [instruction, output]"
                raise ChatError("not a message", reason, len(messages))
            for role, said in zip(("user", "assistant"), pair, strict=True):
                messages.append({"role": role, "content": self._text(said, "history", len(messages))})
        turn = len(messages)
        instruction, output = self.main
        asked = [self._text(row[instruction], "instruction", turn)]
        if self._value(row, "input") is not None:
            asked.append(self._text(self._value(row, "input"), "input", turn))
        if not any(asked):
            raise ChatError("missing content", f"{instruction!r} is empty", turn)
        messages.append({"role": "user", "content": "\n".join(filter(None, asked))})
        messages.append({"role": "assistant", "content": self._text(row[output], "output", turn + 1)})

    def _read_part(self, value: Any, role: str, messages: list[Message], column: str) -> None:
        """A prompt or an answer: text, a list of messages, or one message."""
        if isinstance(value, str):
            messages.append({"role": role, "content": value})
            return
        turns = [value] if isinstance(value, dict) else value
        if not isinstance(turns, list | tuple):
            reason = f"{column!r} is {what_is(value)}, not text or a list of messages"
            raise ChatError("content is not text", reason, len(messages))
        if not turns:
            raise ChatError("empty conversation", f"{column!r} has no messages")
        try:
            read_turns(turns, self._turns, messages)
        except ChatError as error:
            error.reason = f"in {column!r}: {error.reason}"
            raise

    def _raise_not_there(self, row: Row) -> NoReturn:
        self._refuse_another(row)
        columns = zip(FORMATS[self.format].main, self.main, strict=True)
        name, column = next(pair for pair in columns if row.get(pair[1]) is None)
        reason = f"column {column!r} is null"
        if column not in row:
            reason = f"no column {column!r}: this row has {names_in_words(row)}"
        raise ChatError("no messages" if name in _LISTS else f"no {name}", reason)

    def _refuse_another(self, row: Row) -> None:
        try:
            other = detect(row)
        except ChatError:
            return
        if (other.format, other.main) != (self.format, self.main):
            raise ChatError(
                "another format",
                f"this row is {other}; expected {self}",
                remedy="one format in a source: put rows of each format into files of their own",
            )

    def __str__(self) -> str:
        names, shown = self._column, {*FORMATS[self.format].main}
        match self.format:
            case "messages" | "sharegpt":
                noun = "messages" if self.format == "messages" else "turns"
                what = f"{noun} in {self.main[0]!r} ({self._turns.role}, {self._turns.content})"
                shown |= {*TURN_FIELDS}
            case "preference":
                what = f"{self.main[0]!r} over {self.main[1]!r}"
                if "prompt" in names:
                    what += f", after {names['prompt']!r}"
                    shown.add("prompt")
            case _:
                what = " and ".join(map(repr, self.main))
        more = [f"{name} in {its!r}" for name, its in self.columns if name not in shown and its != name]
        more += [f"no {name}" for name in FORMATS[self.format].names if name not in names]
        more += [f"role {given!r} is {role}" for given, role in self.roles]
        return "; ".join([f"{self.format}: {what}", *more])


# Detection


def detect(row: Row) -> Layout:
    """The layout of a row. A ChatError if no layout fits, or more than one."""
    found = [
        Layout.of(format, {})
        for format in ("alpaca", "prompt_completion", "preference")
        if all(row.get(name) is not None for name in FORMATS[format].main)
    ]
    found += [layout for column in _LISTS if (layout := _of_list(row.get(column), column)) is not None]
    if not found:
        raise _unknown(row)
    if len(found) > 1:
        raise _several(found)
    if found[0].format == "prompt_completion" and isinstance(row.get("label"), bool):
        raise ChatError(
            "unknown format",
            "prompt, completion and label: a label says whether the completion is a good one",
            remedy="format='prompt_completion' to train on all of them, with where= on the good ones only",
        )
    return found[0]


def _of_list(turns: Any, column: str) -> Layout | None:
    """The layout by the first item of a list of messages."""
    if not isinstance(turns, list | tuple) or not turns or not isinstance(turns[0], dict):
        return None
    if turns[0].get("role") is not None:
        return Layout.of("messages", {"messages": column})
    if turns[0].get("from") is not None:
        return Layout.of("sharegpt", {"conversations": column})
    return None


def _several(layouts: list[Layout]) -> ChatError:
    words = [f"{layout.format} ({', '.join(map(repr, layout.main))})" for layout in layouts]
    first, second = layouts[:2]
    remedy = " or ".join(f"format={layout.format!r}" for layout in layouts)
    if first.format == second.format:
        remedy = f"columns={{{FORMATS[first.format].main[0]!r}: {first.main[0]!r}}}, or the other"
    return ChatError("several formats", f"this row can be {' or '.join(words)}", remedy=remedy)


def _unknown(row: Row) -> ChatError:
    for column in _LISTS:
        value = row.get(column)
        if isinstance(value, str):
            reason = f"{column!r} is str, not a list of messages"
            return ChatError("unknown format", reason, remedy="decode it in a step before")
        if isinstance(value, list | tuple):
            return _unknown_list(value, column)
    remedy = "columns={'messages': 'COLUMN'}, or format= and columns= of another format"
    for asked, answered in _PAIRS:
        if row.get(asked) is not None and row.get(answered) is not None:
            remedy = f"columns={{'prompt': {asked!r}, 'completion': {answered!r}}}, if that is what they are"
            break
    reason = f"this row has {names_in_words(row)}; looked for {_LOOKED_FOR}"
    return ChatError("unknown format", reason, remedy=remedy)


def _unknown_list(turns: Sequence[Any], column: str) -> ChatError:
    if not turns:
        return ChatError("empty conversation", f"{column!r} has no messages")
    has = what_is(turns[0])
    if isinstance(turns[0], dict):
        has = f"an object with {names_in_words(turns[0])}"
    reason = f"the first item of {column!r} is {has}; looked for 'role' and 'content', or 'from' and 'value'"
    remedy = f"columns={{'messages': {column!r}, 'role': 'FIELD', 'content': 'FIELD'}}"
    return ChatError("unknown format", reason, remedy=remedy)


# Messages


def _not_learned(message: Message) -> Message:
    """A message of a prompt, with weight 0 for an assistant: its words there are not the answer."""
    if message["role"] != "assistant" or "weight" in message:
        return message
    return {**message, "weight": 0.0}


def _checked(messages: list[Message], has_system: bool) -> list[Message]:
    if has_system and messages[1:2] == messages[:1]:
        del messages[0]  # said twice, the same
    check_order(messages)
    return messages


def _contains(answer: list[Message], asked: list[Message], prompt: Any) -> bool:
    """Whether an answer is a whole conversation, with the prompt in it."""
    if isinstance(prompt, str):  # the first question, or the last one of a longer conversation
        return any(m["role"] == "user" and m["content"] == prompt for m in answer[:-1])
    begins = [(m["role"], m["content"]) for m in asked]
    skip = int(answer[0]["role"] == "system" != asked[0]["role"])
    return [(m["role"], m["content"]) for m in answer[skip : skip + len(asked)]] == begins


# The parameters format=, columns= and roles=


def layout_of(
    format: str | None = None,
    columns: Mapping[str, str | None] | None = None,
    roles: Mapping[str, str] | None = None,
) -> Layout | None:
    """The layout that a user gave, or None if it must be detected.

    >>> print(layout_of("messages", {"messages": "dialog", "role": "speaker"}))
    messages: messages in 'dialog' (speaker, content)
    >>> print(layout_of(columns={"prompt": "question", "completion": "answer"}))
    prompt_completion: 'question' and 'answer'

    `columns` is {the format's name: the rows' name}; None leaves an optional column out. `roles` is
    {the rows' name of a role: system, developer, user, assistant or tool}.
    """
    columns = _mapping("columns", columns, "columns={'messages': 'dialog'}")
    roles = _mapping("roles", roles, "roles={'bot': 'assistant'}")
    for given, role in roles.items():
        _check_role(given, role)
    if format is None:
        _check_names(columns, FORMATS, "no format has")
        if not columns and not roles:
            return None
        format = _format_with(columns)
    one_of(FORMATS, format=format)
    _check_names(columns, [format], f"format {format!r} does not have")
    needed = {*FORMATS[format].main, *TURN_FIELDS}
    for name, column in columns.items():
        is_name = isinstance(column, str) and column != ""
        if not is_name and (column is not None or name in needed):
            raise SpecError(
                f"columns={{{name!r}: {column!r}}} names no column",
                parameter="columns",
                remedy=f"{{{name!r}: 'its name in your rows'}}",
            )
    layout = Layout.of(format, columns, roles.items())
    if len(set(layout.main)) < len(layout.main):
        raise SpecError(
            f"columns= takes {' and '.join(FORMATS[format].main)} from one column, {layout.main[0]!r}",
            parameter="columns",
            remedy="a column for each",
        )
    return layout


def _mapping(parameter: str, given: Any, remedy: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise SpecError(f"{parameter}={given!r} is not a mapping", parameter=parameter, remedy=remedy)
    return given


def _check_role(given: Any, role: Any) -> None:
    if isinstance(given, str) and role in ROLES:
        return
    raise SpecError(
        f"roles={{{given!r}: {role!r}}}: {role!r} is not a role",
        parameter="roles",
        known=", ".join(ROLES),
        remedy=f"{{{given!r}: {likely_role(str(role))!r}}}",
    )


def _check_names(columns: Mapping[str, Any], formats: Iterable[str], which: str) -> None:
    known = dict.fromkeys(name for format in formats for name in FORMATS[format].names)
    for name in columns:
        if name not in known:
            raise SpecError(
                f"columns= names {name!r}, which {which}",
                parameter="columns",
                known=", ".join(known),
                remedy=repr(suggest(name, known) or "first what the format calls it, then what your rows call it"),
            )


def _format_with(columns: Mapping[str, Any]) -> str:
    """The one format that has all of these names."""
    fit = [format for format, its in FORMATS.items() if columns.keys() <= {*its.names}]
    if len(fit) == 1:
        return fit[0]
    fault = "columns= has names of several formats"
    if fit:
        fault = f"columns= fits {' and '.join(fit)}"
    if not columns:
        fault, fit = "roles= without format=: which roles there are depends on the format", []
    raise SpecError(
        fault,
        parameter="format",
        known=", ".join(FORMATS),
        remedy=f"format={[*fit, 'messages'][0]!r}, or another of them",
    )
