"""Conversations by tokens, and balanced: the same global batches for any ranks, restarts, workers and changes."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from elastic_jobs import bake_in_order, handed, live

import batchwright as bw
from batchwright.base.errors import PlanError, SpecError
from refusals import refused

ROWS = 300
FIELDS = ("input_ids", "targets", "loss_mask", "attention_mask")
BUDGET = bw.Batching(tokens=1600, multiple=4)
UNCHECKED = bw.Delivery(check=False)


def talk(n):
    said = "a" * (n * 7919 % 61 + 1 + 60 * (n % 13 == 0))
    return {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": said}]}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """300 conversations of about 60 to 180 tokens."""
    return bake_in_order(
        tmp_path_factory.mktemp("budget") / "talks.store",
        [talk(n) for n in range(ROWS)],
        bw.chat("bytes", "chatml"),
        "talks",
    )


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 rows: five in an epoch."""
    monkeypatch.setattr("batchwright.order.budget.BLOCK_ROWS", 64)


@pytest.fixture
def open_loader(store, small_blocks):
    def open_it(**given):
        fixed = {"max_length": 200, "seed": 7, "framework": "numpy", "epochs": 2}
        return bw.ConversationDataLoader(store, **(fixed | {"batch_size": BUDGET, "delivery": UNCHECKED} | given))

    return open_it


def to_the_end(loader):
    """Everything from the cursor to the end of the run."""
    batches = []
    while not loader.is_over:
        batches += loader.get_iterator()
    return batches


def values(batch):
    """What a batch is and says, as JSON."""
    about = {name: getattr(value, "tolist", lambda v=value: v)() for name, value in batch.metadata.items()}
    return json.dumps({name: getattr(batch, name).tolist() for name in FIELDS} | about, sort_keys=True)


def weighted_rows(batch):
    """(position, weight, tokens) of each row: what all ranks together have, in any order."""
    about = batch.metadata
    rows = zip(about["position"].tolist(), about["weight"].tolist(), batch.input_ids.tolist(), strict=True)
    return list(rows)


# By tokens


@pytest.mark.parametrize("pad_to", ["longest", "max_length", 32, [90, 150]])
def test_no_batch_has_more_tokens_than_it_may_and_every_row_comes_once_an_epoch(open_loader, pad_to):
    loader = open_loader(batch_size=replace(BUDGET, pad_to=pad_to))
    for epoch in range(2):
        real = []
        for batch in loader:
            rows, width = batch.input_ids.shape
            assert rows * width <= 1600
            assert rows % 4 == 0
            weight = batch.metadata["weight"]
            assert not batch.loss_mask[weight == 0].any()
            assert (batch.targets[weight == 0] == -100).all()
            real += batch.metadata["position"][weight > 0].tolist()
        assert sorted(real) == list(range(epoch * ROWS, (epoch + 1) * ROWS))


def test_batches_have_little_padding_and_do_not_go_from_short_to_long(open_loader):
    by_tokens = [batch.attention_mask for batch in open_loader(epochs=1)]
    by_count = [batch.attention_mask for batch in open_loader(epochs=1, batch_size=12)]
    share = [sum(m.sum() for m in masks) / sum(m.size for m in masks) for masks in (by_tokens, by_count)]
    assert share[0] > share[1]
    widths = [mask.shape[1] for mask in by_tokens]
    assert widths != sorted(widths)


def test_numbers_of_batches_are_known_before(open_loader):
    loader = open_loader()
    assert loader.get_num_batches() == len(list(loader))
    assert loader.step == loader.get_num_batches() or loader.epoch == 1
    assert "at most 1,600 tokens" in repr(loader)


def test_pairs_count_as_two_rows(tmp_path):
    pairs = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": "no" * (n % 9 + 1)} for n in range(22)]
    path = bake_in_order(tmp_path / "pairs.store", pairs, bw.chat("bytes", "chatml"), "talks")
    sizes = bw.Batching(tokens=600)
    loader = bw.ConversationDataLoader(path, max_length=120, batch_size=sizes, delivery=UNCHECKED, framework="numpy")
    batches = list(loader)
    assert all(batch.input_ids.size <= 600 for batch in batches)
    assert sorted(p for batch in batches for p in batch.metadata["position"].tolist()) == sorted([*range(22)] * 2)
    assert sum(batch.metadata["global_sequences"] for batch in batches) == 44


# Ranks


