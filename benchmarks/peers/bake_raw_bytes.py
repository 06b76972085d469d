"""By hand, for "bytes": read JSONL, take the text's UTF-8 bytes, append 256, write uint16: two processes, no checks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import msgspec
import numpy as np

PACKAGE = "msgspec"


def _write(task: tuple[Path, Path]) -> None:
    file, out = task
    decoder, pieces, lengths = msgspec.json.Decoder(), [], []
    with file.open("rb") as lines:
        for line in lines:
            data = decoder.decode(line)["text"].encode()
            piece = np.empty(len(data) + 1, np.uint16)
            piece[:-1], piece[-1] = np.frombuffer(data, np.uint8), 256
            pieces.append(piece)
            lengths.append(len(piece))
    np.concatenate(pieces).tofile(out)
    np.array(lengths, np.int64).tofile(out.with_suffix(".lengths"))


def bake(documents: Path, tokenizer: Path, folder: Path, workers: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [(file, folder / f"{file.stem}.ids") for file in sorted(documents.glob("*.jsonl"))]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        pool.map(_write, tasks, 1)


def read_back(folder: Path) -> list[np.ndarray]:
    return [
        document
        for file in sorted(folder.glob("*.ids"))
        for document in np.split(
            np.fromfile(file, np.uint16), np.cumsum(np.fromfile(file.with_suffix(".lengths"), np.int64))[:-1]
        )
    ]
