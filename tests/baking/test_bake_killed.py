"""kill -9 at any moment: what opens is complete, and the same call continues to the same bytes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import batchwright as bw
from batchwright.baking import run
from batchwright.baking.unit import UnitFile
from batchwright.base.errors import BusyError
from batchwright.base.files import exclusive
from batchwright.sources import units
from harness import descendants, is_running, wait_for
from refusals import refused


def bake(
    folder: Path,
    to: str,
    *,
    workers: int = 0,
    stop_at: int = 10**9,
    die_at: int = 0,
    when: str = "after",
    unit_bytes: int = 500,
) -> None:
    """A job of several units, which marks in a file every row that it reads, so that one can see which it bakes again.

    Each process stands still after `stop_at` rows. Every file of a store gets its name by a rename, so that dying
    before or after each of them (`die_at`, 0 is none) is dying at every write.
    """
    units.UNIT_BYTES = unit_bytes

    def where(row, marks=str(folder / "marks")):
        with open(marks, "ab") as file:
            file.write(b".")
            file.flush()
            if file.tell() >= stop_at:
                time.sleep(600)
        return True

    renames, replace = 0, os.replace

    def dying_replace(*args) -> None:
        nonlocal renames
        renames += 1
        if renames == die_at and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*args)
        if renames == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = dying_replace
    recipe = bw.DatasetRecipe(seed=1).add_ingredient(folder / "in", name="web", where=where, version="1").holdout(0.2)
    bw.bake(recipe.prepare_step(bw.tokenize("bytes")), folder / to, workers=workers, show_progress=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for name in "abcd":
        lines = [f'{{"text": "{name} {n} {"so " * n}"}}\n' for n in range(16)]
        (tmp_path / "in" / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path


class Bakes:
    """Bakes in `folder`, one after the other."""

    def __init__(self, processes, folder: Path, unit_bytes: int = 500) -> None:
        self.processes, self.folder, self.marks, self.unit_bytes = processes, folder, folder / "marks", unit_bytes
        self.number = 0

    def start(self, to: str, **settings) -> str:
        self.number += 1
        name = f"bake-{self.number}"
        self.processes.start(name, bake, self.folder, to, unit_bytes=self.unit_bytes, **settings)
        return name

    def run(self, to: str, **settings) -> int:
        return self.processes.wait_for_end(self.start(to, **settings))

    def run_until_killed(self, to: str, workers: int, after_rows: int) -> None:
        name = self.start(to, workers=workers, stop_at=after_rows)
        self.processes.wait_for("rows", lambda: self.marks.exists() and self.marks.stat().st_size >= after_rows)
        its_workers = descendants(self.processes.pid(name))
        self.processes.kill(name)
        wait_for("end of workers", lambda: not any(map(is_running, its_workers)))

    def rows_read(self) -> int:
        """Rows that were read since the last call."""
        count = self.marks.stat().st_size if self.marks.exists() else 0
        self.marks.unlink(missing_ok=True)
        return count


@pytest.fixture
def bakes(processes, folder) -> Bakes:
    return Bakes(processes, folder)


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_again_and_again_a_bake_still_gets_there(bakes, folder, version_files, workers):
    assert bakes.run("whole.store") == 0, bakes.processes.told()
    assert bakes.rows_read() == 64
    finished_before = 0
    for _ in range(3):
        # After 17 to 20 of the 64 rows: units have 12 and 4 rows, so one at least is done, and one is in the middle.
        bakes.run_until_killed("a.store", workers, after_rows=bakes.processes.chance.randint(17, 20))
        with refused(bw.StoreError, folder=folder / "a.store", remedy="bake"):
            bw.open_store(folder / "a.store")
        finished = [UnitFile.find(path, path.stem) for path in (folder / "a.store" / "work").glob("*.arrow")]
        assert None not in finished  # a unit's file is whole, or is not there
        finished_rows = sum(unit.report.rows_read for unit in finished)
        assert finished_rows >= finished_before
        finished_before = finished_rows
        bakes.rows_read()
    assert 0 < finished_before < 64
    assert bakes.run("a.store", workers=workers) == 0, bakes.processes.told()
    assert bakes.rows_read() == 64 - finished_before  # what was done was not done again
    assert version_files(folder / "a.store") == version_files(folder / "whole.store")
    assert sorted(os.listdir(folder / "a.store")) == [".lock", "batchwright.json", "versions"]


def test_killed_after_any_write_the_version_before_stays_until_the_pointer_moves(bakes, folder, version_files):
    bakes.unit_bytes = 1000
    assert bakes.run("a.store") == 0
    before = bw.open_store(folder / "a.store").fingerprint
    for path in (folder / "in").iterdir():  # every file, so that no unit can be taken from the version before
        path.write_text('{"text": "one more"}\n' + path.read_text())
    assert bakes.run("whole.store") == 0
    after = bw.open_store(folder / "whole.store").fingerprint
    versions, work = folder / "a.store" / "versions", folder / "a.store" / "work"
    die_at, units = 1, 0
    while len(list(versions.glob("*/manifest.json"))) == 1:
        assert bakes.run("a.store", die_at=die_at) == -signal.SIGKILL
        assert bw.open_store(folder / "a.store", verify=True).fingerprint == before
        # A unit that is done stays done, so the next run dies one unit later. Joining begins anew each time.
        die_at += len(list(work.glob("*.arrow"))) == units
        units = len(list(work.glob("*.arrow")))
    assert units >= 3
    assert die_at >= 7  # two shards, two tables, tokenizer, inputs, manifest
    assert bakes.run("a.store", die_at=1) == -signal.SIGKILL  # one write was left: the pointer
    assert bw.open_store(folder / "a.store", verify=True).fingerprint == after
    assert bakes.run("a.store", die_at=1) == 0  # up to date: nothing is written
    assert version_files(folder / "a.store") == version_files(folder / "whole.store")


def test_only_the_holder_of_the_lock_writes_into_a_store(folder, monkeypatch):
    """Also its first file: a process that comes late must not write over what another one finished meanwhile."""
    mark, marked = run.mark_as_store, []

    def mark_under_lock(to: Path) -> None:
        with pytest.raises(BusyError), exclusive(to / ".lock", doing="baking into"):
            pass
        mark(to)
        marked.append(to)

    monkeypatch.setattr(run, "mark_as_store", mark_under_lock)
    recipe = bw.DatasetRecipe().add_ingredient(folder / "in").prepare_step(bw.tokenize("bytes"))
    bw.bake(recipe, folder / "a.store", workers=0, show_progress=False)
    assert marked == [folder / "a.store"]


def test_killed_before_its_first_write_a_bake_can_be_run_again(bakes, folder, version_files):
    assert bakes.run("whole.store") == 0
    assert bakes.run("a.store", die_at=1, when="before") == -signal.SIGKILL
    assert sorted(path.suffix or path.name for path in (folder / "a.store").iterdir()) == [".lock", ".part"]
    assert bakes.run("a.store") == 0
    assert version_files(folder / "a.store") == version_files(folder / "whole.store")
    assert sorted(os.listdir(folder / "a.store")) == [".lock", "batchwright.json", "versions"]
