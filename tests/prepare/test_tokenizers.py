"""Tokenizers of every kind, behind one interface: same text, same ids, whatever the tokenizer was given as."""

from __future__ import annotations

import json

import numpy as np
import pytest

import batchwright as bw
from batchwright.prepare import load_tokenizer, resolve_tokenizer
from refusals import refused

TEXT = "the cat the dog a b c a b c"
IDS = [3, 4, 3, 5, 0, 1, 2, 0, 1, 2]


def test_a_path_a_folder_an_object_and_a_transformers_tokenizer_give_the_same_ids(make_tokenizer, save):
    from transformers import PreTrainedTokenizerFast

    tokenizer = make_tokenizer("</s>")
    path = save(tokenizer)
    fast = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="</s>")
    for given in (path, str(path), path.parent, tokenizer, fast):
        assert [ids.tolist() for ids in bw.tokenize(given).encode([TEXT, ""])] == [IDS, []]
    assert bw.tokenize(path).fingerprint == bw.tokenize(tokenizer).fingerprint


def test_truncation_and_padding_in_a_tokenizer_are_off(make_tokenizer, save, bake_texts):
    tokenizer = make_tokenizer("</s>")
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20, pad_id=0)
    assert len(tokenizer.encode(TEXT).ids) == 20
    for given in (save(tokenizer), tokenizer):
        assert bw.tokenize(given).encode([TEXT, "a"])[0].tolist() == IDS
    assert len(tokenizer.encode(TEXT).ids) == 20  # the user's own object is left as it is
    store = bake_texts([TEXT], bw.tokenize(tokenizer))
    assert store.tokens(0).tolist() == IDS
    assert load_tokenizer(store.folder / "tokenizer.json").encode_batch([TEXT]) == [IDS]


def test_special_tokens_of_the_template_are_never_added(make_tokenizer):
    tokenizer = make_tokenizer("<s>", "</s>")
    assert tokenizer.encode("a").ids == [6, 0]
    assert bw.tokenize(tokenizer, append_eos=True, eos="</s>").encode(["a"])[0].tolist() == [0, 7]


def test_a_transformers_tokenizer_says_its_own_end(make_tokenizer):
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer("</s>", "<end>"), eos_token="<end>")
    step = bw.tokenize(fast, append_eos=True)
    assert (step.eos_id, step.eos_from) == (7, "<end> from the tokenizer's config")
    assert step.encode(["a"])[0].tolist() == [0, 7]


def test_a_transformers_tokenizer_without_the_library_behind_it_is_called(make_tokenizer, bake_texts):
    class Slow:
        """What batchwright uses of a tokenizer written in Python."""

        eos_token_id = 2

        def __len__(self):
            return 3

        def get_vocab(self):
            return {"x": 0, "y": 1, "<end>": 2}

        def convert_tokens_to_ids(self, tokens): ...

        def encode(self, text, add_special_tokens=True, split_special_tokens=False):
            assert split_special_tokens
            return [self.get_vocab()[c] for c in text] + [2] * add_special_tokens

        def decode(self, ids):
            return "".join("xy."[i] for i in ids)

    store = bake_texts(["xyx"], bw.tokenize(Slow(), append_eos=True))
    assert store.tokens(0).tolist() == [0, 1, 0, 2]
    assert store.manifest.tokenizer["vocab_size"] == 3


def test_a_store_decodes_with_the_tokenizer_it_keeps(make_tokenizer, bake_texts):
    store = bake_texts(["the cat"], bw.tokenize(make_tokenizer("</s>"), append_eos=True))
    assert bw.open_store(store.path).decode(store.tokens(0)) == "the cat </s>"


def test_a_function_needs_a_vocabulary_size():
    with refused(bw.TokenizerError, parameter="vocab_size", remedy="tokenize(function, vocab_size=50257)"):
        bw.tokenize(lambda text: [1])


@pytest.mark.parametrize("vocab_size", [0, -5, "100", True])
def test_a_vocabulary_size_that_is_none_is_refused(vocab_size):
    with refused(bw.TokenizerError, parameter="vocab_size", remedy="tokenize(function, vocab_size=50257)"):
        bw.tokenize(lambda text: [1], vocab_size=vocab_size)


