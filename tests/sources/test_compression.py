"""Compressed files read like plain ones, and a damaged one is noticed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest

import penstock as ps
from penstock.sources.compression import open_raw

TEXT = "".join(json.dumps({"text": f"row {n} " + str(n * 7919)}) + "\n" for n in range(20_000)).encode()


def compressed(kind: str, data: bytes = TEXT) -> bytes:
    return gzip.compress(data, mtime=0) if kind == "gz" else pa.compress(data, "zstd", asbytes=True)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_what_was_compressed_comes_out(tmp_path, kind):
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(compressed(kind))
    with open_raw(path) as stream:
        assert stream.read() == TEXT


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_an_archive_of_several_parts_is_read_to_its_end(tmp_path, kind):
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(compressed(kind, b"one\n") + compressed(kind, b"two\n"))
    with open_raw(path) as stream:
        assert stream.read() == b"one\ntwo\n"


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("left", [1, 10, 0.5, -1])
def test_a_cut_off_archive_is_an_error_that_names_it(tmp_path, kind, left):
    path = tmp_path / f"a.jsonl.{kind}"
    data = compressed(kind)
    path.write_bytes(data[: int(len(data) * left) if isinstance(left, float) else left])
    with open_raw(path) as stream, pytest.raises(ps.SourceError, match="is truncated or damaged") as caught:
        stream.read()
    assert str(caught.value.where["file"]) == str(path)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_file_that_is_not_what_its_extension_says_is_an_error(tmp_path, kind):
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(TEXT)
    with open_raw(path) as stream, pytest.raises(ps.SourceError, match="is truncated or damaged"):
        stream.read()


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_what_comes_before_the_damage_can_be_kept(tmp_path, kind):
    path = tmp_path / f"a.jsonl.{kind}"
    data = compressed(kind)
    path.write_bytes(data[: len(data) * 9 // 10])
    store = bake(path, tmp_path / "a.store", on_error="skip")
    part = store.report["ingredients"]["a"]
    assert part["dropped"] == {"damaged archive": 1}
    assert 10_000 < part["documents"] < 19_000
    assert part["rows_read"] == part["documents"] + 1
    assert sorted(row.row for row in store.rows()) == list(range(part["documents"]))


def bake(path: Path, to: Path, **settings) -> ps.Store:
    recipe = ps.DatasetRecipe().add_ingredient(path, name="a").prepare_step(ps.tokenize("bytes"))
    return ps.bake(recipe, to, workers=0, show_progress=False, **settings)


def test_plain_gzip_and_zstd_give_the_same_store(tmp_path):
    fingerprints = set()
    for suffix, data in (("", TEXT), (".gz", compressed("gz")), (".zst", compressed("zst"))):
        (tmp_path / f"a.jsonl{suffix}").write_bytes(data)
        fingerprints.add(bake(tmp_path / f"a.jsonl{suffix}", tmp_path / f"a{suffix}.store").fingerprint)
    assert len(fingerprints) == 1
