"""Garbage collection of a store: nothing that a plan needs, and nothing outside of the store."""

from __future__ import annotations

import gc
import logging

import pytest

import batchwright as bw
from batchwright.store import collect_garbage
from batchwright.store.plans import forget_plan
from refusals import refused


def bake_words(path, number):
    recipe = bw.DatasetRecipe().add_ingredient(["word " * 8] * number, name="words").prepare_step(bw.tokenize("bytes"))
    return bw.bake(recipe, to=path, workers=0, show_progress=False)


def loader_of(path, **settings):
    return bw.PretrainDataLoader(path, batch_size=2, framework="numpy", **settings)


@pytest.fixture
def stopped(tmp_path):
    """(store, plan, what it gives after a state, the state): a run over a version that is not current any more."""
    path = tmp_path / "a.store"
    bake_words(path, 3)
    loader = loader_of(path, chunk_size=8)
    loader.get_batch()
    state, plan = loader.state_dict(), loader.plan.fingerprint
    then = loader.get_batch().input_ids.tolist()
    del loader
    bake_words(path, 4)
    gc.collect()
    return path, plan, state, then


def kept(removals):
    return [removal.plans for removal in removals if removal.is_kept]


def test_a_stopped_run_resumes_after_garbage_collection(stopped):
    path, plan, state, then = stopped
    assert kept(collect_garbage(path)) == [(plan,)]
    loader = loader_of(path, plan=state["plan"])
    loader.load_state_dict(state)
    assert loader.get_batch().input_ids.tolist() == then


def test_a_forgotten_plan_holds_nothing(stopped):
    path, plan, state, _ = stopped
    assert [file.stem for file in forget_plan(path, plan[:6])] == [plan]
    assert not kept(collect_garbage(path))
    with refused(bw.PlanError, plan):
        loader_of(path, plan=state["plan"])
    with refused(bw.PlanError, plan):
        forget_plan(path, plan)


def test_a_plan_holds_no_version_whose_content_is_in_the_current_one(stopped):
    path, *_ = stopped
    bake_words(path, 3)
    gc.collect()
    assert not kept(collect_garbage(path))


def test_a_plan_under_home_holds_its_version_too(stopped, tmp_path, monkeypatch):
    path, plan, *_ = stopped
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (path / "plans").rename(tmp_path / "home" / "plans")
    assert kept(collect_garbage(path)) == [(plan,)]


def test_a_damaged_plan_keeps_all_versions_and_is_named(stopped, caplog):
    path, plan, *_ = stopped
    damaged = path / "plans" / "0123456789abcdef.json"
    damaged.write_text("{")
    forget_plan(path, plan)
    with caplog.at_level(logging.WARNING, "batchwright"):
        assert kept(collect_garbage(path)) == [(damaged.stem,)]
    assert [str(damaged) in record.getMessage() for record in caplog.records] == [True]
    forget_plan(path, damaged.stem)
    assert not kept(collect_garbage(path))


def test_a_version_whose_manifest_is_damaged_stays_where_a_plan_finds_its_content_nowhere(stopped):
    path, plan, *_ = stopped
    (old,) = (folder for folder in path.glob("versions/*") if folder != bw.open_store(path).folder)
    (old / "manifest.json").write_text("{")
    assert kept(collect_garbage(path)) == [(plan,)]
    forget_plan(path, plan)
    assert not kept(collect_garbage(path))


@pytest.mark.parametrize("name", ["versions/linked", "versions", "work", "rows"])
def test_garbage_collection_follows_no_link_to_another_store(tmp_path, name):
    for store in ("a.store", "b.store"):
        bake_words(tmp_path / store, 3)
        bake_words(tmp_path / store, 4)
    gc.collect()
    other = tmp_path / "b.store" / "versions"
    before = sorted(other.rglob("*"))
    link = tmp_path / "a.store" / name
    if link.exists():
        link.rename(tmp_path / "moved")
    link.symlink_to(other if name == "versions" else next(f for f in other.iterdir() if f.is_dir()))
    for dry_run in (True, False):
        removals = collect_garbage(tmp_path / "a.store", dry_run=dry_run)
        assert [removal.is_link for removal in removals if removal.folder == link or name == "versions"] == [True]
    assert link.is_symlink()
    assert sorted(other.rglob("*")) == before


def test_a_plan_of_another_store_is_not_forgotten(tmp_path):
    # Where a store cannot be written, its plans are kept in the home folder, which all stores share.
    bake_words(tmp_path / "mine.store", 3)
    bake_words(tmp_path / "other.store", 4)
    (tmp_path / "other.store" / "plans").touch()
    plan = loader_of(tmp_path / "other.store", chunk_size=8).plan.fingerprint
    with refused(bw.PlanError, plan, remedy="store"):
        forget_plan(tmp_path / "mine.store", plan)
    assert [file.stem for file in forget_plan(tmp_path / "other.store", plan)] == [plan]
