"""`loader.torch()` in a torch DataLoader is the loader's own stream, whatever the number of workers."""

from __future__ import annotations

import multiprocessing
import pickle
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, default_convert

import batchwright as bw
from batchwright.base.errors import PlanError, SpecError
from batchwright.batches.types import TrainingBatch
from harness import wait_for
from refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # torch counts this machine's cores

EPOCH_ENDS = ["drop", "short", "pad", "wrap"]


def through(loader, num_workers, **options):
    return DataLoader(loader.torch(), batch_size=None, num_workers=num_workers, **options)


@pytest.mark.parametrize("epoch_end", EPOCH_ENDS)
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_one_pass_gives_the_loaders_batches(open_small, values, small_blocks, num_workers, epoch_end):
    sizes = bw.Batching(12, epoch_end=epoch_end)
    expected = [values(batch) for batch in open_small(batch_size=sizes).get_iterator()]
    got = [values(batch) for batch in through(open_small(batch_size=sizes), num_workers)]
    assert len(got) > 40
    assert got == expected


def test_one_pass_gives_the_loaders_batches_where_workers_are_spawned(open_small, values):
    fields = bw.Fields(position_ids=True, border_loss=False)
    settings = {"batch_size": bw.Batching(12, epoch_end="pad"), "fields": fields}
    expected = [values(batch) for batch in open_small(**settings).get_iterator()]
    loader = open_small(**settings)
    got = [values(batch) for batch in through(loader, 2, multiprocessing_context="spawn")]
    assert got == expected


@pytest.mark.parametrize("epoch_end", EPOCH_ENDS)
@pytest.mark.parametrize("step", [1, 51, 53, 140])  # an epoch is 52 steps and a part of one
def test_a_pass_from_any_cursor_ends_where_the_loaders_own_does(open_small, values, epoch_end, step):
    ours, theirs = (open_small(batch_size=bw.Batching(12, epoch_end=epoch_end), epochs=4) for _ in range(2))
    ours.seek(step=step)
    theirs.seek(step=step)
    assert [values(batch) for batch in through(theirs, 2)] == [values(batch) for batch in ours.get_iterator()]


@pytest.mark.parametrize("epoch_end", EPOCH_ENDS)
def test_ranks_get_their_shares_of_the_same_steps(open_small, epoch_end):
    settings = {"batch_size": bw.Batching(100, epoch_end=epoch_end, uneven=True)}
    whole = list(open_small(**settings).get_iterator())
    parts = [list(through(open_small(**settings, rank=rank, world_size=3), 2)) for rank in range(3)]
    assert [len(part) for part in parts] == 3 * [len(whole)]
    for step, batch in enumerate(whole):
        together = torch.cat([part[step].input_ids for part in parts])
        assert together.equal(batch.input_ids)


def test_a_rank_that_has_no_row_of_a_batch_still_takes_every_step(open_small, values):
    few = {"batch_size": bw.Batching(3, uneven=True), "rank": 0, "world_size": 4}
    expected = [values(batch) for batch in open_small(**few).get_iterator()]
    assert len(expected[0]["input_ids"]) == 1  # of weight 0
    assert [values(batch) for batch in through(open_small(**few), 2)] == expected


def test_an_endless_mixture_goes_on_in_the_loaders_order(open_small, values, small_blocks):
    given = {"weights": {"web": 3, "code": 1}, "epochs": None}
    expected = [values(batch) for batch in islice(open_small(**given).get_iterator(), 120)]
    got = [values(batch) for batch in islice(through(open_small(**given), 3), 120)]
    assert got == expected


def test_a_batch_size_given_to_get_batch_is_part_of_the_state_that_workers_report(open_small, values):
    ours, theirs = open_small(), open_small()
    for loader in (ours, theirs):
        loader.get_batch(batch_size=5)
    expected = [values(batch) for batch in ours.get_iterator()]
    assert expected[0]["state"]["steps"] == [[0, 0, 5], [1, 5, 12]]
    assert [values(batch) for batch in through(theirs, 2)] == expected


def test_a_worker_computes_the_order_of_many_of_its_steps_at_once(open_small, monkeypatch):
    loader = open_small()
    located = []
    flow = loader.stream.flow
    locate = flow.locate
    monkeypatch.setattr(flow, "locate", lambda task: located.append(task) or locate(task))
    steps = list(loader.turns(1, 3))
    assert len(steps) > 10
    assert len(located) == 1
    assert located[0].stride == 3 * 12


def test_a_loader_of_numpy_arrays_gives_tensors_here_and_its_cursor_moves(open_small, values):
    expected = [values(batch) for batch in open_small().get_iterator()]
    loader = open_small(framework="numpy", delivery=bw.Delivery(prefetch=2))
    batches = iter(through(loader, 0))
    first = next(batches)
    assert isinstance(first.input_ids, torch.Tensor)
    assert loader.state_dict() == first.metadata["state"]
    assert [values(batch) for batch in [first, *batches]] == expected
    assert loader.framework == "numpy"


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_second_iterator_ends_the_first_with_an_error(open_small, framework):
    dataset = open_small(framework=framework).torch()
    first = iter(dataset)
    next(first)
    next(iter(dataset))
    with refused(PlanError, "get_batch"):
        next(first)


