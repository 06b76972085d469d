"""Types of arguments. Only type checkers need the frameworks; nothing here imports one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from numpy.typing import ArrayLike, NDArray

from batchwright.base.plugins import Tokenizer

__all__ = [
    "AnyArray",
    "Array",
    "Balance",
    "CorpusLike",
    "Data",
    "Device",
    "EpochEnd",
    "Framework",
    "Mesh",
    "OnError",
    "Packing",
    "PadTo",
    "PlanLike",
    "ProcessGroup",
    "ShardingLike",
    "Skip",
    "SourceLike",
    "Split",
    "StoreLike",
    "Tensor",
    "TokenizerLike",
    "Truncation",
    "WeightsLike",
]

Framework = Literal["numpy", "torch", "jax", "mlx"]
Split = Literal["train", "val"]
Packing = Literal["best_fit", "first_fit", "greedy"]
Truncation = Literal["drop", "keep_start", "keep_end", "drop_oldest", "raise"]
EpochEnd = Literal["drop", "short", "pad", "wrap"]
OnError = Literal["raise", "skip"]
PadTo = Literal["longest", "max_length"] | int | Sequence[int]
Balance = bool | tuple[float, float]
"""True, or (a, b): a row of n tokens costs a * n + b * n * n."""
WeightsLike = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]
"""By source; or from each position on."""
Skip = int | Iterable[int | tuple[int, int]]
"""A position, (first, last), or several of these."""
Data = str | os.PathLike[str] | Iterable[Any]
"""A file, folder or glob; several of them; or rows in memory, or a table."""


class JaxDevice(Protocol):
    """A device that jax.devices() lists. Type checkers do not know its class."""

    @property
    def platform(self) -> str: ...


if TYPE_CHECKING:
    import jax
    import mlx.core
    import tokenizers
    import torch
    from torch.distributed import ProcessGroup as ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh as Mesh

    from batchwright.baking.recipe import DatasetRecipe
    from batchwright.loaders.loader import Loader
    from batchwright.order.plan import Plan
    from batchwright.order.sharding import Sharding, Strategy
    from batchwright.prepare.tokenizers import JsonTokenizer
    from batchwright.store.reader import Store

    Tensor: TypeAlias = torch.Tensor
    """What a batch holds: of the loader's framework, which is torch in most programs."""
    AnyArray: TypeAlias = NDArray[Any] | torch.Tensor | jax.Array | mlx.core.array
    Array: TypeAlias = ArrayLike | AnyArray
    """What becomes an array: also lists and numbers."""
    Device: TypeAlias = str | int | torch.device | JaxDevice | jax.sharding.Sharding
    TokenizerLike: TypeAlias = (
        str | os.PathLike[str] | Tokenizer | JsonTokenizer | tokenizers.Tokenizer | Callable[[str], Any]
    )
    StoreLike: TypeAlias = str | os.PathLike[str] | Store
    CorpusLike: TypeAlias = StoreLike | Data | DatasetRecipe
    SourceLike: TypeAlias = StoreLike | Loader[Any]
    PlanLike: TypeAlias = str | os.PathLike[str] | Plan | Mapping[str, Any] | Loader[Any]
    """A plan, its fingerprint or file, a state or its file, or a loader."""
    ShardingLike: TypeAlias = str | Strategy | Sharding
else:
    AnyArray = Array = CorpusLike = Device = Mesh = PlanLike = ProcessGroup = ShardingLike = SourceLike = StoreLike = (
        object
    )
    Tensor = TokenizerLike = object
