"""Epochs over a version of a buffer: every row once, one cursor, exact resume, any number of ranks."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

import batchwright as bw
from batchwright.base.errors import EndOfRun, PlanError, SpecError
from batchwright.buffer.schema import Field, Numbers, Schema
from batchwright.loaders.buffer_rows import RowDataLoader
from batchwright.order.split import share
from refusals import refused


class Ten:
    """Rows 0 to 9 (or as many as asked): `n` is the row's number, its id is 100 more."""

    schema = Schema((Field("n", pa.int64()),))

    def __init__(self, num_rows=10, number=3, content=None):
        self.number, self.content = number, content or f"rows 0 to {num_rows}"
        self.ids = 100 + np.arange(num_rows)

    def __len__(self):
        return len(self.ids)

    def columns_at(self, index):
        return {"n": Numbers(index.copy())}

    def content_fingerprint(self):
        return self.content


def opened(num_rows=10, **settings):
    settings = {"batch_size": 4, "seed": 7, "rank": 0, "world_size": 1} | settings
    version = settings.pop("version", None)
    return RowDataLoader(Ten(num_rows) if version is None else version, **settings)


def numbers_in(batches):
    return [batch["n"].tolist() for batch in batches]


def joined(parts):
    return [row for part in parts for row in part]


# Epochs


