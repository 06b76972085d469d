"""The tokenize step: which id ends a document, which type holds the ids, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import batchwright as bw
from refusals import refused


def test_bytes_are_their_own_ids_and_256_ends_a_document(bake_texts):
    store = bake_texts(["hé"], bw.tokenize("bytes", append_eos=True))
    assert store.tokens(0).tolist() == [*"hé".encode(), 256]
    assert store.manifest.token_dtype == "uint16"
    assert store.manifest.tokenizer["eos_from"] == "its own"


def test_bytes_without_an_end_fit_one_byte(bake_texts):
    store = bake_texts(["abc"], bw.tokenize("bytes"))
    assert (store.manifest.token_dtype, store.tokens(0).tolist()) == ("uint8", [97, 98, 99])
    assert store.manifest.tokenizer["eos"] is None


def test_chars_are_the_characters_of_the_corpus_in_their_order(bake_texts):
    store = bake_texts(["cab", "é→b"], bw.tokenize("chars", append_eos=True))
    assert [store.tokens(i).tolist() for i in (0, 1)] == [[2, 0, 1, 5], [3, 4, 1, 5]]  # a b c é →, then the end
    assert store.manifest.tokenizer["vocab_size"] == 6
    assert store.decode(store.tokens(1)) == "é→b"


def test_chars_of_a_held_out_document_are_in_the_vocabulary(tmp_path):
    texts = [chr(0x4E00 + n) * 3 for n in range(40)]
    recipe = bw.DatasetRecipe().add_ingredient(texts).prepare_step(bw.tokenize("chars")).holdout(0.5)
    store = bw.bake(recipe, tmp_path / "a.store", workers=0, show_progress=False)
    assert store.manifest.tokenizer["vocab_size"] == 40
    assert 0 < store.stream("memory", "val").num_documents < 40


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (2**32, "uint32")],
)
def test_ids_take_the_smallest_type_that_holds_the_vocabulary(vocab_size, dtype, bake_texts):
    step = bw.tokenize(lambda text: [vocab_size - 1], vocab_size=vocab_size)
    store = bake_texts(["x"], step)
    assert (store.manifest.token_dtype, store.tokens(0).tolist()) == (dtype, [vocab_size - 1])


def test_the_end_of_document_counts_in_the_vocabulary(bake_texts):
    assert bw.tokenize("bytes").dtype == np.uint8
    assert bw.tokenize("bytes", append_eos=True).dtype == np.uint16
    assert bw.tokenize("bytes", append_eos=True, eos=0).dtype == np.uint8


@pytest.mark.parametrize("dtype", ["uint16", np.uint16, np.dtype("uint16")])
def test_a_larger_type_can_be_asked_for(bake_texts, dtype):
    assert bake_texts(["abc"], bw.tokenize("bytes", dtype=dtype)).manifest.token_dtype == "uint16"


@pytest.mark.parametrize(
    ("settings", "parameter", "named"),
    [
        ({"dtype": "uint8", "append_eos": True}, "dtype", "257 ids"),
        ({"dtype": "int32"}, "dtype", "dtype='int32'"),
        ({"dtype": "uint64"}, "dtype", "dtype='uint64'"),
        ({"dtype": "smallest"}, "dtype", "dtype='smallest'"),
        ({"eos": 3}, "eos", "append_eos"),
        ({"append_eos": True, "eos": 257}, "eos", "eos=257"),
        ({"append_eos": True, "eos": -1}, "eos", "eos=-1"),
        ({"append_eos": True, "eos": "</s>"}, "eos", "bytes"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(settings, parameter, named):
    with refused(bw.TokenizerError, named, parameter=parameter):
        bw.tokenize("bytes", **settings)


def test_a_vocabulary_beyond_32_bits_is_refused():
    with refused(bw.TokenizerError, "4,294,967,297", parameter="vocab_size", remedy="vocab_size=4294967296"):
        bw.tokenize(lambda text: [0], vocab_size=2**32 + 1)


# append_eos: eos=, else the config beside the file, else the only special token, else a well-known name.


def test_eos_as_a_token_or_an_id_comes_first(make_tokenizer, save):
    path = save(make_tokenizer("<s>", "</s>"), {"eos_token": "</s>"})
    assert (bw.tokenize(path, append_eos=True, eos="<s>").eos_id, 6) == (6, 6)
    step = bw.tokenize(path, append_eos=True, eos=0)
    assert (step.eos_id, step.eos_from) == (0, "eos=")


@pytest.mark.parametrize("written", ["<end>", {"content": "<end>", "lstrip": False}])
def test_the_config_beside_the_file_comes_next(make_tokenizer, save, written, bake_texts, capsys):
    path = save(make_tokenizer("</s>", "<end>"), {"eos_token": written})
    store = bake_texts(["the cat"], bw.tokenize(path, append_eos=True), show_progress=True)
    assert store.tokens(0).tolist() == [3, 4, 7]
    assert store.manifest.tokenizer["eos_from"] == "<end> from the tokenizer's config"
    assert "end of document: id 7 (<end> from the tokenizer's config)" in capsys.readouterr().err


def test_the_only_special_token_comes_next(make_tokenizer, save):
    step = bw.tokenize(save(make_tokenizer("<strange>")), append_eos=True)
    assert (step.eos_id, step.eos_from) == (6, "<strange>, the only special token")


def test_a_config_that_names_no_token_of_the_vocabulary_is_passed_over(make_tokenizer, save):
    step = bw.tokenize(save(make_tokenizer("<strange>"), {"eos_token": "<gone>"}), append_eos=True)
    assert step.eos_from == "<strange>, the only special token"


@pytest.mark.parametrize("token", ["</s>", "<|endoftext|>", "<eos>", "<|im_end|>"])
def test_a_well_known_name_comes_last(make_tokenizer, save, token):
    step = bw.tokenize(save(make_tokenizer("<pad>", token)), append_eos=True)
    assert (step.eos_id, step.eos_from) == (7, f"{token}, a well-known name")


def test_without_an_answer_the_error_lists_the_candidates(make_tokenizer, save):
    with refused(bw.TokenizerError, "tiny", parameter="eos", special="<one> (6), <two> (7)", remedy="eos="):
        bw.tokenize(save(make_tokenizer("<one>", "<two>")), append_eos=True)


def test_an_eos_that_is_no_token_lists_the_candidates(make_tokenizer, save):
    with refused(bw.TokenizerError, "eos='<no>'", parameter="eos", special="<one> (6)"):
        bw.tokenize(save(make_tokenizer("<one>")), append_eos=True, eos="<no>")


def test_a_function_must_say_which_id_ends_a_document(bake_texts):
    with refused(bw.TokenizerError, "append_eos", parameter="eos", remedy="eos=50256"):
        bw.tokenize(lambda text: [1], vocab_size=10, append_eos=True)
    store = bake_texts(["x"], bw.tokenize(lambda text: [1], vocab_size=10, append_eos=True, eos=9))
    assert store.tokens(0).tolist() == [1, 9]


# What a tokenizer gives is checked, and the document is named.


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda text: [10] if text == "bad" else [1], "id 10"),
        (lambda text: np.array([200], np.uint8) if text == "bad" else [1], "id 200"),
        (lambda text: [-1] if text == "bad" else [1], "id -1"),
        (lambda text: [0.5] if text == "bad" else [1], "float64"),
        (lambda text: [[1, 2]] if text == "bad" else [1], "int64"),
        (lambda text: None if text == "bad" else [1], "object"),
        (lambda text: 1 // 0 if text == "bad" else [1], "ZeroDivisionError: integer division"),
    ],
)
def test_what_is_no_list_of_ids_is_refused_and_the_document_named(function, named, bake_texts):
    with refused(bw.TokenizerError, named, file="<memory>", row=2):
        bake_texts(["fine", "fine", "bad", "fine"], bw.tokenize(function, vocab_size=10))


def test_a_document_with_an_id_outside_the_vocabulary_is_named_by_file_and_line(tmp_path, bake_texts):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "bbb"}\n')
    with refused(bw.TokenizerError, "id 3", parameter="vocab_size", file=path, line=3, remedy="vocab_size=4"):
        bake_texts(path, bw.tokenize(lambda text: [len(text)], vocab_size=3))


def test_the_vocabulary_for_the_largest_id_of_a_small_type_is_counted_beyond_it(bake_texts):
    with refused(bw.TokenizerError, "id 255", parameter="vocab_size", remedy="vocab_size=256"):
        bake_texts(["x"], bw.tokenize(lambda text: np.array([255], np.uint8), vocab_size=200))


def test_half_a_surrogate_pair_is_not_utf8_and_is_located(bake_texts):
    with refused(bw.SourceError, "UTF-8", "character 3", file="<memory>", row=1):
        bake_texts(["fine", "bad\ud800"], bw.tokenize("bytes"))
    assert bake_texts(["fine", "bad\ud800"], bw.tokenize("bytes"), on_error="skip").num_rows == 1


def test_a_column_of_another_name_can_be_tokenised(bake_texts):
    rows = [{"text": "question", "answer": "yes"}]
    store = bake_texts(rows, bw.tokenize("bytes", text="answer"))
    assert store.decode(store.tokens(0)) == "yes"
    with refused(bw.SourceError, "'reply'", "'text', 'answer'", file="<memory>", row=0, remedy="tokenize("):
        bake_texts(rows, bw.tokenize("bytes", text="reply"))
