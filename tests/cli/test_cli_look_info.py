"""`batchwright info` and `batchwright look`: what is in a store, and what a model will see."""

from __future__ import annotations

import json
import shutil

import pytest

import batchwright as bw
from batchwright.cli.output import lines_in_words

# info


def test_info_of_a_store_says_what_is_in_it(store, plan, succeeds):
    opened, text = bw.open_store(store), succeeds(f"info {store}").out
    assert f"store {store} ({opened.fingerprint})" in text
    assert f"{opened.num_rows:,} documents, {opened.num_tokens:,} tokens" in text
    for line in ("tokenizer  bytes, 257 ids", "source     web (train)", "source     code (val)", f"plans      {plan}"):
        assert line in text


def test_info_names_a_store_as_it_was_named(store, succeeds, monkeypatch):
    monkeypatch.chdir(store.parent)
    assert succeeds(f"info {store.name}").out.startswith(f"store {store.name} (")
    assert succeeds(f"info {store.name} --json").json["store"] == store.name


def test_info_as_json_is_the_same_in_numbers(store, plan, succeeds):
    opened, facts = bw.open_store(store), succeeds(f"info {store} --json").json
    assert facts["num_tokens"] == opened.num_tokens == sum(source["num_tokens"] for source in facts["sources"])
    assert facts["version"] == opened.version
    assert facts["plans"] == [plan]


def test_info_lists_all_files_when_asked(store, succeeds):
    few, all_files = (succeeds("info", store, *more, "--json").json for more in ([], ["--files"]))
    assert few["num_files"] == all_files["num_files"] == len(all_files["files"]) == 13
    assert len(few["files"]) == 5
    assert "and 8 more: --files lists all" in succeeds(f"info {store}").out


def test_info_says_what_was_dropped_and_why(tmp_path, succeeds):
    recipe = bw.DatasetRecipe().add_ingredient(["keep me", "no"], where=lambda row: "keep" in row["text"], name="words")
    bw.bake(recipe.prepare_step(bw.tokenize("bytes")), to=tmp_path / "a.store", workers=0, show_progress=False)
    assert "dropped    words: 1 not where (1 of 2 rows kept)" in succeeds(f"info {tmp_path / 'a.store'}").out


def test_info_of_conversations_says_template_end_of_turn_and_format(chat_store, succeeds):
    text = succeeds(f"info {chat_store}").out
    assert "template   chatml; turns end with '<|im_end|>'" in text
    assert "format     talk: messages" in text
    assert "documents end with" not in text


def test_info_of_a_plan_by_fingerprint_and_by_file_are_the_same(store, plan, succeeds):
    by_fingerprint = succeeds(f"info {store} {plan[:5]}").out
    assert by_fingerprint == succeeds(f"info {store / 'plans' / f'{plan}.json'}").out
    assert f"plan {plan}" in by_fingerprint


def test_info_of_something_else_is_refused(tmp_path, refuses):
    (tmp_path / "other.json").write_text("[1, 2]")
    assert "other.json" in refuses(f"info {tmp_path / 'other.json'}")


# look


def test_look_shows_documents_with_their_origin(store, succeeds):
    opened, text = bw.open_store(store), succeeds(f"look {store} --source notes --count 2").out
    for number in range(2):
        document = opened.stream("notes").document(number)
        assert f"(train): <memory>, row {document.row}\n" in text
        said = opened.decode(document.tokens)
        assert f"  | {said[0]}⟦{said[1:].removesuffix('<eos>')}" in text
    assert text.count("  -- document ") == text.count("row 0: notes, ") + text.count("row 1: notes, ") == 2


def test_look_goes_to_a_document_of_the_store(store, succeeds):
    shown = succeeds(f"look {store} --document 17 --count 1 --ids --json").json["documents"]
    document = bw.open_store(store)[17]
    assert [d["document"] for d in shown] == [17]
    assert shown[0]["ids"] == document.tokens.tolist()
    assert (shown[0]["file"], shown[0]["row"]) == (document.file, document.row)


def test_look_at_one_side_of_a_holdout(store, succeeds):
    shown = succeeds(f"look {store} --split val --count 100 --json").json["documents"]
    assert {document["split"] for document in shown} == {"val"}
    assert len(shown) == sum(s.num_documents for s in bw.open_store(store).manifest.streams if s.split == "val")


