"""Answers on disk. A group is written before the event that names it, and read by that event."""

from __future__ import annotations

import time
from dataclasses import dataclass

from batchwright.base.errors import SampleError
from batchwright.rollouts.log.folder import LogFolder
from batchwright.rollouts.log.groups import StoredGroup, columns_of, decode_group, encode_group
from batchwright.rollouts.log.ledger import Add, Late, Ledger, accepts
from batchwright.rollouts.log.prompts import PromptJob
from batchwright.rollouts.log.shared_ledger import SharedLedger

__all__ = ["Answers", "read_answer"]


@dataclass(slots=True)
class Answers:
    """Writes answers. All must have the columns of the first one."""

    shared: SharedLedger
    group_size: int
    _first: tuple[Add, frozenset[str]] | None = None
    """The first group that counts, and its columns."""

    def write(self, job: PromptJob, group: StoredGroup) -> bool:
        """Add a group to the log. Returns whether it counts: the first answer to a prompt does."""
        shared, payload = self.shared, encode_group(group, job.ordinal)
        with shared.reading() as ledger:
            writer = shared.writer()
            counts = accepts(ledger, job.ordinal, job.attempt)
            if counts:
                self._check_columns(ledger, group, job.ordinal)
        if counts:  # before the event that names it, and outside of the lock, so that others can work meanwhile
            place = shared.folder.write_group(payload)
        with shared.writing() as ledger:
            counts = accepts(ledger, job.ordinal, job.attempt)
            now, version = time.time(), group.policy_version
            if counts:
                self._check_columns(ledger, group, job.ordinal)  # another may have been the first, meanwhile
                shared.write(Add(now, writer, job.ordinal, job.attempt, version, *place))
            else:
                shared.write(Late(now, writer, job.ordinal, job.attempt, version))
        shared.folder.sync()
        return counts

    def _check_columns(self, ledger: Ledger, group: StoredGroup, ordinal: int) -> None:
        first = next(iter(ledger.taken or ledger.waiting.values()), None)
        if first is None:
            return
        if self._first is None or self._first[0] != first:
            self._first = first, columns_of(read_answer(self.shared.folder, first, self.group_size))
        mine, theirs = columns_of(group), self._first[1]
        for column in sorted(mine ^ theirs):
            has, lacks = ("this group", "the first one") if column in mine else ("the first group", "this one")
            raise SampleError(
                f"{has} of the log has {column.replace('_', ' ')}, and {lacks} has none",
                ordinal=ordinal,
                column=column,
                first=f"prompt {first.ordinal}",
                remedy=f"{column} in all groups of a log, or in none: rows of a batch have the same columns",
            )


def read_answer(folder: LogFolder, answer: Add, group_size: int) -> StoredGroup:
    where = {"folder": folder.path, "writer": answer.writer, "ordinal": answer.ordinal}
    return decode_group(folder.read_group(answer), group_size, **where)
