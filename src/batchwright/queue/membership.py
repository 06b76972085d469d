"""The membership of one consumer. It joins with its first batch, and joins again if others took it for dead."""

from __future__ import annotations

import contextlib
import os

from batchwright.base.errors import QueueError
from batchwright.queue.folder import QueueFolder
from batchwright.queue.members import Liveness, QueueMember
from batchwright.queue.meta import Meta, read_meta
from batchwright.queue.system_errors import deleted

__all__ = ["Membership"]


class Membership:
    """The member that a consumer is. `number` grows when it has to become another one."""

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
        self._member: QueueMember | None = None

    @property
    def member(self) -> QueueMember:
        if self._member is None:
            ranks = {"rank": self.rank, "world_size": self.world_size}
            self._member = QueueMember(self.queue.who, "consumer", self.lease_seconds, **ranks)
            with contextlib.suppress(OSError):
                Liveness(self.queue.who).remove_dead()
        return self._member

    @property
    def was_silent(self) -> bool:
        return self._member is not None and self._member.was_silent

    def renew(self) -> None:
        """Join again if this member was removed. The queue must still be the one that this consumer opened."""
        if self._member is None or self._member.is_here:
            return
        meta = read_meta(self.queue.meta)
        if meta is None:
            raise deleted(self.queue.path)
        remedy = "a new DatasetConsumer reads the new one"
        if meta.fingerprint != self.meta.fingerprint:
            raise self._replaced("by another provider", remedy)
        if meta.born != self.meta.born:
            raise self._replaced("from its beginning", f"{remedy}; load_state_dict of the last state goes on in it")
        self.leave()
        self.number += 1

    def _replaced(self, how: str, remedy: str) -> QueueError:
        return QueueError(
            f"the queue was deleted while it was in use, and made again {how}", folder=self.queue.path, remedy=remedy
        )

    def leave(self) -> None:
        if self._member is not None:
            self._member.leave()
            self._member = None
