"""Existing tokens are used in place: every format, the stream of a bake, and no file that changed."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batchwright as bw
from batchwright.audit.digesting import digest
from batchwright.store import collect_garbage, verify_store, writer
from batchwright.store.adopted import AdoptedFile
from batchwright.store.layout import content_digest, current_version
from refusals import refused
from shared import texts

EOS = 256
DOCUMENTS = [f"document {n} {'so ' * (n % 5)}" for n in range(40)]


def ids_of(documents: list[str], dtype: str = "uint16", *, eos_first: bool = False) -> np.ndarray:
    """UTF-8 bytes of each document, and 256 after it (or before it)."""
    parts = [list(d.encode()) for d in documents]
    return np.array([i for part in parts for i in ([EOS, *part] if eos_first else [*part, EOS])], dtype)


def adopt(path: Any, tokenizer: Any = "bytes", **settings: Any) -> bw.Store:
    return bw.adopt(path, tokenizer, **{"show_progress": False, **settings})


def token_rows(loader: bw.PretrainDataLoader) -> list[list[int]]:
    return [row for batch in loader.get_iterator() for row in np.asarray(batch.input_ids).tolist()]


def open_loader(store: Any, **settings: Any) -> bw.PretrainDataLoader:
    return bw.PretrainDataLoader(
        store, **{"chunk_size": 8, "batch_size": 4, "seed": 7, "framework": "numpy", **settings}
    )


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """data/train.bin: 40 documents, as nanoGPT writes them."""
    (tmp_path / "data").mkdir()
    ids_of(DOCUMENTS).tofile(tmp_path / "data" / "train.bin")
    return tmp_path / "data" / "train.bin"


@pytest.fixture(scope="session")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same documents, baked: source web."""
    path = tmp_path_factory.mktemp("baked") / "baked.store"
    recipe = bw.DatasetRecipe().add_ingredient(DOCUMENTS, name="web")
    recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
    bw.bake(recipe, path, workers=0, shuffle=False, show_progress=False)
    return path


# The same stream as a bake


def test_an_adopted_file_has_the_fingerprint_and_plan_of_a_baked_store_with_these_tokens(train, baked):
    store = adopt(train, name="web")
    assert store.fingerprint == bw.open_store(baked).fingerprint
    assert open_loader(store.path).plan.fingerprint == open_loader(baked).plan.fingerprint


def test_a_loader_reads_from_an_adopted_file_what_it_reads_from_a_baked_store(train, baked):
    store = adopt(train, name="web")
    ours, theirs = (open_loader(path, fields=bw.Fields(segment_ids=True)) for path in (store.path, baked))
    for a, b in zip(ours.get_iterator(), theirs.get_iterator(), strict=True):
        assert np.array_equal(a.input_ids, b.input_ids)
        assert np.array_equal(a.targets, b.targets)
        assert np.array_equal(a.segment_ids, b.segment_ids)
    steps = [digest(path, loader, 0, 9) for path, loader in ((store.path, ours), (baked, theirs))]
    assert steps[0] == steps[1]


def test_tokens_are_mapped_from_the_users_file_and_copied_nowhere(train):
    before = (train.read_bytes(), train.stat().st_mtime_ns)
    store = adopt(train)
    tokens = store.stream("tokens").shard(0).tokens
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [(line.split("-")[0], line.split("-")[1].split()[0]) for line in maps if line.endswith(str(train))]
    assert any(int(a, 16) <= tokens.ctypes.data < int(b, 16) for a, b in ranges)
    assert not tokens.flags.writeable
    assert all(before[0][:64] not in path.read_bytes() for path in store.path.rglob("*") if path.is_file())
    assert (train.read_bytes(), train.stat().st_mtime_ns) == before


def test_a_run_over_adopted_tokens_resumes_where_it_stopped(train):
    path = adopt(train).path
    whole = token_rows(open_loader(path))
    first = open_loader(path)
    seen = [row for _ in range(5) for row in np.asarray(first.get_batch().input_ids).tolist()]
    second = open_loader(path)
    second.load_state_dict(first.state_dict())
    assert seen + token_rows(second) == whole


def test_trace_and_find_lead_to_the_file_and_the_number_of_the_document(train):
    store = adopt(train)
    loader = open_loader(store.path)
    for record in bw.trace(store, loader, step=3):
        assert record.file == str(train)
        words = ids_of(DOCUMENTS[record.row : record.row + 1])[slice(*record.document_span)]
        assert record.text == store.decode(words)
    found = bw.find(store, loader.plan, file="train.bin", row=17)
    assert {record.row for record in found} == {17}
    assert {n for record in found for n in range(*record.document_span)} == set(range(len(ids_of(DOCUMENTS[17:18]))))


def test_adopting_from_another_path_gives_the_same_fingerprint_and_plan(train, tmp_path):
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    shutil.copy(train, tmp_path / "elsewhere" / "deep" / "train.bin")
    stores = [adopt(train), adopt(tmp_path / "elsewhere" / "deep" / "train.bin", to=tmp_path / "other.store")]
    assert stores[0].fingerprint == stores[1].fingerprint
    assert len({open_loader(store.path).plan.fingerprint for store in stores}) == 1


def test_adopting_again_changes_nothing(train):
    first, second = adopt(train), adopt(train)
    assert (first.version, first.fingerprint) == (second.version, second.fingerprint)
    assert len(first.version) == 12
    assert len(list((second.path / "versions").iterdir())) == 1


# Formats


