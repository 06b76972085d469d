"""Files are brought into the page cache, looked for there, and dropped from it. A file that is gone is no fault."""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import pytest

from batchwright.base.machine import is_cached
from batchwright.batches import ahead
from batchwright.batches.ahead import FileReader, cached_share
from harness import wait_for

MEGABYTE = 1 << 20


@pytest.fixture
def file(tmp_path):
    """32 MB of zeros, on disk."""
    path = tmp_path / "data.bin"
    with path.open("wb") as out:
        out.write(bytes(32 * MEGABYTE))
        out.flush()
        os.fsync(out.fileno())
    return path


def needs_a_cache(path) -> None:
    """Drop a file. A busy file system holds pages that it has written until its journal is done: so, repeatedly."""
    whole = [(path, 0, path.stat().st_size)]
    for _ in range(60):
        with FileReader() as files:
            files.drop(whole)
            if sys.platform == "linux" and cached_share(whole) == 0:
                time.sleep(0.05)  # the pages that were looked at arrive, and go too
                files.drop(whole)
                return
        time.sleep(0.05)
    pytest.skip("NOT CHECKED: this file system does not drop what is cached")


def wait_until_cached(span, read) -> None:
    """Read until all of a span is cached: a busy machine may drop what was read just now."""
    wait_for("cached span", lambda: read(span) or cached_share([span]) == 1)


def test_what_was_dropped_is_not_cached_and_what_was_read_is(file):
    needs_a_cache(file)
    whole = [(file, 0, 32 * MEGABYTE)]
    with FileReader() as files:
        wait_for("cold file", lambda: files.drop(whole) or cached_share(whole) < 0.1)
        wait_until_cached((file, 0, 16 * MEGABYTE), files.read)
        wait_until_cached(whole[0], files.read)


def test_looking_does_not_make_the_next_look_say_that_a_cold_file_is_cached(file):
    needs_a_cache(file)
    assert all(cached_share([(file, 0, 32 * MEGABYTE)]) < 0.3 for _ in range(5))


def test_reading_a_span_brings_in_that_span_only(file):
    needs_a_cache(file)
    with FileReader() as files:
        files.drop([(file, 0, 32 * MEGABYTE)])
        wait_until_cached((file, 8 * MEGABYTE, 12 * MEGABYTE), files.read)
    assert cached_share([(file, 13 * MEGABYTE, 32 * MEGABYTE)]) < 0.2
    assert cached_share([(file, 0, 7 * MEGABYTE)]) < 0.2


def test_what_the_cache_lost_is_read_again(file):
    needs_a_cache(file)
    span = (file, 0, 16 * MEGABYTE)
    with FileReader() as files:
        files.read(span)

        def lose_and_read_again(span):
            files.drop([(file, 4 * MEGABYTE, 12 * MEGABYTE)])
            files.read_again(span)

        wait_until_cached(span, lose_and_read_again)


def test_small_parts_that_are_asked_for_arrive(file):
    needs_a_cache(file)
    with FileReader() as files:
        files.drop([(file, 0, 32 * MEGABYTE)])
        places = np.array([5 * MEGABYTE, 20 * MEGABYTE])
        wait_for("small parts", lambda: files.ask_for(file, places, 4096) or files.is_cached(file, 20 * MEGABYTE))


def test_a_missing_file_is_passed_over(tmp_path):
    gone = tmp_path / "gone.bin"
    with FileReader() as files:
        files.read((gone, 0, 100))
        files.read_again((gone, 0, 100))
        files.drop([(gone, 0, 100)])
        files.ask_for(gone, np.array([0]), 10)
        assert files.is_cached(gone, 0) is None
    assert cached_share([(gone, 0, 100)]) is None


def test_a_span_past_the_end_of_a_file_is_read_to_its_end(tmp_path):
    path = tmp_path / "short.bin"
    path.write_bytes(b"abc")
    with FileReader() as files:
        files.read((path, 0, 10**9))


def test_only_some_files_are_open_at_once_and_none_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "_OPEN_FILES", 3)
    paths = [tmp_path / str(n) for n in range(10)]
    for path in paths:
        path.write_bytes(b"data")
    opened, closed = [], []
    really_open, really_close = os.open, os.close
    monkeypatch.setattr(os, "open", lambda *given: opened.append(d := really_open(*given)) or d)
    monkeypatch.setattr(os, "close", lambda d: closed.append(d) or really_close(d))
    with FileReader() as files:
        for path in paths:
            files.read((path, 0, 4))
            assert len(opened) - len(closed) <= 3
    assert len(opened) == len(closed) == 10


def test_where_the_system_does_not_tell_the_share_is_not_known(file, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_PORTABLE", "1")
    assert cached_share([(file, 0, 100)]) is None
    with FileReader() as files:
        files.read((file, 0, 32 * MEGABYTE))  # plain reads work everywhere
        files.drop([(file, 0, 32 * MEGABYTE)])
    monkeypatch.setenv("BATCHWRIGHT_PORTABLE", "0")
    if sys.platform == "linux":
        with file.open("rb") as still:
            assert is_cached(still.fileno(), MEGABYTE) in (True, None)
