"""Where every prompt of a rollout log is, or all that happened to one.

`status` counts from the journal: what is in flight and who has it, what waits for the trainer, what it took, what was
stale, dropped or came late; and that no prompt is lost and none used twice. Exit code 1 says that one is. --position
has the position of a checkpoint, in rows: what the run that it restores has used, and what it gets again.
`show` prints the history of one prompt and its answer: by its ordinal, or by the position of a row that a trainer used
(`batch.metadata["position"]`). Neither locks or changes anything.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from batchwright.base.errors import SpecError
from batchwright.base.words import bytes_in_words, counted, truncated
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

_MAX_LEASES = 5
"""Leases that are listed without --all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", choices=("status", "show"), help="status, or show")
    parser.add_argument("folder", metavar="FOLDER", help="a rollout log")
    parser.add_argument("ordinal", metavar="ORDINAL", nargs="?", type=whole_number, help="of show: the prompt")
    parser.add_argument(
        "--position", type=whole_number, metavar="ROWS", help="of status: a checkpoint's; of show: a row's"
    )
    parser.add_argument("--all", action="store_true", help="of status: list all leases")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.what == "show":
        return _show(arguments)
    return _status(arguments)


def _show(arguments: argparse.Namespace) -> int:
    from batchwright.rollouts.log.status import history, ordinal_at

    folder, ordinal, position = arguments.folder, arguments.ordinal, arguments.position
    if (ordinal is None) == (position is None):
        remedy = f"batchwright rollouts show {folder} 17, or --position"
        raise SpecError("which prompt?", parameter="ORDINAL", remedy=remedy)
    facts: dict[str, Any] = {}
    if position is not None:
        ordinal, response = ordinal_at(folder, position)
        facts = {"position": position, "response": response}
    facts = {"folder": folder, **history(folder, ordinal), **facts}
    if arguments.json:
        print_json(facts)
    else:
        print("\n".join(_history_lines(facts)))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from batchwright.rollouts.log.status import status

    if arguments.ordinal is not None:
        remedy = f"batchwright rollouts show {arguments.folder} {arguments.ordinal}"
        raise SpecError("status is of all prompts", parameter="ORDINAL", remedy=remedy)
    facts = {"folder": arguments.folder, **status(arguments.folder, arguments.position)}
    if arguments.json:
        print_json(facts)
    else:
        print("\n".join(_status_lines(facts, len(facts["in_flight"]) if arguments.all else _MAX_LEASES)))
    return int(bool(facts["lost"] or facts["used_twice"] or facts.get("checkpoint", {}).get("missing")))


def _status_lines(facts: dict[str, Any], max_leases: int) -> list[str]:
    prompts, in_flight = facts["prompts"], facts["in_flight"]
    epochs, total = "endless epochs", ""
    if prompts["epochs"] is not None:
        epochs, total = counted(prompts["epochs"], "epoch"), f" of {prompts['epochs'] * prompts['num_prompts']:,}"
    repeated = f", each used {prompts['samples_per_insert']} times" if prompts["samples_per_insert"] > 1 else ""
    lines = [
        f"rollouts {facts['folder']}",
        f"  prompts    {prompts['num_prompts']:,} ({prompts['fingerprint'][:16]}), {epochs}, "
        f"groups of {prompts['group_size']}{repeated}",
        f"  issued     {facts['cursor']:,}{total}{': over' if facts['is_over'] else ''}",
        f"  in flight  {len(in_flight):,}",
        *(f"    {_lease(lease)}" for lease in in_flight[:max_leases]),
    ]
    if len(in_flight) > max_leases:
        lines.append(f"    and {len(in_flight) - max_leases:,} more: --all lists them")
    lines += [
        f"  again      {_ordinals(facts['again'])}",
        f"  waiting    {facts['waiting']:,} answered, and not taken",
        f"  taken      {facts['taken']:,}",
        f"  dropped    {_ordinals(list(facts['dropped']))}",
        f"  stale      {counted(facts['stale'], 'answer')}",
        f"  late       {counted(facts['late'], 'answer')}",
    ]
    if "checkpoint" in facts:
        lines += _checkpoint_lines(facts["checkpoint"])
    return [*lines, f"  lost       {_ordinals(facts['lost'])}", f"  used twice {_ordinals(facts['used_twice'])}"]


def _checkpoint_lines(checkpoint: dict[str, Any]) -> list[str]:
    lines = [
        f"  checkpoint at row {checkpoint['position']:,}: {counted(checkpoint['groups_used'], 'group')} used; "
        f"{checkpoint['groups_to_come']:,} more were taken after it, and come again in the same order"
    ]
    if checkpoint["missing"]:
        missing = counted(checkpoint["missing"], "use")
        lines.append(f"  missing    {missing} of the checkpoint: this log has no such groups")
    return lines


def _lease(lease: dict[str, Any]) -> str:
    end = f"{lease['seconds_left']:,.0f} s left"
    if lease["is_dead"]:
        end = "its holder died"
    elif lease["seconds_left"] <= 0:
        end = "its time is up"
    holder = f"attempt {lease['attempt']}, {printable(lease['holder'])}"
    return f"{lease['ordinal']}: {holder}, for {lease['age_seconds']:,.0f} s, {end}"


def _ordinals(ordinals: list[int], shown: int = 10) -> str:
    if not ordinals:
        return "0"
    more = ", ..." if len(ordinals) > shown else ""
    return f"{len(ordinals):,} ({', '.join(map(str, ordinals[:shown]))}{more})"


def _history_lines(facts: dict[str, Any]) -> list[str]:
    answer = facts["answer"] or {}
    lines = [f"prompt {facts['ordinal']}: row {facts['row']:,} in epoch {facts['epoch']}"]
    if "damaged" in answer:
        lines.append(f"  {answer['damaged']}")
    if "prompt" in answer:
        lines.append(f"  {_shortened(answer['prompt'])}")
    pairs = zip(answer.get("responses", ()), answer.get("rewards", ()), strict=True)
    for number, (response, reward) in enumerate(pairs):
        mark = f"    at position {facts['position']:,}" if facts.get("response") == number else ""
        lines.append(f"  {number:>3}  {reward:>8.4g}  {_shortened(response)}{mark}")
    return [*lines, *map(_event_line, facts["events"])]


def _event_line(event: dict[str, Any]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"]))
    facts = {name: value for name, value in event.items() if name not in ("record", "at", "event")}
    said = ", ".join(_in_words(name, value) for name, value in facts.items() if value not in (None, ""))
    line = f"  {when}  {event['event']}"
    return f"{line}: {printable(said)}" if said else line


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return truncated(printable(text))


def _in_words(name: str, value: Any) -> str:
    match name:
        case "num_bytes":
            return bytes_in_words(value)
        case "seconds":
            return f"for {value:g} s"
        case "reason":
            return str(value)
    return f"{name.replace('_', ' ')} {value}"
