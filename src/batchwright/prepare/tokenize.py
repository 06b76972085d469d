"""The recipe step that turns text into tokens of the smallest dtype, with an id for the end of a document."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import one_of
from batchwright.base.errors import TokenizerError
from batchwright.base.fingerprint import fingerprint
from batchwright.base.words import counted, error_in_words
from batchwright.prepare.tokenizers import (
    WELL_KNOWN_EOS,
    CharsTokenizer,
    JsonTokenizer,
    configured_tokens,
    resolve_tokenizer,
)
from batchwright.typing import TokenizerLike

__all__ = ["Tokenize", "special_in_words", "tokenize"]


def tokenize(
    tokenizer: TokenizerLike,
    *,
    append_eos: bool = False,
    eos: int | str | None = None,
    text: str = "text",
    vocab_size: int | None = None,
    decode: Callable[[Any], str] | None = None,
    dtype: str | None = None,
    version: str | None = None,
    special: str = "text",
) -> Tokenize:
    """A recipe step that encodes `row[text]` with `tokenizer`.

    tokenize("tokenizer.json", append_eos=True)      a Hugging Face file; padding and truncation in it are turned off
    tokenize(AutoTokenizer.from_pretrained("..."))   a transformers tokenizer, or a tokenizers.Tokenizer
    tokenize("bytes")                                UTF-8 bytes, no vocabulary to make
    tokenize("chars")                                the characters of this corpus
    tokenize(function, vocab_size=50257)             any function from text to ids

    `append_eos` ends every document with one id: `eos=` (an id or a token), else the id from the tokenizer_config.json
    beside the file, else the only special token, else a well-known name. The bake report names it. If none is found,
    the error lists the candidates. Special tokens of the template are never added.

    For a function, `vocab_size` is one more than its largest id, `decode` is its inverse, and `version` identifies it
    if it uses things that cannot be compared. `dtype` is the type of the stored ids, by default the smallest.

    `special="text"` encodes the name of a special token in a document (`<|endoftext|>` on a web page) as plain
    characters; "parse" makes it that token. The bake report counts these names.
    """
    resolved = resolve_tokenizer(tokenizer, vocab_size=vocab_size, decode=decode, version=version)
    one_of(("text", "parse"), special=special)
    has_special = isinstance(resolved, JsonTokenizer) and bool(resolved.special)
    if special == "parse" and not has_special:
        raise TokenizerError(
            f"special='parse': no special tokens are known of the tokenizer {resolved.name!r}",
            parameter="special",
            remedy="leave it out, or the path of a tokenizer.json that has some",
        )
    eos_id, eos_from = None, None
    if append_eos:
        eos_id, eos_from = _eos(resolved, eos)
    elif eos is not None:
        remedy = "append_eos=True, or no eos="
        raise TokenizerError(f"eos={eos!r} has no effect without append_eos", parameter="eos", remedy=remedy)
    step = Tokenize(resolved, eos_id, eos_from, text, _dtype_name(dtype), special if has_special else None)
    if not step.needs_fit:
        _ = step.dtype  # raises now, not at the bake, if it cannot hold the vocabulary
    return step


@dataclass(frozen=True, slots=True)
class Tokenize:
    """The step that `tokenize` returns."""

    tokenizer: Any
    eos_id: int | None
    eos_from: str | None
    text: str
    asked_dtype: str | None = None
    special: str | None = None
    """The treatment of special tokens' names in a text; None if the tokenizer has none, or handles them itself."""

    @property
    def needs_fit(self) -> bool:
        return isinstance(self.tokenizer, CharsTokenizer) and self.tokenizer.chars is None

    def fitted(self, points: set[int]) -> Tokenize:
        """This step with the vocabulary of a corpus."""
        tokenizer = self.tokenizer.fitted(points)
        return replace(self, tokenizer=tokenizer, eos_id=None if self.eos_id is None else tokenizer.eos_id)

    @property
    def vocab_size(self) -> int:
        return max(int(self.tokenizer.vocab_size), (self.eos_id or 0) + 1)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The requested type, else the smallest unsigned one that holds the vocabulary."""
        smallest = np.min_scalar_type(max(self.vocab_size - 1, 0))
        if smallest.itemsize > 4:
            raise TokenizerError(
                f"a vocabulary of {self.vocab_size:,} ids is larger than 32 bits can hold",
                parameter="vocab_size",
                remedy="vocab_size=4294967296 or less",
            )
        if self.asked_dtype is None:
            return smallest
        asked = np.dtype(self.asked_dtype)
        if asked.itemsize < smallest.itemsize:
            raise TokenizerError(
                f"dtype={asked.name} cannot hold a vocabulary of {self.vocab_size:,} ids",
                parameter="dtype",
                remedy=f"dtype='{smallest.name}', or leave it out",
            )
        return asked

    @property
    def fingerprint(self) -> str:
        decides = [self.tokenizer.fingerprint, self.eos_id, self.text, self.asked_dtype]
        return fingerprint(decides if self.special is None else [*decides, self.special])

    def describe(self) -> str:
        end = f", eos {self.eos_id} ({self.eos_from})" if self.eos_id is not None else ""
        special = ", special tokens parsed" if self.special == "parse" else ""
        return f"tokenize({self.tokenizer.name}{end}{special})"

    def special_in(self, text: str) -> list[str]:
        """The names of special tokens that a text holds, in order."""
        return [] if self.special is None else self.tokenizer.special_names.findall(text)

    @property
    def encoder(self) -> str | None:
        """The encoder in use and the reason for it; None for a tokenizer with only one. Not part of a store."""
        return getattr(self.tokenizer, "encoder", None)

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of each text, in this step's dtype, with the end-of-document id if `append_eos` is set.

        The `number` of a TokenizerError is that of the text.
        """
        dtype, ends = self.dtype, self.eos_id is not None
        # All documents in one array, each a slice of it: work per document costs more than work per token.
        arrays, tokens = checked_ids(self._ids(texts), self.vocab_size)
        tokens = tokens.astype(dtype, copy=False)
        stops = np.cumsum([len(array) + ends for array in arrays], dtype=np.int64)
        if ends:
            is_token = np.ones(len(tokens) + len(arrays), bool)
            is_token[stops - 1] = False
            ended = np.full(len(is_token), self.eos_id, dtype)
            ended[is_token] = tokens
            tokens = ended
        return [tokens[start:stop] for start, stop in pairwise([0, *stops.tolist()])]

    def _ids(self, texts: Sequence[str]) -> list[Any]:
        encode = self.tokenizer.encode_as_text if self.special == "text" else self.tokenizer.encode_batch
        try:
            ids = list(encode(texts))
        except Exception:
            for number, text in enumerate(texts):  # once more, to find the text
                try:
                    encode([text])
                except Exception as error:
                    raise _failed(self.tokenizer.name, error, number) from error
            raise
        if len(ids) != len(texts):
            raise TokenizerError(
                f"the tokenizer gave {len(ids)} lists of ids for {len(texts)} texts",
                remedy="encode_batch must answer every text",
            )
        return ids

    def info(self) -> dict[str, Any]:
        """The tokenizer's entry in a store's manifest."""
        entries = tokenizer_info(self.tokenizer, self.vocab_size, self.eos_id, self.eos_from)
        return {**entries, "special": self.special}


