"""Every example runs as it is, and goes on after an interruption as if there had been none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
NO_NETWORK = {"HF_HUB_OFFLINE": "1", "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}


def _run(example: str, folder: Path, steps: int) -> str:
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, EXAMPLES / example, str(folder.parent / "*.txt"), str(steps)],
        cwd=folder,
        env={**os.environ, **ONE_THREAD},
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


@pytest.mark.parametrize(
    "example",
    [
        "train_ddp.py",
        "train_hf_trainer.py",
        "train_jax.py",
        "train_mlx.py",
        # Other packages that take longer to import than to train: with the peers, in `make test-all`.
        pytest.param("train_accelerate.py", marks=pytest.mark.peers),
        pytest.param("train_lightning.py", marks=pytest.mark.peers),
        pytest.param("train_sft_hf.py", marks=pytest.mark.peers),
    ],
)
def test_a_trainer_goes_on_exactly_after_a_checkpoint_inside_an_epoch(example, tmp_path):
    # Each compares its own two runs, of which the second is in a new process, and exits with 1 where they differ.
    ran = subprocess.run(
        [sys.executable, EXAMPLES / example],
        cwd=tmp_path,
        env={**os.environ, **ONE_THREAD, **NO_NETWORK},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    (compared,) = re.findall(r"^steps 16 to 40: exact; the loss went from (\S+) to (\S+)$", ran.stdout, re.MULTILINE)
    assert float(compared[1]) < float(compared[0]) - 1


def test_the_hardest_half_is_trained_a_bad_epoch_undone_and_a_stop_in_mid_epoch_leaves_no_trace(tmp_path):
    def run(folder: Path, *stop: str) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, EXAMPLES / "train_hardest.py", *stop],
            cwd=folder,
            env={**os.environ, **ONE_THREAD},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    whole = run(tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    accuracy = {int(e): float(a) for e, a in re.findall(r"^epoch (\d)  .* accuracy (\S+)$", whole.stdout, re.MULTILINE)}
    assert accuracy[4] < accuracy[3] - 0.05 < accuracy[5]
    assert "worse, with rows from {'scrape-2'}: back to 'after epoch 3'" in whole.stdout
    first = run(tmp_path / "parts", "30")
    assert first.stderr == "stopped in epoch 2, after step 10 of 20\n"
    assert first.stdout + run(tmp_path / "parts").stdout == whole.stdout


def test_a_reward_rises_while_generator_and_trainer_are_killed_and_no_prompt_is_lost_or_used_twice(tmp_path):
    ran = subprocess.run(
        [sys.executable, EXAMPLES / "train_grpo.py"],
        cwd=tmp_path,
        env={**os.environ, **ONE_THREAD, "EPOCHS": "6", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (killed,) = re.findall(r"^killed both after step (\d+)$", ran.stdout, re.MULTILINE)
    (resumed,) = re.findall(r"^resumed from step (\d+)$", ran.stdout, re.MULTILINE)
    assert 20 <= int(resumed) <= int(killed) < 48
    counted = re.findall(r"^  (lost|used twice) +(.+)$", ran.stdout, re.MULTILINE)
    assert counted == [("lost", "0"), ("used twice", "0")] * 2
    assert "issued     384 of 384: over" in ran.stdout
    before, after = re.findall(r"^reward .*: ([\d. ]+)$", ran.stdout, re.MULTILINE)
    assert float(after.split()[-1]) > float(before.split()[0]) + 0.3


def test_the_pool_takes_the_wave_out_of_the_loss_and_a_board_game_network_is_better_for_it(tmp_path):
    ran = subprocess.run(
        [sys.executable, EXAMPLES / "train_board_game.py"],
        cwd=tmp_path,
        env={**os.environ, **ONE_THREAD, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = re.findall(r"^ *\d+-\d+  (\w+) +(\S+) #+ +(\S+) +(\S+) #+ +(\S+)$", ran.stdout, re.MULTILINE)
    assert [name for name, *_ in rows] == ["beginners", "improving", "strong"] * 6
    ordered, ordered_held_out, mixed, mixed_held_out = ([float(row[n]) for row in rows] for n in range(1, 5))
    late = range(6, len(rows) - 1)  # when the steep beginning is over
    jump, mixed_jump = (max(abs(loss[n + 1] - loss[n]) for n in late) for loss in (ordered, mixed))
    assert mixed_jump < jump / 5
    assert sum(mixed_held_out[-3:]) < sum(ordered_held_out[-3:])
    assert "resumed after step 500 of 1152: the next batch is the same" in ran.stdout
    assert re.search(r"^sequential +0\.99", ran.stdout, re.MULTILINE)


def test_every_example_is_run_by_a_test():
    tested = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if path.name not in tested] == []
