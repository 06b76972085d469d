"""Workers change how fast a bake is, and nothing else: not its bytes, its errors, or how a script must be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import batchwright as bw
from batchwright.sources import units
from harness import is_running, wait_for
from refusals import refused
from shared import slow


def many_sided_recipe(raw: Path) -> bw.DatasetRecipe:
    """Every feature that has a choice to make: where, quantity, steps, holdout, several sources of several kinds."""
    smallest = 5
    recipe = bw.DatasetRecipe(seed=11)
    recipe.add_ingredient(raw / "web", name="web", where=lambda row: row["number"] % 10 >= smallest, quantity=0.7)
    recipe.add_ingredient(raw / "code", name="code", quantity=7)
    recipe.add_ingredient([{"text": f"note {n}", "tags": ["x"]} for n in range(30)], name="notes")
    recipe.prepare_step(lambda row: {**row, "text": row["text"].upper()} if "3" not in row["text"] else None)
    return recipe.holdout(0.3)


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize(("tokenizer", "numbers"), [("bytes", (3,)), ("chars", (2,)), slow("bytes", (1, 2))])
def test_every_file_is_the_same_for_any_number_of_workers(raw, tmp_path, quiet_bake, version_files, tokenizer, numbers):
    recipe = many_sided_recipe(raw).prepare_step(bw.tokenize(tokenizer, append_eos=True))
    alone = version_files(quiet_bake(recipe, tmp_path / "0.store", workers=0).path)
    assert len(alone) == 6 + 7  # a shard for each source and split; four tables, tokenizer, inputs, manifest
    for workers in numbers:
        store = quiet_bake(recipe, tmp_path / f"{workers}.store", workers=workers)
        assert version_files(store.path) == alone


@pytest.mark.usefixtures("small_units")
def test_the_work_is_really_done_by_other_processes(tmp_path, quiet_bake):
    pids = tmp_path / "pids"
    pids.mkdir()

    def mark(row):
        (pids / str(os.getpid())).touch()
        return row

    recipe = bw.DatasetRecipe().add_ingredient([f"document {n}" for n in range(80)])
    recipe.prepare_step(mark, version="1").prepare_step(bw.tokenize("bytes"))
    quiet_bake(recipe, tmp_path / "a.store", workers=2)
    used = {int(path.name) for path in pids.iterdir()}
    assert len(used) == 2
    assert os.getpid() not in used
    assert not any(map(is_running, used))


def test_a_step_that_changes_its_rows_does_not_change_the_callers(tmp_path, quiet_bake):
    rows = [{"text": "one", "tags": ["a"]}, {"text": "two", "tags": []}]

    def append(row):
        row["tags"].append("seen")
        row["text"] += str(len(row["tags"]))
        return row

    # "chars" reads every row twice: a row that a step changed the first time would come out otherwise the second.
    recipe = bw.DatasetRecipe().add_ingredient(rows, quantity=2)
    store = quiet_bake(recipe.prepare_step(append).prepare_step(bw.tokenize("chars")), tmp_path / "a.store")
    assert sorted(store.decode(row.tokens) for row in store.rows()) == ["one2", "two1"]
    assert rows == [{"text": "one", "tags": ["a"]}, {"text": "two", "tags": []}]


# What a user pastes: no guard, functions and a format of the script's own, workers.
PASTED = """
    import sys
    import batchwright as bw
    from batchwright.sources import units
    units.UNIT_BYTES = 150

    @bw.register_format("shout", extensions=(".shout",), by_line=True)
    def parse_shout(line):
        return {"text": line.decode().upper(), "number": COUNT}

    COUNT = 7
    class Box:
        def __init__(self, limit): self.limit = limit
        def __call__(self, row): return row if len(row["text"]) < self.limit else None

    def helper(text): return text + "!"
    def step(row): return {**row, "text": helper(row["text"])}

    raw, to, workers = sys.argv[1:]
    recipe = bw.DatasetRecipe().add_ingredient(raw, name="web", where=lambda row: row["number"] == COUNT)
    recipe.prepare_step(step).prepare_step(Box(1000)).prepare_step(bw.tokenize("bytes"))
    print(bw.bake(recipe, to, workers=int(workers)).num_rows)
