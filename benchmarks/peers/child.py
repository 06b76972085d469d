"""Run one task of one peer in this process, and write what it found: python -m benchmarks.peers.child TASK.json"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.buffers import measure_buffer
from benchmarks.peers.documents import document_hashes
from benchmarks.peers.pools import measure_pool
from benchmarks.peers.rollouts import measure_rollouts
from benchmarks.peers.source import ROWS, Source, cut, version_of

_WARM_BATCHES = 10
_CHECKED_BATCHES = 20
_MIXED_BATCHES = 50


def _consume(batches: Any, *, seconds: float) -> tuple[int, float]:
    """(tokens, seconds) of a loop that sums every batch."""
    total, tokens, began = 0, 0, time.perf_counter()
    until = began + seconds
    while (now := time.perf_counter()) < until:
        batch = np.asarray(next(batches))
        total += int(batch.sum())
        tokens += batch.size
    assert total > 0
    return tokens, now - began


def _hashes(batches: Any) -> list[str]:
    return [
        hashlib.sha256(np.ascontiguousarray(np.asarray(batch)).tobytes()).hexdigest()
        for batch in itertools.islice(batches, _CHECKED_BATCHES)
    ]


def load(peer: Any, source: Source, task: dict[str, Any]) -> dict[str, Any]:
    """Open, take the first batch, then measure ("speed"), or save the state in the middle of the epoch ("half")."""
    batches, state_of = peer.open_batches(source, task["workers"], None)
    first = np.asarray(next(batches))
    first_seconds = time.monotonic() - task["spawned"]
    assert first.shape == (ROWS, source.row_tokens), first.shape
    assert first.dtype == np.int64, first.dtype
    if task["do"] == "speed":
        for _ in itertools.islice(batches, _WARM_BATCHES):
            pass
        tokens, seconds = _consume(batches, seconds=task["seconds"])
        return {"first_s": first_seconds, "mtok_s": tokens / seconds / 1e6}
    for _ in itertools.islice(batches, source.num_rows // ROWS // 2 - 1):
        pass
    Path(task["state"]).write_bytes(pickle.dumps(state_of()))
    return {"hashes": _hashes(batches)}


def load_resumed(peer: Any, source: Source, task: dict[str, Any]) -> dict[str, Any]:
    """The batches after a resume, and how long the first took from the start of the process."""
    state = pickle.loads(Path(task["state"]).read_bytes())
    batches, _ = peer.open_batches(source, task["workers"], state)
    first = next(batches)
    seconds = time.monotonic() - task["spawned"]
    return {"resume_s": seconds, "hashes": _hashes(itertools.chain([first], batches))}


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    try:
        peer = importlib.import_module(f"benchmarks.peers.{task['peer']}")
        resumes_by = getattr(peer, "RESUMES_BY", None)
        found = {"version": version_of(peer.PACKAGE), "resumes_by": resumes_by, **_do(peer, task)}
    except BaseException as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"}
    Path(task["out"]).write_text(json.dumps(found))


def _reads_the_bare_array(source: Source) -> None:
    """Nothing to convert."""


def mix(peer: Any, sources: list[Source], task: dict[str, Any]) -> dict[str, Any]:
    """Open, take the first batch, look whether the shares are those that were asked for, then measure."""
    batches = peer.open_mixture(sources, task["weights"])
    first = np.asarray(next(batches))
    first_seconds = time.monotonic() - task["spawned"]
    assert first.shape == (ROWS, sources[0].row_tokens), first.shape
    assert first.dtype == np.int64, first.dtype
    shares, strangers = shares_of(itertools.islice(batches, _MIXED_BATCHES), sources)
    if getattr(peer, "CUTS_AT_MULTIPLES", True):
        assert not strangers, f"{strangers} rows are not of any source"
        assert np.abs(shares - task["weights"]).max() < 0.06, shares
    tokens, seconds = _consume(batches, seconds=task["seconds"])
    return {"first_s": first_seconds, "mtok_s": tokens / seconds / 1e6}


def shares_of(batches: Any, sources: list[Source]) -> tuple[np.ndarray, int]:
    """(the share of rows that each source has, how many rows are of none), where every row is a row of some source."""
    known: dict[bytes, int] = {}
    for number, source in enumerate(sources):
        for row in cut(source.tokens(), source.row_tokens):
            known[hashlib.blake2b(row[:-1].tobytes(), digest_size=8).digest()] = number
    found = [
        known.get(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), len(sources))
        for batch in batches
        for row in np.asarray(batch).astype(np.uint16)
    ]
    counts = np.bincount(found, minlength=len(sources) + 1)
    return counts[:-1] / max(counts[:-1].sum(), 1), int(counts[-1])


def _do(peer: Any, task: dict[str, Any]) -> dict[str, Any]:
    if task["do"] == "bake":
        began = time.perf_counter()
        seconds = peer.bake(Path(task["documents"]), Path(task["tokenizer"]), Path(task["folder"]), task["workers"])
        return {"seconds": seconds or time.perf_counter() - began}  # an encoder alone says how long it encoded
    if task["do"] == "read_back":
        return {"hashes": document_hashes(peer.read_back(Path(task["folder"])))}
    if task["do"] == "pack":
        tokens, lengths = (np.load(Path(task["folder"], f"{name}.npy")) for name in ("tokens", "lengths"))
        found: dict[str, Any] = peer.pack_samples(tokens, lengths, task["capacity"], task["method"])
        return found
    if task["do"] == "buffer":
        return measure_buffer(peer.open_buffer, task)
    if task["do"] == "pool":
        return measure_pool(peer, task)
    if task["do"] == "rollouts":
        if task["clock"] == "cpu":
            importlib.import_module("torch").set_num_threads(1)  # of all threads the time would be added up
        return measure_rollouts(peer.run, task)
    if "sources" in task:
        sources = [Source(*(Path(path) for path in paths), task["row_tokens"]) for paths in task["sources"]]
        if task["do"] == "convert":
            for source in sources:
                getattr(peer, "convert", _reads_the_bare_array)(source)
            return {}
        return mix(peer, sources, task)
    source = Source(Path(task["store"]), Path(task["token_file"]), Path(task["folder"]), task["row_tokens"])
    if task["do"] == "convert":
        getattr(peer, "convert", _reads_the_bare_array)(source)
        return {}
    return load_resumed(peer, source, task) if task["do"] == "resume" else load(peer, source, task)


if __name__ == "__main__":
    main()
