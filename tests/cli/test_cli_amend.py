"""`batchwright amend`: a plan is changed from a position on, kept with its stores, and a run goes on with it."""

from __future__ import annotations

import json

import pytest

import batchwright as bw

WEIGHTS = {"web": 3, "code": 1}


@pytest.fixture
def loader(mixed_stores):
    """Over web.store and code.store, 8 rows of 16 tokens a step; its plan is kept with both."""
    sources = {name: mixed_stores / f"{name}.store" for name in WEIGHTS}
    weights = bw.Mixture(WEIGHTS, num_rows=600)
    return bw.MixedDataLoader(sources, weights, chunk_size=16, batch_size=8, framework="numpy")


@pytest.fixture
def stores(loader, mixed_stores):
    return mixed_stores


@pytest.fixture
def plan(loader):
    return loader.plan.fingerprint


def kept_in(stores):
    return sorted(str(path) for path in stores.glob("*/plans/*.json"))


def positions_and_tokens(batch):
    return list(zip(batch.metadata["position"].tolist(), batch.input_ids.tolist(), strict=True))


# What it makes


def test_an_amended_plan_of_conversations_says_which_loader_goes_on_with_it(chat_store, succeeds):
    given = {"max_length": 120, "batch_size": 4, "framework": "numpy", "delivery": bw.Delivery(check=False)}
    without_length = {name: value for name, value in given.items() if name != "max_length"}
    loader = bw.ConversationDataLoader(chat_store, **given)
    loader.get_batch()
    facts = succeeds(f"amend {chat_store} {loader.plan.fingerprint} --skip 4-5 --json").json
    (use, _) = facts["use"]
    assert use.startswith(f"loader = bw.ConversationDataLoader({str(chat_store)!r}, plan=")
    amended = bw.ConversationDataLoader(chat_store, plan=facts["fingerprint"], **without_length)
    amended.load_state_dict(loader.state_dict())
    assert amended.get_batch().metadata["position"].tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        ("--skip 82-83", {"skip": (82, 83)}),
        ("--at 80 --skip 82-83 --skip 90", {"at": 80, "skip": [(82, 83), 90]}),
        ("--step 10 --weights web=1,code=1", {"at": 80, "weights": {"web": 1, "code": 1}}),
        (
            "--at 80 --weights web=1 --weights 120:code=1",
            {"at": 80, "weights": [(80, {"web": 1}), (120, {"code": 1})]},
        ),
        (
            "--at 80 --ramp 100-200:code=1",
            {"at": 80, "weights": bw.ramp({"web": 3, "code": 1}, {"code": 1}, first=100, last=200)},
        ),
        ("--at 80 --max-epochs code=2 --num-rows 900", {"at": 80, "max_epochs": {"code": 2}, "num_rows": 900}),
        ("--at 80 --num-tokens 8k", {"at": 80, "num_tokens": 8000}),
        (
            "--at 80 --add math=math.store --weights web=2,math=1",
            {"at": 80, "add": {"math": "math.store"}, "weights": {"web": 2, "math": 1}},
        ),
    ],
    ids=["skip", "skips", "step", "weights", "ramp", "caps", "end", "add"],
)
def test_the_amended_plan_is_the_one_that_python_makes_and_is_kept_with_all_its_stores(
    flags, change, loader, stores, plan, succeeds, monkeypatch
):
    monkeypatch.chdir(stores)
    made = succeeds("amend", "code.store", plan[:6], *flags.split(), "--json").json
    amended = loader.plan.amend(**change)
    assert made["fingerprint"] == amended.fingerprint
    assert made["parent"] == plan
    names = [*WEIGHTS, *change.get("add", {})]
    for name in names:
        assert bw.Plan.load(stores / f"{name}.store" / "plans" / f"{amended.fingerprint}.json") == amended
    assert len(made["kept_in"]) == len(names)


