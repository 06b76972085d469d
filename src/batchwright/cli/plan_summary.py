"""The numbers of a plan: steps, tokens, and the share and epochs of each source.

They follow from the plan alone, by the arithmetic of its order. No data is read, and the counts are exact, also for
plans with amendments, caps, skips and growing sources. Rows of whole documents differ in length: a part of an epoch is
counted by the mean row, and the stores tell how many documents are in no row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from batchwright.batches.samples import SampleRows
from batchwright.loaders.stored import open_samples, spec_of_entry
from batchwright.order.epochs import Epochs, Skips
from batchwright.order.plan import Plan, PlanSource, Run
from batchwright.order.plan_text import MANY_EPOCHS
from batchwright.order.schedule import NEVER
from batchwright.order.split import Cut, step_of_position
from batchwright.order.sweep import MixLeg
from batchwright.store import TokenStream


@dataclass(frozen=True, slots=True)
class DocumentsSummary:
    """The documents of a source whose rows are made of whole documents."""

    num_documents: int
    left_out: dict[str, int]
    """Documents that are in no row, by the reason."""
    num_cut: int
    """Documents cut by --truncation."""
    learned_share: float | None
    """Of all tokens in rows; None for plain text, where all are learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSummary:
    name: str
    split: str
    asked_share: float
    """Of rows, or of tokens where the plan's weights are by tokens. Over the whole run; without an end, the last."""
    effective_share: float
    """Of rows, after caps and in whole slots of the pattern. Over the same."""
    effective_token_share: float
    num_rows: int
    num_tokens: int
    row_tokens: int
    """The most that a row has."""
    mean_row_tokens: float
    fill: float | None
    """The share of packed rows that is not padding. None where rows are not packed."""
    documents: DocumentsSummary | None
    """None where rows are windows over all tokens, and where the store was not looked at."""
    rows_read: int | None = None
    """None where the stream has no end."""
    tokens_read: int | None = None
    epochs: float | None = None
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
    """Shares by source; a missing source has none."""
    effective: dict[str, float]
    effective_tokens: dict[str, float]


@dataclass(frozen=True, slots=True)
class CapSummary:
    source: str
    epochs: int
    position: int | None = None
    """From here on the source is left out; None: the run ends before."""
    step: int | None = None
    ends_the_stream: bool = False


@dataclass(frozen=True, slots=True)
class AmendmentSummary:
    fingerprint: str
    """Of the plan that it gives."""
    parent: str
    from_position: int
    from_step: int | None
    change: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """What is None by default is not known of a stream without end."""

    fingerprint: str
    row_tokens: int
    batch_rows: int | None
    """None where the runs of the plan cut it differently."""
    epochs: int | None = None
    epoch_rows: int | None
    """Of the last epochs, where that changes."""
    rows: int | None
    """Of the whole run, with those that are dropped and without those that are skipped."""
    skipped_rows: int
    dropped_rows: int | None = None
    """Rows of partial batches that are dropped."""
    steps: int | None = None
    tokens: int | None = None
    mean_row_tokens: float
    """Over the whole run; without an end, in the end."""
    padding_tokens: int | None = None
    """None also where a batch is as wide as its longest row."""
    sources: tuple[SourceSummary, ...]
    stretches: tuple[StretchSummary, ...]
    caps: tuple[CapSummary, ...]
    amendments: tuple[AmendmentSummary, ...]


def summarize(
    plan: Plan, *, epochs: int | None = None, streams: Mapping[str, TokenStream] | None = None
) -> PlanSummary:
    """`epochs` of the run: by default one, or as many as the last amendment needs to take effect.

    `streams` are the plan's: with them, documents are counted too.
    """
    return _Summary(plan, epochs, streams or {}).made()


