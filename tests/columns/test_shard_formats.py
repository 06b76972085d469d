"""Shards of every format give the same columns, read only what is asked for, and say what is wrong with them."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchwright.base.errors import SourceError, SpecError
from batchwright.base.machine import is_linux
from batchwright.columns.row_shard import BLOCK_ROWS, decode
from batchwright.columns.shard import EXTENSIONS, Column, content_mark, open_shard, peek
from refusals import refused

ROWS = 11


def toy(rows: int = ROWS) -> dict[str, np.ndarray]:
    """Columns in which every value says its row."""
    number = np.arange(rows)
    return {
        "board": (number[:, None, None] * 10 + np.arange(6).reshape(2, 3)).astype(np.uint8),
        "is_last": number == rows - 1,
        "policy": (number[:, None] + np.arange(4) / 4).astype(np.float16),
        "value": (number / 8).astype(np.float32),
    }


def read(path: Path, wanted: Any = slice(None), rows_per_chunk: int = 4, **given: Any) -> dict[str, np.ndarray]:
    """All chunks, copied: the memory of one is used for the next."""
    with open_shard(path, allow_pickle=True, **given) as shard:
        chunks = [
            {name: np.array(values) for name, values in chunk.items()} for chunk in shard.chunks(wanted, rows_per_chunk)
        ]
        for name, values in ((name, values) for chunk in chunks for name, values in chunk.items()):
            assert len(values) <= rows_per_chunk
            assert Column(values.dtype, values.shape[1:]) == shard.schema[name]
        return {
            name: np.concatenate([chunk[name] for chunk in chunks])
            if chunks
            else np.empty((0, *column.shape), column.dtype)
            for name, column in shard.schema.items()
        }


def assert_equal(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(got) == sorted(expected)
    for name, values in expected.items():
        assert (got[name].dtype, got[name].shape) == (values.dtype, values.shape), name
        np.testing.assert_array_equal(got[name], values, err_msg=name)


# One writer for each format


def as_arrow(values: np.ndarray) -> pa.Array:
    flat = pa.array(values.reshape(-1))
    for length in reversed(values.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, length)
    return flat


def as_table(columns: dict[str, np.ndarray]) -> pa.Table:
    return pa.table({name: as_arrow(values) for name, values in columns.items()})


def write_ipc(path: Path, table: pa.Table, new: Any = pa.ipc.new_file, compression: str | None = None) -> None:
    with new(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=5)


def write_safetensors(path: Path, columns: dict[str, np.ndarray], **changed: Any) -> None:
    names = {"float16": "F16", "float32": "F32", "float64": "F64", "bool": "BOOL", "uint8": "U8", "int64": "I64"}
    header: dict[str, Any] = {"__metadata__": {"made by": "hand"}}
    data = b""
    for name, values in columns.items():
        offsets = [len(data), len(data) + values.nbytes]
        header[name] = {"dtype": names[str(values.dtype)], "shape": list(values.shape), "data_offsets": offsets}
        header[name] |= changed.get(name, {})
        data += values.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def as_rows(columns: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    return [
        dict(zip(columns, (value.tolist() for value in row), strict=True))
        for row in zip(*columns.values(), strict=True)
    ]


def as_lines(rows: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_zstd(path: Path, data: bytes) -> None:
    with pa.output_stream(str(path), compression="zstd") as stream:
        stream.write(data)


Writer = Callable[[Path, dict[str, np.ndarray]], object]
SEEKABLE: dict[str, tuple[str, Writer]] = {
    "stored npz": ("s_1.npz", lambda path, columns: np.savez(path, **columns)),
    "deflated npz": ("s_1.npz", lambda path, columns: np.savez_compressed(path, **columns)),
    "Arrow file": ("s_1.arrow", lambda path, columns: write_ipc(path, as_table(columns))),
    "Arrow stream": ("s_1.ipc", lambda path, columns: write_ipc(path, as_table(columns), pa.ipc.new_stream)),
    "compressed Arrow file": (
        "s_1.feather",
        lambda path, columns: write_ipc(path, as_table(columns), compression="lz4"),
    ),
    "compressed Arrow stream": (
        "s_1.arrow",
        lambda path, columns: write_ipc(path, as_table(columns), pa.ipc.new_stream, "zstd"),
    ),
    "Parquet": ("s_1.parquet", lambda path, columns: pq.write_table(as_table(columns), path, row_group_size=5)),
    "safetensors": ("s_1.safetensors", write_safetensors),
}


def arrays_by_row(columns: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    rows = len(columns["value"])
    return [{name: values[row] for name, values in columns.items()} for row in range(rows)]


def decoded_as(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What numbers written as text come back as."""
    wide = {"u": np.int64, "i": np.int64, "f": np.float64, "b": np.bool_}
    return {name: values.astype(wide[values.dtype.kind]) for name, values in columns.items()}


