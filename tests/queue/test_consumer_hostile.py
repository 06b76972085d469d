"""What a consumer outlives: interrupts at any line, failing conversions, the collector, other threads, forks, exits."""

from __future__ import annotations

import gc
import linecache
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from providers import SETTINGS, Numbered

import batchwright.queue
from batchwright import DatasetConsumer, NotReadyError, QueueError, SpecError
from harness import wait_for
from refusals import refused

FILE_ROWS = SETTINGS["batch_size"] * SETTINGS["batches_per_file"]
OURS = str(Path(batchwright.queue.__file__).parent)


def prepare(folder: Path, num_files: int = 4, kind=Numbered, splits=("train",), **settings) -> None:
    kind(folder, **(SETTINGS | {"max_backlog_files": 99} | settings)).run(splits, max_files=num_files)


def opened(folder: Path, **settings) -> DatasetConsumer:
    return DatasetConsumer(folder, **({"framework": "numpy", "timeout_seconds": 20} | settings))


def ids(consumer: DatasetConsumer, num_batches: int, split: str = "train") -> list[int]:
    return [row for _ in range(num_batches) for row in consumer.get_batch(split)["id"].tolist()]


def stream(num_rows: int, first: int = 0) -> list[int]:
    return [1000 * (row // FILE_ROWS) + row % FILE_ROWS for row in range(first, first + num_rows)]


def row_of(consumer: DatasetConsumer) -> int:
    """Where a consumer says it is, in rows of the stream."""
    place = consumer.state_dict()["train"]
    return place["file"] * FILE_ROWS + place["batch"] * SETTINGS["batch_size"] + place.get("row", 0)


class Interrupt:
    """KeyboardInterrupt before the n-th line that this thread runs in the package's queue."""

    def __init__(self, before_line: int) -> None:
        self.left = before_line

    def __enter__(self) -> Interrupt:
        self.before = sys.gettrace()  # whoever measures coverage
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        # A with statement is traced once more before its block is left, where no signal can arrive: it would stay open.
        is_with = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and not is_with:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that the collector closed
@pytest.mark.parametrize("settings", [{}, {"batch_size": 7}, {"delete": "checkpoint"}, {"rank": 0, "world_size": 1}])
def test_interrupted_before_any_line_nothing_is_lost_and_the_consumer_goes_on(tmp_path, running, settings):
    running(max_backlog_files=3)
    size = settings.get("batch_size", 4)
    with opened(tmp_path / "data", **settings) as consumer:
        row, num_interrupts = 0, 0
        for line in range(1, 900, 4):
            interrupted = False
            try:
                with Interrupt(line):
                    got = consumer.get_batch("train")["id"].tolist()
            except KeyboardInterrupt:
                interrupted = True
                num_interrupts += 1
            if not interrupted:
                assert got == stream(size, row)
                row += size
                continue
            now = row_of(consumer)
            assert now in (row, row + size)  # the second: it was handed out, and the caller did not get to keep it
            row = now
            assert ids(consumer, 1) == stream(size, row)
            row += size
        assert num_interrupts > 20
        if "delete" not in settings:
            claimed = tmp_path / "data/queue/control/train/claimed"  # a thread deletes what was read
            wait_for("deletion of files", lambda: len(list(claimed.glob("*.batches"))) < 5)


def test_a_conversion_that_fails_takes_no_batch(tmp_path, monkeypatch):
    prepare(tmp_path)
    with opened(tmp_path, framework="torch") as consumer:
        assert ids(consumer, 1) == stream(4)
        for device in ("cuda:99", "nonsense"):
            with pytest.raises((SpecError, RuntimeError, AssertionError)):
                consumer.get_batch("train", device=device)
        assert ids(consumer, 1) == stream(4, 4)


def test_the_collector_may_let_go_of_a_consumer_while_the_queue_is_locked(tmp_path):
    prepare(tmp_path)
    consumer = opened(tmp_path)
    ids(consumer, 1)
    folder = consumer._streams["train"].folder
    consumer.itself = consumer
    signal.alarm(240)  # or a deadlock would hold up all tests
    try:
        with folder.one_at_a_time():
            del consumer
            gc.collect()
    finally:
        signal.alarm(0)
    with opened(tmp_path) as consumer:
        assert ids(consumer, 2) == stream(8)  # the first batch was not recorded


def test_a_state_from_before_the_first_batch_leads_back_to_it(tmp_path, running):
    running()
    with opened(tmp_path / "data") as consumer:
        first = consumer.state_dict()
        assert first["train"] == first["val"] == {"file": 0, "batch": 0}
        ids(consumer, 7)
        ids(consumer, 2, "val")
        consumer.load_state_dict(first)
        assert ids(consumer, 7) == stream(28)
        assert ids(consumer, 2, "val") == stream(8)
    direct = DatasetConsumer(provider=Numbered("nowhere", **SETTINGS), framework="numpy")
    first = direct.state_dict()
    ids(direct, 7)
    direct.load_state_dict(first)
    assert ids(direct, 7) == stream(28)


def test_a_state_of_a_queue_that_somebody_read_before_is_where_he_stopped(tmp_path):
    prepare(tmp_path)
    with opened(tmp_path) as consumer:
        ids(consumer, 7)
    with opened(tmp_path) as consumer:
        assert consumer.state_dict()["train"] == {"file": 1, "batch": 2}
        assert ids(consumer, 1) == stream(4, 28)


def test_a_closed_consumer_still_says_where_it_was(tmp_path):
    prepare(tmp_path)
    with opened(tmp_path) as consumer:
        ids(consumer, 7)
        state, stats = consumer.state_dict(), consumer.stats()
    assert consumer.state_dict() == state
    assert consumer.stats() == stats
    assert stats["train"]["batches"] == 7


def test_files_that_wait_for_commit_are_neither_in_memory_nor_open(tmp_path):
    prepare(tmp_path, 30)
    with opened(tmp_path, delete="checkpoint") as consumer:
        ids(consumer, 10)
        before = len(os.listdir("/proc/self/fd"))
        ids(consumer, 130)
        held = consumer._streams["train"]._files
        assert len(held) == 28
        assert [one.claim.number for one in held if one.file is not None] == [27]
        assert len(os.listdir("/proc/self/fd")) <= before + 2
        consumer.commit()
        assert len(list((tmp_path / "queue/control/train/claimed").glob("*.batches"))) == 0


def test_of_files_that_cannot_be_made_again_none_is_deleted_before_commit_wherever_a_state_leads(tmp_path):
    class Live(Numbered):
        reproducible = False

    prepare(tmp_path, 5, Live)
    with opened(tmp_path, delete="checkpoint") as consumer:
        first = consumer.state_dict()
        ids(consumer, 12)
        later = consumer.state_dict()
        consumer.load_state_dict(later)
        assert ids(consumer, 1) == stream(4, 48)
        consumer.load_state_dict(first)
        assert ids(consumer, 12) == stream(48)
        consumer.commit()
        with refused(QueueError, "train file 0"):
            consumer.load_state_dict(first)
        assert ids(consumer, 1) == stream(4, 48)


def test_another_working_directory_is_no_other_queue(tmp_path, monkeypatch):
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    consumer = opened(Path(tmp_path.name))
    ids(consumer, 4)
    monkeypatch.chdir("/")
    assert ids(consumer, 4) == stream(16, 16)
    consumer.close()


def test_a_link_to_the_folder_is_the_same_queue(tmp_path):
    prepare(tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    first, second = opened(tmp_path / "data"), opened(tmp_path / "link")
    ids(first, 1)
    assert ids(second, 1) == stream(4)  # of a process there is one reader: it goes on for the first
    with refused(QueueError, remedy="rank="):
        ids(first, 1)
    second.close()


def test_close_ends_a_wait_in_another_thread(tmp_path):
    prepare(tmp_path, 1)
    consumer = opened(tmp_path, timeout_seconds=600)
    ids(consumer, 5)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            consumer.get_batch("train")
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for("wait", lambda: os.listdir(tmp_path / "queue/control/train/wanted"))
    assert consumer.stats()["train"]["batches"] == 5
    consumer.close()
    thread.join()
    assert isinstance(raised[0], SpecError)
    assert "closed while it waited" in str(raised[0])
    assert not os.listdir(tmp_path / "queue/who")


def test_a_fork_while_another_thread_waits_can_use_its_own(tmp_path):
    prepare(tmp_path, 1)
    consumer = opened(tmp_path, timeout_seconds=600)
    ids(consumer, 5)

    def wait() -> None:
        with refused(SpecError):  # closed while it waited
            consumer.get_batch("train")

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for("wait", lambda: os.listdir(tmp_path / "queue/control/train/wanted"))
    child = os.fork()
    if not child:
        signal.alarm(240)
        try:
            consumer.timeout_seconds = 0
            consumer.get_batch("train")
        except NotReadyError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    consumer.close()
    thread.join()


@pytest.mark.parametrize("end", ["import atexit; atexit.register(c.close)", "", "raise SystemExit(0)"])
def test_the_end_of_the_program_says_nothing_and_leaves_the_queue(tmp_path, end):
    prepare(tmp_path)
    code = f"""
import batchwright as bw
c = bw.DatasetConsumer({str(tmp_path)!r}, framework="numpy")
for _ in range(7):
    c.get_batch("train")
{end}
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    with opened(tmp_path) as consumer:
        assert ids(consumer, 1) == stream(4, 28 if "close" in end else 24)


def test_a_provider_in_this_process_may_fill_the_same_array_again(tmp_path):
    class Reusing(Numbered):
        def sample_batch(self, split, rng):
            batch = super().sample_batch(split, rng)
            if not hasattr(self, "kept"):
                self.kept = {name: np.empty_like(array) for name, array in batch.items()}
            for name, array in batch.items():
                self.kept[name][:] = array
            return self.kept

    direct = DatasetConsumer(provider=Reusing("nowhere", **SETTINGS, val_batches=3), framework="numpy", batch_size=6)
    batches = [direct.get_batch("train")["id"] for _ in range(4)]
    assert np.concatenate(batches).tolist() == stream(24)
    assert ids(direct, 2, "val") == stream(12)


def test_the_providers_batches_are_whole_from_any_row_on(tmp_path):
    prepare(tmp_path)
    direct = DatasetConsumer(provider=Numbered("nowhere", **SETTINGS), framework="numpy")
    with opened(tmp_path) as consumer:
        state = {"queue": consumer.state_dict()["queue"], "train": {"file": 0, "batch": 4, "row": 3}}
        for one in (consumer, direct):
            one.load_state_dict(state | {"cut": {"train": [4, 5]}})
            assert [len(one.get_batch("train")["id"]) for _ in range(3)] == [4, 4, 4]


def test_meta_is_the_callers_to_change(tmp_path):
    prepare(tmp_path)
    with opened(tmp_path) as consumer:
        consumer.meta["vocab_size"] = 10
        assert ids(consumer, 1) == stream(4)


def test_a_consumer_that_is_pickled_is_opened_again_where_it_arrives(tmp_path):
    prepare(tmp_path)
    with opened(tmp_path, batch_size=2) as consumer:
        ids(consumer, 1)
        other = pickle.loads(pickle.dumps(consumer))
        assert ids(other, 1) == stream(2)  # in the same process: it goes on for the first
        other.close()


def test_a_split_that_nobody_makes_is_said(tmp_path):
    prepare(tmp_path, splits=("train",))
    with opened(tmp_path) as consumer:
        with refused(QueueError, split="val"):
            consumer.get_batch("val")
        assert "val" not in consumer.state_dict()
