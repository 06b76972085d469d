"""Checks of conversations for silent errors in training, from their tokens and spans.

A *failure* is certainly a mistake; a *note* is worth knowing. The first 1,000 conversations of a source are checked, by
a loader when it opens (`check=False` turns this off) and by `batchwright doctor chat` before anything is baked.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.batches.samples import SampleRows
from batchwright.prepare.chat.messages import ChatError
from batchwright.prepare.chat.spans import END, ROLES, TEXT, LossPolicy
from batchwright.prepare.tokenizers import JsonTokenizer
from batchwright.store.stream import TokenStream

if TYPE_CHECKING:
    from batchwright.loaders.stored import StoreStream

__all__ = ["CheckSettings", "Finding", "place_in_words"]

log: logging.Logger = logging.getLogger("batchwright")
_MOST_LEFT_OUT = 0.05
"""The share of rows that may be left out, or teach nothing, and still be meant so: dirt, and not a wrong setting."""
_CHECKED_ROWS = 1000
_BY_THE_TEMPLATE = ("by the template", "the template fails", "generation marks")
_MARKER = re.compile(r"<[|｜][^<>\s]{1,64}>|</?s>|<(?:bos|eos|pad)>|<(?:start|end)_of_\w{1,32}>|\[/?[A-Z_]{2,32}\]")
"""Template text that looks like a token, not like words or XML."""
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "<｜begin▁of▁sentence｜>")
_BLANKS = (" ", "\n", "\n\n", "\t", "  ", " \n")
_ASSISTANT = ROLES.index("assistant")
_NEVER_TOKENS = {"zephyr": ("<|system|>", "<|user|>", "<|assistant|>")}
"""Markers for which the model that a template is named after has no tokens either."""

Place = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of a check, with its remedy."""

    kind: str
    """Short, and the same wherever this is found."""
    is_failure: bool
    headline: str
    examples: tuple[Place, ...] = ()
    """The places of the first ones: file, line (from 1) or row (from 0), turn (the number of the message, from 0)."""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class ConversationRows:
    """The concatenated tokens of some conversations, with the roles of the tokens."""

    tokens: NDArray[Any]
    borders: NDArray[np.int64]
    """Conversation d has the tokens [borders[d], borders[d + 1])."""
    starts: NDArray[np.int64]
    """And the spans [starts[d], starts[d + 1])."""
    spans: dict[str, NDArray[Any]]
    """The fields of SPAN_DTYPE."""
    where: Callable[[int], Place]
    """The file and row of a conversation."""

    def __len__(self) -> int:
        return len(self.borders) - 1


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """The training settings of a loader that the checks need."""

    policy: LossPolicy
    max_length: int
    truncation: str = "drop"
    pad: int | None = None
    drops_are_meant: bool = False
    """Whether the user said "drop". Then dropped rows are not a fault, even if they are many."""


def findings_of(rows: ConversationRows, facts: TemplateFacts, settings: CheckSettings) -> list[Finding]:
    """All findings of some conversations, failures first."""
    measured = _Measured(rows, settings.policy)
    found = [
        *_check_markers(facts),
        *_check_masks(measured, settings),
        *_check_ends(measured, facts, settings.policy),
        *_check_answers(measured, facts),
        *_check_markers_said(measured, facts),
        *_check_bos(measured, facts),
        *_check_lengths(measured, settings),
        *_shares(measured),
        *_check_pad(facts, settings),
    ]
    return sorted(found, key=lambda finding: not finding.is_failure)


