"""`batchwright demo` is another program behind the same name: all that is said here is that it is reached."""

from __future__ import annotations


def test_the_demo_reads_its_own_arguments(succeeds):
    assert "usage: batchwright demo" in succeeds("demo --help").out


def test_an_unknown_argument_of_the_demo_is_bad_usage(batchwright):
    assert batchwright("demo --no-such-option").code == 2
