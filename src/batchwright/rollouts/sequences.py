"""Prompts and responses -> tokens, and which of them the policy wrote.

    text        is encoded as it is, prompt and response each by itself; nothing is added
    token ids   are taken as they are, before text and after it
    turns       in a response are text or token ids one after the other, as they are; what assistants say is trained
    messages    as a prompt go through the chat template. A response of text, or of turns without token ids, goes with
                them, and what assistants say in it, and that they stop, is trained. Before token ids, the prompt is
                written up to where an answer begins

Rows of one table may differ in this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import TokenizerError
from batchwright.base.words import suggest
from batchwright.prepare.chat.messages import LIKELY_ROLES, MESSAGES_ROLES
from batchwright.prepare.tokenizers import CharsTokenizer, resolve_tokenizer
from batchwright.rl.columns import offsets
from batchwright.rollouts.ragged import (
    BadValue,
    Ragged,
    concatenated,
    is_arrow,
    is_tensor,
    joined,
    kind_of_value,
    ragged_of,
)

if TYPE_CHECKING:
    from batchwright.rollouts.conversations import Conversations

__all__ = ["Encoder", "NeedsTokenizer", "Sequences", "interleave", "sequences_of"]

T = TypeVar("T")


class Sequences(NamedTuple):
    """Prompts and responses of all rows."""

    prompt: Ragged
    response: Ragged
    trained: NDArray[np.bool_] | None
    """Of each token of the responses; None: all."""


class NeedsTokenizer(BadValue):
    """Nothing is wrong with the row: it is text, and there is no tokenizer."""


class Encoder:
    """A tokenizer that is asked for only when there is text, and encodes each text once."""

    def __init__(self, tokenizer: Any, chat_template: Any, vocab_size: int | None) -> None:
        self.tokenizer: Any | None = None if tokenizer is None else resolve_tokenizer(tokenizer, vocab_size=vocab_size)
        if isinstance(self.tokenizer, CharsTokenizer) and self.tokenizer.chars is None:
            raise TokenizerError(
                "a vocabulary of characters is made from text, and rollouts need theirs before",
                parameter="tokenizer",
                remedy="'bytes', or a tokenizer.json",
            )
        self.chat_template = chat_template
        self._chat: Conversations | None = None

    @property
    def limit(self) -> int | None:
        """The first id that is none; None where nobody said it."""
        if self.tokenizer is None:
            return None
        return max(int(self.tokenizer.vocab_size), (getattr(self.tokenizer, "eos_id", None) or 0) + 1)

    @property
    def unused_template(self) -> bool:
        """Whether a template was given, and no row had messages."""
        return self.chat_template is not None and self._chat is None

    def texts(self, texts: Sequence[str]) -> Ragged:
        """The ids of texts, each encoded as it is."""
        assert self.tokenizer is not None, "_refuse_text comes before"
        distinct = list(dict.fromkeys(texts))
        try:
            known = dict(zip(distinct, map(np.asarray, self.tokenizer.encode_batch(distinct)), strict=True))
        except (UnicodeEncodeError, TypeError, TokenizerError):
            raise self._first_bad(texts) from None
        return ragged_of([known[text] for text in texts])

    def _first_bad(self, texts: Sequence[str]) -> BadValue:
        assert self.tokenizer is not None
        for number, text in enumerate(texts):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                what = f"it cannot be written as UTF-8: half a surrogate pair at character {error.start:,}"
                return BadValue(number, what, "text.encode('utf-8', 'replace').decode()")
            try:
                self.tokenizer.encode_batch([text])
            except (TokenizerError, TypeError) as error:
                return BadValue(number, str(error).splitlines()[0], getattr(error, "remedy", None) or "")
        raise AssertionError("every text is good by itself")

    @property
    def chat(self) -> Conversations:
        """What makes conversations of messages. Jinja is not needed before."""
        if self._chat is None:
            from batchwright.rollouts.conversations import conversations_of

            assert self.tokenizer is not None, "_refuse_text comes before"
            self._chat = conversations_of(self.tokenizer, self.chat_template)
        return self._chat


def sequences_of(prompts: Any, responses: Any, tools: Any, encoder: Encoder) -> Sequences:
    """The tokens of all rows. BadValue names the row, and by `key` whether its prompt or its response is to blame."""
    prompts, asked = _sorted_out(prompts, "prompt")
    responses, answered = _sorted_out(responses, "response")
    tools = _as_list(tools)
    if encoder.tokenizer is None:
        _refuse_text(prompts, asked, responses, answered)
    if isinstance(asked, str) and isinstance(answered, str):
        return _one_kind(prompts, responses, tools, asked, answered, encoder)
    pairs = list(zip(_for_each(asked, prompts), _for_each(answered, responses), strict=True))
    columns = _as_list(prompts), _as_list(responses), tools
    parts: list[Sequences] = []
    rows_of: list[list[int]] = []
    for pair in dict.fromkeys(pairs):
        rows = [number for number, one in enumerate(pairs) if one == pair]
        asked_here, answered_here, tools_here = (
            None if column is None else [column[row] for row in rows] for column in columns
        )
        try:
            parts.append(_one_kind(asked_here, answered_here, tools_here, *pair, encoder))
        except BadValue as bad:
            bad.row = rows[bad.row]
            raise
        rows_of.append(rows)
    back = np.argsort(np.concatenate(rows_of), kind="stable")
    trained = None
    if any(part.trained is not None for part in parts):
        flags = [np.ones(len(p.response.flat), bool) if p.trained is None else p.trained for p in parts]
        trained = Ragged(np.concatenate(flags), np.concatenate([p.response.lengths for p in parts])).take(back).flat
    return Sequences(
        _end_to_end([part.prompt for part in parts]).take(back),
        _end_to_end([part.response for part in parts]).take(back),
        trained,
    )


def _for_each(kinds: str | list[str], column: Any) -> list[str]:
    return [kinds] * len(column) if isinstance(kinds, str) else kinds


def _as_list(column: Any) -> Any:
    return column.to_pylist() if is_arrow(column) else column


def _end_to_end(parts: Sequence[Ragged]) -> Ragged:
    return Ragged(concatenated([part.flat for part in parts]), np.concatenate([part.lengths for part in parts]))


# What a prompt or a response is


def _sorted_out(column: Any, key: str) -> tuple[Any, str | list[str]]:
    """(the column, what its values are: "text", "list", "turns", or "marked" for turns with ids; or that of each)."""
    if is_arrow(column):
        kind = _arrow_kind(column.type)
        if kind is None:
            raise BadValue(0, f"it is {column.type}, not text, token ids or messages", key=key)
        if kind == "list":
            return column, kind
        column = column.to_pylist()
        if kind == "text":
            return column, kind
    types = set(map(type, column))
    if types == {str}:
        return column, "text"
    if types == {list} and {type(value[0]) for value in column if value} <= {int}:
        return column, "list"
    if types == {np.ndarray} and not any(value.dtype.hasobject for value in column):
        return column, "list"
    if len(types) == 1 and is_tensor(column[0]):
        return column, "list"
    kinds = [_kind_of(value, number, key) for number, value in enumerate(column)]
    if "turns" in kinds:
        column = [_turns(value) if kind == "turns" else value for value, kind in zip(column, kinds, strict=True)]
        for number, (value, kind) in enumerate(zip(column, kinds, strict=True)):
            if kind == "turns":
                kinds[number] = _kind_of_turns(value, number, key)
    return column, kinds[0] if len(set(kinds)) == 1 else kinds


def _arrow_kind(kind: Any) -> str | None:
    import pyarrow as pa

    is_a = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if is_a.is_dictionary(kind):
        kind = kind.value_type
    if is_a.is_string(kind) or is_a.is_large_string(kind) or is_a.is_string_view(kind):
        return "text"
    value = kind if is_a.is_struct(kind) else getattr(kind, "value_type", None)
    return None if value is None else "turns" if is_a.is_struct(value) or is_a.is_map(value) else "list"


def _kind_of(value: Any, number: int, key: str) -> str:
    kind = kind_of_value(value)
    if kind in ("number", "other"):
        what = f"it is a {type(value).__name__}, not text, token ids or messages"
        raise BadValue(number, what, "text, or token ids", key=key)
    return "turns" if kind == "object" else kind


def _turns(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [value]
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _kind_of_turns(turns: list[Any], number: int, key: str) -> str:
    for place, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise BadValue(number, f"turn {place} of it is a {type(turn).__name__}, not an object", key=key)
    return "marked" if any(turn.get("token_ids") is not None for turn in turns) else "turns"


# Without a tokenizer


def _refuse_text(prompts: Any, asked: str | list[str], responses: Any, answered: str | list[str]) -> None:
    """NeedsTokenizer names the first row with anything to encode, if there is one."""
    found = [_first_text(prompts, asked, "prompt"), _first_text(responses, answered, "response")]
    needy = [bad for bad in found if bad is not None]
    if needy:
        raise min(needy, key=lambda bad: bad.row)


def _first_text(column: Any, kinds: str | list[str], key: str) -> NeedsTokenizer | None:
    if kinds == "list":  # mostly, and nothing to look at
        return None
    for number, (value, kind) in enumerate(zip(column, _for_each(kinds, column), strict=True)):
        if kind == "turns" and key == "prompt":
            remedy = "tokenizer='tokenizer.json', or token ids in place of messages"
            return NeedsTokenizer(number, "a prompt is messages, and they need a tokenizer", remedy, key=key)
        if kind == "text" or (kind in ("turns", "marked") and any(map(_is_text, value))):
            remedy = "tokenizer='tokenizer.json' or 'bytes', or token ids in place of text"
            return NeedsTokenizer(number, f"a {key} is text, and text needs a tokenizer", remedy, key=key)
    return None


def _is_text(turn: Mapping[str, Any]) -> bool:
    return turn.get("token_ids") is None and isinstance(turn.get("content"), str)


# Each kind


def _one_kind(prompts: Any, responses: Any, tools: Any, asked: str, answered: str, encoder: Encoder) -> Sequences:
    """Rows that are all of one kind."""
    if asked == "turns" and answered in ("text", "turns"):
        return _blaming("response", lambda: encoder.chat.whole(prompts, responses, tools))
    prompt = _blaming("prompt", lambda: _prompt(prompts, tools, asked, encoder))
    if answered in ("turns", "marked"):
        return Sequences(prompt, *_blaming("response", lambda: _said(responses, encoder)))
    if answered == "text":
        return Sequences(prompt, _blaming("response", lambda: encoder.texts(responses)), None)
    return Sequences(prompt, _blaming("response", lambda: joined(responses, "ids")), None)


def _blaming(key: str, read: Callable[[], T]) -> T:
    """What `read` gives; a value that it finds bad is of this column, unless it says otherwise."""
    try:
        return read()
    except BadValue as bad:
        bad.key = bad.key or key
        raise


def _prompt(prompts: Any, tools: Any, kind: str, encoder: Encoder) -> Ragged:
    if kind == "text":
        return encoder.texts(prompts)
    if kind == "list":
        return joined(prompts, "ids")
    return _said(prompts, encoder)[0] if kind == "marked" else encoder.chat.prompts(prompts, tools)


def _said(rows: Sequence[Any], encoder: Encoder) -> tuple[Ragged, NDArray[np.bool_]]:
    """Turns as they are: ids where a turn has them, else its text encoded by itself. Assistants' turns are trained."""
    owners: list[int] = []
    given: list[Any] = []
    trained: list[bool] = []
    for number, turns in enumerate(rows):
        for place, turn in enumerate(turns):
            ids, content = turn.get("token_ids"), turn.get("content")
            if ids is None and not isinstance(content, str):
                what = "null" if content is None else f"a {type(content).__name__}"
                what = f"turn {place} has no token_ids, and its content is {what}"
                raise BadValue(number, what, "text as content, or token_ids")
            owners.append(number)
            given.append(content if ids is None else ids)
            trained.append(_is_trained(turn, number, place))
    texts = [n for n, value in enumerate(given) if isinstance(value, str)]
    lists = [n for n, value in enumerate(given) if not isinstance(value, str)]
    try:
        numbers = texts
        of_texts = encoder.texts([given[n] for n in texts]) if texts else ragged_of([])
        numbers = lists
        of_lists = joined([given[n] for n in lists], "ids") if lists else ragged_of([])
    except BadValue as bad:  # by its number among texts or lists
        bad.row = owners[numbers[bad.row]]
        raise
    whole = _end_to_end([of_texts, of_lists]).take(np.argsort([*texts, *lists], kind="stable"))
    lengths = np.bincount(owners, whole.lengths, len(rows)).astype(np.int64)
    return Ragged(whole.flat, lengths), np.repeat(np.array(trained, bool), whole.lengths)


