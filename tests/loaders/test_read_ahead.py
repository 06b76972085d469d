"""What a loader will need is read before it needs it, by the known order; batches and lifetimes do not depend on it."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import batchwright as bw
from batchwright.base.errors import SpecError
from batchwright.batches.ahead import FileReader
from batchwright.loaders import read_ahead
from batchwright.loaders.read_ahead import _Blocks, _Rows
from refusals import refused

ORDERS = {
    "global": {"shuffle": "global"},
    "pool": {"shuffle": bw.Shuffle("pool", pool_rows=40)},
    "none": {"shuffle": "none"},
    "pool, mixture": {
        "shuffle": bw.Shuffle("pool", pool_rows=40),
        "weights": bw.Mixture({"web": 0.5, "code": 0.2, "notes": 0.3}, num_rows=600),
    },
}
AHEAD = {"delivery": bw.Delivery(read_ahead=True)}
NOT_AHEAD = {"delivery": bw.Delivery(read_ahead=False)}


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batchwright-read-ahead"]


@pytest.fixture
def small_memory(monkeypatch):
    """No store fits, and what is read at once is small, as it would be for a store of terabytes."""
    monkeypatch.setattr(read_ahead, "available_bytes", lambda: 4000)
    monkeypatch.setattr(read_ahead, "_UNIT_BYTES", 600)


@pytest.fixture
def held_up(monkeypatch):
    """The thread waits in its first read until this is set."""
    go_on, waits = threading.Event(), threading.Event()

    def read(self, span):
        waits.set()
        go_on.wait(240)

    monkeypatch.setattr(FileReader, "read", read)
    yield waits
    go_on.set()
    for thread in threads():
        thread.join(240)


def bytes_of(spans) -> set[tuple[str, int]]:
    return {(str(path), byte) for path, first, last in spans for byte in range(first, last)}


def bytes_of_batch(loader, batch) -> set[tuple[str, int]]:
    """Where the tokens of a batch lie."""
    flow = loader.stream.flow
    draw = flow.order.at(batch.metadata["position"])
    found: set[tuple[str, int]] = set()
    for source, index, epoch in zip(*(part.tolist() for part in draw), strict=True):
        rows = flow.windows[source]
        for start, stop in rows.stretch(index, index + 1, epoch):
            found |= bytes_of(rows.stream.spans(start, stop))
    return found


def digest(loader) -> list[bytes]:
    return [batch.input_ids.tobytes() for _ in range(loader.epochs) for batch in loader.get_iterator()]


# The batches


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("fits", [True, False])
def test_batches_are_the_same_with_and_without(request, small_store, open_loader, name, fits):
    expected = digest(open_loader(small_store, epochs=2, **NOT_AHEAD, **ORDERS[name]))
    if not fits:
        request.getfixturevalue("small_memory")
    loader = open_loader(small_store, epochs=2, **AHEAD, **ORDERS[name])
    assert digest(loader) == expected
    del loader
    gc.collect()
    for thread in threads():
        thread.join(240)
        assert not thread.is_alive()


# What is read, and when: the follower by hand, without its thread


@pytest.mark.parametrize("store", ["small_store", "sharded_store"])
@pytest.mark.parametrize("name", ["pool", "none", "pool, mixture"])
def test_every_row_was_read_before_it_is_handed_over_and_is_not_dropped_before_that(
    request, open_loader, small_memory, monkeypatch, store, name
):
    monkeypatch.setattr(read_ahead, "available_bytes", lambda: 16_000)  # for two windows of each source
    loader = open_loader(request.getfixturevalue(store), epochs=2, **NOT_AHEAD, **ORDERS[name])
    follower = _Blocks(loader, once=False)
    cached: set[tuple[str, int]] = set()
    dropped = 0
    for _ in range(2):
        for batch in loader.get_iterator():
            assert bytes_of_batch(loader, batch) <= cached or batch.metadata["position"][0] == 0
            for _ in range(1000):
                work = follower.next(loader)
                if not (work.read or work.drop or work.read_again):
                    break
                dropped += len(work.drop)
                # Neighbours share a token, the last label of one and the first input of the other, and in different
                # epochs up to a row. A cache drops whole pages only, so it keeps that.
                cached -= bytes_of((path, first + 34, last - 34) for path, first, last in work.drop)
                cached |= bytes_of(work.read) | bytes_of(work.read_again)
            else:
                pytest.fail("it never has nothing to do")
    assert dropped


def test_no_more_is_held_than_the_window_in_use_and_what_memory_allows(small_store, open_loader, small_memory):
    loader = open_loader(
        small_store,
        epochs=2,
        **NOT_AHEAD,
        weights=bw.Mixture({"web": 1}, num_rows=600),
        **ORDERS["pool"],
    )
    follower = _Blocks(loader, once=False)
    window_bytes = loader.plan.pool_rows * 16 * 2
    most = 0
    for _ in loader.get_iterator():
        while follower.next(loader).read:
            most = max(most, follower.held_bytes)
    assert window_bytes < most <= max(0.8 * 4000, window_bytes) + 600


def test_when_everything_fits_it_is_read_once_and_that_is_all(small_store, open_loader):
    for name in ("global", "pool", "none"):
        loader = open_loader(small_store, **NOT_AHEAD, epochs=None, **ORDERS[name])
        follower = _Blocks(loader, once=True)
        read = []
        while (work := follower.next(loader)) is not None:
            read += work.read
        expected = [
            span
            for rows in loader.stream.flow.windows
            for span in rows.stream.spans(0, rows.num_rows * rows.row_tokens + 1)  # less than a row is never needed
        ]
        assert bytes_of(expected) <= bytes_of(read)
        assert sum(last - first for _, first, last in read) < 1.1 * len(bytes_of(expected))


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_that_lie_anywhere_are_asked_for_one_by_one_and_only_those_of_this_rank(
    small_store, open_loader, small_memory, monkeypatch, rank
):
    monkeypatch.setattr(read_ahead, "_ROWS_AHEAD", 50)
    monkeypatch.setattr(read_ahead, "_ROWS_AT_ONCE", 7)
    loader = open_loader(small_store, epochs=2, **NOT_AHEAD, rank=rank, world_size=2)
    follower = _Rows()
    asked: set[tuple[str, int]] = set()
    rows_asked = 0
    # One row of a later epoch runs over the end of its stream: what it has of the beginning is not asked for.
    over_the_end = bytes_of(span for rows in loader.stream.flow.windows for span in rows.stream.spans(0, 17))
    for _ in range(2):
        for batch in loader.get_iterator():
            assert bytes_of_batch(loader, batch) - over_the_end <= asked or batch.metadata["position"][0] < 12
            while parts := follower.next(loader).ask_for:
                rows_asked += sum(len(offsets) for _, offsets, _ in parts)
                asked |= bytes_of((path, o, o + size) for path, offsets, size in parts for o in offsets.tolist())
    assert rows_asked <= 2 * loader.plan.epoch_rows // 2


def test_going_back_starts_again_from_there(small_store, open_loader, small_memory):
    loader = open_loader(small_store, **NOT_AHEAD, **ORDERS["pool"])
    follower = _Blocks(loader, once=False)
    first = follower.next(loader).read
    for _ in range(20):
        loader.get_batch()
        follower.next(loader)
    loader.reset()
    assert follower.next(loader).read == first


def test_a_jump_far_ahead_goes_on_from_there(small_store, open_loader, small_memory):
    loader = open_loader(small_store, **NOT_AHEAD, epochs=None, **ORDERS["pool"])
    follower = _Blocks(loader, once=False)
    follower.next(loader)
    loader.seek(position=10**12)
    wanted = bytes_of_batch(loader, loader.get_batch())
    read = set()
    while work := follower.next(loader).read:
        read |= bytes_of(work)
    assert wanted <= read


def test_an_adopted_file_is_read_where_it_lies(tmp_path, open_loader):
    path = tmp_path / "train.bin"
    np.arange(4000, dtype=np.uint16).clip(0, 255).tofile(path)
    store = bw.adopt(path, "bytes", eos="none", show_progress=False)
    loader = open_loader(store.path, **NOT_AHEAD)
    follower = _Blocks(loader, once=True)
    spans = follower.next(loader).read
    assert {span[0] for span in spans} == {path}
    assert bytes_of(spans) == {(str(path), byte) for byte in range((3999 // 16 * 16 + 1) * 2)}


# When there is a thread, and how it ends


def test_no_thread_starts_where_the_data_is_cached(small_store, open_loader, monkeypatch):
    monkeypatch.setattr(read_ahead, "_LEAST_BYTES", 0)
    monkeypatch.setattr(read_ahead, "cached_share", lambda spans: 1.0)
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
    open_loader(small_store)


def test_no_thread_starts_for_a_small_store_or_where_it_is_turned_off(small_store, open_loader, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
    open_loader(small_store)
    monkeypatch.setattr(read_ahead, "_LEAST_BYTES", 0)
    monkeypatch.setattr(read_ahead, "cached_share", lambda spans: 0.0)
    open_loader(small_store, **NOT_AHEAD)


@pytest.mark.usefixtures("held_up")
@pytest.mark.parametrize(("local_rank", "expected"), [(None, 1), ("0", 1), ("1", 0)])
def test_cold_data_is_read_by_one_process_of_a_machine(small_store, open_loader, monkeypatch, local_rank, expected):
    monkeypatch.setattr(read_ahead, "_LEAST_BYTES", 0)
    monkeypatch.setattr(read_ahead, "cached_share", lambda spans: 0.0)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    loader = open_loader(small_store)
    assert len(threads()) == expected
    del loader


def test_the_thread_ends_when_it_has_read_everything(small_store, open_loader):
    loader = open_loader(small_store, **AHEAD)
    for thread in threads():
        thread.join(240)
        assert not thread.is_alive()
    assert loader.get_batch() is not None


def test_a_dropped_loader_lets_go_of_its_store_while_its_thread_reads(small_store, open_loader, small_memory, held_up):
    loader = open_loader(small_store, **AHEAD, **ORDERS["pool"])
    loader.get_batch()
    assert held_up.wait(240)  # it reads now
    (thread,) = threads()
    store = weakref.ref(loader.store)
    del loader
    gc.collect()
    assert store() is None
    assert thread.is_alive()  # it is held up in its read, and holds nothing


def test_the_thread_of_a_dropped_loader_ends(small_store, open_loader, small_memory):
    loader = open_loader(small_store, **AHEAD, **ORDERS["pool"])
    (thread,) = threads()
    assert thread.is_alive()
    del loader
    gc.collect()
    thread.join(240)
    assert not thread.is_alive()


@pytest.mark.usefixtures("small_memory")
def test_a_copy_has_no_thread_and_gives_the_same(small_store, open_loader):
    loader = open_loader(small_store, **AHEAD, **ORDERS["pool"])
    before = len(threads())
    copy = pickle.loads(pickle.dumps(loader))
    assert len(threads()) == before == 1
    assert np.array_equal(copy.get_batch().input_ids, loader.get_batch().input_ids)
    del loader
    gc.collect()
    for thread in threads():
        thread.join(240)


def test_a_process_ends_while_its_thread_still_reads(small_store):
    code = f"""
