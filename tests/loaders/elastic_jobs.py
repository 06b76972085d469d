"""Jobs of real processes over a mixture, for tests: their stores, their lives, and what they leave when killed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import batchwright as bw

RANK_SCRIPT = Path(__file__).with_name("elastic_mixed_rank.py")


def bake_texts(path: Path, texts: Any) -> str:
    """A store of one source that keeps the order of its documents, so that more of them make it grow."""
    recipe = bw.DatasetRecipe(seed=3).add_ingredient(texts, name="text")
    bw.bake(recipe.prepare_step(bw.tokenize("bytes")), to=path, workers=0, shuffle=False, show_progress=False)
    return str(path)


def bake_sources(raw: Path, folder: Path) -> dict[str, str]:
    """web (474 rows of 16 tokens), code (149) and notes (61)."""
    return {
        "web": bake_texts(folder / "web.store", raw / "web" / "*.jsonl"),
        "code": bake_texts(folder / "code.store", raw / "code" / "*.txt"),
        "notes": bake_texts(folder / "notes.store", notes(range(50))),
    }


def notes(numbers: range) -> list[str]:
    return [f"note {n}." + " More." * (n % 5) for n in numbers]


@dataclass
class Life:
    """What one generation of ranks did before it was killed, or until it was done."""

    first_step: int
    """The step at which it started."""
    recorded: list[list[dict[str, Any]]]
    """Of each rank, a line for every step: {"step", "rows": [[position, digest], ...]}."""
    saved_step: int
    state: dict[str, Any]
    """What rank 0 had saved last: all ranks had recorded the steps before `saved_step`."""

    @property
    def steps(self) -> list[tuple[int, list[list[Any]]]]:
        """(step, rows of all ranks) of each step that every rank had recorded."""
        return [
            (lines[0]["step"], [row for line in lines for row in line["rows"]])
            for lines in zip(*self.recorded, strict=False)
        ]


def live(
    folder: Path,
    job: dict[str, Any],
    *,
    kill_after: tuple[int, int] | None = None,
    chance: random.Random | None = None,
    first_step: int = 0,
) -> Life:
    """Run the ranks of a job, each a process, until they are done.

    With `kill_after` (fewest, most steps) all get a SIGKILL at some moment between, one after the other, as `chance`
    has it.
    """
    chance = chance or random.Random()
    world_size = job["world_size"]
    folder.mkdir(parents=True)
    np.zeros(world_size, np.int64).tofile(folder / "done")
    defaults = {"settings": {}, "delivery": {}, "plan": None, "state": None, "amendments": []}
    most_steps = None if kill_after is None else kill_after[1]
    (folder / "job.json").write_text(json.dumps(defaults | job | {"most_steps": most_steps}))
    command = [sys.executable, str(RANK_SCRIPT), str(folder / "job.json")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(world_size)]
    try:
        if kill_after is None:
            codes = [rank.wait(timeout=60) for rank in ranks]
            assert not any(codes), f"a rank failed: {codes}"
        else:
            _wait_for_steps(folder / "done", ranks, chance.randint(*kill_after))
            time.sleep(chance.uniform(0, 0.005))
    finally:
        for rank in chance.sample(ranks, world_size):
            rank.kill()
        for rank in ranks:
            rank.wait()
    saved = json.loads((folder / "checkpoint.json").read_text())
    return Life(
        first_step=first_step,
        recorded=[_lines_of(folder / f"{rank}.jsonl") for rank in range(world_size)],
        saved_step=saved["step"],
        state=saved["state"],
    )


def _wait_for_steps(done: Path, ranks: list[subprocess.Popen[bytes]], num_steps: int) -> None:
    deadline = time.monotonic() + 60
    while np.fromfile(done, np.int64).min() < num_steps:
        assert time.monotonic() < deadline, "the ranks hang"
        assert all(rank.poll() is None for rank in ranks), "a rank failed"
        time.sleep(0.002)


def _lines_of(path: Path) -> list[dict[str, Any]]:
    """What a rank had recorded when it died; a last line that it did not finish does not count."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []
