"""Rows as people have them -> one normal form of a conversation, or what is wrong with it, and in which message.

>>> row = {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}
>>> print(layout := detect(row))
sharegpt: turns in 'conversations' (from, value)
>>> layout.normalise(row)["messages"]
[{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}]

The normal form is {"messages": [...], "tools": [...]}, plain values only. A message has

- `role`, one of system, developer, user, assistant, tool;
- `content`, always a string ("" where an assistant only calls tools);
- `tool_calls` of an assistant, where there are any: [{"type": "function", "function": {"name", "arguments"}}], with
  "id" where it was given; the arguments are a dict;
- `weight`, a float, where the message said "weight" or "train";
- what else it had (`reasoning_content`, `name`, `tool_call_id`, ...), for the template. Null counts as absent: a table
  has every field in every row. Values that JSON has no word for (bytes, dates) are left out.

Messages that need no change are the row's own objects, not copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from batchwright.base.checks import one_of
from batchwright.base.errors import SpecError
from batchwright.base.words import suggest
from batchwright.prepare.chat.faults import ChatError
from batchwright.prepare.chat.messages import (
    LIKELY_ROLES,
    MESSAGES_ROLES,
    ROLES,
    SHAREGPT_ROLES,
    Message,
    Turns,
    check_order,
    listed,
    read_turns,
    text_of,
    tools_of,
    what_is,
)

__all__ = ["FORMATS", "Layout", "detect", "layout_of"]

FORMATS = ("messages", "sharegpt", "alpaca", "prompt_completion", "preference")

Row = Mapping[str, Any]
Conversation = dict[str, Any]

_FIELDS = {"role": "role", "content": "content"}
_NAMES: dict[str, dict[str, str]] = {
    "messages": {"messages": "messages", "system": "system", "tools": "tools", **_FIELDS},
    "sharegpt": {
        "conversations": "conversations",
        "system": "system",
        "tools": "tools",
        "from": "from",
        "value": "value",
    },
    "alpaca": {name: name for name in ("instruction", "input", "output", "system", "history")},
    "prompt_completion": {name: name for name in ("prompt", "completion", "system", "tools")} | _FIELDS,
    "preference": {name: name for name in ("prompt", "chosen", "rejected", "system", "tools")} | _FIELDS,
}
"""What each format looks for, by default under its own name. Fields of a turn are among them."""
_TURN_FIELDS = ("role", "content", "from", "value")
_MAIN = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
}
"""What every row must have."""
_LISTS = ("messages", "conversation", "conversations")
"""Columns in which detection looks for a list of messages."""
_PAIRS = [
    (asked, answered) for asked in ("prompt", "question", "query") for answered in ("response", "answer", "output")
]
"""Names that are not taken for a prompt and a completion, but offered."""


@dataclass(frozen=True)
class Layout:
    """Which format the rows of a source have, and in which columns. A value: its fields are plain."""

    format: str
    columns: tuple[tuple[str, str], ...]
    """(what the format calls it, what the rows call it): columns, and fields of a turn."""
    roles: tuple[tuple[str, str], ...] = ()
    """(a role as the rows write it, what it is), where the user said so."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are looked at; a row need not have all of them."""
        return tuple(sorted({column for name, column in self.columns if name not in _TURN_FIELDS}))

    def spec(self) -> dict[str, Any]:
        """What a fingerprint is made of, and a manifest keeps."""
        return {"format": self.format, "columns": dict(self.columns), "roles": dict(self.roles)}

    def normalise(self, row: Row) -> Conversation | tuple[Conversation, Conversation]:
        """The conversation of a row, in the normal form; of a preference both: (chosen, rejected)."""
        how = self._how
        if any(row.get(column) is None for column in how.main):
            self._raise_not_there(row)
        tools = tools_of(row.get(how.columns["tools"])) if "tools" in how.columns else []
        if self.format == "preference":
            chosen, rejected = self._pair(row)
            return {"messages": chosen, "tools": tools}, {"messages": rejected, "tools": tools}
        messages = _system_of(row, how)
        has_system = bool(messages)
        if self.format == "alpaca":
            _read_alpaca(row, how, messages)
        elif self.format == "prompt_completion":
            _read_side(row[how.columns["prompt"]], "user", how, messages, how.columns["prompt"])
            messages = [_not_learned(message) for message in messages]
            _read_side(row[how.columns["completion"]], "assistant", how, messages, how.columns["completion"])
        else:
            column = how.main[0]
            turns = row[column]
            if type(turns) is not list and not isinstance(turns, list | tuple):
                raise ChatError(
                    "no messages",
                    f"{column!r} is {what_is(turns)}, not a list of messages",
                    remedy="decode it in a step before" if isinstance(turns, str) else "",
                )
            if not turns:
                raise ChatError("empty conversation", f"{column!r} has no messages")
            self._refuse_other_turns(row, turns)
            read_turns(turns, how.turns, messages)
        if has_system and messages[1:2] == messages[:1]:
            del messages[0]  # said twice, the same
        check_order(messages)
        return {"messages": messages, "tools": tools}

    @cached_property
    def _how(self) -> _How:
        columns = dict(self.columns)
        sharegpt = self.format == "sharegpt"
        return _How(
            columns,
            tuple(columns[name] for name in _MAIN[self.format]),
            Turns(
                columns.get("from" if sharegpt else "role", "role"),
                columns.get("value" if sharegpt else "content", "content"),
                {**(SHAREGPT_ROLES if sharegpt else MESSAGES_ROLES), **dict(self.roles)},
                self.format,
                {name: column for name, column in self.columns if _NAMES[self.format][name] != column},
            ),
        )

    def _pair(self, row: Row) -> tuple[list[Message], list[Message]]:
        how = self._how
        prompt = row.get(how.columns["prompt"]) if "prompt" in how.columns else None
        asked: list[Message] = []
        if prompt is not None:
            _read_side(prompt, "user", how, asked, how.columns["prompt"])
        sides = []
        for column in how.main:
            answer: list[Message] = []
            if isinstance(row[column], str) and prompt is None:
                raise ChatError(
                    "no prompt",
                    f"{column!r} is text, and there is no prompt before it",
                    remedy="format='preference', columns={'prompt': 'COLUMN'}, or make messages of it in a step before",
                )
            _read_side(row[column], "assistant", how, answer, column)
            messages = _system_of(row, how)
            has_system = bool(messages)
            if prompt is not None and not _contains(answer, asked, prompt):
                if answer[0]["role"] not in ("assistant", "tool"):
                    raise ChatError(
                        "prompt does not fit",
                        f"{column!r} begins with a {answer[0]['role']} message, and not with the prompt",
                        remedy="format='preference', columns={'prompt': None}, if both are whole conversations",
                    )
                messages += asked
            messages += answer
            if has_system and messages[1:2] == messages[:1]:
                del messages[0]  # said twice, the same
            check_order(messages)
            sides.append(messages)
        return sides[0], sides[1]

    def _refuse_other_turns(self, row: Row, turns: Any) -> None:
        """The first turn tells messages from ShareGPT, where both are in columns of one name."""
        first = turns[0]
        if isinstance(first, dict) and first.get(self._how.turns.role) is None:
            self._refuse_another(row)

    def _raise_not_there(self, row: Row) -> NoReturn:
        self._refuse_another(row)
        missing = [column for column in self._how.main if row.get(column) is None]
        there = missing[0] in row
        raise ChatError(
            "no messages" if self.format in ("messages", "sharegpt") else f"no {self._called(missing[0])}",
            f"column {missing[0]!r} is null" if there else f"no column {missing[0]!r}: this row has {listed(row)}",
        )

    def _called(self, column: str) -> str:
        return next(name for name, its in self.columns if its == column and name not in _TURN_FIELDS)

    def _refuse_another(self, row: Row) -> None:
        try:
            other = detect(row)
        except ChatError:
            return
        if (other.format, other._how.main) != (self.format, self._how.main):
            raise ChatError(
                "another format",
                f"this row is {other}; expected {self}",
                remedy="one format in a source: put rows of each format into files of their own",
            )

    def __str__(self) -> str:
        names = dict(self.columns)
        main = [repr(names[name]) for name in _MAIN[self.format]]
        if self.format in ("messages", "sharegpt"):
            turns = "turns" if self.format == "sharegpt" else "messages"
            what = f"{turns} in {main[0]} ({self._how.turns.role}, {self._how.turns.content})"
            shown = {*_MAIN[self.format], *_TURN_FIELDS}
        elif self.format == "preference":
            what = f"{main[0]} over {main[1]}" + (f", after {names['prompt']!r}" if "prompt" in names else "")
            shown = {"chosen", "rejected", "prompt"}
        else:
            what = " and ".join(main)
            shown = {*_MAIN[self.format]}
        default = _NAMES[self.format]
        more = [f"{name} in {its!r}" for name, its in self.columns if name not in shown and its != default[name]]
        more += [f"no {name}" for name in default if name not in names]
        more += [f"role {given!r} is {role}" for given, role in self.roles]
        return "; ".join([f"{self.format}: {what}", *more])


