"""`RolloutLog`: prompts leased to generators, their answers, and what the trainer took, in a folder that many share.

Every change is one record in a journal, written under a lock after reading the records of others. All processes see
the same events in the same order, and compute from them where every prompt is (`ledger.py`). There is no other state:
what is in the journal happened, and nothing else did.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.base.checks import at_least, local_path, one_of, whole_number
from batchwright.base.errors import BusyError, PlanError, RowIndexError, SampleError, SpecError, StoreError
from batchwright.base.journal import Record
from batchwright.rollouts.log import ledger as rules
from batchwright.rollouts.log.folder import LogFolder, Place
from batchwright.rollouts.log.groups import Content, Group, checked_content, columns_of, decode_content, encode_content
from batchwright.rollouts.log.ledger import Add, Begin, Contradiction, Drop, Event, GiveBack, Late, Lease, Ledger, Renew
from batchwright.rollouts.log.prompts import Job, Prompts, read_prompts, rows_of
from batchwright.rollouts.log.uses import Uses
from batchwright.typing import Data

__all__ = ["RolloutLog"]

log: logging.Logger = logging.getLogger("batchwright")


class RolloutLog:
    """Prompts and their rollouts in a folder, in which nothing is lost and nothing is used twice.

    >>> log = RolloutLog("run/rollouts", prompts="prompts.jsonl", group_size=8, seed=0)     # doctest: +SKIP
    >>> for job in log.next_prompts(64):                                                    # doctest: +SKIP
    ...     responses, rewards = generate(job.prompt)
    ...     log.add(job, responses=responses, rewards=rewards, policy_version=12)

    Generators, trainers and their ranks have one folder open at once; each may be killed at any moment. What `add` and
    `take` returned from survives that, and a power cut too. Safe to use from several threads; not in a forked child.

    Without `prompts=`, a log that is there is opened as it is: enough for a trainer. What fixes the stream of prompts
    (`prompts`, `group_size`, `seed`, `shuffle`, `epochs`, `samples_per_insert`, `round_groups`) is kept in the log;
    giving another is a PlanError. The other settings are those of this process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        prompts: Data | None = None,
        *,
        group_size: int | None = None,
        seed: int | None = None,
        shuffle: bool | None = None,
        epochs: int | EllipsisType | None = ...,
        samples_per_insert: int | None = None,
        round_groups: int | None = None,
        prompt_column: str = "prompt",
        format: str | None = None,
        lease_seconds: float = 600.0,
        max_attempts: int = 5,
        on_stuck: str = "raise",
        ahead: int | None = None,
        stale: str = "reissue",
        vocab_size: int | None = None,
        read_only: bool = False,
    ) -> None:
        """`path` is the log's folder. What fixes the stream, of a new log:

        `prompts`, any source (of a `format`), of which `prompt_column` is asked; `group_size` responses to each; `seed`
        and `shuffle` for their order; `epochs` over them (1; None never ends); `samples_per_insert`, how often the
        trainer uses each group, in passes over rounds of `round_groups`.

        What this process does:

        `lease_seconds` until a prompt that it leased is issued again, without a heartbeat; `max_attempts` to answer a
        prompt, and `on_stuck` ("raise" or "drop") what happens then; `ahead`, groups that may be asked for and not
        taken; `stale` ("reissue" or "drop"), what becomes of groups that are too old; `vocab_size`, which ids must be
        below; `read_only` for looking.
        """
        asked = _asked(group_size, seed, shuffle, epochs, samples_per_insert, round_groups)
        self.lease_seconds: float = _seconds(lease_seconds=lease_seconds)
        self.max_attempts: int = at_least(1, max_attempts=max_attempts)
        self.on_stuck: str = one_of(("raise", "drop"), on_stuck=on_stuck)
        self.ahead: int | None = None if ahead is None else at_least(1, ahead=ahead)
        self.stale: str = one_of(("reissue", "drop"), stale=stale)
        self.vocab_size: int | None = None if vocab_size is None else at_least(1, vocab_size=vocab_size)
        self.read_only: bool = bool(read_only)
        self.path: Path = local_path(path=path)
        self._prompts: Prompts | None = None
        if prompts is not None:
            self._prompts = read_prompts(prompts, prompt_column, format, self.vocab_size)
        self._process = os.getpid()
        self._is_closed = False
        self._lock = threading.RLock()
        self._held: dict[int, Job] = {}
        """Jobs of this object that were neither answered nor given back."""
        self._first_columns: tuple[Add | None, frozenset[str]] = (None, frozenset())
        """The first group that counts, as far as it was looked at, and what it has."""
        self._folder = LogFolder(self.path)
        self._ledger = Ledger()
        self._said_lower = False
        self._is_torn = False
        """Whether something went wrong between an event that happened here and its record: then all are read again."""
        try:
            self._open(asked)
        except BaseException:
            self._folder.close()
            raise

    # Opening

    def _open(self, asked: dict[str, Any]) -> None:
        if not self._folder.has_events():
            if self._prompts is None or self.read_only:
                raise StoreError(
                    "there is no rollout log here",
                    folder=self.path,
                    remedy="look for a mistake in the path; prompts= and group_size= make a new one",
                )
            self._begin(asked)
        with self._locked_thread():
            self._refresh()
            assert self._ledger.begin is not None
            self._of = self._ledger.begin
            _check_same(self._of, asked, self._prompts, self.path)
        self._uses = Uses(self._of.samples_per_insert, self._of.round_groups or 1, self._of.seed)

    def _begin(self, asked: dict[str, Any]) -> None:
        assert self._prompts is not None
        settings = {"seed": 0, "shuffle": True, "epochs": 1, "samples_per_insert": 1, "round_groups": None} | asked
        if "group_size" not in asked:
            raise SpecError(
                "a new log must know how many responses each prompt gets", parameter="group_size", remedy="group_size=8"
            )
        if settings["samples_per_insert"] > 1 and settings["round_groups"] is None:
            raise SpecError(
                "groups that are used several times are used in rounds",
                parameter="round_groups",
                remedy="round_groups=64: the trainer passes samples_per_insert times over each 64 groups",
            )
        event = Begin(prompts=self._prompts.fingerprint, num_prompts=len(self._prompts), **settings)
        with self._folder.locked():
            self._folder.create()
            if not self._folder.catch_up():  # nobody else was faster
                self._folder.write(rules.encode(event))
                self._folder.sync()
        self._folder.rewind()

    def close(self) -> None:
        """Let go of the folder. Leases of this object end at once."""
        if self._process != os.getpid():
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                with contextlib.suppress(OSError, StoreError):
                    self._folder.sync()
                self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Opened again where it is unpickled: without the prompts."""
        names = ("lease_seconds", "max_attempts", "on_stuck", "ahead", "stale", "vocab_size", "read_only")
        return _reopened, (str(self.path), {name: getattr(self, name) for name in names})

    # Events: read, decide, write

    @contextlib.contextmanager
    def _locked_thread(self) -> Iterator[None]:
        """One thread of this process at a time; and never in a child of it, or after `close`."""
        if self._process != os.getpid():
            raise BusyError(
                "this log can be used by the process that opened it, not by a child of it",
                folder=self.path,
                process=f"pid {self._process}",
                remedy="open it in the child: RolloutLog(path, ...)",
            )
        with self._lock:
            if self._is_closed:
                raise StoreError("this log was closed", folder=self.path, remedy="open it again: RolloutLog(path, ...)")
            yield

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the lock of all processes; the ledger has what all of them wrote."""
        with self._folder.locked():
            self._mend()
            self._apply(self._folder.catch_up())
            yield

    def _writer(self) -> str:
        """This process's name in the ledger."""
        if self.read_only:
            raise SpecError(
                "this log is open to read only", parameter="read_only", remedy="open it without read_only=True"
            )
        return self._folder.begin_writing()

    def _write(self, event: Event) -> None:
        """Let an event happen, and write it down. Inside `_writing`.

        First it happens here: one that contradicts those before it is never written. Where it could not be written, the
        ledger is read again.
        """
        self._is_torn = True
        self._ledger.apply(event)
        self._folder.applied(self._folder.write(rules.encode(event)))
        self._is_torn = False

    def _refresh(self) -> None:
        self._mend()
        try:
            self._apply(self._folder.new_events())
        except FileNotFoundError:
            raise StoreError(
                "the journal of this log is gone",
                file=self._folder.ledger_path,
                remedy="restore the folder from a copy",
            ) from None

    def _mend(self) -> None:
        if self._is_torn:
            self._ledger, self._is_torn = Ledger(), False
            self._folder.rewind()

    def _apply(self, records: Iterable[Record]) -> None:
        self._is_torn = True
        for record in records:
            try:
                self._ledger.apply(rules.decode(record.payload))
            except Contradiction as error:
                raise StoreError(
                    "this log is damaged",
                    file=self._folder.ledger_path,
                    record=record.number,
                    reason=str(error),
                    remedy="restore the folder from a copy",
                ) from None
            self._folder.applied(record)
        self._is_torn = False

    # Generators

    def next_prompts(self, num_prompts: int, timeout: float = 0.0) -> list[Job]:
        """Lease up to `num_prompts` prompts: first those that must be issued again, lowest ordinal first; then fresh
        ones.

        Waits until there is one, `timeout` seconds at most. [] means that there is none now: `is_over` says whether
        there may be one later.
        """
        wanted = at_least(1, num_prompts=num_prompts)
        if wanted > rules.MOST_AT_ONCE:
            raise SpecError(
                f"num_prompts={wanted:,} at once", parameter="num_prompts", remedy=f"at most {rules.MOST_AT_ONCE:,}"
            )
        if self._prompts is None:
            raise SpecError(
                "this log was opened without its prompts",
                parameter="prompts",
                remedy="RolloutLog(path, prompts=...), with those that it was made with",
            )
        for _ in _looks(_seconds(timeout=timeout, smallest=0.0)):
            with self._locked_thread():
                jobs = self._lease(wanted)
                if jobs or rules.is_over(self._ledger):
                    return jobs
        return []

    def _lease(self, wanted: int) -> list[Job]:
        self._refresh()
        dead = self._folder.dead({held.writer for held in self._ledger.in_flight.values()})
        again, num_fresh = rules.to_issue(self._ledger, wanted, ahead=self.ahead)
        if not again and not num_fresh and not any(rules.expired(self._ledger, time.time(), dead)):
            return []  # found out without the lock: those that wait do not disturb those that work
        writer = self._writer()
        with self._writing():
            now = time.time()
            died, overdue = rules.expired(self._ledger, now, dead)
            if self._drop_stuck(wanted, (*died, *overdue), writer):
                died, overdue = rules.expired(self._ledger, now, dead)
            again, num_fresh = rules.to_issue(self._ledger, wanted, ended=(*died, *overdue), ahead=self.ahead)
            if not again and not num_fresh:
                return []
            first = self._ledger.cursor
            self._write(Lease(now, writer, self.lease_seconds, died, overdue, again, first, num_fresh))
        jobs = self._jobs([*again, *range(first, first + num_fresh)])
        self._held.update((job.ordinal, job) for job in jobs)
        return jobs

    def _drop_stuck(self, wanted: int, ended: Sequence[int], writer: str) -> bool:
        """Prompts that were issued too often without an answer: an error, or dropped. Whether any was."""
        again, _ = rules.to_issue(self._ledger, wanted, ended=ended, ahead=0)
        stuck = [each for each in again if rules.failed_attempts(self._ledger, each) >= self.max_attempts]
        if not stuck:
            return False
        if self.on_stuck == "raise":
            first = stuck[0]
            raise SampleError(
                f"a group that never completes: its prompt was issued {self._ledger.issued[first]} times",
                ordinal=first,
                row=self._row(first)[1],
                attempts=self._ledger.issued[first],
                others=len(stuck) - 1 or None,
                remedy=f"log.drop({first}, reason=...) to leave it out, max_attempts={self.max_attempts * 2} to try "
                "again, or on_stuck='drop'",
            )
        reason = f"issued {self.max_attempts} times without an answer"
        log.warning("%s: dropped %d prompts, each %s: %s", self.path, len(stuck), reason, stuck[:10])
        self._write(Drop(time.time(), writer, stuck, reason))
        return True

    def _jobs(self, ordinals: list[int]) -> list[Job]:
        assert self._prompts is not None
        jobs = []
        for ordinal, epoch, row in zip(ordinals, *self._rows(ordinals), strict=True):
            fields = self._prompts.row(row)
            attempt = self._ledger.in_flight[ordinal].attempt
            prompt = fields[self._prompts.column]
            jobs.append(Job(ordinal, prompt, attempt, epoch, row, fields, self._folder.id.hex()))
        return jobs

    def _rows(self, ordinals: list[int]) -> tuple[list[int], list[int]]:
        return rows_of(ordinals, num_prompts=self._of.num_prompts, seed=self._of.seed, shuffle=self._of.shuffle)

    def _row(self, ordinal: int) -> tuple[int, int]:
        (epoch,), (row,) = self._rows([ordinal])
        return epoch, row

    def add(
        self,
        job: Job,
        responses: Sequence[Any],
        rewards: Sequence[Any],
        *,
        policy_version: int | None = None,
        old_log_probs: Sequence[Any] | None = None,
        ref_log_probs: Sequence[Any] | None = None,
        values: Sequence[Any] | None = None,
        response_mask: Sequence[Any] | None = None,
    ) -> bool:
        """The whole group that answers a job: its `responses` and their `rewards`. True: it counts, and is on disk.

        `policy_version` made the group. `old_log_probs`, `ref_log_probs`, `values` and `response_mask` have a number
        for each token of each response.

        False where the prompt was answered meanwhile: the first answer counts, and this one is only counted as late.
        """
        self._check_job(job)
        # As it was issued: an engine may have gone on writing into the messages that it was given.
        asked = job.fields | {"prompt": job.prompt}
        if self._prompts is not None:
            asked = self._prompts.row(job.row)
            asked["prompt"] = asked[self._prompts.column]
        content = checked_content(
            asked["prompt"],
            responses,
            rewards,
            group_size=self._of.group_size,
            ordinal=job.ordinal,
            vocab_size=self.vocab_size,
            policy_version=policy_version,
            response_mask=response_mask,
            tools=asked.get("tools"),
            old_log_probs=old_log_probs,
            ref_log_probs=ref_log_probs,
            values=values,
        )
        payload = encode_content(content, job.ordinal)
        with self._locked_thread():
            writer = self._writer()
            self._refresh()
            counts = rules.accepts(self._ledger, job.ordinal, job.attempt)
            if counts:
                self._check_columns(content, job.ordinal)
        if counts:
            # Before the event that names it, and outside of the lock: others go on while the disk works.
            place = self._folder.write_group(payload)
        with self._locked_thread():
            with self._writing():
                counts = rules.accepts(self._ledger, job.ordinal, job.attempt)
                now, version = time.time(), content.policy_version
                if counts:
                    self._check_columns(content, job.ordinal)  # another may have been the first, meanwhile
                    self._write(Add(now, writer, job.ordinal, job.attempt, version, *place))
                else:
                    self._write(Late(now, writer, job.ordinal, job.attempt, version))
            self._forget(job)
        self._folder.sync()
        return counts

    def _check_columns(self, content: Content, ordinal: int) -> None:
        """All groups of a log have what its first one has: a trainer could not put others into a batch with it."""
        waiting = iter(self._ledger.waiting.values())
        first = self._ledger.taken[0] if self._ledger.taken else next(waiting, None)
        if first is None:
            return
        if self._first_columns[0] != first:
            try:
                self._first_columns = (first, columns_of(self._group(first, 0, 0)))
            except StoreError:  # whoever reads it will be told
                return
        mine, theirs = columns_of(content), self._first_columns[1]
        for column in sorted(mine ^ theirs):
            has, lacks = ("this group", "the first one") if column in mine else ("the first group", "this one")
            raise SampleError(
                f"{has} of the log has {column.replace('_', ' ')}, and {lacks} has none",
                ordinal=ordinal,
                column=column,
                first=f"prompt {first.ordinal}",
                remedy=f"{column} in all groups of a log, or in none: rows of a batch have the same columns",
            )

    def heartbeat(self, jobs: Iterable[Job] | None = None) -> list[Job]:
        """Renew leases: of these jobs, or of all that this object has. Returns those that are still wanted.

        Cheap to call often: it is written down when a quarter of a lease has passed.
        """
        if jobs is not None:
            jobs = list(jobs)
            for job in jobs:
                self._check_job(job)
        with self._locked_thread():
            jobs = list(self._held.values()) if jobs is None else jobs
            self._refresh()
            now = time.time()
            if any(
                now - self._ledger.in_flight[job.ordinal].renewed >= self.lease_seconds / 4 for job in self._mine(jobs)
            ):
                with self._writing():
                    ordinals = sorted({job.ordinal for job in self._mine(jobs)})
                    if ordinals and self._folder.writer is not None:
                        self._write(Renew(now, self._folder.writer, self.lease_seconds, ordinals))
            wanted = self._mine(jobs)
            still = {job.ordinal for job in wanted}
            for job in jobs:
                if job.ordinal not in still:
                    self._forget(job)
            return wanted

    def _mine(self, jobs: list[Job]) -> list[Job]:
        """Those that this object still has a lease of."""
        found = []
        for job in jobs:
            held = self._ledger.in_flight.get(job.ordinal)
            if held is not None and (held.attempt, held.writer) == (job.attempt, self._folder.writer):
                found.append(job)
        return found

    def give_back(self, job: Job, reason: str = "") -> None:
        """End the lease of `job` now, on record with a `reason`: the prompt is issued again. Nothing happens where it
        ended already."""
        self._check_job(job)
        with self._locked_thread():
            writer = self._writer()
            with self._writing():
                held = self._ledger.in_flight.get(job.ordinal)
                if held is not None and held.attempt == job.attempt:
                    self._write(GiveBack(time.time(), writer, job.ordinal, job.attempt, _text(reason)))
            self._forget(job)

    def drop(self, ordinal: int, reason: str = "") -> None:
        """Leave the prompt `ordinal` out, on record with a `reason`: it is not issued again, and an answer that waits
        is not used."""
        number = whole_number(ordinal=ordinal)
        with self._locked_thread():
            writer = self._writer()
            with self._writing():
                ledger = self._ledger
                if number in ledger.dropped:
                    return
                if number not in ledger.issued:
                    what = "was used" if 0 <= number < ledger.cursor else "was never issued"
                    raise SpecError(
                        f"prompt {number:,} {what}, and cannot be dropped",
                        parameter="ordinal",
                        remedy="the ordinal of a prompt that is in flight, to be issued again, or waiting",
                    )
                self._write(Drop(time.time(), writer, [number], _text(reason)))
            self._held.pop(number, None)
            self._folder.sync()

    def _check_job(self, job: Any) -> None:
        if not isinstance(job, Job) or job.log_id != self._folder.id.hex():
            what = "a job of another log" if isinstance(job, Job) else f"a {type(job).__name__}, and no job"
            raise SpecError(f"this is {what}", parameter="job", remedy="a job that next_prompts of this log gave")

    def _forget(self, job: Job) -> None:
        held = self._held.get(job.ordinal)
        if held is not None and held.attempt == job.attempt:
            del self._held[job.ordinal]

    # Trainers

    def take(
        self,
        num_groups: int,
        *,
        policy_version: int | None = None,
        max_staleness: int | None = None,
        timeout: float = 0.0,
    ) -> int:
        """Decide which groups are used, in the order of the journal, until `num_groups` are in all; say how many are.

        Fewer, where they are not answered yet after `timeout` seconds; more, where more were decided before. Whoever
        asks first decides; all who ask later get the decisions that are on record. A group whose policy version is
        lower than `policy_version - max_staleness` is stale: not used, and its prompt issued again or dropped.
        """
        wanted = at_least(0, num_groups=num_groups)
        version = None if policy_version is None else at_least(0, policy_version=policy_version)
        staleness = None if max_staleness is None else at_least(0, max_staleness=max_staleness)
        if staleness is not None and version is None:
            raise SpecError(
                "groups cannot be too old without a version to compare with",
                parameter="policy_version",
                remedy="policy_version=, the trainer's; or max_staleness=None",
            )
        for _ in _looks(_seconds(timeout=timeout, smallest=0.0)):
            with self._locked_thread():
                self._refresh()
                if len(self._ledger.taken) < wanted and not self.read_only:
                    self._decide(wanted, version, staleness)
                num_taken = len(self._ledger.taken)
                if num_taken >= wanted or rules.is_over(self._ledger):
                    break
        return num_taken

    def _decide(self, wanted: int, version: int | None, staleness: int | None) -> None:
        before = self._ledger.decided_version
        if version is not None and before is not None and version < before and not self._said_lower:
            self._said_lower = True  # legal: restored weights are older. But it may be a trainer that lost count
            log.warning("%s: policy_version=%d, and groups were decided on at %d before", self.path, version, before)
        if not self._ledger.waiting:
            return
        writer = self._folder.writer or ""
        with self._writing():
            event = rules.decide(
                self._ledger,
                wanted,
                policy_version=version,
                max_staleness=staleness,
                reissue=self.stale == "reissue",
                at=time.time(),
                writer=writer,
            )
            if event is not None:
                self._write(event)
        self._folder.sync()

    @property
    def num_taken(self) -> int:
        """Groups that were decided to be used."""
        self.refresh()
        return len(self._ledger.taken)

    def groups(self, first: int, last: int) -> list[Group]:
        """Groups [first, last) of those that were taken."""
        with self._locked_thread():
            if last > len(self._ledger.taken):
                self._refresh()
            num_taken = len(self._ledger.taken)
            if not 0 <= first <= last <= num_taken:
                raise RowIndexError(
                    f"groups {first:,} to {last:,} of {num_taken:,} that were taken",
                    folder=self.path,
                    remedy="log.take(last) first, and see how many it says",
                )
            answers = self._ledger.taken[first:last]
        epochs, rows = self._rows([answer.ordinal for answer in answers])
        return [self._group(*each) for each in zip(answers, epochs, rows, strict=True)]

    def _group(self, answer: Add, epoch: int, row: int) -> Group:
        place = Place(answer.offset, answer.num_bytes, answer.checksum)
        payload = self._folder.read_group(answer.writer, place)
        content = decode_content(
            payload, self._of.group_size, folder=self.path, writer=answer.writer, ordinal=answer.ordinal
        )
        return Group(
            answer.ordinal,
            answer.attempt,
            epoch,
            row,
            content.prompt,
            content.responses,
            content.rewards,
            answer.policy_version,
            content.old_log_probs,
            content.ref_log_probs,
            content.values,
            content.response_mask,
            content.tools,
        )

    def uses(self, first: int, last: int) -> NDArray[np.int64]:
        """Which taken group each of the uses [first, last) is of: each is used `samples_per_insert` times."""
        with self._locked_thread():
            self._refresh()
            num_uses = self._num_uses
            if not 0 <= first <= last <= num_uses:
                raise RowIndexError(
                    f"uses {first:,} to {last:,} of {num_uses:,} that are known",
                    folder=self.path,
                    remedy="log.take_uses(last) first, and see how many it says",
                )
            return self._uses.at(np.arange(first, last), self._last_group)

    def groups_at(self, uses: ArrayLike) -> list[Group]:
        """The groups of some uses, by their numbers. Each is read once."""
        numbers = np.asarray(uses, np.int64)
        if not numbers.size:
            return []
        known = self.uses(int(numbers.min()), int(numbers.max()) + 1)
        wanted = known[numbers - numbers.min()].tolist()
        if wanted == list(range(wanted[0], wanted[-1] + 1)):
            return self.groups(wanted[0], wanted[-1] + 1)
        found = {number: self.groups(number, number + 1)[0] for number in dict.fromkeys(wanted)}
        return [found[number] for number in wanted]

    def take_uses(
        self,
        last_use: int,
        *,
        policy_version: int | None = None,
        max_staleness: int | None = None,
        timeout: float = 0.0,
    ) -> int:
        """`take` as many groups as uses [0, last_use) are of. Returns how many uses are known then.

        `policy_version`, `max_staleness` and `timeout` are those of `take`.
        """
        needed = self.groups_needed(last_use)
        self.take(needed, policy_version=policy_version, max_staleness=max_staleness, timeout=timeout)
        return self._num_uses

    def groups_needed(self, last_use: int) -> int:
        """How many groups must be taken, so that uses [0, last_use) are known."""
        with self._locked_thread():
            self._refresh()
            return self._uses.groups_needed(at_least(0, last_use=last_use), self._last_group)

    @property
    def num_uses(self) -> int:
        """Uses that are known: of groups that were taken."""
        self.refresh()
        return self._num_uses

    @property
    def _num_uses(self) -> int:
        with self._locked_thread():
            return self._uses.known(len(self._ledger.taken), rules.is_over(self._ledger))

    @property
    def _last_group(self) -> int | None:
        """How many groups there will ever be, once that is known."""
        return len(self._ledger.taken) if rules.is_over(self._ledger) else None

    # What is there

    @property
    def is_over(self) -> bool:
        """Whether there will never be another group: every prompt of every epoch was used or dropped."""
        self.refresh()
        return rules.is_over(self._ledger)

    @property
    def group_size(self) -> int:
        return self._of.group_size

    @property
    def num_prompts(self) -> int:
        """Of one epoch."""
        return self._of.num_prompts

    @property
    def epochs(self) -> int | None:
        return self._of.epochs

    @property
    def seed(self) -> int:
        return self._of.seed

    @property
    def samples_per_insert(self) -> int:
        return self._of.samples_per_insert

    @property
    def round_groups(self) -> int | None:
        return self._of.round_groups

    @property
    def fingerprint(self) -> str:
        """The log's own name: that of its journal. Another log of the same prompts has another."""
        return self._folder.id.hex()

    def refresh(self) -> None:
        """Read what others wrote. Every method that needs it does so by itself."""
        with self._locked_thread():
            self._refresh()

    def state(self) -> dict[str, Any]:
        """Where the prompts are, as a small dict that can be JSON."""
        with self._locked_thread():
            self._refresh()
            ledger = self._ledger
            return {
                "cursor": ledger.cursor,
                "in_flight": sorted(ledger.in_flight),
                "again": list(ledger.again),
                "waiting": len(ledger.waiting),
                "consumed": len(ledger.taken),
                "stale": ledger.num_stale,
                "dropped": len(ledger.dropped),
                "late": ledger.num_late,
                "prompts": self._of.prompts,
                "journal": self._folder.number,
            }

    def __repr__(self) -> str:
        if self._is_closed or self._process != os.getpid():
            return f"RolloutLog({str(self.path)!r}), closed"
        of, state = self._of, self.state()
        epochs = "endless epochs" if of.epochs is None else f"{of.epochs} epoch{'s' if of.epochs > 1 else ''}"
        return (
            f"RolloutLog({str(self.path)!r}): {of.num_prompts:,} prompts, {epochs}, groups of {of.group_size}\n"
            f"  {state['cursor']:,} issued: {len(state['in_flight']):,} in flight, {len(state['again']):,} to be "
            f"issued again, {state['waiting']:,} waiting, {state['consumed']:,} taken, {state['dropped']:,} dropped"
        )


