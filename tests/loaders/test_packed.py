"""Packed documents: every token once an epoch, apart from each other, and the contract of any other row."""

from __future__ import annotations

import os
import pickle
import shutil

import numpy as np
import pytest

import batchwright as bw
from refusals import refused
from shared import arrays_of

# Documents of different lengths, each beginning with its own letter, longer ones than a row among them.
TEXTS = [chr(65 + n % 26) + str(n) + "." * (n * 7 % 45) for n in range(120)]
ROW = 32


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    recipe = bw.DatasetRecipe(seed=1).add_ingredient(TEXTS, name="docs")
    recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
    return bw.bake(recipe, to=tmp_path_factory.mktemp("packed") / "docs.store", workers=0, show_progress=False)


def open_loader(store, **settings):
    given = {"chunk_size": ROW, "packing": "best_fit", "framework": "numpy"}
    return bw.PretrainDataLoader(store, **given | {"batch_size": bw.Batching(4, epoch_end="pad")} | settings)


def samples_of(batch):
    """The real samples of a batch: (tokens, targets) of each."""
    for row in np.flatnonzero(batch.metadata["weight"] > 0):
        for segment in range(1, int(batch.segment_ids[row].max()) + 1):
            mine = batch.segment_ids[row] == segment
            yield batch.input_ids[row][mine].tolist(), batch.targets[row][mine].tolist()


@pytest.mark.parametrize("packing", ["best_fit", "first_fit", "greedy"])
def test_an_epoch_has_every_document_whole_or_in_full_pieces(store, packing):
    whole, pieces = [], []
    for batch in open_loader(store, packing=packing):
        for tokens, targets in samples_of(batch):
            (pieces if targets[-1] != -100 or tokens[-1] != 256 else whole).append(bytes(t for t in tokens if t < 256))
            assert targets[:-1] == tokens[1:]
    short = sorted(text for text in TEXTS if len(text) + 1 <= ROW)
    found = sorted(text.decode() for text in whole)
    assert [text for text in found if text in short] == short
    assert sum(map(len, whole)) + sum(map(len, pieces)) == sum(map(len, TEXTS))
    assert all(len(piece) == ROW for piece in pieces)  # cut only where a row is full


def test_no_label_is_lost_at_a_cut(store):
    # Every token but the first of each document is predicted once.
    targets = sum(int((batch.targets != -100).sum()) for batch in open_loader(store))
    assert targets == store.num_tokens - len(TEXTS)


def test_every_epoch_has_the_same_rows_in_another_order(store):
    loader = open_loader(store, epochs=2)
    first, second = ([row.tobytes() for batch in loader.get_iterator() for row in batch.input_ids] for _ in range(2))
    assert first != second
    assert sorted(set(first)) == sorted(set(second))


def test_a_state_goes_on_with_another_batch_size_and_other_ranks(store):
    one = open_loader(store, epochs=None, seed=3)
    for _ in range(5):
        one.get_batch()
    state = one.state_dict()
    expected = [one.get_batch() for _ in range(3)]
    for rank in range(2):
        two = open_loader(store, epochs=None, seed=3, rank=rank, world_size=2)
        two.load_state_dict(state)
        for batch in expected:
            mine = two.get_batch()
            for name in ("input_ids", "targets", "loss_mask", "segment_ids", "position_ids"):
                assert getattr(mine, name).tolist() == getattr(batch, name)[2 * rank : 2 * rank + 2].tolist()


def test_workers_and_threads_give_the_same_batches(store):
    plain = [batch for batch, _ in zip(open_loader(store), range(6), strict=False)]
    for delivery in (bw.Delivery(prefetch=2), bw.Delivery(workers=2)):
        for batch, expected in zip(open_loader(store, delivery=delivery), plain, strict=False):
            assert arrays_of(batch).keys() == arrays_of(expected).keys()
            for name, array in arrays_of(batch).items():
                assert np.array_equal(array, getattr(expected, name)), name


def test_a_loader_travels_to_another_process_without_its_index(store):
    loader = open_loader(store)
    data = pickle.dumps(loader)
    assert len(data) < 8_000
    assert pickle.loads(data).get_batch().targets.tolist() == loader.get_batch().targets.tolist()


