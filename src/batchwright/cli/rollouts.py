"""Where every prompt of a rollout log is, or all that happened to one.

`status` counts from the journal: what is in flight and who has it, what waits for the trainer, what it took, what was
stale, dropped or came late; and that no prompt is lost and none used twice. Exit code 1 says that one is. --position
has the position of a checkpoint, in rows: what the run that it restores has used, and what it gets again.
`show` tells of one prompt all that happened to it, in order, and what was answered: by its ordinal, or by the position
of a row that a trainer used (`batch.metadata["position"]`). Neither locks or changes anything.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from batchwright.base.errors import SpecError
from batchwright.base.words import bytes_in_words, counted
from batchwright.cli.output import add_json, print_json, printable
from batchwright.cli.values import whole_number

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "where every prompt of a rollout log is, or all that happened to one"

EXAMPLES = """\
examples:
  batchwright rollouts status run/rollouts
  batchwright rollouts status run/rollouts --position 4096
  batchwright rollouts show run/rollouts 17
  batchwright rollouts show run/rollouts --position 4099
"""

_SHOWN = 5
"""Leases that are listed without --all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", choices=("status", "show"), help="status, or show")
    parser.add_argument("folder", metavar="FOLDER", help="a rollout log")
    parser.add_argument("ordinal", metavar="ORDINAL", nargs="?", type=whole_number, help="of show: which prompt")
    parser.add_argument(
        "--position", type=whole_number, metavar="ROWS", help="of status: a checkpoint's; of show: a row's"
    )
    parser.add_argument("--all", action="store_true", help="of status: list all leases")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from batchwright.rollouts.log.status import history, ordinal_at, status

    if arguments.what == "show":
        if (arguments.ordinal is None) == (arguments.position is None):
            raise SpecError(
                "which prompt?",
                parameter="ORDINAL",
                remedy=f"batchwright rollouts show {arguments.folder} 17, or --position",
            )
        ordinal, response = arguments.ordinal, None
        if arguments.position is not None:
            ordinal, response = ordinal_at(arguments.folder, arguments.position)
        told = {"folder": arguments.folder, **history(arguments.folder, ordinal)}
        if response is not None:
            told |= {"position": arguments.position, "response": response}
        if arguments.json:
            print_json(told)
        else:
            print(_render_history(told))
        return 0
    if arguments.ordinal is not None:
        raise SpecError(
            "status is of all prompts",
            parameter="ORDINAL",
            remedy=f"batchwright rollouts show {arguments.folder} {arguments.ordinal}",
        )
    facts = {"folder": arguments.folder, **status(arguments.folder, arguments.position)}
    if arguments.json:
        print_json(facts)
    else:
        print(_render(facts, _SHOWN if not arguments.all else None))
    return int(bool(facts["lost"] or facts["used_twice"] or facts.get("checkpoint", {}).get("missing")))


def _render(facts: dict[str, Any], shown: int | None) -> str:
    of, in_flight = facts["prompts"], facts["in_flight"]
    epochs = "endless epochs" if of["epochs"] is None else counted(of["epochs"], "epoch")
    total = "" if of["epochs"] is None else f" of {of['epochs'] * of['num_prompts']:,}"
    repeated = f", each used {of['samples_per_insert']} times" if of["samples_per_insert"] > 1 else ""
    lines = [
        f"rollouts {facts['folder']}",
        f"  prompts    {of['num_prompts']:,} ({of['fingerprint'][:16]}), {epochs}, "
        f"groups of {of['group_size']}{repeated}",
        f"  issued     {facts['cursor']:,}{total}" + (": over" if facts["is_over"] else ""),
        f"  in flight  {len(in_flight):,}",
        *(f"    {_lease(lease)}" for lease in in_flight[:shown]),
    ]
    if shown is not None and len(in_flight) > shown:
        lines.append(f"    and {len(in_flight) - shown:,} more: --all lists them")
    lines += [
        f"  again      {_ordinals(facts['again'])}",
        f"  waiting    {facts['waiting']:,} answered, and not taken",
        f"  taken      {facts['taken']:,}",
        f"  dropped    {_ordinals(list(facts['dropped']))}",
        f"  stale      {counted(facts['stale'], 'answer')}",
        f"  late       {counted(facts['late'], 'answer')}",
    ]
    if "checkpoint" in facts:
        checkpoint = facts["checkpoint"]
        lines.append(
            f"  checkpoint at row {checkpoint['position']:,}: {counted(checkpoint['groups_used'], 'group')} used; "
            f"{checkpoint['groups_to_come']:,} more were taken after it, and come again in the same order"
        )
        if checkpoint["missing"]:
            lines.append(
                f"  missing    {counted(checkpoint['missing'], 'use')} of the checkpoint: this log has no such groups"
            )
    lines += [f"  lost       {_ordinals(facts['lost'])}", f"  used twice {_ordinals(facts['used_twice'])}"]
    return "\n".join(lines)


def _lease(lease: dict[str, Any]) -> str:
    end = "its holder died" if lease["is_dead"] else f"{lease['seconds_left']:,.0f} s left"
    if lease["seconds_left"] <= 0 and not lease["is_dead"]:
        end = "its time is up"
    return (
        f"{lease['ordinal']}: attempt {lease['attempt']}, {printable(lease['holder'])}, "
        f"for {lease['age_seconds']:,.0f} s, {end}"
    )


def _ordinals(ordinals: list[int], shown: int = 10) -> str:
    if not ordinals:
        return "0"
    more = ", ..." if len(ordinals) > shown else ""
    return f"{len(ordinals):,} ({', '.join(map(str, ordinals[:shown]))}{more})"


def _render_history(told: dict[str, Any]) -> str:
    lines = [f"prompt {told['ordinal']}: row {told['row']:,} in epoch {told['epoch']}"]
    answer = told["answer"] or {}
    lines += [f"  {answer['damaged']}"] if "damaged" in answer else []
    lines += [f"  {_shortened(answer['prompt'])}"] if "prompt" in answer else []
    for number, (response, reward) in enumerate(
        zip(answer.get("responses", ()), answer.get("rewards", ()), strict=True)
    ):
        mark = f"    at position {told['position']:,}" if told.get("response") == number else ""
        lines.append(f"  {number:>3}  {reward:>8.4g}  {_shortened(response)}{mark}")
    for event in told["events"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"]))
        facts = {name: value for name, value in event.items() if name not in ("record", "at", "event")}
        said = ", ".join(_in_words(name, value) for name, value in facts.items() if value not in (None, ""))
        lines.append(f"  {when}  {event['event']}" + (f": {printable(said)}" if said else ""))
    return "\n".join(lines)


def _shortened(value: Any, most: int = 80) -> str:
    text = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text if len(text) <= most else text[: most - 3] + "..."


def _in_words(name: str, value: Any) -> str:
    if name == "num_bytes":
        return bytes_in_words(value)
    if name == "seconds":
        return f"for {value:g} s"
    return str(value) if name == "reason" else f"{name.replace('_', ' ')} {value}"
