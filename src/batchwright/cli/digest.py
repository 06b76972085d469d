"""Digest the batches of some steps: one number, equal on any machine and for any ranks, workers and framework.

Compare it between two machines, two releases, or a plan and a run: batchwright.audit.digesting computes the same number
in a training loop. It hashes the input ids of every row of the global batch, in order (for rows of whole documents also
targets and loss mask). Rows that an amendment skips are in no batch.
"""

from __future__ import annotations

import argparse

from batchwright.base.words import counted
from batchwright.cli.output import add_json, print_facts
from batchwright.cli.values import add_plan, number_range

SUMMARY = "one number for what some steps read, the same everywhere"

EXAMPLES = """\
examples:
  batchwright digest corpus.store 3f2a --steps 0-99
  batchwright digest corpus.store 3f2a --steps 100-109 --each
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan(parser)
    steps = "first and last step, e.g. 0-99"
    parser.add_argument("--steps", type=number_range, required=True, metavar="A-B", help=steps)
    parser.add_argument("--each", action="store_true", help="also a number for each step")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    from batchwright.audit.digesting import combine, digest_steps
    from batchwright.store.plans import find_plan

    first, last = arguments.steps
    plan = find_plan(arguments.store, arguments.plan, batch_size=arguments.batch_size)
    each, hashes, num_rows, num_tokens = [], [], 0, 0
    for step in digest_steps(arguments.store, plan, first, last):
        hashes.append(step.row_hashes)
        num_rows += len(step.row_hashes)
        num_tokens += step.num_tokens
        if arguments.each and arguments.json:
            each.append({"step": step.step, "position": step.position, "digest": step.number})
        elif arguments.each:
            print(f"{step.number}  step {step.step}")
    number = combine(hashes)
    facts = {
        "plan": plan.fingerprint,
        "steps": [first, last],
        "num_rows": num_rows,
        "num_tokens": num_tokens,
        "digest": number,
    }
    if arguments.each:
        facts["each"] = each
    line = f"{number}  steps {first}-{last}, {counted(num_rows, 'row')}, plan {plan.fingerprint}"
    print_facts(facts, [line], as_json=arguments.json)