def test_a_source_that_grew_is_taken_in(mixed_stores, succeeds):
    loader = bw.PretrainDataLoader(mixed_stores / "notes.store", chunk_size=16, framework="numpy")
    command = f"amend {mixed_stores / 'notes.store'} {loader.plan.fingerprint} --at 10"
    facts = succeeds(command, "--add", f"text={mixed_stores / 'more.store'}", "--json").json
    assert facts["fingerprint"] == loader.plan.amend(at=10, add={"text": mixed_stores / "more.store"}).fingerprint
    assert facts["epochs"] == 2
    first, second = (stretch["from_position"] for stretch in facts["stretches"])
    assert (first, second) == (0, loader.plan.epoch_rows)


def test_a_state_says_from_where_and_of_which_plan(loader, stores, plan, tmp_path, succeeds):
    for _ in range(10):
        loader.get_batch()
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    command = f"amend {stores / 'web.store'} --state {tmp_path / 'state.json'} --weights web=1,code=1"
    made = succeeds(command, "--json").json
    assert made["amendments"][0]["from_position"] == 80
    assert made["fingerprint"] == loader.plan.amend(at=80, weights={"web": 1, "code": 1}).fingerprint


def test_an_amendment_is_amended_again(stores, plan, succeeds):
    once = succeeds(f"amend {stores / 'web.store'} {plan} --skip 82-83 --json").json["fingerprint"]
    twice = succeeds(f"amend {stores / 'code.store'} {once} --at 200 --weights web=1 --json").json
    assert [(a["parent"], a["from_position"]) for a in twice["amendments"]] == [(plan, 82), (once, 200)]


def test_a_ramp_begins_with_the_weights_of_the_amendment_before(loader, stores, plan, succeeds):
    once = loader.plan.amend(at=80, weights={"web": 1, "code": 1})
    succeeds(f"amend {stores / 'web.store'} {plan} --at 80 --weights web=1,code=1")
    command = f"amend {stores / 'web.store'} {once.fingerprint} --at 200 --ramp 200-300:code=1"
    ramp = bw.ramp({"web": 1, "code": 1}, {"code": 1}, first=200, last=300)
    assert succeeds(command, "--json").json["fingerprint"] == once.amend(at=200, weights=ramp).fingerprint


def test_a_store_that_joined_is_found_from_any_other(stores, plan, succeeds):
    command = f"amend {stores / 'web.store'} {plan} --at 80 --weights math=1"
    made = succeeds(command, "--add", f"math={stores / 'math.store'}", "--json").json["fingerprint"]
    digests = [succeeds(f"digest {stores / f'{n}.store'} {made} --steps 0-20").out for n in (*WEIGHTS, "math")]
    assert len(set(digests)) == 1


# What a run does with it


