"""`batchwright.look`: every token of a batch as a person can read it, and which of them are trained."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import batchwright as bw
from batchwright.batches.looking import look
from batchwright.prepare.chat.spans import ROLES
from refusals import refused

LEGEND = "⟦trained⟧  ⟨special token⟩  ↵ newline"
USER, ASSISTANT = ROLES.index("user"), ROLES.index("assistant")


def batch_of(*rows, pad_left=False, framework=np.asarray, **fields):
    """A batch of bytes. Each row is text in which what is trained stands in brackets: "Hi [Yo]"."""
    tokens, weights = [], []
    for row in rows:
        ids, trained, is_trained = [], [], False
        for byte in row.encode():
            if byte in b"[]":
                is_trained = byte == ord("[")
            else:
                ids.append(byte)
                trained.append(float(is_trained))
        tokens.append(ids)
        weights.append(trained)
    width = max(map(len, tokens))

    def padded(values):
        gaps = [[0] * (width - len(own)) for own in values]
        rows = [gap + own if pad_left else own + gap for gap, own in zip(gaps, values, strict=True)]
        return np.array([[*row, 0] for row in rows])

    ids, weight, real = padded(tokens), padded(weights), padded([[1] * len(own) for own in tokens])
    targets = np.where(weight > 0, ids, -100)[:, 1:]
    metadata = fields.pop("metadata", {})
    fields |= {"attention_mask": real[:, :-1], "targets": targets, "loss_mask": weight[:, 1:].astype(np.float32)}
    arrays = {name: framework(values) for name, values in fields.items()}
    return bw.TrainingBatch(framework(ids[:, :-1]), metadata=metadata, **arrays)


def shown(batch, **settings):
    """The plain form, without the two lines at its top."""
    heading, legend, *lines = str(look(batch, **{"tokenizer": "bytes", "color": False, **settings})).split("\n")
    assert "% trained" in heading
    assert legend == LEGEND
    return lines


# What is marked


def test_trained_tokens_stand_in_marks():
    assert shown(batch_of("Hi [Yo]!")) == ["", "row 0: 6 tokens, 2 trained", "  | Hi ⟦Yo⟧!"]


def test_the_first_line_counts_the_whole_batch():
    batch = batch_of("a[bc]d", "e[f]")
    assert str(look(batch, rows=1, tokenizer="bytes")).split("\n")[0] == (
        "1 of 2 rows, 8 tokens, 37.5 % trained, 25.0 % padding"
    )


def test_weights_other_than_one_are_said():
    batch = batch_of("a[bcd]")
    batch.loss_mask = np.array([[0.5, 1, 1, 0]], np.float32)
    text = str(look(batch, tokenizer="bytes", color=False))
    assert "75.0 % trained (weights from 0.5 to 1)" in text
    assert "  | a⟦b⟧x0.5⟦cd⟧" in text


def test_padding_is_counted_not_shown():
    assert shown(batch_of("ab[cd]", "a[b]"))[-3:] == [
        "row 1: 2 tokens, 1 trained, 2 of padding",
        "  | a⟦b⟧",
        "  | ... 2 of padding",
    ]


def test_padding_on_the_left_comes_first():
    assert shown(batch_of("ab[cd]", "a[b]", pad_left=True))[-2:] == ["  | ... 2 of padding", "  | a⟦b⟧"]


def test_padding_that_is_trained_is_shown_and_noted():
    batch = batch_of("ab[cd]", "a[b]")
    batch.targets[1, 2:], batch.loss_mask[1, 2:] = 0, 1
    text = str(look(batch, tokenizer="bytes", color=False))
    assert "note: 2 trained targets are in the padding" in text
    assert text.endswith("  | a⟦b⟧\n  | ... 1 of padding⟦\\x00⟧⟦\\x00⟧(target only)")


def test_the_last_target_of_a_window_is_not_among_its_inputs():
    ids = np.frombuffer(b"abcd", np.uint8).astype(np.int64)[None]
    batch = bw.TrainingBatch(ids[:, :-1], np.ones((1, 3)), targets=ids[:, 1:])
    assert shown(batch) == ["", "row 0: 3 tokens, 3 trained", "  | a⟦bc⟧⟦d⟧(target only)"]


def test_a_last_target_that_is_also_the_token_for_padding_is_no_padding():
    batch = batch_of("ab[cd]", "a[b]")
    batch.targets[1, 1], batch.loss_mask[1, 1] = 0, 1  # a row that is shorter than others ends with this target
    assert shown(batch)[-2:] == ["  | a⟦b⟧⟦\\x00⟧(target only)", "  | ... 2 of padding"]


def test_labels_that_another_library_made_are_marked_alike():
    batch = batch_of("Hi [Yo]!")
    assert shown({"input_ids": batch.input_ids, "labels": batch.labels}) == [
        "",
        "row 0: 6 tokens, 2 trained",
        "  | Hi ⟦Yo⟧!",
    ]


def test_targets_shifted_twice_are_noted_and_shown():
    batch = batch_of("ab[cdef]")
    batch.targets = np.concatenate([batch.targets[:, 1:], [[-100]]], axis=1)
    batch.loss_mask = (batch.targets != -100).astype(np.float32)
    text = str(look(batch, tokenizer="bytes", color=False))
    assert "note: 4 trained targets are not the token that follows" in text
    assert "  | a⟦c⟧(odd target)b⟦d⟧(odd target)c⟦e⟧(odd target)d⟦f⟧(odd target)ef" in text


def test_targets_that_only_the_mask_keeps_out_are_noted():
    batch = batch_of("ab[cd]")
    batch.targets = np.array([[98, 99, 100, -100]])
    text = str(look(batch, tokenizer="bytes", color=False))
    assert "note: 1 target is not -100 where loss_mask is 0: a loss that reads no mask learns them" in text
    assert text.endswith("ab⟦cd⟧")


def test_a_batch_without_labels_trains_nothing():
    batch = {"input_ids": np.array([[72, 105]])}
    assert shown(batch) == ["", "row 0: 2 tokens, 0 trained", "  | Hi"]


# Rows


def test_rows_say_where_they_are_from():
    metadata = {"source": ["web", "web"], "position": np.array([1200, 7]), "weight": np.array([1, 0])}
    lines = shown(batch_of("a[b]", "c[d]", metadata=metadata))
    assert lines[1] == "row 0: web, position 1,200, 2 tokens, 1 trained"
    assert lines[4] == "row 1: web, position 7, fills the batch up, 2 tokens, 1 trained"


def test_roles_stand_beside_their_turns():
    role = np.array([[USER] * 3 + [ASSISTANT] * 4])
    batch = batch_of("U\nu\nA\n[a", metadata={"role": role, "turn": np.where(role == USER, 0, 1)})
    assert shown(batch)[2:] == ["  user      | U↵", "            | u↵", "  assistant | A↵", "            | ⟦a⟧"]


def test_pairs_say_which_answer_they_are():
    batch = batch_of("Q[yes]", "Q[no]", metadata={"side": ["chosen", "rejected"]})
    assert [line for line in shown(batch) if line.startswith("row")] == [
        "row 0: chosen, 4 tokens, 3 trained",
        "row 1: rejected, 3 tokens, 2 trained, 1 of padding",
    ]


PACKED = [
    "",
    "row 0: 7 tokens, 3 trained",
    "  -- sample 1: 4 tokens, 2 trained",
    "  | ab⟦cd⟧",
    "  -- sample 2: 3 tokens, 1 trained",
    "  | xy⟦z⟧",
]


@pytest.mark.parametrize(
    "fields",
    [
        {"segment_ids": [[1, 1, 1, 1, 2, 2, 2]]},
        {"position_ids": [[0, 1, 2, 3, 0, 1, 2]]},
        {"cu_seqlens": [0, 4, 7]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_samples_of_a_packed_row_stand_apart(fields):
    assert shown(batch_of("ab[cd]xy[z]", **fields)) == PACKED


# Text


def test_newlines_are_a_mark_and_a_break():
    assert shown(batch_of("a\n\n[b\nc]"))[2:] == ["  | a↵", "  | ↵", "  | ⟦b↵⟧", "  | ⟦c⟧"]


def test_characters_are_whole_where_their_bytes_are_marked_alike():
    assert shown(batch_of("né[日本]"))[2:] == ["  | né⟦日本⟧"]


def test_a_character_that_a_border_cuts_is_shown_by_its_bytes():
    batch = batch_of("a[é]")
    batch.loss_mask = np.array([[0, 1, 0]], np.float32)
    batch.targets = np.array([[-100, 0xA9, -100]])
    assert shown(batch)[2:] == ["  | a\\xc3⟦\\xa9⟧"]


def test_text_cannot_drive_a_terminal_or_pretend_to_be_marked():
    assert shown(batch_of("\x1b(0;x\x07\t⟦no⟧\u202e"))[2:] == ["  | \\x1b(0;x\\x07\\t\\u27e6no\\u27e7\\u202e"]


def test_long_lines_are_wrapped_after_a_space():
    assert shown(batch_of("one two three [four five]"), width=20)[2:] == [
        "  | one two three ",
        "  | ⟦four five⟧",
    ]


def test_a_long_stretch_loses_its_middle_and_keeps_its_borders():
    line = "".join(shown(batch_of(f"A{'.' * 500}B[x]C{'é' * 300}D"), width=2000)[2:])
    assert line == f"  | A{'.' * 79} ... 342 tokens ... {'.' * 79}B⟦x⟧C{'é' * 40} ... 440 tokens ... {'é' * 40}D"


def test_nothing_is_left_out_of_the_whole():
    text = f"A{'.' * 500}B[x]"
    assert shown(batch_of(text), width=2000, whole=True)[2:] == [f"  | A{'.' * 500}B⟦x⟧"]


def test_ids_are_shown_where_no_tokenizer_is_known():
    lines = str(look(batch_of("a[bc]"), color=False)).split("\n")
    assert lines[1] == "note: ids, no text: tokenizer= says what they mean"
    assert lines[-1] == "  | 97 ⟦98 99⟧ "


def test_a_tokenizer_that_is_gone_leaves_ids():
    batch = batch_of("a[bc]", metadata={"tokenizer": "gone/tokenizer.json"})
    lines = str(look(batch, color=False)).split("\n")
    assert lines[1].startswith("note: ids, no text: gone/tokenizer.json is not there")
    assert lines[-1] == "  | 97 ⟦98 99⟧ "


def test_ids_and_text_side_by_side():
    assert shown(batch_of("a[\n]"), ids=True)[2:] == ["  | 97:'a' ⟦10:'\\n'⟧ "]


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


def byte_fallback():
    vocab = {"<unk>": 0, "▁": 1, "▁a": 2, "b": 3, "▁caf": 4, "<0xC3>": 5, "<0xA9>": 6}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def word_pieces():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "water": 1, "##fall": 2, "runs": 3}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def test_a_special_token_is_told_from_its_name_in_a_message():
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|im_end|>")
    ids = [*map(tokenizer.token_to_id, "x<|im_end|>"), end]
    batch = {"input_ids": np.array([ids]), "targets": np.array([[*ids[1:], -100]])}
    assert shown(batch, tokenizer=tokenizer)[2:] == ["  | x⟦<|im_end|>⟨<|im_end|>⟩⟧"]


@pytest.mark.parametrize(
    ("tokenizer", "ids", "text"),
    [
        (byte_level(), ["Ġ", "Ã", "©", "Ġ", "x"], "  |  ⟦\\xc3⟧\\xa9 x"),
        (byte_fallback(), ["b", "▁caf", "<0xC3>", "<0xA9>", "▁a", "b"], "  | b⟦ caf⟧é ab"),
        (byte_fallback(), ["b", "<0xC3>", "<0xA9>", "▁a"], "  | b⟦\\xc3⟧\\xa9 a"),
        (word_pieces(), ["runs", "water", "##fall", "runs"], "  | runs⟦ water⟧fall runs"),
    ],
    ids=["byte level", "byte fallback", "a cut character", "word pieces"],
)
def test_every_kind_of_vocabulary_is_spelled(tokenizer, ids, text):
    tokens = np.array([[tokenizer.token_to_id(token) for token in ids]])
    labels = np.where(np.arange(len(ids)) == 1, tokens, -100)
    batch = {"input_ids": tokens, "labels": labels}
    assert shown(batch, tokenizer=tokenizer)[2:] == [text]


# Colours and HTML


def test_colours_stand_for_marks():
    text = str(look(batch_of("a[b]"), tokenizer="bytes", color=True))
    assert text.endswith("  | a\x1b[30;42mb\x1b[0m")
    assert "⟦" not in text


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    batch = look(batch_of("a[b]"), tokenizer="bytes")
    assert "\x1b" not in str(batch)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" in repr(batch)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in str(batch)


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def test_what_a_message_says_is_no_html():
    hostile = "<script>x</script>[<img src=x onerror=y>]&amp;"
    batch = batch_of(hostile, metadata={"source": ["<script>"]})
    page = Tags(look(batch, tokenizer="bytes").html())
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img", "link", "iframe"})
    assert not any(name in attributes for _, attributes in page.tags for name in ("src", "href", "onerror"))
    assert "<script>x</script><img src=x onerror=y>&amp;" in page.text
    assert "row 0: <script>, " in page.text


def test_the_page_marks_what_is_trained():
    page = look(batch_of("a[b]"), tokenizer="bytes").html()
    assert page.startswith("<!DOCTYPE html>")
    assert 'a<span class="t" title="trained, weight 1">b</span>' in page


def test_a_notebook_shows_the_first_rows_of_a_batch():
    batch = batch_of(*["a[b]"] * 6)
    assert batch._repr_html_().count("<h4>") == 4
    assert "4 of 6 rows" in batch._repr_html_()


# Any batch


def test_tensors_are_shown_as_arrays_are():
    import torch

    array, tensor = batch_of("a[b]c"), batch_of("a[b]c", framework=torch.as_tensor)
    tensor.loss_mask = tensor.loss_mask.to(torch.bfloat16)
    assert shown(tensor) == shown(array)


def test_jax_arrays_are_shown_as_arrays_are():
    import jax.numpy as jnp

    assert shown(batch_of("a[b]c", framework=jnp.asarray)) == shown(batch_of("a[b]c"))


@pytest.mark.parametrize("settings", [{}, {"batch_size": bw.Batching(1, padding_side="left")}, {"packing": "best_fit"}])
def test_what_a_loader_hands_over_knows_its_tokenizer_and_its_roles(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path))
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    loader = bw.ConversationDataLoader(
        [{"messages": turns}, {"messages": [*turns, *turns]}],
        "bytes",
        256,
        "chatml",
        fields=bw.Fields(roles=True),
        delivery=bw.Delivery(check=False),
        **({"batch_size": 1} | settings),
    )
    lines = str(bw.look(loader.get_batch(), color=False)).split("\n")
    begin = lines.index("  user      | <|im_start|>user↵")
    assert lines[begin : begin + 4] == [
        "  user      | <|im_start|>user↵",
        "            | 2+2?<|im_end|>↵",
        "  assistant | <|im_start|>assistant↵",
        "            | ⟦4<|im_end|>⟧↵",
    ]


def test_a_sample_of_one_token_is_one_token():
    lines = shown(batch_of("ab[c]x", segment_ids=np.array([[1, 1, 1, 2]])))
    assert lines[4] == "  -- sample 2: 1 token, 0 trained"


def test_whole_documents_side_by_side_are_learned_but_for_their_first_tokens(tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(["abcd", "xyz"], name="words").prepare_step(bw.tokenize("bytes"))
    bw.bake(recipe, to=tmp_path / "a.store", workers=0, show_progress=False)
    loader = bw.PretrainDataLoader(
        tmp_path / "a.store", chunk_size=8, packing="best_fit", batch_size=1, framework="numpy"
    )
    assert str(bw.look(loader.get_batch(), color=False)).split("\n")[3:] == [
        "row 0: words, position 0, 7 tokens, 5 trained, 1 of padding",
        "  -- sample 1: 4 tokens, 3 trained",
        "  | a⟦bcd⟧",
        "  -- sample 2: 3 tokens, 2 trained",
        "  | x⟦yz⟧",
        "  | ... 1 of padding",
    ]


@pytest.mark.parametrize(
    ("batch", "settings", "parameter", "named"),
    [
        ([1, 2], {}, "batch", "list"),
        ({"input_ids": np.arange(3)}, {}, "batch", "1 dimensions"),
        ({"input_ids": np.ones((1, 2), int)}, {"rows": 0}, "rows", 0),
        ({"input_ids": np.ones((1, 2), int)}, {"width": 3}, "width", 20),
    ],
    ids=["no batch", "no rows", "rows", "width"],
)
def test_what_cannot_be_shown_is_refused(batch, settings, parameter, named):
    with refused(bw.SpecError, named, parameter=parameter):
        look(batch, **settings)


def test_characters_without_a_corpus_are_no_tokenizer():
    with refused(bw.TokenizerError, "'chars'", parameter="tokenizer"):
        look(batch_of("a[b]"), tokenizer="chars")
