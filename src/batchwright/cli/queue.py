"""A queue of batches: what is in it and who works on it, whether it is whole; or remove it.

`status` looks at a queue from outside, while providers and consumers work on it: nothing is locked or changed.
`verify` reads every file, all bytes of it, and compares it with its checksums, its name and the queue's meta; exit code
1 says that something is damaged. --quarantine puts damaged files that wait aside, and asks for them again.
`purge` removes a queue's files and all that it remembers, so that numbers begin at 0 again. It refuses while somebody
uses the queue, and leaves what is not a queue's.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from batchwright.base.errors import SpecError
from batchwright.base.words import bytes_in_words, counted
from batchwright.cli.output import add_json, indented, print_json, printable

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

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
    parser.add_argument("what", metavar="WHAT", choices=("status", "purge", "verify"), help="status, verify or purge")
    parser.add_argument("path", metavar="PATH", help="data/<dataset>, or the queue folder in it")
    parser.add_argument("--split", metavar="NAME", help="of purge: remove only this split")
    parser.add_argument("--force", action="store_true", help="of purge: also while somebody uses the queue")
    parser.add_argument(
        "--quarantine", action="store_true", help="of verify: put damaged files aside, to be made again"
    )
    parser.add_argument("--all", action="store_true", help="of status and purge: list everything")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    for name, of in (("split", "purge"), ("force", "purge"), ("quarantine", "verify")):
        if getattr(arguments, name) and arguments.what != of:
            raise SpecError(
                f"--{name} is of {of}, not of {arguments.what}",
                parameter=name,
                remedy=f"batchwright queue {of} {shlex.quote(arguments.path)}",
            )
    shown = None if arguments.all else _SHOWN
    if arguments.what == "status":
        return _status(arguments, shown)
    return _verify(arguments) if arguments.what == "verify" else _purge(arguments, shown)


# status


def _status(arguments: argparse.Namespace, shown: int | None) -> int:
    from batchwright.queue.status import queue_status

    told = queue_status(arguments.path)
    if arguments.json:
        print_json(told)
    else:
        print("\n".join(_render(told, shown)))
    return 0


def _render(told: dict[str, Any], shown: int | None) -> Iterator[str]:
    stamp = "has no meta.json" if told["stamp"] is None else f"made from {told['stamp'][:16]}"
    yield f"queue {told['queue']}, {stamp}" + ("" if told["reproducible"] is not False else ", not reproducible")
    for name, split in told["splits"].items():
        yield from _render_split(name, split, shown)
    for role in ("providers", "consumers"):
        yield f"{role}" + ("" if told[role] else "  none")
        yield from _limited([f"  {_member(member)}" for member in told[role]], shown)
    for death in told["died"]:
        yield f"died  {_ago(death['age_seconds'])}: {printable(death['headline'])}"
        yield indented(death["traceback"], "  | ")
    if told["quarantine"]:
        yield f"quarantine  {counted(len(told['quarantine']), 'file')}"
        yield from _limited([f"  {_aside(one)}" for one in told["quarantine"]], shown)


def _aside(one: dict[str, Any]) -> str:
    why = printable(one["reason"] or "nobody wrote down why")
    return f"{printable(one['file'])}, {bytes_in_words(one['num_bytes'])}: {why}"


def _render_split(name: str, split: dict[str, Any], shown: int | None) -> Iterator[str]:
    is_streamed = not split["is_kept"] or bool(split["next"])  # or it was, before val_batches was set
    yield printable(name) + (f"  next {split['next']}, taken up to {split['taken']}" if is_streamed else ", kept")
    if split["is_kept"] or split["kept"] is not None:
        yield f"  kept      {_kept(split)}"
    ready = split["ready"]
    oldest = "" if split["oldest_seconds"] is None else f", the oldest for {_seconds(split['oldest_seconds'])}"
    if is_streamed:
        yield f"  ready     {_sizes(ready)}" + (f"{oldest}: {_numbers(ready, shown)}" if ready else "")
    for one in ready:
        if one["damage"]:
            yield f"            file {one['number']} is damaged: {printable(one['damage'])}"
    if is_streamed:
        making, reading = split["files_per_second"], split["reading_rows_per_second"]
        yield (
            "  rate      "
            + ("unknown" if making is None else f"{making:,.2f} files/s made")
            + ("" if reading is None else f", {reading:,.0f} rows/s read")
        )
    for one in split["claimed"]:
        of = "unknown" if one["num_rows"] is None else f"{one['num_rows']:,}"
        yield (
            f"  claimed   file {one['number']} by {_by(one['by'])}: {one['recorded']:,} of {of} rows recorded, "
            f"{one['handed']:,} handed over"
        )
    for one in split["making"]:
        since = "" if one["age_seconds"] is None else f", for {_seconds(one['age_seconds'])}"
        file = "kept batches" if one["number"] is None else f"file {one['number']}"
        yield f"  making    {file} by {_by(one['by'])}{since}"
    for one in split["returned"]:
        yield (
            f"  returned  file {one['number']}: {counted(one['recorded'], 'row')} recorded, "
            f"{one['handed']:,} handed over, the rest comes again"
        )
    if split["wanted"]:
        yield f"  wanted    {_listed([str(number) for number in split['wanted']], shown)}"
    for one in split["ranks"]:
        yield f"  rank      {one['rank']} of {one['world_size']}: recorded up to file {one['file']}, row {one['row']:,}"


def _kept(split: dict[str, Any]) -> str:
    """The validation batches that are kept; of a queue that streams them now, those of before."""
    kept = split["kept"]
    if kept is None:
        return "not made yet"
    if kept["damage"]:
        return f"damaged: {printable(kept['damage'])}"
    unused = "" if split["is_kept"] else "; not used now, without val_batches"
    return f"{_size([kept])}, for {_seconds(kept['age_seconds'])}{unused}"


def _sizes(files: list[dict[str, Any]]) -> str:
    return f"{counted(len(files), 'file')}, {_size(files)}" if files else "0 files"


def _size(files: list[dict[str, Any]]) -> str:
    num_batches, num_rows = (sum(one[name] or 0 for one in files) for name in ("num_batches", "num_rows"))
    size = bytes_in_words(sum(one["num_bytes"] for one in files))
    return f"{counted(num_batches, 'batch', 'batches')}, {counted(num_rows, 'row')}, {size}"


def _numbers(files: list[dict[str, Any]], shown: int | None) -> str:
    return _listed([str(one["number"]) for one in files], shown)


def _listed(words: Sequence[str], shown: int | None) -> str:
    more = "" if shown is None or len(words) <= shown else f" and {len(words) - shown:,} more"
    return ", ".join(words[:shown]) + more


def _limited(lines: Sequence[str], shown: int | None) -> Iterator[str]:
    yield from lines[:shown]
    if shown is not None and len(lines) > shown:
        yield f"  and {len(lines) - shown:,} more: --all lists them"


def _by(who: dict[str, Any]) -> str:
    host = "" if who["host"] is None else f" on {printable(who['host'])}"
    return f"{printable(who['role'])}, pid {who['pid']}{host}, {who['state']}"


def _member(member: dict[str, Any]) -> str:
    rank = "" if member["rank"] is None else f", rank {member['rank']} of {member['world_size']}"
    file = "" if member["number"] is None else f" {printable(member['split'] or '')} file {member['number']}"
    doing = f": {printable(member['doing'])}{file}" if member["doing"] else ""
    if doing and member["doing_seconds"] is not None and member["state"] == "alive":
        doing += f", for {_seconds(member['doing_seconds'])}"
    silent = "" if member["state"] in ("alive", "dead") else f" (silent for {_seconds(member['silent_seconds'])})"
    return f"pid {member['pid']} on {printable(member['host'])}{rank}, {member['state']}{silent}{doing}"


def _seconds(seconds: float) -> str:
    """
    >>> _seconds(3.21), _seconds(75), _seconds(7300), _seconds(200_000)
    ('3.2 s', '75 s', '122 min', '56 h')
    """
    if seconds < 600:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.0f} h"


def _ago(seconds: float) -> str:
    return f"{_seconds(seconds)} ago"


# verify


def _verify(arguments: argparse.Namespace) -> int:
    from batchwright.queue.verify import verify_queue

    found = verify_queue(arguments.path, quarantine=arguments.quarantine)
    if arguments.json:
        print_json(
            {
                "queue": str(found.queue),
                "ok": not found.damaged,
                "num_files": found.num_files,
                "num_bytes": found.num_bytes,
                "num_gone": found.num_gone,
                "damaged": [
                    {"file": str(one.file), "what": one.what, "moved_to": one.moved_to} for one in found.damaged
                ],
            }
        )
        return int(bool(found.damaged))
    for one in found.damaged:
        print(f"{one.file}: {printable(one.what)}" + ("" if one.moved_to is None else f"; moved to {one.moved_to}"))
    gone = f"; {found.num_gone:,} more were used up meanwhile" if found.num_gone else ""
    size = f"{counted(found.num_files, 'file')}, {bytes_in_words(found.num_bytes)}{gone}"
    if not found.damaged:
        print(f"{found.queue}: whole ({size})")
        return 0
    print(f"batchwright: {found.queue} is damaged: {counted(len(found.damaged), 'file')}", file=sys.stderr)
    path = shlex.quote(arguments.path)
    names = {one.file.name for one in found.damaged if one.moved_to is None}
    remedies = [f"batchwright queue purge {path}, and prepare again"] if "meta.json" in names else []
    if {"next", "taken"} & names:
        remedies += ["batchwright prepare CONFIG: the next file writes that number anew"]
    if any(name.endswith(".batches") for name in names) and not arguments.quarantine:
        remedies += [f"batchwright queue verify {path} --quarantine: a provider makes them again"]
    for number, remedy in enumerate(remedies):
        print(("" if number else "  try").ljust(13) + remedy, file=sys.stderr)
    return 1


# purge


def _purge(arguments: argparse.Namespace, shown: int | None) -> int:
    from batchwright.queue.purge import purge

    done = purge(arguments.path, arguments.split, force=arguments.force)
    if arguments.json:
        print_json({"queue": str(done.queue), "num_bytes": done.num_bytes, "removed": done.removed, "left": done.left})
        return 0
    what = f"{counted(len(done.removed), 'file')}, {bytes_in_words(done.num_bytes)}"
    print("\n".join([f"removed {what} from {done.queue}", *_names(done.removed, shown)]))
    if done.left:
        print(f"left, because no queue writes such files: {counted(len(done.left), 'file')}")
        print("\n".join(_names(done.left, shown)))
    return 0


def _names(names: Sequence[str], shown: int | None) -> Iterator[str]:
    return _limited([f"  {printable(name)}" for name in names], shown)
