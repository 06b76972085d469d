"""The fast encoder: tiktoken for documents with a proof of equal ids, `tokenizers` for the rest.

tiktoken_proof.py proves it for a tokenizer. A document still goes through `tokenizers` if it
- holds the text of an added token, which `tokenizers` finds in any text;
- holds a character that the two regex engines see differently (ſ is an s where case is ignored);
- has an unbroken run of more than 4,096 characters, blank or not: tiktoken's time can be quadratic in it;
- makes tiktoken fail.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.base.machine import cpu_count
from batchwright.prepare.tiktoken_proof import DIFFERS, NORMALIZES, Proof, make_encoding, proved_before

MAX_RUN_CHARACTERS = 4096
_SAMPLE_DOCUMENTS, _SAMPLE_CHARACTERS = 64, 1 << 17
"""The size of the sample that a new process encodes both ways: about 0.05 s of `tokenizers`, from many documents."""
_THREAD_CHARACTERS, _THREAD_DOCUMENT_CHARACTERS = 1 << 16, 1 << 10
"""Below this size in all, or for each document, threads cost more time than they save."""

_BLANK = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # White_Space, as \s of both engines
_BLANKS, _OTHERS = re.compile(f"[{_BLANK}]"), re.compile(f"[^{_BLANK}]")
_RUNS = re.compile(f"[{_BLANK}]+|[^{_BLANK}]+")

log: logging.Logger = logging.getLogger("batchwright")

Ids = NDArray[np.uint32]


def find_proof(json: str, backend: Any) -> Proof:
    """The proof for a fast encoder of this `tokenizer.json`, or the reason why there is none."""
    asked = os.environ.get("BATCHWRIGHT_ENCODER", "")
    if asked not in ("", "tokenizers"):
        raise SpecError(
            f"BATCHWRIGHT_ENCODER={asked!r} is not an encoder",
            parameter="BATCHWRIGHT_ENCODER",
            remedy="'tokenizers' turns the fast encoder off; without the variable it is used where it is proved",
        )
    if asked:
        return Proof(reason="BATCHWRIGHT_ENCODER=tokenizers")
    try:
        import tiktoken  # noqa: F401
    except ImportError:
        return Proof(reason="tiktoken is not installed: pip install 'batchwright[fast]'")
    return proved_before(json, backend.to_str)


class FastEncoder:
    """Both encoders of one tokenizer. Chooses between them for each document."""

    def __init__(self, backend: Any, proof: Proof) -> None:
        self.backend: Any = backend
        self.proof: Proof = proof
        self.encoding: Any = make_encoding(backend.get_vocab(with_added_tokens=False), proof)
        self.off: str | None = None
        """The reason why this process stopped using tiktoken."""
        self._sample = [_SAMPLE_DOCUMENTS, _SAMPLE_CHARACTERS]
        self._table = proof.table()
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        if proof.normalizes:
            added |= {backend.normalizer.normalize_str(content) for content in added}
        self._added = any_of(added - {""})

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        if self.off:
            return self._slow(texts)
        ready = self._ready(texts)
        if not self._sample_agrees(ready, texts):
            return self._slow(texts)
        encoded = self._fast(ready)
        slow = [number for number, ids in enumerate(encoded) if ids is None]
        for number, ids in zip(slow, self._slow([texts[number] for number in slow]), strict=True):
            encoded[number] = ids
        return encoded  # type: ignore[return-value]

    def _slow(self, texts: Sequence[str]) -> list[Ids]:
        if not texts:
            return []
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def _fast(self, ready: Sequence[str | None]) -> list[Ids | None]:
        """Encode with tiktoken. A single process uses all cores; a bake already has one worker for each core."""
        threads = 1 if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in _OFF else cpu_count()
        worth_it = max(_THREAD_CHARACTERS, _THREAD_DOCUMENT_CHARACTERS * len(ready))
        if threads == 1 or len(ready) == 1 or sum(len(text) for text in ready if text) < worth_it:
            return self._encode(ready)
        size = -(-len(ready) // (threads * 8))  # some parts take longer than others
        parts = [ready[start : start + size] for start in range(0, len(ready), size)]
        with ThreadPoolExecutor(threads) as pool:
            return [ids for part in pool.map(self._encode, parts) for ids in part]

    def _encode(self, texts: Iterable[str | None]) -> list[Ids | None]:
        encode = self.encoding.encode_to_numpy
        encoded: list[Ids | None] = []
        for text in texts:
            ids = None
            if text is not None:
                try:
                    ids = encode(text, disallowed_special=())
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException:  # a Rust panic is not an Exception
                    log.debug("tiktoken failed on a document of %d characters", len(text), exc_info=True)
            encoded.append(ids)
        return encoded

    def _sample_agrees(self, ready: Sequence[str | None], texts: Sequence[str]) -> bool:
        """Encode the first documents both ways. If they differ, against the proof, tiktoken is not used again."""
        sample = []
        for number, text in enumerate(ready):
            if not all(left > 0 for left in self._sample):
                break
            if text is not None:
                part = texts[number][: self._sample[1]]
                self._sample = [self._sample[0] - 1, self._sample[1] - len(part)]
                sample.append(part)
        fast = self._encode(self._ready(sample))
        if any(not np.array_equal(a, b) for a, b in zip(fast, self._slow(sample), strict=True) if a is not None):
            self.off = "tiktoken gave other ids for a document, though it was proved identical"
            log.warning("%s; only tokenizers is used from here on. Please report this tokenizer", self.off)
        return self.off is None

    # Which documents

    def _ready(self, texts: Sequence[str]) -> list[str | None]:
        """Each text as tiktoken takes it, or None for a text that needs `tokenizers`."""
        # Of all texts at once: flags and added tokens are rare.
        flags = self._flags("".join(text for text in texts if not text.isascii()))
        has_added = self._added.search("\0".join(texts)) is not None
        ready: list[str | None] = [text or None for text in texts]
        for number, text in enumerate(texts):
            if (len(text) > MAX_RUN_CHARACTERS and has_long_run(text)) or (has_added and self._added.search(text)):
                ready[number] = None
            elif flags and not text.isascii():
                ready[number] = self._characters_checked(text)
        return ready

    def _flags(self, text: str) -> int:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        return int(np.bitwise_or.reduce(self._table.take(points), initial=0))

    def _characters_checked(self, text: str) -> str | None:
        flags = self._flags(text)
        if flags & NORMALIZES:
            try:
                text = self.backend.normalizer.normalize_str(text)
            except UnicodeEncodeError:  # half a surrogate pair
                return None
            if self._added.search(text):
                return None
            flags = self._flags(text)
        return None if flags & DIFFERS else text


_NOTHING = "\U0010ffff(?!)"  # a literal first: then a search is quick
_OFF = ("off", "false", "f", "no", "n", "0")  # as tokenizers reads its own variable


def has_long_run(text: str) -> bool:
    """Whether a text has a run of more than 4,096 characters, all of them blank or none.

    >>> has_long_run("ab " * 9000), has_long_run("ab " * 9000 + "a" * 4097), has_long_run(" " * 4097)
    (False, True, True)
    """
    half = MAX_RUN_CHARACTERS // 2  # a long run holds a whole block of half its length: most texts are done after these
    starts = range(0, len(text) - half + 1, half)
    if all(_BLANKS.search(text, at, at + half) and _OTHERS.search(text, at, at + half) for at in starts):
        return False
    return any(run.end() - run.start() > MAX_RUN_CHARACTERS for run in _RUNS.finditer(text))


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the names. If several begin at one place, it finds the longest."""
    patterns = [re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name))]
    return re.compile(f"({'|'.join(patterns)})" if patterns else _NOTHING)
