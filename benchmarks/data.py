"""Corpora that benchmarks read: about 200M tokens (bytes of Python's own sources, repeated), baked once and kept."""

from __future__ import annotations

import glob
import os
import sysconfig
import tempfile
from pathlib import Path

import batchwright as bw

__all__ = ["corpus_store", "mixture_store"]

_FILE_BYTES = 20_000_000


def corpus_store(num_tokens: int = 200_000_000) -> Path:
    """The store, made if it is not there. Lies in $BATCHWRIGHT_BENCH, or in the system's temporary folder."""
    raw = _home() / f"raw-{num_tokens}"
    _write(raw, num_tokens)
    recipe = (
        bw.DatasetRecipe(seed=0)
        .add_ingredient(raw, format="text", name="code")
        .prepare_step(bw.tokenize("bytes", append_eos=True))
    )
    store = _home() / f"tokens-{num_tokens}.store"
    bw.bake(recipe, to=store)
    return store


def mixture_store(num_sources: int, num_tokens: int = 200_000_000) -> Path:
    """A store of about as many tokens in all, in sources of one size: source000, source001, ..."""
    raw = _home() / f"raw-{num_tokens}-in-{num_sources}"
    recipe = bw.DatasetRecipe(seed=0)
    for number in range(num_sources):
        name = f"source{number:03d}"
        _write(raw / name, num_tokens // num_sources, first=1 + number * 10_007)  # no two begin alike
        recipe = recipe.add_ingredient(raw / name, format="text", name=name)
    store = _home() / f"tokens-{num_tokens}-in-{num_sources}.store"
    bw.bake(recipe.prepare_step(bw.tokenize("bytes", append_eos=True)), to=store)
    return store


def _write(folder: Path, num_bytes: int, first: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(-(-num_bytes // _FILE_BYTES)):
        path = folder / f"{number:03d}.txt"
        if not path.exists():
            path.write_bytes(_text(min(_FILE_BYTES, num_bytes - number * _FILE_BYTES), first))


def _home() -> Path:
    return Path(os.environ.get("BATCHWRIGHT_BENCH") or Path(tempfile.gettempdir()) / "batchwright-bench")


def _text(num_bytes: int, first: int = 0) -> bytes:
    """Python's top-level library sources from byte `first` on, as often as it takes."""
    sources = b"".join(Path(path).read_bytes() for path in sorted(glob.glob(sysconfig.get_path("stdlib") + "/*.py")))
    sources = sources.decode("ascii", "ignore").encode()
    return (sources * ((first + num_bytes) // len(sources) + 1))[first : first + num_bytes]
