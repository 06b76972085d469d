"""The proof that tiktoken gives the ids of `tokenizers` for a `tokenizer.json`, and the characters that it excludes.

Both cut the text by one regex, turn each piece into bytes, and merge neighbours. So they agree if they cut alike and
merge alike. The two are proved separately.

*Merging.* `tokenizers` merges the neighbours that stand first in a list of pairs; tiktoken merges the neighbours whose
bytes together are the token with the smallest id. Every token is given to the model's own merges, alone. Let t be one
that comes back whole, and let a piece at some moment hold neighbours a, b whose bytes are t. Nothing was merged across
the ends of a b, so what was merged inside it is what t alone goes through, in that order: the first pair of a whole is
also the first pair of its part. So a b is a moment of t alone, the only one with two symbols, the one before the end:
a, b is in the list, and is the only pair that ever makes t. With ids that never fall along the list, the smallest id is
then the first pair, and both take the leftmost of equals: both merge the same neighbours, from the first to the last.
A token that does not come back whole is never made by merging; tiktoken must not know it. Where pieces that are tokens
are not merged at all (`ignore_merges`), tiktoken must know it, and does no harm if alone it ends in three or more
symbols: there is no moment with two of them. With two it is refused.

*Cutting.* The pattern is a choice of branches, and every branch must be in the list here: those of GPT-2, GPT-4 and
later. Branches are made of literals, classes and greedy quantifiers, which both engines combine in the same way. A
class may hold other characters in the other engine (their Unicode versions may differ), so each class is compared
between the engines for every character that Unicode has. There must be a branch for each kind of character, because
tiktoken drops text that its pattern does not match.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchwright.base.files import home, write_whole
from batchwright.base.fingerprint import fingerprint, fingerprint_bytes
from batchwright.prepare.special_tokens import pairs_of
from batchwright.prepare.token_text import BYTE_OF, bytes_of_tokens, names_of_bytes

_PROOF_VERSION = 4
_CODE_POINTS = 0x110000
_BYTE_LEVEL_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""ByteLevel writes 's|'t|'re|'ve|'m|'ll|'d, which is the same, because no two of them begin alike. With one branch for
all of them, tiktoken is half as fast again."""
_LONG_S = 0x17F
"""The only character beyond ASCII that equals a letter of a known suffix ('s, 't, 're, ...) if case is ignored."""

