"""`batchwright plan`: what a run will read, before it costs anything."""

from __future__ import annotations

import json

import numpy as np
import pytest

import batchwright as bw
from batchwright.batches.settings import Asked
from batchwright.cli.plan_summary import summarize
from batchwright.loaders.pretrain import make_plan


def test_settings_give_steps_tokens_shares_and_epochs(store, succeeds):
    command = f"plan {store} --chunk-size 16 --batch-size 8 --weights web=.75,code=.25"
    facts = succeeds(command, "--num-tokens", "12.8e3", "--json").json
    assert (facts["epoch_rows"], facts["steps"], facts["tokens"]) == (800, 100, 12800)
    web, code = facts["sources"]
    assert (web["asked_share"], web["effective_share"]) == (0.75, 0.75)
    assert (web["rows_read"], code["rows_read"]) == (600, 200)
    assert web["epochs"] == 600 / web["num_rows"]


def test_the_plan_is_the_one_a_loader_runs(own_store, succeeds):
    weights = bw.Mixture({"web": 0.5, "code": 0.5}, stop="all_exhausted")
    loader = bw.PretrainDataLoader(own_store, chunk_size=16, batch_size=8, seed=3, weights=weights)
    command = f"plan {own_store} --chunk-size 16 --batch-size 8 --seed 3 --weights"
    facts = succeeds(command, "web=.5,code=.5", "--stop", "all_exhausted", "--json").json
    assert facts["fingerprint"] == loader.plan.fingerprint
    assert facts["steps"] == loader.get_num_batches()


def test_a_pool_shuffle_is_the_one_a_loader_runs_and_says_its_windows(own_store, succeeds):
    loader = bw.PretrainDataLoader(own_store, chunk_size=16, shuffle=bw.Shuffle("pool", pool_rows=50))
    command = f"plan {own_store} --chunk-size 16 --shuffle pool --pool-rows 50"
    assert succeeds(command, "--json").json["fingerprint"] == loader.plan.fingerprint
    assert "shuffle pool (windows of 64 rows)" in succeeds(command).out


def test_sources_that_are_read_over_four_times_are_marked(store, succeeds):
    command = f"plan {store} --chunk-size 16 --weights web=.1,notes=.9 --num-tokens 10k"
    web, notes = (line for line in succeeds(command).out.splitlines() if line.startswith(("web", "notes")))
    assert notes.endswith("over 4 epochs")
    assert not web.endswith("over 4 epochs")


def test_an_endless_mixture_says_what_would_end_it_and_when_each_source_was_read_once(store, succeeds):
    text = succeeds(f"plan {store} --chunk-size 16 --weights web=.7,code=.3").out
    assert "--num-tokens, --num-rows or --stop" in text
    assert "once by step" in text


def test_no_settings_list_the_plans_kept(store, plan, succeeds):
    assert plan in succeeds(f"plan {store}").out
    (kept,) = succeeds(f"plan {store} --json").json["plans"]
    assert (kept["fingerprint"], kept["runs"]) == (plan, [[[0, 0, 12]]])


def test_a_store_without_plans_says_so(own_store, succeeds):
    assert "no plans" in succeeds(f"plan {own_store}").out


def test_a_plan_kept_is_described(store, plan, succeeds):
    facts = succeeds(f"plan {store} {plan[:4]} --json").json
    assert facts["fingerprint"] == plan
    assert facts["batch_rows"] == 12
    assert facts["steps"] == facts["epoch_rows"] // 12


def test_asking_writes_nothing_but_what_save_names(store, plan, tmp_path, succeeds):
    command = f"plan {store} --chunk-size 24 --batch-size 4 --json"
    made = succeeds(command, "--save", tmp_path / "mine.json").json["fingerprint"]
    assert [file.stem for file in (store / "plans").iterdir()] == [plan]
    assert bw.Plan.load(tmp_path / "mine.json").fingerprint == made
    assert succeeds(f"plan {store} {tmp_path / 'mine.json'} --json").json["batch_rows"] == 4


