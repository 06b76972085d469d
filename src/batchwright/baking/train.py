"""Train a tokenizer on whatever bake can read: rows are read one after another, and none is kept."""

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

__all__ = ["train_tokenizer"]

_SAMPLE_BITS = 20
"""A sample is cut between groups of rows with the same first bits of their hashes: a millionth of the text or so."""


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

    train_tokenizer("corpus/", 32_000, out="tokenizer.json")     also written to a file, whole or not at all
    train_tokenizer("corpus/", max_bytes=10**9)                  learn from about a gigabyte of the text

    - The same source gives the same file, to the byte, on any number of threads.
    - `vocab_size` counts everything: 256 bytes, merges, special tokens. If the text has too few pairs that occur
      `min_frequency` times the vocabulary is smaller, and a warning says how large.
    - `max_bytes` learns from at most so much text: the rows with the smallest hash of (seed, file, row), so from all
      over the source. The source is then read twice.
    - `pattern` is where text is cut before merging: "llama3", "gpt2", or a regular expression.
    - Malformed rows are as in `bake`: `on_error="raise"` names the first, `"skip"` leaves them out.
    - `text`, `format` and `options` are as in `add_ingredient`. `special_tokens` get ids of their own.
    - A file at `out` is replaced only with `force=True`. `show_progress=False`: say nothing.
    """
    from batchwright.baking.work import plan_work  # and Arrow with it, which `bake` can often do without

    started = time.monotonic()
    one_of(("raise", "skip"), on_error=on_error)
    path = None if out is None else _checked_out(out, force)
    name = "trained" if path is None else path.stem if path.name != "tokenizer.json" else path.parent.name
    settings = BpeSettings(
        vocab_size, special_tokens=special_tokens, pattern=pattern, min_frequency=min_frequency, name=name
    )
    recipe = DatasetRecipe(seed=seed).add_ingredient(source, text, format=format, options=options, name="text")
    recipe.prepare_step(tokenize("bytes"))  # not used: a recipe has one
    (part,) = plan_work(recipe, Inputs.of(recipe, False), on_error, False)
    sample = None if max_bytes is None else _Sample.of(part, at_least(1, max_bytes=max_bytes), seed, show_progress)
    reader = _Reader(part, sample)
    tokenizer = train_bpe(reader.texts("training a tokenizer", show_progress), settings)
    if path is not None:
        with out_of_space_at(path.parent):
            write_whole(path, tokenizer.to_json())
    say(_summary(path, tokenizer, reader, time.monotonic() - started), show=show_progress)
    return tokenizer


def _checked_out(out: str | os.PathLike[str], force: bool) -> Path:
    """Where to write, if that can be done: said before the text is read, and not after."""
    path = Path(os.path.abspath(local_path(out=out)))
    if path.is_dir():
        raise SpecError(f"{path} is a folder", parameter="out", remedy=f"out='{path / 'tokenizer.json'}'")
    if path.exists() and not force:
        raise SpecError(
            f"{path} is there already, and is left as it is",
            parameter="out",
            remedy="force=True (--force), or another name",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(
            f"{path.parent} cannot be made: {os.strerror(error.errno or 0)}", parameter="out", remedy="another folder"
        ) from None
    if not os.access(path.parent, os.W_OK):
        raise SpecError(f"{path.parent} cannot be written", parameter="out", remedy="another folder")
    return path


class _Reader:
    """Reads the texts of a source once, and counts what became of its rows."""

    def __init__(self, part: Work, sample: _Sample | None = None) -> None:
        self.part, self.sample = part, sample
        self.num_documents = self.num_bytes = self.num_errors = 0
        self.dropped: Counter[str] = Counter()

    def texts(self, doing: str, show: bool) -> Iterator[str]:
        for _, text in self.hashed(doing, show):
            yield text

    def hashed(self, doing: str, show: bool) -> Iterator[tuple[int, str]]:
        """(hash of file and row, text) of every row of the sample. Raises where there is none."""
        from batchwright.baking.rows import UnitReport
        from batchwright.baking.unit import texts_of

        part, seed = self.part, self.part.job.seed & (1 << 64) - 1
        rows_before: Counter[int] = Counter()
        """Of each file, those in the parts of it that were read."""
        with progress(doing, sum(unit.num_bytes for unit in part.units), show=show) as done:
            for unit in part.units:
                report = UnitReport()
                files = [span.file for span in unit.spans] or [0]
                names = [part.file_of(span).name for span in unit.spans] or ["<memory>"]
                first = [rows_before[file] for file in files] if unit.spans else [unit.first_row]
                for span, row, text in texts_of(part.job, unit, report, self.dropped):
                    place = f"{names[span]}\0{first[span] + row}".encode("utf-8", "surrogatepass")
                    noise = xxhash.xxh3_64_intdigest(place, seed=seed)
                    if self.sample is None or self.sample.has(noise):
                        self.num_documents += 1
                        self.num_bytes += _bytes_of(text)
                        yield noise, text
                for file, count in zip(files, report.span_rows, strict=True):
                    rows_before[file] += count
                self.num_errors += report.errors
                done.advance(unit.num_bytes, f"{self.num_documents:,} documents")
        if not self.num_bytes:
            raise SourceError(
                "no text to learn from: every row was dropped" if self.dropped else "no text to learn from",
                dropped=", ".join(f"{count:,} {why}" for why, count in self.dropped.items()) or None,
                remedy="text= names the column that holds the text",
            )


class _Sample:
    """The rows whose hash is below a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def has(self, noise: int) -> bool:
        return noise >> 64 - _SAMPLE_BITS < self.limit

    @classmethod
    def of(cls, part: Work, max_bytes: int, seed: int, show: bool) -> _Sample:
        """The limit below which rows have at most `max_bytes` of text. Reads the source once."""
        import numpy as np

        sizes = np.zeros(1 << _SAMPLE_BITS, np.int64)
        for noise, text in _Reader(part).hashed("measuring the text", show):
            sizes[noise >> 64 - _SAMPLE_BITS] += _bytes_of(text)
        together = np.cumsum(sizes)
        limit = int(np.searchsorted(together, max_bytes, side="right"))
        if not limit or not together[limit - 1]:
            needed = int(together[np.argmax(sizes > 0)])
            raise SpecError(
                f"max_bytes={max_bytes:,} is less than the first document of the sample has: {needed:,} bytes",
                parameter="max_bytes",
                remedy=f"max_bytes={needed} or more, or none",
            )
        return cls(limit)


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _summary(path: Path | None, tokenizer: JsonTokenizer, reader: _Reader, seconds: float) -> str:
    where = f"{path}: " if path is not None else ""
    lines = [
        f"{where}{tokenizer.vocab_size:,} ids, from {reader.num_documents:,} documents, {reader.num_bytes:,} bytes, "
        f"in {seconds:.1f} s"
    ]
    if reader.dropped:
        lines.append("  dropped: " + ", ".join(f"{count:,} {why}" for why, count in reader.dropped.items()))
    return "\n".join(lines)
