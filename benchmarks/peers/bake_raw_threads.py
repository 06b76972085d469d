"""The encoder alone: tokenizers' `encode_batch_fast` with its own threads, over texts in memory; nothing is written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from benchmarks.peers.documents import EOS, read_texts

PACKAGE = "tokenizers"


def bake(documents: Path, tokenizer: Path, folder: Path, workers: int) -> float:
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(workers)}
    from tokenizers import Tokenizer

    texts, backend = read_texts(documents), Tokenizer.from_file(str(tokenizer))
    ids = []
    began = time.perf_counter()
    for first in range(0, len(texts), 100):
        encoded = backend.encode_batch_fast(texts[first : first + 100], add_special_tokens=False)
        ids += [encoding.ids for encoding in encoded]
    seconds = time.perf_counter() - began
    keep(folder, [[*one, backend.token_to_id(EOS)] for one in ids])
    return seconds


def keep(folder: Path, ids: list[list[int]]) -> None:
    """Write what was encoded, after the clock has stopped, so that it can be compared."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "lengths.npy", [len(one) for one in ids])
    np.save(folder / "ids.npy", np.concatenate([np.array(one, np.uint16) for one in ids]))


def read_back(folder: Path) -> list[np.ndarray]:
    return np.split(np.load(folder / "ids.npy"), np.cumsum(np.load(folder / "lengths.npy"))[:-1])
