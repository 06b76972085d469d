"""The table of texts: sorted hashes that find a document again, whatever the number of documents."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from batchwright.store import texts
from batchwright.store.texts import TextsWriter, find_texts, hash_texts, texts_by_document


def table_of(path):
    with pa.memory_map(str(path)) as file:
        batch = pa.ipc.open_file(file).get_batch(0)
    return {name: batch.column(name).to_numpy() for name in batch.schema.names}


def written(folder, hashes, pieces=3):
    with TextsWriter(folder, len(hashes)) as writer:
        for piece in np.array_split(hashes, pieces):
            writer.add(piece)
        writer.finish(folder / "texts.arrow")
    return table_of(folder / "texts.arrow")


@pytest.mark.parametrize("sorted_at_once", [1 << 22, 50, 3])
def test_every_document_is_found_by_its_text_and_no_other(tmp_path, monkeypatch, sorted_at_once):
    monkeypatch.setattr(texts, "_SORTED_AT_ONCE", sorted_at_once)
    hashes = hash_texts([f"text {n}" for n in range(500)])
    table = written(tmp_path, hashes)
    assert (np.diff(table["high"].astype(object)) > 0).all()
    assert find_texts(table, hashes).tolist() == list(range(500))
    assert find_texts(table, hash_texts(["text 500", "", "Text 1"])).tolist() == [-1, -1, -1]


def test_the_table_has_the_same_bytes_however_much_is_sorted_at_once(tmp_path, monkeypatch):
    hashes = hash_texts([f"text {n % 70}" for n in range(200)])
    found = []
    for sorted_at_once in (1 << 22, 7):
        monkeypatch.setattr(texts, "_SORTED_AT_ONCE", sorted_at_once)
        written(tmp_path, hashes, pieces=sorted_at_once % 5 + 1)
        found.append((tmp_path / "texts.arrow").read_bytes())
    assert found[0] == found[1]
    assert [path.name for path in tmp_path.iterdir()] == ["texts.arrow"]


def test_of_a_text_that_is_there_twice_the_first_document_is_found(tmp_path):
    table = written(tmp_path, hash_texts(["b", "a", "b", "a"]))
    assert find_texts(table, hash_texts(["a", "b"])).tolist() == [1, 0]


def test_texts_that_share_half_of_their_hash_are_not_mistaken_for_each_other(tmp_path):
    table = written(tmp_path, np.array([[5, 1], [5, 2], [9, 9]], np.uint64))
    found = find_texts(table, np.array([[5, 1], [5, 2], [5, 3], [9, 9]], np.uint64))
    assert found.tolist() == [0, -1, -1, 2]


@pytest.mark.parametrize("sorted_at_once", [1 << 22, 3])
def test_hashes_come_back_in_the_order_of_the_documents(tmp_path, monkeypatch, sorted_at_once):
    monkeypatch.setattr(texts, "_SORTED_AT_ONCE", sorted_at_once)
    hashes = hash_texts([f"text {n % 13}" for n in range(40)])
    assert (texts_by_document(written(tmp_path, hashes), tmp_path) == hashes).all()


def test_a_hash_is_xxh3_of_the_utf8_bytes():
    high, low = (int(half) for half in hash_texts(["thé"])[0])
    assert (high << 64) + low == xxhash.xxh3_128_intdigest("thé".encode())


def test_half_a_surrogate_pair_has_a_hash_too():
    assert (hash_texts(["a", "\ud800"])[0] == hash_texts(["a"])[0]).all()