@pytest.mark.parametrize(
    ("world_size", "balance", "sizes"),
    [
        (2, None, BUDGET),
        (4, None, BUDGET),
        (4, (1, 0.01), BUDGET),
        (2, True, bw.Batching(14, epoch_end="pad")),
        (4, True, bw.Batching(12, epoch_end="drop")),
    ],
)
def test_ranks_together_have_the_global_batches_of_one(open_loader, world_size, balance, sizes):
    alone = to_the_end(open_loader(batch_size=sizes))
    ranks = [
        to_the_end(open_loader(rank=rank, world_size=world_size, batch_size=replace(sizes, balance=balance)))
        for rank in range(world_size)
    ]
    for whole, *parts in zip(alone, *ranks, strict=True):
        together = [row for part in parts for row in weighted_rows(part)]
        assert sorted(together) == sorted(weighted_rows(whole))
        assert len({part.input_ids.shape for part in parts}) == 1
        assert {json.dumps(part.metadata["state"]) for part in parts} == {json.dumps(whole.metadata["state"])}
        if balance is None:
            assert together == weighted_rows(whole)


def test_a_balanced_step_says_how_even_it_is_and_is_more_even_than_one_that_is_not(open_loader):
    def costs(**given):
        sizes = bw.Batching(20, **given)
        ranks = [open_loader(rank=r, world_size=2, batch_size=sizes, epochs=1) for r in range(2)]
        return [[b.attention_mask.sum() for b in batches] for batches in zip(*ranks, strict=True)]

    balanced, plain = (np.array(costs(**given)) for given in ({"balance": True}, {}))
    over = balanced.max(1) / balanced.mean(1) - 1
    assert over.max() < 0.01 < (plain.max(1) / plain.mean(1) - 1).max()
    batches = list(open_loader(rank=0, world_size=2, batch_size=bw.Batching(20, balance=True), epochs=1))
    said = [batch.metadata["imbalance"] for batch in batches]
    assert np.allclose([each["measured"] for each in said], over)
    assert all(0 <= each["bound"] <= each["measured"] for each in said)


def test_ranks_may_have_different_numbers_of_rows_where_that_is_more_even(open_loader):
    sizes = bw.Batching(15, balance=True, equal_counts=False)
    ranks = [open_loader(rank=r, world_size=2, batch_size=sizes) for r in range(2)]
    counts = {(len(one.input_ids), len(two.input_ids)) for one, two in zip(*ranks, strict=True)}
    assert {sum(pair) for pair in counts} == {15}
    assert len(counts) > 1


@pytest.mark.parametrize(
    "sizes",
    [bw.Batching(tokens=300), bw.Batching(tokens=300, balance=True, equal_counts=False), bw.Batching(2)],
)
def test_a_rank_without_a_row_has_one_of_weight_0(open_loader, sizes):
    given = {"world_size": 3, "batch_size": replace(sizes, uneven=True), "epochs": 1}
    ranks = [to_the_end(open_loader(rank=r, **given)) for r in range(3)]
    real, idle = [], 0
    for parts in zip(*ranks, strict=True):
        weights = [batch.metadata["weight"] for batch in parts]
        assert all(weight.all() or weight.tolist() == [0] for weight in weights)
        assert {batch.metadata["global_rows"] for batch in parts} == {sum(weight.sum() for weight in weights)}
        for batch, weight in zip(parts, weights, strict=True):
            idle += not weight.any()
            real += batch.metadata["position"][weight > 0].tolist()
            assert (batch.targets[weight == 0] == -100).all()
            assert not batch.loss_mask[weight == 0].any()
    assert idle
    assert sorted(real) == list(range(ROWS))


@pytest.mark.parametrize("sharding", ["strided", lambda rows, rank, world: range(rank, rows, world)])
def test_a_sharding_of_ones_own_shares_batches_by_tokens(open_loader, sharding):
    alone = to_the_end(open_loader())
    sizes = replace(BUDGET, sharding=sharding)
    ranks = [to_the_end(open_loader(rank=r, world_size=2, batch_size=sizes)) for r in range(2)]
    for whole, *parts in zip(alone, *ranks, strict=True):
        for rank, part in enumerate(parts):
            assert weighted_rows(part) == weighted_rows(whole)[rank::2]


