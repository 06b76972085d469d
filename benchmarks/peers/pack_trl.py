"""TRL: pack_dataset over a dataset in memory, which leaves rows of different lengths. Its collator pads them later."""

from __future__ import annotations

import time
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from trl import pack_dataset

PACKAGE = "trl"


def pack_samples(tokens: np.ndarray, lengths: np.ndarray, capacity: int, method: str) -> dict[str, Any]:
    """`method` is "bfd", in windows of 1000 samples by default, or "bfd, whole" for one window over all."""
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    samples = datasets.Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(borders, tokens.astype(np.int32))}))
    datasets.disable_progress_bars()
    options = {"batch_size": len(samples)} if method == "bfd, whole" else {}
    began = time.perf_counter()
    packed = pack_dataset(samples, capacity, "bfd", {"keep_in_memory": True, **options})
    seconds = time.perf_counter() - began
    ids = packed.data["input_ids"]
    sizes = pc.list_value_length(ids).to_numpy()
    assert sizes.max() <= capacity
    checksum = sum(int(chunk.flatten().to_numpy().sum(dtype=np.int64)) for chunk in ids.chunks)
    return {"seconds": seconds, "rows": packed.num_rows, "tokens": int(sizes.sum()), "checksum": checksum}
