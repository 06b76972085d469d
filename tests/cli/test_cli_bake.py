"""`batchwright bake`: a store from flags, or from a recipe file."""

from __future__ import annotations

import json
import os
import py_compile

import pytest

import batchwright as bw
from shared import sorted_texts


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "web").mkdir()
    (tmp_path / "src").mkdir()
    rows = [json.dumps({"content": f"page {n}"}) for n in range(5)]
    (tmp_path / "web" / "pages.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "src" / "one.py").write_text("print(1)\n")
    (tmp_path / "src" / "two.py").write_text("print(2)\n")
    return tmp_path


def test_a_folder_becomes_a_store(folder, process_succeeds):
    done = process_succeeds("bake web --text content --tokenizer bytes --workers 0 --to a.store", cwd=folder)
    assert "5 documents, 30 tokens" in done.out
    assert sorted_texts(bw.open_store(folder / "a.store")) == [f"page {n}" for n in range(5)]


def test_json_says_what_was_made_and_progress_stays_on_stderr(folder, process_succeeds):
    command = "bake web --text content --tokenizer bytes --workers 0 --to a.store --json"
    first, second = (process_succeeds(command, cwd=folder) for _ in range(2))
    assert first.json["num_documents"] == 5
    assert first.json["num_tokens"] == 30
    assert not first.json["was_up_to_date"]
    assert second.json == {**first.json, "was_up_to_date": True}
    assert "up to date" in second.err


def test_quiet_says_nothing_on_stderr(folder, succeeds):
    command = "bake web --text content --tokenizer bytes --workers 0 --to a.store --quiet"
    assert succeeds(command, cwd=folder).err == ""


def test_named_sources_have_formats_and_columns_of_their_own(folder, succeeds):
    command = "bake pages=web 'code=src/*.py' --format code=text --text pages=content"
    succeeds(command, "--tokenizer", "bytes", "--workers", "0", "--to", "a.store", cwd=folder)
    assert bw.open_store(folder / "a.store").names == ["pages", "code"]
    assert sorted_texts(bw.open_store(folder / "a.store")) == [
        *(f"page {n}" for n in range(5)),
        "print(1)\n",
        "print(2)\n",
    ]


def test_text_is_a_path_or_a_template_and_options_reach_the_format(folder, succeeds):
    (folder / "chat.jsonl").write_text('{"message": {"content": "hello"}, "title": "A=B"}\n')
    (folder / "table.csv").write_text("id;body\n1;one, two\n")
    bake = ("--tokenizer", "bytes", "--workers", "0", "--quiet")
    succeeds("bake", folder / "chat.jsonl", "--text", "message.content", *bake, "--to", folder / "path.store")
    assert sorted_texts(bw.open_store(folder / "path.store")) == ["hello"]
    template = r"{title} = {message.content}\n."
    succeeds("bake", folder / "chat.jsonl", "--text", template, *bake, "--to", folder / "template.store")
    assert sorted_texts(bw.open_store(folder / "template.store")) == ["A=B = hello\n."]
    sources = (f"a={folder / 'table.csv'}", f"b={folder / 'chat.jsonl'}", "--text", "a=body", "--text", "b=title")
    succeeds("bake", *sources, "--option", "a.delimiter=;", *bake, "--to", folder / "option.store")
    assert sorted_texts(bw.open_store(folder / "option.store")) == ["A=B", "one, two"]


def test_files_that_the_shell_lists_are_one_source_named_after_their_folder(folder, succeeds):
    command = "bake src/one.py src/two.py --format text --tokenizer bytes --workers 0 --to a.store"
    succeeds(command, cwd=folder)
    assert bw.open_store(folder / "a.store").names == ["src"]


def test_a_glob_among_several_paths_is_files_and_not_text(folder, succeeds):
    for name in ("my notes", "your notes"):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(name)
    command = "bake 'my notes' 'your n*/*' --tokenizer bytes --workers 0"
    succeeds(command, "--to", "a.store", cwd=folder)
    assert sorted_texts(bw.open_store(folder / "a.store")) == ["my notes", "your notes"]


def test_eos_holdout_seed_and_quantity_reach_the_recipe(folder, succeeds):
    command = "bake web --text content --tokenizer bytes --workers 0 --to a.store --json"
    made = succeeds(
        command, "--eos", "7", "--holdout", "0.5", "--seed", "3", "--quantity", "4", "--no-shuffle", cwd=folder
    ).json
    recipe = bw.open_store(folder / "a.store").manifest.recipe
    assert made["tokenizer"]["eos"] == 7
    assert (recipe["seed"], recipe["holdout"], recipe["shuffle"]) == (3, 0.5, False)
    assert made["num_documents"] == 4


def test_append_eos_takes_the_tokenizers_own(folder, succeeds):
    command = "bake web --text content --tokenizer bytes --append-eos --workers 0 --to a.store --json"
    assert succeeds(command, cwd=folder).json["tokenizer"]["eos"] == 256


def test_skipped_rows_are_counted(folder, succeeds):
    (folder / "web" / "pages.jsonl").write_text('{"content": "good"}\n{bad\n')
    command = "bake web --text content --tokenizer bytes --on-error skip --workers 0 --to a.store"
    made = succeeds(command, "--json", cwd=folder).json
    assert made["num_documents"] == 1
    assert made["report"]["errors"] == 1


def test_a_malformed_row_is_named_and_no_store_opens(folder, refuses, batchwright):
    (folder / "web" / "pages.jsonl").write_text('{"content": "good"}\n{bad\n')
    command = "bake web --text content --tokenizer bytes --workers 0 --to a.store --quiet"
    text = refuses(command, cwd=folder)
    assert "pages.jsonl" in text
    assert "2" in text
    assert batchwright("info a.store", cwd=folder).code == 2


RECIPE = """
import batchwright as bw
from beside import SHOUT

LIMIT = 2

def late(row):
    return int(row["content"].split()[1]) > LIMIT

def last(row):
    return int(row["content"].split()[1]) > 100_000

recipe = bw.DatasetRecipe(seed=1)
recipe.add_ingredient("web", "content", where=late, name="late")
many = [{"content": f"row {n}"} for n in range(100_002)]  # work for two workers
recipe.add_ingredient(many, "content", where=last, name="many")
recipe.prepare_step(lambda row: {**row, "content": row["content"].upper() + SHOUT})
recipe.prepare_step(bw.tokenize("bytes", text="content"))
"""


def test_a_recipe_file_is_run_and_its_functions_work_in_workers(folder, process_succeeds):
    (folder / "recipe.py").write_text(RECIPE)
    (folder / "beside.py").write_text("SHOUT = '!'")
    process_succeeds("bake recipe.py --to a.store --workers 2", cwd=folder)
    assert sorted_texts(bw.open_store(folder / "a.store")) == ["PAGE 3!", "PAGE 4!", "ROW 100001!"]
    assert "up to date" in process_succeeds("bake recipe.py --workers 0 --to a.store", cwd=folder).err


ROWS = """
import batchwright as bw

recipe = bw.DatasetRecipe().add_ingredient([{"n": 1}, {"n": 2}], name="one", where=lambda row: row["n"] > 1)
"""


def test_explain_says_what_would_happen_and_writes_nothing(tmp_path, succeeds):
    (tmp_path / "recipe.py").write_text(ROWS)
    assert succeeds("bake recipe.py --explain", cwd=tmp_path).out.splitlines() == [
        "DatasetRecipe, seed 0",
        "├─ one: 2 rows from memory, where <lambda>: 2 rows read, 1 not where, 1 kept",
        "└─ 1 row in the end",
    ]
    told = json.loads(succeeds("bake recipe.py --explain --json", cwd=tmp_path).out)
    assert told["instructions"][0]["counts"] == {"rows read": 2, "not where": 1, "kept": 1}
    assert told["num_rows"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.py"]


def test_a_recipe_file_is_run_as_it_is_now(tmp_path, succeeds):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(ROWS)
    py_compile.compile(str(recipe))
    compiled_at = recipe.stat().st_mtime_ns
    recipe.write_text(ROWS.replace("> 1", "> 0"))
    os.utime(recipe, ns=(compiled_at, compiled_at))  # an edit of the same size, in the same second
    assert "└─ 2 rows in the end" in succeeds("bake recipe.py --explain", cwd=tmp_path).out


def test_a_recipe_file_without_tokens_gives_a_buffer(tmp_path, succeeds):
    (tmp_path / "recipe.py").write_text(ROWS)
    done = succeeds("bake recipe.py --to rows --workers 0 --json", cwd=tmp_path)
    assert json.loads(done.out) == {"buffer": "rows", "num_rows": 1}
    with bw.DatasetBuffer(path=tmp_path / "rows", read_only=True) as buffer:
        assert buffer.to_pydict() == {"n": [2]}


def test_a_bake_to_nowhere_is_refused(tmp_path, refuses):
    (tmp_path / "recipe.py").write_text(ROWS)
    assert "--to corpus.store" in refuses("bake recipe.py", cwd=tmp_path)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("x = 1", "`recipe`"),
        ("recipe = 3", "`recipe`"),
        ("x = 1\nrecipe = 1 / 0", "ZeroDivisionError"),
        ("x = 1\nrecipe = (", "SyntaxError"),
        ("x = 1\nrecipe = '\udce9'", "SyntaxError"),  # a byte that is not UTF-8
        ("x = 1\nraise SystemExit(0)", "SystemExit"),
    ],
)
def test_a_recipe_file_that_gives_no_recipe_is_named(recipe, said, tmp_path, process_refuses):
    (tmp_path / "recipe.py").write_bytes(os.fsencode(recipe))
    text = process_refuses("bake recipe.py --workers 0 --to a.store", cwd=tmp_path)
    assert said in text
    assert "recipe.py" in text
    assert ("line       2" in text) == ("x = 1\n" in recipe)
    assert not (tmp_path / "a.store").exists()


