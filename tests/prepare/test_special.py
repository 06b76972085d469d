"""The name of a special token in a document is text: never the token, unless the recipe asks for it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from byte_level import LLAMA3_PATTERN, trained_json
from hypothesis import given
from hypothesis import strategies as st
from test_chat_encode import KINDS, OTHERS, SPECIAL
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

import batchwright as bw
from batchwright.cli.main import main
from batchwright.prepare.tokenizers import JsonTokenizer
from refusals import refused

EVERY = {
    **KINDS,
    **{kind: lambda make=make: JsonTokenizer(make().to_str(), "made here") for kind, make in OTHERS.items()},
}
TEXTS = ["a <|end|> b", "<|end|>", "<|start|><|end|>>", "the cat", "x<|start|>", "   <|end|>   ", "<|end", ""]


@pytest.fixture(scope="module")
def tokenizers():
    return {kind: make() for kind, make in EVERY.items()}


def without_special(tokenizer: JsonTokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of a tokenizer that never had special tokens."""
    body = json.loads(tokenizer.backend.to_str())
    body["added_tokens"] = [token for token in body["added_tokens"] if not token["special"]]
    backend = Tokenizer.from_str(json.dumps(body))
    return [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]


@pytest.mark.parametrize("kind", EVERY)
def test_no_text_becomes_a_special_token(tokenizers, kind):
    tokenizer = tokenizers[kind]
    ids = [number for name, number in tokenizer.special.items() if name in SPECIAL]
    assert ids
    parsed = bw.tokenize(tokenizer, special="parse").encode(TEXTS)
    assert np.isin(np.concatenate(parsed), ids).any()
    kept = bw.tokenize(tokenizer).encode(TEXTS)
    assert not np.isin(np.concatenate(kept), ids).any()
    assert kept[3].tolist() == tokenizer.backend.encode("the cat", add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@given(pieces=st.lists(st.sampled_from([*SPECIAL, "<|end", "|>", " ", "a", "é", "\n", "<think>", "<t>", "\U000f0000"])))
def test_the_ids_are_those_of_a_tokenizer_without_special_tokens(tokenizers, kind, pieces):
    text = "".join(pieces)
    (ids,) = bw.tokenize(tokenizers[kind]).encode([text])
    assert [ids.tolist()] == without_special(tokenizers[kind], [text])


@pytest.mark.parametrize("special", ["text", "parse"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_encoders_give_the_same_ids(kind, special, monkeypatch):
    texts = [*TEXTS, *(f"{a}{b}" for a in TEXTS for b in TEXTS)]
    encoded = {}
    for asked in ("", "tokenizers"):
        monkeypatch.setenv("BATCHWRIGHT_ENCODER", asked)
        step = bw.tokenize(KINDS[kind](), special=special)
        encoded[step.encoder] = [ids.tolist() for ids in step.encode(texts)]
    fast, slow = encoded
    assert (fast, slow) == ("tiktoken, proved identical", "tokenizers (BATCHWRIGHT_ENCODER=tokenizers)")
    assert encoded[fast] == encoded[slow]


def test_added_tokens_that_are_not_special_stay_tokens(tokenizers):
    tokenizer = tokenizers["qwen"]
    (ids,) = bw.tokenize(tokenizer).encode(["<think>a<|end|><t>"])
    assert {tokenizer.vocab["<think>"], tokenizer.vocab["<t>"]} <= set(ids.tolist())


@pytest.fixture(scope="module")
def pieces():
    """A Unigram tokenizer that composes characters before it looks for pieces."""
    words = ["<unk>", "</s>", "▁", *"</s>unk"]
    backend = Tokenizer(models.Unigram([(word, -float(n)) for n, word in enumerate(words)], unk_id=0))
    backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    backend.add_special_tokens([AddedToken("<unk>", normalized=False), AddedToken("</s>", normalized=False)])
    return JsonTokenizer(backend.to_str(), "made here")


def test_the_name_of_the_unknown_token_is_text_and_unknown_text_is_still_unknown(pieces):
    encoded = bw.tokenize(pieces).encode(["<unk>", "☃", "<unk>☃"])
    assert [ids.tolist().count(0) for ids in encoded] == [0, 1, 1]


def test_a_name_that_only_the_normalizer_makes_is_text(pieces):
    parsed, kept = (bw.tokenize(pieces, special=special).encode(["＜/s＞"])[0] for special in ("parse", "text"))
    assert (1 in parsed.tolist(), 1 in kept.tolist()) == (True, False)


def test_a_tokenizer_that_makes_special_tokens_by_merging_is_refused_with_the_row(bake_texts):
    body = json.loads(trained_json(LLAMA3_PATTERN))
    body["added_tokens"].append({**body["added_tokens"][0], "id": body["model"]["vocab"]["he"], "content": "he"})
    step = bw.tokenize(JsonTokenizer(json.dumps(body), "he"))
    with refused(bw.TokenizerError, remedy="special='parse'", file="<memory>", row=1):
        bake_texts(["x", "hex"], step)


# What a bake does and says


@pytest.fixture
def tokenizer(save):
    return save(Tokenizer.from_str(trained_json()))


def test_the_end_of_a_document_is_where_it_ends(bake_texts, tokenizer):
    step = bw.tokenize(tokenizer, append_eos=True)
    store = bake_texts(["one<|end|>two", "three"], step)
    assert [store.tokens(n).tolist().count(step.eos_id) for n in (0, 1)] == [1, 1]
    assert store.decode(store.tokens(0)) == "one<|end|>two<|end|>"


@pytest.mark.parametrize("special", ["text", "parse"])
def test_the_report_counts_names_of_special_tokens(bake_texts, tokenizer, capfd, special):
    texts = ["<|end|>", "a", "b<|end|>c<|end|>", "<|end"]
    store = bake_texts(texts, bw.tokenize(tokenizer, special=special), show_progress=True, on_error="skip")
    assert store.report["special_tokens"] == {"as": special, "documents": 2, "names": {"<|end|>": 3}}
    said = next(line for line in capfd.readouterr().err.splitlines() if "<|end|>" in line)
    assert "3" in said
    assert "2 documents" in said


def test_the_report_is_the_same_when_the_tokens_were_made_before(bake_texts, tokenizer, tmp_path):
    texts = ["<|end|> and more", "a"]
    first = bake_texts(texts, bw.tokenize(tokenizer))
    recipe = bw.DatasetRecipe().add_ingredient(texts, name="other").prepare_step(bw.tokenize(tokenizer))
    again = bw.bake(recipe, tmp_path / "again.store", workers=0, show_progress=False)
    assert again.report["special_tokens"] == first.report["special_tokens"]


def test_tokens_that_were_parsed_are_not_taken_for_text(bake_texts, tokenizer):
    texts = ["one<|end|>two"]
    parsed = bake_texts(texts, bw.tokenize(tokenizer, special="parse"))
    kept = bake_texts(texts, bw.tokenize(tokenizer))
    again = bake_texts(texts, bw.tokenize(tokenizer, special="parse"))
    lengths = [len(store.tokens(0)) for store in (parsed, kept, again)]
    assert lengths[1] > lengths[0] == lengths[2]


def test_a_store_that_does_not_say_it_has_parsed_them(bake_texts, tokenizer, tmp_path):
    """Stores of earlier releases."""
    texts = ["one<|end|>two"]
    parsed = bake_texts(texts, bw.tokenize(tokenizer, special="parse"))
    path = parsed.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["tokenizer"]["special"]
    path.write_text(json.dumps(manifest))
    kept = bake_texts(texts, bw.tokenize(tokenizer))
    assert len(kept.tokens(0)) > len(parsed.tokens(0))


@pytest.mark.parametrize("streaming", [True, False])
def test_raw_files_that_a_loader_reads_hold_text(tokenizer, tmp_path, streaming):
    (tmp_path / "raw.txt").write_text("one<|end|>two " * 50)
    loader = bw.PretrainDataLoader(tmp_path / "raw.txt", tokenizer, chunk_size=16, batch_size=1, streaming=streaming)
    end = JsonTokenizer(tokenizer.read_text(), "x").special["<|end|>"]
    batches = list(loader.get_iterator())
    assert sum(int((batch.input_ids == end).sum()) for batch in batches) <= 1  # the document's own


@pytest.mark.parametrize("other", ["bytes", "chars", lambda text: [1]])
def test_parse_is_refused_where_it_could_not_be_done(other):
    with refused(bw.TokenizerError, parameter="special"):
        bw.tokenize(other, special="parse", vocab_size=None if isinstance(other, str) else 2)


def test_another_word_is_refused(tokenizer):
    with refused(bw.SpecError, "'keep'", "text", parameter="special"):
        bw.tokenize(tokenizer, special="keep")


def test_the_command_line_has_the_setting_and_says_what_was_found(tokenizer, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one<|end|>two")
    command = ["bake", str(tmp_path / "a.txt"), "--tokenizer", str(tokenizer), "--workers", "0", "--quiet"]
    for special in ("text", "parse"):
        store = str(tmp_path / f"{special}.store")
        assert main([*command, "--special", special, "--to", store]) == 0
        assert bw.open_store(store).report["special_tokens"]["as"] == special
        capsys.readouterr()
        assert main(["info", store]) == 0
        assert "<|end|>" in capsys.readouterr().out
