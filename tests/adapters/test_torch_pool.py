"""A mixed stream in torch: each position once with any workers, and a state after any batch goes on exactly there."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from batchwright import MemoryLimitError, StreamingMixedShardDataset
from batchwright.base.errors import PlanError, SpecError
from batchwright.columns.shard import row_bytes
from batchwright.pool.memory import Needs
from harness import wait_for
from refusals import refused
from shared import slow

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # torch counts this machine's cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata still calls it
]

ROWS = {"selfplay": [23] * 5, "human": [31, 2, 31]}
NUM_ROWS = 179
BATCH = 8


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Two directories of npz shards. Every position has an id, and a board that is made of it."""
    folder, first = tmp_path_factory.mktemp("shards"), 0
    for name, sizes in ROWS.items():
        (folder / name).mkdir()
        for number, rows in enumerate(sizes):
            ids = np.arange(first, first + rows)
            np.savez(folder / name / f"shard_{number:04}.npz", id=ids, board=np.stack([ids, -ids], 1).astype(np.int16))
            first += rows
    assert first == NUM_ROWS
    return [str(folder / name) for name in ROWS]


@pytest.fixture
def opened(directories):
    given = {"pool_size": 72, "refill_threshold": 50, "random_seed": 7, "batch_size": BATCH}
    return lambda **other: StreamingMixedShardDataset(directories, ["all", "all"], **(given | other))


def ids_of(batches):
    """The ids of each batch; every board is that of its id."""
    batches = list(iter(batches))  # list(DataLoader) asks for its length, which does not count short batches of workers
    for batch in batches:
        assert np.array_equal(batch["board"][:, 0], batch["id"])
    return [batch["id"].tolist() for batch in batches]


def flat(batches):
    return [id_ for batch in batches for id_ in batch]


def alone(ds, *, lanes=1, epochs=1):
    """The batches of whole epochs, if this process draws from so many lanes."""
    if lanes > 1:
        batches = iter(ds.loader(num_workers=lanes))
        next(batches)
        state = ds.state_dict()
        ds.load_state_dict(state | {"drawn": 0, "by_lane": [0] * lanes})
    return [batch for _ in range(epochs) for batch in ids_of(ds.batches())]


# A plain DataLoader


