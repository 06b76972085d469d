"""Kept validation batches: a file of their own that is made once, by the provider that started last."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from providers import SETTINGS, Counting, Numbered

from batchwright import DatasetConsumer, NotReadyError, WorkerError
from batchwright.queue.batch_file import read_facts
from batchwright.queue.members import QueueMember
from harness import wait_for
from refusals import refused


def prepare(folder: Path, num_files: int, kind=Numbered, splits=("train", "val"), **settings) -> None:
    kind(folder, **(SETTINGS | {"max_backlog_files": 99} | settings)).run(splits, max_files=num_files)


def opened(folder: Path, **settings) -> DatasetConsumer:
    return DatasetConsumer(folder, **({"framework": "numpy", "timeout_seconds": 10} | settings))


def ids(consumer: DatasetConsumer, num_batches: int, split: str = "val") -> list[int]:
    return [row for _ in range(num_batches) for row in consumer.get_batch(split)["id"].tolist()]


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def wait_until(is_so: Callable[[], bool]) -> None:
    wait_for("change", is_so)


# Their place


def test_kept_batches_are_made_first_and_once_and_have_no_number(tmp_path):
    prepare(tmp_path, 3, val_batches=7)
    file = tmp_path / "queue/val/kept.batches"
    assert os.listdir(tmp_path / "queue/val") == ["kept.batches"]
    assert (read_facts(file).number, read_facts(file).num_batches) == (0, 7)
    made = file.stat()
    prepare(tmp_path, 1, val_batches=7)
    assert file.stat() == made
    prepare(tmp_path, 1, val_batches=8)
    assert read_facts(file).num_batches == 8


def test_to_keep_batches_for_a_while_leaves_the_stream_as_it_was(tmp_path):
    prepare(tmp_path, 2, splits=("val",))
    with opened(tmp_path) as consumer:
        assert ids(consumer, 3) == [*range(12)]
    prepare(tmp_path, 1, splits=("val",), val_batches=2)
    with opened(tmp_path) as consumer:
        assert ids(consumer, 3) == [*range(8), *range(4)]
    prepare(tmp_path, 1, splits=("val",))
    with opened(tmp_path, timeout_seconds=0) as consumer:
        assert ids(consumer, 12) == [*range(12, 20), *range(1000, 1020), *range(2000, 2020)]
    prepare(tmp_path, 0, val_batches=2)
    with opened(tmp_path, timeout_seconds=0) as consumer:
        assert ids(consumer, 1) == [*range(4)]


# Who makes them


@pytest.mark.parametrize("other", [{"val_batches": 7}, {"val_batches": 5, "batch_size": 2}])
def test_of_two_that_differ_the_one_that_started_last_makes_them_and_once(tmp_path, running, other):
    file = tmp_path / "data/queue/val/kept.batches"
    first = running(Counting, val_batches=5, sleep_seconds=0.01)
    wait_until(file.exists)
    made = file.stat()
    last = running(Counting, **({"sleep_seconds": 0.01} | other))
    wait_until(lambda: file.stat() != made)
    time.sleep(0.2)  # some twenty looks of each
    assert (read_facts(file).num_batches, read_facts(file).batch_size) == (
        other["val_batches"],
        other.get("batch_size", 4),
    )
    assert (first.provider.num_begun, last.provider.num_begun) == (1, 1)
    file.unlink()
    wait_until(file.exists)
    assert (first.provider.num_begun, last.provider.num_begun) == (1, 2)


@pytest.mark.parametrize("val_batches", [2, None])
def test_what_a_dead_provider_began_is_removed(tmp_path, val_batches):
    prepare(tmp_path, 0)
    (tmp_path / "queue/val/.kept.provider-1-ab.part").touch()
    prepare(tmp_path, 1, splits=("val",), val_batches=val_batches)
    assert not list((tmp_path / "queue/val").glob(".*.part"))


def test_what_a_living_provider_makes_is_left_to_it_until_it_is_dead(tmp_path, running):
    queue = tmp_path / "data/queue"
    prepare(tmp_path / "data", 0)
    member = QueueMember(queue / "who", "provider", 30.0)
    part = queue / f"val/.kept.{member.id}.part"
    part.touch()
    running(val_batches=2, sleep_seconds=0.01)
    wait_until((queue / "train/00000001.batches").exists)
    assert os.listdir(queue / "val") == [part.name]
    member.leave()
    wait_until((queue / "val/kept.batches").exists)
    assert os.listdir(queue / "val") == ["kept.batches"]


def test_a_provider_that_is_stopped_in_the_middle_leaves_nothing_of_them(tmp_path):
    class Stopped(Numbered):
        def sample_batch(self, split, rng):
            self.stop()
            return super().sample_batch(split, rng)

    prepare(tmp_path, 1, kind=Stopped, val_batches=2)
    assert os.listdir(tmp_path / "queue/val") == os.listdir(tmp_path / "queue/control/val/wanted") == []


def test_an_error_while_they_are_made_names_them(tmp_path):
    class Failing(Numbered):
        def sample_batch(self, split, rng):
            if split == "val":
                raise ValueError("low >= high")
            return super().sample_batch(split, rng)

    with refused(WorkerError, "kept val batches", "ValueError: low >= high"):
        prepare(tmp_path, 1, kind=Failing, val_batches=2)
    with refused(WorkerError, "kept val batches", "ValueError: low >= high"):
        opened(tmp_path).get_batch("val")


# Who reads them


def test_a_damaged_file_is_put_aside_and_made_again(tmp_path, running):
    prepare(tmp_path / "data", 1, val_batches=2)
    flip_last_byte(tmp_path / "data/queue/val/kept.batches")
    said = "the file of kept val batches was not there after 0 s"
    with opened(tmp_path / "data", timeout_seconds=0) as alone, pytest.raises(NotReadyError, match=said):
        alone.get_batch("val")
    queue = tmp_path / "data/queue"
    assert sorted(os.listdir(queue / "quarantine")) == ["val-kept.0.batches", "val-kept.0.json"]
    assert os.listdir(queue / "control/val/wanted") == []
    running(val_batches=2)
    with opened(tmp_path / "data") as consumer:
        assert ids(consumer, 2) == [*range(8)]


def test_an_evaluation_needs_nobody_where_the_batches_were_read_before(tmp_path):
    prepare(tmp_path, 2, val_batches=2)
    with opened(tmp_path, timeout_seconds=0) as consumer:
        assert ids(consumer, 1) == [*range(4)]
        (tmp_path / "queue/val/kept.batches").unlink()
        assert ids(consumer, 1, "train") == [*range(4)]
        assert ids(consumer, 2) == [*range(8)]


def test_batches_that_were_made_anew_come_with_the_next_evaluation(tmp_path):
    prepare(tmp_path, 2, val_batches=2)
    with opened(tmp_path, timeout_seconds=0) as consumer:
        assert ids(consumer, 1) == [*range(4)]
        prepare(tmp_path, 1, val_batches=3)
        assert ids(consumer, 2) == [*range(4, 8), *range(4)]
        consumer.get_batch("train")
        assert ids(consumer, 4) == [*range(12), *range(4)]


def test_new_batches_that_are_damaged_are_put_aside_and_the_old_ones_are_read(tmp_path):
    prepare(tmp_path, 2, val_batches=2)
    with opened(tmp_path, timeout_seconds=0) as consumer:
        assert ids(consumer, 1) == [*range(4)]
        prepare(tmp_path, 1, val_batches=3)
        flip_last_byte(tmp_path / "queue/val/kept.batches")
        consumer.get_batch("train")
        assert ids(consumer, 2) == [*range(8)]
        assert consumer.stats()["val"]["quarantined_files"] == 1
    assert not (tmp_path / "queue/val/kept.batches").exists()
