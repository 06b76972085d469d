"""Make a store from raw text, or from conversations.

A SOURCE is a file, a folder or a quoted glob; NAME=PATH gives it a name, and sources of one name are read as one. A
file's format follows from its extension (.jsonl, .txt, .parquet ...; .gz, .zst ... are unpacked) or by --format. --text
is a column, a path into nested data (message.content), or a template ('{title}\\n\\n{body}'). --format, --text and
--quantity hold for all sources, or as NAME=VALUE for one; they can be given several times. --option is for the files'
format: --option delimiter=';', or --option NAME.delimiter=';' for one source. Run again over unchanged files it does
nothing; killed, the same command continues.

--chat renders rows that are conversations by a chat template (chatml, llama-3, mistral, gemma, zephyr, qwen, plain, a
.jinja file; alone, the tokenizer's own), and the store keeps the role of each token, so that a loader can choose the
loss. The first row, or --conversation-format, tells their format; --columns and --roles rename columns and roles.

With one SOURCE that ends in .py (and without --format) that file is run, and the DatasetRecipe that it calls `recipe`
is baked. It is code: run only files that you trust. A recipe without a tokenize step gives a buffer of rows.

--explain reads everything and says what each instruction will do with how many rows; it writes nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.base.checks import local_path
from batchwright.base.errors import SpecError
from batchwright.base.words import suggest
from batchwright.cli.output import add_json, print_json
from batchwright.cli.plan_settings import add_renames
from batchwright.cli.values import whole_number

if TYPE_CHECKING:
    from batchwright.baking import DatasetRecipe

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "make a store from raw text, or from conversations"

EXAMPLES = """\
examples:
  batchwright bake data/ --tokenizer bytes --append-eos --to corpus.store
  batchwright bake web='web/*.jsonl.gz' code='src/**/*.py' --format code=text --text web=content \\
      --tokenizer tokenizer.json --append-eos --holdout 0.005 --to mix.store
  batchwright bake sft.jsonl --chat chatml --tokenizer tokenizer.json --to sft.store
  batchwright bake recipe.py --to corpus.store
  batchwright bake recipe.py --explain
