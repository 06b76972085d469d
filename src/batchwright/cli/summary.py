"""What a plan will do, in numbers: steps, tokens, and for each source its share and how often it is read.

From the plan alone, by the order's own arithmetic: no data is touched, and the counts are exact, for plans that are
amended, capped, skipped and growing too. Where rows are made of whole documents, each has tokens of its own: a part of
an epoch is counted by the mean row, and the stores say what became of the documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from batchwright.cli.common import counted, printable, table
from batchwright.order.plan_words import MANY_EPOCHS

if TYPE_CHECKING:
    from batchwright.order.plan import Plan, PlanSource
    from batchwright.order.sweep import Leg
    from batchwright.store import TokenStream

__all__ = [
    "AmendmentSummary",
    "CapSummary",
    "DocumentsSummary",
    "PlanSummary",
    "SourceSummary",
    "StretchSummary",
    "render",
    "summarize",
]

_FEWEST_OF_A_RAMP = 8
_SOURCES_SHOWN = 6
_STRETCHES_SHOWN = 16


@dataclass(frozen=True, slots=True)
class DocumentsSummary:
    """What became of the documents of a source whose rows are made of whole ones."""

    num_documents: int
    left_out: dict[str, int]
    """Documents that are in no row, by what is wrong with them."""
    num_cut: int
    """Documents of which only a part is in a row, as --truncation asks."""
    learned_share: float | None
    """Of all tokens in rows; None for plain text, of which all are."""


@dataclass(frozen=True, slots=True)
class SourceSummary:
    name: str
    split: str
    asked_share: float
    """Of rows, or of tokens where the plan's weights are by tokens. Over the whole run; without an end, the last."""
    effective_share: float
    """Of rows: what the weights came to, after caps and in whole slots of the pattern. Over the same."""
    effective_token_share: float
    num_rows: int
    num_tokens: int
    row_tokens: int
    """The most that a row has."""
    mean_row_tokens: float
    fill: float | None
    """Of the places of packed rows, how many have tokens. None where rows are not packed."""
    documents: DocumentsSummary | None
    """None where rows are windows over all tokens, and where the store was not looked at."""
    rows_read: int | None
    """None where the stream has no end."""
    tokens_read: int | None
    epochs: float | None
    first_epoch_ends_at_step: int | None
    """With weights: the step in which the source's last row is read for the first time, if the run gets there."""

    @property
    def is_read_often(self) -> bool:
        return self.epochs is not None and self.epochs > MANY_EPOCHS


@dataclass(frozen=True, slots=True)
class StretchSummary:
    """A part of the run in which one mix holds."""

    from_position: int
    from_step: int | None
    asked: dict[str, float]
    """Shares by source; what is not there has none."""
    effective: dict[str, float]
    effective_tokens: dict[str, float]
    is_inside_a_ramp: bool
    """Neither the first nor the last of many equal steps."""


@dataclass(frozen=True, slots=True)
class CapSummary:
    source: str
    epochs: int
    position: int | None
    """From here on the source is left out; None: the run ends before."""
    step: int | None
    ends_the_stream: bool


@dataclass(frozen=True, slots=True)
class AmendmentSummary:
    fingerprint: str
    """Of the plan that it gives."""
    parent: str
    from_position: int
    from_step: int | None
    change: str


@dataclass(frozen=True, slots=True)
class PlanSummary:
    fingerprint: str
    row_tokens: int
    batch_rows: int | None
    """None: the plan does not say, because its runs cut it differently."""
    epochs: int | None
    """How often the run goes through the plan's rows; None where they have no end."""
    epoch_rows: int | None
    """Of the last epochs, where that changes."""
    rows: int | None
    """Of the whole run, with those that are dropped and without those that are skipped."""
    skipped_rows: int
    dropped_rows: int | None
    """Rows that no step has, because they do not fill one. None where the stream has no end."""
    steps: int | None
    tokens: int | None
    mean_row_tokens: float
    """Over the whole run; without an end, in the end."""
    padding_tokens: int | None
    """What fills up rows. None where a batch is as wide as its longest row, as loaders of single conversations do."""
    sources: tuple[SourceSummary, ...]
    stretches: tuple[StretchSummary, ...]
    caps: tuple[CapSummary, ...]
    amendments: tuple[AmendmentSummary, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    plan: Plan, *, epochs: int | None = None, streams: Mapping[str, TokenStream] | None = None
) -> PlanSummary:
    """`epochs`: how often the run goes through the rows: once; or, amended, up to what the last amendment changes.

    `streams` are the plan's, and say more of rows that are made of whole documents.
    """
    return _Summary(plan, epochs, streams or {}).made()


