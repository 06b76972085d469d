"""List shards of positions, or convert them to a format that is fast to read.

`info DIR` lists rows, bytes and columns of shards, from their headers. JSONL and pickle have no header: --count reads
them. The exit code is 1 if a shard cannot be read.
`convert DIR OUT` writes every shard under the same name with another extension, and prints the rows read per second
before and after. Run again, it continues: files made from the same input stay. A pickle can run code when it is read:
--allow-pickle is for files that you made.
"""

from __future__ import annotations

import argparse
import os
import string
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from batchwright.base.errors import SourceError
from batchwright.base.words import bytes_in_words, counted
from batchwright.cli.output import add_json, number, print_facts, printable, table

if TYPE_CHECKING:
    from batchwright.columns.shard import Schema
    from batchwright.pool.convert import Conversion

SUMMARY = "list shards of positions, or convert them to a format that is fast to read"

EXAMPLES = """\
examples:
  batchwright shards info games
  batchwright shards info games --range 0-99 --json
  batchwright shards convert games games_npz --allow-pickle
  batchwright shards convert games games_arrow --to arrow --columns board,value
"""

_FORMATS = ("npz", "safetensors", "arrow", "parquet")  # as shards.convert has them, which a --help does not load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(metavar="WHAT", required=True)
    info = whats.add_parser("info", help="list shards")
    convert = whats.add_parser("convert", help="write shards in another format")
    for sub, act in ((info, _info), (convert, _convert)):
        sub.set_defaults(act=act)
        sub.add_argument("directory", metavar="DIR", help="a directory of shards")
        sub.add_argument("--range", default="all", metavar="RANGE", help="shard numbers: 0-99, 7, 0-9,20-29 (all)")
        sub.add_argument("--allow-pickle", action="store_true", help="read pickles, which can run code: you made them")
        sub.add_argument("--columns", type=_names, metavar="NAME,...", help="only these columns (all)")
        add_json(sub)
    info.add_argument("--count", action="store_true", help="read shards whose headers do not say enough")
    convert.add_argument("out", metavar="OUT", help="the folder to write into")
    convert.add_argument("--to", choices=_FORMATS, default="npz", help="the format (npz)")
    convert.add_argument("--force", action="store_true", help="overwrite files that it did not make")
    convert.add_argument("--quiet", action="store_true", help="no progress")


def _names(text: str) -> list[str]:
    """
    >>> _names("board, value")
    ['board', 'value']
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different names, as in board,value")
    return names


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.act(arguments))


# info


def _info(arguments: argparse.Namespace) -> int:
    from batchwright.pool.shard_files import shards_in

    found = shards_in(arguments.directory, arguments.range, parameter="--range")
    shards = [_facts(shard.number, shard.path, arguments) for shard in found]
    facts = {"directory": arguments.directory, "shards": shards}
    print_facts(facts, _lines(arguments.directory, shards), as_json=arguments.json)
    return int(any(shard["fault"] for shard in shards))


def _facts(number: int, path: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One shard as plain values: rows and columns are None where only reading would tell."""
    from batchwright.columns.shard import format_of

    kind = format_of(path)
    facts: dict[str, Any] = {"number": number, "file": os.path.basename(path), "format": kind, "rows": None}
    facts |= {"bytes": os.path.getsize(path), "columns": None, "fault": None}
    if kind == "pickle" and not arguments.allow_pickle:
        return facts  # not read: a listing is no reason to run what is in it
    try:
        rows, schema = _rows_and_schema(path, kind, arguments)
    except SourceError as error:
        return facts | {"fault": str(error)}
    if schema is not None:
        facts["columns"] = _plain(schema)
    return facts | {"rows": rows}


def _rows_and_schema(path: str, kind: str | None, arguments: argparse.Namespace) -> tuple[int | None, Schema | None]:
    from batchwright.columns.shard import open_shard, peek

    if arguments.count and kind in ("jsonl", "pickle"):
        with open_shard(path, allow_pickle=arguments.allow_pickle, columns=arguments.columns) as shard:
            return shard.rows, shard.schema
    facts = peek(path, allow_pickle=arguments.allow_pickle, columns=arguments.columns)
    return facts.rows, facts.schema


def _plain(schema: Schema) -> dict[str, dict[str, Any]]:
    return {name: {"dtype": str(column.dtype), "shape": list(column.shape)} for name, column in schema.items()}


