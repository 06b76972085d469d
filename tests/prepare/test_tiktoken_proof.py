"""What is proved before tiktoken may encode: structure, merges, pattern, characters. Each refusal says its reason."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from byte_level import GPT4_PATTERN, LLAMA3_PATTERN, O200K_PATTERN, QWEN_PATTERN, SEEN, trained_json
from tokenizers import Tokenizer, models, pre_tokenizers

from batchwright.prepare import tiktoken_proof as proof
from batchwright.prepare.tiktoken_proof import Unproved, check_pattern, classes_of, prove, proved_before
from batchwright.prepare.tokenizers import JsonTokenizer
from batchwright.prepare.train import PATTERNS

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    """A proved tokenizer's JSON with one change, as `tokenizers` writes it."""
    body = json.loads(trained_json())
    change(body)
    return str(Tokenizer.from_str(json.dumps(body)).to_str())


def sequence(*parts: object) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def without_a_byte(body: dict[str, Any]) -> None:
    del body["model"]["vocab"]["Ā"]  # stands for byte 0


def last_merge_first(body: dict[str, Any]) -> None:
    merges = body["model"]["merges"]
    merges.insert(0, merges.pop())


def a_token_in_two_parts(body: dict[str, Any]) -> None:
    """The piece qz is this token for both; inside a longer piece only tiktoken would make it, out of q and z."""
    body["model"]["ignore_merges"] = True
    body["model"]["vocab"]["qz"] = 90_000


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another model": (
        lambda b: b.update(model={"type": "WordLevel", "vocab": {"a": 0, "u": 1}, "unk_token": "u"}, added_tokens=[]),
        "model WordLevel",
    ),
    "dropout": (lambda b: b["model"].update(dropout=0.1), "dropout 0.1"),
    "byte fallback": (lambda b: b["model"].update(byte_fallback=True), "byte_fallback True"),
    "prefix": (lambda b: b["model"].update(continuing_subword_prefix="##", merges=[]), "continuing_subword_prefix ##"),
    "suffix": (lambda b: b["model"].update(end_of_word_suffix="</w>", merges=[]), "end_of_word_suffix </w>"),
    "a missing byte": (without_a_byte, "no token for 1 of the 256 bytes"),
    "order of merges": (last_merge_first, "merges that are not in the order of their ids"),
    "token in two parts": (a_token_in_two_parts, "a token that merges make only in part ('qz')"),
    "lower case": (lambda b: b.update(normalizer={"type": "Lowercase"}), "normalizer Lowercase"),
    "NFKC": (lambda b: b.update(normalizer={"type": "NFKC"}), "normalizer NFKC"),
    "no pre-tokenizer": (lambda b: b.update(pre_tokenizer=None), "pre-tokenizer none"),
    "another pre-tokenizer": (lambda b: b.update(pre_tokenizer={"type": "Whitespace"}), "pre-tokenizer Whitespace"),
    "two splits": (
        lambda b: b.update(pre_tokenizer=sequence(SPLIT, SPLIT, BYTE_LEVEL)),
        "pre-tokenizer Sequence[Split, Split, ByteLevel]",
    ),
    "a space before a text": (lambda b: b["pre_tokenizer"].update(add_prefix_space=True), "pre-tokenizer ByteLevel"),
    "bytes only": (lambda b: b.update(pre_tokenizer=BYTE_LEVEL), "pre-tokenizer ByteLevel"),
    "a space before each piece": (
        lambda b: b.update(pre_tokenizer=sequence(SPLIT, {**BYTE_LEVEL, "add_prefix_space": True})),
        "pre-tokenizer Sequence[Split, ByteLevel]",
    ),
    "cut twice": (
        lambda b: b.update(pre_tokenizer=sequence(SPLIT, {**BYTE_LEVEL, "use_regex": True})),
        "pre-tokenizer Sequence[Split, ByteLevel]",
    ),
    "removing split": (
        lambda b: b.update(pre_tokenizer=sequence({**SPLIT, "behavior": "Removed"}, BYTE_LEVEL)),
        "pre-tokenizer Sequence[Split, ByteLevel]",
    ),
    "inverted split": (
        lambda b: b.update(pre_tokenizer=sequence({**SPLIT, "invert": True}, BYTE_LEVEL)),
        "pre-tokenizer Sequence[Split, ByteLevel]",
    ),
    "split by a string": (
        lambda b: b.update(pre_tokenizer=sequence({**SPLIT, "pattern": {"String": " "}}, BYTE_LEVEL)),
        "pre-tokenizer Sequence[Split, ByteLevel]",
    ),
    "a pattern of its own": (
        lambda b: b.update(pre_tokenizer=sequence({**SPLIT, "pattern": {"Regex": r"\w+|\W+"}}, BYTE_LEVEL)),
        r"a split pattern of its own, from '\\w+|\\W+' on",
    ),
    "a pattern that misses numbers": (
        lambda b: b.update(
            pre_tokenizer=sequence(
                {**SPLIT, "pattern": {"Regex": LLAMA3_PATTERN.replace(r"|\p{N}{1,3}", "")}}, BYTE_LEVEL
            )
        ),
        "a split pattern without a branch for numbers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_proved_is_refused_with_its_reason(case):
    change, reason = REFUSED[case]
    found = prove(changed(change))
    assert found.reason is not None
    assert found.reason.startswith(reason)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_encoded_by_tokenizers(case):
    text = changed(REFUSED[case][0])
    tokenizer, backend = JsonTokenizer(text, case), Tokenizer.from_str(text)
    assert tokenizer.encoder.startswith(f"tokenizers ({REFUSED[case][1]}")
    if "dropout" not in case:
        wanted = [backend.encode(seen, add_special_tokens=False).ids for seen in SEEN]
        assert [list(ids) for ids in tokenizer.encode_batch(SEEN)] == wanted


@pytest.mark.parametrize(
    "change",
    [
        lambda b: None,
        lambda b: b["model"].update(dropout=0.0),
        lambda b: b["model"].update(unk_token="<|end|>", fuse_unk=True),  # never used: every byte has its token
        lambda b: b["model"].update(ignore_merges=True),
        lambda b: b.update(normalizer={"type": "Sequence", "normalizers": []}),
        lambda b: b.update(pre_tokenizer=sequence(SPLIT, BYTE_LEVEL), normalizer={"type": "NFC"}),
    ],
)
def test_what_changes_no_id_is_no_reason(change):
    assert prove(changed(change)).reason is None


def test_settings_that_are_not_known_here_are_refused():
    body = json.loads(trained_json())
    assert prove(json.dumps({**body, "novelty": 1})).reason == (
        "the tokenizer has the setting 'novelty', which is not known here"
    )
    body["model"]["novelty"] = 1
    assert prove(json.dumps(body)).reason == "the model has the setting 'novelty', which is not known here"


def bpe(tokens: list[str], merges: list[tuple[str, str]], *, ignore_merges: bool) -> Tokenizer:
    """A tokenizer of the 256 bytes, these tokens and these merges."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *tokens]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_a_token_that_ends_in_three_parts_alone_is_no_reason(ignore_merges):
    # abcde: (a b) comes first, then nothing makes abcde out of ab, cd, e.
    tokenizer = bpe(["ab", "cd", "abcde"], [("a", "b"), ("c", "d")], ignore_merges=ignore_merges)
    ours = JsonTokenizer(tokenizer.to_str(), "three parts")
    texts = ["abcde", "abcdeabcde", "xabcde", "abcd", "abcde abcde"]
    wanted = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    assert [ids.tolist() for ids in ours.encode_batch(texts)] == wanted
    assert ours.encoder == "tiktoken, proved identical"
    assert (wanted[0] == [258]) is ignore_merges


def test_merges_that_overlap_are_taken_in_the_same_order():
    tokens, merges = ["aa", "aaa", "ab", "aaaa"], [("a", "a"), ("aa", "a"), ("a", "b"), ("aa", "aa")]
    tokenizer = bpe(tokens, merges, ignore_merges=False)
    ours = JsonTokenizer(tokenizer.to_str(), "overlap")
    texts = ["a" * length + "b" * (length % 3) for length in range(1, 40)]
    assert [ids.tolist() for ids in ours.encode_batch(texts)] == [e.ids for e in tokenizer.encode_batch(texts)]
    assert ours.encoder == "tiktoken, proved identical"


# Known patterns


@pytest.mark.parametrize("pattern", [LLAMA3_PATTERN, QWEN_PATTERN, GPT4_PATTERN, O200K_PATTERN, *PATTERNS.values()])
def test_the_patterns_of_common_models_are_known(pattern):
    check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "|",
        LLAMA3_PATTERN + "|",
        "|" + LLAMA3_PATTERN,
        LLAMA3_PATTERN + "+",
        LLAMA3_PATTERN.replace("{1,3}", "{1,3}+"),
        LLAMA3_PATTERN.replace(r"\s+(?!\S)|\s+", r"\s+(?!\S)"),
        LLAMA3_PATTERN.replace(" ?[^", " ??[^"),
        GPT4_PATTERN.replace("[sdmt]", "[sdmk]"),
        LLAMA3_PATTERN.replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),
    ],
)
def test_every_other_pattern_is_refused(pattern):
    with pytest.raises(Unproved):
        check_pattern(pattern)


def test_the_classes_of_a_pattern_are_listed_as_written():
    classes = classes_of(LLAMA3_PATTERN)
    assert set(classes) == {r"\s", r"\S", r"\p{L}", r"\p{N}", r"[^\r\n\p{L}\p{N}]", r"[^\s\p{L}\p{N}]", r"[\r\n]"}


# What is kept


def files_of(home: Path) -> list[Path]:
    return sorted((home / "encoders").glob("*"))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def never() -> str:
    pytest.fail("this was proved before")


def test_a_proof_is_kept_and_found_again(home):
    first = proved_before(trained_json(), trained_json)
    (path,) = files_of(home)
    assert proved_before(trained_json(), never) == first
    assert path.stat().st_size < 100_000


def test_a_proof_is_the_same_every_time(home):
    proved_before(trained_json(LLAMA3_PATTERN, nfc=True), lambda: trained_json(LLAMA3_PATTERN, nfc=True))
    (path,) = files_of(home)
    before = path.read_bytes()
    path.unlink()
    for found in (proof._seen_by_tiktoken, proof._seen_by_tokenizers):
        found.cache_clear()
    proved_before(trained_json(LLAMA3_PATTERN, nfc=True), lambda: trained_json(LLAMA3_PATTERN, nfc=True))
    assert path.read_bytes() == before


def test_a_refusal_is_kept_too(home):
    text = changed(REFUSED["NFKC"][0])
    proved_before(text, lambda: text)
    assert proved_before(text, never).reason == "normalizer NFKC"


@pytest.mark.parametrize("library", ["tokenizers", "tiktoken"])
def test_another_version_of_a_library_is_proved_anew(home, monkeypatch, library):
    proved_before(trained_json(), trained_json)
    version = proof.importlib.metadata.version
    monkeypatch.setattr(proof.importlib.metadata, "version", lambda name: version(name) + "x" * (name == library))
    proved_before(trained_json(), trained_json)
    assert len(files_of(home)) == 2


def flip_a_digit(data: bytes) -> bytes:
    """Still JSON of the right shape: an id that merging never makes becomes another."""
    assert data.count(b"90001") == 1
    return data.replace(b"90001", b"90002")


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:-9], lambda data: b"\xff" + data, lambda data: b"[]", flip_a_digit],
)
def test_a_damaged_file_is_proved_anew_and_written_again(home, damage):
    text = trained_json().replace('"vocab":{', '"vocab":{"zzz":90001,')
    first = proved_before(text, lambda: text)
    assert first.left_out == [0, 90001]  # the end of text is no merge either
    (path,) = files_of(home)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert proved_before(text, lambda: text) == first
    assert path.read_bytes() == whole


def test_a_home_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "file"))  # root may write into any folder
    assert proved_before(trained_json(), trained_json).reason is None
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
        monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "locked"))
        assert proved_before(trained_json(), trained_json).reason is None
