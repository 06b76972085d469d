"""Predict a run before it costs anything: steps, tokens, requested and effective shares, epochs of each source.

With loader settings, it describes the run that they would give. No plan is written, except by --save. With PLAN, it
describes a plan that is kept. Without either, it lists the plans kept with the store. Sources that are read more than
four times are marked. For each cap of --max-epochs, the output has the step at which it takes effect.

For rows of whole documents (--packing, and all conversations), it shows how full the rows are, their mean number of
tokens, the share of tokens that is trained, and how many documents are left out, and why.

NAME=STORE, repeated, describes a mixture of stores, as MixedDataLoader makes it. An argument that exists as a path is
a path, even with a '=' in it; ./a=b.store always is one. --weights can be repeated with a position: --weights web=1
--weights 100000:web=.5,code=.5 changes there at once, --ramp 100000-200000:web=.5,code=.5 in small steps. Positions are
rows: steps times the batch size.

`plan forget STORE PLAN` removes a kept plan: `batchwright gc` may then remove the versions that it needs. Write
./forget for a store called forget.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import batchwright as bw
from batchwright.base.checks import local_path
from batchwright.base.errors import PlanError, SpecError
from batchwright.cli.output import add_json, number, print_facts, printable, table
from batchwright.cli.values import add_settings, count, named_store, refuse_settings, settings_given

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
    epochs = "epochs of the run (1; if amended, as many as the last amendment needs)"
    parser.add_argument("--epochs", type=count, metavar="N", help=epochs)
    parser.add_argument("--save", metavar="FILE", help="write the plan to a file: a loader with plan=FILE runs it")
    add_settings(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    from batchwright.cli.plan_words import describe

    if arguments.target[0] == "forget" and not Path("forget").exists():
        return _forget(arguments)
    sources = _named(arguments.target)
    plan = _plan_of(arguments, sources)
    if plan is None:
        return _list(arguments.target[0], as_json=arguments.json)
    if arguments.save is not None:
        _save(plan, local_path(save=arguments.save))
    return describe(plan, sources or arguments.target[0], epochs=arguments.epochs, as_json=arguments.json)


def _plan_of(arguments: argparse.Namespace, sources: dict[str, str] | None) -> bw.Plan | None:
    """The plan to describe; None where neither PLAN nor settings say which."""
    from batchwright.cli.plan_settings import plan_of_settings
    from batchwright.store.plans import find_plan

    if sources is not None:
        return plan_of_settings(sources, arguments)
    store, *kept = arguments.target
    if kept:
        refuse_settings(arguments, kept[0])
        return find_plan(store, kept[0], batch_size=arguments.batch_size)
    if settings_given(arguments):
        return plan_of_settings(bw.Store(store), arguments)
    if arguments.save is not None:
        raise SpecError("which plan is --save for?", parameter="save", remedy="--chunk-size and more, or PLAN")
    return None


def _named(target: list[str]) -> dict[str, str] | None:
    """NAME=STORE ... as a mapping; None for STORE [PLAN]."""
    from batchwright.store.layout import is_store

    named = [named_store(text) for text in target]
    if not any(named) and len(target) <= 2 and not any(is_store(Path(text)) for text in target[1:]):
        return None
    found: dict[str, str] = {}
    for text, pair in zip(target, named, strict=True):
        if pair is None:
            what = f"{text} has no name, and a mixture of stores needs one for each"
            raise SpecError(what, parameter="STORE", remedy="NAME=STORE NAME=STORE ..., or STORE [PLAN]")
        name, path = pair
        if name in found:
            raise SpecError(f"two stores are called {name!r}", parameter="STORE", remedy="rename one")
        found[name] = path
    return found


def _save(plan: bw.Plan, path: Path) -> None:
    if path.exists():
        known = bw.Plan.load(path)
        if known.fingerprint != plan.fingerprint:
            raise PlanError(f"{path} holds another plan: {known.fingerprint}", file=path, remedy="a new file")
    plan.save(path)


def _forget(arguments: argparse.Namespace) -> None:
    from batchwright.store.plans import forget_plan

    if len(arguments.target) != 3:
        raise SpecError("which plan?", parameter="PLAN", remedy="batchwright plan forget STORE PLAN")
    _, store, plan = arguments.target
    files = forget_plan(store, plan)
    facts = {"store": store, "forgotten": files[0].stem, "files": [str(file) for file in files]}
    print_facts(facts, [f"forgot plan {files[0].stem}"], as_json=arguments.json)


def _list(path: str, *, as_json: bool) -> None:
    from batchwright.store.plans import list_plans

    store = bw.Store(path)
    plans = list_plans(store.path)
    listed = [
        {"fingerprint": plan.fingerprint, "lineage": plan.lineage, "plan": plan.spec(), "runs": plan.runs}
        for plan in plans
    ]
    text = f"no plans are kept with {store.path}: a loader keeps its plan; --chunk-size describes one beforehand"
    if plans:
        left = ["plan", "sources", "batch sizes", "amends"]
        text = table([_cells(plan) for plan in plans], left=left, optional=["amends"])
    print_facts({"store": str(store.path), "plans": listed}, [text], as_json=as_json)


def _cells(plan: bw.Plan) -> dict[str, Any]:
    return {
        "plan": plan.fingerprint,
        "chunk size": number(plan.row_tokens),
        "seed": plan.seed,
        "rows": number(plan.epoch_rows, "no end"),
        "batch sizes": ", ".join(str(run[-1][2]) for run in plan.runs) or "-",
        "amends": "".join(amendment.parent for amendment in plan.amendments[-1:]),
        "sources": printable(_sources(plan)),
    }


def _sources(plan: bw.Plan) -> str:
    weights = plan.weights
    if weights is None:
        return ", ".join(f"{source.name} ({source.split})" for source in plan.all_sources)
    said = ", ".join(f"{source.name}={weights.get(source.name, 0):g}" for source in plan.all_sources)
    if len(plan.schedule) > 1:
        said += " in the end"
    return said
