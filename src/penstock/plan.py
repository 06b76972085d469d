"""What fixes row p of a stream: a frozen, content-addressed value that is saved with the store and outlives the run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import PlanError
from penstock.files import home, one_at_a_time, write_whole
from penstock.fingerprint import fingerprint

__all__ = ["Plan", "PlanSource", "State", "is_fingerprint", "plan_home"]

State = dict[str, Any]
"""{"position", "plan", "steps"}: JSON, tens of bytes, independent of ranks and workers."""

Run = tuple[tuple[int, int, int], ...]
"""((from_step, from_position, rows_per_step), ...): how one run cut batches."""

PLAN_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSource:
    """One source of a plan: which rows it has, by content."""

    name: str
    split: str
    fingerprint: str
    """Of the source's content: the same tokens give the same, wherever the store lies."""
    num_rows: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What fixes row p of the stream. Batch size, ranks, workers, prefetch and framework are not in it.

    `fingerprint` names the plan. `runs` and `world_size` say how it was cut into batches and ranks: they travel with
    the plan, so that a step can be traced, but are not part of what it is.
    """

    row_tokens: int
    seed: int
    shuffle: str
    sources: tuple[PlanSource, ...]
    segments: tuple[tuple[int, tuple[tuple[str, float], ...] | None], ...] = ((0, None),)
    """(from_position, weights): weights None means every row once, in natural proportion."""
    recut: bool = True
    epoch_end: str = "drop"
    num_rows: int | None = None
    """Rows of the whole stream, where weights made it endless and num_rows, num_tokens or stop= ended it."""
    order_version: int = 1
    pool: tuple[int, int] | None = None
    """(rows of a block, blocks of a window), where shuffle is "pool"."""
    runs: tuple[Run, ...] = field(default=(), compare=False)
    """How runs cut it into batches. One on a loader's plan; as many as were recorded on a plan read from a file."""
    world_size: int = field(default=1, compare=False)

    @property
    def weights(self) -> dict[str, float] | None:
        weights = self.segments[-1][1]
        return None if weights is None else dict(weights)

    @property
    def epoch_rows(self) -> int | None:
        """Rows of one epoch; None for an endless stream."""
        return self.num_rows if self.weights is not None else sum(source.num_rows for source in self.sources)

    @property
    def pool_rows(self) -> int | None:
        """Rows among which a row is shuffled; None where that is a whole epoch, or where nothing is shuffled."""
        return None if self.pool is None else self.pool[0] * self.pool[1]

    @property
    def epoch_spec(self) -> dict[str, Any]:
        """How steps go through epochs, as `Cut`, `position_of_step` and `step_of_position` take it."""
        return {"epoch_rows": self.epoch_rows, "epoch_end": self.epoch_end}

    def spec(self) -> dict[str, Any]:
        """The fingerprinted part, as JSON."""
        spec = asdict(self)
        del spec["runs"], spec["world_size"]
        if self.pool is None:
            del spec["pool"]  # plans that are older than this setting keep their fingerprint
        return spec

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.spec())[:16]

    @property
    def steps(self) -> Run:
        """How the run cut batches: where several are recorded and differ, there is no one answer."""
        if len(self.runs) == 1:
            return self.runs[0]
        sizes = ", ".join(str(rows) for rows in sorted({run[0][2] for run in self.runs}))
        raise PlanError(
            f"plan {self.fingerprint} was cut into batches of {sizes} rows by different runs"
            if self.runs
            else f"plan {self.fingerprint} does not say how it was cut into batches",
            remedy="batch_size=, or the state (or loader) of the run that you mean",
        )

    def cut_as(self, steps: Sequence[Sequence[int]], world_size: int = 1) -> Plan:
        """This plan, with the record of one run that cut it."""
        return replace(self, runs=(_run(steps),), world_size=world_size)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. Runs that were recorded there before are kept beside this one's."""
        path = Path(path)
        with one_at_a_time(path.parent):  # two runs that open at once are both recorded
            known = [_run(run) for run in _read(path).get("runs", [])] if path.exists() else []
            runs = [*known, *(run for run in self.runs if run not in known)]
            if path.exists() and runs == known:
                return
            body = {"penstock_plan": PLAN_FORMAT, "fingerprint": self.fingerprint, "plan": self.spec(), "runs": runs}
            write_whole(path, msgspec.json.format(msgspec.json.encode(body), indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan, with the runs that are recorded in its file."""
        body = _read(Path(path))
        plan = cls.from_spec(body["plan"], where=path)
        if plan.fingerprint != body.get("fingerprint"):
            raise PlanError(
                "this plan was changed after it was written",
                file=path,
                remedy="open a loader with the settings you want: it writes its own plan",
            )
        return replace(plan, runs=tuple(_run(run) for run in body.get("runs", [])))

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], where: object = None) -> Plan:
        try:
            fields = dict(spec)
            fields["sources"] = tuple(PlanSource(**source) for source in fields["sources"])
            fields["segments"] = tuple(
                (int(at), None if weights is None else tuple((str(n), float(w)) for n, w in weights))
                for at, weights in fields["segments"]
            )
            if fields.get("pool") is not None:
                block_rows, window_blocks = fields["pool"]
                fields["pool"] = (int(block_rows), int(window_blocks))
            plan = cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError("this is not a plan", file=where, reason=error) from None
        if plan.order_version != 1:
            raise PlanError(
                f"this plan has order version {plan.order_version}; this penstock knows version 1",
                file=where,
                remedy="a penstock release that knows that version",
            )
        return plan

    def difference(self, other: Plan) -> str | None:
        """The first thing in which another plan differs, in words."""
        mine, theirs = self.spec(), other.spec()
        for key in mine | theirs:
            if mine.get(key) == theirs.get(key):
                continue
            if key == "sources":
                for one, two in zip(mine[key], theirs[key], strict=False):
                    for part in one:
                        if one[part] != two[part]:
                            return f"source {one['name']!r}: {part} {one[part]} here, {two[part]} there"
                return f"sources: {len(mine[key])} here, {len(theirs[key])} there"
            return f"{'chunk_size' if key == 'row_tokens' else key}: {mine.get(key)} here, {theirs.get(key)} there"
        return None

    def __repr__(self) -> str:
        rows = self.epoch_rows
        weights = self.weights
        length = "endless" if rows is None else f"{rows:,} rows, {rows * self.row_tokens:,} tokens an epoch"
        lines = [
            f"Plan {self.fingerprint}: rows of {self.row_tokens} tokens, {length}, seed {self.seed}, "
            f"shuffle {self.shuffle}" + (f" in windows of {self.pool_rows:,} rows" if self.pool else "")
        ]
        for i, source in enumerate(self.sources):
            branch = "└─" if i == len(self.sources) - 1 else "├─"
            if weights is None:
                share = source.num_rows / max(rows or 1, 1)
            else:
                share = weights.get(source.name, 0.0) / sum(weights.values())
            lines.append(
                f"{branch} {source.name} ({source.split})  {100 * share:.1f} %  {source.num_rows:,} rows, "
                f"{source.num_tokens:,} tokens  content {source.fingerprint[:7]}"
            )
        return "\n".join(lines)


def _run(steps: Sequence[Sequence[int]]) -> Run:
    return tuple((int(step), int(position), int(rows)) for step, position, rows in steps)


def is_fingerprint(text: str) -> bool:
    """Whether a text can be a plan's fingerprint, or the beginning of one.

    >>> is_fingerprint("3f2a"), is_fingerprint("corpus.json")
    (True, False)
    """
    return re.fullmatch(r"[0-9a-f]{4,16}", text) is not None


def plan_home() -> Path:
    """Where plans go that cannot lie beside their store."""
    return home() / "plans"


def _read(path: Path) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise PlanError(
            f"no plan at {path}", file=path, remedy="`penstock plan STORE` lists the plans of a store"
        ) from None
    except msgspec.DecodeError as error:
        raise PlanError("this is not a plan", file=path, reason=error, remedy=_REMOVE) from None
    if not isinstance(body, dict) or body.get("penstock_plan") != PLAN_FORMAT:
        raise PlanError("this is not a plan that this penstock can read", file=path, remedy=_REMOVE)
    return body


_REMOVE = "remove the file, and open a loader with the settings of that run: it writes its plan"
