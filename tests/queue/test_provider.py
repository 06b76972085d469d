"""`DataProviderBase`: the same bytes for the same number, whole files, and ends that lose nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from providers import SETTINGS, Numbered, Pair

from batchwright import (
    DataProviderBase,
    DatasetConsumer,
    NotReadyError,
    QueueError,
    SampleError,
    SpecError,
    WorkerError,
)
from batchwright.queue.folder import QueueFolder
from batchwright.queue.members import read_failures
from harness import wait_for
from refusals import refused


def files(folder: Path) -> dict[str, str]:
    """Every ready file by name, and the hash of its bytes."""
    return {
        f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("queue/*/*.batches"))
    }


def provider(folder: Path, kind=Numbered, **settings) -> DataProviderBase:
    return kind(folder, **(SETTINGS | settings))


# What is made


def test_the_same_config_makes_the_same_bytes_also_after_a_restart(tmp_path):
    provider(tmp_path / "one", max_backlog_files=9).run(max_files=6)
    for _ in range(6):
        provider(tmp_path / "parts", max_backlog_files=9).run(max_files=1)
    assert files(tmp_path / "one") == files(tmp_path / "parts")
    assert len(files(tmp_path / "one")) == 6


def test_another_seed_split_or_number_makes_other_bytes(tmp_path):
    provider(tmp_path / "a").run(max_files=4)
    provider(tmp_path / "b", seed=8).run(max_files=4)
    rows = [path.read_bytes()[-240:] for path in sorted(tmp_path.glob("*/queue/*/*.batches"))]
    assert len(rows) == len(set(rows)) == 8


def test_the_bytes_of_a_file_are_those_that_states_of_running_jobs_count_on(tmp_path):
    batches = list(provider(tmp_path).batches("train", 3))
    assert batches[0][1][0].tolist() == [4, 6, 0]
    assert batches[4][1][-1].tolist() == [2, 2, 0]


def test_two_providers_at_once_write_the_same_files_as_one(tmp_path):
    provider(tmp_path / "one", max_backlog_files=12).run(("train",), max_files=12)
    two = [provider(tmp_path / "two", max_backlog_files=12) for _ in range(2)]
    threads = [threading.Thread(target=one.run, args=(("train",), 6)) for one in two]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files(tmp_path / "two") == files(tmp_path / "one")


def test_meta_is_written_before_the_first_file_and_says_what_build_meta_said(tmp_path):
    class Watching(Numbered):
        def sample_batch(self, split, rng):
            self.seen = json.loads((self.data_dir / "queue" / "meta.json").read_text())
            return super().sample_batch(split, rng)

    one = provider(tmp_path, Watching)
    one.run(max_files=1)
    assert one.seen["vocab_size"] == 7
    assert one.seen["batch_schema"] == one.build_meta()["batch_schema"]


def test_every_name_of_the_config_is_an_attribute_and_in_config(tmp_path):
    one = Numbered(tmp_path, batch_size=4, block_size=3, dataset="toy", mask_probability=0.3, stages=[1, 2])
    assert (one.dataset, one.mask_probability, one.stages) == ("toy", 0.3, [1, 2])
    assert one.config["mask_probability"] == 0.3
    assert one.config["batch_size"] == one.batch_size == 4
    assert one.config["seed"] == 1337


def test_a_setting_that_is_missing_is_named_where_it_is_read(tmp_path):
    class Reading(Numbered):
        @property
        def share(self):
            return self.mask_probability / 2

    one = provider(tmp_path, Reading, mask_probabilty=0.5)
    for read in (lambda: one.mask_probability, lambda: one.share):
        with pytest.raises(AttributeError, match=r"Reading has no mask_probability \(did you mean mask_probabilty\?\)"):
            read()
    with pytest.raises(KeyError, match="the config has no temperature: set temperature in the config"):
        one.config["temperature"]
    assert (one.config.get("temperature"), getattr(one, "temperature", 1)) == (None, 1)


@pytest.mark.parametrize("name", ["run", "meta", "share", "draw"])
def test_a_setting_cannot_take_the_place_of_a_method_or_property(tmp_path, name):
    class Own(Numbered):
        share = property(lambda self: 1)

        def draw(self):
            return 1

    with refused(SpecError, f"{name} is a part of ", parameter=name):
        provider(tmp_path, Own, **{name: 3})
    assert provider(tmp_path, Own, draw=lambda: 2).draw() == 2


def test_input_files_are_those_named_input(tmp_path):
    one = provider(tmp_path)
    with refused(SpecError, folder=tmp_path) as caught:
        one.input_files()
    assert caught.value.where["folder"] == tmp_path
    for name in ("input.txt", "input.2.csv", "output.txt"):
        (tmp_path / name).write_text("")
    assert [path.name for path in one.input_files()] == ["input.2.csv", "input.txt"]


@pytest.mark.parametrize("kind", ["numpy", "torch", "arrow"])
def test_a_batch_may_be_of_numpy_torch_or_arrow(tmp_path, kind):
    import torch

    class Any(Numbered):
        def sample_batch(self, split, rng):
            batch = super().sample_batch(split, rng)
            if kind == "torch":
                return {name: torch.from_numpy(array) for name, array in batch.items()}
            if kind == "arrow":
                lists = pa.FixedSizeListArray.from_arrays(pa.array(batch["x"].ravel()), self.block_size)
                return {"id": pa.array(batch["id"]), "x": lists}
            return batch

    made, expected = (next(provider(tmp_path, of).batches("train", 0)) for of in (Any, Numbered))
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(made, expected, strict=True))


def test_a_provider_may_ask_for_torchs_generator(tmp_path):
    import torch

    class Torch(Numbered):
        rng_framework = "torch"

        def sample_batch(self, split, rng):
            assert isinstance(rng, torch.Generator)
            size = (self.batch_size, self.block_size)
            return {
                "id": torch.arange(self.batch_size),
                "x": torch.randint(0, 7, size, generator=rng, dtype=torch.int32),
            }

    first, again, other = (next(provider(tmp_path, Torch).batches("train", number))[1] for number in (5, 5, 6))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


# The queue of another provider


class Changed(Numbered):
    def build_meta(self):
        return super().build_meta() | {"vocab_size": 9}


class Wider(Numbered):
    def build_meta(self):
        meta = super().build_meta()
        meta["batch_schema"][1]["dtype"] = "int64"
        return meta


def take(folder: Path, num_batches: int = 1) -> list[int]:
    """Hand out batches: the first id of each."""
    with DatasetConsumer(folder, framework="numpy") as consumer:
        return [int(consumer.get_batch("train")["id"][0]) for _ in range(num_batches)]


def test_a_queue_that_was_read_is_refused_to_another_provider_with_the_difference_and_the_ways_on(tmp_path):
    provider(tmp_path).run(max_files=1)
    take(tmp_path)
    before = files(tmp_path), (tmp_path / "queue/meta.json").read_bytes()
    with refused(QueueError, "vocab_size", f"batchwright queue purge {tmp_path}", folder=tmp_path / "queue") as caught:
        provider(tmp_path, Changed).run(max_files=1)
    assert "--accept-change" in caught.value.remedy
    assert "accept_change=True" in caught.value.remedy
    assert (files(tmp_path), (tmp_path / "queue/meta.json").read_bytes()) == before


def test_another_seed_is_another_queue_and_another_batch_size_or_learning_rate_is_not(tmp_path):
    provider(tmp_path, learning_rate=0.1).run(max_files=1)
    take(tmp_path)
    provider(tmp_path, learning_rate=0.2, batch_size=8).run(max_files=1)
    with refused(QueueError, "seed was 1337, and is 3"):
        provider(tmp_path, seed=3).run(max_files=1)


@pytest.mark.parametrize("readers", [{}, {"rank": 1, "world_size": 2}])
def test_a_queue_of_which_nothing_was_read_is_made_anew_by_the_provider_that_starts(tmp_path, readers):
    provider(tmp_path / "one").run(max_files=3)
    (tmp_path / "one/queue/train/notes.txt").touch()
    with DatasetConsumer(tmp_path / "one", timeout_seconds=0, **readers) as consumer:
        (tmp_path / "one/queue/train/00000000.batches").unlink()
        with refused(NotReadyError):  # it asked, and was handed nothing
            consumer.get_batch("train")
    for folder in ("one", "new"):
        provider(tmp_path / folder, Changed).run(max_files=2)
    assert files(tmp_path / "one") == files(tmp_path / "new")
    assert (tmp_path / "one/queue/train/notes.txt").exists()
    assert DatasetConsumer(tmp_path / "one").meta["vocab_size"] == 9


def test_kept_batches_that_nobody_has_read_are_made_anew_and_others_are_not(tmp_path):
    provider(tmp_path, val_batches=2).run(max_files=1)
    before = files(tmp_path)
    provider(tmp_path, val_batches=2, seed=3).run(("val",), max_files=1)
    assert files(tmp_path) != before
    with DatasetConsumer(tmp_path) as consumer:
        consumer.get_batch("val")
    with refused(QueueError, "seed"):
        provider(tmp_path, val_batches=2, seed=4).run(max_files=1)


def test_a_change_that_is_accepted_counts_from_the_next_file_on_and_states_go_on(tmp_path):
    provider(tmp_path).run(("train",), max_files=2)
    with DatasetConsumer(tmp_path, framework="numpy") as consumer:
        consumer.get_batch("train")
        state = consumer.state_dict()
        provider(tmp_path, Changed, seed=3, max_backlog_files=3).run(("train",), max_files=1, accept_change=True)
        batches = [consumer.get_batch("train") for _ in range(10)]
    assert [int(batch["id"][0]) for batch in batches] == [4, 8, 12, 16, 1000, 1004, 1008, 1012, 1016, 2000]
    for seed, number, batch in (1337, 1, batches[4]), (3, 2, batches[9]):
        assert next(provider(tmp_path, seed=seed).batches("train", number))[1].tolist() == batch["x"].tolist()
    with DatasetConsumer(tmp_path) as consumer:
        assert consumer.meta["vocab_size"] == 9
        consumer.load_state_dict(state)
    (record,) = json.loads((tmp_path / "queue/meta.json").read_text())["batchwright"]["accepted"]
    assert record["difference"][:2] == ["meta['vocab_size'] was 7, and is 9", "seed was 1337, and is 3"]
    assert record["next"] == {"train": 2}


def test_a_change_that_was_accepted_once_is_accepted_and_the_provider_before_it_is_refused(tmp_path):
    provider(tmp_path).run(max_files=1)
    take(tmp_path)
    provider(tmp_path, seed=3).run(max_files=1, accept_change=True)
    assert provider(tmp_path, seed=3).run(max_files=1) == 1
    with refused(QueueError, "seed was 3, and is 1337"):
        provider(tmp_path).run(max_files=1)


def test_another_schema_cannot_be_accepted(tmp_path):
    provider(tmp_path).run(max_files=1)
    take(tmp_path)
    with refused(QueueError, "meta['batch_schema'][1]['dtype']", remedy="batchwright queue purge") as caught:
        provider(tmp_path, Wider).run(max_files=1, accept_change=True)
    assert "--accept-change" not in caught.value.remedy


@pytest.mark.parametrize("accept_change", [False, True])
def test_while_a_provider_is_at_work_no_other_one_changes_its_queue(tmp_path, running, accept_change):
    running()
    before = files(tmp_path / "data")
    with refused(QueueError, "seed", remedy="stopped"):
        provider(tmp_path / "data", seed=3).run(accept_change=accept_change)
    assert before.items() <= files(tmp_path / "data").items()


def test_raw_files_count_by_what_is_in_them(tmp_path):
    (tmp_path / "input.txt").write_text("one")
    (tmp_path / "input.2.txt").write_text("same")
    provider(tmp_path).run(max_files=1)
    take(tmp_path)
    os.utime(tmp_path / "input.txt", (0, 0))
    provider(tmp_path).run(max_files=1)
    (tmp_path / "input.txt").write_text("two")
    with refused(QueueError, "raw file input.txt has other content") as caught:
        provider(tmp_path).run(max_files=1)
    assert "input.2.txt" not in str(caught.value)
    (tmp_path / "input.txt").unlink()
    (tmp_path / "input.3.txt").write_text("one")
    with refused(QueueError, "raw file input.txt is gone", "raw file input.3.txt is new"):
        provider(tmp_path).run(max_files=1)


def test_raw_files_are_those_that_the_provider_names_in_its_order(tmp_path):
    class Elsewhere(Numbered):
        names = ("b", "a")

        def input_files(self):
            return [str(self.data_dir.parent / name) for name in self.names]

    for name in "ab":
        (tmp_path / name).write_text(name)
    provider(tmp_path / "data", Elsewhere).run(max_files=1)
    take(tmp_path / "data")
    Elsewhere.names = ("a", "b")
    with refused(QueueError, "another order"):
        provider(tmp_path / "data", Elsewhere).run(max_files=1)
    Elsewhere.names = ("a", "c")
    with refused(SpecError, parameter="input_files()", file=tmp_path / "c"):
        provider(tmp_path / "data", Elsewhere).run(max_files=1)


def test_what_is_drawn_from_elsewhere_than_rng_is_found_with_the_first_batch(tmp_path):
    class Global(Numbered):
        def sample_batch(self, split, rng):
            return super().sample_batch(split, rng) | {"x": other.integers(0, 7, (4, 3), dtype=np.int32)}

    other = np.random.default_rng(1)
    with refused(WorkerError, "train file 0", remedy="rng", provider="Global", field="x"):
        provider(tmp_path, Global).run()
    assert files(tmp_path) == {}
    with refused(WorkerError, "train file 0"):
        DatasetConsumer(tmp_path).get_batch("train")
    Global.reproducible = False
    assert provider(tmp_path, Global).run(max_files=1) == 1


def test_a_batch_in_memory_that_is_used_again_is_compared_as_it_was(tmp_path):
    class InPlace(Numbered):
        def sample_batch(self, split, rng):
            batch = super().sample_batch(split, rng)
            self.memory = getattr(self, "memory", batch["x"])
            self.memory[:] = other.integers(0, 7, (4, 3)) if self.wrong else batch["x"]
            return batch | {"x": self.memory}

    other = np.random.default_rng(1)
    assert provider(tmp_path / "right", InPlace, wrong=False).run(max_files=2) == 2
    with refused(WorkerError, field="x"):
        provider(tmp_path / "wrong", InPlace, wrong=True).run(max_files=2)


# Ends


class Failing(Numbered):
    def sample_batch(self, split, rng):
        if self.number == 1:
            raise ValueError("low >= high")
        return super().sample_batch(split, rng)


def test_an_error_of_sample_batch_is_named_with_its_file_and_line_and_left_for_consumers(tmp_path):
    with refused(WorkerError, "sample_batch", "train file 1", "ValueError: low >= high") as caught:
        provider(tmp_path, Failing).run(("train",))
    line = Failing.sample_batch.__code__.co_firstlineno + 2
    assert caught.value.where["at"] == f"test_provider.py:{line}"
    assert isinstance(caught.value.__cause__, ValueError)
    (death,) = read_failures(tmp_path / "queue/who")
    assert (death.split, death.number, death.place) == ("train", 1, f"test_provider.py:{line}")
    assert [*files(tmp_path)] == ["train/00000000.batches"]
    assert not list((tmp_path / "queue/train").glob(".*.part"))


def test_a_mended_provider_goes_on_with_the_file_that_failed(tmp_path):
    with pytest.raises(WorkerError):
        provider(tmp_path, Failing).run(("train",))
    meta = json.loads((tmp_path / "queue/meta.json").read_text())
    Failing.sample_batch, broken = Numbered.sample_batch, Failing.sample_batch
    try:
        assert meta["vocab_size"] == 7
        provider(tmp_path, Failing).run(("train",), max_files=1)
    finally:
        Failing.sample_batch = broken
    assert [*files(tmp_path)] == ["train/00000000.batches", "train/00000001.batches"]
    assert read_failures(tmp_path / "queue/who") == []


def test_an_error_of_build_meta_is_left_for_consumers_too(tmp_path):
    class NoMeta(Numbered):
        def build_meta(self):
            return {"size": 1 / 0}

    with refused(WorkerError, "build_meta", "ZeroDivisionError"):
        provider(tmp_path, NoMeta).run()
    with refused(WorkerError, "ZeroDivisionError: division by zero", "test_provider.py"):
        DatasetConsumer(tmp_path)


def test_an_old_death_is_forgotten_before_the_next_provider_reads_its_data(tmp_path):
    class Looking(Numbered):
        def build_meta(self):
            self.deaths = read_failures(self.data_dir / "queue/who")
            return super().build_meta()

        def sample_batch(self, split, rng):
            if self.config.get("fails"):
                raise ValueError("low >= high")
            return super().sample_batch(split, rng)

    with pytest.raises(WorkerError):
        provider(tmp_path, Looking, fails=True).run()
    assert len(read_failures(tmp_path / "queue/who")) == 1
    again = provider(tmp_path, Looking, fails=True)
    with pytest.raises(WorkerError):
        again.run()
    assert again.deaths == []


@pytest.mark.parametrize("where", ["build_meta", "sample_batch"])
def test_sys_exit_is_an_error_like_any_other(tmp_path, where):
    class Exiting(Numbered):
        pass

    setattr(Exiting, where, lambda *_: sys.exit("no data"))
    with refused(WorkerError, where, "SystemExit: no data"):
        provider(tmp_path, Exiting).run()
    with refused(WorkerError, os.getpid(), "SystemExit: no data", "test_provider.py"):
        DatasetConsumer(tmp_path, timeout_seconds=0).get_batch("train")


def test_stop_before_run_ends_it_at_once_and_only_that_one(tmp_path):
    one = provider(tmp_path)
    one.stop()
    assert one.run(max_files=1) == 0
    assert not list(tmp_path.iterdir())
    assert one.run(max_files=1) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda batch: batch.pop("x"), "field 'x' is missing"),
        (lambda batch: batch.update(z=batch["x"]), "field 'z' is not in the schema"),
        (lambda batch: batch.update(x=batch["x"].astype("int64")), "field 'x' is int64"),
        (lambda batch: batch.update(x=batch["x"][:, :2]), r"field 'x' has shape \[4, 2\]"),
        (lambda batch: batch.update(x=batch["x"][:2]), r"field 'x' has shape \[2, 3\]"),
        (lambda batch: batch.update(x="text"), "field 'x' is no array"),
    ],
)
def test_a_batch_that_does_not_fit_its_schema_is_named_and_no_file_appears(tmp_path, change, said):
    class Wrong(Numbered):
        def sample_batch(self, split, rng):
            batch = super().sample_batch(split, rng)
            if self.index == 3:
                change(batch)
            return batch

    with pytest.raises(SampleError, match=said) as caught:
        provider(tmp_path, Wrong).run()
    assert caught.value.where["batch"] == "train file 0, batch 2"
    assert "batch_schema" in caught.value.remedy
    assert files(tmp_path) == {}
    with pytest.raises(WorkerError, match=f"died making train file 0: SampleError: {said}"):
        DatasetConsumer(tmp_path).get_batch("train")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_cleanly_and_the_next_one_goes_on(tmp_path, number):
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from providers import Numbered
class Slow(Numbered):
    def sample_batch(self, split, rng):
        time.sleep(0.01)
        print("sampling", flush=True)
        return super().sample_batch(split, rng)
made = Slow({str(tmp_path)!r}, batch_size=4, block_size=3, batches_per_file=1000).run()
print("made", made, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "sampling\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out.splitlines()[-1], err) == (0, "made 0", "")
    assert not list((tmp_path / "queue/train").glob(".*.part"))
    assert not os.listdir(tmp_path / "queue/who")


def test_a_signal_while_build_meta_runs_ends_it_at_once(tmp_path):
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from providers import Numbered
class Slow(Numbered):
    def build_meta(self):
        print("reading", flush=True)
        time.sleep(60)
print("made", Slow({str(tmp_path)!r}, batch_size=4, block_size=3).run())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out, err) == (0, "made 0\n", "")
    assert not os.listdir(tmp_path / "queue/who")


def test_a_file_in_place_of_the_queue_is_named(tmp_path):
    (tmp_path / "queue").write_text("not a folder")
    with refused(QueueError, folder=tmp_path / "queue") as caught:
        provider(tmp_path).run()
    assert caught.value.where["folder"] == tmp_path / "queue"
    assert (tmp_path / "queue").read_text() == "not a folder"


def test_it_waits_without_work_and_wakes_when_a_file_is_taken(tmp_path, running):
    one = running(sleep_seconds=30)
    with DatasetConsumer(tmp_path / "data", framework="numpy") as consumer:
        for _ in range(20):  # four files: it had made two, and made room for more wakes it long before 30 s
            consumer.get_batch("train")
    assert one.error is None


def test_a_full_disk_is_waited_for_and_said(tmp_path, running, monkeypatch, capsys):
    from batchwright.queue import batch_file

    full, pwrite = [True], os.pwrite

    def write(descriptor, data, offset):
        if full[0] and getattr(data, "nbytes", 0) == 48:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(batch_file.os, "pwrite", write)
    running()
    consumer = DatasetConsumer(tmp_path / "data", framework="numpy", timeout_seconds=0.1)

    def is_said() -> bool:
        with refused(NotReadyError, "train file 0") as caught:
            consumer.get_batch("train")
        return "No space left on device" in caught.value.where["providers"]

    wait_for("word of it", is_said)
    full[0] = False
    consumer.timeout_seconds = 240
    consumer._streams["train"].waiter.timeout_seconds = 240
    assert consumer.get_batch("train")["id"].tolist() == [0, 1, 2, 3]
    consumer.close()
    assert capsys.readouterr().err.count("No space left on device") >= 1


def test_a_file_system_that_is_read_only_is_named(tmp_path, monkeypatch):
    def make(queue, splits):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(queue.path))

    monkeypatch.setattr(QueueFolder, "make", make)
    with refused(QueueError, "Read-only file system") as caught:
        provider(tmp_path).run(max_files=1)
    assert caught.value.where["folder"] == tmp_path / "queue"
    assert caught.value.remedy


# Parameters


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": -4}, "batch_size"),
        ({"batch_size": 4.0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"block_size": 0}, "block_size"),
        ({"target_size": -1}, "target_size"),
        ({"batches_per_file": 0}, "batches_per_file"),
        ({"max_backlog_files": 0}, "max_backlog_files"),
        ({"val_batches": 0}, "val_batches"),
        ({"sleep_seconds": 0}, "sleep_seconds"),
        ({"sleep_seconds": float("nan")}, "sleep_seconds"),
        ({"sleep_seconds": True}, "sleep_seconds"),
        ({"seed": "1337"}, "seed"),
        ({"seed": -1}, "seed"),
        ({"run": 3}, "run"),
        ({"sample_batch": 3}, "sample_batch"),
    ],
)
def test_a_parameter_that_cannot_work_is_named_before_anything_is_written(tmp_path, settings, name):
    with refused(SpecError, parameter=name) as caught:
        provider(tmp_path, Pair, **settings)
    assert caught.value.where["parameter"] == name
    assert caught.value.remedy
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"splits": "train"}, "splits"),
        ({"splits": ("train", "test")}, "splits"),
        ({"splits": ["train", ["val"]]}, "splits"),
        ({"splits": ("val", "val")}, "splits"),
        ({"splits": ()}, "splits"),
        ({"splits": None}, "splits"),
        ({"max_files": -1}, "max_files"),
        ({"max_files": 2.5}, "max_files"),
        ({"max_files": "3"}, "max_files"),
        ({"max_files": True}, "max_files"),
    ],
)
def test_run_names_a_parameter_that_cannot_work_before_anything_is_written(tmp_path, parameters, name):
    with refused(SpecError, parameter=name) as caught:
        provider(tmp_path).run(**({"max_files": 1} | parameters))
    assert caught.value.where["parameter"] == name
    assert caught.value.remedy
    assert not list(tmp_path.iterdir())


def test_a_provider_without_its_two_methods_says_which_is_missing(tmp_path):
    class Empty(DataProviderBase):
        pass

    with refused(SpecError, "Empty", parameter="build_meta"):
        Empty(tmp_path, 4, 3).run()
    Empty.build_meta = Numbered.build_meta
    with refused(SpecError, "Empty", parameter="sample_batch"):
        Empty(tmp_path / "other", 4, 3).run()