def _is_trained(turn: Mapping[str, Any], number: int, place: int) -> bool:
    train, role = turn.get("train"), turn.get("role")
    if not isinstance(role, str) or role not in MESSAGES_ROLES:
        near = LIKELY_ROLES.get(str(role).lower()) or suggest(str(role), MESSAGES_ROLES)
        raise BadValue(
            number,
            f"turn {place} has the role {role!r}; known are {', '.join(MESSAGES_ROLES)}",
            f"'role': {near if near in MESSAGES_ROLES else 'assistant'!r}",
        )
    if train is not None and not isinstance(train, bool | np.bool_):
        raise BadValue(number, f"turn {place} has train={train!r}, which is not true or false", "'train': False")
    return MESSAGES_ROLES[role] == "assistant" if train is None else bool(train)


# All of them


def interleave(prompt: Ragged, response: Ragged) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
    """(tokens of all rows end to end, where rows start, whether a token is of a response).

    >>> rows = Ragged(np.array([1, 2]), np.array([2, 0])), Ragged(np.array([3, 4, 5]), np.array([1, 2]))
    >>> [array.tolist() for array in interleave(*rows)]
    [[1, 2, 3, 4, 5], [0, 3, 5], [False, False, True, True, True]]
    """
    count = len(prompt.lengths)
    lengths = np.empty(2 * count, np.int64)
    lengths[::2], lengths[1::2] = prompt.lengths, response.lengths
    is_answer = np.zeros(2 * count, bool)
    is_answer[1::2] = True
    is_response = np.repeat(is_answer, lengths)
    tokens = np.empty(len(is_response), np.int32)
    tokens[is_response] = response.flat
    tokens[~is_response] = prompt.flat
    return tokens, offsets(prompt.lengths + response.lengths), is_response
