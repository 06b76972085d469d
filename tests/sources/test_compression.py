"""Compressed files read like plain ones, whole, by name or by their first bytes; a damaged one is noticed."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import shutil
import struct
import subprocess
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest

import batchwright as bw
from batchwright.sources import compression, cut_files
from batchwright.sources.compression import compression_of, compression_of_bytes, open_raw, uncompressed_name
from refusals import refused
from shared import bake_source

TEXT = "".join(json.dumps({"text": f"row {n} " + str(n * 7919)}) + "\n" for n in range(20_000)).encode()
KINDS = ["gz", "zst", "lz4", "bz2", "xz"]


def compressed(kind: str, data: bytes = TEXT) -> bytes:
    if kind == "lz4":
        out = pa.BufferOutputStream()
        with pa.CompressedOutputStream(out, "lz4") as stream:
            stream.write(data)
        return out.getvalue().to_pybytes()
    return {
        "gz": lambda: gzip.compress(data, 6, mtime=0),
        "zst": lambda: pa.compress(data, "zstd", asbytes=True),
        "bz2": lambda: bz2.compress(data, 1),  # smaller blocks: more comes before a damage
        "xz": lambda: lzma.compress(data, preset=1),
    }[kind]()


def read(path: Path) -> bytes:
    with open_raw(path) as stream:
        return stream.read()


def written(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder / name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a.jsonl.{}", "A.JSONL.{}", "a.jsonl", "a"])
def test_what_was_compressed_comes_out_whatever_its_name_does_not_say(tmp_path, kind, name):
    assert read(written(tmp_path, name.format(kind), compressed(kind))) == TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_of_several_parts_is_read_to_its_end(tmp_path, kind):
    parts = [b"one\n", b"", TEXT, b"", b"two\n"]
    data = b"".join(compressed(kind, part) for part in parts)
    assert read(written(tmp_path, f"a.{kind}", data)) == b"".join(parts)


@pytest.mark.parametrize(
    "command",
    [
        "gzip -c {0} && gzip -1 -c {0}",
        "pigz -c {0} && pigz -c {0}",
        "zstd -q -T4 -B512KB -c {0} && zstd -q --long=24 -c {0}",
        "lz4 -q -B4 -BD -c {0} && lz4 -q -BX --content-size -c {0}",
        "bzip2 -c {0} && bzip2 -1 -c {0}",
        "pbzip2 -c {0} && pbzip2 -c {0}",
        "xz -0 -T4 --block-size=300KiB -c {0} && xz -0 -C sha256 -c {0}",
    ],
    ids=lambda command: command.split()[0],
)
def test_what_the_tools_of_the_trade_write_is_read_whole(tmp_path, command):
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"{command.split()[0]} is not installed")
    plain = written(tmp_path, "plain", TEXT)
    with open(tmp_path / "archive", "wb") as out:
        subprocess.run(command.format(plain), shell=True, check=True, stdout=out)
    assert read(tmp_path / "archive") == TEXT + TEXT


@pytest.mark.parametrize("kind", ["zst", "lz4"])
def test_frames_that_decoders_skip_are_skipped(tmp_path, kind):
    skipped = struct.pack("<II", 0x184D2A50, 5) + b"notes"
    data = skipped + compressed(kind, b"one\n") + skipped + compressed(kind, b"two\n")
    assert read(written(tmp_path, f"a.{kind}", data)) == b"one\ntwo\n"


def test_zeros_between_xz_streams_are_skipped(tmp_path):
    data = compressed("xz", b"one\n") + bytes(8) + compressed("xz", b"two\n") + bytes(4)
    assert read(written(tmp_path, "a.xz", data)) == b"one\ntwo\n"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", [1, 10, 0.5, -1])
def test_a_cut_off_archive_is_an_error_that_names_it(tmp_path, kind, left):
    data = compressed(kind)
    path = written(tmp_path, f"a.{kind}", data[: int(len(data) * left) if isinstance(left, float) else left])
    with refused(bw.SourceError, compression_of(path), "on_error='skip'", file=path):
        read(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("garbage", [b"g", b"garbage after the end", bytes(512)])
def test_what_follows_an_archive_and_is_none_is_an_error(tmp_path, kind, garbage):
    if kind == "xz" and garbage == bytes(512):
        pytest.skip("xz allows zeros there")
    path = written(tmp_path, f"a.{kind}", compressed(kind) + garbage)
    with refused(bw.SourceError, compression_of(path), "on_error='skip'", file=path):
        read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_not_what_its_extension_says_is_an_error_that_says_so(tmp_path, kind):
    for data in (TEXT, compressed("gz" if kind != "gz" else "xz")):
        path = written(tmp_path, f"a.jsonl.{kind}", data)
        with refused(bw.SourceError, compression_of(path), "extension", file=path):
            read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_file_holds_nothing_whatever_its_name(tmp_path, kind):
    assert read(written(tmp_path, f"a.{kind}", b"")) == b""


def test_an_xz_file_that_asks_for_much_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "_XZ_MEMORY_BYTES", 4 << 20)
    path = written(tmp_path, "a.xz", lzma.compress(b"x", preset=6))  # asks for 9 MiB
    with refused(bw.SourceError, file=path, reason="Memory usage limit exceeded"):
        read(path)


@pytest.mark.parametrize("text", [b"BZh9 is how bzip2 files begin", b"(\xc2\xb5/x)", b"PK", b"", b'{"text": "a"}'])
def test_text_is_not_taken_for_an_archive(text):
    assert compression_of_bytes(text) is None


def test_short_extensions_of_tar_files_say_both():
    for name, kind in (("a.tgz", "gzip"), ("a.tbz2", "bz2"), ("a.txz", "xz"), ("a.tzst", "zstd")):
        assert (compression_of(name), uncompressed_name(name)) == (kind, "a.tar")


@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_what_comes_out(tmp_path, kind):
    path = written(tmp_path, f"a.{kind}", compressed(kind, TEXT * 6))
    tracemalloc.start()
    try:
        with open_raw(path) as stream:
            while stream.read(1 << 16):
                pass
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


# Files by line: never cut if compressed.


def test_a_large_file_is_cut_only_if_its_first_bytes_are_no_archive(tmp_path):
    plain = written(tmp_path, "a.jsonl", TEXT)
    hidden = written(tmp_path, "b.jsonl", compressed("gz"))
    files = [(0, str(plain), plain.stat().st_size), (1, str(hidden), hidden.stat().st_size)]
    spans = [(span.file, span.start, span.stop) for unit in cut_files(files, None, 50_000) for span in unit.spans]
    assert [span for span in spans if span[0] == 1] == [(1, 0, None)]
    assert len(spans) > 10


def test_small_files_are_not_opened_when_they_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "open", lambda *_: pytest.fail("opened"), raising=False)
    cut_files([(n, str(tmp_path / f"{n}.jsonl"), 10) for n in range(5)], None, 1000)


# Bombs


@pytest.fixture
def _small_limits(monkeypatch):
    monkeypatch.setattr(compression, "_FREE_BYTES", 1 << 20)


@pytest.mark.usefixtures("_small_limits")
@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_that_grows_out_of_proportion_is_refused(tmp_path, kind):
    size = 40 << 20 if kind != "lz4" else 41 << 20  # lz4 cannot exceed 255:1
    path = written(tmp_path, f"a.{kind}", compressed(kind, bytes(size)))
    with refused(compression.DecompressionBomb, "1,048,576 bytes", file=path):
        read(path)


@pytest.mark.usefixtures("_small_limits")
def test_a_small_archive_may_grow_as_it_likes_and_a_large_one_as_text_does(tmp_path):
    assert len(read(written(tmp_path, "a.xz", compressed("xz", bytes(1 << 20))))) == 1 << 20
    repeated = TEXT[:20_000] * 500
    assert len(read(written(tmp_path, "b.gz", compressed("gz", repeated)))) == len(repeated)


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_before_the_damage_can_be_kept(tmp_path, kind):
    data = compressed(kind)
    path = written(tmp_path, f"a.jsonl.{kind}", data[: len(data) * 9 // 10])
    store = bake_source(tmp_path / "a.store", path, name="a", on_error="skip")
    part = store.report["ingredients"]["a"]
    assert part["dropped"] == {"damaged archive": 1}
    assert 5_000 < part["documents"] < 19_000
    assert part["rows_read"] == part["documents"] + 1
    assert sorted(row.row for row in store.rows()) == list(range(part["documents"]))


def test_plain_and_compressed_files_give_the_same_store(tmp_path):
    text = TEXT[:50_000].rpartition(b"\n")[0]
    fingerprints = {bake_source(tmp_path / "plain.store", written(tmp_path, "a.jsonl", text)).fingerprint}
    for kind in KINDS:
        path = written(tmp_path, f"a.jsonl.{kind}", compressed(kind, text))
        fingerprints.add(bake_source(tmp_path / f"{kind}.store", path).fingerprint)
    assert len(fingerprints) == 1