class _Measured:
    """The numbers of conversations, span by span."""

    def __init__(self, rows: ConversationRows, policy: LossPolicy) -> None:
        self.rows, spans = rows, rows.spans
        stop = spans["stop"].astype(np.int64)
        start = np.roll(stop, 1)
        start[rows.starts[:-1][np.diff(rows.starts) > 0]] = 0
        self.length: NDArray[np.int64] = stop - start
        """Tokens of each span."""
        self.document: NDArray[np.int64] = np.repeat(np.arange(len(rows)), np.diff(rows.starts))
        self.sample: NDArray[np.int64] = 2 * self.document + spans["side"]
        """One more for the rejected side of a pair."""
        self.begins: NDArray[np.bool_] = np.append(True, np.diff(self.sample) != 0)[: len(stop)]
        """Whether a span is the first of its sample."""
        self.trained: NDArray[np.int64] = np.where(policy.weights(rows.starts, spans) > 0, self.length - self.begins, 0)
        """Trained tokens. The first of a sample is none: nothing comes before it that could predict it."""
        turns, self.turn = np.unique(self.sample * (1 << 16) + spans["turn"] + 1, return_inverse=True)
        """Numbers turns through all samples; spans of one turn have the same."""
        self.num_turns = len(turns)

    def answers(self, part: int, count: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether this part of each turn has a count above 0 and the turn is an assistant's."""
        is_counted = (self.rows.spans["role"] == _ASSISTANT) & (self.rows.spans["part"] == part)
        found: NDArray[np.bool_] = np.bincount(self.turn[is_counted], count[is_counted], self.num_turns) > 0
        return found

    def place_of(self, span: int) -> Place:
        return self.rows.where(int(self.document[span])) | {"turn": int(self.rows.spans["turn"][span])}

    def first_spans(self, turns: NDArray[Any]) -> NDArray[np.int64]:
        """The first span of each of these turns."""
        first: NDArray[np.int64] = np.unique(self.turn, return_index=True)[1][turns]
        return first

    def of_share(
        self, documents: Sequence[int], kind: str, words: str, remedy: str, example: Place | None = None
    ) -> Iterator[Finding]:
        """A finding for unusable rows. It is a failure if there are too many of them to be intended."""
        if len(documents):
            is_failure = len(documents) > _MOST_LEFT_OUT * len(self.rows)
            headline = f"{share_in_words(len(documents), len(self.rows))} {words}"
            yield Finding(kind, is_failure, headline, (example or self.rows.where(int(documents[0])),), remedy)


def _check_markers(facts: TemplateFacts) -> Iterator[Finding]:
    never = _NEVER_TOKENS.get(facts.template, ())
    cut = {name: len(ids) for name, ids in facts.markers.items() if len(ids) != 1 and name not in never}
    if not cut:
        return
    if not facts.has_tokens:
        words = f"{facts.tokenizer!r} has no tokens for markers: the template's are spelled out, as text is"
        yield Finding("marker is not a token", False, words)
        return
    listed = ", ".join(f"{name} ({number or 'not known to it'})" for name, number in cut.items())
    yield Finding(
        "marker is not a token",
        not facts.is_own or facts.end_of_turn in cut,
        f"markers of the template {facts.template!r} are not one token of {facts.tokenizer!r}: {listed}",
        remedy="no template: the tokenizer's own; one for this tokenizer; or a tokenizer with these tokens",
    )


def _check_masks(measured: _Measured, settings: CheckSettings) -> Iterator[Finding]:
    size = 2 * len(measured.rows)
    trained = np.bincount(measured.sample, measured.trained, size)
    is_there = np.bincount(measured.sample, minlength=size) > 0
    is_there[::2] |= ~is_there[1::2]  # a conversation without any span has an empty mask too
    is_empty = ((trained == 0) & is_there).reshape(-1, 2).any(axis=1)
    yield from measured.of_share(
        np.flatnonzero(is_empty).tolist(),
        "empty mask",
        f"have no trained token under loss='{settings.policy}': they would be dropped",
        "another loss=, or look at roles, and at weight and train of messages",
    )


def _check_ends(measured: _Measured, facts: TemplateFacts, policy: LossPolicy) -> Iterator[Finding]:
    if not policy.trains_answers:
        return
    said = measured.answers(TEXT, measured.trained)
    endless = np.flatnonzero(said & ~measured.answers(END, measured.trained))
    if not len(endless):
        return
    if not policy.end_of_turn:
        words = "without end of turn: a model learns from these answers what to say, and not to stop"
        yield Finding("end of turn", False, words)
        return
    total = int(said.sum())
    if len(endless) < total:
        words = f"{len(endless):,} of {total:,} trained answers have no end of turn after them"
        remedy = "look at these rows: a model learns not to stop there"
    elif facts.end_of_turn is None:
        words = (
            f"the template {facts.template!r} writes no end-of-turn marker after an answer: a model would never stop"
        )
        remedy = "a template with one, such as 'chatml'; 'plain' takes the tokenizer's eos_token"
    else:
        words = f"{facts.end_of_turn} is never trained: a model would never stop"
        remedy = "a template that writes it after every answer"
        if facts.has_generation:
            remedy = f"{{% endgeneration %}} behind {facts.end_of_turn} in the template"
    example = measured.place_of(int(measured.first_spans(endless)[0]))
    yield Finding("end of turn", len(endless) == total, words, (example,), remedy)


def _check_answers(measured: _Measured, facts: TemplateFacts) -> Iterator[Finding]:
    """Find answers without a word, which teach to stop at once. Blanks do not count; some templates add one."""
    words = np.append(0, np.cumsum(~np.isin(measured.rows.tokens, list(facts.blank))))
    ends_at = np.cumsum(measured.length)
    says = measured.answers(TEXT, words[ends_at] - words[ends_at - measured.length])
    spans = measured.first_spans(np.flatnonzero(measured.answers(END, measured.trained) & ~says))
    if len(spans):
        yield from measured.of_share(
            np.unique(measured.document[spans]).tolist(),
            "empty answer",
            "have an answer without text: a model would learn to stop at once",
            'leave them out, or "train": false in these messages',
            measured.place_of(int(spans[0])),
        )


def _check_markers_said(measured: _Measured, facts: TemplateFacts) -> Iterator[Finding]:
    """Find learned markers that only a template writes. They show a mask that is shifted or too wide."""
    names = {ids[0]: name for name, ids in facts.markers.items() if len(ids) == 1 and ids[0] in facts.special}
    tokens, spans = measured.rows.tokens, measured.rows.spans
    is_said = np.repeat((spans["part"] == TEXT) & (spans["role"] == _ASSISTANT), measured.length)
    wrong = np.flatnonzero(np.isin(tokens, list(names)) & is_said)
    if len(wrong):
        span = int(np.searchsorted(np.cumsum(measured.length), wrong[0], side="right"))
        yield Finding(
            "marker in an answer",
            not facts.has_generation,
            f"{names[int(tokens[wrong[0]])]} is inside of what an assistant said, where only the template writes it",
            (measured.place_of(span),),
            "look at {% generation %} in the template" if facts.has_generation else "report this template",
        )


def _check_bos(measured: _Measured, facts: TemplateFacts) -> Iterator[Finding]:
    rows = measured.rows
    firsts = (np.cumsum(measured.length) - measured.length)[measured.begins].tolist()
    for bos in filter(None, facts.bos):
        begins = [tuple(rows.tokens[first : first + 2 * len(bos)].tolist()) for first in firsts]
        doubled = measured.document[measured.begins][[begin == bos * 2 for begin in begins]]
        if len(doubled):
            words = f"{share_in_words(len(doubled), len(rows))} begin with two start tokens"
            remedy = "take one out of the template, or out of the messages"
            yield Finding("double BOS", True, words, (rows.where(int(doubled[0])),), remedy)
            return


def _check_lengths(measured: _Measured, settings: CheckSettings) -> Iterator[Finding]:
    lengths = np.bincount(measured.sample, measured.length, 2 * len(measured.rows)).reshape(-1, 2).max(axis=1)
    over = np.flatnonzero(lengths > settings.max_length).tolist()
    if not over:
        return
    words = f"have more than max_length={settings.max_length:,} tokens"
    if settings.truncation == "drop" and not settings.drops_are_meant:
        fits = int(np.quantile(lengths, 1 - _MOST_LEFT_OUT, method="inverted_cdf"))
        remedy = "truncation='drop' if that is meant, 'keep_start', ... if not"
        if fits > settings.max_length:
            remedy = f"max_length={fits} holds 95 % of them, or {remedy}"
        yield from measured.of_share(over, "over length", f"{words}: they would be dropped", remedy)
        return
    headline = f"{share_in_words(len(over), len(measured.rows))} {words}: truncation='{settings.truncation}'"
    yield Finding("over length", False, headline, (measured.rows.where(over[0]),))


def _shares(measured: _Measured) -> Iterator[Finding]:
    total, rows = int(measured.length.sum()), measured.rows
    if not total:
        return
    num_turns = len(np.unique(measured.turn[rows.spans["turn"] >= 0]))
    yield Finding(
        "shares",
        False,
        f"{len(rows):,} rows, {100 * measured.trained.sum() / total:.1f} % of their tokens trained; on average "
        f"{total / len(rows):,.0f} tokens and {num_turns / len(rows):.1f} messages",
    )


def _check_pad(facts: TemplateFacts, settings: CheckSettings) -> Iterator[Finding]:
    if settings.pad is not None and settings.pad in facts.ends:
        yield Finding(
            "pad == eos",
            False,
            "rows are filled up with the token that ends a text or a turn: our masks come from lengths, so where "
            "it ends an answer it is still trained",
        )


def share_in_words(number: int, total: int) -> str:
    """
    >>> share_in_words(3, 40)
    '3 of 40 rows (7.5 %)'
    """
    return f"{number:,} of {total:,} rows ({100 * number / max(total, 1):.1f} %)"


def place_in_words(place: Mapping[str, Any]) -> str:
    """
    >>> place_in_words({"file": "sft.jsonl", "line": 7, "turn": 2})
    'sft.jsonl, line 7, message 2'
    """
    names = {"file": "", "turn": "message ", "why": ""}
    return ", ".join(f"{names.get(name, f'{name} ')}{value}" for name, value in place.items())


# Templates


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
    special: frozenset[int]
    """Ids that come from template text alone."""
    bos: tuple[tuple[int, ...], ...]
    blank: frozenset[int]
    """Ids that are only blanks."""


def facts_of(info: Mapping[str, Any], tokenizer: Any) -> TemplateFacts:
    """The facts of a template, from the tokenizer and its entry in a manifest (or `Chat.info`)."""
    chat, name = info["chat"], str(info["name"])
    template, end_of_turn, tokens = str(chat["template"]), chat["end_of_turn"], chat["special_tokens"]
    vocab: dict[str, int] = getattr(tokenizer, "vocab", {})
    ends: set[Any] = {info.get("eos"), vocab.get(tokens.get("eos_token") or ""), vocab.get(end_of_turn or "")}
    names: list[str] = []
    if hasattr(tokenizer, "encode_batch"):
        names = _markers_of(chat)
    bos = {tokens.get("bos_token"), *(name for name in _BOS_NAMES if name in vocab)} - {None, ""}
    encode = _encoder_of(tokenizer)
    return TemplateFacts(
        template,
        name,
        has_tokens=info["kind"] not in ("bytes", "chars"),
        is_own=template == name or template.startswith(f"{name}:"),
        end_of_turn=end_of_turn,
        has_generation=re.search(r"\{%-?\s*generation\b", chat["source"]) is not None,
        ends=frozenset(ends - {None}),
        markers={name: encode(name) for name in names},
        special=frozenset(tokenizer.special.values()) if isinstance(tokenizer, JsonTokenizer) else frozenset(),
        bos=tuple(encode(name) for name in sorted(bos)),
        blank=frozenset(number for blank in _BLANKS for number in encode(blank)),
    )


def _encoder_of(tokenizer: Any) -> Callable[[str], tuple[int, ...]]:
    """A function from text to ids, empty for unknown text, and if a store did not keep the tokenizer."""
    if not hasattr(tokenizer, "encode_batch"):
        return lambda text: ()
    if not isinstance(tokenizer, JsonTokenizer):
        return lambda text: tuple(np.asarray(tokenizer.encode_batch([text])[0]).tolist())
    backend, vocab = tokenizer.backend, tokenizer.vocab
    unknown = vocab.get(getattr(backend.model, "unk_token", None) or "<unk>")

    def encode(text: str) -> tuple[int, ...]:
        ids = tuple(backend.encode(text, add_special_tokens=False).ids)
        return () if ids == (unknown,) and vocab.get(text) != unknown else ids

    return encode


def _markers_of(chat: Mapping[str, Any]) -> list[str]:
    """The markers in an example of the template, and its end of a turn."""
    text = _example_text(chat)
    markers = [*_MARKER.findall(text), *(token for token in chat["special_tokens"].values() if token and token in text)]
    if chat["end_of_turn"]:
        markers.append(chat["end_of_turn"])
    return markers


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


# The check of a loader


def refuse_bad(read: StoreStream, *, drops_are_meant: bool = False) -> None:
    """Raise one error for all failures of the conversations; log the notes.

    `drops_are_meant`: the user asked to drop conversations that are too long, even if they are many.
    """
    failures: dict[str, str] = {}
    file = None
    for name, finding in _findings(read, drops_are_meant):
        if not finding.is_failure:
            log.info("%s: %s: %s", name, finding.kind, finding.headline)
            continue
        words = finding.headline
        for place in finding.examples[:1]:
            words += f"\nfirst: {place_in_words(place)}"
            file = file or str(place["file"])
        if finding.remedy:
            words += f"\ntry: {finding.remedy}"
        failures[f"{finding.kind}, {name}" if finding.kind in failures else finding.kind] = words
    if failures:
        remedy = "Delivery(check=False) opens them as they are"
        if file != "<memory>":
            command = f"batchwright doctor chat {file or 'FILE'} --tokenizer T --template X"
            remedy = f"{command} shows such rows; {remedy}"
        words = f"these conversations did not pass the check: {', '.join(failures)}"
        raise SpecError(words, **failures, remedy=remedy)


def _findings(read: StoreStream, drops_are_meant: bool) -> Iterator[tuple[str, Finding]]:
    """(name of the source, finding) of all sources."""
    known: dict[Any, TemplateFacts] = {}  # by store, as a store may have many sources
    for rows in read.flow.stored:
        stream = rows.stream
        if not isinstance(rows, SampleRows) or not isinstance(stream, TokenStream) or rows.spec.loss is None:
            continue
        store, spec, policy = stream.store, rows.spec, LossPolicy.of(rows.spec.loss)
        if store.folder not in known:
            known[store.folder] = facts_of(store.manifest.tokenizer, store.tokenizer)
        settings = CheckSettings(policy, spec.row_tokens, spec.truncation, read.flow.pad, drops_are_meant)
        for finding in _findings_of_bake(store.report, stream.name):
            yield rows.name, finding
        for finding in findings_of(_first_rows(stream), known[store.folder], settings):
            yield rows.name, finding


def _findings_of_bake(report: Mapping[str, Any], source: str) -> Iterator[Finding]:
    """Findings of a bake's report: rows that its template could not render right, left out by on_error='skip'."""
    part = report.get("ingredients", {}).get(source, {})
    total = part.get("rows_read", 0)
    for kind, number in part.get("dropped", {}).items():
        if not any(words in kind for words in _BY_THE_TEMPLATE):
            continue
        examples = [
            {"file": file, "row": row, "why": why}
            for file, row, why in report.get("examples", [])
            if why.startswith(kind)
        ]
        headline = f"{share_in_words(number, total)} were left out: {kind}"
        remedy = "a chat template for such conversations"
        yield Finding(kind, number > _MOST_LEFT_OUT * total, headline, tuple(examples[:1]), remedy)
    if source in report.get("layouts", {}):
        yield Finding("format", False, report["layouts"][source])


def _first_rows(stream: TokenStream) -> ConversationRows:
    """The first conversations of a stream, read from as few shards as possible."""
    tokens: list[NDArray[Any]] = []
    lengths: list[NDArray[Any]] = []
    num_spans: list[NDArray[Any]] = []
    fields: list[dict[str, NDArray[Any]]] = []
    left = _CHECKED_ROWS
    for number in range(len(stream.address)):
        shard = stream.shard(number)
        if not left or shard.spans is None:
            break
        starts, spans = shard.spans
        mine = min(left, len(shard.offsets) - 1)
        tokens.append(shard.tokens[: shard.offsets[mine]])
        lengths.append(np.diff(shard.offsets[: mine + 1]))
        num_spans.append(np.diff(starts[: mine + 1]))
        fields.append({name: values[: starts[mine]] for name, values in spans.items()})
        left -= mine

    def where(number: int) -> dict[str, Any]:
        document = stream.document(number)
        return {"file": document.file, "row": document.row}

    return ConversationRows(
        np.concatenate(tokens),
        np.append(0, np.cumsum(np.concatenate(lengths), dtype=np.int64)),
        np.append(0, np.cumsum(np.concatenate(num_spans), dtype=np.int64)),
        {name: np.concatenate([part[name] for part in fields]) for name in fields[0]},
        where,
    )