import time
from batchwright.batches.ahead import FileReader
import batchwright as bw
FileReader.read = lambda self, span: time.sleep(600)
loader = bw.PretrainDataLoader({str(small_store)!r}, chunk_size=16, framework="numpy",
                               delivery=bw.Delivery(read_ahead=True))
print(loader.get_batch().input_ids.shape)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(bw.__file__).parent.parent)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert (ran.returncode, ran.stdout) == (0, "(8, 16)\n"), ran.stderr


@pytest.mark.usefixtures("small_memory")
def test_what_only_linux_has_is_not_needed(small_store, open_loader, monkeypatch):
    expected = digest(open_loader(small_store, **NOT_AHEAD, **ORDERS["pool"]))
    monkeypatch.setenv("BATCHWRIGHT_PORTABLE", "1")
    assert digest(open_loader(small_store, **AHEAD, **ORDERS["pool"])) == expected
    loader = open_loader(small_store, **AHEAD, **ORDERS["global"])
    assert len(loader.get_batch()) == 12


@pytest.mark.usefixtures("small_memory")
def test_windows_that_do_not_fit_twice_are_said_with_a_number_that_would(small_store, open_loader, caplog):
    with caplog.at_level(logging.WARNING, "batchwright"):
        open_loader(small_store, **AHEAD, shuffle=bw.Shuffle("pool", pool_rows=400))
    (said,) = [record.getMessage() for record in caplog.records if "windows" in record.getMessage()]
    assert "do not fit" in said
    assert "pool_rows=" in said


