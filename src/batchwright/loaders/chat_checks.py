"""What would go wrong silently in training on some conversations: found in their tokens and spans, said in words.

A *failure* is what nobody can mean; a *note* is worth knowing. Checked are the first 1,000 conversations of a source,
by a loader when it opens (`check=False` leaves that out) and by `batchwright doctor chat` before anything is baked.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.batches.samples import SampleRows
from batchwright.prepare.chat.faults import ChatError
from batchwright.prepare.chat.policy import LossPolicy
from batchwright.prepare.chat.spans import END, ROLES, TEXT
from batchwright.prepare.tokenizers import JsonTokenizer
from batchwright.store.stream import TokenStream

if TYPE_CHECKING:
    from batchwright.loaders.stored import StoreStream

__all__ = [
    "CHECKED_ROWS",
    "MOST_LEFT_OUT",
    "Facts",
    "Finding",
    "Rows",
    "Settings",
    "facts_of",
    "findings_of",
    "findings_of_bake",
    "first_rows",
    "place_in_words",
    "refuse_bad",
]

log: logging.Logger = logging.getLogger("batchwright")

CHECKED_ROWS = 1000
MOST_LEFT_OUT = 0.05
"""The share of rows that may be left out, or teach nothing, and still be meant so: dirt, and not a wrong setting."""

_ASSISTANT = ROLES.index("assistant")
_MARKER = re.compile(r"<[|｜][^<>\s]{1,64}>|</?s>|<(?:bos|eos|pad)>|<(?:start|end)_of_\w{1,32}>|\[/?[A-Z_]{2,32}\]")
"""What a template writes that looks like a token, and not like words or XML."""
_NEVER_TOKENS = {"zephyr": ("<|system|>", "<|user|>", "<|assistant|>")}
"""Markers for which the model that a template is named after has no tokens either."""
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "<｜begin▁of▁sentence｜>")
_BLANKS = (" ", "\n", "\n\n", "\t", "  ", " \n")
_BY_THE_TEMPLATE = ("by the template", "the template fails", "generation marks")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a check has found, and what to do about it."""

    kind: str
    """Short, and the same wherever this is found."""
    is_failure: bool
    headline: str
    examples: tuple[dict[str, Any], ...] = ()
    """Where the first ones are: file, line (from 1) or row (from 0), turn (the number of the message, from 0)."""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some conversations as tokens, end to end, with what the tokens are."""

    tokens: NDArray[Any]
    borders: NDArray[np.int64]
    """Conversation d has the tokens [borders[d], borders[d + 1])."""
    starts: NDArray[np.int64]
    """And the spans [starts[d], starts[d + 1])."""
    spans: dict[str, NDArray[Any]]
    """The fields of SPAN_DTYPE."""
    where: Callable[[int], dict[str, Any]]
    """Where a conversation was read: file and row."""

    def __len__(self) -> int:
        return len(self.borders) - 1


@dataclass(frozen=True, slots=True)
class Settings:
    """How a loader would train on them."""

    policy: LossPolicy
    max_length: int
    truncation: str = "drop"
    pad: int | None = None
    drops_are_meant: bool = False
    """Whether the user said "drop": then it is no fault, however many rows it takes."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a template, with a tokenizer."""

    template: str
    tokenizer: str
    has_tokens: bool
    """Whether this kind of tokenizer can have tokens for markers: bytes and characters have none."""
    is_own: bool
    """Whether the template came with the tokenizer."""
    end_of_turn: str | None
    has_generation: bool
    """Whether it says itself, by {% generation %}, what is generated."""
    markers: dict[str, tuple[int, ...]]
    """What the template writes around messages, such as "<|im_start|>", and the ids of each."""
    special: frozenset[int]
    """Ids that come from template text alone."""
    bos: tuple[tuple[int, ...], ...]
    ends: frozenset[int]
    """Ids of the end of a text, and of a turn."""
    blank: frozenset[int]
    """Ids that are nothing but blanks."""