"""

_OF_CHAT = ("conversation_format", "columns", "roles", "keep_newest")
_OF_A_RECIPE = (
    *("format", "text", "option", "tokenizer", "append_eos", "eos", "special", "name", "quantity", "holdout", "seed"),
    *("chat", *_OF_CHAT),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="+", metavar="SOURCE", help="file, folder, glob, NAME=PATH, or one recipe.py")
    parser.add_argument("--to", metavar="STORE", help="the store's folder: new, or a store already")
    parser.add_argument("--explain", action="store_true", help="only say what would happen, with counts of rows")
    parser.add_argument(
        "--check", action="store_true", help="first see on a sample that each function depends on its row alone"
    )
    parser.add_argument(
        "--format", action="append", help="text (a file is a document), lines (a line is one), jsonl, or a plug-in's"
    )
    parser.add_argument(
        "--text", action="append", metavar="COLUMN", help="the column, path or template that is the text (text)"
    )
    parser.add_argument(
        "--option", action="append", metavar="KEY=VALUE", help="of the files' format, e.g. delimiter=';'"
    )
    parser.add_argument("--tokenizer", metavar="T", help="bytes, chars, or the path of a tokenizer.json")
    parser.add_argument("--append-eos", action="store_true", help="end every document with the end-of-document id")
    parser.add_argument("--eos", metavar="TOKEN", help="that id, or its token; otherwise the tokenizer's own")
    parser.add_argument(
        "--special",
        choices=("text", "parse"),
        help="what <|endoftext|> in a document becomes: characters like any others (text), or the token",
    )
    parser.add_argument(
        "--chat", nargs="?", const="", metavar="TEMPLATE", help="conversations, by this template (the tokenizer's own)"
    )
    parser.add_argument(
        "--conversation-format", metavar="F", help="messages, sharegpt, alpaca, prompt_completion or preference"
    )
    add_renames(parser)
    parser.add_argument(
        "--keep-newest", type=whole_number, metavar="TOKENS", help="drop the oldest turns of conversations over this"
    )
    parser.add_argument("--name", help="name of the sources that are given without one")
    parser.add_argument(
        "--quantity", action="append", metavar="N", help="keep this number of rows of a source, or a share such as 0.1"
    )
    parser.add_argument("--holdout", type=float, metavar="SHARE", help="hold out as split val, e.g. 0.005")
    parser.add_argument("--seed", type=int, help="of everything that is drawn (0)")
    parser.add_argument(
        "--workers", type=whole_number, help="processes (one for each CPU); the bytes do not depend on it"
    )
    parser.add_argument(
        "--on-error", choices=("raise", "skip"), default="raise", help="a malformed row: stop and name it, or count it"
    )
    parser.add_argument("--no-shuffle", action="store_true", help="keep documents in the order of the files")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from batchwright.baking import bake, explain
    from batchwright.store.layout import current_version, is_store

    if arguments.to is None and not arguments.explain:
        raise SpecError("where to?", parameter="to", remedy="--to corpus.store, or --explain to see what would happen")
    sources: list[str] = arguments.source
    is_recipe = len(sources) == 1 and sources[0].endswith(".py") and arguments.format is None
    recipe = _recipe_of_file(arguments) if is_recipe else _recipe_of_flags(arguments)
    if arguments.explain:
        if arguments.check:
            from batchwright.baking.check import check_functions

            check_functions(recipe, on_error=arguments.on_error)
        explanation = explain(recipe, on_error=arguments.on_error)
        print_json(explanation.as_json()) if arguments.json else print(explanation)
        return 0
    to = local_path(to=arguments.to)
    before = current_version(to) if is_store(to) else None
    store = bake(
        recipe,
        to,
        workers=arguments.workers,
        on_error=arguments.on_error,
        shuffle=not arguments.no_shuffle,
        check=arguments.check,
        show_progress=not arguments.quiet,
    )
    if not recipe.is_tokenized:
        print_json({"buffer": str(to), "num_rows": len(store)}) if arguments.json else print(store)
    elif arguments.json:
        print_json(
            {
                "store": str(store.path),
                "version": store.version,
                "fingerprint": store.fingerprint,
                "was_up_to_date": store.version == before,
                "num_documents": store.num_rows,
                "num_tokens": store.num_tokens,
                "tokenizer": store.manifest.tokenizer,
                "report": store.report,
            }
        )
    else:
        print(store)
    return 0


def _recipe_of_flags(arguments: argparse.Namespace) -> DatasetRecipe:
    from batchwright.baking import DatasetRecipe

    if arguments.tokenizer is None:
        raise SpecError(
            "which tokenizer?",
            parameter="tokenizer",
            remedy="--tokenizer bytes, --tokenizer chars, or --tokenizer path/to/tokenizer.json",
        )
    step = _text_step(arguments) if arguments.chat is None else _chat_step(arguments)
    recipe = DatasetRecipe(seed=arguments.seed or 0)
    named = _by_name(arguments.source, arguments.name)
    formats, texts, quantities = (
        _per_source(flag, getattr(arguments, flag), named) for flag in ("format", "text", "quantity")
    )
    options = _options(arguments.option, named)
    for name, paths in named.items():
        recipe.add_ingredient(
            [local_path(source=path) for path in paths],  # Path objects: a list of strings could be rows of text
            _text(texts.get(name, "text")),
            format=formats.get(name),
            name=name,
            quantity=_quantity(quantities.get(name)),
            options=options.get(name),
        )
    recipe.prepare_step(step)
    return recipe if arguments.holdout is None else recipe.holdout(arguments.holdout)


def _text_step(arguments: argparse.Namespace) -> Any:
    from batchwright.prepare import tokenize

    given = next((name for name in _OF_CHAT if getattr(arguments, name) is not None), None)
    if given is not None:
        flag = f"--{given.replace('_', '-')}"
        raise SpecError(f"{flag} is for conversations", parameter=given, remedy=f"--chat too, or leave out {flag}")
    eos = arguments.eos
    return tokenize(
        arguments.tokenizer,
        append_eos=arguments.append_eos or eos is not None,
        eos=int(eos) if eos is not None and eos.isdigit() else eos,
        special=arguments.special or "text",
    )


def _chat_step(arguments: argparse.Namespace) -> Any:
    from batchwright.prepare.chat.step import chat

    for name, instead in (
        ("text", "--columns, for the columns of a conversation"),
        ("append_eos", "leave it out: the template ends every turn"),
        ("eos", "leave it out: the template ends every turn"),
        ("special", "leave it out: in messages they are always text"),
    ):
        if getattr(arguments, name) not in (None, False):
            flag = f"--{name.replace('_', '-')}"
            raise SpecError(f"{flag} is for plain text, and --chat for conversations", parameter=name, remedy=instead)
    return chat(
        arguments.tokenizer,
        arguments.chat or None,
        format=arguments.conversation_format,
        columns=arguments.columns,
        roles=arguments.roles,
        keep_newest=arguments.keep_newest,
    )


def _by_name(sources: list[str], default: str | None) -> dict[str | None, list[str]]:
    """Sources of one name together, in the order in which the names come."""
    named: dict[str | None, list[str]] = {}
    for source in sources:
        match = re.match(r"([\w.-]+)=(.+)", source, re.DOTALL)
        if match is not None and not os.path.exists(source):
            named.setdefault(match[1], []).append(match[2])
        else:
            named.setdefault(default, []).append(source)
    if len(named.get(None, ())) > 1:  # the shell's own glob, as a rule: one source, named after the folder
        paths = named.pop(None)
        folder = os.path.basename(os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths]))
        named.setdefault(folder or "data", []).extend(paths)
    return named


def _per_source(flag: str, given: list[str] | None, named: Iterable[str | None]) -> dict[str | None, str]:
    """What a flag that was given as VALUE or NAME=VALUE says for each source."""
    for_all: str | None = None
    for_one: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[\w.-]+", name):  # '{a} = {b}' names no source
            for_all = text
        elif name in named:
            for_one[name] = value
        else:
            names = [known for known in named if known is not None]
            raise SpecError(
                f"--{flag} {text}: no source is named {name!r}",
                parameter=flag,
                sources=", ".join(names) or "none has a name",
                remedy=f"--{flag} {suggest(name, names) or names[0]}={value}" if names else f"--{flag} {value}",
            )
    said = {name: for_one.get(name or "", for_all) for name in named}
    return {name: value for name, value in said.items() if value is not None}


def _text(spec: str) -> str:
    r"""Shells pass \n as two characters; in a template it means a new line."""
    return spec.replace("\\n", "\n").replace("\\t", "\t") if "{" in spec else spec


def _options(given: list[str] | None, named: Iterable[str | None]) -> dict[str | None, dict[str, Any]]:
    """The options of each source: KEY=VALUE is for all of them, NAME.KEY=VALUE for one."""
    for_all: dict[str, Any] = {}
    for_one: dict[str, dict[str, Any]] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise SpecError(f"--option {text} is not KEY=VALUE", parameter="option", remedy="--option delimiter=';'")
        name, _, inner = key.rpartition(".")
        if name and name in named:
            for_one.setdefault(name, {})[inner] = _option_value(value)
        else:
            for_all[key] = _option_value(value)
    return {name: {**for_all, **for_one.get(name or "", {})} for name in named}


def _option_value(text: str) -> Any:
    """
    >>> _option_value(";"), _option_value("true"), _option_value("12")
    (';', True, 12)
    """
    if text in ("true", "false"):
        return text == "true"
    if text == "null":
        return None
    return int(text) if re.fullmatch(r"-?\d+", text) else text.replace("\\t", "\t")


def _quantity(text: str | None) -> int | float | None:
    if text is None:
        return None
    if re.fullmatch(r"[\d_]+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        raise SpecError(
            f"--quantity {text} is neither a number of rows nor a share", parameter="quantity", remedy="10000, or 0.1"
        ) from None


def _recipe_of_file(arguments: argparse.Namespace) -> DatasetRecipe:
    """The `recipe` of a Python file. Its functions travel to workers by value: they cannot import it."""
    import importlib.util

    import cloudpickle

    from batchwright.baking import DatasetRecipe

    path = local_path(source=arguments.source[0])
    given = [f"--{name.replace('_', '-')}" for name in _OF_A_RECIPE if getattr(arguments, name) not in (None, False)]
    if given:
        raise SpecError(f"{', '.join(given)}: with a recipe file this is said in the recipe", file=path)
    if not path.is_file():
        raise SpecError(f"no recipe at {path}", file=path, remedy="a Python file that defines `recipe`, or --format")
    spec = importlib.util.spec_from_file_location(f"batchwright_recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent.absolute()))  # as Python does for a script: modules beside it can be imported
    cloudpickle.register_pickle_by_value(module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _failed(path, error) from error
    recipe: Any = getattr(module, "recipe", None)
    if not isinstance(recipe, DatasetRecipe):
        what = "does not define" if recipe is None else f"has a {type(recipe).__name__} as"
        raise SpecError(f"{path} {what} `recipe`", file=path, remedy="recipe = bw.DatasetRecipe(seed=0)")
    return recipe


def _failed(path: Path, error: BaseException) -> Exception:
    from batchwright.base.errors import BatchwrightError

    if isinstance(error, BatchwrightError):
        return error
    line = error.lineno if isinstance(error, SyntaxError) else None
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(path.absolute()):
            line = frame.tb_lineno
        frame = frame.tb_next
    return SpecError(f"{path} failed: {type(error).__name__}: {error}", file=path, line=line)
