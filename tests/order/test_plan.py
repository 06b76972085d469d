"""A plan is what fixes row p of a stream: named by its content, kept with the store, found again in many ways."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import batchwright as bw
from batchwright.base.errors import PlanError, SpecError
from batchwright.order.plan import Plan, PlanSource
from batchwright.store.plans import find_plan, list_plans, streams_for_plan
from refusals import refused

PLAN = Plan(
    row_tokens=2048,
    seed=7,
    shuffle="global",
    sources=(
        PlanSource(name="web", split="train", fingerprint="a81c22e0a81c22e0", num_rows=1000, num_tokens=2_048_001),
        PlanSource(name="code", split="train", fingerprint="09be7d4109be7d41", num_rows=500, num_tokens=1_024_001),
    ),
    segments=((0, (("web", 0.7), ("code", 0.3))),),
    num_rows=10_000,
)


def test_another_record_of_runs_leaves_the_fingerprint_and_another_seed_does_not():
    assert PLAN.fingerprint  # computed, so that a copy could carry it
    cut = PLAN.cut_as([[0, 0, 32]], world_size=4)
    assert cut.fingerprint == PLAN.fingerprint == replace(cut, runs=()).fingerprint
    assert replace(cut, seed=8).fingerprint != PLAN.fingerprint


def test_the_fingerprint_is_pinned():
    # Never change these. States of running jobs name their plan by this: if it changes, none of them loads any more.
    assert PLAN.fingerprint == "4c6de1e12b8173a1"
    assert (
        Plan(row_tokens=16, seed=0, shuffle="none", sources=PLAN.sources, epoch_end="pad").fingerprint
        == "8335fa80730714b3"
    )


def test_what_fixes_the_rows_is_in_the_fingerprint_and_what_does_not_is_not(small_store, open_loader):
    base = open_loader(small_store).plan.fingerprint
    for given in (
        {"batch_size": 24},
        {"rank": 1, "world_size": 3},
        {"delivery": bw.Delivery(prefetch=2)},
        {"delivery": bw.Delivery(workers=1)},
        {"framework": "torch"},
        {"epochs": 5},
        {"fields": bw.Fields(position_ids=True, border_loss=False)},
    ):
        assert open_loader(small_store, **given).plan.fingerprint == base, given
    others = [
        open_loader(small_store, **given).plan.fingerprint
        for given in (
            {"chunk_size": 32},
            {"seed": 8},
            {"shuffle": False},
            {"weights": {"web": 1, "code": 1}},
            {"weights": {"web": 1, "code": 2}},
            {"weights": bw.Mixture({"web": 1, "code": 1}, num_rows=100)},
            {"batch_size": bw.Batching(12, epoch_end="pad")},
            {"shuffle": bw.Shuffle(recut=False)},
            {"split": "val"},
        )
    ]
    assert len({base, *others}) == 10


def test_the_fingerprint_does_not_depend_on_where_the_store_lies(small_store, own_store, open_loader):
    assert open_loader(small_store).plan == open_loader(own_store).plan


def test_the_fingerprint_depends_on_the_content(tmp_path, open_loader):
    def plan_over(text):
        recipe = bw.DatasetRecipe().add_ingredient([text * 100], name="words").prepare_step(bw.tokenize("bytes"))
        bw.bake(recipe, to=tmp_path / f"{text}.store", workers=0, show_progress=False)
        return open_loader(tmp_path / f"{text}.store").plan

    one, two = plan_over("one"), plan_over("two")
    assert one.fingerprint != two.fingerprint
    assert one.difference(two).startswith("source 'words': fingerprint")


def test_a_plan_is_saved_and_loaded_as_it_was(tmp_path):
    plan = PLAN.cut_as([[0, 0, 32], [10, 320, 64]])
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == PLAN
    assert loaded.fingerprint == PLAN.fingerprint
    assert loaded.steps == ((0, 0, 32), (10, 320, 64))
    assert loaded.weights == {"web": 0.7, "code": 0.3}


def test_a_plan_file_keeps_every_run_that_cut_it_once(tmp_path):
    path = tmp_path / "plan.json"
    for rows in (32, 64, 32):
        PLAN.cut_as([[0, 0, rows]]).save(path)
    assert Plan.load(path).runs == (((0, 0, 32),), ((0, 0, 64),))
    with refused(PlanError, "32, 64", remedy="batch_size="):
        _ = Plan.load(path).steps


def test_a_plan_without_a_run_does_not_say_where_steps_are():
    with refused(PlanError, PLAN.fingerprint, remedy="batch_size="):
        _ = PLAN.steps


def test_a_changed_plan_file_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    body = json.loads(path.read_text())
    body["plan"]["seed"] = 8
    path.write_text(json.dumps(body))
    with refused(PlanError, file=path, remedy="settings"):
        Plan.load(path)


def test_a_plan_of_an_unknown_order_version_is_refused_by_name(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(path.read_text().replace('"order_version": 1', '"order_version": 2'))
    with refused(PlanError, "version 2", "version 1", file=path):
        Plan.load(path)


@pytest.mark.parametrize(
    "content", ["", "no json", "[]", "{}", '{"batchwright_plan": 99}', '{"batchwright_plan": 1, "plan": {}}']
)
def test_what_is_not_a_plan_is_refused_by_name(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with refused(PlanError, file=path, remedy="batchwright plan forget STORE"):
        Plan.load(path)


def test_no_error_about_a_file_advises_to_remove_it(tmp_path):
    mine = tmp_path / "mine.json"
    for content in ("", "no json", "{}", '{"epoch": 3}', '{"batchwright_plan": 1, "plan": 5}'):
        mine.write_text(content)
        with refused(PlanError, mine, remedy="state_dict()") as caught:
            find_plan((), str(mine))
        assert "remove" not in caught.value.remedy


def test_a_missing_plan_file_is_named(tmp_path):
    with refused(PlanError, file=tmp_path / "nowhere.json", remedy="batchwright plan STORE"):
        Plan.load(tmp_path / "nowhere.json")


def test_a_plan_prints_what_it_will_do():
    text = repr(PLAN)
    for part in (PLAN.fingerprint, "rows of 2048 tokens", "10,000 rows", "seed 7", "web (train)  70.0 %", "30.0 %"):
        assert part in text


# Kept with the store


def test_opening_a_loader_keeps_its_plan_beside_the_store(own_store, open_loader):
    loader = open_loader(own_store)
    path = own_store / "plans" / f"{loader.plan.fingerprint}.json"
    assert Plan.load(path) == loader.plan
    assert Plan.load(path).steps == ((0, 0, 12),)
    assert list_plans(own_store) == [loader.plan]


def test_a_plan_goes_home_where_it_cannot_lie_beside_the_store(own_store, open_loader, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    (own_store / "plans").write_text("in the way")  # also root cannot make a folder here
    loader = open_loader(own_store)
    assert (tmp_path / "home" / "plans" / f"{loader.plan.fingerprint}.json").exists()
    assert find_plan(own_store, loader.plan.fingerprint) == loader.plan


def test_a_plan_is_found_by_object_loader_state_fingerprint_and_file(own_store, open_loader):
    loader = open_loader(own_store)
    loader.get_batch()
    state = own_store.parent / "state.json"
    state.write_text(json.dumps(loader.state_dict()))
    name = loader.plan.fingerprint
    for meant in (
        loader,
        loader.plan,
        loader.state_dict(),
        name,
        name[:6],
        own_store / "plans" / f"{name}.json",
        str(own_store / "plans" / f"{name}.json"),
        state,
        str(state),
    ):
        found = find_plan(own_store, meant)
        assert found == loader.plan
        assert found.steps == ((0, 0, 12),)
    assert find_plan(own_store, name, batch_size=24).steps == ((0, 0, 24),)


def test_a_state_file_opens_its_plan_again(own_store, open_loader, tmp_path):
    loader = open_loader(own_store)
    state = tmp_path / "state.json"
    state.write_text(json.dumps(loader.state_dict()))
    assert open_loader(own_store, plan=state).plan == loader.plan
    assert bw.MixedDataLoader(own_store, plan=str(state), framework="numpy").plan == loader.plan


def test_an_unknown_fingerprint_is_answered_with_the_known_ones(own_store, open_loader):
    known = open_loader(own_store).plan.fingerprint
    with refused(PlanError, "ffff", plans=known):
        find_plan(own_store, "ffff")


def test_a_fingerprint_too_short_to_be_one_plan_is_refused(own_store):
    (own_store / "plans").mkdir()
    for name in ("abcd1111", "abcd2222"):
        (own_store / "plans" / f"{name}.json").write_text("{}")
    with refused(PlanError, plans="abcd1111, abcd2222"):
        find_plan(own_store, "abcd")


@pytest.mark.parametrize("steps", ["7", '[["x"]]', "[[1, 2]]", "[" * 200_000])
def test_a_damaged_state_file_is_refused_by_name(own_store, open_loader, tmp_path, steps):
    name = open_loader(own_store).plan.fingerprint
    (tmp_path / "state.json").write_text(f'{{"position": 0, "plan": "{name}", "steps": {steps}}}')
    with refused(PlanError):
        open_loader(own_store, plan=tmp_path / "state.json")


@pytest.mark.parametrize("wrong", [7, None, {"position": 3}])
def test_what_cannot_mean_a_plan_is_refused(own_store, wrong):
    with refused(PlanError):
        find_plan(own_store, wrong)


def test_a_plan_finds_its_content_in_an_older_version_of_the_store(own_store, raw, open_loader):
    plan = open_loader(own_store).plan
    recipe = bw.DatasetRecipe().add_ingredient(raw / "code" / "*.txt", name="web").prepare_step(bw.tokenize("bytes"))
    new = bw.bake(recipe, to=own_store, workers=0, show_progress=False)
    assert bw.open_store(own_store).version == new.version
    assert streams_for_plan(own_store, plan)["web"].store.version != new.version
    assert open_loader(own_store, plan=plan).plan == plan


def test_a_damaged_version_does_not_hide_the_older_one_that_a_plan_needs(own_store, open_loader):
    loader = open_loader(own_store)
    for text in ("second", "third"):
        recipe = bw.DatasetRecipe().add_ingredient([text * 40], name="other").prepare_step(bw.tokenize("bytes"))
        newest = bw.bake(recipe, to=own_store, workers=0, show_progress=False)
        if text == "second":
            (newest.folder / "manifest.json").write_text("{")
    assert streams_for_plan(own_store, loader.plan)["web"].store.version == loader.store.version


def test_a_plan_whose_content_is_gone_is_refused_by_source(own_store, small_store, tmp_path, open_loader):
    plan = open_loader(own_store).plan
    recipe = bw.DatasetRecipe().add_ingredient(["other text"], name="web").prepare_step(bw.tokenize("bytes"))
    other = tmp_path / "other.store"
    bw.bake(recipe, to=other, workers=0, show_progress=False)
    with refused(PlanError, other, plan.fingerprint, source="web (train), code (train), notes (train)"):
        open_loader(other, plan=plan)


def test_a_plan_works_over_a_store_that_has_moved(own_store, tmp_path, open_loader):
    loader = open_loader(own_store)
    expected = loader.get_batch().input_ids.copy()
    moved = tmp_path / "elsewhere" / "moved.store"
    shutil.copytree(own_store, moved)
    again = open_loader(moved, plan=loader.plan.fingerprint)
    assert (again.get_batch().input_ids == expected).all()


def test_runs_that_open_at_once_are_all_recorded(tmp_path, own_store):
    code = (
        "import sys, batchwright as bw; bw.PretrainDataLoader(sys.argv[1], chunk_size=9, batch_size=int(sys.argv[2]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(bw.__file__).parents[1])}
    command = [sys.executable, "-c", code, str(own_store)]
    runs = [subprocess.Popen([*command, str(batch_size)], env=environment) for batch_size in range(1, 7)]
    assert [run.wait(timeout=240) for run in runs] == [0] * 6
    plan = bw.PretrainDataLoader(own_store, chunk_size=9, batch_size=1).plan
    kept = Plan.load(own_store / "plans" / f"{plan.fingerprint}.json")
    assert sorted(run[0][2] for run in kept.runs) == [1, 2, 3, 4, 5, 6]


def test_a_damaged_plan_file_does_not_keep_a_run_from_starting(own_store, open_loader, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    plan = open_loader(own_store, chunk_size=9).plan
    (own_store / "plans" / f"{plan.fingerprint}.json").write_text("")
    assert open_loader(own_store, chunk_size=9).plan == plan
    assert (tmp_path / "home" / "plans" / f"{plan.fingerprint}.json").exists()


def test_a_store_below_the_home_folder_is_found_by_its_short_name(own_store, open_loader, monkeypatch):
    monkeypatch.setenv("HOME", str(own_store.parent))
    plan = open_loader(own_store, chunk_size=9).plan
    assert find_plan(f"~/{own_store.name}", plan.fingerprint) == plan


@pytest.mark.parametrize("seed", [1.5, "7"])
def test_a_seed_that_is_no_whole_number_is_refused(own_store, open_loader, seed):
    with refused(SpecError, seed, parameter="seed"):
        open_loader(own_store, chunk_size=9, seed=seed)
