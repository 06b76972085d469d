"""Predict a run before it costs anything: steps, tokens, shares asked and effective, epochs of every source.

With loader settings, it answers for a run that you consider; no plan is written, except by --save. With PLAN, it
answers for a plan that is kept. With neither, it lists the plans that are kept with the store. A source that is read
more than four times is marked, and the step is said at which each cap of --max-epochs binds.

Of rows that are made of whole documents (--packing, and all conversations) it says how full they are, how many tokens
a row has in the mean, what share of them is learned, and how many documents are in no row, and why.

NAME=STORE, once or several times, describes a mixture of stores, as MixedDataLoader makes it. An argument that exists
as a path is a path, also with a '=' in it; ./a=b.store is always one. --weights may be given again with a position:
--weights web=1 --weights 100000:web=.5,code=.5 changes there at once, --ramp 100000-200000:web=.5,code=.5 little by
little. Positions are rows: steps times the batch size.

`plan forget STORE PLAN` removes a kept plan: `batchwright gc` may then remove the versions that it needs. A store that
is called forget is ./forget.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.base.checks import local_path
from batchwright.base.errors import BatchwrightError, PlanError, SpecError
from batchwright.cli.output import add_json, number, print_facts, printable, table
from batchwright.cli.plan_settings import add_settings, plan_of_settings, refuse_settings, settings_given
from batchwright.cli.values import check_positive, named_store, whole_number

if TYPE_CHECKING:
    from batchwright.cli.plan_summary import PlanSummary
    from batchwright.order.plan import Plan
    from batchwright.store import TokenStream

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "describe", "facts_of", "run", "streams_of"]

SUMMARY = "epochs, shares, tokens and steps of a run, before it starts"

EXAMPLES = """\
examples:
  batchwright plan corpus.store --chunk-size 2048 --batch-size 32 --weights web=.7,code=.3 --num-tokens 10e9
  batchwright plan corpus.store                        the plans of runs over this store
  batchwright plan corpus.store 3f2a                   one of them, with its history
  batchwright plan forget corpus.store 3f2a            release it: gc may remove what it needs
  batchwright plan corpus.store --chunk-size 2048 --packing best_fit
  batchwright plan sft.store --max-length 2048 --packing best_fit --loss last
  batchwright plan web=web.store code=code.store --chunk-size 2048 --weights web=.7,code=.3 --max-epochs code=4 \\
      --num-tokens 10e9
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="STORE",
        nargs="+",
        help="STORE, STORE PLAN (kept with it, or a plan's or state's file), NAME=STORE ..., or forget STORE PLAN",
    )
    parser.add_argument(
        "--epochs",
        type=whole_number,
        metavar="N",
        help="epochs of the run (1; if amended, as many as the last amendment needs)",
    )
    parser.add_argument("--save", metavar="FILE", help="write the plan there: a loader with plan=FILE runs it")
    add_settings(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    check_positive(arguments, "epochs")
    if arguments.target[0] == "forget" and not Path("forget").exists():
        return _forget(arguments)
    sources = _named(arguments.target)
    plan = _plan_of(arguments, sources)
    if plan is None:
        return _list(arguments.target[0], as_json=arguments.json)
    if arguments.save is not None:
        _save(plan, local_path(save=arguments.save))
    streams = streams_of(sources or arguments.target[0], plan)
    return describe(plan, epochs=arguments.epochs, streams=streams, as_json=arguments.json)


def _plan_of(arguments: argparse.Namespace, sources: dict[str, str] | None) -> Plan | None:
    """The plan to describe; None where neither PLAN nor settings say which."""
    from batchwright.store import Store
    from batchwright.store.plans import find_plan

    if sources is not None:
        return plan_of_settings(sources, arguments)
    store, *kept = arguments.target
    if kept:
        refuse_settings(arguments, kept[0])
        return find_plan(store, kept[0], batch_size=arguments.batch_size)
    if settings_given(arguments):
        return plan_of_settings(Store(store), arguments)
    if arguments.save is not None:
        raise SpecError("--save which plan?", parameter="save", remedy="--chunk-size and other settings, or PLAN")
    return None


def _named(target: list[str]) -> dict[str, str] | None:
    """NAME=STORE ... as a mapping; None for STORE [PLAN]."""
    named = [named_store(text) for text in target]
    if named[0] is None:
        _refuse_several_stores(target)
        return None
    found: dict[str, str] = {}
    for text, pair in zip(target, named, strict=True):
        if pair is None:
            raise _without_name(
                text, f"NAME={text}; for a plan that is kept, one of its stores: batchwright plan STORE {text}"
            )
        name, path = pair
        if name in found:
            raise SpecError(f"two stores are called {name!r}", parameter="STORE", remedy="rename one")
        found[name] = path
    return found


def _refuse_several_stores(target: list[str]) -> None:
    """Refuse stores without a name where they are more than one: STORE PLAN is one."""
    from batchwright.store.layout import is_store

    if len(target) > 2 or any(named_store(text) or is_store(Path(text)) for text in target[1:]):
        raise _without_name(target[0], "NAME=STORE NAME=STORE ..., or STORE [PLAN]")


def _without_name(text: str, remedy: str) -> SpecError:
    return SpecError(
        f"{text} has no name, and a mixture of stores needs one for each", parameter="STORE", remedy=remedy
    )


def streams_of(where: Any, plan: Plan) -> dict[str, TokenStream] | None:
    """The streams that can say more of a plan's rows, where there is more to say, and they are still in their place."""
    from batchwright.store.plans import streams_for_plan

    if not any(source.rows for source in plan.all_sources):
        return None
    with suppress(BatchwrightError):
        return streams_for_plan(where, plan)
    return None


def describe(
    plan: Plan, *, epochs: int | None = None, streams: dict[str, TokenStream] | None = None, as_json: bool
) -> None:
    from batchwright.cli.plan_summary import summarize
    from batchwright.cli.plan_words import render

    summary = summarize(plan, epochs=epochs, streams=streams)
    print_facts(facts_of(plan, summary), [render(plan, summary)], as_json=as_json)


def facts_of(plan: Plan, summary: PlanSummary) -> dict[str, Any]:
    return {**summary.as_json(), "plan": plan.spec(), "runs": plan.runs}


def _save(plan: Plan, path: Path) -> None:
    if path.exists():
        from batchwright.order.plan import Plan as PlanFile

        known = PlanFile.load(path)
        if known.fingerprint != plan.fingerprint:
            raise PlanError(f"{path} holds another plan: {known.fingerprint}", file=path, remedy="a new file")
    plan.save(path)


def _forget(arguments: argparse.Namespace) -> None:
    from batchwright.store.plans import forget_plan

    if len(arguments.target) != 3:
        raise SpecError("forget which plan?", parameter="PLAN", remedy="batchwright plan forget STORE PLAN")
    _, store, plan = arguments.target
    files = forget_plan(store, plan)
    facts = {"store": store, "forgotten": files[0].stem, "files": [str(file) for file in files]}
    print_facts(facts, [f"forgot plan {files[0].stem}"], as_json=arguments.json)


def _list(path: str, *, as_json: bool) -> None:
    from batchwright.store import Store
    from batchwright.store.plans import list_plans

    store = Store(path)
    plans = list_plans(store.path)
    facts = {"store": str(store.path), "plans": [_line_as_json(plan) for plan in plans]}
    text = f"no plans are kept with {store.path}: opening a loader keeps one; --chunk-size asks for one beforehand"
    if plans:
        left = ["plan", "sources", "batch sizes", "amends"]
        text = table([_cells(plan) for plan in plans], left=left, optional=["amends"])
    print_facts(facts, [text], as_json=as_json)


def _cells(plan: Plan) -> dict[str, Any]:
    return {
        "plan": plan.fingerprint,
        "chunk size": number(plan.row_tokens),
        "seed": plan.seed,
        "rows": number(plan.epoch_rows, "no end"),
        "batch sizes": ", ".join(str(run[-1][2]) for run in plan.runs) or "-",
        "amends": "".join(amendment.parent for amendment in plan.amendments[-1:]),
        "sources": printable(_sources(plan)),
    }


def _sources(plan: Plan) -> str:
    weights = plan.weights
    if weights is None:
        return ", ".join(f"{source.name} ({source.split})" for source in plan.all_sources)
    said = ", ".join(f"{source.name}={weights.get(source.name, 0):g}" for source in plan.all_sources)
    if len(plan.schedule) > 1:
        said += " in the end"
    return said


def _line_as_json(plan: Plan) -> dict[str, object]:
    return {"fingerprint": plan.fingerprint, "lineage": plan.lineage, "plan": plan.spec(), "runs": plan.runs}
