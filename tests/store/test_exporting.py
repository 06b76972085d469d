"""The way out: what is exported is what is in the store, comes back unchanged, and appears whole or not at all."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import batchwright as bw
from batchwright.store import export_tokens as exporting
from batchwright.store.export_tokens import FORMATS
from refusals import refused


def export(store: Any, path: Path, to: str, **settings: Any) -> list[Path]:
    return bw.export(store, path, to=to, **{"show_progress": False, **settings})


def adopt(path: Path, **settings: Any) -> bw.Store:
    return bw.adopt(path, "bytes", show_progress=False, **settings)


def documents(stream: Any) -> list[list[int]]:
    return [stream.document(n).tokens.tolist() for n in range(stream.num_documents)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("to", "last"), [("megatron", ".idx"), ("npy", ".npy")])
def test_what_is_exported_and_adopted_again_is_the_same_stream(to, last, small_store, tmp_path):
    before = bw.open_store(small_store)
    export(small_store, tmp_path, to)
    for name in before.names:
        for split in ("train", "val"):
            original = before.stream(name, split)
            again = adopt(tmp_path / f"{name}-{split}{last}", name=name, split=split).stream(name, split)
            assert documents(again) == documents(original)
            assert again.fingerprint == original.fingerprint


@pytest.mark.parametrize("to", FORMATS)
def test_a_source_and_split_become_the_files_of_the_format(to, small_store, tmp_path):
    written = export(small_store, tmp_path / "out", to, source="web")
    suffixes = exporting._KINDS[to].suffixes
    assert [path.name for path in written] == [f"web-{split}{s}" for split in ("train", "val") for s in suffixes]
    assert names(tmp_path / "out") == sorted(path.name for path in written)


@pytest.mark.parametrize("to", ["parquet", "jsonl"])
def test_rows_of_many_shards_are_in_the_order_of_the_store(to, sharded_store, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_TOKENS_AT_ONCE", 50)
    export(sharded_store, tmp_path, to, source="web", split="train")
    stream = bw.open_store(sharded_store).stream("web")
    assert stream.info.num_shards > 3
    assert [row["tokens"] for row in exported_rows(to, tmp_path)] == documents(stream)


@pytest.mark.parametrize(("to", "last"), [("megatron", ".idx"), ("npy", ".npy")])
def test_pieces_that_are_written_at_once_leave_no_seams(to, last, sharded_store, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_TOKENS_AT_ONCE", 7)
    monkeypatch.setattr(exporting, "_DOCUMENTS_AT_ONCE", 3)
    export(sharded_store, tmp_path, to, source="web", split="train")
    again = adopt(tmp_path / f"web-train{last}", name="web").stream("web")
    assert documents(again) == documents(bw.open_store(sharded_store).stream("web"))


def test_npy_files_open_with_numpy(small_store, tmp_path):
    export(small_store, tmp_path, "npy", source="notes", split="train")
    tokens, offsets = np.load(tmp_path / "notes-train.npy"), np.load(tmp_path / "notes-train.offsets.npy")
    stream = bw.open_store(small_store).stream("notes")
    assert (tokens.dtype, offsets.dtype) == (np.uint16, np.int64)
    assert [tokens[a:b].tolist() for a, b in itertools.pairwise(offsets)] == documents(stream)


def exported_rows(to: str, folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.iterdir()
    if to == "parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("to", ["parquet", "jsonl"])
def test_rows_have_source_file_row_tokens_and_text(to, small_store, tmp_path):
    export(small_store, tmp_path, to, source="web", split="val")
    store = bw.open_store(small_store)
    stream = store.stream("web", "val")
    rows = exported_rows(to, tmp_path)
    assert len(rows) == stream.num_documents
    for number, row in enumerate(rows):
        document = stream.document(number)
        assert row == {
            "source": "web",
            "split": "val",
            "file": document.file,
            "row": document.row,
            "tokens": document.tokens.tolist(),
            "text": store.decode(document.tokens[:-1]),
        }
        assert row["tokens"][-1] == 256


@pytest.mark.parametrize("to", ["parquet", "jsonl"])
def test_text_is_null_where_the_tokenizer_cannot_decode(to, tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(["abc"], name="web")
    recipe.prepare_step(bw.tokenize(lambda text: [len(text)], vocab_size=9))
    bw.bake(recipe, tmp_path / "s", workers=0, show_progress=False)
    export(tmp_path / "s", tmp_path / "out", to)
    assert [(row["tokens"], row["text"]) for row in exported_rows(to, tmp_path / "out")] == [([3], None)]


def test_text_is_without_the_id_that_ends_the_document(tmp_path):
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    tokenizer.add_special_tokens(["<eos>"])
    np.array([0, 1, 2, 1, 2], np.uint16).tofile(tmp_path / "web.bin")
    store = bw.adopt(tmp_path / "web.bin", tokenizer, show_progress=False)
    export(store, tmp_path / "out", "jsonl")
    assert [(row["tokens"], row["text"]) for row in exported_rows("jsonl", tmp_path / "out")] == [
        ([0, 1, 2], "one two"),
        ([1, 2], "two"),
    ]


def test_uint32_becomes_int32_for_megatron(tmp_path):
    np.array([1, 70_000, 2, 0], np.uint32).tofile(tmp_path / "web.bin")
    big = bw.adopt(tmp_path / "web.bin", lambda text: [], vocab_size=70_001, eos=2, show_progress=False)
    export(big, tmp_path / "out", "megatron")
    assert np.fromfile(tmp_path / "out" / "web-train.bin", np.int32).tolist() == [1, 70_000, 2, 0]
    assert (tmp_path / "out" / "web-train.idx").read_bytes()[17] == 4


def test_an_adopted_store_is_exported_like_a_baked_one(small_store, tmp_path):
    export(small_store, tmp_path / "npy", "npy", source="web")
    adopted = adopt(tmp_path / "npy", name="web", to=tmp_path / "web.store")
    for folder, store in (("a", small_store), ("b", adopted)):
        export(store, tmp_path / folder, "megatron", source="web")
    assert names(tmp_path / "a") == names(tmp_path / "b")
    for name in names(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_streams_without_documents_are_left_out(tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(["one"], name="web").holdout(1e-9)
    bw.bake(recipe.prepare_step(bw.tokenize("bytes")), tmp_path / "s", workers=0, show_progress=False)
    assert [path.name for path in export(tmp_path / "s", tmp_path / "out", "jsonl")] == ["web-train.jsonl"]


# Whole or not at all


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_there_is_not_written_over_unless_forced(to, small_store, tmp_path):
    first = export(small_store, tmp_path, to, source="notes")
    first[-1].write_bytes(b"mine")
    before = {path: path.read_bytes() for path in first}
    with refused(bw.SpecError, remedy="--force") as caught:
        export(small_store, tmp_path, to, source="notes")
    assert caught.value.where["file"] in first
    assert {path: path.read_bytes() for path in first} == before
    export(small_store, tmp_path, to, source="notes", force=True)
    assert first[-1].read_bytes() != b"mine"


def test_an_export_that_fails_half_way_leaves_what_was_there(small_store, tmp_path, monkeypatch):
    before = {path: path.read_bytes() for path in export(small_store, tmp_path, "npy")}
    monkeypatch.setattr(exporting, "_borders", lambda stream: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        export(small_store, tmp_path, "npy", force=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("settings", "named", "remedy"),
    [
        ({"to": "hdf5"}, "to='hdf5'", "to="),
        ({"to": "npy", "source": "wbe"}, "'wbe'", "web"),
        ({"to": "npy", "split": "test"}, "split='test'", "split="),
    ],
)
def test_what_is_not_there_is_refused_by_name(settings, named, remedy, small_store, tmp_path):
    with refused(bw.SpecError, named, remedy=remedy):
        export(small_store, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_a_store_is_not_exported_into(small_store, tmp_path):
    store = Path(shutil.copytree(bw.open_store(small_store).path, tmp_path / "copy.store"))
    before = sorted(store.rglob("*"))
    with refused(bw.SpecError, store, parameter="path"):
        export(store, store, to="npy", force=True)
    assert sorted(store.rglob("*")) == before


def test_a_file_in_place_of_the_folder_is_refused(small_store, tmp_path):
    (tmp_path / "out").write_text("mine")
    with refused(bw.SpecError, tmp_path / "out", parameter="path"):
        export(small_store, tmp_path / "out", "npy")
    assert (tmp_path / "out").read_text() == "mine"


FULL = """
import pickle, resource, sys
import batchwright as bw
import pyarrow.parquet
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
for to in sys.argv[3:]:
    try:
        bw.export(sys.argv[1], sys.argv[2] + to, to=to, source="web", show_progress=False)
    except bw.BatchwrightError as error:
        sys.stdout.write(pickle.dumps(error).hex() + "\\n")
