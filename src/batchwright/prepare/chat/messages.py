"""One message of a row -> the normal form (see formats.py), and the rules that a conversation keeps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from batchwright.base.words import suggest
from batchwright.prepare.chat.faults import ChatError

__all__ = [
    "LIKELY_ROLES",
    "MESSAGES_ROLES",
    "ROLES",
    "SHAREGPT_ROLES",
    "Message",
    "Turns",
    "check_order",
    "listed",
    "read_turns",
    "text_of",
    "tools_of",
    "what_is",
]

Message = dict[str, Any]

ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
MESSAGES_ROLES = {**ROLES, "function": "tool"}
"""A "function" is what a tool was in OpenAI's first version."""
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
"""What an unknown role may mean: offered, not taken."""
_WRITTEN_CALL = "<{[("
"""A tool call that is part of the text has one of these, however a model writes it."""
_MAX_WEIGHT = 2.0**127
"""Weights are kept in 32 bits."""
_MOST_MESSAGES = 2**15 - 1
"""Numbers of turns are kept in 16 bits."""
_JSON_TYPES = (str, int, float, bool, list, tuple, dict)


class Turns(NamedTuple):
    """How the messages of a source are written."""

    role: str
    """The field that has the role."""
    content: str
    roles: Mapping[str, str]
    """A role as it is written -> what it is."""
    format: str
    columns: Mapping[str, str]
    """Those that have other names than the format gives them."""

    def said_with(self, field: str = "", **more: Any) -> str:
        """The parameters that would say all this, and that a field of a turn has another name, or more."""
        names = {"role": "from", "content": "value"} if self.format == "sharegpt" else {}
        columns = {**self.columns, **({names.get(field, field): more.pop("name")} if field else {})}
        given = {"format": self.format, **({"columns": columns} if columns else {}), **more}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())


def read_turns(turns: Iterable[Any], how: Turns, messages: list[Message]) -> None:
    role_field, content_field, roles = how.role, how.content, how.roles
    is_normal = role_field == "role" and content_field == "content"
    for item in turns:
        # Nearly always, a message is a role and a text, and what else a table has is null.
        if type(item) is dict and (len(item) == 2 or list(item.values()).count(None) == len(item) - 2):
            role, content = item.get(role_field), item.get(content_field)
            if type(content) is str and type(role) is str:
                known = roles.get(role)
                if known is not None and known != _CALL:
                    is_kept = is_normal and known == role and len(item) == 2
                    messages.append(item if is_kept else {"role": known, "content": content})
                    continue
        messages.append(_message(item, how, len(messages)))


def _message(item: Any, how: Turns, turn: int) -> Message:
    """One message in the normal form, whatever it has."""
    if not isinstance(item, dict):
        raise ChatError("not a message", f"it is {what_is(item)}, not an object with a role", turn=turn)
    given = {name: value for name, value in item.items() if value is not None and isinstance(value, _JSON_TYPES)}
    role = _role_of(item, how, turn)
    content = item.get(how.content)
    for name in (how.role, how.content):
        given.pop(name, None)
    calls = given.pop("tool_calls", None)
    if role == _CALL:
        role, calls, content = "assistant", content, None
        if calls is None:
            raise ChatError("missing content", f"a {item[how.role]} turn without {how.content!r}", turn=turn)
    elif isinstance(given.get("function_call"), dict):  # what tool calls were in OpenAI's first version
        calls = calls or [given.pop("function_call")]
    message: Message = {"role": role, "content": ""}
    if calls:
        if role != "assistant":
            raise ChatError("bad tool call", f"a {role} message has tool calls", turn=turn)
        message["tool_calls"] = _calls_of(calls, turn)
    if content is None:
        if "tool_calls" not in message:
            raise _no_content(item, how, turn)
    else:
        message["content"] = text_of(content, turn)
    weight, train = given.pop("weight", None), given.pop("train", None)
    if weight is not None or train is not None:
        message["weight"] = _weight_of(weight, train, turn)
    if not isinstance(given.get("reasoning_content", ""), str):
        what = what_is(given["reasoning_content"])
        raise ChatError("content is not text", f"'reasoning_content' is {what}, not text", turn=turn)
    message.update((name, value) for name, value in given.items() if name not in message)
    return message


def _role_of(item: dict[str, Any], how: Turns, turn: int) -> str:
    role = item.get(how.role)
    if role is None:
        raise ChatError(
            "missing role",
            f"no {how.role!r}: this message has {listed(item)}",
            turn=turn,
            remedy=f"{how.said_with('role', name='FIELD')}, if it has another name",
        )
    if not isinstance(role, str):
        raise ChatError("unknown role", f"{how.role!r} is {what_is(role)}, not text", turn=turn)
    known = how.roles.get(role)
    if known is None:
        near = LIKELY_ROLES.get(role.lower()) or suggest(role, ROLES) or "assistant"
        raise ChatError(
            "unknown role",
            f"{role!r}; known are {', '.join(how.roles)}",
            turn=turn,
            remedy=f"{how.said_with(roles={role: 'assistant' if near == _CALL else near})}, if that is what it is",
        )
    return known


