"""Verification reads every byte, and names every file that is not what the manifest says."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

import batchwright as bw
from batchwright.store import verify_store
from refusals import refused

SHARDS = ["web-train-00000.arrow", "web-train-00001.arrow", "notes-train-00000.arrow"]


def damaged(path) -> list[tuple[str, str]]:
    return [(damage.file.name, damage.what) for damage in verify_store(bw.Store(path))]


def test_a_whole_store_has_no_damage(path):
    assert damaged(path) == []
    assert bw.open_store(path, verify=True).num_rows == 8


@pytest.mark.parametrize("name", [*SHARDS, "shards.arrow", "files.arrow", "units.arrow", "tokenizer.json"])
def test_one_flipped_bit_anywhere_is_found(path, name):
    file = bw.Store(path).folder / name
    data = file.read_bytes()
    for at in range(0, len(data), max(1, len(data) // 40)):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert [found for found, _ in damaged(path)] == [name]
        with refused(bw.StoreError, file=file):
            bw.open_store(path, verify=True)
    file.write_bytes(data)
    assert damaged(path) == []


def test_every_damaged_file_is_named(path):
    folder = bw.Store(path).folder
    (folder / SHARDS[0]).unlink()
    os.truncate(folder / SHARDS[1], 100)
    data = (folder / SHARDS[2]).read_bytes()
    (folder / SHARDS[2]).write_bytes(data.replace(b"z\0z\0", b"z\0y\0"))
    (folder / "tokenizer.json").unlink()
    (folder / "files.arrow").write_bytes(b"")
    assert damaged(path) == [
        ("tokenizer.json", "the tokenizer of this store is missing"),
        ("files.arrow", "a table of this store was altered"),
        (SHARDS[0], "a shard of this store is missing"),
        (SHARDS[1], "a shard of this store was truncated or altered"),
        (SHARDS[2], "a shard of this store was altered: its hash differs"),
    ]


def test_shards_that_were_swapped_are_found(path):
    folder = bw.Store(path).folder
    one, two = (folder / name for name in SHARDS[:2])
    data = one.read_bytes(), two.read_bytes()
    one.write_bytes(data[1])
    two.write_bytes(data[0])
    assert [name for name, _ in damaged(path)] == SHARDS[:2]


@pytest.mark.parametrize("change", [{"num_tokens": 9}, {"num_documents": 9}, {"fingerprint": "0" * 16}])
def test_a_manifest_that_says_other_things_than_its_shards_is_found(path, change):
    store = bw.Store(path)
    streams = [replace(store.manifest.streams[0], **change), *store.manifest.streams[1:]]
    replace(store.manifest, streams=streams).save(store.folder)
    assert damaged(path) == [("manifest.json", "the manifest was altered: stream 'web' differs")]


def test_ids_outside_the_vocabulary_are_found(path):
    store = bw.Store(path)
    replace(store.manifest, tokenizer=store.manifest.tokenizer | {"vocab_size": 200}).save(store.folder)
    assert damaged(path) == [(name, "token id 256 is outside the vocabulary of 200") for name in SHARDS]


def test_what_only_verification_finds_does_not_stop_an_open(path):
    folder = bw.Store(path).folder
    data = (folder / SHARDS[2]).read_bytes()
    (folder / SHARDS[2]).write_bytes(data.replace(b"z\0z\0", b"z\0y\0"))
    store = bw.open_store(path)  # size and footer are right: hashes are not read when a store opens
    assert store.decode(store.tokens(7)) == "zyz"
    with refused(bw.StoreError, "hash", file=folder / SHARDS[2]):
        bw.open_store(path, verify=True)
