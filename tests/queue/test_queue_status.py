"""A queue seen from outside: where its files are and who works on them, whether it is whole, and how it is removed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import batchwright as bw
from batchwright.base.errors import BusyError, MissingQueueError, QueueError, SpecError
from batchwright.queue.consumer import DatasetConsumer
from batchwright.queue.folder import QueueFolder
from batchwright.queue.members import Liveness, QueueMember
from batchwright.queue.provider import DataProviderBase
from batchwright.queue.purge import purge
from batchwright.queue.status import find_queue, production_rate, queue_status, verify_queue
from harness import wait_for
from refusals import refused

BATCH_SIZE, BATCHES = 4, 3


class Toy(DataProviderBase):
    def build_meta(self):
        return {"batch_schema": [{"name": name, "dtype": "int64", "shape": [2], "role": None} for name in "xy"]}

    def sample_batch(self, split, rng):
        if self.config.get("fails"):
            raise ValueError("no more luck")
        x = rng.integers(0, 100, (self.batch_size, 2))
        return {"x": x, "y": x + 1}


def make_files(data: Path, num_files: int, **settings) -> None:
    splits = settings.pop("splits", ("train",))
    provider = Toy(data, BATCH_SIZE, batches_per_file=BATCHES, max_backlog_files=num_files, **settings)
    provider.run(splits=splits, max_files=num_files)


@pytest.fixture(scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("queue")
    make_files(path, 3)
    return path


@pytest.fixture
def data(_made: Path, tmp_path: Path) -> Path:
    """A dataset whose queue has train files 0, 1 and 2, of 12 rows each."""
    return Path(shutil.copytree(_made, tmp_path / "toy"))


@pytest.fixture
def consumer(data: Path) -> Iterator[DatasetConsumer]:
    """Reads train file 0: 2 batches were handed over, and 1 is recorded."""
    with DatasetConsumer(data, framework="numpy") as consumer:
        for _ in range(2):
            consumer.get_batch("train")
        yield consumer


@contextmanager
def member_in_a_process(data: Path, role: str, lease_seconds: float) -> Iterator[subprocess.Popen[str]]:
    code = (
        "import sys; from pathlib import Path; from batchwright.queue.members import QueueMember\n"
        f"member = QueueMember(Path({str(data / 'queue' / 'who')!r}), {role!r}, {lease_seconds})\n"
        "member.say('makes', 'train', 3)\n"
        f"Path({str(data / 'queue' / 'train')!r}, f'.00000003.{{member.id}}.part').touch()\n"
        "print('here', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(bw.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "here\n"
        try:
            yield process
        finally:
            process.kill()


def look(path: Path) -> dict:
    return queue_status(path, look_seconds=0.0)


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "who" not in path.parts)
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


# status


def test_files_that_wait_are_told_with_their_sizes(data):
    train = look(data)["splits"]["train"]
    size = (data / "queue/train/00000000.batches").stat().st_size
    assert (train["next"], train["taken"], train["backlog"]) == (3, 0, 3)
    told = [[one[name] for name in ("number", "num_bytes", "num_batches", "num_rows")] for one in train["ready"]]
    assert told == [[number, size, 3, 12] for number in range(3)]


def test_a_claimed_file_is_told_with_its_reader_and_how_far_that_is(data, consumer):
    train = look(data)["splits"]["train"]
    (claimed,) = train["claimed"]
    assert (claimed["number"], claimed["recorded"], claimed["handed"], claimed["num_rows"]) == (0, 4, 8, 12)
    assert (claimed["by"]["role"], claimed["by"]["pid"], claimed["by"]["state"]) == ("consumer", os.getpid(), "alive")
    assert (train["taken"], train["backlog"]) == (1, 2)


def test_how_fast_rows_are_read_is_seen_by_looking_twice(data, consumer, monkeypatch):
    monkeypatch.setattr("batchwright.queue.status.time.sleep", lambda seconds: consumer.get_batch("train"))
    assert look(data)["splits"]["train"]["reading_rows_per_second"] > 0
    monkeypatch.setattr("batchwright.queue.status.time.sleep", lambda seconds: None)
    assert look(data)["splits"]["train"]["reading_rows_per_second"] == 0


def test_nobody_reads_is_not_a_rate_of_nothing(data):
    assert look(data)["splits"]["train"]["reading_rows_per_second"] is None


def test_kept_batches_are_told_as_such(tmp_path):
    make_files(tmp_path, 2, splits=("train", "val"), val_batches=5)
    told = look(tmp_path)
    assert (told["val_batches"], told["splits"]["val"]["is_kept"], told["splits"]["train"]["is_kept"]) == (
        5,
        True,
        False,
    )
    kept = told["splits"]["val"]["kept"]
    size = (tmp_path / "queue/val/kept.batches").stat().st_size
    assert [kept[name] for name in ("number", "num_batches", "num_rows", "num_bytes", "damage")] == [
        *(None, 5, 20, size, None)
    ]
    assert told["splits"]["val"]["ready"] == []
    assert told["splits"]["train"]["kept"] is None


def test_kept_batches_that_are_being_made_are_told(tmp_path):
    make_files(tmp_path, 1, splits=("train", "val"))
    member = QueueMember(tmp_path / "queue/who", "provider", 30.0)
    member.say("makes kept val batches", "val")
    (tmp_path / f"queue/val/.kept.{member.id}.part").touch()
    (making,) = look(tmp_path)["splits"]["val"]["making"]
    assert (making["number"], making["by"]["state"]) == (None, "alive")
    assert making["age_seconds"] is not None
    member.leave()


def test_a_file_that_came_back_and_one_that_is_wanted_are_told(data, consumer):
    queue = QueueFolder(data / "queue")
    queue.split("train", Liveness(queue.who)).want(3)
    consumer.close()
    train = look(data)["splits"]["train"]
    assert train["wanted"] == [3]
    assert train["returned"] == [{"number": 0, "recorded": 8, "handed": 8}]


def test_ranks_are_told_with_what_they_have_recorded(data):
    with DatasetConsumer(data, framework="numpy", rank=1, world_size=2) as consumer:
        consumer.get_batch("train")
        told = look(data)
        assert [(one["rank"], one["world_size"]) for one in told["consumers"]] == [(1, 2)]
        assert told["splits"]["train"]["ranks"] == [{"rank": 1, "world_size": 2, "file": 0, "row": 0}]


def test_a_copy_without_its_empty_folders_has_no_ranks(data):
    (data / "queue/control/train/ranks").rmdir()
    assert look(data)["splits"]["train"]["ranks"] == []


def test_ages_and_the_rate_come_from_when_files_were_made(data):
    now = time.time()
    for number, seconds_ago in ((0, 108), (1, 104), (2, 100)):
        os.utime(data / f"queue/train/0000000{number}.batches", (now - seconds_ago,) * 2)
    train = look(data)["splits"]["train"]
    assert train["files_per_second"] == pytest.approx(0.25, rel=1e-3)
    assert 108 <= train["oldest_seconds"] < 1000
    assert [round(one["age_seconds"] - train["ready"][2]["age_seconds"]) for one in train["ready"]] == [8, 4, 0]


@pytest.mark.parametrize(
    ("made", "rate"),
    [
        pytest.param([], None, id="none"),
        pytest.param([(4, 10.0)], None, id="one"),
        pytest.param([(4, 10.0), (5, 10.0)], None, id="at once"),
        pytest.param([(4, 10.0), (9, 20.0)], 0.5, id="those in between are made and gone"),
        pytest.param([(9, 10.0), (4, 20.0)], 0.1, id="an old one made again is one file"),
    ],
)
def test_a_rate_is_told_where_it_is_known(made, rate):
    assert production_rate(made) == rate


def test_a_killed_provider_is_dead_and_its_file_is_nobodys(data):
    with member_in_a_process(data, "provider", 30) as process:
        told = look(data)
        assert [(one["pid"], one["state"], one["doing"]) for one in told["providers"]] == [
            (process.pid, "alive", "makes")
        ]
        assert [(one["split"], one["number"]) for one in told["providers"]] == [("train", 3)]
        process.send_signal(signal.SIGKILL)
        process.wait()
    told = look(data)
    assert [(one["pid"], one["state"]) for one in told["providers"]] == [(process.pid, "dead")]
    (making,) = told["splits"]["train"]["making"]
    assert (making["number"], making["by"]["pid"], making["by"]["state"]) == (3, process.pid, "dead")
    (data / "queue/who" / making["by"]["id"]).unlink()
    (making,) = look(data)["splits"]["train"]["making"]  # who it was is in the name of the file
    assert (making["by"]["role"], making["by"]["pid"], making["by"]["state"]) == ("provider", process.pid, "dead")


def test_a_stopped_process_hangs_until_it_goes_on(data):
    with member_in_a_process(data, "consumer", 0.3) as process:
        process.send_signal(signal.SIGSTOP)
        wait_for("hung", lambda: [one["state"] for one in look(data)["consumers"]] == ["hung"])
        process.send_signal(signal.SIGCONT)
        wait_for("alive", lambda: [one["state"] for one in look(data)["consumers"]] == ["alive"])


def test_a_clock_that_is_wrong_makes_nobody_hang(data, monkeypatch):
    member = QueueMember(data / "queue/who", "consumer", 0.3)
    try:
        right = time.time
        monkeypatch.setattr("batchwright.queue.status.time.time", lambda: right() + 1e6)
        assert [one["state"] for one in look(data)["consumers"]] == ["alive"]
    finally:
        member.leave()


def test_the_error_of_a_provider_that_died_is_told(data):
    purge(data)
    with refused(bw.WorkerError, "no more luck"):
        make_files(data, 3, fails=True)
    (died,) = look(data)["died"]
    assert (died["pid"], died["split"], died["number"]) == (os.getpid(), "train", 0)
    assert died["error"] == "ValueError: no more luck"
    assert died["place"].startswith("test_queue_status.py:")
    assert "in sample_batch" in died["traceback"]


def test_a_damaged_header_is_told_and_the_others_too(data):
    (data / "queue/train/00000001.batches").write_bytes(b"")
    train = look(data)["splits"]["train"]
    assert [one["damage"] is None for one in train["ready"]] == [True, False, True]
    assert "it ends after 0 bytes" in train["ready"][1]["damage"]


def test_looking_changes_nothing(data, consumer):
    before = tree(data)
    look(data)
    assert tree(data) == before


def test_a_queue_is_found_by_its_dataset_and_by_itself(data):
    assert find_queue(data).path == find_queue(data / "queue").path == data / "queue"
    (data / "queue/meta.json").unlink()
    assert look(data)["stamp"] is None


@pytest.mark.parametrize("use", [queue_status, purge, verify_queue])
@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        pytest.param([], MissingQueueError, "Queue directory not found", id="nothing"),
        pytest.param(["queue"], QueueError, "not a queue", id="a file"),
        pytest.param(["queue/notes.txt"], QueueError, "not a queue", id="a folder of that name"),
        pytest.param(["queue/meta.json", "queue/train/next"], QueueError, "not a queue", id="somebody's meta.json"),
    ],
)
def test_what_is_not_a_queue_is_refused_and_left(tmp_path, use, files, error, said):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    before = tree(tmp_path)
    with pytest.raises(error, match=said) as caught:
        use(tmp_path)
    assert tmp_path / "queue" in (caught.value.where.get("folder"), caught.value.where.get("file"))
    assert caught.value.remedy is not None
    assert tree(tmp_path) == before


# verify


def test_a_whole_queue_is_whole(data, consumer):
    found = verify_queue(data)
    assert (found.num_files, found.damaged) == (3, [])
    assert found.num_bytes == 3 * (data / "queue/train/00000001.batches").stat().st_size


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def replace_by_its_neighbour(file: Path) -> None:
    file.write_bytes(file.with_name("00000000.batches").read_bytes())


def replace_by_one_of_another_seed(file: Path) -> None:
    other = file.parents[3] / "other"
    make_files(other, 2, seed=7)
    file.write_bytes((other / "queue/train" / file.name).read_bytes())


DAMAGES = [
    pytest.param(flip_last_byte, "do not match their checksum", id="a flipped bit"),
    pytest.param(lambda file: os.truncate(file, 500), "its header says", id="truncated"),
    pytest.param(replace_by_its_neighbour, "it is train file 0, under the name of train file 1", id="wrong name"),
    pytest.param(replace_by_one_of_another_seed, "made from something else than meta.json says", id="another seed"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_file_that_is_not_what_it_should_be_is_found(data, damage, said):
    damage(data / "queue/train/00000001.batches")
    before = tree(data)
    (found,) = verify_queue(data).damaged
    assert found.file == data / "queue/train/00000001.batches"
    assert said in found.what
    assert tree(data) == before


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_damaged_file_that_waits_is_put_aside_and_made_again_with_the_same_bytes(data, damage, said):
    file = data / "queue/train/00000001.batches"
    content = file.read_bytes()
    damage(file)
    (found,) = verify_queue(data, quarantine=True).damaged
    told = look(data)
    assert not file.exists()
    assert told["splits"]["train"]["wanted"] == [1]
    assert [(data / "queue/quarantine" / one["file"], one["number"]) for one in told["quarantine"]] == [
        (found.moved_to, 1)
    ]
    assert said in told["quarantine"][0]["reason"]
    make_files(data, 1)
    assert file.read_bytes() == content
    assert verify_queue(data).damaged == []


def test_a_damaged_file_that_a_consumer_has_is_left_to_it(data, consumer):
    (claimed,) = (data / "queue/control/train/claimed").glob("*.batches")
    flip_last_byte(claimed)
    (found,) = verify_queue(data, quarantine=True).damaged
    assert (found.file, found.moved_to) == (claimed, None)
    assert claimed.exists()


def test_a_damaged_kept_file_is_made_again(tmp_path):
    make_files(tmp_path, 1, splits=("val",), val_batches=2)
    file = tmp_path / "queue/val/kept.batches"
    flip_last_byte(file)
    (found,) = verify_queue(tmp_path, quarantine=True).damaged
    assert (found.file, found.moved_to) == (file, tmp_path / "queue/quarantine/val-kept.0.batches")
    (aside,) = look(tmp_path)["quarantine"]
    assert (aside["split"], aside["number"]) == ("val", None)
    make_files(tmp_path, 1, splits=("val",), val_batches=2)
    found = verify_queue(tmp_path)
    assert (found.num_files, found.damaged) == (1, [])
    assert look(tmp_path)["splits"]["val"]["wanted"] == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("meta.json", None, "it is not there"),
        ("meta.json", "{", "not the meta of a queue"),
        ("meta.json", '{"batchwright": {"format": 99}}', "format 99"),
        ("train/next", "three", "does not hold a number"),
        ("control/train/taken", "", "does not hold a number"),
    ],
)
def test_what_a_queue_remembers_is_checked_too(data, name, content, said):
    file = data / "queue" / name
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_text(content)
    found = verify_queue(data)
    assert [(one.file, said in one.what) for one in found.damaged] == [(file, True)]
    assert found.num_files == 3


def test_files_that_are_used_up_meanwhile_are_no_damage(data, monkeypatch):
    from batchwright.queue import status

    def read(path, memory):
        (data / "queue/train/00000001.batches").unlink(missing_ok=True)
        return real(path, memory)

    real = status.read_batches
    monkeypatch.setattr(status, "read_batches", read)
    found = verify_queue(data)
    assert (found.num_files, found.num_gone, found.damaged) == (2, 1, [])


# purge


def test_a_purge_leaves_nothing_of_a_queue_and_the_dataset_alone(data, consumer):
    (data / "input.txt").write_text("raw")
    QueueFolder(data / "queue").split("train", Liveness(data / "queue/who")).want(9)
    consumer.close()
    flip_last_byte(data / "queue/train/00000002.batches")
    verify_queue(data, quarantine=True)
    (data / "queue/train/.00000009.provider-1-ab.part").touch()
    num_files = sum(path.is_file() for path in data.rglob("queue/**/*"))
    done = purge(data)
    assert list(data.iterdir()) == [data / "input.txt"]
    assert (len(done.removed), done.left) == (num_files, [])
    assert {"meta.json", "train/00000000.batches", "train/next"} < set(done.removed)


def test_another_file_in_the_place_of_kept_batches_is_named(tmp_path):
    make_files(tmp_path, 4, splits=("train", "val"))
    (tmp_path / "queue/val/00000001.batches").rename(tmp_path / "queue/val/kept.batches")
    (found,) = verify_queue(tmp_path).damaged
    assert found.what == "it is val file 1, under the name of kept val batches"


def test_a_purge_of_ranks_and_kept_batches_leaves_nothing(tmp_path):
    make_files(tmp_path, 1, splits=("val",), val_batches=2)
    flip_last_byte(tmp_path / "queue/val/kept.batches")
    verify_queue(tmp_path, quarantine=True)
    (tmp_path / "queue/val/.kept.provider-1-ab.part").touch()
    make_files(tmp_path, 3, splits=("train", "val"), val_batches=2)
    with DatasetConsumer(tmp_path, framework="numpy", rank=0, world_size=1) as consumer:
        consumer.get_batch("train")
        consumer.get_batch("val")
    with refused(bw.QueueError, "seed"):
        make_files(tmp_path, 1, seed=2)  # leaves word of its death
    assert purge(tmp_path).left == []
    assert list(tmp_path.iterdir()) == []


def test_numbers_begin_at_0_after_a_purge(data):
    first = (data / "queue/train/00000000.batches").read_bytes()
    purge(data)
    make_files(data, 1)
    assert look(data)["splits"]["train"]["next"] == 1
    assert (data / "queue/train/00000000.batches").read_bytes() == first


def test_one_split_alone_can_be_purged(tmp_path):
    make_files(tmp_path, 4, splits=("train", "val"))
    val = tree(tmp_path / "queue/val") | tree(tmp_path / "queue/control/val")
    done = purge(tmp_path, "train")
    assert all(name.startswith(("train/", "control/train/")) for name in done.removed)
    assert tree(tmp_path / "queue/val") | tree(tmp_path / "queue/control/val") == val
    assert list(look(tmp_path)["splits"]) == ["val"]
    make_files(tmp_path, 1)
    assert verify_queue(tmp_path).damaged == []


def test_what_is_not_a_queues_is_left_and_named(data, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "00000007.batches").write_text("mine")
    left = ["README", "control/train/claimed/todo.txt", "mine/next", "train/x.batches"]
    for name in left:
        (data / "queue" / name).parent.mkdir(exist_ok=True)
        (data / "queue" / name).write_text("mine")
    (data / "queue/train/00000008.batches").symlink_to(outside / "00000007.batches")
    (data / "queue/val").symlink_to(outside)
    done = purge(data)
    assert sorted(done.left) == sorted([*left, "train/00000008.batches", "val"])
    assert (outside / "00000007.batches").read_text() == "mine"
    assert all((data / "queue" / name).read_text() == "mine" for name in left)
    assert not (data / "queue/train/00000000.batches").exists()


def test_a_queue_in_use_is_not_purged_unless_forced(data, consumer):
    with member_in_a_process(data, "provider", 30) as process:
        before = tree(data)
        with refused(BusyError, "2 processes") as caught:
            purge(data)
        assert caught.value.where["process"] == f"consumer, pid {os.getpid()}\nprovider, pid {process.pid}"
        assert "--force" in (caught.value.remedy or "")
        assert tree(data) == before
    consumer.close()
    member = QueueMember(data / "queue/who", "consumer", 30)
    try:
        purge(data, force=True)
    finally:
        member.leave()
    assert not (data / "queue").exists()


@pytest.mark.parametrize("what", ["list", "remove"])
def test_a_purge_that_may_not_do_all_of_it_does_nothing(data, what, monkeypatch):
    """As root everything is allowed: so the system's answers are made up."""
    train, scandir, access, before = str(data / "queue/train"), os.scandir, os.access, tree(data)

    def listed(path):
        if what == "list" and str(path) == train:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), train)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listed)
    if what == "remove":
        monkeypatch.setattr(os, "access", lambda path, mode: str(path) != train and access(path, mode))
    with refused(QueueError) as caught:
        purge(data)
    assert str(caught.value.where["folder"]) == train
    assert f"chmod u+rwx {train}" in str(caught.value.remedy)
    monkeypatch.undo()
    assert tree(data) == before


def test_the_dead_do_not_keep_a_queue(data):
    with member_in_a_process(data, "provider", 30) as process:
        process.kill()
        process.wait()
        purge(data)
    assert not (data / "queue").exists()


def test_a_split_that_is_not_there_is_refused_with_those_that_are(data):
    with refused(SpecError, "test") as caught:
        purge(data, "test")
    assert "is not one of 'train'" in caught.value.headline
    assert len(look(data)["splits"]["train"]["ready"]) == 3
