"""Look at a batch: every token of its rows as text, and which of them are trained.

⟦trained⟧   ⟨special token⟩   ↵ newline        in a terminal by colours, in a notebook as HTML, in a log by these marks
"""

from __future__ import annotations

import html as markup
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least
from batchwright.base.errors import SpecError, TokenizerError
from batchwright.batches.types import TrainingBatch
from batchwright.prepare.chat.spans import ROLES
from batchwright.prepare.spelling import Said, Spelling
from batchwright.prepare.tokenizers import load_tokenizer, resolve_tokenizer
from batchwright.typing import TokenizerLike

__all__ = ["Look", "look"]

_IGNORED = -100
_MOST_UNTRAINED, _MOST_TRAINED = 160, 640
"""Tokens of a stretch that are shown: of a longer one its beginning and its end, half as many each."""
_BEFORE = 8
_LOG_WIDTH = 100
_MARKS = "⟦⟧⟨⟩"


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
    """What a batch holds, token by token, and what of it is trained.

    print(bw.look(batch))                                  the first 4 rows: colours in a terminal, marks elsewhere
    bw.look(batch, rows=32, whole=True)                    all rows, and nothing of them left out
    bw.look(batch, tokenizer="tokenizer.json")             for a batch that does not know its tokenizer
    Path("masks.html").write_text(bw.look(batch).html())   a page that needs nothing else

    `batch` is any TrainingBatch, of any framework and on any device, or a mapping with input_ids, and labels or
    targets. A token is marked where it is a target that counts: its loss_mask is not 0. Shares
    are of all tokens of the batch, padding included. Long stretches are shortened in their middle, so every border
    between trained and untrained is seen. `ids` shows numbers too; without a tokenizer there are only numbers. `color`
    and `width` (columns) are what the terminal says, if not given.
    """
    at_least(1, rows=rows)
    if width is not None:
        at_least(20, width=width)
    view = _view(batch)
    speller, why = _spelling(tokenizer, view.metadata)
    notes = [*view.notes, *([why] if why else [])]
    shown = [_shown_row(view, row, _Speller(speller, ids), whole) for row in range(min(rows, len(view.tokens)))]
    return Look(_heading(view, len(shown)), tuple(notes), tuple(shown), color=color, width=width)


# What a batch says, as NumPy arrays


@dataclass(frozen=True, slots=True)
class _View:
    """A batch on the host: [rows, tokens] each."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    weight: NDArray[np.float32]
    """Of each target; 0 where it is not trained."""
    is_real: NDArray[np.bool_]
    sample: NDArray[np.int64]
    """Number of the sample inside its row, from 1; 0 for padding."""
    is_known: NDArray[np.bool_]
    """Whether a target is the token that follows in its row."""
    metadata: Mapping[str, Any]
    notes: tuple[str, ...]


def _view(batch: Any) -> _View:
    def get(name: str) -> Any:
        is_mapping = isinstance(batch, Mapping) and not isinstance(batch, TrainingBatch)
        return batch.get(name) if is_mapping else getattr(batch, name, None)

    tokens = _on_host(get("input_ids"))
    if tokens is None or tokens.ndim != 2:
        what = f"a {type(batch).__name__}" if tokens is None else f"input_ids of {tokens.ndim} dimensions"
        raise SpecError(
            f"look shows a batch of rows of tokens, and this is {what}",
            parameter="batch",
            remedy="a TrainingBatch, or a mapping with input_ids and labels or targets of [rows, tokens]",
        )
    targets, mask, attention = (
        _of_shape(get(name), tokens.shape) for name in ("targets", "loss_mask", "attention_mask")
    )
    if targets is None:
        targets = np.full(tokens.shape, _IGNORED)
        labels = _of_shape(get("labels"), tokens.shape)
        if labels is not None:
            targets[:, :-1] = labels[:, 1:]
    given = np.ones(tokens.shape, np.float32) if mask is None else mask
    weight = np.where(targets == _IGNORED, 0, given).astype(np.float32)
    segments = _of_shape(get("segment_ids"), tokens.shape)
    is_real = np.ones(tokens.shape, bool) if attention is None else attention != 0
    if segments is not None and attention is None:
        is_real = segments != 0
    begins = _begins(segments, _of_shape(get("position_ids"), tokens.shape), _on_host(get("cu_seqlens")), is_real)
    sample = np.where(is_real, np.cumsum(begins, axis=1), 0)
    metadata = get("metadata") or {}
    is_known = np.zeros(tokens.shape, bool)  # the token after a row's last is in its target alone
    is_known[:, :-1] = (targets[:, :-1] == tokens[:, 1:]) & (is_real[:, 1:] | ~is_real[:, :-1])
    view = _View(tokens, targets, weight, is_real, sample, is_known, metadata, ())
    notes = _notes(view, None if mask is None else (targets != _IGNORED) & (mask == 0))
    return replace(view, notes=tuple(notes))


def _on_host(array: Any) -> NDArray[Any] | None:
    """An array of any framework as NumPy's."""
    if array is None:
        return None
    if hasattr(array, "detach"):  # torch's, perhaps on a device, perhaps of a type that NumPy does not have
        array = array.detach().cpu()
        array = array.float() if array.is_floating_point() else array
    return np.asarray(array)


