"""Chat templates: the text of a conversation, with spans for the role and part of every character.

    template = find_template("chatml", tokenizer)
    template.render(conversation)        the text, as transformers' apply_chat_template gives it
    template.rendered(conversation)      the text, with spans

Masks come from unmodified templates. No marks are needed in them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from batchwright.base.checks import local_path
from batchwright.base.errors import SpecError, TokenizerError
from batchwright.base.fingerprint import fingerprint_value
from batchwright.base.words import half_character_in, suggest
from batchwright.prepare.chat.locate import locate, plain_conversation
from batchwright.prepare.chat.messages import ChatError
from batchwright.prepare.chat.render_cache import LookedInside, OpaqueEnvironment, OpaqueText, RenderCache
from batchwright.prepare.chat.sandbox import CompiledTemplate, compile_template
from batchwright.prepare.chat.spans import Rendered
from batchwright.prepare.chat.turns import Markers, find_turns
from batchwright.prepare.tokenizers import WELL_KNOWN_EOS, configured_tokens

__all__ = ["ChatTemplate", "find_template"]

_RULES_VERSION = 1
"""The version of the rules for texts and spans. A new number makes a new dataset."""

_WELL_KNOWN = {
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "<｜begin▁of▁sentence｜>"),
    "eos_token": WELL_KNOWN_EOS,
}
_SPECIAL = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]{2,32}\]")
_ASKED, _ANSWER, _ASKED_AGAIN = "\ufdd6", "\ufdd7", "\ufdd8"


class _Calls(NamedTuple):
    """The form in which a template gets tool calls."""

    content: str | None
    """The content of a message without any. Some templates print calls only if content is null, as in APIs."""
    json: bool
    """Whether arguments are one JSON string. Most templates take an object."""


_WAYS_TO_CALL = (_Calls("", False), _Calls(None, False), _Calls("", True), _Calls(None, True))


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with all its inputs besides conversations. A value: equal fingerprints give equal texts."""

    name: str
    source: str
    special_tokens: dict[str, str] = field(default_factory=dict, hash=False)
    """By their names in the template: bos_token, eos_token, pad_token, ..."""
    args: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further variables for the template, such as enable_thinking=False. `strftime_now='2025-01-31'` is the day that a
    template gets as today. Without it, a template that needs a date is refused, and a template with a default date uses
    that."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "source", "special_tokens", "args")}

    @property
    def fingerprint(self) -> str:
        return fingerprint_value(
            [_RULES_VERSION, self.source, sorted(self.special_tokens.items()), sorted(self.args.items())]
        )[:16]

    def render(self, conversation: Mapping[str, Any], *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation."""
        return self._render(plain_conversation(self._fitted(conversation)), False, add_generation_prompt)

    def rendered(self, conversation: Mapping[str, Any]) -> Rendered:
        """The text of a conversation, with the spans that tile it, and the regions that come from messages.

        Raises `ChatError` if the template refuses the conversation, or drops, reorders or changes a message.
        """
        # The text does not show generation marks, so equal texts may have different marks.
        render = self._rendered_in_full if self._compiled.has_generation else self._cache.rendered
        found = render(conversation)
        if not found.text.isascii() and (half := half_character_in(found.text)):
            raise ChatError("not UTF-8", f"{half} of the rendered text")
        return found

    @cached_property
    def _cache(self) -> RenderCache:
        return RenderCache(self._rendered_in_full, self.render, self._prints_only)

    @cached_property
    def _compiled_for_opaque(self) -> CompiledTemplate:
        return CompiledTemplate(self.source, self.name, OpaqueEnvironment())

    def _prints_only(self, conversation: Mapping[str, Any]) -> bool:
        """Whether this template prints the contents of messages without inspecting them."""
        messages = [{**message, "content": OpaqueText(message["content"])} for message in conversation["messages"]]
        variables = self._variables(plain_conversation({**conversation, "messages": messages}), False)
        try:
            self._compiled_for_opaque.render(variables)
        except (LookedInside, ChatError, SpecError):
            return False
        return True

    def _rendered_in_full(self, conversation: Mapping[str, Any]) -> Rendered:
        conversation = self._fitted(conversation)
        located = locate(conversation, self._render, template=self.name, marks=self._compiled.has_generation)
        messages = conversation["messages"]

        def prefix(number: int, asked: bool) -> str | None:
            return self._render_or_none({**conversation, "messages": messages[:number]}, asked)

        return find_turns(located, messages, self._markers, prefix)

    def _render_or_none(self, conversation: Mapping[str, Any], prompt: bool) -> str | None:
        """The text of a conversation; None if the template refuses it."""
        try:
            return self.render(conversation, add_generation_prompt=prompt)
        except ChatError:
            return None

    @property
    def end_of_turn(self) -> str | None:
        """The marker that ends an assistant's turn, such as "<|im_end|>"; None without one that looks like a token."""
        return next(iter(self._markers.ends), None)

    @cached_property
    def _compiled(self) -> CompiledTemplate:
        return compile_template(self.source, self.name)

    def _render(self, conversation: dict[str, Any], marks: bool, add_generation_prompt: bool = False) -> str:
        variables = self._variables(conversation, add_generation_prompt)
        num_characters = sum(len(message["content"]) for message in conversation["messages"])
        if any(_only_calls(message) for message in conversation["messages"]) and self._calls_as.content is None:
            variables["messages"] = [{**m, "content": None} if _only_calls(m) else m for m in conversation["messages"]]
        return self._compiled.render(variables, num_characters=num_characters, marks=marks)

    def _variables(self, conversation: Mapping[str, Any], add_generation_prompt: bool) -> dict[str, Any]:
        fixed = {"documents": None, **self.special_tokens, **self.args}
        return {**fixed, **conversation, "add_generation_prompt": add_generation_prompt}

    def _fitted(self, conversation: Mapping[str, Any]) -> Mapping[str, Any]:
        """A conversation with the arguments of tool calls in the form that this template takes."""
        messages = conversation["messages"]
        if not any(message.get("tool_calls") for message in messages) or not self._calls_as.json:
            return conversation
        return {**conversation, "messages": [_with_json_arguments(message) for message in messages]}

    # Facts of the template, found by rendering made-up conversations

    def _try(self, *messages: dict[str, Any], prompt: bool = False) -> str | None:
        """The text of made-up messages, with a system message if the template needs one; None if refused."""
        text = self._render_or_none({"messages": list(messages)}, prompt)
        if text is None:
            system = {"role": "system", "content": "system"}
            text = self._render_or_none({"messages": [system, *messages]}, prompt)
        return text

    @cached_property
    def _markers(self) -> Markers:
        user, answer = {"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWER}
        again = {"role": "user", "content": _ASKED_AGAIN}
        before, _, after = (self._try(user, answer) or "").partition(_ANSWER)
        between = (self._try(user, answer, again) or "").partition(_ANSWER)[2].partition(_ASKED_AGAIN)[0]
        ends = self._find_ends(before.partition(_ASKED)[0], after, between)
        alone, prompted = self._try(user) or "", self._try(user, prompt=True) or ""
        header = _behind_ends(before.partition(_ASKED)[2], ends)
        behind = prompted.partition(_ASKED)[2]
        if prompted.startswith(alone) and prompted != alone:
            prompt = prompted[len(alone) :]
        elif behind and behind == after and not ends:  # the end of any turn, though it looks like no token
            prompt, header = "", header.removeprefix(behind)
        else:  # always or never there: the text after the user's turn
            prompt = _behind_ends(behind, ends)
        if not prompt.strip():
            prompt = header
        lead = header[header.rfind(prompt) + len(prompt) :] if prompt in header else ""
        return Markers(tuple(ends), prompt, lead, self.special_tokens.get("bos_token", ""))

    def _find_ends(self, first_header: str, after: str, between: str) -> list[str]:
        """End-of-turn markers, from the text after the last answer and the text between an answer and a question."""
        last, (first, *others) = self._ends_in(after)[:1], [*self._ends_in(between), ""]
        if last and first != last[0] and len(others) > 1:
            return [*last, first]  # some end the last turn with another; one marker alone is a header
        if not last and not after.strip() and first not in first_header:  # others do not end it; this is not a header
            return [first] if len(others) > 1 or first == self.special_tokens.get("eos_token") else []
        return last

    def _ends_in(self, after: str) -> list[str]:
        """The token-like words in the text after an answer, if the text starts with one."""
        eos = self.special_tokens.get("eos_token")
        found = re.compile(f"{re.escape(eos)}|{_SPECIAL.pattern}") if eos else _SPECIAL
        return found.findall(after) if found.match(after.lstrip()) else []

    @cached_property
    def _calls_as(self) -> _Calls:
        """Find the form in which the template prints tool calls of a message without content."""
        for calls in _WAYS_TO_CALL:
            arguments = f'{{"x": "{_ASKED}"}}' if calls.json else {"x": _ASKED}
            call = {"type": "function", "id": "123456789", "function": {"name": _ANSWER, "arguments": arguments}}
            messages = [
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": calls.content, "tool_calls": [call]},
                {"role": "tool", "content": "t", "name": "f", "tool_call_id": "123456789"},
                {"role": "assistant", "content": "a"},
            ]
            try:
                text = self._compiled.render(self._variables({"messages": messages, "tools": None}, False))
            except ChatError:
                continue
            if _ANSWER in text and _ASKED in text:
                return calls
        return _WAYS_TO_CALL[0]


def _only_calls(message: Mapping[str, Any]) -> bool:
    return not message["content"] and bool(message.get("tool_calls"))


def _with_json_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _behind_ends(text: str, ends: list[str]) -> str:
    """The text after the first end-of-turn marker; all of the text if there is none."""
    for end in ends:
        if end in text:
            return text.partition(end)[2]
    return text


# Finding a template

BUILT_IN: dict[str, dict[str, str]] = {
    "chatml": {},
    "gemma": {"bos_token": "<bos>"},
    "llama-3": {"bos_token": "<|begin_of_text|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "plain": {"eos_token": ""},
    "qwen": {},
    "zephyr": {"eos_token": "</s>"},
}
"""The built-in templates, and the special tokens of each for a tokenizer that does not name its own. `plain` ends an
answer with the tokenizer's end of text, if it has one."""


def find_template(
    template: str | os.PathLike[str] | None, tokenizer: Any, *, args: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """Find a chat template by a built-in name, Jinja, the path of a .jinja file, or None for the tokenizer's own.

    If a tokenizer has several templates, None takes "default", and a name takes any other.
    """
    tokens = configured_tokens(getattr(tokenizer, "config", None) or {})
    if isinstance(template, str) and template in BUILT_IN:
        vocab = getattr(tokenizer, "vocab", None) or {}
        tokens = {token: _token_for(token, literal, vocab) for token, literal in BUILT_IN[template].items()} | tokens
        name, source = template, _built_in(template)
    elif isinstance(template, str) and ("{{" in template or "{%" in template):
        name, source = "inline", template
    else:
        name, source = _own_or_file(template, tokenizer)
    found = ChatTemplate(name, source, tokens, dict(args or {}))
    _ = found._compiled  # raises now, not at the first row, if it is not valid
    return found


def _built_in(name: str) -> str:
    """The Jinja of a built-in template. The newline at the end of its file is not part of it."""
    file = resources.files("batchwright.prepare.chat") / "templates" / f"{name}.jinja"
    return file.read_text(encoding="utf-8").removesuffix("\n")


def _own_or_file(template: Any, tokenizer: Any) -> tuple[str, str]:
    """(name, Jinja) of one of the tokenizer's own templates, or of a file."""
    own = _own_templates(tokenizer)
    if template is None and own:
        return _name_of(tokenizer), own.get("default") or next(iter(own.values()))
    if template is None:
        raise TokenizerError(
            f"the tokenizer {_name_of(tokenizer)!r} has no chat template",
            parameter="chat_template",
            names=", ".join(BUILT_IN),
            remedy="chat_template='chatml', another of these names, or a Jinja string",
        )
    if isinstance(template, str) and template in own:
        return f"{_name_of(tokenizer)}:{template}", own[template]
    if isinstance(template, str | os.PathLike):
        return Path(template).name, _read(template, [*BUILT_IN, *own])
    raise SpecError(
        f"chat_template={template!r} is not a chat template",
        parameter="chat_template",
        remedy=f"one of {', '.join(BUILT_IN)}; a Jinja string; the path of a .jinja file",
    )


def _name_of(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name", type(tokenizer).__name__))


class _Named(msgspec.Struct):
    """An item of the list of templates in a `tokenizer_config.json`."""

    name: str
    template: str


def _own_templates(tokenizer: Any) -> dict[str, str]:
    """The tokenizer's own templates, by name."""
    config = getattr(tokenizer, "config", None) or {}
    try:
        own = msgspec.convert(config.get("chat_template") or {}, str | dict[str, str] | list[_Named])
    except msgspec.ValidationError as error:
        raise TokenizerError(
            f"the chat_template of the tokenizer {_name_of(tokenizer)!r} is neither Jinja nor a list of templates",
            parameter="chat_template",
            reason=error,
            remedy="mend it in tokenizer_config.json, or use another: chat_template='chatml'",
        ) from None
    if isinstance(own, str):
        return {"default": own}
    if isinstance(own, list):
        return {each.name: each.template for each in own}
    return dict(own)


def _token_for(name: str, literal: str, vocab: Mapping[str, int]) -> str:
    if literal in vocab:
        return literal
    return next((token for token in _WELL_KNOWN[name] if token in vocab), literal)


def _read(template: str | os.PathLike[str], names: list[str]) -> str:
    path = local_path(chat_template=template)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if path.suffix in (".jinja", ".jinja2", ".j2", ".txt") or len(path.parts) > 1:
            raise SpecError(
                "this chat template cannot be read",
                file=path,
                reason=getattr(error, "strerror", None) or error,
                parameter="chat_template",
                remedy=f"the path of a .jinja file, or one of {', '.join(names)}",
            ) from None
    remedy = "one of these names, a Jinja string, or the path of a .jinja file"
    if near := suggest(str(template), names):
        remedy = repr(near)
    what = f"no chat template {str(template)!r}"
    raise SpecError(what, parameter="chat_template", names=", ".join(names), remedy=remedy)
