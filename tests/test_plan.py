"""A plan is what fixes row p of a stream: named by its content, kept with the store, found again in many ways."""

from __future__ import annotations

import json
import shutil

import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.plan import Plan, PlanSource
from penstock.plans import find_plan, list_plans, store_for_plan

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


def test_the_fingerprint_is_pinned():
    # Never change these. States of running jobs name their plan by this: if it changes, none of them loads any more.
    assert PLAN.fingerprint == "90f3f0c6d533ad2d"
    assert (
        Plan(row_tokens=16, seed=0, shuffle="none", sources=PLAN.sources, epoch_end="pad").fingerprint
        == "ad8d692be7f2cc86"
    )


def test_what_fixes_the_rows_is_in_the_fingerprint_and_what_does_not_is_not(small_store, open_loader):
    base = open_loader(small_store).plan.fingerprint
    for given in (
        {"batch_size": 24},
        {"rank": 1, "world_size": 3},
        {"prefetch": 2},
        {"workers": 1},
        {"framework": "torch"},
        {"epochs": 5},
        {"position_ids": True, "border_loss": False},
        {"alignment": "same"},
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
            {"weights": {"web": 1, "code": 1}, "num_rows": 100},
            {"epoch_end": "pad"},
            {"recut": False},
            {"split": "val"},
        )
    ]
    assert len({base, *others}) == 10


def test_the_fingerprint_does_not_depend_on_where_the_store_lies(small_store, own_store, open_loader):
    assert open_loader(small_store).plan == open_loader(own_store).plan


def test_the_fingerprint_depends_on_the_content(tmp_path, open_loader):
    def plan_over(text):
        recipe = ps.DatasetRecipe().add_ingredient([text * 100], name="words").prepare_step(ps.tokenize("bytes"))
        ps.bake(recipe, to=tmp_path / f"{text}.store", workers=0, show_progress=False)
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
    with pytest.raises(PlanError, match="batches of 32, 64 rows by different runs") as caught:
        _ = Plan.load(path).steps
    assert "batch_size=" in caught.value.remedy


def test_a_plan_without_a_run_does_not_say_where_steps_are():
    with pytest.raises(PlanError, match="does not say how it was cut"):
        _ = PLAN.steps


def test_a_changed_plan_file_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    body = json.loads(path.read_text())
    body["plan"]["seed"] = 8
    path.write_text(json.dumps(body))
    with pytest.raises(PlanError, match="changed after it was written") as caught:
        Plan.load(path)
    assert caught.value.where["file"] == path


def test_a_plan_of_an_unknown_order_version_is_refused_by_name(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(path.read_text().replace('"order_version": 1', '"order_version": 2'))
    with pytest.raises(PlanError, match="order version 2; this penstock knows version 1"):
        Plan.load(path)


@pytest.mark.parametrize(
    "content", ["", "no json", "[]", "{}", '{"penstock_plan": 99}', '{"penstock_plan": 1, "plan": {}}']
)
def test_what_is_not_a_plan_is_refused_by_name(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(PlanError, match="not a plan") as caught:
        Plan.load(path)
    assert caught.value.where["file"] == path


def test_a_missing_plan_file_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"no plan at .*nowhere\.json"):
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
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    (own_store / "plans").write_text("in the way")  # also root cannot make a folder here
    loader = open_loader(own_store)
    assert (tmp_path / "home" / "plans" / f"{loader.plan.fingerprint}.json").exists()
    assert find_plan(own_store, loader.plan.fingerprint) == loader.plan


def test_a_plan_is_found_by_object_loader_state_fingerprint_and_file(own_store, open_loader):
    loader = open_loader(own_store)
    loader.get_batch()
    name = loader.plan.fingerprint
    for meant in (
        loader,
        loader.plan,
        loader.state_dict(),
        name,
        name[:6],
        own_store / "plans" / f"{name}.json",
        str(own_store / "plans" / f"{name}.json"),
    ):
        found = find_plan(own_store, meant)
        assert found == loader.plan
        assert found.steps == ((0, 0, 12),)
    assert find_plan(own_store, name, batch_size=24).steps == ((0, 0, 24),)


def test_an_unknown_fingerprint_is_answered_with_the_known_ones(own_store, open_loader):
    known = open_loader(own_store).plan.fingerprint
    with pytest.raises(PlanError, match="no plan ffff is kept") as caught:
        find_plan(own_store, "ffff")
    assert caught.value.where["plans"] == known


def test_a_fingerprint_too_short_to_be_one_plan_is_refused(own_store):
    (own_store / "plans").mkdir()
    for name in ("abcd1111", "abcd2222"):
        (own_store / "plans" / f"{name}.json").write_text("{}")
    with pytest.raises(PlanError, match="several plans begin with abcd") as caught:
        find_plan(own_store, "abcd")
    assert caught.value.remedy == "more digits"


@pytest.mark.parametrize("wrong", [7, None, {"position": 3}])
def test_what_cannot_mean_a_plan_is_refused(own_store, wrong):
    with pytest.raises(PlanError, match=r"is not a plan|not a loader's state"):
        find_plan(own_store, wrong)


def test_a_plan_finds_its_content_in_an_older_version_of_the_store(own_store, raw, open_loader):
    plan = open_loader(own_store).plan
    recipe = ps.DatasetRecipe().add_ingredient(raw / "code" / "*.txt", name="web").prepare_step(ps.tokenize("bytes"))
    new = ps.bake(recipe, to=own_store, workers=0, show_progress=False)
    assert ps.open_store(own_store).version == new.version
    assert store_for_plan(own_store, plan).version != new.version
    assert open_loader(own_store, plan=plan).plan == plan


def test_a_plan_whose_content_is_gone_is_refused_by_source(own_store, small_store, tmp_path, open_loader):
    plan = open_loader(own_store).plan
    recipe = ps.DatasetRecipe().add_ingredient(["other text"], name="web").prepare_step(ps.tokenize("bytes"))
    other = tmp_path / "other.store"
    ps.bake(recipe, to=other, workers=0, show_progress=False)
    with pytest.raises(PlanError, match=f"has the content of plan {plan.fingerprint}") as caught:
        open_loader(other, plan=plan)
    assert "web (train)" in caught.value.where["source"]


def test_a_plan_works_over_a_store_that_has_moved(own_store, tmp_path, open_loader):
    loader = open_loader(own_store)
    expected = loader.get_batch().input_ids.copy()
    moved = tmp_path / "elsewhere" / "moved.store"
    shutil.copytree(own_store, moved)
    again = open_loader(moved, plan=loader.plan.fingerprint)
    assert (again.get_batch().input_ids == expected).all()
