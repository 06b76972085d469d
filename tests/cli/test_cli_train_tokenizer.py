"""batchwright train-tokenizer: from raw text to a file that bake takes."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus").mkdir()
    for n in range(20):
        (tmp_path / "corpus" / f"{n}.txt").write_text(f"document {n}: water runs down the pipe. " * 5)
    return tmp_path / "corpus"


def test_train_and_bake(process_succeeds, corpus, tmp_path):
    out = tmp_path / "tokenizer.json"
    done = process_succeeds(f"train-tokenizer {corpus} --vocab-size 280 --out {out}")
    assert done.out == f"{out}: 280 ids, special tokens: <|endoftext|> (279)\n"
    assert "280 ids, from 20 documents, 3,850 bytes, in " in done.err
    baked = process_succeeds(f"bake {corpus} --tokenizer {out} --append-eos --to {tmp_path / 'a.store'} --workers 0")
    assert "end of document: id 279 (<|endoftext|>, the only special token)" in baked.err


def test_json_is_all_that_goes_to_stdout(succeeds, corpus, tmp_path):
    done = succeeds(f"train-tokenizer {corpus} --vocab-size 270 --out {tmp_path / 't.json'} --json")
    assert done.json["vocab_size"] == 270
    assert done.json["special_tokens"] == {"<|endoftext|>": 269}
    assert done.json["tokenizer"] == str(tmp_path / "t.json")


def test_every_flag_arrives(succeeds, corpus, tmp_path):
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps({"body": path.read_text()}) + "\n" for path in corpus.iterdir()) + "{broken\n")
    flags = ["--text", "body", "--format", "jsonl", "--pattern", "gpt2", "--min-frequency", 1, "--on-error", "skip"]
    more = ["--special", "<s>", "--special", "</s>", "--max-bytes", "2k", "--seed", 3, "--quiet", "--force"]
    out = tmp_path / "t.json"
    out.write_text("in the way")
    done = succeeds("train-tokenizer", lines, "--vocab-size", 270, "--out", out, *flags, *more)
    assert done.err == ""
    body = json.loads(out.read_text())
    assert [token["content"] for token in body["added_tokens"]] == ["<s>", "</s>"]
    assert "{1,3}" not in json.dumps(body["pre_tokenizer"])


def test_a_vocabulary_that_came_out_smaller_is_a_note(succeeds, corpus, tmp_path):
    done = succeeds(f"train-tokenizer {corpus} --out {tmp_path / 't.json'} --quiet")
    assert done.err.startswith("note: the vocabulary has ")
    assert "not 32,000" in done.err


def test_a_file_that_is_there_is_refused_without_force(refuses, corpus, tmp_path):
    (tmp_path / "t.json").write_text("mine")
    message = refuses(f"train-tokenizer {corpus} --vocab-size 270 --out {tmp_path / 't.json'}")
    assert "is there already" in message
    assert "--force" in message
    assert (tmp_path / "t.json").read_text() == "mine"