def _of_shape(array: Any, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """The array where it has a value for each token; masks of pairs of tokens have not."""
    found = _on_host(array)
    return found if found is not None and found.shape == shape else None


def _begins(
    segments: NDArray[Any] | None,
    positions: NDArray[Any] | None,
    borders: NDArray[Any] | None,
    is_real: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Where a sample begins: by the first of these that the batch has."""
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


def _is_odd(view: _View) -> NDArray[np.bool_]:
    """Where a trained target is another token than the one that follows in the row."""
    odd: NDArray[np.bool_] = (view.weight != 0) & ~view.is_known
    odd[:, -1] = False
    odd[:, :-1] &= (view.sample[:, 1:] == view.sample[:, :-1]) & view.is_real[:, 1:]
    return odd


def _notes(view: _View, is_masked: NDArray[np.bool_] | None) -> Iterator[str]:
    odd = int(_is_odd(view).sum())
    if odd:
        yield f"{_counted(odd, 'trained target')} not the token that follows"
    left = 0 if is_masked is None else int(is_masked.sum())
    if left:
        yield f"{_counted(left, 'target')} not -100 where loss_mask is 0: a loss that reads no mask learns them"
    padding = int(((view.weight != 0) & ~view.is_real).sum())
    if padding:
        yield f"{_counted(padding, 'trained target')} in the padding"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun} is" if number == 1 else f"{number:,} {noun}s are"


def _heading(view: _View, shown: int) -> str:
    total = max(view.tokens.size, 1)
    weights = view.weight[view.weight != 0]
    has_weights = len(weights) and bool((weights != 1).any())
    low, high = (float(weights.min()), float(weights.max())) if has_weights else (1.0, 1.0)
    between = f"weights from {low:.3g} to {high:.3g}" if low != high else f"weight {low:.3g}"
    return (
        f"{shown} of {len(view.tokens):,} rows, {view.tokens.size:,} tokens, {100 * len(weights) / total:.1f} % trained"
        f"{f' ({between})' if has_weights else ''}, {100 * int((~view.is_real).sum()) / total:.1f} % padding"
    )


def _row_heading(view: _View, row: int) -> str:
    known: dict[str, Any] = {}
    for name in ("source", "position", "side", "weight"):
        values = view.metadata.get(name)
        if isinstance(values, Sequence | np.ndarray) and not isinstance(values, str) and len(values) > row:
            known[name] = values[row]
    where = [str(known["source"])] if "source" in known else []
    where += [f"position {int(known['position']):,}"] if "position" in known else []
    where += [str(known["side"])] if known.get("side") else []
    where += ["fills the batch up"] if float(known.get("weight", 1)) == 0 else []
    real, trained = int(view.is_real[row].sum()), int((view.weight[row] != 0).sum())
    padding = view.tokens.shape[1] - real
    counts = f"{real:,} tokens, {trained:,} trained" + (f", {padding:,} of padding" if padding else "")
    return f"row {row}: {', '.join([*where, counts])}"


# Stretches of tokens that are marked in the same way


class _Stretch(NamedTuple):
    tokens: list[int]
    before: list[int]
    weight: float
    sample: int
    role: int
    turn: int
    kind: int


_IN_PLACE, _TARGET_ONLY, _ODD = 0, 1, 2
_KINDS = ("", "target only", "odd target")


def _stretches(view: _View, row: int) -> Iterator[_Stretch]:
    tokens, trained, sample = view.tokens[row], view.weight[row] != 0, view.sample[row]
    weight = np.zeros(len(tokens) + 1, np.float32)
    weight[1:] = np.where(view.is_known[row], view.weight[row], 0)
    role, turn = (_by_token(view, name, row) for name in ("role", "turn"))
    apart = np.flatnonzero(trained & ~view.is_known[row])
    kind = np.where(_is_odd(view)[row, apart], _ODD, _TARGET_ONLY)
    columns: list[NDArray[Any]] = [
        np.insert(tokens, apart + 1, view.targets[row, apart]),
        np.insert(weight[: len(tokens)], apart + 1, view.weight[row, apart]),
        np.insert(sample, apart + 1, sample[apart]),
        np.insert(role[: len(tokens)], apart + 1, role[apart + 1]),
        np.insert(turn[: len(tokens)], apart + 1, turn[apart + 1]),
        np.insert(np.zeros(len(tokens), np.int64), apart + 1, kind),
    ]
    changes = np.zeros(len(columns[0]), bool)
    for column in columns[1:]:
        changes[1:] |= column[1:] != column[:-1]
    starts = [0, *np.flatnonzero(changes).tolist()]
    for start, stop in zip(starts, [*starts[1:], len(changes)], strict=True):
        if stop > start:
            before = columns[0][max(start - _BEFORE, 0) : start][columns[2][max(start - _BEFORE, 0) : start] > 0]
            values = [column[start].item() for column in columns[1:]]
            yield _Stretch(columns[0][start:stop].tolist(), before.tolist(), *values)


def _by_token(view: _View, name: str, row: int) -> NDArray[Any]:
    """What metadata says of each token of a row, and of the target after it; -1 where it says nothing."""
    values = _of_shape(view.metadata.get(name), view.tokens.shape)
    if values is None:
        return np.full(view.tokens.shape[1] + 1, -1)
    own = values[row].astype(np.int64)
    return np.concatenate([own[:1], own])  # nothing is said of the first token: as of the second


# Their text


def _spelling(tokenizer: Any, metadata: Mapping[str, Any]) -> tuple[Spelling | None, str]:
    """(how tokens are written, why there is no text)."""
    if tokenizer is not None:
        resolved = resolve_tokenizer(tokenizer)
        if resolved.kind == "chars" and resolved.chars is None:
            raise TokenizerError(
                "'chars' alone does not say which characters", parameter="tokenizer", remedy="the file that a store has"
            )
        found = Spelling(resolved)
        return (found, "") if found.can else (None, "ids, no text: this tokenizer does not decode")
    path = metadata.get("tokenizer")
    if path is None:
        return None, "ids, no text: tokenizer= says what they mean"
    try:
        found = _spelling_of_file(str(path), os.stat(path).st_mtime_ns)
    except (OSError, TokenizerError):
        return None, f"ids, no text: {path} is not there or no tokenizer; tokenizer= gives another"
    return (found, "") if found.can else (None, "ids, no text: the tokenizer was a function; tokenizer= gives it")


@lru_cache(maxsize=4)
def _spelling_of_file(path: str, changed: int) -> Spelling:
    return Spelling(load_tokenizer(Path(path)))


class _Speller(NamedTuple):
    spelling: Spelling | None
    ids: bool

    def runs(self, tokens: Sequence[int], before: Sequence[int], weight: float) -> Iterator[_Run]:
        if self.spelling is None:
            yield from (_Run(f"{token} ", "id", weight) for token in tokens)
        elif self.ids:
            for number, token in enumerate(tokens):
                said = self.spelling.says([token], [*before, *tokens[:number]][-_BEFORE:])
                text = _printable("".join(part.text for part in said).replace("\n", "\\n"))
                yield _Run(f"{token}:'{text}' ", "id", weight)
        else:
            yield from _text_runs(self.spelling.says(tokens, before), weight)

    def cut(self, tokens: Sequence[int], most: int) -> tuple[int, int] | None:
        """(end of the beginning, beginning of the end) of a stretch that is too long, both between characters."""
        if len(tokens) <= most:
            return None
        inside = self.spelling.is_inside if self.spelling is not None else lambda token: False
        first, last = most // 2, len(tokens) - most // 2
        while first < last and inside(tokens[first]):
            first += 1
        while first < last and inside(tokens[last]):
            last -= 1
        return (first, last) if first < last else None


class _Run(NamedTuple):
    """Some text of a line, without a newline in it."""

    text: str
    kind: str
    """"text", "special", "id", "newline", or "note" for what is said about the tokens."""
    weight: float
    is_apart: bool = False
    """Whether it is a target that the row does not have in its place."""


class _Line(NamedTuple):
    """What a row shows on one line, before it is wrapped; `border` is a line of its own, between samples."""

    role: int
    is_turn_start: bool
    runs: tuple[_Run, ...]
    border: str = ""


class _ShownRow(NamedTuple):
    heading: str
    lines: tuple[_Line, ...]
    has_roles: bool


def _shown_row(view: _View, row: int, speller: _Speller, whole: bool) -> _ShownRow:
    stretches = list(_stretches(view, row))
    num_samples = int(view.sample[row].max(initial=0))
    origins = view.metadata.get("origins")
    lines: list[_Line] = []
    for sample, in_sample in groupby(stretches, key=lambda stretch: stretch.sample):
        some = list(in_sample)
        if sample and (num_samples > 1 or origins):
            lines.append(_Line(-1, False, (), _border(some, sample, num_samples, origins[row] if origins else ())))
        for (role, _), of_turn in groupby(some, key=lambda stretch: (stretch.role, stretch.turn)):
            lines += _lines(list(of_turn), role, speller, whole)
    return _ShownRow(_row_heading(view, row), tuple(lines), any(stretch.role >= 0 for stretch in stretches))


def _border(stretches: list[_Stretch], sample: int, num_samples: int, origins: Sequence[str]) -> str:
    """What stands between samples. `origins` are words on where each of the row's samples is from."""
    origin = origins[sample - 1] if sample <= len(origins) else ""
    if num_samples == 1:
        return origin
    num_tokens = sum(len(s.tokens) for s in stretches if s.kind == _IN_PLACE)
    trained = sum(len(s.tokens) for s in stretches if s.weight)
    return f"sample {sample}{origin and ', '}{origin}: {num_tokens:,} tokens, {trained:,} trained"


def _lines(stretches: list[_Stretch], role: int, speller: _Speller, whole: bool) -> Iterator[_Line]:
    """The lines of one turn."""
    runs: list[_Run] = []
    is_first = True
    for run in (run for stretch in stretches for run in _runs(stretch, speller, whole)):
        runs.append(run)
        if run.kind == "newline":
            yield _Line(role, is_first, tuple(runs))
            runs, is_first = [], False
    if runs:
        yield _Line(role, is_first, tuple(runs))


def _runs(stretch: _Stretch, speller: _Speller, whole: bool) -> Iterator[_Run]:
    runs = _runs_of_tokens(stretch, speller, whole)
    if stretch.kind == _IN_PLACE:
        yield from runs
    else:
        yield from (run._replace(is_apart=True) for run in runs)
        yield _Run(f"({_KINDS[stretch.kind]})", "note", 0)


def _runs_of_tokens(stretch: _Stretch, speller: _Speller, whole: bool) -> Iterator[_Run]:
    tokens, weight = stretch.tokens, stretch.weight
    if not stretch.sample and not weight:
        yield _Run(f"... {len(tokens):,} of padding", "note", 0)
        return
    cut = None if whole else speller.cut(tokens, _MOST_TRAINED if weight else _MOST_UNTRAINED)
    if cut is None:
        yield from speller.runs(tokens, stretch.before, weight)
    else:
        first, last = cut
        yield from speller.runs(tokens[:first], stretch.before, weight)
        yield _Run(f" ... {last - first:,} tokens ... ", "note", weight)
        yield from speller.runs(tokens[last:], tokens[last - _BEFORE : last], weight)


def _text_runs(said: list[Said], weight: float) -> Iterator[_Run]:
    for text, is_special in said:
        if is_special:
            yield _Run(_printable(text).replace("\n", "\\n"), "special", weight)
            continue
        *ended, last = text.split("\n")
        for line in ended:
            if line:
                yield _Run(_printable(line), "text", weight)
            yield _Run("↵", "newline", weight)
        if last:
            yield _Run(_printable(last), "text", weight)


def _printable(text: str) -> str:
    r"""Control characters, which could move a cursor or turn text around, as escapes.

    >>> _printable("a\tb\x1b[2J")
    'a\\tb\\x1b[2J'
    """
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(ascii(c)[1:-1] if c != "\n" and unicodedata.category(c) in hidden else c for c in text)


# How it comes out


@dataclass(frozen=True, slots=True, repr=False)
class Look:
    """A batch to be looked at: `print` it, or let a notebook show it; `.html()` is a page."""

    heading: str
    notes: tuple[str, ...]
    rows: tuple[_ShownRow, ...]
    color: bool | None = None
    width: int | None = None

    def __str__(self) -> str:
        is_terminal = _is_terminal()
        in_color = _wants_color(is_terminal) if self.color is None else self.color
        columns = shutil.get_terminal_size().columns if is_terminal else _LOG_WIDTH
        paint = _colored if in_color else _marked
        legend = [("trained", "text", 1.0), ("special token", "special", 0.0), ("↵", "newline", 0.0)]
        lines = [self.heading, *(f"note: {note}" for note in self.notes)]
        lines.append("  ".join(paint([_Run(*run)], -1) for run in legend) + " newline")
        for row in self.rows:
            heading = _printable(row.heading)
            lines += ["", f"\x1b[1m{heading}\x1b[0m" if in_color else heading]
            lines += _plain_lines(row, paint, self.width or columns)
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<style>{_STYLE}</style>{self._body()}"

    def html(self) -> str:
        """One whole page: no scripts, and nothing that is loaded from elsewhere."""
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            f"<title>{markup.escape(self.heading)}</title><style>{_STYLE}</style></head>\n"
            f"<body>{self._body()}</body></html>\n"
        )

    def _body(self) -> str:
        notes = "".join(f'<p class="warn">{markup.escape(note)}</p>' for note in self.notes)
        return (
            f'<div class="batchwright-look"><p>{markup.escape(self.heading)}</p>{notes}'
            '<p><span class="t">trained</span> <span class="s">special token</span> <span class="n">↵</span> newline'
            "</p>"
            f"{''.join(map(_row_html, self.rows))}</div>"
        )


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _wants_color(is_terminal: bool) -> bool:
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _role_name(role: int) -> str:
    return ROLES[role] if 0 <= role < len(ROLES) else ""


Paint = Callable[[Sequence[_Run], int], str]
"""(runs of a line, role) -> text."""


def _plain_lines(row: _ShownRow, paint: Paint, width: int) -> Iterator[str]:
    gutter = max(map(len, ROLES)) + 1 if row.has_roles else 0
    for line in row.lines:
        if line.border:
            yield f"  -- {_printable(line.border)}"
            continue
        name = _role_name(line.role) if line.is_turn_start else ""
        for runs in _wrapped(line.runs, max(width - gutter - 6, 12)):
            yield f"  {name:<{gutter}}| {paint(runs, line.role)}"
            name = ""


def _wrapped(runs: Sequence[_Run], columns: int) -> Iterator[list[_Run]]:
    """A line as several that are short enough, cut after a space if there is one. All but text stays whole."""
    line: list[_Run] = []
    left = columns
    for run in runs:
        text = run.text
        while text:
            fits = _fitting(text, left)
            if run.kind == "newline" or fits >= len(text):
                fits = len(text)
            elif run.kind != "text":
                fits = 0 if line else len(text)
            else:
                fits = text.rfind(" ", 0, fits) + 1 or fits
            if fits:
                line.append(run._replace(text=text[:fits]))
                left -= sum(map(_columns, text[:fits]))
                text = text[fits:]
            if text:
                yield line
                line, left = [], columns
    if line:
        yield line


def _fitting(text: str, columns: int) -> int:
    """How many characters have room; of an empty line at least one."""
    used = 0
    for number, character in enumerate(text):
        used += _columns(character)
        if used > columns:
            return number
    return len(text)


def _columns(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _marked(runs: Sequence[_Run], role: int) -> str:
    """
    >>> _marked([_Run("Hi ", "text", 0), _Run("Yo", "text", 0.5), _Run("<e>", "special", 0.5)], -1)
    'Hi ⟦Yo⟨<e>⟩⟧x0.5'
    """
    parts = []
    for (weight, _), group in groupby(runs, key=_marking):
        some = list(group)
        text = "".join(f"⟨{_unmarked(run.text)}⟩" if run.kind == "special" else _unmarked(run.text) for run in some)
        after = " " if some[-1].kind == "id" else ""
        parts.append(f"⟦{text.removesuffix(after)}⟧{_times(weight)}{after}" if weight else text)
    return "".join(parts)


def _marking(run: _Run) -> tuple[float, bool]:
    return run.weight, run.is_apart


def _unmarked(text: str) -> str:
    """Text that does not look as if it were marked."""
    return "".join(ascii(c)[1:-1] if c in _MARKS else c for c in text)


def _times(weight: float) -> str:
    return "" if weight in (0, 1) else f"x{weight:.3g}"


_ROLE_COLORS = {"system": "35", "developer": "35", "user": "36", "tool": "33", "template": "2"}


def _colored(runs: Sequence[_Run], role: int) -> str:
    parts = []
    for (weight, _), group in groupby(runs, key=_marking):
        base = _ROLE_COLORS.get(_role_name(role), "") if not weight else "30;42" if weight == 1 else "30;43"
        for run in group:
            own = {"special": "1;4", "newline": "2", "note": "2;3"}.get(run.kind, "")
            codes = ";".join(filter(None, (base, own)))
            parts.append(f"\x1b[{codes}m{run.text}\x1b[0m" if codes else run.text)
        if _times(weight):
            parts.append(f"\x1b[2m{_times(weight)}\x1b[0m")
    return "".join(parts)


_STYLE = (
    ".batchwright-look{font:13px/1.5 ui-monospace,Menlo,Consolas,monospace;max-width:110ch}"
    ".batchwright-look p{margin:.3em 0}"
    ".batchwright-look h4{font:inherit;font-weight:bold;margin:1.2em 0 .2em}"
    ".batchwright-look .warn{color:#c22}"
    ".batchwright-look .b{border-top:1px dashed #888;color:#888;margin:.4em 0 .1em}"
    ".batchwright-look .l{display:flex}"
    ".batchwright-look .g{flex:none;width:10ch;color:#888;user-select:none}"
    ".batchwright-look .x{white-space:pre-wrap;overflow-wrap:anywhere;border-left:3px solid #8884;padding-left:1ch}"
    ".batchwright-look .t{background:#3b34;border-radius:2px}"
    ".batchwright-look .w{background:#ea04;border-radius:2px}"
    ".batchwright-look .s{font-weight:bold;text-decoration:underline dotted}"
    ".batchwright-look .n,.batchwright-look .o{color:#888}"
    ".batchwright-look .o{font-style:italic}"
    ".batchwright-look .system,.batchwright-look .developer{border-left-color:#a4a}"
    ".batchwright-look .user{border-left-color:#18a}"
    ".batchwright-look .assistant{border-left-color:#3b3}"
    ".batchwright-look .tool{border-left-color:#c80}"
)
_CLASSES = {"special": "s", "newline": "n", "note": "o"}


def _row_html(row: _ShownRow) -> str:
    return f"<h4>{markup.escape(_printable(row.heading))}</h4>{''.join(_line_html(line, row) for line in row.lines)}"


def _line_html(line: _Line, row: _ShownRow) -> str:
    if line.border:
        return f'<div class="b">{markup.escape(_printable(line.border))}</div>'
    name = _role_name(line.role)
    gutter = f'<div class="g">{name if line.is_turn_start else ""}</div>' if row.has_roles else ""
    return f'<div class="l">{gutter}<div class="x {name}">{_runs_html(line.runs)}</div></div>'


def _runs_html(runs: Sequence[_Run]) -> str:
    parts = []
    for (weight, _), group in groupby(runs, key=_marking):
        text = "".join(_run_html(run) for run in group)
        if weight:
            kind, title = ("t" if weight == 1 else "w"), f"trained, weight {weight:.3g}"
            text = f'<span class="{kind}" title="{title}">{text}</span>'
        parts.append(text)
    return "".join(parts)


def _run_html(run: _Run) -> str:
    text = markup.escape(run.text)
    return f'<span class="{_CLASSES[run.kind]}">{text}</span>' if run.kind in _CLASSES else text
