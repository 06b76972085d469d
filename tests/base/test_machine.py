"""What only Linux has is a help, never a need: the core works with that half turned off, and gives the same."""

from __future__ import annotations

import ast
import gc
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import batchwright as bw
from batchwright.base import machine
from harness import SECONDS

SOURCE = Path(bw.__file__).parent

# The whole path, with workers in the bake and in the loader.
CORE = """
import sys
import batchwright as bw
from batchwright.base import machine
from batchwright.sources import units
units._UNIT_ROWS = 20
print("linux", machine.is_linux())
recipe = bw.DatasetRecipe(seed=1).add_ingredient([f"document {n} " * (n % 5 + 1) for n in range(100)], name="a")
recipe.prepare_step(lambda row: {"text": row["text"].upper()}).prepare_step(bw.tokenize("bytes", append_eos=True))
store = bw.bake(recipe, sys.argv[1], workers=2, show_progress=False)
workers = bw.Delivery(workers=2)
loader = bw.PretrainDataLoader(sys.argv[1], chunk_size=16, batch_size=4, seed=7, delivery=workers, framework="numpy")
print(store.fingerprint, [int(batch.input_ids.sum()) for batch in loader])
print(next(bw.trace(sys.argv[1], loader, step=3)).text)
assert machine.anonymous_bytes() > 1_000_000 and machine.cpu_count() >= 1
"""


def run_core(to: Path, portable: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent), "BATCHWRIGHT_PORTABLE": portable}
    done = subprocess.run(
        [sys.executable, "-c", CORE, str(to)], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_core_gives_the_same_with_the_linux_half_turned_off(tmp_path):
    portable = run_core(tmp_path / "portable.store", "1")
    assert portable[0] == "linux False"
    assert portable[1:] == run_core(tmp_path / "own.store", "0")[1:]


LINUX_ONLY = {
    "sched_getaffinity",
    "memfd_create",
    "posix_fadvise",
    "pidfd_open",
    "inotify_init1",
    "inotify_add_watch",
    "inotify_rm_watch",
    "prctl",
    "madvise",
    "eventfd",
    "splice",
    "copy_file_range",
    "sendfile",
    "fork",
}


def test_only_one_module_uses_what_only_linux_has():
    users = {}
    for file in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & LINUX_ONLY
        paths = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith(("/proc", "/dev/"))
        }
        if names | paths:
            users[file.relative_to(SOURCE).as_posix()] = names | paths
    assert set(users) == {"base/machine.py"}, users


