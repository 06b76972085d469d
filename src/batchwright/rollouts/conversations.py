"""Prompts of messages through a chat template, with their answers, or up to the start of an answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import numpy as np

from batchwright.base.errors import TokenizerError
from batchwright.prepare.chat.encode import ConversationEncoder
from batchwright.prepare.chat.formats import layout_of
from batchwright.prepare.chat.messages import MESSAGES_ROLES, ChatError
from batchwright.prepare.chat.render import ChatTemplate, find_template
from batchwright.prepare.chat.spans import SPAN_DTYPE, TEMPLATE, LossPolicy, Rendered, TextSpan
from batchwright.rl.columns import offsets
from batchwright.rollouts.ragged import BadValue, Ragged, ragged_of
from batchwright.rollouts.sequences import Sequences

T = TypeVar("T")

_REMEDIES = {
    "unknown role": f"a role that is known: {', '.join(MESSAGES_ROLES)}",
    "missing role": "a 'role' in every message",
    "missing content": "a 'content' in every message, which is text",
    "unknown format": "messages as {'role': ..., 'content': ...}",
}


def conversations_of(tokenizer: Any, chat_template: Any) -> Conversations:
    """Conversations by a template: a built-in name, Jinja, the path of a file, or None for the tokenizer's.

    The last few are cached: a log is read a few groups at a time, and parsing a template takes 20 ms.
    """
    return _cached(tokenizer, find_template(chat_template, tokenizer))


@lru_cache(maxsize=4)
def _cached(tokenizer: Any, template: ChatTemplate) -> Conversations:
    return Conversations(tokenizer, template)


class Conversations:
    """Renders and encodes by one template."""

    def __init__(self, tokenizer: Any, template: ChatTemplate) -> None:
        self.template = template
        self._encoder = ConversationEncoder(tokenizer)
        self._answered = _reader("prompt_completion", {"completion": "response"})
        self._asked = _reader("messages", {"messages": "prompt"})

    def whole(self, prompts: Sequence[Any], responses: Sequence[Any], tools: Sequence[Any] | None) -> Sequences:
        """Prompts and responses as one conversation each.

        A response begins with the words of its first turn: the template's text before them was given to the model. It
        ends with the marker that ends its last turn: a model does not write the template's text after that.
        """
        rows = [
            {"prompt": _plain(prompt), "response": _plain(response), "tools": has_tools}
            for prompt, response, has_tools in zip(prompts, responses, tools or [None] * len(prompts), strict=True)
        ]
        of_prompts = list(map(len, prompts))
        conversations = _each(rows, self._answered, of_prompts)
        encoded = self._encoded(_each(conversations, self.template.rendered, of_prompts))
        # As bytes: NumPy compares the fields of each array with those of the one before it.
        spans = np.frombuffer(b"".join([one.spans.tobytes() for one in encoded]), SPAN_DTYPE)
        of_rows = offsets(np.array([len(one.spans) for one in encoded]))
        weights = LossPolicy().weights(of_rows, {name: spans[name] for name in SPAN_DTYPE.names or ()})
        asked, answered, trained = [], [], []
        for number, (conversation, response, one) in enumerate(zip(conversations, responses, encoded, strict=True)):
            num_turns = 1 if isinstance(response, str) else len(response)
            is_answer = one.spans["turn"] >= len(conversation["messages"]) - num_turns
            is_said = one.spans["part"] != TEMPLATE
            if not (is_answer & is_said).any():
                raise BadValue(number, "the template writes nothing of it", "another chat_template=, or token ids")
            ends = np.append(0, one.spans["stop"])
            begin = ends[np.argmax(is_answer & is_said)]
            end = ends[1 + np.flatnonzero(is_said)[-1]]
            is_trained = weights[of_rows[number] : of_rows[number + 1]] > 0
            asked.append(one.tokens[:begin])
            answered.append(one.tokens[begin:end])
            trained.append(np.repeat(is_trained, np.diff(ends))[begin:end])
        return Sequences(ragged_of(asked), ragged_of(answered), np.concatenate(trained))

    def prompts(self, prompts: Sequence[Any], tools: Sequence[Any] | None) -> Ragged:
        """Prompts up to the start of an answer. Equal prompts, as in a group, are rendered once."""
        rows = list(zip(prompts, tools or [None] * len(prompts), strict=True))
        keys = [msgspec.json.encode(row, enc_hook=repr) for row in rows]
        first_with = {key: number for number, key in reversed(list(enumerate(keys)))}
        numbers = sorted(first_with.values())
        try:
            rendered = _each([rows[n] for n in numbers], lambda row: self._rendered_prompt(*row))
            encoded = self._encoded(rendered)
        except BadValue as bad:
            bad.row = numbers[bad.row]
            raise
        tokens = {keys[n]: one.tokens for n, one in zip(numbers, encoded, strict=True)}
        return ragged_of([tokens[key] for key in keys])

    def _rendered_prompt(self, prompt: Any, tools: Any) -> Rendered:
        conversation = self._asked({"prompt": _plain(prompt), "tools": tools})
        asking = self.template.render(conversation, add_generation_prompt=True)
        plain = self.template.rendered(conversation)
        shared = len(os.path.commonprefix([plain.text, asking]))  # noqa: RUF071  (of characters, as meant)
        if plain.said and plain.said[-1][1] > shared:
            raise ChatError(
                "no generation prompt",
                f"{self.template.name} writes the messages themselves in another way where an answer is to follow",
                remedy="token ids as the prompt too",
            )
        spans = [span._replace(stop=min(span.stop, shared)) for span in plain.spans if span.start < shared]
        if shared < len(asking):
            spans.append(TextSpan(shared, len(asking), 0, TEMPLATE, -1))
        return Rendered(asking, tuple(spans), plain.said)

    def _encoded(self, rendered: Sequence[Rendered]) -> list[Any]:
        try:
            return self._encoder.encode(rendered)
        except TokenizerError as error:
            raise BadValue(int(str(error.where.get("number", 0))), error.headline, error.remedy or "") from None


def _reader(format: str, columns: dict[str, str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The function from a row of this format to a conversation."""
    layout = layout_of(format, columns, None)
    assert layout is not None
    return layout.normalise  # type: ignore[return-value]  # only a preference has two


def _plain(turns: Any) -> Any:
    """Text, or turns as dicts of their own."""
    return turns if isinstance(turns, str) else [dict(turn) for turn in turns]


def _each(rows: Any, function: Callable[[Any], T], of_prompts: Sequence[int] | None = None) -> list[T]:
    """The results of a function for each row. A BadValue names the refused row.

    Messages count through prompt and response; `of_prompts` says how many are of the prompt.
    """
    found: list[T] = []
    for number, row in enumerate(rows):
        try:
            found.append(function(row))
        except ChatError as error:
            is_asked = error.turn is None or of_prompts is None or error.turn < of_prompts[number]
            remedy = _REMEDIES.get(error.kind, error.remedy)  # those of chat= name other parameters
            raise BadValue(number, str(error), remedy, key="prompt" if is_asked else "response") from None
    return found
