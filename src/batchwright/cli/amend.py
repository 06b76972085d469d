"""Change a plan from a position on, and keep the amended plan with its stores.

Before that position the amended plan equals the old one, and every source continues where it is. --at, --step or
--state set the position; --skip alone begins at its first position. A run continues with the amended plan from any
state at that position or before, including states saved with the old plan. `batchwright trace` finds the positions of a
step or a document.

--weights NAME=W,... holds from that position on, POSITION:NAME=W,... from a later one; --ramp is that of `batchwright
plan`. --add NAME=STORE adds a store, or a source of the plan that grew. PLAN may be left out with --state.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import batchwright as bw
from batchwright.base.errors import PlanError, SpecError
from batchwright.batches.settings import SETTINGS
from batchwright.cli.output import add_json
from batchwright.cli.values import (
    add_plan,
    add_setting,
    add_weights,
    named_store,
    number_range,
    schedule_of,
    whole_number,
)

if TYPE_CHECKING:
    from batchwright.store import TokenStream

SUMMARY = "change a plan from a position on: weights, sources, caps, end, what to skip"

EXAMPLES = """\
examples:
  batchwright amend corpus.store 3f2a --skip 802-803
  batchwright amend corpus.store 3f2a --step 1000 --weights web=.5,code=.5
  batchwright amend corpus.store 3f2a --at 32000 --ramp 32000-64000:web=.2,code=.8 --max-epochs code=4
  batchwright amend corpus.store --state state.json --add math=math.store --weights web=.5,code=.3,math=.2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan(parser, nargs="?")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--at", type=whole_number, metavar="P", help="from this position on")
    where.add_argument("--step", type=whole_number, metavar="S", help="from the first row of this step on")
    where.add_argument("--state", metavar="FILE", help="from the position of a saved state (state_dict() as JSON)")
    add_weights(parser)
    skip = "never hand out these positions; repeatable"
    parser.add_argument("--skip", type=number_range, action="append", metavar="FIRST-LAST", help=skip)
    parser.add_argument("--add", action="append", metavar="NAME=STORE", help="a new or grown source; repeatable")
    for name in ("max_epochs", "num_tokens", "num_rows"):
        add_setting(parser, SETTINGS[name])
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    from batchwright.cli.plan_words import describe
    from batchwright.store.plans import streams_for_plan

    plan, at = _plan_and_position(arguments)
    streams = dict(streams_for_plan(arguments.store, plan))
    amended = _amended(plan, at, streams, arguments)
    stores = list({stream.store.path: stream.store for stream in streams.values()}.values())
    files = _keep(amended, stores)
    use = _use(amended, stores)
    if not arguments.json:
        amendment = amended.amendments[-1]
        print(f"plan {amended.fingerprint} amends {plan.fingerprint} {amendment}")
        print(*(f"  kept in {file}" for file in files), sep="\n")
        print(f"a run continues with it from any state at position {amendment.at:,} or before:")
        print(*(f"  {line}" for line in use), "", sep="\n")
    more = {"parent": plan.fingerprint, "kept_in": files, "use": use}
    describe(amended, stores, more=more, as_json=arguments.json)


def _plan_and_position(arguments: argparse.Namespace) -> tuple[bw.Plan, int | None]:
    """The plan to amend, and the position from which on; None: where --skip begins."""
    from batchwright.store.plans import find_plan

    if arguments.state is not None:
        return _plan_of_state(arguments)
    if arguments.plan is None:
        raise SpecError(
            "which plan?", parameter="PLAN", remedy="`batchwright plan STORE` lists the plans kept; or --state"
        )
    plan = find_plan(arguments.store, arguments.plan, batch_size=arguments.batch_size)
    return plan, _position(plan, arguments)