def facts_of(info: Mapping[str, Any], tokenizer: Any) -> Facts:
    """From what a manifest (or `Chat.info`) says of the tokenizer, and the tokenizer."""
    chat = info["chat"]
    encode = _encoder_of(tokenizer)
    text = _example_text(chat) if encode else ""
    names = [*_MARKER.findall(text), *(t for t in chat["special_tokens"].values() if t and t in text)]
    names += [chat["end_of_turn"]] if chat["end_of_turn"] and encode else []
    markers = {name: encode(name) for name in dict.fromkeys(names)} if encode else {}
    vocab: dict[str, int] = getattr(tokenizer, "vocab", {})
    bos_names = {chat["special_tokens"].get("bos_token"), *(name for name in _BOS_NAMES if name in vocab)}
    eos = chat["special_tokens"].get("eos_token")
    ends = {info.get("eos"), vocab.get(eos or ""), vocab.get(chat["end_of_turn"] or "")}
    template, name = str(chat["template"]), str(info["name"])
    return Facts(
        template=template,
        tokenizer=name,
        has_tokens=info["kind"] not in ("bytes", "chars"),
        is_own=template == name or template.startswith(f"{name}:"),
        end_of_turn=chat["end_of_turn"],
        has_generation=re.search(r"\{%-?\s*generation\b", chat["source"]) is not None,
        markers=markers,
        special=frozenset(tokenizer.special.values()) if isinstance(tokenizer, JsonTokenizer) else frozenset(),
        bos=tuple(encode(name) for name in sorted(filter(None, bos_names))) if encode else (),
        ends=frozenset(end for end in ends if end is not None),
        blank=frozenset(one for text in _BLANKS for one in encode(text)) if encode else frozenset(),
    )


def _encoder_of(tokenizer: Any) -> Callable[[str], tuple[int, ...]] | None:
    """Text -> ids; none for what the tokenizer does not know. None where a store did not keep the tokenizer."""
    if isinstance(tokenizer, JsonTokenizer):
        backend, vocab = tokenizer.backend, tokenizer.vocab
        unknown = vocab.get(getattr(backend.model, "unk_token", None) or "<unk>")

        def encode(text: str) -> tuple[int, ...]:
            ids = tuple(backend.encode(text, add_special_tokens=False).ids)
            return () if ids == (unknown,) and vocab.get(text) != unknown else ids

        return encode
    if not hasattr(tokenizer, "encode_batch"):
        return None
    return lambda text: tuple(np.asarray(tokenizer.encode_batch([text])[0]).tolist())


def _example_text(chat: Mapping[str, Any]) -> str:
    """What the template makes of a plain conversation; nothing if it refuses every one."""
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


# Checks


def findings_of(rows: Rows, facts: Facts, settings: Settings) -> list[Finding]:
    """All that is found in some conversations, failures first."""
    found = [*_check_markers(facts)]
    if not _is_tiled(rows).all():
        document = int(np.flatnonzero(~_is_tiled(rows))[0])
        found.append(
            Finding(
                "wrong spans",
                True,
                "the spans of conversations do not fit their tokens, so no mask can be right",
                (rows.where(document),),
                "bake them anew, and report this",
            )
        )
    else:
        measured = _Measured.of(rows, settings.policy)
        found += _check_masks(rows, measured, settings)
        found += _check_ends(rows, measured, facts, settings)
        found += _check_answers(rows, measured, facts)
        found += _check_markers_said(rows, measured, facts)
        found += _check_bos(rows, measured, facts)
        found += _check_lengths(rows, measured, settings)
        found += _shares(rows, measured)
    if settings.pad is not None and settings.pad in facts.ends:
        found.append(
            Finding(
                "pad == eos",
                False,
                "rows are filled up with the token that ends a text or a turn: our masks come from lengths, so where "
                "it ends an answer it is still trained",
            )
        )
    return sorted(found, key=lambda finding: not finding.is_failure)


