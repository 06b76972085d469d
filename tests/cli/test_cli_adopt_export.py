"""batchwright adopt and batchwright export, and the other verbs over an adopted store."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import batchwright as bw

TEXTS = [f"text {n} {'and ' * (n % 4)}more" for n in range(30)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """data/train.bin with 30 documents and data/val.bin with 2, ended by id 256."""
    (tmp_path / "data").mkdir()
    for name, texts in (("train", TEXTS), ("val", TEXTS[:2])):
        ids = [i for text in texts for i in (*text.encode(), 256)]
        np.array(ids, np.uint16).tofile(tmp_path / "data" / f"{name}.bin")
    return tmp_path / "data"


def test_adopt_makes_a_store_beside_the_data(data, process_succeeds):
    done = process_succeeds(f"adopt {data} --tokenizer bytes")
    store = bw.open_store(data.with_name("data.store"))
    assert done.out == f"{store!r}\n"
    assert "adopted 32 documents" in done.err
    assert "documents end with id 256 (its own)" in done.err
    assert store.splits == ["train", "val"]


def test_adopt_takes_its_settings(data, succeeds, tmp_path):
    done = succeeds(
        *("adopt", data / "train.bin", "--tokenizer", "bytes", "--to", tmp_path / "s", "--val", data / "val.bin"),
        *("--name", "web", "--eos", "32", "--dtype", "uint16", "--format", "bin", "--quiet", "--json"),
    )
    assert done.err == ""
    assert done.json["store"] == str(tmp_path / "s")
    assert done.json["tokenizer"]["eos"] == 32
    store = bw.open_store(tmp_path / "s")
    assert [(s.source, s.split) for s in store.manifest.streams] == [("web", "train"), ("web", "val")]
    assert all(int(document.tokens[-1]) in (32, 256) for document in store.rows())


def test_adopt_names_sources_and_says_where_documents_begin(data, succeeds, tmp_path):
    succeeds(
        *("adopt", f"web={data / 'train.bin'}", f"code={data / 'val.bin'}", "--tokenizer", "bytes"),
        *("--to", tmp_path / "s", "--eos-first", "--quiet"),
    )
    store = bw.open_store(tmp_path / "s")
    assert store.names == ["web", "code"]
    assert store.tokens(1)[0] == 256


def test_adopt_without_borders_says_so(data, succeeds):
    done = succeeds(f"adopt {data / 'train.bin'} --tokenizer bytes --eos none --split val")
    assert "no id ends a document: each file is one" in done.err
    assert bw.open_store(data / "train.store").splits == ["val"]


def test_adopt_refuses_names_for_some_paths_only(data, refuses):
    assert str(data / "val.bin") in refuses(f"adopt web={data / 'train.bin'} {data / 'val.bin'} --tokenizer bytes")


def test_adopt_names_file_token_and_id_of_what_is_no_id(data, process_refuses):
    np.array([1, 2, 999], np.uint16).tofile(data / "train.bin")
    message = process_refuses(f"adopt {data} --tokenizer bytes")
    assert all(named in message for named in ("token 2 ", "999", "257"))
    assert str(data / "train.bin") in message
    assert "dtype=" in message
    assert not data.with_name("data.store").exists()


@pytest.fixture
def adopted(data: Path) -> Path:
    return bw.adopt(data, "bytes", name="web", show_progress=False).path


def test_info_says_that_tokens_are_adopted_and_where_they_lie(adopted, data, succeeds):
    text, facts = succeeds(f"info {adopted}").out, succeeds(f"info {adopted} --json").json
    assert "files      2, adopted in place" in text
    assert str(data / "train.bin") in text
    size = sum((data / f"{name}.bin").stat().st_size for name in ("train", "val"))
    assert facts["adopted"]
    assert facts["num_bytes"] > size


def test_look_shows_documents_and_batches_of_adopted_tokens(adopted, succeeds):
    assert "t⟦ext 3 and and and more" in succeeds(f"look {adopted} --count 30").out
    out = succeeds(f"look {adopted} --chunk-size 8 --shuffle none --step 0").out
    assert "train.bin, row 0, line 1, tokens 0-9" in out


def test_plan_trace_digest_and_gc_work_over_adopted_tokens(adopted, succeeds):
    loader = bw.PretrainDataLoader(adopted, chunk_size=8, batch_size=2, seed=7, framework="numpy")
    plan = loader.plan.fingerprint
    assert plan in succeeds(f"plan {adopted}").out
    assert "train.bin, row 5" in succeeds(f"trace {adopted} {plan} --file train.bin --row 5").out
    assert succeeds(f"digest {adopted} {plan} --steps 0-9 --json").json["num_rows"] == 20
    assert "nothing to remove" in succeeds(f"gc {adopted}").out


def test_verify_names_the_adopted_file_that_changed(adopted, data, batchwright, succeeds):
    assert "whole (2 shards" in succeeds(f"verify {adopted}").out
    (data / "val.bin").write_bytes(b"\0\0")
    done = batchwright(f"verify {adopted}")
    assert done.code == 1
    assert done.out.startswith(f"{data / 'val.bin'}: a file that this store adopted has changed since: it had")
    assert "batchwright adopt" in done.err


def test_a_changed_file_is_one_message_for_every_verb(adopted, data, refuses):
    (data / "train.bin").unlink()
    message = refuses(f"look {adopted}")
    assert "a file that this store adopted is missing" in message
    assert str(data / "train.bin") in message


def test_export_writes_what_it_lists(adopted, process_succeeds, tmp_path):
    done = process_succeeds(f"export {adopted} {tmp_path / 'out'} --to megatron")
    assert "tokens in 4 files for megatron" in done.err
    listed = [Path(line.rsplit("  ", 1)[0]).name for line in done.out.splitlines()]
    assert listed == ["web-train.bin", "web-train.idx", "web-val.bin", "web-val.idx"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(listed)


def test_export_takes_its_settings(adopted, succeeds, refuses, tmp_path):
    command = f"export {adopted} {tmp_path / 'out'} --to jsonl --source web --split val --quiet"
    done = succeeds(command, "--json")
    assert [Path(file["path"]).name for file in done.json["files"]] == ["web-val.jsonl"]
    lines = (tmp_path / "out" / "web-val.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == TEXTS[:2]
    assert "--force" in refuses(command)
    assert succeeds(command, "--force").err == ""


def test_export_refuses_an_unknown_format(adopted, refuses, tmp_path):
    assert "'hdf5'" in refuses(f"export {adopted} {tmp_path / 'out'} --to hdf5")