class _Summary:
    """A plan, a run of it, and the end of that run."""

    def __init__(self, plan: Plan, epochs: int | None, streams: Mapping[str, TokenStream]) -> None:
        self.plan, self.order, self.streams = plan, plan.order, streams
        self.all_epochs: Epochs = plan.epoch_spec["epochs"]
        self.skips = self.all_epochs.skips
        self.sources = plan.all_sources
        self.mean_row_tokens = [plan.tokens_per_row(source) for source in self.sources]
        self.steps: Run = ()
        """How the run cuts batches; empty where runs cut them differently, or none did yet."""
        if len(plan.runs) == 1:
            self.steps = plan.steps
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
        stretches = self._stretches()
        sources = [self._source(number, source, stretches) for number, source in enumerate(self.sources)]
        batch_rows = None
        if self.steps:
            batch_rows = self.steps[-1][2]
        summary = PlanSummary(
            fingerprint=self.plan.fingerprint,
            row_tokens=self.plan.row_tokens,
            batch_rows=batch_rows,
            epoch_rows=self.plan.epoch_rows,
            rows=self.end_live,
            skipped_rows=(self.end or 0) - (self.end_live or 0),
            mean_row_tokens=sum(source.effective_share * source.mean_row_tokens for source in sources),
            sources=tuple(sources),
            stretches=tuple(stretches),
            caps=tuple(self._caps()),
            amendments=tuple(self._amendments()),
        )
        if self.end_live is None:
            return summary
        return self._with_counts(summary, self.end_live)

    def _with_counts(self, summary: PlanSummary, end: int) -> PlanSummary:
        """The summary with the counts of a run that ends."""
        num_steps, spans = self._read(end)
        rows, epochs = self._rows_of_sources(spans)
        tokens = [round(count * of_row) for count, of_row in zip(rows, self.mean_row_tokens, strict=True)]
        return replace(
            summary,
            epochs=self.epochs,
            dropped_rows=end - sum(rows),
            steps=num_steps,
            tokens=sum(tokens),
            padding_tokens=self._padding(rows, tokens),
            sources=tuple(
                replace(source, rows_read=rows[i], tokens_read=tokens[i], epochs=epochs[i])
                for i, source in enumerate(summary.sources)
            ),
        )

    def _source(self, number: int, source: PlanSource, stretches: list[StretchSummary]) -> SourceSummary:
        """A source without the counts of a run."""
        return SourceSummary(
            name=source.name,
            split=source.split,
            asked_share=self._over_the_run(stretches, "asked", source.name),
            effective_share=self._over_the_run(stretches, "effective", source.name),
            effective_token_share=self._over_the_run(stretches, "effective_tokens", source.name),
            num_rows=source.num_rows,
            num_tokens=source.num_tokens,
            row_tokens=source.row_tokens or self.plan.row_tokens,
            mean_row_tokens=self.mean_row_tokens[number],
            fill=_fill(self.plan, source),
            documents=_documents(source, self.streams.get(source.name)),
            first_epoch_ends_at_step=self._read_once_by(number),
        )

    def _amendments(self) -> Iterator[AmendmentSummary]:
        for amendment, fingerprint in zip(self.plan.amendments, self.plan.lineage[1:], strict=True):
            yield AmendmentSummary(
                fingerprint=fingerprint,
                parent=amendment.parent,
                from_position=amendment.at,
                from_step=self._step(amendment.at),
                change=str(amendment).partition(": ")[2],
            )

    def _padding(self, rows: list[int], tokens: list[int]) -> int | None:
        read = [source for count, source in zip(rows, self.sources, strict=True) if count]
        if any(source.rows and _fill(self.plan, source) is None for source in read):
            return None
        return sum(rows) * self.plan.row_tokens - sum(tokens)

    # What is read

    def _read(self, run_end: int) -> tuple[int | None, list[tuple[int, int]]]:
        """(steps, spans [start, stop) of positions) that the run reads."""
        if not self.steps:
            return None, list(self._positions(0, run_end))
        num_steps = 0
        spans: list[tuple[int, int]] = []
        ends = [min(self.skips.live(position), run_end) for _, position, _ in self.steps[1:]]
        for (_, position, rows), end in zip(self.steps, [*ends, run_end], strict=True):
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
        """(rows, epochs) of each source in some spans of positions."""
        rows, epochs = [0] * len(self.sources), [0.0] * len(self.sources)
        for start, stop in spans:
            counts = zip(self.order.counts(start), self.order.counts(stop), strict=True)
            for number, (before, after) in enumerate(counts):
                rows[number] += after - before
                epochs[number] += self._epochs_given(number, after) - self._epochs_given(number, before)
        return rows, epochs

    def _epochs_given(self, source: int, rows: int) -> float:
        """Epochs of a source after `rows` of its rows. The source may have grown."""
        size = next(s for s in reversed(self.order.growth[source]) if s.first_row <= rows)
        return size.first_epoch + (rows - size.first_row) / max(size.num_rows, 1)

    def _read_once_by(self, source: int) -> int | None:
        if self.plan.weights is None or not self.order.growth[source][0].num_rows:
            return None
        position = self.order.first_epoch_ends_at(source) - 1
        if not self._is_in_the_run(position):
            return None
        return self._step(position)

    # Shares

    def _stretches(self) -> list[StretchSummary]:
        tokens_of_rows = dict(zip(self.order.names, self.mean_row_tokens, strict=True))
        found = []
        for leg in self.order.legs:
            if leg.start and not self._is_in_the_run(leg.start):
                continue
            effective = self._effective(leg)
            stretch = StretchSummary(
                from_position=leg.start,
                from_step=self._step(leg.start),
                asked=self._asked(leg),
                effective=effective,
                effective_tokens=_normalised({name: share * tokens_of_rows[name] for name, share in effective.items()}),
            )
            found.append(stretch)
        return found

    def _asked(self, leg: MixLeg) -> dict[str, float]:
        _, weights = max((s for s in self.plan.schedule if s[0] <= leg.start), key=lambda s: s[0])
        if weights is None:
            return self._effective(leg)
        return _normalised(dict(weights))

    def _effective(self, leg: MixLeg) -> dict[str, float]:
        """The share of rows of each source in a leg."""
        shares = self.order.shares
        if len(self.order.legs) > 1:
            shares = leg.mix.counts_per_cycle.tolist()
        return _normalised(dict(zip(self.order.names, shares, strict=False)))  # a source that joins later has none yet

    def _over_the_run(self, stretches: list[StretchSummary], what: str, source: str) -> float:
        """The mean of a share over all rows of the run; where it has no end, the share in the end."""
        shares: list[float] = [getattr(stretch, what).get(source, 0.0) for stretch in stretches]
        if self.end is None or len(stretches) == 1:
            return shares[-1]
        starts = [stretch.from_position for stretch in stretches]
        lengths = [stop - start for start, stop in pairwise([*starts, self.end])]
        return sum(share * length for share, length in zip(shares, lengths, strict=True)) / sum(lengths)

    # Caps

    def _caps(self) -> Iterator[CapSummary]:
        plan = self.plan
        if plan.weights is None:
            return
        caps: dict[str, int] = {}
        if plan.exhausted != "repeat":
            caps = dict.fromkeys(plan.weights, 1)
        for max_epochs in (plan.max_epochs, *(amendment.max_epochs for amendment in plan.amendments)):
            caps |= dict(max_epochs)
        bound = {binding.source: binding.position for binding in self.order.bindings}
        limit = self.order.epochs.limit
        for source in self.order.names:
            position = bound.get(source, NEVER)
            ends_the_stream = position == limit and (self.end is None or self.end >= limit)
            if source not in caps:
                continue
            if position < NEVER and (ends_the_stream or self._is_in_the_run(position)):
                yield CapSummary(source, caps[source], position, self._step(position), ends_the_stream)
            else:
                yield CapSummary(source, caps[source])

    # Places

    def _is_in_the_run(self, position: int) -> bool:
        return position < (NEVER if self.end is None else self.end)

    def _step(self, position: int) -> int | None:
        if not self.steps:
            return None
        return step_of_position(self.steps, position, **self.plan.epoch_spec)