@pytest.mark.parametrize("dtype", ["uint16", "int16", "uint32", "int32", "uint64", "int64"])
def test_raw_ids_of_every_type_are_gathered_right(dtype, tmp_path, baked):
    ids_of(DOCUMENTS, dtype).tofile(tmp_path / "web.bin")
    store = adopt(tmp_path / "web.bin", dtype=dtype)
    assert store.manifest.token_dtype == dtype
    assert token_rows(open_loader(store.path)) == token_rows(open_loader(baked))


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_ids_of_one_byte_are_gathered_right(dtype, tmp_path):
    np.frombuffer("".join(DOCUMENTS).encode(), dtype).tofile(tmp_path / "web.bin")
    store = adopt(tmp_path / "web.bin", dtype=dtype, eos="none")
    rows = open_loader(store.path, shuffle=False).get_batch().input_ids
    assert bytes(np.asarray(rows).ravel().tolist()).decode() == "".join(DOCUMENTS)[:32]


def test_a_vocabulary_over_16_bits_is_read_as_uint32(tmp_path):
    np.array([5, 70_000, 9], np.uint32).tofile(tmp_path / "web.bin")
    store = bw.adopt(tmp_path / "web.bin", lambda text: [], vocab_size=70_001, eos=9, show_progress=False)
    assert (store.manifest.token_dtype, store.tokens(0).tolist()) == ("uint32", [5, 70_000, 9])


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_the_header_of_llm_c_is_recognised_and_left_out(magic, version, dtype, tmp_path):
    ids = ids_of(DOCUMENTS, dtype)
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(ids)
    (tmp_path / "web.bin").write_bytes(header.tobytes() + ids.tobytes())
    store = adopt(tmp_path / "web.bin")
    assert store.manifest.token_dtype == dtype
    assert texts(store) == DOCUMENTS


def test_a_one_dimensional_npy_is_cut_by_the_end_of_document_id(tmp_path):
    np.save(tmp_path / "web.npy", ids_of(DOCUMENTS, "int32"))
    assert texts(adopt(tmp_path / "web.npy")) == DOCUMENTS


def test_rows_of_a_two_dimensional_npy_are_documents(tmp_path):
    np.save(tmp_path / "web.npy", np.arange(12, dtype=np.uint16).reshape(3, 4))
    store = adopt(tmp_path / "web.npy")
    assert [d.tokens.tolist() for d in store.rows()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_borders_beside_a_npy_are_used(tmp_path):
    np.save(tmp_path / "web.npy", np.arange(6, dtype=np.uint16))
    np.save(tmp_path / "web.offsets.npy", np.array([0, 0, 2, 2, 6]))
    store = adopt(tmp_path / "web.npy")
    assert [d.tokens.tolist() for d in store.rows()] == [[], [0, 1], [], [2, 3, 4, 5]]
    assert [d.row for d in store.rows()] == [0, 1, 2, 3]


def write_megatron(
    prefix: Path, sizes: list[int], borders: list[int], *, code: int = 8, ids: Any = None, **parts: Any
) -> Path:
    """A dataset of sequences with these sizes; a document is sequences [borders[d], borders[d + 1]). Parts can lie."""
    dtype = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}.get(code, "<u2")
    ids = np.arange(sum(sizes)) if ids is None else ids
    Path(f"{prefix}.bin").write_bytes(parts.get("data", np.array(ids, dtype).tobytes()))
    pointers = np.cumsum([0, *sizes[:-1]]) * np.dtype(dtype).itemsize
    index = [
        parts.get("magic", b"MMIDIDX\0\0"),
        struct.pack("<QB", parts.get("version", 1), code),
        struct.pack("<QQ", parts.get("count", len(sizes)), len(borders)),
        np.array(parts.get("said_sizes", sizes), "<i4").tobytes(),
        np.array(parts.get("pointers", pointers), "<i8").tobytes(),
        np.array(borders, "<i8").tobytes(),
        parts.get("modes", b""),
    ]
    Path(f"{prefix}.idx").write_bytes(b"".join(index)[: parts.get("cut")])
    return Path(f"{prefix}.idx")


@pytest.mark.parametrize("suffix", [".idx", ".bin", ""])
def test_sequences_of_a_megatron_document_are_one_document(suffix, tmp_path):
    write_megatron(tmp_path / "web", [2, 1, 3, 0, 4], [0, 2, 3, 5])
    store = adopt(f"{tmp_path}/web{suffix}")
    assert store.path == tmp_path / "web.store"
    assert [d.tokens.tolist() for d in store.rows()] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert [(d.file, d.row) for d in store.rows()] == [(f"{tmp_path}/web.bin", n) for n in range(3)]


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
def test_every_whole_type_of_megatron_is_read(code, tmp_path):
    write_megatron(tmp_path / "web", [3, 2], [0, 1, 2], code=code)
    assert [d.tokens.tolist() for d in adopt(tmp_path / "web.idx").rows()] == [[0, 1, 2], [3, 4]]


def write_datatrove(path: Path, token_bytes: int = 2, ends: Any = (2, 5), **beside: bytes) -> Path:
    path.write_bytes(np.arange(5, dtype=f"<u{token_bytes}").tobytes())
    Path(f"{path}.index").write_bytes(np.array(ends, "<u8").tobytes())
    for name, data in beside.items():
        Path(f"{path}.{name}").write_bytes(data)
    return path


