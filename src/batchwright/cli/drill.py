"""Prove on your own plan that a run can be killed and restarted anywhere, on other ranks and workers.

It reads the steps once without a break. Then it reads them again in legs of real processes, each leg with other ranks
and workers, started from the last checkpoint and killed with SIGKILL at a random step. Every row and state of every
rank is compared with the uninterrupted run. If one differs, it prints the first step that does, with exit code 1.

TARGET is a plan (its fingerprint with --store, or its file), or a store with loader settings. Nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import batchwright as bw
from batchwright.base.checks import at_least, local_path
from batchwright.base.errors import PlanError, SpecError
from batchwright.base.words import counted
from batchwright.cli.output import add_json, print_facts
from batchwright.cli.values import add_settings, refuse_settings, settings_given, whole_number

if TYPE_CHECKING:
    from batchwright.audit.drilling import DrillReport, Leg, LegResult

SUMMARY = "kill -9 and restart your own plan, and compare"

EXAMPLES = """\
examples:
  batchwright drill 3f2a --store corpus.store --steps 200
  batchwright drill corpus.store/plans/3f2a91c04be7d155.json
  batchwright drill corpus.store --chunk-size 2048 --batch-size 32 --weights web=.7,code=.3
"""

_ROW = "{leg:>3}  {ranks:>5}  {workers:>7}  {prefetch:>8}  {steps:<13}  {ended:<22}  {equal}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET", help="a plan, or a store with loader settings")
    add("--store", metavar="STORE", help="the plan's store")
    add("--steps", type=whole_number, default=200, metavar="N", help="number of steps (200)")
    add("--from-step", type=whole_number, default=0, metavar="N", help="the first step (0)")
    add("--ranks", type=_numbers, default=(1, 3, 8), metavar="N,...", help="ranks of the legs (1,3,8)")
    add("--workers", type=_numbers, default=(0, 2), metavar="N,...", help="workers of a rank (0,2)")
    add("--checkpoint-every", type=whole_number, default=10, metavar="N", help="steps between checkpoints (10)")
    add("--kill-seed", type=int, metavar="N", help="kill in the same steps as an earlier drill")
    add_settings(parser)
    add_json(parser)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,3,8") from None


def run(arguments: argparse.Namespace) -> int:
    from batchwright.audit.drilling import legs_over

    store, plan = _target(arguments)
    legs = legs_over(arguments.ranks, arguments.workers)
    rows: int = plan.steps[-1][2]
    at_least(len(legs), steps=arguments.steps)
    if not arguments.json:
        _begin(arguments, store, plan, rows, legs)
    report = bw.drill(
        store,
        plan,
        steps=arguments.steps,
        first_step=arguments.from_step,
        batch_size=rows,
        legs=legs,
        checkpoint_every=arguments.checkpoint_every,
        kill_seed=arguments.kill_seed,
        on_leg=_progress if arguments.json else _print_leg,
    )
    print_facts(_as_json(report, store), [_outcome(report)], as_json=arguments.json)
    return int(not report.ok)


def _target(arguments: argparse.Namespace) -> tuple[Path, bw.Plan]:
    """(store, plan with the batch size)."""
    from batchwright.store.plans import find_plan

    target = local_path(target=arguments.target)
    if target.is_dir():
        return target, _considered(target, arguments)
    refuse_settings(arguments, arguments.target)
    root = _store_of(target, arguments)
    found = find_plan(root, arguments.target, batch_size=arguments.batch_size)
    return root, found.cut_as([[0, 0, found.steps[-1][2]]])


def _considered(folder: Path, arguments: argparse.Namespace) -> bw.Plan:
    """The plan of a store with loader settings."""
    from batchwright.cli.plan_settings import plan_of_settings
    from batchwright.store.plans import list_plans

    if arguments.store is not None:
        raise SpecError(f"{folder} is a folder, and --store names another", remedy="a plan with --store")
    store = bw.Store(folder)
    if not settings_given(arguments):
        plans = [plan.fingerprint for plan in list_plans(folder)]
        raise SpecError(
            "which plan?",
            parameter="target",
            plans=", ".join(plans) or "none is kept with this store",
            remedy=f"--chunk-size or --max-length (and more), or a plan: batchwright drill PLAN --store {folder}",
        )
    return plan_of_settings(store, arguments)


def _store_of(plan: Path, arguments: argparse.Namespace) -> Path:
    """The store that --store names, or the one around the plan's file."""
    from batchwright.store.layout import is_store

    if arguments.store is not None:
        return local_path(store=arguments.store)
    around = plan.absolute().parent.parent
    if plan.is_file() and is_store(around):
        return around
    raise PlanError(f"the store of {arguments.target} is not known", remedy="--store STORE")


def _begin(arguments: argparse.Namespace, store: Path, plan: bw.Plan, rows: int, legs: list[Leg]) -> None:
    tokens = f"{plan.row_tokens:,} tokens"
    if any(source.rows for source in plan.all_sources):
        tokens = f"at most {tokens}"
    print(
        f"drill of plan {plan.fingerprint} over {store}: {counted(arguments.steps, 'step')} of {rows} x "
        f"{tokens}, {counted(len(legs) - 1, 'kill')}"
    )
    if max(leg.ranks for leg in legs) > rows:
        print(f"a batch has {counted(rows, 'row')}, so no leg has more ranks than that")
    names = ("leg", "ranks", "workers", "prefetch", "steps", "ended", "equal")
    print(_ROW.format(**{name: name for name in names}), flush=True)


def _print_leg(result: LegResult) -> None:
    steps, ended = "none", "finished"
    equal = "NO" if result.differences else "yes"
    if result.num_steps:
        steps = f"{result.first_step}-{result.first_step + result.num_steps - 1}"
    if result.killed_in_step is not None:
        ended = f"kill -9 in step {result.killed_in_step}"
    elif result.differences:
        ended = "stopped by an error"
    print(_ROW.format(leg=result.number, **asdict(result.leg), steps=steps, ended=ended, equal=equal), flush=True)


def _progress(result: LegResult) -> None:
    print(f"leg {result.number} ({result.leg}): {counted(result.num_steps, 'step')}", file=sys.stderr, flush=True)


def _outcome(report: DrillReport) -> str:
    last = report.first_step + report.num_steps - 1
    difference = report.first_difference
    again = f"--kill-seed {report.kill_seed} kills in the same steps again"
    if difference is not None:
        return f"FAILED: {difference}\n{again}"
    repeated = sum(leg.repeated_steps for leg in report.legs)
    return (
        f"steps {report.first_step}-{last} equal the uninterrupted run's in every leg, {repeated} of them twice; "
        f"digest {report.digest}\n{again}"
    )


def _as_json(report: DrillReport, store: Path) -> dict[str, Any]:
    difference = report.first_difference
    return {
        "ok": report.ok,
        "store": str(store),
        "plan": report.plan,
        "batch_size": report.batch_size,
        "row_tokens": report.row_tokens,
        "steps": [report.first_step, report.first_step + report.num_steps - 1],
        "kill_seed": report.kill_seed,
        "digest": report.digest,
        "first_difference": difference and asdict(difference),
        "legs": [_leg_as_json(result) for result in report.legs],
    }


def _leg_as_json(result: LegResult) -> dict[str, Any]:
    names = ("first_step", "num_steps", "killed_in_step", "repeated_steps")
    facts = {**asdict(result.leg), **{name: getattr(result, name) for name in names}}
    return {**facts, "num_differences": len(result.differences), "seconds": round(result.seconds, 3)}
