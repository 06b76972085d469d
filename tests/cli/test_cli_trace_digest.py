"""`batchwright trace` and `batchwright digest`: from steps to documents, and to one number."""

from __future__ import annotations

from dataclasses import asdict

import pytest

import batchwright as bw
from batchwright.audit.digesting import combine, row_hashes
from batchwright.cli.output import lines_in_words

# trace


def test_trace_of_a_step_is_what_trace_returns(store, plan, succeeds):
    shown = succeeds(f"trace {store} {plan} --step 7 --json").json["records"]
    for mine, theirs in zip(shown, bw.trace(store, plan, step=7), strict=True):
        assert mine == {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(theirs).items()}


def test_trace_in_text_names_step_file_row_lines_and_text(store, plan, succeeds):
    text = succeeds(f"trace {store} {plan} --step 7").out
    for record in bw.trace(store, plan, step=7):
        assert f"step 7, rank 0, row {record.row_in_batch} (position {record.position}): {record.source}" in text
        assert f"  {record.file}, row {record.row}{lines_in_words(record.lines)}, tokens" in text
        assert repr(record.text) in text


def test_trace_of_a_position_is_one_row(store, plan, succeeds):
    shown = succeeds(f"trace {store} {plan} --position 100 --json").json["records"]
    assert {record["position"] for record in shown} == {100}
    assert shown[0]["window_span"][0] == 0
    assert shown[-1]["window_span"][1] == 17


def test_trace_says_ranks_for_a_world_size(store, plan, succeeds):
    shown = succeeds(f"trace {store} {plan} --step 0 --world-size 4 --json").json["records"]
    assert {(record["row_in_batch"], record["rank"]) for record in shown} == {(row, row // 3) for row in range(12)}
    strided = ("--world-size", "4", "--sharding", "strided")
    shown = succeeds("trace", store, plan, "--step", "0", *strided, "--json").json["records"]
    assert {(record["row_in_batch"], record["rank"]) for record in shown} == {(row, row % 4) for row in range(12)}


def test_trace_of_a_file_is_what_find_returns(store, plan, succeeds):
    used = succeeds(f"trace {store} {plan} --file a.jsonl --row 3 --json").json["records"]
    found = bw.find(store, plan, file="a.jsonl", row=3)
    assert [(record["position"], record["step"]) for record in used] == [(r.position, r.step) for r in found]
    assert {record["row"] for record in used} == {3}
    text = succeeds(f"trace {store} {plan} --file a.jsonl --row 3").out
    assert text.startswith(f"{len(found)} use")


def test_trace_of_a_file_looks_as_far_as_it_is_told(store, plan, succeeds):
    rows = bw.Plan.load(store / "plans" / f"{plan}.json").epoch_rows
    once, twice = (
        succeeds(f"trace {store} {plan} --file 3.txt --until {until} --json").json["records"]
        for until in (rows, 2 * rows)
    )
    assert {record["epoch"] for record in once} == {0}
    assert {record["epoch"] for record in twice} == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "-1"], "step -1"),
        (["--step", "x"], "'x'"),
        (["--position", "-4"], "position -4"),
        (["--file", "c.jsonl"], "c.jsonl"),
        (["--step", "1", "--row", "2"], "--row"),
        (["--step", "1", "--world-size", "0"], "--world-size: '0'"),
        ([], "--step --position --file"),
        (["--step", "1", "--position", "2"], "--position"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_trace_refuses_what_does_not_exist(arguments, said, store, plan, refuses):
    assert said in refuses("trace", store, plan, *arguments)


def test_a_plan_that_runs_cut_differently_asks_for_the_batch_size(own_store, refuses, succeeds):
    for rows in (4, 8):
        loader = bw.PretrainDataLoader(own_store, chunk_size=16, batch_size=rows, framework="numpy")
    text = refuses(f"trace {own_store} {loader.plan.fingerprint} --step 1")
    assert "4, 8 rows" in text
    shown = succeeds(f"trace {own_store} {loader.plan.fingerprint} --step 1 --batch-size 8 --json").json
    assert shown["records"][0]["position"] == 8


# digest


def test_digest_is_the_number_of_what_a_loader_hands_over(store, plan, own_store, succeeds):
    loader = bw.PretrainDataLoader(own_store, plan=store / "plans" / f"{plan}.json", framework="numpy")
    loader.seek(step=5)
    hashes = [row_hashes(loader.get_batch().input_ids) for _ in range(5, 9)]
    done = succeeds(f"digest {store} {plan} --steps 5-8 --json").json
    assert done["digest"] == combine(hashes)
    assert (done["num_rows"], done["num_tokens"]) == (48, 48 * 16)


def test_digest_of_each_step_comes_before_that_of_all(store, plan, succeeds):
    lines = succeeds(f"digest {store} {plan} --steps 5-7 --each").out.splitlines()
    (alone,) = succeeds(f"digest {store} {plan} --steps 6").out.splitlines()
    (together,) = succeeds(f"digest {store} {plan} --steps 5-7").out.splitlines()
    assert [line.split()[2] for line in lines[:3]] == ["5", "6", "7"]
    assert lines[1].split()[0] == alone.split()[0]
    assert lines[3] == together
    each = succeeds(f"digest {store} {plan} --steps 5-7 --each --json").json["each"]
    assert [part["digest"] for part in each] == [line.split()[0] for line in lines[:3]]


@pytest.mark.parametrize(
    ("steps", "said"),
    [("9-3", "9-3"), ("x", "'x'"), ("-1", "--steps")],
)
def test_digest_refuses_steps_that_do_not_exist(steps, said, store, plan, refuses):
    assert said in refuses(f"digest {store} {plan} --steps {steps}")
