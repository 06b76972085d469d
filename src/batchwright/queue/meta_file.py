"""`queue/meta.json`: what a provider says of its batches, and beside it what they were made from."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from batchwright.base.errors import QueueError
from batchwright.base.files import part_name
from batchwright.queue.refused import purge_command
from batchwright.queue.stale import Stamp

__all__ = ["Meta", "read_meta", "write_meta"]

_FORMAT = 1
_OURS = "batchwright"


@dataclass(frozen=True)
class Meta:
    """What `build_meta` said, and what a queue must remember besides."""

    said: dict[str, Any]
    stamp: Stamp
    reproducible: bool = True
    val_batches: int | None = None
    batch_size: int | None = None
    """These two are of the provider that started last: its kept batches are those that count."""
    born: str = field(default_factory=partial(secrets.token_hex, 8), compare=False)
    """Of this folder: one that was deleted and made again, of the same provider, is another queue."""
    accepted: tuple[dict[str, Any], ...] = ()
    """Changes that somebody went on with: the difference, and the next file of each split at that time."""
    made_for: str | None = None
    """The fingerprint that its first files have, and so all of them: `stamp` may have changed since."""

    @cached_property
    def fingerprint(self) -> str:
        """Equal for queues whose files may be mixed. Every file carries it, and every state of a consumer."""
        return self.made_for or self.stamp.fingerprint


def write_meta(path: Path, meta: Meta) -> None:
    ours = {
        "format": _FORMAT,
        "fingerprint": meta.fingerprint,
        "born": meta.born,
        "reproducible": meta.reproducible,
        "val_batches": meta.val_batches,
        "batch_size": meta.batch_size,
        "accepted": meta.accepted,
        "made_from": meta.stamp.to_json(),
    }
    part = part_name(path)
    with open(part, "w", encoding="utf-8") as file:
        file.write(json.dumps({**meta.said, _OURS: ours}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def read_meta(path: Path) -> Meta | None:
    """What a queue's meta.json says; None where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ours = content.pop(_OURS)
        if ours["format"] != _FORMAT:
            raise QueueError(
                f"this queue has format {ours['format']}, and this batchwright reads {_FORMAT}",
                file=path,
                remedy=f"prepare again, after\n{purge_command(path.parent)}",
            )
        stamp = Stamp.from_json(ours["made_from"], content)
        return Meta(
            content,
            stamp,
            bool(ours["reproducible"]),
            ours["val_batches"],
            ours["batch_size"],
            born=str(ours["born"]),
            accepted=tuple(ours.get("accepted", ())),
            made_for=str(ours["fingerprint"]),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise QueueError(
            f"this is not the meta of a queue: {type(error).__name__}: {error}",
            file=path,
            remedy=f"prepare again, after\n{purge_command(path.parent)}",
        ) from error
