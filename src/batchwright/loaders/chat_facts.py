"""The markers of a chat template, and the ids that a tokenizer gives them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchwright.prepare.chat.messages import ChatError
from batchwright.prepare.tokenizers import JsonTokenizer

__all__ = ["TemplateFacts", "facts_of"]

_MARKER = re.compile(r"<[|｜][^<>\s]{1,64}>|</?s>|<(?:bos|eos|pad)>|<(?:start|end)_of_\w{1,32}>|\[/?[A-Z_]{2,32}\]")
"""Template text that looks like a token, not like words or XML."""
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "<｜begin▁of▁sentence｜>")
_BLANKS = (" ", "\n", "\n\n", "\t", "  ", " \n")


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """A template with a tokenizer. There are no ids if a store did not keep its tokenizer."""

    template: str
    tokenizer: str
    has_tokens: bool
    """Whether this kind of tokenizer can have tokens for markers: bytes and characters have none."""
    is_own: bool
    """Whether the template came with the tokenizer."""
    end_of_turn: str | None
    has_generation: bool
    """Whether the template marks generated text by {% generation %}."""
    ends: frozenset[int]
    """Ids of the end of a text, and of a turn."""
    markers: Mapping[str, tuple[int, ...]]
    """The markers that the template writes around messages, such as "<|im_start|>", and the ids of each."""
    special: frozenset[int] = frozenset()
    """Ids that come from template text alone."""
    bos: tuple[tuple[int, ...], ...] = ()
    blank: frozenset[int] = frozenset()
    """Ids that are only blanks."""


def facts_of(info: Mapping[str, Any], tokenizer: Any) -> TemplateFacts:
    """The facts of a template, from the tokenizer and its entry in a manifest (or `Chat.info`)."""
    chat, name = info["chat"], str(info["name"])
    template, end_of_turn, tokens = str(chat["template"]), chat["end_of_turn"], chat["special_tokens"]
    vocab: dict[str, int] = getattr(tokenizer, "vocab", {})
    ends = {info.get("eos"), vocab.get(tokens.get("eos_token") or ""), vocab.get(end_of_turn or "")}
    facts = TemplateFacts(
        template,
        name,
        has_tokens=info["kind"] not in ("bytes", "chars"),
        is_own=template == name or template.startswith(f"{name}:"),
        end_of_turn=end_of_turn,
        has_generation=re.search(r"\{%-?\s*generation\b", chat["source"]) is not None,
        ends=frozenset(end for end in ends if end is not None),
        markers={},
    )
    encode = _encoder_of(tokenizer)
    if encode is None:
        return facts
    text = _example_text(chat)
    markers = [*_MARKER.findall(text), *(token for token in tokens.values() if token and token in text)]
    if end_of_turn:
        markers.append(end_of_turn)
    bos = {tokens.get("bos_token"), *(name for name in _BOS_NAMES if name in vocab)}
    return replace(
        facts,
        markers={name: encode(name) for name in dict.fromkeys(markers)},
        special=frozenset(tokenizer.special.values()) if isinstance(tokenizer, JsonTokenizer) else frozenset(),
        bos=tuple(encode(name) for name in sorted(filter(None, bos))),
        blank=frozenset(number for blank in _BLANKS for number in encode(blank)),
    )


def _encoder_of(tokenizer: Any) -> Callable[[str], tuple[int, ...]] | None:
    """A function from text to ids, empty for unknown text. None if a store did not keep the tokenizer."""
    if not hasattr(tokenizer, "encode_batch"):
        return None
    if not isinstance(tokenizer, JsonTokenizer):
        return lambda text: tuple(np.asarray(tokenizer.encode_batch([text])[0]).tolist())
    backend, vocab = tokenizer.backend, tokenizer.vocab
    unknown = vocab.get(getattr(backend.model, "unk_token", None) or "<unk>")

    def encode(text: str) -> tuple[int, ...]:
        ids = tuple(backend.encode(text, add_special_tokens=False).ids)
        return () if ids == (unknown,) and vocab.get(text) != unknown else ids

    return encode


def _example_text(chat: Mapping[str, Any]) -> str:
    """A plain conversation rendered by the template; empty if it refuses all examples."""
    from batchwright.prepare.chat.render import ChatTemplate  # Jinja

    template = ChatTemplate(chat["template"], chat["source"], chat["special_tokens"], chat["args"])
    system = {"role": "system", "content": "s"}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * 2
    for messages in (turns, [system, *turns], turns[:2]):
        try:
            return template.render({"messages": messages})
        except ChatError:
            continue
    return ""
