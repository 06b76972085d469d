"""The recipe step that turns conversations into tokens with spans: `bw.chat(...)`, in place of `bw.tokenize(...)`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.base.checks import at_least
from batchwright.base.errors import SpecError, TokenizerError
from batchwright.base.fingerprint import fingerprint
from batchwright.prepare.chat.encode import ConversationEncoder
from batchwright.prepare.chat.formats import Layout, layout_of
from batchwright.prepare.chat.messages import ChatError
from batchwright.prepare.chat.spans import Encoded, Rendered
from batchwright.prepare.tokenize import checked_ids, tokenizer_info
from batchwright.prepare.tokenizers import resolve_tokenizer
from batchwright.typing import TokenizerLike

if TYPE_CHECKING:
    from batchwright.prepare.chat.render import ChatTemplate

__all__ = ["Chat", "Prepared", "chat"]

CHAT_VERSION = 1
"""Part of every chat step's name. A release that renders or marks differently takes another number."""


def chat(
    tokenizer: TokenizerLike,
    template: str | None = None,
    *,
    format: str | None = None,
    columns: Mapping[str, str | None] | None = None,
    roles: Mapping[str, str] | None = None,
    template_args: Mapping[str, Any] | None = None,
    keep_newest: int | None = None,
    vocab_size: int | None = None,
) -> Chat:
    """A recipe step that renders each row's conversation by a chat template and encodes it with `tokenizer`.

    chat("tokenizer.json")                          the tokenizer's own template
    chat("tokenizer.json", "chatml")                a built-in one: chatml llama-3 mistral gemma zephyr qwen plain
    chat(tokenizer, "{% for m in messages %}...")   any Jinja template, in a sandbox

    `format` is "messages", "sharegpt", "alpaca", "prompt_completion" or "preference". If it is not given, it is
    detected from the first row, and all rows must have it. `columns` and `roles` rename the columns and roles of rows.
    `template_args` are variables for the `template`. `vocab_size` is for a tokenizer that is a function. `keep_newest`
    drops the oldest turns of conversations with more tokens than this, until they fit.
    """
    from batchwright.prepare.chat.render import find_template  # Jinja, which plain text does not need

    resolved = resolve_tokenizer(tokenizer, vocab_size=vocab_size)
    _ = ConversationEncoder(resolved)  # raises now, not at the bake, if the tokenizer cannot encode conversations
    return Chat(
        tokenizer=resolved,
        template=find_template(template, resolved, args=_checked_args(template_args) if template_args else None),
        layout=layout_of(format, columns, roles),
        keep_newest=None if keep_newest is None else at_least(1, keep_newest=keep_newest),
    )


