"""MixedDataLoader: what the rows are, whose they are, how often; and what changes when the plan is amended."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from refusals import refused
from shared import bake_source

WEB, CODE, MATH = 300, 60, 40


def documents(word, count):
    """Texts that say whose they are, and no two windows of which are alike."""
    return [f"{word} {number} {sha256(str((word, number)).encode()).hexdigest()}" for number in range(count)]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Three stores, each of one source; in the store it is called "text"."""
    folder = tmp_path_factory.mktemp("mixed")
    sizes = {"web": WEB, "code": CODE, "math": MATH}
    return {name: bake_source(folder / f"{name}.store", documents(name, count)).path for name, count in sizes.items()}


@pytest.fixture
def mixed(stores):
    def opened(weights=None, names=("web", "code"), **given):
        chosen = {name: stores[name] for name in names}
        return bw.MixedDataLoader(
            chosen, weights, **{"chunk_size": 16, "batch_size": 8, "framework": "numpy", "seed": 5} | given
        )

    return opened


def rows_with_sources(loader, steps=None):
    """(position, source, tokens) of every row that comes."""
    found = []
    for number, batch in enumerate(loader):
        columns = batch.metadata["position"].tolist(), batch.metadata["source"], batch.input_ids.tolist()
        found += [(p, s, tuple(t)) for p, s, t in zip(*columns, strict=True)]
        if steps is not None and number + 1 == steps:
            break
    return found


# What a mixture is


def test_every_prefix_has_the_shares_that_were_asked_for(mixed):
    rows = rows_with_sources(mixed(bw.Mixture({"web": 3, "code": 1}, num_rows=1200)))
    for length in (40, 400, 1200):
        assert abs(sum(source == "code" for _, source, _ in rows[:length]) - length / 4) < 1


def test_rows_are_those_of_the_store_under_the_name_that_the_mixture_gives(mixed):
    for _, source, tokens in rows_with_sources(mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=200))):
        text = bytes(t for t in tokens if t < 256).decode(errors="replace")
        other = "code" if source == "web" else "web"
        assert other not in text


