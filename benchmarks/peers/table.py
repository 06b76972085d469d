"""Tables that leave nobody out: a peer has numbers, or its row says why not, or the run fails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

__all__ = ["Row", "markdown", "missing", "spread"]


@dataclass(slots=True)
class Row:
    """One line of a table: a peer in one configuration, all that its rounds measured, or why they did not."""

    name: str
    measured: dict[str, list[Any]] = field(default_factory=dict)
    why_not: str | None = None

    def add(self, found: dict[str, Any]) -> None:
        """Take in one round. The first error stays, and the row's numbers then no longer count."""
        if "error" in found:
            self.why_not = self.why_not or str(found["error"])
            return
        for name, value in found.items():
            self.measured.setdefault(name, []).append(value)

    def middle(self, name: str) -> float | None:
        """The median over the rounds."""
        values = self.measured.get(name)
        return float(median(values)) if values else None

    def last(self, name: str) -> Any:
        values = self.measured.get(name)
        return values[-1] if values else None


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """'12.5 (11.0 - 13.1)': the median, and the least and the most of the rounds.

    >>> spread([3.0, 1.0, 2.0])
    '2.0 (1.0 - 3.0)'
    """
    if not values:
        return ""
    return f"{median(values):{form}}" + (f" ({min(values):{form}} - {max(values):{form}})" if len(values) > 1 else "")


def missing(wanted: Iterable[str], rows: Iterable[Row], needs: str) -> list[str]:
    """Peers that a table lacks: no row, or a row that has neither the number it needs nor a reason.

    >>> missing(["a", "b", "c"], [Row("a", {"speed": [1.0]}), Row("b", why_not="ImportError: no b")], "speed")
    ['c']
    """
    have = {row.name for row in rows if row.why_not or row.measured.get(needs)}
    return [name for name in wanted if name not in have]


def markdown(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A Markdown table. A vertical bar inside a cell is written so that it stays there.

    >>> print(markdown(["a", "b"], [[1, "x|y"]]))
    | a | b |
    |---|---|
    | 1 | x\\|y |
    """
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in (header, *lines)]
    shown = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([shown[0], "|" + "---|" * len(header), *shown[1:]])
