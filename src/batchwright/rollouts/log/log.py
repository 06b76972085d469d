"""`RolloutLog`: prompts leased to generators, their answers, and the trainer's decisions, in one shared folder."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.base.checks import at_least, local_path, one_of, whole_number
from batchwright.base.errors import RowIndexError, SpecError, StoreError
from batchwright.base.words import counted
from batchwright.rollouts.log import ledger as rules
from batchwright.rollouts.log import stream
from batchwright.rollouts.log.folder import LogFolder
from batchwright.rollouts.log.groups import Group, checked_group, prompt_group
from batchwright.rollouts.log.jobs import Jobs, PromptJob, read_answer
from batchwright.rollouts.log.ledger import Ledger
from batchwright.rollouts.log.shared_ledger import SharedLedger
from batchwright.rollouts.log.stream import Rounds, rounds_of, rows_of
from batchwright.typing import Data

__all__ = ["RolloutLog"]

log: logging.Logger = logging.getLogger("batchwright")


class RolloutLog:
    """Prompts and their rollouts in a folder. Nothing is lost, and nothing is used twice.

    >>> log = RolloutLog("run/rollouts", prompts="prompts.jsonl", group_size=8, seed=0)     # doctest: +SKIP
    >>> for job in log.next_prompts(64):                                                    # doctest: +SKIP
    ...     responses, rewards = generate(job.prompt)
    ...     log.add(job, responses=responses, rewards=rewards, policy_version=12)

    Generators, trainers and their ranks open one folder at once, and each may be killed at any moment. Results of `add`
    and `take` survive that, and a power cut too. Safe to use from several threads; not in a forked child.

    Without `prompts=`, an existing log is opened, which is enough for a trainer. The settings of the stream of prompts
    (`prompts`, `group_size`, `seed`, `shuffle`, `epochs`, `samples_per_insert`, `round_groups`) are recorded in the
    log; giving another value is a PlanError. The other settings are those of this process.
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
        """`path` is the log's folder. A new log takes the settings of its stream:

        `prompts`, any source (of a `format`) with a `prompt_column`; `group_size` responses to each; `seed` and
        `shuffle` for their order; `epochs` over them (1; None never ends); `samples_per_insert`, how often the trainer
        uses each group, in passes over rounds of `round_groups`.

        Settings of this process: `lease_seconds` without a heartbeat until a prompt is issued again; `max_attempts` to
        answer a prompt, and `on_stuck` ("raise" or "drop") for what happens then; `ahead`, groups that may be asked for
        and not taken; `stale` ("reissue" or "drop") for groups that are too old; `vocab_size`, an upper limit of token
        ids; `read_only` for looking.
        """
        given = stream.given_settings(
            group_size=group_size,
            seed=seed,
            shuffle=shuffle,
            epochs=epochs,
            samples_per_insert=samples_per_insert,
            round_groups=round_groups,
        )
        self.path: Path = local_path(path=path)
        self.lease_seconds: float = _seconds(lease_seconds=lease_seconds)
        self.max_attempts: int = at_least(1, max_attempts=max_attempts)
        self.on_stuck: str = one_of(("raise", "drop"), on_stuck=on_stuck)
        self.ahead: int | None = _optional(1, ahead=ahead)
        self.stale: str = one_of(("reissue", "drop"), stale=stale)
        self.vocab_size: int | None = _optional(1, vocab_size=vocab_size)
        self.read_only: bool = bool(read_only)
        self._prompts: stream.Prompts | None = None
        if prompts is not None:
            self._prompts = stream.read_prompts(prompts, prompt_column, format, self.vocab_size)
        self._warned_of_lower_version = False
        self._open(given)

    def _open(self, given: dict[str, Any]) -> None:
        self._shared = SharedLedger(self.path, self.read_only)
        self._folder: LogFolder = self._shared.folder
        try:
            if not self._folder.has_events():
                if self._prompts is None or self.read_only:
                    what = "there is no rollout log here"
                    remedy = "look for a mistake in the path; prompts= and group_size= make a new one"
                    raise StoreError(what, folder=self.path, remedy=remedy)
                self._shared.create(stream.first_event(self._prompts, given))
            with self._shared.reading() as ledger:
                begin = self._begin = ledger.first_event
            stream.refuse_other_stream(begin, given, self._prompts, self.path)
        except BaseException:
            self._shared.close()
            raise
        self.num_prompts: int = begin.num_prompts
        """The number of prompts of one epoch."""
        self.group_size: int = begin.group_size
        self.epochs: int | None = begin.epochs
        self.seed: int = begin.seed
        self.samples_per_insert: int = begin.samples_per_insert
        self.round_groups: int | None = begin.round_groups
        self._rounds: Rounds = rounds_of(begin)
        self._jobs = Jobs(
            shared=self._shared,
            begin=begin,
            lease_seconds=self.lease_seconds,
            max_attempts=self.max_attempts,
            on_stuck=self.on_stuck,
            ahead=self.ahead,
        )

    def close(self) -> None:
        """Release the folder. Leases of this object end immediately."""
        self._shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Opened again where it is unpickled, without the prompts."""
        names = ("lease_seconds", "max_attempts", "on_stuck", "ahead", "stale", "vocab_size", "read_only")
        return partial(RolloutLog, **{name: getattr(self, name) for name in names}), (str(self.path),)

    # Generators

    def next_prompts(self, num_prompts: int, timeout: float = 0.0) -> list[PromptJob]:
        """Lease up to `num_prompts` prompts: first those to be issued again, lowest ordinal first; then fresh ones.

        Waits up to `timeout` seconds for a prompt. [] means that there is none now. `is_over` tells if there may be one
        later.
        """
        wanted = min(at_least(1, num_prompts=num_prompts), rules.MOST_AT_ONCE)
        if self._prompts is None:
            what = "this log was opened without its prompts"
            remedy = "RolloutLog(path, prompts=...), with those that it was made with"
            raise SpecError(what, parameter="prompts", remedy=remedy)
        for _ in _attempts(_seconds(timeout=timeout, smallest=0.0)):
            with self._shared.reading() as ledger:
                jobs = self._jobs.issue(ledger, wanted, self._prompts)
                if jobs or rules.is_over(self._shared.ledger):
                    return jobs
        return []

    def add(
        self,
        job: PromptJob,
        responses: Sequence[Any],
        rewards: Sequence[Any],
        *,
        policy_version: int | None = None,
        old_log_probs: Sequence[Any] | None = None,
        ref_log_probs: Sequence[Any] | None = None,
        values: Sequence[Any] | None = None,
        response_mask: Sequence[Any] | None = None,
    ) -> bool:
        """Add the whole group that answers a job: its `responses` and their `rewards`. True: it counts, and is on disk.

        `policy_version` is that of the policy that made the group. `old_log_probs`, `ref_log_probs`, `values` and
        `response_mask` have a number for each token of each response.

        False: the prompt was answered meanwhile. The first answer counts, and this one is only recorded as late.
        """
        asked = self._checked(job).fields | {"prompt": job.prompt}
        if self._prompts is not None:  # the issued prompt: an engine may have changed its copy of the messages
            asked = self._prompts.row(job.row)
            asked["prompt"] = asked[self._prompts.column]
        group = checked_group(
            asked["prompt"],
            responses,
            rewards,
            group_size=self.group_size,
            ordinal=job.ordinal,
            vocab_size=self.vocab_size,
            policy_version=policy_version,
            response_mask=response_mask,
            tools=asked.get("tools"),
            old_log_probs=old_log_probs,
            ref_log_probs=ref_log_probs,
            values=values,
        )
        return self._jobs.answer(job, group)

    def heartbeat(self, jobs: Iterable[PromptJob] | None = None) -> list[PromptJob]:
        """Renew the leases of `jobs`, or of all jobs of this object. Returns those that are still wanted.

        Cheap to call often: a renewal is written when a quarter of a lease has passed.
        """
        if jobs is not None:
            jobs = [self._checked(job) for job in jobs]
        return self._jobs.renew(jobs)

    def give_back(self, job: PromptJob, reason: str = "") -> None:
        """End the lease of `job` now, on record with a `reason`: the prompt is issued again. Nothing happens if it
        ended already."""
        self._jobs.give_back(self._checked(job), reason)

    def drop(self, ordinal: int, reason: str = "") -> None:
        """Leave the prompt `ordinal` out, on record with a `reason`: it is not issued again, and a waiting answer to it
        is not used."""
        self._jobs.drop(whole_number(ordinal=ordinal), reason)

    def _checked(self, job: Any) -> PromptJob:
        if isinstance(job, PromptJob) and job.log_id == self.fingerprint:
            return job
        what = f"this is a {type(job).__name__}, and not a job of this log"
        raise SpecError(what, parameter="job", remedy="a job that next_prompts of this log returned")

    # Trainers

    def take(
        self,
        num_groups: int,
        *,
        policy_version: int | None = None,
        max_staleness: int | None = None,
        timeout: float = 0.0,
    ) -> int:
        """Decide which groups are used, in the order of the journal, until there are `num_groups`; return their number.

        It is smaller if answers are missing after `timeout` seconds, and larger if more were decided before. The first
        caller decides, and later callers get the decisions on record. A group whose policy version is lower than
        `policy_version - max_staleness` is stale: not used, and its prompt issued again or dropped.
        """
        wanted = at_least(0, num_groups=num_groups)
        version = _optional(0, policy_version=policy_version)
        staleness = _optional(0, max_staleness=max_staleness)
        if staleness is not None and version is None:
            what = "groups cannot be too old without a version to compare with"
            remedy = "policy_version=, the trainer's; or max_staleness=None"
            raise SpecError(what, parameter="policy_version", remedy=remedy)
        for _ in _attempts(_seconds(timeout=timeout, smallest=0.0)):
            with self._shared.reading() as ledger:
                if len(ledger.taken) < wanted and not self.read_only:
                    self._decide(ledger, wanted, version, staleness)
                num_taken = len(self._shared.ledger.taken)
                if num_taken >= wanted or rules.is_over(self._shared.ledger):
                    break
        return num_taken

    def _decide(self, ledger: Ledger, wanted: int, version: int | None, staleness: int | None) -> None:
        before = ledger.decided_version
        is_lower = version is not None and before is not None and version < before
        if is_lower and not self._warned_of_lower_version:
            self._warned_of_lower_version = True  # legal: restored weights are older. Or its count is wrong
            log.warning("%s: policy_version=%d, and groups were decided on at %d before", self.path, version, before)
        if not ledger.waiting:
            return
        with self._shared.writing() as ledger:
            event = rules.decide(
                ledger,
                wanted,
                policy_version=version,
                max_staleness=staleness,
                reissue=self.stale == "reissue",
                at=time.time(),
                writer=self._folder.writer or "",
            )
            if event is not None:
                self._shared.write(event)
        self._folder.sync()

    @property
    def num_taken(self) -> int:
        """The number of groups decided to be used."""
        with self._shared.reading() as ledger:
            return len(ledger.taken)

    def groups(self, first: int, last: int) -> list[Group]:
        """Groups [first, last) of those that were taken."""
        with self._shared.reading() as ledger:
            num_taken = len(ledger.taken)
            self._check_range("groups", first, last, num_taken, "log.take(last)")
            answers = ledger.taken[first:last]
        epochs, rows = rows_of([answer.ordinal for answer in answers], self._begin)
        return [
            prompt_group(read_answer(self._folder, answer, self.group_size), answer.ordinal, answer.attempt, epoch, row)
            for answer, epoch, row in zip(answers, epochs, rows, strict=True)
        ]

    def uses(self, first: int, last: int) -> NDArray[np.int64]:
        """The number of the group of each of the uses [first, last): each is used `samples_per_insert` times."""
        with self._shared.reading() as ledger:
            num_uses = self._rounds.num_uses(len(ledger.taken), rules.is_over(ledger))
            self._check_range("uses", first, last, num_uses, "log.take_uses(last)")
            return self._rounds.group_of(np.arange(first, last), rules.last_group(ledger))

    def _check_range(self, noun: str, first: int, last: int, num_known: int, call: str) -> None:
        if not 0 <= first <= last <= num_known:
            what = f"{noun} {first:,} to {last:,} of {num_known:,} that were taken"
            raise RowIndexError(what, folder=self.path, remedy=f"{call} first, which returns the number of {noun}")

    def groups_at(self, uses: ArrayLike) -> list[Group]:
        """The groups of some uses, by their numbers. Each is read once."""
        numbers = np.asarray(uses, np.int64)
        if not numbers.size:
            return []
        group_of = self.uses(int(numbers.min()), int(numbers.max()) + 1)
        wanted = group_of[numbers - numbers.min()].tolist()
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
        """`take` the groups of uses [0, last_use). Returns the number of uses that are known then.

        `policy_version`, `max_staleness` and `timeout` are those of `take`.
        """
        needed = self.groups_needed(last_use)
        self.take(needed, policy_version=policy_version, max_staleness=max_staleness, timeout=timeout)
        return self.num_uses

    def groups_needed(self, last_use: int) -> int:
        """The number of groups that must be taken before uses [0, last_use) are known."""
        with self._shared.reading() as ledger:
            return self._rounds.groups_needed(at_least(0, last_use=last_use), rules.last_group(ledger))

    @property
    def num_uses(self) -> int:
        """The number of uses that are known: those of groups that were taken."""
        with self._shared.reading() as ledger:
            return self._rounds.num_uses(len(ledger.taken), rules.is_over(ledger))

    # State

    @property
    def is_over(self) -> bool:
        """Whether no group will follow: every prompt of every epoch was used or dropped."""
        with self._shared.reading() as ledger:
            return rules.is_over(ledger)

    @property
    def fingerprint(self) -> str:
        """The log's own name: that of its journal. Another log of the same prompts has another."""
        return self._folder.id.hex()

    def state(self) -> dict[str, Any]:
        """The places of the prompts, as a small dict that can be JSON."""
        with self._shared.reading() as ledger:
            return {
                "cursor": ledger.cursor,
                "in_flight": sorted(ledger.in_flight),
                "again": sorted(ledger.again),
                "waiting": len(ledger.waiting),
                "consumed": len(ledger.taken),
                "stale": ledger.num_stale,
                "dropped": len(ledger.dropped),
                "late": ledger.num_late,
                "prompts": self._begin.prompts,
                "journal": self._folder.number,
            }

    def __repr__(self) -> str:
        if not self._shared.is_usable:
            return f"RolloutLog({str(self.path)!r}), closed"
        state, epochs = self.state(), "endless epochs"
        if self.epochs is not None:
            epochs = counted(self.epochs, "epoch")
        return (
            f"RolloutLog({str(self.path)!r}): {self.num_prompts:,} prompts, {epochs}, groups of {self.group_size}\n"
            f"  {state['cursor']:,} issued: {len(state['in_flight']):,} in flight, {len(state['again']):,} to be "
            f"issued again, {state['waiting']:,} waiting, {state['consumed']:,} taken, {state['dropped']:,} dropped"
        )


def _attempts(timeout: float) -> Iterator[None]:
    """Yield for one attempt immediately, then for more after pauses, until the time is up."""
    begin = time.monotonic()
    yield
    while (passed := time.monotonic() - begin) < timeout:
        time.sleep(min(timeout - passed, 0.1, max(0.002, passed / 8)))
        yield


def _optional(smallest: int, **parameter: Any) -> int | None:
    """None, or a number that is `smallest` or more."""
    if None in parameter.values():
        return None
    return at_least(smallest, **parameter)


def _seconds(*, smallest: float = 1e-3, **parameter: Any) -> float:
    ((name, value),) = parameter.items()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value >= smallest:
        remedy = f"{name}={max(smallest, 60)}"
        raise SpecError(f"{name} must be a number of seconds, got {value!r}", parameter=name, remedy=remedy)
    return float(value)
