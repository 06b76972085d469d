"""The tokens of a large unit go to a file: the same store, and memory that does not grow with the unit."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import batchwright as bw
from batchwright.baking import documents as documents_module
from batchwright.baking.documents import TokenSpool


def documents(count):
    return [np.arange(n, 2 * n, dtype=np.uint16) for n in range(count)]


@pytest.mark.parametrize("most_bytes", [0, 1, 10, 100, 10**6])
def test_documents_come_back_in_any_order_from_memory_or_a_file(tmp_path, monkeypatch, most_bytes):
    monkeypatch.setattr(documents_module, "_MOST_BYTES", most_bytes)
    tokens = TokenSpool(tmp_path, np.dtype(np.uint16))
    for first in range(0, 20, 4):
        tokens.extend(documents(20)[first : first + 4])
    order = list(range(0, 20, 2)) + list(range(1, 20, 2))
    expected = np.concatenate([documents(20)[n] for n in order])
    assert tokens.in_order(order).tolist() == expected.tolist()
    assert tokens.lengths().tolist() == list(range(20))
    assert list(tmp_path.iterdir()) == []


def test_no_documents_are_no_tokens(tmp_path):
    assert TokenSpool(tmp_path, np.dtype(np.uint16)).in_order([]).dtype == np.uint16


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*.arrow"))}


def test_a_store_is_the_same_whether_its_tokens_were_held_in_memory_or_in_a_file(tmp_path, monkeypatch):
    rows = "".join(json.dumps({"text": f"document {n} " * (n % 50)}) + "\n" for n in range(3000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    recipe = bw.DatasetRecipe().add_ingredient(tmp_path / "a.jsonl.gz").prepare_step(bw.tokenize("bytes"))
    bw.bake(recipe, tmp_path / "one", workers=0, show_progress=False)
    monkeypatch.setattr(documents_module, "_MOST_BYTES", 10_000)
    bw.bake(recipe, tmp_path / "two", workers=0, show_progress=False)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


def test_a_unit_larger_than_a_shard_is_cut_at_documents(tmp_path, monkeypatch):
    monkeypatch.setattr("batchwright.baking.run._SHARD_BYTES", 1000)
    rows = [f"document {n} " * 10 for n in range(50)] + ["long " * 1000]
    recipe = bw.DatasetRecipe().add_ingredient(rows, name="rows").prepare_step(bw.tokenize("bytes"))
    store = bw.bake(recipe, tmp_path / "s", workers=0, shuffle=False, show_progress=False)
    sizes = store.shards["num_tokens"].tolist()
    assert max(sizes[:-1]) <= 1000 < sizes[-1] == 5000
    assert [store.decode(document.tokens) for document in store.rows()] == rows


@pytest.mark.slow
def test_memory_does_not_grow_with_a_compressed_file(tmp_path):
    """600 MB of tokens, held by a process that may take 350 MB of its own memory."""
    line = json.dumps({"text": "many words on one line, again and again. " * 50}) + "\n"
    with gzip.open(tmp_path / "large.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(145):
            file.write(line.encode() * 1000)
    code = f"""
import threading, time, batchwright as bw
most = 0
def watch():
    global most
    while True:
        for line in open("/proc/self/status"):
            if line.startswith("RssAnon"):
                most = max(most, int(line.split()[1]))
        time.sleep(0.02)
threading.Thread(target=watch, daemon=True).start()
recipe = bw.DatasetRecipe().add_ingredient({str(tmp_path)!r}).prepare_step(bw.tokenize("bytes", dtype="uint16"))
store = bw.bake(recipe, {str(tmp_path / "s")!r}, workers=0, show_progress=False)
print(most // 1024, store.num_tokens)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    megabytes, tokens = map(int, done.stdout.split())
    assert tokens * 2 > 550 << 20
    assert megabytes < 350
