"""The tokens of a batch as text, row by row, with marks on the trained ones.

⟦trained⟧   ⟨special token⟩   ↵ newline        in a terminal by colours, in a notebook as HTML, in a log by these marks
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least
from batchwright.base.errors import SpecError, TokenizerError
from batchwright.base.words import counted
from batchwright.batches.frameworks import on_host
from batchwright.batches.look_text import Look, ShownRow, TextLine, TextRun, printable
from batchwright.batches.types import TrainingBatch
from batchwright.prepare.token_text import TokenSpelling, TokenText
from batchwright.prepare.tokenizers import load_tokenizer, resolve_tokenizer
from batchwright.typing import TokenizerLike

__all__ = ["look"]

_IGNORED = -100
_MOST_UNTRAINED, _MOST_TRAINED = 160, 640
"""The number of tokens shown of a stretch. A longer one shows half as many at its beginning and at its end."""
_BEFORE = 8
"""The number of tokens before a stretch that a tokenizer gets. Some need them for spaces."""


def look(
    batch: TrainingBatch | Mapping[str, Any],
    *,
    rows: int = 4,
    tokenizer: TokenizerLike | None = None,
    whole: bool = False,
    ids: bool = False,
    color: bool | None = None,
    width: int | None = None,
) -> Look:
    """Show a batch token by token, with the trained tokens marked.

    print(bw.look(batch))                                  the first 4 rows: colours in a terminal, marks elsewhere
    bw.look(batch, rows=32, whole=True)                    all rows, and nothing of them left out
    bw.look(batch, tokenizer="tokenizer.json")             for a batch that does not know its tokenizer
    Path("masks.html").write_text(bw.look(batch).html())   a page that needs nothing else

    `batch` is a TrainingBatch of any framework on any device, or a mapping with input_ids, and labels or targets. A
    token is marked if it is a trained target: its loss_mask is not 0. Shares are of all tokens of the batch, padding
    included. Long stretches are shortened in their middle, so every border between trained and untrained tokens is
    shown. `ids` shows numbers too; without a tokenizer there are only numbers. `color` and `width` (columns) are the
    terminal's by default.
    """
    at_least(1, rows=rows)
    if width is not None:
        at_least(20, width=width)
    view = _view(batch)
    spelling, why = _spelling(tokenizer, view.metadata)
    speller = _Speller(spelling, ids, whole)
    shown = tuple(_shown_row(view, row, speller) for row in range(min(rows, len(view.tokens))))
    notes = tuple(filter(None, (*view.notes, why)))
    return Look(_heading(view, len(shown)), notes, shown, color=color, width=width)


# The batch as NumPy arrays


@dataclass(frozen=True, slots=True)
class _View:
    """A batch on the host: [rows, tokens] each."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    weight: NDArray[np.float32]
    """The weight of each target; 0 if it is not trained."""
    is_real: NDArray[np.bool_]
    sample: NDArray[np.int64]
    """The number of the sample inside its row, from 1; 0 for padding."""
    is_next: NDArray[np.bool_]
    """Whether a target is the next token of its row."""
    is_odd: NDArray[np.bool_]
    """Whether a trained target differs from the next token."""
    metadata: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def _view(batch: Any) -> _View:
    def get(name: str) -> Any:
        if isinstance(batch, Mapping) and not isinstance(batch, TrainingBatch):
            return batch.get(name)
        return getattr(batch, name, None)

    tokens = on_host(get("input_ids"))
    if tokens is None or tokens.ndim != 2:
        what = f"a {type(batch).__name__}" if tokens is None else f"input_ids of {tokens.ndim} dimensions"
        raise SpecError(
            f"look shows a batch of rows of tokens, and this is {what}",
            parameter="batch",
            remedy="a TrainingBatch, or a mapping with input_ids and labels or targets of [rows, tokens]",
        )
    targets, labels, mask, attention, segments, positions = (
        _of_shape(get(name), tokens.shape)
        for name in ("targets", "labels", "loss_mask", "attention_mask", "segment_ids", "position_ids")
    )
    if targets is None:
        targets = np.full(tokens.shape, _IGNORED)
        if labels is not None:
            targets[:, :-1] = labels[:, 1:]
    is_real = np.ones(tokens.shape, bool)
    if attention is not None:
        is_real = attention != 0
    elif segments is not None:
        is_real = segments != 0
    is_target = targets != _IGNORED
    weight = is_target.astype(np.float32)
    if mask is not None:
        weight = np.where(is_target, mask, 0).astype(np.float32)
    begins = _begins(segments, positions, on_host(get("cu_seqlens")), is_real)
    sample = np.where(is_real, np.cumsum(begins, axis=1), 0)
    is_next = np.zeros(tokens.shape, bool)  # the token after a row's last one is only a target
    is_next[:, :-1] = (targets[:, :-1] == tokens[:, 1:]) & (is_real[:, 1:] | ~is_real[:, :-1])
    is_odd = (weight != 0) & ~is_next
    is_odd[:, -1] = False
    is_odd[:, :-1] &= (sample[:, 1:] == sample[:, :-1]) & is_real[:, 1:]
    view = _View(tokens, targets, weight, is_real, sample, is_next, is_odd, get("metadata") or {})
    return replace(view, notes=tuple(_notes(view, is_target)))