@pytest.fixture(params=["0", "1"], ids=["own", "portable"])
def half(request, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_PORTABLE", request.param)
    return request.param


@pytest.mark.usefixtures("half")
def test_shared_memory_is_shared_and_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    descriptor = machine.shared_memory(5000)
    try:
        code = f"import mmap; m = mmap.mmap({descriptor}, 5000); m[4990:4995] = b'hello'"
        subprocess.run([sys.executable, "-c", code], pass_fds=[descriptor], timeout=SECONDS, check=True)
        with mmap.mmap(descriptor, 5000) as memory:
            assert memory[4990:4995] == b"hello"
    finally:
        os.close(descriptor)
    assert os.listdir(tmp_path) == []
    assert (set(os.listdir("/dev/shm")) if before else set()) <= before


@pytest.mark.usefixtures("half")
def test_a_process_counts_the_cpus_it_may_use():
    assert 1 <= machine.cpu_count() <= (os.cpu_count() or 1)


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_affinity_limits_the_cpus_that_are_counted():
    code = "import os; os.sched_setaffinity(0, {0}); from batchwright.base.machine import cpu_count; print(cpu_count())"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.stdout == "1\n"


def test_whether_a_process_is_alive():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert machine.is_alive(process.pid)
        process.kill()
    assert not machine.is_alive(process.pid)
    assert machine.is_alive(1)


# Memory

MEMINFO = "MemTotal: 24000 kB\nMemFree: 100 kB\nMemAvailable: 20000 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        pytest.param("0::/\n", {}, 20_000 * 1024, id="no limit"),
        pytest.param(
            "0::/job\n",
            {
                "job/memory.max": "1000000\n",
                "job/memory.current": "700000\n",
                "job/memory.stat": "anon 1\ninactive_file 200000\nactive_file 100000\nfile 999\n",
            },
            1_000_000 - 700_000 + 300_000,
            id="version 2: cached files count as free",
        ),
        pytest.param(
            "0::/a/b\n",
            {
                "a/memory.max": "5000\n",
                "a/memory.current": "1000\n",
                "a/b/memory.max": "max\n",
                "a/b/memory.current": "900\n",
            },
            4000,
            id="version 2: a limit further up counts",
        ),
        pytest.param(
            "5:cpu,memory:/job\n0::/\n",
            {
                "memory/job/memory.limit_in_bytes": "9000\n",
                "memory/job/memory.usage_in_bytes": "8000\n",
                "memory/job/memory.stat": "total_inactive_file 500\ntotal_active_file 100\n",
            },
            1600,
            id="version 1",
        ),
        pytest.param(
            "4:memory:/docker/1234\n",
            {"memory/memory.limit_in_bytes": "7000\n", "memory/memory.usage_in_bytes": "1000\n"},
            6000,
            id="a container that sees only its own root",
        ),
        pytest.param("0::/job\n", {"job/memory.max": "1000\n", "job/memory.current": "3000\n"}, 0, id="over its limit"),
    ],
)
def test_available_memory_is_what_the_machine_and_every_limit_leave(tmp_path, cgroup, files, expected):
    proc = write(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": cgroup})
    assert machine.available_bytes(proc, write(tmp_path / "cgroup", files)) == expected


@pytest.mark.usefixtures("half")
def test_some_memory_is_available_on_any_machine():
    assert machine.available_bytes() > 1 << 20


def test_pages_that_are_let_go_of_come_back_unchanged(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 256)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = bytes(mapped)
        machine.expect_random_reads(mapped)
        for start, stop in ((0, 65_536), (1, 65_535), (5000, 5001), (100, 100)):
            machine.unmap_pages(mapped, start, stop)
            assert bytes(mapped) == before


# Folders that tell of changes. On the portable half every wait says "look yourself" after a nap.

only_where_linux_tells = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")


@pytest.fixture
def told(monkeypatch):
    """Linux tells, and nobody looks in the meantime."""
    monkeypatch.setenv("BATCHWRIGHT_PORTABLE", "0")
    monkeypatch.setattr(machine, "_LOOK_SECONDS", 1e9)


def wait_for(watch: machine.FolderWatch, is_there) -> bool:
    deadline = time.monotonic() + SECONDS
    while not is_there():
        if time.monotonic() > deadline:
            return False
        watch.wait(10)
    return True


@pytest.mark.usefixtures("half")
def test_a_waiting_thread_finds_a_file_that_another_process_brings(tmp_path):
    code = "import os, sys, time; time.sleep(0.1); open('.a.part', 'w').close(); os.rename('.a.part', 'a')"
    with machine.FolderWatch(tmp_path) as watch:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
        assert wait_for(watch, (tmp_path / "a").exists)
        assert process.wait(SECONDS) == 0


@only_where_linux_tells
@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("change", ["made", "moved in", "moved out", "removed", "written", "folder removed"])
def test_a_wait_ends_when_something_changes(tmp_path, change):
    folder = tmp_path / "watched"
    folder.mkdir()
    (tmp_path / "outside").touch()
    for name in ("old", "other"):
        (folder / name).touch()
    with machine.FolderWatch(folder) as watch:
        assert not watch.wait(0)
        changes = {
            "made": lambda: (folder / "new").mkdir(),
            "moved in": lambda: (tmp_path / "outside").rename(folder / "new"),
            "moved out": lambda: (folder / "old").rename(tmp_path / "gone"),
            "removed": lambda: (folder / "old").unlink(),
            "written": lambda: (folder / "old").write_text("1"),
            "folder removed": lambda: shutil.rmtree(folder),
        }
        threading.Timer(0.05, changes[change]).start()
        began = time.monotonic()
        assert watch.wait(2 * SECONDS)
        assert time.monotonic() - began < SECONDS


@only_where_linux_tells
@pytest.mark.usefixtures("told")
def test_nothing_is_missed_between_two_waits_and_many_changes_are_one_wake_up(tmp_path):
    with machine.FolderWatch(tmp_path) as watch:
        for n in range(3000):
            (tmp_path / str(n)).touch()
        assert watch.wait(0)
        assert not watch.wait(0.01)
        (tmp_path / "0").unlink()
        assert watch.wait(0)
        assert not watch.wait(0.01)


@only_where_linux_tells
@pytest.mark.usefixtures("told")
def test_names_that_begin_with_a_dot_wake_nobody(tmp_path):
    (tmp_path / ".part").touch()
    with machine.FolderWatch(tmp_path) as watch:
        (tmp_path / ".part").write_text("half")
        assert not watch.wait(0.01)
        (tmp_path / ".part").rename(tmp_path / "whole")
        assert watch.wait(0)


@only_where_linux_tells
@pytest.mark.usefixtures("told")
def test_the_end_of_a_process_that_holds_a_file_open_for_writing_is_a_change(tmp_path):
    code = "import sys; f = open('held', 'w'); print('held', flush=True); sys.stdin.read()"
    with (
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        machine.FolderWatch(tmp_path) as watch,
    ):
        assert process.stdout.readline() == "held\n"
        watch.wait(0)
        process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        assert watch.wait(2 * SECONDS)
        assert time.monotonic() - began < SECONDS


@pytest.mark.usefixtures("half")
def test_a_folder_that_comes_goes_and_comes_again_is_watched(tmp_path):
    folder = tmp_path / "later"
    with machine.FolderWatch(tmp_path / "other", folder) as watch:
        (tmp_path / "other").mkdir()
        assert watch.wait(10)  # not there: look yourself
        for _ in range(3):
            folder.mkdir()
            assert watch.wait(10)
            (folder / "a").touch()
            assert watch.wait(10)
            shutil.rmtree(folder)
            assert watch.wait(10)


@only_where_linux_tells
@pytest.mark.usefixtures("told")
def test_a_folder_that_is_replaced_is_watched_in_its_new_shape(tmp_path):
    folder = tmp_path / "above" / "watched"
    folder.mkdir(parents=True)
    with machine.FolderWatch(folder) as watch:
        (tmp_path / "above").rename(tmp_path / "moved")
        assert watch.wait(0)
        folder.mkdir(parents=True)
        assert watch.wait(0)
        (tmp_path / "moved" / "watched" / "a").touch()
        assert not watch.wait(0)
        (folder / "a").touch()
        assert watch.wait(0)
        folder.rename(tmp_path / "away")
        folder.mkdir()
        assert watch.wait(0)
        (tmp_path / "away" / "b").touch()
        assert not watch.wait(0)


@only_where_linux_tells
def test_a_folder_renamed_further_up_ends_a_wait_that_has_begun(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_PORTABLE", "0")
    monkeypatch.setattr(machine, "_LOOK_SECONDS", 0.1)
    folder = tmp_path / "above" / "watched"
    folder.mkdir(parents=True)
    with machine.FolderWatch(folder) as watch:
        threading.Timer(0.05, (tmp_path / "above").rename, [tmp_path / "moved"]).start()
        began = time.monotonic()
        assert watch.wait(2 * SECONDS)
        assert time.monotonic() - began < SECONDS


@pytest.mark.usefixtures("half")
def test_waiting_costs_hardly_any_cpu(tmp_path):
    with machine.FolderWatch(tmp_path, tmp_path / "missing") as watch:
        began, cpu_began, num_waits = time.monotonic(), time.thread_time(), 0
        while time.monotonic() - began < 0.5:
            watch.wait(0.5)
            num_waits += 1
    assert time.thread_time() - cpu_began < 0.2 * (time.monotonic() - began)
    assert num_waits < 30  # 1, 2, 4, ... 50 ms


@only_where_linux_tells
@pytest.mark.usefixtures("told")
def test_nothing_happens_while_nothing_changes(tmp_path):
    with machine.FolderWatch(tmp_path) as watch:
        began, cpu_began = time.monotonic(), time.thread_time()
        assert not watch.wait(0.3)
        assert time.monotonic() - began >= 0.3
        assert time.thread_time() - cpu_began < 0.2 * (time.monotonic() - began)


def test_the_portable_half_naps_longer_and_longer_until_a_change(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_PORTABLE", "1")
    naps: list[float] = []

    class NoSleep:
        def poll(self, milliseconds):
            naps.append(milliseconds / 1000)

    with machine.FolderWatch(tmp_path) as watch:
        watch._poll = NoSleep()
        assert watch.wait(10)  # look yourself, after a while
        assert naps[:8] == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.05, 0.05]
        (tmp_path / "a").touch()
        watch.wait(10)
        assert watch._nap_seconds == 0.001


@only_where_linux_tells
@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("refused", ["inotify_init1", "inotify_add_watch"])
def test_a_machine_with_no_watches_left_is_looked_at_again_and_again(tmp_path, monkeypatch, refused):
    class Libc:
        def __getattr__(self, name):
            return (lambda *_: -1) if name == refused else getattr(real, name)

    real = machine._libc()
    monkeypatch.setattr(machine, "_libc", Libc)
    with machine.FolderWatch(tmp_path) as watch:
        assert [watch.wait(10) for _ in range(3)] == [True] * 3
        assert watch._nap_seconds == 0.05


@pytest.mark.usefixtures("half")
def test_wake_ends_a_wait_from_another_thread(tmp_path):
    with machine.FolderWatch(tmp_path) as watch:
        for _ in range(70_000):  # nobody waits: it neither blocks nor adds up
            watch.wake()
        assert watch.wait(2 * SECONDS)
        stop = threading.Event()
        threading.Timer(0.05, lambda: (stop.set(), watch.wake())).start()
        assert wait_for(watch, stop.is_set)


@only_where_linux_tells
@pytest.mark.usefixtures("told")
def test_wake_in_a_signal_handler_ends_the_wait_of_its_own_thread(tmp_path):
    with machine.FolderWatch(tmp_path) as watch:
        before = signal.signal(signal.SIGUSR1, lambda *_: watch.wake())
        try:
            threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1]).start()
            began = time.monotonic()
            assert watch.wait(2 * SECONDS)
            assert time.monotonic() - began < SECONDS
        finally:
            signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("half")
