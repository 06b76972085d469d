"""`queue/meta.json`: the result of `build_meta`, and the stamp of the code and data behind the batches."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from batchwright.base.errors import QueueError, SpecError
from batchwright.base.files import write_whole
from batchwright.base.words import error_in_words, listed
from batchwright.queue.messages import purge_command
from batchwright.queue.stamp import Stamp

_FORMAT = 1
_OURS = "batchwright"


@dataclass(frozen=True)
class Meta:
    """The result of `build_meta`, and the other facts that a queue must remember."""

    said: dict[str, Any]
    stamp: Stamp
    reproducible: bool = True
    val_batches: int | None = None
    batch_size: int | None = None
    """These two are of the provider that started last: its kept batches are those that count."""
    born: str = field(default_factory=partial(secrets.token_hex, 8), compare=False)
    """The id of this folder. A folder that was deleted and made again by the same provider is another queue."""
    accepted: tuple[dict[str, Any], ...] = ()
    """Changes that were accepted: the difference, and the next file of each split at that time."""
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
    write_whole(path, (json.dumps({**meta.said, _OURS: ours}, indent=1) + "\n").encode())


def read_meta(path: Path) -> Meta | None:
    """Read the meta.json of a queue. None if the file does not exist."""
    try:
        content = json.loads(path.read_bytes())
        ours = content.pop(_OURS)
        if ours["format"] != _FORMAT:
            raise ValueError(f"it has format {ours['format']}, and this batchwright reads {_FORMAT}")
        return Meta(
            content,
            Stamp.from_json(ours["made_from"], content),
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
            f"this is not the meta of a queue: {error_in_words(error)}",
            file=path,
            remedy=f"prepare again, after\n{purge_command(path.parent)}",
        ) from error


# Values that build_meta may return


def check_meta(meta: Any) -> dict[str, Any]:
    """The meta in plain Python values. NumPy's numbers become numbers, tuples lists; what JSON would change is refused.

    >>> check_meta({"vocab_size": 65, "itos": ("a", "b")})
    {'vocab_size': 65, 'itos': ['a', 'b']}
    """
    if not isinstance(meta, Mapping):
        raise SpecError(
            f"build_meta() returned {type(meta).__name__}; it has to return a dict",
            parameter="build_meta()",
            remedy='return {"batch_schema": [{"name": "x", "dtype": "int64", "shape": [self.block_size]}, ...]}',
        )
    problems: list[str] = []
    if _OURS in meta:
        problems.append(f"meta[{_OURS!r}] is a name that batchwright needs for itself")
    try:
        plain: dict[str, Any] = _plain(meta, "meta", problems)
    except RecursionError:
        problems.append("the meta holds itself")
    if problems:
        raise SpecError(
            problems[0],
            parameter="build_meta()",
            also=listed(problems[1:], most=4) or None,
            remedy="text, finite numbers, lists and dicts of them; .tolist() of an array",
        )
    return plain


def _plain(value: Any, path: str, problems: list[str]) -> Any:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of NumPy, torch or JAX
        value = value.item()
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)  # the text alone, also of an enum
        case int():
            return int(value)
        case float() if math.isfinite(value):
            return float(value)
        case list() | tuple():
            return [_plain(item, f"{path}[{number}]", problems) for number, item in enumerate(value)]
        case Mapping() if all(isinstance(key, str) for key in value):
            return {str.__str__(key): _plain(item, f"{path}[{key!r}]", problems) for key, item in value.items()}
        case Mapping():
            fault = "has keys that are not strings"
        case float():
            fault = f"is {value}"
        case _:
            fault = "is a " + f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    problems.append(f"{path} {fault}, which JSON does not have")
    return None
