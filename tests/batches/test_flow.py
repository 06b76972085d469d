"""The whole path on one page: a task in, its rows out, the same whoever asks and however the task is divided."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import batchwright as bw
from batchwright.batches.flow import Flow, Task
from batchwright.batches.settings import Asked
from batchwright.loaders.pretrain import make_plan
from batchwright.loaders.stored import open_flow
from batchwright.order.schedule import Order
from batchwright.store.plans import streams_for_plan


def flow_of(store, plan):
    return open_flow(streams_for_plan(store, plan), plan)


def fresh(rows, width):
    return np.full((rows, width), -1, np.int64)


class Numbers:
    """A source without a store: row i of epoch e is 1000 e + i, over and over."""

    row_tokens, fingerprint = 3, "numbers"

    def __init__(self, name, num_rows, sign=1):
        self.name, self.num_rows, self.sign = name, num_rows, sign

    def gather(self, index, epoch, out):
        out[:] = self.sign * (1000 * epoch + index)[:, None]


def test_a_task_names_the_positions_of_one_rank():
    task = Task(live=100, num_steps=3, stride=10, rows=range(4, 6), real_rows=10)
    assert task.live_rows().tolist() == [104, 105, 114, 115, 124, 125]
    assert task.num_rows == 6
    assert task.weights() is None


def test_a_task_may_hold_any_rows_in_any_order():
    task = Task(live=100, num_steps=2, stride=10, rows=(9, 0, 4), real_rows=5)
    assert task.live_rows().tolist() == [104, 100, 104, 114, 110, 114]
    assert task.num_rows == 6
    assert task.weights().tolist() == [0, 1, 1] * 2


def test_rows_beyond_the_data_repeat_the_last_row_with_weight_0():
    task = Task(live=100, num_steps=1, stride=4, rows=range(4), real_rows=2)
    assert task.live_rows().tolist() == [100, 101, 101, 101]
    assert task.weights().tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("store", ["small_store", "sharded_store"])
@pytest.mark.parametrize("weights", [None, {"web": 0.5, "notes": 0.5}])
def test_rows_are_those_that_the_documents_have(store, weights, request, slow_rows):
    opened = bw.open_store(request.getfixturevalue(store))
    plan = make_plan(opened, Asked(chunk_size=16, seed=7, weights=weights))
    flow, slow = flow_of(opened, plan), slow_rows(opened, plan)
    block = flow.make(Task(0, 1, 1500, range(1500), 1500), fresh)  # three epochs, with rows over shard borders and ends
    assert block.tokens.tolist() == [slow.row(position) for position in range(1500)]
    assert block.position.tolist() == list(range(1500))
    assert [slow.names[s] for s in block.source] == [slow.names[slow.places(p)[0]] for p in range(1500)]


def test_small_shards_hold_the_rows_that_one_shard_holds_apart(sharded_store):
    flow = flow_of(bw.open_store(sharded_store), make_plan(bw.open_store(sharded_store), Asked(chunk_size=16, seed=7)))
    assert sum(len(rows.stream.shard_tokens) for rows in flow.windows) > 20
    located = flow.locate(Task(0, 1, 500, range(500), 500))
    assert len(located.apart) > 10  # rows over the border of a shard: the ones that the gather cannot take whole


@pytest.mark.parametrize("store", ["small_store", "sharded_store"])
@pytest.mark.parametrize("weights", [None, {"web": 0.8, "notes": 0.2}])
def test_sources_that_are_found_together_are_gathered_as_one_by_one(store, weights, request):
    opened = bw.open_store(request.getfixturevalue(store))
    flow = flow_of(opened, make_plan(opened, Asked(chunk_size=16, seed=7, weights=weights)))
    task = Task(0, 1, 1500, range(1500), 1500)
    together = flow.make(task, fresh).tokens
    assert flow.joint is not None
    flow.one_gather = False
    assert np.array_equal(flow.make(task, fresh).tokens, together)


def test_a_task_can_be_made_in_parts(sharded_store):
    store = bw.open_store(sharded_store)
    flow = flow_of(store, make_plan(store, Asked(chunk_size=16, seed=7)))
    located = flow.locate(Task(30, 5, 40, range(40), 40))
    whole = located.make(0, 200, fresh).tokens
    for parts in ([(0, 1), (1, 200)], [(0, 77), (77, 78), (78, 200)], [(n, n + 10) for n in range(0, 200, 10)]):
        made = [located.make(first, last, fresh).tokens for first, last in parts]
        assert np.array_equal(np.concatenate(made), whole)


def test_rows_that_all_lie_over_a_border_are_read_one_by_one(sharded_store, slow_rows):
    store = bw.open_store(sharded_store)
    plan = make_plan(store, Asked(chunk_size=16, seed=7))
    flow, slow = flow_of(store, plan), slow_rows(store, plan)
    apart = flow.locate(Task(0, 1, 500, range(500), 500)).apart[:5].tolist()
    for position in apart:
        block = flow.make(Task(position, 1, 1, range(1), 1), fresh)
        assert block.tokens.tolist() == [slow.row(position)]


def test_several_threads_get_the_same_rows(small_store):
    store = bw.open_store(small_store)
    flow = flow_of(store, make_plan(store, Asked(chunk_size=16, seed=7)))
    tasks = [Task(12 * n, 1, 12, range(12), 12) for n in range(60)]
    expected = [flow.make(task, fresh).tokens for task in tasks]
    found = {}

    def work(turn):
        for n, task in list(enumerate(tasks))[:: 1 if turn % 2 else -1]:
            found[turn, n] = flow.make(task, fresh).tokens

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 * 60
    assert all(np.array_equal(tokens, expected[n]) for (_, n), tokens in found.items())


def test_sources_of_the_users_own_are_gathered_by_number():
    sources = [Numbers("up", 6), Numbers("down", 2, sign=-1)]
    order = Order({"up": 6, "down": 2}, seed=7)
    block = Flow(sources, order).make(Task(8, 1, 8, range(8), 8), fresh)  # the second epoch
    source, index, _ = order.at(range(8, 16))
    assert block.tokens[:, 0].tolist() == [(1000 + i) * (-1 if s else 1) for s, i in zip(source, index, strict=True)]
