"""`DatasetConsumer`: the stream of a queue, in order, from anywhere, in any framework; and what it says if it waits."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from providers import SETTINGS, Numbered, Pair

from batchwright import (
    DatasetConsumer,
    MissingQueueError,
    NotReadyError,
    PlanError,
    QueueError,
    SpecError,
    WorkerError,
)
from refusals import refused

FILE_ROWS = SETTINGS["batch_size"] * SETTINGS["batches_per_file"]


def prepare(folder: Path, num_files: int = 4, kind=Numbered, splits=("train",), **settings) -> None:
    kind(folder, **(SETTINGS | {"max_backlog_files": 99} | settings)).run(splits, max_files=num_files)


def opened(folder: Path, **settings) -> DatasetConsumer:
    return DatasetConsumer(folder, **({"framework": "numpy", "timeout_seconds": 10} | settings))


def ids(consumer: DatasetConsumer, num_batches: int, split: str = "train") -> list[int]:
    return [row for _ in range(num_batches) for row in consumer.get_batch(split)["id"].tolist()]


def stream(num_rows: int, first: int = 0) -> list[int]:
    """The ids of the stream of `Numbered`: rows of a file, file after file."""
    return [1000 * (row // FILE_ROWS) + row % FILE_ROWS for row in range(first, first + num_rows)]


# The stream


def test_batches_come_in_order_and_files_that_were_read_are_deleted(tmp_path):
    prepare(tmp_path, 3)
    with opened(tmp_path) as consumer:
        assert ids(consumer, 11) == stream(44)
        consumer.commit()
        assert sorted(path.name for path in (tmp_path / "queue/train").glob("*.batches")) == []
        assert [path.name[:8] for path in (tmp_path / "queue/control/train/claimed").glob("*.batches")] == ["00000002"]
    assert [path.name for path in (tmp_path / "queue/train").glob("*.batches")] == ["00000002.batches"]
    assert not os.listdir(tmp_path / "queue/who")


def test_x_and_y_come_as_a_pair_and_other_schemas_as_a_dict(tmp_path):
    prepare(tmp_path / "pair", kind=Pair)
    X, Y = opened(tmp_path / "pair").get_batch("train")
    assert X.shape == Y.shape == (4, 3)
    assert np.array_equal(X + 1, Y)
    prepare(tmp_path / "dict")
    assert [*opened(tmp_path / "dict").get_batch("train")] == ["id", "x"]


def test_meta_and_schema_are_what_the_provider_said(tmp_path):
    prepare(tmp_path)
    consumer = opened(tmp_path)
    assert consumer.meta == Numbered(tmp_path, **SETTINGS).build_meta()
    assert consumer.schema("train") == consumer.meta["batch_schema"]


@settings(max_examples=25)
@given(batch_size=st.integers(1, 50), resume_after=st.integers(0, 6))
def test_any_batch_size_gives_the_same_rows_from_any_state(tmp_path_factory, batch_size, resume_after):
    folder = tmp_path_factory.mktemp("queue")
    prepare(folder, 1 + 7 * batch_size // FILE_ROWS)
    with opened(folder, batch_size=batch_size) as consumer:
        before = ids(consumer, resume_after)
        state = json.loads(json.dumps(consumer.state_dict()))
        assert before + ids(consumer, 7 - resume_after) == stream(7 * batch_size)
    direct = DatasetConsumer(provider=Numbered(folder, **SETTINGS), batch_size=batch_size, framework="numpy")
    direct.load_state_dict(state)
    assert ids(direct, 7 - resume_after) == stream((7 - resume_after) * batch_size, resume_after * batch_size)


def test_a_provider_in_this_process_gives_the_same_bytes_as_its_files(tmp_path):
    prepare(tmp_path, 6, splits=("train", "val"))
    direct = DatasetConsumer(provider=Numbered("nowhere", **SETTINGS), framework="numpy")
    with opened(tmp_path) as consumer:
        for split in ("train", "val", "train"):
            for _ in range(6):
                ours, theirs = direct.get_batch(split), consumer.get_batch(split)
                assert all(np.array_equal(ours[name], theirs[name]) for name in ("id", "x"))
        assert direct.state_dict() == consumer.state_dict()
    assert not Path("nowhere").exists()


def test_a_kept_batch_is_never_overwritten(tmp_path):
    prepare(tmp_path, 30)
    with opened(tmp_path) as consumer:
        kept = [consumer.get_batch("train") for _ in range(150)]
    assert [row for batch in kept for row in batch["id"].tolist()] == stream(600)


def test_a_batch_may_be_written_into_and_nobody_else_sees_it(tmp_path):
    prepare(tmp_path, 3, splits=("train", "val"), val_batches=2)
    with opened(tmp_path) as consumer:
        for split in ("train", "val"):
            consumer.get_batch(split)["id"][:] = -1
        assert ids(consumer, 1) == stream(4, 4)
        assert ids(consumer, 2, "val") == stream(8)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "mlx"])
def test_batches_are_arrays_of_the_framework_with_the_same_numbers(tmp_path, framework):
    prepare(tmp_path)
    with opened(tmp_path, framework=framework) as consumer:
        batch = consumer.get_batch("train")
    assert type(batch["x"]).__module__.split(".")[0] in {"jax": ("jax", "jaxlib")}.get(framework, (framework,))
    assert np.array_equal(np.asarray(batch["id"]), [0, 1, 2, 3])
    assert batch["x"].shape == (4, 3)


def test_without_a_framework_it_is_torch_where_the_program_has_imported_it(tmp_path):
    prepare(tmp_path)
    code = (
        "import sys; {} import batchwright as bw; print(type(bw.DatasetConsumer(sys.argv[1]).get_batch('train')['x']))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code.format(first), str(tmp_path)], capture_output=True, text=True, check=True
        ).stdout
        for first in ("", "import torch;")
    ]
    assert said == ["<class 'numpy.ndarray'>\n", "<class 'torch.Tensor'>\n"]


# State


def test_a_state_is_a_file_and_a_batch_and_goes_on_exactly_though_files_were_deleted(tmp_path, running):
    running()
    with opened(tmp_path / "data") as consumer:
        ids(consumer, 7)
        state = consumer.state_dict()
        assert state["train"] == {"file": 1, "batch": 2}
        assert ids(consumer, 20) == stream(80, 28)
    with opened(tmp_path / "data") as consumer:
        consumer.load_state_dict(state)
        assert consumer.state_dict() == state
        assert ids(consumer, 20) == stream(80, 28)


def test_a_state_loads_on_a_queue_that_was_thrown_away_since(tmp_path, running):
    first = running()
    with opened(tmp_path / "data") as consumer:
        ids(consumer, 12)
        state = consumer.state_dict()
    first.stop()
    shutil.rmtree(tmp_path / "data/queue")
    running()
    with opened(tmp_path / "data") as consumer:
        consumer.load_state_dict(state)
        assert ids(consumer, 5) == stream(20, 48)
    assert not (tmp_path / "data/queue/train/00000000.batches").exists()


def test_a_state_loads_in_the_middle_of_a_run(tmp_path, running):
    running()
    with opened(tmp_path / "data") as consumer:
        start = consumer.state_dict() | {"train": {"file": 0, "batch": 0}, "cut": {"train": [4, 5]}}
        ids(consumer, 13)
        consumer.load_state_dict(start)
        assert ids(consumer, 13) == stream(52)
        ahead = start | {"train": {"file": 9, "batch": 4}}
        consumer.load_state_dict(ahead)
        assert ids(consumer, 3) == stream(12, 9 * FILE_ROWS + 16)


def test_files_of_a_provider_that_cannot_make_them_again_are_kept_until_commit(tmp_path):
    class Live(Numbered):
        reproducible = False

    prepare(tmp_path, 5, Live)
    with opened(tmp_path, delete="checkpoint") as consumer:
        ids(consumer, 6)
        state = consumer.state_dict()
        consumer.commit()
        assert ids(consumer, 9) == stream(36, 24)
    with opened(tmp_path, delete="checkpoint") as consumer:
        consumer.load_state_dict(state)
        assert ids(consumer, 9) == stream(36, 24)
        with refused(QueueError, "train file 0", remedy="checkpoint") as caught:
            consumer.load_state_dict(state | {"train": {"file": 0, "batch": 0}})
        assert "checkpoint" in caught.value.remedy


def test_what_a_closed_consumer_was_handed_does_not_come_again(tmp_path):
    prepare(tmp_path)
    with opened(tmp_path) as consumer:
        ids(consumer, 3)
    consumer.close()
    with opened(tmp_path) as consumer:
        assert ids(consumer, 1) == stream(4, 12)
        assert consumer.stats()["train"]["redelivered_batches"] == 0


def fail_in_a_step(folder: Path) -> None:
    with opened(folder) as consumer:
        ids(consumer, 3)
        raise ZeroDivisionError


def test_the_batch_that_a_failing_step_worked_on_comes_again_and_is_counted(tmp_path):
    prepare(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fail_in_a_step(tmp_path)
    with opened(tmp_path) as consumer:
        assert ids(consumer, 1) == stream(4, 8)
        assert consumer.stats()["train"]["redelivered_batches"] == 1


def test_a_consumer_that_is_let_go_of_leaves_the_queue(tmp_path):
    prepare(tmp_path)
    consumer = opened(tmp_path)
    ids(consumer, 3)
    del consumer
    gc.collect()
    assert not os.listdir(tmp_path / "queue/who")
    with opened(tmp_path) as consumer:
        assert ids(consumer, 1) == stream(4, 8)


def test_commit_says_that_the_last_batch_is_used(tmp_path):
    prepare(tmp_path)
    consumer = opened(tmp_path)
    ids(consumer, 3)
    consumer.commit()
    del consumer
    gc.collect()
    with opened(tmp_path) as consumer:
        assert ids(consumer, 1) == stream(4, 12)


def test_a_second_consumer_of_a_process_goes_on_for_the_first_which_says_so(tmp_path):
    prepare(tmp_path)
    first = opened(tmp_path)
    before = ids(first, 7)
    second = opened(tmp_path)
    after = ids(second, 13)
    assert before[:-4] + after[:4] == stream(28)  # the first one's last batch was not recorded: it comes again
    assert after == stream(52, 24)
    assert second.stats()["train"]["redelivered_batches"] == 1
    with refused(QueueError, split="train", remedy="rank="):
        first.get_batch("train")
    second.close()


# Validation


def test_kept_validation_batches_begin_again_with_each_evaluation(tmp_path):
    prepare(tmp_path, 3, splits=("train", "val"), val_batches=3)
    with opened(tmp_path) as consumer:
        assert ids(consumer, 2, "val") == stream(8)
        assert ids(consumer, 2, "val") == [*stream(4, 8), *stream(4)]  # more than there are: from the first again
        ids(consumer, 1)
        assert ids(consumer, 2, "val") == stream(8)
        assert "val" not in consumer.state_dict()


def test_kept_validation_batches_do_not_wait_for_a_provider(tmp_path):
    prepare(tmp_path, 1, splits=("train", "val"), val_batches=3)
    with opened(tmp_path, timeout_seconds=0) as one, opened(tmp_path, timeout_seconds=0) as other:
        assert ids(one, 3, "val") == ids(other, 3, "val") == stream(12)


def test_streamed_validation_batches_are_a_stream_of_their_own(tmp_path):
    prepare(tmp_path, 4, splits=("train", "val"))
    with opened(tmp_path) as consumer:
        assert ids(consumer, 3, "val") == stream(12)
        assert ids(consumer, 3) == stream(12)
        assert ids(consumer, 3, "val") == stream(12, 12)
        assert consumer.state_dict()["val"] == {"file": 1, "batch": 1}


# Damage


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap"])
def test_a_damaged_file_is_put_aside_and_made_again_and_no_row_is_lost(tmp_path, running, damage):
    prepare(tmp_path / "data", 3)
    path = tmp_path / "data/queue/train/00000001.batches"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-9] ^= 4
    elif damage == "cut":
        content = content[:-100]
    elif damage == "empty":
        content.clear()
    else:
        content[:] = (tmp_path / "data/queue/train/00000002.batches").read_bytes()
    path.write_bytes(content)
    running()
    with opened(tmp_path / "data") as consumer:
        assert ids(consumer, 17) == stream(68)
        assert consumer.stats()["train"]["quarantined_files"] == 1
    aside, report = sorted((tmp_path / "data/queue/quarantine").iterdir())
    assert aside.read_bytes() == bytes(content)
    assert json.loads(report.read_text())["number"] == 1


def test_a_queue_that_was_made_anew_under_a_consumer_is_not_mixed_with_the_old_one(tmp_path):
    class Changed(Numbered):
        def build_meta(self):
            return super().build_meta() | {"vocab_size": 9}

    prepare(tmp_path, 1)
    with opened(tmp_path, timeout_seconds=1) as consumer:
        ids(consumer, 5)
        shutil.rmtree(tmp_path / "queue")
        prepare(tmp_path, 2, Changed)
        with refused(QueueError, tmp_path, remedy="DatasetConsumer"):
            ids(consumer, 1)
    assert len(list((tmp_path / "queue/train").glob("*.batches"))) == 2
    with opened(tmp_path) as consumer:
        assert consumer.meta["vocab_size"] == 9


def test_a_queue_that_was_deleted_and_made_again_is_not_read_from_its_beginning(tmp_path):
    prepare(tmp_path, 1)
    with opened(tmp_path, timeout_seconds=1) as consumer:
        ids(consumer, 5)
        state = consumer.state_dict()
        shutil.rmtree(tmp_path / "queue")
        prepare(tmp_path, 3)
        with refused(QueueError, tmp_path, remedy="load_state_dict"):
            ids(consumer, 1)
    with opened(tmp_path) as consumer:
        consumer.load_state_dict(state)
        assert ids(consumer, 3) == stream(12, FILE_ROWS)


def test_files_of_another_provider_are_refused_though_the_folder_is_the_same(tmp_path):
    class Changed(Numbered):
        def build_meta(self):
            return super().build_meta() | {"vocab_size": 9}

    prepare(tmp_path, 1)
    prepare(tmp_path / "other", 2, Changed)
    shutil.copy(tmp_path / "other/queue/train/00000001.batches", tmp_path / "queue/train")
    with opened(tmp_path, timeout_seconds=1) as consumer:
        ids(consumer, 5)
        with refused(QueueError, "train file 1") as caught:
            ids(consumer, 1)
        assert "batchwright queue purge" in caught.value.remedy
    assert (tmp_path / "queue/train/00000001.batches").exists()


# Waiting


def test_a_missing_queue_is_said_with_what_to_run(tmp_path):
    with refused(MissingQueueError, tmp_path) as caught:
        DatasetConsumer(tmp_path / "data/toy")
    assert isinstance(caught.value, FileNotFoundError)
    assert "prepare" in caught.value.remedy
    assert caught.value.where["folder"] == tmp_path / "data/toy/queue"
    assert not list(tmp_path.iterdir())


def test_a_folder_without_meta_and_without_a_provider_is_a_missing_queue(tmp_path):
    (tmp_path / "queue").mkdir()
    with refused(MissingQueueError, "meta.json", "no provider"):
        DatasetConsumer(tmp_path, timeout_seconds=0)


def test_a_timeout_says_who_is_waited_for_and_takes_nothing(tmp_path, running):
    class Slow(Numbered):
        def sample_batch(self, split, rng):
            while self.number == 1 and not self._stopping.wait(0.01):
                pass
            return super().sample_batch(split, rng)

    running(Slow)
    with opened(tmp_path / "data", timeout_seconds=0.3, batch_size=FILE_ROWS + 1) as consumer:
        with refused(NotReadyError, "train file 1", "0.3 s") as caught:
            consumer.get_batch("train")
        assert f"provider, pid {os.getpid()}: makes train file 1, since" in caught.value.where["providers"]
        assert consumer.state_dict()["train"] == {"file": 0, "batch": 0}


def test_without_a_provider_a_timeout_says_so(tmp_path):
    prepare(tmp_path, 1)
    with opened(tmp_path, timeout_seconds=0.2) as consumer:
        assert ids(consumer, 5) == stream(20)
        with refused(NotReadyError, "train file 1") as caught:
            consumer.get_batch("train")
    assert caught.value.where["providers"] == "none is running"
    assert "batchwright prepare" in caught.value.remedy


def test_what_a_provider_died_of_is_raised_at_once_but_not_before_what_is_ready_was_handed_out(tmp_path, running):
    class Failing(Numbered):
        def sample_batch(self, split, rng):
            if (split, self.number) == ("train", 2):
                raise ValueError("low >= high")
            return super().sample_batch(split, rng)

    one = running(Failing, max_backlog_files=5)
    one.thread.join()
    with opened(tmp_path / "data", timeout_seconds=600) as consumer:
        assert ids(consumer, 10) == stream(40)
        with refused(WorkerError, "train file 2", "ValueError: low >= high", "test_consumer.py:") as caught:
            consumer.get_batch("train")
        assert "Traceback" in caught.value.where["traceback"]


def test_the_folder_deleted_under_a_consumer_is_one_clear_error(tmp_path):
    prepare(tmp_path, 1)
    with opened(tmp_path, timeout_seconds=600) as consumer:
        ids(consumer, 1)
        shutil.rmtree(tmp_path / "queue")
        assert ids(consumer, 4) == stream(16, 4)  # what it has read
        state = consumer.state_dict()
        with refused(QueueError, tmp_path) as caught:
            consumer.get_batch("train")
        assert "load_state_dict" in caught.value.remedy
    assert state["train"] == {"file": 1, "batch": 0}


def test_a_forked_child_is_a_consumer_of_its_own(tmp_path):
    prepare(tmp_path, 2)
    with opened(tmp_path) as consumer:
        assert ids(consumer, 1) == stream(4)
        child = os.fork()
        if not child:
            try:
                is_right = ids(consumer, 2) == stream(8, FILE_ROWS)
            finally:
                os._exit(0 if is_right else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert ids(consumer, 4) == stream(16, 4)
        assert ids(consumer, 1) == stream(4, FILE_ROWS + 4)  # the child's end recorded its first batch, not its last


# Bad input


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": -3}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 99}, "block_size"),
        ({"target_size": "x"}, "target_size"),
        ({"timeout_seconds": -1}, "timeout_seconds"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds"),
        ({"lease_seconds": 0}, "lease_seconds"),
        ({"framework": "keras"}, "framework"),
        ({"framework": "numpy", "device": "cuda"}, "device"),
        ({"delete": "never"}, "delete"),
        ({"rank": 0}, "world_size"),
        ({"world_size": 2}, "rank"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"rank": 0, "world_size": 0}, "world_size"),
    ],
)
def test_a_parameter_of_a_consumer_that_cannot_work_is_named(tmp_path, settings, name):
    prepare(tmp_path, 1)
    before = sorted(tmp_path.rglob("*"))
    with refused(SpecError, name) as caught:
        DatasetConsumer(tmp_path, **settings)
    assert caught.value.where["parameter"] == name
    assert caught.value.remedy
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("split", ["test", "", None, "../train", 0])
def test_a_split_that_is_none_is_named(tmp_path, split):
    prepare(tmp_path, 1)
    with refused(SpecError, parameter="split"):
        opened(tmp_path).get_batch(split)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "not the state of a consumer"),
        ({}, "not the state of a consumer"),
        ({"queue": "0" * 32, "train": {"file": 0, "batch": 0}}, "of another queue"),
        ({"train": {"file": -1, "batch": 0}}, r"train\.file"),
        ({"train": {"file": 1}}, "batch.*train"),
        ({"train": {"file": 1.5, "batch": 0}}, r"train\.file"),
        ({"train": {"file": 1, "batch": 2}, "cut": {}}, "train"),
        ({"train": [0, 1]}, "train"),
        ({"test": {"file": 0, "batch": 0}}, "test"),
    ],
)
def test_a_state_that_does_not_belong_here_is_refused_and_nothing_moves(tmp_path, state, said):
    prepare(tmp_path, 2)
    with opened(tmp_path) as consumer:
        ids(consumer, 3)
        before = consumer.state_dict()
        if state and "queue" not in state:
            state = {"queue": before["queue"], "cut": {"train": [4, 5]}} | state
        with pytest.raises(PlanError, match=said) as caught:
            consumer.load_state_dict(state)
        assert caught.value.remedy
        assert consumer.state_dict() == before
        assert ids(consumer, 1) == stream(4, 12)


def test_a_state_of_batches_of_another_size_is_refused_by_both_numbers_until_the_provider_makes_those(
    tmp_path, running
):
    first = running(batch_size=8)
    with opened(tmp_path / "data") as consumer:
        ids(consumer, 6)
        state = consumer.state_dict()
        after = ids(consumer, 3)
        ids(consumer, 6)  # file 1 is deleted: the next provider has to make it again
    first.stop()
    second = running(batch_size=4)
    with opened(tmp_path / "data") as consumer:
        ids(consumer, 1)
        consumer.load_state_dict(state)
        said = "the state counts in files of 5 batches of 8 rows, and train file 1 has 5 of 4"
        with pytest.raises(PlanError, match=said) as caught:
            ids(consumer, 1)
        assert "batch_size = 8" in caught.value.remedy
        second.stop()
        running(batch_size=8)
        consumer.load_state_dict(state)
        assert ids(consumer, 3) == after


def test_a_closed_consumer_says_that_it_is(tmp_path):
    prepare(tmp_path, 1)
    consumer = opened(tmp_path)
    consumer.close()
    with refused(SpecError, remedy="DatasetConsumer"):
        consumer.get_batch("train")
