"""One process's view of a log's ledger: read the records of others, decide, write one record.

A record is written under the lock of all processes, after reading the records of others. So all processes see the same
events in the same order, and compute the same ledger from them. No other state exists.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from batchwright.base.errors import BusyError, SpecError, StoreError
from batchwright.base.journal import Record
from batchwright.rollouts.log.folder import LogFolder, damage
from batchwright.rollouts.log.ledger import Begin, Contradiction, Event, Ledger, decode, encode


class SharedLedger:
    """Safe to use from several threads; not in a forked child."""

    def __init__(self, path: Path, read_only: bool) -> None:
        self.folder: LogFolder = LogFolder(path)
        self.read_only: bool = read_only
        self.ledger: Ledger = Ledger()
        self._process = os.getpid()
        self._is_closed = False
        self._thread_lock = threading.RLock()
        self._is_torn = False
        """An event was applied here and may not be in the journal: the next call reads all events again."""

    def create(self, first: Begin) -> None:
        """Begin the journal, unless another process was faster."""
        with self.folder.locked():
            self.folder.create()
            if not self.folder.catch_up():
                self.folder.write(encode(first))
                self.folder.sync()
        self.folder.rewind()

    @property
    def is_usable(self) -> bool:
        """Whether it is open, and used in the process that opened it."""
        return not self._is_closed and self._process == os.getpid()

    def close(self) -> None:
        """Release the folder. Leases of this process end at once."""
        if self._process != os.getpid():
            return
        with self._thread_lock:
            if not self._is_closed:
                self._is_closed = True
                with contextlib.suppress(OSError, StoreError):
                    self.folder.sync()
                self.folder.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Ledger]:
        """The ledger with all records of other processes. One thread at a time; other processes are not blocked."""
        with self._one_thread():
            self._mend()
            self._apply(self.folder.new_events())
            yield self.ledger

    @contextlib.contextmanager
    def writing(self) -> Iterator[Ledger]:
        """The same as `reading`, while no other process writes."""
        with self._one_thread():
            self._refuse_read_only()
            with self.folder.locked():
                self._mend()
                self._apply(self.folder.catch_up())
                yield self.ledger

    def writer(self) -> str:
        """This process's name in the ledger. Inside `reading` or `writing`."""
        self._refuse_read_only()
        return self.folder.begin_writing()

    def _refuse_read_only(self) -> None:
        if self.read_only:
            raise SpecError(
                "this log is open read-only", parameter="read_only", remedy="open it without read_only=True"
            )

    def write(self, event: Event) -> None:
        """Apply an event, then write it down, inside `writing`. An event that contradicts the others is not written."""
        self._is_torn = True
        self.ledger.apply(event)
        self.folder.applied(self.folder.write(encode(event)))
        self._is_torn = False

    @contextlib.contextmanager
    def _one_thread(self) -> Iterator[None]:
        if self._process != os.getpid():
            what = "this log can be used by the process that opened it, not by a child of it"
            remedy = "open it in the child: RolloutLog(path, ...)"
            raise BusyError(what, folder=self.folder.path, process=f"pid {self._process}", remedy=remedy)
        with self._thread_lock:
            if self._is_closed:
                remedy = "open it again: RolloutLog(path, ...)"
                raise StoreError("this log was closed", folder=self.folder.path, remedy=remedy)
            yield

    def _mend(self) -> None:
        if self._is_torn:
            self.ledger, self._is_torn = Ledger(), False
            self.folder.rewind()

    def _apply(self, records: Iterable[Record]) -> None:
        self._is_torn = True
        for record, _ in replayed(self.folder, self.ledger, records):
            self.folder.applied(record)
        self._is_torn = False


def replayed(folder: LogFolder, ledger: Ledger, records: Iterable[Record]) -> Iterator[tuple[Record, Event]]:
    """(record, event) of some records, each after the ledger has applied it."""
    for record in records:
        try:
            event = decode(record.payload)
            ledger.apply(event)
        except Contradiction as error:
            where = {"file": folder.ledger_path, "record": record.number, "reason": str(error)}
            raise damage("this log is damaged", **where) from None
        yield record, event
