"""batchwright queue: what is in it and who works on it, whether it is whole, and how it is removed."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

import batchwright as bw
from batchwright.queue.consumer import DatasetConsumer
from batchwright.queue.folder import QueueFolder
from batchwright.queue.members import Liveness
from batchwright.queue.meta import read_meta
from batchwright.queue.provider import DataProviderBase
from refusals import refused


class Toy(DataProviderBase):
    def build_meta(self):
        return {"batch_schema": [{"name": "x", "dtype": "int64", "shape": [2], "role": None}]}

    def sample_batch(self, split, rng):
        if self.config.get("fails"):
            raise ValueError("no more\x1b[2J luck")
        return {"x": rng.integers(0, 100, (self.batch_size, 2))}


@pytest.fixture(scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("queue")
    Toy(path, 4, batches_per_file=3, max_backlog_files=3, val_batches=2).run(max_files=4)
    return path


@pytest.fixture
def data(_made: Path, tmp_path: Path) -> Path:
    """A dataset whose queue has train files 0, 1 and 2, of 3 batches of 4 rows each, and 2 kept validation batches."""
    return Path(shutil.copytree(_made, tmp_path / "toy"))


def damage(file: Path) -> Path:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file


def test_status_says_where_every_file_is_and_who_works(data, succeeds):
    queue = QueueFolder(data / "queue")
    queue.split("train", Liveness(queue.who)).want(3)
    with DatasetConsumer(data, framework="numpy") as consumer:
        for _ in range(2):
            consumer.get_batch("train")
        stamp = read_meta(queue.meta).fingerprint
        text = succeeds(f"queue status {data}").out
    host = os.uname().nodename
    assert re.sub(r"[\d,.]+ (bytes|s|files/s)\b", r"N \1", text).splitlines() == [
        f"queue {data / 'queue'}, made from {stamp[:16]}",
        "train  next 3, taken up to 1",
        "  ready     2 files, 6 batches, 24 rows, N bytes, the oldest for N s: 1, 2",
        "  rate      N files/s made, 0 rows/s read",
        f"  claimed   file 0 by consumer, pid {os.getpid()} on {host}, alive: 4 of 12 rows recorded, 8 handed over",
        "  wanted    3",
        "val, kept",
        "  kept      2 batches, 8 rows, N bytes, for N s",
        "providers  none",
        "consumers",
        f"  pid {os.getpid()} on {host}, alive",
    ]


def test_status_tells_of_kept_batches_whether_they_are_made_whole_and_used(data, succeeds):
    file = data / "queue/val/kept.batches"
    (data / "queue/val/.kept.provider-1-ab.part").touch()
    assert "\n  making    kept batches by provider, pid 1, dead\n" in succeeds(f"queue status {data}").out
    file.write_bytes(file.read_bytes()[:3])
    assert "\nval, kept\n  kept      damaged: " in succeeds(f"queue status {data}").out
    file.unlink()
    assert "\nval, kept\n  kept      not made yet\n" in succeeds(f"queue status {data}").out
    Toy(data, 4, batches_per_file=3, val_batches=1).run(("val",), max_files=1)
    Toy(data, 4, batches_per_file=3).run(("val",), max_files=1)
    text = succeeds(f"queue status {data}").out
    assert "\nval  next 1, taken up to 0\n  kept      1 batch, 4 rows, " in text
    assert "; not used now, without val_batches\n  ready     1 file, 3 batches, 12 rows, " in text


def test_status_as_json(data, succeeds):
    told = succeeds(f"queue status {data / 'queue'} --json").json
    assert (told["splits"]["train"]["backlog"], told["splits"]["val"]["is_kept"]) == (3, True)
    assert (told["providers"], told["consumers"], told["quarantine"], told["died"]) == ([], [], [], [])


def test_a_rate_that_is_not_known_is_said_to_be(data, succeeds):
    for number in (0, 1):
        (data / f"queue/train/0000000{number}.batches").unlink()
    assert "  rate      unknown\n" in succeeds(f"queue status {data}").out


def test_status_tells_the_error_of_a_provider_that_died_and_what_was_put_aside(data, batchwright, succeeds):
    damage(data / "queue/train/00000001.batches")
    assert batchwright(f"queue verify {data} --quarantine").code == 1
    with DatasetConsumer(data) as consumer:
        consumer.get_batch("train")
    with refused(bw.QueueError, "fails"):
        Toy(data, 4, batches_per_file=3, max_backlog_files=3, val_batches=2, fails=True).run(max_files=4)
    text = succeeds(f"queue status {data}").out
    assert f"provider, pid {os.getpid()}, died: QueueError: the queue was made by something else" in text
    assert "  | Traceback" in text
    assert "quarantine  1 file\n  train-00000001.0.batches, " in text
    assert "do not match their checksum" in text


def test_what_a_provider_said_cannot_move_the_terminals_cursor(data, succeeds):
    succeeds(f"queue purge {data}")
    with refused(bw.WorkerError, "no more"):
        Toy(data, 4, fails=True).run(max_files=1)
    text = succeeds(f"queue status {data}").out
    assert "no more\\x1b[2J luck" in text
    assert "\x1b" not in text


def test_verify_of_a_whole_queue(data, succeeds):
    assert succeeds(f"queue verify {data}").out.startswith(f"{data / 'queue'}: whole (4 files, ")
    told = succeeds(f"queue verify {data} --json").json
    assert (told["ok"], told["num_files"], told["damaged"]) == (True, 4, [])


def test_verify_names_what_is_damaged_and_ends_with_code_1(data, batchwright):
    file = damage(data / "queue/train/00000001.batches")
    ran = batchwright(f"queue verify {data}")
    assert ran.code == 1
    assert ran.out == f"{file}: the bytes of field 'x' do not match their checksum\n"
    assert ran.err.splitlines() == [
        f"batchwright: {data / 'queue'} is damaged: 1 file",
        f"  try        batchwright queue verify {data} --quarantine: a provider makes them again",
    ]
    told = batchwright(f"queue verify {data} --json")
    assert (told.code, told.json["ok"], told.json["damaged"][0]["moved_to"]) == (1, False, None)


def test_verify_shows_a_command_that_a_shell_understands(data, batchwright):
    (data.parent / "my toy").symlink_to(data)
    damage(data / "queue/train/00000001.batches")
    assert (
        f"verify '{data.parent / 'my toy'}' --quarantine: " in batchwright("queue verify", data.parent / "my toy").err
    )


@pytest.mark.parametrize(
    ("file", "remedies"),
    [
        ("meta.json", ["batchwright queue purge DATA, and prepare again"]),
        ("train/next", ["batchwright prepare CONFIG: the next file writes that number anew"]),
        ("train/00000001.batches", ["batchwright queue verify DATA --quarantine: a provider makes them again"]),
    ],
)
def test_verify_says_what_helps_against_each_kind_of_damage(file, remedies, data, batchwright):
    (data / "queue" / file).write_text("x")
    _, _, said = batchwright(f"queue verify {data}").err.partition("  try        ")
    assert [line.strip() for line in said.splitlines()] == [line.replace("DATA", str(data)) for line in remedies]


def test_verify_puts_damaged_files_aside_where_it_is_told_to(data, batchwright, succeeds):
    damage(data / "queue/train/00000001.batches")
    ran = batchwright(f"queue verify {data} --quarantine")
    assert ran.code == 1
    assert ran.out.endswith(f"; moved to {data / 'queue/quarantine/train-00000001.0.batches'}\n")
    succeeds(f"queue verify {data}")


def test_purge_says_what_it_removed_and_what_it_left(data, succeeds):
    (data / "queue/train/notes.txt").write_text("mine")
    lines = succeeds(f"queue purge {data} --split train").out.splitlines()
    assert lines[0].startswith(f"removed {len(lines) - 3} files, ")
    assert all(f"  train/{name}" in lines for name in ("00000000.batches", "00000001.batches", "next"))
    assert not any("val" in line or "meta.json" in line for line in lines[1:])
    assert lines[-2:] == ["left, because no queue writes such files: 1 file", "  train/notes.txt"]
    told = succeeds(f"queue purge {data} --json").json
    assert {"meta.json", "val/kept.batches", "control/val/taken"} <= set(told["removed"])
    assert told["left"] == ["train/notes.txt"]


def test_purge_of_a_queue_in_use_names_who_uses_it(data, refuses, succeeds):
    with DatasetConsumer(data, framework="numpy") as consumer:
        consumer.get_batch("train")
        said = refuses(f"queue purge {data}")
        assert "1 process uses this queue" in said
        assert f"consumer, pid {os.getpid()}" in said
        assert "--force" in said
        assert (data / "queue/meta.json").exists()
        succeeds(f"queue purge {data} --force")
        assert not (data / "queue/meta.json").exists()


def test_a_purge_of_nothing_lists_nothing(data, succeeds):
    succeeds(f"queue purge {data}")
    for name in ("control", "who"):
        (data / "queue" / name).mkdir(parents=True)
    assert succeeds(f"queue purge {data}").out == f"removed 0 files, 0 bytes from {data / 'queue'}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "nowhere"], "Queue directory not found"),
        (["status", "DATA", "--force"], "--force"),
        (["purge", "DATA", "--quarantine"], "--quarantine"),
        (["verify", "DATA", "--split", "train"], "--split"),
        (["purge", "DATA", "--split", "test"], "split='test' is not one of 'train'"),
        (["empty", "DATA"], "invalid choice: 'empty'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_refused(data, refuses, arguments, said):
    assert said in refuses("queue", *({"DATA": data}.get(argument, argument) for argument in arguments))
    assert (data / "queue/train/00000000.batches").exists()
