"""The rank of this process: as given, from a mesh, from torch or JAX, from the launcher's environment, or alone.

A framework's own setup in this process comes before the launcher's environment. The search sets nothing up: it asks
only frameworks that the program has loaded, and touches no accelerator.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from batchwright.base.errors import SpecError

__all__ = ["Ranks", "find_ranks", "torch_distributed"]

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