def test_without_weights_an_epoch_is_every_row_of_every_source_once(mixed, stores):
    loader = mixed(batch_size=bw.Batching(5, epoch_end="pad"))
    counts = Counter(source for _, source, _ in set(rows_with_sources(loader)))
    assert counts == {n: (bw.open_store(stores[n]).stream("text").num_tokens - 1) // 16 for n in ("web", "code")}


def test_a_loaders_seed_cursor_and_batch_size_are_not_used(stores):
    def made(seed, batches):
        source = bw.PretrainDataLoader(stores["web"], chunk_size=16, seed=seed, batch_size=3, framework="numpy")
        for _ in range(batches):
            source.get_batch()
        mixture = bw.MixedDataLoader({"web": source, "code": stores["code"]}, {"web": 1, "code": 1}, chunk_size=16)
        return mixture.plan

    assert made(0, 0) == made(9, 4)


def test_a_mixture_inside_is_flattened_and_shares_its_weight(stores):
    inner = bw.MixedDataLoader({n: stores[n] for n in ("code", "math")}, {"code": 3, "math": 1}, chunk_size=16)
    outer = bw.MixedDataLoader({"web": stores["web"], "rest": inner}, bw.Mixture({"web": 1, "rest": 1}, num_rows=800))
    assert [source.name for source in outer.plan.sources] == ["web", "rest/code", "rest/math"]
    assert outer.plan.order.given(800) == [400, 300, 100]


def test_a_store_with_several_sources_is_flattened_too(small_store, stores):
    loader = bw.MixedDataLoader({"small": small_store, "math": stores["math"]}, {"small": 1, "math": 1}, chunk_size=16)
    assert [s.name for s in loader.plan.sources] == ["small/web", "small/code", "small/notes", "math"]


def test_one_store_alone_keeps_the_names_of_its_sources(small_store):
    loader = bw.MixedDataLoader(small_store, bw.Mixture({"web": 1, "code": 1}, max_epochs={"code": 2}), chunk_size=16)
    assert [source.name for source in loader.plan.sources] == ["web", "code", "notes"]
    assert loader.plan.order.counts(40) == [20, 20, 0]


def test_the_same_rows_come_whatever_the_weights_are_written_as(mixed):
    one = mixed(bw.Mixture({"web": 0.75, "code": 0.25}, num_rows=80)).plan
    assert one.order.at(np.arange(80)).source.tolist() == (
        mixed(bw.Mixture({"code": 1, "web": 3}, num_rows=80)).plan.order.at(np.arange(80)).source.tolist()
    )


def test_a_temperature_brings_shares_nearer_to_each_other(mixed):
    plain = mixed({"web": 0.9, "code": 0.1}).plan.order.shares
    warm = mixed(bw.Mixture({"web": 0.9, "code": 0.1}, temperature=2)).plan.order.shares
    assert warm[1] == pytest.approx(0.25, abs=0.001)
    assert plain[1] == pytest.approx(0.1, abs=0.001)
    sizes = mixed(bw.Mixture(temperature=1)).plan.order.shares
    assert sizes[0] > 0.8


def test_weights_by_tokens_are_shares_of_tokens_where_rows_are_padded(stores):
    sources = {
        "web": bw.PretrainDataLoader(stores["web"], chunk_size=32),
        "code": bw.PretrainDataLoader(stores["code"], chunk_size=16),
    }
    loader = bw.MixedDataLoader(
        sources,
        bw.Mixture({"web": 1, "code": 1}, by="tokens", num_tokens=6400),
        batch_size=bw.Batching(4, pad=0),
        framework="numpy",
    )
    tokens = defaultdict(int)
    for batch in loader:
        real = batch.attention_mask.sum(axis=1)
        assert (real == batch.loss_mask.sum(axis=1)).all()
        assert ((batch.targets == -100) == (batch.attention_mask == 0)).all()
        assert (batch.input_ids[batch.attention_mask == 0] == 0).all()
        for source, count in zip(batch.metadata["source"], real.tolist(), strict=True):
            tokens[source] += count
    assert tokens["web"] == pytest.approx(tokens["code"], abs=64)
    assert sum(tokens.values()) == pytest.approx(6400, abs=8 * 32)
    assert loader.stats()["tokens_per_source"] == dict(tokens)


def test_padded_rows_are_those_of_the_short_source(stores):
    short = bw.PretrainDataLoader(stores["code"], chunk_size=16, shuffle=False, framework="numpy")
    sources = {"web": bw.PretrainDataLoader(stores["web"], chunk_size=32), "code": short}
    loader = bw.MixedDataLoader(
        sources,
        {"code": 1, "web": 1},
        batch_size=bw.Batching(pad=7),
        shuffle=bw.Shuffle(False, recut=False),
        framework="numpy",
    )
    batch = loader.get_batch(8)
    mine = [row for row, source in enumerate(batch.metadata["source"]) if source == "code"]
    expected = short.get_batch(len(mine))
    assert (batch.input_ids[mine, :16] == expected.input_ids).all()
    assert (batch.targets[mine, :16] == expected.targets).all()
    assert (batch.input_ids[mine, 16:] == 7).all()


# Ends and caps


def test_a_capped_source_is_read_as_often_as_it_may_and_the_plan_says_where_that_ends(mixed):
    loader = mixed(bw.Mixture({"web": 1, "code": 1}, max_epochs={"code": 2}, num_rows=1600))
    (binding,) = loader.plan.order.bindings
    rows = rows_with_sources(loader)
    last = max(position for position, source, _ in rows if source == "code")
    assert last + 1 == binding.position
    assert f"step {binding.position // 8:,} (position {binding.position:,})" in repr(loader)


def test_the_stream_ends_where_the_first_source_has_given_its_rows(mixed):
    loader = mixed(bw.Mixture({"web": 1, "code": 1}, exhausted="stop"), batch_size=bw.Batching(4, epoch_end="pad"))
    rows = rows_with_sources(loader)
    code = loader.plan.sources[1].num_rows
    assert loader.plan.order.epochs.limit in (2 * code - 1, 2 * code)
    assert len({position for position, _, _ in rows}) == loader.plan.order.epochs.limit


def test_every_row_comes_once_when_each_source_leaves_after_its_epoch(mixed):
    loader = mixed(bw.Mixture({"web": 1, "code": 1}, exhausted="renormalise"), batch_size=1)
    total = sum(source.num_rows for source in loader.plan.sources)
    assert loader.get_num_batches() == total
    assert len(set(rows_with_sources(loader))) == total


def test_a_plan_marks_what_is_read_more_than_four_times(mixed):
    text = repr(mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=4000)).plan)
    code = next(line for line in text.splitlines() if " code " in line)
    assert "(over 4)" in code


