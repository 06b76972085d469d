"""Where mixtures and amendments meet the rest: padded rows, torch, moved ends, grown sources, odd numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import batchwright as bw
from refusals import refused


def baked(path: Path, count: int, word: str, tokenizer: str = "bytes", shuffle: bool = True) -> Path:
    texts = [f"{word} number {n}, which says {n * 7919 % 10007}. " for n in range(count)]
    recipe = bw.DatasetRecipe(seed=1).add_ingredient(texts, name="text").prepare_step(bw.tokenize(tokenizer))
    bw.bake(recipe, to=path, workers=0, show_progress=False, shuffle=shuffle)
    return path


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("edges")
    return {name: baked(folder / f"{name}.store", n, name) for name, n in (("web", 220), ("code", 60))}


@pytest.fixture
def mixed(stores):
    def opened(weights=None, **given):
        return bw.MixedDataLoader(stores, weights, **{"chunk_size": 16, "batch_size": 8, "framework": "numpy"} | given)

    return opened


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_what_fills_a_row_up_is_not_learned_by_models_that_shift_themselves(stores, framework):
    sources = {
        "web": bw.PretrainDataLoader(stores["web"], chunk_size=16, framework="numpy"),
        "code": bw.PretrainDataLoader(stores["code"], chunk_size=8, framework="numpy"),
    }
    loader = bw.MixedDataLoader(sources, {"code": 1}, batch_size=bw.Batching(pad=7), framework=framework)
    batch = loader.get_batch()
    labels = np.asarray(batch.labels)
    assert (labels[:, 9:] == -100).all()  # at 8 stands what the row's last token predicts
    assert (labels[:, 1:8] == np.asarray(batch.input_ids)[:, 1:8]).all()


def test_a_rare_source_gets_its_rows_under_weights_that_change_with_every_step(mixed):
    loader = mixed(bw.Mixture({"web": 0.97, "code": 0.03}, num_rows=800))
    rare = 0
    for step in range(100):
        rare += loader.get_batch().metadata["source"].count("code")
        if step < 99:
            loader.amend(weights={"web": 0.97 - step * 1e-5, "code": 0.03})
    assert abs(rare - 24) <= 2


def test_a_rare_source_gets_its_rows_on_a_ramp(mixed):
    weights = bw.ramp({"web": 0.96, "code": 0.04}, {"web": 0.97, "code": 0.04}, first=0, last=640)
    loader = mixed(bw.Mixture(weights, num_rows=640))
    assert abs(loader.plan.order.given(640)[1] - 25.6) <= 2


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_an_iteration_in_torch_goes_on_with_the_amended_plan(mixed, framework, num_workers):
    loader = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=80), framework=framework)
    batches = iter(loader.torch().loader(num_workers=num_workers))
    handed = [next(batches)]
    loader.amend(skip=(8, 15))
    handed += list(batches)
    assert [int(batch.metadata["position"][0]) for batch in handed] == [0, *range(16, 80, 8)]
    assert handed[1].metadata["state"]["plan"] == loader.plan.fingerprint
    assert loader.position == 80


@pytest.mark.parametrize(("epoch_end", "step"), [("drop", 12), ("pad", 13)])
def test_steps_are_counted_on_where_the_end_was_moved(mixed, stores, epoch_end, step):
    loader = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=100), batch_size=bw.Batching(8, epoch_end=epoch_end))
    old = list(loader)
    state = loader.state_dict()
    loader.amend(num_rows=200)
    batch = loader.get_batch()
    assert len(old) == step
    assert loader.step == step + 1
    traced = {record.position for record in bw.trace(stores["web"], loader.plan, step=step)}
    assert traced == set(batch.metadata["position"].tolist())
    resumed = mixed(None, plan=loader.plan, chunk_size=None, batch_size=8)
    resumed.load_state_dict(state)
    assert resumed.step == step
    assert resumed.get_batch().metadata["position"].tolist() == batch.metadata["position"].tolist()


def test_a_last_epoch_that_is_shorter_than_a_batch_ends_the_run(mixed):
    loader = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=100), batch_size=40, epochs=4)
    for _ in range(2):
        loader.get_batch()
    loader.amend(at=104, num_rows=130)
    assert loader.step == 2
    with pytest.raises(bw.EndOfRun):
        loader.get_batch()


def test_growth_by_less_than_a_row_leaves_old_rows_alone(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()

    def bake_with(name, text):
        (folder / name).write_text(json.dumps({"text": text}) + "\n")
        recipe = bw.DatasetRecipe(seed=0).add_ingredient(folder / "*.jsonl", name="text")
        path = tmp_path / f"{name}.store"
        bw.bake(recipe.prepare_step(bw.tokenize("bytes")), to=path, workers=0, show_progress=False, shuffle=False)
        return path

    small = bake_with("a.jsonl", "the quick brown fox jumps over the lazy dog " * 12 + "again.")
    large = bake_with("b.jsonl", "x")
    plain = bw.PretrainDataLoader(small, chunk_size=16, batch_size=1, epochs=3, framework="numpy")
    rows = plain.plan.epoch_rows
    expected = [plain.get_batch().input_ids.tolist() for _ in range(2 * rows)]
    loader = bw.PretrainDataLoader(small, chunk_size=16, batch_size=1, epochs=3, framework="numpy")
    loader.amend(at=2 * rows, add={"text": large})
    assert [source.num_rows for source in loader.plan.all_sources] == [rows], "a token more, and no row more"
    assert [loader.get_batch().input_ids.tolist() for _ in range(2 * rows)] == expected


def test_a_padded_source_grows_and_new_short_ones_may_join(stores, tmp_path):
    small = baked(tmp_path / "small.store", 30, "code", shuffle=False)
    large = baked(tmp_path / "large.store", 50, "code", shuffle=False)
    sources = {
        "web": bw.PretrainDataLoader(stores["web"], chunk_size=16, framework="numpy"),
        "code": bw.PretrainDataLoader(small, chunk_size=8, framework="numpy"),
    }
    loader = bw.MixedDataLoader(
        sources, bw.Mixture({"web": 1, "code": 1}, num_rows=800), batch_size=bw.Batching(pad=0), framework="numpy"
    )
    first = loader.get_batch().input_ids.tolist()
    loader.amend(add={"code": large})
    short = bw.PretrainDataLoader(stores["code"], chunk_size=4, framework="numpy")
    loader.get_batch()
    loader.amend(add={"more": short}, weights={"web": 1, "code": 1, "more": 1})
    assert [s.row_tokens for s in loader.plan.all_sources] == [None, 8, 4]
    loader.reset()
    assert loader.get_batch().input_ids.tolist() == first


def test_a_plan_amended_with_another_tokenizer_is_refused(mixed, stores, tmp_path):
    chars = baked(tmp_path / "chars.store", 60, "chars", tokenizer="chars")
    plan = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=80)).plan
    change = {"at": 8, "add": {"chars": chars}, "weights": {"web": 1, "chars": 1}}
    with refused(bw.SpecError, "chars.store", parameter="sources", source="chars"):
        plan.amend(**change)
    unknown = replace(plan, places=()).amend(**change)  # where its stores are is not known, so it cannot be compared
    with refused(bw.SpecError, "chars.store", parameter="sources", source="chars"):
        mixed(None, plan=replace(unknown, places=(("chars", str(chars)),)), chunk_size=None)


def test_a_plan_opens_with_the_batch_size_of_its_run(mixed):
    plan = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=80), batch_size=5).plan
    assert mixed(None, plan=plan, chunk_size=None, batch_size=None).batch_size == 5


def test_num_tokens_of_padded_rows_counts_tokens_through_all_weights(stores):
    sources = {
        "web": bw.PretrainDataLoader(stores["web"], chunk_size=16, framework="numpy"),
        "code": bw.PretrainDataLoader(stores["code"], chunk_size=8, framework="numpy"),
    }
    weights = [(0, {"web": 1}), (100, {"code": 1})]
    loader = bw.MixedDataLoader(
        sources, bw.Mixture(weights, num_tokens=2400), batch_size=bw.Batching(1, pad=0), framework="numpy"
    )
    assert sum(int(batch.attention_mask.sum()) for batch in loader) == 2400


def test_settings_that_a_plan_fixes_are_not_ignored_beside_it(mixed):
    plan = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=80), seed=3).plan
    for name, given in (
        ("seed", {"seed": 4}),
        ("seed", {"seed": 0}),
        ("recut", {"shuffle": bw.Shuffle(recut=False)}),
        ("by", {"weights": bw.Mixture(by="tokens")}),
        ("exhausted", {"weights": bw.Mixture(exhausted="stop")}),
        ("split", {"split": "val"}),
    ):
        with refused(bw.SpecError, parameter=name):
            mixed(plan=plan, **({"chunk_size": None, "batch_size": None} | given))
    assert mixed(None, plan=plan, chunk_size=16, seed=3).plan == plan


@pytest.mark.parametrize("weight", [np.float32(2.0), np.int64(2), 2, 2.0, 1e308])
def test_any_real_number_is_a_weight(mixed, weight):
    plan = mixed(bw.Mixture({"web": weight, "code": weight}, num_rows=80)).plan
    assert plan.order.given(80) == [40, 40]
    assert bw.Plan.from_spec(json.loads(json.dumps(plan.spec()))) == plan


@pytest.mark.parametrize("weight", [10**400, True, "1", None, np.nan])
def test_what_is_no_real_number_is_no_weight(mixed, weight):
    with refused(bw.SpecError, parameter="weights", source="web"):
        mixed({"web": weight, "code": 1})


@pytest.mark.parametrize(
    "damage", [{"runs": [[1, 2]]}, {"runs": None}, {"places": [1]}, {"plan": None}, {"plan": {"seed": 1}}]
)
def test_a_plan_file_that_was_edited_is_refused(mixed, stores, damage):
    plan = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=80)).plan
    path = stores["web"] / "plans" / f"{plan.fingerprint}.json"
    whole = path.read_text()
    path.write_text(json.dumps(json.loads(whole) | damage))
    try:
        with pytest.raises(bw.PlanError) as caught:
            bw.Plan.load(path)
        assert str(path) in str(caught.value.where["file"])
    finally:
        path.write_text(whole)


def test_kept_workers_go_on_after_a_skip_where_batches_wrap(mixed):
    from torch.utils.data import DataLoader

    loader = mixed(None, batch_size=bw.Batching(8, epoch_end="wrap"), epochs=3)
    loader.amend(skip=(20, 50))
    kept = DataLoader(loader.torch(), batch_size=None, num_workers=1, persistent_workers=True)
    passes = [[int(batch.metadata["position"][0]) for batch in kept] for _ in range(2)]
    expected = [[int(batch.metadata["position"][0]) for batch in loader] for _ in range(2)]
    assert passes == expected


def test_many_capped_sources_open_at_once(stores):
    """Sixty sources that leave one after another: no pattern is drawn further than its leg."""
    sources = {f"s{n}": stores["code"] for n in range(60)}
    loader = bw.MixedDataLoader(
        sources,
        bw.Mixture({f"s{n}": n + 1.0 for n in range(60)}, exhausted="renormalise"),
        chunk_size=16,
        framework="numpy",
    )
    assert max(leg.mix.num_slots for leg in loader.plan.order.legs) < 200_000
    assert loader.plan.order.epochs.limit == sum(source.num_rows for source in loader.plan.sources)
    assert len(loader.plan.order.bindings) == 60


def test_names_of_entries_with_several_sources_stand_for_them_also_in_amendments(stores, small_store):
    loader = bw.MixedDataLoader(
        {"small": small_store, "code": stores["code"]}, {"small": 1, "code": 1}, chunk_size=16, framework="numpy"
    )
    loader.amend(weights={"small": 3, "code": 1}, max_epochs={"small": 2})
    inner = {name: weight for name, weight in loader.plan.weights.items() if name.startswith("small/")}
    assert sum(inner.values()) == pytest.approx(3)
    assert loader.plan.caps == dict.fromkeys(inner, 2)


def test_one_number_caps_every_source(mixed):
    assert mixed(bw.Mixture({"web": 1, "code": 1}, max_epochs=2)).plan.caps == {"web": 2, "code": 2}


def test_a_cap_that_is_not_reached_is_said_to_be_so(mixed):
    text = repr(mixed(bw.Mixture({"web": 1, "code": 1}, max_epochs={"code": 9}, num_rows=80)).plan)
    assert "code would have given 9 epochs by position" in text
    assert "which is not reached" in text


def test_an_amendment_says_from_where_its_weights_hold(mixed):
    plan = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=800)).plan.amend(at=100, weights=[(500, {"web": 1})])
    assert str(plan.amendments[-1]) == "from position 100: from position 500 on weights web=1"


def test_a_source_cannot_join_a_run_that_has_no_next_epoch(mixed, stores):
    loader = mixed(None)
    with refused(bw.SpecError, parameter="add"):
        loader.amend(add={"more": stores["code"]})


@pytest.mark.parametrize(
    ("skip", "skipped"),
    [((5, 8), [5, 6, 7, 8]), ([5, 8], [5, 8]), (range(5, 8), [5, 6, 7]), (np.array([[5, 6], [8, 9]]), [5, 6, 8, 9])],
)
def test_what_can_be_skipped(mixed, skip, skipped):
    plan = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=80)).plan.amend(at=0, skip=skip)
    assert [p for p in range(80) if p in plan.order.skips] == skipped


def test_without_a_position_a_plan_is_amended_from_the_first_skipped_one(mixed):
    plan = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=80)).plan.amend(skip=[8, 5])
    assert plan.amendments[-1].at == 5


def test_more_ranks_than_lanes_share_them(stores):
    settings = {"shuffle": bw.Shuffle("pool", pool_rows=32, lanes=2), "batch_size": 16, "chunk_size": 16}
    plan = bw.MixedDataLoader(stores, {"web": 1, "code": 1}, framework="numpy", **settings).plan
    lanes = [[view.lane for view in plan.order.views(rank, 8)] for rank in range(8)]
    assert lanes == [[0]] * 4 + [[1]] * 4
    assert [[view.lane for view in plan.order.views(rank, 3)] for rank in range(3)] == [[0], [0, 1], [1]]
