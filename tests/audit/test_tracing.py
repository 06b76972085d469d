"""Trace both ways: the pieces of a step tile its rows, and every use of a document is found without a scan."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

import batchwright as bw
from batchwright.base.errors import PlanError, SourceError
from refusals import refused

STORES = ["small_store", "sharded_store"]
MIXTURE = {"weights": {"web": 0.2, "code": 0.5, "notes": 0.3}}


@pytest.fixture(scope="session")
def raw_text():
    """The text of a raw row, read from the raw file itself."""

    def read(record):
        if record.file == "<memory>":
            return f"note {record.row}." + " More." * (record.row % 5)
        if record.file.endswith(".jsonl"):
            return json.loads(Path(record.file).read_text(encoding="utf-8").split("\n")[record.row])["text"]
        assert record.row == 0
        return Path(record.file).read_text(encoding="utf-8")

    return read


def lines_of(text, span):
    """First and last line of some bytes of a text, counted one by one; the end of a document is on its last line."""
    data = text.encode()
    first, last = (min(i, len(data) - 1) for i in (span[0], span[1] - 1))
    return 1 + data[:first].count(b"\n"), 1 + data[:last].count(b"\n")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("given", [{}, MIXTURE], ids=["union", "mixture"])
def test_the_pieces_of_every_row_tile_its_window_and_are_what_the_raw_files_say(
    store, given, request, open_loader, raw_text
):
    store = request.getfixturevalue(store)
    loader = open_loader(store, epochs=None, **given)
    opened, plan = bw.open_store(store), loader.plan
    over_the_end = 0
    for step in range(100):  # two epochs of the union, and several of its smaller sources in the mixture
        batch = loader.get_batch()
        records = list(bw.trace(opened, plan, step=step))
        rows = {position: list(pieces) for position, pieces in groupby(records, key=lambda r: r.position)}
        assert list(rows) == batch.metadata["position"].tolist()
        for row, pieces in enumerate(rows.values()):
            window = [*batch.input_ids[row].tolist(), int(batch.targets[row, -1])]
            assert [p.window_span[0] for p in pieces] + [17] == [0] + [p.window_span[1] for p in pieces]
            for piece in pieces:
                text = raw_text(piece)
                tokens = [*text.encode(), 256][slice(*piece.document_span)]
                assert tokens == window[slice(*piece.window_span)]
                assert piece.text == bytes(t for t in tokens if t < 256).decode("utf-8", "replace")
                assert piece.lines == lines_of(text, piece.document_span)
                assert piece.source == batch.metadata["source"][row]
                assert (piece.step, piece.row_in_batch, piece.rank) == (step, row, 0)
            starts = [piece.document_span[0] for piece in pieces]
            assert all(start == 0 for start in starts[1:])  # later pieces begin with their document
            over_the_end += len({piece.epoch for piece in pieces}) == 1 and _wraps(opened, pieces)
    assert over_the_end > 0  # some rows run over the end of their stream, or this test has not seen them


def _wraps(store, pieces):
    """Whether a row has both the last and the first document of its stream."""
    stream = store.stream(pieces[0].source)
    ends = [stream.document(0), stream.document(stream.num_documents - 1)]
    places = {(piece.file, piece.row) for piece in pieces}
    return {(d.file, d.row) for d in ends} <= places


def test_lines_count_newlines_as_part_of_the_line_they_end(tmp_path, open_loader):
    text = "one\ntwo\n\n\n\nsixth\n"
    recipe = bw.DatasetRecipe().add_ingredient([text], name="lines")
    bw.bake(
        recipe.prepare_step(bw.tokenize("bytes", append_eos=True)), to=tmp_path / "s", workers=0, show_progress=False
    )
    loader = open_loader(tmp_path / "s", chunk_size=4, batch_size=4, shuffle=False)
    records = list(bw.trace(tmp_path / "s", loader, step=0))
    assert [(r.text, r.lines) for r in records] == [
        ("one\nt", (1, 2)),
        ("two\n\n", (2, 3)),
        ("\n\n\nsi", (3, 6)),
        ("ixth\n", (6, 6)),
    ]


def in_pairs(num_rows, rank, world_size):
    return [row for row in range(num_rows) if row // 2 % world_size == rank]


@pytest.mark.parametrize("sharding", ["contiguous", "strided", in_pairs])
def test_ranks_are_those_that_got_the_rows(small_store, open_loader, sharding):
    batching = bw.Batching(12, sharding=sharding)
    loaders = [open_loader(small_store, rank=rank, world_size=3, batch_size=batching) for rank in range(3)]
    batches = [loader.get_batch() for loader in loaders]
    records = list(bw.trace(small_store, loaders[0], step=0))
    for rank, batch in enumerate(batches):
        mine = {record.position for record in records if record.rank == rank}
        assert mine == set(batch.metadata["position"].tolist())
    assert {r.rank for r in bw.trace(small_store, loaders[0].plan, step=0, world_size=6)} == set(range(6))
    state = loaders[0].state_dict()  # knows nothing of ranks
    assert list(bw.trace(small_store, state, step=0, world_size=3, sharding=sharding)) == records


def test_a_position_is_traced_alone(small_store, open_loader):
    loader = open_loader(small_store)
    step = [record for record in bw.trace(small_store, loader, step=5) if record.position == 67]
    assert list(bw.trace(small_store, loader, position=67)) == step
    assert step[0].row_in_batch == 7


def test_a_step_of_a_run_that_changed_its_batch_size_is_found_in_its_state(small_store, open_loader):
    loader = open_loader(small_store)
    loader.get_batch()
    loader.get_batch(batch_size=4)
    batch = loader.get_batch()
    records = list(bw.trace(small_store, loader.state_dict(), step=2))
    assert sorted({r.position for r in records}) == batch.metadata["position"].tolist() == list(range(16, 28))
    assert {r.position for r in bw.trace(small_store, loader.state_dict(), step=1)} == set(range(12, 16))


def test_rows_that_only_fill_a_batch_up_are_not_traced(small_store, open_loader):
    loader = open_loader(small_store, split="val")
    *_, last = loader.get_iterator()
    traced = {record.position for record in bw.trace(small_store, loader, step=loader.step - 1)}
    assert traced == set(last.metadata["position"][last.metadata["weight"] == 1].tolist())


def test_rows_that_drop_leaves_out_belong_to_no_step(small_store, open_loader):
    loader = open_loader(small_store)
    rows = loader.plan.epoch_rows
    assert rows % 12
    assert {record.step for record in bw.trace(small_store, loader, position=rows - 1)} == {None}
    assert {record.step for record in bw.trace(small_store, loader, position=rows)} == {rows // 12}


def test_steps_of_a_second_pass_over_a_bounded_mixture_can_be_traced(small_store, open_loader):
    loader = open_loader(small_store, weights=bw.Mixture(MIXTURE["weights"], num_rows=100), epochs=2)
    batches = [batch for _ in range(2) for batch in loader]
    traced = {record.position for record in bw.trace(small_store, loader, step=15)}
    assert traced == set(batches[15].metadata["position"].tolist())
    assert min(traced) > 100


def test_a_tokenizer_that_cannot_decode_gives_no_text(tmp_path, open_loader):
    recipe = bw.DatasetRecipe().add_ingredient(["some words " * 20], name="words")
    recipe.prepare_step(bw.tokenize(lambda text: [len(word) for word in text.split()], vocab_size=10))
    bw.bake(recipe, to=tmp_path / "s", workers=0, show_progress=False)
    loader = open_loader(tmp_path / "s", chunk_size=4, batch_size=2)
    records = list(bw.trace(tmp_path / "s", loader, step=0))
    assert {(record.text, record.lines) for record in records} == {(None, None)}


# Which plan


def test_a_plan_is_given_as_object_loader_state_fingerprint_or_file(own_store, open_loader):
    loader = open_loader(own_store)
    expected = list(bw.trace(own_store, loader, step=3))
    assert len(expected) >= 12
    name = loader.plan.fingerprint
    for plan in (loader.plan, loader.state_dict(), name, own_store / "plans" / f"{name}.json"):
        assert list(bw.trace(own_store, plan, step=3)) == expected
    assert list(bw.trace(bw.open_store(own_store), name, step=3)) == expected


def test_runs_that_disagree_about_steps_ask_for_a_batch_size_or_a_state(own_store, open_loader):
    twelve, twenty_four = open_loader(own_store), open_loader(own_store, batch_size=24)
    name = twelve.plan.fingerprint
    with refused(PlanError, name, "12, 24", remedy="batch_size="):
        bw.trace(own_store, name, step=3)
    for meant, given in ((name, {"batch_size": 24}), (twenty_four, {}), (twenty_four.state_dict(), {})):
        assert {r.position for r in bw.trace(own_store, meant, step=3, **given)} == set(range(72, 96))
    assert {r.step for r in bw.trace(own_store, name, position=5)} == {None}  # a position needs no steps


def test_trace_takes_a_step_or_a_position_that_exists(small_store, open_loader):
    loader = open_loader(small_store)
    for given in ({}, {"step": 1, "position": 1}):
        with refused(PlanError, "step=", "position="):
            bw.trace(small_store, loader, **given)
    for given in ({"step": -1}, {"position": -1}):
        with refused(PlanError, -1):
            bw.trace(small_store, loader, **given)


# Find


@pytest.fixture(scope="session")
def scan(slow_rows):
    """Every use of some documents, by looking at every row: (position, epoch, window span, document span)."""

    def scanned(store, plan, wanted, positions):
        opened = bw.open_store(store)
        slow = slow_rows(opened, plan)
        found = []
        for position in positions:
            source, epoch, _ = slow.places(position)
            stream = opened.stream(slow.names[source])
            places = slow.documents(position)
            start = 0
            for t in range(1, len(places) + 1):
                if t == len(places) or places[t] != (places[t - 1][0], places[t - 1][1] + 1):
                    document = stream.document(places[start][0])
                    if (document.file, document.row) in wanted:
                        found.append((position, epoch, (start, t), (places[start][1], places[t - 1][1] + 1)))
                    start = t
        return found

    return scanned


def uses(records):
    return [(record.position, record.epoch, record.window_span, record.document_span) for record in records]


def some_documents(store, count):
    documents = [d for d in bw.open_store(store).rows() if d.split == "train"]
    return [(d.file, d.row) for d in (documents[i] for i in np.linspace(0, len(documents) - 1, count).astype(int))]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    "given", [{}, {"shuffle": bw.Shuffle(False, recut=False)}, MIXTURE], ids=["union", "in order", "mixture"]
)
def test_find_returns_exactly_the_uses_that_a_scan_finds(store, given, request, open_loader, scan):
    store = request.getfixturevalue(store)
    plan = open_loader(store, epochs=None, **given).plan
    until = 1300  # two epochs of the union; the mixture's sources are at different ones
    documents = some_documents(store, 12)
    together = scan(store, plan, set(documents), range(until))
    found = [use for file, row in documents for use in uses(bw.find(store, plan, file=file, row=row, until=until))]
    assert sorted(found) == together
    assert len({epoch for _, epoch, _, _ in found}) > 1


def test_find_looks_through_one_epoch_unless_told_otherwise(small_store, open_loader, scan):
    loader = open_loader(small_store, epochs=None)
    ((file, row),) = some_documents(small_store, 1)
    rows = loader.plan.epoch_rows
    one_epoch = scan(small_store, loader.plan, {(file, row)}, range(rows))
    assert uses(bw.find(small_store, loader, file=file, row=row)) == one_epoch
    loader.seek(position=2 * rows)
    further = scan(small_store, loader.plan, {(file, row)}, range(2 * rows))
    for meant in (loader, loader.state_dict()):
        assert uses(bw.find(small_store, meant, file=file, row=row)) == further
    assert bw.find(small_store, loader, file=file, row=row, until=0) == []


def test_find_in_an_endless_mixture_looks_through_the_first_epoch_of_each_source(small_store, open_loader, scan):
    loader = open_loader(small_store, **MIXTURE)
    ((file, row),) = some_documents(small_store, 1)
    records = bw.find(small_store, loader, file=file, row=row)
    assert records
    assert {record.epoch for record in records} == {0}
    loader.get_batch()  # having come a little way does not hide the rest of the first epoch
    assert bw.find(small_store, loader, file=file, row=row) == records


def test_find_without_a_row_finds_all_documents_of_a_file(small_store, open_loader, scan):
    plan = open_loader(small_store).plan
    store = bw.open_store(small_store)
    for file in ("a.jsonl", "<memory>", "3.txt"):
        wanted = {(d.file, d.row) for d in store.rows() if d.file.endswith(file)}
        assert uses(bw.find(store, plan, file=file)) == scan(small_store, plan, wanted, range(plan.epoch_rows))


def test_find_and_trace_give_the_same_records(small_store, open_loader):
    loader = open_loader(small_store, epochs=None)
    for file, row in some_documents(small_store, 5):
        for record in bw.find(small_store, loader, file=file, row=row):
            assert record in list(bw.trace(small_store, loader, position=record.position))
            if record.step is not None:
                assert record in list(bw.trace(small_store, loader, step=record.step))


def test_a_document_that_is_held_out_is_never_used(small_store, open_loader):
    held_out = next(d for d in bw.open_store(small_store).rows() if d.split == "val")
    assert bw.find(small_store, open_loader(small_store), file=held_out.file, row=held_out.row) == []


def test_a_file_that_is_not_there_is_answered_with_the_nearest(small_store, open_loader):
    loader = open_loader(small_store)
    with refused(SourceError, file="aa.jsonl", remedy=" a.jsonl"):
        bw.find(small_store, loader, file="aa.jsonl")


def test_a_file_name_that_several_files_end_in_asks_for_more_of_the_path(tmp_path, open_loader):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.txt").write_text(f"{folder} " * 50)
    recipe = bw.DatasetRecipe().add_ingredient(tmp_path / "*" / "same.txt", name="words")
    bw.bake(recipe.prepare_step(bw.tokenize("bytes")), to=tmp_path / "s", workers=0, show_progress=False)
    loader = open_loader(tmp_path / "s")
    with refused(SourceError, tmp_path / "one" / "same.txt", tmp_path / "two" / "same.txt", remedy="path"):
        bw.find(tmp_path / "s", loader, file="same.txt")
    assert {r.file for r in bw.find(tmp_path / "s", loader, file="two/same.txt")} == {
        str(tmp_path / "two" / "same.txt")
    }


def test_a_file_that_two_ingredients_have_is_found_in_both(tmp_path, open_loader):
    (tmp_path / "a.txt").write_text("some text that is read twice")
    recipe = (
        bw.DatasetRecipe().add_ingredient(tmp_path / "a.txt", name="one").add_ingredient(tmp_path / "a.txt", name="two")
    )
    bw.bake(recipe.prepare_step(bw.tokenize("bytes")), to=tmp_path / "c.store", workers=0, show_progress=False)
    loader = open_loader(tmp_path / "c.store", chunk_size=4, batch_size=2)
    assert {use.source for use in bw.find(tmp_path / "c.store", loader, file="a.txt")} == {"one", "two"}