# Weights over time


def test_steps_change_the_shares_from_their_position_on(mixed):
    rows = rows_with_sources(mixed(bw.Mixture([(0, {"web": 1}), (160, {"web": 1, "code": 3})], num_rows=320)))
    assert {source for _, source, _ in rows[:160]} == {"web"}
    assert sum(source == "code" for _, source, _ in rows[160:]) == 120


def test_a_ramp_goes_from_one_mixture_to_another(mixed):
    loader = mixed(bw.Mixture(bw.ramp({"web": 1.0}, {"code": 1.0}, first=0, last=640), num_rows=1000))
    shares = [
        np.mean([s == "code" for _, s, _ in rows]) for rows in np.split(np.array(rows_with_sources(loader), object), 10)
    ]
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] == 1.0


# Amendments


def test_nothing_before_an_amendment_changes_and_nothing_is_lost_after_it(mixed):
    plain = rows_with_sources(mixed(bw.Mixture({"web": 2, "code": 1}, num_rows=800)))
    loader = mixed(bw.Mixture({"web": 2, "code": 1}, num_rows=800))
    rows = rows_with_sources(loader, steps=20)
    loader.amend(weights={"web": 1, "code": 3})
    rows += rows_with_sources(loader)
    assert rows[:160] == plain[:160]
    for source in ("web", "code"):
        mine = [row[2] for row in rows if row[1] == source]
        theirs = [row[2] for row in plain if row[1] == source]
        shorter = min(len(mine), len(theirs))
        assert mine[:shorter] == theirs[:shorter], "each source gives the same rows in the same order"


def test_an_iteration_that_is_under_way_goes_on_with_the_amended_plan(mixed):
    loader = mixed(bw.Mixture({"web": 1}, num_rows=160))
    sources = []
    for number, batch in enumerate(loader):
        sources.append(set(batch.metadata["source"]))
        if number == 4:
            loader.amend(weights={"code": 1}, num_rows=80)
    assert sources == [{"web"}] * 5 + [{"code"}] * 5


def test_amended_plans_are_kept_and_open_again_from_any_of_the_stores(mixed, stores):
    loader = mixed(bw.Mixture({"web": 2, "code": 1}, num_rows=800))
    rows_with_sources(loader, steps=10)
    early = loader.state_dict()
    rows_with_sources(loader, steps=10)
    loader.amend(add={"math": stores["math"]}, weights={"web": 1, "code": 1, "math": 1}, skip=(200, 210))
    expected = rows_with_sources(loader)
    again = bw.MixedDataLoader({"web": stores["web"]}, plan=loader.plan.fingerprint, framework="numpy")
    again.load_state_dict(early)  # saved before the amendment
    rows = rows_with_sources(again)
    assert rows[80:] == expected
    assert again.plan == loader.plan
    assert not {row[0] for row in rows} & set(range(200, 211))


def test_a_state_from_after_an_amendment_began_is_refused_by_the_plan_that_has_it(mixed):
    loader = mixed(bw.Mixture({"web": 2, "code": 1}, num_rows=800))
    other = mixed(bw.Mixture({"web": 2, "code": 1}, num_rows=800))
    rows_with_sources(loader, steps=10)
    state = loader.state_dict()
    other.amend(at=40, weights={"web": 1})
    before = other.state_dict()
    with refused(bw.PlanError, "position 80", remedy="position 40") as caught:
        other.load_state_dict(state)
    assert "from position 40: weights web=1" in caught.value.where["amendment"]
    assert other.state_dict() == before