def _lines(directory: str, shards: list[dict[str, Any]]) -> Iterator[str]:
    """A table in which a letter stands for columns, then the columns of each letter, then faults."""
    size = bytes_in_words(sum(shard["bytes"] for shard in shards))
    yield f"shards {directory}: {counted(len(shards), 'shard')}, {_total(shards)}, {size}"
    letters: dict[str, str] = {}
    yield table([_cells(shard, letters) for shard in shards], left=["file", "columns"])
    for words, letter in letters.items():
        yield f"{letter}: {printable(words)}"
    if len(letters) > 1:
        yield "note: not all shards have the same columns: they cannot be read together without columns="
    for shard in shards:
        if shard["fault"]:
            yield printable(shard["fault"])


def _cells(shard: dict[str, Any], letters: dict[str, str]) -> dict[str, Any]:
    return {
        "number": shard["number"],
        "file": printable(shard["file"]),
        "rows": number(shard["rows"], "-"),
        "bytes": number(shard["bytes"]),
        "columns": _columns_cell(shard, letters),
    }


def _columns_cell(shard: dict[str, Any], letters: dict[str, str]) -> str:
    """The letter of a shard's columns; or why they are not known."""
    if shard["fault"]:
        return "cannot be read"
    if shard["columns"] is not None:
        words = _columns_in_words(shard["columns"])
        return letters.setdefault(words, _letter(len(letters)))
    if shard["format"] == "pickle":
        return "a pickle: --allow-pickle --count reads it"
    return "--count reads them"


def _total(shards: list[dict[str, Any]]) -> str:
    known = [shard["rows"] for shard in shards if shard["rows"] is not None]
    if not known:
        return "rows not known"
    total = counted(sum(known), "row")
    if len(known) < len(shards):
        total += f" in {len(known):,} of them"
    return total


def _letter(number: int) -> str:
    """
    >>> _letter(0), _letter(25), _letter(26)
    ('A', 'Z', 'A1')
    """
    round_, place = divmod(number, 26)
    return f"{string.ascii_uppercase[place]}{round_ or ''}"


def _columns_in_words(columns: dict[str, dict[str, Any]]) -> str:
    """
    >>> _columns_in_words({"board": {"dtype": "uint8", "shape": [3, 3]}, "value": {"dtype": "float32", "shape": []}})
    'board uint8[3, 3], value float32'
    """
    return ", ".join(f"{name} {column['dtype']}{column['shape'] or ''}" for name, column in columns.items())


# convert


def _convert(arguments: argparse.Namespace) -> int:
    from batchwright.pool.convert import convert

    done = convert(
        arguments.directory,
        arguments.out,
        to=arguments.to,
        columns=arguments.columns,
        allow_pickle=arguments.allow_pickle,
        shard_range=arguments.range,
        force=arguments.force,
        show_progress=not arguments.quiet,
    )
    facts = _converted_as_json(done)
    print_facts(facts, _converted_in_words(done, facts), as_json=arguments.json)
    return 0


def _converted_as_json(done: Conversion) -> dict[str, Any]:
    facts: dict[str, Any] = {"directory": done.directory, "out": done.out, "to": done.to}
    for name in ("rows", "bytes_before", "bytes_after"):
        facts[name] = sum(getattr(shard, name) for shard in done.shards)
    facts |= {"seconds": done.seconds, "reading": None}
    if done.speed is not None:
        facts["reading"] = {
            "rows_per_second_before": done.speed.before,
            "rows_per_second_after": done.speed.after,
            "num_shards": done.speed.num_shards,
            "num_rows": done.speed.num_rows,
        }
    names = ("number", "input", "output", "rows", "bytes_before", "bytes_after", "was_there")
    shards = [
        {name: getattr(shard, name) for name in names} | {"columns": _plain(shard.schema)} for shard in done.shards
    ]
    return facts | {"shards": shards}


def _converted_in_words(done: Conversion, facts: dict[str, Any]) -> Iterator[str]:
    headline = f"{done.out}: {counted(len(done.shards), 'shard')}, {counted(facts['rows'], 'row')} as {done.to} "
    headline += f"in {done.seconds:,.1f} s"
    already = sum(shard.was_there for shard in done.shards)
    if already:
        headline += f"; {already:,} of them were there already"
    yield headline
    before, after = bytes_in_words(facts["bytes_before"]), bytes_in_words(facts["bytes_after"])
    yield f"  bytes      {before} before, {after} after"
    if done.speed is not None:
        yield (
            f"  reading    {done.speed.before:,.0f} rows/s before, {done.speed.after:,.0f} rows/s after "
            f"({counted(done.speed.num_shards, 'shard')}, {counted(done.speed.num_rows, 'row')}, "
            "all of it in the page cache)"
        )
    kinds = {_columns_in_words(shard["columns"]) for shard in facts["shards"]}
    for words in sorted(kinds):
        yield f"  columns    {printable(words)}"
    if len(kinds) > 1:
        yield f"  note       shards differ in their columns: see batchwright shards info {done.out}"
