"""HF datasets: `load_dataset("json")`, then `map` in batches with two processes; its cache file is the result."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value, load_dataset
from tokenizers import Tokenizer

from benchmarks.peers.documents import EOS

PACKAGE = "datasets"


def bake(documents: Path, tokenizer: Path, folder: Path, workers: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    backend = Tokenizer.from_file(str(tokenizer))
    eos = backend.token_to_id(EOS)

    def encode(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        encoded = backend.encode_batch_fast(rows["text"], add_special_tokens=False)
        return {"ids": [np.array([*encoding.ids, eos], np.uint16) for encoding in encoded]}

    files = sorted(map(str, documents.glob("*.jsonl")))
    texts = load_dataset("json", data_files=files, split="train", cache_dir=str(folder / "json"), num_proc=workers)
    made = texts.map(
        encode,
        batched=True,
        batch_size=100,
        num_proc=workers,
        remove_columns=texts.column_names,
        features=Features({"ids": List(Value("uint16"))}),
        cache_file_name=str(folder / "tokens.arrow"),
        load_from_cache_file=False,
    )
    assert isinstance(made, Dataset)


def read_back(folder: Path) -> list[np.ndarray]:
    documents = []
    for file in sorted(folder.glob("tokens*.arrow")):
        with pa.memory_map(str(file)) as stream:
            column = pa.ipc.open_stream(stream).read_all().column("ids")
            documents += [np.asarray(ids.values) for ids in column]
    return documents
