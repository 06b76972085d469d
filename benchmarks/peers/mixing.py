"""Mixing: every peer reads 4 sources of 50M tokens by the same weights, round after round."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.peers.loading import OURS, Peer, ratios, warm
from benchmarks.peers.processes import run_child
from benchmarks.peers.source import bench_home
from benchmarks.peers.table import Row, markdown, spread

__all__ = ["MIXERS", "NUM_SOURCES", "measure_mixing", "show_mixing"]

NUM_SOURCES = 4
WEIGHTS = [0.125, 0.208, 0.292, 0.375]

MIXERS = (
    Peer("mix_batchwright", OURS, (0,)),
    Peer("mix_litdata", "LitData CombinedStreamingDataset", (0,)),
    Peer("mix_hf", "HF interleave_datasets, map-style", (0,)),
    Peer("mix_hf_iterable", "HF interleave_datasets, iterable", (0,)),
    Peer("mix_grain", "Grain MapDataset.mix", (0,)),
    Peer("mix_mosaic", "MosaicML streams with proportions", (0,)),
    Peer("mix_megatron", "Megatron-core blend", (0,)),
)


def measure_mixing(
    mixers: Sequence[Peer], *, row_tokens: int, rounds: int, seconds: float, say: Callable[[str], None]
) -> list[Row]:
    """One row for each peer. Rounds go over all of them, so that all meet the same noise."""
    store, token_files = _tokens()
    rows, tasks = {mixer.name: Row(mixer.name) for mixer in mixers}, {}
    for mixer in mixers:
        shared = "mix_hf" if mixer.module == "mix_hf_iterable" else mixer.module
        folder = bench_home() / "peers" / f"{shared}-{row_tokens}"
        sources = [(str(store), str(file), str(folder / file.stem)) for file in token_files]
        task = {"peer": mixer.module, "sources": sources, "row_tokens": row_tokens, "weights": WEIGHTS}
        done = folder.with_name(folder.name + ".done")
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            found = run_child({**task, "do": "convert"})
            rows[mixer.name].add(found if "error" in found else {})
            if "error" not in found:
                done.touch()
                say(f"converted for {mixer.name}")
        tasks[mixer.name] = task
    ours = {**next(iter(tasks.values())), "do": "mix"}
    for number in range(rounds):
        for name, task in tasks.items():
            if rows[name].why_not is None:
                folder = Path(task["sources"][0][2]).parent
                warm([folder] if any(folder.iterdir()) else [store, *token_files])
                # Ours once more right before each peer: on a busy machine only neighbours can be compared.
                beside = {} if task["peer"] == ours["peer"] else run_child({**ours, "seconds": 1})
                found = run_child({**task, "do": "mix", "seconds": seconds}, limit_seconds=120)
                rows[name].add(found if "error" in found else {**found, "ours_mtok_s": beside.get("mtok_s")})
                say(f"round {number + 1}: {name}: {found.get('error') or round(found['mtok_s'], 1)}")
    return list(rows.values())


def _tokens() -> tuple[Path, list[Path]]:
    """batchwright's store, and the same tokens as a bare file for each source."""
    import batchwright as bw
    from benchmarks.data import mixture_store

    store = mixture_store(NUM_SOURCES)
    opened, files = bw.open_store(store), []
    for name in opened.names:
        files.append(bench_home() / f"mixture-{NUM_SOURCES}" / f"{name}.u16")
        if not files[-1].exists():
            files[-1].parent.mkdir(parents=True, exist_ok=True)
            stream, part = opened.stream(name), files[-1].with_suffix(".part")
            stream.read(0, stream.num_tokens).astype(np.uint16).tofile(part)
            part.rename(files[-1])
    return store, files


def show_mixing(rows: Sequence[Row]) -> str:
    """The table: the fastest first, then those that could not run, with the reason."""
    lines, failed = [], []
    for row in sorted(rows, key=lambda row: -(row.middle("mtok_s") or 0)):
        if row.why_not is not None or not row.measured.get("mtok_s"):
            failed.append([row.name, row.why_not or "", "", "", "", ""])
            continue
        lines.append(
            [
                row.name,
                spread(row.measured["mtok_s"], ".3g"),
                spread(ratios(row), ".2f"),
                f"{median(row.measured['first_s']):.2f}",
                f"{row.middle('peak_mb'):.0f} ({row.middle('anonymous_mb'):.0f})",
                row.last("version"),
            ]
        )
    header = ["", "M tokens/s", "batchwright over it", "first batch, s", "peak RSS (anonymous), MB", "version"]
    return markdown(header, [*lines, *failed])
