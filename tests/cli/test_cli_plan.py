"""`penstock plan`: what a run will read, before it costs anything."""

from __future__ import annotations

import json

import numpy as np
import pytest

import penstock as ps
from penstock.cli.summary import summarize
from penstock.loaders.pretrain import make_plan


def test_settings_give_steps_tokens_shares_and_epochs(store, succeeds):
    command = ["plan", store, "--chunk-size", "16", "--batch-size", "8", "--weights", "web=.75,code=.25"]
    facts = succeeds(*command, "--num-tokens", "12.8e3", "--json").json
    assert (facts["epoch_rows"], facts["steps"], facts["tokens"]) == (800, 100, 12800)
    web, code = facts["sources"]
    assert (web["asked_share"], web["effective_share"]) == (0.75, 0.75)
    assert (web["rows_read"], code["rows_read"]) == (600, 200)
    assert web["epochs"] == 600 / web["num_rows"]


def test_the_plan_is_the_one_a_loader_runs(own_store, succeeds):
    loader = ps.PretrainDataLoader(
        own_store, chunk_size=16, batch_size=8, seed=3, weights={"web": 0.5, "code": 0.5}, stop="all_exhausted"
    )
    command = ["plan", own_store, "--chunk-size", "16", "--batch-size", "8", "--seed", "3", "--weights"]
    facts = succeeds(*command, "web=.5,code=.5", "--stop", "all_exhausted", "--json").json
    assert facts["fingerprint"] == loader.plan.fingerprint
    assert facts["steps"] == loader.get_num_batches()


def test_a_pool_shuffle_is_the_one_a_loader_runs_and_says_its_windows(own_store, succeeds):
    loader = ps.PretrainDataLoader(own_store, chunk_size=16, shuffle="pool", pool_rows=50)
    command = ["plan", own_store, "--chunk-size", "16", "--shuffle", "pool", "--pool-rows", "50"]
    assert succeeds(*command, "--json").json["fingerprint"] == loader.plan.fingerprint
    assert "shuffle pool (windows of 64 rows)" in succeeds(*command).out


def test_sources_that_are_read_over_four_times_are_marked(store, succeeds):
    command = ["plan", store, "--chunk-size", "16", "--weights", "web=.1,notes=.9", "--num-tokens", "10k"]
    web, notes = (line for line in succeeds(*command).out.splitlines() if line.startswith(("web", "notes")))
    assert notes.endswith("over 4 epochs")
    assert not web.endswith("over 4 epochs")


def test_an_endless_mixture_says_what_would_end_it_and_when_each_source_was_read_once(store, succeeds):
    text = succeeds("plan", store, "--chunk-size", "16", "--weights", "web=.7,code=.3").out
    assert "no end: --num-tokens, --num-rows or --stop gives it one" in text
    assert "once by step" in text


def test_no_settings_list_the_plans_kept(store, plan, succeeds):
    assert plan in succeeds("plan", store).out
    (kept,) = succeeds("plan", store, "--json").json["plans"]
    assert (kept["fingerprint"], kept["runs"]) == (plan, [[[0, 0, 12]]])


def test_a_store_without_plans_says_so(own_store, succeeds):
    assert "no plans are kept" in succeeds("plan", own_store).out


def test_a_plan_kept_is_described(store, plan, succeeds):
    facts = succeeds("plan", store, plan[:4], "--json").json
    assert facts["fingerprint"] == plan
    assert facts["batch_rows"] == 12
    assert facts["steps"] == facts["epoch_rows"] // 12


def test_asking_writes_nothing_but_what_save_names(store, plan, tmp_path, succeeds):
    command = ["plan", store, "--chunk-size", "24", "--batch-size", "4", "--json"]
    made = succeeds(*command, "--save", tmp_path / "mine.json").json["fingerprint"]
    assert [file.stem for file in (store / "plans").iterdir()] == [plan]
    assert ps.Plan.load(tmp_path / "mine.json").fingerprint == made
    assert succeeds("plan", store, tmp_path / "mine.json", "--json").json["batch_rows"] == 4


