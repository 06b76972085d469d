"""Baking: every peer turns the same JSONL into tokens on disk with the same tokenizer; all ids are compared."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.documents import Corpus, make_corpus
from benchmarks.peers.processes import run_child
from benchmarks.peers.source import bench_home
from benchmarks.peers.table import Row, markdown, spread

__all__ = ["KINDS", "Baker", "bakers_of", "measure_baking", "show_baking"]

WORKERS = 2

KINDS = {
    "bpe": "byte-level BPE, 32,000 ids",
    "lower": "the same BPE behind a Lowercase normalizer (no fast encoder)",
    "bytes": "UTF-8 bytes",
}


@dataclass(frozen=True, slots=True)
class Baker:
    """A file of this folder, what the table calls it, and the tokenizers that it is tried with."""

    module: str
    name: str
    kinds: tuple[str, ...] = ("bpe",)
    is_encoder: bool = False
    """The encoder alone: texts are in memory already, nothing is written."""


BAKERS = (
    Baker("bake_batchwright", "batchwright", ("bpe", "lower", "bytes")),
    Baker("bake_datasets", "datasets.map"),
    Baker("bake_datatrove", "datatrove"),
    Baker("bake_mosaic", "MDSWriter script"),
    Baker("bake_litdata", "litdata.optimize"),
    Baker("bake_megatron", "Megatron-style pool"),
    Baker("bake_raw_threads", "encoder alone: tokenizers, 2 threads", ("bpe", "lower"), is_encoder=True),
    Baker("bake_raw_processes", "encoder alone: tokenizers, 2 processes", ("bpe", "lower"), is_encoder=True),
    Baker("bake_tiktoken", "encoder alone: tiktoken, 2 processes", is_encoder=True),
    Baker("bake_raw_bytes", "by hand: msgspec, NumPy, 2 processes", ("bytes",)),
)


def bakers_of(kind: str) -> list[Baker]:
    return [baker for baker in BAKERS if kind in baker.kinds]


def measure_baking(
    bakers: Sequence[Baker], kind: str, *, num_bytes: int, rounds: int, say: Callable[[str], None]
) -> tuple[list[Row], Corpus]:
    """One row for each peer. Every bake is cold: a new folder, a new home, so that no cache of ours or theirs helps."""
    corpus = make_corpus(num_bytes, say)
    expected = corpus.hashes(kind)
    rows = {baker.name: Row(baker.name) for baker in bakers}
    for number in range(rounds):
        for baker in bakers:
            row = rows[baker.name]
            if row.why_not is None:
                row.add(_bake_once(baker, kind, corpus, None if number else expected))
                say(f"round {number + 1}: {kind}: {baker.name}: {row.why_not or row.measured['seconds'][-1]}")
    for row in rows.values():
        if row.why_not is None:
            row.measured["mtok_s"] = [corpus.facts[f"{kind}_tokens"] / s / 1e6 for s in row.measured["seconds"]]
            row.measured["mb_s"] = [corpus.facts["bytes"] / s / 1e6 for s in row.measured["seconds"]]
    return list(rows.values()), corpus


def _bake_once(baker: Baker, kind: str, corpus: Corpus, expected: list[str] | None) -> dict[str, Any]:
    """Bake into an empty folder, and compare all documents where `expected` says what they must be."""
    scratch = Path(tempfile.mkdtemp(prefix="bake-", dir=bench_home() / "peers"))
    try:
        home = {
            "BATCHWRIGHT_HOME": str(scratch / "home"),
            "HF_HOME": str(scratch / "hf"),
            "XDG_CACHE_HOME": str(scratch),
        }
        task = {
            "peer": baker.module,
            "documents": str(corpus.documents),
            "tokenizer": str(corpus.tokenizer(kind)),
            "folder": str(scratch / "out"),
            "workers": WORKERS,
        }
        for file in corpus.documents.iterdir():
            file.read_bytes()  # warm
        found = run_child({**task, "do": "bake"}, env=home)
        if "error" in found or expected is None:
            return found
        back = run_child({**task, "do": "read_back"}, env=home)
        if "error" in back:
            return {"error": f"baked, but could not be read back: {back['error']}"}
        if back["hashes"] != expected:
            same = len(set(back["hashes"]) & set(expected))
            return {"error": f"other ids: {same} of {len(expected)} documents are identical"}
        return found
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def show_baking(rows: Sequence[Row], bakers: Sequence[Baker]) -> str:
    """The table: bakers first, the encoders alone after them, then those that could not run, with the reason."""
    ours = next((row for row in rows if row.name == "batchwright" and row.why_not is None), None)
    alone = {baker.name for baker in bakers if baker.is_encoder}
    lines, failed = [], []
    for row in sorted(rows, key=lambda row: (row.name in alone, row.middle("seconds") or 0)):
        if row.why_not is not None or not row.measured.get("seconds"):
            failed.append([row.name, row.why_not or "", "", "", "", "", ""])
            continue
        ratios = []
        if ours is not None and row is not ours:
            ratios = [b / a for a, b in zip(ours.measured["seconds"], row.measured["seconds"], strict=False)]
        lines.append(
            [
                row.name,
                spread(row.measured["mtok_s"], ".3g"),
                f"{row.middle('mb_s'):.3g}",
                spread(row.measured["seconds"], ".2f"),
                spread(ratios, ".2f") if ratios else "1",
                f"{row.middle('peak_mb'):.0f}",
                row.last("version"),
            ]
        )
    header = ["", "M tokens/s", "MB/s", "seconds", "batchwright over it", "peak RSS, MB", "version"]
    return markdown(header, [*lines, *failed])
