"""Prove on your own plan that a run can be killed and restarted anywhere, on other ranks and workers.

Reads the steps once without a break. Then reads them again in legs of real processes, each leg with other ranks and
workers, started from the last checkpoint and killed with signal 9 at a random step. Every row and state that any rank
was handed is compared with the uninterrupted run. Exit code 1 and the first step that differs, if any does.

TARGET is a plan (its fingerprint with --store, or its file), or a store with loader settings. Nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.base.checks import local_path
from batchwright.base.errors import PlanError, SpecError
from batchwright.base.words import counted
from batchwright.cli.output import add_json, print_json
from batchwright.cli.plan_settings import add_settings, plan_of_settings, settings_given
from batchwright.cli.values import whole_number

if TYPE_CHECKING:
    from batchwright.audit.drilling import DrillReport, Leg, LegResult
    from batchwright.order.plan import Plan

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "kill -9 and restart your own plan, and compare"

EXAMPLES = """\
examples:
  batchwright drill 3f2a --store corpus.store --steps 200
  batchwright drill corpus.store/plans/3f2a91c04be7d155.json
  batchwright drill corpus.store --chunk-size 2048 --batch-size 32 --weights web=.7,code=.3
"""

_ROW = "{leg:>3}  {ranks:>5}  {workers:>7}  {prefetch:>8}  {steps:<13}  {ended:<22}  {equal}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="a plan, or a store with loader settings")
    parser.add_argument("--store", metavar="STORE", help="the plan's store")
    parser.add_argument("--steps", type=whole_number, default=200, metavar="N", help="how many (200)")
    parser.add_argument("--from-step", type=whole_number, default=0, metavar="N", help="the first of them (0)")
    parser.add_argument("--ranks", type=_numbers, default=(1, 3, 8), metavar="N,...", help="ranks of the legs (1,3,8)")
    parser.add_argument("--workers", type=_numbers, default=(0, 2), metavar="N,...", help="workers of a rank (0,2)")
    parser.add_argument("--checkpoint-every", type=whole_number, default=10, metavar="N", help="steps (10)")
    parser.add_argument("--kill-seed", type=int, metavar="N", help="kill in the same steps as an earlier drill")
    add_settings(parser)
    add_json(parser)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,3,8") from None


def run(arguments: argparse.Namespace) -> int:
    from batchwright.audit.drilling import drill, legs_over
    from batchwright.base.checks import at_least

    store, plan = _target(arguments)
    legs = legs_over(arguments.ranks, arguments.workers)
    rows: int = plan.steps[-1][2]
    at_least(len(legs), steps=arguments.steps)
    if not arguments.json:
        _begin(arguments, store, plan, rows, legs)
    report = drill(
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
    if arguments.json:
        print_json(_as_json(report, store))
    else:
        print(_outcome(report))
    return 0 if report.ok else 1


def _target(arguments: argparse.Namespace) -> tuple[Path, Plan]:
    """(store, plan with the batch size)."""
    from batchwright.store import Store
    from batchwright.store.layout import is_store
    from batchwright.store.plans import find_plan

    target = local_path(target=arguments.target)
    given = settings_given(arguments)
    if target.is_dir():
        if arguments.store is not None:
            raise SpecError(f"{target} is a folder, and --store names another", remedy="a plan with --store")
        store = Store(target)
        if not given:
            raise SpecError(
                "which plan?",
                parameter="target",
                plans=_plans_of(target),
                remedy=f"--chunk-size or --max-length (and more), or a plan: batchwright drill PLAN --store {target}",
            )
        return target, plan_of_settings(store, arguments)
    if given:
        raise SpecError(f"{given[0]} makes a new plan, and {arguments.target} is one", remedy="give one of the two")
    plan = arguments.target
    beside = target.absolute().parent.parent
    if arguments.store is not None:
        root = local_path(store=arguments.store)
    elif target.is_file() and is_store(beside):
        root = beside
    else:
        raise PlanError(f"the store of {arguments.target} is not known", remedy="--store STORE")
    found = find_plan(root, plan, batch_size=arguments.batch_size)
    return root, found.cut_as([[0, 0, found.steps[-1][2]]])


def _plans_of(store: Path) -> str:
    from batchwright.store.plans import list_plans

    return ", ".join(plan.fingerprint for plan in list_plans(store)) or "none is kept with this store"


def _begin(arguments: argparse.Namespace, store: Path, plan: Plan, rows: int, legs: list[Leg]) -> None:
    at_most = "at most " if any(source.rows for source in plan.all_sources) else ""
    print(
        f"drill of plan {plan.fingerprint} over {store}: {counted(arguments.steps, 'step')} of {rows} x "
        f"{at_most}{plan.row_tokens:,} tokens, {counted(len(legs) - 1, 'kill')}"
    )
    if max(leg.ranks for leg in legs) > rows:
        print(f"a batch has {counted(rows, 'row')}, so no leg has more ranks than that")
    header = {"leg": "leg", "ranks": "ranks", "workers": "workers", "prefetch": "prefetch"}
    print(_ROW.format(**header, steps="steps", ended="ended", equal="equal"), flush=True)


def _print_leg(result: LegResult) -> None:
    last = result.first_step + result.num_steps - 1
    ended = "finished"
    if result.killed_in_step is not None:
        ended = f"kill -9 in step {result.killed_in_step}"
    elif result.differences:
        ended = "stopped by an error"
    line = _ROW.format(
        leg=result.number,
        ranks=result.leg.ranks,
        workers=result.leg.workers,
        prefetch=result.leg.prefetch,
        steps=f"{result.first_step}-{last}" if result.num_steps else "none",
        ended=ended,
        equal="NO" if result.differences else "yes",
    )
    print(line, flush=True)


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
    from dataclasses import asdict

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
        "first_difference": None if difference is None else asdict(difference),
        "legs": [
            {
                **asdict(result.leg),
                "first_step": result.first_step,
                "num_steps": result.num_steps,
                "killed_in_step": result.killed_in_step,
                "repeated_steps": result.repeated_steps,
                "num_differences": len(result.differences),
                "seconds": round(result.seconds, 3),
            }
            for result in report.legs
        ],
    }