@dataclass(frozen=True, slots=True)
class _Measured:
    """Conversations in numbers, span by span."""

    length: NDArray[np.int64]
    """Tokens of each span."""
    trained: NDArray[np.int64]
    """Trained ones among them. The first token of a sample is none: nothing comes before it that could predict it."""
    document: NDArray[np.int64]
    sample: NDArray[np.int64]
    """2 * document, and one more for the rejected side of a pair."""
    turn: NDArray[np.int64]
    """Numbers turns through all samples; spans of one turn have the same."""
    num_turns: int

    @classmethod
    def of(cls, rows: Rows, policy: LossPolicy) -> _Measured:
        spans = rows.spans
        document = np.repeat(np.arange(len(rows)), np.diff(rows.starts))
        length = _span_lengths(rows)
        sample = 2 * document + spans["side"]
        weight = policy.weights(rows.starts, spans)
        is_first = np.append(True, np.diff(sample) != 0)[: len(sample)]
        trained = np.where(weight > 0, length - is_first, 0)
        turns, turn = np.unique(sample * (1 << 16) + spans["turn"] + 1, return_inverse=True)
        return cls(length, trained, document, sample, turn, len(turns))

    def by_turn(self, is_counted: NDArray[np.bool_], what: NDArray[np.int64]) -> NDArray[Any]:
        return np.bincount(self.turn[is_counted], what[is_counted], self.num_turns)


def _span_lengths(rows: Rows) -> NDArray[np.int64]:
    stop = rows.spans["stop"].astype(np.int64)
    before = np.append(0, stop[:-1])[: len(stop)]
    before[rows.starts[:-1][np.diff(rows.starts) > 0]] = 0
    result: NDArray[np.int64] = stop - before
    return result


def _is_tiled(rows: Rows) -> NDArray[np.bool_]:
    """Whether the spans of each conversation tile its tokens."""
    length, tokens, num_spans = _span_lengths(rows), np.diff(rows.borders), np.diff(rows.starts)
    document = np.repeat(np.arange(len(rows)), num_spans)
    last = np.zeros(len(rows), np.int64)
    last[num_spans > 0] = rows.spans["stop"][rows.starts[1:][num_spans > 0] - 1]
    has_empty = np.bincount(document[length <= 0], minlength=len(rows)) > 0
    result: NDArray[np.bool_] = (last == tokens) & ~has_empty
    return result


def _check_markers(facts: Facts) -> Iterator[Finding]:
    cut = {
        name: len(ids)
        for name, ids in facts.markers.items()
        if len(ids) != 1 and name not in _NEVER_TOKENS.get(facts.template, ())
    }
    if not cut:
        return
    listed = ", ".join(f"{name} ({number or 'not known to it'})" for name, number in cut.items())
    what = f"markers of the template {facts.template!r} are not one token of {facts.tokenizer!r}: {listed}"
    if not facts.has_tokens:
        note = f"{facts.tokenizer!r} has no tokens for markers: the template's are spelled out, as text is"
        yield Finding("marker is not a token", False, note)
    else:
        yield Finding(
            "marker is not a token",
            not facts.is_own or facts.end_of_turn in cut,
            what,
            remedy="no template: the tokenizer's own; one for this tokenizer; or a tokenizer with these tokens",
        )


def _check_masks(rows: Rows, measured: _Measured, settings: Settings) -> Iterator[Finding]:
    trained = np.bincount(measured.sample, measured.trained, 2 * len(rows))
    is_there = np.bincount(measured.sample, minlength=2 * len(rows)) > 0
    is_there[::2] |= ~is_there[1::2]  # a conversation without any span has an empty mask too
    is_empty = ((trained == 0) & is_there).reshape(-1, 2).any(axis=1)
    yield from _of_share(
        rows,
        np.flatnonzero(is_empty),
        "empty mask",
        f"have no trained token under loss='{settings.policy}': they would be dropped",
        "another loss=, or look at roles, and at weight and train of messages",
    )


