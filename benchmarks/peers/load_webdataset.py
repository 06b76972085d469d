"""WebDataset: tar shards of rows as raw bytes, shuffled deterministically with a buffer of 1,000. Resume replays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import webdataset as wds

from benchmarks.peers.source import ROWS, SEED, Source, cut

PACKAGE = "webdataset"
RESUMES_BY = "replays from the start"

_SHARD_ROWS = 4096


def convert(source: Source) -> None:
    rows = cut(source.tokens(), source.row_tokens)
    source.folder.mkdir(parents=True)
    for first in range(0, len(rows), _SHARD_ROWS):
        with wds.TarWriter(str(source.folder / f"{first // _SHARD_ROWS:05d}.tar")) as tar:
            for number in range(first, min(first + _SHARD_ROWS, len(rows))):
                tar.write({"__key__": f"{number:08d}", "tokens": rows[number, :-1].tobytes()})


def _tokens(sample: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(sample["tokens"], np.uint16)


def _block(rows: list[np.ndarray]) -> np.ndarray:
    return np.stack(rows).astype(np.int64)


def open_batches(source: Source, workers: int, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    shards = sorted(map(str, source.folder.glob("*.tar")))
    dataset = wds.WebDataset(shards, shardshuffle=len(shards), detshuffle=True, seed=SEED)
    dataset = dataset.compose(wds.detshuffle(1000, seed=SEED)).map(_tokens)
    dataset = dataset.batched(ROWS, collation_fn=_block, partial=False)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers)
    done = 0

    def batches() -> Iterator[Any]:
        nonlocal done
        for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), state or 0, None):
            done += 1
            yield batch

    return batches(), lambda: (state or 0) + done
