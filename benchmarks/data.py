"""The corpus that benchmarks read: about 200M tokens (bytes of Python's own sources, repeated), baked once and kept."""

from __future__ import annotations

import glob
import os
import sysconfig
import tempfile
from pathlib import Path

import penstock as ps

__all__ = ["corpus_store"]

_FILE_BYTES = 20_000_000


def corpus_store(num_tokens: int = 200_000_000) -> Path:
    """The store, made if it is not there. Lies in $PENSTOCK_BENCH, or in the system's temporary folder."""
    home = Path(os.environ.get("PENSTOCK_BENCH") or Path(tempfile.gettempdir()) / "penstock-bench")
    raw = home / f"raw-{num_tokens}"
    raw.mkdir(parents=True, exist_ok=True)
    for number in range(-(-num_tokens // _FILE_BYTES)):
        path = raw / f"{number:03d}.txt"
        if not path.exists():
            path.write_bytes(_text(min(_FILE_BYTES, num_tokens - number * _FILE_BYTES)))
    recipe = (
        ps.DatasetRecipe(seed=0)
        .add_ingredient(raw, format="text", name="code")
        .prepare_step(ps.tokenize("bytes", append_eos=True))
    )
    store = home / f"tokens-{num_tokens}.store"
    ps.bake(recipe, to=store)
    return store


def _text(num_bytes: int) -> bytes:
    """Python's top-level library sources, as often as it takes."""
    sources = b"".join(Path(path).read_bytes() for path in sorted(glob.glob(sysconfig.get_path("stdlib") + "/*.py")))
    sources = sources.decode("ascii", "ignore").encode()
    return (sources * (num_bytes // len(sources) + 1))[:num_bytes]