def _no_content(item: dict[str, Any], how: Turns, turn: int) -> ChatError:
    null = how.content in item
    other = next((name for name in ("content", "value", "text") if isinstance(item.get(name), str)), None)
    return ChatError(
        "missing content",
        f"{how.content!r} is null" if null else f"no {how.content!r}: this message has {listed(item)}",
        turn=turn,
        remedy=f"{how.said_with('content', name=other)}, if that is it" if other else "",
    )


def text_of(content: Any, turn: int, where: str = "") -> str:
    """Content as one string: it is one, or a list of parts that are text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join([_text_of_part(part, turn) for part in content])
    raise ChatError("content is not text", f"{where or 'it'} is {what_is(content)}", turn=turn)


def _text_of_part(part: Any, turn: int) -> str:
    if not isinstance(part, dict):
        raise ChatError("content is not text", f"a part of it is {what_is(part)}", turn=turn)
    kind, text = part.get("type", "text"), part.get("text")
    if kind != "text":
        raise ChatError("content is not text", f"a part of type {kind!r}: only text can be read", turn=turn)
    if not isinstance(text, str):
        raise ChatError("content is not text", f"a part whose text is {what_is(text)}", turn=turn)
    return text


def _weight_of(weight: Any, train: Any, turn: int) -> float:
    if weight is not None and train is not None:
        raise ChatError("bad weight", "both 'weight' and 'train'", turn=turn, remedy="one of them")
    if train is not None:
        if not isinstance(train, bool):
            raise ChatError("bad weight", f"train={train!r} is not true or false", turn=turn)
        return float(train)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ChatError("bad weight", f"weight={weight!r} is not a number", turn=turn)
    if not 0 <= weight < _MAX_WEIGHT:
        raise ChatError("bad weight", f"weight={weight!r} is not a number from 0 on", turn=turn)
    return float(weight)


# Tools


def _calls_of(calls: Any, turn: int) -> list[dict[str, Any]]:
    if isinstance(calls, str):
        calls = _decoded(calls, "bad tool call", "tool calls", turn)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list | tuple):
        raise ChatError("bad tool call", f"tool calls are {what_is(calls)}, not a list of objects", turn=turn)
    return [_call_of(call, turn) for call in calls]


def _call_of(call: Any, turn: int) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise ChatError("bad tool call", f"it is {what_is(call)}, not an object", turn=turn)
    function = call.get("function")
    if function is None:
        function = call  # without the wrapping
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ChatError("bad tool call", f"no 'name' of the function: it has {listed(call)}", turn=turn)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = (
            _decoded(arguments, "bad tool call", f"the arguments of {name!r}", turn) if arguments.strip() else {}
        )
        if not isinstance(arguments, dict):
            what = f"the arguments of {name!r} are {what_is(arguments)}, not an object"
            raise ChatError("bad tool call", what, turn=turn)
    elif arguments is None:
        arguments = {}
    elif isinstance(arguments, dict):
        arguments = _without_nulls(arguments)
    else:
        raise ChatError(
            "bad tool call", f"the arguments of {name!r} are {what_is(arguments)}, not an object", turn=turn
        )
    normal: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        normal["id"] = call["id"]
    return normal


def tools_of(tools: Any) -> list[dict[str, Any]]:
    """Tool definitions: a list of objects, or that as JSON."""
    if tools is None or tools == "":
        return []
    if isinstance(tools, str):
        tools = _decoded(tools, "bad tools", "tools", None)
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


def _decoded(text: str, kind: str, what: str, turn: int | None) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ChatError("duplicate keys", f"{what}: {twice!r} is there twice", turn=turn)
        return found

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
        if "\\u" in text:  # half a surrogate pair can be escaped, and is no text
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ChatError(kind, f"{what}: a string that is not JSON: {why}", turn=turn) from None
    return value


# Rules


def check_order(messages: list[Message]) -> None:
    """What no template can mean. Two messages of one role in a row are left to the template."""
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
        if turn and (role == "system" or role == "developer"):
            second = messages[0]["role"] in ("system", "developer")
            raise ChatError(
                "role order",
                f"a second system message ({role})" if second else f"a {role} message that is not the first",
                turn=turn,
                remedy="one system message, as the first",
            )
        before = message


def _check_result(message: Message, before: Message | None, turn: int) -> None:
    """A tool message answers the last message that is none, which must have called."""
    remedy = "an assistant message with tool_calls before it"
    if before is None or before["role"] != "assistant":
        after = "is the first message" if before is None else f"comes after a {before['role']} message"
        raise ChatError("role order", f"a tool message {after}: no tool was called", turn=turn, remedy=remedy)
    answers = message.get("tool_call_id")
    calls = before.get("tool_calls")
    if not calls:
        if answers is not None or not any(sign in before["content"] for sign in _WRITTEN_CALL):
            reason = "a tool message comes after an assistant message that calls no tool"
            raise ChatError("role order", reason, turn=turn, remedy=remedy)
    elif answers is not None:
        ids = [call["id"] for call in calls if "id" in call]
        if ids and answers not in ids:
            reason = f"tool_call_id {answers!r} is none of those before it ({', '.join(map(repr, ids))})"
            raise ChatError("role order", reason, turn=turn, remedy="the id of the call that it answers")


# Words

_NAMES_SHOWN = 12


def listed(row: Any) -> str:
    names = list(row)
    more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(map(repr, names[:_NAMES_SHOWN])) or "nothing") + more


def what_is(value: Any) -> str:
    return "null" if value is None else type(value).__name__
