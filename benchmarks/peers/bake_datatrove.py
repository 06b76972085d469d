"""datatrove: JsonlReader into DocumentTokenizer, eight tasks over two worker processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer

from benchmarks.peers.documents import EOS

PACKAGE = "datatrove"


def bake(documents: Path, tokenizer: Path, folder: Path, workers: int) -> None:
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(str(documents)),
            DocumentTokenizer(
                str(folder / "tokens"),
                tokenizer_name_or_path=str(tokenizer),
                eos_token=EOS,
                shuffle_documents=False,
                max_tokens_per_file=0,
            ),
        ],
        tasks=8,
        workers=workers,
        logging_dir=str(folder / "logs"),
        skip_completed=False,
    ).run()


def read_back(folder: Path) -> list[np.ndarray]:
    documents = []
    for file in sorted((folder / "tokens").glob("*.ds")):
        ends = np.fromfile(file.with_name(file.name + ".index"), np.uint64).astype(np.int64)
        documents += np.split(np.fromfile(file, np.uint16), ends[:-1])
    return documents