def tokenizer_info(tokenizer: Any, vocab_size: int, eos: int | None, eos_from: str | None) -> dict[str, Any]:
    """The entries of every tokenizer in a store's manifest."""
    return {
        "name": tokenizer.name,
        "kind": tokenizer.kind,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": vocab_size,
        "eos": eos,
        "eos_from": eos_from,
    }


def special_in_words(report: Mapping[str, Any]) -> list[str]:
    """The report's line about special tokens in texts; no line without any."""
    said = report.get("special_tokens")
    if not said or not said["documents"]:
        return []
    names = ", ".join(f"{count:,} {name}" for name, count in said["names"].items())
    became = "kept as text" if said["as"] == "text" else "made special tokens"
    return [f"{names} in the text of {counted(said['documents'], 'document')}: {became}"]


def checked_ids(lists: Iterable[Any], limit: int) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    """Lists of ids below `limit` as arrays, and all of them in one."""
    arrays = [np.asarray(ids) for ids in lists]
    for number, array in enumerate(arrays):
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TokenizerError(
                f"the tokenizer gave {array.dtype} of shape {array.shape}, not a list of ids",
                number=number,
                remedy="a function that returns whole numbers, one for each token",
            )
    together: NDArray[Any] = np.concatenate([np.empty(0, np.uint8), *(array for array in arrays if array.size)])
    if together.size and (together.max() >= limit or together.min() < 0):
        raise _outside(arrays, together, limit)
    return arrays, together


