"""`batchwright demo queue` kills and damages, loses nothing by it, and notices when it did."""

from __future__ import annotations

import contextlib
import json
import re

import pytest

from batchwright.demo import queue as demo_queue
from batchwright.demo.harness import NotAsExpected
from batchwright.demo.queue import BATCHES_PER_FILE, NUM_STEPS


@pytest.fixture(scope="module")
def demo(run_demo):
    """One whole run of the demo in an empty folder: (what it printed, the queue that it left)."""
    printed, folder = run_demo("demo queue")
    return printed, folder / "runs" / "data" / "code" / "queue"


def test_a_provider_and_the_trainer_were_killed_in_mid_file(demo):
    (made,) = re.findall(r"Provider \d+ got SIGKILL while it made train file (\d+)\.", demo[0])
    ((step, batch, file),) = re.findall(
        r"SIGKILL after step (\d+), with (\d+) of 40 batches of train file (\d+)", demo[0]
    )
    assert int(made) < int(file)
    assert 0 < int(batch) < BATCHES_PER_FILE
    assert int(step) + 1 == BATCHES_PER_FILE * int(file) + int(batch)


def test_every_batch_was_the_one_of_an_undisturbed_run(demo):
    (again,) = re.findall(r"All 400 batches are the same, byte for byte; (\d+) that came again", demo[0])
    assert int(again) > 0
    assert "the weights at the end, in every bit" in demo[0]


def test_the_damaged_file_is_in_quarantine_and_was_made_again(demo):
    printed, queue = demo
    (name,) = re.findall(r"queue/train/(\d{8})\.batches was put aside", printed)
    (report,) = (queue / "quarantine").glob("*.json")
    assert report.name.startswith(f"train-{name}.")
    assert json.loads(report.read_text())["number"] == int(name) < NUM_STEPS // BATCHES_PER_FILE


def test_the_status_of_the_queue_names_who_is_alive(demo):
    alive = re.findall(r"^  pid \d+ on \S+, alive", demo[0], re.MULTILINE)
    assert len(alive) == 2
    assert "ended with exit code 0" in demo[0]


def test_the_output_is_clean_and_fits_100_columns(demo):
    assert [line for line in demo[0].splitlines() if len(line) > 100 or line != line.rstrip()] == []
    assert not re.search(r"Traceback|EXPECTED|DIFFERENT|[\r\x1b]", demo[0])
    assert demo[0].endswith("Everything was as promised.\n")


# What would not be as promised


def told(step, digest=None, loss="0x1p+0"):
    return {"step": step, "digest": digest or f"digest {step}", "loss": loss}


@pytest.mark.parametrize(
    ("change", "held"),
    [
        (lambda run: None, True),
        (lambda run: run.reports[7].append(told(7)), True),
        (lambda run: run.reports[7].append(told(7, digest="another")), False),
        (lambda run: run.reports[7].append(told(7, loss="0x1p+1")), False),
        (lambda run: run.reports.pop(7), False),
        (lambda run: run.end.update(weights="others"), False),
    ],
    ids=["all as expected", "a batch twice", "another batch", "another loss", "a batch is missing", "other weights"],
)
def test_a_batch_that_is_another_is_noticed(tmp_path, monkeypatch, change, held):
    reports = {step: told(step) for step in range(NUM_STEPS)}
    monkeypatch.setattr(demo_queue, "_undisturbed", lambda _: (reports, "weights"))
    run = demo_queue._Run(tmp_path, tmp_path / "config.py")
    run.reports, run.end = {step: [report] for step, report in reports.items()}, {"weights": "weights"}
    change(run)
    with contextlib.nullcontext() if held else pytest.raises(NotAsExpected):
        demo_queue._expect_undisturbed_batches(run)


@pytest.mark.parametrize(
    ("names", "count", "held"),
    [
        (["train-00000006.0.json"], 1, True),
        ([], 0, False),
        (["train-00000005.0.json"], 1, False),
        (["train-00000006.0.json", "train-00000007.0.json"], 2, False),
    ],
    ids=["put aside", "not noticed", "another file", "one more"],
)
def test_damage_that_is_not_put_aside_is_noticed(tmp_path, names, count, held):
    run = demo_queue._Run(tmp_path, tmp_path / "config.py", end={"stats": {"quarantined_files": count}})
    folder = run.dataset / "queue" / "quarantine"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text('{"reason": "bytes differ"}')
    with contextlib.nullcontext() if held else pytest.raises(NotAsExpected, match="in quarantine"):
        demo_queue._expect_quarantine(run, "00000006.batches")


def test_a_flipped_bit_is_one_bit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    demo_queue._flip_a_bit(path)
    assert sum(byte.bit_count() for byte in path.read_bytes()) == 1
    assert path.stat().st_size == 100
