"""A consumer's place in its queue, taken again when others have taken it for dead."""

from __future__ import annotations

import contextlib
import os

from batchwright.base.errors import QueueError
from batchwright.queue.folder import QueueFolder
from batchwright.queue.members import Census, Member
from batchwright.queue.meta_file import Meta, read_meta
from batchwright.queue.refused import deleted

__all__ = ["Seat"]


class Seat:
    """The member that a consumer is, from its first batch on. `number` grows when it has to become another one."""

    def __init__(
        self, queue: QueueFolder, meta: Meta, lease_seconds: float, rank: int | None, world_size: int | None
    ) -> None:
        self.queue = queue
        self.meta = meta
        self.lease_seconds = lease_seconds
        self.rank = rank
        self.world_size = world_size
        self.number: int = 0
        self.pid: int = os.getpid()
        self._member: Member | None = None

    @property
    def member(self) -> Member:
        if self._member is None:
            ranks = {"rank": self.rank, "world_size": self.world_size}
            self._member = Member(self.queue.who, "consumer", self.lease_seconds, **ranks)
            with contextlib.suppress(OSError):
                Census(self.queue.who).bury_the_dead()
        return self._member

    @property
    def was_silent(self) -> bool:
        return self._member is not None and self._member.was_silent

    def stay(self) -> None:
        """Be seen by others, in the queue that this consumer opened: it may have been deleted, or made anew."""
        if self._member is None or self._member.is_here:
            return
        meta = read_meta(self.queue.meta)
        if meta is None:
            raise deleted(self.queue.path)
        if (meta.fingerprint, meta.born) != (self.meta.fingerprint, self.meta.born):
            what = "by another provider" if meta.fingerprint != self.meta.fingerprint else "from its beginning"
            raise QueueError(
                f"the queue was deleted while it was in use, and made again {what}",
                folder=self.queue.path,
                remedy="a new DatasetConsumer reads the new one; load_state_dict of the last state goes on in it"
                if what == "from its beginning"
                else "a new DatasetConsumer reads the new one",
            )
        self.leave()
        self.number += 1

    def leave(self) -> None:
        if self._member is not None:
            self._member.leave()
            self._member = None
