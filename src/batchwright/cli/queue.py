"""A queue of batches: show its files and processes, verify it, or remove it.

`status` reads a queue while providers and consumers use it. It locks and changes nothing.
`verify` reads every byte and compares it with checksums, file names and the queue's meta. The exit code is 1 if
something is damaged. --quarantine moves damaged ready files away, and requests their numbers again.
`purge` removes the files and records of a queue, so that numbers begin at 0 again. It refuses while a process uses the
queue, and leaves other files.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batchwright.base.words import bytes_in_words, counted, listed
from batchwright.cli.output import add_json, indented, limited, number, print_damage, print_facts, printable

if TYPE_CHECKING:
    from batchwright.queue.purge import Purged
    from batchwright.queue.status import Verified

SUMMARY = "what is in a queue and who works on it; check it, or remove it"

EXAMPLES = """\
examples:
  batchwright queue status data/char_diffusion
  batchwright queue verify data/char_diffusion --quarantine
  batchwright queue purge data/char_diffusion
  batchwright queue purge data/char_diffusion --split train
"""

_SHOWN = 10
"""Numbers or names that are listed without --all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(metavar="WHAT", required=True)
    status = whats.add_parser("status", help="files, providers and consumers")
    verify = whats.add_parser("verify", help="check every byte")
    purge = whats.add_parser("purge", help="remove the queue")
    for sub, act in ((status, _status), (verify, _verify), (purge, _purge)):
        sub.set_defaults(act=act)
        sub.add_argument("path", metavar="PATH", help="data/<dataset>, or the queue folder in it")
        add_json(sub)
    for sub in (status, purge):
        sub.add_argument("--all", action="store_true", help="list everything")
    verify.add_argument("--quarantine", action="store_true", help="move damaged files away, to be made again")
    purge.add_argument("--split", metavar="NAME", help="remove only this split")
    purge.add_argument("--force", action="store_true", help="also while a process uses the queue")


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.act(arguments))


# status


def _status(arguments: argparse.Namespace) -> int:
    from batchwright.queue.status import queue_status

    status = queue_status(arguments.path)
    print_facts(status, _render(status, _shown(arguments)), as_json=arguments.json)
    return 0


def _shown(arguments: argparse.Namespace) -> int:
    """The number of names that are listed."""
    return sys.maxsize if arguments.all else _SHOWN


def _render(status: dict[str, Any], shown: int) -> Iterator[str]:
    heading = f"queue {status['queue']}, has no meta.json"
    if status["stamp"] is not None:
        heading = f"queue {status['queue']}, made from {status['stamp'][:16]}"
    if status["reproducible"] is False:
        heading += ", not reproducible"
    yield heading
    for name, split in status["splits"].items():
        yield from _render_split(printable(name), split, shown)
    for role in ("providers", "consumers"):
        if not status[role]:
            yield f"{role}  none"
            continue
        yield role
        yield from limited(list(map(_member, status[role])), shown)
    for failure in status["died"]:
        yield f"died  {_seconds(failure['age_seconds'])} ago: {printable(failure['headline'])}"
        yield indented(failure["traceback"], "  | ")
    if status["quarantine"]:
        yield f"quarantine  {counted(len(status['quarantine']), 'file')}"
        yield from limited(list(map(_quarantined, status["quarantine"])), shown)


def _quarantined(one: dict[str, Any]) -> str:
    why = printable(one["reason"] or "the reason is lost")
    return f"{printable(one['file'])}, {bytes_in_words(one['num_bytes'])}: {why}"


def _render_split(name: str, split: dict[str, Any], shown: int) -> Iterator[str]:
    if split["is_kept"] and not split["next"]:
        yield f"{name}, kept"
        yield f"  kept      {_kept(split)}"
        yield from _damaged(split)
    else:  # streamed, or it was before val_batches was set
        yield f"{name}  next {split['next']}, taken up to {split['taken']}"
        if split["is_kept"] or split["kept"] is not None:
            yield f"  kept      {_kept(split)}"
        yield f"  ready     {_ready(split, shown)}"
        yield from _damaged(split)
        yield f"  rate      {_rate(split)}"
    yield from _work(split)
    if split["wanted"]:
        yield f"  wanted    {listed(split['wanted'], shown)}"
    for one in split["ranks"]:
        yield f"  rank      {one['rank']} of {one['world_size']}: recorded up to file {one['file']}, row {one['row']:,}"


def _damaged(split: dict[str, Any]) -> Iterator[str]:
    for one in split["ready"]:
        if one["damage"]:
            yield f"            file {one['number']} is damaged: {printable(one['damage'])}"


def _work(split: dict[str, Any]) -> Iterator[str]:
    """Files that are read, made, or were given back."""
    for one in split["claimed"]:
        rows = number(one["num_rows"], "unknown")
        yield (
            f"  claimed   file {one['number']} by {_by(one['by'])}: {one['recorded']:,} of {rows} rows recorded, "
            f"{one['handed']:,} handed over"
        )
    for one in split["making"]:
        file = "kept batches"
        if one["number"] is not None:
            file = f"file {one['number']}"
        yield f"  making    {file} by {_by(one['by'])}{_for(one['age_seconds'])}"
    for one in split["returned"]:
        yield (
            f"  returned  file {one['number']}: {counted(one['recorded'], 'row')} recorded, "
            f"{one['handed']:,} handed over, the rest comes again"
        )


