"""Reading a store: documents by number, tokens without a copy, content named wherever it lies."""

from __future__ import annotations

import mmap
import os
import pickle
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import batchwright as bw
from batchwright.store.layout import Manifest, current_version, sealed
from batchwright.store.stream import MappedShard
from batchwright.store.writer import write_table
from refusals import refused
from shared import slow


def test_a_store_says_what_it_holds(path):
    store = bw.open_store(path)
    assert store.names == ["web", "notes"]
    assert store.splits == ["train"]
    assert (store.num_rows, len(store)) == (8, 8)
    assert store.num_tokens == sum(map(len, ("zero", "one", "three", "four", "five and more", "x", "yy", "zzz"))) + 8
    assert repr(store).splitlines() == [
        f"Store a.store ({store.fingerprint[:7]}): 8 documents, 43 tokens, uint16, tokenizer bytes (257 ids)",
        "├─ web (train)  5 documents, 34 tokens, 2 shards",
        "└─ notes (train)  3 documents, 9 tokens, 1 shard",
    ]


def test_rows_are_found_by_number_with_where_they_came_from(path, tmp_path):
    store = bw.open_store(path)
    rows = [(row.source, Path(row.file).name, row.row, store.decode(row.tokens)) for row in store.rows()]
    assert rows == [
        ("web", "a.txt", 0, "zero"),
        ("web", "a.txt", 1, "one"),
        ("web", "a.txt", 3, "three"),
        ("web", "b.txt", 0, "four"),
        ("web", "b.txt", 1, "five and more"),
        ("notes", "<memory>", 0, "x"),
        ("notes", "<memory>", 1, "yy"),
        ("notes", "<memory>", 2, "zzz"),
    ]
    assert store[0].file == str(tmp_path / "in" / "a.txt")
    assert store[-1].row == 2
    assert store[np.int64(3)].row == 0
    assert store.tokens(1).tolist() == [*b"one", 256]
    with refused(IndexError, 8):
        store[8]


def test_tokens_are_read_only_views_of_the_mapped_file(path):
    store = bw.open_store(path)
    tokens = store.tokens(0)
    assert tokens.dtype == np.uint16
    assert not tokens.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1
    mapped = store.stream("web").shard(0)
    whole = np.frombuffer(mapped._map, np.uint8)
    begin = whole.ctypes.data
    assert begin <= tokens.ctypes.data < begin + len(whole)
    assert isinstance(mapped._map, mmap.mmap)
    assert np.shares_memory(tokens, store.tokens(0))


