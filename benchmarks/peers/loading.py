"""Loading: every peer reads shuffled windows of the same tokens, round after round, then stops halfway and resumes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.processes import run_child
from benchmarks.peers.source import bench_home
from benchmarks.peers.table import Row, markdown, spread

__all__ = ["OURS", "PEERS", "Peer", "measure_loading", "ratios", "show_loading", "warm"]

OURS = "batchwright"


@dataclass(frozen=True, slots=True)
class Peer:
    """A file of this folder, what the table calls it, and the numbers of workers it is tried with."""

    module: str
    name: str
    workers: tuple[int, ...] = (0, 2)

    def rows(self) -> list[tuple[str, int]]:
        return [(self.name if len(self.workers) == 1 else f"{self.name}, {n} workers", n) for n in self.workers]


PEERS = (
    Peer("load_batchwright", OURS),
    Peer("load_numpy", "hand-written NumPy (the limit)", (0,)),
    Peer("load_stateful", "torch StatefulDataLoader, `__getitems__`"),
    Peer("load_torch", "torch DataLoader, a sample at a time"),
    Peer("load_hf", "HF datasets, NumPy format", (0,)),
    Peer("load_litdata", "LitData StreamingDataset"),
    Peer("load_grain", "Grain"),
    Peer("load_lance", "Lance take", (0,)),
    Peer("load_webdataset", "WebDataset"),
    Peer("load_megatron", "Megatron-core GPTDataset"),
    Peer("load_hf_iterable", "HF IterableDataset"),
    Peer("load_mosaic", "MosaicML StreamingDataset"),
)


def measure_loading(
    peers: Sequence[Peer],
    *,
    row_tokens: int,
    rounds: int,
    seconds: float,
    is_resumed: bool,
    say: Callable[[str], None],
) -> list[Row]:
    """One row for each peer and number of workers. Rounds go over all of them, so that all meet the same noise."""
    store, token_file = _tokens()
    rows = {name: Row(name) for peer in peers for name, _ in peer.rows()}
    tasks = {}
    for peer in peers:
        folder, error = _converted(peer, store, token_file, row_tokens, say)
        for name, workers in peer.rows():
            rows[name].add({"error": error} if error else {})
            tasks[name] = {
                "peer": peer.module,
                "store": str(store),
                "token_file": str(token_file),
                "folder": str(folder),
                "row_tokens": row_tokens,
                "workers": workers,
            }
    ours = next(iter(tasks.values()))
    for number in range(rounds):
        for name, task in tasks.items():
            if rows[name].why_not is None:
                warm([Path(task["folder"])] if Path(task["folder"]).exists() else [token_file, store])
                # Ours once more right before each peer: on a busy machine only neighbours can be compared.
                beside = {} if task["peer"] == ours["peer"] else run_child({**ours, "do": "speed", "seconds": 1})
                found = run_child({**task, "do": "speed", "seconds": seconds}, limit_seconds=120)
                rows[name].add(found if "error" in found else {**found, "ours_mtok_s": beside.get("mtok_s")})
                say(f"round {number + 1}: {name}: {found.get('error') or round(found['mtok_s'], 1)}")
    for peer in peers if is_resumed else ():
        best = max(
            (name for name, _ in peer.rows() if rows[name].why_not is None),
            key=lambda name: rows[name].middle("mtok_s") or 0,
            default=None,
        )
        if best is not None:
            rows[best].measured["resume"] = [_resume(tasks[best])]
            say(f"resume: {best}: {rows[best].measured['resume'][0]}")
    return list(rows.values())


def _tokens() -> tuple[Path, Path]:
    """batchwright's store, and the same tokens as a bare file."""
    import batchwright as bw
    from benchmarks.data import corpus_store

    store = corpus_store()
    token_file = bench_home() / "tokens-200000000.u16"
    if not token_file.exists():
        part = token_file.with_suffix(".part")
        bw.open_store(store).stream("code").shard(0).tokens.tofile(part)
        part.rename(token_file)
    return store, token_file


def _converted(
    peer: Peer, store: Path, token_file: Path, row_tokens: int, say: Callable[[str], None]
) -> tuple[Path, str | None]:
    """The folder with the peer's own copy, made once and kept; and what went wrong."""
    shared = "load_hf" if peer.module == "load_hf_iterable" else peer.module
    folder = bench_home() / "peers" / f"{shared}-{row_tokens}"
    done = folder.with_name(folder.name + ".done")
    if done.exists():
        return folder, None
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    task = {
        "peer": peer.module,
        "do": "convert",
        "store": str(store),
        "token_file": str(token_file),
        "folder": str(folder),
        "row_tokens": row_tokens,
    }
    found = run_child(task)
    if "error" not in found:
        done.touch()
        say(f"converted for {peer.name}")
    return folder, found.get("error")


def warm(paths: Sequence[Path]) -> None:
    """Read everything once, so that it is in the page cache."""
    for file in (file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))):
        if file.is_file():
            with file.open("rb") as stream:
                while stream.read(1 << 22):
                    pass


def _resume(task: dict[str, Any]) -> dict[str, Any]:
    """Stop in the middle of the epoch, go on in a new process: the seconds to its first batch, and whether it is the
    batch that the uninterrupted run had next, and the 19 after it too, byte for byte."""
    state = bench_home() / "peers" / "state.pickle"
    half = run_child({**task, "do": "half", "state": str(state)})
    if "error" in half:
        return {"error": half["error"]}
    resumed = run_child({**task, "do": "resume", "state": str(state)})
    if "error" in resumed:
        return {"error": resumed["error"]}
    return {"seconds": resumed["resume_s"], "is_exact": resumed["hashes"] == half["hashes"]}


def show_loading(rows: Sequence[Row]) -> str:
    """The table: the fastest first, then those that could not run, with the reason."""
    lines, failed = [], []
    for row in sorted(rows, key=lambda row: -(row.middle("mtok_s") or 0)):
        if row.why_not is not None or not row.measured.get("mtok_s"):
            failed.append([row.name, row.why_not or "", "", "", "", "", "", ""])
            continue
        lines.append(
            [
                row.name,
                spread(row.measured["mtok_s"], ".3g"),
                spread(ratios(row), ".2f"),
                f"{median(row.measured['first_s']):.2f}",
                *_resume_cells(row),
                f"{row.middle('peak_mb'):.0f} ({row.middle('anonymous_mb'):.0f})",
                row.last("version"),
            ]
        )
    header = [
        "",
        "M tokens/s",
        "batchwright over it",
        "first batch, s",
        "resume at 50 %, s",
        "exact",
        "peak RSS (anonymous), MB",
        "version",
    ]
    return markdown(header, [*lines, *failed])


def ratios(row: Row) -> list[float]:
    """Our rate over that of a peer, each time measured right before it."""
    pairs = zip(row.measured["ours_mtok_s"], row.measured["mtok_s"], strict=True)
    return [ours / theirs for ours, theirs in pairs if ours]


def _resume_cells(row: Row) -> tuple[str, str]:
    resume = row.last("resume")
    if resume is None:
        return "", ""
    if "error" in resume:
        return "", f"failed: {resume['error']}"
    return f"{resume['seconds']:.2f}", f"{'yes' if resume['is_exact'] else '**no**'}: {row.last('resumes_by')}"
