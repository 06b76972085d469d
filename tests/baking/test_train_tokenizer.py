"""From a source to a tokenizer.json: read as bake reads, sampled from all over, the same file every time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import batchwright as bw
from batchwright.baking import train as training
from batchwright.sources import units
from refusals import refused

SENTENCES = [f"sentence {n} of the corpus: {'water runs down the pipe. ' * (n % 5)}" for n in range(200)]


@pytest.fixture
def corpus(tmp_path) -> Path:
    (tmp_path / "corpus").mkdir()
    for name, part in (("a", SENTENCES[:120]), ("b", SENTENCES[120:])):
        lines = "".join(json.dumps({"text": sentence, "number": n}) + "\n" for n, sentence in enumerate(part))
        (tmp_path / "corpus" / f"{name}.jsonl").write_text(lines)
    return tmp_path / "corpus"


def train(source, vocab_size=300, **settings):
    return bw.train_tokenizer(source, vocab_size, **{"show_progress": False, **settings})


def test_train_bake_load_and_decode_gives_the_text_back(corpus, tmp_path, quiet_bake):
    train(corpus, out=tmp_path / "tokenizer.json")
    recipe = bw.DatasetRecipe().add_ingredient(corpus, name="web")
    step = bw.tokenize(tmp_path / "tokenizer.json", append_eos=True)
    store = quiet_bake(recipe.prepare_step(step), tmp_path / "a.store", shuffle=False)
    assert step.eos_id == 299
    assert step.eos_from == "<|endoftext|>, the only special token"
    assert [store.decode(d.tokens) for d in store.rows()] == [s + "<|endoftext|>" for s in SENTENCES]
    assert store.num_tokens < sum(map(len, SENTENCES)) / 2
    loader = bw.PretrainDataLoader(store, chunk_size=32, batch_size=2, shuffle="none", framework="numpy")
    row = loader.get_batch().input_ids[0]
    assert store.decode(row) == "<|endoftext|>".join(SENTENCES)[: len(store.decode(row))]


def test_the_tokenizer_that_is_returned_is_the_one_that_is_written(corpus, tmp_path):
    tokenizer = train(corpus, out=tmp_path / "new" / "folder" / "mine.json")
    assert (tmp_path / "new" / "folder" / "mine.json").read_bytes() == tokenizer.to_json()
    assert bw.tokenize(tokenizer).fingerprint == bw.tokenize(tmp_path / "new" / "folder" / "mine.json").fingerprint


SCRIPT = """
import sys
import batchwright as bw
bw.train_tokenizer(sys.argv[1], 400, out=sys.argv[2], min_frequency=1, max_bytes=8000, show_progress=False)
"""


def test_the_same_source_gives_the_same_file_on_any_number_of_threads(corpus, tmp_path, run_script):
    written = []
    for number, threads in enumerate(({"RAYON_NUM_THREADS": "1"}, {"RAYON_NUM_THREADS": "5"})):
        out = tmp_path / f"{number}.json"
        run_script(SCRIPT, corpus, out, cwd=tmp_path, **threads)
        written.append(out.read_bytes())
    run_script(SCRIPT, corpus, tmp_path / "off.json", cwd=tmp_path, TOKENIZERS_PARALLELISM="false")
    assert written[0] == written[1] == (tmp_path / "off.json").read_bytes()


@pytest.mark.parametrize("kind", ["folder", "glob", "file list", "rows", "strings"])
def test_any_source_of_a_bake_will_do(corpus, kind):
    rows = [{"text": sentence} for sentence in SENTENCES]
    source = {
        "folder": corpus,
        "glob": str(corpus / "*.jsonl"),
        "file list": [corpus / "a.jsonl", corpus / "b.jsonl"],
        "rows": rows,
        "strings": SENTENCES,
    }[kind]
    assert train(source).fingerprint == train(SENTENCES).fingerprint


def test_text_and_format_are_as_in_a_recipe(tmp_path):
    (tmp_path / "a.log").write_text("\n".join(SENTENCES))
    assert train(tmp_path / "a.log", format="lines").fingerprint == train(SENTENCES).fingerprint
    assert train([{"body": s} for s in SENTENCES], text="body").fingerprint == train(SENTENCES).fingerprint


# A sample


def learned_texts(source, **settings) -> list[str]:
    """The texts that a tokenizer learns from."""
    seen: list[str] = []
    train_bpe = training.train_bpe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "train_bpe", lambda texts, *a: train_bpe((seen.append(t) or t for t in texts), *a))
        train(source, **settings)
    return seen


def test_a_sample_is_from_all_over_the_source_and_within_its_limit(corpus):
    seen = learned_texts(corpus, max_bytes=4000, min_frequency=1)
    size = sum(map(len, seen))
    assert 3500 < size <= 4000 < sum(map(len, SENTENCES))
    numbers = [SENTENCES.index(text) for text in seen]
    assert numbers == sorted(numbers)
    assert min(numbers) < 40
    assert any(number >= 120 for number in numbers)
    assert numbers != list(range(len(numbers)))


def test_a_sample_depends_on_seed_file_and_row_alone(corpus, monkeypatch):
    settings = {"max_bytes": 4000, "min_frequency": 1}
    whole = learned_texts(corpus, **settings)
    assert learned_texts(corpus, **settings, seed=1) != whole
    monkeypatch.setattr(units, "UNIT_BYTES", 700)  # cut into many parts, it has the same rows
    assert learned_texts(corpus, **settings) == whole


def test_a_limit_above_all_of_the_text_takes_all_of_it(corpus):
    assert train(corpus, max_bytes=10**9).fingerprint == train(corpus).fingerprint


# What is refused


def test_a_file_that_is_there_stays_unless_it_is_forced(corpus, tmp_path):
    out = tmp_path / "tokenizer.json"
    out.write_text("mine")
    with refused(bw.SpecError, out, parameter="out", remedy="force=True (--force)"):
        train(corpus, out=out)
    assert out.read_text() == "mine"
    train(corpus, out=out, force=True)
    assert bw.tokenize(out).vocab_size == 300


@pytest.mark.parametrize(
    ("source", "settings", "error", "what", "where", "remedy"),
    [
        (
            [""],
            {},
            bw.SourceError,
            "",
            {"dropped": "1 empty text"},
            "text=",
        ),
        ([], {}, bw.SpecError, "empty", {"parameter": "source"}, "rows"),
        (["ab"], {"max_bytes": 1}, bw.SpecError, "max_bytes=1", {"parameter": "max_bytes"}, "max_bytes=2"),
        (["ab"], {"max_bytes": 0}, bw.SpecError, "0", {"parameter": "max_bytes"}, "max_bytes=1"),
        (["ab"], {"vocab_size": 100}, bw.SpecError, "100", {"parameter": "vocab_size"}, "vocab_size=257"),
        (["ab"], {"out": "."}, bw.SpecError, "folder", {"parameter": "out"}, "tokenizer.json"),
        (["ab"], {"out": "file/t.json"}, bw.SpecError, "file", {"parameter": "out"}, "folder"),
        (["ab"], {"on_error": "stop"}, bw.SpecError, "on_error='stop'", {"parameter": "on_error"}, "raise"),
        (["ab", 7], {}, bw.SourceError, "int", {"file": "<memory>", "row": 1}, "on_error='skip'"),
        ([{"txt": "ab"}], {}, bw.SourceError, "'text'", {"row": 0}, "text="),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(tmp_path, monkeypatch, source, settings, error, what, where, remedy):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with refused(error, what, remedy=remedy, **where):
        train(source, **{"out": "t.json", **settings})
    assert os.listdir(tmp_path) == ["file"]


def test_malformed_rows_are_left_out_and_counted_if_that_is_asked_for(corpus, capsys):
    with open(corpus / "a.jsonl", "a") as file:
        file.write("{broken\n")
    with refused(bw.SourceError, "JSON", file=corpus / "a.jsonl", line=121):
        train(corpus)
    tokenizer = train(corpus, on_error="skip", show_progress=True)
    assert tokenizer.fingerprint == train(SENTENCES).fingerprint
    assert "  dropped: 1 malformed row\n" in capsys.readouterr().err


def test_killed_while_it_reads_it_leaves_no_file(tmp_path):
    script = """
import os, signal, sys
import batchwright as bw
@bw.register_format("dying", extensions=(".dying",), by_line=True, version="1")
def parse(line):
    if line == b"now":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"text": line.decode()}
bw.train_tokenizer("in.dying", 300, out="tokenizer.json")
"""
    (tmp_path / "in.dying").write_text("one\ntwo\nnow\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(bw.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["in.dying"]
