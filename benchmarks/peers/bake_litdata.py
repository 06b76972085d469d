"""LitData: `optimize` with two workers, one input for each file, tokens end to end for its TokensLoader."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litdata import TokensLoader, optimize
from tokenizers import Tokenizer

from benchmarks.peers.documents import EOS

PACKAGE = "litdata"

_EOS_ID = 0  # the first special token of the trained tokenizers


@cache
def _backend(tokenizer: str) -> Any:
    return Tokenizer.from_file(tokenizer)


def _encode(file: str, tokenizer: str) -> Iterator[torch.Tensor]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    backend = _backend(tokenizer)
    eos = backend.token_to_id(EOS)
    with open(file, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    for first in range(0, len(texts), 100):
        for encoding in backend.encode_batch_fast(texts[first : first + 100], add_special_tokens=False):
            yield torch.from_numpy(np.array([*encoding.ids, eos], np.uint16))


def bake(documents: Path, tokenizer: Path, folder: Path, workers: int) -> None:
    optimize(
        fn=partial(_encode, tokenizer=str(tokenizer)),
        inputs=sorted(map(str, documents.glob("*.jsonl"))),
        output_dir=str(folder / "tokens"),
        chunk_size=1 << 25,
        item_loader=TokensLoader(),
        num_workers=workers,
    )


def read_back(folder: Path) -> list[np.ndarray]:
    """Documents again, by the id that ends each: the format keeps no borders."""
    tokens = []
    for chunk in json.loads((folder / "tokens" / "index.json").read_text())["chunks"]:
        data = (folder / "tokens" / chunk["filename"]).read_bytes()
        header = 4 * (2 + int.from_bytes(data[:4], "little"))
        tokens.append(np.frombuffer(data[header:], np.uint16)[: chunk["dim"]])
    together = np.concatenate(tokens)
    return np.split(together, np.flatnonzero(together == _EOS_ID)[:-1] + 1)