def test_an_epoch_has_every_row_once_in_an_order_of_its_own():
    loader = opened(batch_size=5, epochs=2)
    first, second = (joined(numbers_in(loader.get_iterator())) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != list(range(10))


def test_the_order_is_pinned():
    # States saved by running jobs are positions in this order: if it changes, they point at other rows.
    assert numbers_in(opened(batch_size=10)) == [[5, 7, 6, 4, 9, 3, 8, 1, 0, 2]]


def test_the_seed_is_the_order():
    assert numbers_in(opened(seed=7)) == numbers_in(opened(seed=7)) != numbers_in(opened(seed=8))


def test_rows_come_in_order_where_nothing_is_shuffled():
    assert numbers_in(opened(shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("epoch_end", "batches"),
    [
        ("drop", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("short", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        ("pad", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9]]),
        ("wrap", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]),
    ],
)
def test_the_last_batch_of_an_epoch_ends_as_asked(epoch_end, batches):
    loader = opened(shuffle=False, batch_size=bw.Batching(4, epoch_end=epoch_end), epochs=2)
    found = list(loader.get_iterator())
    assert numbers_in(found) == batches
    assert loader.epoch == 1
    weight = found[-1].metadata["weight"].tolist()
    assert weight == ([1, 1, 0, 0] if epoch_end == "pad" else [1] * len(batches[-1]))
    assert found[-1].metadata["global_rows"] == sum(weight)


def test_an_order_computed_for_some_rows_at_a_time_is_the_same(monkeypatch):
    expected = numbers_in(opened(100, batch_size=8))
    monkeypatch.setattr("batchwright.loaders.buffer_rows._LOCATED_ROWS", 24)
    assert numbers_in(opened(100, batch_size=8)) == expected


# The cursor


def test_a_batch_says_which_rows_it_has_and_where_they_lie():
    batch = opened(shuffle=False).get_batch()
    assert batch.index.tolist() == batch["n"].tolist() == [0, 1, 2, 3]
    assert batch.ids.tolist() == [100, 101, 102, 103]
    assert batch.metadata["position"].tolist() == [0, 1, 2, 3]
    assert batch.metadata["global_rows"] == 4


def test_the_cursor_moves_when_a_batch_is_handed_over():
    loader = opened(epochs=2)
    assert (loader.position, loader.step, loader.epoch, len(loader), loader.get_num_batches()) == (0, 0, 0, 3, 3)
    loader.get_batch()
    assert (loader.position, loader.step, loader.epoch) == (4, 1, 0)
    loader.get_batch()
    assert (loader.position, loader.step, loader.epoch) == (8, 2, 0)
    loader.get_batch()
    assert (loader.position, loader.step, loader.epoch) == (10, 3, 1)


def test_reset_and_seek_go_anywhere():
    loader = opened(epochs=None)
    batches = numbers_in(loader.get_batch() for _ in range(6))
    loader.reset()
    assert loader.get_batch()["n"].tolist() == batches[0]
    loader.seek(step=4)
    assert loader.get_batch()["n"].tolist() == batches[4]
    loader.seek(position=0)
    assert loader.get_batch()["n"].tolist() == batches[0]


def test_a_second_iterator_ends_the_first():
    loader = opened()
    first = loader.get_iterator()
    next(first)
    next(loader.get_iterator())
    with refused(PlanError, "get_batch"):
        next(first)


def test_after_the_last_epoch_the_run_is_over():
    loader = opened()
    assert len(list(loader)) == 3
    with refused(EndOfRun, "10 rows", remedy="epochs=2"):
        loader.get_batch()


def test_get_batch_takes_another_size_for_once():
    loader = opened(shuffle=False)
    assert numbers_in([loader.get_batch(), loader.get_batch(2), loader.get_batch()]) == [
        [0, 1, 2, 3],
        [4, 5],
        [6, 7, 8, 9],
    ]
    assert loader.step == 3


# Resume


@pytest.mark.parametrize("stopped_after", [0, 1, 2, 3, 7])
def test_a_restored_loader_gives_what_the_lost_one_would_have(stopped_after):
    lost = opened(epochs=None)
    for _ in range(stopped_after):
        lost.get_batch()
    state = json.loads(json.dumps(lost.state_dict()))
    restored = opened(epochs=None)
    restored.load_state_dict(state)
    assert (restored.step, restored.position) == (stopped_after, lost.position)
    assert numbers_in(restored.get_batch() for _ in range(5)) == numbers_in(lost.get_batch() for _ in range(5))


def test_the_state_in_a_batch_is_the_one_after_it():
    loader = opened(epochs=3)
    for _ in range(3):
        for batch in loader.get_iterator():
            assert batch.metadata["state"] == loader.state_dict()


def test_a_state_goes_on_with_another_batch_size():
    lost = opened(20, batch_size=4)
    rows = joined(numbers_in(lost.get_batch() for _ in range(2)))
    restored = opened(20, batch_size=6)
    restored.load_state_dict(lost.state_dict())
    assert restored.step == 2
    assert rows + joined(numbers_in(restored)) == joined(numbers_in(opened(20, batch_size=20)))


def test_rows_that_lie_in_another_version_are_the_same_rows():
    lost = opened()
    lost.get_batch()
    again = opened(version=Ten(number=8))
    again.load_state_dict(lost.state_dict())
    assert numbers_in([again.get_batch()]) == numbers_in([lost.get_batch()])


def test_a_loader_is_pickled_with_its_cursor():
    loader = opened(epochs=None)
    loader.get_batch()
    there = pickle.loads(pickle.dumps(loader))
    assert there.state_dict() == loader.state_dict()
    assert numbers_in([there.get_batch()]) == numbers_in([loader.get_batch()])


# Ranks


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("epoch_end", ["drop", "short", "pad", "wrap"])
def test_ranks_get_contiguous_shares_of_the_same_global_batches(world_size, epoch_end):
    settings = {"batch_size": bw.Batching(12, epoch_end=epoch_end), "epochs": 3}
    alone = opened(31, **settings)
    ranks = [opened(31, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]
    for _ in range(6):
        parts = [rank.get_batch() for rank in ranks]
        whole = alone.get_batch()
        assert [len(part) for part in parts] == [
            len(share(len(whole), rank=r, world=world_size)) for r in range(world_size)
        ]
        assert joined(numbers_in(parts)) == whole["n"].tolist()
        assert all(rank.state_dict() == alone.state_dict() for rank in ranks)


def test_uneven_shares_are_allowed_when_asked_for():
    settings = {"batch_size": bw.Batching(4, uneven=True), "shuffle": False}
    parts = [opened(rank=rank, world_size=3, **settings).get_batch() for rank in range(3)]
    assert numbers_in(parts) == [[0], [1], [2, 3]]


def test_a_rank_without_a_row_of_a_small_batch_gets_one_of_weight_0():
    settings = {"batch_size": bw.Batching(1, uneven=True), "shuffle": False}
    parts = [opened(rank=rank, world_size=2, **settings).get_batch() for rank in range(2)]
    assert numbers_in(parts) == [[0], [0]]
    assert [part.metadata["weight"].tolist() for part in parts] == [[0], [1]]


RANK = """
import json, sys
import numpy as np
import batchwright as bw

rank, world_size, batch_size, num_batches, state = json.loads(sys.argv[1])
buffer = bw.DatasetBuffer()
for first in range(0, 50, 10):                      # in several pieces
    buffer.extend({"n": np.arange(first, first + 10), "obs": np.full((10, 3), first, np.float32)})
loader = buffer.loader(batch_size=batch_size, seed=5, epochs=None, rank=rank, world_size=world_size)
if state:
    loader.load_state_dict(state)
batches = [loader.get_batch() for _ in range(num_batches)]
batches = [batch["n"][batch.metadata["weight"] > 0].tolist() for batch in batches]
print(json.dumps([batches, loader.state_dict()]))
"""


def run_ranks(world_size, batch_size, num_batches, state=None):
    """(global batches, state) of a job of real processes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, json.dumps([rank, world_size, batch_size, num_batches, state])],
            env=environment,
            stdout=subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    said = [json.loads(job.communicate(timeout=240)[0]) for job in jobs]
    assert all(state == said[0][1] for _, state in said)
    return [joined(parts) for parts in zip(*(batches for batches, _ in said), strict=True)], said[0][1]


def test_jobs_of_one_two_and_three_processes_have_the_same_global_batches():
    expected, _ = run_ranks(1, 12, 9)
    first, state = run_ranks(2, 12, 3)
    then, _ = run_ranks(3, 12, 6, state)
    assert first + then == expected


# Versions of a real buffer


@pytest.fixture
def buffer():
    buffer = bw.DatasetBuffer([{"n": n} for n in range(10)])
    buffer.commit("ten")
    return buffer


def test_a_loader_reads_the_version_at_which_it_was_opened(buffer):
    expected = numbers_in(buffer.loader(batch_size=2, seed=7))
    loader = buffer.loader(batch_size=2, seed=7)
    found = numbers_in([loader.get_batch()])
    buffer.set(buffer.ids, n=np.full(10, -1))
    buffer.append({"n": 10}, retain_prior=0.5, retain_prior_by="oldest")
    assert found + numbers_in(loader) == expected


def test_a_state_goes_on_over_the_version_that_it_belongs_to(buffer):
    lost = buffer.loader(batch_size=2, seed=7)
    lost.get_batch()
    buffer.append({"n": 10})
    with refused(PlanError, remedy=f"buffer.at({lost.version}).loader"):
        buffer.loader(batch_size=2, seed=7).load_state_dict(lost.state_dict())
    again = buffer.at(lost.version).loader(batch_size=2, seed=7)
    again.load_state_dict(lost.state_dict())
    assert numbers_in(again) == numbers_in(lost)


def test_a_loader_over_a_buffer_is_pickled_with_its_rows(buffer):
    loader = buffer.loader(batch_size=2, seed=7)
    loader.get_batch()
    there = pickle.loads(pickle.dumps(loader))
    buffer.append({"n": 10}, retain_prior=0)
    assert there.state_dict() == loader.state_dict()
    assert numbers_in(there) == numbers_in(loader)


def test_rows_that_were_rolled_back_to_are_the_same_rows(buffer):
    lost = buffer.loader(batch_size=2, seed=7)
    lost.get_batch()
    buffer.append({"n": 10}, retain_prior=0.3)
    buffer.rollback("ten")
    again = buffer.loader(batch_size=2, seed=7)
    again.load_state_dict(lost.state_dict())
    assert numbers_in(again) == numbers_in(lost)


# Bad input


def other_version():
    return opened(version=Ten(number=12, content="other rows"))


@pytest.mark.parametrize(
    ("opening", "named", "where", "remedy"),
    [
        (other_version, "version 12", {}, "buffer.at(3).loader"),
        (lambda: opened(seed=8), "seed=7", {"parameter": "seed"}, True),
        (lambda: opened(shuffle=False), "shuffle='global'", {"parameter": "shuffle"}, True),
        (
            lambda: opened(batch_size=bw.Batching(4, epoch_end="pad")),
            "epoch_end='short'",
            {"parameter": "epoch_end"},
            True,
        ),
    ],
)
def test_a_state_of_another_run_is_refused_and_the_cursor_stays(opening, named, where, remedy):
    lost, loader = opened(), opening()
    lost.get_batch()
    before = loader.state_dict()
    with refused(PlanError, named, remedy=remedy, **where):
        loader.load_state_dict(lost.state_dict())
    assert loader.state_dict() == before


@pytest.mark.parametrize("state", [None, {}, {"position": -1, "plan": "x", "steps": [[0, 0, 4]]}, {"buffer": 3}])
def test_something_that_is_no_state_is_refused(state):
    loader = opened()
    loader.get_batch()
    before = loader.state_dict()
    with refused(PlanError, got=state, remedy="state_dict()"):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


@pytest.mark.parametrize(
    ("opening", "named", "parameter"),
    [
        (lambda: opened(version=Ten(0)), "rows", "buffer"),
        (lambda: opened(batch_size=0), 0, "batch_size"),
        (lambda: opened(batch_size=bw.Batching(11, epoch_end="drop")), "10 rows", "batch_size"),
        (lambda: opened(shuffle="pool"), "'pool'", "shuffle"),
        (lambda: opened(batch_size=bw.Batching(4, epoch_end="stop")), "'stop'", "epoch_end"),
        (lambda: opened(epochs=0), 0, "epochs"),
        (lambda: opened(framework="tensorflow"), "'tensorflow'", "framework"),
        (lambda: opened(world_size=3), "world_size=3", "batch_size"),
        (lambda: opened(rank=2, world_size=2), "rank 2 of 2", "rank"),
    ],
)
def test_settings_that_cannot_work_are_named(opening, named, parameter):
    with refused(SpecError, named, parameter=parameter):
        opening()


def test_it_prints_what_it_will_do():
    loader = opened(rank=1, world_size=2)
    assert repr(loader).splitlines() == [
        "RowDataLoader: batches of 4 rows (numpy), rank 1 of 2 gets 2, 1 epoch, 3 steps an epoch, "
        "at step 0 (position 0)",
        "└─ version 3 of a buffer: 10 rows, shuffled by seed 7, content rows 0 ",
    ]


def test_ranks_can_be_proven_to_be_in_step():
    loader = opened()
    loader.get_batch()
    assert loader.check_sync().position == 4
    assert loader.position == 4