# What every format gives


@pytest.mark.parametrize("name", SEEKABLE)
@pytest.mark.parametrize(
    "wanted",
    [slice(None), slice(1, None, 3), slice(4, 9), slice(3, 3), np.array([0, 4, 5, 10]), np.array([7])],
    ids=["all", "a lane", "a part", "none", "some", "one"],
)
def test_a_shard_gives_the_wanted_rows_in_order(name: str, wanted: Any, tmp_path: Path) -> None:
    file, write = SEEKABLE[name]
    write(tmp_path / file, toy())
    assert_equal(read(tmp_path / file, wanted), {column: values[wanted] for column, values in toy().items()})


@pytest.mark.parametrize("name", SEEKABLE)
def test_peek_says_rows_and_schema_without_decoding(name: str, tmp_path: Path) -> None:
    file, write = SEEKABLE[name]
    write(tmp_path / file, toy())
    facts = peek(tmp_path / file)
    assert (facts.format, facts.rows) == (EXTENSIONS[Path(file).suffix], ROWS)
    assert facts.schema == {
        "board": Column(np.dtype(np.uint8), (2, 3)),
        "is_last": Column(np.dtype(np.bool_), ()),
        "policy": Column(np.dtype(np.float16), (4,)),
        "value": Column(np.dtype(np.float32), ()),
    }


@pytest.mark.parametrize("name", SEEKABLE)
def test_a_shard_without_rows_is_read_as_that(name: str, tmp_path: Path) -> None:
    file, write = SEEKABLE[name]
    write(tmp_path / file, toy(0))
    assert_equal(read(tmp_path / file), toy(0))


@pytest.mark.parametrize("name", SEEKABLE)
def test_only_the_named_columns_are_read(name: str, tmp_path: Path) -> None:
    file, write = SEEKABLE[name]
    write(tmp_path / file, toy())
    assert_equal(read(tmp_path / file, columns=["value", "policy"]), {k: toy()[k] for k in ("policy", "value")})


@pytest.mark.parametrize(
    ("file", "write"),
    [
        ("s.jsonl", lambda path, rows: path.write_bytes(as_lines(rows))),
        ("s.ndjson.gz", lambda path, rows: path.write_bytes(gzip.compress(as_lines(rows)))),
        ("s.jsonl.zst", lambda path, rows: write_zstd(path, as_lines(rows))),
        ("s.pkl", lambda path, rows: path.write_bytes(pickle.dumps(rows))),
        ("s.pickle.gz", lambda path, rows: path.write_bytes(gzip.compress(pickle.dumps({"examples": rows})))),
    ],
)
def test_rows_of_plain_numbers_become_wide_columns(
    file: str, write: Callable[[Path, list[dict[str, Any]]], object], tmp_path: Path
) -> None:
    write(tmp_path / file, as_rows(toy()))
    decoded = decode(str(tmp_path / file), EXTENSIONS["".join(Path(file).suffixes)], None)
    got = {name: np.concatenate(blocks) for name, blocks in decoded.blocks.items()}
    assert_equal(got, decoded_as(toy()))


def test_a_child_decodes_jsonl_and_hands_out_lanes(tmp_path: Path) -> None:
    number = np.arange(2 * BLOCK_ROWS + 7)  # more than one block
    (tmp_path / "s.jsonl").write_bytes(as_lines([{"n": int(n), "at": [int(n), 0.5]} for n in number]))
    expected = {"n": number, "at": np.stack([number, np.full(len(number), 0.5)], axis=1)}
    with open_shard(tmp_path / "s.jsonl") as shard:
        for wanted in (slice(None), slice(5, None, 7), np.array([0, BLOCK_ROWS - 1, BLOCK_ROWS])):
            chunks = [{k: v.copy() for k, v in chunk.items()} for chunk in shard.chunks(wanted, 999)]
            for name, values in expected.items():
                np.testing.assert_array_equal(np.concatenate([chunk[name] for chunk in chunks]), values[wanted])