def _reopened(path: str, settings: dict[str, Any]) -> RolloutLog:
    return RolloutLog(path, **settings)


def _text(reason: Any) -> str:
    """A reason as it can be written: an error's message may hold anything."""
    return str(reason).encode("utf-8", "backslashreplace").decode("utf-8")


def _looks(timeout: float) -> Iterator[None]:
    """Once at once; then again and again, with a pause between, until the time is up."""
    begin = time.monotonic()
    yield
    while (passed := time.monotonic() - begin) < timeout:
        time.sleep(min(timeout - passed, 0.1, max(0.002, passed / 8)))
        yield


def _seconds(*, smallest: float = 1e-3, **parameter: Any) -> float:
    ((name, value),) = parameter.items()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value >= smallest:
        raise SpecError(
            f"{name} must be a number of seconds, got {value!r}", parameter=name, remedy=f"{name}={max(smallest, 60)}"
        )
    return float(value)


def _asked(
    group_size: Any, seed: Any, shuffle: Any, epochs: Any, samples_per_insert: Any, round_groups: Any
) -> dict[str, Any]:
    """Those settings of the stream that were given, checked."""
    asked: dict[str, Any] = {}
    if group_size is not None:
        asked["group_size"] = at_least(1, group_size=group_size)
    if seed is not None:
        asked["seed"] = whole_number(seed=seed)
    if shuffle is not None:
        asked["shuffle"] = bool(shuffle)
    if epochs is not ...:
        asked["epochs"] = None if epochs is None else at_least(1, epochs=epochs)
    if samples_per_insert is not None:
        asked["samples_per_insert"] = at_least(1, samples_per_insert=samples_per_insert)
    if round_groups is not None:
        asked["round_groups"] = at_least(1, round_groups=round_groups)
    return asked


def _check_same(begin: Begin, asked: dict[str, Any], prompts: Prompts | None, path: Path) -> None:
    """The log is of these prompts and settings, or a PlanError names what differs."""
    if prompts is not None and prompts.fingerprint != begin.prompts:
        raise PlanError(
            "this log is of other prompts",
            folder=path,
            prompts=f"{prompts.fingerprint[:16]} ({len(prompts):,} rows)",
            expected=f"{begin.prompts[:16]} ({begin.num_prompts:,} rows)",
            remedy="the prompts that it was made with, unchanged; or another folder for these",
        )
    for name, value in asked.items():
        kept = getattr(begin, name)
        if value != kept:
            raise PlanError(
                f"this log was made with {name}={kept}, not {value}",
                folder=path,
                parameter=name,
                remedy=f"{name}={kept}, or leave it out; or another folder",
            )
