"""`batchwright drill`: the user's own plan under kill -9, and how it says that something differs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest


def test_the_whole_drill_passes_on_a_real_plan(store, plan, process_succeeds):
    text = process_succeeds(f"drill {plan} --store {store} --ranks 1,3 --steps 40").out
    rows = [line.split() for line in text.splitlines() if re.match(r" +\d", line)]
    assert [(row[1], row[2], row[-1]) for row in rows] == [
        (ranks, workers, "yes") for workers in ("0", "2") for ranks in ("1", "3")
    ]
    assert text.count("kill -9 in step") == 3
    number = process_succeeds(f"digest {store} {plan} --steps 0-39").out.split()[0]
    assert "steps 0-39 equal the uninterrupted run's in every leg" in text
    assert f"digest {number}" in text


def test_a_drill_as_json_keeps_progress_on_stderr(store, plan, process_succeeds):
    command = f"drill {store / 'plans' / f'{plan}.json'} --ranks 1,2 --workers 0 --steps 12"
    done = process_succeeds(command, "--from-step", "30", "--kill-seed", "4", "--json")
    facts = done.json
    assert facts["ok"]
    assert facts["plan"] == plan
    assert facts["steps"] == [30, 41]
    one, two = facts["legs"]
    assert (one["ranks"], one["first_step"]) == (1, 30)
    assert (two["ranks"], two["first_step"] + two["num_steps"]) == (2, 42)
    assert facts["first_difference"] is None
    assert "leg 2 (2 ranks, 0 workers, prefetch 2)" in done.err


def test_a_store_with_settings_is_drilled_without_leaving_a_plan(store, plan, succeeds):
    command = f"drill {store} --chunk-size 8 --batch-size 3 --weights web=.7,code=.3"
    text = succeeds(command, "--ranks", "1,8", "--workers", "0", "--steps", "4").out
    assert "4 steps of 3 x 8 tokens, 1 kill" in text
    assert "a batch has 3 rows, so no leg has more ranks than that" in text
    assert [file.stem for file in (store / "plans").iterdir()] == [plan]


BROKEN = """
import functools, sys
import batchwright.audit.drilling
from batchwright.cli.main import main

def broken():
    def open_broken(opening):
        from batchwright.audit.drilling import open_rank

        loader = open_rank(opening)
        original = loader.get_iterator

        def get_iterator():
            for batch in original():
                if opening.leg.ranks == 2 and opening.rank == 1 and loader.step == 8:
                    batch.input_ids = batch.input_ids + 1
                yield batch

        loader.get_iterator = get_iterator
        return loader

    return open_broken

batchwright.audit.drilling.drill = functools.partial(batchwright.audit.drilling.drill, open_loader=broken())
sys.exit(main(sys.argv[1:]))
"""


def test_a_difference_is_named_and_fails(store, plan, environment):
    command = ["drill", plan, "--store", str(store), "--ranks", "1,2", "--workers", "0", "--steps", "12"]
    command += ["--kill-seed", "1"]
    ran = [
        subprocess.run(
            [sys.executable, "-c", BROKEN, *command, *more],
            env=environment,
            capture_output=True,
            text=True,
        )
        for more in ([], ["--json"])
    ]
    assert [done.returncode for done in ran] == [1, 1]
    assert "FAILED: step 7 differs: tokens of row 6 of the batch, and 5 more rows (leg 2, rank 1)" in ran[0].stdout
    assert "  NO\n" in ran[0].stdout
    assert '"step": 7' in ran[1].stdout
    assert "Traceback" not in ran[0].stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["PLAN"], "--store STORE"),
        (["PLAN", "--store", "STORE", "--seed", "1"], "--seed"),
        (["dead", "--store", "STORE"], "plan dead"),
        (["STORE"], "drill PLAN"),
        (["STORE", "--chunk-size", "8", "--steps", "3"], "steps=6"),
        (["STORE", "--chunk-size", "8", "--ranks", "x"], "'x'"),
        (["STORE", "--chunk-size", "8", "--ranks", "0"], "ranks=1"),
        (["STORE", "--chunk-size", "8", "--store", "STORE"], "--store"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_drilled_is_refused(arguments, said, store, plan, refuses):
    names = {"STORE": store, "PLAN": plan}
    assert said in refuses("drill", *(names.get(argument, argument) for argument in arguments))


def test_a_drill_loads_no_torch(store, plan, tmp_path, environment, process_succeeds):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    command = f"drill {plan} --store {store} --ranks 1 --workers 1 --steps 3"
    assert "equal the uninterrupted run's" in process_succeeds(command, PYTHONPATH=path).out