def _outside(arrays: Sequence[NDArray[Any]], together: NDArray[Any], limit: int) -> TokenizerError:
    """The error for the first id outside of the vocabulary."""
    at = int(np.flatnonzero((together < 0) | (together >= limit))[0])
    bad = int(together[at])  # 255 + 1 is 0 in uint8
    remedy = "ids of 0 or more"
    if bad >= 0:
        remedy = f"vocab_size={bad + 1} or more"
    return TokenizerError(
        f"the tokenizer gave id {bad}, outside its vocabulary of {limit:,}",
        number=int(np.searchsorted(np.cumsum([len(array) for array in arrays]), at, "right")),
        parameter="vocab_size",
        remedy=remedy,
    )


def _failed(name: str, error: Exception, number: int) -> TokenizerError:
    """The error that a tokenizer raised, with the number of the text that caused it."""
    if isinstance(error, TokenizerError):
        error.where["number"] = number
        return error
    if isinstance(error, UnicodeEncodeError):
        return TokenizerError(
            f"this text cannot be written as UTF-8: it has half a surrogate pair at character {error.start:,}",
            number=number,
            remedy="text.encode('utf-8', 'replace').decode() in a step before tokenize",
        )
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return TokenizerError(
        f"the tokenizer {name!r} failed: {error_in_words(error)}",
        number=number,
        at=f"{frame.filename}:{frame.lineno}",
        remedy="mend the tokenizer, or leave such rows out with where=",
    )


def _dtype_name(asked: Any) -> str | None:
    """A user's dtype, checked, by its name."""
    if asked is None:
        return None
    try:
        name = str(np.dtype(asked).name)
    except TypeError:
        name = ""
    if name not in ("uint8", "uint16", "uint32"):
        remedy = "'uint8', 'uint16' or 'uint32'"
        raise TokenizerError(f"dtype={asked!r} is not a type of token ids", parameter="dtype", remedy=remedy)
    return name


def _eos(tokenizer: Any, asked: int | str | None) -> tuple[int, str]:
    """(the id that ends a document, its origin)."""
    own = getattr(tokenizer, "eos_id", None)
    if isinstance(asked, int):
        limit = max(int(tokenizer.vocab_size), (own or -1) + 1)
        if isinstance(asked, bool) or not 0 <= asked < limit:
            raise _bad_eos(f"eos={asked} is outside the vocabulary of {limit:,} ids", "an id of the vocabulary")
        return asked, "eos="
    if isinstance(tokenizer, JsonTokenizer):
        return _eos_by_name(tokenizer, asked)
    if asked is not None:
        raise _bad_eos(f"eos={asked!r}: a {tokenizer.kind} tokenizer has no named tokens", "eos as an id")
    if own is None:
        remedy = "tokenize(function, append_eos=True, eos=50256)"
        raise _bad_eos("append_eos needs to know which id ends a document", remedy)
    return own, "its own"


def _bad_eos(what: str, remedy: str, special: str | None = None) -> TokenizerError:
    return TokenizerError(what, parameter="eos", special=special, remedy=remedy)


def _eos_by_name(tokenizer: JsonTokenizer, asked: str | None) -> tuple[int, str]:
    special, vocab = tokenizer.special, tokenizer.vocab
    known = ", ".join(f"{token} ({number})" for token, number in list(special.items())[:12]) or "none"
    if asked in vocab:
        return vocab[asked], "eos="
    if asked is not None:
        raise _bad_eos(f"eos={asked!r} is not a token of {tokenizer.name}", "one of these, or an id", known)
    configured = configured_tokens(tokenizer.config).get("eos_token")
    if configured in vocab:
        return vocab[configured], f"{configured} from the tokenizer's config"
    if len(special) == 1:
        ((token, number),) = special.items()
        return number, f"{token}, the only special token"
    for token in WELL_KNOWN_EOS:
        if token in special:
            return special[token], f"{token}, a well-known name"
    remedy = f"eos= with {'one of these tokens, or ' * bool(special)}an id of the vocabulary, or append_eos=False"
    raise _bad_eos(f"append_eos: cannot tell which token of {tokenizer.name} ends a document", remedy, known)
