"""Who am I among how many: explicit, from a mesh, from torch.distributed, from the launcher's environment, or alone."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from penstock.errors import SpecError

__all__ = ["Ranks", "find_ranks"]

_DATA_DIMENSIONS = ("dp", "data", "dp_replicate", "dp_shard", "fsdp", "replicate", "shard")


@dataclass(frozen=True, slots=True)
class Ranks:
    rank: int
    world_size: int
    found_in: str
    """Said in the loader's first log line."""


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
    elif (distributed := _torch_distributed()) is not None:
        found = Ranks(distributed.get_rank(), distributed.get_world_size(), "torch.distributed")
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # what torchrun sets
        found = Ranks(_number("RANK"), _number("WORLD_SIZE"), "the environment: RANK, WORLD_SIZE")
    else:
        found = Ranks(0, 1, "nothing says otherwise")
    if found.world_size < 1 or not 0 <= found.rank < found.world_size:
        raise SpecError(
            f"rank {found.rank} of {found.world_size} does not exist (from {found.found_in})",
            parameter="rank",
            remedy="a rank from 0 to world_size - 1",
        )
    return found


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


def _torch_distributed() -> Any:
    torch = sys.modules.get("torch")  # asked only if the program has loaded it itself
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _from_mesh(mesh: Any) -> Ranks:
    """Data-parallel coordinates of a torch DeviceMesh: its data dimensions by name, or its only dimension."""
    if not hasattr(mesh, "mesh_dim_names"):
        raise SpecError(
            f"mesh= is a {type(mesh).__name__}, not a torch DeviceMesh",
            parameter="mesh",
            remedy="torch.distributed.device_mesh.init_device_mesh(...), or rank= and world_size=",
        )
    names = mesh.mesh_dim_names or ()
    dimensions = [i for i, name in enumerate(names) if name in _DATA_DIMENSIONS] or ([0] if mesh.ndim == 1 else [])
    if not dimensions:
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
    rank, size = 0, 1
    for dimension in dimensions:
        rank = rank * mesh.size(dimension) + coordinates[dimension]
        size *= mesh.size(dimension)
    return Ranks(rank, size, f"mesh= ({', '.join(names[d] for d in dimensions) if names else '1 dimension'})")
