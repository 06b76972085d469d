"""Rows of samples keep the contract: the same rows and widths for any ranks, workers and interruptions."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from elastic_jobs import amend_if_due, bake_in_order, handed, live, open_source

import batchwright as bw
from batchwright.base.errors import PlanError, SpecError
from refusals import refused
from shared import arrays_of

UNCHECKED = {"delivery": bw.Delivery(check=False)}
FIELDS = ("input_ids", "attention_mask", "targets", "loss_mask", "position_ids", "segment_ids")


def talk(n):
    """One in eleven is long: what is the longest row of a batch changes from batch to batch."""
    said = f"answer {n}" + "!" * (n % 7 + 40 * (n % 11 == 0))
    return {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": said}]}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """387 windows of 32 tokens, 39 packed rows of 48, 80 conversations of at most 120. Read only."""
    folder = tmp_path_factory.mktemp("samples")
    text = bw.tokenize("bytes")
    return {
        "web": bake_in_order(folder / "web.store", [f"web {n}: " + "word " * (n % 23) for n in range(200)], text),
        "notes": bake_in_order(folder / "notes.store", [f"note {n}." + " More." * (n % 5) for n in range(90)], text),
        "talks": bake_in_order(folder / "talks.store", [talk(n) for n in range(80)], bw.chat("bytes", "chatml")),
    }


@pytest.fixture(scope="module")
def pair_store(tmp_path_factory):
    pairs = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": "no" * (n % 9 + 1)} for n in range(22)]
    return bake_in_order(tmp_path_factory.mktemp("pairs") / "pairs.store", pairs, bw.chat("bytes", "chatml"))


@pytest.fixture
def own_stores(stores, tmp_path):
    """Copies without plans and row indexes: nobody has opened them."""
    leave = shutil.ignore_patterns("plans", "rows")
    return {name: str(shutil.copytree(path, tmp_path / Path(path).name, ignore=leave)) for name, path in stores.items()}


def entries(stores):
    """What a mixture is made of: windows of a store, and two loaders."""
    return {
        "web": stores["web"],
        "notes": {"door": "PretrainDataLoader", "path": stores["notes"], "chunk_size": 48, "packing": "best_fit"},
        "talks": {"door": "ConversationDataLoader", "path": stores["talks"], "max_length": 120, **UNCHECKED},
    }


def open_mixture(stores, weights=None, batching=(), **given):
    """`batching` are settings of `Batching`, here as in the other two."""
    sources = {name: open_source(source) for name, source in entries(stores).items()}
    batch_size = bw.Batching(**({"size": 24, "pad_to": "longest"} | dict(batching)))
    return bw.MixedDataLoader(
        sources, weights, batch_size=batch_size, **({"chunk_size": 32, "seed": 7, "framework": "numpy"} | given)
    )


def open_packed(stores, **given):
    return _conversations(stores["talks"], packing="best_fit", max_length=240, **given)


def open_talks(stores, **given):
    return _conversations(stores["talks"], **given)


def _conversations(store, batching=(), delivery=None, **given):
    batch_size = bw.Batching(**({"size": 8} | dict(batching)))
    delivery = replace(delivery or bw.Delivery(), check=False)
    fixed = {"max_length": 120, "seed": 7, "framework": "numpy"}
    return bw.ConversationDataLoader(store, batch_size=batch_size, delivery=delivery, **(fixed | given))


def values(batch):
    """Everything a batch says, as lists that compare."""
    about = {name: getattr(value, "tolist", lambda v=value: v)() for name, value in batch.metadata.items()}
    arrays = arrays_of(batch)
    return {n: array if n == "max_seqlen" else array.tolist() for n, array in arrays.items()} | about


def all_values(batches):
    return [values(batch) for batch in batches]


# Killed jobs


ROWS_PER_STEP = 24
CHECKPOINT_STEPS = 3
STOP_AT_STEP = 30


def test_a_killed_job_over_windows_packed_rows_and_conversations_goes_on_with_other_ranks(
    stores, own_stores, tmp_path, processes
):
    settings = {"weights": {"web": 0.5, "notes": 0.3, "talks": 0.2}, "chunk_size": 32, "seed": 7}
    amendments = [(4, {"weights": {"web": 0.2, "notes": 0.3, "talks": 0.5}}), (9, {"skip": [[300, 340]]})]
    job = {"batch_size": ROWS_PER_STEP, "checkpoint_steps": CHECKPOINT_STEPS, "stop_at_step": STOP_AT_STEP}
    job |= {"batching": {"pad_to": "longest"}, "amendments": amendments}

    # The first ranks plan the rows, all at once. Those after them have files alone: stores, a plan's name, a state.
    starts = {"sources": entries(own_stores), "settings": settings, "world_size": 4}
    first = live(processes, tmp_path / "1", job | starts, kill_after=(4, 10))
    job |= {"sources": own_stores}
    goes_on = {"plan": first.state["plan"], "state": first.state, "world_size": 3}
    second = live(processes, tmp_path / "2", job | goes_on, kill_after=(4, 10), first_step=first.saved_step)
    goes_on = {"plan": second.state["plan"], "state": second.state, "world_size": 8}
    third = live(processes, tmp_path / "3", job | goes_on, first_step=second.saved_step)

    alone = open_mixture(stores, settings["weights"], epochs=None)  # the same rows at another place, without a file
    expected, widths, narrow_shares = [], set(), 0
    for _ in range(STOP_AT_STEP):
        amend_if_due(alone, amendments)
        batch = alone.get_batch()
        expected.append(handed(batch))
        widths.add(batch.input_ids.shape[1])
        narrow_shares += int((batch.attention_mask.sum(1).reshape(8, -1).max(1) < batch.input_ids.shape[1]).sum())
    for life in (first, second, third):
        share = ROWS_PER_STEP // len(life.recorded)
        for rank, lines in enumerate(life.recorded):
            assert [line["step"] for line in lines] == list(range(life.first_step, life.first_step + len(lines)))
            for line in lines:
                of_rank = expected[line["step"]][rank * share : (rank + 1) * share]
                assert line["rows"] == of_rank, f"rank {rank} of {len(life.recorded)}, step {line['step']}"
    given = dict(chain.from_iterable(life.steps for life in (first, second, third)))
    assert [given[step] for step in range(STOP_AT_STEP)] == expected
    assert third.state == alone.state_dict()

    # The run was what the test is about: widths that differ, and that no rank could tell from its own rows.
    assert len(widths) > 5
    assert narrow_shares > STOP_AT_STEP
    assert alone.plan.lineage[-1] == third.state["plan"]
    assert not {*range(300, 341)} & {position for rows in expected for position, _ in rows}


# Ranks, workers and frameworks


@pytest.mark.parametrize("open_loader", [open_mixture, open_packed, open_talks])
@pytest.mark.parametrize(("world_size", "uneven"), [(2, False), (4, False), (3, True), (5, True)])
def test_ranks_together_have_the_rows_and_widths_of_one(stores, open_loader, world_size, uneven):
    alone = list(open_loader(stores, batching={"epoch_end": "pad"}).get_iterator())
    batching = {"epoch_end": "pad", "uneven": uneven}
    ranks = [
        list(open_loader(stores, batching=batching, rank=r, world_size=world_size).get_iterator())
        for r in range(world_size)
    ]
    for whole, *parts in zip(alone, *ranks, strict=True):
        for name in (name for name in FIELDS if getattr(whole, name) is not None):
            joined = np.concatenate([getattr(part, name) for part in parts])
            assert np.array_equal(joined, getattr(whole, name)), name
        assert np.concatenate([part.metadata["weight"] for part in parts]).tolist() == whole.metadata["weight"].tolist()


def test_pairs_of_ranks_together_are_those_of_one(pair_store):
    (alone,) = _conversations(pair_store, {"size": 22}).get_iterator()
    ranks = [next(_conversations(pair_store, {"size": 22}, rank=r, world_size=2).get_iterator()) for r in range(2)]
    for name in ("input_ids", "targets", "loss_mask"):
        assert np.array_equal(np.concatenate([getattr(batch, name) for batch in ranks]), getattr(alone, name)), name
    assert ranks[1].metadata["side"] == ["chosen", "rejected"] * 11


def test_one_rank_of_many_does_not_look_up_a_million_rows_for_its_first_batch(stores, monkeypatch):
    weights = {"web": 0.5, "notes": 0.3, "talks": 0.2}
    loader = open_mixture(stores, weights, {"size": 1024}, rank=0, world_size=256)
    order, asked = loader.plan.order, []
    at = type(order).at
    monkeypatch.setattr(type(order), "at", lambda self, positions: asked.append(len(positions)) or at(self, positions))
    loader.get_batch()
    assert 1024 <= sum(asked) <= 20_000


@pytest.mark.parametrize("open_loader", [open_mixture, open_packed, open_talks])
@pytest.mark.parametrize("ahead", [{"workers": 2}, {"prefetch": 2}])
def test_batches_that_are_made_ahead_are_the_same(stores, open_loader, ahead):
    expected = all_values(open_loader(stores, batching={"epoch_end": "pad"}).get_iterator())
    loader = open_loader(stores, batching={"epoch_end": "pad"}, delivery=bw.Delivery(**ahead))
    assert all_values(loader.get_iterator()) == expected


def test_roles_of_batches_that_workers_make_are_the_same(stores):
    roles = bw.Fields(roles=True)
    expected = all_values(open_packed(stores, fields=roles).get_iterator())
    assert all_values(open_packed(stores, fields=roles, delivery=bw.Delivery(workers=2)).get_iterator()) == expected
    assert len({role for row in expected[0]["role"] for role in row}) == 3  # of a user, of an assistant, of nothing


@pytest.mark.parametrize("open_loader", [open_mixture, open_packed, open_talks])
def test_a_pickled_loader_goes_on_where_it_was(stores, open_loader):
    loader = open_loader(stores)
    loader.get_batch()
    copy = pickle.loads(pickle.dumps(loader))
    assert all_values(copy.get_iterator()) == all_values(loader.get_iterator())


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # torch counts this machine's cores
def test_workers_of_torch_give_the_same_batches(stores):
    expected = all_values(open_mixture(stores, framework="torch").get_iterator())
    assert all_values(open_mixture(stores, framework="torch").torch().loader(num_workers=2)) == expected


@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
@pytest.mark.parametrize("open_loader", [open_mixture, open_packed, open_talks])
def test_a_framework_has_every_field_as_its_own_array(stores, open_loader, framework):
    own = pytest.importorskip({"mlx": "mlx.core"}.get(framework, framework))
    kind = {"torch": "Tensor", "jax": "Array", "mlx": "array"}[framework]
    expected = open_loader(stores).get_batch()
    batch = open_loader(stores, framework=framework).get_batch()
    assert values(batch) == values(expected)
    arrays = arrays_of(batch)
    assert ("cu_seqlens" in arrays) == ("segment_ids" in arrays) == (open_loader is not open_talks)
    for name in arrays.keys() - {"max_seqlen"}:
        assert isinstance(arrays[name], getattr(own, kind)), name


# What fills batches up


def test_rows_that_fill_the_last_batch_up_teach_nothing(stores):
    *_, last = open_talks(stores, batching={"size": 24, "epoch_end": "pad"}).get_iterator()
    assert last.metadata["weight"].tolist() == [1] * 8 + [0] * 16
    assert not last.loss_mask[8:].any()
    assert (last.targets[8:] == -100).all()
    assert last.loss_mask[:8].any(axis=1).all()


def test_pairs_that_fill_the_last_batch_up_teach_nothing(pair_store):
    *_, last = _conversations(pair_store, {"size": 4, "epoch_end": "pad"}).get_iterator()
    assert last.metadata["weight"].tolist() == [1] * 4 + [0] * 4  # two pairs, and two that repeat the second
    assert not last.loss_mask[4:].any()
    assert (last.targets[4:] == -100).all()
    assert last.loss_mask[:4].any(axis=1).all()


# Where a loader is


@pytest.mark.parametrize("open_loader", [open_mixture, open_packed, open_talks])
def test_a_loader_that_seeks_gives_what_one_that_read_on_gives(stores, open_loader):
    read = open_loader(stores, epochs=None)
    batches = [values(read.get_batch()) for _ in range(12)]  # over the end of an epoch
    for step in (11, 3, 0, 7):
        loader = open_loader(stores, epochs=None)
        loader.seek(step=step)
        assert values(loader.get_batch())["input_ids"] == batches[step]["input_ids"]


def test_a_batch_of_another_size_has_the_next_rows_as_wide_as_they_are(stores):
    loader = open_talks(stores)
    all_rows = open_talks(stores, batching={"size": 80, "pad_to": "max_length"}).get_batch()
    lengths = all_rows.attention_mask.sum(1)
    at = 0
    for size in (8, 3, 20, 8):
        batch = loader.get_batch(size)
        width = batch.input_ids.shape[1]
        assert width == lengths[at : at + size].max()
        assert np.array_equal(batch.targets, all_rows.targets[at : at + size, :width])
        at += size
    assert loader.position == at


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"max_length": 200}, "max_length"),
        ({"packing": "greedy"}, "packing"),
        ({"packing": None}, "packing"),
        ({"loss": "all"}, "loss"),
        ({"truncation": "keep_start"}, "truncation"),
    ],
)
def test_a_state_of_rows_made_otherwise_is_refused_and_named(stores, changed, named):
    fixed = {"max_length": 240, "packing": "best_fit"}
    state = _conversations(stores["talks"], **fixed).state_dict()
    loader = _conversations(stores["talks"], **(fixed | changed))
    loader.get_batch()
    with refused(PlanError, named) as caught:
        loader.load_state_dict(state)
    assert named in caught.value.where["differs"]
    assert loader.position == 8


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"max_length": 200}, "max_length"), ({"loss": "all"}, "loss"), ({"packing": "greedy"}, "packing")],
)
def test_a_plan_opened_with_another_setting_is_refused_and_named(stores, changed, named):
    plan = open_packed(stores).plan.fingerprint
    with refused(SpecError, parameter=named):
        bw.ConversationDataLoader(stores["talks"], plan=plan, **UNCHECKED, **changed)
