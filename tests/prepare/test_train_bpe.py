"""A byte-level BPE from texts: what it learns, that it loses nothing, and what is refused."""

from __future__ import annotations

import json
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright.prepare.train import BpeSettings, train_bpe
from refusals import refused

TEXTS = [
    "the cat sat on the mat, the cat's mat 1234; where else would a cat of that kind have been sitting?",
    "été → thé\n\n  and more the the: another sentence that has some longer words in it",
] * 20


def trained(texts=TEXTS, vocab_size=300, **settings):
    given = {"special_tokens": ["<|endoftext|>"], "pattern": "llama3", "min_frequency": 2, "name": "t", **settings}
    return train_bpe(texts, BpeSettings(vocab_size, **given))


@pytest.fixture(scope="module")
def tokenizer():
    return trained()


def test_ids_are_bytes_then_merges_then_special_tokens(tokenizer):
    vocab = json.loads(tokenizer.json)["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(299))
    assert all(len(piece) == 1 for piece, number in vocab.items() if number < 256)
    assert all(len(piece) > 1 for piece, number in vocab.items() if number >= 256)
    assert tokenizer.special == {"<|endoftext|>": 299}
    assert tokenizer.vocab_size == 300


def test_the_most_frequent_pair_is_merged_first():
    tokenizer = trained(["ab ab ab cd"], vocab_size=258)
    assert json.loads(tokenizer.json)["model"]["merges"][0] == ["a", "b"]


@given(st.text())
def test_what_is_decoded_is_the_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text


def test_no_token_spans_a_cut_of_the_pattern():
    words = ["one two 12345678 one two 12345678"] * 9
    llama, gpt2 = (set(trained(words, n, pattern=pattern).vocab) for n, pattern in ((268, "llama3"), (271, "gpt2")))
    assert {"Ġtwo", "123"} <= llama
    assert {"Ġtwo", "Ġ12345678"} <= gpt2
    assert not any(len(piece) > 3 and "2" in piece for piece in llama)
    assert not any("Ġ" in piece[1:] for piece in llama | gpt2)


def test_a_pattern_of_ones_own_is_a_regular_expression():
    with pytest.warns(UserWarning, match="vocab_size=258"):
        vocab = trained(["ab-ab-ab-"] * 9, 300, pattern="-").vocab
    assert {piece for piece in vocab if len(piece) > 1} == {"ab", "<|endoftext|>"}


def test_the_name_of_a_special_token_is_never_learned_from_the_text():
    with pytest.warns(UserWarning, match="vocab_size=258"):
        tokenizer = trained(["ab<s>ab<s>ab<s>"] * 9, special_tokens=["<s>"], pattern="ab")
    assert "ab" in tokenizer.vocab
    assert tokenizer.special == {"<s>": 257}


@pytest.mark.parametrize("pattern", ["llama3", "gpt2"])
def test_the_fast_encoder_is_proved_identical_on_it(pattern):
    pytest.importorskip("tiktoken")
    tokenizer = trained(pattern=pattern)
    assert tokenizer.proof.reason is None
    assert tokenizer.encoder == "tiktoken, proved identical"


def test_a_text_with_too_few_pairs_gives_a_smaller_vocabulary_and_says_how_large():
    with pytest.warns(UserWarning, match=r"259.* 5,000.*min_frequency=.*vocab_size=259"):
        tokenizer = trained(["aaa aaa"], 5000)
    assert tokenizer.vocab_size == 259


def test_the_smallest_vocabulary_is_the_bytes_and_the_special_tokens():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained(vocab_size=257).vocab_size == 257
        assert trained(vocab_size=256, special_tokens=[]).vocab_size == 256


@pytest.mark.parametrize(
    ("settings", "parameter", "what", "remedy"),
    [
        ({"vocab_size": 256}, "vocab_size", "256 bytes", "vocab_size=257"),
        ({"vocab_size": 0}, "vocab_size", "0", "vocab_size=1"),
        ({"vocab_size": 1.5}, "vocab_size", "1.5", None),
        ({"min_frequency": 0}, "min_frequency", "0", "min_frequency=1"),
        ({"pattern": "(("}, "pattern", "((", "pattern='llama3'"),
        ({"special_tokens": "<s>"}, "special_tokens", "'<s>'", "special_tokens=['<|endoftext|>']"),
        ({"special_tokens": ["<s>", ""]}, "special_tokens", "['<s>', '']", "special_tokens=['<|endoftext"),
        ({"special_tokens": ["<s>", "<s>"]}, "special_tokens", "'<s>'", "once"),
    ],
)
def test_what_cannot_be_is_refused_before_any_text_is_read(settings, parameter, what, remedy):
    def never():
        raise AssertionError("it was read")
        yield ""

    with refused(bw.SpecError, what, parameter=parameter, remedy=remedy or True):
        trained(never(), **settings)


def test_an_error_of_the_texts_comes_out_as_it_is():
    def broken():
        yield "one"
        raise bw.SourceError("this line is broken", file="a.jsonl")

    with refused(bw.SourceError, file="a.jsonl", remedy=False):
        trained(broken())
