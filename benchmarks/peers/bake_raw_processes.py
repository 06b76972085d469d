"""The encoder alone: tokenizers' `encode_batch_fast` in two processes, over texts that each has in memory already."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.peers import bake_raw_threads
from benchmarks.peers.documents import EOS, read_texts

PACKAGE = "tokenizers"

read_back = bake_raw_threads.read_back


def encode_in_processes(
    open_encoder: Callable[[], Callable[[list[str]], list[list[int]]]], documents: Path, workers: int
) -> tuple[list[list[int]], float]:
    """(ids of all documents, seconds from the moment when all processes are ready until all have encoded)."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(workers)]
    children = [
        context.Process(target=_child, args=(open_encoder, documents, number, workers, theirs), daemon=True)
        for number, (_, theirs) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    for ours, _ in pipes:
        ours.recv()
    began = time.perf_counter()
    for ours, _ in pipes:
        ours.send("go")
    for ours, _ in pipes:
        ours.recv()
    seconds = time.perf_counter() - began
    return [ids for ours, _ in pipes for ids in ours.recv()], seconds


def _child(open_encoder: Any, documents: Path, number: int, workers: int, pipe: Connection) -> None:
    encode, texts = open_encoder(), read_texts(documents)[number::workers]
    pipe.send("ready")
    pipe.recv()
    ids = [one for first in range(0, len(texts), 100) for one in encode(texts[first : first + 100])]
    pipe.send("done")
    pipe.send(ids)


def _open(tokenizer: Path) -> Callable[[list[str]], list[list[int]]]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer))
    eos = backend.token_to_id(EOS)
    return lambda texts: [[*one.ids, eos] for one in backend.encode_batch_fast(texts, add_special_tokens=False)]


def bake(documents: Path, tokenizer: Path, folder: Path, workers: int) -> float:
    ids, seconds = encode_in_processes(partial(_open, tokenizer), documents, workers)
    bake_raw_threads.keep(folder, ids)
    return seconds