def test_the_vocabulary_size_is_taken_from_the_encoder_of_a_bound_method():
    class Encoder:
        n_vocab = 300

        def encode(self, text):
            return [299] * len(text)

    step = bw.tokenize(Encoder().encode)
    assert (step.vocab_size, step.encode(["ab"])[0].tolist()) == (300, [299, 299])


def test_a_function_may_give_lists_arrays_or_tuples(bake_texts):
    kinds = {"list": [1, 2], "tuple": (1, 2), "array": np.array([1, 2], np.int32), "empty": []}
    store = bake_texts(list(kinds), bw.tokenize(lambda text: kinds[text], vocab_size=3))
    assert [store.tokens(i).tolist() for i in range(4)] == [[1, 2], [1, 2], [1, 2], []]


def test_a_store_of_a_function_cannot_decode_and_says_so_by_none(bake_texts, tmp_path):
    store = bake_texts(["ab"], bw.tokenize(lambda text: [1, 2], vocab_size=3))
    assert store.decode([1, 2]) is None
    with refused(bw.TokenizerError, "function", file=store.folder / "tokenizer.json"):
        bw.tokenize(store.folder / "tokenizer.json")


def test_the_tokenizer_of_a_store_can_tokenise_again(bake_texts):
    store = bake_texts(["cab"], bw.tokenize("chars"))
    step = bw.tokenize(store.folder / "tokenizer.json", append_eos=True)
    assert step.encode(["abc"])[0].tolist() == [0, 1, 2, 3]
    with refused(bw.TokenizerError, "'x'", file="<memory>", row=1):
        bake_texts(["abc", "axc"], step)


def test_an_object_that_does_what_the_protocol_asks_for_is_a_tokenizer(bake_texts):
    class Evens:
        vocab_size, fingerprint = 20, "evens-1"

        def encode_batch(self, texts):
            return [[2 * int(c) for c in text] for text in texts]

        def decode(self, ids):
            return "".join(str(i // 2) for i in ids)

    store = bake_texts(["123"], bw.tokenize(Evens()))
    assert store.tokens(0).tolist() == [2, 4, 6]
    assert store.manifest.tokenizer["name"] == "Evens"


def test_vocabularies_with_gaps_count_to_their_largest_id(make_tokenizer, save):
    path = save(make_tokenizer())
    body = json.loads(path.read_text())
    body["model"]["vocab"]["far"] = 70_000
    path.write_text(json.dumps(body))
    step = bw.tokenize(path)
    assert (step.vocab_size, step.dtype) == (70_001, np.uint32)
    assert step.encode(["far"])[0].tolist() == [70_000]


def test_tokenizers_that_differ_have_fingerprints_that_differ(make_tokenizer):
    steps = [
        bw.tokenize("bytes"),
        bw.tokenize("bytes", append_eos=True),
        bw.tokenize("chars"),
        bw.tokenize(make_tokenizer()),
        bw.tokenize(make_tokenizer("</s>")),
        bw.tokenize(lambda text: [1], vocab_size=5),
        bw.tokenize(lambda text: [2], vocab_size=5),
        bw.tokenize(lambda text: [1], vocab_size=6),
    ]
    assert len({step.fingerprint for step in steps}) == len(steps)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("byte", "'bytes'"),
        ("gpt2", "AutoTokenizer.from_pretrained"),
        (5, "a int"),
        (object(), "a object"),
    ],
)
def test_what_is_no_tokenizer_is_answered_with_what_is(given, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(bw.TokenizerError, named):
        resolve_tokenizer(given)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"model": 5}', b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with refused(bw.TokenizerError, "tokenizer.json", file=path, remedy="tokenizer.json"):
        bw.tokenize(path)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with refused(bw.TokenizerError, file=tmp_path / "tokenizer.json", remedy="AutoTokenizer.from_pretrained"):
        bw.tokenize(tmp_path)


@pytest.mark.parametrize("config", ["{", "[]", "5"])
def test_a_config_that_is_broken_is_named(make_tokenizer, save, config):
    path = save(make_tokenizer("</s>"))
    path.with_name("tokenizer_config.json").write_text(config)
    with refused(bw.TokenizerError, file=path.with_name("tokenizer_config.json")):
        bw.tokenize(path, append_eos=True)