def _check_ends(rows: Rows, measured: _Measured, facts: Facts, settings: Settings) -> Iterator[Finding]:
    policy = settings.policy
    if not (policy.everything or "assistant" in policy.roles):
        return
    role, part = rows.spans["role"], rows.spans["part"]
    said = measured.by_turn((role == _ASSISTANT) & (part == TEXT), measured.trained) > 0
    ended = measured.by_turn((role == _ASSISTANT) & (part == END), measured.trained) > 0
    if not said.any() or (said & ~ended).sum() == 0:
        return
    number, total = int((said & ~ended).sum()), int(said.sum())
    example = (_place_of_turn(rows, measured, int(np.flatnonzero(said & ~ended)[0])),)
    if not policy.end_of_turn:
        yield Finding(
            "end of turn", False, "without end of turn: a model learns from these answers what to say, and not to stop"
        )
    elif number < total:
        what = f"{number:,} of {total:,} trained answers have no end of turn after them"
        yield Finding("end of turn", False, what, example, "look at these rows: a model learns not to stop there")
    elif facts.end_of_turn is None:
        what = f"the template {facts.template!r} writes no end-of-turn marker after an answer: a model would never stop"
        remedy = "a template with one, such as 'chatml'; 'plain' takes the tokenizer's eos_token"
        yield Finding("end of turn", True, what, example, remedy)
    else:
        what = f"{facts.end_of_turn} is never trained: a model would never stop"
        remedy = (
            f"{{% endgeneration %}} behind {facts.end_of_turn} in the template"
            if facts.has_generation
            else "a template that writes it after every answer"
        )
        yield Finding("end of turn", True, what, example, remedy)


def _check_answers(rows: Rows, measured: _Measured, facts: Facts) -> Iterator[Finding]:
    """Answers without a word teach to stop at once. Blanks are no words: some templates write one before an answer."""
    role, part = rows.spans["role"], rows.spans["part"]
    words = np.append(0, np.cumsum(~np.isin(rows.tokens, list(facts.blank))))
    ends_at = np.cumsum(measured.length)
    says = (
        measured.by_turn((role == _ASSISTANT) & (part == TEXT), words[ends_at] - words[ends_at - measured.length]) > 0
    )
    ends = measured.by_turn((role == _ASSISTANT) & (part == END), measured.trained) > 0
    silent = np.flatnonzero(ends & ~says)
    if len(silent):
        first = np.searchsorted(np.sort(measured.turn), silent)
        documents = np.unique(measured.document[np.argsort(measured.turn, kind="stable")[first]])
        yield from _of_share(
            rows,
            documents,
            "empty answer",
            "have an answer without text: a model would learn to stop at once",
            'leave them out, or "train": false in these messages',
            (_place_of_turn(rows, measured, int(silent[0])),),
        )


def _check_markers_said(rows: Rows, measured: _Measured, facts: Facts) -> Iterator[Finding]:
    """A mask that is shifted or too wide trains what only a template writes."""
    ids = {ids[0]: name for name, ids in facts.markers.items() if len(ids) == 1 and ids[0] in facts.special}
    if not ids:
        return
    is_marker = np.isin(rows.tokens, list(ids))
    is_said = np.repeat((rows.spans["part"] == TEXT) & (rows.spans["role"] == _ASSISTANT), measured.length)
    wrong = np.flatnonzero(is_marker & is_said)
    if len(wrong):
        document = int(np.searchsorted(rows.borders, wrong[0], side="right")) - 1
        span = int(np.searchsorted(np.cumsum(measured.length), wrong[0], side="right"))
        name = ids[int(rows.tokens[wrong[0]])]
        yield Finding(
            "marker in an answer",
            not facts.has_generation,
            f"{name} is inside of what an assistant said, where only the template writes it",
            (rows.where(document) | {"turn": int(rows.spans["turn"][span])},),
            "look at {% generation %} in the template" if facts.has_generation else "report this template",
        )


