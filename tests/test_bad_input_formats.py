"""Bad input of every format: one clear error that names file, place and remedy; or what is good of it, and a count.

One case for each line of the promise: a bad file beside a good one. With on_error="raise" it is the error that the case
describes, and no store changes or appears. With on_error="skip" the good file and what is good of the bad one are
there, and what is not is counted under its reason.
"""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest

import batchwright as bw
from batchwright.sources import compression

GOOD = "".join(json.dumps({"text": f"good {n}"}) + "\n" for n in range(20))
ROWS = [f"row {n}" for n in range(6)]


@dataclass
class Expected:
    """What becomes of a bad file."""

    name: str
    data: str | bytes | Callable[[Path], object]
    """What is in it, or what writes it."""
    headline: str
    """How the error begins."""
    where: dict[str, Any]
    """What it names, besides the file."""
    remedy: str
    kept: list[str]
    """The texts of the file that are left with on_error="skip"."""
    dropped: dict[str, int]
    ingredient: dict[str, Any] = field(default_factory=dict)


Case = Callable[[], Expected]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES[name] = function
        return function

    return add


SKIP_ROWS, SKIP_FILE = "on_error='skip' to leave out such rows and count them", "on_error='skip' to pass over it"


# Compression


def packed(kind: str, data: bytes) -> bytes:
    if kind in ("zstd", "lz4"):
        out = pa.BufferOutputStream()
        with pa.CompressedOutputStream(out, kind) as stream:
            stream.write(data)
        return out.getvalue().to_pybytes()
    return {"gzip": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[kind](data)


def truncated(kind: str, extension: str) -> Case:
    def make() -> Expected:
        return Expected(
            f"b.jsonl{extension}",
            packed(kind, GOOD.encode())[:40],
            f"damaged archive: this {kind} file is truncated or damaged (",
            {"line": 1},
            f"mend or leave out the file, or {SKIP_FILE}",
            [],
            {"damaged archive": 1},
        )

    return make


for kind, extension in (("gzip", ".gz"), ("zstd", ".zst"), ("lz4", ".lz4"), ("bz2", ".bz2"), ("xz", ".xz")):
    case(f"truncated compressed stream: {kind}")(truncated(kind, extension))


@case("compressed stream that is not what its name says")
def misnamed() -> Expected:
    return Expected(
        "b.jsonl.gz",
        GOOD,
        "damaged archive: this gzip file is truncated or damaged (",
        {"line": 1},
        f"mend or leave out the file, or {SKIP_FILE}",
        [],
        {"damaged archive": 1},
    )


@case("trailing garbage after a compressed stream")
def trailing_garbage() -> Expected:
    rows = "".join(json.dumps({"text": f"row {n} {'x' * 1000}"}) + "\n" for n in range(70)).encode()
    return Expected(
        "b.jsonl",  # by its first bytes
        packed("gzip", rows) + b"garbage",
        "damaged archive: this gzip file is truncated or damaged (zlib inflate failed: incorrect header check)",
        {},
        f"mend or leave out the file, or {SKIP_FILE}",
        [f"row {n} {'x' * 1000}" for n in range(64)],  # up to the last whole buffer before the garbage
        {"damaged archive": 1},
    )


@case("decompression bomb")
def bomb() -> Expected:
    rows = "".join(json.dumps({"text": row}) + "\n" for row in ROWS).encode()
    return Expected(
        "b.jsonl.xz",
        packed("xz", rows + bytes(30 << 20)),  # the limit is 1 MiB here: see `limits`
        "decompression bomb: ",
        {"line": 7},
        f"decompress the file yourself, if it is meant so; or {SKIP_FILE}",
        ROWS,
        {"decompression bomb": 1},
    )


# Lines, encodings


@case("a line of 200 MB")
def long_line() -> Expected:
    first, last = ("".join(json.dumps({"text": row}) + "\n" for row in part) for part in (ROWS[:3], ROWS[3:]))

    def write(path: Path) -> None:
        with open(path, "w") as file:
            file.write(first)
            file.truncate(len(first) + (200 << 20))  # zeros that take no space
            file.seek(0, 2)
            file.write("\n" + last)

    return Expected(
        "b.jsonl",
        write,
        "line too long: over 134,217,728 bytes",
        {"line": 4},
        f'options={{"max_row_bytes": 268435456}} or more, if it is meant so; or {SKIP_ROWS}',
        ROWS,
        {"line too long": 1},
    )


def utf16(name: str, text: str, where: dict[str, Any], encoding: str = "utf-16") -> Case:
    def make() -> Expected:
        return Expected(
            name,
            text.encode(encoding),
            "not UTF-8: this file is UTF-16, little-endian",
            where,
            f"iconv -f {'UTF-16' if encoding == 'utf-16' else 'UTF-16LE'} -t UTF-8 FILE > NEW_FILE; or {SKIP_FILE}",
            [],
            {"not UTF-8": 1},
        )

    return make


case("UTF-16: JSONL")(utf16("b.jsonl", GOOD, {"line": 1}))
case("UTF-16: JSONL without a byte order mark")(utf16("b.jsonl", GOOD, {"line": 1}, "utf-16-le"))
case("UTF-16: text")(utf16("b.txt", "one text", {}))
case("UTF-16: CSV")(utf16("b.csv", "text\none\n", {"row": 0}))
case("UTF-16: JSON")(utf16("b.json", '[{"text": "one"}]', {"row": 0}))


@case("Latin-1: CSV")
def latin_1_csv() -> Expected:
    return Expected(
        "b.csv",
        "text,id\nrow 0,0\ncafé,1\nrow 1,2\n".encode("latin-1"),
        "not UTF-8: line 3: byte 0xe9 at 3",
        {"row": 1},
        f"mend the row, or {SKIP_ROWS}",
        ROWS[:2],
        {"not UTF-8": 1},
    )


# CSV


@case("ragged CSV")
def ragged_csv() -> Expected:
    return Expected(
        "b.csv",
        'id,text\n0,row 0\n1,"row\n1"\n2,row 2,more\n3\n4,row 4\n',
        "ragged row: line 5 has 3 fields, and there are 2 columns",
        {"row": 2},
        f"mend the row, or {SKIP_ROWS}",
        ["row 0", "row\n1", "row 4"],
        {"ragged row": 2},
    )


def wrong_delimiter(name: str, delimiter: str, shown: str, **ingredient: Any) -> Case:
    def make() -> Expected:
        return Expected(
            name,
            f"id{delimiter}text\n0{delimiter}row 0\n",
            "wrong delimiter: the header is one column, ",
            {"row": 0},
            f'options={{"delimiter": "{shown}"}}; or {SKIP_FILE}',
            [],
            {"wrong delimiter": 1},
            ingredient,
        )

    return make


case("wrong delimiter: semicolons in CSV")(wrong_delimiter("b.csv", ";", ";"))
case("wrong delimiter: tabs in CSV")(wrong_delimiter("b.csv", "\t", r"\t"))
case("wrong delimiter: commas in TSV")(wrong_delimiter("b.tsv", ",", ","))
case("wrong delimiter: where every column is wanted")(wrong_delimiter("b.csv", ";", ";", where=lambda row: True))


@case("unclosed quote in CSV")
def unclosed_quote() -> Expected:
    return Expected(
        "b.csv",
        'id,text\n0,row 0\n1,"row 1\n2,row 2\n',
        "unclosed quote: a quote opens in line 3, and the rest of the file is inside it",
        {"row": 1},
        f"mend or leave out the file, or {SKIP_FILE}",
        ["row 0"],
        {"unclosed quote": 1},
    )


@case("CSV header with a name twice")
def bad_header() -> Expected:
    return Expected(
        "b.csv",
        "text,text\n1,2\n",
        "bad header: line 1: two columns are named 'text'",
        {"row": 0},
        f"name each column once in the header row; or {SKIP_FILE}",
        [],
        {"bad header": 1},
    )


@case("NUL byte in CSV")
def nul_byte() -> Expected:
    return Expected(
        "b.csv",
        "text\nrow 0\nro\0w\nrow 1\n",
        "malformed row: line 3: a NUL byte",
        {"row": 1},
        f"mend the row, or {SKIP_ROWS}",
        ROWS[:2],
        {"malformed row": 1},
    )


# tar


def tar(*members: tuple[Any, ...]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data, *kind in members:
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(data), kind[0] if kind else tarfile.REGTYPE, "/etc/passwd"
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def bad_member(reason: str, *member: Any) -> Case:
    def make() -> Expected:
        return Expected(
            "b.tar",
            tar(("0.text", b"row 0"), member, ("2.text", b"row 1")),
            f"malformed row: {reason}",
            {"row": 1},
            f"mend the row, or {SKIP_ROWS}",
            ROWS[:2],
            {"malformed row": 1},
        )

    return make


case("tar member that escapes: ..")(bad_member("member '../1.text' leads out of the archive", "../1.text", b"x"))
case("tar member that escapes: absolute")(bad_member("member '/1.text' leads out of the archive", "/1.text", b"x"))
case("tar member that is a link")(
    bad_member("member '1.text' is a link, to '/etc/passwd'", "1.text", b"", tarfile.SYMTYPE)
)
case("tar member that is a device")(
    bad_member("member '1.text' is a device or a pipe, not a file", "1.text", b"", tarfile.BLKTYPE)
)


@case("tar that was cut off")
def cut_tar() -> Expected:
    return Expected(
        "b.tar",
        tar(("0.text", b"row 0"), ("1.text", b"row 1"), ("2.text", b"row 2"))[:2600],
        "damaged archive: this tar file is truncated or damaged in the row with key '2' (unexpected end of data)",
        {"row": 2},
        f"mend or leave out the file, or {SKIP_FILE}",
        ROWS[:2],
        {"damaged archive": 1},
    )


# JSON


@case("JSON array that was cut off")
def cut_json() -> Expected:
    return Expected(
        "b.json",
        '[{"text": "row 0"},\n{"text": "row 1"},\n{"text": "ro',
        "malformed row: line 3: the file ends inside it",
        {"row": 2},
        f"mend or leave out the file, or {SKIP_FILE}",
        ROWS[:2],
        {"malformed row": 1},
    )


# Parquet and Arrow


def parquet(columns: Any, names: list[str] | None = None, **options: Any) -> Callable[[Path], None]:
    """Writes a table in row groups of two."""

    def write(path: Path) -> None:
        table = pa.table(columns, names=names) if names else pa.table(columns)
        pq.write_table(table, path, row_group_size=2, use_dictionary=False, **options)

    return write


def changed(change: Callable[[bytes], bytes], **options: Any) -> Callable[[Path], None]:
    """Writes six rows, and changes the bytes of the file."""

    def write(path: Path) -> None:
        parquet({"text": ROWS}, **options)(path)
        path.write_bytes(change(path.read_bytes()))

    return write


@case("missing column: Parquet")
def missing_column() -> Expected:
    return Expected(
        "b.parquet",
        parquet({"id": [0, 1], "txet": ["a", "b"]}),
        "no column 'text': this row has 'id', 'txet'; perhaps text='txet'",
        {"row": 0},
        f"text= with the column that holds the text, or {SKIP_ROWS}",
        [],
        {"no column 'text'": 2},
    )


@case("mixed types in a column: JSONL")
def mixed_types() -> Expected:
    return Expected(
        "b.jsonl",
        '{"text": "row 0"}\n{"text": 1}\n{"text": null}\n{"text": "row 1"}\n',
        "column 'text' is not text: it is int",
        {"line": 2},
        f"mend the row, or {SKIP_ROWS}",
        ROWS[:2],
        {"column 'text' is not text": 1, "column 'text' is null": 1},
    )


@case("a text column of numbers: Parquet")
def text_of_numbers() -> Expected:
    return Expected(
        "b.parquet",
        parquet({"text": [1, 2, 3]}),
        "column 'text' is not text: it is int",
        {"row": 0},
        f"mend the row, or {SKIP_ROWS}",
        [],
        {"column 'text' is not text": 3},
    )


@case("corrupt row group")
def corrupt_row_group() -> Expected:
    write = changed(
        lambda data: data.replace(b"row 3", b"rov 3"),
        compression="none",
        write_page_checksum=True,
        write_statistics=False,
    )
    return Expected(
        "b.parquet",
        write,
        "corrupt row group: row group 1: could not verify page integrity",
        {"rows": "2 to 3"},
        f"write the file again, or {SKIP_ROWS}",
        [*ROWS[:2], *ROWS[4:]],
        {"corrupt row group": 2},
    )


def of_whole_file(
    kind: str, reason: str, write: Any, name: str = "b.parquet", where: dict[str, Any] | None = None
) -> Case:
    def make() -> Expected:
        place = {"row": 0} if where is None else where
        remedy = f"mend or leave out the file, or {SKIP_FILE}"
        return Expected(name, write, f"{kind}: {reason}", place, remedy, [], {kind: 1})

    return make


case("Parquet that was cut off")(
    of_whole_file("truncated Parquet file", "it has no footer", changed(lambda data: data[:-9]))
)
case("Parquet with a damaged footer")(
    of_whole_file("damaged Parquet file", "", changed(lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1"))
)
case("Parquet that is none")(of_whole_file("not a Parquet file", "it begins with b'text'", "text\nrow 0\n"))
case("Parquet without rows")(
    of_whole_file("empty file", "a table without rows", parquet({"text": pa.array([], pa.string())}))
)
case("Arrow that is none")(of_whole_file("not an Arrow IPC file", "", "text\nrow 0\nmore and more\n", "b.arrow"))


@case("Parquet with two columns of one name")
def duplicate_names() -> Expected:
    return Expected(
        "b.parquet",
        parquet([["a"], ["b"]], ["text", "text"]),
        "two columns have one name: 'text'",
        {"row": 0},
        f"mend or leave out the file, or {SKIP_FILE}",
        [],
        {"two columns have one name": 1},
    )


class ToyKeys(encryption.KmsClient):
    """Keys that are no secret."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        return base64.b64decode(wrapped_key)


def encrypted(path: Path, **settings: Any) -> None:
    factory = encryption.CryptoFactory(lambda _: ToyKeys())
    config = encryption.EncryptionConfiguration(footer_key="key", column_keys={"key": ["text"]}, **settings)
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), config)
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())]), encryption_properties=properties) as writer:
        writer.write_table(pa.table({"text": ROWS[:2]}))


case("encrypted Parquet")(
    of_whole_file("encrypted Parquet file", "its footer is encrypted, and there is no key", encrypted)
)


@case("encrypted columns of Parquet")
def encrypted_columns() -> Expected:
    return Expected(
        "b.parquet",
        lambda path: encrypted(path, plaintext_footer=True),
        "encrypted row group: row group 0: ",
        {"rows": "0 to 1"},
        f"write the file again, or {SKIP_ROWS}",
        [],
        {"encrypted row group": 2},
    )


@case("Parquet with an unknown codec")
def unknown_codec() -> Expected:
    def to_lzo(data: bytes) -> bytes:
        # codec 1 (snappy) of the second row group becomes 3 (LZO): in the footer's encoding a 2 that becomes a 6.
        before = b"\x19\x18\x04text\x15"  # the path of a column, and then its codec
        at = data.index(before, data.index(before) + 1) + len(before)
        assert data[at] == 2
        return data[:at] + b"\x06" + data[at + 1 :]

    return Expected(
        "b.parquet",
        changed(to_lzo, compression="snappy"),
        "unsupported row group: row group 1: While LZO compression is supported by the Parquet format",
        {"rows": "2 to 3"},
        f"write the file again, or {SKIP_ROWS}",
        [*ROWS[:2], *ROWS[4:]],
        {"unsupported row group": 2},
    )


# What all cases promise


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_FREE_BYTES", 1 << 20)  # a bomb of 1 GiB would take a minute


def bake(folder: Path, ingredient: dict[str, Any], to: Path, **settings: Any) -> bw.Store:
    recipe = bw.DatasetRecipe().add_ingredient(folder / "raw", **{"name": "web", **ingredient})
    return bw.bake(recipe.prepare_step(bw.tokenize("bytes")), to, workers=0, show_progress=False, **settings)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("name", list(CASES))
def test_bad_input_is_one_clear_error_or_is_counted(name: str, tmp_path: Path) -> None:
    expected = CASES[name]()
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.jsonl").write_text(GOOD)
    before = bake(tmp_path, {}, tmp_path / "good.store").version
    file = raw / expected.name
    if callable(expected.data):
        expected.data(file)
    else:
        file.write_bytes(expected.data.encode() if isinstance(expected.data, str) else expected.data)
    stored = everything(tmp_path / "good.store" / "versions")
    for to in (tmp_path / "good.store", tmp_path / "fresh.store"):
        with pytest.raises(bw.SourceError) as caught:
            bake(tmp_path, expected.ingredient, to)
        error = caught.value
        assert error.headline.startswith(expected.headline)
        assert error.where | {"file": str(file), **expected.where} == error.where
        assert expected.remedy in (error.remedy or "")
    assert everything(tmp_path / "good.store" / "versions") == stored
    assert bw.open_store(tmp_path / "good.store", verify=True).version == before
    with pytest.raises(bw.StoreError, match=r"no store at|is not complete"):
        bw.open_store(tmp_path / "fresh.store")

    store = bake(tmp_path, expected.ingredient, tmp_path / "good.store", on_error="skip")
    texts = [store.decode(row.tokens) for row in store.rows() if row.file == str(file)]
    assert sorted(texts) == sorted(expected.kept)
    part = store.report["ingredients"]["web"]
    assert part["dropped"] == expected.dropped
    assert store.report["errors"] == sum(expected.dropped.values())
    assert part["documents"] == 20 + len(expected.kept)
    assert part["rows_read"] == part["documents"] + sum(expected.dropped.values())
    assert store.report["examples"][0][0] == str(file)
    assert store.report["examples"][0][2].startswith(expected.headline)
