"""The fast encoder gives the ids of `tokenizers`, for every text; which of the two encoded never shows in a store."""

from __future__ import annotations

import logging
import pickle
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from byte_level import GPT4_PATTERN, LLAMA3_PATTERN, O200K_PATTERN, QWEN_PATTERN, SEEN, trained_json
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

import batchwright as bw
from batchwright.prepare import tiktoken_encoder as fast
from batchwright.prepare.tiktoken_proof import DIFFERS
from batchwright.prepare.tokenizers import JsonTokenizer
from refusals import refused

KINDS = {
    "gpt2": {},
    "llama3": {"pattern": LLAMA3_PATTERN},
    "gpt4": {"pattern": GPT4_PATTERN},
    "o200k": {"pattern": O200K_PATTERN},
    "qwen, NFC": {"pattern": QWEN_PATTERN, "nfc": True, "added": ("<|end|>", "<tool>", "é̀x")},
}


@pytest.fixture(scope="module")
def tokenizers():
    return {kind: JsonTokenizer(trained_json(**settings), kind) for kind, settings in KINDS.items()}


def ids_by_tokenizers(tokenizer: JsonTokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)]


def ids_by_us(tokenizer: JsonTokenizer, texts: list[str]) -> list[list[int]]:
    ids = [array.tolist() for array in tokenizer.encode_batch(texts)]
    # Afterwards too: a difference in the first documents turns tiktoken off, and would not show in the ids.
    assert tokenizer.encoder == "tiktoken, proved identical"
    return ids


BLANKS = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2003\u2028\u2029\u202f\u205f\u3000\u200b\ufeff\x1c\x1f\u180e"
WITH_APOSTROPHE = [
    "'s",
    "'S",
    "'LL",
    "'lL",
    "'ſ",
    "'\u212a",
    "'lſ",
    "'ß",
    "'ﬀ",
    "'ﬆ",
    "'ŉ",
    "'İ",
    "'é",
    "’s",
    "''",
    "x'Re",
]
NEWEST = ["\U0001fae8", "\U00011f02", "\U0002ebf0", "\U000323b0", "\u1c89", "\ua7cb", "\U00010d69", "\U0001cc00"]
MARKS = [
    "e\u0301",
    "q\u0307\u0323",
    "\u0301",
    "\u1100\u1161\u11a8",
    "\uac00\u11a8",
    "\u212b",
    "\u0344",
    "a\u0345\u0334",
]
ADDED = ["<|end|>", "<tool>", "e\u0301\u0300x", "<|end|", "\u00e9\u0300x"]
PIECES = [
    *BLANKS,
    *WITH_APOSTROPHE,
    *NEWEST,
    *MARKS,
    *ADDED,
    *"\0\x01\x7f\x80\x9f\ufffd",
    "👨‍👩‍👧",
    "🇩🇪",
    "12345",
    "½",
    "字",
]

random_text = st.lists(
    st.one_of(st.sampled_from(PIECES), st.text(max_size=6), st.sampled_from(SEEN).map(lambda text: text[:40])),
    max_size=20,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(random_text, min_size=1, max_size=6))
@example(texts=PIECES)
@example(texts=[a + b for a in PIECES for b in PIECES])
@example(texts=[f"{piece} {piece}x{piece}" for piece in PIECES])
@example(texts=SEEN)
def test_random_text_gets_the_ids_of_tokenizers(tokenizers, kind, texts):
    assert ids_by_us(tokenizers[kind], texts) == ids_by_tokenizers(tokenizers[kind], texts)


@pytest.mark.parametrize("kind", KINDS)
def test_every_character_of_unicode_gets_the_ids_of_tokenizers(tokenizers, kind):
    every = [chr(point) for point in range(0x110000) if unicodedata.category(chr(point)) not in ("Cs", "Cn", "Co")]
    random.Random(0).shuffle(every)
    texts = ["".join(every[start : start + 200]) for start in range(0, len(every), 200)]
    texts += [" ".join(every[start : start + 500]) for start in range(0, 20_000, 500)]
    assert ids_by_us(tokenizers[kind], texts) == ids_by_tokenizers(tokenizers[kind], texts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [4095, 4096, 4097, 9000])