# The settings


def test_a_window_is_about_a_gibibyte_of_tokens_by_default(small_store, open_loader):
    plan = open_loader(small_store, chunk_size=64, shuffle="pool").plan
    rows = (1 << 30) // (3 * 64 * 2)  # three sources, two bytes a token
    assert plan.pool is not None
    assert rows <= plan.pool_rows < rows + 16
    assert plan.pool[1] == 16


def test_the_windows_are_in_the_plan_and_its_fingerprint(small_store, open_loader, tmp_path):
    plans = [open_loader(small_store, shuffle=bw.Shuffle("pool", pool_rows=rows)).plan for rows in (160, 320)]
    plans.append(open_loader(small_store).plan)
    assert len({plan.fingerprint for plan in plans}) == 3
    assert plans[0].difference(plans[1]) == "pool: (10, 16) here, (20, 16) there"
    assert plans[2].difference(plans[0]) == "shuffle: global here, pool there"
    assert "pool in windows of 160 rows" in repr(plans[0])
    plans[0].save(tmp_path / "plan.json")
    assert bw.Plan.load(tmp_path / "plan.json") == plans[0]
    assert bw.Plan.load(tmp_path / "plan.json").fingerprint == plans[0].fingerprint


def test_a_plan_with_windows_is_run_again_from_its_fingerprint(small_store, open_loader):
    first = open_loader(small_store, **ORDERS["pool"])
    again = open_loader(small_store, plan=first.plan.fingerprint)
    assert np.array_equal(first.get_batch().input_ids, again.get_batch().input_ids)
    what_it_has = bw.Shuffle(pool_rows=40)  # rounded up to 48
    open_loader(small_store, plan=first.plan.fingerprint, shuffle=what_it_has)