class _Summary:
    """A plan, the run that is looked at, and where that run ends."""

    def __init__(self, plan: Plan, epochs: int | None, streams: Mapping[str, TokenStream]) -> None:
        from batchwright.order.epochs import Epochs, Skips

        self.plan, self.order, self.streams = plan, plan.order, streams
        self.all_epochs: Epochs = plan.epoch_spec["epochs"]
        self.skips = self.all_epochs.skips
        self.sources = plan.all_sources
        self.mean_row_tokens = [plan.tokens_per_row(source) for source in self.sources]
        self.steps = plan.steps if len(plan.runs) == 1 else None
        self.epochs = epochs or self._epochs_to_the_last_change()
        self.end_live: int | None = self.all_epochs.end_of(self.epochs)
        self.end: int | None = replace(self.all_epochs, skips=Skips()).end_of(self.epochs)

    def _epochs_to_the_last_change(self) -> int:
        if not self.plan.amendments:
            return 1
        changed = self.plan.amendments[-1].at
        if self.plan.weights is None:  # what joins or grows waits for the next epoch
            changed = max(changed, self.order.legs[-1].start)
        return 1 + self.all_epochs.number(changed)

    def made(self) -> PlanSummary:
        plan, has_end = self.plan, self.end_live is not None
        num_steps, spans = self._read()
        rows, epochs = self._rows_of_sources(spans)
        stretches = self._stretches()
        tokens = [round(count * of_row) for count, of_row in zip(rows, self.mean_row_tokens, strict=True)]
        of_rows = [self._over_the_run(stretches, "effective", source.name) for source in self.sources]
        return PlanSummary(
            fingerprint=plan.fingerprint,
            row_tokens=plan.row_tokens,
            batch_rows=None if self.steps is None else self.steps[-1][2],
            epochs=self.epochs if has_end else None,
            epoch_rows=plan.epoch_rows,
            rows=self.end_live,
            skipped_rows=(self.end or 0) - (self.end_live or 0),
            dropped_rows=None if self.end_live is None else self.end_live - sum(rows),
            steps=num_steps if has_end else None,
            tokens=sum(tokens) if has_end else None,
            mean_row_tokens=sum(share * mean for share, mean in zip(of_rows, self.mean_row_tokens, strict=True)),
            padding_tokens=self._padding(rows, tokens) if has_end else None,
            sources=tuple(
                SourceSummary(
                    name=source.name,
                    split=source.split,
                    asked_share=self._over_the_run(stretches, "asked", source.name),
                    effective_share=of_rows[number],
                    effective_token_share=self._over_the_run(stretches, "effective_tokens", source.name),
                    num_rows=source.num_rows,
                    num_tokens=source.num_tokens,
                    row_tokens=source.row_tokens or plan.row_tokens,
                    mean_row_tokens=self.mean_row_tokens[number],
                    fill=_fill(plan, source),
                    documents=_documents(source, self.streams.get(source.name)),
                    rows_read=rows[number] if has_end else None,
                    tokens_read=tokens[number] if has_end else None,
                    epochs=epochs[number] if has_end else None,
                    first_epoch_ends_at_step=self._read_once_by(number),
                )
                for number, source in enumerate(self.sources)
            ),
            stretches=tuple(stretches),
            caps=tuple(self._caps()),
            amendments=tuple(
                AmendmentSummary(
                    fingerprint=fingerprint,
                    parent=amendment.parent,
                    from_position=amendment.at,
                    from_step=self._step(amendment.at),
                    change=str(amendment).partition(": ")[2],
                )
                for amendment, fingerprint in zip(plan.amendments, plan.lineage[1:], strict=True)
            ),
        )

    def _padding(self, rows: list[int], tokens: list[int]) -> int | None:
        read = [source for count, source in zip(rows, self.sources, strict=True) if count]
        if any(source.rows and _fill(self.plan, source) is None for source in read):
            return None
        return sum(rows) * self.plan.row_tokens - sum(tokens)

    # What is read

    def _read(self) -> tuple[int | None, list[tuple[int, int]]]:
        """(steps, spans [start, stop) of positions) that the run reads."""
        from batchwright.order.split import Cut

        if self.end_live is None:
            return None, []
        if self.steps is None:
            return None, list(self._positions(0, self.end_live))
        num_steps = 0
        spans: list[tuple[int, int]] = []
        ends = [min(self.skips.live(triple[1]), self.end_live) for triple in self.steps[1:]]
        for (_, position, rows), end in zip(self.steps, [*ends, self.end_live], strict=True):
            cut = Cut(rows_per_step=rows, **self.plan.epoch_spec)
            for start, stop, steps in _batches(cut, self.skips.live(position), end):
                num_steps += steps
                spans += self._positions(start, stop)
        return num_steps, spans

    def _positions(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Spans of positions of live rows [start, stop)."""
        if start >= stop:
            return
        first, last = self.skips.position(start), self.skips.position(stop - 1)
        for skipped, stop_of_skipped in self.skips.ranges:
            if first < skipped <= last:
                yield first, skipped
                first = stop_of_skipped
        yield first, last + 1

    def _rows_of_sources(self, spans: list[tuple[int, int]]) -> tuple[list[int], list[float]]:
        """(rows, epochs) of each source that lie in some spans of positions."""
        rows, epochs = [0] * len(self.sources), [0.0] * len(self.sources)
        for start, stop in spans:
            for number, (before, after) in enumerate(
                zip(self.order.counts(start), self.order.counts(stop), strict=True)
            ):
                rows[number] += after - before
                epochs[number] += self._epochs_given(number, after) - self._epochs_given(number, before)
        return rows, epochs

    def _epochs_given(self, source: int, rows: int) -> float:
        """Epochs of a source, which may have grown, that so many of its rows are."""
        size = next(s for s in reversed(self.order.growth[source]) if s.first_row <= rows)
        return size.first_epoch + (rows - size.first_row) / max(size.num_rows, 1)

    def _read_once_by(self, source: int) -> int | None:
        if self.plan.weights is None or not self.order.growth[source][0].num_rows:
            return None
        position = self.order.first_epoch_ends_at(source) - 1
        return self._step(position) if self._is_in_the_run(position) else None

    # Shares

    def _stretches(self) -> list[StretchSummary]:
        inside = _inside_ramps([at for at, _ in self.plan.schedule])
        return [
            StretchSummary(
                from_position=leg.start,
                from_step=self._step(leg.start),
                asked=self._asked(leg),
                effective=(effective := self._effective(leg)),
                effective_tokens=_normalised(
                    {name: share * self.mean_row_tokens[self._number(name)] for name, share in effective.items()}
                ),
                is_inside_a_ramp=any(first < leg.start < last for first, last in inside),
            )
            for leg in self.order.legs
            if leg.start == 0 or self._is_in_the_run(leg.start)
        ]

    def _asked(self, leg: Leg) -> dict[str, float]:
        _, weights = max((s for s in self.plan.schedule if s[0] <= leg.start), key=lambda s: s[0])
        return self._effective(leg) if weights is None else _normalised(dict(weights))

    def _effective(self, leg: Leg) -> dict[str, float]:
        """What share of rows each source has in a leg."""
        from batchwright.order.mix import Pattern

        counts = leg.mix.counts_per_cycle.tolist() if isinstance(leg.mix, Pattern) else leg.mix.sizes
        shares = self.order.shares if len(self.order.legs) == 1 else counts
        return _normalised(dict(zip(self.order.names, shares, strict=False)))  # whoever joins later has none yet

    def _over_the_run(self, stretches: list[StretchSummary], what: str, source: str) -> float:
        """The mean of a share over all rows of the run; where it has no end, the share in the end."""
        shares: list[float] = [getattr(stretch, what).get(source, 0.0) for stretch in stretches]
        if self.end is None or len(stretches) == 1:
            return shares[-1]
        starts = [stretch.from_position for stretch in stretches]
        lengths = [stop - start for start, stop in pairwise([*starts, self.end])]
        return sum(share * length for share, length in zip(shares, lengths, strict=True)) / sum(lengths)

    def _number(self, source: str) -> int:
        return self.order.names.index(source)

    # Caps

    def _caps(self) -> Iterator[CapSummary]:
        plan = self.plan
        if plan.weights is None:
            return
        caps = {} if plan.exhausted == "repeat" else dict.fromkeys(plan.weights, 1)
        caps |= dict(plan.max_epochs)
        for amendment in plan.amendments:
            caps |= dict(amendment.max_epochs)
        bound = {binding.source: binding for binding in self.order.bindings}
        limit = self.order.epochs.limit
        for source in self.order.names:
            if source not in caps:
                continue
            position = bound[source].position if source in bound else None
            ends = position is not None and position == limit and (self.end is None or self.end >= limit)
            if position is not None and not ends and not self._is_in_the_run(position):
                position = None
            step = None if position is None else self._step(position)
            yield CapSummary(source, caps[source], position, step, ends)

    # Places

    def _is_in_the_run(self, position: int) -> bool:
        from batchwright.order.schedule import NEVER

        return position < (NEVER if self.end is None else self.end)

    def _step(self, position: int) -> int | None:
        from batchwright.order.split import step_of_position

        return None if self.steps is None else step_of_position(self.steps, position, **self.plan.epoch_spec)


def _fill(plan: Plan, source: PlanSource) -> float | None:
    if not dict(source.rows).get("packing"):
        return None
    return source.num_tokens / (source.num_rows * (source.row_tokens or plan.row_tokens))


def _documents(source: PlanSource, stream: TokenStream | None) -> DocumentsSummary | None:
    from batchwright.loaders.packed import open_samples, spec_of_entry

    if not source.rows or stream is None:
        return None
    rows = open_samples(stream, spec_of_entry(source.rows), source.name)
    counts = dict(rows.index.counts)
    num_documents, num_cut = counts.pop("documents"), counts.pop("cut", 0)
    share = None
    if rows.trained is not None:
        index = rows.index
        begin = index.start - rows.borders[index.document]
        learned = rows.trained.count(
            index.document, begin + 1, begin + index.length
        )  # nothing predicts the first token
        share = int(learned.sum()) / max(rows.num_tokens, 1)
    return DocumentsSummary(num_documents, counts, num_cut, share)


def _batches(cut: Any, live: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(first, last + 1, steps) of the live rows that whole steps read from a row to an end, epoch after epoch."""
    rows = cut.rows_per_step
    if cut.is_linear:
        steps = max(end - live, 0) // rows
        yield live, live + steps * rows, steps
        return
    while live < end:
        _, _, of_epoch = cut.epochs.span(live)
        stop = end if of_epoch is None else min(of_epoch, end)
        steps = -(-(stop - live) // rows) if cut.epoch_end in ("short", "pad") else (stop - live) // rows
        yield live, min(stop, live + steps * rows), steps
        live = stop


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items() if weight}


def _inside_ramps(starts: list[int]) -> list[tuple[int, int]]:
    """(first, last) of positions that follow each other in equal steps, if these are many.

    >>> _inside_ramps([0, 500, *range(1000, 2000, 100), 5000])
    [(1000, 1900)]
    """
    found, first = [], 0
    for i in range(1, len(starts) + 1):
        is_equal = i < len(starts) and (
            i == first + 1 or abs((starts[i] - starts[i - 1]) - (starts[first + 1] - starts[first])) <= 1
        )
        if not is_equal:
            if i - first >= _FEWEST_OF_A_RAMP:
                found.append((starts[first], starts[i - 1]))
            first = i - 1  # a larger step may begin the next ramp
    return found


# In words


def render(plan: Plan, summary: PlanSummary) -> str:
    lanes = "" if plan.lanes is None else f" in {counted(plan.lanes[0], 'lane')}"
    windows = "" if plan.pool_rows is None else f" (windows of {plan.pool_rows:,} rows{lanes})"
    lines = [
        f"plan {summary.fingerprint}",
        f"  rows    {_rows(plan)}, shuffle {plan.shuffle}{windows}, seed {plan.seed}",
        f"  batch   {_batch(plan, summary)}",
        f"  run     {_run(plan, summary)}",
        "",
        *_source_lines(plan, summary),
    ]
    if of_documents := [source for source in plan.all_sources if source.rows]:
        said = {source.name: source for source in summary.sources}
        lines += ["", "rows of whole documents"]
        lines += [line for source in of_documents for line in _documents_lines(source, said[source.name])]
    if len(summary.stretches) > 1:
        lines += ["", *_stretch_lines(plan, summary)]
    if summary.caps:
        lines += ["", "caps", *map(_cap_line, summary.caps)]
    if summary.amendments:
        lines += ["", "history", f"  {summary.amendments[0].parent}  as it began"]
        lines += [
            f"  {a.fingerprint}  amends {a.parent[:8]} from {_place(a.from_step, a.from_position)}: "
            + printable(a.change)
            for a in summary.amendments
        ]
    if often := [source.name for source in summary.sources if source.is_read_often]:
        lines += [
            "",
            f"note: {printable(', '.join(often))}: read more than {MANY_EPOCHS} times. Repeats beyond that were "
            "measured to teach little more;",
            "      a smaller weight, a shorter run, or more text.",
        ]
    return "\n".join(lines)


def _source_lines(plan: Plan, summary: PlanSummary) -> list[str]:
    shares = ["asked", "effective"]
    if _says_both(plan, summary):
        shares = [f"asked ({plan.by})", "effective (rows)", "effective (tokens)"]
    rows = [
        [
            printable(source.name),
            source.split,
            f"{100 * source.asked_share:.2f} %",
            f"{100 * source.effective_share:.3f} %",
            *([f"{100 * source.effective_token_share:.3f} %"] if len(shares) > 2 else []),
            f"{source.num_tokens:,}",
            "no end" if source.tokens_read is None else f"{source.tokens_read:,}",
            "" if source.epochs is None else f"{source.epochs:.2f}",
            "" if source.first_epoch_ends_at_step is None else f"{source.first_epoch_ends_at_step:,}",
            f"over {MANY_EPOCHS} epochs" if source.is_read_often else "",
        ]
        for source in summary.sources
    ]
    of_documents = any(source.rows for source in plan.all_sources)  # not all tokens of the store are in rows then
    in_all = "tokens in rows" if of_documents else "tokens in store"
    header = ["source", "split", *shares, in_all, "tokens read", "epochs", "once by step", ""]
    unused = [i for i, name in enumerate(header) if all(not row[i] for row in rows) and name in ("once by step", "")]
    keep = [i for i in range(len(header)) if i not in unused]
    body = table([header[i] for i in keep], [[row[i] for i in keep] for row in rows], left=["source", "split", ""])
    return body.split("\n")


def _documents_lines(of: PlanSource, source: SourceSummary) -> list[str]:
    """How the rows of a source are made, and what became of its documents."""
    rows, documents = dict(of.rows), source.documents
    kind, how = ("pair", "two rows of a batch each") if rows.get("pairs") else ("row", "a document each")
    if source.fill is not None:
        how = f"packed {rows['packing']}, {100 * source.fill:.2f} % full"
    learned = f", loss on {rows['loss']}" if "loss" in rows else ""
    if documents is not None and documents.learned_share is not None:
        learned += f" ({100 * documents.learned_share:.1f} % of the tokens)"
    mean = f"{source.mean_row_tokens:,.1f} tokens in the mean"
    lines = [f"  {printable(source.name)}: {counted(source.num_rows, kind)}, {how}, {mean}{learned}"]
    if documents is None:
        return lines
    total = documents.num_documents
    words = {"over length": f"over {rows['row_tokens']:,} tokens", "empty mask": "nothing to learn"}
    for what, number in documents.left_out.items():
        lines.append(f"    left out: {_of_all(number, total)}: {words.get(what, what)}")
    if documents.num_cut:
        lines.append(f"    cut ({rows['truncation']}): {_of_all(documents.num_cut, total)}: {words['over length']}")
    return lines


def _of_all(number: int, total: int) -> str:
    """
    >>> _of_all(312, 40_000)
    '312 of 40,000 documents (0.8 %)'
    """
    return f"{number:,} of {counted(total, 'document')} ({100 * number / max(total, 1):.1f} %)"


def _rows(plan: Plan) -> str:
    if not any(source.rows for source in plan.all_sources):
        return f"{plan.row_tokens:,} tokens each"
    return f"{plan.row_tokens:,} tokens at most"


def _stretch_lines(plan: Plan, summary: PlanSummary) -> list[str]:
    """One line for each mix: of a ramp, only the first and the last; of very many, the first and the last few."""
    both = _says_both(plan, summary)
    header = [
        "from step",
        "position",
        "asked",
        *(["effective (rows)", "effective (tokens)"] if both else ["effective"]),
    ]
    shown = [stretch for stretch in summary.stretches if not stretch.is_inside_a_ramp]
    if len(shown) > _STRETCHES_SHOWN:
        shown = [*shown[: _STRETCHES_SHOWN // 2], *shown[-_STRETCHES_SHOWN // 2 :]]
    rows = [
        [
            "" if stretch.from_step is None else f"{stretch.from_step:,}",
            f"{stretch.from_position:,}",
            _shares_in_words(stretch.asked),
            _shares_in_words(stretch.effective),
            *([_shares_in_words(stretch.effective_tokens)] if both else []),
        ]
        for stretch in shown
    ]
    lines = table(header, rows, left=header[2:]).split("\n")
    hidden = len(summary.stretches) - len(shown)
    return [*lines, *([f"and {hidden:,} more in between: --json has them"] if hidden else [])]


def _says_both(plan: Plan, summary: PlanSummary) -> bool:
    """Whether shares of rows and of tokens are two things."""
    return plan.by == "tokens" or len({source.mean_row_tokens for source in summary.sources}) > 1


def _shares_in_words(shares: Mapping[str, float]) -> str:
    """
    >>> _shares_in_words({"web": 0.75, "code": 0.25})
    'web 75.00 %, code 25.00 %'
    """
    said = [f"{printable(name)} {100 * share:.2f} %" for name, share in list(shares.items())[:_SOURCES_SHOWN]]
    return ", ".join(said) + (f" and {len(shares) - len(said)} more" if len(shares) > len(said) else "")


def _cap_line(cap: CapSummary) -> str:
    most = f"  {printable(cap.source)}: at most {counted(cap.epochs, 'epoch')}, "
    if cap.position is None:
        return f"{most}not reached"
    then = "the stream ends there" if cap.ends_the_stream else "the others share its place"
    return f"{most}given by {_place(cap.step, cap.position)}: {then}"


def _place(step: int | None, position: int) -> str:
    return f"position {position:,}" if step is None else f"step {step:,} (position {position:,})"


def _batch(plan: Plan, summary: PlanSummary) -> str:
    if summary.batch_rows is None:
        return "not said: runs cut this plan differently, or none did yet (--batch-size)"
    earlier = [f", {rows:,} before step {step:,}" for (_, _, rows), (step, _, _) in pairwise(plan.steps)]
    about = "about " if any(source.rows for source in plan.all_sources) else ""
    of_row = summary.mean_row_tokens if about else summary.row_tokens
    tokens = f"{about}{round(summary.batch_rows * of_row):,} tokens a step"
    return f"{counted(summary.batch_rows, 'row')}, {tokens}" + "".join(reversed(earlier))


def _run(plan: Plan, summary: PlanSummary) -> str:
    if summary.rows is None:
        return "no end: --num-tokens, --num-rows or --stop gives it one"
    steps = "" if summary.steps is None else f"{counted(summary.steps, 'step')}, "
    padding = f" and {summary.padding_tokens:,} of padding" if summary.padding_tokens else ""
    skipped = f", {counted(summary.skipped_rows, 'row')} skipped" if summary.skipped_rows else ""
    dropped = f", {counted(summary.dropped_rows, 'row')} dropped" if summary.dropped_rows else ""
    rows = f", {counted(summary.rows, 'row')}"
    if plan.weights is None:
        is_even = summary.epochs is not None and summary.epoch_rows == summary.rows / summary.epochs
        each = f"{counted(summary.epoch_rows or 0, 'row')} each" if is_even else counted(summary.rows, "row")
        rows = f" in {counted(summary.epochs or 1, 'epoch')}, {each}"
    return f"{steps}{summary.tokens:,} tokens{padding}{rows}{skipped}{dropped}"