class _How(NamedTuple):
    """A layout, looked up once."""

    columns: dict[str, str]
    main: tuple[str, ...]
    turns: Turns


def layout_of(
    format: str | None = None,
    columns: Mapping[str, str | None] | None = None,
    roles: Mapping[str, str] | None = None,
) -> Layout | None:
    """The layout that a user gave. None: it is to be detected.

    >>> print(layout_of("messages", {"messages": "dialog", "role": "speaker"}))
    messages: messages in 'dialog' (speaker, content)
    >>> print(layout_of(columns={"prompt": "question", "completion": "answer"}))
    prompt_completion: 'question' and 'answer'

    `columns` are {what the format calls it: what the rows call it}; None leaves an optional one out. `roles` are
    {a role as the rows write it: system, developer, user, assistant or tool}.
    """
    for parameter, given in {"columns": columns, "roles": roles}.items():
        if given is not None and not isinstance(given, Mapping):
            raise SpecError(
                f"{parameter}={given!r} is not a mapping",
                parameter=parameter,
                remedy="columns={'messages': 'dialog'}" if parameter == "columns" else "roles={'bot': 'assistant'}",
            )
    checked = _checked_roles(roles)
    if checked and format is None and not columns:
        raise SpecError(
            "roles= without format=: which roles there are depends on the format",
            parameter="format",
            known=", ".join(FORMATS),
            remedy="format='messages', or another of them",
        )
    if format is not None:
        one_of(FORMATS, format=format)
    if not columns:
        return None if format is None else Layout(format, tuple(_NAMES[format].items()), checked)
    known = _NAMES[format] if format else {name for names in _NAMES.values() for name in names}
    for name in columns:
        if name not in known:
            near = suggest(name, known)
            swapped = next((n for n, column in columns.items() if column in known), None) if near is None else None
            raise SpecError(
                f"columns= names {name!r}, which {f'format {format!r} does not have' if format else 'no format has'}",
                parameter="columns",
                known=", ".join(known if format else sorted(known)),
                remedy=f"{near!r}"
                if near
                else f"{{{columns[swapped]!r}: {swapped!r}}}: first what the format calls it"
                if swapped
                else "first what the format calls it, then what your rows call it",
            )
    if format is None:
        fit = [name for name in FORMATS if columns.keys() <= _NAMES[name].keys()]
        if len(fit) != 1:
            raise SpecError(
                f"columns= fits {' and '.join(fit)}" if fit else "columns= has names of several formats",
                parameter="format",
                known=", ".join(FORMATS),
                remedy=f"format={(fit or FORMATS)[0]!r}, or another of them",
            )
        format = fit[0]
    for name, column in columns.items():
        needed = name in _MAIN[format] or name in _TURN_FIELDS
        if not (isinstance(column, str) and column) and (needed or column is not None):
            raise SpecError(
                f"columns={{{name!r}: {column!r}}} names no column",
                parameter="columns",
                remedy=f"{{{name!r}: 'its name in your rows'}}",
            )
    chosen = {name: column for name, column in {**_NAMES[format], **columns}.items() if column is not None}
    main = [chosen[name] for name in _MAIN[format]]
    if len(set(main)) < len(main):
        raise SpecError(
            f"columns= takes {' and '.join(_MAIN[format])} from one column, {main[0]!r}",
            parameter="columns",
            remedy="a column for each",
        )
    return Layout(format, tuple(chosen.items()), checked)