@pytest.mark.parametrize("metadata", [{}, {"metadata": b"gpt2|%d\n5\n5 T"}, {"metadata": b"gpt2\n5\n5 T"}])
@pytest.mark.parametrize("token_bytes", [2, 4])
def test_datatrove_files_have_the_documents_of_their_index(token_bytes, metadata, tmp_path):
    beside = {name: data.replace(b"%d", b"%d" % token_bytes) for name, data in metadata.items()}
    store = adopt(write_datatrove(tmp_path / "web.ds", token_bytes, **beside))
    assert [d.tokens.tolist() for d in store.rows()] == [[0, 1], [2, 3, 4]]
    assert store.manifest.token_dtype == f"uint{8 * token_bytes}"


def test_a_loss_mask_of_datatrove_is_said_not_to_be_used(tmp_path, capsys):
    store = adopt(write_datatrove(tmp_path / "web.ds", loss=b"\1\1\0\1\1"), show_progress=True)
    assert store.report["notes"] == ["web.ds.loss is not used: every token counts in the loss"]
    assert "note: web.ds.loss is not used" in capsys.readouterr().err


def test_format_names_what_the_extension_does_not(tmp_path):
    ids_of(DOCUMENTS).tofile(tmp_path / "web.npy")  # raw ids under this name, as some tools write them
    assert texts(adopt(tmp_path / "web.npy", format="bin")) == DOCUMENTS


def test_a_format_with_borders_of_its_own_needs_no_end_of_document(tmp_path):
    write_megatron(tmp_path / "web", [2, 1], [0, 1, 2], ids=[0, 1, 1])
    store = adopt(tmp_path / "web.idx", without_eos(tmp_path))
    assert [d.tokens.tolist() for d in store.rows()] == [[0, 1], [1]]
    assert store.manifest.tokenizer["eos"] is None


# Where documents end


def test_the_last_document_needs_no_end(tmp_path):
    np.array([1, 2, EOS, 3], np.uint16).tofile(tmp_path / "web.bin")
    assert [d.tokens.tolist() for d in adopt(tmp_path / "web.bin").rows()] == [[1, 2, EOS], [3]]


def test_eos_can_be_any_id(tmp_path):
    np.array([1, 0, 2, 0], np.uint16).tofile(tmp_path / "web.bin")
    store = adopt(tmp_path / "web.bin", eos=0)
    assert [d.tokens.tolist() for d in store.rows()] == [[1, 0], [2, 0]]
    assert (store.manifest.tokenizer["eos"], store.manifest.tokenizer["eos_from"]) == (0, "eos=")


def test_without_an_end_of_document_a_file_is_one_document_and_that_is_said(train, capsys):
    store = adopt(train, eos="none", show_progress=True)
    assert (store.num_rows, store.num_tokens) == (1, len(ids_of(DOCUMENTS)))
    assert "no id ends a document: each file is one" in capsys.readouterr().err


def test_eos_first_begins_documents_with_the_id(tmp_path):
    ids_of(DOCUMENTS, eos_first=True).tofile(tmp_path / "web.bin")
    store = adopt(tmp_path / "web.bin", eos_first=True)
    assert texts(store) == DOCUMENTS
    assert all(int(d.tokens[0]) == EOS for d in store.rows())


def test_a_file_that_begins_with_the_end_of_document_is_noted(tmp_path):
    ids_of(DOCUMENTS, eos_first=True).tofile(tmp_path / "web.bin")
    (note,) = adopt(tmp_path / "web.bin").report["notes"]
    assert "web.bin begins with id 256" in note


# Files, splits and sources


def test_several_files_are_shards_of_one_source_in_the_order_of_their_path_bytes(tmp_path):
    for name, part in (("web_b", DOCUMENTS[5:9]), ("web_B", DOCUMENTS[:5]), ("web_10", DOCUMENTS[9:])):
        ids_of(part).tofile(tmp_path / f"{name}.bin")
    store = adopt([tmp_path / "web_b.bin", f"{tmp_path}/web_[B1]*.bin"], name="web")
    assert texts(store) == DOCUMENTS[9:] + DOCUMENTS[:5] + DOCUMENTS[5:9]
    assert [(Path(d.file).name, d.row) for d in store.rows()][30:33] == [
        ("web_10.bin", 30),
        ("web_B.bin", 0),
        ("web_B.bin", 1),
    ]
    assert store.manifest.streams[0].num_shards == 3


def test_a_folder_with_train_and_val_is_one_source_with_two_splits(train):
    ids_of(["held out"]).tofile(train.parent / "val.bin")
    (train.parent / "meta.pkl").write_bytes(b"never read")
    store = adopt(train.parent)
    assert (store.path, store.names, store.splits) == (train.parents[1] / "data.store", ["data"], ["train", "val"])
    assert (texts(store), texts(store, split="val")) == (DOCUMENTS, ["held out"])


def test_names_that_say_train_and_val_split_a_list_of_files(tmp_path):
    ids_of(DOCUMENTS).tofile(tmp_path / "fineweb_train_000001.bin")
    ids_of(["held out"]).tofile(tmp_path / "fineweb_val_000000.bin")
    store = adopt(f"{tmp_path}/*.bin")
    assert (store.path.name, store.names, store.splits) == ("fineweb.store", ["fineweb"], ["train", "val"])
    assert (texts(store), texts(store, split="val")) == (DOCUMENTS, ["held out"])


def test_a_store_is_named_after_what_a_pattern_matched_not_after_the_pattern(train):
    assert adopt(f"{train.parent}/tr*.bin", name="web").path == train.parent / "web.store"


def test_one_file_alone_is_for_training_whatever_its_name(tmp_path):
    ids_of(DOCUMENTS).tofile(tmp_path / "val.bin")
    assert adopt(tmp_path / "val.bin").splits == ["train"]


