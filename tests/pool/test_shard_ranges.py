"""Ranges of shards: what a text means, which number a file has, and what is said where they do not fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.base.errors import SpecError
from batchwright.pool.shard_files import choose, extension_of, number_of, parse_range, range_text
from refusals import refused


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("shard_0012.pkl.gz", 12),
        ("run2_shard-007.npz", 7),
        ("0.npz", 0),
        ("shard.0003.npz", 3),
        ("shard_12.v2.parquet", 2),
        ("SHARD_5.NPZ", 5),
        ("2024-01-31.jsonl", 31),
        ("positions.safetensors", None),
        ("shard_٣.npz", None),
    ],
)
def test_the_number_of_a_shard_is_the_last_integer_before_its_extension(name, number):
    assert number_of(name) == number


@pytest.mark.parametrize("name", ["README.md", "metadata.json", "shard_1.npz.tmp", "shard_1.npz~", "npz", "shard_1"])
def test_files_of_other_kinds_have_no_shard_extension(name):
    assert extension_of(name) is None


def means(wanted, number: int) -> bool:
    return wanted.stretches is None or any(first <= number <= last for first, last in wanted.stretches)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("0-99", [0, 50, 99], [100]),
        ("251-300", [251, 300], [250, 301]),
        ("7", [7], [6, 8]),
        ("0-9,20-29", [0, 9, 20, 29], [10, 19, 30]),
        (" 20 - 29 ,0-9 ", [0, 9, 20, 29], [10, 19, 30]),
        ("00-09", [0, 9], [10]),
        ("all", [0, 10**12], []),
        ("none", [], [0, 1]),
    ],
)
def test_a_range_has_both_its_ends(text, inside, outside):
    wanted = parse_range(text)
    assert all(means(wanted, number) for number in inside)
    assert not any(means(wanted, number) for number in outside)


def test_parts_that_touch_or_overlap_are_one_range():
    assert str(parse_range("10-19,0-9")) == "0-19"
    assert str(parse_range("0-9,5-12,7,7")) == "0-12"


BAD = [
    *("", "   ", "-5", "-5-3", "3--5", "a-b", "0:99", "0-99,", "0-9-20", "1.5", "٣-٥", "9" * 5000, "all,3", "3,none"),
    *(7, (0, 99), range(100), None, True),
]


@pytest.mark.parametrize("text", BAD, ids=lambda value: repr(value)[:20])
def test_what_is_no_range_is_refused_with_some_that_are(text):
    place = {"parameter": "shard_ranges", "index": 1, "directory": "data/b", "range": repr(text)}
    with refused(SpecError, remedy='"0-99"', **place):
        parse_range(text, directory="data/b", index=1)


@pytest.mark.parametrize("text", ["99-0", "0-9, 99-0"])
def test_a_reversed_range_is_refused_with_the_one_that_was_meant(text):
    with refused(SpecError, "reversed", remedy='"0-99"', range=repr(text)):
        parse_range(text)


@given(st.sets(st.integers(0, 60)))
def test_the_text_of_numbers_means_exactly_them(numbers):
    wanted = parse_range(range_text(numbers))
    assert {number for number in range(70) if means(wanted, number)} == numbers


@given(st.sets(st.integers(0, 40), min_size=1), st.sets(st.integers(0, 40)))
def test_a_choice_is_whole_or_lists_exactly_what_is_missing(asked, there):
    wanted = parse_range(range_text(asked))
    if asked <= there:
        assert choose(wanted, there) == sorted(asked)
    else:
        with pytest.raises(SpecError) as caught:
            choose(wanted, there)
        missing = parse_range(caught.value.where["missing"].replace(" ", ""))
        assert {number for number in range(50) if means(missing, number)} == asked - there


@pytest.mark.parametrize(
    ("text", "there", "missing", "has", "remedy"),
    [
        ("0-99", {*range(100)} - {57, *range(60, 65)}, "57, 60-64", "0-56, 58-59, 65-99", '"0-56,58-59,65-99"'),
        ("90-120", {*range(100)}, "100-120", "0-99", '"90-99"'),
        ("200-300", {*range(100)}, "200-300", "0-99", '"all"'),
        ("12", {11, 13}, "12", "11, 13", '"all"'),
        ("0-999999999999", {0}, "1-999999999999", "0", '"0"'),
        ("all", {0, 1, 3}, "2", "0-1, 3", '"0-1,3"'),
    ],
)
def test_numbers_that_are_not_there_are_listed_with_a_range_that_fits(text, there, missing, has, remedy):
    place = {"parameter": "shard_ranges", "index": 1, "directory": "data/b", "range": repr(text)}
    with refused(SpecError, missing=missing, there=has, remedy=remedy, **place):
        choose(parse_range(text), there, directory="data/b", index=1)


def test_many_gaps_are_listed_only_in_part():
    there = [number for number in range(1000) if number % 7]
    with pytest.raises(SpecError) as caught:
        choose(parse_range("0-999"), there)
    assert caught.value.where["missing"].startswith("0, 7, 14, ")
    assert caught.value.where["missing"].endswith(", 133 and 123 more")
    assert len(str(caught.value)) < 3000


def test_numbers_are_ids_where_fewer_than_half_are_there():
    assert choose(parse_range("all"), [0, 5]) == [0, 5]  # 2 of 6
    with refused(SpecError, range="'all'", missing="1-2", there="0, 3"):
        choose(parse_range("all"), [0, 3])  # 2 of 4: half


def test_ids_of_an_explicit_range_must_all_be_there():
    assert choose(parse_range("17,4011"), [17, 4011, 90210]) == [17, 4011]
    with refused(SpecError, range="'17-18'", missing="18"):
        choose(parse_range("17-18"), [17, 4011, 90210])


def test_thousands_of_ids_are_chosen_at_once():
    ids = (np.arange(20_000) * 97).tolist()  # quadratic time would show: 400 million steps
    assert choose(parse_range(range_text(ids)), ids) == ids
