"""Batches straight from raw files: the rows of a baked store, in bounded memory, with an exact resume."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import islice

import pytest

import batchwright as bw
from batchwright.base.errors import EndOfRun, PlanError, SourceError, SpecError, StoreError, TokenizerError
from batchwright.loaders import raw_stream
from batchwright.prepare.tokenizers import CallableTokenizer
from harness import no_thread_left
from refusals import refused
from shared import arrays_of


def texts_of_file(file: int) -> list[str]:
    """Documents of all lengths, also empty ones; each says where it is from."""
    return [f"file {file} record {n}. " * ((n * 7 + file) % 5) for n in range(30)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw") / "corpus"
    folder.mkdir()
    for file in range(4):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts_of_file(file))
        if file == 2:
            (folder / f"{file}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        else:
            (folder / f"{file}.jsonl").write_text(lines)
    (folder / "9.txt").write_text("the last file is one document\n" * 20)
    return folder


@pytest.fixture
def stream(corpus):
    """A loader that streams the corpus: 4 rows of 32 tokens in a batch."""

    def opened(source=corpus, tokenizer="bytes", **settings):
        settings = {"chunk_size": 32, "batch_size": 4, "framework": "numpy"} | settings
        return bw.PretrainDataLoader(source, tokenizer, streaming=True, **settings)

    return opened


def recipe_of(source, tokenizer="bytes", append_eos=True, on_error="raise"):
    """The recipe that a path and a tokenizer are short for; or one that differs."""
    recipe = bw.DatasetRecipe(on_error=on_error).add_ingredient(source)
    return recipe.prepare_step(bw.tokenize(tokenizer, append_eos=append_eos))


@pytest.fixture(scope="module")
def store(corpus):
    return bw.bake(recipe_of(corpus), corpus.with_suffix(".store"), shuffle=False, show_progress=False, workers=0).path


def values(batch):
    fields = {name: array if name == "max_seqlen" else array.tolist() for name, array in arrays_of(batch).items()}
    return fields | {"weight": batch.metadata["weight"].tolist(), "position": batch.metadata["position"].tolist()}


def rest_of(loader):
    """Everything that is left of a run."""
    batches = []
    while True:
        try:
            batches.append(values(loader.get_batch()))
        except EndOfRun:
            return batches


BORDERS = bw.Fields(position_ids=True, segment_ids=True, border_loss=False)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fields": BORDERS},
        {"epochs": 3},
        {"epochs": 3, "batch_size": bw.Batching(4, epoch_end="short")},
        {"epochs": 3, "batch_size": bw.Batching(4, epoch_end="pad")},
        {"epochs": 2, "shuffle": bw.Shuffle("none", recut=False)},
    ],
)
def test_rows_are_those_of_the_baked_form(stream, store, settings):
    given = {"chunk_size": 32, "batch_size": 4, "shuffle": "none", "framework": "numpy"} | settings
    baked = bw.PretrainDataLoader(store, **given)
    streamed = stream(**settings)
    for _ in range(settings.get("epochs", 1)):
        expected = [values(batch) for batch in baked.get_iterator()]
        assert [values(batch) for batch in streamed.get_iterator()] == expected
        assert len(expected) > 20
    assert streamed.get_num_batches() == baked.get_num_batches()


def test_files_cut_into_ranges_give_the_same_rows(stream, monkeypatch):
    whole = rest_of(stream(epochs=2))
    monkeypatch.setattr("batchwright.sources.units.UNIT_BYTES", 300)
    in_ranges = stream(epochs=2)
    assert len(in_ranges.stream.documents.parts) > 10
    assert rest_of(in_ranges) == whole


WINDOWS = bw.Shuffle("window", pool_rows=10)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_the_stream_does_not_depend_on_what_is_made_ahead(stream, prefetch):
    ahead = stream(delivery=bw.Delivery(prefetch=prefetch), shuffle=WINDOWS)
    assert rest_of(ahead) == rest_of(stream(shuffle=WINDOWS))


def test_every_row_comes_once_from_a_shuffled_window(stream):
    plain = [batch["input_ids"][0] for batch in rest_of(stream(batch_size=1))]
    mixed = [batch["input_ids"][0] for batch in rest_of(stream(batch_size=1, shuffle=WINDOWS))]
    assert mixed != plain
    for start in range(0, len(plain), 10):
        assert sorted(mixed[start : start + 10]) == sorted(plain[start : start + 10])


def test_windows_are_shuffled_anew_in_every_epoch_and_by_the_seed(stream):
    settings = {"shuffle": bw.Shuffle("window", pool_rows=50, recut=False)}
    loader = stream(epochs=2, **settings)
    one, two = [values(batch) for batch in loader.get_iterator()], [values(batch) for batch in loader.get_iterator()]
    assert [b["input_ids"] for b in one] != [b["input_ids"] for b in two]
    other = [values(b) for b in stream(seed=1, **settings).get_iterator()]
    assert [b["input_ids"] for b in one] != [b["input_ids"] for b in other]


SETTINGS = [
    {},
    {"epochs": 2, "batch_size": bw.Batching(4, epoch_end="short")},
    {"epochs": 2, "batch_size": bw.Batching(4, epoch_end="pad")},
    {"shuffle": WINDOWS},
    {"shuffle": bw.Shuffle("window", pool_rows=7), "epochs": 2},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_state_continues_exactly_from_every_step(stream, settings):
    running, states, every = stream(**settings), [], []
    for _ in range(settings.get("epochs", 1)):
        for batch in running.get_iterator():
            every.append(values(batch))
            states.append(json.loads(json.dumps(running.state_dict())))
            assert batch.metadata["state"] == running.state_dict()
    for step in range(0, len(states), 5):
        resumed = stream(**settings)
        resumed.load_state_dict(states[step])
        assert rest_of(resumed) == every[step + 1 :]


def test_a_state_says_file_record_and_tokens_to_skip(stream):
    loader = stream()
    batch = loader.get_batch()
    place = loader.state_dict()["place"]
    # Record 0 is empty; records 1, 2 and 3 have 34 + 1, 68 + 1 and 17 + 1 tokens; four rows of 32 are 128.
    assert {name: place[name] for name in ("file", "record", "skip")} == {"file": "0.jsonl", "record": 4, "skip": 6}
    assert batch.metadata["begins"][0] == {"file": "0.jsonl", "record": 1, "skip": 0}


def test_resuming_opens_no_file_before_the_one_that_the_state_names(stream, corpus, monkeypatch):
    running = stream()
    while running.state_dict().get("place", None) is None or running.state_dict()["place"]["file"] != "3.jsonl":
        running.get_batch()
    opened = []
    real = raw_stream.texts_of
    monkeypatch.setattr(
        raw_stream, "texts_of", lambda job, unit, *rest: (opened.append(unit.spans[0].path), real(job, unit, *rest))[1]
    )
    resumed = stream()
    resumed.load_state_dict(running.state_dict())
    assert len(rest_of(resumed)) > 2
    assert [path.rsplit("/")[-1] for path in opened] == ["3.jsonl", "9.txt"]


def test_resuming_does_not_tokenise_what_came_before_the_record(stream, corpus):
    seen = []

    def tokenizer(text):
        seen.append(text)
        return list(text.encode())

    def opened():
        return stream(recipe_of(corpus, CallableTokenizer(tokenizer, 256, version="1"), append_eos=False), None)

    running = opened()
    for _ in range(5):
        running.get_batch()
    state = running.state_dict()
    seen.clear()
    resumed = opened()
    resumed.load_state_dict(state)
    resumed.get_batch()
    assert seen[0] == texts_of_file(0)[state["place"]["record"]]


def test_another_batch_size_continues_at_the_same_row(stream):
    whole = [row for batch in rest_of(stream()) for row in batch["input_ids"]]
    first = stream()
    first.get_batch()
    second = stream(batch_size=6)
    second.load_state_dict(first.state_dict())
    rows = [row for batch in rest_of(second) for row in batch["input_ids"]]
    assert rows[:60] == whole[4:64]


def test_batch_sizes_may_change_from_call_to_call(stream):
    whole = [row for batch in rest_of(stream(batch_size=1)) for row in batch["input_ids"]]
    loader, rows = stream(), []
    for size in (1, 5, 2, 8, 3):
        rows += loader.get_batch(size).input_ids.tolist()
    assert rows == whole[:19]


def test_an_epoch_of_whole_batches_is_followed_by_the_next_one(stream, tmp_path):
    """Without a tail to pass over, the first row of an epoch lies where the one before ended."""
    (tmp_path / "a.txt").write_text("x" * 128)  # with its end-of-document id: 4 rows of 32 tokens
    opened = partial(stream, tmp_path, batch_size=2, epochs=3, shuffle=bw.Shuffle(recut=False))
    every = rest_of(opened())
    assert [batch["position"] for batch in every] == [[n, n + 1] for n in range(0, 12, 2)]
    loader = opened()
    for step in range(6):
        loader.get_batch()
        resumed = opened()
        resumed.load_state_dict(loader.state_dict())
        assert rest_of(resumed) == every[step + 1 :]


@pytest.mark.parametrize("prefetch", [0, 1, 30])
def test_what_was_made_ahead_does_not_decide_where_an_epoch_ends(stream, tmp_path, prefetch):
    (tmp_path / "a.txt").write_text("x" * 32 * 10)  # 10 rows
    loader = stream(tmp_path, epochs=2, shuffle=bw.Shuffle(recut=False), delivery=bw.Delivery(prefetch=prefetch))
    got = []
    for size in (2, 3, 3, 1, 3):
        got.append(loader.get_batch(size).metadata["position"].tolist())
        time.sleep(0.05)  # time for the thread to read to the end
    assert got == [[0, 1], [2, 3, 4], [5, 6, 7], [8], [10, 11, 12]]


def test_any_sharding_gives_rows_of_the_same_batches(stream):
    whole = rest_of(stream(batch_size=6))
    sizes = bw.Batching(6, sharding="strided")
    parts = [rest_of(stream(batch_size=sizes, rank=rank, world_size=3)) for rank in range(3)]
    for rank, part in enumerate(parts):
        assert [batch["input_ids"] for batch in part] == [batch["input_ids"][rank::3] for batch in whole]
        assert [batch["position"] for batch in part] == [batch["position"][rank::3] for batch in whole]


def test_ranks_get_their_rows_of_the_same_batches(stream):
    whole = rest_of(stream(batch_size=6))
    parts = [rest_of(stream(batch_size=6, rank=rank, world_size=3)) for rank in range(3)]
    for step, expected in enumerate(whole):
        assert [row for part in parts for row in part[step]["input_ids"]] == expected["input_ids"]


def test_no_row_is_lost_in_a_short_batch_on_any_ranks_and_in_workers(stream, tmp_path):
    (tmp_path / "a.txt").write_text("x" * 32 * 13)  # 13 rows: the last batch has one
    settings = {"batch_size": bw.Batching(6, epoch_end="short"), "epochs": 2}
    ranks = [stream(tmp_path, rank=rank, world_size=3, **settings) for rank in range(3)]
    for parts in zip(*(rest_of(loader) for loader in ranks), strict=True):
        assert sum(sum(part["weight"]) for part in parts) in (6, 1)
        assert all(all(part["weight"]) or part["weight"] == [0] for part in parts)
    assert {loader.step for loader in ranks} == {6}
    assert {loader.position for loader in ranks} == {26}
    alone = stream(tmp_path, **(settings | {"epochs": 1}))
    turns = [[batch.metadata["global_rows"] for batch in alone.turns(worker, 2)] for worker in range(2)]
    assert turns == [[6, 1], [6]]


def test_rows_that_are_dropped_are_counted_when_the_end_of_the_files_was_read(stream, tmp_path, caplog):
    (tmp_path / "a.txt").write_text("x" * 32 * 13)
    rest_of(stream(tmp_path, batch_size=6, epochs=2))
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "the last 1 row of each epoch" in said.getMessage()


def test_seek_and_reset_go_anywhere(stream):
    loader = stream()
    every = rest_of(loader)
    loader.seek(step=7)
    assert values(loader.get_batch()) == every[7]
    loader.reset()
    assert values(loader.get_batch()) == every[0]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_torchs_workers_give_the_same_batches_and_the_state_follows(stream, workers):
    expected = rest_of(stream())
    loader = stream(framework="torch")
    batches = loader.torch().loader(num_workers=workers)
    got = [values(batch) for batch in islice(batches, 5)]
    state = batches.state_dict()
    assert got == expected[:5]
    resumed = stream()
    resumed.load_state_dict(state)
    assert rest_of(resumed) == expected[5:]


@pytest.mark.parametrize("end", ["drop", "short", "pad"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_torch_reads_every_epoch(stream, tmp_path, framework, end):
    (tmp_path / "a.txt").write_text("x" * 32 * 13)  # 13 rows: the last batch has one
    settings = {"batch_size": bw.Batching(6, epoch_end=end), "epochs": 3}
    loader, whole = stream(tmp_path, framework=framework, **settings), stream(tmp_path, **settings)
    batches = loader.torch().loader()
    for _ in range(3):
        expected = [batch.metadata["position"].tolist() for batch in whole]
        assert [batch.metadata["position"].tolist() for batch in batches] == expected
        assert loader.state_dict() == whole.state_dict()
    assert loader.is_over


@pytest.mark.parametrize("end", ["drop", "short", "pad"])
def test_a_pass_of_torchs_workers_ends_where_the_files_end(stream, tmp_path, end):
    (tmp_path / "a.txt").write_text("x" * 32 * 13)
    opened = partial(stream, tmp_path, batch_size=bw.Batching(6, epoch_end=end), framework="torch")
    loader = opened()
    last = list(loader.torch().loader(num_workers=2))[-1]
    assert loader.position == last.metadata["state"]["position"]
    resumed = opened()
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == []


def test_several_epochs_in_torchs_workers_are_refused(stream):
    with refused(SpecError, "epochs", remedy=False):  # torch makes a text of it
        next(iter(stream(epochs=2, framework="torch").torch().loader(num_workers=1)))


def test_the_loader_pickles_and_goes_on_where_it_was(stream):
    loader = stream()
    loader.get_batch()
    copied = pickle.loads(pickle.dumps(loader))
    assert values(copied.get_batch()) == values(loader.get_batch())


def test_a_recipe_with_steps_is_streamed_as_it_is_baked(stream, corpus, tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(corpus, where=lambda row: "record 1" in row["text"])
    recipe.prepare_step(lambda row: {"text": row["text"].upper()}).prepare_step(bw.tokenize("bytes", append_eos=True))
    bw.bake(recipe, tmp_path / "s", shuffle=False, show_progress=False, workers=0)
    baked = bw.PretrainDataLoader(tmp_path / "s", chunk_size=32, batch_size=4, shuffle="none", framework="numpy")
    assert rest_of(stream(recipe, None)) == [values(batch) for batch in baked]


def test_rows_from_memory_are_streamed(stream):
    rows = [{"text": "abcdefgh" * 20}, "ijklmnop" * 20]
    loader = stream(rows, chunk_size=16, batch_size=2)
    assert bytes(loader.get_batch().input_ids[0].astype("u1")) == b"abcdefghabcdefgh"


def test_the_first_batch_reads_only_what_it_needs(stream, tmp_path):
    with open(tmp_path / "large.jsonl", "w") as file:
        for n in range(20_000):
            file.write(json.dumps({"text": f"document {n} " * 20}) + "\n")
    seen = []

    def tokenizer(text):
        seen.append(text)
        return list(text.encode())

    recipe = recipe_of(tmp_path, CallableTokenizer(tokenizer, 256, version="1"), append_eos=False)
    loader = stream(recipe, None, delivery=bw.Delivery(prefetch=0))
    loader.get_batch()
    assert len(seen) < 200


def test_memory_stays_bounded(tmp_path):
    """A gzip file of 200 MB of text, in a process that may not use more than 100 MB over what it starts with."""
    line = json.dumps({"text": "many words on one line, again and again. " * 50}) + "\n"
    with gzip.open(tmp_path / "large.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(100):
            file.write(line.encode() * 1000)
    code = f"""