def test_chat_makes_a_store_of_conversations_and_says_how(tmp_path, succeeds):
    turns = [[("human", f"question {n}"), ("bot", f"answer {n}")] for n in range(3)]
    lines = [json.dumps({"turns": [{"from": who, "value": text} for who, text in each]}) for each in turns]
    (tmp_path / "talk.jsonl").write_text("\n".join(lines))
    how = ["--conversation-format", "sharegpt", "--columns", "conversations=turns", "--roles", "bot=assistant"]
    command = ["bake", "talk.jsonl", "--tokenizer", "bytes", "--chat", "chatml", *how]
    done = succeeds(*command, "--to", "a.store", "--workers", "0", cwd=tmp_path)
    assert "template: chatml" in done.err
    assert "talk: sharegpt" in done.err
    assert sorted(sorted_texts(bw.open_store(tmp_path / "a.store"))) == [
        f"<|im_start|>user\nquestion {n}<|im_end|>\n<|im_start|>assistant\nanswer {n}<|im_end|>\n" for n in range(3)
    ]
    assert bw.open_store(tmp_path / "a.store").stream("talk").has_spans


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["web"], "--tokenizer bytes"),
        (["web", "--tokenizer", "no.json"], "no.json"),
        (["nowhere", "--tokenizer", "bytes"], "nowhere"),
        (["src", "--tokenizer", "bytes"], "'.py'"),
        (["web", "--tokenizer", "bytes", "--format", "cod=text"], "'cod'"),
        (["web", "--tokenizer", "bytes", "--quantity", "many"], "--quantity many"),
        (["web", "--tokenizer", "bytes", "--holdout", "2"], "holdout(2.0)"),
        (["web", "--tokenizer", "bytes", "--chat", "chatml", "--append-eos"], "append_eos"),
        (["web", "--tokenizer", "bytes", "--chat", "chatml", "--text", "body"], "--columns"),
        (["web", "--tokenizer", "bytes", "--roles", "bot=assistant"], "parameter  roles"),
        (["web", "--tokenizer", "bytes", "--chat", "chatmk"], "'chatmk'"),
        (["web", "--tokenizer", "bytes", "--chat"], "chat_template='chatml'"),
        (["web", "--tokenizer", "bytes", "--chat", "chatml", "--columns", "turns"], "'turns'"),
        (["recipe.py", "--chat", "chatml"], "--chat: "),
        (["recipe.py", "--seed", "1"], "--seed: "),
        (["recipe.py"], "recipe.py"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_baked_is_refused_and_nothing_is_written(arguments, said, folder, refuses):
    assert said in refuses("bake", *arguments, "--workers", "0", "--to", "a.store", "--quiet", cwd=folder)
    assert not (folder / "a.store" / "batchwright.json").exists()


@pytest.mark.parametrize("rest", [("--to", "a.store"), ("--explain",)])
def test_check_names_a_step_that_remembers_and_writes_nothing(folder, process_refuses, rest):
    (folder / "recipe.py").write_text(
        "import batchwright as bw\n"
        "seen = set()\n"
        "def once(row):\n"
        "    return None if row['text'] in seen else seen.add(row['text']) or row\n"
        "recipe = bw.DatasetRecipe().add_ingredient('web', 'content')\n"
        "recipe.prepare_step(once, version='1').prepare_step(bw.tokenize('bytes'))\n"
    )
    said = process_refuses("bake", "recipe.py", "--check", *rest, cwd=folder)
    assert "step 'once'" in said
    assert not (folder / "a.store").exists()
