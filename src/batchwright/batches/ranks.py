"""The rank of this process, and a check that the ranks of a run belong together.

The rank is as given, or from a mesh, from torch or JAX, from the launcher's environment, or this process is alone. A
framework's own setup in this process comes before the launcher's environment. The search sets nothing up: it asks only
frameworks that the program has loaded, and touches no accelerator.

The check compares plan, position and other settings, the shares that are read, and the next batches of replicas. Each
process states these, and all processes gather all statements and compare the same ones. So all raise or none, and no
process waits for one that has left. A failure to read the next batch is part of the statement.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchwright.base.errors import EndOfRun, SpecError, SyncError
from batchwright.base.fingerprint import fingerprint, fingerprint_value
from batchwright.base.words import counted, error_in_words, listed
from batchwright.batches.types import TrainingBatch
from batchwright.order.plan import Plan

__all__ = ["Ranks", "Standing", "SyncReport", "check_standing", "digests_of_next", "find_ranks"]

_DATA_DIMENSIONS = ("dp", "data", "dp_replicate", "dp_shard", "fsdp", "replicate", "shard")
_MODEL_DIMENSIONS = (
    *("tp", "pp", "cp", "sp", "ep", "etp", "mp"),
    *("tensor", "pipeline", "pipe", "stage", "context", "sequence", "seq", "expert", "model"),
)
"""Mesh dimensions whose ranks hold parts of one model or sequence, and so get the same rows."""


@dataclass(frozen=True, slots=True)
class Ranks:
    rank: int
    world_size: int
    found_in: str
    """For the loader's first log line."""


def find_ranks(rank: int | None = None, world_size: int | None = None, mesh: Any = None) -> Ranks:
    """
    >>> find_ranks(1, 2)
    Ranks(rank=1, world_size=2, found_in='rank=, world_size=')
    """
    if (rank is None) != (world_size is None):
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise SpecError(f"{given}= was given without {missing}=", parameter=missing, remedy="give both, or neither")
    if rank is not None and world_size is not None:
        found = Ranks(int(rank), int(world_size), "rank=, world_size=")
    elif mesh is not None:
        found = _from_mesh(mesh)
    else:
        found = _from_frameworks() or _from_environment() or Ranks(0, 1, "nothing says otherwise")
    if not 0 <= found.rank < found.world_size:
        raise SpecError(
            f"rank {found.rank} of {found.world_size} does not exist (from {found.found_in})",
            parameter="rank",
            remedy="a rank from 0 to world_size - 1",
        )
    return found


def _from_frameworks() -> Ranks | None:
    distributed = torch_distributed()
    if distributed is not None:
        return Ranks(distributed.get_rank(), distributed.get_world_size(), "torch.distributed")
    # jax.process_index() would start a backend, and take the accelerator's memory, only to answer.
    jax: Any = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if getattr(jax, "client", None) is None or getattr(jax, "num_processes", None) is None:
        return None
    return Ranks(jax.process_id, jax.num_processes, "jax.distributed")


def _from_environment() -> Ranks | None:
    """The rank from the environment variables of torchrun or srun."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", _SLURM_TASKS)):
        if rank in os.environ and size in os.environ:
            return Ranks(_number(rank), _number(size), f"the environment: {rank}, {size}")
    return None


_SLURM_TASKS = "SLURM_STEP_NUM_TASKS"
"""Set in the step that srun started. SLURM_NTASKS is also set in a batch script or an salloc shell (in a script even
SLURM_PROCID=0), for tasks that are not running, and a step may have fewer."""


def _number(variable: str) -> int:
    text = os.environ[variable]
    try:
        return int(text)
    except ValueError:
        raise SpecError(
            f"the environment variable {variable} is {text!r}, not a number",
            parameter=variable,
            remedy="unset it, or give rank= and world_size=",
        ) from None


def torch_distributed() -> Any:
    """torch.distributed if it is set up, else None."""
    torch = sys.modules.get("torch")  # used only if the program has loaded it itself
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _from_mesh(mesh: Any) -> Ranks:
    """Data-parallel coordinates of a torch DeviceMesh: its data dimensions by name, or its only dimension.

    A mesh of model dimensions alone is one reader: all its ranks get the same rows.
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise SpecError(
            f"mesh= is a {type(mesh).__name__}, not a torch DeviceMesh",
            parameter="mesh",
            remedy="torch.distributed.device_mesh.init_device_mesh(...), or rank= and world_size=",
        )
    names = mesh.mesh_dim_names or ()
    dimensions = [i for i, name in enumerate(names) if name in _DATA_DIMENSIONS]
    is_one_model = bool(names) and all(name in _MODEL_DIMENSIONS for name in names)
    if not dimensions and not is_one_model and mesh.ndim == 1:
        dimensions = [0]
    if not dimensions and not is_one_model:
        raise SpecError(
            f"cannot tell which dimension of this mesh is data parallel: it has {', '.join(names) or mesh.ndim}",
            parameter="mesh",
            remedy=f"name it one of {', '.join(_DATA_DIMENSIONS)}, or pass mesh['yours']",
        )
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise SpecError(
            "this process is not in the mesh",
            parameter="mesh",
            remedy="a mesh that this process is in, or rank= and world_size=",
        )
    if is_one_model:
        return Ranks(0, 1, f"mesh= (only {', '.join(names)})")
    rank, size = 0, 1
    for dimension in dimensions:
        rank = rank * mesh.size(dimension) + coordinates[dimension]
        size *= mesh.size(dimension)
    words = ", ".join(names[dimension] for dimension in dimensions) if names else "1 dimension"
    return Ranks(rank, size, f"mesh= ({words})")


# Ranks that belong together


_REMEDIES = {
    "plan": "open the loader of every rank with the same settings, over the same store; or with one plan=",
    "position": "load the state of one checkpoint on every rank, and take batches on every rank equally often",
    "world_size": "rank= and world_size=, or mesh=, of one and the same division into ranks",
}
_REMEDIES["steps"] = _REMEDIES["position"]
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
        remedy=_REMEDIES.get(name, "the same settings on every rank"),
    )


def _refuse_missing(replicas: Mapping[int, Sequence[Standing]]) -> None:
    """Every share of a batch must have equally many processes, and at least one."""
    counts = {rank: len(who) for rank, who in replicas.items()}
    crowded = max(counts, key=counts.__getitem__)
    short = [rank for rank, count in counts.items() if count < counts[crowded]]
    if not short:
        return
    who = replicas[crowded]
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
