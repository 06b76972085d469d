"""Ranks and single consumers on one queue, one kind after the other: nothing is lost, what comes again is counted."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from providers import SETTINGS, Numbered
from test_queue_folder import Kill, Killed, kill

from batchwright import BusyError, DatasetConsumer, NotReadyError, QueueError
from batchwright.queue.ranks import RankProgress, RankRecords
from batchwright.queue.reading import Position
from refusals import refused

FILE_ROWS = SETTINGS["batch_size"] * SETTINGS["batches_per_file"]  # 4 * 5


class NeverAgain(Numbered):
    reproducible = False


@pytest.fixture
def data(tmp_path: Path) -> Path:
    prepare(tmp_path, 6)
    return tmp_path


def prepare(folder: Path, num_files: int, kind: type[Numbered] = Numbered, **settings) -> None:
    kind(folder, **(SETTINGS | {"max_backlog_files": 99} | settings)).run(("train",), max_files=num_files)


def single(folder: Path, **settings) -> DatasetConsumer:
    return DatasetConsumer(folder, **({"framework": "numpy", "timeout_seconds": 5} | settings))


def ranks(folder: Path, world_size: int = 2, **settings) -> list[DatasetConsumer]:
    return [single(folder, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]


def ids(consumers: DatasetConsumer | list[DatasetConsumer], num_steps: int) -> list[int]:
    """What is handed out in so many steps, to one after the other."""
    every = consumers if isinstance(consumers, list) else [consumers]
    return [id for _ in range(num_steps) for one in every for id in one.get_batch("train")["id"].tolist()]


def rows(start: int, stop: int) -> list[int]:
    """The ids of these rows of the stream."""
    return [1000 * (row // FILE_ROWS) + row % FILE_ROWS for row in range(start, stop)]


def close(consumers: list[DatasetConsumer]) -> None:
    for one in consumers:
        one.close()


def die(*consumers: DatasetConsumer) -> None:
    """As in a kill -9: the lock is gone, and nothing is recorded."""
    for one in consumers:
        kill(one._memberships[0].member)


def again(consumer: DatasetConsumer) -> int:
    return consumer.stats()["train"]["redelivered_batches"]


def what_is_there(folder: Path) -> set[tuple[str, bytes]]:
    control = folder / "queue/control"
    return {(str(path), path.read_bytes()) for path in control.rglob("*") if path.is_file()}


# One kind after the other


def test_ranks_go_on_where_a_single_consumer_closed(data):
    with single(data) as consumer:
        assert ids(consumer, 8) == rows(0, 32)
    both = ranks(data)
    assert ids(both, 3) == rows(32, 56)
    assert [again(one) for one in both] == [0, 0]
    assert not os.listdir(data / "queue/control/train/returned")


def test_ranks_get_the_batch_again_that_a_single_consumer_died_with(data):
    consumer = single(data)
    ids(consumer, 8)
    die(consumer)
    both = ranks(data)
    assert ids(both, 3) == rows(28, 52)
    assert [again(one) for one in both] == [1, 0]


def test_ranks_skip_a_file_that_a_single_consumer_had_recorded_and_not_deleted(data, monkeypatch):
    consumer = single(data)
    ids(consumer, 5)
    monkeypatch.setattr(consumer._streams["train"].reader, "do_later", lambda work: None)
    ids(consumer, 3)
    die(consumer)
    assert ids(ranks(data), 2) == rows(28, 44)


def test_ranks_go_on_from_the_lowest_row_of_single_consumers(data):
    slow, fast = single(data), single(data, rank=None)
    stream = fast._stream("train")
    stream.rank = 7  # two consumers of one process: as of two
    ids(slow, 2)
    assert ids(fast, 5) == rows(20, 40)
    fast.close()  # file 1 is read and done
    die(slow)
    both = ranks(data, timeout_seconds=0)
    assert ids(both, 2) == rows(4, 20)
    with refused(NotReadyError, "train file 1"):  # it is made again, by a provider
        ids(both, 1)
    prepare(data, 1)
    assert ids(both, 1) == rows(20, 28)
    assert [again(one) for one in both] == [1, 0]  # of the first file


def test_a_single_consumer_cannot_go_on_for_ranks_and_is_told_the_two_ways(data):
    both = ranks(data)
    assert ids(both, 4) == rows(0, 32)
    state = both[0].state_dict()
    close(both)
    before = what_is_there(data)
    with single(data) as consumer, refused(QueueError, "train", remedy="rank=0, world_size=1"):
        consumer.get_batch("train")
    assert what_is_there(data) == before
    with single(data, rank=0, world_size=1) as consumer:
        assert ids(consumer, 2) == rows(32, 40)
        assert again(consumer) == 0
    with single(data) as consumer:
        consumer.load_state_dict(state)
        prepare(data, 1)  # file 1 was deleted
        assert ids(consumer, 5) == rows(32, 52)
        assert not list((data / "queue/control/train/ranks").iterdir())


def test_one_rank_goes_on_from_the_slowest_of_many(data):
    slow, fast = ranks(data)
    ids([slow, fast], 1)
    ids(fast, 3)
    close([slow, fast])
    assert ids(single(data, rank=0, world_size=1), 2) == rows(8, 16)


def test_one_rank_goes_on_in_the_right_file_where_a_step_is_longer_than_a_file(tmp_path):
    prepare(tmp_path, 9, batches_per_file=1)
    many = ranks(tmp_path, 3)
    ids(many, 2)
    close(many)
    with single(tmp_path, rank=0, world_size=1) as consumer:
        assert consumer.get_batch("train")["id"].tolist() == [6000, 6001, 6002, 6003]


def test_nothing_before_a_state_comes_after_a_kill_where_a_step_is_longer_than_a_file(tmp_path):
    prepare(tmp_path, 6, batches_per_file=1)
    many = ranks(tmp_path, 3)
    ids(many, 1)
    state = many[0].state_dict()
    close(many)
    consumer = single(tmp_path)
    consumer.load_state_dict(state)
    assert ids(consumer, 1) == [3000, 3001, 3002, 3003]
    die(consumer)
    assert ids(single(tmp_path), 1) == [3000, 3001, 3002, 3003]


def test_the_number_of_ranks_changes_often_and_every_row_comes_once(data):
    prepare(data, 8)
    handed = []
    for turn in range(6):
        readers = ranks(data, 1 + turn)
        handed += ids(readers, 3)
        close(readers)
    assert handed == rows(0, len(handed))
    assert len(handed) > 4 * FILE_ROWS


def test_ranks_of_another_number_get_again_and_count_what_the_ones_before_died_with(data):
    both = ranks(data)
    ids(both, 3)
    die(*both)
    three = ranks(data, 3)
    assert ids(three, 2) == rows(16, 40)
    assert [again(one) for one in three] == [1, 1, 0]


def test_each_rank_counts_what_it_was_handed_itself(data):
    slow, fast = ranks(data)
    ids([slow, fast], 1)
    ids(fast, 3)
    die(slow, fast)
    slow, fast = ranks(data)
    assert ids([slow, fast], 5) == rows(0, 40)
    assert (again(slow), again(fast)) == (1, 4)


def test_a_rank_that_is_started_again_counts_its_last_batch(data):
    first, second = ranks(data)
    ids([first, second], 3)
    die(second)
    second = single(data, rank=1, world_size=2)
    assert ids(second, 2) == rows(20, 24) + rows(28, 32)
    assert again(second) == 1


def test_a_state_that_is_loaded_counts_and_not_what_ranks_had_recorded(data):
    with single(data) as consumer:
        ids(consumer, 3)
        state = consumer.state_dict()
    both = ranks(data)
    ids(both, 3)
    close(both)
    with single(data) as consumer:
        consumer.load_state_dict(state)
        prepare(data, 1)  # file 0 was deleted
        assert ids(consumer, 2) == rows(12, 20)
        assert again(consumer) == 0


def test_a_rank_knows_where_it_will_begin_before_it_comes(data):
    with single(data) as consumer:
        ids(consumer, 6)
    one = ranks(data)[1]
    assert one.state_dict()["train"] == {"file": 1, "batch": 1}
    assert not os.listdir(data / "queue/who")


def test_killed_between_any_two_steps_a_new_run_of_ranks_goes_on_where_the_one_before_was(tmp_path, monkeypatch):
    def left_off(change: int | None) -> tuple[RankProgress | None, int]:
        records = RankRecords(tmp_path / str(change))
        records.folder.mkdir()
        records.write_began(RankProgress(Position(0, 0), Position(0, 0)), [])
        for rank, row in enumerate((5, 9, 7)):
            records.path(rank, 3).write_bytes(RankProgress(Position(2, row), Position(2, row + 3)).packed())
        with monkeypatch.context() as patch:
            count = Kill(patch, before_change=change)
            with contextlib.suppress(Killed):
                left = records.left_off()
                assert left is not None
                records.begin_again(left, 2, ["consumer-1"])
        return records.left_off(), count.num_changes

    left, num_changes = left_off(None)
    assert left == RankProgress(Position(2, 5), Position(2, 12))
    assert num_changes > 3
    for change in range(num_changes):
        assert left_off(change)[0] == left, change


# Not both at once


def test_a_single_consumer_is_refused_beside_living_ranks_and_goes_on_when_they_are_gone(data):
    both = ranks(data)
    assert ids(both, 1) == rows(0, 8)
    state, before = both[0].state_dict(), what_is_there(data)
    consumer = single(data)
    with refused(BusyError, "train", remedy="rank=") as caught:
        consumer.get_batch("train")
    pid = os.getpid()
    assert caught.value.where["process"] == f"consumer, pid {pid} (rank 0 of 2), consumer, pid {pid} (rank 1 of 2)"
    assert "rank=" in caught.value.remedy
    with refused(BusyError, "train", remedy="rank="):
        consumer.load_state_dict(state)
    assert what_is_there(data) == before
    assert ids(both, 2) == rows(8, 24)
    close(both)
    consumer.load_state_dict(both[0].state_dict())
    assert ids(consumer, 2) == rows(24, 32)


def test_ranks_are_refused_beside_a_living_single_consumer(data):
    consumer = single(data)
    ids(consumer, 1)
    with refused(BusyError, "rank 0 of 2", "train"):
        ranks(data)[0].get_batch("train")
    assert ids(consumer, 1) == rows(4, 8)


def test_a_rank_that_seemed_dead_goes_on_after_a_run_that_went_on_for_it(data):
    (rank,) = ranks(data, 1)
    ids(rank, 2)
    die(rank)
    with single(data, rank=1, world_size=2) as other:
        assert ids(other, 2) == rows(8, 12) + rows(16, 20)
    assert ids(rank, 2) == rows(4, 12)
    assert rank.stats()["train"]["lost_claims"] == 1


@pytest.mark.parametrize("delete", ["consumed", "checkpoint"])
def test_a_rank_that_seemed_dead_and_was_not_replaced_comes_back_where_it_was(data, delete):
    both = ranks(data, delete=delete)
    ids(both, 3)
    die(both[0])
    (data / "queue/who" / both[0]._memberships[0].member.id).unlink()  # buried
    assert ids(both, 3) == rows(24, 48)
    assert [again(one) for one in both] == [0, 0]
    die(*both)
    assert ids(ranks(data), 1) == (rows(40, 48) if delete == "consumed" else rows(0, 8))


def test_a_rank_that_seemed_dead_goes_on_after_the_one_that_was_started_in_its_place(data):
    both = ranks(data)
    ids(both, 1)
    die(both[0])
    (data / "queue/who" / both[0]._memberships[0].member.id).unlink()
    place = RankProgress(Position(1, 4), Position(1, 8))  # as another process recorded it, and ended
    (data / "queue/control/train/ranks/00000-of-00002").write_bytes(place.packed())
    assert ids(both[0], 1) == rows(24, 28)
    assert again(both[0]) == 1


# What ranks hold


def test_ranks_load_a_state_of_a_provider_that_makes_nothing_again(tmp_path):
    prepare(tmp_path, 4, NeverAgain)
    both = ranks(tmp_path, delete="checkpoint")
    ids(both, 3)
    state = both[0].state_dict()
    ids(both, 3)
    close(both)
    both = ranks(tmp_path, delete="checkpoint")
    for one in both:
        one.load_state_dict(state)
    assert ids(both, 2) == rows(24, 40)
    for one in both:
        one.commit()
    assert not (tmp_path / "queue/train/00000000.batches").exists()


def test_a_rank_that_waits_in_vain_leaks_no_descriptor_and_then_goes_on(tmp_path):
    prepare(tmp_path, 1)
    rank = ranks(tmp_path, 1, timeout_seconds=0)[0]
    (tmp_path / "queue/train/00000000.batches").unlink()
    counts = []
    for _ in range(4):
        with refused(NotReadyError, "train file 0"):
            rank.get_batch("train")
        counts.append(len(os.listdir("/dev/fd")))
    assert counts[1:] == counts[:1] * 3
    prepare(tmp_path, 1)
    assert ids(rank, 2) == rows(0, 8)


def test_a_batch_that_could_not_be_converted_comes_again_on_every_rank(data, monkeypatch):
    both = ranks(data)
    ids(both, 2)
    place = both[0].state_dict()

    def fail(batch, device):
        raise MemoryError("no room on the device")

    for one in both:
        with monkeypatch.context() as patch:
            patch.setattr(one, "_converted", fail)
            for _ in range(2):
                with pytest.raises(MemoryError, match="no room"):
                    one.get_batch("train")
        assert one.state_dict() == place
    assert ids(both, 2) == rows(16, 32)
    assert [again(one) for one in both] == [0, 0]


def test_ranks_hold_only_files_in_memory_that_they_still_need(data):
    both = ranks(data, delete="checkpoint")
    for _ in range(12):
        ids(both, 1)
        assert all(len(one._streams["train"]._files) <= 2 for one in both)
    assert len(list((data / "queue/train").glob("*.batches"))) == 6