def _kept(split: dict[str, Any]) -> str:
    """The kept validation batches; of a queue that streams them now, those of before."""
    kept = split["kept"]
    if kept is None:
        return "not made yet"
    if kept["damage"]:
        return f"damaged: {printable(kept['damage'])}"
    said = f"{_size([kept])}{_for(kept['age_seconds'])}"
    if split["is_kept"]:
        return said
    return f"{said}; not used now, without val_batches"


def _ready(split: dict[str, Any], shown: int) -> str:
    files = split["ready"]
    if not files:
        return "0 files"
    numbers = listed((one["number"] for one in files), shown)
    oldest = _seconds(split["oldest_seconds"])
    return f"{counted(len(files), 'file')}, {_size(files)}, the oldest for {oldest}: {numbers}"


def _rate(split: dict[str, Any]) -> str:
    rates = ["unknown"]
    if split["files_per_second"] is not None:
        rates = [f"{split['files_per_second']:,.2f} files/s made"]
    if split["reading_rows_per_second"] is not None:
        rates.append(f"{split['reading_rows_per_second']:,.0f} rows/s read")
    return ", ".join(rates)


def _size(files: list[dict[str, Any]]) -> str:
    num_batches, num_rows = (sum(one[name] or 0 for one in files) for name in ("num_batches", "num_rows"))
    size = bytes_in_words(sum(one["num_bytes"] for one in files))
    return f"{counted(num_batches, 'batch', 'batches')}, {counted(num_rows, 'row')}, {size}"


def _by(member: dict[str, Any]) -> str:
    pid = f"{printable(member['role'])}, pid {member['pid']}"
    if member["host"] is not None:
        pid += f" on {printable(member['host'])}"
    return f"{pid}, {member['state']}"


def _member(member: dict[str, Any]) -> str:
    said = f"pid {member['pid']} on {printable(member['host'])}"
    if member["rank"] is not None:
        said += f", rank {member['rank']} of {member['world_size']}"
    said += f", {member['state']}"
    if member["state"] not in ("alive", "dead"):
        said += f" (silent for {_seconds(member['silent_seconds'])})"
    if not member["doing"]:
        return said
    said += f": {printable(member['doing'])}"
    if member["number"] is not None:
        said += f" {printable(member['split'] or '')} file {member['number']}"
    if member["state"] == "alive":
        said += _for(member["doing_seconds"])
    return said


def _for(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f", for {_seconds(seconds)}"


def _seconds(seconds: float) -> str:
    """
    >>> _seconds(3.21), _seconds(75), _seconds(7300), _seconds(200_000)
    ('3.2 s', '75 s', '122 min', '56 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    if seconds < 36_000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


# verify


def _verify(arguments: argparse.Namespace) -> int:
    from batchwright.queue.status import verify_queue

    found = verify_queue(arguments.path, quarantine=arguments.quarantine)
    facts = asdict(found) | {"ok": not found.damaged}
    print_facts(facts, _verified(found), as_json=arguments.json)
    if found.damaged and not arguments.json:
        print_damage(found.queue, len(found.damaged), list(_remedies(found, arguments)))
    return int(bool(found.damaged))


def _verified(found: Verified) -> Iterator[str]:
    for one in found.damaged:
        line = f"{one.file}: {printable(one.what)}"
        if one.moved_to:
            line += f"; moved to {one.moved_to}"
        yield line
    if not found.damaged:
        size = f"{counted(found.num_files, 'file')}, {bytes_in_words(found.num_bytes)}"
        if found.num_gone:
            size += f"; {found.num_gone:,} more were used up meanwhile"
        yield f"{found.queue}: whole ({size})"


def _remedies(found: Verified, arguments: argparse.Namespace) -> Iterator[str]:
    path = shlex.quote(arguments.path)
    names = {one.file.name for one in found.damaged if one.moved_to is None}
    if "meta.json" in names:
        yield f"batchwright queue purge {path}, and prepare again"
    if {"next", "taken"} & names:
        yield "batchwright prepare CONFIG: the next file writes that number anew"
    if any(name.endswith(".batches") for name in names) and not arguments.quarantine:
        yield f"batchwright queue verify {path} --quarantine: a provider makes them again"


# purge


def _purge(arguments: argparse.Namespace) -> int:
    from batchwright.queue.purge import purge

    done = purge(arguments.path, arguments.split, force=arguments.force)
    print_facts(asdict(done), _purged(done, _shown(arguments)), as_json=arguments.json)
    return 0


def _purged(done: Purged, shown: int) -> Iterator[str]:
    size = f"{counted(len(done.removed), 'file')}, {bytes_in_words(done.num_bytes)}"
    yield f"removed {size} from {done.queue}"
    yield from limited(list(map(printable, done.removed)), shown)
    if done.left:
        yield f"left, because no queue writes such files: {counted(len(done.left), 'file')}"
        yield from limited(list(map(printable, done.left)), shown)
