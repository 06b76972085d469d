"""lanes= on loaders: the same rows on any number of ranks, and resume, trace and amendments as ever."""

from __future__ import annotations

import numpy as np
import pytest

import batchwright as bw
from batchwright.loaders.read_ahead import _Blocks
from refusals import refused

SETTINGS = {"shuffle": bw.Shuffle("pool", pool_rows=32, lanes=4), "batch_size": 12}


def tokens(loader, steps=None):
    found = []
    for number, batch in enumerate(loader):
        found.append(batch.input_ids[batch.metadata["weight"] > 0])
        if steps is not None and number + 1 == steps:
            break
    return found


@pytest.mark.parametrize("epoch_end", ["drop", "short"])
@pytest.mark.parametrize("weights", [None, {"web": 1, "code": 2}])
def test_any_number_of_ranks_reads_the_same_batches(small_store, open_loader, weights, epoch_end):
    settings = SETTINGS | {"batch_size": bw.Batching(12, epoch_end=epoch_end)}
    if weights is not None:
        settings["weights"] = bw.Mixture(weights, num_rows=605)
    alone = tokens(open_loader(small_store, **settings))
    for world_size in (2, 3, 4):
        ranks = [
            tokens(open_loader(small_store, rank=rank, world_size=world_size, **settings)) for rank in range(world_size)
        ]
        assert all((np.concatenate(parts) == whole).all() for *parts, whole in zip(*ranks, alone, strict=True))


def test_a_run_in_lanes_resumes_with_other_ranks_and_another_batch_size(small_store, open_loader):
    whole = np.concatenate(tokens(open_loader(small_store, **SETTINGS)))
    loader = open_loader(small_store, **SETTINGS)
    first = np.concatenate(tokens(loader, steps=5))
    other = open_loader(small_store, plan=loader.plan, batch_size=6)
    other.load_state_dict(loader.state_dict())
    rest = np.concatenate(tokens(other))
    assert (np.concatenate([first, rest])[: len(whole)] == whole).all()


def test_steps_are_traced_and_documents_are_found(small_store, open_loader):
    loader = open_loader(small_store, **SETTINGS)
    records = list(bw.trace(small_store, loader.plan, step=7))
    (chosen,) = [r for r in records if r.source == "notes"][:1] or records[:1]
    uses = bw.find(small_store, loader.plan, file=chosen.file, row=chosen.row)
    assert (chosen.position, chosen.document_span) in [(use.position, use.document_span) for use in uses]


def test_weights_can_be_amended_and_rows_skipped(small_store, open_loader):
    loader = open_loader(small_store, weights=bw.Mixture({"web": 1, "code": 1}, num_rows=600), **SETTINGS)
    plain = np.concatenate(tokens(open_loader(small_store, plan=loader.plan)))
    first = tokens(loader, steps=5)
    loader.amend(weights={"web": 3, "code": 1}, skip=(70, 75))
    rest = np.concatenate([batch.metadata["position"] for batch in loader])
    assert (np.concatenate(first) == plain[:60]).all()
    assert rest.tolist() == [p for p in range(60, 600) if not 70 <= p <= 75][: len(rest)]
    draw = loader.plan.order.at(np.arange(600))
    assert len(set(zip(draw.source.tolist(), draw.index.tolist(), draw.epoch.tolist(), strict=True))) == 600


def test_reading_ahead_touches_only_the_windows_of_a_ranks_lanes(small_store, open_loader):
    rows = []
    for rank in range(2):
        loader = open_loader(small_store, rank=rank, world_size=2, delivery=bw.Delivery(read_ahead=False), **SETTINGS)
        follower = _Blocks(loader, once=True)
        read = set()
        while (work := follower.next(loader)) is not None:
            read |= {(str(path), byte) for path, start, stop in work.read for byte in range(start, stop, 16)}
        rows.append(read)
    assert min(map(len, rows)) > 100
    assert len(rows[0] & rows[1]) < 0.5 * min(map(len, rows))


@pytest.mark.parametrize(
    ("scope", "lanes", "named"), [("pool", 5, "lanes=5"), (None, 4, "shuffle='pool'"), ("pool", 0, 0)]
)
def test_lanes_that_cannot_be_are_refused(small_store, open_loader, scope, lanes, named):
    with refused(bw.SpecError, named, parameter="lanes"):
        open_loader(small_store, shuffle=bw.Shuffle(scope, lanes=lanes), batch_size=12)


def test_new_sources_cannot_join_lanes(small_store, open_loader):
    loader = open_loader(small_store, weights=bw.Mixture({"web": 1, "code": 1}, num_rows=600), **SETTINGS)
    before = loader.plan
    with refused(bw.SpecError, "skip=", parameter="max_epochs"):
        loader.amend(max_epochs={"code": 3})
    assert loader.plan == before
