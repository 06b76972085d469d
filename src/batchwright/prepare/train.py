r"""Training of a byte-level BPE. Every byte has an id and nothing is normalised, so decoding gives the exact text.

Ids 0 to 255 are the bytes, then come merges in the order in which they were found, then the special tokens. This is the
order of `tiktoken` too, so that the fast encoder can be proved identical.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from batchwright.base.checks import at_least
from batchwright.base.errors import SpecError
from batchwright.prepare.tokenizers import JsonTokenizer

__all__ = ["BpeSettings", "train_bpe"]

PATTERNS = {
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
"""Patterns that cut text before merging. No token spans a cut."""
_BYTES = 256
_BATCH_CHARACTERS = 1 << 20


class BpeSettings:
    """The settings of a new tokenizer, checked before any text is read."""

    def __init__(
        self, vocab_size: int, *, special_tokens: Sequence[str], pattern: str, min_frequency: int, name: str
    ) -> None:
        self.special_tokens: list[str] = _checked_specials(special_tokens)
        self.vocab_size: int = at_least(1, vocab_size=vocab_size)
        self.min_frequency: int = at_least(1, min_frequency=min_frequency)
        self.name: str = name
        smallest = _BYTES + len(self.special_tokens)
        if vocab_size < smallest:
            raise SpecError(
                f"vocab_size={vocab_size:,} is too small: {_BYTES} bytes have an id each, and so have special tokens "
                f"({len(self.special_tokens)})",
                parameter="vocab_size",
                remedy=f"vocab_size={smallest} or more",
            )
        self.empty: Any = self._empty(pattern)

    def _empty(self, pattern: str) -> Any:
        """The tokenizer without any merges."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        try:
            regex = Regex(PATTERNS.get(pattern, pattern))
        except Exception as error:  # the library raises bare Exception
            raise SpecError(
                f"pattern={pattern!r} is neither {' nor '.join(map(repr, PATTERNS))} nor a regular expression",
                parameter="pattern",
                reason=error,
                remedy="pattern='llama3'",
            ) from None
        tokenizer = Tokenizer(models.BPE())
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(regex, "isolated"), byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer


def train_bpe(texts: Iterable[str], settings: BpeSettings) -> JsonTokenizer:
    """Learn merges from texts, which are read once, in order. The same texts give the same tokenizer, to the byte."""
    from tokenizers import pre_tokenizers, trainers

    tokenizer = settings.empty
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size - len(settings.special_tokens),
        min_frequency=settings.min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_batches(_without(settings.special_tokens, texts)), trainer)
    tokenizer.add_special_tokens(settings.special_tokens)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size < settings.vocab_size:
        warnings.warn(
            f"the vocabulary has {size:,} ids, not {settings.vocab_size:,}: the text has no more pairs that occur "
            f"{settings.min_frequency:,} times; more text, min_frequency=, or vocab_size={size}",
            stacklevel=3,
        )
    return JsonTokenizer(tokenizer.to_str(pretty=True), settings.name)


def _without(special_tokens: Sequence[str], texts: Iterable[str]) -> Iterator[str]:
    """Cut texts at the names of special tokens. If merges could learn a name, one id would have two meanings."""
    names = re.compile("|".join(map(re.escape, special_tokens)) or r"(?!)")
    for text in texts:
        if any(token in text for token in special_tokens):
            yield from filter(None, names.split(text))
        else:
            yield text


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of texts. The library cuts each list into pieces with several threads."""
    batch: list[str] = []
    waiting = 0
    for text in texts:
        batch.append(text)
        waiting += len(text)
        if waiting >= _BATCH_CHARACTERS:
            yield batch
            batch, waiting = [], 0
    yield batch


def _checked_specials(tokens: Any) -> list[str]:
    if isinstance(tokens, str) or not all(isinstance(token, str) and token for token in tokens):
        raise SpecError(
            f"special_tokens={tokens!r} is not a list of names",
            parameter="special_tokens",
            remedy="special_tokens=['<|endoftext|>']",
        )
    for token in tokens:
        if tokens.count(token) > 1:
            remedy = "name each of them once"
            raise SpecError(f"special token {token!r} is there twice", parameter="special_tokens", remedy=remedy)
    return list(tokens)
