"""Plan of a stream: a frozen, content-addressed value that fixes every row. It is kept with the store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import msgspec

from batchwright.base.errors import PlanError
from batchwright.base.fingerprint import fingerprint
from batchwright.base.words import shortened
from batchwright.order.epochs import Epochs
from batchwright.order.lanes import LanedOrder
from batchwright.order.plan_file import REMEDY, read_plan, record_run
from batchwright.order.plan_text import amendment_in_words, difference, plan_in_words
from batchwright.order.schedule import ORDER_VERSION, Order
from batchwright.order.sweep import OrderChange
from batchwright.typing import ShardingLike, Skip, SourceLike, WeightsLike

__all__ = ["Amendment", "Plan", "PlanSource", "Run", "Segments", "State", "with_record"]

State = dict[str, Any]
"""{"position", "plan", "steps"}: JSON, tens of bytes, independent of ranks and workers."""

Run = tuple[tuple[int, int, int], ...]
"""((from_step, from_position, rows_per_step), ...): how one run cut batches."""

Weights = tuple[tuple[str, float], ...]
Segments = tuple[tuple[int, Weights | None], ...]
"""((from_position, weights), ...): weights None means every row once, in natural proportion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSource:
    """One source of a plan. Its rows are identified by content."""

    name: str
    split: str
    fingerprint: str
    """The fingerprint of the source's content. The path of the store has no influence."""
    num_rows: int
    num_tokens: int
    row_tokens: int | None = None
    """Tokens of this source's rows, if they are shorter than the plan's and padded."""
    rows: tuple[tuple[str, Any], ...] = ()
    """The rules for rows of whole documents (packing, truncation, loss); none: rows are windows over all tokens."""

    def spec(self) -> dict[str, Any]:
        """The source as JSON, without default values."""
        spec = asdict(self) | {"rows": dict(self.rows)}
        return {name: value for name, value in spec.items() if name not in ("row_tokens", "rows") or value}


def with_record(plan: Plan, **record: Any) -> Plan:
    """A plan with another record of its runs or places. The rows stay, and so does the fingerprint."""
    other = replace(plan, **record)
    if "fingerprint" in plan.__dict__:
        other.__dict__["fingerprint"] = plan.fingerprint
    return other