def test_the_printed_lines_take_a_state_of_the_old_plan_on_into_the_new_one(loader, stores, plan, succeeds):
    batches = [loader.get_batch() for _ in range(10)]
    state = batches[4].metadata["state"]
    text = succeeds(f"amend {stores / 'web.store'} {plan} --skip 82-83").out
    assert "position 82 " in text
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  loader = bw.MixedDataLoader("))
    names = {"bw": bw, "state": json.loads(json.dumps(state))}
    exec("\n".join(line.strip() for line in lines[first : first + 2]), names)
    again = [names["loader"].get_batch() for _ in range(6)]
    for one, two in zip(batches[5:10], again[:5], strict=True):
        assert positions_and_tokens(one) == positions_and_tokens(two)
    assert [position for position, _ in positions_and_tokens(again[5])] == [80, 81, 84, 85, 86, 87, 88, 89]


def test_the_printed_lines_of_one_store_open_a_pretrain_loader(own_store, succeeds):
    loader = bw.PretrainDataLoader(own_store, chunk_size=16, framework="numpy")
    text = succeeds(f"amend {own_store} {loader.plan.fingerprint} --skip 8-15").out
    (line,) = (line.strip() for line in text.splitlines() if line.startswith("  loader = "))
    names = {"bw": bw}
    exec(line, names)
    assert isinstance(names["loader"], bw.PretrainDataLoader)
    assert names["loader"].plan.skips == ((8, 15),)


def test_the_answer_ends_with_what_plan_says(stores, plan, succeeds):
    text = succeeds(f"amend {stores / 'web.store'} {plan} --step 10 --skip 82-83").out
    made = text.split()[1]
    assert text.startswith(f"plan {made} amends {plan} from position 80: skip 82-83\n")
    assert f"  kept in {stores / 'code.store' / 'plans' / made}.json\n" in text
    assert text.endswith("\n\n" + succeeds(f"plan {stores / 'web.store'} {made}").out)


# What it refuses


@pytest.mark.parametrize(
    ("flags", "said", "remedy"),
    [
        ("PLAN --weights web=1", "at", "--at P, --step S, --state FILE"),
        ("--at 80 --weights web=1", "PLAN", "--state"),
        ("PLAN --at 80", "weights", "weights=, add=, skip="),
        ("PLAN --at -1 --weights web=1", "-1", "at=1"),
        ("PLAN --step -1 --weights web=1", "step -1", ""),
        ("PLAN --at 80 --step 10 --weights web=1", "--step", "amend --help"),
        ("PLAN --at 80 --weights wbe=1", "'wbe'", "'web'"),
        ("PLAN --at 80 --weights web=-1", "'web=-1'", "--help"),
        ("PLAN --at 80 --weights web=0", "weights", "'web', 'code'"),
        ("PLAN --at 80 --weights 40:web=1", "position 40", "80"),
        ("PLAN --at 80 --skip 70", "position 70", "skip"),
        ("PLAN --skip 9-4", "skip=(9, 4)", "skip=(4, 9)"),
        ("PLAN --skip x", "'x'", "--help"),
        ("PLAN --at 80 --add math.store --weights web=1", "math.store", "--add NAME=math.store"),
        ("PLAN --at 80 --add a=math.store --add a=code.store", "a=code.store", "--add NAME=code.store"),
        ("PLAN --at 80 --add math=math.store", "'math'", "weights="),
        ("PLAN --at 80 --add web=math.store --weights web=1", "source 'web'", "math.store"),
        ("PLAN --at 590 --max-epochs code=1", "source 'code'", "max_epochs={'code': 2}"),
        ("PLAN --at 80 --num-rows 60", "row 60", "num_rows=81"),
        ("PLAN --state other.json --weights web=1", "other.json", "deadbeefdeadbeef"),
        ("PLAN --state no.json --weights web=1", "no plan at", ""),
        ("PLAN --state plan.json --weights web=1", "plan.json", "state_dict()"),
        ("AMENDED --at 90 --weights web=1", "position 90", "amend()"),
        ("AMENDED --at 40 --weights web=1", "position 40", "at=91"),
    ],
)
def test_an_amendment_that_cannot_be_is_refused_and_nothing_is_kept(
    flags, said, remedy, loader, stores, plan, refuses, monkeypatch
):
    monkeypatch.chdir(stores)
    if "AMENDED" in flags:
        amended = loader.amend(at=90, skip=95).fingerprint
        flags = flags.replace("AMENDED", amended)
    (stores / "other.json").write_text(json.dumps({"position": 8, "plan": "deadbeefdeadbeef", "steps": [[0, 0, 8]]}))
    loader.plan.save(stores / "plan.json")
    before = kept_in(stores)
    message = refuses("amend", "web.store", *flags.replace("PLAN", plan).split())
    assert said in message
    assert remedy in message
    assert kept_in(stores) == before


def test_a_step_needs_to_know_how_batches_are_cut(mixed_stores, tmp_path, succeeds, refuses):
    sources = {name: mixed_stores / f"{name}.store" for name in WEIGHTS}
    for batch_size in (8, 4):
        made = bw.MixedDataLoader(sources, WEIGHTS, chunk_size=16, batch_size=batch_size, framework="numpy").plan
    command = f"amend {mixed_stores / 'web.store'} {made.fingerprint} --step 10 --weights web=1"
    assert "batch_size=" in refuses(command)
    facts = succeeds(command, "--batch-size", "4", "--json").json
    assert facts["amendments"][0]["from_position"] == 40
