"""MosaicML: two processes that each tokenise their files into an MDSWriter; the indices are merged."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import types
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.peers.documents import EOS

# streaming imports its vision half, and with it torchvision, which has no CPU build beside this torch.
sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))

from streaming import LocalDataset, MDSWriter  # noqa: E402
from streaming.base.util import merge_index  # noqa: E402

PACKAGE = "mosaicml-streaming"


def _write(task: tuple[list[str], str, str]) -> None:
    files, tokenizer, out = task
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    backend = Tokenizer.from_file(tokenizer)
    eos = backend.token_to_id(EOS)
    with MDSWriter(out=out, columns={"tokens": "ndarray:uint16"}) as writer:
        for file in files:
            with open(file, encoding="utf-8") as lines:
                texts = [json.loads(line)["text"] for line in lines]
            for first in range(0, len(texts), 100):
                for encoding in backend.encode_batch_fast(texts[first : first + 100], add_special_tokens=False):
                    writer.write({"tokens": np.array([*encoding.ids, eos], np.uint16)})


def bake(documents: Path, tokenizer: Path, folder: Path, workers: int) -> None:
    files = sorted(map(str, documents.glob("*.jsonl")))
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [(files[n::workers], str(tokenizer), str(folder / f"part-{n}")) for n in range(workers)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        pool.map(_write, tasks)
    merge_index(str(folder))


def read_back(folder: Path) -> list[np.ndarray]:
    dataset = LocalDataset(str(folder))
    return [dataset[number]["tokens"] for number in range(len(dataset))]