def test_val_names_the_files_that_are_held_out(train, tmp_path):
    ids_of(["held out"]).tofile(tmp_path / "other.bin")
    store = adopt(train, val=tmp_path / "other.bin")
    assert (texts(store), texts(store, split="val")) == (DOCUMENTS, ["held out"])


def test_split_puts_everything_into_one_split(train):
    store = adopt(train, split="val")
    assert (store.splits, texts(store, split="val")) == (["val"], DOCUMENTS)


def test_adopted_sources_of_different_types_are_mixed_like_baked_ones(tmp_path):
    web, code = DOCUMENTS[:25], DOCUMENTS[25:]
    ids_of(web).tofile(tmp_path / "web.bin")
    np.save(tmp_path / "code.npy", ids_of(code, "int64"))
    recipe = bw.DatasetRecipe().add_ingredient(web, name="web").add_ingredient(code, name="code")
    recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
    theirs = bw.bake(recipe, tmp_path / "baked.store", workers=0, shuffle=False, show_progress=False)
    ours = adopt({"web": tmp_path / "web.bin", "code": tmp_path / "code.npy"}, to=tmp_path / "mix.store")
    assert [ours.stream(name).dtype.name for name in ours.names] == ["uint16", "int64"]
    settings = {
        "weights": bw.Mixture({"web": 0.7, "code": 0.3}, num_rows=60),
        "fields": bw.Fields(segment_ids=True, position_ids=True),
    }
    for a, b in zip(
        open_loader(ours.path, **settings).get_iterator(),
        open_loader(theirs.path, **settings).get_iterator(),
        strict=True,
    ):
        assert np.array_equal(a.input_ids, b.input_ids)
        assert np.array_equal(a.segment_ids, b.segment_ids)
        assert np.array_equal(a.position_ids, b.position_ids)
    assert list(verify_store(ours)) == []


def test_dtype_is_for_raw_ids_beside_files_that_say_their_own(tmp_path):
    ids_of(DOCUMENTS, "uint32").tofile(tmp_path / "web.bin")
    np.save(tmp_path / "code.npy", ids_of(DOCUMENTS, "int64"))
    store = adopt({"web": tmp_path / "web.bin", "code": tmp_path / "code.npy"}, to=tmp_path / "s", dtype="uint32")
    assert [store.stream(name).dtype.name for name in store.names] == ["uint32", "int64"]


def test_a_source_without_held_out_files_has_an_empty_split(train, tmp_path):
    ids_of(["held out"]).tofile(tmp_path / "val.bin")
    ids_of(DOCUMENTS).tofile(tmp_path / "code.bin")
    store = adopt({"web": train, "code": tmp_path / "code.bin"}, val={"web": tmp_path / "val.bin"}, to=tmp_path / "s")
    assert [(s.source, s.split, s.num_documents) for s in store.manifest.streams] == [
        ("web", "train", 40),
        ("web", "val", 1),
        ("code", "train", 40),
        ("code", "val", 0),
    ]
    assert open_loader(store.path, split="val").plan.sources[0].name == "web"


# Files larger than a shard


def test_a_large_file_is_cut_into_shards_between_documents(train, baked, monkeypatch):
    monkeypatch.setattr(writer, "MAX_SHARD_TOKENS", 100)
    store = adopt(train, name="web")
    shards = store.shards["num_tokens"].tolist()
    assert len(shards) > 5
    assert max(shards) <= 100
    assert [(d.row, d.tokens.tolist()) for d in store.rows()] == [
        (n, d.tokens.tolist()) for n, d in enumerate(bw.open_store(baked).rows())
    ]
    assert token_rows(open_loader(store.path)) == token_rows(open_loader(baked))
    assert list(verify_store(store)) == []


