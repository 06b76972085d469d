"""Prompts and responses as tokens, with a mask of the tokens that the policy wrote.

    text        is encoded unchanged, prompt and response separately; nothing is added
    token ids   stay unchanged, before text and after it
    turns       of a response are text or token ids, joined unchanged; assistants' turns are trained
    messages    of a prompt go through the chat template, together with a response of text or of turns without token
                ids; assistants' words and their end of turn are trained. Before token ids, the prompt is written up
                to the start of an answer

Rows of one table may differ in this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import TokenizerError
from batchwright.base.words import first_line, suggest
from batchwright.prepare.chat.messages import LIKELY_ROLES, MESSAGES_ROLES
from batchwright.prepare.tokenizers import CharsTokenizer, resolve_tokenizer
from batchwright.rl.columns import offsets
from batchwright.rollouts.ragged import BadValue, Ragged, concatenated, is_arrow, joined, kind_of_value, ragged_of

if TYPE_CHECKING:
    from batchwright.rollouts.conversations import Conversations


class Sequences(NamedTuple):
    """Prompts and responses of all rows."""

    prompt: Ragged
    response: Ragged
    trained: NDArray[np.bool_] | None
    """Whether each token of the responses is trained; None: all."""


class NeedsTokenizer(BadValue):
    """The error for a row of text without a tokenizer."""


class Encoder:
    """A tokenizer that is needed only for text, and encodes each text once."""

    def __init__(self, tokenizer: Any, chat_template: Any, vocab_size: int | None) -> None:
        self.tokenizer: Any | None = tokenizer
        if tokenizer is not None:
            self.tokenizer = resolve_tokenizer(tokenizer, vocab_size=vocab_size)
        if isinstance(self.tokenizer, CharsTokenizer) and self.tokenizer.chars is None:
            what = "a vocabulary of characters is made from text, and rollouts need theirs before"
            raise TokenizerError(what, parameter="tokenizer", remedy="'bytes', or a tokenizer.json")
        self.chat_template = chat_template
        self._chat: Conversations | None = None

    @property
    def limit(self) -> int | None:
        """The number of ids, if a tokenizer gives it."""
        if self.tokenizer is None:
            return None
        return max(int(self.tokenizer.vocab_size), (getattr(self.tokenizer, "eos_id", None) or 0) + 1)

    @property
    def unused_template(self) -> bool:
        """Whether a template was given, and no row had messages."""
        return self.chat_template is not None and self._chat is None

    def texts(self, texts: Sequence[str]) -> Ragged:
        """The ids of texts, encoded unchanged."""
        if self.tokenizer is None:
            remedy = "tokenizer='tokenizer.json' or 'bytes', or token ids in place of text"
            raise NeedsTokenizer(0, "this is text, and text needs a tokenizer", remedy)
        distinct = list(dict.fromkeys(texts))
        try:
            ids = dict(zip(distinct, map(np.asarray, self.tokenizer.encode_batch(distinct)), strict=True))
        except (UnicodeEncodeError, TypeError, TokenizerError):
            raise self._first_bad(texts) from None
        return ragged_of([ids[text] for text in texts])

    def _first_bad(self, texts: Sequence[str]) -> BadValue:
        assert self.tokenizer is not None
        for number, text in enumerate(texts):
            try:
                text.encode("utf-8")
                self.tokenizer.encode_batch([text])
            except UnicodeEncodeError as error:
                what = f"it cannot be written as UTF-8: half a surrogate pair at character {error.start:,}"
                return BadValue(number, what, "text.encode('utf-8', 'replace').decode()")
            except (TokenizerError, TypeError) as error:
                return BadValue(number, first_line(error), getattr(error, "remedy", None) or "")
        raise AssertionError("every text is good by itself")

    @property
    def chat(self) -> Conversations:
        """Renders messages by the chat template. Only messages need Jinja."""
        if self._chat is None:
            from batchwright.rollouts.conversations import conversations_of

            if self.tokenizer is None:
                remedy = "tokenizer='tokenizer.json', or token ids in place of messages"
                raise NeedsTokenizer(0, "a prompt is messages, and they need a tokenizer", remedy, key="prompt")
            self._chat = conversations_of(self.tokenizer, self.chat_template)
        return self._chat


def sequences_of(prompts: Any, responses: Any, tools: Any, encoder: Encoder) -> Sequences:
    """The tokens of all rows. A BadValue names the row, and its `key` the prompt or the response."""
    prompts, prompt_kinds = _with_kinds(prompts, "prompt")
    responses, response_kinds = _with_kinds(responses, "response")
    tools = _as_list(tools)
    if len(set(prompt_kinds)) == len(set(response_kinds)) == 1:
        return _of_one_kind(prompts, responses, tools, prompt_kinds[0], response_kinds[0], encoder)
    pairs = list(zip(prompt_kinds, response_kinds, strict=True))
    prompts, responses = _as_list(prompts), _as_list(responses)
    parts: list[Sequences] = []
    rows_of: list[list[int]] = []
    for pair in dict.fromkeys(pairs):
        rows = [number for number, each in enumerate(pairs) if each == pair]
        some_tools = None if tools is None else [tools[row] for row in rows]
        try:
            part = [prompts[row] for row in rows], [responses[row] for row in rows], some_tools
            parts.append(_of_one_kind(*part, *pair, encoder))
        except BadValue as bad:
            bad.row = rows[bad.row]
            raise
        rows_of.append(rows)
    return _in_order(parts, np.argsort(np.concatenate(rows_of), kind="stable"))


def _in_order(parts: Sequence[Sequences], back: NDArray[np.int64]) -> Sequences:
    """Parts end to end, with their rows in another order."""
    prompt = _end_to_end([part.prompt for part in parts]).take(back)
    response = _end_to_end([part.response for part in parts])
    if all(part.trained is None for part in parts):
        return Sequences(prompt, response.take(back), None)
    flags = [np.ones(len(p.response.flat), bool) if p.trained is None else p.trained for p in parts]
    trained = Ragged(np.concatenate(flags), response.lengths)
    return Sequences(prompt, response.take(back), trained.take(back).flat)


def _as_list(column: Any) -> Any:
    return column.to_pylist() if is_arrow(column) else column


def _end_to_end(parts: Sequence[Ragged]) -> Ragged:
    return Ragged(concatenated([part.flat for part in parts]), np.concatenate([part.lengths for part in parts]))


# Kinds: "text", "list" (of ids), "turns" (objects), and "marked" (turns of which some have ids)


def _with_kinds(column: Any, key: str) -> tuple[Any, list[str]]:
    """(the column, the kind of each of its values). Only a column of lists of numbers stays in Arrow."""
    if is_arrow(column):
        if _is_list_of_numbers(column.type):
            return column, ["list"] * len(column)
        column = column.to_pylist()
    kind = _common_kind(column)
    if kind is not None:
        return column, [kind] * len(column)
    pairs = [_with_kind(value, number, key) for number, value in enumerate(column)]
    return [value for value, _ in pairs], [kind for _, kind in pairs]


def _common_kind(column: Any) -> str | None:
    """The kind of all values, if their types suffice to tell it. Faster than a test of each value."""
    types = set(map(type, column))
    if types == {str}:
        return "text"
    if types == {list} and {type(value[0]) for value in column if value} <= {int}:
        return "list"
    if types == {np.ndarray} and not any(value.dtype.hasobject for value in column):
        return "list"
    return None


def _is_list_of_numbers(kind: Any) -> bool:
    import pyarrow as pa

    kind = getattr(kind, "storage_type", kind)
    if pa.types.is_dictionary(kind) or not hasattr(kind, "value_type"):
        return False
    return bool(pa.types.is_primitive(kind.value_type) or pa.types.is_null(kind.value_type))


def _with_kind(value: Any, number: int, key: str) -> tuple[Any, str]:
    """(the value, with turns as a list; its kind)."""
    kind = kind_of_value(value)
    if kind in ("number", "other"):
        what = f"it is a {type(value).__name__}, not text, token ids or messages"
        raise BadValue(number, what, "text, or token ids", key=key)
    if kind in ("text", "list"):
        return value, kind
    if kind == "object":
        kind, value = "turns", [value]
    turns = value.tolist() if hasattr(value, "tolist") else list(value)
    for place, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise BadValue(number, f"turn {place} of it is a {type(turn).__name__}, not an object", key=key)
    if any(turn.get("token_ids") is not None for turn in turns):
        kind = "marked"
    return turns, kind


# Each kind


def _of_one_kind(
    prompts: Any, responses: Any, tools: Any, prompt_kind: str, response_kind: str, encoder: Encoder
) -> Sequences:
    if prompt_kind == "turns" and response_kind in ("text", "turns"):
        with _blamed("response"):
            return encoder.chat.whole(prompts, responses, tools)
    with _blamed("prompt"):
        match prompt_kind:
            case "text":
                prompt = encoder.texts(prompts)
            case "list":
                prompt = joined(prompts, "ids")
            case "marked":
                prompt, _ = _turns_as_they_are(prompts, encoder)
            case _:
                prompt = encoder.chat.prompts(prompts, tools)
    with _blamed("response"):
        match response_kind:
            case "text":
                return Sequences(prompt, encoder.texts(responses), None)
            case "list":
                return Sequences(prompt, joined(responses, "ids"), None)
        return Sequences(prompt, *_turns_as_they_are(responses, encoder))


@contextmanager
def _blamed(key: str) -> Iterator[None]:
    """Name this column for a bad value found inside, unless it has a column already."""
    try:
        yield
    except BadValue as bad:
        bad.key = bad.key or key
        raise


def _turns_as_they_are(rows: Sequence[Any], encoder: Encoder) -> tuple[Ragged, NDArray[np.bool_]]:
    """(turns end to end, mask of trained tokens). A turn gives its ids, else its text encoded separately."""
    owners: list[int] = []
    contents: list[Any] = []
    trained: list[bool] = []
    texts: list[int] = []
    lists: list[int] = []
    for number, turns in enumerate(rows):
        for place, turn in enumerate(turns):
            content, of_kind = turn.get("token_ids"), lists
            if content is None:
                content, of_kind = turn.get("content"), texts
                if not isinstance(content, str):
                    kind = type(content).__name__.replace("NoneType", "null")
                    what = f"turn {place} has no token_ids, and its content is {kind}"
                    raise BadValue(number, what, "text as content, or token_ids")
            of_kind.append(len(owners))
            owners.append(number)
            contents.append(content)
            trained.append(_is_trained(turn, number, place))
    parts: list[Ragged] = []
    for numbers, encode in ((texts, encoder.texts), (lists, lambda some: joined(some, "ids"))):
        try:
            parts.append(encode([contents[n] for n in numbers]) if numbers else ragged_of([]))
        except BadValue as bad:  # by its number among texts or lists
            bad.row = owners[numbers[bad.row]]
            raise
    found = _end_to_end(parts).take(np.argsort([*texts, *lists], kind="stable"))
    lengths = np.bincount(owners, found.lengths, len(rows)).astype(np.int64)
    return Ragged(found.flat, lengths), np.repeat(np.array(trained, bool), found.lengths)


def _is_trained(turn: Mapping[str, Any], number: int, place: int) -> bool:
    train, role = turn.get("train"), turn.get("role")
    if not isinstance(role, str) or role not in MESSAGES_ROLES:
        near = LIKELY_ROLES.get(str(role).lower()) or suggest(str(role), MESSAGES_ROLES)
        if near not in MESSAGES_ROLES:
            near = "assistant"
        what = f"turn {place} has the role {role!r}; known are {', '.join(MESSAGES_ROLES)}"
        raise BadValue(number, what, f"'role': {near!r}")
    if train is None:
        return MESSAGES_ROLES[role] == "assistant"
    if not isinstance(train, bool | np.bool_):
        raise BadValue(number, f"turn {place} has train={train!r}, which is not true or false", "'train': False")
    return bool(train)


def interleave(prompt: Ragged, response: Ragged) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
    """(tokens of all rows end to end, starts of rows, whether a token is of a response).

    >>> rows = Ragged(np.array([1, 2]), np.array([2, 0])), Ragged(np.array([3, 4, 5]), np.array([1, 2]))
    >>> [array.tolist() for array in interleave(*rows)]
    [[1, 2, 3, 4, 5], [0, 3, 5], [False, False, True, True, True]]
    """
    lengths = np.stack([prompt.lengths, response.lengths], axis=1).reshape(-1)
    is_response = np.repeat(np.tile([False, True], len(prompt.lengths)), lengths)
    tokens = np.empty(len(is_response), np.int32)
    tokens[is_response] = response.flat
    tokens[~is_response] = prompt.flat
    return tokens, offsets(prompt.lengths + response.lengths), is_response