def test_a_state_from_a_sibling_amendment_is_refused_with_the_first_difference(mixed):
    one, two = (mixed(bw.Mixture({"web": 2, "code": 1}, num_rows=800)) for _ in range(2))
    one.amend(at=40, weights={"web": 1})
    two.amend(at=64, skip=(70, 71))
    differs = "amendment 1: from position 64: skip 70-71 here, from position 40: weights web=1 there"
    with refused(bw.PlanError, differs=differs):
        two.load_state_dict(one.state_dict())


def test_another_chunk_size_cannot_go_on_and_says_what_was_read(mixed):
    loader = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=80))
    rows_with_sources(loader, steps=5)
    with refused(bw.PlanError, differs="chunk_size: 8 here, 16 there") as caught:
        mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=80), chunk_size=8).load_state_dict(loader.state_dict())
    code = loader.plan.sources[1]
    assert f"{100 * 20 * 16 / code.num_tokens:.1f} % of code" in caught.value.where["seen"]


def test_another_batch_size_goes_on_at_the_same_row(mixed):
    loader = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=96))
    rows = rows_with_sources(loader, steps=3)
    other = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=96), batch_size=12)
    other.load_state_dict(loader.state_dict())
    assert rows + rows_with_sources(other) == rows_with_sources(mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=96)))
    assert other.step == 3 + 6


def test_skipped_rows_are_marked_and_no_step_uses_them(mixed, stores):
    loader = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=160))
    loader.amend(skip=[(20, 24), 30])
    (record, *_) = bw.trace(stores["code"], loader.plan, position=22)
    assert (record.is_skipped, record.step) == (True, None)
    steps = [{r.position for r in bw.trace(stores["web"], loader.plan, step=s)} for s in range(5)]
    assert [sorted(s) for s in steps[2:4]] == [[16, 17, 18, 19, 25, 26, 27, 28], [29, *range(31, 38)]]
    assert loader.get_num_batches() == (160 - 6) // 8
    handed = [batch.metadata["position"].tolist() for batch in loader]
    assert handed[2] == sorted(steps[2])
    assert handed[3] == sorted(steps[3])


def test_a_document_is_found_in_every_step_of_a_mixture(mixed, stores):
    loader = mixed(bw.Mixture({"web": 1, "code": 1}, num_rows=400))
    loader.amend(at=100, weights={"code": 1})
    uses = {(r.step, r.position) for r in bw.find(stores["code"], loader.plan, file="<memory>", row=7) if r.row == 7}
    seen = set()
    for batch in loader:
        for record in bw.trace(stores["web"], loader.plan, step=loader.step - 1):
            if record.source == "code" and record.row == 7:
                seen.add((record.step, record.position))
        assert batch is not None
    assert {use for use in uses if use[1] < 400 and "code"} >= seen
    code_uses = {u for u in uses if loader.plan.order.at([u[1]]).source[0] == 1}
    assert code_uses == seen


def test_a_natural_mixture_takes_a_new_source_at_its_next_epoch(mixed, stores):
    loader = mixed(epochs=2, batch_size=bw.Batching(8, epoch_end="pad"))
    rows = rows_with_sources(loader, steps=3)
    loader.amend(add={"math": stores["math"]})
    rows += rows_with_sources(loader)
    assert {source for _, source, _ in rows} == {"web", "code"}
    assert len(set(rows)) == sum(source.num_rows for source in loader.plan.sources)
    rows = rows_with_sources(loader)
    assert {s for p, s, _ in rows} == {"web", "code", "math"}
    assert len({p for p, _, _ in rows}) == sum(source.num_rows for source in loader.plan.all_sources)


# A source that grows


