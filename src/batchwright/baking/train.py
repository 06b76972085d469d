"""Training of a tokenizer on anything that bake can read, in a stream of rows."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from batchwright.baking.inputs import Inputs
from batchwright.baking.recipe import DatasetRecipe
from batchwright.baking.unit_rows import UnitReport, dropped_in_words
from batchwright.base.checks import at_least, local_path, one_of
from batchwright.base.errors import SourceError, SpecError
from batchwright.base.files import out_of_space_at, write_whole
from batchwright.base.progress import progress, say
from batchwright.prepare.tokenize import tokenize
from batchwright.prepare.tokenizers import JsonTokenizer
from batchwright.prepare.train import BpeSettings, train_bpe
from batchwright.typing import Data, OnError

if TYPE_CHECKING:
    from batchwright.baking.work import Work
    from batchwright.sources.units import Unit

_SAMPLE_BITS = 20
"""A sample consists of groups of rows with the same first bits of their hashes. A group has a millionth of the text."""


def train_tokenizer(
    source: Data,
    vocab_size: int = 32_000,
    *,
    out: str | os.PathLike[str] | None = None,
    text: str = "text",
    format: str | None = None,
    options: Mapping[str, Any] | None = None,
    special_tokens: Sequence[str] = ("<|endoftext|>",),
    pattern: str = "llama3",
    min_frequency: int = 2,
    max_bytes: int | None = None,
    seed: int = 0,
    on_error: OnError = "raise",
    force: bool = False,
    show_progress: bool = True,
) -> JsonTokenizer:
    """Train a byte-level BPE on a source as `add_ingredient` takes it. Returns the tokenizer, for `bw.tokenize`.

    train_tokenizer("corpus/", 32_000, out="tokenizer.json")     also written to a file, atomically
    train_tokenizer("corpus/", max_bytes=10**9)                  learn from about a gigabyte of the text

    - The same source gives the same file, to the byte, on any number of threads.
    - `vocab_size` counts everything: 256 bytes, merges, special tokens. If the text has too few pairs that occur
      `min_frequency` times the vocabulary is smaller, and a warning says how large.
    - `max_bytes` limits the text to learn from: the rows with the smallest hash of (seed, file, row), spread over the
      source. The source is then read twice.
    - `pattern` cuts text before merging: "llama3", "gpt2", or a regular expression.
    - Malformed rows are as in `bake`: `on_error="raise"` names the first, `"skip"` leaves them out.
    - `text`, `format` and `options` are as in `add_ingredient`. `special_tokens` get ids of their own.
    - A file at `out` is replaced only with `force=True`. `show_progress=False` is quiet.
    """
    from batchwright.baking.work import plan_work  # imports Arrow, which `bake` can often do without

    started = time.monotonic()
    one_of(("raise", "skip"), on_error=on_error)
    path = None if out is None else _checked_out(out, force)
    settings = BpeSettings(
        vocab_size, special_tokens=special_tokens, pattern=pattern, min_frequency=min_frequency, name=_name_of(path)
    )
    recipe = DatasetRecipe(seed=seed).add_ingredient(source, text, format=format, options=options, name="text")
    recipe.prepare_step(tokenize("bytes"))  # not used, but required of a recipe
    (work,) = plan_work(recipe, Inputs.of(recipe, False), on_error, False)
    reader = _TextReader(work)
    if max_bytes is not None:
        reader.limit = _limit_of_sample(work, at_least(1, max_bytes=max_bytes), show_progress)
    texts = (text for _, text in reader.read("training a tokenizer", show_progress))
    tokenizer = train_bpe(texts, settings)
    if path is not None:
        with out_of_space_at(path.parent):
            write_whole(path, tokenizer.to_json())
    say(_summary(path, tokenizer, reader, time.monotonic() - started), show=show_progress)
    return tokenizer


def _name_of(path: Path | None) -> str:
    if path is None:
        return "trained"
    if path.name == "tokenizer.json":
        return path.parent.name
    return path.stem


def _checked_out(out: str | os.PathLike[str], force: bool) -> Path:
    """The path to write to. Checked before the text is read, and not after."""
    path = Path(os.path.abspath(local_path(out=out)))
    if path.is_dir():
        raise SpecError(f"{path} is a folder", parameter="out", remedy=f"out='{path / 'tokenizer.json'}'")
    if path.exists() and not force:
        remedy = "force=True (--force), or another name"
        raise SpecError(f"{path} is there already, and is left as it is", parameter="out", remedy=remedy)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"{path.parent} cannot be made: {os.strerror(error.errno or 0)}"
        raise SpecError(what, parameter="out", remedy="another folder") from None
    if not os.access(path.parent, os.W_OK):
        raise SpecError(f"{path.parent} cannot be written", parameter="out", remedy="another folder")
    return path


class _TextReader:
    """Reads the texts of a source, and counts its rows."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.limit = 1 << _SAMPLE_BITS
        """Rows of the sample have first bits of their hash below this."""
        self.num_documents = self.num_bytes = 0
        self.dropped: Counter[str] = Counter()

    def read(self, doing: str, show: bool) -> Iterator[tuple[int, str]]:
        """(first bits of the hash of file and row, text) of every row of the sample. Raises if there is none."""
        units = self.work.units
        rows_before: Counter[int] = Counter()
        """For each file, the number of rows in its parts that were read."""
        with progress(doing, sum(unit.num_bytes for unit in units), show=show) as done:
            for unit in units:
                for bits, text in self._read_unit(unit, rows_before):
                    if bits < self.limit:
                        self.num_documents += 1
                        self.num_bytes += _bytes_of(text)
                        yield bits, text
                done.advance(unit.num_bytes, f"{self.num_documents:,} documents")
        if not self.num_bytes:
            what = "no text to learn from" + ": every row was dropped" * bool(self.dropped)
            dropped = dropped_in_words(self.dropped) or None
            raise SourceError(what, dropped=dropped, remedy="text= names the column that holds the text")

    def _read_unit(self, unit: Unit, rows_before: Counter[int]) -> Iterator[tuple[int, str]]:
        from batchwright.baking.unit import texts_of

        files, names, first = [0], ["<memory>"], [unit.first_row]
        if unit.spans:
            files = [span.file for span in unit.spans]
            names = [self.work.file_of(span).name for span in unit.spans]
            first = [rows_before[file] for file in files]
        report, seed = UnitReport(), self.work.job.seed & (1 << 64) - 1
        for (_, span, number), text in texts_of(self.work.job, unit, report):
            place = f"{names[span]}\0{first[span] + number}".encode("utf-8", "surrogatepass")
            yield xxhash.xxh3_64_intdigest(place, seed=seed) >> 64 - _SAMPLE_BITS, text
        rows_before.update(dict(zip(files, report.span_rows, strict=True)))
        self.dropped.update(report.dropped)


