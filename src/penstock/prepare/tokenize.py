"""The step that turns text into tokens: which tokenizer, which id ends a document, which type holds the ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import TokenizerError
from penstock.fingerprint import fingerprint
from penstock.prepare.tokenizers import WELL_KNOWN_EOS, CharsTokenizer, JsonTokenizer, resolve_tokenizer

__all__ = ["Tokenize", "tokenize"]


def tokenize(
    tokenizer: Any,
    *,
    append_eos: bool = False,
    eos: int | str | None = None,
    text: str = "text",
    vocab_size: int | None = None,
    decode: Callable[[Any], str] | None = None,
    dtype: str | None = None,
    version: str | None = None,
) -> Tokenize:
    """A recipe step that encodes `row[text]`.

    tokenize("tokenizer.json", append_eos=True)      a Hugging Face file; padding and truncation in it are turned off
    tokenize(AutoTokenizer.from_pretrained("..."))   a transformers tokenizer, or a tokenizers.Tokenizer
    tokenize("bytes")                                UTF-8 bytes, no vocabulary to make
    tokenize("chars")                                the characters of this corpus
    tokenize(function, vocab_size=50257)             any function from text to ids

    `append_eos` ends every document with one id: `eos=` (an id or a token), else what tokenizer_config.json beside the
    file says, else the only special token, else a well-known name. The bake report says which; where there is no
    answer the error lists the candidates. Special tokens of the template are never added.
    """
    resolved = resolve_tokenizer(tokenizer, vocab_size=vocab_size, decode=decode, version=version)
    eos_id, eos_from = _eos(resolved, eos) if append_eos else (None, None)
    step = Tokenize(tokenizer=resolved, eos_id=eos_id, eos_from=eos_from, text=text, asked_dtype=dtype)
    if not step.needs_fit:
        _ = step.dtype
    return step


@dataclass(frozen=True, slots=True)
class Tokenize:
    """See `tokenize`."""

    tokenizer: Any
    eos_id: int | None
    eos_from: str | None
    text: str
    asked_dtype: str | None = None

    @property
    def needs_fit(self) -> bool:
        return isinstance(self.tokenizer, CharsTokenizer) and self.tokenizer.chars is None

    def fitted(self, points: set[int]) -> Tokenize:
        """This step with the vocabulary that a corpus has."""
        tokenizer = self.tokenizer.fitted(points)
        return replace(self, tokenizer=tokenizer, eos_id=None if self.eos_id is None else tokenizer.eos_id)

    @property
    def vocab_size(self) -> int:
        return max(int(self.tokenizer.vocab_size), (self.eos_id or 0) + 1)

    @property
    def dtype(self) -> np.dtype[Any]:
        smallest = np.min_scalar_type(max(self.vocab_size - 1, 0))
        if self.asked_dtype is None:
            return smallest
        asked = np.dtype(self.asked_dtype)
        if asked.kind != "u" or asked.itemsize > 4 or asked.itemsize < smallest.itemsize:
            raise TokenizerError(
                f"dtype={asked.name} cannot hold a vocabulary of {self.vocab_size:,} ids",
                parameter="dtype",
                remedy=f"dtype='{smallest.name}', or leave it out",
            )
        return asked

    @property
    def fingerprint(self) -> str:
        return fingerprint([self.tokenizer.fingerprint, self.eos_id, self.text, self.asked_dtype])

    def describe(self) -> str:
        end = f", eos {self.eos_id} ({self.eos_from})" if self.eos_id is not None else ""
        return f"tokenize({self.tokenizer.name}{end})"

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of each text, in this step's dtype, with the end of document where it was asked for."""
        dtype, limit = self.dtype, self.vocab_size
        encoded = []
        for number, ids in enumerate(self.tokenizer.encode_batch(texts)):
            array = np.asarray(ids)
            if array.dtype != np.uint8 and len(array):
                if array.ndim != 1 or array.dtype.kind not in "iu":
                    raise TokenizerError(
                        f"the tokenizer gave {array.dtype} of shape {array.shape}, not a list of ids", number=number
                    )
                if int(array.max()) >= limit or int(array.min()) < 0:
                    bad = int(array.max()) if int(array.max()) >= limit else int(array.min())
                    raise TokenizerError(
                        f"the tokenizer gave id {bad}, outside its vocabulary of {limit:,}",
                        number=number,
                        remedy=f"vocab_size={max(bad, limit) + 1}" if bad >= 0 else "ids of 0 or more",
                    )
            tokens = np.empty(len(array) + (self.eos_id is not None), dtype)
            tokens[: len(array)] = array
            if self.eos_id is not None:
                tokens[-1] = self.eos_id
            encoded.append(tokens)
        return encoded

    def info(self) -> dict[str, Any]:
        """What a store's manifest says of its tokenizer."""
        return {
            "name": self.tokenizer.name,
            "kind": self.tokenizer.kind,
            "fingerprint": self.tokenizer.fingerprint,
            "vocab_size": self.vocab_size,
            "eos": self.eos_id,
            "eos_from": self.eos_from,
        }


def _eos(tokenizer: Any, asked: int | str | None) -> tuple[int, str]:
    if isinstance(asked, int):
        limit = max(int(tokenizer.vocab_size), getattr(tokenizer, "eos_id", -1) + 1)
        if not 0 <= asked < limit:
            raise TokenizerError(
                f"eos={asked} is outside the vocabulary of {limit:,} ids",
                parameter="eos",
                remedy="an id of the vocabulary",
            )
        return asked, "eos="
    if not isinstance(tokenizer, JsonTokenizer):
        if asked is not None:
            raise TokenizerError(
                f"eos={asked!r}: a {tokenizer.kind} tokenizer has no named tokens",
                parameter="eos",
                remedy="eos as an id",
            )
        if (own := getattr(tokenizer, "eos_id", None)) is not None:
            return own, "its own"
        raise TokenizerError(
            "append_eos needs to know which id ends a document",
            parameter="eos",
            remedy="tokenize(function, append_eos=True, eos=50256)",
        )
    special = tokenizer.special
    if asked is not None:
        if asked not in tokenizer.vocab:
            raise TokenizerError(
                f"eos={asked!r} is not a token of {tokenizer.name}",
                special=_listed(special),
                remedy="one of these, or an id",
            )
        return tokenizer.vocab[asked], "eos="
    configured = tokenizer.config.get("eos_token")
    configured = configured.get("content") if isinstance(configured, dict) else configured
    if isinstance(configured, str) and configured in tokenizer.vocab:
        return tokenizer.vocab[configured], f"{configured} from the tokenizer's config"
    if len(special) == 1:
        ((token, number),) = special.items()
        return number, f"{token}, the only special token"
    for token in WELL_KNOWN_EOS:
        if token in special:
            return special[token], f"{token}, a well-known name"
    raise TokenizerError(
        f"append_eos: cannot tell which token of {tokenizer.name} ends a document",
        special=_listed(special) or "none",
        remedy="eos= with one of these tokens, or an id",
    )


def _listed(special: dict[str, int]) -> str:
    return ", ".join(f"{token} ({number})" for token, number in list(special.items())[:12])