def test_rows_of_a_pool_are_found_again_by_their_document(small_store, open_loader):
    loader = open_loader(small_store, **ORDERS["pool"])
    record = next(bw.trace(small_store, loader, step=5))
    uses = bw.find(small_store, loader, file=record.file, row=record.row)
    assert (record.position, record.epoch) in {(use.position, use.epoch) for use in uses}


@pytest.mark.parametrize(
    ("scope", "pool_rows", "parameter", "named"),
    [
        (None, 100, "pool_rows", "shuffle='pool'"),
        ("none", 100, "pool_rows", "shuffle='none'"),
        ("pool", 0, "pool_rows", "pool_rows"),
        ("pol", None, "shuffle", "pool"),
    ],
)
def test_settings_that_mean_nothing_are_refused(own_store, open_loader, scope, pool_rows, parameter, named):
    with refused(SpecError, named, parameter=parameter):
        open_loader(own_store, shuffle=bw.Shuffle(scope, pool_rows=pool_rows))
    assert not (own_store / "plans").exists()


def test_other_windows_than_a_plan_has_are_refused(small_store, open_loader):
    plan = open_loader(small_store, **ORDERS["pool"]).plan
    with refused(SpecError, "pool_rows=80", parameter="pool_rows"):
        open_loader(small_store, plan=plan, shuffle=bw.Shuffle(pool_rows=80))