def test_a_plan_that_no_loader_could_run_is_not_saved(store, tmp_path, refuses):
    refuses(f"plan {store} --chunk-size 16 --batch-size 1e6 --save {tmp_path / 'mine.json'}")
    assert not (tmp_path / "mine.json").exists()


def test_save_does_not_overwrite_another_plan(store, tmp_path, succeeds, refuses):
    command = f"plan {store} --save {tmp_path / 'mine.json'} --chunk-size"
    succeeds(command, "24")
    assert "mine.json" in refuses(command, "25")


# Rows of whole documents


def flags(settings):
    return [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_length": 120},
        {"max_length": 256, "packing": "best_fit", "loss": "user+assistant", "seed": 3},
        {"max_length": 100, "truncation": "keep_start", "pad": 7},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_a_plan_of_conversations_is_the_one_a_loader_runs(chat_store, settings, succeeds):
    given = {"delivery": bw.Delivery(check=False), "framework": "numpy"} | settings
    if "pad" in given:
        given["batch_size"] = bw.Batching(pad=given.pop("pad"))
    loader = bw.ConversationDataLoader(chat_store, **given)
    facts = succeeds("plan", chat_store, *flags(settings), "--json").json
    assert facts["fingerprint"] == loader.plan.fingerprint
    assert facts["steps"] == loader.get_num_batches()
    batches = list(loader)
    real = sum(int(batch.attention_mask.sum()) for batch in batches)
    assert abs(facts["tokens"] - real) < 120 * 8  # by the mean row: a last, partial batch is dropped


def test_a_packed_plan_of_text_is_the_one_a_loader_runs(own_store, succeeds):
    loader = bw.PretrainDataLoader(own_store, chunk_size=64, packing="greedy", framework="numpy")
    facts = succeeds(f"plan {own_store} --chunk-size 64 --packing greedy --json").json
    assert facts["fingerprint"] == loader.plan.fingerprint


def test_a_plan_of_conversations_says_what_is_left_out_how_full_rows_are_and_what_is_learned(chat_store, succeeds):
    text = succeeds(f"plan {chat_store} --max-length 120").out
    assert "rows    120 tokens at most" in text
    assert "talk: 39 rows, a document each, 101.0 tokens on average, loss on assistant (18.8 % of the tokens)" in text
    assert "left out: 9 of 48 documents (18.8 %): over 120 tokens" in text
    facts = succeeds(f"plan {chat_store} --max-length 240 --packing best_fit --json").json
    (talk,) = facts["sources"]
    assert talk["documents"]["num_documents"] == 48
    assert talk["documents"]["left_out"] == {}
    assert talk["fill"] == talk["num_tokens"] / (240 * talk["num_rows"]) > 0.8
    assert talk["mean_row_tokens"] == talk["num_tokens"] / talk["num_rows"]
    assert facts["padding_tokens"] == 240 * talk["rows_read"] - facts["tokens"]


def test_documents_that_are_cut_are_counted(chat_store, succeeds):
    text = succeeds(f"plan {chat_store} --max-length 100 --truncation keep_end").out
    assert "cut (keep_end): 29 of 48 documents (60.4 %): over 100 tokens" in text


def test_a_plan_that_is_kept_says_the_same_of_its_documents(chat_store, succeeds):
    delivery = bw.Delivery(check=False)
    plan = bw.ConversationDataLoader(chat_store, max_length=120, seed=9, framework="numpy", delivery=delivery).plan
    settings = succeeds(f"plan {chat_store} --max-length 120 --seed 9").out
    assert succeeds(f"plan {chat_store} {plan.fingerprint}").out == settings
    assert succeeds(f"info {chat_store} {plan.fingerprint}").out == settings


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--chunk-size", "64"], "--max-length 2048"),
        (["--seed", "1"], "--max-length 2048"),
        (["--max-length", "1"], "max_length=2"),
        (["--max-length", "20"], "48 over length"),
        (["--max-length", "120", "--loss", "asistant"], "'assistant'"),
        (["--max-length", "120", "--packing", "best"], "'best_fit'"),
        (["--max-length", "120", "--packing", "web=best_fit"], "'web'"),
        (["--max-length", "120", "--pad", "9999"], "9999"),
        (["--max-length", "120", "--no-recut"], "--no-recut"),
        (["--max-length", "100", "--truncation", "raise"], "max_length=100"),
        (["--max-length", "100", "--truncation", "drop_oldest"], "keep_newest"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_no_loader_of_conversations_could_run_is_refused(arguments, said, chat_store, refuses):
    assert said in refuses("plan", chat_store, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-length", "64"], "--max-length"),
        (["--chunk-size", "16", "--loss", "last"], "--loss"),
        (["--chunk-size", "16", "--pad", "0"], "packing="),
        (["--chunk-size", "16", "--packing", "best_fit", "--pad", "x"], "pad='x'"),
        (["--chunk-size", "x"], "'x'"),
        (["--chunk-size", "0"], "chunk_size=1"),
        (["--chunk-size", "16", "--batch-size", "0"], "batch_size=1"),
        (["--chunk-size", "16", "--batch-size", "1e6"], "batch_size=1000000"),
        (["--chunk-size", "16", "--weights", "web=.7,cod=.3"], "'code'"),
        (["--chunk-size", "16", "--weights", "web=.7,code"], "NAME=VALUE"),
        (["--chunk-size", "16", "--weights", "web=0"], "weight"),
        (["--chunk-size", "16", "--num-tokens", "1e9"], "weights="),
        (["--chunk-size", "16", "--epochs", "0"], "--epochs: '0'"),
        (["--seed", "1"], "--chunk-size 2048"),
        (["--save", "x.json"], "--save"),
        (["dead"], "plan dead"),
        (["no.json"], "no plan at"),
        (["/"], "Is a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_no_loader_could_run_is_refused(arguments, said, store, refuses, tmp_path):
    assert said in refuses("plan", store, *arguments, cwd=tmp_path)


def test_an_altered_plan_file_is_refused(store, plan, tmp_path, refuses):
    body = json.loads((store / "plans" / f"{plan}.json").read_text())
    body["plan"]["seed"] += 1
    (tmp_path / "altered.json").write_text(json.dumps(body))
    assert "altered.json" in refuses(f"plan {store} {tmp_path / 'altered.json'}")


@pytest.mark.parametrize("epoch_end", ["drop", "short", "pad", "wrap"])
@pytest.mark.parametrize("weights", [None, bw.Mixture({"web": 0.6, "code": 0.4}, num_rows=333)], ids=["no", "some"])
@pytest.mark.parametrize("epochs", [1, 3])
def test_the_summary_counts_what_a_run_really_reads(small_store, epoch_end, weights, epochs):
    store = bw.open_store(small_store)
    asked = Asked(chunk_size=16, seed=1, weights=weights, batch_size=bw.Batching(epoch_end=epoch_end))
    plan = make_plan(store, asked)
    summary = summarize(plan.cut_as([[0, 0, 32]]), epochs=epochs)
    loader = bw.PretrainDataLoader(store, plan=plan, batch_size=32, epochs=epochs, framework="numpy")
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
    assert summary.dropped_rows == summary.rows - sum(read.values())
    assert (summary.dropped_rows > 0) is (epoch_end in ("drop", "wrap"))


def test_the_step_by_which_a_source_was_read_once_is_the_one_that_reads_its_last_row(small_store):
    plan = make_plan(bw.open_store(small_store), Asked(chunk_size=16, weights={"web": 0.6, "code": 0.4}))
    summary, order = summarize(plan.cut_as([[0, 0, 8]])), plan.order
    for number, source in enumerate(summary.sources):
        step = source.first_epoch_ends_at_step
        before, after = order.counts(8 * step)[number], order.counts(8 * (step + 1))[number]
        assert before < source.num_rows <= after
    assert np.isclose(sum(source.effective_share for source in summary.sources), 1)