@dataclass(frozen=True, kw_only=True, slots=True)
class Amendment:
    """A change of a plan from a position on. Before that position the amended plan equals its parent."""

    at: int
    parent: str
    """Fingerprint of the plan that was amended."""
    weights: Segments = ()
    """The weights that replace all weights from `at` on; none: no change."""
    add: tuple[PlanSource, ...] = ()
    """Sources that join, and sources of the plan with their size after they grew."""
    skip: tuple[tuple[int, int], ...] = ()
    """(first, last) position, both skipped: they count as consumed, and are never given out."""
    max_epochs: tuple[tuple[str, int], ...] = ()
    num_rows: int | None = None

    def spec(self) -> dict[str, Any]:
        """The changes, as JSON."""
        spec = {name: value for name, value in asdict(self).items() if value or name == "at"}
        if self.add:
            spec["add"] = [source.spec() for source in self.add]
        return spec

    def __str__(self) -> str:
        """
        >>> print(Amendment(at=800, parent="3f2a", skip=((802, 803),), num_rows=4000))
        from position 800: skip 802-803, end at row 4,000
        """
        return amendment_in_words(self)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All settings that fix row p of the stream. Batch size, ranks, workers, prefetch and framework are not part of it.

    `fingerprint` names the plan. `runs`, `world_size` and `sharding` record the batches and ranks of the runs. They
    are stored with the plan, so that a step can be traced, but do not change the fingerprint.

    Rows have `row_tokens` tokens, come from `sources` with the weights of `segments`, and are shuffled by `seed` as
    `shuffle` says. Loaders set the other fields from their settings of the same name: `by`, `max_epochs`, `exhausted`,
    `num_rows`, `epoch_end`, `recut`, `pool`, `lanes`, `pad`, `batch_tokens`.
    `amendments` are the changes on the way, `places` the paths of the sources.
    """

    row_tokens: int
    seed: int
    shuffle: str
    sources: tuple[PlanSource, ...]
    segments: Segments = ((0, None),)
    """The weights requested at the beginning. Amendments replace the later ones."""
    recut: bool = True
    epoch_end: str = "drop"
    num_rows: int | None = None
    """Rows of the whole stream, where weights made it endless and num_rows, num_tokens or stop= ended it."""
    pool: tuple[int, int] | None = None
    """(rows of a block, blocks of a window), where shuffle is "pool"."""
    by: str = "rows"
    """The unit of weights: "rows" or "tokens"."""
    max_epochs: tuple[tuple[str, int], ...] = ()
    exhausted: str = "repeat"
    """The behaviour at the end of a source's epochs: see `MixedDataLoader`."""
    lanes: tuple[int, int] | None = None
    """(lanes, rows that each gets in turn), where shuffle is "pool" and ranks read only their own windows."""
    pad: int | None = None
    """The token that fills up rows of sources with shorter ones."""
    amendments: tuple[Amendment, ...] = ()
    runs: tuple[Run, ...] = field(default=(), compare=False)
    """The recorded steps of runs: one run on a loader's plan, all recorded runs on a plan read from a file."""
    world_size: int = field(default=1, compare=False)
    sharding: ShardingLike | None = field(default=None, compare=False)
    """The sharding of a batch, as an argument of `sharding_of`; None is contiguous."""
    batch_tokens: int | None = field(default=None, compare=False)
    """The token budget, if the run cut batches by tokens. The rows of a step then follow from lengths, not the plan."""
    places: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """(source, path of its store when it was last opened). It is only the first place to look."""

    @property
    def schedule(self) -> Segments:
        """The requested weights and the positions at which they begin, after all amendments."""
        segments = self.segments
        for amendment in self.amendments:
            if amendment.weights:
                segments = (*(s for s in segments if s[0] < amendment.at), *amendment.weights)
        return segments

    @property
    def weights(self) -> dict[str, float] | None:
        """The requested weights at the end of the stream."""
        weights = self.schedule[-1][1]
        return None if weights is None else dict(weights)

    @property
    def all_sources(self) -> tuple[PlanSource, ...]:
        """All sources in the numbering of the order, with those added later. Grown sources have their final size."""
        latest = {source.name: source for source in self.sources}
        latest.update((source.name, source) for amendment in self.amendments for source in amendment.add)
        return tuple(latest.values())

    @property
    def caps(self) -> dict[str, int]:
        """The maximal number of epochs of each capped source, after all amendments."""
        return dict((*self.max_epochs, *(cap for amendment in self.amendments for cap in amendment.max_epochs)))

    @property
    def end_rows(self) -> int | None:
        """The number of rows at which a setting such as num_rows ends the stream, after all amendments."""
        return next((a.num_rows for a in reversed(self.amendments) if a.num_rows is not None), self.num_rows)

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """(first, last) of all positions that are skipped."""
        return tuple(span for amendment in self.amendments for span in amendment.skip)

    @property
    def lineage(self) -> tuple[str, ...]:
        """Fingerprints of the plans that this one was amended from, oldest first, and its own."""
        return (*(amendment.parent for amendment in self.amendments), self.fingerprint)

    @cached_property
    def order(self) -> Order:
        """The row and the source at each position. Needs no data, and is the same for equal plans."""
        if self.fingerprint not in _orders:
            while len(_orders) >= _MOST_ORDERS:
                _orders.pop(next(iter(_orders)), None)
            _orders[self.fingerprint] = self._make_order()
        return _orders[self.fingerprint]

    def _make_order(self) -> Order:
        sizes = {source.name: source.num_rows for source in self.sources}
        skips = [(first, last + 1) for first, last in self.skips]
        changes = [self._change(amendment) for amendment in self.amendments]
        given: dict[str, Any] = {"seed": self.seed, "pool": self.pool, "num_rows": self.num_rows, "skips": skips}
        if self.lanes is not None:
            given["changes"] = [OrderChange(at=change.at, num_rows=change.num_rows) for change in changes]
            weights = self._row_weights(self.schedule)
            # It has the methods of Order that other modules use.
            return LanedOrder(sizes, weights=weights, lanes=self.lanes, **given)  # type: ignore[return-value]
        given |= {"max_epochs": dict(self.max_epochs), "exhausted": self.exhausted, "changes": changes}
        return Order(sizes, weights=self._row_weights(self.segments), shuffle=self.shuffle, **given)

    def _change(self, amendment: Amendment) -> OrderChange:
        return OrderChange(
            at=amendment.at,
            weights=self._row_weights(amendment.weights) or None,
            sizes=tuple((source.name, source.num_rows) for source in amendment.add),
            max_epochs=amendment.max_epochs,
            num_rows=amendment.num_rows,
        )

    def _row_weights(self, segments: Segments) -> tuple[tuple[int, dict[str, float] | None], ...]:
        """Weights as shares of rows. Weights by tokens are divided by the tokens of a row."""
        tokens: dict[str, float] = {}
        if self.by == "tokens":
            tokens = {source.name: self.tokens_per_row(source) for source in self.all_sources}
        found: list[tuple[int, dict[str, float] | None]] = []
        for at, weights in segments:
            if weights is None:
                found.append((at, None))
            else:
                found.append((at, {name: weight / tokens.get(name, 1) for name, weight in weights}))
        return tuple(found)

    def tokens_per_row(self, source: PlanSource) -> float:
        """Tokens of a source's rows, without padding. It is the mean for rows of whole documents."""
        if source.rows:
            return source.num_tokens / source.num_rows
        return float(source.row_tokens or self.row_tokens)

    @property
    def _has_plain_epochs(self) -> bool:
        """Whether all epochs have the same length, which is known without an order."""
        return not self.amendments and not self.max_epochs and self.exhausted == "repeat"

    @property
    def epoch_rows(self) -> int | None:
        """Rows of one epoch (of the last ones, where that changes); None for an endless stream."""
        if not self._has_plain_epochs:
            return self.order.epochs.last_rows
        if self.weights is not None:
            return self.num_rows
        return sum(source.num_rows for source in self.sources)

    @property
    def pool_rows(self) -> int | None:
        """The number of rows among which a row is shuffled; None for a whole epoch or without a shuffle."""
        if self.pool is None:
            return None
        return self.pool[0] * self.pool[1]

    @property
    def epoch_spec(self) -> dict[str, Any]:
        """The epoch arguments of `Cut`, `position_of_step` and `step_of_position`."""
        return {"epochs": self.epochs, "epoch_end": self.epoch_end}

    @cached_property
    def epochs(self) -> Epochs:
        if self._has_plain_epochs:
            return Epochs.of(self.epoch_rows)
        return self.order.epochs

    def spec(self) -> dict[str, Any]:
        """The fingerprinted part, as JSON. Default values of fields that older plans did not have are left out."""
        spec: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.compare and (field.name not in _LATER or getattr(self, field.name) != field.default)
        }
        spec["order_version"] = ORDER_VERSION
        spec["sources"] = [source.spec() for source in self.sources]
        if self.amendments:
            spec["amendments"] = [amendment.spec() for amendment in self.amendments]
        return spec

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.spec())[:16]

    @property
    def steps(self) -> Run:
        """The steps of the recorded run. Raises unless exactly one run is recorded."""
        if len(self.runs) == 1:
            return self.runs[0]
        if self.batch_tokens is not None:
            raise PlanError(
                f"this run of plan {self.fingerprint} cut batches by tokens (batch_tokens={self.batch_tokens:,}): "
                "which rows a step had depends on the lengths of all rows of its block",
                remedy="position=, from the batch's metadata['position']; or loader.seek(step=...) and get_batch()",
            )
        headline = f"plan {self.fingerprint} does not say how it was cut into batches"
        if self.runs:
            sizes = ", ".join(str(rows) for rows in sorted({run[0][2] for run in self.runs}))
            headline = f"plan {self.fingerprint} was cut into batches of {sizes} rows by different runs"
        raise PlanError(headline, remedy="batch_size=, or the state (or loader) of the run that you mean")

    def cut_as(self, steps: Sequence[Sequence[int]], world_size: int = 1, sharding: ShardingLike | None = None) -> Plan:
        """This plan, with the record of one run that cut it: its `steps`, `world_size` and `sharding`."""
        runs: tuple[Run, ...] = ()
        tokens = None
        try:
            if steps and len(steps[-1]) == 4:
                tokens = steps[-1][2]
            else:
                runs = (_run(steps),)
        except (TypeError, ValueError, KeyError):
            raise PlanError(
                "these are not the steps of a run", steps=shortened(steps), remedy="a state that state_dict() returned"
            ) from None
        return with_record(self, runs=runs, batch_tokens=tokens, world_size=world_size, sharding=sharding)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to the file `path`, as JSON. Runs that the file already records are kept."""
        runs = [[list(triple) for triple in run] for run in self.runs]
        record_run(path, {"fingerprint": self.fingerprint, "plan": self.spec()}, runs, dict(self.places))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from the file `path`, with the recorded runs."""
        body = read_plan(path)
        plan = cls.from_spec(body.get("plan", {}), where=path)
        if plan.fingerprint != body.get("fingerprint"):
            raise PlanError(
                "this plan was changed after it was written",
                file=path,
                remedy="open a loader with the settings you want: it writes its own plan",
            )
        try:
            runs = tuple(_run(run) for run in body.get("runs", []))
            places = tuple(msgspec.convert(body.get("places", {}), dict[str, str]).items())
        except (TypeError, ValueError) as error:
            raise PlanError(
                "the record of runs in this plan is damaged", file=path, reason=error, remedy=REMEDY
            ) from None
        return replace(plan, runs=runs, places=places)

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], where: object = None) -> Plan:
        """The plan that has this `spec`. Errors name the file `where`."""
        try:
            given = {**spec, "sources": [_with_pairs(source) for source in spec["sources"]]}
            given["amendments"] = [
                amendment | {"add": [_with_pairs(source) for source in amendment.get("add", ())]}
                for amendment in given.get("amendments", ())
            ]
            given |= {name: msgspec.convert(given[name], type_) for name, type_ in _TYPES.items() if name in given}
            version = given.pop("order_version", ORDER_VERSION)
            plan = cls(**given)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError("this is not a plan", file=where, reason=error, remedy=REMEDY) from None
        if version != ORDER_VERSION:
            raise PlanError(
                f"this plan has order version {version}; this batchwright knows version {ORDER_VERSION}",
                file=where,
                remedy="a batchwright release that knows that version",
            )
        return plan

    def amend(
        self,
        *,
        at: int | None = None,
        weights: WeightsLike | None = None,
        add: Mapping[str, SourceLike] | None = None,
        skip: Skip | None = None,
        max_epochs: Mapping[str, int] | None = None,
        num_rows: int | None = None,
        num_tokens: int | None = None,
    ) -> Plan:
        """This plan, changed from position `at` on (by default, from the first position that `skip` names).

        `weights`, `add`, `skip`, `max_epochs`, `num_rows` and `num_tokens` are as in `loader.amend`.

        The new plan equals this one before `at`, and every source continues from its current row. States of this plan
        can continue with the amended plan if their position is at most `at`.
        """
        from batchwright.loaders.amending import amend_plan

        return amend_plan(
            self,
            at=at,
            weights=weights,
            add=add,
            skip=skip,
            max_epochs=max_epochs,
            num_rows=num_rows,
            num_tokens=num_tokens,
        )

    def difference(self, other: Plan) -> str | None:
        """The first difference from the `other` plan, in words."""
        return difference(self, other)

    def __repr__(self) -> str:
        return plan_in_words(self)


_orders: dict[str, Order] = {}
"""By fingerprint: a plan is copied whenever something beside it changes, and some orders take seconds to work out."""
_MOST_ORDERS = 16

_LATER = ("pool", "lanes", "by", "max_epochs", "exhausted", "pad", "amendments")
"""Settings that came after the first plans were written: where they have their default, a plan keeps its name."""

_TYPES: dict[str, Any] = {
    "sources": tuple[PlanSource, ...],
    "segments": Segments,
    "pool": tuple[int, int] | None,
    "lanes": tuple[int, int] | None,
    "max_epochs": tuple[tuple[str, int], ...],
    "amendments": tuple[Amendment, ...],
}
"""The types of the fields that JSON has in another form."""


def _with_pairs(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of a source, with its rows as `PlanSource` has them."""
    return {**spec, "rows": sorted(dict(spec.get("rows", {})).items())}


def _run(steps: Sequence[Sequence[int]]) -> Run:
    return tuple((int(step), int(position), int(rows)) for step, position, rows in steps)
