"""Beside TRL: best_fit never makes more rows than its best-fit decreasing, over all samples or in its windows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from batchwright.batches.pack import pack

pytestmark = pytest.mark.peers

CAPACITY = 4096
SHAPES = ["log-normal", "uniform", "short", "long", "two lengths", "just over half"]

PEER = """
import json, sys
import datasets, numpy as np, pyarrow as pa
from trl import pack_dataset

datasets.disable_progress_bars()
counts = {}
for name, lengths in np.load(sys.argv[1]).items():
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = pa.ListArray.from_arrays(borders, np.zeros(borders[-1], np.int32))
    samples = datasets.Dataset(pa.table({"input_ids": tokens}))
    at_once = {"whole": len(samples), "windows": 1000}  # 1000 is what it takes by default
    counts[name] = {
        how: pack_dataset(samples, int(sys.argv[2]), "bfd", {"batch_size": size, "keep_in_memory": True}).num_rows
        for how, size in at_once.items()
    }
print(json.dumps(counts))
"""


def lengths_of(shape: str) -> np.ndarray:
    draw = np.random.default_rng(SHAPES.index(shape))
    drawn = {
        "log-normal": draw.lognormal(5.8, 0.93, 5000),
        "uniform": draw.integers(1, CAPACITY + 1, 3000),
        "short": draw.integers(1, 60, 20_000),
        "long": draw.normal(3000, 500, 2500),
        "two lengths": draw.choice([1500, 1100], 3000),
        "just over half": draw.integers(CAPACITY // 2 - 200, CAPACITY // 2 + 200, 3000),
    }
    return np.clip(drawn[shape], 1, CAPACITY).astype(np.int64)


@pytest.fixture(scope="module")
def rows_of_trl(tmp_path_factory) -> dict[str, dict[str, int]]:
    """In a process of its own, which may live in another environment: {shape: {"whole": rows, "windows": rows}}."""
    beside = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"  # what `make bench-peers` builds
    python = os.environ.get("BATCHWRIGHT_PEERS_PYTHON") or (str(beside) if beside.exists() else sys.executable)
    if subprocess.run([python, "-W", "ignore", "-c", "from trl import pack_dataset"], capture_output=True).returncode:
        pytest.skip(
            "NOT COMPARED WITH TRL: `make bench-peers` builds an environment that has it; "
            "$BATCHWRIGHT_PEERS_PYTHON can name another one"
        )
    folder = tmp_path_factory.mktemp("trl")
    np.savez(folder / "lengths.npz", **{shape: lengths_of(shape) for shape in SHAPES})
    done = subprocess.run(
        [python, "-W", "ignore", "-c", PEER, str(folder / "lengths.npz"), str(CAPACITY)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    counts: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return counts


@pytest.mark.parametrize("shape", SHAPES)
def test_best_fit_makes_as_many_rows_as_trl_over_all_samples_at_once(shape, rows_of_trl):
    assert pack(lengths_of(shape), CAPACITY).num_rows == rows_of_trl[shape]["whole"]


@pytest.mark.parametrize("shape", SHAPES)
def test_best_fit_makes_no_more_rows_than_trl_in_its_windows(shape, rows_of_trl):
    assert pack(lengths_of(shape), CAPACITY).num_rows <= rows_of_trl[shape]["windows"]