def _of_shape(array: Any, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """The array if it has a value for each token, unlike masks of token pairs."""
    found = on_host(array)
    if found is None or found.shape != shape:
        return None
    return found


def _begins(
    segments: NDArray[Any] | None,
    positions: NDArray[Any] | None,
    borders: NDArray[Any] | None,
    is_real: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """The starts of samples, from the first of these fields that the batch has."""
    begins = np.zeros(is_real.shape, bool)
    begins[:, 0] = True
    if segments is not None:
        begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    elif positions is not None:
        begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    elif borders is not None:
        begins.reshape(-1)[borders[borders < begins.size]] = True
    begins[:, 1:] |= is_real[:, 1:] & ~is_real[:, :-1]
    begins &= is_real
    return begins


def _notes(view: _View, is_target: NDArray[np.bool_]) -> Iterator[str]:
    trained = view.weight != 0
    for found, noun, words in (
        (view.is_odd, "trained target", "not the token that follows"),
        (is_target & ~trained, "target", "not -100 where loss_mask is 0: a loss that reads no mask learns them"),
        (trained & ~view.is_real, "trained target", "in the padding"),
    ):
        number = int(found.sum())
        if number:
            yield f"{counted(number, noun)} {'is' if number == 1 else 'are'} {words}"


def _heading(view: _View, shown: int) -> str:
    total = max(view.tokens.size, 1)
    weights = view.weight[view.weight != 0]
    said = ""
    if (weights != 1).any():
        low, high = float(weights.min()), float(weights.max())
        said = f" (weights from {low:.3g} to {high:.3g})"
        if low == high:
            said = f" (weight {low:.3g})"
    return (
        f"{shown} of {len(view.tokens):,} rows, {view.tokens.size:,} tokens, {100 * len(weights) / total:.1f} % trained"
        f"{said}, {100 * int((~view.is_real).sum()) / total:.1f} % padding"
    )


def _row_heading(view: _View, row: int) -> str:
    known: dict[str, Any] = {}
    for name in ("source", "position", "epoch", "side", "weight"):
        values = view.metadata.get(name)
        if isinstance(values, Sequence | np.ndarray) and not isinstance(values, str) and len(values) > row:
            known[name] = values[row]
    words: list[str] = []
    if "source" in known:
        words.append(str(known["source"]))
    if "position" in known:
        words.append(f"position {int(known['position']):,}")
    if "epoch" in known:
        words.append(f"epoch {known['epoch']}")
    if known.get("side"):
        words.append(str(known["side"]))
    if float(known.get("weight", 1)) == 0:
        words.append("fills the batch up")
    real = int(view.is_real[row].sum())
    words += [f"{real:,} tokens", f"{int((view.weight[row] != 0).sum()):,} trained"]
    if real < view.tokens.shape[1]:
        words.append(f"{view.tokens.shape[1] - real:,} of padding")
    return f"row {row}: {', '.join(words)}"


# The tokens of a row


class _Token(NamedTuple):
    sample: int
    role: int
    turn: int
    weight: float
    note: str
    """The reason to show a token that is not in the row itself: it is a target that differs from the next token."""
    number: int


def _tokens(view: _View, row: int) -> Iterator[_Token]:
    """The tokens of a row, each with its weight as a target, and the targets that are not in the row."""
    role, turn = _by_token(view, "role", row), _by_token(view, "turn", row)
    weight = 0.0
    for at, number in enumerate(view.tokens[row].tolist()):
        sample = int(view.sample[row, at])
        yield _Token(sample, role[at], turn[at], weight, "", number)
        own = float(view.weight[row, at])
        weight = own if view.is_next[row, at] else 0.0
        if own and not view.is_next[row, at]:
            note = "odd target" if view.is_odd[row, at] else "target only"
            yield _Token(sample, role[at + 1], turn[at + 1], own, note, int(view.targets[row, at]))


def _by_token(view: _View, name: str, row: int) -> list[int]:
    """A metadata value for each token of a row, and for the target after it; -1 where there is none."""
    values = _of_shape(view.metadata.get(name), view.tokens.shape)
    if values is None:
        return [-1] * (view.tokens.shape[1] + 1)
    own: list[int] = values[row].astype(np.int64).tolist()
    return [*own[:1], *own]  # the first token has no value: it gets that of the second


def _shown_row(view: _View, row: int, speller: _Speller) -> ShownRow:
    tokens = list(_tokens(view, row))
    num_samples = int(view.sample[row].max(initial=0))
    origins = view.metadata.get("origins")
    lines: list[TextLine] = []
    before: list[int] = []
    for sample, of_sample in groupby(tokens, key=lambda token: token.sample):
        mine = list(of_sample)
        if sample and (num_samples > 1 or origins):
            lines.append(TextLine(border=_border(mine, num_samples, origins[row] if origins else ())))
        for (role, _), of_turn in groupby(mine, key=lambda token: (token.role, token.turn)):
            runs: list[TextRun] = []
            for (_, _, _, weight, note), stretch in groupby(of_turn, key=lambda token: token[:-1]):
                numbers = [token.number for token in stretch]
                runs += speller.runs(numbers, before[-_BEFORE:], weight, is_padding=not sample, note=note)
                if sample:
                    before += numbers
            lines += _lines(runs, role)
    return ShownRow(_row_heading(view, row), tuple(lines), any(token.role >= 0 for token in tokens))


def _border(tokens: Sequence[_Token], num_samples: int, origins: Sequence[str]) -> str:
    """The line before a sample. `origins` describes the source of each of the row's samples."""
    sample = tokens[0].sample
    origin = "".join(origins[sample - 1 : sample])
    if num_samples == 1:
        return origin
    num_tokens = sum(not token.note for token in tokens)
    trained = sum(token.weight != 0 for token in tokens)
    return f"sample {sample}{origin and ', '}{origin}: {counted(num_tokens, 'token')}, {trained:,} trained"


def _lines(runs: Sequence[TextRun], role: int) -> Iterator[TextLine]:
    """The lines of one turn."""
    first = 0
    for at, run in enumerate(runs):
        if run.kind == "newline":
            yield TextLine(role, first == 0, tuple(runs[first : at + 1]))
            first = at + 1
    if first < len(runs):
        yield TextLine(role, first == 0, tuple(runs[first:]))


# Their text


def _spelling(tokenizer: Any, metadata: Mapping[str, Any]) -> tuple[TokenSpelling | None, str]:
    """(the spelling of tokens, the reason if it is None)."""
    path = metadata.get("tokenizer")
    if tokenizer is not None:
        resolved = resolve_tokenizer(tokenizer)
        if resolved.kind == "chars" and resolved.chars is None:
            raise TokenizerError(
                "'chars' alone does not say which characters", parameter="tokenizer", remedy="the file that a store has"
            )
        found, why = TokenSpelling(resolved), "this tokenizer does not decode"
    elif path is None:
        return None, "ids, no text: tokenizer= says what they mean"
    else:
        try:
            found = _spelling_of_file(str(path), os.stat(path).st_mtime_ns)
        except (OSError, TokenizerError):
            return None, f"ids, no text: {path} is not there or no tokenizer; tokenizer= gives another"
        why = "the tokenizer was a function; tokenizer= gives it"
    if not found.can_decode:
        return None, f"ids, no text: {why}"
    return found, ""


@lru_cache(maxsize=4)
def _spelling_of_file(path: str, changed: int) -> TokenSpelling:
    return TokenSpelling(load_tokenizer(Path(path)))


class _Speller(NamedTuple):
    """Writes stretches of tokens with equal marks."""

    spelling: TokenSpelling | None
    shows_ids: bool
    is_whole: bool

    def runs(
        self, tokens: list[int], before: list[int], weight: float, *, is_padding: bool, note: str
    ) -> Iterator[TextRun]:
        if is_padding and not weight:
            yield TextRun(f"... {len(tokens):,} of padding", "note")
            return
        first, last = self._cut(tokens, _MOST_TRAINED if weight else _MOST_UNTRAINED)
        runs = list(self._written(tokens[:first], before, weight))
        if first < last:
            runs.append(TextRun(f" ... {last - first:,} tokens ... ", "note", weight))
            runs += self._written(tokens[last:], tokens[last - _BEFORE : last], weight)
        yield from (run._replace(is_apart=bool(note)) for run in runs)
        if note:
            yield TextRun(f"({note})", "note")

    def _cut(self, tokens: Sequence[int], most: int) -> tuple[int, int]:
        """(end of the first part, start of the last part) of a stretch that is shortened, both between characters."""
        if self.is_whole or len(tokens) <= most:
            return len(tokens), len(tokens)
        first, last = most // 2, len(tokens) - most // 2
        if self.spelling is not None:
            while first < last and self.spelling.is_inside(tokens[first]):
                first += 1
            while first < last and self.spelling.is_inside(tokens[last]):
                last -= 1
        return first, last

    def _written(self, tokens: Sequence[int], before: Sequence[int], weight: float) -> Iterator[TextRun]:
        if self.spelling is None:
            yield from (TextRun(f"{token} ", "id", weight) for token in tokens)
        elif not self.shows_ids:
            yield from _text_runs(self.spelling.text_of(tokens, before), weight)
        else:
            for number, token in enumerate(tokens):
                parts = self.spelling.text_of([token], [*before, *tokens[:number]][-_BEFORE:])
                text = printable("".join(part.text for part in parts).replace("\n", "\\n"))
                yield TextRun(f"{token}:'{text}' ", "id", weight)


def _text_runs(parts: Sequence[TokenText], weight: float) -> Iterator[TextRun]:
    for text, is_special in parts:
        if is_special:
            yield TextRun(printable(text).replace("\n", "\\n"), "special", weight)
            continue
        *ended, last = text.split("\n")
        for line in ended:
            if line:
                yield TextRun(printable(line), "text", weight)
            yield TextRun("↵", "newline", weight)
        if last:
            yield TextRun(printable(last), "text", weight)