def test_a_shard_is_plain_arrow(path):
    store = bw.open_store(path)
    with pa.memory_map(str(store.folder / "notes-train-00000.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.schema.names == ["tokens", "file", "row"]
    assert table.column("tokens").to_pylist() == [[*b"x", 256], [*b"yy", 256], [*b"zzz", 256]]
    assert table.column("row").to_pylist() == [0, 1, 2]


def test_a_stream_reads_over_the_borders_of_shards(path):
    stream = bw.open_store(path).stream("web")
    assert len(stream.shard_tokens) == 2
    whole = [*b"zero", 256, *b"one", 256, *b"three", 256, *b"four", 256, *b"five and more", 256]
    assert stream.read(0, stream.num_tokens).tolist() == whole
    for start in range(len(whole)):
        for stop in range(start, len(whole) + 1):
            assert stream.read(start, stop).tolist() == whole[start:stop]


def test_a_stream_says_which_documents_a_span_touches(path):
    stream = bw.open_store(path).stream("web")
    assert stream.documents_in(0, 34) == [(0, 0, 5), (1, 5, 9), (2, 9, 15), (3, 15, 20), (4, 20, 34)]
    assert stream.documents_in(8, 16) == [(1, 5, 9), (2, 9, 15), (3, 15, 20)]
    assert stream.document_span(3) == (15, 20)
    assert stream.borders(1, 20).tolist() == [5, 9, 15]


def test_the_fingerprint_names_the_content_and_not_the_place(path, tmp_path):
    store = bw.open_store(path)
    shutil.copytree(path, tmp_path / "elsewhere" / "other.store")
    copy = bw.open_store(tmp_path / "elsewhere" / "other.store", verify=True)
    assert copy.fingerprint == store.fingerprint
    assert [row.tokens.tolist() for row in copy.rows()] == [row.tokens.tolist() for row in store.rows()]


def test_raw_files_that_lie_elsewhere_give_the_same_fingerprint(tmp_path):
    stores = []
    for folder in ("here", "there/deeper"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.txt").write_text("hello")
        (tmp_path / folder / "b.txt").write_text("world")
        recipe = bw.DatasetRecipe().add_ingredient(tmp_path / folder, name="a").prepare_step(bw.tokenize("bytes"))
        stores.append(bw.bake(recipe, tmp_path / f"{len(stores)}.store", workers=0, show_progress=False))
    assert stores[0].fingerprint == stores[1].fingerprint


def test_other_content_or_another_tokenizer_has_another_fingerprint(tmp_path):
    def bake(texts, **tokenizer):
        recipe = bw.DatasetRecipe().add_ingredient(texts, name="a").prepare_step(bw.tokenize(**tokenizer))
        return bw.bake(recipe, tmp_path / f"{len(made)}.store", workers=0, shuffle=False, show_progress=False)

    made: list[str] = []
    for texts, tokenizer in (
        (["ab", "c"], {"tokenizer": "bytes"}),
        (["a", "bc"], {"tokenizer": "bytes"}),  # the same tokens, other documents
        (["ab", "d"], {"tokenizer": "bytes"}),
        (["ab", "c"], {"tokenizer": "bytes", "dtype": "uint16"}),
        (["ab", "c"], {"tokenizer": lambda text: list(text.encode()), "vocab_size": 256}),
    ):
        made.append(bake(texts, **tokenizer).fingerprint)
    assert len(set(made)) == 5


def test_a_store_stays_open_when_the_process_changes_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(path.parent)
    store = bw.open_store("a.store")
    lazy = bw.Store("a.store")
    monkeypatch.chdir("/")
    assert store.decode(store.tokens(4)) == "five and more"
    assert lazy.decode(lazy.tokens(4)) == "five and more"
    assert pickle.loads(pickle.dumps(store)).path == path


def test_a_store_travels_to_another_process_without_its_maps(path):
    store = bw.open_store(path)
    _ = store.tokens(0)
    packed = pickle.dumps(store)
    assert len(packed) < 1000
    assert pickle.loads(pickle.dumps(store.stream("web"))).read(0, 4).tobytes().decode("utf-16-le") == "zero"
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).tokens(1).tolist())"
    environment = {**os.environ, "PYTHONPATH": str(Path(bw.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], input=packed, env=environment, capture_output=True, timeout=240)
    assert done.stdout.decode() == "[111, 110, 101, 256]\n"


def test_a_pickled_store_is_the_version_it_was(path, tmp_path):
    packed = pickle.dumps(bw.open_store(path))
    version = bw.open_store(path).version
    bw.bake(bw.DatasetRecipe().add_ingredient(["new"]).prepare_step(bw.tokenize("bytes")), path, show_progress=False)
    assert bw.open_store(path).version != version
    assert pickle.loads(packed).version == version


def test_an_unknown_source_is_answered_with_the_known_ones(path):
    with refused(bw.SpecError, "'wbe'", there="web (train), notes (train)", remedy="'web'"):
        bw.open_store(path).stream("wbe")


@pytest.mark.parametrize("version", ["nothing", "../versions", "", "a/../../.."])
def test_a_version_that_is_not_there_is_refused(path, version):
    if version == "":
        assert bw.open_store(path, version=version).num_rows == 8  # nothing asked for: the current one
        return
    with refused(bw.StoreError, version):
        bw.open_store(path, version=version)


@pytest.mark.parametrize("name", ["/etc/passwd", "../../../raw.arrow", "web/../../../x.arrow", "a\0b", ""])
def test_a_shard_name_that_leaves_the_store_is_refused(path, name):
    store = bw.open_store(path)
    columns = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in store.shards.items()}
    columns = {
        key: pa.array(value).to_pylist() if isinstance(value, pa.Array) else value for key, value in columns.items()
    }
    columns["stream"] = np.array(columns["stream"], np.int32)
    columns["file"] = [name, *columns["file"][1:]]
    hashed = write_table(store.folder / "shards.arrow", columns)
    replace(store.manifest, shards_hash=hashed).save(store.folder)
    with refused(bw.StoreError, name=repr(name)):
        bw.open_store(path)


def test_a_shard_whose_lengths_lead_outside_of_the_file_is_refused(path):
    """As a hostile store could have it: manifest and shard agree, and both claim more tokens than there are bytes."""
    store = bw.open_store(path)
    shard = store.folder / "notes-train-00000.arrow"
    claimed, data = 10**9, shard.read_bytes()
    length_and_nulls = struct.pack("<qq", 9, 0)  # of the nine tokens, as Arrow's metadata has them
    assert data.count(length_and_nulls) == 1
    shard.write_bytes(data.replace(length_and_nulls, struct.pack("<qq", claimed, 0)))
    row = store.shards["file"].to_pylist().index(shard.name)
    store.shards["num_tokens"] = np.where(np.arange(len(store.shards["num_tokens"])) == row, claimed, 9)
    with refused(bw.StoreError, "length 1000000000", file=shard):
        MappedShard(store, row)


@pytest.mark.parametrize("version", ["../../elsewhere", "/etc", "a/../.."])
def test_a_pointer_that_leaves_the_store_is_refused(path, version):
    (path / "batchwright.json").write_bytes(sealed({"batchwright_store": 1, "current": version}))
    with refused(bw.StoreError, name=repr(version)):
        bw.open_store(path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"current": "x"}', '{"batchwright_store": 1, "current": 5}', "\udcff"]
)
def test_a_damaged_pointer_is_named_and_never_written_over(path, content):
    data = content.encode("utf-8", "surrogateescape")
    (path / "batchwright.json").write_bytes(data)
    for act in (lambda: bw.open_store(path), lambda: _bake_one(path)):
        with refused(bw.StoreError, file=path / "batchwright.json"):
            act()
    assert (path / "batchwright.json").read_bytes() == data


