"""The generators' side of a log: jobs are leased, renewed, given back and answered.

A lease ends by an answer, by time, or with its process. A group is on disk before the event that names it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from batchwright.base.errors import SampleError, SpecError
from batchwright.rollouts.log import ledger as rules
from batchwright.rollouts.log.folder import LogFolder
from batchwright.rollouts.log.groups import StoredGroup, columns_of, decode_group, encode_group
from batchwright.rollouts.log.ledger import Add, Begin, Drop, GiveBack, Late, Lease, Ledger, Renew
from batchwright.rollouts.log.shared_ledger import SharedLedger
from batchwright.rollouts.log.stream import Prompts, rows_of

log: logging.Logger = logging.getLogger("batchwright")


@dataclass(frozen=True, slots=True)
class PromptJob:
    """A leased prompt: `group_size` responses to it are wanted."""

    ordinal: int
    """Number of the prompt in the run, epoch after epoch."""
    prompt: Any
    """Text, token ids, or messages."""
    attempt: int
    """The number of times it was issued, from 1."""
    epoch: int
    row: int
    """Row of the source."""
    fields: dict[str, Any] = field(repr=False)
    """The whole row, for a reward function."""
    log_id: str = field(repr=False)


@dataclass(slots=True, kw_only=True)
class Jobs:
    """The jobs of one `RolloutLog`. Settings are those of its constructor."""

    shared: SharedLedger
    begin: Begin
    lease_seconds: float
    max_attempts: int
    on_stuck: str
    ahead: int | None
    open: dict[tuple[int, int], PromptJob] = field(default_factory=dict)
    """By (ordinal, attempt): jobs of this object that were neither answered nor given back."""
    first_group: tuple[Add, frozenset[str]] | None = None
    """The first group that counts, and its columns: all groups must have them."""

    def issue(self, ledger: Ledger, wanted: int, prompts: Prompts) -> list[PromptJob]:
        """Lease up to `wanted` prompts. Only inside `shared.reading`."""
        dead = self.shared.folder.dead({lease.writer for lease in ledger.in_flight.values()})
        again, num_fresh = rules.to_issue(ledger, wanted, ahead=self.ahead)
        if not again and not num_fresh and not any(rules.expired(ledger, time.time(), dead)):
            return []  # without the lock, so that waiting processes do not disturb working ones
        writer = self.shared.writer()
        with self.shared.writing() as ledger:
            now = time.time()
            died, overdue = rules.expired(ledger, now, dead)
            if self._drop_stuck(ledger, wanted, (*died, *overdue), writer):
                died, overdue = rules.expired(ledger, now, dead)
            again, num_fresh = rules.to_issue(ledger, wanted, ended=(*died, *overdue), ahead=self.ahead)
            if not again and not num_fresh:
                return []
            first = ledger.cursor
            self.shared.write(Lease(now, writer, self.lease_seconds, died, overdue, again, first, num_fresh))
        ordinals = [*again, *range(first, first + num_fresh)]
        log_id = self.shared.folder.id.hex()
        jobs = []
        for ordinal, epoch, row in zip(ordinals, *rows_of(ordinals, self.begin), strict=True):
            attempt, fields = ledger.in_flight[ordinal].attempt, prompts.row(row)
            jobs.append(PromptJob(ordinal, fields[prompts.column], attempt, epoch, row, fields, log_id))
        self.open.update(((job.ordinal, job.attempt), job) for job in jobs)
        return jobs

    def _drop_stuck(self, ledger: Ledger, wanted: int, ended: Sequence[int], writer: str) -> bool:
        """Raise for prompts that were issued too often without an answer, or drop them. Returns whether any was."""
        again, _ = rules.to_issue(ledger, wanted, ended=ended, ahead=0)
        stuck = [ordinal for ordinal in again if rules.failed_attempts(ledger, ordinal) >= self.max_attempts]
        if not stuck:
            return False
        if self.on_stuck == "raise":
            first = stuck[0]
            raise SampleError(
                f"a group that never completes: its prompt was issued {ledger.issued[first]} times",
                ordinal=first,
                row=rows_of([first], self.begin)[1][0],
                attempts=ledger.issued[first],
                others=len(stuck) - 1 or None,
                remedy=f"log.drop({first}, reason=...) to leave it out, max_attempts={self.max_attempts * 2} to try "
                "again, or on_stuck='drop'",
            )
        reason = f"issued {self.max_attempts} times without an answer"
        log.warning("%s: dropped %d prompts, each %s: %s", self.shared.folder.path, len(stuck), reason, stuck[:10])
        self.shared.write(Drop(time.time(), writer, stuck, reason))
        return True

    def renew(self, jobs: list[PromptJob] | None) -> list[PromptJob]:
        """Renew the leases of jobs, or of all open ones, when a quarter has passed. Returns those still leased."""
        with self.shared.reading() as ledger:
            if jobs is None:
                jobs = list(self.open.values())
            now, mine = time.time(), self._still_leased(ledger, jobs)
            if any(now - ledger.in_flight[job.ordinal].renewed >= self.lease_seconds / 4 for job in mine):
                with self.shared.writing() as ledger:
                    mine = self._still_leased(ledger, jobs)
                    if mine:
                        ordinals = sorted({job.ordinal for job in mine})
                        self.shared.write(Renew(now, self.shared.writer(), self.lease_seconds, ordinals))
            still_leased = {(job.ordinal, job.attempt) for job in mine}
            for job in jobs:
                if (job.ordinal, job.attempt) not in still_leased:
                    self.forget(job)
            return mine

    def _still_leased(self, ledger: Ledger, jobs: list[PromptJob]) -> list[PromptJob]:
        found = []
        for job in jobs:
            lease = ledger.in_flight.get(job.ordinal)
            if lease is not None and (lease.attempt, lease.writer) == (job.attempt, self.shared.folder.writer):
                found.append(job)
        return found

    def answer(self, job: PromptJob, group: StoredGroup) -> bool:
        """Add a group to the log. Returns whether it counts: the first answer to a prompt does."""
        shared, payload = self.shared, encode_group(group, job.ordinal)
        with shared.reading() as ledger:
            writer = shared.writer()
            counts = rules.accepts(ledger, job.ordinal, job.attempt)
            if counts:
                self._check_columns(ledger, group, job.ordinal)
        if counts:  # before the event that names it, and outside of the lock, so that others can work meanwhile
            place = shared.folder.write_group(payload)
        with shared.writing() as ledger:
            counts = rules.accepts(ledger, job.ordinal, job.attempt)
            now, version = time.time(), group.policy_version
            if counts:
                self._check_columns(ledger, group, job.ordinal)  # another may have been the first, meanwhile
                shared.write(Add(now, writer, job.ordinal, job.attempt, version, *place))
            else:
                shared.write(Late(now, writer, job.ordinal, job.attempt, version))
        shared.folder.sync()
        self.forget(job)
        return counts

    def _check_columns(self, ledger: Ledger, group: StoredGroup, ordinal: int) -> None:
        first = next(iter(ledger.taken or ledger.waiting.values()), None)
        if first is None:
            return
        if self.first_group is None or self.first_group[0] != first:
            self.first_group = first, columns_of(read_answer(self.shared.folder, first, self.begin.group_size))
        mine, theirs = columns_of(group), self.first_group[1]
        for column in sorted(mine ^ theirs):
            has, lacks = ("this group", "the first one") if column in mine else ("the first group", "this one")
            what = f"{has} of the log has {column.replace('_', ' ')}, and {lacks} has none"
            remedy = f"{column} in all groups of a log, or in none: rows of a batch have the same columns"
            raise SampleError(what, ordinal=ordinal, column=column, first=f"prompt {first.ordinal}", remedy=remedy)

    def give_back(self, job: PromptJob, reason: str) -> None:
        with self.shared.writing() as ledger:
            lease = ledger.in_flight.get(job.ordinal)
            if lease is not None and lease.attempt == job.attempt:
                self.shared.write(GiveBack(time.time(), self.shared.writer(), job.ordinal, job.attempt, _text(reason)))
        self.forget(job)

    def drop(self, ordinal: int, reason: str) -> None:
        with self.shared.writing() as ledger:
            if ordinal in ledger.dropped:
                return
            if ordinal not in ledger.issued:
                remedy = "the ordinal of a prompt that is in flight, to be issued again, or waiting"
                what = f"prompt {ordinal:,} was never issued, or was used, and cannot be dropped"
                raise SpecError(what, parameter="ordinal", remedy=remedy)
            self.shared.write(Drop(time.time(), self.shared.writer(), [ordinal], _text(reason)))
        self.shared.folder.sync()

    def forget(self, job: PromptJob) -> None:
        """Remove a finished job. A later attempt at the same prompt stays open."""
        self.open.pop((job.ordinal, job.attempt), None)


def read_answer(folder: LogFolder, answer: Add, group_size: int) -> StoredGroup:
    where = {"folder": folder.path, "writer": answer.writer, "ordinal": answer.ordinal}
    return decode_group(folder.read_group(answer), group_size, **where)


def _text(reason: Any) -> str:
    """A reason in a form that can be written, because an error's message may hold any characters."""
    return str(reason).encode("utf-8", "backslashreplace").decode("utf-8")