import resource, batchwright as bw
settings = dict(streaming=True, batch_size=8, framework="numpy", shuffle=bw.Shuffle("window", pool_rows=256))
loader = bw.PretrainDataLoader({str(tmp_path)!r}, "bytes", 512, **settings)
loader.get_batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(10_000):
    loader.get_batch()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100


def test_leaving_a_pass_early_leaves_no_thread_behind(stream):
    with no_thread_left():
        before = set(threading.enumerate())
        loader = stream(delivery=bw.Delivery(prefetch=3))
        next(loader.get_iterator())
        assert set(threading.enumerate()) - before
        loader.reset()


def test_malformed_rows_are_skipped_and_resumed_past(stream, tmp_path):
    good = [json.dumps({"text": f"row {n} " * 9}) for n in range(40)]
    good[7] = "{broken"
    (tmp_path / "a.jsonl").write_text("\n".join(good))
    recipe = recipe_of(tmp_path, on_error="skip")
    every = rest_of(stream(recipe, None))
    loader = stream(recipe, None)
    for _ in range(len(every) // 2):
        loader.get_batch()
    resumed = stream(recipe, None)
    resumed.load_state_dict(loader.state_dict())
    assert rest_of(resumed) == every[len(every) // 2 :]


# Bad input


def test_a_malformed_row_stops_the_stream_and_is_located(stream, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": 1}\n')
    loader = stream(tmp_path, chunk_size=2, batch_size=1)
    with refused(SourceError, "'text'", "int", file=tmp_path / "a.jsonl", line=2):
        loader.get_batch()
    assert loader.position == 0


REFUSED = [
    ({"shuffle": "global"}, "shuffle='global'", "shuffle", "streaming=False"),
    ({"tokenizer": len}, "a function as tokenizer needs vocab_size=", "vocab_size", "a recipe in place of the path"),
    ({"shuffle": 3}, "3", "shuffle", None),
    ({"shuffle": bw.Shuffle("none", pool_rows=5)}, "pool_rows", "pool_rows", None),
    ({"shuffle": bw.Shuffle(lanes=2)}, "lanes=2", "lanes", "streaming=False"),
    ({"weights": {"corpus": 1.0}}, "weights={'corpus': 1.0}", "weights", "streaming=False"),
    ({"weights": bw.Mixture(num_rows=9)}, "num_rows=9", "num_rows", "streaming=False"),
    ({"packing": "best_fit"}, "packing='best_fit'", "packing", "streaming=False"),
    ({"fields": bw.Fields(cu_seqlens=True)}, "cu_seqlens=True", "cu_seqlens", "streaming=False"),
    ({"split": "val"}, "split=", "split", "streaming=False"),
    ({"delivery": bw.Delivery(workers=2)}, "workers=", "workers", "streaming=False"),
    ({"plan": "abcd"}, "plan=", "plan", "streaming=False"),
    ({"chunk_size": None}, "row", "chunk_size", "2048"),
    ({"chunk_size": 0}, "chunk_size", "chunk_size", None),
    ({"tokenizer": None}, "tokenizer", "tokenizer", "tokenizer.json"),
    ({"tokenizer": "chars"}, "characters", "streaming", "streaming=False"),
    ({"batch_size": bw.Batching(4, epoch_end="wrap")}, "epoch_end", "epoch_end", None),
]


@pytest.mark.parametrize(("settings", "says", "parameter", "remedy"), REFUSED)
def test_what_streaming_cannot_do_is_refused(stream, settings, says, parameter, remedy):
    with refused((SpecError, TokenizerError), says, parameter=parameter, remedy=remedy or True):
        stream(**settings)


def test_a_window_without_a_row_is_refused():
    with refused(SpecError, "pool_rows", parameter="pool_rows"):
        bw.Shuffle("window", pool_rows=0)


def test_a_tokenizer_without_an_end_of_document_is_refused(stream):
    from tokenizers import Tokenizer, models

    plain = Tokenizer(models.BPE({"a": 0}, []))
    with refused(TokenizerError, "append_eos", parameter="eos", special="none", remedy="eos="):
        stream(tokenizer=plain)


def test_too_little_text_is_an_error_and_not_an_empty_epoch(stream, tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with refused(SpecError, "33 tokens", parameter="chunk_size"):
        list(stream(tmp_path))
    with refused(SpecError, "2 rows", parameter="batch_size", remedy="batch_size=2"):
        list(stream(tmp_path, chunk_size=2))


def test_a_batch_that_no_epoch_fills_is_an_error_whose_remedy_works(stream, tmp_path):
    (tmp_path / "a.txt").write_text("x" * 32 * 10)  # 10 rows
    with refused(SpecError, "10 rows", "batch_size=10", parameter="batch_size", remedy="epoch_end='short'"):
        stream(tmp_path, batch_size=64).get_batch()
    assert len(rest_of(stream(tmp_path, batch_size=bw.Batching(64, epoch_end="short")))) == 1


def test_a_store_is_not_streamed(stream, store):
    with refused(SourceError, file=store, remedy="loader"):
        stream(store)


def test_the_number_of_batches_is_known_after_the_first_pass(stream):
    loader = stream()
    with refused(SpecError, parameter="streaming", remedy="streaming=False"):
        loader.get_num_batches()
    assert len(list(loader)) == loader.get_num_batches()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state | {"plan": "0" * 16}, "belongs to plan"),
        (lambda state: state | {"place": {"file": "0.jsonl"}}, "not the state of a loader that streams"),
        (lambda state: state | {"place": state["place"] | {"file": "7.jsonl"}}, "7.jsonl, which is not among"),
        (lambda state: state | {"place": state["place"] | {"record": -1}}, "not the state of a loader that streams"),
        (lambda state: [1], "not a loader's state"),
    ],
)
def test_another_state_is_refused_and_nothing_changes(stream, change, says):
    loader = stream()
    loader.get_batch()
    before = loader.state_dict()
    with refused(PlanError, says):
        loader.load_state_dict(change(before))
    assert loader.state_dict() == before


def test_a_state_that_skips_more_than_its_record_has_is_noticed(stream):
    loader = stream()
    loader.get_batch()
    state = loader.state_dict()
    loader.load_state_dict(state | {"place": state["place"] | {"skip": 10**9}})
    with refused(PlanError, file="0.jsonl", row=state["place"]["record"]):
        loader.get_batch()


def test_a_record_that_changed_under_a_state_is_noticed(stream, tmp_path):
    file = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": f"row {n:02d} " * 9}) for n in range(40)]
    file.write_text("\n".join(rows))
    loader = stream(tmp_path)
    loader.get_batch()
    record = loader.state_dict()["place"]["record"]
    file.write_text("\n".join([*rows[:record], rows[record].replace("row", "ROW"), *rows[record + 1 :]]))
    resumed = stream(tmp_path)
    resumed.load_state_dict(loader.state_dict())
    with refused(PlanError, file="a.jsonl", row=record):
        resumed.get_batch()


@pytest.mark.parametrize(
    "settings", [{"seed": 1}, {"chunk_size": 16}, {"shuffle": bw.Shuffle("window", pool_rows=5)}, {"append_eos": False}]
)
def test_a_state_of_other_settings_is_refused(stream, corpus, settings):
    other = stream(**settings) if "append_eos" not in settings else stream(recipe_of(corpus, **settings), None)
    with refused(PlanError, "plan") as caught:
        other.load_state_dict(stream().state_dict())
    assert "plan=" not in caught.value.remedy  # which streaming refuses


# Without streaming: a cache


def test_raw_files_are_baked_once_into_a_cache(corpus, store, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path))
    first = bw.PretrainDataLoader(corpus, "bytes", 32, framework="numpy")
    assert tmp_path in first.store.path.parents
    again = bw.PretrainDataLoader(corpus, "bytes", 32, framework="numpy")
    assert again.store.version == first.store.version
    assert values(again.get_batch()) == values(first.get_batch())
    other = bw.PretrainDataLoader(recipe_of(corpus, append_eos=False), chunk_size=32, framework="numpy")
    assert other.store.path != first.store.path


