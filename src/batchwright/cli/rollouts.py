"""The state of every prompt of a rollout log, or the history of one.

`status` counts prompts from the journal: in flight and by whom, waiting, taken, stale, dropped, late. The exit code is
1 if a prompt is lost or used twice. --position is that of a checkpoint, in rows: it shows what the restored run has
used, and what it gets again.
`show` prints the history of one prompt and its answer, by its ordinal or by the position of a row that a trainer used
(`batch.metadata["position"]`). Neither locks or changes anything.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from batchwright.base.errors import SpecError
from batchwright.base.words import bytes_in_words, counted, listed, truncated
from batchwright.cli.output import add_json, limited, print_facts, printable
from batchwright.cli.values import whole_number

SUMMARY = "the state of every prompt of a rollout log, or the history of one"

EXAMPLES = """\
examples:
  batchwright rollouts status run/rollouts
  batchwright rollouts status run/rollouts --position 4096
  batchwright rollouts show run/rollouts 17
  batchwright rollouts show run/rollouts --position 4099
"""

_MAX_LEASES = 5
"""Leases that are listed without --all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(metavar="WHAT", required=True)
    status, show = whats.add_parser("status", help="all prompts"), whats.add_parser("show", help="one prompt")
    for sub, act, position in ((status, _status, "of a checkpoint"), (show, _show, "of a row, in place of ORDINAL")):
        sub.set_defaults(act=act)
        sub.add_argument("folder", metavar="FOLDER", help="a rollout log")
        sub.add_argument("--position", type=whole_number, metavar="ROWS", help=f"the position {position}")
        add_json(sub)
    status.add_argument("--all", action="store_true", help="list all leases")
    show.add_argument("ordinal", metavar="ORDINAL", nargs="?", type=whole_number, help="the prompt")


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.act(arguments))


def _show(arguments: argparse.Namespace) -> int:
    from batchwright.rollouts.log.status import history, ordinal_at

    folder, ordinal, position = arguments.folder, arguments.ordinal, arguments.position
    if (ordinal is None) == (position is None):
        remedy = f"batchwright rollouts show {folder} 17, or --position"
        raise SpecError("which prompt?", parameter="ORDINAL", remedy=remedy)
    place: dict[str, Any] = {}
    if position is not None:
        ordinal, response = ordinal_at(folder, position)
        place = {"position": position, "response": response}
    facts = {"folder": folder, **history(folder, ordinal), **place}
    print_facts(facts, _history_lines(facts), as_json=arguments.json)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from batchwright.rollouts.log.status import status

    facts = {"folder": arguments.folder, **status(arguments.folder, arguments.position)}
    max_leases = len(facts["in_flight"]) if arguments.all else _MAX_LEASES
    print_facts(facts, _status_lines(facts, max_leases), as_json=arguments.json)
    return int(bool(facts["lost"] or facts["used_twice"] or facts.get("checkpoint", {}).get("missing")))


def _status_lines(facts: dict[str, Any], max_leases: int) -> Iterator[str]:
    leases = facts["in_flight"]
    yield f"rollouts {facts['folder']}"
    yield from _prompt_lines(facts)
    yield f"  in flight  {len(leases):,}"
    yield from limited(list(map(_lease, leases)), max_leases, margin="    ")
    yield f"  again      {_ordinals(facts['again'])}"
    yield f"  waiting    {facts['waiting']:,} answered, and not taken"
    yield f"  taken      {facts['taken']:,}"
    yield f"  dropped    {_ordinals(list(facts['dropped']))}"
    yield f"  stale      {counted(facts['stale'], 'answer')}"
    yield f"  late       {counted(facts['late'], 'answer')}"
    if "checkpoint" in facts:
        yield from _checkpoint_lines(facts["checkpoint"])
    yield f"  lost       {_ordinals(facts['lost'])}"
    yield f"  used twice {_ordinals(facts['used_twice'])}"


def _prompt_lines(facts: dict[str, Any]) -> Iterator[str]:
    prompts = facts["prompts"]
    epochs, issued = "endless epochs", f"{facts['cursor']:,}"
    if prompts["epochs"] is not None:
        epochs = counted(prompts["epochs"], "epoch")
        issued += f" of {prompts['epochs'] * prompts['num_prompts']:,}"
    if facts["is_over"]:
        issued += ": over"
    groups = f"groups of {prompts['group_size']}"
    if prompts["samples_per_insert"] > 1:
        groups += f", each used {prompts['samples_per_insert']} times"
    yield f"  prompts    {prompts['num_prompts']:,} ({prompts['fingerprint'][:16]}), {epochs}, {groups}"
    yield f"  issued     {issued}"


def _checkpoint_lines(checkpoint: dict[str, Any]) -> Iterator[str]:
    yield (
        f"  checkpoint at row {checkpoint['position']:,}: {counted(checkpoint['groups_used'], 'group')} used; "
        f"{checkpoint['groups_to_come']:,} more were taken after it, and come again in the same order"
    )
    if checkpoint["missing"]:
        yield f"  missing    {counted(checkpoint['missing'], 'use')} of the checkpoint: this log has no such groups"


def _lease(lease: dict[str, Any]) -> str:
    end = f"{lease['seconds_left']:,.0f} s left"
    if lease["is_dead"]:
        end = "its holder died"
    elif lease["seconds_left"] <= 0:
        end = "its time is up"
    holder = f"attempt {lease['attempt']}, {printable(lease['holder'])}"
    return f"{lease['ordinal']}: {holder}, for {lease['age_seconds']:,.0f} s, {end}"


def _ordinals(ordinals: list[int]) -> str:
    """
    >>> _ordinals([]), _ordinals([3, 7])
    ('0', '2 (3, 7)')
    """
    if not ordinals:
        return "0"
    return f"{len(ordinals):,} ({listed(ordinals, 10)})"


def _history_lines(facts: dict[str, Any]) -> Iterator[str]:
    answer = facts["answer"] or {}
    yield f"prompt {facts['ordinal']}: row {facts['row']:,} in epoch {facts['epoch']}"
    if "damaged" in answer:
        yield f"  {answer['damaged']}"
    if "prompt" in answer:
        yield f"  {_shortened(answer['prompt'])}"
    pairs = zip(answer.get("responses", ()), answer.get("rewards", ()), strict=True)
    for number, (response, reward) in enumerate(pairs):
        line = f"  {number:>3}  {reward:>8.4g}  {_shortened(response)}"
        if facts.get("response") == number:
            line += f"    at position {facts['position']:,}"
        yield line
    yield from map(_event_line, facts["events"])


def _event_line(event: dict[str, Any]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"]))
    facts = {name: value for name, value in event.items() if name not in ("record", "at", "event")}
    said = ", ".join(_in_words(name, value) for name, value in facts.items() if value not in (None, ""))
    return f"  {when}  {event['event']}: {printable(said)}".removesuffix(": ")


def _shortened(value: Any) -> str:
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
    return truncated(printable(value))


def _in_words(name: str, value: Any) -> str:
    match name:
        case "num_bytes":
            return bytes_in_words(value)
        case "seconds":
            return f"for {value:g} s"
        case "reason":
            return str(value)
    return f"{name.replace('_', ' ')} {value}"
