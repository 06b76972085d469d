"""Jobs that die and come back with another number of ranks: real processes, real kill -9, the same global batches."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

import batchwright as bw

RANK_SCRIPT = Path(__file__).with_name("elastic_rank.py")


def lines_of(path):
    """What a rank had recorded when it died; a last line that it did not finish does not count."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


@contextlib.contextmanager
def job(store, folder, world_size, state, workers):
    """Ranks of one job, each a process; all of them are killed at the end, at once."""
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps(state))
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                *(str(RANK_SCRIPT), str(store), str(rank), str(world_size)),
                *(str(folder / "state.json"), str(folder / f"{rank}.jsonl"), str(workers)),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for rank in range(world_size)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            os.kill(process.pid, signal.SIGKILL)
        for process in ranks:
            process.wait()


def run_until_killed(store, folder, world_size, state, num_steps, workers=0):
    """What the ranks had recorded when all were killed, not before each had handed over `num_steps` steps."""
    files = [folder / f"{rank}.jsonl" for rank in range(world_size)]
    with job(store, folder, world_size, state, workers) as ranks:
        deadline = time.monotonic() + 60
        while min(len(lines_of(file)) for file in files) < num_steps:
            assert time.monotonic() < deadline, "the ranks hang"
            assert all(process.poll() is None for process in ranks), "a rank failed"
            time.sleep(0.01)
    return [lines_of(file) for file in files]


@pytest.fixture
def raw_files(tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    for file in range(3):
        (folder / f"{file}.txt").write_text(f"file {file}, and what it says. " * 150)
    return folder


@pytest.mark.parametrize(("worlds", "workers"), [((4, 3, 8), 0), ((2, 1), 2)])
def test_a_killed_job_goes_on_with_other_ranks_and_the_same_global_batches(
    small_store, open_loader, tmp_path, worlds, workers
):
    alone = open_loader(small_store, batch_size=48, epochs=None)
    check_lives(small_store, tmp_path, worlds, workers, alone)


def test_a_killed_job_over_raw_files_goes_on_too(raw_files, tmp_path):
    alone = bw.PretrainDataLoader(
        *(raw_files, "bytes", 16),
        streaming=True,
        shuffle_rows=100,
        batch_size=48,
        seed=7,
        epochs=None,
        framework="numpy",
    )
    check_lives(raw_files, tmp_path, (4, 3, 2), 0, alone)


def check_lives(source, tmp_path, worlds, workers, alone):
    seed = random.randrange(10**9)
    chance = random.Random(seed)
    state, done = None, []
    for life, world_size in enumerate(worlds):
        # With 13 steps in an epoch, the lives begin and end in different epochs.
        recorded = run_until_killed(source, tmp_path / str(life), world_size, state, chance.randrange(5, 40), workers)
        common = min(map(len, recorded))
        for lines in zip(*(lines[:common] for lines in recorded), strict=True):
            assert len({line["step"] for line in lines}) == 1, f"ranks disagree about the step (seed {seed})"
            assert lines[0]["step"] == len(done), f"a step was lost or repeated (seed {seed})"
            assert all(line["state"] == lines[0]["state"] for line in lines)
            done.append([row_hash for line in lines for row_hash in line["hashes"]])
        state = recorded[0][common - 1]["state"]
    for step, hashes in enumerate(done):
        expected = [zlib.crc32(row.tobytes()) for row in alone.get_batch().input_ids]
        assert hashes == expected, f"step {step} differs (seed {seed})"
    assert alone.epoch >= 1
    assert alone.state_dict() == state