def detect(row: Row) -> Layout:
    """The layout that a row has; ChatError where none fits, or more than one."""
    found: list[tuple[str, dict[str, str]]] = [
        (format, {})
        for format in ("alpaca", "prompt_completion", "preference")
        if all(row.get(name) is not None for name in _MAIN[format])
    ]
    empty = None
    for column in _LISTS:
        turns = row.get(column)
        if not isinstance(turns, list | tuple):
            continue
        if not turns:
            empty = column
        elif isinstance(turns[0], dict):
            if turns[0].get("role") is not None:
                found.append(("messages", {"messages": column}))
            elif turns[0].get("from") is not None:
                found.append(("sharegpt", {"conversations": column}))
    if len(found) > 1:
        layouts = [Layout(format, tuple({**_NAMES[format], **names}.items())) for format, names in found]
        first, second = layouts[0], layouts[1]
        same = first.format == second.format
        raise ChatError(
            "several formats",
            f"this row can be {' or '.join(f'{layout.format} ({_main_of(layout)})' for layout in layouts)}",
            remedy=f"columns={{{_MAIN[first.format][0]!r}: {first._how.main[0]!r}}}, or the other"
            if same
            else " or ".join(f"format={layout.format!r}" for layout in layouts),
        )
    if not found:
        if empty is not None:
            raise ChatError("empty conversation", f"{empty!r} has no messages")
        raise _unknown(row)
    ((format, names),) = found
    if format == "prompt_completion" and isinstance(row.get("label"), bool):
        raise ChatError(
            "unknown format",
            "prompt, completion and label: a label says whether the completion is a good one",
            remedy="format='prompt_completion' to train on all of them, with where= on the good ones only",
        )
    return Layout(format, tuple({**_NAMES[format], **names}.items()))


def _main_of(layout: Layout) -> str:
    return ", ".join(map(repr, layout._how.main))


def _unknown(row: Row) -> ChatError:
    for column in _LISTS:
        value = row.get(column)
        if isinstance(value, list | tuple) and value:
            has = f"an object with {listed(value[0])}" if isinstance(value[0], dict) else what_is(value[0])
            return ChatError(
                "unknown format",
                f"the first item of {column!r} is {has}; looked for 'role' and 'content', or 'from' and 'value'",
                remedy=f"columns={{'messages': {column!r}, 'role': 'FIELD', 'content': 'FIELD'}}",
            )
        if isinstance(value, str):
            return ChatError(
                "unknown format",
                f"{column!r} is str, not a list of messages",
                remedy="decode it in a step before",
            )
    pair = next(((a, b) for a, b in _PAIRS if row.get(a) is not None and row.get(b) is not None), None)
    if pair:
        remedy = f"columns={{'prompt': {pair[0]!r}, 'completion': {pair[1]!r}}}, if that is what they are"
    else:
        remedy = "columns={'messages': 'COLUMN'}, or format= and columns= of another format"
    wanted = (
        "messages, conversation or conversations; instruction and output; prompt and completion; chosen and rejected"
    )
    return ChatError("unknown format", f"this row has {listed(row)}; looked for {wanted}", remedy=remedy)


