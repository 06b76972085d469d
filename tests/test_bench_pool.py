"""The benchmark of the mixed pool measures the same rows on both sides, and knows where refills are."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import pool as program  # noqa: E402
from benchmarks.peers import pool_batchwright, pool_dicts  # noqa: E402
from benchmarks.peers.pools import COLUMNS, make_shards, measure_pool, pickled, refill_draws  # noqa: E402
from benchmarks.peers.table import Row  # noqa: E402

needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")
NUM_ROWS, SHARD_ROWS = 8_000, 1_000
TASK = {"num_rows": NUM_ROWS, "shard_rows": SHARD_ROWS, "pool_rows": 4_000, "threshold": 3_000}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_shards(tmp_path_factory.mktemp("pool"), NUM_ROWS, SHARD_ROWS)


def test_shards_lie_in_two_directories_and_number_their_rows(folders):
    assert [len(list(folder.glob("*.npz"))) for folder in folders] == [5, 3]
    with np.load(folders[1] / "shard_0000.npz") as shard:
        assert shard["number"][0] == 5 * SHARD_ROWS
        assert {name: (str(shard[name].dtype), shard[name].shape[1:]) for name in COLUMNS} == COLUMNS


@needs_proc
@pytest.mark.parametrize("way", ["batches", "rows"])
@pytest.mark.parametrize("how", ["views", "copies", "pickles"])
def test_the_list_of_dicts_gives_every_row_once(folders, how, way):
    given = [str(folder) for folder in (pickled(folders) if how == "pickles" else folders)]
    found = measure_pool(pool_dicts, {**TASK, "way": way, "how": how, "folders": given})  # which counts them
    assert len(found["pool_s"]["shuffle"]) == 1 + len(refill_draws(NUM_ROWS, SHARD_ROWS, 4_000, 3_000))


@needs_proc
def test_the_columns_give_every_row_once(folders):
    found = measure_pool(pool_batchwright, {**TASK, "way": "batches", "how": "npz", "folders": [*map(str, folders)]})
    assert len(found["refills_ms"]) == 4


@needs_proc
def test_a_row_that_is_missing_is_noticed(folders):
    with pytest.raises(AssertionError, match="8000 rows came, of 8001"):
        measure_pool(
            pool_dicts, {**TASK, "num_rows": 8_001, "way": "rows", "how": "views", "folders": [*map(str, folders)]}
        )


def test_ours_is_compared_with_theirs_of_the_same_round():
    ways = [way for way in program.WAYS if way.part == "rows"]
    facts = {"later_rows_s": [1.0, 1.0], "first_s": [1.0, 1.0]}
    rows = [
        Row(
            way.name,
            {"rows_s": [6.0, 8.0] if way.module == program.OURS else [3.0, 2.0], "most_mb": [4.0, 4.0], **facts},
        )
        for way in ways
    ]
    assert "| 3.0 (2.0 - 4.0) |" in program.show_rates(ways, rows)