@pytest.mark.parametrize("packing", [None, "best_fit"])
@pytest.mark.parametrize("loss", ["all", None])
@pytest.mark.parametrize("sizes", [bw.Batching(tokens=3200, multiple=2), bw.Batching(8, epoch_end="pad")])
def test_every_rank_knows_what_the_global_batch_has_to_learn(open_loader, sizes, loss, packing):
    given = {"batch_size": sizes, "loss": loss, "packing": packing, "max_length": 400}
    alone = to_the_end(open_loader(**given))
    ranks = [to_the_end(open_loader(rank=r, world_size=2, **given)) for r in range(2)]
    for whole, *parts in zip(alone, *ranks, strict=True):
        tokens = sum(float(part.loss_mask.sum()) for part in parts)
        assert {batch.metadata["global_tokens"] for batch in (whole, *parts)} == {tokens}
        assert len({batch.metadata["global_sequences"] for batch in (whole, *parts)}) == 1
    an_epoch = alone[: len(alone) // 2]
    assert sum(batch.metadata["global_sequences"] for batch in an_epoch) == ROWS
    assert isinstance(alone[0].metadata["global_tokens"], int)


def test_global_tokens_are_the_sum_of_weights_where_messages_have_their_own(tmp_path):
    rows = [talk(n) for n in range(20)]
    for n, row in enumerate(rows):
        row["messages"][1]["weight"] = 0.5 if n % 2 else 1
    path = bake_in_order(tmp_path / "weighted.store", rows, bw.chat("bytes", "chatml"), "talks")
    given = {"max_length": 200, "batch_size": 4, "delivery": UNCHECKED, "framework": "numpy"}
    batches = list(bw.ConversationDataLoader(path, **given))
    assert [batch.metadata["global_tokens"] for batch in batches] == [batch.loss_mask.sum() for batch in batches]
    assert any(0.5 in batch.loss_mask for batch in batches)


def test_losses_divided_by_global_tokens_add_up_to_that_of_one_rank(open_loader):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    network = torch.nn.Embedding(300, 300)

    def gradient(batches):
        network.zero_grad()
        loss = 0.0
        for batch in batches:
            losses = torch.nn.functional.cross_entropy(network(batch.input_ids).mT, batch.targets, reduction="none")
            part = (losses * batch.loss_mask).sum() / batch.metadata["global_tokens"]
            part.backward()
            loss += part.item()
        return loss, network.weight.grad.clone()

    given = {"framework": "torch", "batch_size": replace(BUDGET, balance=True)}
    alone = open_loader(framework="torch").get_iterator()
    ranks = [open_loader(rank=r, world_size=2, **given).get_iterator() for r in range(2)]
    for whole, *parts in islice(zip(alone, *ranks, strict=True), 2):
        (loss, weights), (expected, of_one) = gradient(parts), gradient([whole])
        assert loss == pytest.approx(expected, rel=1e-5)
        assert torch.allclose(weights, of_one, atol=1e-7)


# Going on


def test_a_run_that_stops_at_any_step_goes_on_exactly(open_loader):
    everything = [values(batch) for batch in to_the_end(open_loader())]
    loader = open_loader()
    for step in range(len(everything)):
        state = json.loads(json.dumps(loader.state_dict()))
        other = open_loader()
        other.load_state_dict(state)
        assert other.step == step
        assert values(other.get_batch()) == everything[step]
        batch = loader.get_batch()
        assert batch.metadata["state"] == loader.state_dict()
    assert loader.step == len(everything)


@pytest.mark.parametrize("changed", [bw.Batching(tokens=4000, multiple=4), bw.Batching(tokens=800)])
def test_a_budget_that_changes_at_any_step_loses_and_repeats_nothing(open_loader, changed):
    steps = open_loader(epochs=1).get_num_batches()
    for stop in range(0, steps, 3):
        loader = open_loader(epochs=1)
        seen = [p for batch in islice(loader, stop) for p in batch.metadata["position"][batch.metadata["weight"] > 0]]
        other = open_loader(epochs=1, batch_size=changed)
        other.load_state_dict(loader.state_dict())
        assert (other.step, other.position) == (stop, loader.position)
        batches = to_the_end(other)
        assert all(batch.input_ids.size <= changed.tokens for batch in batches)
        seen += [p for batch in batches for p in batch.metadata["position"][batch.metadata["weight"] > 0]]
        assert sorted(int(p) for p in seen) == list(range(ROWS))


def test_a_budget_that_changed_twice_in_a_block_goes_on_exactly(open_loader):
    def changed(upto):
        """The batches of a run that had three budgets, restored at every change and at step `upto`."""
        state, batches = open_loader().state_dict(), []
        budgets = {0: (1600, 4), 1: (2400, 2), 2: (900, 1)}
        for step in range(6):
            if step in budgets or step == upto:
                tokens, multiple = budgets[max(s for s in budgets if s <= step)]
                loader = open_loader(batch_size=bw.Batching(tokens=tokens, multiple=multiple))
                loader.load_state_dict(state)
            batches.append(values(loader.get_batch()))
            state = loader.state_dict()
        return batches, loader

    expected, loader = changed(0)
    assert len(loader.state_dict()["steps"]) == 3
    assert loader.position <= 64  # all in one block
    for upto in range(1, 6):
        assert changed(upto)[0] == expected
    loader.seek(step=3)
    assert values(loader.get_batch()) == expected[3]


def test_seeking_a_step_or_a_position_gives_what_reading_on_gives(open_loader):
    reading, batches, positions = open_loader(), [], []
    while not reading.is_over:
        positions.append(reading.position)
        batches.append(reading.get_batch().input_ids)
    for step in random.Random(1).sample(range(len(batches)), 8):
        loader = open_loader()
        loader.seek(step=step)
        assert (loader.step, loader.position) == (step, positions[step])
        assert np.array_equal(loader.get_batch().input_ids, batches[step])
        loader.seek(position=positions[step])
        assert np.array_equal(loader.get_batch().input_ids, batches[step])
    loader.reset()
    assert np.array_equal(loader.get_batch().input_ids, batches[0])


def test_a_step_or_position_after_the_end_is_refused_and_nothing_moves(open_loader):
    loader = open_loader(epochs=1)
    last = loader.get_num_batches()
    loader.seek(step=last)
    assert loader.position == ROWS
    loader.seek(step=2)
    before = loader.state_dict()
    for asked, remedy in (
        ({"step": last + 1}, f"0 to {last}"),
        ({"step": 10**15}, f"0 to {last}"),
        ({"step": -1}, "0"),
    ):
        with refused(PlanError, **asked, remedy=remedy):
            loader.seek(**asked)
    with refused(PlanError, position=ROWS + 1):
        loader.seek(position=ROWS + 1)
    assert loader.state_dict() == before


def test_a_position_inside_a_batch_can_be_gone_to_and_the_rest_is_cut_anew(open_loader):
    loader = open_loader(epochs=1)
    first = loader.get_batch().metadata["position"].tolist()
    loader.seek(position=2)
    state = loader.state_dict()
    assert loader.step == 1
    rest = to_the_end(loader)
    real = [p for batch in rest for p in batch.metadata["position"][batch.metadata["weight"] > 0].tolist()]
    assert sorted([*first[:2], *real]) == list(range(ROWS))
    other = open_loader(epochs=1)
    other.load_state_dict(state)
    assert [values(batch) for batch in to_the_end(other)] == [values(batch) for batch in rest]


def test_a_killed_job_goes_on_with_other_ranks_and_another_budget(store, tmp_path, processes):
    opened = {"door": "ConversationDataLoader", "path": store, "max_length": 200, "seed": 7, "delivery": UNCHECKED}
    budgets = [bw.Batching(tokens=1600, multiple=6), bw.Batching(tokens=2400, multiple=6, balance=True)]
    job = {"checkpoint_steps": 2, "stop_at_step": 24}
    job_of = [job | {"loader": opened | {"batch_size": budget}} for budget in budgets]
    first = live(processes, tmp_path / "1", job_of[0] | {"world_size": 2}, kill_after=(4, 9))
    goes_on = {"state": first.state, "world_size": 3}
    second = live(processes, tmp_path / "2", job_of[1] | goes_on, first_step=first.saved_step)

    given = dict((*first.steps, *second.steps))
    alone = bw.ConversationDataLoader(**opened_alone(opened), batch_size=budgets[0])
    for step in range(24):
        if step == first.saved_step:
            state = alone.state_dict()
            assert state == first.state
            alone = bw.ConversationDataLoader(**opened_alone(opened), batch_size=budgets[1])
            alone.load_state_dict(state)
        assert sorted(given[step]) == sorted(handed(alone.get_batch())), f"step {step}"
    assert alone.state_dict() == second.state


def opened_alone(opened):
    return {name: value for name, value in opened.items() if name != "door"} | {"epochs": None, "framework": "numpy"}


# Delivery


@pytest.mark.parametrize(
    ("sizes", "ahead"),
    [
        (BUDGET, {"workers": 2}),
        (BUDGET, {"prefetch": 2}),
        (bw.Batching(12), {"prefetch": 2}),
    ],
)
def test_batches_that_are_made_ahead_are_the_same(open_loader, sizes, ahead):
    given = {"batch_size": replace(sizes, balance=True), "rank": 1, "world_size": 2}
    ahead = bw.Delivery(check=False, **ahead)
    expected = [values(batch) for batch in to_the_end(open_loader(**given))]
    assert [values(batch) for batch in to_the_end(open_loader(**given, delivery=ahead))] == expected


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # torch counts this machine's cores
def test_workers_of_torch_give_the_same_batches_and_move_the_cursor(store):
    def opened(**given):
        fixed = {"max_length": 200, "batch_size": bw.Batching(tokens=1600), "delivery": UNCHECKED}
        return bw.ConversationDataLoader(store, epochs=2, framework="torch", **(fixed | given))

    expected = [values(batch) for batch in to_the_end(opened())]
    loader = opened().torch().loader(num_workers=2)
    taken = [values(batch) for batch in islice(loader, 5)]
    other = opened().torch().loader(num_workers=2, persistent_workers=True)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert len(other.dataset) == opened().get_num_batches()
    taken += [values(batch) for batch in other]
    assert other.dataset.source.epoch == 1
    workers = other._iterator._workers
    taken += [values(batch) for batch in other]
    assert taken == expected
    assert other._iterator._workers is workers  # kept from one epoch to the next


def test_a_dataset_of_torch_can_be_set_to_an_epoch(open_loader):
    pytest.importorskip("torch")
    dataset = open_loader(framework="torch").torch()
    dataset.set_epoch(1)
    assert dataset.source.position == ROWS
    assert dataset.source.step == open_loader().get_num_batches()


def test_a_pickled_loader_goes_on_where_it_was(open_loader):
    loader = open_loader(batch_size=replace(BUDGET, balance=True))
    loader.get_batch()
    copy = pickle.loads(pickle.dumps(loader))
    assert [values(batch) for batch in to_the_end(copy)] == [values(batch) for batch in to_the_end(loader)]


def test_a_position_can_be_traced_and_a_step_is_refused_with_a_reason(open_loader, store):
    loader = open_loader()
    batch = loader.get_batch()
    position = int(batch.metadata["position"][0])
    (record,) = bw.trace(store, loader, position=position)
    assert (record.position, record.step) == (position, None)
    for plan in (loader, loader.state_dict(), loader.plan):
        with refused(PlanError, remedy="position="):
            list(bw.trace(store, plan, step=0))


# Bad input


@pytest.mark.parametrize(
    ("asked", "world_size", "named", "parameter", "remedy"),
    [
        ({"size": 8, "tokens": 100}, 1, "batch_tokens=100", "batch_tokens", True),
        ({"tokens": 0}, 1, 0, "batch_tokens", "batch_tokens=1"),
        ({"tokens": 1.5}, 1, 1.5, "batch_tokens", "batch_tokens=1"),
        ({"tokens": 100}, 1, "batch_tokens=100", "batch_tokens", "batch_tokens="),
        ({"tokens": 600, "multiple": 4}, 1, "row_multiple", "batch_tokens", "batch_tokens="),
        ({"tokens": 900, "multiple": 0}, 1, 0, "row_multiple", "row_multiple=1"),
        ({"size": 8, "multiple": 2}, 1, "row_multiple=", "row_multiple", "tokens="),
        ({"tokens": 900, "epoch_end": "wrap"}, 1, "epoch_end='wrap'", "epoch_end", "epoch_end="),
        ({"tokens": 900}, 4, "world_size=4", "row_multiple", "multiple=4"),
        ({"tokens": 900, "multiple": 3}, 2, "row_multiple=3", "row_multiple", "multiple=4"),
        ({"size": 8, "balance": "token"}, 1, "'token'", "balance", "tokens"),
        ({"size": 8, "balance": (1, 2, 3)}, 1, "balance=(1, 2, 3)", "balance", "True"),
        ({"size": 8, "balance": (-1, 0)}, 1, -1, "linear", "linear=1"),
        ({"size": 8, "balance": True, "sharding": "strided"}, 1, "sharding='strided'", "balance", True),
        ({"size": 8, "equal_counts": False}, 1, "equal_counts=False", "equal_counts", "balance=True"),
        ({"size": 7, "balance": True}, 2, "world_size=2", "batch_size", "uneven"),
    ],
)
def test_settings_that_cannot_be_are_refused_and_named(open_loader, asked, world_size, named, parameter, remedy):
    with refused(SpecError, named, parameter=parameter, remedy=remedy):
        open_loader(batch_size=bw.Batching(**asked), rank=0, world_size=world_size)


def test_a_row_over_the_budget_is_named_before_anything_is_read(open_loader):
    with refused(SpecError, source="talks", parameter="batch_tokens") as caught:
        open_loader(batch_size=bw.Batching(tokens=100))
    longest = max(batch.input_ids.shape[1] for batch in open_loader(epochs=1, batch_size=1))
    assert caught.value.where["tokens"] == longest
    loader = open_loader(batch_size=1, epochs=1, shuffle=False)
    loader.seek(position=caught.value.where["row"])
    assert loader.get_batch().input_ids.shape[1] == longest


@pytest.mark.parametrize(
    ("do", "named", "parameter"),
    [
        (lambda loader: loader.get_batch(batch_size=4), "1,600 tokens", "batch_size"),
        (lambda loader: loader.amend(skip=(100, 120)), "amended", "batch_tokens"),
    ],
)
def test_what_a_budget_does_not_allow_leaves_the_loader_as_it_was(open_loader, do, named, parameter):
    loader = open_loader()
    loader.get_batch()
    before = loader.state_dict()
    with refused(SpecError, named, parameter=parameter):
        do(loader)
    assert loader.state_dict() == before


@pytest.mark.parametrize(
    ("theirs", "mine", "change", "named", "parameter"),
    [
        ({"batch_size": 8}, {}, {}, "batch_size=8", "batch_size"),
        ({}, {"batch_size": 8}, {}, "batch_tokens=1600", "batch_tokens"),
        ({}, {"batch_size": replace(BUDGET, pad_to=64)}, {}, "pad_to='longest'", "pad_to"),
        (
            {"batch_size": replace(BUDGET, pad_to=[100])},
            {"batch_size": replace(BUDGET, pad_to=[110])},
            {},
            "pad_to=[100]",
            "pad_to",
        ),
        ({}, {}, {"batch_in_block": 5}, "batch_in_block=5", "batch_in_block"),
        ({}, {}, {"batch_in_block": None}, "batch_in_block=None", "batch_in_block"),
        ({}, {}, {"position": 3}, "position 3 ", "batch_in_block"),
        ({}, {}, {"steps": [[0, 0, 1600, 4], [1, 999, 1600, 4]]}, "position", None),
        ({}, {}, {"steps": [[0, 0, 1600, 0]]}, "1600, 0]", None),
        ({}, {}, {"steps": [[0, 0, 1600, 4], [1, 5, 8]]}, "steps", None),
    ],
)
def test_a_state_of_another_cut_is_refused_and_nothing_moves(open_loader, theirs, mine, change, named, parameter):
    other, loader = open_loader(**theirs), open_loader(**mine)
    other.get_batch()
    other.get_batch()
    loader.get_batch()
    before = loader.state_dict()
    with refused(PlanError, named, parameter=parameter):
        loader.load_state_dict(other.state_dict() | change)
    assert loader.state_dict() == before


def test_a_state_from_before_an_amendment_is_refused(open_loader):
    amended = open_loader(batch_size=8)
    state = open_loader().state_dict()
    loader = open_loader(plan=amended.amend(skip=(100, 120)))
    with refused(PlanError, parameter="batch_tokens"):
        loader.load_state_dict(state)
    real = [p for b in loader for p in b.metadata["position"][b.metadata["weight"] > 0].tolist()]
    assert sorted(real) == [p for p in range(ROWS) if not 100 <= p <= 120]


def test_a_loader_whose_rows_have_no_lengths_says_who_can(tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(["some text " * 9] * 9, name="text").prepare_step(bw.tokenize("bytes"))
    bw.bake(recipe, to=tmp_path / "text.store", workers=0, show_progress=False)
    for asked in (bw.Batching(tokens=64), bw.Batching(4, balance=True)):
        with refused(SpecError, parameter="batch_tokens", remedy="conversations, rollouts"):
            bw.PretrainDataLoader(tmp_path / "text.store", chunk_size=16, batch_size=asked)