DIFFERS, NORMALIZES = 1, 2
"""Flags of a character: the engines differ on it; a normalizer may change it or its neighbours."""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The proof for one tokenizer and these versions of both libraries, or the reason why there is none."""

    reason: str | None = None
    """The reason why tiktoken cannot be used; None if it gives the same ids."""
    pattern: str = ""
    normalizes: bool = False
    left_out: list[int] = []
    """Ids that merging never makes."""
    flags: list[tuple[int, int]] = []
    """(first character, flags) of each run of characters with the same flags."""

    def table(self) -> NDArray[np.uint8]:
        """The flags of every character."""
        firsts = [first for first, _ in self.flags] + [_CODE_POINTS]
        return np.repeat(np.array([flags for _, flags in self.flags], np.uint8), np.diff(firsts))


def proved_before(json: str, canonical: Callable[[], str]) -> Proof:
    """The result of `prove`, cached in the home folder if that can be written.

    `json` is the content of a `tokenizer.json`; `canonical` returns the same as written by `Tokenizer.to_str()`.
    """
    versions = [(name, importlib.metadata.version(name)) for name in ("tokenizers", "tiktoken")]
    key = fingerprint([_PROOF_VERSION, versions, fingerprint_bytes(json.encode())])
    path = home() / "encoders" / f"{key[:32]}.json"
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
        # Parsing is not a sufficient check: a flipped bit would give other ids.
        if kept.hash == fingerprint_bytes(msgspec.json.encode([key, kept.proof])):
            return kept.proof
    proof = prove(canonical())
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _Kept(proof, fingerprint_bytes(msgspec.json.encode([key, proof])))
        write_whole(path, msgspec.json.encode(kept))
    return proof


class _Kept(msgspec.Struct, frozen=True):
    proof: Proof
    hash: str


def prove(canonical: str) -> Proof:
    """Prove equal ids for a tokenizer. `canonical` is the output of `Tokenizer.to_str()`."""
    body = msgspec.json.decode(canonical)
    try:
        _only_keys(body, "the tokenizer", _TOKENIZER_KEYS)
        normalizes = _check_normalizer(body["normalizer"])
        pattern = _pattern_of(body["pre_tokenizer"])
        check_pattern(pattern)
        _check_model(body["model"])
        flags = _flags(pattern, normalizes=normalizes)
        left_out = _check_merges(body["model"])
    except Unproved as error:
        return Proof(reason=str(error))
    return Proof(pattern=pattern, normalizes=normalizes, left_out=left_out, flags=flags)


# Structure

_TOKENIZER_KEYS = {
    *("version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder"),
    "model",
}
_MODEL_KEYS = {
    *("type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"),
    *("ignore_merges", "vocab", "merges"),
}


def _only_keys(body: Mapping[str, Any], what: str, known: set[str]) -> None:
    if unknown := sorted(body.keys() - known):
        raise Unproved(f"{what} has the setting {unknown[0]!r}, which is not known here")


def _kind(part: Any) -> str:
    if not isinstance(part, dict):
        return "none"
    steps = [_kind(step) for value in part.values() if isinstance(value, list) for step in value]
    return f"{part.get('type')}[{', '.join(steps)}]" if steps else str(part.get("type"))


def _check_normalizer(normalizer: Any) -> bool:
    """Whether there is a normalizer. Only NFC is allowed: its own object handles all text that it may change."""
    if normalizer is None or normalizer == {"type": "Sequence", "normalizers": []}:
        return False
    if normalizer == {"type": "NFC"}:
        return True
    raise Unproved(f"normalizer {_kind(normalizer)}")


def _pattern_of(pre: Any) -> str:
    """The pattern that cuts a text."""
    match pre:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return _BYTE_LEVEL_PATTERN
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        }:
            return pattern
    raise Unproved(f"pre-tokenizer {_kind(pre)}")


def _check_model(model: Mapping[str, Any]) -> None:
    if model["type"] != "BPE":
        raise Unproved(f"model {model['type']}")
    _only_keys(model, "the model", _MODEL_KEYS)
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model[name]:
            raise Unproved(f"{name} {model[name]}")
    missing = [byte for character, byte in BYTE_OF.items() if character not in model["vocab"]]
    if missing:
        raise Unproved(f"no token for {len(missing)} of the 256 bytes")


# Merging


def _check_merges(model: Mapping[str, Any]) -> list[int]:
    """The ids that merging never makes. Raises Unproved if tiktoken could make other ids than `tokenizers`."""
    from tokenizers import Tokenizer

    vocab: dict[str, int] = model["vocab"]
    last = -1
    for left, right in pairs_of(model["merges"]):
        if vocab[left + right] < last:
            raise Unproved(f"merges that are not in the order of their ids (at {left + right!r})")
        last = vocab[left + right]
    alone = {"version": "1.0", "added_tokens": [], "model": {**model, "ignore_merges": False}}
    merging = Tokenizer.from_str(msgspec.json.encode(alone).decode())
    words = names_of_bytes(vocab)
    left_out = []
    for word, merged in zip(words, merging.encode_batch_fast(words, add_special_tokens=False), strict=True):
        if len(merged) == 1:
            continue
        if not model["ignore_merges"]:
            left_out.append(vocab[word])
        elif len(merged) == 2:
            raise Unproved(f"a token that merges make only in part ({word!r})")
    return sorted(left_out)


# Cutting


def _flags(pattern: str, *, normalizes: bool) -> list[tuple[int, int]]:
    table = np.where(_is_compared(), 0, DIFFERS).astype(np.uint8)
    for name in classes_of(pattern):
        table[_seen_by_tiktoken(name) != _seen_by_tokenizers(name)] |= DIFFERS
    if "(?i:" in pattern:
        table[_LONG_S] |= DIFFERS
    if normalizes:
        table[_changed_by_nfc()] |= NORMALIZES
    firsts = np.flatnonzero(np.diff(table, prepend=255))
    return [(int(first), int(table[first])) for first in firsts]


@functools.cache
def _every_character() -> str:
    return "".join(map(chr, np.flatnonzero(_is_compared()).tolist()))


def _is_compared() -> NDArray[np.bool_]:
    """The code points in ranges with assigned characters, without surrogates, which no UTF-8 text has.

    The others are three quarters of all. Comparing them would take most of the time of a proof, so they count as
    different.
    """
    is_compared = np.zeros(_CODE_POINTS, bool)
    is_compared[:0x34000] = is_compared[0xE0000:0xE0200] = True
    is_compared[0xD800:0xE000] = False
    return is_compared


def _as_table(characters: str) -> NDArray[np.bool_]:
    table = np.zeros(_CODE_POINTS, bool)
    table[np.frombuffer(characters.encode("utf-32-le"), np.uint32)] = True
    return table


@functools.cache
def _seen_by_tiktoken(name: str) -> NDArray[np.bool_]:
    """The characters of a class, by tiktoken, which drops all others."""
    # Many characters at a time: one by one they would be a million pieces.
    encoding = _encoding(f"(?:{name}){{1,64}}", {bytes([byte]): byte for byte in range(256)})
    ids = encoding.encode_to_numpy(_every_character(), disallowed_special=())
    return _as_table(ids.astype(np.uint8).tobytes().decode())


@functools.cache
def _seen_by_tokenizers(name: str) -> NDArray[np.bool_]:
    """The characters of a class, by the engine that splits. A decoder runs it on plain text, many times faster."""
    from tokenizers import Regex, decoders

    return ~_as_table(decoders.Replace(Regex(f"(?:{name})+"), "").decode([_every_character()])) & _is_compared()


@functools.cache
def _changed_by_nfc() -> NDArray[np.bool_]:
    """Characters that a normal form may change, or that may change their neighbours. All others stay, in any text.

    These are the characters that change between two marks of the last and the first class (this includes every mark,
    which would change places with them), and the second characters of decompositions, which may compose with a first.
    """
    from tokenizers import normalizers

    characters = _every_character()[0x80:]  # ASCII stays
    between = "\u0345" + "\u0334\n\u0345".join(characters) + "\u0334"
    lines = zip(characters, between.split("\n"), normalizers.NFC().normalize_str(between).split("\n"), strict=True)
    changed = [character for character, before, after in lines if before != after]
    decomposed = normalizers.NFD().normalize_str("\n".join(characters)).split("\n")
    return _as_table("".join(changed) + "".join(part[1:] for part in decomposed if len(part) > 1))


# tiktoken


def make_encoding(vocab: Mapping[str, int], proof: Proof) -> Any:
    """The tiktoken encoding of a proved tokenizer."""
    left_out = set(proof.left_out)
    return _encoding(proof.pattern, {word: i for word, i in bytes_of_tokens(vocab).items() if i not in left_out})


def _encoding(pattern: str, ranks: dict[bytes, int]) -> Any:
    import tiktoken

    # Without any special token tiktoken would look for the empty one, at every character.
    special = {"<no text has this \U0010ffff>": max(ranks.values()) + 1}
    return tiktoken.Encoding("batchwright", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


# Split patterns

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BRANCHES: dict[str, tuple[str, ...]] = {
    "": (_SUFFIX, r"'(?i:[sdmt]|ll|ve|re)", r"'(?:[sdmt]|ll|ve|re)", *_SUFFIX[4:-1].split("|")),
    "letters": (r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+"),
    "letters marks": (
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}"
            for end in (f"{_SUFFIX}?", "")
        ),
    ),
    "numbers": (r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}"),
    "others marks": tuple(rf" ?[^\s\p{{L}}\p{{N}}]+{after}" for after in ("", r"[\r\n]*", r"[\r\n/]*")),
    "others": tuple(rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+{after}" for after in ("", r"[\r\n]*", r"[\r\n/]*")),
    "blanks": (r"\s+", r"\s"),
    " ": (r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)"),
}
"""The kinds of characters that each branch matches, alone and before any text."""
_KINDS = {branch: set(kinds.split()) for kinds, branches in _BRANCHES.items() for branch in branches}
_NEEDED = {"letters", "marks", "numbers", "others", "blanks"}


class Unproved(Exception):
    """The error for a tokenizer that is not proved to give the same ids. The message is the reason."""


def check_pattern(pattern: str) -> None:
    """Raise Unproved unless a pattern is made of known branches that match every character.

    >>> check_pattern(r"'s|'t| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+")
    >>> check_pattern(r"\\w+|\\W+")
    Traceback (most recent call last):
    batchwright.prepare.tiktoken_proof.Unproved: a split pattern of its own, from '\\\\w+|\\\\W+' on
    """
    rest = f"|{pattern}"
    kinds: set[str] = set()
    while rest:
        fitting = (name for name in _KINDS if rest.startswith(f"|{name}") and rest[len(name) + 1 :][:1] in ("", "|"))
        branch = max(fitting, key=len, default=None)
        if branch is None:
            raise Unproved(f"a split pattern of its own, from {rest[1:41]!r} on")
        kinds |= _KINDS[branch]
        rest = rest[len(branch) + 1 :]
    if not kinds >= _NEEDED:
        raise Unproved(f"a split pattern without a branch for {', '.join(sorted(_NEEDED - kinds))}")


def classes_of(pattern: str) -> list[str]:
    """The classes of a known pattern, as written in it.

    >>> classes_of(r" ?\\p{L}+|[^\\s\\p{L}]+|\\s+(?!\\S)|\\s+")
    ['[^\\\\s\\\\p{L}]', '\\\\S', '\\\\p{L}', '\\\\s']
    """
    return sorted(set(re.findall(r"\[[^\]]+\]|\\p\{\w+\}|\\[sS]", pattern)))