def test_every_shard_of_a_large_file_has_the_content_hash_of_a_baked_one(train, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_SHARD_TOKENS", 100)
    monkeypatch.setattr("batchwright.sources.tokens._READ_BYTES", 64)
    store = adopt(train)
    for number, content_hash in enumerate(store.shards["content_hash"].to_pylist()):
        mapped = store.stream("tokens").shard(number)
        assert content_digest(mapped.tokens, mapped.offsets) == content_hash


def test_the_cut_does_not_depend_on_how_much_is_read_at_once(train, monkeypatch, tmp_path):
    monkeypatch.setattr(writer, "MAX_SHARD_TOKENS", 100)
    whole = adopt(train)
    for size in (2, 64, 202):
        monkeypatch.setattr("batchwright.sources.tokens._READ_BYTES", size)
        store = adopt(train, to=tmp_path / f"{size}.store")
        assert store.fingerprint == whole.fingerprint
        assert store.files["content_hash"] == whole.files["content_hash"]


@pytest.mark.parametrize("eos_first", [False, True])
def test_shards_of_a_file_hold_whole_documents_also_where_the_id_begins_them(eos_first, tmp_path, monkeypatch):
    ids_of(DOCUMENTS, eos_first=eos_first).tofile(tmp_path / "web.bin")
    monkeypatch.setattr(writer, "MAX_SHARD_TOKENS", 60)
    monkeypatch.setattr("batchwright.sources.tokens._READ_BYTES", 34)
    store = adopt(tmp_path / "web.bin", eos_first=eos_first)
    assert texts(store) == DOCUMENTS
    assert [d.row for d in store.rows()] == list(range(40))


def test_given_borders_are_cut_into_shards_too(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_SHARD_TOKENS", 4)
    write_megatron(tmp_path / "web", [0, 2, 1, 3, 0, 4, 0], [0, 1, 3, 4, 5, 6, 7])
    store = adopt(tmp_path / "web.idx")
    assert [d.tokens.tolist() for d in store.rows()] == [[], [0, 1, 2], [3, 4, 5], [], [6, 7, 8, 9], []]
    assert [d.row for d in store.rows()] == [0, 1, 2, 3, 4, 5]


def test_a_document_longer_than_a_shard_is_kept_in_pieces_under_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_SHARD_TOKENS", 4)
    np.array([1, EOS, *range(10), EOS, 7, EOS], np.uint16).tofile(tmp_path / "web.bin")
    store = adopt(tmp_path / "web.bin")
    assert [(d.row, d.tokens.tolist()) for d in store.rows()] == [
        (0, [1, EOS]),
        (1, [0, 1, 2, 3]),
        (1, [4, 5, 6, 7]),
        (1, [8, 9, EOS]),
        (2, [7, EOS]),
    ]


# Files that change, and stores that move


def rewrite(path: Path, data: bytes) -> None:
    """Other bytes under the same size and time."""
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda p: os.truncate(p, 100), "100"),
    "grown": (lambda p: p.write_bytes(p.read_bytes() + b"\0\0"), "1,502"),
    "touched": (lambda p: os.utime(p, ns=(0, 0)), "1970-01-01 00:00:00.000000Z"),
    "missing": (lambda p: p.unlink(), "missing"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_adopted_file_that_changed_is_refused_at_open(change, train):
    store = adopt(train)
    act, changed = CHANGES[change]
    act(train)
    for opens in (bw.open_store, open_loader):
        with refused(bw.StoreError, changed, file=train, remedy="batchwright adopt"):
            opens(store.path)
    (damage,) = verify_store(bw.Store(store.path))
    assert damage.file == train


def test_adopting_a_touched_file_again_gives_the_same_plan(train):
    before = open_loader(adopt(train).path)
    state = before.state_dict()
    os.utime(train, ns=(0, 0))
    after = open_loader(adopt(train).path)
    assert after.plan.fingerprint == before.plan.fingerprint
    after.load_state_dict(state)


def test_a_file_that_is_replaced_between_open_and_map_is_refused(train, monkeypatch):
    monkeypatch.setattr(writer, "MAX_SHARD_TOKENS", 20)  # more shards than are mapped at open
    store = adopt(train)
    stream = store.stream("tokens")
    assert len(stream.shard_tokens) > 16
    shutil.copy(train, train.with_suffix(".new"))
    os.replace(train.with_suffix(".new"), train)
    with refused(bw.StoreError, file=train, store=store.path):
        stream.shard(20)


def test_a_file_that_is_replaced_between_finding_and_mapping_it_is_refused(train, monkeypatch):
    store = adopt(train)
    find = AdoptedFile.find

    def found_and_replaced(self):
        place = find(self)
        shutil.copy(train, train.with_suffix(".new"))
        os.replace(train.with_suffix(".new"), train)
        return place

    monkeypatch.setattr(AdoptedFile, "find", found_and_replaced)
    with refused(bw.StoreError, file=train, store=store.path):
        store.adopted[0].map(0, 2)


def test_verify_finds_bytes_that_changed_under_the_same_size_and_time(train):
    store = adopt(train)
    assert list(verify_store(store)) == []
    data = train.read_bytes()
    rewrite(train, data[:10] + b"\1" + data[11:])
    (damage,) = verify_store(bw.Store(store.path))
    assert (damage.file, damage.what) == (train, "a file that this store adopted was altered: its hash differs")
    assert "adopt" in damage.remedy
    with refused(bw.StoreError, "hash", file=train):
        bw.open_store(store.path, verify=True)


def test_adopting_again_mends_a_store_whose_borders_were_damaged(train):
    store = adopt(train)
    (shard,) = store.folder.glob("tokens-train-*.arrow")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    again = adopt(train)
    assert (again.version, again.fingerprint) == (f"{store.version}-2", store.fingerprint)
    assert list(verify_store(again)) == []


def test_store_and_data_that_move_together_stay_good(train, tmp_path):
    store = adopt(train)
    os.rename(train.parent, tmp_path / "moved")
    moved = bw.open_store(tmp_path / "moved" / "train.store")
    assert texts(moved) == DOCUMENTS
    assert moved.fingerprint == store.fingerprint


def test_a_copy_of_store_and_data_uses_its_own_data(train, tmp_path):
    adopt(train)
    shutil.copytree(train.parent, tmp_path / "copy")  # keeps times
    copied = bw.open_store(tmp_path / "copy" / "train.store")
    assert copied.adopted[0].find() == tmp_path / "copy" / "train.bin"
    train.unlink()
    assert texts(bw.open_store(copied.path)) == DOCUMENTS


def test_a_store_that_moves_alone_finds_its_data_where_it_was(train, tmp_path):
    store = adopt(train)
    os.rename(store.path, tmp_path / "alone.store")
    assert texts(bw.open_store(tmp_path / "alone.store")) == DOCUMENTS


def test_a_store_that_lies_elsewhere_names_its_data_by_absolute_path_only(train, tmp_path):
    (tmp_path / "stores").mkdir()
    store = adopt(train, to=tmp_path / "stores" / "a.store")
    assert store.files["beside"].to_pylist() == [""]
    assert texts(bw.open_store(store.path)) == DOCUMENTS


def test_only_a_manifest_that_says_so_reaches_outside_of_its_folder(train):
    store = adopt(train)
    replace(store.manifest, adopted=False).save(store.folder)
    with refused(bw.StoreError, "format 2", file=store.folder / "manifest.json"):
        bw.open_store(store.path)
    replace(store.manifest, adopted=False, format=1).save(store.folder)
    with refused(bw.StoreError, file=store.folder / "tokens-train-00000.arrow"):
        bw.open_store(store.path)


# Other verbs, and being killed


def test_garbage_collection_removes_borders_of_old_versions_and_never_tokens(train):
    first = adopt(train).version
    ids_of(["other"]).tofile(train)
    store = adopt(train)
    assert [removal.folder.name for removal in collect_garbage(store.path)] == [first]
    assert texts(bw.open_store(store.path)) == ["other"]


def test_a_bake_stays_out_of_an_adopted_store(train):
    store = adopt(train)
    recipe = bw.DatasetRecipe().add_ingredient(["x"]).prepare_step(bw.tokenize("bytes"))
    with refused(bw.SpecError, store.path, parameter="to"):
        bw.bake(recipe, store.path, show_progress=False)
    assert texts(bw.open_store(store.path)) == DOCUMENTS


def test_a_second_process_is_told_who_adopts(train, tmp_path):
    store = adopt(train)
    code = (
        "import sys, fcntl; f = open(sys.argv[1], 'a+'); fcntl.flock(f, fcntl.LOCK_EX)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(store.path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        with refused(bw.BusyError, "adopting", folder=store.path):
            adopt(train)
        other.stdin.close()
    assert texts(bw.open_store(store.path)) == DOCUMENTS


KILLED = """
import os, signal, sys
import batchwright as bw
from batchwright.base.errors import StoreError
path, to = sys.argv[1:]

def adopt(to=to):
    return bw.adopt(path, "bytes", to=to, show_progress=False)

adopt(to + ".first")  # everything is imported once, and not in every child

def child(die_at, when):
    count = 0
    def dying(real):
        def call(*args):
            nonlocal count
            count += 1
            if count == die_at and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            real(*args)
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return call
    os.replace, os.rename = dying(os.replace), dying(os.rename)
    adopt()

deaths = 0
for die_at in range(1, 30):
    for when in ("before", "after"):
        process = os.fork()
        if process == 0:
            child(die_at, when)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            print(deaths, bw.open_store(to, verify=True).fingerprint)
            sys.exit()
        deaths += 1
        try:
            store = bw.open_store(to, verify=True)
        except StoreError as error:
            assert "not finished" in str(error) or "no store at" in str(error) or "is not a store" in str(error), error
        else:
            assert store.num_rows == 40
"""


def test_killed_at_every_rename_nothing_half_adopted_opens_and_the_same_call_finishes(train, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(train), str(tmp_path / "k.store")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    deaths, fingerprint = done.stdout.split()
    assert int(deaths) >= 4
    assert fingerprint == adopt(train, to=tmp_path / "whole.store").fingerprint


FULL = """
import pickle, resource, sys
import batchwright as bw
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
try:
    bw.adopt(sys.argv[1], "bytes", to=sys.argv[2], show_progress=False)
except bw.BatchwrightError as error:
    sys.stdout.buffer.write(pickle.dumps(error))
"""


def test_a_full_disk_is_said_and_leaves_nothing(train, tmp_path):
    to = tmp_path / "full.store"
    done = subprocess.run([sys.executable, "-c", FULL, str(train), str(to)], capture_output=True, check=True)
    error = pickle.loads(done.stdout)
    assert isinstance(error, bw.OutOfSpaceError)
    assert (error.where["folder"], error.remedy) == (to, "free some space and run the same call again")
    assert not to.exists()


# Bad input: which error, what it names, what it advises; and nothing is left behind


def saved(path: Path, array: Any) -> Path:
    np.save(path, array, allow_pickle=True)
    return path


def raw(path: Path, data: Any) -> Path:
    path.write_bytes(np.asarray(data).tobytes() if not isinstance(data, bytes) else data)
    return path


def header(magic: int, version: int, count: int, ids: Any) -> bytes:
    return np.array([magic, version, count, *[0] * 253], np.int32).tobytes() + np.asarray(ids, np.uint16).tobytes()


def mega(folder: Path, sizes: Any = (2, 3), borders: Any = (0, 1, 2), **parts: Any) -> Path:
    return write_megatron(folder / "x", list(sizes), list(borders), **parts)


def without_eos(folder: Path) -> str:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@dataclass(frozen=True)
class Bad:
    """What is adopted, and what is said of it."""

    make: Callable[[Path], Any]
    headline: str
    where: dict[str, Any]
    remedy: str
    error: type[bw.BatchwrightError]
    settings: dict[str, Any]


BAD: dict[str, Bad] = {}


def bad(
    case: str,
    make: Callable[[Path], Any],
    headline: str,
    where: dict[str, Any],
    remedy: str,
    error: type[bw.BatchwrightError] = bw.SourceError,
    **settings: Any,
) -> None:
    BAD[case] = Bad(make, headline, where, remedy, error, settings)


bad(
    "id outside the vocabulary",
    lambda d: raw(d / "x.bin", np.array([1, 2, 300, 4], np.uint16)),
    "token 2 of this file has id 300, outside the vocabulary of 257",
    {"file": "x.bin", "token": 2},
    "dtype=",
)
bad(
    "negative id",
    lambda d: saved(d / "x.npy", np.array([1, -2])),
    "token 1 of this file has id -2",
    {"file": "x.npy", "token": 1},
    "the tokenizer",
)
bad(
    "half an id",
    lambda d: raw(d / "x.bin", b"abc"),
    "3 bytes are not a whole number of uint16 ids",
    {"file": "x.bin"},
    "dtype=",
)
bad("no tokens", lambda d: raw(d / "x.bin", b""), "no tokens", {"file": "x.bin"}, "leave it out")
bad(
    "header with another count",
    lambda d: raw(d / "x.bin", header(20240520, 1, 9, [1, 2])),
    "the header says 9 tokens, and 2 of uint16 follow it",
    {"file": "x.bin"},
    "copy it again",
)
bad(
    "header of another version",
    lambda d: raw(d / "x.bin", header(20240520, 2, 2, [1, 2])),
    "the header says version 2",
    {"file": "x.bin"},
    "write it again",
)
bad(
    "evaluation file of llm.c",
    lambda d: raw(d / "x.bin", header(20240522, 1, 2, [1, 2])),
    "evaluation file",
    {"file": "x.bin"},
    "train and val",
)
bad(
    "floats", lambda d: saved(d / "x.npy", np.ones(3)), "of float64, not of whole numbers", {"file": "x.npy"}, "np.save"
)
bad(
    "objects",
    lambda d: saved(d / "x.npy", np.array([1, "a", {}], object)),
    "of object, not of whole numbers",
    {"file": "x.npy"},
    "np.save",
)
bad("big-endian", lambda d: saved(d / "x.npy", np.ones(3, ">i4")), "big-endian", {"file": "x.npy"}, "newbyteorder")
bad(
    "Fortran order",
    lambda d: saved(d / "x.npy", np.asfortranarray(np.ones((3, 2), np.int32))),
    "shape \\(3, 2\\) in Fortran order",
    {"file": "x.npy"},
    "C order",
)
bad(
    "three dimensions",
    lambda d: saved(d / "x.npy", np.ones((1, 2, 3), np.int32)),
    "shape \\(1, 2, 3\\)",
    {"file": "x.npy"},
    "one dimension",
)
bad(
    "npy that was cut short",
    lambda d: raw(d / "x.npy", saved(d / "y.npy", np.ones(9, np.int32)).read_bytes()[:-4]),
    "the header says 36 bytes of int32, and 32 follow it",
    {"file": "x.npy"},
    "again",
)
bad(
    "npy that is none",
    lambda d: raw(d / "x.npy", b"\x01\x00\x02\x00" * 9),
    "not a .npy file",
    {"file": "x.npy"},
    "format='bin'",
)
bad(
    "npy with a header of 4 GB",
    lambda d: raw(d / "x.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}"),
    "not a .npy file",
    {"file": "x.npy", "reason": "a header of 4,294,967,295 bytes"},
    "np.save",
)
bad("a pipe", lambda d: os.mkfifo(d / "x.bin") or d / "x.bin", "no regular file", {"file": "x.bin"}, ".bin")
bad(
    "borders of another file",
    lambda d: (saved(d / "x.offsets.npy", [0, 2, 9]), saved(d / "x.npy", np.ones(3, np.int32)))[1],
    "the last document ends at token 9, and the data has 3 tokens",
    {"file": "x.offsets.npy", "tokens": "x.npy"},
    "both files again",
)
bad(
    "Megatron: magic",
    lambda d: mega(d, magic=b"MMIDIDY\x00\x00"),
    "not a Megatron index",
    {"file": "x.idx"},
    "both files again",
)
bad(
    "Megatron: version",
    lambda d: mega(d, version=2),
    "version 2; version 1 is known",
    {"file": "x.idx"},
    "megatron-core",
)
bad("Megatron: floats", lambda d: mega(d, code=6), "ids of float64", {"file": "x.idx"}, "whole numbers")
bad("Megatron: unknown type", lambda d: mega(d, code=99), "type code 99", {"file": "x.idx"}, "whole numbers")
bad(
    "Megatron: a count that no memory holds",
    lambda d: mega(d, count=1 << 60),
    "the index says 1,152,921,504,606,846,976 sequences and 3 document borders",
    {"file": "x.idx"},
    "both files again",
)
bad(
    "Megatron: index cut short",
    lambda d: mega(d, cut=-5),
    "which take 82 bytes; it has 77",
    {"file": "x.idx"},
    "both files again",
)
bad(
    "Megatron: sizes that disagree with pointers",
    lambda d: mega(d, said_sizes=[3, 2]),
    "sequence 1 lies at byte 4; by the sizes of those before it, at 6",
    {"file": "x.idx"},
    "both files again",
)
bad(
    "Megatron: negative size",
    lambda d: mega(d, said_sizes=[-2, 3]),
    "sequence 0 has -2 tokens",
    {"file": "x.idx"},
    "both files again",
)
bad(
    "Megatron: data cut short",
    lambda d: mega(d, data=b"12345678"),
    "the index describes 10 bytes of uint16, and the data has 8",
    {"file": "x.bin", "index": "x.idx"},
    "both files again",
)
bad(
    "Megatron: documents that fall",
    lambda d: mega(d, [1, 1, 3], [0, 2, 1, 3]),
    "document 1 goes from sequence 2 to 1",
    {"file": "x.idx"},
    "both files again",
)
bad(
    "Megatron: documents that end elsewhere",
    lambda d: mega(d, borders=[0, 1, 3]),
    "the documents go from sequence 0 to 3, of 2 sequences",
    {"file": "x.idx"},
    "both files again",
)
bad("Megatron: more than text", lambda d: mega(d, modes=b"\x00\x01"), "second kind", {"file": "x.idx"}, "text only")
bad(
    "Megatron: index without data",
    lambda d: (mega(d), (d / "x.bin").unlink())[0],
    "no data beside it",
    {"file": "x.idx", "missing": "x.bin"},
    ".bin",
)
bad("datatrove: no index", lambda d: raw(d / "x.ds", b"1234"), "no .ds.index", {"file": "x.ds"}, "format='bin'")
bad(
    "datatrove: index cut short",
    lambda d: (write_datatrove(d / "x.ds"), os.truncate(d / "x.ds.index", 9))[0],
    "9 bytes is not a list",
    {"file": "x.ds.index"},
    "both files again",
)
bad(
    "datatrove: index of another file",
    lambda d: write_datatrove(d / "x.ds", ends=[2, 7]),
    "the last document ends at token 7, and the data has 10 bytes",
    {"file": "x.ds.index"},
    "both files again",
)
bad(
    "datatrove: ends that fall",
    lambda d: write_datatrove(d / "x.ds", ends=[4, 2, 5]),
    "document 1 ends at token 2, before the one in front",
    {"file": "x.ds.index"},
    "both files again",
)
bad("unknown extension", lambda d: raw(d / "x.tok", b"12"), "not a format", {"file": "x.tok"}, "format='bin'")
bad("no such file", lambda d: d / "x.bin", "does not exist", {"file": "x.bin"}, ".bin")
bad(
    "folder without tokens", lambda d: (d / "empty").mkdir() or d / "empty", "no token files", {"file": "empty"}, ".bin"
)
bad(
    "another type than the file says",
    lambda d: saved(d / "x.npy", np.ones(3, np.int32)),
    "dtype=uint16 was asked for, and the file says int32",
    {"file": "x.npy", "parameter": "dtype"},
    "leave dtype= out",
    error=bw.SpecError,
    dtype="uint16",
)
bad(
    "a type that ids cannot have",
    lambda d: raw(d / "x.bin", b"12"),
    "not a type of token ids",
    {"parameter": "dtype"},
    "'uint16'",
    error=bw.SpecError,
    dtype="float32",
)
bad(
    "two types in one source",
    lambda d: [saved(d / "x.npy", np.ones(3, np.int32)), raw(d / "y.bin", b"\x01\x00")],
    "ids of int32 and of uint16",
    {"file": "y.bin", "source": "tokens"},
    "sources of their own",
    error=bw.SpecError,
)
bad(
    "one file twice",
    lambda d: {"a": raw(d / "x.bin", b"\x01\x00"), "b": d / "x.bin"},
    "in two places",
    {"file": "x.bin"},
    "one of them",
    error=bw.SpecError,
)
bad(
    "tokenizer without an end of document",
    lambda d: raw(d / "x.bin", b"\x01\x00"),
    "cannot tell which token of .* ends a document",
    {"parameter": "eos"},
    "eos='none'",
    error=bw.TokenizerError,
    tokenizer=without_eos,
)
bad(
    "eos that is no id",
    lambda d: raw(d / "x.bin", b"\x01\x00"),
    "eos=900 is outside the vocabulary",
    {"parameter": "eos"},
    "an id of the vocabulary",
    error=bw.TokenizerError,
    eos=900,
)
bad(
    "chars",
    lambda d: raw(d / "x.bin", b"\x01\x00"),
    "'chars' has no vocabulary",
    {"parameter": "tokenizer"},
    "tokenizer.json",
    error=bw.TokenizerError,
    tokenizer="chars",
)
bad(
    "unknown split",
    lambda d: raw(d / "x.bin", b"\x01\x00"),
    "split='test' is not one of",
    {"parameter": "split"},
    "split=",
    error=bw.SpecError,
    split="test",
)
bad(
    "bad name",
    lambda d: raw(d / "x.bin", b"\x01\x00"),
    "cannot be named",
    {"parameter": "name"},
    "web",
    error=bw.SpecError,
    name="../x",
)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error_and_leaves_nothing(name, tmp_path):
    case = BAD[name]
    path = case.make(tmp_path)
    settings = {k: v(tmp_path) if callable(v) else v for k, v in case.settings.items()}
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(case.error, match=case.headline) as caught:
        adopt(path, to=tmp_path / "x.store", **settings)
    for what, value in case.where.items():
        found = caught.value.where[what]
        assert (Path(str(found)).name if what in ("file", "index", "tokens", "missing") else found) == value
    assert case.remedy in str(caught.value.remedy)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_fails_leaves_the_store_that_was_there(train):
    store = adopt(train)
    before = current_version(store.path)
    np.array([1, 999], np.uint16).tofile(train)
    with refused(bw.SourceError, "999", file=train, token=1):
        adopt(train)
    assert current_version(store.path) == before
    assert not (store.path / "work").exists()


@pytest.mark.parametrize("there", ["baked", "folder", "file"])
def test_only_adopted_stores_are_adopted_into(there, train, baked, tmp_path):
    to = tmp_path / "there"
    if there == "baked":
        shutil.copytree(baked, to)
    elif there == "folder":
        to.mkdir()
        (to / "thesis.txt").write_text("mine")
    else:
        to.write_text("mine")
    before = [path.read_bytes() for path in sorted(to.rglob("*")) if path.is_file()]
    with refused(bw.SpecError, to, parameter="to"):
        adopt(train, to=to)
    assert [path.read_bytes() for path in sorted(to.rglob("*")) if path.is_file()] == before


def test_a_file_that_changes_while_it_is_read_is_refused(train, monkeypatch):
    from batchwright.sources.tokens import TokenScan

    read = TokenScan._tokens

    def grow(self, *args):
        with open(train, "ab") as file:
            file.write(b"\1\0")
        return read(self, *args)

    monkeypatch.setattr(TokenScan, "_tokens", grow)
    with refused(bw.SourceError, file=train, remedy="again"):
        adopt(train)
    assert not train.with_suffix(".store").exists()
