"""From rendered conversations to tokens with spans: the ids of the whole text, and no special token from a message."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from byte_level import LLAMA3_PATTERN, QWEN_PATTERN, SEEN, trained_json
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from batchwright.base.errors import TokenizerError
from batchwright.prepare.chat.encode import ConversationEncoder
from batchwright.prepare.chat.spans import END, ROLES, SPAN_DTYPE, TEMPLATE, TEXT, Encoded, Rendered, TextSpan
from batchwright.prepare.tokenizers import BytesTokenizer, CallableTokenizer, CharsTokenizer, JsonTokenizer
from refusals import refused

SPECIAL = ("<|start|>", "<|end|>", "<|end|>>")
USER, ASSISTANT = ROLES.index("user"), ROLES.index("assistant")


def rendered(*pieces: tuple[str, str, int]) -> Rendered:
    """A conversation from (text, role, part), each a turn of its own. What has a role and is TEXT was said."""
    spans, said, at = [], [], 0
    for turn, (text, role, part) in enumerate(pieces):
        if text:
            spans.append(TextSpan(at, at + len(text), ROLES.index(role), part, turn))
            if part == TEXT:
                said.append((at, at + len(text)))
        at += len(text)
    apart: list[tuple[int, int]] = []
    for start, stop in said:
        if apart and apart[-1][1] == start:
            start = apart.pop()[0]
        apart.append((start, stop))
    return Rendered("".join(text for text, _, _ in pieces), tuple(spans), tuple(apart))


def turn(role: str, text: str) -> list[tuple[str, str, int]]:
    return [(f"<|start|>{role}\n", role, TEMPLATE), (text, role, TEXT), ("<|end|>", role, END), ("\n", role, TEMPLATE)]


def exchange(said: str, answer: str) -> Rendered:
    return rendered(*turn("user", said), *turn("assistant", answer))


def with_added(canonical: str, *tokens: AddedToken) -> JsonTokenizer:
    backend = Tokenizer.from_str(canonical)
    backend.add_tokens(list(tokens))
    return JsonTokenizer(backend.to_str(), "made here")


KINDS = {
    "gpt2": lambda: JsonTokenizer(trained_json(added=SPECIAL), "gpt2"),
    "llama3": lambda: JsonTokenizer(trained_json(LLAMA3_PATTERN, added=SPECIAL), "llama3"),
    "qwen": lambda: with_added(
        trained_json(QWEN_PATTERN, nfc=True, added=SPECIAL), AddedToken("<think>", normalized=False), AddedToken("<t>")
    ),
}


@pytest.fixture(scope="module")
def encoders() -> dict[str, ConversationEncoder]:
    return {kind: ConversationEncoder(make()) for kind, make in KINDS.items()}


@pytest.fixture(scope="module")
def encoder(encoders) -> ConversationEncoder:
    return encoders["llama3"]


def by_whole_texts(encoder: ConversationEncoder) -> ConversationEncoder:
    """The same without the fast way."""
    slow = ConversationEncoder(encoder.tokenizer)
    slow.__dict__["_fast"] = None
    return slow


def texts_of(encoder: ConversationEncoder, encoded: Encoded) -> list[tuple[str, str, int]]:
    """(text, role, part) of each span, decoded from its tokens."""
    stops = encoded.spans["stop"].tolist()
    return [
        (encoder.tokenizer.decode(encoded.tokens[start:stop]), ROLES[span["role"]], int(span["part"]))
        for start, stop, span in zip([0, *stops[:-1]], stops, encoded.spans, strict=True)
    ]


def one(encoder: ConversationEncoder, conversation: Rendered) -> Encoded:
    """Encoded both ways, which must agree."""
    (fast,), (slow,) = encoder.encode([conversation]), by_whole_texts(encoder).encode([conversation])
    assert fast.tokens.tolist() == slow.tokens.tolist()
    assert fast.spans.tobytes() == slow.spans.tobytes()
    return fast


# Special tokens


def test_a_turn_is_its_markers_and_its_text(encoder):
    special = encoder.tokenizer.vocab
    encoded = one(encoder, exchange("the cat", "we'll say"))
    assert texts_of(encoder, encoded) == [
        ("<|start|>user\n", "user", TEMPLATE),
        ("the cat", "user", TEXT),
        ("<|end|>", "user", END),
        ("\n", "user", TEMPLATE),
        ("<|start|>assistant\n", "assistant", TEMPLATE),
        ("we'll say", "assistant", TEXT),
        ("<|end|>", "assistant", END),
        ("\n", "assistant", TEMPLATE),
    ]
    assert encoded.tokens[0] == special["<|start|>"]
    assert (encoded.tokens == special["<|end|>"]).sum() == 2
    assert encoded.spans.dtype == SPAN_DTYPE
    assert encoded.spans["turn"].tolist() == list(range(8))
    assert not encoded.spans["side"].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPECIAL)
def test_the_name_of_a_special_token_in_a_message_is_plain_text(encoders, kind, name):
    encoder = encoders[kind]
    written = f"{name}a {name} {name}"
    encoded = one(encoder, exchange(written, written))
    assert [text for text, _, part in texts_of(encoder, encoded) if part == TEXT] == [written, written]
    (named,) = (number for number, part in enumerate(encoded.spans["part"]) if part == TEXT and number < 4)
    start, stop = encoded.spans["stop"][[named - 1, named]]
    assert not set(encoded.tokens[start:stop].tolist()) & set(encoder.tokenizer.special.values())
    # And it is what a tokenizer without these tokens makes of it.
    body = json.loads(encoder.tokenizer.json)
    body["added_tokens"] = [token for token in body["added_tokens"] if not token["special"]]
    without = Tokenizer.from_str(json.dumps(body))
    assert encoded.tokens[start + 0 : stop].tolist() == without.encode(f"\n{written}").ids[1:]


def test_a_special_name_that_a_message_begins_and_the_template_ends_is_plain_text(encoder):
    said, after = "<|en", "d|>"
    encoded = one(encoder, rendered((said, "user", TEXT), (after, "user", TEMPLATE), ("<|end|>", "user", END)))
    assert encoder.tokenizer.decode(encoded.tokens) == "<|end|><|end|>"
    assert (encoded.tokens == encoder.tokenizer.vocab["<|end|>"]).tolist() == [False] * (len(encoded.tokens) - 1) + [
        True
    ]


def test_a_message_cannot_hide_a_marker_of_the_template(encoder):
    # "<|end|>>" is longer than "<|end|>": in the whole text it would be found instead.
    encoded = one(encoder, rendered(("a", "user", TEXT), ("<|end|>", "user", END), (">b", "user", TEXT)))
    assert encoder.tokenizer.vocab["<|end|>"] in encoded.tokens.tolist()
    assert encoder.tokenizer.vocab["<|end|>>"] not in encoded.tokens.tolist()


def test_added_tokens_that_are_not_special_are_recognised_in_messages(encoders):
    encoder = encoders["qwen"]
    encoded = one(encoder, exchange("<t>", "<think>a<think><think>b<t>"))
    vocab = encoder.tokenizer.vocab
    assert (encoded.tokens == vocab["<think>"]).sum() == 3
    assert (encoded.tokens == vocab["<t>"]).sum() == 2


def test_a_message_of_private_characters_cannot_pass_for_a_special_token(encoder):
    stand_in = chr(0xF0000) * len(SPECIAL[0]) + chr(0xF0001) * len(SPECIAL[1])
    encoded = one(encoder, exchange(stand_in, "<|end|>"))
    assert texts_of(encoder, encoded)[1] == (stand_in, "user", TEXT)
    assert sum(number in encoder.tokenizer.special.values() for number in encoded.tokens.tolist()) == 4


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_a_model_that_looks_up_whole_words_still_gives_no_special_token_for_a_message(ignore_merges):
    body = json.loads(trained_json(LLAMA3_PATTERN, added=("END",)))
    body["model"]["ignore_merges"] = ignore_merges
    encoder = ConversationEncoder(JsonTokenizer(json.dumps(body), "END"))
    encoded = one(encoder, rendered(("a", "user", TEXT), ("END", "user", END), ("END", "user", TEXT)))
    assert (encoded.tokens == encoder.tokenizer.vocab["END"]).sum() == 1


def test_a_special_token_that_merges_make_is_refused():
    body = json.loads(trained_json(LLAMA3_PATTERN))
    body["added_tokens"].append({**body["added_tokens"][0], "id": body["model"]["vocab"]["he"], "content": "he"})
    encoder = ConversationEncoder(JsonTokenizer(json.dumps(body), "he"))
    with refused(TokenizerError, "special tokens", number=1):
        encoder.encode([exchange("a", "b"), exchange("hex", "b")])


# Borders


def test_a_token_across_a_border_belongs_to_the_message(encoder):
    # " cat" is one token, whose blank is the template's, and so are three line ends.
    encoded = one(encoder, rendered(("a: ", "template", TEMPLATE), ("cat", "user", TEXT), ("\n", "user", TEMPLATE)))
    assert texts_of(encoder, encoded) == [
        ("a:", "template", TEMPLATE),
        (" cat", "user", TEXT),
        ("\n", "user", TEMPLATE),
    ]
    encoded = one(encoder, rendered(("cat", "assistant", TEXT), ("\n", "assistant", END), ("\n\n", "user", TEMPLATE)))
    assert texts_of(encoder, encoded) == [("cat", "assistant", TEXT), ("\n\n\n", "assistant", END)]


@pytest.mark.parametrize(
    ("first", "second", "owner"),
    [
        (("user", TEXT), ("assistant", TEXT), 1),
        (("assistant", TEXT), ("user", TEXT), 0),
        (("assistant", TEXT), ("assistant", END), 0),
        (("assistant", END), ("user", TEXT), 0),
        (("user", TEXT), ("user", END), 0),
        (("user", TEXT), ("system", TEXT), 1),
        (("assistant", TEMPLATE), ("user", END), 1),
        (("user", END), ("assistant", TEMPLATE), 0),
    ],
)
def test_between_two_spans_a_token_belongs_to_what_must_be_learned(encoder, first, second, owner):
    encoded = one(encoder, rendered(("Th", *first), ("e", *second)))
    assert len(encoded.tokens) == 1
    assert encoded.spans[["turn", "stop"]].tolist() == [(owner, 1)]


def test_a_span_inside_of_a_token_vanishes(encoder):
    pieces = [("T", "template", TEMPLATE), ("h", "user", TEXT), ("e", "template", TEMPLATE), (" cat", "user", TEXT)]
    encoded = one(encoder, rendered(*pieces))
    assert texts_of(encoder, encoded) == [("The", "user", TEXT), (" cat", "user", TEXT)]


def test_all_tokens_of_one_character_belong_to_its_span(encoder):
    encoded = one(encoder, rendered(("a\U0001f9d9", "user", TEXT), ("\U0001f9d9b", "assistant", TEXT)))
    assert len(encoded.tokens) > 6
    assert texts_of(encoder, encoded) == [("a\U0001f9d9", "user", TEXT), ("\U0001f9d9b", "assistant", TEXT)]


def test_weights_and_turns_come_through(encoder):
    spans = (TextSpan(0, 3, USER, TEXT, 4, 0.5), TextSpan(3, 7, ASSISTANT, TEXT, 5))
    encoded = one(encoder, Rendered("the cat", spans, ((0, 7),)))
    assert encoded.spans["turn"].tolist() == [4, 5]
    np.testing.assert_array_equal(encoded.spans["weight"], np.array([0.5, np.nan], np.float32))


def test_nothing_is_no_tokens(encoder):
    assert encoder.encode([]) == []
    encoded = one(encoder, Rendered("", (), ()))
    assert (len(encoded.tokens), len(encoded.spans)) == (0, 0)
    both = encoder.encode([Rendered("", (), ()), exchange("a", ""), Rendered("", (), ())])
    assert [len(encoded.spans) for encoded in both] == [0, 7, 0]


# Any text

PARTS = st.sampled_from([TEMPLATE, TEXT, END])
WORDS = st.sampled_from(
    [*SPECIAL, "<think>", "<t>", "<|en", "d|>", "the", " ", "\n\n", "e\u0301", "\u0338", "👍🏽", *SEEN]
)
PIECES = st.lists(
    st.tuples(st.lists(st.text(max_size=4) | WORDS, max_size=4).map("".join), st.sampled_from(ROLES), PARTS), max_size=6
)


def expected_spans(starts: Sequence[int], stops: Sequence[int], conversation: Rendered) -> list[int]:
    """The turn of each token, the slow way: of all spans that it overlaps, the one that comes first in this order."""

    def order(span: TextSpan) -> tuple[bool, int, int]:
        return (span.role == ASSISTANT and span.part != TEMPLATE, (0, 2, 1)[span.part], span.start)

    return [
        max((span for span in conversation.spans if span.start < stop and start < span.stop), key=order).turn
        for start, stop in zip(starts, stops, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
@given(many=st.lists(PIECES, min_size=1, max_size=3))
@example(many=[[("<t>", "user", TEXT), ("\u0338", "user", TEXT)], [("é" * 9, "user", TEXT)]])
def test_the_fast_way_gives_the_tokens_and_spans_of_whole_texts(encoders, kind, many):
    encoder, conversations = encoders[kind], [rendered(*pieces) for pieces in many]
    fast, slow = encoder.encode(conversations), by_whole_texts(encoder).encode(conversations)
    for conversation, a, b in zip(conversations, fast, slow, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.spans.tobytes() == b.spans.tobytes()
        assert a.spans["stop"].tolist() == sorted(set(a.spans["stop"].tolist()) - {0})
        assert a.spans["stop"][-1:].tolist() == [len(a.tokens)] * bool(conversation.text)
    assert encoder.tokenizer.encoder == "tiktoken, proved identical"


@pytest.mark.parametrize("kind", KINDS)
@given(pieces=PIECES)
def test_ids_and_spans_are_those_of_tokenizers_offsets(encoders, kind, pieces):
    encoder, conversation = encoders[kind], rendered(*pieces)
    all_template = Rendered(conversation.text, conversation.spans, ())  # then special tokens count everywhere
    (encoded,) = encoder.encode([all_template])
    theirs = encoder.tokenizer.backend.encode(conversation.text, add_special_tokens=False)
    assert encoded.tokens.tolist() == theirs.ids
    turns = np.repeat(encoded.spans["turn"], np.diff(encoded.spans["stop"], prepend=0)).tolist()
    assert turns == expected_spans(*zip(*theirs.offsets, strict=True), conversation) if theirs.ids else not turns


def test_the_fast_way_is_taken(encoder, monkeypatch):
    no_tokens = [np.empty(0, np.uint32)]
    slow = lambda texts: pytest.fail("slow") if any(texts) else no_tokens * len(texts)
    monkeypatch.setattr(encoder.tokenizer.fast, "_slow", slow)
    monkeypatch.setattr(encoder, "_encode_whole", lambda rendered, numbers: pytest.fail("slow") if rendered else [])
    encoder.tokenizer.fast._sample = [0, 0]
    assert len(encoder.encode([exchange("été 👍🏽", "we'll"), exchange("a", "b")])) == 2


# Other tokenizers


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(SEEN, trainer)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def prepending() -> Tokenizer:
    tokenizer = metaspace("never")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    return tokenizer


def unigram() -> Tokenizer:
    words = [
        "<unk>",
        *SPECIAL,
        "▁",
        "a",
        "b",
        "the",
        "▁the",
        "▁cat",
        "<",
        "|",
        ">",
        "end",
        "start",
        "\n",
        "user",
        "assistant",
    ]
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    return tokenizer


def word_level() -> Tokenizer:
    words = ["[UNK]", *SPECIAL, "the", "cat", "user", "assistant", "a"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[UNK]", *SPECIAL])
    return tokenizer


def lowercase() -> Tokenizer:
    tokenizer = word_level()
    tokenizer.normalizer = normalizers.BertNormalizer()
    return tokenizer


def stripping() -> Tokenizer:
    tokenizer = Tokenizer.from_str(trained_json(added=()))
    tokenizer.add_special_tokens(
        [AddedToken("<|start|>", lstrip=True), AddedToken("<|end|>", lstrip=True, rstrip=True)]
    )
    return tokenizer


OTHERS = {
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "prepend": prepending,
    "unigram": unigram,
    "words": word_level,
    "lowercase": lowercase,
    "strips blanks": stripping,
    "space before": lambda: Tokenizer.from_str(trained_json(added=SPECIAL, space=True)),
    "two splits": lambda: _two_splits(),
}


def _two_splits() -> Tokenizer:
    tokenizer = Tokenizer.from_str(trained_json(LLAMA3_PATTERN, added=SPECIAL))
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    return tokenizer


@pytest.mark.parametrize("kind", OTHERS)
def test_the_ids_of_other_tokenizers_are_those_of_the_whole_text(kind):
    encoder = ConversationEncoder(JsonTokenizer(OTHERS[kind]().to_str(), kind))
    conversation = exchange(" the cat  12", "a the\n b")
    (encoded,) = encoder.encode([conversation])
    theirs = encoder.tokenizer.backend.encode(conversation.text, add_special_tokens=False)
    assert encoded.tokens.tolist() == theirs.ids
    turns = np.repeat(encoded.spans["turn"], np.diff(encoded.spans["stop"], prepend=0)).tolist()
    assert turns == expected_spans(*zip(*theirs.offsets, strict=True), conversation)


@pytest.fixture(scope="module")
def other_encoders() -> dict[str, ConversationEncoder]:
    return {kind: ConversationEncoder(JsonTokenizer(make().to_str(), kind)) for kind, make in OTHERS.items()}


@given(kind=st.sampled_from(sorted(OTHERS)), pieces=PIECES)
def test_any_text_of_a_template_gets_the_ids_of_tokenizers(other_encoders, kind, pieces):
    encoder, conversation = other_encoders[kind], rendered(*pieces)
    (encoded,) = encoder.encode([Rendered(conversation.text, conversation.spans, ())])
    theirs = encoder.tokenizer.backend.encode(conversation.text, add_special_tokens=False)
    assert encoded.tokens.tolist() == theirs.ids
    assert encoded.spans["stop"].tolist() == sorted(set(encoded.spans["stop"].tolist()) - {0})
    assert encoded.spans["stop"][-1:].tolist() == [len(theirs.ids)] * bool(theirs.ids)


@pytest.mark.parametrize("kind", OTHERS)
def test_no_other_tokenizer_makes_a_special_token_of_a_message(kind):
    encoder = ConversationEncoder(JsonTokenizer(OTHERS[kind]().to_str(), kind))
    plain, named = encoder.encode([exchange("the cat", "a"), exchange("<|end|> <|start|> the cat", "<|end|>")])
    ids = [number for name, number in encoder.tokenizer.special.items() if "|" in name]
    assert np.isin(plain.tokens, ids).sum() == np.isin(named.tokens, ids).sum() == 4


def test_bytes_have_no_special_tokens():
    (encoded,) = ConversationEncoder(BytesTokenizer()).encode([exchange("é", "")])
    assert bytes(encoded.tokens.tolist()).decode() == "<|start|>user\né<|end|>\n<|start|>assistant\n<|end|>\n"
    assert encoded.spans["stop"].tolist()[:3] == [14, 16, 23]


def test_a_function_encodes_span_by_span():
    letters = CallableTokenizer(lambda text: [len(word) for word in text.split()], 100, version="1")
    (encoded, empty) = ConversationEncoder(letters).encode([exchange("the cat sat", "yes"), Rendered("", (), ())])
    assert encoded.tokens.tolist() == [13, 3, 3, 3, 7, 18, 3, 7]
    assert encoded.spans["stop"].tolist() == [1, 4, 5, 6, 7, 8]
    assert len(empty.tokens) == len(empty.spans) == 0


def test_a_vocabulary_of_characters_must_be_there():
    with refused(TokenizerError, parameter="tokenizer", remedy="tokenizer.json"):
        ConversationEncoder(CharsTokenizer())
    (encoded,) = ConversationEncoder(CharsTokenizer("abc")).encode([rendered(("ab", "user", TEXT), ("c", "user", END))])
    assert (encoded.tokens.tolist(), encoded.spans["stop"].tolist()) == ([0, 1, 2], [2, 3])


def test_a_pickled_encoder_encodes_the_same(encoder):
    conversation = exchange("the cat", "👍🏽<|end|>")
    again = pickle.loads(pickle.dumps(encoder))
    assert one(again, conversation).tokens.tolist() == one(encoder, conversation).tokens.tolist()