def _bake_one(path):
    recipe = bw.DatasetRecipe().add_ingredient(["a"]).prepare_step(bw.tokenize("bytes"))
    return bw.bake(recipe, path, workers=0, show_progress=False)


def test_a_store_of_a_later_format_is_refused_by_name(path):
    (path / "batchwright.json").write_bytes(sealed({"batchwright_store": 2, "current": "x"}))
    with refused(bw.StoreError, "format 2", "format 1", file=path / "batchwright.json"):
        bw.open_store(path)


def test_a_manifest_of_a_later_format_is_refused_by_name(path):
    store = bw.open_store(path)
    replace(store.manifest, format=7).save(store.folder)
    with refused(bw.StoreError, "format 7", "manifest.json"):
        bw.open_store(path)


@pytest.mark.parametrize(
    ("name", "every"), [("manifest.json", 7), ("batchwright.json", 1), slow("manifest.json", 1)]
)  # 7: every bit of a byte in turn
def test_no_flipped_bit_changes_what_a_store_says(path, name, every):
    file = next(path.rglob(name))
    read = partial(current_version, path) if name == "batchwright.json" else partial(Manifest.load, file.parent)
    data, said = file.read_bytes(), read()
    errors = []
    for bit in range(0, 8 * len(data), every):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            assert read() == said
        except bw.StoreError as error:
            errors.append(error)
    assert len(errors) > 7 * len(data) // every  # white space says nothing
    assert all(error.where["file"] == file and error.remedy for error in errors)


def test_a_million_shards_open_without_looking_at_each(path):
    store = bw.open_store(path)
    count = 10**6
    info = store.stream("notes").info
    columns = {
        "stream": np.zeros(count, np.int32),
        "file": pa.array(["notes-train-00000.arrow"]).take(pa.array(np.zeros(count, np.int32))),
        "num_documents": np.full(count, 3),
        "num_tokens": np.full(count, 9),
        "num_bytes": np.full(count, (store.folder / "notes-train-00000.arrow").stat().st_size),
        "file_hash": pa.array(["0" * 32]).take(pa.array(np.zeros(count, np.int32))),
        "content_hash": pa.array(["0" * 32]).take(pa.array(np.zeros(count, np.int32))),
    }
    hashed = write_table(store.folder / "shards.arrow", columns)
    large = replace(info, num_documents=3 * count, num_tokens=9 * count, num_shards=count)
    replace(store.manifest, streams=[large], shards_hash=hashed).save(store.folder)
    opened = bw.open_store(path)
    stream = opened.stream("notes")
    assert opened.num_tokens == 9 * count
    assert stream.read(9 * count - 4, 9 * count).tolist() == [*b"zzz", 256]
    assert opened.decode(opened.tokens(3 * 777_777 + 1)) == "yy"
    assert len(stream._mapped) <= 2


def test_the_manifest_holds_what_a_reader_needs_and_no_more(path):
    manifest = Manifest.load(bw.open_store(path).folder)
    assert (manifest.format, manifest.token_dtype) == (1, "uint16")
    assert manifest.tokenizer["kind"] == "bytes"
    assert (bw.open_store(path).folder / "manifest.json").stat().st_size < 10_000