def test_workers_of_the_loader_itself_are_left_out_inside_torchs_workers(open_small, values):
    loader = open_small(delivery=bw.Delivery(workers=2, prefetch=0))
    expected = [values(batch) for batch in open_small().get_iterator()]
    dataset = loader.torch()
    assert [values(batch) for batch in DataLoader(dataset, batch_size=None, num_workers=1)] == expected
    assert loader.twin("torch", alone=True).making.workers == 0
    assert loader.making.workers == 2


def test_torch_leaves_a_batch_as_it_is(open_small, values):
    batch = open_small().get_batch()
    converted = default_convert(batch)  # torch copies mappings, and puts its own values into the copy
    assert values(converted) == values(batch)
    assert converted._block is batch._block is not None
    assert type(next(iter(through(open_small(), 0)))) is TrainingBatch
    assert type(next(iter(through(open_small(), 1)))) is TrainingBatch


def test_the_length_is_that_of_an_epoch_and_torch_finds_it_kept(open_small):
    for epoch_end in EPOCH_ENDS:
        loader = open_small(batch_size=bw.Batching(12, epoch_end=epoch_end), epochs=2)
        batches = through(loader, 0)
        assert len(batches) in (loader.get_num_batches(), loader.get_num_batches() + 1)
        assert len(list(batches)) <= len(batches)  # else torch would warn, which is an error here


def test_an_endless_dataset_has_no_length_as_torch_expects_it(open_small):
    with pytest.raises(TypeError, match="num_rows="):
        len(through(open_small(weights={"web": 1}), 0))


def test_a_hundred_batches_kept_from_workers_stay_unchanged(open_loader, long_store, values):
    def opened():
        return open_loader(long_store, framework="torch", chunk_size=256, batch_size=8)

    kept = list(islice(through(opened(), 2), 100))
    expected = [values(batch) for batch in islice(opened().get_iterator(), 100)]
    assert [values(batch) for batch in kept] == expected


def test_a_hundred_batches_kept_without_workers_stay_unchanged(open_loader, long_store, values):
    loader = open_loader(long_store, framework="torch", chunk_size=256, batch_size=8)
    kept, expected = [], []
    for batch in islice(loader.get_iterator(), 100):
        kept.append(batch)
        expected.append(values(batch))
    assert [values(batch) for batch in kept] == expected


def test_writing_into_a_mask_reaches_no_batch_that_has_arrived_already(open_small):
    """Batches of other workers may be unpickled, and wait, before the first is handed over."""
    first, waiting = (pickle.loads(pickle.dumps(batch)) for batch in islice(open_small().get_iterator(), 2))
    first.attention_mask[:] = 0
    first.loss_mask.mul_(5)
    assert waiting.keys() == first.keys()
    assert (waiting.attention_mask == 1).all()
    assert (waiting.to("cpu").loss_mask == 1).all()


def test_writing_into_a_mask_reaches_no_other_batch_from_workers(open_small):
    batches = iter(through(open_small(), 2))
    kept = [next(batches)]
    kept[0].attention_mask[:] = 0
    kept[0].loss_mask.mul_(5)
    for batch in batches:
        assert (batch.attention_mask == 1).all()
        assert (batch.loss_mask == 1).all()


def test_batches_from_workers_share_their_masks_and_keep_their_tokens_in_one_piece(open_small):
    one, two = islice(through(open_small(), 1), 2)
    assert one.attention_mask is two.attention_mask
    assert one.loss_mask is two.loss_mask
    assert one._block is not None


def test_the_dataset_pickles_without_threads_maps_or_tokens(open_loader, long_store, values):
    loader = open_loader(long_store, framework="torch", delivery=bw.Delivery(prefetch=2))
    batches = loader.get_iterator()
    next(batches)  # a stream is open now: with a thread, a map, and blocks of memory
    pickled = pickle.dumps(loader.torch())
    assert len(pickled) < 20_000 < loader.store.num_tokens
    restored = pickle.loads(pickled)
    assert [values(batch) for batch in islice(restored, 3)] == [values(batch) for batch in islice(batches, 3)]


def test_leaving_a_pass_early_leaves_no_worker_behind(open_small):
    before = set(multiprocessing.active_children())
    batches = iter(through(open_small(), 2))
    next(batches)
    assert len(set(multiprocessing.active_children()) - before) == 2
    del batches
    wait_for("end of the workers", lambda: set(multiprocessing.active_children()) <= before)


@pytest.fixture
def two_ranks():
    """Starts a process group in which this process is the first of two. Nothing is sent in it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    yield lambda: torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_opened_before_the_ranks_were_known_is_refused_and_stays_where_it_is(
    open_small, two_ranks, num_workers
):
    loader = open_small()
    two_ranks()
    with refused(SpecError, parameter="rank", remedy="train_dataloader()"):
        next(iter(loader.torch().loader(num_workers=num_workers)))
    assert loader.position == 0


def test_a_loader_that_was_told_to_read_everything_on_every_rank_does(open_small, two_ranks):
    loader = open_small(rank=0, world_size=1)
    two_ranks()
    assert len(next(iter(loader.torch().loader()))) == loader.batch_size