@pytest.fixture
def growing(tmp_path):
    """The same documents and more after them, as two stores; unshuffled, so that the first ones stay where they are."""
    folder = tmp_path / "texts"
    folder.mkdir()

    def bake_with(name, lines):
        (folder / name).write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        return bake_source(tmp_path / f"{name}.store", folder / "*.jsonl", shuffle=False).path

    return (
        bake_with("a.jsonl", documents("early", 60)),
        bake_with("b.jsonl", documents("later", 25)),
    )


def test_a_source_that_grew_ends_its_epoch_and_then_gives_everything(growing, stores):
    small, large = growing
    settings_of = {"chunk_size": 16, "batch_size": 4, "framework": "numpy", "shuffle": True}
    loader = bw.MixedDataLoader({"web": small, "code": stores["code"]}, {"web": 1, "code": 1}, **settings_of)
    plain = bw.MixedDataLoader({"web": small, "code": stores["code"]}, {"web": 1, "code": 1}, **settings_of)
    had = loader.plan.sources[0].num_rows
    rows = rows_with_sources(loader, steps=10)
    loader.amend(add={"web": large})
    has = loader.plan.all_sources[0].num_rows
    assert has > had
    rows += rows_with_sources(loader, steps=(4 * has) // 4)
    mine = [row[2] for row in rows if row[1] == "web"]
    assert mine[:had] == [row[2] for row in rows_with_sources(plain, steps=had) if row[1] == "web"][:had]
    text = ["".join(chr(t) for t in row if t < 256) for row in mine]
    assert not any("later" in row for row in text[:had])
    second = text[had : had + has]
    assert len(set(mine[had : had + has])) == has
    assert sum("later" in row for row in second) > 20
    assert list(bw.trace([large, stores["code"]], loader.plan, position=len(rows) - 1))


def test_rows_of_epochs_before_it_grew_stay_what_they_were(growing):
    small, large = growing
    before = bw.PretrainDataLoader(small, chunk_size=16, batch_size=1, epochs=3, framework="numpy")
    had = before.plan.sources[0].num_rows
    expected = [row for _ in range(2) for row in rows_with_sources(before)]
    after = bw.PretrainDataLoader(small, chunk_size=16, batch_size=1, epochs=3, framework="numpy")
    after.amend(at=had + 3, add={"text": large})  # in the second epoch, which was cut at another place
    assert [row for _ in range(2) for row in rows_with_sources(after)] == expected
    third = rows_with_sources(after)
    assert len(third) == after.plan.all_sources[0].num_rows > had


# By chance, through real stores


@settings(max_examples=12)
@given(data=st.data())
def test_random_amendments_lose_nothing_and_repeat_nothing(stores, data):
    sources = {name: stores[name] for name in ("web", "code")}
    start = data.draw(st.sampled_from([None, {"web": 1.0, "code": 1.0}]))
    loader = bw.MixedDataLoader(sources, start, chunk_size=16, batch_size=7, epochs=None, framework="numpy")
    plan, at = loader.plan, 0
    for _ in range(data.draw(st.integers(1, 3))):
        at += data.draw(st.integers(1, 150))
        change = data.draw(
            st.sampled_from(
                [
                    {"weights": {"web": 1.0, "code": 2.0}},
                    {"weights": {"code": 1.0}},
                    {"skip": (at + 3, at + 9)},
                    {"add": {f"math-{at}": stores["math"]}, "weights": {"web": 1.0, f"math-{at}": 1.0}},
                ]
            )
        )
        amended = plan.amend(at=at, **change)
        before, after = plan.order.at(np.arange(at)), amended.order.at(np.arange(at))
        assert all(np.array_equal(one, two) for one, two in zip(before, after, strict=True))
        plan = amended
    draw = plan.order.at(np.arange(at + 400))
    for source in range(len(plan.order.names)):
        mine = draw.source == source
        pairs = list(zip(draw.epoch[mine].tolist(), draw.index[mine].tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
        for epoch in range(max((e for e, _ in pairs), default=0)):
            size = plan.order.epoch_size(source, epoch)[1]
            assert sorted(i for e, i in pairs if e == epoch) == list(range(size))
