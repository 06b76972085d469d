"""Every example runs as it is, and goes on after an interruption as if there had been none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def _run(example: str, folder: Path, steps: int) -> str:
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, EXAMPLES / example, str(folder.parent / "*.txt"), str(steps)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    ).stdout


def _losses(printed: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"^step (\d+)  loss (\S+)", printed, re.MULTILINE)}


@pytest.mark.parametrize("example", ["train_numpy.py", "train_torch.py"])
def test_a_training_example_learns_and_goes_on_where_it_was(example, tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text("".join(f"{n} squared is {n * n}\n" for n in range(i, 5000, 7)))
    whole = _losses(_run(example, tmp_path / "whole", 60))
    assert float(whole[60]) < float(whole[20]) < 5
    _run(example, tmp_path / "parts", 20)
    rest = _run(example, tmp_path / "parts", 60)
    assert rest.startswith("going on at step 20\n")
    assert _losses(rest) == {step: loss for step, loss in whole.items() if step > 20}


def test_every_example_is_run_by_a_test():
    tested = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if path.name not in tested] == []
