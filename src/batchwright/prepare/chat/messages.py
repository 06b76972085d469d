"""The normal form of one message (see formats.py), the rules that a conversation keeps, and the error for one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from batchwright.base.words import listed, suggest

__all__ = ["LIKELY_ROLES", "MESSAGES_ROLES", "ChatError"]

Message = dict[str, Any]

ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
MESSAGES_ROLES = {**ROLES, "function": "tool"}
"""OpenAI's first version called a tool a "function"."""
_CALL = "function_call"
"""A turn of ShareGPT that is tool calls, written as JSON."""
SHAREGPT_ROLES = {
    **MESSAGES_ROLES,
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), _CALL),
}
LIKELY_ROLES = {**SHAREGPT_ROLES, **dict.fromkeys(("ai", "bot"), "assistant"), "ipython": "tool", "prompter": "user"}
"""Roles that an error suggests for an unknown one. They are not assumed."""
_WRITTEN_CALL = "<{[("
"""Marks of a tool call inside the text. Every model's way to write one has one of these."""
_MAX_WEIGHT = 2.0**127
"""Weights are kept in 32 bits."""
_MOST_MESSAGES = 2**15 - 1
"""Numbers of turns are kept in 16 bits."""
_JSON_TYPES = (str, int, float, bool, list, tuple, dict)


class ChatError(Exception):
    """A conversation that cannot be used, with the reason.

    `kind` is short and the same for all conversations with this fault. Reports count by it. `reason` has the details.

    >>> print(ChatError("unknown role", "role 'usr'", turn=2, remedy="'user'"))
    unknown role: role 'usr' (message 2)
    """

    def __init__(self, kind: str, reason: str = "", turn: int | None = None, remedy: str = "") -> None:
        super().__init__(kind, reason, turn, remedy)
        self.kind: str = kind
        self.reason: str = reason
        self.turn: int | None = turn
        self.remedy: str = remedy
        """`turn` is the number of the message, from 0; None if the fault is not in a single message."""

    def __str__(self) -> str:
        text = f"{self.kind}: {self.reason}" if self.reason else self.kind
        return text if self.turn is None else f"{text} (message {self.turn})"


@contextmanager
def at_turn(turn: int) -> Iterator[None]:
    """Add the number of the message to a ChatError."""
    try:
        yield
    except ChatError as error:
        error.turn = turn
        raise


class Turns(NamedTuple):
    """The names of fields and roles in the messages of a source."""

    role: str
    """The field of the role."""
    content: str
    roles: Mapping[str, str]
    """The role of each name."""
    format: str
    columns: Mapping[str, str]
    """Fields whose names are not those of the format."""

    def as_settings(self, columns: Mapping[str, str], **more: Any) -> str:
        """The parameters that would give these names, and further names for the fields of a turn."""
        given: dict[str, Any] = {"format": self.format}
        if self.columns or columns:
            given["columns"] = {**self.columns, **columns}
        return ", ".join(f"{name}={value!r}" for name, value in (given | more).items())

    def field(self, name: str) -> str:
        """The format's name for the role or the content of a turn."""
        return {"role": "from", "content": "value"}[name] if self.format == "sharegpt" else name


def read_turns(turns: Iterable[Any], how: Turns, messages: list[Message]) -> None:
    is_normal = (how.role, how.content) == ("role", "content")
    for item in turns:
        # Nearly every message is a role and a text, and the other fields of a table are null.
        if type(item) is dict and (len(item) == 2 or list(item.values()).count(None) == len(item) - 2):
            role, content = item.get(how.role), item.get(how.content)
            known = how.roles.get(role, _CALL) if type(role) is str and type(content) is str else _CALL
            if known != _CALL:
                is_kept = is_normal and known == role and len(item) == 2
                messages.append(item if is_kept else {"role": known, "content": content})
                continue
        with at_turn(len(messages)):
            messages.append(_message(item, how))


def _message(item: Any, how: Turns) -> Message:
    """One message in the normal form, with any fields."""
    if not isinstance(item, dict):
        raise ChatError("not a message", f"it is {what_is(item)}, not an object with a role")
    more = _other_fields(item, how)
    message: Message = {"role": _role_of(item, how), "content": ""}
    content, calls = item.get(how.content), more.pop("tool_calls", None)
    if message["role"] == _CALL:
        if content is None:
            raise ChatError("missing content", f"a {item[how.role]} turn without {how.content!r}")
        message["role"], calls, content = "assistant", content, None
    elif isinstance(more.get("function_call"), dict):  # the form of tool calls in OpenAI's first version
        calls = calls or [more.pop("function_call")]
    if calls:
        message["tool_calls"] = _calls_of(calls, message["role"])
    if content is not None:
        message["content"] = text_of(content)
    elif not calls:
        raise _no_content(item, how)
    weight = _weight_of(more.pop("weight", None), more.pop("train", None))
    if weight is not None:
        message["weight"] = weight
    return {**message, **more, **message}


def _other_fields(item: dict[str, Any], how: Turns) -> dict[str, Any]:
    """The fields besides role and content, without null and values that JSON cannot hold."""
    own = (how.role, how.content)
    more = {name: value for name, value in item.items() if name not in own and isinstance(value, _JSON_TYPES)}
    reasoning = more.get("reasoning_content", "")
    if not isinstance(reasoning, str):
        raise ChatError("content is not text", f"'reasoning_content' is {what_is(reasoning)}, not text")
    return more


def _role_of(item: dict[str, Any], how: Turns) -> str:
    role = item.get(how.role)
    if role is None:
        raise ChatError(
            "missing role",
            f"no {how.role!r}: this message has {names_in_words(item)}",
            remedy=f"{how.as_settings({how.field('role'): 'FIELD'})}, if it has another name",
        )
    if not isinstance(role, str):
        raise ChatError("unknown role", f"{how.role!r} is {what_is(role)}, not text")
    if role in how.roles:
        return how.roles[role]
    remedy = f"{how.as_settings({}, roles={role: likely_role(role)})}, if that is what it is"
    raise ChatError("unknown role", f"{role!r}; known are {', '.join(how.roles)}", remedy=remedy)


def likely_role(name: str) -> str:
    """The role that an error suggests for an unknown name."""
    near = LIKELY_ROLES.get(name.lower()) or suggest(name, ROLES)
    return near if near in ROLES else "assistant"


def _no_content(item: dict[str, Any], how: Turns) -> ChatError:
    reason, remedy = f"no {how.content!r}: this message has {names_in_words(item)}", ""
    if how.content in item:
        reason = f"{how.content!r} is null"
    for other in ("content", "value", "text"):
        if isinstance(item.get(other), str):
            remedy = f"{how.as_settings({how.field('content'): other})}, if that is it"
            break
    return ChatError("missing content", reason, remedy=remedy)


def text_of(content: Any, where: str = "it") -> str:
    """Content as one string, from a string or a list of text parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join(map(_text_of_part, content))
    raise ChatError("content is not text", f"{where} is {what_is(content)}")


def _text_of_part(part: Any) -> str:
    match part:
        case {"text": str(text), **more} if more.get("type", "text") == "text":
            return text
        case {"type": kind} if kind != "text":
            reason = f"a part of type {kind!r}: only text can be read"
        case dict():
            reason = f"a part whose text is {what_is(part.get('text'))}"
        case _:
            reason = f"a part of it is {what_is(part)}"
    raise ChatError("content is not text", reason)


def _weight_of(weight: Any, train: Any) -> float | None:
    if train is not None:
        if weight is not None:
            raise ChatError("bad weight", "both 'weight' and 'train'", remedy="one of them")
        if not isinstance(train, bool):
            raise ChatError("bad weight", f"train={train!r} is not true or false")
        return float(train)
    if weight is None:
        return None
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < _MAX_WEIGHT:
        raise ChatError("bad weight", f"weight={weight!r} is not a number from 0 on")
    return float(weight)


# Tools


def _calls_of(calls: Any, role: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise ChatError("bad tool call", f"a {role} message has tool calls")
    if isinstance(calls, str):
        calls = _decoded(calls, "bad tool call", "tool calls")
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list | tuple):
        raise ChatError("bad tool call", f"tool calls are {what_is(calls)}, not a list of objects")
    return [_call_of(call) for call in calls]


def _call_of(call: Any) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise ChatError("bad tool call", f"it is {what_is(call)}, not an object")
    function = call if call.get("function") is None else call["function"]
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ChatError("bad tool call", f"no 'name' of the function: it has {names_in_words(call)}")
    normal: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": _arguments_of(name, function.get("arguments"))},
    }
    if call.get("id") is not None:
        normal["id"] = call["id"]
    return normal


def _arguments_of(name: str, arguments: Any) -> dict[str, Any]:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        arguments = _decoded(arguments, "bad tool call", f"the arguments of {name!r}")
    elif isinstance(arguments, dict):
        arguments = _without_nulls(arguments)
    if not isinstance(arguments, dict):
        raise ChatError("bad tool call", f"the arguments of {name!r} are {what_is(arguments)}, not an object")
    return arguments


def tools_of(tools: Any) -> list[dict[str, Any]]:
    """Tool definitions, from a list of objects or from JSON of one."""
    if tools is None or tools == "":
        return []
    if isinstance(tools, str):
        tools = _decoded(tools, "bad tools", "tools")
    if not isinstance(tools, list | tuple):
        raise ChatError("bad tools", f"they are {what_is(tools)}, not a list of objects")
    for tool in tools:
        if not isinstance(tool, dict):
            raise ChatError("bad tools", f"one is {what_is(tool)}, not an object")
    return [_without_nulls(tool) for tool in tools]


def _without_nulls(value: Any) -> Any:
    """Objects without the keys that are null: in a table, every struct has the fields of all the others."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value]
    return value


def _decoded(text: str, kind: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise ChatError(kind, f"{what}: a string that is not JSON: {error}") from None


# Rules


def check_order(messages: list[Message]) -> None:
    """Refuse an order that no template can mean. Two messages of one role in a row are left to the template."""
    if not messages:
        raise ChatError("empty conversation")
    if len(messages) > _MOST_MESSAGES:
        raise ChatError(
            "too many messages",
            f"{len(messages):,} of them; a conversation has {_MOST_MESSAGES:,} at most",
            remedy="cut it into several conversations",
        )
    before: Message | None = None
    for turn, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            _check_result(message, before, turn)
            continue
        if turn and role in ("system", "developer"):
            reason = f"a {role} message that is not the first"
            if messages[0]["role"] in ("system", "developer"):
                reason = f"a second system message ({role})"
            raise ChatError("role order", reason, turn, remedy="one system message, as the first")
        before = message


def _check_result(message: Message, before: Message | None, turn: int) -> None:
    """Check that the last message before a tool message, apart from other tool messages, called a tool."""
    remedy = "an assistant message with tool_calls before it"
    answers = message.get("tool_call_id")
    if before is None:
        reason = "a tool message is the first message: no tool was called"
    elif before["role"] != "assistant":
        reason = f"a tool message comes after a {before['role']} message: no tool was called"
    elif "tool_calls" in before:
        ids = [call["id"] for call in before["tool_calls"] if "id" in call]
        if not ids or answers is None or answers in ids:
            return
        reason = f"tool_call_id {answers!r} is none of those before it ({listed(map(repr, ids))})"
        remedy = "the id of the call that it answers"
    elif answers is None and any(sign in before["content"] for sign in _WRITTEN_CALL):
        return
    else:
        reason = "a tool message comes after an assistant message that calls no tool"
    raise ChatError("role order", reason, turn=turn, remedy=remedy)


# Words


def names_in_words(row: Iterable[Any]) -> str:
    return listed(map(repr, row), most=12) or "nothing"


def what_is(value: Any) -> str:
    return "null" if value is None else type(value).__name__