def _checked_roles(roles: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    for given, role in (roles or {}).items():
        if not isinstance(given, str) or role not in ROLES:
            near = suggest(str(role), ROLES) or LIKELY_ROLES.get(str(role))
            raise SpecError(
                f"roles={{{given!r}: {role!r}}}: {role!r} is not a role",
                parameter="roles",
                known=", ".join(ROLES),
                remedy=f"{{{given!r}: {near if near in ROLES else 'assistant'!r}}}",
            )
    return tuple((roles or {}).items())


# From rows to messages


def _not_learned(message: Message) -> Message:
    """A message of a prompt: what an assistant says there was asked, and is not the answer."""
    if message["role"] != "assistant" or "weight" in message:
        return message
    return {**message, "weight": 0.0}


def _system_of(row: Row, how: _How) -> list[Message]:
    """The system message that a row has as a column of its own."""
    column = how.columns.get("system")
    text = None if column is None else row.get(column)
    if text is None or text == "":
        return []
    return [{"role": "system", "content": text_of(text, 0, f"column {column!r}")}]


def _read_alpaca(row: Row, how: _How, messages: list[Message]) -> None:
    columns = how.columns
    past = row.get(columns["history"]) if "history" in columns else None
    for pair in () if past is None else past if isinstance(past, list | tuple) else (past,):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            reason = f"an item of {columns['history']!r} is {what_is(pair)}, not [instruction, output]"
            raise ChatError("not a message", reason, turn=len(messages))
        for role, text in zip(("user", "assistant"), pair, strict=True):
            content = text_of(text, len(messages), f"column {columns['history']!r}")
            messages.append({"role": role, "content": content})
    turn = len(messages)
    asked = text_of(row[columns["instruction"]], turn, f"column {columns['instruction']!r}")
    more = row.get(columns["input"]) if "input" in columns else None
    if more is not None and more != "":
        given = text_of(more, turn, f"column {columns['input']!r}")
        asked = f"{asked}\n{given}" if asked else given
    if not asked:
        raise ChatError("missing content", f"{columns['instruction']!r} is empty", turn=turn)
    answer = text_of(row[columns["output"]], turn + 1, f"column {columns['output']!r}")
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _read_side(value: Any, role: str, how: _How, messages: list[Message], column: str) -> None:
    """A prompt or an answer: text, a list of messages, or one message."""
    if isinstance(value, str):
        messages.append({"role": role, "content": value})
    elif isinstance(value, list | tuple):
        if not value:
            raise ChatError("empty conversation", f"{column!r} has no messages")
        _read_in(column, value, how, messages)
    elif isinstance(value, dict):
        _read_in(column, (value,), how, messages)
    else:
        raise ChatError(
            "content is not text", f"{column!r} is {what_is(value)}, not text or a list of messages", turn=len(messages)
        )


def _read_in(column: str, turns: Iterable[Any], how: _How, messages: list[Message]) -> None:
    """Read the messages of one column of several, and name it in what goes wrong."""
    try:
        read_turns(turns, how.turns, messages)
    except ChatError as error:
        error.reason = f"in {column!r}: {error.reason}"
        raise


def _contains(answer: list[Message], asked: list[Message], prompt: Any) -> bool:
    """Whether an answer is a whole conversation, with the prompt in it."""
    if isinstance(prompt, str):  # the first question, or of a longer conversation the last one
        return any(m["role"] == "user" and m["content"] == prompt for m in answer[:-1])
    begins = [(m["role"], m["content"]) for m in asked]
    skip = int(answer[0]["role"] == "system" != asked[0]["role"])
    return [(m["role"], m["content"]) for m in answer[skip : skip + len(asked)]] == begins