def test_torch_takes_it_for_an_iterable_dataset(opened):
    assert isinstance(opened(), IterableDataset)
    assert issubclass(StreamingMixedShardDataset, IterableDataset)


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_a_plain_dataloader_yields_every_position_once(opened, num_workers):
    batches = ids_of(DataLoader(opened(), batch_size=None, num_workers=num_workers))
    assert sorted(flat(batches)) == list(range(NUM_ROWS))
    assert all(len(batch) == BATCH for batch in batches[: NUM_ROWS // BATCH - 2])


def test_torch_may_make_the_batches_from_positions(opened):
    batches = list(DataLoader(opened(batch_size=None), batch_size=64, num_workers=2))
    assert sorted(flat(ids_of(batches))) == list(range(NUM_ROWS))
    assert [len(batch["id"]) for batch in batches] == [64, 64, 26, 25]
    assert batches[0]["board"].dtype == torch.int16


def test_kept_workers_of_a_plain_dataloader_go_on_with_the_next_epoch(opened):
    batches = DataLoader(opened(), batch_size=None, num_workers=2, persistent_workers=True)
    passes = [ids_of(batches) for _ in range(3)]
    assert [sorted(flat(one_pass)) for one_pass in passes] == [list(range(NUM_ROWS))] * 3
    assert passes[0] != passes[1] != passes[2]


def test_set_epoch_says_which_epoch_a_plain_dataloader_reads(opened):
    whole = alone(opened(), epochs=2)
    ds = opened()
    batches = DataLoader(ds, batch_size=None, num_workers=1)
    got = []
    for epoch in range(2):
        ds.set_epoch(epoch)
        got += ids_of(batches)
    assert got == whole


def test_lengths_are_what_a_pass_yields(opened):
    ds = opened()
    assert len(ds) == len(DataLoader(ds, batch_size=None)) == len(list(ds)) == 23
    ds = opened(batch_size=None)
    assert len(ds) == len(list(ds)) == NUM_ROWS
    assert len(DataLoader(ds, batch_size=64)) == 3


@pytest.mark.parametrize("num_workers", [0, slow(1), 2, slow(3)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_length_of_our_loader_knows_of_its_workers(opened, num_workers, drop_last):
    loader = opened().loader(num_workers=num_workers, drop_last=drop_last)
    length = len(loader)  # asked first: torch warns where more come than it said
    assert length == len(list(loader)) == len(loader)


# ds.loader(): the one that follows


@pytest.mark.parametrize("num_workers", [1, 2, slow(4)])
def test_workers_take_the_turns_that_one_process_would_take(opened, num_workers):
    expected = alone(opened(), lanes=num_workers, epochs=2)
    loader = opened().loader(num_workers=num_workers)
    assert ids_of(loader) + ids_of(loader) == expected


@pytest.mark.parametrize(("before", "after"), [(2, 0), (2, 1), (4, 2), (0, 1), slow(3, 3)])
def test_a_state_after_any_batch_goes_on_exactly_with_other_workers(opened, before, after):
    loader = opened().loader(num_workers=before)
    states, whole = [], []
    for batch in loader:
        whole += ids_of([batch])
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert sorted(flat(whole)) == list(range(NUM_ROWS))
    second = ids_of(loader)

    # Every state with this process, some with workers, which take a while to start.
    for taken, state in enumerate(states, start=1):
        if taken in (1, 11, 23, len(states)) or not after:
            ds = opened()
            ds.load_state_dict(state)
            assert ids_of(ds.loader(num_workers=after)) == (whole[taken:] or second), f"after {taken} batches"
            assert (ds.state_dict()["drawn"], ds.state_dict()["lanes"]) == (0, state["lanes"])


def test_a_count_of_workers_that_does_not_divide_the_lanes_is_refused(opened):
    loader = opened().loader(num_workers=2)
    next(iter(loader))
    state = loader.state_dict()
    ds = opened()
    ds.load_state_dict(state)
    with refused(PlanError, lanes=2, parameter="num_workers"):
        next(iter(ds.loader(num_workers=3)))
    assert ds.state_dict() == state


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_follow_each_other(opened, num_workers):
    ds = opened()
    loader = ds.loader(num_workers=num_workers)
    passes = [ids_of(loader) for _ in range(3)]
    assert [sorted(flat(one_pass)) for one_pass in passes] == [list(range(NUM_ROWS))] * 3
    assert passes[0] != passes[1] != passes[2]
    assert (ds.epoch, loader.state_dict()["epoch"]) == (3, 3)


def test_kept_workers_are_the_same_processes_in_every_epoch(opened):
    expected = ids_of_epochs(opened().loader(num_workers=2), 3)
    loader = opened().loader(num_workers=2, persistent_workers=True)
    got, pids = [], []
    for _ in range(3):
        got.append(ids_of(loader))
        pids.append(sorted(child.pid for child in multiprocessing.active_children()))
    assert got == expected
    assert pids[0] == pids[1] == pids[2]
    assert len(pids[0]) == 2


def ids_of_epochs(loader, epochs):
    return [ids_of(loader) for _ in range(epochs)]


@pytest.mark.parametrize("abandoned", ["before the first epoch ends", "later", "and the cursor goes back"])
def test_kept_workers_do_not_go_on_from_where_an_abandoned_pass_left_them(opened, abandoned):
    first, second, third = ids_of_epochs(opened().loader(num_workers=2), 3)
    ds = opened()
    loader = ds.loader(num_workers=2, persistent_workers=True)
    if abandoned == "before the first epoch ends":
        for _ in islice(loader, 3):
            pass
        assert ids_of(loader) == first[3:]
        assert ids_of(loader) == second
        return
    assert ids_of(loader) == first
    at_second = loader.state_dict()
    for _ in islice(loader, 3):
        pass
    if abandoned == "later":
        assert ids_of(loader) == second[3:]
    else:
        loader.load_state_dict(at_second)
        assert ids_of(loader) == second
    assert ids_of(loader) == third


def test_kept_workers_follow_a_state_that_is_loaded_at_the_last_batch(opened):
    expected = ids_of(opened().loader(num_workers=2))
    loader = opened().loader(num_workers=2, persistent_workers=True)
    states = []
    for _ in loader:
        states.append(loader.state_dict())
        if len(states) == len(expected):
            loader.load_state_dict(states[4])
    assert ids_of(loader) == expected[5:]


def test_a_newer_pass_ends_the_one_before(opened):
    loader = opened().loader(num_workers=2)
    older, newer = iter(loader), iter(loader)
    next(older)
    next(newer)
    with refused(PlanError, remedy="dataset"):
        next(older)


def test_batches_are_tensors(opened):
    for num_workers in (0, 1):
        batch = next(iter(opened().loader(num_workers=num_workers)))
        assert isinstance(batch["id"], torch.Tensor)
        assert (batch["id"].dtype, batch["board"].dtype) == (torch.int64, torch.int16)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")  # without an accelerator it does nothing
@pytest.mark.parametrize("num_workers", [0, 2])
def test_pin_memory_and_prefetching_change_nothing(opened, num_workers):
    expected = ids_of(opened().loader(num_workers=num_workers))
    options = {"prefetch_factor": 5} if num_workers else {}
    assert ids_of(opened().loader(num_workers=num_workers, pin_memory=True, **options)) == expected


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"in_order": False}, "in_order"),
        ({"shuffle": True}, "shuffle"),
        ({"sampler": [1, 2]}, "sampler"),
        ({"batch_sampler": [[1], [2]]}, "batch_sampler"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 73}, "pool_size"),
    ],
)
def test_options_that_cannot_work_are_refused(opened, options, parameter):
    ds = opened()
    before = ds.state_dict()
    with refused(SpecError, parameter=parameter):
        ds.loader(num_workers=2, **options)
    assert ds.state_dict() == before


