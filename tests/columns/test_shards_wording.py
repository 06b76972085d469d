"""The exact wording of a few errors of shards, in one place. Other tests say what an error names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from batchwright.base.errors import BatchwrightError
from batchwright.columns.shard import open_shard
from batchwright.pool.shard_files import discover_and_split_multiple_data, find_shards, parse_range

WORDING: dict[str, tuple[Callable[[], object], str]] = {
    "a range that is reversed": (
        lambda: parse_range("9-0", directory="a", index=0),
        (
            "this range of shards is reversed: 9 is after 0\n"
            "  parameter  shard_ranges\n"
            "  index      0\n"
            "  directory  a\n"
            "  range      '9-0'\n"
            '  try        "0-9"'
        ),
    ),
    "a shard that is missing": (
        lambda: find_shards(["a"], ["0-3"]),
        (
            "shard 3 of range '0-3' is not there\n"
            "  parameter  shard_ranges\n"
            "  index      0\n"
            "  directory  a\n"
            "  range      '0-3'\n"
            "  missing    3\n"
            "  there      0-2\n"
            '  try        "0-2", or bring back what is missing'
        ),
    ),
    "a share of 2": (
        lambda: discover_and_split_multiple_data(["a"], ["all"], 2),
        (
            "validation_split is a share of the shards, 0 or more and below 1, and not 2\n"
            "  parameter  validation_split\n"
            "  given      2\n"
            "  try        validation_split=0.02"
        ),
    ),
    "a column that is not there": (
        lambda: open_shard("a/shard_0.npz", columns=["valeu"]),
        (
            "no column 'valeu'\n"
            "  file       a/shard_0.npz\n"
            "  column     valeu\n"
            "  columns    value\n"
            "  try        columns=['value']"
        ),
    ),
    "a file that is no npz": (
        lambda: open_shard("a/shard_2.npz"),
        (
            "not an npz file, or damaged\n"
            "  file       a/shard_2.npz\n"
            "  reason     File is not a zip file\n"
            "  try        copy it again, or write it again"
        ),
    ),
    "a pickle": (
        lambda: open_shard("b/shard_0.pkl"),
        (
            "shard_0.pkl is a pickle, which can run code when read. If you made it: allow_pickle=True, "
            "or once: batchwright shards convert DIR OUT --allow-pickle\n"
            "  file       b/shard_0.pkl\n"
            "  try        allow_pickle=True, or once: batchwright shards convert b b-npz --allow-pickle"
        ),
    ),
}


@pytest.mark.parametrize(("act", "text"), WORDING.values(), ids=WORDING)
def test_errors_of_shards_read_like_this(act, text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("b").mkdir()
    for number in (0, 1):
        np.savez(f"a/shard_{number}.npz", value=np.arange(3))
    Path("a/shard_2.npz").write_bytes(b"PK??" * 9)
    Path("b/shard_0.pkl").touch()
    with pytest.raises(BatchwrightError) as caught:
        act()
    assert str(caught.value) == text
