"""What fixes row p of a stream: a frozen, content-addressed value that is saved with the store and outlives the run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from batchwright.base.checks import local_path
from batchwright.base.errors import PlanError
from batchwright.base.files import home, one_at_a_time, write_whole
from batchwright.base.fingerprint import fingerprint
from batchwright.typing import ShardingLike, Skip, SourceLike, WeightsLike

if TYPE_CHECKING:
    from batchwright.order.epochs import Epochs
    from batchwright.order.schedule import Order

__all__ = ["Amendment", "Plan", "PlanSource", "State", "is_fingerprint", "kept_plans", "plan_home", "state_in"]

State = dict[str, Any]
"""{"position", "plan", "steps"}: JSON, tens of bytes, independent of ranks and workers."""

Run = tuple[tuple[int, int, int], ...]
"""((from_step, from_position, rows_per_step), ...): how one run cut batches."""

Weights = tuple[tuple[str, float], ...]
Segments = tuple[tuple[int, Weights | None], ...]
"""((from_position, weights), ...): weights None means every row once, in natural proportion."""

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
    row_tokens: int | None = None
    """Tokens of this source's rows, where they are shorter than the plan's and padded."""
    rows: tuple[tuple[str, Any], ...] = ()
    """How rows are made of whole documents (packing, truncation, loss); none: they are windows over all tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Amendment:
    """A change of a plan from a position on. Before that position the amended plan equals its parent."""

    at: int
    parent: str
    """Fingerprint of the plan that was amended."""
    weights: Segments = ()
    """What replaces all weights from `at` on; none: they stay."""
    add: tuple[PlanSource, ...] = ()
    """Sources that join, and sources of the plan as they are after they grew."""
    skip: tuple[tuple[int, int], ...] = ()
    """(first, last) position, both skipped: they count as consumed, and are never given out."""
    max_epochs: tuple[tuple[str, int], ...] = ()
    num_rows: int | None = None

    def spec(self) -> dict[str, Any]:
        """What is not as it was, as JSON."""
        spec = {name: value for name, value in asdict(self).items() if value or name == "at"}
        return spec | ({"add": [_source_spec(source) for source in self.add]} if self.add else {})

    def __str__(self) -> str:
        """In words.

        >>> print(Amendment(at=800, parent="3f2a", skip=((802, 803),), num_rows=4000))
        from position 800: skip 802-803, end at row 4,000
        """
        said = []
        if self.weights:
            said.append(_in_words(self.weights, self.at))
        said += [f"add {source.name} ({source.num_rows:,} rows)" for source in self.add]
        skips = [f"skip {first:,}-{last:,}" if first < last else f"skip {first:,}" for first, last in self.skip]
        if len(skips) > 4:
            count = sum(last - first + 1 for first, last in self.skip)
            skips = [f"skip {count:,} positions between {self.skip[0][0]:,} and {self.skip[-1][1]:,}"]
        said += skips
        said += [f"at most {epochs} epoch{'s' * (epochs != 1)} of {name}" for name, epochs in self.max_epochs]
        said += [] if self.num_rows is None else [f"end at row {self.num_rows:,}"]
        return f"from position {self.at:,}: {', '.join(said)}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What fixes row p of the stream. Batch size, ranks, workers, prefetch and framework are not in it.

    `fingerprint` names the plan. `runs`, `world_size` and `sharding` say how it was cut into batches and ranks:
    they travel with the plan, so that a step can be traced, but are not part of what it is.

    Rows have `row_tokens` tokens, come from `sources` with the weights of `segments`, and are shuffled by `seed` as
    `shuffle` says. Loaders set the other fields from their settings of the same name: `by`, `max_epochs`, `exhausted`,
    `num_rows`, `epoch_end`, `recut`, `pool`, `lanes`, `pad`, `batch_tokens`. `order_version` names the algorithm,
    `amendments` changes on the way, `places` where the sources were found.
    """

    row_tokens: int
    seed: int
    shuffle: str
    sources: tuple[PlanSource, ...]
    segments: Segments = ((0, None),)
    """The weights that were asked for from the beginning. Amendments replace what is to come of them."""
    recut: bool = True
    epoch_end: str = "drop"
    num_rows: int | None = None
    """Rows of the whole stream, where weights made it endless and num_rows, num_tokens or stop= ended it."""
    order_version: int = 1
    pool: tuple[int, int] | None = None
    """(rows of a block, blocks of a window), where shuffle is "pool"."""
    by: str = "rows"
    """What weights are shares of: "rows" or "tokens"."""
    max_epochs: tuple[tuple[str, int], ...] = ()
    exhausted: str = "repeat"
    """What happens where a source has given its epochs: see `MixedDataLoader`."""
    lanes: tuple[int, int] | None = None
    """(lanes, rows that each gets in turn), where shuffle is "pool" and ranks read only their own windows."""
    pad: int | None = None
    """The token that fills up rows of sources with shorter ones."""
    amendments: tuple[Amendment, ...] = ()
    runs: tuple[Run, ...] = field(default=(), compare=False)
    """How runs cut it into batches. One on a loader's plan; as many as were recorded on a plan read from a file."""
    world_size: int = field(default=1, compare=False)
    sharding: ShardingLike | None = field(default=None, compare=False)
    """Which rank got which rows of a batch, as `sharding_of` takes it; None is contiguous."""
    batch_tokens: int | None = field(default=None, compare=False)
    """Where the run cut batches by tokens: how many they may have. Which rows a step had, lengths say, not the plan."""
    places: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """(source, path of the store in which it was found last): where to look first, not what is looked for."""

    @property
    def schedule(self) -> Segments:
        """The weights that are asked for, from which position on, after all amendments."""
        segments = self.segments
        for amendment in self.amendments:
            if amendment.weights:
                segments = (*(s for s in segments if s[0] < amendment.at), *amendment.weights)
        return segments

    @property
    def weights(self) -> dict[str, float] | None:
        """The weights that are asked for in the end."""
        weights = self.schedule[-1][1]
        return None if weights is None else dict(weights)

    @property
    def all_sources(self) -> tuple[PlanSource, ...]:
        """The sources and those that were added later, each as it is after it grew: the order's, by number."""
        latest = {source.name: source for source in self.sources}
        latest.update((source.name, source) for amendment in self.amendments for source in amendment.add)
        return tuple(latest.values())

    @property
    def caps(self) -> dict[str, int]:
        """How often each source may be read, after all amendments."""
        return dict((*self.max_epochs, *(cap for amendment in self.amendments for cap in amendment.max_epochs)))

    @property
    def end_rows(self) -> int | None:
        """Rows at which num_rows or the like end the stream, after all amendments."""
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
        """Which row of which source lies at each position. Needs no data, and is the same for equal plans."""
        if self.fingerprint not in _orders:
            while len(_orders) >= _MOST_ORDERS:
                _orders.pop(next(iter(_orders)), None)
            _orders[self.fingerprint] = self._make_order()
        made: Order = _orders[self.fingerprint]
        return made

    def _make_order(self) -> Order:
        from batchwright.order.lanes import LanedOrder
        from batchwright.order.schedule import Order
        from batchwright.order.sweep import Change

        if self.lanes is not None:
            assert self.pool is not None
            return LanedOrder(  # type: ignore[return-value]  # has what others ask of an order
                {source.name: source.num_rows for source in self.sources},
                seed=self.seed,
                weights=self._row_weights(self.schedule),
                pool=self.pool,
                lanes=self.lanes,
                num_rows=self.num_rows,
                changes=[Change(at=a.at, num_rows=a.num_rows) for a in self.amendments],
                skips=[(first, last + 1) for first, last in self.skips],
            )
        return Order(
            {source.name: source.num_rows for source in self.sources},
            seed=self.seed,
            weights=self._row_weights(self.segments),
            shuffle=self.shuffle,
            pool=self.pool,
            max_epochs=dict(self.max_epochs),
            exhausted=self.exhausted,
            num_rows=self.num_rows,
            skips=[(first, last + 1) for first, last in self.skips],
            changes=[
                Change(
                    at=amendment.at,
                    weights=self._row_weights(amendment.weights) if amendment.weights else None,
                    sizes=tuple((source.name, source.num_rows) for source in amendment.add),
                    max_epochs=amendment.max_epochs,
                    num_rows=amendment.num_rows,
                )
                for amendment in self.amendments
            ],
        )

    def _row_weights(self, segments: Segments) -> tuple[tuple[int, dict[str, float] | None], ...]:
        """Weights as shares of rows: what was asked in tokens, divided by the tokens of a row."""
        if self.by == "rows":
            return tuple((at, None if weights is None else dict(weights)) for at, weights in segments)
        tokens = {source.name: self.tokens_per_row(source) for source in self.all_sources}
        return tuple(
            (at, None if weights is None else {name: weight / tokens.get(name, 1) for name, weight in weights})
            for at, weights in segments
        )

    def tokens_per_row(self, source: PlanSource) -> float:
        """Tokens of a source's rows, without what fills them up: the mean, where rows are made of whole documents."""
        return source.num_tokens / source.num_rows if source.rows else float(source.row_tokens or self.row_tokens)

    @property
    def epoch_rows(self) -> int | None:
        """Rows of one epoch (of the last ones, where that changes); None for an endless stream."""
        if self.amendments or self.max_epochs or self.exhausted != "repeat":
            return self.order.epochs.last_rows
        return self.num_rows if self.weights is not None else sum(source.num_rows for source in self.sources)

    @property
    def pool_rows(self) -> int | None:
        """Rows among which a row is shuffled; None where that is a whole epoch, or where nothing is shuffled."""
        return None if self.pool is None else self.pool[0] * self.pool[1]

    @property
    def epoch_spec(self) -> dict[str, Any]:
        """How steps go through epochs, as `Cut`, `position_of_step` and `step_of_position` take it."""
        return {"epochs": self._epochs, "epoch_end": self.epoch_end}

    @cached_property
    def _epochs(self) -> Epochs:
        from batchwright.order.epochs import Epochs

        is_simple = not (self.amendments or self.max_epochs or self.exhausted != "repeat")
        return Epochs.of(self.epoch_rows) if is_simple else self.order.epochs

    def spec(self) -> dict[str, Any]:
        """The fingerprinted part, as JSON. What has its default is left out where older plans did not have it."""
        spec: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.compare and (field.name not in _LATER or getattr(self, field.name) != field.default)
        }
        spec["sources"] = [_source_spec(source) for source in self.sources]
        if self.amendments:
            spec["amendments"] = [amendment.spec() for amendment in self.amendments]
        return spec

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.spec())[:16]

    @property
    def steps(self) -> Run:
        """How the run cut batches: where several are recorded and differ, there is no one answer."""
        if len(self.runs) == 1:
            return self.runs[0]
        if self.batch_tokens is not None:
            raise PlanError(
                f"this run of plan {self.fingerprint} cut batches by tokens (batch_tokens={self.batch_tokens:,}): "
                "which rows a step had depends on the lengths of all rows of its block",
                remedy="position=, from the batch's metadata['position']; or loader.seek(step=...) and get_batch()",
            )
        sizes = ", ".join(str(rows) for rows in sorted({run[0][2] for run in self.runs}))
        raise PlanError(
            f"plan {self.fingerprint} was cut into batches of {sizes} rows by different runs"
            if self.runs
            else f"plan {self.fingerprint} does not say how it was cut into batches",
            remedy="batch_size=, or the state (or loader) of the run that you mean",
        )

    def cut_as(self, steps: Sequence[Sequence[int]], world_size: int = 1, sharding: ShardingLike | None = None) -> Plan:
        """This plan, with the record of one run that cut it: its `steps`, `world_size` and `sharding`."""
        try:
            tokens = steps[-1][2] if steps and len(steps[-1]) == 4 else None
            runs = (_run(steps),) if tokens is None else ()
        except (TypeError, ValueError, KeyError):
            raise PlanError(
                "these are not the steps of a run", steps=repr(steps)[:80], remedy="a state that state_dict() returned"
            ) from None
        return replace(self, runs=runs, batch_tokens=tokens, world_size=world_size, sharding=sharding)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to the file `path`, as JSON. Runs that were recorded there before are kept beside this
        one's."""
        path = local_path(plan=path)
        with one_at_a_time(path.parent):  # two runs that open at once are both recorded
            there = _read(path) if path.exists() else {}
            known = [_run(run) for run in there.get("runs", [])]
            runs = [*known, *(run for run in self.runs if run not in known)]
            places = dict(self.places) or there.get("places", {})  # stores may have moved since
            if there and runs == known and places == there.get("places", {}):
                return
            body = {"batchwright_plan": PLAN_FORMAT, "fingerprint": self.fingerprint, "plan": self.spec(), "runs": runs}
            if places:
                body["places"] = places
            write_whole(path, msgspec.json.format(msgspec.json.encode(body), indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from the file `path`, with the runs that are recorded there."""
        body = _read(local_path(plan=path))
        if not isinstance(body.get("plan"), dict):
            raise PlanError("this is not a plan", file=path, remedy=_REMEDY)
        plan = cls.from_spec(body["plan"], where=path)
        if plan.fingerprint != body.get("fingerprint"):
            raise PlanError(
                "this plan was changed after it was written",
                file=path,
                remedy="open a loader with the settings you want: it writes its own plan",
            )
        try:
            runs = tuple(_run(run) for run in body.get("runs", []))
            places = tuple((str(name), str(place)) for name, place in body.get("places", {}).items())
        except (TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                "the record of runs in this plan is damaged", file=path, reason=error, remedy=_REMEDY
            ) from None
        return replace(plan, runs=runs, places=places)

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], where: object = None) -> Plan:
        """The plan that has this `spec`; errors say that it is of the file `where`."""
        try:
            given = dict(spec)
            given["sources"] = tuple(_source(source) for source in given["sources"])
            given["segments"] = _segments(given["segments"])
            for name in ("pool", "lanes"):
                if given.get(name) is not None:
                    one, two = given[name]
                    given[name] = (int(one), int(two))
            given["max_epochs"] = tuple((str(n), int(e)) for n, e in given.get("max_epochs", ()))
            given["amendments"] = tuple(_amendment(a) for a in given.get("amendments", ()))
            plan = cls(**given)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError("this is not a plan", file=where, reason=error, remedy=_REMEDY) from None
        if plan.order_version != 1:
            raise PlanError(
                f"this plan has order version {plan.order_version}; this batchwright knows version 1",
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

        It equals this one before `at`, and every source goes on where it is. States of this plan go on with the
        amended one if they lie before `at`, or there.
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
        """The first thing in which the `other` plan differs, in words."""
        mine, theirs = self.spec(), other.spec()
        for key in mine | theirs:
            if mine.get(key) == theirs.get(key):
                continue
            if key == "sources":
                for one, two in zip(self.sources, other.sources, strict=False):
                    # How rows are made before how many there are, which follows from it.
                    first, second = ({**dict(source.rows), **_source_spec(source)} for source in (one, two))
                    for part in ("name", "split", "fingerprint", *dict(one.rows), *dict(two.rows), *first):
                        if part != "rows" and first.get(part) != second.get(part):
                            return f"source {one.name!r}: {part} {first.get(part)} here, {second.get(part)} there"
                return f"sources: {len(mine[key])} here, {len(theirs[key])} there"
            if key in ("segments", "amendments"):
                what = "segment" if key == "segments" else "amendment"
                return _first_difference(what, getattr(self, key), getattr(other, key))
            has_loss = any("loss" in dict(source.rows) for source in self.sources)
            name = ("max_length" if has_loss else "chunk_size") if key == "row_tokens" else key
            return f"{name}: {mine.get(key)} here, {theirs.get(key)} there"
        return None

    def __repr__(self) -> str:
        rows, weights, sources = self.epoch_rows, self.weights, self.all_sources
        end = None if weights is None else self._epochs.end_of(1)
        rows = rows if end is None else end
        if rows is None:
            length = "endless"
        elif any(source.rows for source in sources):
            length = f"{rows:,} rows an epoch"
        else:
            length = f"{rows:,} rows, {rows * self.row_tokens:,} tokens an epoch"
        lines = [
            f"Plan {self.fingerprint}: rows of {self.row_tokens} tokens, {length}, seed {self.seed}, "
            f"shuffle {self.shuffle}"
            + (f" in windows of {self.pool_rows:,} rows" if self.pool else "")
            + (f" in {self.lanes[0]} lanes" if self.lanes else "")
        ]
        read = None if end is None else self.order.given(self.order.skips.position(end))
        for i, source in enumerate(sources):
            branch = "└─" if i == len(sources) - 1 else "├─"
            if weights is None:
                share = f"{100 * source.num_rows / max(sum(s.num_rows for s in sources), 1):.1f} %"
            else:
                asked = weights.get(source.name, 0.0) / sum(weights.values())
                changes = " at the end" if len(self.schedule) > 1 else ""
                got = self.order.shares[i] if read is None else read[i] / max(sum(read), 1)
                run = "" if read is None else " of the run"
                share = f"{100 * asked:.1f} % of {self.by} asked{changes}, {100 * got:.2f} % of rows{run}"
            epochs = "" if read is None else f", {read[i] / source.num_rows:.2f} epochs"
            often = f" (over {MANY_EPOCHS})" if read is not None and read[i] > MANY_EPOCHS * source.num_rows else ""
            lines.append(
                f"{branch} {source.name} ({source.split})  {share}  {source.num_rows:,} rows, "
                f"{source.num_tokens:,} tokens{self._rows_in_words(source)}{epochs}{often}  "
                f"content {source.fingerprint[:7]}"
            )
        if weights is not None:
            lines += [f"cap: {line}" for line in self.bindings_in_words()]
        lines += [f"amendment {i + 1}: {amendment}" for i, amendment in enumerate(self.amendments)]
        return "\n".join(lines)

    def _rows_in_words(self, source: PlanSource) -> str:
        if "row_tokens" not in dict(source.rows):  # of text, of rollouts
            return ""
        rows = dict(source.rows)
        fill = 100 * source.num_tokens / (source.num_rows * rows["row_tokens"] * (1 + bool(rows.get("pairs"))))
        return f", packed {rows['packing']}, {fill:.2f} % full" if rows.get("packing") else ", one sample a row"

    def bindings_in_words(self) -> list[str]:
        """Where each cap binds: derived from weights and sizes, so known before the run starts."""
        end = self._epochs.end_of(1)
        last = None if end is None else self.order.skips.position(end)
        return [self._binding_in_words(binding, last) for binding in self.order.bindings]

    def _binding_in_words(self, binding: Any, last: int | None) -> str:
        epochs = f"{binding.epochs} epoch{'s' * (binding.epochs != 1)}"
        if last is not None and binding.position > last:
            return f"{binding.source} would have given {epochs} by position {binding.position:,}, which is not reached"
        is_end = binding.position == self.order.epochs.limit
        then = "the stream ends there" if is_end else "the others share its place"
        return f"{binding.source} has given {epochs} by {self._place_in_words(binding.position)}, {then}"

    def _place_in_words(self, position: int) -> str:
        if len(self.runs) != 1:
            return f"position {position:,}"
        from batchwright.order.split import step_of_position

        return f"step {step_of_position(self.steps, position, **self.epoch_spec):,} (position {position:,})"


_orders: dict[str, Any] = {}
"""By fingerprint: a plan is copied whenever something beside it changes, and some orders take seconds to work out."""
_MOST_ORDERS = 16

MANY_EPOCHS = 4
"""Text that is read more often than about four times was measured to teach little more (Muennighoff et al. 2023)."""

_LATER = ("pool", "lanes", "by", "max_epochs", "exhausted", "pad", "amendments")
"""Settings that came after the first plans were written: where they have their default, a plan keeps its name."""


def _source_spec(source: PlanSource) -> dict[str, Any]:
    spec = asdict(source)
    if source.row_tokens is None:
        del spec["row_tokens"]
    if source.rows:
        spec["rows"] = dict(source.rows)
    else:
        del spec["rows"]
    return spec


def _source(spec: Mapping[str, Any]) -> PlanSource:
    given = dict(spec)
    return PlanSource(**given | {"rows": tuple(sorted(dict(given.get("rows", {})).items()))})


def _segments(spec: Sequence[Any]) -> Segments:
    return tuple(
        (int(at), None if weights is None else tuple((str(n), float(w)) for n, w in weights)) for at, weights in spec
    )


def _amendment(spec: Mapping[str, Any]) -> Amendment:
    given = dict(spec)
    given["weights"] = _segments(given.get("weights", ()))
    given["add"] = tuple(_source(source) for source in given.get("add", ()))
    given["skip"] = tuple((int(first), int(last)) for first, last in given.get("skip", ()))
    given["max_epochs"] = tuple((str(n), int(e)) for n, e in given.get("max_epochs", ()))
    return Amendment(**given)


def _in_words(segments: Segments, at: int) -> str:
    """Weights that were asked for at a position, the first and the last where there are many."""
    said = [
        "natural proportion" if weights is None else "weights " + ", ".join(f"{n}={w:.3g}" for n, w in weights)
        for _, weights in segments
    ]
    first = f"from position {segments[0][0]:,} on " if segments[0][0] > at else ""
    if len(segments) == 1:
        return first + said[0]
    return f"{first}{said[0]} ... {said[-1]} in {len(said)} segments up to position {segments[-1][0]:,}"


def _first_difference(what: str, mine: Sequence[Any], theirs: Sequence[Any]) -> str:
    """Of two lists of segments or amendments, the first place at which they part."""
    for number, (one, two) in enumerate(zip_longest(mine, theirs)):
        if one != two:
            here, there = ("none" if x is None else _said(x) for x in (one, two))
            return f"{what} {number + 1}: {here} here, {there} there"
    return f"{what}s"


def _said(part: Any) -> str:
    return str(part) if isinstance(part, Amendment) else f"from position {part[0]:,}: {_in_words((part,), part[0])}"


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


def kept_plans(*stores: Path, beginning: str = "[0-9a-f]") -> list[Path]:
    """The files of plans that are kept for stores, of those whose fingerprints begin so."""
    folders = [*(store / "plans" for store in stores), plan_home()]
    return [path for folder in folders for path in sorted(folder.glob(f"{beginning}*.json"))]


def state_in(path: str | os.PathLike[str]) -> State | None:
    """The state of a loader in a JSON file; None if something else is in there."""
    body = _json(local_path(plan=path))
    return body if isinstance(body, dict) and body.keys() >= {"position", "plan", "steps"} else None


def _read(path: Path) -> dict[str, Any]:
    body = _json(path)
    if not isinstance(body, dict) or body.get("batchwright_plan") != PLAN_FORMAT:
        raise PlanError("this is not a plan that this batchwright can read", file=path, remedy=_REMEDY)
    return body


def _json(path: Path) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        remedy = "a plan's fingerprint or file, or a state's file: `batchwright plan STORE` lists the plans of a store"
        raise PlanError(f"no plan at {path}", file=path, reason=error.strerror, remedy=remedy) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError("this is not a plan", file=path, reason=error, remedy=_REMEDY) from None


_REMEDY = (
    "a plan's fingerprint or file, or the JSON of state_dict(); a damaged plan that is kept with a store: "
    "`batchwright plan forget STORE PLAN`, and a loader with the settings of its run"
)
