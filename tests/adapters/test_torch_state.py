"""A checkpoint taken anywhere in a torch DataLoader continues exactly, and epochs follow each other."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import batchwright as bw
from batchwright.base.errors import EndOfRun, PlanError, SpecError
from refusals import refused
from shared import slow

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # torch counts this machine's cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata still calls it
]

EPOCH_ENDS = ["drop", "short", "pad", "wrap"]
BATCH_ROWS = 100  # six or seven steps in an epoch


@pytest.fixture
def opened(open_loader, small_store):
    def open_it(epoch_end=None, **other):
        sizes = bw.Batching(BATCH_ROWS, epoch_end=epoch_end)
        return open_loader(small_store, **({"framework": "torch", "batch_size": sizes, "epochs": 3} | other))

    return open_it


@pytest.fixture
def rows(values):
    """What matters of batches: their tokens, and the state after each."""
    return lambda batches: [(batch.input_ids.tolist(), batch.metadata["state"]) for batch in batches]


def all_passes(loader, epochs=3):
    return [list(loader.get_iterator()) for _ in range(epochs)]


# A plain DataLoader


@pytest.mark.parametrize("stopped_after", [1, 4, 6])
def test_the_last_batchs_state_continues_a_plain_dataloader_with_workers(opened, rows, stopped_after):
    whole = [batch for one_pass in all_passes(opened()) for batch in one_pass]
    batches = iter(DataLoader(opened().torch(), batch_size=None, num_workers=2))
    *_, last = islice(batches, stopped_after)
    state = json.loads(json.dumps(last.metadata["state"]))

    resumed = opened()
    resumed.load_state_dict(state)
    rest = list(DataLoader(resumed.torch(), batch_size=None, num_workers=2))
    assert rows(rest) == rows(whole[stopped_after : stopped_after + len(rest)])
    assert rest[-1].metadata["state"]["position"] % resumed.plan.epoch_rows == 0


@pytest.mark.parametrize("epoch_end", EPOCH_ENDS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_set_epoch_says_which_epoch_a_plain_dataloader_reads(opened, rows, num_workers, epoch_end):
    expected = all_passes(opened(epoch_end=epoch_end))
    dataset = opened(epoch_end=epoch_end).torch()
    batches = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        assert rows(batches) == rows(expected[epoch])


def test_set_epoch_leaves_a_cursor_that_is_inside_the_epoch(opened, rows):
    first, second, _ = all_passes(opened())
    loader = opened()
    loader.load_state_dict(second[2].metadata["state"])
    dataset = loader.torch()
    dataset.set_epoch(1)
    assert rows(DataLoader(dataset, batch_size=None, num_workers=2)) == rows(second[3:])
    dataset.set_epoch(0)
    assert rows(DataLoader(dataset, batch_size=None, num_workers=2)) == rows(first)


@pytest.mark.parametrize("epoch_end", EPOCH_ENDS)
def test_kept_workers_of_a_plain_dataloader_go_on_with_the_next_epoch(opened, rows, epoch_end):
    dataset = opened(epoch_end=epoch_end).torch()
    batches = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    for one_pass in all_passes(opened(epoch_end=epoch_end)):
        assert rows(batches) == rows(one_pass)


# loader.torch().loader(): the one that follows


@pytest.mark.parametrize(
    ("num_workers", "kept", "epoch_end"),
    [
        *((0, False, end) for end in EPOCH_ENDS),
        *((2, True, end) for end in EPOCH_ENDS),
        (1, False, "short"),
        (2, False, "drop"),
        (3, True, "short"),
        *(slow(*workers, end) for workers in ((1, False), (2, False), (3, True)) for end in ("pad", "wrap")),
    ],
)
def test_epochs_follow_each_other_and_the_state_follows_every_batch(opened, rows, num_workers, kept, epoch_end):
    ours, loader = opened(epoch_end=epoch_end), opened(epoch_end=epoch_end)
    batches = loader.torch().loader(num_workers=num_workers, persistent_workers=kept)
    for _ in range(3):
        got = []
        for batch in batches:
            assert batches.state_dict() == loader.state_dict() == batch.metadata["state"]
            got.append(batch)
        assert rows(got) == rows(ours.get_iterator())
        assert loader.epoch == ours.epoch
        assert loader.step == ours.step


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_loader_of_either_framework_is_followed(opened, rows, num_workers, framework):
    loader = opened(framework=framework)
    batches = loader.torch().loader(num_workers=num_workers)
    got = list(islice(batches, 3))
    assert isinstance(got[0].input_ids, torch.Tensor)
    assert loader.state_dict() == got[-1].metadata["state"]
    assert rows(got) == rows(all_passes(opened())[0][:3])


@pytest.mark.parametrize(
    ("before", "after", "stopped_after"),
    [(0, 2, 1), (2, 3, 6), (3, 0, 9), *(slow(2, 3, steps) for steps in (1, 9)), slow(0, 2, 6), slow(3, 0, 1)],
)
def test_a_state_continues_exactly_in_a_new_object_with_other_workers(opened, rows, stopped_after, before, after):
    expected = [batch for one_pass in all_passes(opened()) for batch in one_pass][stopped_after:]
    old = opened().torch().loader(num_workers=before)
    taken = 0
    while taken < stopped_after:
        for _ in islice(old, stopped_after - taken):
            taken += 1
    state = json.loads(json.dumps(old.state_dict()))

    new = opened().torch().loader(num_workers=after)
    new.load_state_dict(state)
    rest = [batch for _ in range(3 if stopped_after < 6 else 2) for batch in new]
    assert rows(rest) == rows(expected)


def test_a_state_continues_exactly_on_other_ranks(opened):
    one = opened().torch().loader(num_workers=2)
    list(islice(one, 4))
    expected = next(iter(one))
    one.load_state_dict({**one.state_dict(), "position": 4 * BATCH_ROWS})
    for rank in range(2):
        two = opened(rank=rank, world_size=2).torch().loader(num_workers=2)
        two.load_state_dict(one.state_dict())
        half = slice(rank * BATCH_ROWS // 2, (rank + 1) * BATCH_ROWS // 2)
        assert next(iter(two)).input_ids.equal(expected.input_ids[half])


@pytest.mark.parametrize("kept", [False, True])
def test_leaving_a_pass_and_starting_again_goes_on_at_the_cursor(opened, rows, kept):
    expected = [batch for one_pass in all_passes(opened()) for batch in one_pass]
    batches = opened().torch().loader(num_workers=2, persistent_workers=kept)
    got = []
    for batch in batches:
        got.append(batch)
        if len(got) == 3:
            break
    got += [batch for _ in range(3) for batch in batches]
    assert rows(got) == rows(expected)


@pytest.mark.parametrize("kept", [False, True])
def test_a_cursor_that_is_moved_between_passes_is_obeyed(opened, rows, kept):
    first, _, third = all_passes(opened())
    loader = opened()
    batches = loader.torch().loader(num_workers=2, persistent_workers=kept)
    assert rows(batches) == rows(first)
    loader.reset()
    assert rows(batches) == rows(first)
    loader.load_state_dict(third[0].metadata["state"])
    assert rows(batches) == rows(third[1:])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_end_of_the_run_is_an_error_after_it_and_nothing_where_it_was_restored(opened, num_workers):
    batches = opened(epochs=1).torch().loader(num_workers=num_workers)
    list(batches)
    with refused(EndOfRun, "1 epoch", remedy="epochs=2"):
        next(iter(batches))
    restored = opened(epochs=1).torch().loader(num_workers=num_workers)
    restored.load_state_dict(batches.state_dict())
    assert list(restored) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_second_iterator_ends_the_first(opened, num_workers):
    batches = opened().torch().loader(num_workers=num_workers)
    first = iter(batches)
    next(first)
    next(iter(batches))
    with refused(PlanError, "get_batch"):
        next(first)


def test_get_batch_and_an_iterator_share_the_cursor(opened, rows):
    whole = [batch for one_pass in all_passes(opened()) for batch in one_pass]
    loader = opened()
    got = [loader.get_batch(), *islice(loader.torch().loader(num_workers=2), 2), loader.get_batch()]
    assert rows(got) == rows(whole[:4])


def test_stats_count_what_was_handed_over_with_workers_too(opened):
    ours, loader = opened(), opened()
    list(islice(ours.get_iterator(), 4))
    list(islice(loader.torch().loader(num_workers=2), 4))
    waited = loader.stats().pop("data_wait_percent")
    assert {**loader.stats(), "data_wait_percent": 0} == {**ours.stats(), "data_wait_percent": 0}
    assert 0 < waited <= 100


def test_collating_in_the_workers_does_not_disturb_the_state(opened):
    loader = opened()
    batches = loader.torch().loader(num_workers=2, collate_fn=_only_ids)
    ids = list(islice(batches, 3))
    assert all(isinstance(one, torch.Tensor) for one in ids)
    assert loader.position == 3 * BATCH_ROWS


def _only_ids(batch):
    return batch.input_ids.clone()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pass_takes_nothing_from_the_programs_random_numbers(opened, num_workers):
    # A resumed run begins one pass more than the run that was not interrupted: its dropout must be the same.
    torch.manual_seed(0)
    before = torch.get_rng_state()
    batches = opened().torch().loader(num_workers=num_workers)
    assert len(list(batches)) == len(list(batches))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_that_was_given_is_used(opened):
    own = torch.Generator().manual_seed(3)
    assert opened().torch().loader(generator=own).generator is own


def test_steps_out_of_order_are_refused(opened):
    with refused(SpecError, parameter="in_order"):
        opened().torch().loader(num_workers=2, in_order=False)


# torchdata's StatefulDataLoader


def stateful(loader, num_workers, **options):
    return StatefulDataLoader(loader.torch(), batch_size=None, num_workers=num_workers, **options)


@pytest.mark.parametrize(
    ("num_workers", "stopped_after", "epoch_end"),
    [
        *((0, steps, end) for steps in (0, 1, 4) for end in EPOCH_ENDS),
        (2, 0, "drop"),
        *((2, 4, end) for end in EPOCH_ENDS),
        *(slow(2, steps, end) for steps in (0, 1) for end in EPOCH_ENDS[1:]),
    ],
)
def test_a_stateful_dataloader_continues_exactly_in_a_new_object(opened, rows, num_workers, stopped_after, epoch_end):
    expected = all_passes(opened(epoch_end=epoch_end))[0]
    old = stateful(opened(epoch_end=epoch_end), num_workers)
    assert rows(islice(old, stopped_after)) == rows(expected[:stopped_after])
    state = old.state_dict()
    del old
    new = stateful(opened(epoch_end=epoch_end), num_workers)
    new.load_state_dict(state)
    assert rows(new) == rows(expected[stopped_after:])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_dataloader_can_be_stopped_twice(opened, rows, num_workers):
    expected, got = all_passes(opened())[0], []
    state = {}
    for steps in (2, 2, 9):
        loader = stateful(opened(), num_workers)
        loader.load_state_dict(state)
        got += list(islice(loader, steps))
        state = loader.state_dict()
    assert rows(got) == rows(expected)


@pytest.mark.parametrize(("num_workers", "kept"), [(0, False), (2, False), (2, True)])
def test_a_stateful_dataloader_goes_through_epochs_and_continues_in_the_second(opened, rows, num_workers, kept):
    expected = all_passes(opened())
    old = stateful(opened(), num_workers, persistent_workers=kept)
    assert rows(old) == rows(expected[0])
    old.dataset.set_epoch(1)
    assert rows(islice(old, 3)) == rows(expected[1][:3])
    state = old.state_dict()
    new = stateful(opened(), num_workers, persistent_workers=kept)
    new.load_state_dict(state)
    assert rows(new) == rows(expected[1][3:])
    new.dataset.set_epoch(2)
    assert rows(new) == rows(expected[2])