"""


@pytest.fixture
def shouts(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / f"{name}.shout").write_text("".join(f"line {n} of {name}\n" for n in range(30)))
    return tmp_path / "in"


@pytest.mark.parametrize("how", ["python -", "script without a guard", "script under spawn"])
def test_workers_need_no_main_guard_and_functions_travel_by_value(shouts, tmp_path, run_script, version_files, how):
    code = PASTED
    if how == "script under spawn":
        code = "\n    import multiprocessing\n    multiprocessing.set_start_method('spawn')" + code
    alone = run_script(code, shouts, tmp_path / "alone.store", 0, cwd=tmp_path)
    done = run_script(code, shouts, tmp_path / "two.store", 2, cwd=tmp_path, from_stdin=how == "python -")
    assert done.stdout == alone.stdout == "90\n"
    assert version_files(tmp_path / "two.store") == version_files(tmp_path / "alone.store")
    assert "LINE 0 OF A!" in [bw.open_store(tmp_path / "two.store").decode(r.tokens) for r in _rows(tmp_path)]


def _rows(folder: Path):
    return bw.open_store(folder / "two.store").rows()


def test_workers_do_not_import_from_the_folder_they_start_in(shouts, tmp_path, run_script):
    # The script lies elsewhere, so its own process does not see this module; a worker must not either.
    (tmp_path / "cloudpickle.py").write_text("raise RuntimeError('imported by mistake')")
    assert run_script(PASTED, shouts, tmp_path / "a.store", 2, cwd=tmp_path).stdout == "90\n"


def test_progress_is_plain_lines_where_there_is_no_terminal(shouts, tmp_path, run_script):
    code = "import batchwright.base.progress\n    batchwright.base.progress._SECONDS_BETWEEN_LINES = 0.0" + PASTED
    lines = run_script("    " + code, shouts, tmp_path / "a.store", 0, cwd=tmp_path).stderr.splitlines()
    assert lines[0].startswith(f"baking {tmp_path / 'a.store'}: ")
    assert "100 %" in lines[-2]
    assert "90 documents" in lines[-2]
    assert lines[-1].startswith(f"{tmp_path / 'a.store'}: 90 documents, ")
    assert not any("\r" in line or "\x1b" in line for line in lines)


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_user_code_names_file_line_and_code(raw, tmp_path, quiet_bake, workers):
    recipe = bw.DatasetRecipe().add_ingredient(raw / "web" / "a.jsonl", where=lambda row: 1 / (row["number"] - 23))
    file = raw / "web" / "a.jsonl"
    with refused(bw.WorkerError, "where= of 'a'", "ZeroDivisionError: division by zero", file=file, line=24) as caught:
        quiet_bake(recipe.prepare_step(bw.tokenize("bytes")), tmp_path / "a.store", workers=workers)
    assert caught.value.where["at"].startswith(__file__)


@pytest.mark.usefixtures("small_units")
def test_a_worker_that_dies_is_named_with_what_it_worked_on(raw, tmp_path, quiet_bake):
    recipe = bw.DatasetRecipe().add_ingredient(raw / "web" / "a.jsonl")
    recipe.prepare_step(lambda row: os.kill(os.getpid(), signal.SIGKILL)).prepare_step(bw.tokenize("bytes"))
    with refused(bw.WorkerError, "pid", "signal 9", working_on=raw / "web" / "a.jsonl"):
        quiet_bake(recipe, tmp_path / "a.store", workers=2)
    with refused(bw.StoreError, folder=tmp_path / "a.store", remedy="bake"):
        bw.open_store(tmp_path / "a.store")


@pytest.mark.usefixtures("small_units")
def test_what_cannot_travel_is_refused_with_a_remedy(tmp_path, quiet_bake):
    lock = threading.Lock()

    def step(row):
        with lock:
            return row

    recipe = bw.DatasetRecipe().add_ingredient([f"document {n}" for n in range(40)])
    recipe.prepare_step(step, version="1").prepare_step(bw.tokenize("bytes"))
    with refused(bw.SpecError, "lock", parameter="workers", remedy="workers=0"):
        quiet_bake(recipe, tmp_path / "a.store", workers=2)
    assert quiet_bake(recipe, tmp_path / "a.store", workers=0).num_rows == 40


def bake_and_stand_still(pids: Path, to: Path) -> None:
    """Two workers, each of which says that it is there, and does not come to an end."""
    units.cut_rows.__defaults__ = (1,)

    def wait(row):
        (pids / str(os.getpid())).touch()
        time.sleep(600)

    recipe = bw.DatasetRecipe().add_ingredient(["a b", "c d", "e f"]).prepare_step(wait, version="1")
    bw.bake(recipe.prepare_step(bw.tokenize("bytes")), to, workers=2)


@pytest.mark.parametrize("portable", ["0", "1"])
def test_workers_die_with_a_parent_that_is_killed(tmp_path, processes, monkeypatch, portable):
    monkeypatch.setenv("BATCHWRIGHT_PORTABLE", portable)
    pids = tmp_path / "pids"
    pids.mkdir()
    processes.start("parent", bake_and_stand_still, pids, tmp_path / "a.store")
    processes.wait_for("both workers", lambda: len(list(pids.iterdir())) == 2)
    processes.kill("parent")
    workers = [int(path.name) for path in pids.iterdir()]
    wait_for("end of the workers", lambda: not any(map(is_running, workers)))


@pytest.mark.usefixtures("small_units")
def test_a_finished_bake_leaves_only_the_store(raw, tmp_path, quiet_bake):
    threads = set(threading.enumerate())
    recipe = many_sided_recipe(raw).prepare_step(bw.tokenize("bytes"))
    store = quiet_bake(recipe, tmp_path / "a.store", workers=2)
    assert sorted(path.name for path in store.path.iterdir()) == [".lock", "batchwright.json", "versions"]
    assert [path.name for path in (store.path / "versions").iterdir()] == [store.version]
    assert not [path for path in store.path.rglob("*") if path.name.endswith(".part")]
    # The one that starts processes stays.
    wait_for("end of threads", lambda: len(set(threading.enumerate()) - threads) <= 1)


def test_a_function_that_would_do_something_else_in_a_worker_is_refused(tmp_path):
    # Workers import the module anew, so they would not see the value that the program set.
    (tmp_path / "settings.py").write_text(
        "times = 1\n\ndef repeat(row):\n    return {'text': row['text'] * times}\n\n"
        "def repeat_by(times, row):\n    return {'text': row['text'] * times}\n"
    )
    program = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from functools import partial
import batchwright as bw, settings
settings.times = 3
def recipe(step):
    made = bw.DatasetRecipe(seed=0).add_ingredient(["one"] * 5, name="a").add_ingredient(["two"] * 5, name="b")
    return made.prepare_step(step, name="repeat").prepare_step(bw.tokenize("bytes"))
print(bw.bake(recipe(settings.repeat), to="here.store", workers=0).num_tokens)
print(bw.bake(recipe(partial(settings.repeat_by, 3)), to="passed.store", workers=2).num_tokens)
try:
    bw.bake(recipe(settings.repeat), to="workers.store", workers=2)
except bw.SpecError as error:
    print(error.where["function"], "|", error.remedy)
"""
    done = subprocess.run([sys.executable, "-"], input=program, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[:2] == ["90", "90"], done.stderr
    assert done.stdout.splitlines()[2].startswith("step 'repeat' | pass the value to the function")
