"""What a queue promises when something goes wrong: real signals, at random moments, and every id accounted for."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from queue_jobs import (
    BATCH,
    BATCHES_PER_FILE,
    FILE_ROWS,
    Rows,
    Run,
    ids_below,
    rows_provider,
)

from batchwright.base.errors import QueueError
from batchwright.queue.consumer import DatasetConsumer
from batchwright.queue.folder import QueueFolder
from batchwright.queue.members import Liveness, QueueMember
from batchwright.queue.production import begin, give_up
from harness import is_running
from refusals import refused

few_or_many = pytest.mark.parametrize("times", [4, pytest.param(50, marks=pytest.mark.slow)])
KILL_OR_TERM = (signal.SIGKILL, signal.SIGTERM)


def ready_files(queue: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((queue / "train").glob("*.batches"))}


def made_undisturbed(folder: Path, num_files: int) -> dict[str, bytes]:
    """The first files of a queue, by one provider that nobody disturbs."""
    rows_provider(folder, max_backlog_files=num_files).run(("train",), max_files=num_files)
    return ready_files(folder / "queue")


def ready_numbers(run: Run) -> list[int]:
    return [int(path.stem) for path in sorted((run.queue / "train").glob("*.batches"))]


# Kills


@few_or_many
def test_killed_providers_make_the_files_of_one_that_nobody_disturbs(run: Run, tmp_path: Path, times: int) -> None:
    providers = ["p0", "p1", "p2"]
    run.provide(*providers, settings={"max_backlog_files": 40})
    run.disturb(providers, times, *KILL_OR_TERM)
    run.kill(*providers)
    run.provide("p0", settings={"max_backlog_files": 1})
    control = run.queue / "control" / "train"
    run.wait_for(
        "end of what the dead began",
        lambda: (
            not any((control / "wanted").iterdir())
            and not any((run.queue / "train").glob(".*"))
            and ready_numbers(run) == [*range(len(ready_numbers(run)))]
            and any(b"enough is ready" in path.read_bytes() for path in run.queue.glob(f"who/*-{run.pid('p0')}-*"))
        ),
    )
    run.stop_providers()
    made = ready_files(run.queue)
    assert made == made_undisturbed(tmp_path / "other", len(made)), run.told()
    run.check_nothing_is_left()


@few_or_many
@pytest.mark.parametrize("batch_size", [None, 5])
def test_a_killed_consumer_is_handed_at_most_one_batch_again(run: Run, times: int, batch_size: int | None) -> None:
    run.provide("p")
    run.consume("c", settings={"batch_size": batch_size})
    run.disturb(["c"], times, *KILL_OR_TERM)
    end = run.come_to_an_end("c")

    assert run.num_repeats(end) <= times * (1 if batch_size is None else 2)
    in_order = list(dict.fromkeys(id for line in run.handed() for id in line["ids"]))
    assert in_order == sorted(in_order)
    run.check_nothing_is_left()


@few_or_many
def test_what_a_killed_consumer_did_not_commit_comes_again(run: Run, times: int) -> None:
    run.provide("p")
    run.consume("c", settings={"delete": "checkpoint"}, commit_every=7)
    run.disturb(["c"], times, longest_seconds=0.06)
    end = run.come_to_an_end("c")

    run.num_repeats(end)
    least = most = -1  # what is committed for sure, and what may be: a kill can fall inside a commit
    for pid, lines in by_process(run):
        ids = [id for line in lines for id in line.get("ids", [])]
        if ids:
            begin = position(ids[0])
            assert least < begin <= most + 1, f"{pid}\n{run.told()}"
            assert [*map(position, ids)] == [*range(begin, begin + len(ids))], run.told()
            least = most = begin - 1
        for line in lines:
            if line.get("event") in ("commits", "committed"):
                most = position(line["after"])
            if line.get("event") == "committed":
                least = most
    run.check_nothing_is_left()


@few_or_many
@pytest.mark.parametrize("delete", ["consumed", "checkpoint"])
def test_a_killed_consumer_goes_on_exactly_at_its_last_state(run: Run, times: int, delete: str) -> None:
    run.provide("p")
    run.consume("c", settings={"delete": delete}, save_every=6)
    run.wait_for_batches(7, "c")
    for _ in range(times):
        run.wait_for_batches(run.chance.randrange(1, 14), "c")
        run.pause(0.02)
        run.kill("c")
        run.start_again("c")
    run.come_to_an_end("c")

    check_each_went_on_at_its_state(run, times)


@few_or_many
def test_nothing_is_lost_or_doubled_when_one_of_four_consumers_and_providers_are_killed(run: Run, times: int) -> None:
    consumers, providers = ["c0", "c1", "c2", "c3"], ["p0", "p1"]
    run.provide(*providers)
    run.consume(*consumers)
    run.disturb(consumers + providers, times)
    end = run.come_to_an_end(*consumers, more_files=6)

    assert run.num_repeats(end) <= times
    rows_provider(run.data_dir).run(("train",), max_files=0)  # clears up after those who died last
    run.check_nothing_is_left()


def test_without_kills_each_batch_goes_to_exactly_one_of_four_consumers(run: Run) -> None:
    consumers = ["c0", "c1", "c2", "c3"]
    run.provide("p0", "p1")
    run.consume(*consumers)
    run.wait_for("batches for all", lambda: {line["who"] for line in run.handed()} == {*consumers})
    end = run.come_to_an_end(*consumers, more_files=8)

    assert run.num_repeats(end) == 0
    assert sum(line["redelivered_batches"] + line["lost_claims"] for line in run.handed()) == 0
    run.check_nothing_is_left()


def position(id: int) -> int:
    """Where a row is in the stream of all rows; -1 of no row."""
    return -1 if id < 0 else id // 1000 * FILE_ROWS + id % 1000


def by_process(run: Run) -> list[tuple[int, list[dict[str, Any]]]]:
    """What each process of the consumer wrote down, in the order in which they lived."""
    lines: dict[int, list[dict[str, Any]]] = {}
    for line in run.said():
        if line["who"] == "c":
            lines.setdefault(line["pid"], []).append(line)
    return [*lines.items()]


def check_each_went_on_at_its_state(run: Run, times: int) -> None:
    """What each process was handed follows, without a gap, on the state that it loaded."""
    run.check_rows()
    num_loaded = 0
    for pid, lines in by_process(run):
        began = lines[0]["at"] if lines[0].get("event") == "began" else None
        ids = [id for line in lines if "ids" in line for id in line["ids"]]
        if began is not None and ids:
            num_loaded += 1
            first = position(began)
            assert [*map(position, ids)] == [*range(first, first + len(ids))], f"{pid}\n{run.told()}"
    assert num_loaded == times, run.told()


# Disks and folders


@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_bytes", [0, 1000])
def test_on_a_full_disk_a_provider_waits_and_goes_on_when_there_is_room(run: Run, num_bytes: int, times: int) -> None:
    # A file has more than 1000 bytes; what is written beside it has less, so that 0 is another fault.
    run.provide("p")
    run.consume("c")
    for _ in range(times):
        run.wait_for_batches()
        run.limit_file_bytes("p", num_bytes)
        run.wait_for("the end of what is there", lambda: not ready_numbers(run))
        run.pause(0.1)
        run.limit_file_bytes("p", resource.RLIM_INFINITY)
    end = run.come_to_an_end("c")

    assert run.num_repeats(end) == 0
    if num_bytes:  # otherwise that could not be written either
        assert "goes on when there is room" in run.complained("p")
    run.check_nothing_is_left()


def test_a_consumer_that_waits_for_a_provider_without_room_says_so(run: Run) -> None:
    run.provide("p")
    run.wait_for("files", lambda: len(ready_numbers(run)) == 2)
    run.limit_file_bytes("p", 1000)
    run.consume("takes")  # all that is there
    run.wait_for("word of it", lambda: "goes on when there is room" in run.complained("p"))
    run.consume("c", settings={"timeout_seconds": 0.1})

    def is_told() -> bool:  # between two tries of the provider
        error = run.error_of("c")
        assert error["kind"] == "NotReadyError", run.told()
        assert "train file 2 " in error["text"], run.told()
        assert f"provider, pid {run.pid('p')}: " in error["text"], run.told()
        run.start_again("c")
        return "waits: File too large" in error["text"]

    run.wait_for("word of it", is_told)


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT CHECKED: a disk that others fill; only root mounts one")
def test_on_a_disk_that_others_fill_both_wait_and_nothing_is_lost(tmp_path: Path) -> None:
    run = Run(tmp_path)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", run.data_dir], check=False).returncode:
        pytest.skip("NOT CHECKED: a disk that others fill; mounting is not allowed here")
    run.may_fail = True  # a consumer says that there is no room, and is started again
    try:
        run.provide("p", pause_seconds=0)
        run.consume("c")
        for _ in range(5):
            enough = len(run.handed()) + 2
            run.wait_for("batches", lambda enough=enough: is_full_no_more(run) and len(run.handed()) >= enough)
            fill(run.data_dir / "filler")
            run.pause(0.2)
            (run.data_dir / "filler").unlink()
        enough = len(run.handed()) + 2
        run.wait_for("batches", lambda: is_full_no_more(run) and len(run.handed()) >= enough)
        end = run.come_to_an_end("c")
        assert run.num_repeats(end) == 0
        run.check_nothing_is_left()
    finally:
        run.__exit__()
        subprocess.run(["umount", run.data_dir], check=True)


def is_full_no_more(run: Run) -> bool:
    """A consumer that found no room has ended, and is started again."""
    if run.exit_code("c") is not None:
        assert run.error_of("c")["kind"] == "OutOfSpaceError", run.told()
        run.start_again("c")
    return True


def fill(path: Path) -> None:
    with suppress(OSError), open(path, "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


@pytest.mark.parametrize("times", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_a_queue_that_is_deleted_under_both_is_one_clear_error_and_its_state_goes_on_exactly(
    run: Run, times: int
) -> None:
    run.provide("p")
    run.consume("c", save_every=4)
    for _ in range(times):
        run.wait_for_batches(7)
        run.pause(0.05)
        while run.queue.exists():  # again, where something was put into a folder that was just emptied
            shutil.rmtree(run.queue, ignore_errors=True)
        for error in (run.error_of("p"), run.error_of("c")):
            assert error["kind"] == "QueueError", run.told()
            assert "deleted" in error["text"], run.told()
            assert str(run.queue) in error["text"], run.told()
            assert "batchwright prepare CONFIG" in error["text"]
        run.start_again("p")
        run.wait_for("queue", (run.queue / "meta.json").exists)
        run.start_again("c")
    run.wait_for_batches()
    run.come_to_an_end("c")

    check_each_went_on_at_its_state(run, times)


def test_a_queue_that_is_made_anew_under_a_consumer_is_not_gone_on_with(run: Run) -> None:
    run.provide("p", pause_seconds=0)
    run.consume("c", pause_seconds=0.2)
    run.wait_for_batches()
    run.kill("p")
    shutil.rmtree(run.queue)
    run.start_again("p")

    error = run.error_of("c")
    assert error["kind"] == "QueueError"
    assert "load_state_dict" in error["text"]
    ids = [id for line in run.handed() for id in line["ids"]]
    assert ids == ids_below(9)[: len(ids)]  # none of file 0 again


@few_or_many
def test_damaged_files_are_put_aside_with_a_report_and_made_again(run: Run, times: int) -> None:
    run.provide("p", settings={"max_backlog_files": 4})
    run.consume("c", pause_seconds=0.01)
    quarantine = run.queue / "quarantine"
    while len([*quarantine.glob("*.json")]) < times:
        path = run.queue / "train" / f"{max(run.wait_for('a file', lambda: ready_numbers(run))):08}.batches"
        with suppress(FileNotFoundError), open(path, "r+b", buffering=0) as file:  # it may be claimed by now
            size = os.fstat(file.fileno()).st_size
            if run.chance.random() < 0.3:
                file.truncate(run.chance.randrange(size))
            else:
                at = run.chance.randrange(size)
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 1 << run.chance.randrange(8)]))
        run.wait_for_batches()
    end = run.come_to_an_end("c", more_files=5)

    assert run.num_repeats(end) == 0
    ids = [id for line in run.handed() for id in line["ids"] if id < end * 1000]
    assert ids == ids_below(end)
    reports = [json.loads(path.read_text()) for path in quarantine.glob("*.json")]
    damaged = list(quarantine.glob("*.batches"))
    assert len(reports) == len(damaged) == run.handed()[-1]["quarantined_files"]
    assert all(report["split"] == "train" and report["reason"] for report in reports)
    run.check_nothing_is_left()


@pytest.mark.parametrize("times", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_processes_that_lose_their_permissions_say_so_and_go_on_when_they_have_them_again(times: int) -> None:
    uid = 65534 if os.geteuid() == 0 else os.geteuid()
    folder = Path(tempfile.mkdtemp(prefix="batchwright-"))  # the folders of pytest are for their owner alone
    run = Run(folder, uid=uid) if uid != os.geteuid() else Run(folder)
    try:
        folder.chmod(0o755)
        run.data_dir.chmod(0o777)
        run.provide("p")
        run.consume("c")
        for _ in range(times):
            run.wait_for_batches(3)
            run.pause(0.05)
            run.queue.chmod(0)
            for error in (run.error_of("p"), run.error_of("c")):
                assert error["kind"] == "QueueError", run.told()
                assert "Permission denied" in error["text"], run.told()
                assert str(run.queue) in error["text"], run.told()
            run.queue.chmod(0o755)
            run.start_again("p", "c")
        end = run.come_to_an_end("c")
        assert run.num_repeats(end) <= times
        run.check_nothing_is_left()
    finally:
        run.__exit__()
        shutil.rmtree(folder)


# Clocks, identities, processes that hang


def test_clocks_that_jump_make_nobody_dead_or_alive(run: Run) -> None:
    consumers = ["c0", "c1", "c2"]
    for number, name in enumerate(["p0", "p1", *consumers]):
        (run.consume if name in consumers else run.provide)(name, clock_seed=number)
    for _ in range(50):
        for path in [*run.queue.rglob("*")]:
            if run.chance.random() < 0.3:
                moment = time.time() + run.chance.uniform(-1, 1) * 24 * 3600
                with suppress(FileNotFoundError):
                    os.utime(path, (moment, moment))
        time.sleep(0.01)
    end = run.come_to_an_end(*consumers, more_files=6)

    assert run.num_repeats(end) == 0
    assert sum(line["redelivered_batches"] + line["lost_claims"] for line in run.handed()) == 0
    run.check_nothing_is_left()


@pytest.mark.parametrize("number", [0, 3])
def test_a_provider_that_forks_while_it_makes_a_file_is_two_that_make_the_same_files(
    run: Run, tmp_path: Path, number: int
) -> None:
    run.provide("p", settings={"max_backlog_files": 12}, fork_at=number)
    run.consume("c")
    forked = run.wait_for("fork", lambda: read_pid(run.folder / "forked"))
    end = run.come_to_an_end("c", more_files=12)
    os.kill(forked, signal.SIGTERM)
    run.wait_for("end of the fork", lambda: not is_running(forked))

    assert run.num_repeats(end) == 0
    assert [id for line in run.handed() for id in line["ids"] if id < end * 1000] == ids_below(end)
    expected = made_undisturbed(tmp_path / "other", end + 16)
    assert all(content == expected[name] for name, content in ready_files(run.queue).items())


def read_pid(path: Path) -> int | None:
    return int(path.read_text() or "0") or None if path.exists() else None


@pytest.mark.parametrize("times", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_two_providers_that_start_at_once_make_each_file_once(tmp_path: Path, times: int) -> None:
    expected = made_undisturbed(tmp_path / "other", 6)
    for time_ in range(times):
        with Run(tmp_path / str(time_)) as run:
            run.provide("p0", "p1", settings={"max_backlog_files": 6}, pause_seconds=0)
            run.wait_for("six files", lambda run=run: {*range(6)} <= {*ready_numbers(run)})
            run.stop_providers()
            made = ready_files(run.queue)
            assert {name: content for name, content in made.items() if name in expected} == expected, run.told()
            run.check_nothing_is_left()


def test_a_consumer_that_hangs_longer_than_its_lease_loses_its_file_to_another_and_goes_on(run: Run) -> None:
    run.provide("p")
    run.consume("hangs", settings={"lease_seconds": 0.4}, pause_seconds=0.1)
    held = stop_inside_a_file(run, "hangs")
    run.consume("lives")
    run.wait_for("the file", lambda: any(line["ids"][0] // 1000 == held for line in run.handed("lives")))
    before = len(run.handed("hangs"))
    run.send("hangs", signal.SIGCONT)
    run.wait_for("more batches", lambda: len(run.handed("hangs")) > before)
    end = run.come_to_an_end("hangs", "lives", more_files=4)

    num_lost = run.handed("hangs")[-1]["lost_claims"]  # more than one where the machine is busy for longer than a lease
    assert num_lost >= 1
    assert run.num_repeats(end) <= num_lost
    assert all(line["ids"][0] // 1000 != held for line in run.handed("hangs")[before:])
    run.check_nothing_is_left()


def stop_inside_a_file(run: Run, name: str) -> int:
    """Stop a consumer that has a file with batches left in it. The file's number."""
    stat = Path(f"/proc/{run.pid(name)}/stat")
    while True:
        run.wait_for_batches(1, name)
        run.send(name, signal.SIGSTOP)
        run.wait_for("stop", lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        number, row = divmod(run.handed(name)[-1]["ids"][0], 1000)
        if row < FILE_ROWS - 2 * BATCH:
            return number
        run.send(name, signal.SIGCONT)
        run.wait_for_batches()


# One process


@pytest.mark.parametrize("delete", ["consumed", "checkpoint"])
def test_a_notebook_cell_that_is_run_again_loses_no_row(tmp_path: Path, delete: str) -> None:
    rng = random.Random(1)
    num_files = 30
    rows_provider(tmp_path, max_backlog_files=num_files).run(("train",), max_files=num_files)
    handed: list[int] = []
    consumers, num_counted = [], 0
    while num_files * 1000 - 1000 + FILE_ROWS - 1 not in handed:
        consumers.append(DatasetConsumer(tmp_path, framework="numpy", timeout_seconds=1, delete=delete))
        for _ in range(rng.randrange(1, 12)):
            if (num_files - 1) * 1000 + FILE_ROWS - 1 not in handed:
                handed += consumers[-1].get_batch("train")[0][:, 0].tolist()
        num_counted += consumers[-1].stats()["train"]["redelivered_batches"]
        if delete == "checkpoint" and rng.random() < 0.7:
            consumers[-1].commit()

    assert sorted(set(handed)) == ids_below(num_files)
    num_repeats = (len(handed) - len(set(handed))) // BATCH
    assert num_repeats == len(consumers) - 1 if delete == "consumed" else num_repeats > len(consumers) - 1
    assert num_repeats <= num_counted
    for replaced in consumers[:-1]:
        with refused(QueueError, split="train", remedy="rank="):
            replaced.get_batch("train")
    for consumer in consumers:
        consumer.close()


def test_what_comes_a_third_time_is_counted_though_less_of_it_came_the_second_time(tmp_path: Path) -> None:
    rows_provider(tmp_path).run(("train",), max_files=2)
    num_batches, counted = [4, 1, 4], []
    for num in num_batches:  # each goes on for the one before it, which committed nothing
        consumer = DatasetConsumer(tmp_path, framework="numpy", delete="checkpoint")
        for _ in range(num):
            consumer.get_batch("train")
        counted.append(consumer.stats()["train"]["redelivered_batches"])
    consumer.close()

    assert counted == [0, 4, 4]


def test_a_state_goes_on_where_a_provider_that_cannot_repeat_itself_stopped_in_the_middle_of_a_file(
    tmp_path: Path,
) -> None:
    class Unrepeatable(Rows):
        reproducible = False

    Unrepeatable(tmp_path, BATCH, batches_per_file=BATCHES_PER_FILE).run(("train",), max_files=2)
    queue = QueueFolder(tmp_path / "queue")
    stopped = QueueMember(queue.who, "provider", 30.0)
    folder = queue.split("train", Liveness(queue.who))
    part = begin(folder, stopped, 9)
    assert part is not None
    give_up(folder, part)
    stopped.leave()
    with DatasetConsumer(tmp_path, framework="numpy", delete="checkpoint") as consumer:
        consumer.get_batch("train")
        state = consumer.state_dict()
    with DatasetConsumer(tmp_path, framework="numpy", delete="checkpoint") as consumer:
        consumer.load_state_dict(state)  # file 2 was begun and never there: it is not a file that was lost
        assert consumer.get_batch("train")[0][:, 0].tolist() == [3, 4, 5]
