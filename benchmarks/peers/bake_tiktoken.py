"""The encoder alone: tiktoken with the merges of the same tokenizer.json, in two processes, over texts in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.peers import bake_raw_threads
from benchmarks.peers.bake_raw_processes import encode_in_processes
from benchmarks.peers.documents import EOS

PACKAGE = "tiktoken"

read_back = bake_raw_threads.read_back

_GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _byte_of() -> dict[str, int]:
    """The byte for each character of the byte-level alphabet."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def _open(tokenizer: Path) -> Callable[[list[str]], list[list[int]]]:
    import tiktoken

    vocab, byte_of = json.loads(tokenizer.read_text())["model"]["vocab"], _byte_of()
    eos = vocab.pop(EOS)
    ranks = {bytes(byte_of[character] for character in token): number for token, number in vocab.items()}
    encoding = tiktoken.Encoding("bench", pat_str=_GPT2_WORDS, mergeable_ranks=ranks, special_tokens={EOS: eos})
    return lambda texts: [[*encoding.encode_ordinary(text), eos] for text in texts]


def bake(documents: Path, tokenizer: Path, folder: Path, workers: int) -> float:
    ids, seconds = encode_in_processes(partial(_open, tokenizer), documents, workers)
    bake_raw_threads.keep(folder, ids)
    return seconds