def test_a_pool_that_lanes_share_must_hold_a_batch(opened):
    with refused(SpecError, "pool_size=72", parameter="pool_size"):
        next(iter(opened().loader(num_workers=4, batch_size=20)))


# Memory


@pytest.fixture(scope="module")
def with_a_large_shard(tmp_path_factory):
    """Four shards of 20 positions, and one of 90 at the end, which is larger than a small pool."""
    folder, first = tmp_path_factory.mktemp("large"), 0
    for number, rows in enumerate([20, 20, 20, 20, 90]):
        ids = np.arange(first, first + rows)
        np.savez(folder / f"shard_{number}.npz", id=ids, board=np.stack([ids, -ids], 1))
        first += rows
    return folder


@pytest.fixture
def limited(with_a_large_shard):
    """A stream whose memory is enough for so many rows, in one lane or in two."""

    def opened(rows, lanes, **given):
        settings = {"pool_size": 72, "refill_threshold": 50, "random_seed": 7, "batch_size": BATCH} | given
        ds = StreamingMixedShardDataset([with_a_large_shard], ["all"], **settings)
        needs = Needs(row_bytes(ds.schema), ds.factor, ds.memory_report().shards)
        memory = lanes * (needs.bytes_of(rows // lanes, 72 // lanes) + 1) / 10**9
        return StreamingMixedShardDataset([with_a_large_shard], ["all"], max_memory_gb=memory, **settings)

    return opened


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_memory_error_of_a_worker_has_the_state_to_go_on_from(limited, num_workers):
    lanes = max(1, num_workers)
    loader = limited(85, lanes).loader(num_workers=num_workers)
    got = []
    with pytest.raises(MemoryLimitError, match="max_memory_gb") as caught:  # from a worker, torch makes it of its text
        got.extend(ids_of([batch])[0] for batch in loader)
    error = caught.value
    assert 0 < len(flat(got)) < 170
    # They end though somebody has the error, and so the frames of the pass.
    wait_for("end of the workers", lambda: not multiprocessing.active_children())
    assert error.state == loader.state_dict()
    assert "error.state" in str(error)

    ds = limited(170, lanes)
    ds.load_state_dict(json.loads(json.dumps(error.state)))
    assert sorted(flat(got) + flat(ids_of(ds.loader(num_workers=num_workers)))) == list(range(170))


@pytest.mark.parametrize(("num_workers", "kept"), [(0, False), (2, False), (2, True)])
def test_a_stream_that_stops_early_says_so_here_and_goes_on_exactly(limited, num_workers, kept):
    lanes = max(1, num_workers)
    ds = limited(85, lanes, on_memory_limit="stop")
    loader = ds.loader(num_workers=num_workers, persistent_workers=kept)
    got = ids_of(loader)
    assert ds.stopped_early
    assert ds.epoch == 0
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["drawn"] == len(flat(got)) < 170
    assert ids_of(loader) == []  # it did not become more memory
    assert loader.state_dict()["by_lane"] == state["by_lane"]

    roomy = limited(170, lanes)
    roomy.load_state_dict(state)
    assert sorted(flat(got) + flat(ids_of(roomy.loader(num_workers=num_workers)))) == list(range(170))
    assert not roomy.stopped_early


def test_a_worker_of_a_plain_dataloader_raises_where_nobody_would_learn_that_it_stopped(limited):
    batches = iter(DataLoader(limited(85, 2, on_memory_limit="stop"), batch_size=None, num_workers=2))
    with pytest.raises(MemoryLimitError, match="max_memory_gb"):  # torch makes it anew, from its text
        ids_of(batches)
    batches._shutdown_workers()  # the error holds the iterator, and torch would wait 10 s when both are collected


# Spawned workers


SCRIPT = """
    import json, sys
    import numpy as np, torch
    from torch.utils.data import DataLoader
    import batchwright as bw

    def mirrored(columns, which):
        return {**columns, "board": np.where(which[:, None] == 1, columns["board"][:, ::-1], columns["board"])}

    mirrored.factor = 2

    if __name__ == "__main__":
        def opened():
            return bw.StreamingMixedShardDataset(
                json.loads(sys.argv[1]), ["all", "all"], 72, 50, random_seed=7, batch_size=8, augmentation=mirrored,
                transform=lambda columns: {**columns, "twice": columns["id"] * 2},
            )
        def rows(batches):
            return [(batch["id"].tolist(), batch["board"].tolist(), batch["twice"].tolist()) for batch in batches]
        forked = rows(DataLoader(opened(), batch_size=None, num_workers=1, multiprocessing_context="fork"))
        spawned = rows(opened().loader(num_workers=1, multiprocessing_context="spawn"))
        print(json.dumps({"forked": forked, "spawned": spawned}))
"""


def test_a_scripts_own_functions_reach_spawned_workers(directories, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(script), json.dumps(directories)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["spawned"] == result["forked"]
    entries = [
        (id_, tuple(board)) for ids, boards, _ in result["spawned"] for id_, board in zip(ids, boards, strict=True)
    ]
    assert sorted(entries) == sorted([(n, (n, -n)) for n in range(NUM_ROWS)] + [(n, (-n, n)) for n in range(NUM_ROWS)])
    assert all(twice == [2 * id_ for id_ in ids] for ids, _, twice in result["spawned"])


# torchdata


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_torchdatas_loader_goes_on_exactly(opened, num_workers, drop_last):
    def loader():
        return StatefulDataLoader(opened(drop_last=drop_last), batch_size=None, num_workers=num_workers)

    states, whole = [], []
    first = loader()
    for batch in first:
        whole += ids_of([batch])
        states.append(first.state_dict())
    lost = NUM_ROWS - len(flat(whole))
    assert len({*flat(whole)}) == NUM_ROWS - lost
    assert 0 <= lost <= (BATCH * max(1, num_workers) if drop_last else 0)

    for taken in (1, 2, 5, len(whole) - 1):
        resumed = loader()
        resumed.load_state_dict(states[taken - 1])
        assert ids_of(resumed) == whole[taken:], f"after {taken} batches"


def test_torchdatas_loader_goes_on_with_positions(opened):
    def loader():
        return StatefulDataLoader(opened(batch_size=None), batch_size=16, num_workers=2)

    first, whole = loader(), []
    for batch in first:
        whole += ids_of([batch])
        if len(whole) == 5:
            state = first.state_dict()
    assert sorted(flat(whole)) == list(range(NUM_ROWS))
    resumed = loader()
    resumed.load_state_dict(state)
    assert ids_of(resumed) == whole[5:]


# What stays behind


@pytest.mark.parametrize("num_workers", [0, 1])
def test_abandoned_passes_leave_no_thread_and_no_file_open(opened, num_workers):
    ds = opened()
    loader = ds.loader(num_workers=num_workers)

    def left() -> tuple[int, int, int]:
        gc.collect()
        files = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
        return threading.active_count(), len(files), len(multiprocessing.active_children())

    def abandon() -> None:
        ds.reset()
        assert len(ids_of(islice(loader, 3))) == 3

    abandon()  # torch makes a few things once
    before = left()
    for _ in range(20 if not num_workers else 5):
        abandon()
    # No more than before: what the first pass left may have been on its way out.
    is_gone = lambda: all(now <= then for now, then in zip(left(), before, strict=True))
    wait_for("end of what passes left", is_gone, lambda: f"{before}\n{left()}")


# Mistakes with a plain DataLoader


def test_an_epoch_that_workers_read_before_is_warned_of(opened, capfd):
    logging.getLogger("batchwright").addHandler(handler := logging.StreamHandler())
    try:
        dataset = opened()
        loader = DataLoader(dataset, batch_size=None, num_workers=2)
        first = sorted(ids_of(loader))
        assert "was read before" not in capfd.readouterr().err
        assert sorted(ids_of(loader)) == first
        assert "epoch 0 was read before by workers of this DataLoader" in capfd.readouterr().err
        dataset.set_epoch(1)
        ids_of(loader)
        assert "was read before" not in capfd.readouterr().err
        dataset.reset()  # epoch 0 again, because it was asked for
        ids_of(loader)
        assert "was read before" not in capfd.readouterr().err
    finally:
        logging.getLogger("batchwright").removeHandler(handler)


def test_a_state_beside_workers_is_warned_of(opened, caplog):
    dataset = opened()
    batches = iter(DataLoader(dataset, batch_size=None, num_workers=1))
    dataset.state_dict()
    assert not caplog.messages
    next(batches)
    with caplog.at_level(logging.WARNING, "batchwright"):
        dataset.state_dict()
    assert "DataLoader" in caplog.messages[0]
    batches._shutdown_workers()


def test_a_loader_that_follows_is_not_warned_of(opened, caplog):
    dataset = opened()
    with caplog.at_level(logging.WARNING, "batchwright"):
        for batch in dataset.loader(num_workers=1):
            del batch
            dataset.state_dict()
        dataset.state_dict()
    assert not caplog.records
