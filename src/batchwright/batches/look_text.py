"""The three forms of a batch as text: with marks for a log, with colours for a terminal, and as HTML."""

from __future__ import annotations

import html as markup
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from batchwright.prepare.chat.spans import ROLES

_LOG_WIDTH = 100
_MARKS = "⟦⟧⟨⟩"
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


class TextRun(NamedTuple):
    """Some text of a line, without a newline in it."""

    text: str
    kind: str
    """"text", "special", "id", "newline", or "note" for a remark on the tokens."""
    weight: float = 0
    is_apart: bool = False
    """Whether it is a target that differs from the row's own token there."""


class TextLine(NamedTuple):
    """One line of a row, before wrapping. A `border` is a separate line between samples."""

    role: int = -1
    is_turn_start: bool = False
    runs: tuple[TextRun, ...] = ()
    border: str = ""

    @property
    def role_name(self) -> str:
        if not 0 <= self.role < len(ROLES):
            return ""
        return ROLES[self.role]


class ShownRow(NamedTuple):
    heading: str
    lines: tuple[TextLine, ...]
    has_roles: bool


_LEGEND = (TextRun("trained", "text", 1), TextRun("special token", "special"), TextRun("↵", "newline"))


def printable(text: str) -> str:
    r"""Text with control characters as escapes, because they could move a cursor or reverse text.

    >>> printable("a\tb\x1b[2J")
    'a\\tb\\x1b[2J'
    """
    return "".join(ascii(c)[1:-1] if c != "\n" and unicodedata.category(c) in _HIDDEN else c for c in text)


@dataclass(frozen=True, slots=True, repr=False)
class Look:
    """A batch to look at: `print` it, or show it in a notebook. `.html()` is a page."""

    heading: str
    notes: tuple[str, ...]
    rows: tuple[ShownRow, ...]
    color: bool | None = None
    width: int | None = None

    def __str__(self) -> str:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        in_color = self.color
        if in_color is None:
            in_color = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        paint, columns = _colored if in_color else _marked, self.width or _LOG_WIDTH
        if is_terminal and not self.width:
            columns = shutil.get_terminal_size().columns
        lines = [self.heading, *(f"note: {note}" for note in self.notes)]
        lines.append("  ".join(paint([run], "") for run in _LEGEND) + " newline")
        for row in self.rows:
            heading = printable(row.heading)
            lines += ["", f"\x1b[1m{heading}\x1b[0m" if in_color else heading]
            lines += _plain_lines(row, paint, columns)
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<style>{_STYLE}</style>{self._body()}"

    def html(self) -> str:
        """A complete page, without scripts and external resources."""
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
            f"</p>{''.join(map(_row_html, self.rows))}</div>"
        )


Paint = Callable[[Sequence[TextRun], str], str]
"""(runs of a line, name of the role) -> text."""


def _plain_lines(row: ShownRow, paint: Paint, width: int) -> Iterator[str]:
    gutter = (max(map(len, ROLES)) + 1) * row.has_roles
    for line in row.lines:
        if line.border:
            yield f"  -- {printable(line.border)}"
            continue
        name = line.role_name * line.is_turn_start
        for runs in _wrapped(line.runs, max(width - gutter - 6, 12)):
            yield f"  {name:<{gutter}}| {paint(runs, line.role_name)}"
            name = ""


def _wrapped(runs: Sequence[TextRun], columns: int) -> Iterator[list[TextRun]]:
    """Wrap a line into several that fit, cut after a space if there is one. Only text is cut."""
    line: list[TextRun] = []
    left = columns
    for run in runs:
        text = run.text
        while text:
            size = _fitting(run.kind, text, left, is_first=not line)
            if size:
                line.append(run._replace(text=text[:size]))
                left -= sum(map(_columns, text[:size]))
                text = text[size:]
            if text:
                yield line
                line, left = [], columns
    if line:
        yield line


def _fitting(kind: str, text: str, columns: int, *, is_first: bool) -> int:
    """The number of characters of a run that fit on a line. A run that must stay whole fits or does not."""
    if kind == "newline":
        return len(text)
    used = size = 0
    while size < len(text) and used + _columns(text[size]) <= columns:
        used += _columns(text[size])
        size += 1
    if size == len(text):
        return size
    if kind != "text":
        return len(text) * is_first
    return text.rfind(" ", 0, size) + 1 or size


def _columns(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _by_weight(runs: Sequence[TextRun]) -> Iterator[tuple[float, list[TextRun]]]:
    """Groups of runs that share their marks."""
    for (weight, _), group in groupby(runs, key=lambda run: (run.weight, run.is_apart)):
        yield weight, list(group)


def _times(weight: float) -> str:
    return "" if weight in (0, 1) else f"x{weight:.3g}"


def _marked(runs: Sequence[TextRun], role: str) -> str:
    """
    >>> _marked([TextRun("Hi ", "text", 0), TextRun("Yo", "text", 0.5), TextRun("<e>", "special", 0.5)], "")
    'Hi ⟦Yo⟨<e>⟩⟧x0.5'
    """
    parts = []
    for weight, some in _by_weight(runs):
        texts = []
        for run in some:
            text = "".join(ascii(c)[1:-1] if c in _MARKS else c for c in run.text)  # it must not look marked
            texts.append(f"⟨{text}⟩" if run.kind == "special" else text)
        text, after = "".join(texts), ""
        if weight and some[-1].kind == "id":
            text, after = text.removesuffix(" "), " "
        parts.append(f"⟦{text}⟧{_times(weight)}{after}" if weight else text)
    return "".join(parts)


_ROLE_COLORS = {"system": "35", "developer": "35", "user": "36", "tool": "33", "template": "2"}
_KIND_COLORS = {"special": "1;4", "newline": "2", "note": "2;3"}


def _colored(runs: Sequence[TextRun], role: str) -> str:
    parts = []
    for weight, some in _by_weight(runs):
        base = _ROLE_COLORS.get(role, "")
        if weight:
            base = "30;42" if weight == 1 else "30;43"
        for run in some:
            codes = ";".join(filter(None, (base, _KIND_COLORS.get(run.kind, ""))))
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


def _row_html(row: ShownRow) -> str:
    return f"<h4>{markup.escape(printable(row.heading))}</h4>{''.join(_line_html(line, row) for line in row.lines)}"


def _line_html(line: TextLine, row: ShownRow) -> str:
    if line.border:
        return f'<div class="b">{markup.escape(printable(line.border))}</div>'
    gutter = f'<div class="g">{line.role_name * line.is_turn_start}</div>' if row.has_roles else ""
    return f'<div class="l">{gutter}<div class="x {line.role_name}">{_runs_html(line.runs)}</div></div>'


def _runs_html(runs: Sequence[TextRun]) -> str:
    parts = []
    for weight, some in _by_weight(runs):
        text = "".join(map(_run_html, some))
        if weight:
            kind = "t" if weight == 1 else "w"
            text = f'<span class="{kind}" title="trained, weight {weight:.3g}">{text}</span>'
        parts.append(text)
    return "".join(parts)


def _run_html(run: TextRun) -> str:
    text = markup.escape(run.text)
    if run.kind not in _CLASSES:
        return text
    return f'<span class="{_CLASSES[run.kind]}">{text}</span>'
