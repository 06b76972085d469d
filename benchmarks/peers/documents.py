"""The documents that are baked: source code and prose of the installed packages, with tokenizers trained on them.

The same files give the same documents, tokenizers and ids: everything is taken in the order of a hash of its path.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.source import bench_home

__all__ = ["EOS", "Corpus", "document_hashes", "make_corpus", "read_texts"]

EOS = "<|endoftext|>"
_FILES = 8
_VOCAB = 32_000


class Corpus:
    """A folder with documents as JSONL, one tokenizer.json for each kind, and the ids that each must give."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.documents = folder / "documents"
        self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())

    def tokenizer(self, kind: str) -> Path:
        return self.folder / f"{kind}.json"

    def hashes(self, kind: str) -> list[str]:
        """Of each document's ids, end of document included, sorted."""
        hashes: list[str] = json.loads((self.folder / f"{kind}-ids.json").read_text())
        return hashes


def make_corpus(num_bytes: int, say: Callable[[str], None]) -> Corpus:
    """The corpus, made once and kept. More than the installed packages hold is made by repeating with variation."""
    folder = bench_home() / "peers" / f"documents-{num_bytes}"
    if not (folder / "facts.json").exists():
        (folder / "documents").mkdir(parents=True, exist_ok=True)
        texts = list(_texts(num_bytes))
        for number in range(_FILES):
            with (folder / "documents" / f"{number:02d}.jsonl").open("w", encoding="utf-8") as file:
                for n in range(len(texts) * number // _FILES, len(texts) * (number + 1) // _FILES):
                    file.write(json.dumps({"id": n, "text": texts[n]}, ensure_ascii=False) + "\n")
        say(f"{len(texts):,} documents written; training tokenizers")
        facts = {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
        for kind, tokenizer in _tokenizers(texts).items():
            tokenizer.save(str(folder / f"{kind}.json"))
            eos = tokenizer.token_to_id(EOS)
            encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
            ids = [np.array([*encoding.ids, eos], np.uint16) for encoding in encoded]
            (folder / f"{kind}-ids.json").write_text(json.dumps(document_hashes(ids)))
            facts[f"{kind}_tokens"] = sum(map(len, ids))
        ids = [np.append(np.frombuffer(text.encode(), np.uint8).astype(np.uint16), np.uint16(256)) for text in texts]
        (folder / "bytes-ids.json").write_text(json.dumps(document_hashes(ids)))
        facts["bytes_tokens"] = sum(map(len, ids))
        (folder / "facts.json").write_text(json.dumps(facts))
    return Corpus(folder)


def document_hashes(ids: Any) -> list[str]:
    """One hash for each document, sorted: peers may store documents in another order, but not other documents."""
    return sorted(hashlib.sha256(np.asarray(one, np.uint16).tobytes()).hexdigest()[:24] for one in ids)


def read_texts(documents: Path) -> list[str]:
    return [
        json.loads(line)["text"] for file in sorted(documents.glob("*.jsonl")) for line in file.open(encoding="utf-8")
    ]


def _texts(num_bytes: int) -> Iterator[str]:
    """Prose first, up to a third of what is wanted, then code; then all over again, with a first line of its own."""
    files = sorted(_files(), key=lambda found: hashlib.sha256(found[0].encode()).digest())
    seen: set[bytes] = set()
    left = num_bytes
    for again in range(1000):
        for is_prose, share in ((True, left // 3), (False, left)):
            budget = share
            for name, path in files:
                if (path.suffix != ".py") != is_prose:
                    continue
                try:
                    text = path.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError):
                    continue
                if again:
                    text = f"{name}, number {again}\n{text}"
                digest = hashlib.sha256(text.encode()).digest()
                if not 200 <= len(text) <= 500_000 or EOS in text or digest in seen:
                    continue
                seen.add(digest)
                budget -= len(text)
                left -= len(text)
                yield text
                if budget <= 0 or left <= 0:
                    break
            if left <= 0:
                return


def _files() -> Iterator[tuple[str, Path]]:
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    for root in (library, packages):
        for path in root.rglob("*"):
            inside = path.relative_to(root)
            if root == library and "site-packages" in inside.parts:
                continue
            if path.suffix in (".py", ".md", ".rst") or path.name == "METADATA":
                yield str(inside), path


def _tokenizers(texts: list[str]) -> dict[str, Any]:
    """`bpe`: byte-level BPE. `lower`: the same behind a Lowercase normalizer, which keeps the fast encoder out."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        texts[:4000],
        trainers.BpeTrainer(
            vocab_size=_VOCAB, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=sys.stderr.isatty()
        ),
    )
    lower = Tokenizer.from_str(bpe.to_str())
    lower.normalizer = normalizers.Lowercase()
    return {"bpe": bpe, "lower": lower}
