"""Mixtures on the command line: `batchwright plan` says what a run does, and every verb can read them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

import batchwright as bw
from batchwright.cli.plan_summary import summarize
from batchwright.cli.plan_words import render
from batchwright.cli.values import ramp_to, schedule_of, weights_from

NAMED = ("web", "code")


@pytest.fixture
def mixed(mixed_stores):
    """mixed(weights, seed=...): a loader over web.store and code.store, 8 rows of 16 tokens a step."""

    def opened(weights=None, **settings):
        sources = {name: mixed_stores / f"{name}.store" for name in NAMED}
        given = {"chunk_size": 16, "batch_size": 8, "framework": "numpy"} | settings
        return bw.MixedDataLoader(sources, weights, **given)

    return opened


@pytest.fixture
def kept(mixed_stores, mixed):
    """(folder of the stores, plan of a mixture that is kept there and skips positions 42 and 43)."""
    loader = mixed(bw.Mixture({"web": 3, "code": 1}, num_rows=400))
    loader.amend(at=40, skip=(42, 43))
    return mixed_stores, loader.plan


# What a loader would run


@pytest.mark.parametrize(
    ("flags", "weights", "settings"),
    [
        ("--weights web=.7,code=.3", {"web": 0.7, "code": 0.3}, {}),
        (
            "--weights web=.7,code=.3 --max-epochs code=4 --num-tokens 10e3 --by tokens --temperature 3 "
            "--exhausted renormalise",
            bw.Mixture(
                {"web": 0.7, "code": 0.3},
                max_epochs={"code": 4},
                num_tokens=10_000,
                by="tokens",
                temperature=3.0,
                exhausted="renormalise",
            ),
            {},
        ),
        (
            "--weights web=1 --weights 100:web=.5,code=.5 --num-rows 300",
            bw.Mixture([(0, {"web": 1.0}), (100, {"web": 0.5, "code": 0.5})], num_rows=300),
            {},
        ),
        (
            "--ramp 100-200:web=1,code=1 --weights web=1 --num-rows 300",
            bw.Mixture(
                [(0, {"web": 1.0}), *bw.ramp({"web": 1.0}, {"web": 1.0, "code": 1.0}, first=100, last=200)],
                num_rows=300,
            ),
            {},
        ),
        ("--temperature 2", bw.Mixture(temperature=2.0), {}),
        ("--seed 5 --shuffle none", None, {"seed": 5, "shuffle": "none"}),
    ],
    ids=["weights", "caps", "steps", "ramp", "sizes", "natural"],
)
def test_named_stores_give_the_plan_of_a_mixed_loader(flags, weights, settings, mixed_stores, mixed, succeeds):
    command = ["plan", "web=web.store", "code=code.store", "--chunk-size", "16", *flags.split(), "--json"]
    made = succeeds(*command, cwd=mixed_stores).json
    assert not (mixed_stores / "web.store" / "plans").exists()
    assert made["fingerprint"] == mixed(weights, **settings).plan.fingerprint


def test_settings_of_a_mixture_over_one_store_give_the_plan_of_a_pretrain_loader(own_store, succeeds):
    weights = bw.Mixture({"web": 0.7, "code": 0.3}, max_epochs={"code": 2})
    loader = bw.PretrainDataLoader(own_store, chunk_size=16, weights=weights)
    command = f"plan {own_store} --chunk-size 16 --weights web=.7,code=.3 --max-epochs code=2"
    assert succeeds(command, "--json").json["fingerprint"] == loader.plan.fingerprint


def test_lanes_are_those_of_a_loader(own_store, succeeds):
    loader = bw.PretrainDataLoader(own_store, chunk_size=16, shuffle=bw.Shuffle("pool", pool_rows=16, lanes=4))
    command = f"plan {own_store} --chunk-size 16 --shuffle pool --pool-rows 16 --lanes 4"
    facts = succeeds(command, "--json").json
    assert facts["fingerprint"] == loader.plan.fingerprint
    assert facts["steps"] == loader.get_num_batches()
    assert "(windows of 16 rows in 4 lanes)" in succeeds(command).out


def test_a_saved_plan_of_a_mixture_knows_its_stores(mixed_stores, tmp_path, succeeds):
    command = f"plan web=web.store code=code.store --chunk-size 16 --save {tmp_path / 'plan.json'}"
    succeeds(command, cwd=mixed_stores)
    one = succeeds(f"digest {mixed_stores / 'web.store'} {tmp_path / 'plan.json'} --steps 0-9").out
    assert one == succeeds(f"digest {mixed_stores / 'code.store'} {tmp_path / 'plan.json'} --steps 0-9").out


@pytest.mark.parametrize("path", ["web=code.store", "./web=code.store"])
def test_a_store_whose_name_has_an_equals_sign_is_a_path(path, own_store, tmp_path, succeeds):
    own_store.rename(tmp_path / "web=code.store")
    facts = succeeds(f"plan {path} --chunk-size 16 --json", cwd=tmp_path).json
    assert {source["name"] for source in facts["sources"]} == {"web", "code", "notes"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["web=web.store", "code.store", "--chunk-size", "16"], "code.store has no name"),
        (["code.store", "web=web.store", "--chunk-size", "16"], "code.store has no name"),
        (["web.store", "code.store", "math.store"], "web.store has no name"),
        (["web.store", "code.store", "--chunk-size", "16"], "web.store has no name"),
        (["web=web.store", "web=code.store", "--chunk-size", "16"], "'web'"),
        (["web=web.store", "code=code.store"], "--chunk-size 2048"),
        (["web=no.store", "--chunk-size", "16"], "no.store"),
        (["web=web.store", "--chunk-size", "16", "--weights", "10:web=1"], "(0, {...})"),
        (["web=web.store", "--chunk-size", "16", "--weights", "web=1", "--weights", "web=2"], "position 0"),
        (["web=web.store", "--chunk-size", "16", "--weights", "x:web=1"], "'x'"),
        (["web=web.store", "--chunk-size", "16", "--ramp", "0-100:web=1"], "--weights 0:NAME=W"),
        (["web=web.store", "--chunk-size", "16", "--ramp", "100:web=1"], "'100:web=1'"),
        (["web=web.store", "--chunk-size", "16", "--weights", "web=1", "--ramp", "0-9:web=2"], "last=64"),
        (
            [
                *("web=web.store", "--chunk-size", "16", "--weights", "web=1"),
                "--weights=50:web=2",
                "--ramp=0-100:web=2",
            ],
            "100",
        ),
        (["web=web.store", "--chunk-size", "16", "--max-epochs", "web"], "NAME=VALUE"),
        (["web=web.store", "--chunk-size", "16", "--max-epochs", "web=1,web=2"], "'web'"),
        (["web=web.store", "--chunk-size", "16", "--max-epochs", "web=2"], "max_epochs"),
        (["web=web.store", "--chunk-size", "16", "--weights", "wbe=1"], "'web'"),
        (["web=web.store", "--chunk-size", "16", "--temperature", "0"], "temperature"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_mixtures_that_cannot_be_are_refused(arguments, said, mixed_stores, refuses):
    assert said in refuses("plan", *arguments, cwd=mixed_stores)


def test_a_ramp_begins_with_the_weights_that_hold_before_it():
    given = [weights_from("web=1"), weights_from("50:web=1,code=1")]
    steps = schedule_of(given, [ramp_to("50-690:code=1")])
    assert steps[:2] == [(0, {"web": 1.0}), (50, {"web": 1.0, "code": 1.0})]
    assert steps[-1] == (680, {"web": 0.0, "code": 1.0})
    assert len(steps) == 65


def test_a_source_whose_name_looks_like_a_position_can_be_weighted():
    assert weights_from("0:10:web=1").weights == {"10:web": 1.0}


# The numbers, against a run that is walked through


def plan_capped(mixed, stores):
    return mixed(bw.Mixture({"web": 0.5, "code": 0.5}, max_epochs={"code": 2}, num_rows=800)).plan


def plan_that_stops(mixed, stores):
    return mixed(bw.Mixture({"web": 0.5, "code": 0.5}, exhausted="stop")).plan


def plan_renormalised(mixed, stores):
    return mixed(bw.Mixture({"web": 0.5, "code": 0.5}, exhausted="renormalise", max_epochs={"code": 3})).plan


def plan_by_ramp(mixed, stores):
    steps = [(0, {"web": 1}), *bw.ramp({"web": 1}, {"code": 1}, first=100, last=300)]
    return mixed(bw.Mixture(steps, num_rows=500)).plan


def plan_skipped(mixed, stores):
    plan = mixed(bw.Mixture({"web": 3, "code": 1}, num_rows=500)).plan
    return plan.amend(skip=[(42, 43), (100, 130), (499, 499)]).amend(at=200, skip=250)


def plan_amended(mixed, stores):
    plan = mixed(bw.Mixture({"web": 3, "code": 1}, num_rows=500)).plan
    plan = plan.amend(at=101, add={"math": stores / "math.store"}, weights={"web": 1, "math": 1, "code": 1})
    return plan.amend(at=300, max_epochs={"math": 2}, num_rows=900, skip=(310, 320))


def plan_grown(mixed, stores):
    plan = bw.MixedDataLoader({"notes": stores / "notes.store"}, chunk_size=16, batch_size=8).plan
    return plan.amend(at=10, add={"notes": stores / "more.store"}, skip=(4 * plan.epoch_rows, 4 * plan.epoch_rows + 3))


def plan_grown_in_a_mixture(mixed, stores):
    sources = {"notes": stores / "notes.store", "web": stores / "web.store"}
    weights = bw.Mixture({"web": 1, "notes": 1}, num_rows=600)
    plan = bw.MixedDataLoader(sources, weights, chunk_size=16, batch_size=8).plan
    return plan.amend(at=70, add={"notes": stores / "more.store"}, max_epochs={"notes": 3})


def plan_joined(mixed, stores):
    return mixed().plan.amend(at=30, add={"math": stores / "math.store"}, skip=(35, 50))


def plan_padded(mixed, stores):
    short = bw.PretrainDataLoader(stores / "code.store", chunk_size=8, framework="numpy")
    long = bw.PretrainDataLoader(stores / "web.store", chunk_size=16, framework="numpy")
    weights, batching = bw.Mixture({"web": 1, "code": 1}, by="tokens", num_rows=300), bw.Batching(8, pad=0)
    return bw.MixedDataLoader({"web": long, "code": short}, weights, batch_size=batching, framework="numpy").plan


def plan_weighted_later(mixed, stores):
    return mixed().plan.amend(at=130, weights={"web": 1, "code": 1}, num_rows=700)


def plan_that_wraps(mixed, stores):
    return mixed(batch_size=bw.Batching(8, epoch_end="wrap")).plan.amend(
        at=30, add={"math": stores / "math.store"}, skip=(35, 51)
    )


def plan_that_pads(mixed, stores):
    weights, batching = bw.Mixture({"web": 1, "code": 1}, num_rows=303), bw.Batching(8, epoch_end="pad")
    return mixed(weights, batch_size=batching).plan.amend(skip=(35, 50))


PLANS = [
    plan_capped,
    plan_that_stops,
    plan_renormalised,
    plan_by_ramp,
    plan_skipped,
    plan_amended,
    plan_grown,
    plan_grown_in_a_mixture,
    plan_joined,
    plan_padded,
    plan_weighted_later,
    plan_that_wraps,
    plan_that_pads,
]


def walk(stores, plan, *, epochs, batch_size=8):
    """(positions of each step, real rows only) of a run of a plan, from its first row to its end."""
    settings = {"batch_size": batch_size, "framework": "numpy", "epochs": epochs}
    loader = bw.MixedDataLoader([*stores.glob("*.store")], plan=plan, **settings)
    steps = []
    while True:
        try:
            batch = loader.get_batch()
        except bw.EndOfRun:
            return steps
        is_real = np.asarray(batch.metadata["weight"]) > 0
        steps.append(np.asarray(batch.metadata["position"])[is_real].tolist())


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("make", PLANS)
def test_the_summary_of_a_plan_counts_what_a_run_of_it_reads(make, epochs, mixed, mixed_stores):
    plan = make(mixed, mixed_stores).cut_as([[0, 0, 8]])
    summary = summarize(plan, epochs=epochs)
    steps = walk(mixed_stores, plan, epochs=epochs)
    positions = np.array([position for step in steps for position in step])
    draw = plan.order.at(positions)
    rows = Counter(plan.order.names[source] for source in draw.source.tolist())
    assert summary.steps == len(steps)
    assert {source.name: source.rows_read for source in summary.sources if source.rows_read} == rows
    real = {source.name: source.row_tokens or plan.row_tokens for source in plan.all_sources}
    assert summary.tokens == sum(rows[name] * real[name] for name in rows)
    assert summary.tokens + summary.padding_tokens == len(positions) * plan.row_tokens
    read = dict.fromkeys(rows, 0.0)  # a row is one part of the epoch that it is in, which may have grown
    for source, epoch in zip(draw.source.tolist(), draw.epoch.tolist(), strict=True):
        read[plan.order.names[source]] += 1 / plan.order.epoch_size(source, epoch)[1]
    assert {s.name: s.epochs for s in summary.sources if s.epochs} == pytest.approx(read)
    assert {s.name for s in summary.sources if s.is_read_often} == {name for name in read if read[name] > 4}


@pytest.mark.parametrize(
    ("make", "caps"),
    [
        (plan_capped, {"code": 2}),
        (plan_that_stops, {"web": 1, "code": 1}),
        (plan_renormalised, {"web": 1, "code": 3}),
        (plan_amended, {"math": 2}),
        (plan_grown_in_a_mixture, {"notes": 3}),
        (plan_skipped, {}),
        (plan_joined, {}),
    ],
)
def test_a_cap_binds_after_the_last_row_that_its_source_gives(make, caps, mixed, mixed_stores):
    plan = make(mixed, mixed_stores).cut_as([[0, 0, 8]])
    assert {cap.source: cap.epochs for cap in summarize(plan, epochs=1).caps} == caps
    end = plan.epoch_spec["epochs"].end_of(1)
    source = plan.order.at(np.arange(plan.order.skips.position(end))).source
    for cap in summarize(plan, epochs=1).caps:
        number = plan.order.names.index(cap.source)
        last = int(np.flatnonzero(source == number)[-1])
        given = plan.order.counts(len(source))[number]
        allowed = plan.order.epoch_size(number, cap.epochs)[0]
        if cap.position is None:
            assert given < allowed
        else:
            assert (last + 1, given) == (cap.position, allowed)
            live = plan.order.skips.live(cap.position)
            assert cap.step == live // 8
            assert cap.ends_the_stream == (cap.position == len(source))


@pytest.mark.parametrize("make", PLANS)
def test_effective_shares_are_what_lies_in_each_stretch(make, mixed, mixed_stores):
    plan = make(mixed, mixed_stores).cut_as([[0, 0, 8]])
    summary = summarize(plan, epochs=3)
    source = plan.order.at(np.arange(summary.rows + summary.skipped_rows)).source
    starts = [*(stretch.from_position for stretch in summary.stretches), len(source)]
    for stretch, (start, stop) in zip(summary.stretches, pairwise(starts), strict=True):
        for number, name in enumerate(plan.order.names):
            there = int((source[start:stop] == number).sum())
            assert abs(there - stretch.effective.get(name, 0) * (stop - start)) < 1
            assert stretch.from_step == plan.order.skips.live(start) // 8 or plan.weights is None
    for mean in summary.sources:
        of_all = int((source == plan.order.names.index(mean.name)).sum()) / len(source)
        assert mean.effective_share == pytest.approx(of_all, abs=len(starts) / len(source))
    for what in ("asked_share", "effective_share", "effective_token_share"):
        assert sum(getattr(s, what) for s in summary.sources) == pytest.approx(1)


def test_skipped_rows_are_counted_apart(mixed, mixed_stores):
    summary = summarize(plan_skipped(mixed, mixed_stores))
    assert (summary.rows, summary.skipped_rows) == (500 - 35, 2 + 31 + 1 + 1)


def test_a_run_that_changed_its_batch_size_is_counted_as_it_was_cut(mixed, mixed_stores):
    loader = mixed(bw.Mixture({"web": 3, "code": 1}, num_rows=403))
    steps = [loader.get_batch() for _ in range(10)]
    while True:
        try:
            steps.append(loader.get_batch(batch_size=12))
        except bw.EndOfRun:
            break
    summary = summarize(loader.plan)
    assert summary.steps == len(steps)
    assert sum(source.rows_read for source in summary.sources) == sum(len(step.input_ids) for step in steps)
    assert "12 rows, 192 tokens a step, 8 before step 10" in render(loader.plan, summary)


def test_shares_asked_in_tokens_are_shown_in_rows_and_tokens(mixed, mixed_stores):
    plan = plan_padded(mixed, mixed_stores)
    web, code = summarize(plan).sources
    assert (web.asked_share, code.asked_share) == (0.5, 0.5)
    assert web.effective_share == pytest.approx(1 / 3, abs=1e-3)  # its rows are twice as long
    assert web.effective_token_share == pytest.approx(1 / 2, abs=1e-3)
    text = render(plan, summarize(plan))
    assert "asked (tokens)  effective (rows)  effective (tokens)" in text
    assert " of padding" in text


# In words


def test_a_ramp_is_shown_by_its_first_and_last_mixes(mixed, mixed_stores, succeeds):
    plan = plan_by_ramp(mixed, mixed_stores)
    text = succeeds(f"plan {mixed_stores / 'web.store'} {plan.fingerprint}").out
    lines = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert [line[1] for line in lines] == ["0", "100", "103", "106", "287", "290", "293", "296"]
    assert lines[0][2:5] == ["web", "100.00", "%"]
    assert lines[-1][2:5] == ["code", "100.00", "%"]
    assert "and 57 more in between" in text
    facts = succeeds(f"plan {mixed_stores / 'web.store'} {plan.fingerprint} --json").json
    assert len(facts["stretches"]) == 65


def test_caps_are_told_with_the_step_at_which_they_bind(mixed_stores, succeeds):
    command = ["plan", "web=web.store", "code=code.store", "--chunk-size", "16", "--weights", "web=.5,code=.5"]
    command += ["--num-rows", "800", "--max-epochs"]
    facts = succeeds(*command, "code=2,web=9", "--json", cwd=mixed_stores).json
    web, code = facts["caps"]
    assert (web["source"], web["position"], web["step"]) == ("web", None, None)
    text = succeeds(*command, "code=2,web=9", cwd=mixed_stores).out
    reached = f"reached at step {code['step']} (position {code['position']}): the others share"
    assert f"code: at most 2 epochs, {reached}" in text
    assert "web: at most 9 epochs, not reached" in text


def test_the_history_of_a_plan_is_told(mixed, mixed_stores, succeeds):
    loader = mixed(bw.Mixture({"web": 3, "code": 1}, num_rows=500))
    first = loader.plan.fingerprint
    second = loader.amend(at=80, skip=(82, 83)).fingerprint
    third = loader.amend(at=162, weights={"web": 1, "code": 1}).fingerprint
    text = succeeds(f"plan {mixed_stores / 'code.store'} {third}").out
    history = text.partition("history\n")[2].splitlines()
    assert history[:3] == [
        f"  {first}  the original",
        f"  {second}  amends {first[:8]} from step 10 (position 80): skip 82-83",
        f"  {third}  amends {second[:8]} from step 20 (position 162): weights web=1, code=1",
    ]
    told = succeeds(f"plan {mixed_stores / 'code.store'} {third} --json").json["amendments"]
    assert [(a["parent"], a["fingerprint"], a["from_step"]) for a in told] == [
        (first, second, 10),
        (second, third, 20),
    ]
    listed = succeeds(f"plan {mixed_stores / 'code.store'}").out.splitlines()
    assert next(line for line in listed if line.startswith(third)).split()[5] == second


def test_an_amended_plan_without_weights_is_shown_up_to_what_changes(mixed, mixed_stores):
    plan = mixed().plan
    grown = plan.amend(at=plan.epoch_rows + 5, add={"math": mixed_stores / "math.store"})
    assert summarize(grown).epochs == 3
    assert summarize(grown).sources[-1].epochs == pytest.approx(1, abs=0.2)


# Other verbs, given any one store of the mixture


@pytest.mark.parametrize("given", NAMED)
def test_trace_finds_all_stores_of_a_mixture_and_marks_what_is_skipped(given, kept, succeeds):
    stores, plan = kept
    command = f"trace {stores / f'{given}.store'} {plan.fingerprint}"
    step = succeeds(command, "--step", "5", "--json").json["records"]
    assert {record["source"] for record in step} == {"web", "code"}
    assert {record["position"] for record in step} == {40, 41, 44, 45, 46, 47, 48, 49}
    assert succeeds(command, "--position", "42").out.startswith("skipped (position 42): ")
    (record, *_) = succeeds(command, "--position", "42", "--json").json["records"]
    assert record["is_skipped"]
    uses = succeeds(command, "--file", record["file"], "--row", record["row"]).out
    assert "\nskipped (position 42): " in uses


@pytest.mark.parametrize("given", NAMED)
def test_look_shows_rows_of_all_stores_and_where_some_are_skipped(given, kept, succeeds):
    stores, plan = kept
    command = f"look {stores / f'{given}.store'} {plan.fingerprint} --step 5"
    lines = succeeds(command).out.splitlines()
    assert lines[0] == "skipped: positions 42-43"
    assert any(line.startswith("row 2: ") and "position 44," in line for line in lines)
    facts = succeeds(command, "--json").json
    assert facts["skipped"] == [[42, 43]]
    assert {row["source"] for row in facts["rows"]} == {"web", "code"}


def test_a_mixture_of_text_and_conversations_is_the_one_a_loader_runs(mixed_stores, chat_store, succeeds):
    from batchwright.audit.digesting import combine, sample_hashes

    web, code = mixed_stores / "web.store", mixed_stores / "code.store"
    delivery = bw.Delivery(check=False)
    talk = bw.ConversationDataLoader(
        chat_store, max_length=240, packing="best_fit", framework="numpy", delivery=delivery
    )
    packed = bw.PretrainDataLoader(code, chunk_size=64, packing="greedy", framework="numpy")
    weights = bw.Mixture({"web": 0.5, "code": 0.2, "talk": 0.3}, by="tokens", num_rows=90)
    loader = bw.MixedDataLoader({"web": web, "code": packed, "talk": talk}, weights, chunk_size=64, framework="numpy")
    stores = [f"web={web}", f"code={code}", f"talk={chat_store}", "--chunk-size", "64", "--max-length", "240"]
    packing = ["--packing", "talk=best_fit", "--packing", "code=greedy"]
    mixture = ["--by", "tokens", "--weights", "web=.5,code=.2,talk=.3", "--num-rows", "90"]
    facts = succeeds("plan", *stores, *packing, *mixture, "--json").json
    assert facts["fingerprint"] == loader.plan.fingerprint
    assert [source["fill"] is None for source in facts["sources"]] == [True, False, False]
    seen = combine([sample_hashes(loader.get_batch()) for _ in range(10)])
    assert succeeds(f"digest {chat_store} {loader.plan.fingerprint} --steps 0-9").out.split()[0] == seen


def test_digest_of_a_mixture_is_that_of_the_run_whichever_store_is_given(kept, mixed, succeeds):
    from batchwright.audit.digesting import combine, row_hashes

    stores, plan = kept
    loader = bw.MixedDataLoader([stores / "web.store", stores / "code.store"], plan=plan, framework="numpy")
    seen = combine([row_hashes(loader.get_batch().input_ids) for _ in range(20)])
    for given in NAMED:
        command = f"digest {stores / f'{given}.store'} {plan.fingerprint} --steps 0-19"
        assert succeeds(command).out.split()[0] == seen


def test_digest_and_drill_refuse_steps_after_the_end_of_a_capped_stream(mixed, mixed_stores, refuses):
    plan = plan_that_stops(mixed, mixed_stores)
    last = summarize(plan.cut_as([[0, 0, 8]])).steps
    said = f"step {last} "
    assert said in refuses(f"digest {mixed_stores / 'web.store'} {plan.fingerprint} --steps 0-{last}")
    steps = ["--steps", last + 1, "--ranks", "1", "--workers", "0", "--json"]
    assert said in refuses("drill", plan.fingerprint, "--store", mixed_stores / "code.store", *steps)


def test_drill_of_an_amended_mixture_passes(kept, succeeds):
    stores, plan = kept
    command = f"drill {plan.fingerprint} --store {stores / 'code.store'} --steps 12 --ranks 1,2"
    facts = succeeds(command, "--workers", "0", "--json").json
    assert facts["ok"]
    digest = succeeds(f"digest {stores / 'web.store'} {plan.fingerprint} --steps 0-11").out
    assert facts["digest"] == digest.split()[0]


def test_a_mixture_whose_stores_moved_is_found_again_after_a_loader_opened_them(kept, tmp_path, succeeds, refuses):
    stores, plan = kept
    moved = tmp_path / "moved"
    shutil.move(stores, moved)
    command = f"digest {moved / 'web.store'} {plan.fingerprint} --steps 0-9"
    assert "code (train)" in refuses(command)
    bw.MixedDataLoader([moved / "web.store", moved / "code.store"], plan=plan.fingerprint, framework="numpy")
    assert json.loads((moved / "web.store" / "plans" / f"{plan.fingerprint}.json").read_text())["places"]
    succeeds(command)