def test_long_runs_get_the_ids_of_tokenizers(tokenizers, kind, length):
    texts = [part * (length // len(part)) for part in (*"a 1'\n\t\r-é字\u3000\u0301", " \n", "ab", "👍")]
    texts += [f"x {text} y" for text in texts]
    assert ids_by_us(tokenizers[kind], texts) == ids_by_tokenizers(tokenizers[kind], texts)


def test_a_token_that_merges_never_make_is_never_given():
    # As GPT-2 has its end of text in the vocabulary of the model.
    text = trained_json().replace('"vocab":{', '"vocab":{"zzz":90001,"qqq":90002,')
    tokenizer = JsonTokenizer(text, "unreachable")
    assert ids_by_us(tokenizer, ["qqq cat", "the qqq"]) == ids_by_tokenizers(tokenizer, ["qqq cat", "the qqq"])


def test_the_token_that_tiktoken_is_given_to_look_for_means_nothing(tokenizers):
    texts = ["a <no text has this \U0010ffff> b", "\U0010ffff"]
    assert ids_by_us(tokenizers["gpt2"], texts) == ids_by_tokenizers(tokenizers["gpt2"], texts)


# Which documents go which way


def goes_fast(tokenizer: JsonTokenizer, *texts: str) -> list[bool]:
    assert tokenizer.fast is not None
    return [text is not None for text in tokenizer.fast._ready(texts)]


def test_a_document_with_the_text_of_an_added_token_goes_through_tokenizers(tokenizers):
    texts = ("fine", "an <|end|> inside", "<tool>", "<|end", "e\u0301\u0300x", "\u00e9\u0300x")
    assert goes_fast(tokenizers["qwen, NFC"], *texts) == [True, False, False, True, False, False]


def test_an_added_token_that_takes_blanks_with_it_is_found():
    body = Tokenizer.from_str(trained_json())
    body.add_tokens(
        [AddedToken("[x]", lstrip=True, rstrip=True), AddedToken("word", single_word=True, normalized=True)]
    )
    tokenizer = JsonTokenizer(body.to_str(), "blanks")
    texts = ["a  [x]  b", "a word here", "swordfish", "[x", "x]"]
    assert ids_by_us(tokenizer, texts) == ids_by_tokenizers(tokenizer, texts)


def test_a_run_of_more_than_4096_characters_goes_through_tokenizers(tokenizers):
    texts = ("a" * 4096, "a" * 4097, " " * 4097, "ab " * 5000, "ab " * 5000 + "-" * 4097 + " ab" * 5000, "\n" * 4097)
    assert goes_fast(tokenizers["gpt2"], *texts) == [True, False, False, True, False, False]


@pytest.mark.parametrize("run", ["x", " "])
@pytest.mark.parametrize("offset", [0, 1, 2047, 2048, 2049])
@pytest.mark.parametrize(("length", "is_long"), [(4096, False), (4097, True)])
def test_a_long_run_is_found_wherever_it_begins(offset, run, length, is_long):
    other = " " if run == "x" else "x"
    before, after = ("a " * offset)[: max(offset - 1, 0)] + other * bool(offset), other + " a" * 3000
    assert fast.has_long_run(before + run * length + after) == is_long


def test_a_letter_that_only_folds_to_ascii_goes_through_tokenizers(tokenizers):
    texts = ("it's", "it'ſ", "große Straße", "l'été")
    assert goes_fast(tokenizers["llama3"], *texts) == [True, False, True, True]
    assert all(goes_fast(tokenizers["gpt2"], *texts))  # ignores no case


def test_only_one_character_is_a_letter_of_a_suffix_where_case_is_ignored(tokenizers):
    """What the proof takes for granted: after an apostrophe both engines see all other characters alike."""
    every = [chr(point) for point in range(0x80, 0x20000) if not 0xD800 <= point < 0xE000 and chr(point).isalpha()]
    texts = [f"x'{c} x'{c}e x'r{c} x'v{c} x'l{c}" for c in every]
    some = ["".join(texts[start : start + 100]) for start in range(0, len(texts), 100)]
    for kind in ("llama3", "gpt4"):
        assert ids_by_us(tokenizers[kind], some) == ids_by_tokenizers(tokenizers[kind], some)


def test_a_character_that_the_engines_see_differently_goes_through_tokenizers():
    tokenizer = JsonTokenizer(trained_json(), "differs")
    tokenizer.fast._table[ord("²")] |= DIFFERS
    texts = ["word 1", "x² y", "1½", "é"]
    assert goes_fast(tokenizer, *texts) == [True, False, True, True]
    assert ids_by_us(tokenizer, texts) == ids_by_tokenizers(tokenizer, texts)


def test_text_is_normalised_only_where_it_may_change(tokenizers, monkeypatch):
    tokenizer, asked = tokenizers["qwen, NFC"], []
    normalizer = tokenizer.backend.normalizer

    class Counted:
        def normalize_str(self, text: str) -> str:
            asked.append(text)
            return normalizer.normalize_str(text)

    class Backend:
        normalizer = Counted()

    monkeypatch.setattr(tokenizer.fast, "backend", Backend())
    assert all(goes_fast(tokenizer, "größer", "字", "é", "e\u0301", "\u212b", "हिन्दी"))
    assert asked == ["e\u0301", "\u212b", "हिन्दी"]


class _Panic(BaseException):
    """As a panic of Rust reaches Python."""


@pytest.mark.parametrize("error", [_Panic, ValueError])
def test_a_document_on_which_tiktoken_fails_goes_through_tokenizers(monkeypatch, error):
    tokenizer = JsonTokenizer(trained_json(), "fails")

    def fail(text: str, **settings: object) -> None:
        raise error("no")

    monkeypatch.setattr(tokenizer.fast.encoding, "encode_to_numpy", fail)
    assert ids_by_us(tokenizer, SEEN) == ids_by_tokenizers(tokenizer, SEEN)


def test_ctrl_c_is_not_taken_for_a_failure(monkeypatch):
    tokenizer = JsonTokenizer(trained_json(), "interrupted")

    def interrupt(text: str, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer.fast.encoding, "encode_to_numpy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode_batch(["a"])


@pytest.mark.parametrize("kind", ["gpt2", "qwen, NFC"])
def test_half_a_surrogate_pair_is_refused_as_before(tokenizers, kind):
    step = bw.tokenize(tokenizers[kind])
    with refused(bw.TokenizerError, f"'{kind}'", number=1):
        step.encode(["fine", "bad e\u0301 \ud800"])


def test_a_planted_difference_turns_the_fast_encoder_off_and_says_so(monkeypatch, caplog):
    tokenizer = JsonTokenizer(trained_json(), "planted")
    honest = tokenizer.fast.encoding.encode_to_numpy
    monkeypatch.setattr(
        tokenizer.fast.encoding, "encode_to_numpy", lambda text, **settings: honest(text, **settings)[::-1]
    )
    with caplog.at_level(logging.WARNING, "batchwright"):
        encoded = [ids.tolist() for ids in tokenizer.encode_batch(SEEN)]
    assert encoded == ids_by_tokenizers(tokenizer, SEEN)
    assert "tiktoken" in caplog.text
    assert tokenizer.encoder.startswith("tokenizers (tiktoken")


def test_the_sample_ends_after_64_documents(monkeypatch):
    tokenizer = JsonTokenizer(trained_json(), "sample")
    asked: list[str] = []
    slowly = tokenizer.fast._slow
    monkeypatch.setattr(tokenizer.fast, "_slow", lambda texts: [asked.extend(texts), slowly(texts)][1])
    tokenizer.encode_batch(["a b"] * 50)
    tokenizer.encode_batch(["c d"] * 50)
    assert asked == ["a b"] * 50 + ["c d"] * 14


def test_threads_give_the_documents_in_their_order(tokenizers, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr(fast, "cpu_count", lambda: 3)
    texts = [f"document {number} " + "word " * (number * 7 % 900) for number in range(200)]
    pools: list[int] = []
    pool = fast.ThreadPoolExecutor
    monkeypatch.setattr(fast, "ThreadPoolExecutor", lambda threads: [pools.append(threads), pool(threads)][1])
    assert ids_by_us(tokenizers["gpt2"], texts) == ids_by_tokenizers(tokenizers["gpt2"], texts)
    assert pools == [3]
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # as in the workers of a bake
    tokenizers["gpt2"].encode_batch(texts)
    assert pools == [3]


# Which encoder, and that nobody can tell


def test_the_variable_turns_the_fast_encoder_off(monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_ENCODER", "tokenizers")
    tokenizer = JsonTokenizer(trained_json(), "off")
    assert (tokenizer.encoder, tokenizer.fast) == ("tokenizers (BATCHWRIGHT_ENCODER=tokenizers)", None)


def test_an_unknown_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_ENCODER", "tiktokens")
    with refused(bw.SpecError, "='tiktokens'", parameter="BATCHWRIGHT_ENCODER", remedy="'tokenizers'"):
        _ = JsonTokenizer(trained_json(), "misspelt").encoder


def test_without_tiktoken_the_command_to_install_it_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
    tokenizer = JsonTokenizer(trained_json(), "missing")
    assert tokenizer.encoder == "tokenizers (tiktoken is not installed: pip install 'batchwright[fast]')"
    assert tokenizer.encode_batch(["the cat"]) == ids_by_tokenizers(tokenizer, ["the cat"])


def test_what_was_proved_travels_to_workers(monkeypatch):
    tokenizer = JsonTokenizer(trained_json(), "travels")
    assert tokenizer.encoder == "tiktoken, proved identical"
    monkeypatch.setattr(fast, "proved_before", None)  # nothing is proved any more
    there = pickle.loads(pickle.dumps(tokenizer))
    assert ids_by_us(there, SEEN) == ids_by_tokenizers(tokenizer, SEEN)


def test_a_store_is_the_same_bytes_whichever_encoder_ran(tmp_path, monkeypatch, capsys):
    (tmp_path / "tokenizer.json").write_text(trained_json(LLAMA3_PATTERN, nfc=True))
    files, said = [], []
    for name, asked in (("fast", ""), ("slow", "tokenizers")):
        monkeypatch.setenv("BATCHWRIGHT_ENCODER", asked)
        monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / name / "home"))  # or tokens would be known from before
        recipe = bw.DatasetRecipe(seed=0).add_ingredient([*SEEN, "with <|end|>", "'ſ"], name="texts")
        recipe.prepare_step(bw.tokenize(tmp_path / "tokenizer.json", append_eos=True))
        store = bw.bake(recipe, tmp_path / name / "a.store", workers=0)
        said.append(capsys.readouterr().err)
        files.append({path.name: path.read_bytes() for path in store.folder.rglob("*.arrow")} | _manifest(store.folder))
    assert files[0] == files[1]
    assert "encoder: tiktoken, proved identical" in said[0]
    assert "encoder: tokenizers (BATCHWRIGHT_ENCODER=tokenizers)" in said[1]


def _manifest(folder: Path) -> dict[str, bytes]:
    return {"manifest": (folder / "manifest.json").read_bytes()}


def test_ids_are_arrays_of_32_bits(tokenizers):
    assert {ids.dtype for ids in tokenizers["llama3"].encode_batch(["a", "<|end|>", "", "'ſ"])} == {np.dtype(np.uint32)}