def _check_bos(rows: Rows, measured: _Measured, facts: Facts) -> Iterator[Finding]:
    if not len(rows.tokens):
        return
    begins = np.append(True, np.diff(measured.sample) != 0)[: len(measured.sample)]
    at = (np.cumsum(measured.length) - measured.length)[begins]
    documents = measured.document[begins]
    for bos in facts.bos:
        if not bos:
            continue
        twice = np.array(bos * 2)
        fits = at + len(twice) <= len(rows.tokens)
        starts = np.minimum(at, max(len(rows.tokens) - len(twice), 0))
        window = rows.tokens[np.minimum(starts[:, None] + np.arange(len(twice)), len(rows.tokens) - 1)]
        doubled = documents[fits & (window == twice).all(axis=1)]
        if len(doubled):
            what = f"{_rows_in_words(len(doubled), rows)} begin with two start tokens"
            remedy = "take one out of the template, or out of the messages"
            yield Finding("double BOS", True, what, (rows.where(int(doubled[0])),), remedy)
            return


def _check_lengths(rows: Rows, measured: _Measured, settings: Settings) -> Iterator[Finding]:
    lengths = np.bincount(measured.sample, measured.length, 2 * len(rows)).reshape(-1, 2).max(axis=1)
    over = np.flatnonzero(lengths > settings.max_length)
    if not len(over):
        return
    fits = int(np.quantile(lengths, 1 - MOST_LEFT_OUT, method="inverted_cdf"))
    if settings.truncation == "drop" and not settings.drops_are_meant:
        what = f"have more than max_length={settings.max_length:,} tokens: they would be dropped"
        longer = f"max_length={fits} holds 95 % of them, or " if fits > settings.max_length else ""
        yield from _of_share(
            rows, over, "over length", what, f"{longer}truncation='drop' if that is meant, 'keep_start', ... if not"
        )
    else:
        what = f"have more than max_length={settings.max_length:,} tokens: truncation='{settings.truncation}'"
        yield Finding("over length", False, f"{_rows_in_words(len(over), rows)} {what}", (rows.where(int(over[0])),))


def _shares(rows: Rows, measured: _Measured) -> Iterator[Finding]:
    total = int(measured.length.sum())
    if not total:
        return
    spans = rows.spans
    num_turns = len(np.unique(measured.turn[spans["turn"] >= 0]))
    yield Finding(
        "shares",
        False,
        f"{len(rows):,} rows, {100 * measured.trained.sum() / total:.1f} % of their tokens trained; on average "
        f"{total / len(rows):,.0f} tokens and {num_turns / len(rows):.1f} messages",
    )


def _of_share(
    rows: Rows,
    documents: NDArray[np.int64],
    kind: str,
    what: str,
    remedy: str,
    examples: tuple[dict[str, Any], ...] | None = None,
) -> Iterator[Finding]:
    """A finding for rows that are not usable: a failure where they are too many to be meant."""
    if len(documents):
        is_failure = len(documents) > MOST_LEFT_OUT * len(rows)
        first = (rows.where(int(documents[0])),) if examples is None else examples
        yield Finding(kind, is_failure, f"{_rows_in_words(len(documents), rows)} {what}", first, remedy)


def _rows_in_words(number: int, rows: Rows) -> str:
    return f"{number:,} of {len(rows):,} rows ({100 * number / len(rows):.1f} %)"


def _place_of_turn(rows: Rows, measured: _Measured, turn: int) -> dict[str, Any]:
    span = int(np.flatnonzero(measured.turn == turn)[0])
    return rows.where(int(measured.document[span])) | {"turn": int(rows.spans["turn"][span])}


