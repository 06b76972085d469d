"""A costly pattern is built once on a machine; a file that is not what it should be is as good as none."""

from __future__ import annotations

import numpy as np
import pytest

from batchwright.base.files import home
from batchwright.order import disk_cache as kept
from batchwright.order import mix
from batchwright.order.mix import build_pattern

COUNTS = (70, 20, 9, 1)


@pytest.fixture
def builds(tmp_path, monkeypatch):
    """An empty home, in which every pattern is worth keeping; and the counts of all that were built."""
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path))
    monkeypatch.setattr(mix, "_WORTH_KEEPING", 0)
    built, draw = [], mix.draw_slots
    monkeypatch.setattr(mix, "draw_slots", lambda counts: built.append(counts) or draw(counts))
    build_pattern.cache_clear()
    yield built
    build_pattern.cache_clear()


def again() -> list[int]:
    build_pattern.cache_clear()
    return build_pattern(COUNTS).source_of_slot.tolist()


def only_file():
    (file,) = (home() / "patterns").iterdir()
    return file


def test_a_pattern_is_built_once(builds):
    assert again() == again()
    assert builds == [COUNTS]


def test_shares_with_a_common_divisor_are_one_pattern(builds):
    build_pattern(COUNTS)
    build_pattern(tuple(3 * count for count in COUNTS))
    assert builds == [COUNTS]


def test_other_counts_are_another_pattern(builds):
    build_pattern(COUNTS)
    build_pattern(COUNTS[::-1])
    assert len(builds) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data: bytes([data[0] ^ 1]) + data[1:],
    ],
    ids=["empty", "short", "long", "another slot", "another hash"],
)
def test_a_damaged_file_is_built_anew_and_replaced(builds, damage):
    expected, file = again(), only_file()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert again() == expected
    assert builds == [COUNTS, COUNTS]
    assert file.read_bytes() == good


def test_a_whole_file_of_another_mixture_is_built_anew(builds):
    expected, file = again(), only_file()
    build_pattern(COUNTS[::-1])
    (other,) = set((home() / "patterns").iterdir()) - {file}
    file.write_bytes(other.read_bytes())
    assert again() == expected


def test_a_home_that_is_a_file_costs_the_time_and_nothing_else(builds, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "file"))
    assert again() == again()
    assert builds == [COUNTS, COUNTS]


def test_the_oldest_file_goes_when_there_are_many(builds, monkeypatch):
    monkeypatch.setattr(kept, "_MOST_FILES", 3)
    for count in range(2, 9):
        build_pattern((count, 1))
    assert len(list((home() / "patterns").iterdir())) == 3


def test_cheap_patterns_are_not_kept(builds, monkeypatch):
    monkeypatch.setattr(mix, "_WORTH_KEEPING", 1 << 18)
    build_pattern(COUNTS)
    assert not (home() / "patterns").exists()


def test_what_was_kept_is_what_lookups_need(builds):
    build_pattern(COUNTS)
    build_pattern.cache_clear()
    pattern = build_pattern(COUNTS)
    source, ordinal = pattern.at(np.arange(250))
    assert np.array_equal(pattern.position(0, ordinal[source == 0]), np.flatnonzero(source == 0))
