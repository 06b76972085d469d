"""`batchwright demo spike` finds what it planted, skips it, changes nothing before it, and notices a failure."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

import batchwright as bw
from batchwright.base.errors import SpecError
from batchwright.demo import spike
from batchwright.demo.harness import NotAsExpected
from batchwright.demo.model import loss_and_gradients, new_weights, read_checkpoint, row_losses_and_gradients
from batchwright.demo.train import TrainingRun, kept_checkpoint
from batchwright.store.plans import list_plans
from refusals import refused

STEPS = 160


@pytest.fixture(scope="module")
def demo(run_demo):
    """One whole run of the demo in an empty folder: (what it printed, the folder)."""
    return run_demo(f"demo spike --steps {STEPS}")


@pytest.fixture(scope="module")
def plans(demo):
    """(the plan as it began, the amended one), from the store that the demo left."""
    kept = {len(plan.amendments): plan for plan in list_plans(demo[1] / "spike.store")}
    assert sorted(kept) == [0, 1]
    return kept[0], kept[1]


def _jump(printed: str) -> int:
    return int(re.search(r"^step +(\d+) +loss [\d.]+   A JUMP: ", printed, re.MULTILINE)[1])


def test_the_loss_jumps_on_screen_in_the_third_quarter(demo):
    step, loss, rise = re.search(
        r"^step +(\d+) +loss ([\d.]+)   A JUMP: ([\d.]+) above", demo[0], re.MULTILINE
    ).groups()
    assert STEPS // 2 <= int(step) < 3 * STEPS // 4
    assert float(rise) > spike.JUMP_NATS
    drawn = {int(s): len(bar) for s, bar in re.findall(r"^  step +(\d+) +[\d.]+  (#+)$", demo[0], re.MULTILINE)}
    assert max(drawn, key=drawn.get) == int(step)
    assert drawn[int(step)] == round(8 * float(loss))


def test_the_jump_is_traced_to_the_planted_file_and_to_lines_of_noise(demo):
    file, first, last = re.search(r"Most of it is (\S+), lines (\d+)-(\d+)\.", demo[0]).groups()
    assert file == ".demo/planted/mangled.py"
    lines = (demo[1] / "planted" / "mangled.py").read_text("utf-8").split("\n")
    assert all(not line.isascii() for line in lines[int(first) - 1 : int(last)])
    assert all(line.isascii() for line in lines[:12])
    assert "noise was planted there, in lines 13-52" in demo[0]
    assert len(lines) == 53


def test_the_row_of_noise_has_by_far_the_largest_loss(demo):
    rows = re.findall(r"^row \d  loss +([\d.]+)  (\S+\.py) +lines \d+-\d+ ", demo[0], re.MULTILINE)
    noise = {float(loss) for loss, file in rows if file.endswith("mangled.py")}
    real = {float(loss) for loss, file in rows if not file.endswith("mangled.py")}
    assert min(noise) > 2 * max(real)


def test_every_use_of_the_file_is_skipped_and_nothing_else(demo, plans):
    began, amended = plans
    uses = bw.find(demo[1] / "spike.store", began, file="mangled.py")
    positions = sorted({use.position for use in uses})
    assert [first for first, last in amended.skips if first == last] == positions
    assert len(amended.skips) == len(positions)
    assert f"{len(positions)} rows of the epoch hold a part of it" in demo[0]


def test_the_run_goes_back_to_a_checkpoint_before_the_jump_and_on_to_the_end(demo, plans):
    resumed = int(re.search(rf"Process \d+ went on from step (\d+) to step {STEPS - 1}", demo[0])[1])
    assert 0 < resumed <= _jump(demo[0]) < resumed + STEPS // 16
    state = read_checkpoint(kept_checkpoint(demo[1] / "runs" / "first", resumed)).loader
    assert state["plan"] == plans[0].fingerprint
    assert plans[1].amendments[0].at == state["position"] == resumed * 2
    assert "The amended run does not jump at all" in demo[0]


def test_every_step_before_is_equal_bit_for_bit(demo):
    jump = _jump(demo[0])
    resumed = int(re.search(r"went on from step (\d+)", demo[0])[1])
    equal = f"The amended run's losses, steps {resumed} to {jump - 1}, equal the first run's bit for bit: "
    assert f"{equal}{jump - resumed} of {jump - resumed}." in demo[0]


def test_the_history_is_shown(demo, plans):
    began, amended = plans
    printed = " ".join(demo[0].partition("$ batchwright plan")[2].split())
    for text in (began.fingerprint, amended.fingerprint, f"skip {len(amended.skips)} positions between"):
        assert text in printed


def test_the_output_is_clean_and_fits_100_columns(demo):
    assert [line for line in demo[0].splitlines() if len(line) > 100] == []
    assert not re.search(r"Traceback|EXPECTED|DIFFERENT|[\r\x1b]", demo[0])
    assert demo[0].endswith("Everything was as promised.\n")


@pytest.mark.parametrize("is_changed", [False, True], ids=["equal", "one bit"])
def test_a_difference_in_one_bit_is_named(demo, plans, capsys, is_changed):
    uses = bw.find(demo[1] / "spike.store", plans[0], file="mangled.py")
    resumed_from, parted_at = plans[1].amendments[0].at // 2 - 1, min(use.step for use in uses)
    settings = (demo[1] / "spike.store", demo[1] / "runs" / "first", STEPS, 10)
    first = TrainingRun(*settings, losses={s: (5.0 if s == parted_at else 2.0).hex() for s in range(STEPS)})
    amended = TrainingRun(*settings, losses={s: (2.0).hex() for s in range(resumed_from, STEPS)})
    if not is_changed:
        spike._compare(settings[0], first, amended, plans[1], uses)
        assert "does not jump at all" in capsys.readouterr().out
        return
    amended.losses[resumed_from] = math.nextafter(2.0, math.inf).hex()
    with pytest.raises(NotAsExpected, match=rf"the amended run's loss at step {resumed_from} is 0x1\.0{{12}}1p"):
        spike._compare(settings[0], first, amended, plans[1], uses)


def test_blame_that_falls_on_real_text_is_not_hidden(demo, monkeypatch):
    monkeypatch.chdir(demo[1].parent)
    first = TrainingRun(Path(".demo/spike.store"), Path(".demo/runs/first"), STEPS, STEPS // 16)
    planted = spike._Planted(Path(".demo/planted/mangled.py"), (13, 52))
    jump = _jump(demo[0])
    records = bw.trace(first.store, first.checkpoint().loader, step=jump)
    noise = next(r.row_in_batch for r in records if r.file.endswith("mangled.py"))
    first.row_losses[jump] = [9.0 if row == noise else 2.0 for row in range(2)]
    assert {use.file for use in spike._trace_the_jump(first.store, first, jump, planted)} == {str(planted.file)}
    first.row_losses[jump].reverse()
    with pytest.raises(NotAsExpected, match=r"mangled\.py, lines 13-52"):
        spike._trace_the_jump(first.store, first, jump, planted)


def test_a_jump_that_stays_is_not_hidden():
    losses = {step: (5.0 if step == 40 else 2.0).hex() for step in range(50)}
    first, amended = (TrainingRun(Path(), Path(), 50, 10, losses=losses) for _ in range(2))
    with pytest.raises(NotAsExpected, match="jumps again"):
        spike._expect_no_jump(first, amended)


def test_a_run_without_a_jump_is_not_as_expected():
    calm = TrainingRun(Path(), Path(), 50, 10, losses={step: (2.0).hex() for step in range(50)})
    with pytest.raises(NotAsExpected, match=r"1\.8 "):
        spike._first_jump(calm)


def test_a_skip_that_this_run_never_comes_to_is_not_as_expected(demo, plans):
    run = TrainingRun(demo[1] / "spike.store", demo[1] / "runs" / "first", num_steps=10, checkpoint_steps=5)
    uses = bw.find(run.store, plans[0], file="mangled.py")
    with pytest.raises(NotAsExpected, match="skipped"):
        spike._compare(run.store, run, run, plans[1], uses)


def test_a_history_that_is_not_shown_is_not_hidden(demo, plans, monkeypatch):
    monkeypatch.setattr(spike, "show_verb", lambda *_: f"plan {plans[1].fingerprint}, and no more")
    with pytest.raises(NotAsExpected, match="does not show the amendment"):
        spike._show_history(demo[1] / "spike.store", plans[1])


@pytest.mark.parametrize(
    ("losses", "jumps"),
    [
        ([5.5, *[2.0] * 30], []),
        ([5.5 - 0.1 * step for step in range(40)], []),
        ([2.0] * 30 + [3.7] + [2.0] * 9, []),
        ([2.0] * 30 + [3.9] + [2.0] * 9, [30]),
        ([2.0] * 19 + [9.0] + [2.0] * 5 + [9.0], [25]),  # before step 20 there is too little to compare with
    ],
    ids=["start", "falling", "odd text", "jump", "early"],
)
def test_a_jump_is_a_loss_far_above_the_median_of_the_steps_before(losses, jumps):
    assert spike.find_jumps(losses) == jumps


def test_the_loss_of_a_row_is_that_of_the_row_alone():
    weights = new_weights(vocab_size=7, embedding=3, hidden=5, seed=1)
    draw = np.random.default_rng(2)
    ids, labels = draw.integers(0, 7, (3, 6)), draw.integers(0, 7, (3, 6))
    losses, _ = row_losses_and_gradients(weights, ids, labels)
    alone = [loss_and_gradients(weights, ids[row : row + 1], labels[row : row + 1])[0] for row in range(3)]
    np.testing.assert_allclose(losses, alone, rtol=1e-6)
    assert len(set(alone)) == 3


def test_too_few_steps_are_refused_before_anything_is_written(tmp_path, capsys):
    assert spike.main(["--folder", str(tmp_path / "new"), "--steps", "100"]) == 2
    assert "--steps 160" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_more_steps_than_an_epoch_has_are_refused(demo):
    planted = spike._Planted(Path("mangled.py"), (13, 52))
    with refused(SpecError, 1_000_000, parameter="steps", remedy="--steps "):
        spike._seed_for_late_noise(demo[1] / "spike.store", planted, 1_000_000)