"""


def test_a_full_disk_is_said_and_nothing_is_left_behind(small_store, tmp_path):
    command = [sys.executable, "-c", FULL, str(small_store), f"{tmp_path}/", *FORMATS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    errors = [pickle.loads(bytes.fromhex(line)) for line in done.stdout.split()]
    assert [type(error) for error in errors] == [bw.OutOfSpaceError] * len(FORMATS), done.stderr
    assert all("free" in error.remedy for error in errors)
    assert all(names(tmp_path / to) == [] for to in FORMATS)


BOUNDED = """
import os, resource, sys
import numpy as np
import batchwright as bw
import pyarrow.parquet

def there_and_back(name, to):
    store = bw.adopt(name, "bytes", dtype="uint32", to=name + to + ".store", show_progress=False)
    bw.export(store, name + to, to=to, show_progress=False)

os.chdir(sys.argv[1])
np.arange(100, dtype=np.uint32).tofile("small.bin")
for to in sys.argv[2:]:
    there_and_back("small.bin", to)  # imports everything, starts its threads
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
limit = used + 36 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
for to in sys.argv[2:]:
    there_and_back("large.bin", to)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to limit memory")
def test_memory_does_not_grow_with_the_store(tmp_path):
    """Adopts and exports 48 MB in 36 MB of memory of its own: maps of files are not counted, arrays are."""
    documents = np.array([*b"some words " * 100, 256], np.uint32)
    with open(tmp_path / "large.bin", "wb") as file:
        for _ in range(48 * 2**20 // documents.nbytes):
            file.write(documents.data)
    command = [sys.executable, "-c", BOUNDED, str(tmp_path), "megatron", "npy"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "large.binnpy" / "large-train.npy").stat().st_size > 48 * 10**6


# Other tools


PEER = """
import json, sys
import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, get_bin_path, get_idx_path

ours, theirs = sys.argv[1:]
dataset = IndexedDataset(ours)
read = [dataset[i].tolist() for i in range(len(dataset))]
builder = IndexedDatasetBuilder(get_bin_path(theirs), dtype=np.int32)
for document in ([[1, 2], [3]], [[4, 5, 6]], [[7], [8, 9]]):
    for sequence in document:
        builder.add_item(torch.tensor(sequence))
    builder.end_document()
builder.finalize(get_idx_path(theirs))
print(json.dumps({"read": read, "borders": dataset.document_indices.tolist()}))
"""


@pytest.mark.peers
def test_megatron_core_reads_ours_and_we_read_theirs(small_store, tmp_path):
    """In a process of its own: importing it warns and registers things, and it may live in another environment."""
    beside = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"  # what `make bench-peers` builds
    python = os.environ.get("BATCHWRIGHT_PEERS_PYTHON") or (str(beside) if beside.exists() else sys.executable)
    has_it = subprocess.run([python, "-W", "ignore", "-c", "import torch, megatron.core"], capture_output=True)
    if has_it.returncode:
        pytest.skip(
            "NOT COMPARED WITH MEGATRON: `make bench-peers` builds an environment that has it; "
            "$BATCHWRIGHT_PEERS_PYTHON can name another one"
        )
    export(small_store, tmp_path, "megatron", source="web", split="train")
    done = subprocess.run(
        [python, "-W", "ignore", "-c", PEER, str(tmp_path / "web-train"), str(tmp_path / "theirs")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    stream = bw.open_store(small_store).stream("web")
    assert said["read"] == documents(stream)
    assert said["borders"] == list(range(stream.num_documents + 1))
    theirs = adopt(tmp_path / "theirs", name="web")
    assert documents(theirs.stream("web")) == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


# Conversations


@pytest.mark.parametrize("to", ["parquet", "jsonl"])
def test_rows_of_conversations_say_what_each_token_is(to, chat_store, tmp_path):
    (file,) = export(chat_store, tmp_path, to)
    rows = (
        pq.read_table(file).to_pylist() if to == "parquet" else [json.loads(s) for s in file.read_text().splitlines()]
    )
    row = next(row for row in rows if row["row"] == 7)
    begins = [0, *(span["stop"] for span in row["spans"])]
    said = [
        (span["role"], span["part"], span["turn"], bytes(row["tokens"][start : span["stop"]]).decode())
        for start, span in zip(begins, row["spans"], strict=False)
    ]
    assert "".join(text for *_, text in said) == row["text"]
    assert ("user", "text", 0, "question 07 xxxxxxx") in said
    assert said[-3:] == [
        ("assistant", "text", 1, "answer 07"),
        ("assistant", "end", 1, "<|im_end|>"),
        ("assistant", "template", 1, "\n"),
    ]
    assert all((span["side"], span["weight"]) == (0, None) for span in row["spans"])


@pytest.mark.parametrize("to", FORMATS)
def test_formats_that_have_no_place_for_roles_say_so(to, chat_store, tmp_path, caplog):
    export(chat_store, tmp_path, to)
    assert ("holds conversations, and" in caplog.text) == (to in ("megatron", "npy"))
