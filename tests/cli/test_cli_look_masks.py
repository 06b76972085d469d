"""`batchwright look` over conversations and packed rows: which tokens are trained, in the terminal and as a page."""

from __future__ import annotations

import pytest

import batchwright as bw
from shared import bake_source

SHORT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
LONG = [{"role": "user", "content": "Hi <script>"}, {"role": "assistant", "content": "Hello\nyou"}]
SETTINGS = ("--max-length", "160", "--batch-size", "1", "--shuffle", "none")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return bake_source(
        tmp_path_factory.mktemp("chats") / "chats.store",
        [{"messages": SHORT}, {"messages": LONG}],
        bw.chat("bytes", "chatml"),
        name="chats",
        shuffle=False,
    ).path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    bad = [SHORT[0], {"role": "assistant", "content": "five"}]
    return bake_source(
        tmp_path_factory.mktemp("pairs") / "pairs.store",
        [{"chosen": SHORT, "rejected": bad}],
        bw.chat("bytes", "chatml"),
        name="chats",
        shuffle=False,
    ).path


def test_conversations_are_shown_with_what_is_trained(chats, succeeds):
    assert succeeds(f"look {chats} --count 1").out.split("\n")[3:-1] == [
        "row 0: chats, 66 tokens, 11 trained",
        "  -- document 0 (train): <memory>, row 0",
        "  user      | <|im_start|>user↵",
        "            | 2+2?<|im_end|>↵",
        "  assistant | <|im_start|>assistant↵",
        "            | ⟦4<|im_end|>⟧↵",
    ]


def test_another_loss_marks_other_tokens(chats, succeeds):
    text = succeeds(f"look {chats} --document 1 --loss", "user, without end of turn").out
    assert "  -- document 1 (train): <memory>, row 1\n" in text
    assert "⟦Hi <script>⟧<|im_end|>↵" in text
    assert text.count("⟦") == 2  # and the legend


def test_conversations_as_json_say_what_each_token_is(chats, succeeds):
    (document,) = succeeds(f"look {chats} --count 1 --ids --json").json["documents"]
    trained = [token for token, weight in zip(document["ids"], document["loss_mask"], strict=True) if weight]
    assert bytes(trained).decode() == "4<|im_end|>"
    assert document["num_trained"] == len(trained) == 11
    assert set(document["role"]) == {"user", "assistant"}


def test_the_sides_of_a_pair_are_two_rows(pairs, succeeds):
    text = succeeds(f"look {pairs}").out
    assert text.count("  -- document 0 (train): <memory>, row 0\n") == 2
    chosen, rejected = text.partition("\nrow 1: ")[::2]
    assert "row 0: chats, chosen, " in chosen
    assert "⟦4<|im_end|>⟧" in chosen
    assert rejected.startswith("chats, rejected, ")
    assert "⟦five<|im_end|>⟧" in rejected


def test_a_step_of_a_packed_plan_shows_samples_and_their_origins(chats, succeeds):
    lines = succeeds("look", chats, *SETTINGS, "--packing", "best_fit").out.split("\n")
    assert lines[0].startswith("step 0 of plan ")
    assert lines[1].startswith("1 of 1 rows, 160 tokens, ")
    assert [line for line in lines if line.startswith("  --")] == [
        "  -- sample 1, <memory>, row 1, tokens 0-81: 81 tokens, 19 trained",
        "  -- sample 2, <memory>, row 0, tokens 0-66: 66 tokens, 11 trained",
    ]
    assert "            | ⟦you<|im_end|>⟧↵" in lines


def test_a_step_of_a_plan_is_what_a_loader_hands_over(chats, succeeds):
    settings = {"max_length": 160, "batch_size": 2, "seed": 5, "framework": "numpy"}
    loader = bw.ConversationDataLoader(chats, **settings, delivery=bw.Delivery(check=False))
    batch = loader.get_batch()
    shown = succeeds(f"look {chats} {loader.plan.fingerprint} --batch-size 2 --json").json["rows"]
    for name in ("input_ids", "attention_mask", "targets", "loss_mask"):
        assert [row[name] for row in shown] == getattr(batch, name).tolist()


def test_a_step_of_pairs_has_two_rows_for_each(pairs, succeeds):
    text = succeeds("look", pairs, *SETTINGS).out
    assert "row 0: chats, position 0, epoch 0, chosen, 66 tokens, 11 trained, 3 of padding\n" in text
    assert "row 1: chats, position 0, epoch 0, rejected, 69 tokens, 14 trained\n" in text


def test_rows_that_are_not_shown_are_counted(chats, succeeds):
    text = succeeds(f"look {chats} --max-length 160 --batch-size 2 --count 1").out
    assert text.endswith("and 1 more row: --count 2\n")
    assert text.count("\nrow ") == 1


def test_a_page_is_written_in_place_of_text(chats, tmp_path, succeeds):
    page = tmp_path / "masks.html"
    out = succeeds(f"look {chats} --html {page}").out
    assert out == f"{page}: 2 of 2 rows, 162 tokens, 18.5 % trained, 9.3 % padding\n"
    assert "Hi &lt;script&gt;" in page.read_text()
    assert "<script>" not in page.read_text()
    assert list(tmp_path.iterdir()) == [page]


def test_a_page_of_text_marks_all_that_is_learned(store, plan, tmp_path, succeeds):
    page = tmp_path / "step.html"
    succeeds(f"look {store} {plan} --step 2 --count 3 --html {page}")
    assert page.read_text().count("<h4>") == 3
    assert page.read_text().count("16 tokens, 16 trained") == 3
    succeeds(f"look {store} --document 17 --count 1 --html {page}")
    assert page.read_text().count("<h4>") == 1
    assert "document 17 (train): " in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--html", "gone/masks.html"], "gone/masks.html"),
        (["--html", "."], "parameter  html"),
        (["--html", "a.html", "--json"], "--json"),
        (["--loss", "nobody"], "loss='nobody'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_look_cannot_write_or_mark_is_refused(arguments, said, chats, tmp_path, refuses):
    assert said in refuses("look", chats, *arguments, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_loss_means_nothing_for_text(store, refuses):
    assert "--loss" in refuses(f"look {store} --loss all")