def _limit_of_sample(work: Work, max_bytes: int, show: bool) -> int:
    """The limit below which rows have at most `max_bytes` of text. Reads the source once."""
    import numpy as np

    sizes = np.zeros(1 << _SAMPLE_BITS, np.int64)
    for bits, text in _TextReader(work).read("measuring the text", show):
        sizes[bits] += _bytes_of(text)
    together = np.cumsum(sizes)
    limit = int(np.searchsorted(together, max_bytes, side="right"))
    if not limit or not together[limit - 1]:
        needed = int(together[np.argmax(sizes > 0)])
        raise SpecError(
            f"max_bytes={max_bytes:,} is less than the first document of the sample has: {needed:,} bytes",
            parameter="max_bytes",
            remedy=f"max_bytes={needed} or more, or none",
        )
    return limit


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _summary(path: Path | None, tokenizer: JsonTokenizer, reader: _TextReader, seconds: float) -> str:
    text = f"{reader.num_documents:,} documents, {reader.num_bytes:,} bytes"
    summary = f"{tokenizer.vocab_size:,} ids, from {text}, in {seconds:.1f} s"
    if path is not None:
        summary = f"{path}: {summary}"
    if reader.dropped:
        summary += f"\n  dropped: {dropped_in_words(reader.dropped)}"
    return summary