def _fill(plan: Plan, source: PlanSource) -> float | None:
    if not dict(source.rows).get("packing"):
        return None
    return source.num_tokens / (source.num_rows * (source.row_tokens or plan.row_tokens))


def _documents(source: PlanSource, stream: TokenStream | None) -> DocumentsSummary | None:
    if not source.rows or stream is None:
        return None
    rows = open_samples(stream, spec_of_entry(source.rows), source.name)
    counts = dict(rows.index.counts)
    num_documents, num_cut = counts.pop("documents"), counts.pop("cut", 0)
    return DocumentsSummary(num_documents, counts, num_cut, _learned_share(rows))


def _learned_share(rows: SampleRows) -> float | None:
    if rows.trained is None:
        return None
    index = rows.index
    begin = index.start - rows.borders[index.document]
    learned = rows.trained.count(index.document, begin + 1, begin + index.length)  # nothing predicts the first token
    return int(learned.sum()) / max(rows.num_tokens, 1)


def _batches(cut: Any, live: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(first, last + 1, steps) of the live rows that whole steps read from a row to an end, epoch after epoch."""
    rows = cut.rows_per_step
    if cut.is_linear:
        steps = max(end - live, 0) // rows
        yield live, live + steps * rows, steps
        return
    has_short_steps = cut.epoch_end in ("short", "pad")
    while live < end:
        _, _, stop = cut.epochs.span(live)
        if stop is None or stop > end:
            stop = end
        steps, left = divmod(stop - live, rows)
        steps += has_short_steps and left > 0
        yield live, min(stop, live + steps * rows), steps
        live = stop


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items() if weight}