def test_a_watch_closed_by_another_thread_ends_the_wait_with_no(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_LOOK_SECONDS", 1e9)
    watch = machine.FolderWatch(tmp_path)
    threading.Timer(0.05, watch.close).start()
    began = time.monotonic()
    while watch.wait(2 * SECONDS):  # the portable half says yes until it is closed
        assert time.monotonic() - began < SECONDS
    assert time.monotonic() - began < SECONDS
    assert not watch.wait(2 * SECONDS)
    watch.wake()
    watch.close()
    assert watch._descriptors == []


@only_where_linux_tells
@pytest.mark.usefixtures("half")
def test_no_descriptor_is_left_open(tmp_path):
    gc.collect()  # files of tests before this one
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with machine.FolderWatch(tmp_path, tmp_path / "missing") as watch:
            watch.wait(0)
        machine.FolderWatch(tmp_path)  # forgotten, never closed
    assert len(os.listdir("/proc/self/fd")) <= before


FORKED = """
import os, sys
from batchwright.base import machine
machine._LOOK_SECONDS = 1e9
file = sys.argv[1] + "/a"
open(file, "w").close()
watch = machine.FolderWatch(sys.argv[1])

def in_a_child(act):
    child = os.fork()
    if child == 0:
        os._exit(0 if act() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def write_and_wait():
    watch.wait(0)
    open(file, "w").close()
    return watch.wait(0)

in_a_child(write_and_wait)
assert watch.wait(0), "the child took the parent's events"
in_a_child(lambda: [watch.wake(), watch.close()])
assert not watch.wait(0), "the child woke the parent"
open(file, "w").close()
assert watch.wait(0), "the child closed the parent's watch"
"""


@only_where_linux_tells
@pytest.mark.usefixtures("told")
def test_a_forked_child_takes_nothing_from_its_parent(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], env=environment, timeout=SECONDS, check=True)
