"""Pretraining batches from a store: what is in them, which rows a run has, what ends it, what outlives it."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest

import batchwright as bw
from batchwright.base.errors import EndOfRun, PlanError, SpecError
from batchwright.base.fingerprint import fingerprint_bytes
from batchwright.store.layout import Manifest, sealed
from batchwright.store.writer import write_table
from refusals import refused
from shared import arrays_of

BORDERS = {"fields": bw.Fields(position_ids=True, segment_ids=True, border_loss=False)}


def digest(loader, steps):
    """One number for the tokens, labels and positions of some steps."""
    parts = []
    for _ in range(steps):
        batch = loader.get_batch()
        parts += [batch.input_ids.tobytes(), batch.targets.tobytes(), batch.metadata["position"].tobytes()]
    return fingerprint_bytes(b"".join(parts))


def all_positions(loader):
    """The positions of every row that a run hands over, row by row."""
    return [int(p) for batch in loader for p in batch.metadata["position"]]


# What is in a batch


def test_labels_are_the_next_tokens(small_store, open_loader, slow_rows):
    loader = open_loader(small_store)
    slow = slow_rows(small_store, loader.plan)
    for step, batch in zip(range(20), loader, strict=False):
        rows = np.array([slow.row(12 * step + i) for i in range(12)])
        assert np.array_equal(batch.input_ids, rows[:, :-1])
        assert np.array_equal(batch.targets, rows[:, 1:])


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_fields_have_the_promised_types_and_shapes(small_store, open_loader, framework):
    batch = open_loader(small_store, framework=framework, **BORDERS).get_batch()
    types = {n: (str(a.dtype).removeprefix("torch."), tuple(a.shape)) for n, a in arrays_of(batch).items()}
    assert types == {
        "input_ids": ("int64", (12, 16)),
        "attention_mask": ("int64", (12, 16)),
        "labels": ("int64", (12, 16)),
        "targets": ("int64", (12, 16)),
        "loss_mask": ("float32", (12, 16)),
        "position_ids": ("int64", (12, 16)),
        "segment_ids": ("int64", (12, 16)),
    }
    assert len(batch) == 12


def test_constant_masks_are_one_array_that_cannot_be_written(small_store, open_loader):
    loader = open_loader(small_store)
    one, two = loader.get_batch(), loader.get_batch()
    for name in ("attention_mask", "loss_mask"):
        assert getattr(one, name) is getattr(two, name)
        assert (getattr(one, name) == 1).all()
        with pytest.raises(ValueError, match="read-only"):
            getattr(one, name)[0, 0] = 0


def test_a_torch_mask_that_somebody_wrote_into_is_not_handed_out_again(small_store, open_loader):
    loader = open_loader(small_store, framework="torch")
    one = loader.get_batch()
    assert one.loss_mask is loader.get_batch().loss_mask
    one.loss_mask[0, 0] = 0
    for _ in range(3):
        assert (loader.get_batch().loss_mask == 1).all()


@pytest.mark.parametrize("store", ["small_store", "sharded_store"])
def test_fields_at_document_borders_equal_a_loop_over_tokens(store, open_loader, slow_rows, request):
    store = request.getfixturevalue(store)
    loader = open_loader(store, epochs=2, **BORDERS)
    slow = slow_rows(store, loader.plan)
    for _ in range(2 * loader.get_num_batches()):  # the second epoch has windows over the end of the stream
        batch = loader.get_batch()
        for row, position in enumerate(batch.metadata["position"].tolist()):
            tokens, documents = slow.row(position), slow.documents(position)
            place, segment = 0, 1
            for t in range(16):
                if t and documents[t][1] == 0:
                    place, segment = 0, segment + 1
                predicted_over_border = documents[t + 1][1] == 0
                assert batch.position_ids[row, t] == place
                assert batch.segment_ids[row, t] == segment
                assert batch.loss_mask[row, t] == (0 if predicted_over_border else 1)
                assert batch.targets[row, t] == (-100 if predicted_over_border else tokens[t + 1])
                place += 1


# Which rows a run has


def test_without_weights_an_epoch_has_every_row_of_every_source_once(small_store, open_loader):
    loader = open_loader(small_store, batch_size=bw.Batching(12, epoch_end="pad"))
    seen = [
        tuple(row)
        for batch in loader
        for row, weight in zip(batch.input_ids, batch.metadata["weight"], strict=True)
        if weight
    ]
    store = bw.open_store(small_store)
    expected = []
    for name in store.names:
        stream = store.stream(name)
        tokens = stream.read(0, stream.num_tokens)
        expected += [tuple(tokens[i * 16 : i * 16 + 16]) for i in range((len(tokens) - 1) // 16)]
    assert sorted(seen) == sorted(expected)


def test_weights_mix_the_named_sources_in_their_shares(small_store, open_loader):
    loader = open_loader(small_store, weights={"web": 0.75, "notes": 0.25})
    drawn = [name for _ in range(100) for name in loader.get_batch().metadata["source"]]
    assert (drawn.count("web"), drawn.count("notes"), drawn.count("code")) == (900, 300, 0)


def test_a_weight_of_0_leaves_a_source_out(small_store, open_loader):
    assert (
        open_loader(small_store, weights={"web": 3, "notes": 1, "code": 0}).plan
        == open_loader(small_store, weights={"notes": 1, "web": 3}).plan
    )
    with refused(SpecError, parameter="weights", remedy="'web', 'code', 'notes'"):
        open_loader(small_store, weights={"web": 0, "code": 0})


def test_a_weight_for_an_unknown_source_is_refused_with_the_nearest_name(small_store, open_loader):
    with refused(SpecError, "weights=", parameter="weights", source="note", remedy="notes"):
        open_loader(small_store, weights={"web": 0.5, "note": 0.5})


def test_num_rows_ends_a_mixture_after_exactly_so_many_rows(small_store, open_loader):
    loader = open_loader(small_store, weights=bw.Mixture({"web": 1, "code": 1}, num_rows=37), batch_size=1)
    assert loader.get_num_batches() == 37
    assert all_positions(loader) == list(range(37))


def test_num_tokens_ends_a_mixture_after_as_many_whole_rows_as_fit(small_store, open_loader):
    loader = open_loader(small_store, weights=bw.Mixture({"web": 1, "code": 1}, num_tokens=16 * 37 + 15), batch_size=1)
    assert len(all_positions(loader)) == 37


@pytest.mark.parametrize("weights", [{"web": 1, "code": 1, "notes": 1}, {"web": 0.9, "notes": 0.1}, {"code": 1.0}])
@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_stop_ends_a_mixture_exactly_where_a_walk_sees_sources_run_out(small_store, open_loader, weights, stop):
    endless = open_loader(small_store, weights=weights, batch_size=1)
    left = {source.name: source.num_rows for source in endless.plan.sources}
    expected = None
    for count in range(1, 10**5):
        (name,) = endless.get_batch().metadata["source"]
        left[name] -= 1
        run_out = [n <= 0 for n in left.values()]
        if any(run_out) if stop == "first_exhausted" else all(run_out):
            expected = count
            break
    loader = open_loader(small_store, weights=bw.Mixture(weights, stop=stop), batch_size=1)
    assert loader.get_num_batches() == expected
    assert len(all_positions(loader)) == expected


def test_only_a_mixture_takes_an_end_and_only_one(small_store, open_loader):
    with refused(SpecError, parameter="num_rows"):
        open_loader(small_store, weights=bw.Mixture(num_rows=10))
    with refused(SpecError, parameter="stop"):
        open_loader(small_store, weights=bw.Mixture({"web": 1}, num_rows=10, stop="first_exhausted"))
    with refused(SpecError, "stop='last'", parameter="stop"):
        open_loader(small_store, weights=bw.Mixture({"web": 1}, stop="last"))


def test_later_epochs_cut_windows_elsewhere_unless_told_not_to(long_store, open_loader):
    def epochs(**given):
        loader = open_loader(long_store, chunk_size=1024, batch_size=bw.Batching(8, epoch_end="pad"), epochs=2, **given)
        return [{row.tobytes() for batch in loader for row in batch.input_ids} for _ in range(2)]

    first, second = epochs()
    assert not first & second
    first, second = epochs(shuffle=bw.Shuffle(recut=False))
    assert first == second


def test_val_is_unshuffled_finite_and_padded(small_store, open_loader):
    loader = open_loader(small_store, split="val")
    assert loader.plan.shuffle == "none"
    batches = list(loader)
    assert len(batches) == loader.get_num_batches()
    weight = np.concatenate([batch.metadata["weight"] for batch in batches])
    assert weight.sum() == loader.plan.epoch_rows
    assert weight[: loader.plan.epoch_rows].all()
    store = bw.open_store(small_store)
    of_web = [
        row
        for batch in batches
        for row, name in zip(batch.input_ids, batch.metadata["source"], strict=True)
        if name == "web"
    ]
    tokens = store.stream("web", "val").read(0, store.stream("web", "val").num_tokens)
    assert np.array_equal(np.concatenate(of_web)[:160], tokens[:160])


def test_every_pass_over_val_begins_at_its_first_row(small_store, open_loader):
    loader = open_loader(small_store, split="val")
    first = all_positions(loader)
    assert first[0] == 0
    assert all_positions(loader) == first
    with refused(EndOfRun):
        loader.get_batch()


def test_no_document_is_in_both_splits(small_store):
    store = bw.open_store(small_store)
    sides = {split: {(d.source, d.file, d.row) for d in store.rows() if d.split == split} for split in store.splits}
    assert not sides["train"] & sides["val"]
    assert len(sides["val"]) > 5


def test_a_source_with_too_little_text_is_left_out_of_a_union_and_refused_alone(small_store, open_loader):
    tokens = bw.open_store(small_store).stream("notes").num_tokens
    loader = open_loader(small_store, chunk_size=tokens, batch_size=1)
    assert "notes" not in [source.name for source in loader.plan.sources]
    with refused(SpecError, f"chunk_size={tokens}", f"{tokens + 1:,}", parameter="chunk_size", source="notes"):
        open_loader(small_store, chunk_size=tokens, weights={"notes": 1})


def test_a_loader_needs_a_chunk_size(small_store):
    with refused(SpecError, parameter="chunk_size"):
        bw.PretrainDataLoader(small_store)


def test_the_tokenizer_must_be_the_one_that_the_store_was_baked_with(small_store, open_loader):
    open_loader(small_store, tokenizer="bytes")
    with refused(SpecError, parameter="tokenizer"):
        open_loader(small_store, tokenizer="chars")


# Plans and states


def test_a_state_of_another_plan_is_refused_naming_the_first_difference(small_store, open_loader):
    loader = open_loader(small_store)
    for given, difference in (
        ({"chunk_size": 32}, "chunk_size: 16 here, 32 there"),
        ({"seed": 8}, "seed: 7 here, 8 there"),
        ({"shuffle": False}, "shuffle: global here, none there"),
        ({"batch_size": bw.Batching(12, epoch_end="pad")}, "epoch_end: drop here, pad there"),
    ):
        other = open_loader(small_store, **given)
        with refused(PlanError, differs=difference):
            loader.load_state_dict(other.state_dict())
    again = pickle.loads(pickle.dumps(loader))
    with refused(PlanError, differs=difference):
        again.load_state_dict(other.state_dict())


def test_a_plan_opens_the_run_that_it_names(own_store, open_loader):
    given = {"weights": bw.Mixture({"web": 1, "code": 2}, num_rows=300), "seed": 5, "batch_size": 24}
    first = open_loader(own_store, **given)
    for plan in (first, first.plan, first.plan.fingerprint, first.state_dict()):
        again = open_loader(own_store, plan=plan)
        assert again.plan == first.plan
        assert again.batch_size == 24
        again.load_state_dict(first.state_dict())
    assert digest(open_loader(own_store, plan=first.plan), 5) == digest(open_loader(own_store, **given), 5)


def test_a_plan_is_opened_with_the_batch_size_that_is_asked_for(own_store, open_loader):
    plan = open_loader(own_store, batch_size=24).plan
    assert open_loader(own_store, plan=plan, batch_size=8).batch_size == 8


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("chunk_size", {"chunk_size": 32}),
        ("seed", {"seed": 9}),
        ("seed", {"seed": 0}),  # the default, but it was asked for
        ("shuffle", {"shuffle": "none"}),
        ("weights", {"weights": {"web": 1}}),
        ("num_rows", {"weights": bw.Mixture(num_rows=100)}),
        ("num_tokens", {"weights": bw.Mixture(num_tokens=100)}),
        ("stop", {"weights": bw.Mixture(stop="first_exhausted")}),
        ("split", {"split": "val"}),
        ("epoch_end", {"batch_size": bw.Batching(epoch_end="wrap")}),
        ("recut", {"shuffle": bw.Shuffle(recut=False)}),
    ],
)
def test_a_setting_that_the_plan_fixes_otherwise_is_refused_by_name(small_store, open_loader, name, given):
    plan = open_loader(small_store).plan
    with refused(SpecError, plan.fingerprint, parameter=name):
        open_loader(small_store, plan=plan, **given)
    same = {"chunk_size": 16, "seed": 7, "shuffle": True, "split": "train", "batch_size": bw.Batching(epoch_end="drop")}
    assert open_loader(small_store, plan=plan, **same).plan == plan


def test_the_loader_keeps_the_version_it_opened_while_another_is_baked(tmp_path, open_loader):
    def baked(text):
        recipe = bw.DatasetRecipe(seed=0).add_ingredient([text * 200], name="words")
        recipe.prepare_step(bw.tokenize("bytes"))
        return bw.bake(recipe, to=tmp_path / "words.store", workers=0, show_progress=False)

    baked("one ")
    loader = open_loader(tmp_path / "words.store", batch_size=4, shuffle=False)
    first = loader.get_batch()
    baked("two ")
    assert np.array_equal(
        open_loader(tmp_path / "words.store", plan=loader.plan).get_batch().input_ids, first.input_ids
    )
    assert bytes(loader.get_batch().input_ids[0].astype(np.uint8)) == b"one " * 4
    new = open_loader(tmp_path / "words.store", batch_size=4, shuffle=False)
    assert bytes(new.get_batch().input_ids[0].astype(np.uint8)) == b"two " * 4


# Pickle


@pytest.mark.parametrize("ahead", [None, bw.Delivery(prefetch=2), bw.Delivery(workers=1)])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_loader_pickles_in_mid_run_and_continues_equal(small_store, open_loader, framework, ahead):
    loader = open_loader(small_store, framework=framework, epochs=2, delivery=ahead)
    iterator = loader.get_iterator()
    for _ in range(5):
        next(iterator)
    threads = set(threading.enumerate())
    pickled = pickle.dumps(loader)
    again = pickle.loads(pickled)
    assert len(pickled) < 5000  # no tokens, no tables
    assert not set(threading.enumerate()) - threads
    assert again.state_dict() == loader.state_dict()
    for _ in range(5):
        assert (np.asarray(next(iterator).input_ids) == np.asarray(again.get_batch().input_ids)).all()
    loader.reset()
    again.reset()


def test_a_pickled_loader_continues_in_another_process(small_store, open_loader, tmp_path):
    loader = open_loader(small_store, epochs=2)
    for _ in range(5):
        loader.get_batch()
    (tmp_path / "loader.pickle").write_bytes(pickle.dumps(loader))
    script = (
        "import pickle, sys; loader = pickle.load(open(sys.argv[1], 'rb'));"
        "print([loader.get_batch().input_ids.sum() for _ in range(3)], loader.state_dict())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "loader.pickle"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == f"{[loader.get_batch().input_ids.sum() for _ in range(3)]} {loader.state_dict()}"


def test_a_batch_pickles_with_its_metadata(small_store, open_loader):
    batch = open_loader(small_store, **BORDERS).get_batch()
    again = pickle.loads(pickle.dumps(batch))
    assert again.keys() == batch.keys()
    assert all(np.array_equal(again[name], batch[name]) for name in batch)
    assert again.metadata["state"] == batch.metadata["state"]


# A store too large to exist


@pytest.fixture(scope="module")
def vast_store(tmp_path_factory):
    """A manifest of a million shards and 10^13 tokens: the table is real, one small file stands for every shard."""
    folder = tmp_path_factory.mktemp("vast") / "vast.store"
    recipe = bw.DatasetRecipe().add_ingredient(["a little text"], name="web").prepare_step(bw.tokenize("bytes"))
    store = bw.bake(recipe, to=folder, workers=0, show_progress=False)
    shards, count, tokens = store.shards, 10**6, 10**7
    columns = {
        "stream": np.zeros(count, np.int32),
        "num_documents": np.full(count, 10_000),
        "num_tokens": np.full(count, tokens),
        "num_bytes": np.full(count, int(shards["num_bytes"][0])),
        **{name: [shards[name][0].as_py()] * count for name in ("file", "file_hash", "content_hash")},
    }
    path = store.folder / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes())
    manifest["shards_hash"] = write_table(store.folder / "shards.arrow", columns)
    manifest["streams"][0] |= {"num_shards": count, "num_tokens": count * tokens, "num_documents": count * 10_000}
    del manifest["checksum"]
    path.write_bytes(sealed(manifest))
    assert Manifest.load(store.folder).streams[0].num_tokens == 10**13
    return folder


def test_any_step_of_ten_trillion_tokens_is_located_without_data(vast_store):
    loader = bw.PretrainDataLoader(vast_store, chunk_size=2048, batch_size=1024, seed=7, framework="numpy", epochs=None)
    (rows,) = loader.stream.flow.rows
    assert rows.num_rows == (10**13 - 1) // 2048
    for step in (0, 1, 10**6, 4_768_370, 10**9):
        loader.seek(step=step)
        assert loader.step == step
        position = loader.position
        draw = loader.stream.flow.order.at(np.arange(position, position + 1024))
        starts = rows.starts(draw.index, draw.epoch)
        shard, offset = rows.stream.locate(starts)
        assert np.array_equal(shard * 10**7 + offset, starts)
        assert shard.max() < 10**6
        for epoch in np.unique(draw.epoch).tolist():
            mine = draw.epoch == epoch
            assert np.array_equal(
                loader.stream.flow.order.positions(0, draw.index[mine], epoch),
                np.arange(position, position + 1024)[mine],
            )
    assert not rows.stream._mapped  # nothing was read


# Pinned


@pytest.fixture(scope="module")
def pinned_store(tmp_path_factory):
    """Two sources of fixed text from memory: the same tokens on every machine."""
    recipe = bw.DatasetRecipe(seed=0)
    recipe.add_ingredient([f"document {n} of the web, {n * n} words" for n in range(200)], name="web")
    recipe.add_ingredient([f"x_{n} = {n} ** 2\n" for n in range(100)], name="code")
    recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
    path = tmp_path_factory.mktemp("pinned") / "pinned.store"
    bw.bake(recipe, to=path, workers=0, show_progress=False)
    return path


def test_the_first_batches_are_pinned(pinned_store, open_loader):
    # Never change these. They are what jobs that are running now have seen and will see: a change here means that
    # every checkpoint resumes into other data. It also means that a store baked today has other bytes than before.
    union = open_loader(pinned_store, batch_size=8, epochs=None)
    assert union.plan.fingerprint == "45502d9940eb4372"
    assert digest(union, 5) == "459115d031388f0ae06cb85c984772c0"
    union.seek(step=200)  # a later epoch, cut elsewhere
    assert digest(union, 5) == "c8647ca4f26e3b60f9bf3c93ecd08c51"
    mixture = open_loader(pinned_store, batch_size=8, weights={"web": 0.3, "code": 0.7})
    assert mixture.plan.fingerprint == "5ef7e1e0fb4e4c15"
    assert digest(mixture, 5) == "dc4fbc0c0aa0895b835c2a2659542981"


def test_a_source_too_short_for_one_row_is_left_out_and_named(tmp_path, caplog):
    recipe = bw.DatasetRecipe(seed=0).add_ingredient(["long " * 100], name="long").add_ingredient(["tiny"], name="tiny")
    bw.bake(recipe.prepare_step(bw.tokenize("bytes")), to=tmp_path / "a.store", show_progress=False)
    loader = bw.PretrainDataLoader(tmp_path / "a.store", chunk_size=16, framework="numpy")
    assert [source.name for source in loader.plan.sources] == ["long"]
    (warning,) = [record for record in caplog.records if "'tiny'" in record.getMessage()]
    assert warning.levelname == "WARNING"
    assert "4 tokens are too few for one row of 16" in warning.getMessage()