def test_look_shows_what_a_loader_hands_over(store, succeeds):
    loader = bw.PretrainDataLoader(
        shutil.copytree(store, store.parent / "look.store"), chunk_size=16, batch_size=3, seed=5, framework="numpy"
    )
    loader.seek(step=4)
    batch = loader.get_batch()
    command = f"look {store} --chunk-size 16 --batch-size 3 --seed 5 --step 4"
    shown = succeeds(command, "--json").json
    assert shown["plan"] == loader.plan.fingerprint
    assert [row["input_ids"] for row in shown["rows"]] == batch.input_ids.tolist()
    assert [row["source"] for row in shown["rows"]] == batch.metadata["source"]


def test_look_writes_no_plan(store, plan, succeeds):
    succeeds(f"look {store} --chunk-size 8 --batch-size 2")
    assert [file.stem for file in (store / "plans").iterdir()] == [plan]


def test_look_marks_where_documents_begin_and_which_source_they_are_from(store, plan, succeeds):
    text = succeeds(f"look {store} {plan} --step 2").out
    assert f"step 2 of plan {plan}\n12 of 12 rows, 192 tokens" in text
    for record in bw.trace(store, plan, step=2):
        if record.window_span[0] == 16:  # only the last target is from there
            continue
        start, stop = record.document_span
        assert f"{record.file}, row {record.row}{lines_in_words(record.lines)}, tokens {start}-{stop}" in text
        assert f": {record.source}, position {record.position}, epoch 0, 16 tokens" in text


def test_look_shows_ids_token_by_token(store, plan, succeeds):
    row = succeeds(f"look {store} {plan} --step 2 --json").json["rows"][0]
    first, second, *_ = row["input_ids"]
    text = succeeds(f"look {store} {plan} --step 2 --count 1 --ids").out
    assert f"  | {first}:{bytes([first]).decode()!r} ⟦{second}:" in text
    assert "and 11 more rows: --count 12" in text


def test_look_does_not_let_a_document_drive_the_terminal(tmp_path, succeeds):
    recipe = bw.DatasetRecipe().add_ingredient(["\x1b]0;owned\x07 clear \x1b[2J"], name="words")
    bw.bake(recipe.prepare_step(bw.tokenize("bytes")), to=tmp_path / "a.store", workers=0, show_progress=False)
    text = succeeds(f"look {tmp_path / 'a.store'}").out
    assert "\x1b" not in text
    assert "\\x1b⟦]0;owned\\x07 clear \\x1b[2J⟧" in text


def test_look_at_a_store_that_cannot_decode_shows_ids(tmp_path, succeeds):
    recipe = bw.DatasetRecipe().add_ingredient(["abc"], name="words")
    recipe.prepare_step(bw.tokenize(lambda text: [len(text)], vocab_size=9))
    bw.bake(recipe, to=tmp_path / "a.store", workers=0, show_progress=False)
    text = succeeds(f"look {tmp_path / 'a.store'}").out
    assert "note: ids, no text: the tokenizer was a function" in text
    assert "  | 3 \n" in text


def test_look_colors_trained_tokens_in_a_terminal_only(store, plan, succeeds, monkeypatch):
    marked = [succeeds(f"look {store} --count 1").out, succeeds(f"look {store} {plan} --count 1").out]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    colored = [succeeds(f"look {store} --count 1").out, succeeds(f"look {store} {plan} --count 1").out]
    for marks, colors in zip(marked, colored, strict=True):
        assert "⟦trained⟧" in marks
        assert "\x1b" not in marks
        assert colors.count("\x1b[30;42m") > 1  # the legend, and a token
        assert "⟦" not in colors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--document", "999"], "document 999"),
        (["--source", "wbe"], "'web'"),
        (["--weights", "web=1"], "--chunk-size 2048"),
        (["--step", "3"], "--chunk-size 2048"),
        (["--chunk-size", "16", "--document", "1"], "--document"),
        (["--chunk-size", "16", "--step", "-1"], "step -1"),
        (["--chunk-size", "1e9"], "chunk_size=1000000000"),
        (["--count", "0"], "--count: '0'"),
        (["--chars", "80"], "--chars 80"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_look_refuses_what_is_not_there(arguments, said, store, refuses):
    assert said in refuses("look", store, *arguments)


def test_look_refuses_settings_beside_a_plan(store, plan, refuses):
    assert "--seed" in refuses(f"look {store} {plan} --seed 1")


def test_a_state_file_serves_as_a_plan(store, plan, tmp_path, succeeds):
    state = {"position": 120, "plan": plan, "steps": [[0, 0, 12], [5, 60, 4]]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    shown = succeeds(f"look {store} {tmp_path / 'state.json'} --step 6 --json").json
    assert [row["position"] for row in shown["rows"]] == [64, 65, 66, 67]
