"""Change a plan from a position on, and keep the amended plan with its stores.

The amended plan equals the old one before that position, and every source goes on where it is. --at, --step or --state
say from where; --skip alone begins at the first position that it names. A run goes on with it from any state at that
position or before, also one saved with the old plan. `batchwright trace` finds the positions of a step or a document.

--weights NAME=W,... holds from that position on, POSITION:NAME=W,... from a later one, --ramp as in `batchwright plan`.
--add NAME=STORE lets a store join, or a source of the plan that grew. STORE is any one store of the plan; PLAN may be
left out with --state.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from batchwright.base.errors import PlanError, SpecError
from batchwright.cli.output import add_json, print_json
from batchwright.cli.plan_settings import add_weights, holds_conversations
from batchwright.cli.values import (
    check_positive,
    epochs_of_sources,
    named_store,
    position_range,
    schedule_of,
    whole_number,
)

if TYPE_CHECKING:
    from batchwright.order.plan import Plan, State
    from batchwright.store import Store, TokenStream

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "change a plan from a position on: weights, sources, caps, end, what to skip"

EXAMPLES = """\
examples:
  batchwright amend corpus.store 3f2a --skip 802-803
  batchwright amend corpus.store 3f2a --step 1000 --weights web=.5,code=.5
  batchwright amend corpus.store 3f2a --at 32000 --ramp 32000-64000:web=.2,code=.8 --max-epochs code=4
  batchwright amend corpus.store --state state.json --add math=math.store --weights web=.5,code=.3,math=.2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("store", metavar="STORE")
    add("plan", metavar="PLAN", nargs="?", help="fingerprint, plan file or state file")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--at", type=whole_number, metavar="P", help="from this position on")
    where.add_argument("--step", type=whole_number, metavar="S", help="from the first row of this step on")
    where.add_argument(
        "--state", metavar="FILE", help="from where this saved state is (JSON, as state_dict() gives it)"
    )
    add_weights(parser)
    add(
        "--skip",
        type=position_range,
        action="append",
        metavar="FIRST-LAST",
        help="never give out these positions; several times for several",
    )
    add("--add", action="append", metavar="NAME=STORE", help="a source that joins, or that grew; several times")
    add("--max-epochs", type=epochs_of_sources, metavar="NAME=N,...", help="caps, e.g. code=4")
    add("--num-tokens", type=whole_number, metavar="N", help="end the stream there, e.g. 10e9 or 10B")
    add("--num-rows", type=whole_number, metavar="N", help="end the stream there")
    add("--batch-size", type=whole_number, metavar="ROWS", help="where the plan does not say it")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    from batchwright.cli.plan import describe, facts_of
    from batchwright.cli.plan_summary import summarize
    from batchwright.store.plans import streams_for_plan

    check_positive(arguments, "batch_size")
    plan, at = _plan_and_position(arguments)
    streams = dict(streams_for_plan(arguments.store, plan))
    amended = _amended(plan, at, streams, arguments)
    stores = list({stream.store.path: stream.store for stream in streams.values()}.values())
    files = _keep(amended, stores)
    use = _use(amended, stores)
    if arguments.json:
        facts = facts_of(amended, summarize(amended, streams=streams))
        print_json({**facts, "parent": plan.fingerprint, "kept_in": files, "use": use})
        return None
    amendment = amended.amendments[-1]
    print(f"plan {amended.fingerprint} amends {plan.fingerprint} {amendment}")
    print(*(f"  kept in {file}" for file in files), sep="\n")
    print(f"a run goes on with it from any state at position {amendment.at:,} or before:")
    print(*(f"  {line}" for line in use), "", sep="\n")
    return describe(amended, streams=streams, as_json=False)


def _plan_and_position(arguments: argparse.Namespace) -> tuple[Plan, int | None]:
    """The plan to amend, and the position from which on; None: where --skip begins."""
    from batchwright.store.plans import find_plan

    if arguments.state is not None:
        return _plan_of_state(_state(arguments.state), arguments)
    if arguments.plan is None:
        raise SpecError(
            "which plan?", parameter="PLAN", remedy="`batchwright plan STORE` lists the plans kept; or --state"
        )
    plan = find_plan(arguments.store, arguments.plan, batch_size=arguments.batch_size)
    return plan, _position(plan, arguments)


def _amended(plan: Plan, at: int | None, streams: dict[str, TokenStream], arguments: argparse.Namespace) -> Plan:
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


def _state(path: str) -> State:
    from batchwright.order.plan_file import state_in

    state = state_in(path)
    if state is None:
        raise PlanError(f"{path} is not a loader's state", file=path, remedy="what state_dict() returned, as JSON")
    return state


def _plan_of_state(state: State, arguments: argparse.Namespace) -> tuple[Plan, int]:
    """The plan of a state, cut as the state's run cut it, and the state's position."""
    from batchwright.store.plans import find_plan

    named = arguments.plan
    if named is None:
        named = state["plan"]
    plan = find_plan(arguments.store, named, batch_size=arguments.batch_size)
    if state["plan"] != plan.fingerprint:
        raise PlanError(
            f"{arguments.state} is a state of plan {state['plan']}, not of {plan.fingerprint}",
            file=arguments.state,
            remedy=f"amend plan {state['plan']}, or a state that was saved with {plan.fingerprint}",
        )
    if arguments.batch_size is None:
        plan = plan.cut_as(state["steps"])
    return plan, int(state["position"])


def _position(plan: Plan, arguments: argparse.Namespace) -> int | None:
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


def _weights_at(plan: Plan, position: int) -> dict[str, float] | None:
    """The weights just before a position. A ramp begins with these."""
    _, weights = [segment for segment in plan.schedule if segment[0] < max(position, 1)][-1]
    if weights is None:
        return None
    return dict(weights)


def _to_add(given: list[str] | None) -> dict[str, str]:
    added: dict[str, str] = {}
    for text in given or ():
        pair = named_store(text)
        if pair is None:
            raise SpecError(f"{text} has no name", parameter="add", remedy=f"--add NAME={text}")
        name, path = pair
        if name in added:
            raise SpecError(f"two stores are called {name!r}", parameter="add", remedy=f"--add NAME={path}")
        added[name] = path
    return added


def _keep(plan: Plan, stores: list[Store]) -> list[str]:
    """Keep the plan with its stores. Returns its files."""
    from batchwright.order.plan_file import plan_home
    from batchwright.store.plans import keep_plan

    for store in stores:
        keep_plan(store.path, plan)
    folders = [*(store.path / "plans" for store in stores), plan_home()]
    files = [Path(folder) / f"{plan.fingerprint}.json" for folder in folders]
    return [str(file) for file in files if file.is_file()]


def _use(plan: Plan, stores: list[Store]) -> list[str]:
    """The lines with which a run goes on with the plan."""
    paths = [str(store.path) for store in stores]
    if len(paths) > 1:
        loader = f"MixedDataLoader({paths}"
    elif holds_conversations(stores[0]):
        loader = f"ConversationDataLoader({paths[0]!r}"
    else:
        loader = f"PretrainDataLoader({paths[0]!r}"
    return [f"loader = bw.{loader}, plan={plan.fingerprint!r})", "loader.load_state_dict(state)"]
