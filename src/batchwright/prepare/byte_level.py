"""Byte-level vocabularies: the bytes that the name of a token stands for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

__all__ = ["BYTE_OF", "bytes_of_tokens", "names_of_bytes"]


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte. A printable byte stands for itself."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
_TO_LATIN = str.maketrans({character: chr(byte) for character, byte in BYTE_OF.items()})


def bytes_of_tokens(vocab: Mapping[str, int]) -> dict[bytes, int]:
    """The vocabulary by bytes. Tokens that cannot occur in a text are left out.

    >>> bytes_of_tokens({"Ġa": 7, "<▁>": 8})
    {b' a': 7}
    """
    names = names_of_bytes(vocab)
    data = "".join(names).translate(_TO_LATIN).encode("latin-1")  # all at once: a vocabulary is long
    ends = np.cumsum([len(name) for name in names]).tolist()
    starts = [0, *ends][:-1]
    return {data[start:end]: vocab[name] for name, start, end in zip(names, starts, ends, strict=True)}


def names_of_bytes(vocab: Iterable[str]) -> list[str]:
    """The tokens that are made of bytes."""
    names, alphabet = list(vocab), BYTE_OF.keys()
    if alphabet >= set("".join(names)):  # all at once
        return names
    return [name for name in names if alphabet >= set(name)]
