"""Jobs that die and come back with another number of ranks: real processes, real kill -9, the same global batches."""

from __future__ import annotations

import zlib

import pytest
from elastic_jobs import read_rows

import batchwright as bw


@pytest.fixture
def raw_files(tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    for file in range(3):
        (folder / f"{file}.txt").write_text(f"file {file}, and what it says. " * 150)
    return folder


@pytest.mark.parametrize(("worlds", "workers"), [((4, 3, 8), 0), ((2, 1), 2)])
def test_a_killed_job_goes_on_with_other_ranks_and_the_same_global_batches(
    small_store, open_loader, processes, worlds, workers
):
    alone = open_loader(small_store, batch_size=48, epochs=None)
    check_lives(small_store, processes, worlds, workers, alone)


def test_a_killed_job_over_raw_files_goes_on_too(raw_files, processes):
    alone = bw.PretrainDataLoader(
        *(raw_files, "bytes", 16),
        streaming=True,
        shuffle=bw.Shuffle("window", pool_rows=100),
        batch_size=48,
        seed=7,
        epochs=None,
        framework="numpy",
    )
    check_lives(raw_files, processes, (4, 3, 2), 0, alone)


def check_lives(source, processes, worlds, workers, alone):
    state, done = None, []
    for life, world_size in enumerate(worlds):
        ranks = [f"{life}-{rank}" for rank in range(world_size)]
        for rank, name in enumerate(ranks):
            processes.start(name, read_rows, str(source), rank, world_size, state, workers)
        # With 13 steps in an epoch, the lives begin and end in different epochs.
        processes.wait_for_lines(ranks, processes.chance.randrange(7, 40))
        processes.kill(*ranks)
        recorded = [processes.said(name) for name in ranks]
        common = min(map(len, recorded))
        for lines in zip(*(lines[:common] for lines in recorded), strict=True):
            assert len({line["step"] for line in lines}) == 1, "ranks disagree about the step"
            assert lines[0]["step"] == len(done), "a step was lost or repeated"
            assert all(line["state"] == lines[0]["state"] for line in lines)
            done.append([row_hash for line in lines for row_hash in line["hashes"]])
        state = recorded[0][common - 1]["state"]
    for step, hashes in enumerate(done):
        expected = [zlib.crc32(row.tobytes()) for row in alone.get_batch().input_ids]
        assert hashes == expected, f"step {step} differs"
    assert alone.epoch >= 1
    assert alone.state_dict() == state