def test_a_plan_that_no_loader_could_run_is_not_saved(store, tmp_path, refuses):
    refuses("plan", store, "--chunk-size", "16", "--batch-size", "1e6", "--save", tmp_path / "mine.json")
    assert not (tmp_path / "mine.json").exists()


def test_save_does_not_overwrite_another_plan(store, tmp_path, succeeds, refuses):
    command = ["plan", store, "--save", tmp_path / "mine.json", "--chunk-size"]
    succeeds(*command, "24")
    assert "holds another plan" in refuses(*command, "25")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--chunk-size", "x"], "'x' is not a whole number"),
        (["--chunk-size", "0"], "chunk_size must be at least 1"),
        (["--chunk-size", "16", "--batch-size", "0"], "batch_size must be at least 1"),
        (["--chunk-size", "16", "--batch-size", "1e6"], "is more than an epoch"),
        (["--chunk-size", "16", "--weights", "web=.7,cod=.3"], "'code'"),
        (["--chunk-size", "16", "--weights", "web=.7,code"], "'code' is not NAME=WEIGHT"),
        (["--chunk-size", "16", "--weights", "web=0"], "weight"),
        (["--chunk-size", "16", "--num-tokens", "1e9"], "weights="),
        (["--chunk-size", "16", "--epochs", "0"], "epochs must be at least 1"),
        (["--seed", "1"], "--chunk-size 2048"),
        (["--save", "x.json"], "--save which plan?"),
        (["dead"], "no plan dead is kept"),
        (["no.json"], "neither a plan's fingerprint nor a file"),
        (["/"], "is a folder, not a plan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_no_loader_could_run_is_refused(arguments, said, store, refuses, tmp_path):
    assert said in refuses("plan", store, *arguments, cwd=tmp_path)


def test_an_altered_plan_file_is_refused(store, plan, tmp_path, refuses):
    body = json.loads((store / "plans" / f"{plan}.json").read_text())
    body["plan"]["seed"] += 1
    (tmp_path / "altered.json").write_text(json.dumps(body))
    assert "was changed after it was written" in refuses("plan", store, tmp_path / "altered.json")


@pytest.mark.parametrize("epoch_end", ["drop", "pad", "wrap"])
@pytest.mark.parametrize("weights", [None, {"web": 0.6, "code": 0.4}])
@pytest.mark.parametrize("epochs", [1, 3])
def test_the_summary_counts_what_a_run_really_reads(small_store, epoch_end, weights, epochs):
    store = ps.open_store(small_store)
    ends = {} if weights is None else {"num_rows": 333}
    plan = make_plan(store, 16, seed=1, epoch_end=epoch_end, weights=weights, **ends)
    summary = summarize(plan.cut_as([[0, 0, 32]]), epochs=epochs)
    loader = ps.PretrainDataLoader(store, plan=plan, batch_size=32, epochs=epochs, framework="numpy")
    steps, read = 0, dict.fromkeys(plan.order.names, 0)
    for _ in range(epochs):
        for batch in loader.get_iterator():
            steps += 1
            for name, weight in zip(batch.metadata["source"], batch.metadata["weight"], strict=True):
                read[name] += int(weight)
        if epoch_end == "wrap" and loader.position + 32 > loader.plan.epoch_rows * epochs:
            break
    assert summary.steps == steps
    assert {source.name: source.rows_read for source in summary.sources} == read


def test_the_step_by_which_a_source_was_read_once_is_the_one_that_reads_its_last_row(small_store):
    plan = make_plan(ps.open_store(small_store), 16, weights={"web": 0.6, "code": 0.4})
    summary, order = summarize(plan.cut_as([[0, 0, 8]])), plan.order
    for number, source in enumerate(summary.sources):
        step = source.first_epoch_ends_at_step
        before, after = order.counts(8 * step)[number], order.counts(8 * (step + 1))[number]
        assert before < source.num_rows <= after
    assert np.isclose(sum(source.effective_share for source in summary.sources), 1)