def findings_of_bake(report: Mapping[str, Any], source: str) -> list[Finding]:
    """What a bake's report says of rows that its template could not do right, and that on_error='skip' left out."""
    found = []
    part = report.get("ingredients", {}).get(source, {})
    total = part.get("rows_read", 0)
    for kind, number in part.get("dropped", {}).items():
        if not any(words in kind for words in _BY_THE_TEMPLATE):
            continue
        examples = [(file, row, why) for file, row, why in report.get("examples", []) if why.startswith(kind)]
        headline = f"{number:,} of {total:,} rows ({100 * number / total:.1f} %) were left out: {kind}"
        where: tuple[dict[str, Any], ...] = tuple({"file": f, "row": r, "why": why} for f, r, why in examples[:1])
        remedy = "a chat template for such conversations"
        found.append(Finding(kind, number > MOST_LEFT_OUT * total, headline, where, remedy))
    if source in report.get("layouts", {}):
        found.append(Finding("format", False, report["layouts"][source]))
    return found


def place_in_words(place: Mapping[str, Any]) -> str:
    """
    >>> place_in_words({"file": "sft.jsonl", "line": 7, "turn": 2})
    'sft.jsonl, line 7, message 2'
    """
    names = {"file": "", "turn": "message ", "why": ""}
    return ", ".join(f"{names.get(name, f'{name} ')}{value}" for name, value in place.items())


# Of a loader


def first_rows(stream: TokenStream, count: int = CHECKED_ROWS) -> Rows:
    """The first conversations of a stream, read from as few of its shards as hold them."""
    tokens: list[NDArray[Any]] = []
    lengths: list[NDArray[Any]] = []
    num_spans: list[NDArray[Any]] = []
    fields: list[dict[str, NDArray[Any]]] = []
    left = count
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

    return Rows(
        np.concatenate(tokens),
        np.append(0, np.cumsum(np.concatenate(lengths), dtype=np.int64)),
        np.append(0, np.cumsum(np.concatenate(num_spans), dtype=np.int64)),
        {name: np.concatenate([part[name] for part in fields]) for name in fields[0]},
        where,
    )


def refuse_bad(read: StoreStream, *, drops_are_meant: bool = False) -> None:
    """Raise one error for all that is wrong with the conversations that are read; log what is worth knowing.

    `drops_are_meant`: the user said that what is too long is to be dropped, however much that is.
    """
    failures: dict[str, str] = {}
    files: list[str] = []
    known: dict[Any, Facts] = {}  # by store: one may have many sources
    for rows in read.flow.stored:
        stream = rows.stream
        if not (isinstance(rows, SampleRows) and isinstance(stream, TokenStream) and rows.spec.loss is not None):
            continue
        store = stream.store
        if store.folder not in known:
            known[store.folder] = facts_of(store.manifest.tokenizer, store.tokenizer)
        settings = Settings(
            LossPolicy.parse(rows.spec.loss),
            rows.spec.row_tokens,
            rows.spec.truncation,
            read.flow.pad,
            drops_are_meant,
        )
        found = findings_of_bake(store.report, stream.name)
        found += findings_of(first_rows(stream), known[store.folder], settings)
        for finding in found:
            if not finding.is_failure:
                log.info("%s: %s: %s", rows.name, finding.kind, finding.headline)
                continue
            example = "".join(f"\nfirst: {place_in_words(place)}" for place in finding.examples[:1])
            files += [str(place["file"]) for place in finding.examples[:1]]
            remedy = f"\ntry: {finding.remedy}" if finding.remedy else ""
            key = finding.kind if finding.kind not in failures else f"{finding.kind}, {rows.name}"
            failures[key] = finding.headline + example + remedy
    if failures:
        file = (files or ["FILE"])[0]
        doctor = f"batchwright doctor chat {file} --tokenizer T --template X shows such rows; "
        raise SpecError(
            "these conversations did not pass the check: " + ", ".join(failures),
            **failures,
            remedy=("" if file == "<memory>" else doctor) + "Delivery(check=False) opens them as they are",
        )
