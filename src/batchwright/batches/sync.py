"""A check that the ranks of a run belong together: same plan, same position, every share read, equal replicas.

Each process states its plan and position. All processes gather all statements and compare the same ones. So all raise
or none, and no process waits for one that has left. A failure to read the next batch is part of the statement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchwright.base.errors import EndOfRun, SpecError, SyncError
from batchwright.base.fingerprint import fingerprint, fingerprint_value
from batchwright.base.words import counted, error_in_words, listed
from batchwright.batches.ranks import torch_distributed
from batchwright.batches.types import TrainingBatch
from batchwright.order.plan import Plan

__all__ = ["Standing", "SyncReport", "check_standing", "compare", "digests_of", "digests_of_next"]

_REMEDIES = {
    "plan": "open the loader of every rank with the same settings, over the same store; or with one plan=",
    "position": "load the state of one checkpoint on every rank, and take batches on every rank equally often",
    "world_size": "rank= and world_size=, or mesh=, of one and the same division into ranks",
}
_REMEDIES["steps"] = _REMEDIES["position"]
_OTHERWISE = "the same settings on every rank"
_WORDS = {"steps": "record of steps", "epochs": "number of epochs"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The statement of one process about its loader. Small: plans themselves are sent only where they differ."""

    rank: int
    """The data rank. Processes with the same data rank are replicas, which must get the same rows."""
    step: int
    settings: Mapping[str, Any]
    """Values that must be equal everywhere, JSON: plan (its fingerprint), position, world_size and others."""
    batch: Mapping[str, str]
    """A digest of each field of the next batch; empty at the end of the run."""
    failure: str | None = None
    """The error of reading the next batch, if there was one."""
    process: int = 0
    """The rank in torch.distributed's whole world, which messages name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """The result of a check that found no difference."""

    num_processes: int
    world_size: int
    """The number of ranks that each batch is divided among."""
    num_replicas: int
    """The number of processes that get the same rows (tensor, pipeline and context parallel)."""
    plan: str
    step: int
    position: int
    is_compared: bool
    """False for a single loader without a process group."""

    def __str__(self) -> str:
        where = f"plan {self.plan}, step {self.step:,} (position {self.position:,})"
        if not self.is_compared:
            return f"one process, without torch.distributed: nothing to compare. {where}"
        processes = counted(self.num_processes, "process", "processes")
        text = f"{processes} in step: {where}; {counted(self.world_size, 'data rank')}"
        if self.num_replicas > 1:
            text += f", {self.num_replicas} replicas of each with equal next batches"
        return text

    __repr__ = __str__


def digests_of(batch: Any) -> dict[str, str]:
    """A digest for each field of a batch: values, type and shape.

    >>> digests_of({"input_ids": np.arange(4)}) == digests_of({"input_ids": np.arange(4, dtype=np.int32)})
    False
    """
    fields = batch._arrays() if isinstance(batch, TrainingBatch) else batch
    return {name: fingerprint_value(np.asarray(fields[name])) for name in fields}


def digests_of_next(read: Callable[[], Any]) -> tuple[dict[str, str], str | None]:
    """(digests of a batch, the reason for none). Nothing is raised here, because the others wait for this process."""
    try:
        return digests_of(read()), None
    except EndOfRun:
        return {}, None
    except Exception as error:
        return {}, error_in_words(error)


def check_standing(mine: Standing, plan: Plan, group: Any = None) -> SyncReport:
    """Gather the statements of all processes of the group, and compare them."""
    distributed = torch_distributed()
    if distributed is not None:
        return compare(*_gathered(mine, plan, distributed, group))
    world = mine.settings["world_size"]
    if world == 1 and group is None:
        return _report([mine], is_compared=False)
    raise SpecError(
        f"rank {mine.rank} of {world} cannot be compared with the others: torch.distributed is not set up",
        parameter="group",
        remedy="torch.distributed.init_process_group(...) before check_sync()",
    )


def _gathered(mine: Standing, plan: Plan, distributed: Any, group: Any) -> tuple[list[Standing], list[Plan]]:
    """The statements of all processes, and their plans if these differ."""
    size = distributed.get_world_size(group)
    if size < 1:
        raise SpecError(
            "this process is not in the group", parameter="group", remedy="a group of which every caller is a member"
        )

    def all_gathered(value: Any) -> list[Any]:
        everyone: list[Any] = [None] * size
        distributed.all_gather_object(everyone, value, group=group)
        return everyone

    standings = all_gathered(replace(mine, process=distributed.get_rank()))
    differ = len({standing.settings["plan"] for standing in standings}) > 1
    if not differ:
        return standings, []
    return standings, all_gathered(plan)  # all see the same standings, so all take part or none


def compare(standings: Sequence[Standing], plans: Sequence[Plan] = ()) -> SyncReport:
    """Return a report, or raise a SyncError that names the differing ranks and values. The same on every process.

    `plans` has the plan of each process, if they differ.
    """
    for name in standings[0].settings:
        _refuse_differences(name, standings, plans)
    replicas: dict[int, list[Standing]] = {rank: [] for rank in range(standings[0].settings["world_size"])}
    for standing in standings:
        replicas[standing.rank].append(standing)
    _refuse_missing(replicas)
    for standing in standings:
        if standing.failure is not None:
            raise SyncError(
                f"{_named([standing])} could not read its next batch",
                position=standing.settings["position"],
                reason=standing.failure,
                remedy="what the reason says, on that rank",
            )
    for rank, equals in replicas.items():
        _refuse_unequal(rank, equals)
    return _report(standings, is_compared=True)


def _report(standings: Sequence[Standing], is_compared: bool) -> SyncReport:
    first = standings[0]
    return SyncReport(
        num_processes=len(standings),
        world_size=first.settings["world_size"],
        num_replicas=len(standings) // first.settings["world_size"],
        plan=first.settings["plan"],
        step=first.step,
        position=first.settings["position"],
        is_compared=is_compared,
    )


def _refuse_differences(name: str, standings: Sequence[Standing], plans: Sequence[Plan]) -> None:
    most, others = _parted(standings, lambda standing: fingerprint(standing.settings[name]))
    if not others:
        return
    one, other = most[0], others[0]
    differs = f"{name}: {one.settings[name]} here, {other.settings[name]} there"
    if name == "plan":
        numbers = {standing.process: number for number, standing in enumerate(standings)}
        differs = plans[numbers[one.process]].difference(plans[numbers[other.process]]) or differs
    hold = "hold" if len(others) > 1 else "holds"
    raise SyncError(
        f"{_named(others)} {hold} another {_WORDS.get(name, name)} than rank {one.process}",
        plan=one.settings["plan"],
        here=f"rank {one.process}",
        there=f"rank {other.process}",
        differs=differs,
        remedy=_REMEDIES.get(name, _OTHERWISE),
    )


def _refuse_missing(replicas: Mapping[int, Sequence[Standing]]) -> None:
    """Every share of a batch must have equally many processes, and at least one."""
    counts = {rank: len(who) for rank, who in replicas.items()}
    usual = max(counts.values())
    short = [rank for rank, count in counts.items() if count < usual]
    if not short:
        return
    many = [standing for rank, count in counts.items() if count == usual for standing in replicas[rank]]
    crowded = many[0].rank
    who = [standing for standing in many if standing.rank == crowded]
    missing = [rank for rank in short if not counts[rank]]
    what = f"data rank {listed(short)} of {len(replicas)} has fewer processes than data rank {crowded}"
    if missing:
        what = f"no process reads the rows of data rank {listed(missing)} of {len(replicas)}"
    raise SyncError(
        what,
        differs=f"{_named(who)} {'are' if len(who) > 1 else 'is'} data rank {crowded}",
        remedy="rank= and world_size= of each process; with tensor, pipeline or context parallel ranks: mesh=",
    )


def _refuse_unequal(rank: int, replicas: Sequence[Standing]) -> None:
    most, others = _parted(replicas, lambda standing: tuple(sorted(standing.batch.items())))
    if not others:
        return
    one, other = most[0], others[0]
    fields = {**one.batch, **other.batch}
    raise SyncError(
        f"{_named(others)} would get another next batch than rank {one.process}: replicas, all data rank {rank}",
        position=one.settings["position"],
        differs=", ".join(name for name in fields if one.batch.get(name) != other.batch.get(name)),
        remedy="the same fields and masks on every rank, and stores with the same content",
    )


def _parted(
    standings: Iterable[Standing], key: Callable[[Standing], Hashable]
) -> tuple[list[Standing], list[Standing]]:
    """(the largest group of equal standings, the others). Among groups of equal size, the lowest rank decides."""
    ordered = sorted(standings, key=lambda standing: standing.process)
    keys = [key(standing) for standing in ordered]
    ((usual, _),) = Counter(keys).most_common(1)  # ties: the first one found
    most = [standing for standing, its in zip(ordered, keys, strict=True) if its == usual]
    return most, [standing for standing, its in zip(ordered, keys, strict=True) if its != usual]


def _named(standings: Sequence[Standing]) -> str:
    ranks = "rank" if len(standings) == 1 else "ranks"
    return f"{ranks} {listed(standing.process for standing in standings)}"