def test_weights_mix_packed_sources(tmp_path):
    recipe = bw.DatasetRecipe(seed=1).add_ingredient(TEXTS, name="docs").add_ingredient(TEXTS[:50], name="few")
    store = bw.bake(
        recipe.prepare_step(bw.tokenize("bytes", append_eos=True)), to=tmp_path / "s", workers=0, show_progress=False
    )
    loader = open_loader(store, weights=bw.Mixture({"docs": 3, "few": 1}, num_rows=40), batch_size=4)
    sources = [source for batch in loader for source in batch.metadata["source"]]
    assert sources.count("few") == 10


def test_a_plan_and_its_rows_do_not_depend_on_where_the_store_lies(store, tmp_path):
    copied = shutil.copytree(store.path, tmp_path / "copy.store")
    shutil.rmtree(copied / "rows", ignore_errors=True)
    one, two = open_loader(store), open_loader(copied)
    assert one.plan.fingerprint == two.plan.fingerprint
    assert one.get_batch().input_ids.tolist() == two.get_batch().input_ids.tolist()


def test_the_index_is_kept_with_the_store_and_made_again(store, tmp_path, caplog):
    copied = shutil.copytree(store.path, tmp_path / "copy.store")
    shutil.rmtree(copied / "rows", ignore_errors=True)
    expected = open_loader(copied).get_batch().input_ids.tolist()
    (file,) = (copied / "rows").glob("*.arrow")
    whole = file.read_bytes()
    again = open_loader(bw.open_store(copied))
    assert again.get_batch().input_ids.tolist() == expected
    lengths = open_loader(copied).stream.flow.rows[0].index.length.tobytes()
    damaged = bytearray(whole)
    damaged[whole.index(lengths)] ^= 1  # one document longer or shorter by a token: nothing else would notice
    for content in (bytes(damaged), whole[: len(whole) // 2], b""):
        file.write_bytes(content)
        assert open_loader(bw.open_store(copied)).get_batch().input_ids.tolist() == expected
        assert file.read_bytes() == whole
    assert caplog.text.count(str(file)) == 3


def test_a_store_that_cannot_be_written_is_packed_all_the_same(store, tmp_path, monkeypatch):
    if os.geteuid() == 0:
        # Root may write anywhere: a file stands where the folder would be.
        copied = shutil.copytree(store.path, tmp_path / "copy.store")
        shutil.rmtree(copied / "rows", ignore_errors=True)
        (copied / "rows").write_text("not a folder")
    else:
        copied = shutil.copytree(store.path, tmp_path / "copy.store")
        shutil.rmtree(copied / "rows", ignore_errors=True)
        copied.chmod(0o500)
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    assert open_loader(copied).get_batch().input_ids.tolist() == open_loader(store).get_batch().input_ids.tolist()
    assert list((tmp_path / "home" / "rows").glob("*.arrow"))
    copied.chmod(0o700)


def test_gc_removes_the_index(store, tmp_path):
    copied = shutil.copytree(store.path, tmp_path / "copy.store")
    loader = open_loader(copied)
    from batchwright.store.versions import collect_garbage

    collect_garbage(copied)
    assert not (copied / "rows").exists()
    assert loader.get_batch().input_ids.shape == (4, ROW)  # it is mapped


@pytest.mark.parametrize(
    ("packing", "pad", "parameter"), [("best", None, "packing"), ("best_fit", 999, "pad"), (None, 0, "pad")]
)
def test_bad_settings_are_named(store, packing, pad, parameter):
    with refused(bw.SpecError, parameter=parameter):
        open_loader(store, packing=packing, batch_size=bw.Batching(4, epoch_end="pad", pad=pad))


def test_a_plan_refuses_another_packing(store):
    plan = open_loader(store).plan
    with refused(bw.SpecError, "packing='greedy'", parameter="packing"):
        open_loader(store, chunk_size=None, packing="greedy", plan=plan)
    assert open_loader(store, chunk_size=None, packing=None, plan=plan).plan == plan


def test_golden_rows_are_pinned(store):
    """States of running jobs point into these rows: they must never change."""
    batch = open_loader(store, seed=7).get_batch()
    assert batch.cu_seqlens.tolist() == [0, 17, 32, 54, 64, 96, 127, 128]
    assert [bytes(t for t in row[:6].tolist() if t < 256) for row in batch.input_ids] == [
        b"H111..",
        b"C54...",
        b"F5....",
        b"D81...",
    ]
