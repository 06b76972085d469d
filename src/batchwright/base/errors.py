"""Every error that a user can cause. Each says what is wrong, where, and what to do.

    BatchwrightError
    ├─ SpecError (ValueError)        a parameter or recipe that cannot work
    ├─ SourceError (ValueError)      raw data that cannot be read: names the file and the row
    ├─ SampleError (ValueError)      a sample that does not fit the buffer it was given to
    ├─ SampleTypeError (TypeError)   something that is no sample at all
    ├─ RowIndexError (IndexError)    a row or id that is not in the buffer
    ├─ TokenizerError (ValueError)   a tokenizer that cannot do what is asked
    ├─ StoreError                    a store that is missing, unfinished or damaged
    ├─ PlanError (ValueError)        a plan, state or position that does not belong here
    ├─ SyncError                     ranks of one run that do not belong together
    ├─ BusyError                     another process is writing here
    ├─ OutOfSpaceError (OSError)     the disk is full; nothing that was finished is lost
    ├─ QueueError                    a queue that is stale or damaged
    │  └─ MissingQueueError (FileNotFoundError)   there is no queue where one is looked for
    ├─ MemoryLimitError (MemoryError)   a refill would hold more memory than is allowed; has the state to resume from
    ├─ WorkerError (RuntimeError)    a worker process died, or user code failed inside one
    ├─ EndOfRun                      there are no more batches
    ├─ NotReadyError (TimeoutError)  what is asked for is not there yet; somebody else makes it
    └─ MissingExtraError (ImportError)   an optional dependency is not installed

Text: a headline, then one aligned line per named thing, then the remedy.

>>> print(SpecError("batch_size=32 does not divide by world_size=3", remedy="batch_size=33, or uneven=True"))
batch_size=32 does not divide by world_size=3
  try        batch_size=33, or uneven=True
"""

from __future__ import annotations

from functools import partial
from typing import Any

__all__ = [
    "BatchwrightError",
    "BusyError",
    "EndOfRun",
    "MemoryLimitError",
    "MissingExtraError",
    "MissingQueueError",
    "NotReadyError",
    "OutOfSpaceError",
    "PlanError",
    "QueueError",
    "RowIndexError",
    "SampleError",
    "SampleTypeError",
    "SourceError",
    "SpecError",
    "StoreError",
    "SyncError",
    "TokenizerError",
    "WorkerError",
]


class BatchwrightError(Exception):
    """The base of all errors of this package: a `headline`, `where` (named things) and a `remedy`."""

    def __init__(self, headline: str, *, remedy: str | None = None, **where: object) -> None:
        """`headline` says what is wrong, `where` names the things that it is about, `remedy` says what to do."""
        self.headline = headline
        self.where: dict[str, object] = {name: value for name, value in where.items() if value is not None}
        self.remedy = remedy
        super().__init__(headline)

    def __str__(self) -> str:
        lines = [self.headline]
        for name, value in {**self.where, "try": self.remedy}.items():
            if value is not None:
                first, *rest = str(value).splitlines() or [""]
                lines.append(f"  {name.replace('_', ' '):<10} {first}")
                lines += [f"  {'':<10} {line}" for line in rest]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders (bake and loader workers), and must arrive with everything they say.
        return partial(type(self), self.headline, remedy=self.remedy, **self.where), ()


class SpecError(BatchwrightError, ValueError):
    """A parameter or recipe that cannot work."""


class SourceError(BatchwrightError, ValueError):
    """Raw data that cannot be read. Names the file and the row."""


class SampleError(BatchwrightError, ValueError):
    """A sample that does not fit the buffer it was given to. Names the row, the column and both types."""


class SampleTypeError(BatchwrightError, TypeError):
    """Something that is no sample at all."""


class RowIndexError(BatchwrightError, IndexError):
    """A row or an id that is not in the buffer."""


class TokenizerError(BatchwrightError, ValueError):
    """A tokenizer that cannot do what is asked of it."""


class StoreError(BatchwrightError):
    """A store that is missing, unfinished or damaged."""


class PlanError(BatchwrightError, ValueError):
    """A plan, state or position that does not belong to this loader or store."""


class SyncError(BatchwrightError):
    """Ranks of one run that do not belong together. Names who differs, and in what."""


class BusyError(BatchwrightError):
    """Another process is writing here."""


class OutOfSpaceError(BatchwrightError, OSError):
    """The disk is full. What was finished is kept, and the same call continues there."""


class QueueError(BatchwrightError):
    """A queue that is stale or damaged, or that is used in a way that cannot work."""


class MissingQueueError(QueueError, FileNotFoundError):
    """A folder without a queue: no provider has prepared data there."""


class MemoryLimitError(BatchwrightError, MemoryError):
    """A refill would hold more memory than is allowed. Everything before was handed over; nothing is lost."""

    report: Any = None
    """A MemoryReport: what is held, and what was asked for."""
    state: dict[str, Any] | None = None
    """For `load_state_dict`, with more memory or a smaller pool."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (*super().__reduce__(), {"report": self.report, "state": self.state})


class WorkerError(BatchwrightError, RuntimeError):
    """A worker process died, or user code failed inside one."""


class EndOfRun(BatchwrightError):
    """There are no more batches: the run's epochs are used up."""


class NotReadyError(BatchwrightError, TimeoutError):
    """What is asked for is not there yet: another process makes it. Nothing was taken; ask again, or wait longer."""


class MissingExtraError(BatchwrightError, ImportError):
    """An optional dependency is not installed. Says the command that installs it."""


for _name in __all__:
    globals()[_name].__module__ = "batchwright"  # the name that users import, in tracebacks too