def test_a_child_decodes_pickled_arrays_in_their_own_dtypes(tmp_path: Path) -> None:
    (tmp_path / "s.pkl.gz").write_bytes(gzip.compress(pickle.dumps({"examples": arrays_by_row(toy())})))
    assert_equal(read(tmp_path / "s.pkl.gz"), toy())


def test_jsonl_without_rows_has_none(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes(b"\n \n")
    decoded = decode(str(tmp_path / "s.jsonl"), "jsonl", None)
    assert (decoded.starts, decoded.schema) == ([0], {})


def test_whole_numbers_and_fractions_in_one_column_are_floats_over_all_blocks(tmp_path: Path) -> None:
    rows = [{"value": 1}] * BLOCK_ROWS + [{"value": 0.5}]
    (tmp_path / "s.jsonl").write_bytes(as_lines(rows))
    assert decode(str(tmp_path / "s.jsonl"), "jsonl", None).schema == {"value": Column(np.dtype(np.float64), ())}


def test_keys_of_64_bits_are_not_rounded(tmp_path: Path) -> None:
    rows = [{"key": 2**63 + 1}] * BLOCK_ROWS + [{"key": 1}]
    (tmp_path / "s.jsonl").write_bytes(as_lines(rows))
    assert decode(str(tmp_path / "s.jsonl"), "jsonl", None).schema == {"key": Column(np.dtype(np.uint64), ())}


@pytest.mark.parametrize("keys", [[2**63 + 1, 1], [[1, 2**64 - 1], [2, 3]]])
def test_keys_of_64_bits_beside_smaller_ones_are_uint64(keys: list[Any], tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes(as_lines([{"key": key} for key in keys]))
    decoded = decode(str(tmp_path / "s.jsonl"), "jsonl", None)
    assert decoded.blocks["key"][0].tolist() == keys
    assert decoded.schema["key"].dtype == np.uint64


@pytest.mark.parametrize("rows_before", [1, BLOCK_ROWS])
def test_a_whole_number_that_a_float_would_round_is_refused_beside_fractions(rows_before: int, tmp_path: Path) -> None:
    rows = [{"key": 2**53 + 1}] * rows_before + [{"key": 0.5}]
    (tmp_path / "s.jsonl").write_bytes(as_lines(rows))
    with refused(SourceError, "64 bits", file=tmp_path / "s.jsonl", column="key"):
        decode(str(tmp_path / "s.jsonl"), "jsonl", None)


@pytest.mark.parametrize("rows_before", [1, BLOCK_ROWS])
def test_pickled_arrays_of_small_whole_numbers_and_fractions_are_floats(rows_before: int, tmp_path: Path) -> None:
    examples = [{"v": np.array([1, 2], np.uint8)}] * rows_before + [{"v": np.array([0.5, 1], np.float32)}]
    (tmp_path / "s.pkl").write_bytes(pickle.dumps({"examples": examples}))
    assert decode(str(tmp_path / "s.pkl"), "pickle", None).schema == {"v": Column(np.dtype(np.float32), (2,))}


@pytest.mark.parametrize(("line", "kind"), [(b"[1, 2]", "list"), (b"7", "number")])
def test_a_line_that_is_no_object_is_called_what_it_is(line: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes(line)
    with refused(SourceError, kind, file=tmp_path / "s.jsonl", row=0):
        decode(str(tmp_path / "s.jsonl"), "jsonl", None)


@pytest.mark.parametrize("value", ["NaN", "-Infinity"])
def test_numbers_that_json_does_not_have_are_said_to_be_those(value: str, tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text(f'{{"value": {value}}}')
    with refused(SourceError, "JSON", file=tmp_path / "s.jsonl", row=0, remedy="NaN"):
        decode(str(tmp_path / "s.jsonl"), "jsonl", None)


def test_peek_at_what_must_be_decoded_says_only_the_memory(tmp_path: Path) -> None:
    data = as_lines(as_rows(toy(1000)))
    (tmp_path / "plain.jsonl").write_bytes(data)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(data))
    plain, packed = peek(tmp_path / "plain.jsonl"), peek(tmp_path / "packed.jsonl.gz")
    assert (plain.rows, plain.schema) == (None, None)
    assert plain.decode_bytes == packed.decode_bytes > 5 * len(data)


def test_big_endian_columns_become_native(tmp_path: Path) -> None:
    columns = {"value": np.arange(5, dtype=">f4"), "board": np.arange(10, dtype=">i2").reshape(5, 2)}
    np.savez(tmp_path / "s.npz", **columns)
    assert_equal(read(tmp_path / "s.npz"), {name: v.astype(v.dtype.newbyteorder("=")) for name, v in columns.items()})


def test_every_byte_but_zero_is_one_true(tmp_path: Path) -> None:
    bits = np.array([0, 1, 2, 255], np.uint8)
    write_safetensors(tmp_path / "s.safetensors", {"is_last": bits.view(np.bool_)})
    assert read(tmp_path / "s.safetensors")["is_last"].view(np.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_in_fortran_order_are_rows_all_the_same(save: Any, tmp_path: Path) -> None:
    board = np.arange(24, dtype=np.int32).reshape(4, 3, 2)
    save(tmp_path / "s.npz", board=np.asfortranarray(board))
    assert_equal(read(tmp_path / "s.npz", slice(1, None, 2)), {"board": board[1::2]})


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_lists_of_one_length_and_tensors_are_columns(suffix: str, tmp_path: Path) -> None:
    table = pa.table(
        {
            "lists": pa.array([[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [0, 1, 2]]], pa.list_(pa.large_list(pa.int16()))),
            "tensors": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8, dtype=np.float32).reshape(2, 2, 2)),
        }
    )
    path = tmp_path / f"s.{suffix}"
    write_ipc(path, table) if suffix == "arrow" else pq.write_table(table, path)
    lists = np.array([[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [0, 1, 2]]], dtype=np.int16)
    assert_equal(read(path), {"lists": lists, "tensors": np.arange(8, dtype=np.float32).reshape(2, 2, 2)})


def test_a_few_rows_of_a_large_shard_read_little_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "s.npz", board=np.zeros((20_000, 400), np.uint8))
    with open_shard(tmp_path / "s.npz") as shard:
        read_bytes = []
        preadv = os.preadv

        def counted(descriptor: int, buffers: Any, offset: int) -> int:
            read_bytes.append(sum(len(buffer) for buffer in buffers))
            return preadv(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", counted)
        (chunk,) = shard.chunks(np.array([3, 9_000, 19_000]), 8)
    assert chunk["board"].shape == (3, 400)
    assert sum(read_bytes) < 20_000


def test_a_compressed_arrow_file_with_a_damaged_footer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.arrow"
    write_ipc(path, as_table(toy()), compression="zstd")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with refused(SourceError, "not an Arrow file, or damaged", file=str(path)):
        read(path)


@pytest.mark.parametrize("changed_byte", [0, 9 * 307_200 // 17, -1])
def test_a_content_mark_tells_a_changed_file_from_a_copy(changed_byte: int, tmp_path: Path) -> None:
    data = bytearray(range(256)) * 1200
    for name in ("one.npz", "copy.npz"):
        (tmp_path / name).write_bytes(data)
    data[changed_byte] ^= 1
    (tmp_path / "changed.npz").write_bytes(data)
    marks = [content_mark(tmp_path / name) for name in ("one.npz", "copy.npz", "changed.npz")]
    assert marks[0] == marks[1] != marks[2]


# Bad input: SourceError, the file, the row and the column, and what to do


@dataclass
class Bad:
    file: str
    write: Callable[[Path], object]
    headline: str
    where: dict[str, Any] = field(default_factory=dict)
    remedy: str = "write it again"


def npz(**columns: Any) -> Callable[[Path], object]:
    return lambda path: np.savez(path, **columns)


def whole(write: Writer) -> Callable[[Path], object]:
    return lambda path: write(path, toy())


def cut(write: Writer, keep: float = 0.7) -> Callable[[Path], object]:
    def write_part(path: Path) -> None:
        write(path, toy(200))
        os.truncate(path, int(path.stat().st_size * keep))

    return write_part


def flipped(write: Writer, at: bytes) -> Callable[[Path], object]:
    """Bits of the data flipped: the bytes are looked for in the file."""

    def write_flipped(path: Path) -> None:
        write(path, toy(2000))  # more than is read with the header
        data = bytearray(path.read_bytes())
        data[data.index(at) + 1] ^= 0xFF
        path.write_bytes(data)

    return write_flipped


def members(**data: bytes) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in data.items():
                archive.writestr(name, content)

    return write


def npy(header: str) -> bytes:
    """An array without data, whose header says what one likes."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def table(**columns: Any) -> pa.Table:
    return pa.table(columns)


def ipc(**columns: Any) -> Callable[[Path], object]:
    return lambda path: write_ipc(path, table(**columns))


def parquet(**columns: Any) -> Callable[[Path], object]:
    return lambda path: pq.write_table(table(**columns), path)


def lines(*rows: Any) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(as_lines(rows))


def pickled(held: Any) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(pickle.dumps(held))


LIE = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 8), }"
BOARD = toy(200)["board"][7].tobytes()

BAD = {
    # npz
    "npz: no archive": Bad("s.npz", lambda path: path.write_bytes(b"PK??" * 9), "not an npz file"),
    "npz: Arrow by its content": Bad("s.npz", whole(SEEKABLE["Arrow file"][1]), "not an npz file"),
    "npz: cut short": Bad("s.npz", cut(SEEKABLE["stored npz"][1]), "not an npz file"),
    "npz: flipped bits": Bad(
        "s.npz", flipped(SEEKABLE["stored npz"][1], BOARD), "column 'board' is damaged", {"column": "board"}
    ),
    "npz: a header that lies": Bad("s.npz", members(**{"a.npy": npy(LIE)}), "column 'a' is damaged", {"column": "a"}),
    "npz: no array": Bad("s.npz", members(**{"a.npy": b"hello"}), "column 'a' is damaged", {"column": "a"}),
    "npz: a text among arrays": Bad(
        "s.npz", members(**{"notes.txt": b"hello"}), "member 'notes.txt' is no array", remedy=r"columns=\[...\] without"
    ),
    "npz: no members": Bad("s.npz", members(), "without columns"),
    "npz: unequal lengths": Bad(
        "s.npz",
        npz(a=np.zeros(3), b=np.zeros((4, 2))),
        "'a' has 3 rows, 'b' has 4",
        {"column": "b"},
        r"columns=\[...\] without 'b'",
    ),
    "npz: a single value": Bad("s.npz", npz(a=np.float32(1)), "single value", {"column": "a"}, "one value a row"),
    "npz: objects": Bad(
        "s.npz",
        npz(a=np.array([{}, []], dtype=object)),
        "Python objects, which are pickles",
        {"column": "a"},
        "numbers",
    ),
    "npz: records": Bad(
        "s.npz", npz(a=np.zeros(3, [("x", "f4"), ("y", "i4")])), "records of x, y", {"column": "a"}, "each field"
    ),
    "npz: text": Bad("s.npz", npz(a=np.array(["x"])), "holds <U1", {"column": "a"}, "numbers or booleans"),
    "npz: complex numbers": Bad("s.npz", npz(a=np.zeros(2, complex)), "holds complex128", {"column": "a"}, "numbers"),
    "npz: nothing in a row": Bad("s.npz", npz(a=np.zeros((3, 0))), "no values", {"column": "a"}, "without 'a'"),
    # safetensors
    "safetensors: too short": Bad("s.safetensors", lambda path: path.write_bytes(b"abc"), "not a safetensors file"),
    "safetensors: a header longer than the file": Bad(
        "s.safetensors", lambda path: path.write_bytes(struct.pack("<Q", 2**62) + b"{}"), "not a safetensors file"
    ),
    "safetensors: no JSON": Bad(
        "s.safetensors", lambda path: path.write_bytes(struct.pack("<Q", 2) + b"{?"), "not a safetensors file"
    ),
    "safetensors: cut short": Bad("s.safetensors", cut(write_safetensors), "not a safetensors file"),
    "safetensors: a shape that lies": Bad(
        "s.safetensors",
        lambda path: write_safetensors(path, toy(), value={"shape": [10**12]}),
        "is damaged",
        {"column": "value"},
    ),
    "safetensors: offsets that overlap": Bad(
        "s.safetensors",
        lambda path: write_safetensors(
            path, {"a": np.arange(2), "b": np.arange(0)}, b={"shape": [1], "data_offsets": [8, 16]}
        ),
        "is damaged",
    ),
    "safetensors: bfloat16": Bad(
        "s.safetensors",
        lambda path: write_safetensors(path, toy(), policy={"dtype": "BF16"}),
        "column 'policy' is BF16",
        {"column": "policy"},
        "F32 or F16, or columns",
    ),
    # Arrow and Parquet
    "arrow: text": Bad(
        "s.arrow", ipc(a=pa.array(["x"])), "column 'a' holds string", {"column": "a"}, r"columns=\[...\] without 'a'"
    ),
    "arrow: null": Bad(
        "s.arrow", ipc(a=pa.array([1, 2, None])), "row 2 has no value", {"row": 2, "column": "a"}, "null"
    ),
    "arrow: null in a list": Bad(
        "s.arrow",
        ipc(a=pa.array([[1, 2]] * 6 + [[1, None]], pa.list_(pa.int64(), 2))),
        "row 6 has no value",
        {"row": 6, "column": "a"},
        "null",
    ),
    "arrow: ragged": Bad(
        "s.arrow",
        ipc(a=pa.array([[1, 2]] * 7 + [[1]])),
        r"row 7 of column 'a' has shape \(1,\), the rows before have \(2,\)",
        {"row": 7, "column": "a"},
        "pad it",
    ),
    "arrow: dictionary": Bad(
        "s.arrow", ipc(a=pa.array(["x", "x"]).dictionary_encode()), "holds dictionary", {"column": "a"}, "without 'a'"
    ),
    "arrow: not one": Bad("s.arrow", lambda path: path.write_bytes(b"hello " * 50), "not an Arrow file"),
    "arrow: cut short": Bad("s.arrow", cut(SEEKABLE["Arrow file"][1]), "not an Arrow file"),
    "arrow: a stream cut short": Bad("s.ipc", cut(SEEKABLE["Arrow stream"][1]), "not an Arrow file"),
    "arrow: two of one name": Bad(
        "s.arrow",
        lambda path: write_ipc(path, pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])),
        "two columns are called 'a'",
        {"column": "a"},
        "its own name",
    ),
    "parquet: text": Bad("s.parquet", parquet(a=["x"]), "column 'a' holds string", {"column": "a"}, "without 'a'"),
    "parquet: null": Bad("s.parquet", parquet(a=[1, None]), "row 1 has no value", {"row": 1, "column": "a"}, "null"),
    "parquet: ragged": Bad(
        "s.parquet", parquet(a=[[1, 2], [1, 2, 3]]), r"has shape \(3,\)", {"row": 1, "column": "a"}, "pad it"
    ),
    "parquet: not one": Bad("s.parquet", lambda path: path.write_bytes(b"hello " * 50), "not a Parquet file"),
    "parquet: cut short": Bad("s.parquet", cut(SEEKABLE["Parquet"][1]), "not a Parquet file"),
    # JSONL and pickle, by the function that the child runs
    "jsonl: no JSON": Bad(
        "s.jsonl", lambda path: path.write_bytes(b'{"a": 1}\n\n{"a": \n'), "row 1 is not JSON", {"row": 1}
    ),
    "jsonl: a cut gzip": Bad(
        "s.jsonl.gz", lambda path: path.write_bytes(gzip.compress(as_lines([{"a": 1}] * 99))[:-9]), "damaged"
    ),
    "jsonl: a cut zstd": Bad(
        "s.jsonl.zst", lambda path: (write_zstd(path, os.urandom(9999)), os.truncate(path, 5000)), "damaged"
    ),
    "jsonl: another shape": Bad(
        "s.jsonl",
        lines(*[{"a": [1, 2]}] * BLOCK_ROWS, {"a": [1, 2]}, {"a": [1]}),
        r"row 1,025 of column 'a' has shape \(1,\), the rows before have \(2,\)",
        {"row": 1025, "column": "a"},
        "pad it",
    ),
    "jsonl: ragged in a row": Bad(
        "s.jsonl", lines({"a": [[1], [1, 2]]}), "row 0 has lists of unequal length", {"row": 0, "column": "a"}, "equal"
    ),
    "jsonl: null": Bad("s.jsonl", lines({"a": 1}, {"a": None}), "row 1 has no value", {"row": 1}, "without 'a'"),
    "jsonl: text": Bad("s.jsonl", lines({"a": "x"}), "row 0 has text in column 'a'", {"row": 0}, "without 'a'"),
    "jsonl: a number too big": Bad("s.jsonl", lines({"a": 2**70}), "too big for 64 bits", {"row": 0}, "without 'a'"),
    "jsonl: big and negative": Bad(
        "s.jsonl", lines({"a": 2**63}, {"a": -1}), "do not fit in one type", {"column": "a"}, "without 'a'"
    ),
    "jsonl: a column less": Bad(
        "s.jsonl", lines({"a": 1, "b": 1}, {"a": 1}), "row 1 has no column 'b'", {"row": 1}, "same"
    ),
    "jsonl: a column more": Bad(
        "s.jsonl", lines({"a": 1}, {"a": 1, "b": 1}), "row 1 has a column 'b'", {"row": 1}, "same"
    ),
    "jsonl: no object": Bad(
        "s.jsonl", lines({"a": 1}, [1, 2]), "row 1 is .*, not columns by name", {"row": 1}, "each row"
    ),
    "pickle: no examples": Bad("s.pkl", pickled({"rows": []}), "no pickle of examples", {}, "examples"),
    "pickle: an unknown class": Bad(
        "s.pkl", lambda path: path.write_bytes(b"cno_such_module\nThing\n."), "cannot be unpickled", {}, "sys.path"
    ),
    "pickle: cut short": Bad(
        "s.pkl", cut(lambda path, c: path.write_bytes(pickle.dumps(as_rows(c)))), "cannot be unpickled"
    ),
    "pickle: another shape": Bad(
        "s.pkl",
        pickled([{"a": np.zeros(2)}, {"a": np.zeros(3)}]),
        r"row 1 of column 'a' has shape \(3,\), the rows before have \(2,\)",
        {"row": 1, "column": "a"},
        "pad it",
    ),
    "pickle: objects": Bad(
        "s.pkl", pickled([{"a": np.array([{}])}]), "row 0 has an object", {"row": 0, "column": "a"}, "without 'a'"
    ),
    # Any
    "a directory": Bad("s.npz", lambda path: path.mkdir(), "s.npz is a directory", {}, r"\*\.npz.*\*\.pkl\.gz"),
    "an unknown ending": Bad("s.csv", lambda path: path.write_text("a"), "no format that shards have", {}, r"\*\.npz"),
    "nothing there": Bad("s.npz", lambda path: None, "s.npz is not there", {}, "put it back"),
    "an empty file": Bad("s.parquet", lambda path: path.touch(), "s.parquet is empty", {}, "write it again"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_shard_is_named_with_what_to_do(name: str, tmp_path: Path) -> None:
    bad = BAD[name]
    path = tmp_path / bad.file
    bad.write(path)
    kind = name.partition(":")[0]
    with refused(SourceError, file=path, **bad.where) as caught:
        decode(str(path), kind, None) if kind in ("jsonl", "pickle") else read(path)
    assert re.search(bad.headline, caught.value.headline)
    assert re.search(bad.remedy, caught.value.remedy)


def test_a_pickle_is_not_opened_unless_told_to(tmp_path: Path) -> None:
    path = tmp_path / "shard_0000.pkl.gz"
    path.write_bytes(gzip.compress(b"cos\nabort\n(tR."))
    for opened in (open_shard, peek):
        command = f"batchwright shards convert {tmp_path} {tmp_path}-npz --allow-pickle"
        with refused(SourceError, "pickle", "allow_pickle=True", file=path, remedy=command):
            opened(path)


@pytest.mark.parametrize("name", SEEKABLE)
def test_a_column_that_is_not_there_is_answered_with_the_nearest(name: str, tmp_path: Path) -> None:
    file, write = SEEKABLE[name]
    write(tmp_path / file, toy())
    has = "board, is_last, policy, value"
    with refused(SourceError, column="polcy", columns=has, remedy="columns=['value', 'policy']"):
        read(tmp_path / file, columns=["value", "polcy"])


@pytest.mark.parametrize("columns", [[], "board"])
def test_columns_must_be_a_list_of_names(columns: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", **toy())
    with refused(SpecError, f"columns={columns!r}", parameter="columns"):
        open_shard(tmp_path / "s.npz", columns=columns)


@pytest.mark.parametrize(
    ("file", "write"),
    [
        ("s.npz", npz(a=np.arange(3), bad=np.array([None]))),
        ("s.safetensors", lambda path: write_safetensors(path, {"a": np.arange(3), "bad": np.zeros(5)})),
        ("s.arrow", ipc(a=np.arange(3), bad=["x", None, "y"])),
        ("s.parquet", parquet(a=np.arange(3), bad=[[1], [1, 2], None])),
        ("s.jsonl", lines({"a": 0}, {"a": 1, "bad": "x"}, {"a": 2, "bad": [[], 1]})),
    ],
)
def test_a_column_that_is_not_wanted_is_not_checked(file: str, write: Callable[[Path], object], tmp_path: Path) -> None:
    write(tmp_path / file)
    assert_equal(read(tmp_path / file, columns=["a"]), {"a": np.arange(3)})


@pytest.mark.parametrize("wanted", [slice(None, None, -1), np.array([3, 1]), np.array([-1]), np.array([ROWS])])
def test_rows_are_asked_for_in_order_and_where_there_are_some(wanted: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", **toy())
    with refused(SpecError, parameter="wanted"):
        read(tmp_path / "s.npz", wanted)


@pytest.mark.parametrize("name", ["stored npz", "safetensors"])
def test_a_file_that_is_cut_while_it_is_read_is_an_error(name: str, tmp_path: Path) -> None:
    file, write = SEEKABLE[name]
    write(tmp_path / file, toy(200))
    with open_shard(tmp_path / file) as shard:
        chunks = shard.chunks(slice(None), 20)
        next(chunks)
        os.truncate(tmp_path / file, 900)
        with refused(SourceError, "byte 900", file=tmp_path / file):
            list(chunks)


def test_an_arrow_stream_whose_writer_was_killed_between_two_batches_is_refused(tmp_path: Path) -> None:
    table = pa.table({"value": np.arange(6)})
    with pa.OSFile(str(tmp_path / "s.arrow"), "wb") as file:
        writer = pa.ipc.new_stream(file, table.schema)
        writer.write_table(table, max_chunksize=2)  # and no writer.close()
    with refused(SourceError, "6 rows", file=tmp_path / "s.arrow"):
        read(tmp_path / "s.arrow")


@pytest.mark.parametrize("name", [name for name in SEEKABLE if "rrow" in name])
def test_an_arrow_file_that_is_cut_between_two_chunks_does_not_end_the_process(name: str, tmp_path: Path) -> None:
    file, write = SEEKABLE[name]
    write(tmp_path / file, toy(20_000))
    with open_shard(tmp_path / file) as shard:
        chunks = shard.chunks(slice(None), 20)
        next(chunks)
        os.truncate(tmp_path / file, 0)
        with refused(SourceError, "has 0", file=tmp_path / file):
            next(chunks)


@pytest.mark.parametrize("name", ["stored npz", "deflated npz", "safetensors"])
@pytest.mark.parametrize("step", [1, 16])
def test_reading_takes_no_more_memory_than_it_says(name: str, step: int, tmp_path: Path) -> None:
    file, write = SEEKABLE[name]
    columns = {"board": np.zeros((100_000, 128), np.uint8), "value": np.zeros(100_000, np.float32)}
    write(tmp_path / file, columns)
    tracemalloc.start()
    try:
        with open_shard(tmp_path / file) as shard:
            for _ in shard.chunks(slice(0, None, step), 1000):
                pass
            peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < shard.decode_bytes + 132 * 1000 < 13_200_000 / 2


# The child process


@pytest.mark.skipif(not is_linux(), reason="only Linux limits the memory of a process")
def test_a_shard_too_big_for_its_budget_is_an_error_and_not_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "s.pkl"
    path.write_bytes(b"cbuiltins\nbytearray\n(L8000000000L\ntR.")  # 8 GB when read
    with refused(SourceError, "100,000,000 bytes", file=path, remedy="max_memory_gb"):
        open_shard(path, allow_pickle=True, budget=100_000_000)


def test_a_child_that_dies_is_an_error_that_names_the_shard(tmp_path: Path) -> None:
    path = tmp_path / "s.pkl"
    path.write_bytes(b"cos\n_exit\n(I3\ntR.")
    with refused(SourceError, "exit code 3", file=path):
        open_shard(path, allow_pickle=True)


def test_a_fault_in_the_child_arrives_whole(tmp_path: Path) -> None:
    lines({"a": 1}, {"a": None})(tmp_path / "s.jsonl")
    with refused(SourceError, file=tmp_path / "s.jsonl", row=1, column="a"):
        open_shard(tmp_path / "s.jsonl")
