"""Megatron-style: a pool of two processes encodes lines, the parent writes an IndexedDataset, as its script does."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tokenizers import Tokenizer

from benchmarks.peers.documents import EOS

PACKAGE = "megatron-core"

_backend: Any = None


def _start(tokenizer: str) -> None:
    global _backend
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _backend = Tokenizer.from_file(tokenizer)


def _encode(line: str) -> list[int]:
    return [*_backend.encode(json.loads(line)["text"], add_special_tokens=False).ids, _backend.token_to_id(EOS)]


def bake(documents: Path, tokenizer: Path, folder: Path, workers: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(str(folder / "data.bin"), dtype=np.uint16)
    lines = itertools.chain.from_iterable(file.open(encoding="utf-8") for file in sorted(documents.glob("*.jsonl")))
    with multiprocessing.get_context("fork").Pool(workers, _start, [str(tokenizer)]) as pool:
        for ids in pool.imap(_encode, lines, 32):
            builder.add_document(torch.IntTensor(ids), [len(ids)])
    builder.finalize(str(folder / "data.idx"))


def read_back(folder: Path) -> list[np.ndarray]:
    dataset = IndexedDataset(str(folder / "data"))
    return [dataset[number].copy() for number in range(len(dataset))]  # they are views of a map that goes with it
