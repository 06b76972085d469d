"""Make a store from raw text, or from conversations.

A SOURCE is a file, a folder or a quoted glob. NAME=PATH names it, and sources of one name are read as one. The
extension of a file gives its format (.jsonl, .txt, .parquet ...; .gz, .zst ... are decompressed), or --format does.
--text is a column, a path into nested data (message.content), or a template ('{title}\\n\\n{body}'). --format, --text
and --quantity apply to all sources, or as NAME=VALUE to one, and are repeatable. --option is an option of the file
format: --option delimiter=';', or --option NAME.delimiter=';' for one source. Run again over unchanged files, it does
nothing. After a kill, the same command continues.

--chat renders conversations with a chat template (chatml, llama-3, mistral, gemma, zephyr, qwen, plain, or a .jinja
file; without a value, the tokenizer's own). The store keeps the role of each token, so that a loader can choose the
trained ones. The first row shows the format of the conversations, or --conversation-format names it. --columns and
--roles rename columns and roles.

One SOURCE that ends in .py (without --format) is run, and the DatasetRecipe that it defines as `recipe` is baked. It is
code: run only files that you trust. A recipe without a tokenize step gives a buffer of rows.

--explain reads everything, writes nothing, and shows how many rows each instruction keeps and drops.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import batchwright as bw
from batchwright.base.checks import local_path
from batchwright.base.errors import BatchwrightError, SpecError
from batchwright.base.words import error_in_words
from batchwright.cli.output import add_json, print_json, store_facts
from batchwright.cli.values import add_renames, flag_of, paths_by_name, per_source, whole_number

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
    add = parser.add_argument
    add("source", nargs="+", metavar="SOURCE", help="file, folder, glob, NAME=PATH, or one recipe.py")
    add("--to", metavar="STORE", help="the folder of the store, new or existing")
    add("--explain", action="store_true", help="only show how many rows each instruction keeps and drops")
    add("--check", action="store_true", help="first test, on a sample, that each function depends only on its row")
    add("--format", action="append", help="text (a file is a document), lines (a line is one), jsonl, or a plug-in's")
    add("--text", action="append", metavar="COLUMN", help="column, path or template of the text (text)")
    add("--option", action="append", metavar="KEY=VALUE", help="an option of the file format, e.g. delimiter=';'")
    add("--tokenizer", metavar="T", help="bytes, chars, or the path of a tokenizer.json")
    add("--append-eos", action="store_true", help="end every document with the end-of-document id")
    add("--eos", metavar="TOKEN", help="this id or token ends documents (the tokenizer's own)")
    add("--special", choices=("text", "parse"), help="<|endoftext|> in a document: characters (text), or the token")
    add("--chat", nargs="?", const="", metavar="TEMPLATE", help="conversations, by this template (the tokenizer's own)")
    add("--conversation-format", metavar="F", help="messages, sharegpt, alpaca, prompt_completion or preference")
    add_renames(parser)
    add("--keep-newest", type=whole_number, metavar="TOKENS", help="drop the oldest turns of longer conversations")
    add("--name", help="name of the sources that have none")
    add("--quantity", action="append", metavar="N", help="keep N rows of a source, or a share such as 0.1")
    add("--holdout", type=float, metavar="SHARE", help="hold out a share as split val, e.g. 0.005")
    add("--seed", type=int, help="seed of everything random (0)")
    add("--workers", type=whole_number, help="processes (one per CPU); the result does not depend on it")
    add("--on-error", choices=("raise", "skip"), default="raise", help="at a malformed row: stop (raise), or skip it")
    add("--no-shuffle", action="store_true", help="keep documents in the order of the files")
    add("--quiet", action="store_true", help="no progress")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    if arguments.to is None and not arguments.explain:
        raise SpecError("where to?", parameter="to", remedy="--to corpus.store, or --explain to see what would happen")
    sources: list[str] = arguments.source
    is_recipe = len(sources) == 1 and sources[0].endswith(".py") and arguments.format is None
    recipe_of = _recipe_of_file if is_recipe else _recipe_of_flags
    recipe = recipe_of(arguments)
    if arguments.explain:
        _explain(recipe, arguments)
    else:
        _bake(recipe, arguments)


def _explain(recipe: bw.DatasetRecipe, arguments: argparse.Namespace) -> None:
    from batchwright.baking.check import check_functions

    if arguments.check:
        check_functions(recipe, on_error=arguments.on_error)
    explanation = bw.explain(recipe, on_error=arguments.on_error)
    if arguments.json:
        print_json(explanation.as_json())
    else:
        print(explanation)


def _bake(recipe: bw.DatasetRecipe, arguments: argparse.Namespace) -> None:
    from batchwright.store.layout import current_version, is_store

    to, before = local_path(to=arguments.to), None
    if is_store(to):
        before = current_version(to)
    baked = bw.bake(
        recipe,
        to,
        workers=arguments.workers,
        on_error=arguments.on_error,
        shuffle=not arguments.no_shuffle,
        check=arguments.check,
        show_progress=not arguments.quiet,
    )
    if not arguments.json:
        print(baked)
    elif not recipe.is_tokenized:
        print_json({"buffer": str(to), "num_rows": len(baked)})
    else:
        was_up_to_date = baked.version == before
        print_json(store_facts(baked) | {"was_up_to_date": was_up_to_date, "report": baked.report})


def _recipe_of_flags(arguments: argparse.Namespace) -> bw.DatasetRecipe:
    if arguments.tokenizer is None:
        remedy = "--tokenizer bytes, --tokenizer chars, or --tokenizer path/to/tokenizer.json"
        raise SpecError("which tokenizer?", parameter="tokenizer", remedy=remedy)
    make_step = _text_step if arguments.chat is None else _chat_step
    step = make_step(arguments)
    recipe = bw.DatasetRecipe(seed=arguments.seed or 0)
    named = _sources(arguments.source, arguments.name)
    formats = per_source("format", arguments.format, named)
    texts = per_source("text", arguments.text, named)
    quantities = per_source("quantity", arguments.quantity, named)
    options = _options(arguments.option, named)
    for name, paths in named.items():
        recipe.add_ingredient(
            [local_path(source=path) for path in paths],  # Path objects: a list of strings could be rows of text
            _text(texts[name] or "text"),
            format=formats[name],
            name=name,
            quantity=_quantity(quantities[name]),
            options=options[name],
        )
    recipe.prepare_step(step)
    if arguments.holdout is not None:
        recipe.holdout(arguments.holdout)
    return recipe


def _text_step(arguments: argparse.Namespace) -> Any:
    for name in _OF_CHAT:
        if getattr(arguments, name) is not None:
            flag = flag_of(name)
            raise SpecError(f"{flag} is for conversations", parameter=name, remedy=f"--chat too, or leave out {flag}")
    eos = arguments.eos
    if eos is not None and eos.isdigit():
        eos = int(eos)
    append_eos = arguments.append_eos or eos is not None
    return bw.tokenize(arguments.tokenizer, append_eos=append_eos, eos=eos, special=arguments.special or "text")


def _chat_step(arguments: argparse.Namespace) -> Any:
    for name, instead in (
        ("text", "--columns, for the columns of a conversation"),
        ("append_eos", "leave it out: the template ends every turn"),
        ("eos", "leave it out: the template ends every turn"),
        ("special", "leave it out: in messages they are always text"),
    ):
        if getattr(arguments, name) not in (None, False):
            what = f"{flag_of(name)} is for plain text, and --chat for conversations"
            raise SpecError(what, parameter=name, remedy=instead)
    return bw.chat(
        arguments.tokenizer,
        arguments.chat or None,
        format=arguments.conversation_format,
        columns=arguments.columns,
        roles=arguments.roles,
        keep_newest=arguments.keep_newest,
    )


def _sources(given: list[str], default: str | None) -> dict[str | None, list[str]]:
    """Sources of one name together, in the order in which the names come."""
    named = paths_by_name(given, default)
    if len(named.get(None, ())) > 1:  # usually the shell's own glob: one source, named after the folder
        paths = named.pop(None)
        folder = os.path.basename(os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths]))
        named.setdefault(folder or "data", []).extend(paths)
    return named


def _text(spec: str) -> str:
    r"""Shells pass \n as two characters; in a template it means a new line."""
    if "{" not in spec:
        return spec
    return spec.replace("\\n", "\n").replace("\\t", "\t")


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
    """A value as in JSON, or else the text.

    >>> _option_value(";"), _option_value("true"), _option_value("12")
    (';', True, 12)
    """
    try:
        return json.loads(text)
    except ValueError:
        return text.replace("\\t", "\t")


def _quantity(text: str | None) -> int | float | None:
    if text is None:
        return None
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    what = f"--quantity {text} is neither a number of rows nor a share"
    raise SpecError(what, parameter="quantity", remedy="10000, or 0.1")


def _recipe_of_file(arguments: argparse.Namespace) -> bw.DatasetRecipe:
    """The `recipe` of a Python file. Its functions travel to workers by value: they cannot import it."""
    import cloudpickle

    from batchwright.base.plugins import module_for, run_file

    path = local_path(source=arguments.source[0])
    given = [flag_of(name) for name in _OF_A_RECIPE if getattr(arguments, name) not in (None, False)]
    if given:
        raise SpecError(f"{', '.join(given)}: a recipe file sets this itself", file=path)
    if not path.is_file():
        raise SpecError(f"no recipe at {path}", file=path, remedy="a Python file that defines `recipe`, or --format")
    module = module_for(path, f"batchwright_recipe_{path.stem}")
    sys.path.insert(0, str(path.parent.absolute()))  # as Python does for a script: modules beside it can be imported
    cloudpickle.register_pickle_by_value(module)
    try:
        run_file(module)
    except BatchwrightError:
        raise
    except (Exception, SystemExit) as error:
        raise SpecError(f"{path} failed: {error_in_words(error)}", file=path, line=_line_of(path, error)) from error
    recipe: Any = getattr(module, "recipe", None)
    if not isinstance(recipe, bw.DatasetRecipe):
        what = f"has a {type(recipe).__name__} as"
        if recipe is None:
            what = "does not define"
        raise SpecError(f"{path} {what} `recipe`", file=path, remedy="recipe = bw.DatasetRecipe(seed=0)")
    return recipe


def _line_of(path: Path, error: BaseException) -> int | None:
    """The line of a recipe file in which it failed."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(path.absolute())), None)
