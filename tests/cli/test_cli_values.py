"""Arguments that all verbs read alike, and text as a terminal may get it."""

from __future__ import annotations

import argparse
import re

import pytest

from batchwright.cli.output import printable
from batchwright.cli.values import number_range, weights, whole_number


@pytest.mark.parametrize(
    ("text", "number"), [("8", 8), ("10e9", 10**10), ("1_000", 1000), ("2k", 2000), ("1.5B", 15 * 10**8), ("-1", -1)]
)
def test_whole_numbers_are_read_as_people_write_them(text, number):
    assert whole_number(text) == number


def test_a_large_whole_number_stays_exact():
    assert whole_number("12345678901234567891") == 12345678901234567891


@pytest.mark.parametrize("text", ["", "x", "1.5", "e9", "nan", "inf", "--"])
def test_what_is_no_whole_number_is_refused_by_name(text):
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(text))):
        whole_number(text)


@pytest.mark.parametrize("text", ["web", "web=", "=1", "web=-1", "web=nan", "web=inf", "web=1,,code=2", "web=1;code=2"])
def test_weights_that_are_none_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=VALUE"):
        weights(text)


def test_two_weights_for_one_source_are_refused():
    with pytest.raises(argparse.ArgumentTypeError, match="'web'"):
        weights("web=1,web=2")


@pytest.mark.parametrize("text", ["", "-5", "3-", "a-b", "1-2-3", "1.5"])
def test_a_range_of_steps_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(text))):
        number_range(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, café\n\tindented", "plain, café\n\tindented"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\x00", "a\\rb\\x00"),
        ("right \u202eto left", "right \\u202eto left"),
        ("half \ud800 pair", "half \\ud800 pair"),
    ],
)
def test_control_characters_are_shown_and_not_obeyed(text, shown):
    assert printable(text) == shown