def _amended(plan: bw.Plan, at: int | None, streams: dict[str, TokenStream], arguments: argparse.Namespace) -> bw.Plan:
    """The amended plan. The streams of sources that join are added to `streams`."""
    from batchwright.loaders.amending import amend_plan, members_to_add
    from batchwright.store.plans import with_places

    begin = at or 0
    members = members_to_add(_to_add(arguments.add), plan, next(iter(streams.values())).store)
    amended = amend_plan(
        plan,
        at=at,
        weights=schedule_of(arguments.weights, arguments.ramp, at=begin, before=_weights_at(plan, begin)),
        opened=members,
        skip=arguments.skip,
        max_epochs=arguments.max_epochs,
        num_rows=arguments.num_rows,
        num_tokens=arguments.num_tokens,
    )
    streams.update((member.name, member.stream) for member in members)
    return with_places(amended, streams)


def _plan_of_state(arguments: argparse.Namespace) -> tuple[bw.Plan, int]:
    """The plan of a saved state, cut as the state's run cut it, and the state's position."""
    from batchwright.order.plan_file import state_in
    from batchwright.store.plans import find_plan

    path = arguments.state
    state = state_in(path)
    if state is None:
        raise PlanError(f"{path} is not a loader's state", file=path, remedy="what state_dict() returned, as JSON")
    plan = find_plan(arguments.store, arguments.plan or state["plan"], batch_size=arguments.batch_size)
    if state["plan"] != plan.fingerprint:
        raise PlanError(
            f"{path} is a state of plan {state['plan']}, not of {plan.fingerprint}",
            file=path,
            remedy=f"amend plan {state['plan']}, or a state that was saved with {plan.fingerprint}",
        )
    if arguments.batch_size is None:
        plan = plan.cut_as(state["steps"])
    return plan, int(state["position"])


def _position(plan: bw.Plan, arguments: argparse.Namespace) -> int | None:
    from batchwright.order.split import Cut, position_of_step

    if arguments.step is not None:
        position, rows = position_of_step(plan.steps, arguments.step, **plan.epoch_spec)
        return Cut(rows_per_step=rows, **plan.epoch_spec).settle(position)
    if arguments.at is not None:
        return int(arguments.at)
    if not arguments.skip:
        raise SpecError("from which position on?", parameter="at", remedy="--at P, --step S, --state FILE, or --skip")
    at: int = min(first for first, _ in arguments.skip)
    return at


def _weights_at(plan: bw.Plan, position: int) -> dict[str, float] | None:
    """The weights just before a position. A ramp begins with these."""
    _, weights = [segment for segment in plan.schedule if segment[0] < max(position, 1)][-1]
    if weights is None:
        return None
    return dict(weights)


def _to_add(given: list[str] | None) -> dict[str, str]:
    added: dict[str, str] = {}
    for text in given or ():
        pair = named_store(text)
        if pair is None or pair[0] in added:
            what = f"{text} has no name, or that of another store"
            path = text if pair is None else pair[1]
            raise SpecError(what, parameter="add", remedy=f"--add NAME={path}")
        added[pair[0]] = pair[1]
    return added


def _keep(plan: bw.Plan, stores: list[bw.Store]) -> list[str]:
    """Keep the plan with its stores. Returns its files."""
    from batchwright.order.plan_file import plan_home
    from batchwright.store.plans import keep_plan

    for store in stores:
        keep_plan(store.path, plan)
    folders = [*(store.path / "plans" for store in stores), plan_home()]
    files = [Path(folder) / f"{plan.fingerprint}.json" for folder in folders]
    return [str(file) for file in files if file.is_file()]


def _use(plan: bw.Plan, stores: list[bw.Store]) -> list[str]:
    """The lines with which a run goes on with the plan."""
    paths = [str(store.path) for store in stores]
    if len(paths) > 1:
        loader = f"MixedDataLoader({paths}"
    elif "chat" in stores[0].manifest.tokenizer:
        loader = f"ConversationDataLoader({paths[0]!r}"
    else:
        loader = f"PretrainDataLoader({paths[0]!r}"
    return [f"loader = bw.{loader}, plan={plan.fingerprint!r})", "loader.load_state_dict(state)"]