def test_changed_files_are_baked_again(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("abc" * 50)
    first = bw.PretrainDataLoader(folder, "bytes", 8, framework="numpy")
    (folder / "b.txt").write_text("def" * 50)
    second = bw.PretrainDataLoader(folder, "bytes", 8, framework="numpy")
    assert (first.store.num_rows, second.store.num_rows) == (1, 2)


def test_ranks_that_open_a_cache_at_once_get_the_same_store(corpus, tmp_path):
    code = f"""
import os, batchwright as bw
loader = bw.PretrainDataLoader({str(corpus)!r}, "bytes", 32, framework="numpy", batch_size=2)
print(loader.store.version, loader.get_batch().input_ids.sum())
"""
    env = {**os.environ, "BATCHWRIGHT_HOME": str(tmp_path), "PYTHONPATH": ":".join(filter(None, sys.path))}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert len({rank.communicate()[0] for rank in ranks}) == 1
    assert [rank.returncode for rank in ranks] == [0, 0, 0]


@pytest.mark.parametrize("name", ["text", "format", "options", "append_eos", "eos", "on_error"])
@pytest.mark.parametrize("streaming", [True, False])
def test_settings_of_raw_files_belong_to_a_recipe_and_no_loader_takes_them(corpus, name, streaming):
    with pytest.raises(TypeError, match=name):
        bw.PretrainDataLoader(corpus, "bytes", 32, streaming=streaming, **{name: "content"})


@pytest.mark.parametrize("streaming", [True, False])
def test_a_tokenizer_beside_a_recipe_is_refused(corpus, streaming):
    with refused(SpecError, "recipe", parameter="tokenizer"):
        bw.PretrainDataLoader(recipe_of(corpus), "bytes", 32, streaming=streaming)


def test_a_home_that_cannot_be_written_is_named(corpus, tmp_path, monkeypatch):
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    with refused(StoreError, folder=tmp_path / "home" / "stores", remedy="BATCHWRIGHT_HOME"):
        bw.PretrainDataLoader(corpus, "bytes", 32)


def test_two_globs_of_one_folder_have_caches_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    for name in ("a1", "a2", "b1", "b2"):
        (tmp_path / f"{name}.txt").write_text(name * 50)
    a, b = (bw.PretrainDataLoader(tmp_path / f"{x}*.txt", "bytes", 8, framework="numpy") for x in "ab")
    assert a.store.path != b.store.path


def test_a_row_beyond_the_files_is_refused_and_not_counted(stream, tmp_path):
    (tmp_path / "a.txt").write_text("x" * 32 * 10)  # 10 rows
    loader = stream(tmp_path, epochs=2)
    loader.seek(position=1_000)
    with refused(PlanError, "1,000", remedy="0 to 10"):
        loader.get_batch()
    loader.reset()
    assert len(list(loader.get_iterator())) == loader.get_num_batches() == 2


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_epoch_that_has_become_shorter_is_an_error_and_not_an_endless_search(stream, tmp_path, prefetch):
    (tmp_path / "a.jsonl").write_text('{"text": "' + "x" * 320 + '"}\n')
    loader = stream(tmp_path, epochs=2, shuffle=bw.Shuffle(recut=False), delivery=bw.Delivery(prefetch=prefetch))
    list(loader.get_iterator())
    (tmp_path / "a.jsonl").write_text('{"text": "' + "x" * 100 + '"}\n' + " " * 220)  # of the same size
    with refused(PlanError, "10 rows", 3, source=tmp_path.name):
        list(loader.get_iterator())