def _checked_args(args: Any) -> dict[str, Any]:
    """The variables for a template, checked. They are part of the dataset's name, so they must be valid JSON."""
    if not isinstance(args, Mapping) or not all(isinstance(name, str) for name in args):
        raise SpecError(
            f"template_args={args!r} is not a mapping of names", parameter="template_args", remedy="{'name': value}"
        )
    if own := next((name for name in ("messages", "tools", "add_generation_prompt") if name in args), None):
        raise SpecError(
            f"template_args gives {own!r}, which every conversation has of its own",
            parameter="template_args",
            remedy=f"leave out {own!r}",
        )
    try:
        json.dumps(dict(args), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(
            f"template_args has a value that is not JSON: {error}",
            parameter="template_args",
            remedy="text, numbers, true or false, lists and objects of them",
        ) from None
    return dict(args)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversation, or the two of a preference pair, rendered and not yet encoded."""

    conversations: tuple[dict[str, Any], ...]
    sides: tuple[Rendered, ...]

    @property
    def text(self) -> str:
        """The text for holdouts and hashes."""
        return "\0".join(side.text for side in self.sides)


@dataclass(frozen=True)
class Chat:
    """The step that `chat` returns. Has the interface of a tokenize step."""

    tokenizer: Any
    template: ChatTemplate
    layout: Layout | None
    """None: detected from the first row of a source."""
    keep_newest: int | None = None

    needs_fit = False
    text = "text"

    @cached_property
    def _encoder(self) -> ConversationEncoder:
        return ConversationEncoder(self.tokenizer)

    @property
    def vocab_size(self) -> int:
        eos = getattr(self.tokenizer, "eos_id", None)
        return max(int(self.tokenizer.vocab_size), (eos or 0) + 1)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.min_scalar_type(max(self.vocab_size - 1, 0))

    @property
    def fingerprint(self) -> str:
        layout = None if self.layout is None else self.layout.spec()
        return fingerprint(
            ["chat", CHAT_VERSION, self.tokenizer.fingerprint, self.template.fingerprint, layout, self.keep_newest]
        )

    def describe(self) -> str:
        return f"chat({self.tokenizer.name}, {self.template.name})"

    @property
    def encoder(self) -> str | None:
        return getattr(self.tokenizer, "encoder", None)

    def info(self) -> dict[str, Any]:
        """The entries of the tokenizer and the template in a store's manifest."""
        eos = getattr(self.tokenizer, "eos_id", None)
        return {
            **tokenizer_info(self.tokenizer, self.vocab_size, eos, None),
            "chat": {
                "template": self.template.name,
                "source": self.template.source,
                "special_tokens": self.template.special_tokens,
                "args": self.template.args,
                "end_of_turn": self.template.end_of_turn,
                "layout": None if self.layout is None else self.layout.spec(),
                "keep_newest": self.keep_newest,
            },
        }

    def prepare(self, row: Mapping[str, Any]) -> Prepared:
        """Render a row's conversation. A ChatError has the reason if there is none."""
        if self.layout is None:
            raise SpecError("this chat step does not know its format yet", parameter="format", remedy="format=")
        found = self.layout.normalise(row)
        conversations = found if isinstance(found, tuple) else (found,)
        return Prepared(conversations, tuple(map(self.template.rendered, conversations)))

    def encode(self, prepared: Sequence[Prepared]) -> list[Encoded]:
        """The tokens and spans of each conversation. The two sides of a pair are one document, chosen first.

        The `number` of a TokenizerError is that of the conversation.
        """
        sides = [side for one in prepared for side in one.sides]
        try:
            encoded = self._encoder.encode(sides)
            checked_ids([side.tokens for side in encoded], self.vocab_size)
        except TokenizerError as error:
            owners = [number for number, one in enumerate(prepared) for _ in one.sides]
            error.where["number"] = owners[int(error.where.pop("number", 0))]  # type: ignore[call-overload]
            raise
        rest = iter(encoded)
        found = []
        for one in prepared:
            mine = list(islice(rest, len(one.sides)))
            if self.keep_newest is not None and not self._fits(mine):
                mine = self._newest(one.conversations, mine)
            found.append(self._joined(mine))
        return found

    def _fits(self, sides: Sequence[Encoded]) -> bool:
        return all(len(side.tokens) <= (self.keep_newest or 0) for side in sides)

    def _newest(self, conversations: Sequence[dict[str, Any]], whole: list[Encoded]) -> list[Encoded]:
        """A conversation without its oldest turns. The newest turns that fit stay, from a user's message on.

        System messages stay. The two sides of a pair lose the same shared turns, so their prompt stays the same. A last
        exchange that does not fit stays unchanged, and is too long.
        """
        for shorter in _without_oldest(conversations):
            try:
                encoded = self._encoder.encode([self.template.rendered(one) for one in shorter])
            except ChatError:  # a template may refuse the rest
                continue
            if self._fits(encoded):
                return encoded
        return whole

    def _joined(self, sides: Sequence[Encoded]) -> Encoded:
        tokens = np.concatenate([side.tokens for side in sides]).astype(self.dtype)
        if len(sides) == 1:
            return Encoded(tokens, sides[0].spans)
        spans = []
        begin = 0
        for number, side in enumerate(sides):
            mine = side.spans.copy()
            mine["stop"] += begin
            mine["side"] = number
            spans.append(mine)
            begin += len(side.tokens)
        return Encoded(tokens, np.concatenate(spans))


def _without_oldest(conversations: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The conversations without more and more of the oldest turns that they share. A user's message is the first."""
    always = ("system", "developer")
    kept = [[message for message in one["messages"] if message["role"] in always] for one in conversations]
    rest = [[message for message in one["messages"] if message["role"] not in always] for one in conversations]
    for number, turns in enumerate(zip(*rest, strict=False)):
        if any(turn != turns[0] for turn in turns):
            return
        if number and turns[0]["role"] == "user":
            parts = zip(conversations, kept, rest, strict=True)
            yield [{**one, "messages": [*before, *after[number:]]} for one, before, after in parts]
