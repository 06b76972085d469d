"""What a run will read, before it costs anything: steps, tokens, shares asked and effective, epochs of every source.

With loader settings, it answers for a run that you consider; nothing is written but --save. With PLAN, it answers for
a plan that is kept. With neither, it lists the plans that are kept with the store. A source that is read more than four
times is marked.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.common import (
    add_json,
    add_settings,
    plan_argument,
    plan_of_settings,
    print_json,
    settings_given,
    table,
    whole_number,
)
from penstock.errors import PlanError, SpecError

if TYPE_CHECKING:
    from penstock.plan import Plan

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "describe", "run"]

SUMMARY = "epochs, shares, tokens and steps of a run, before it starts"

EXAMPLES = """\
examples:
  penstock plan corpus.store --chunk-size 2048 --batch-size 32 --weights web=.7,code=.3 --num-tokens 10e9
  penstock plan corpus.store                        the plans of runs over this store
  penstock plan corpus.store 3f2a                   one of them
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="a plan that is kept, or a plan's or state's file")
    parser.add_argument("--epochs", type=whole_number, default=1, metavar="N", help="go through the rows so often (1)")
    parser.add_argument("--save", metavar="FILE", help="write the plan there: PretrainDataLoader(plan=FILE) runs it")
    add_settings(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from penstock.plans import find_plan
    from penstock.spec import at_least
    from penstock.store import Store

    at_least(1, epochs=arguments.epochs)
    given = settings_given(arguments)
    if arguments.plan is not None:
        if given:
            raise SpecError(f"{given[0]} makes a new plan, and {arguments.plan} is one", remedy="give one of the two")
        plan = find_plan(arguments.store, plan_argument(arguments.plan), batch_size=arguments.batch_size)
    elif given:
        plan = plan_of_settings(Store(arguments.store), arguments)
    else:
        if arguments.save is not None:
            raise SpecError("--save which plan?", parameter="save", remedy="--chunk-size and other settings, or PLAN")
        return _list(arguments)
    if arguments.save is not None:
        _save(plan, Path(arguments.save))
    return describe(plan, epochs=arguments.epochs, as_json=arguments.json)


def describe(plan: Plan, *, epochs: int = 1, as_json: bool) -> int:
    from penstock.cli.summary import render, summarize

    summary = summarize(plan, batch_rows=plan.runs[0][-1][2] if len(plan.runs) == 1 else None, epochs=epochs)
    if as_json:
        print_json({**summary.as_json(), "plan": plan.spec(), "runs": plan.runs})
    else:
        print(render(plan, summary))
    return 0


def _save(plan: Plan, path: Path) -> None:
    if path.exists() and plan_argument(str(path)) is not None:
        from penstock.plan import Plan as PlanFile

        known = PlanFile.load(path)
        if known.fingerprint != plan.fingerprint:
            raise PlanError(f"{path} holds another plan: {known.fingerprint}", file=path, remedy="a new file")
    plan.save(path)


def _list(arguments: argparse.Namespace) -> int:
    from penstock.plans import list_plans
    from penstock.store import Store

    store = Store(arguments.store)
    plans = list_plans(store.path)
    if arguments.json:
        print_json({"store": str(store.path), "plans": [_line_as_json(plan) for plan in plans]})
        return 0
    if not plans:
        print(f"no plans are kept with {store.path}: opening a loader keeps one; --chunk-size asks for one beforehand")
        return 0
    rows = [
        [
            plan.fingerprint,
            f"{plan.row_tokens:,}",
            plan.seed,
            "no end" if plan.epoch_rows is None else f"{plan.epoch_rows:,}",
            ", ".join(str(run[-1][2]) for run in plan.runs) or "-",
            _sources(plan),
        ]
        for plan in plans
    ]
    print(
        table(
            ["plan", "chunk size", "seed", "rows", "batch sizes", "sources"],
            rows,
            left=["plan", "sources", "batch sizes"],
        )
    )
    return 0


def _sources(plan: Plan) -> str:
    weights = plan.weights
    if weights is None:
        return ", ".join(f"{source.name} ({source.split})" for source in plan.sources)
    return ", ".join(f"{source.name}={weights.get(source.name, 0):g}" for source in plan.sources)


def _line_as_json(plan: Plan) -> dict[str, object]:
    return {"fingerprint": plan.fingerprint, "plan": plan.spec(), "runs": plan.runs}
