"""What only Linux has is a help, never a need: the core works with that half turned off, and gives the same."""

from __future__ import annotations

import ast
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps
from penstock import machine

SOURCE = Path(ps.__file__).parent

# The whole path, with workers in the bake and in the loader.
CORE = """
import sys
import penstock as ps
from penstock import machine
from penstock.sources import units
units._UNIT_ROWS = 20
print("linux", machine.is_linux())
recipe = ps.DatasetRecipe(seed=1).add_ingredient([f"document {n} " * (n % 5 + 1) for n in range(100)], name="a")
recipe.prepare_step(lambda row: {"text": row["text"].upper()}).prepare_step(ps.tokenize("bytes", append_eos=True))
store = ps.bake(recipe, sys.argv[1], workers=2, show_progress=False)
loader = ps.PretrainDataLoader(sys.argv[1], chunk_size=16, batch_size=4, seed=7, workers=2, framework="numpy")
print(store.fingerprint, [int(batch.input_ids.sum()) for batch in loader])
print(next(ps.trace(sys.argv[1], loader, step=3)).text)
assert machine.anonymous_bytes() > 1_000_000 and machine.cpu_count() >= 1
"""


def run_core(to: Path, portable: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent), "PENSTOCK_PORTABLE": portable}
    done = subprocess.run(
        [sys.executable, "-c", CORE, str(to)], env=environment, capture_output=True, text=True, timeout=120
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
    "inotify_init",
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
    assert set(users) == {"machine.py"}, users


@pytest.fixture(params=["0", "1"], ids=["own", "portable"])
def half(request, monkeypatch):
    monkeypatch.setenv("PENSTOCK_PORTABLE", request.param)
    return request.param


@pytest.mark.usefixtures("half")
def test_shared_memory_is_shared_and_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    descriptor = machine.shared_memory(5000)
    try:
        code = f"import mmap; m = mmap.mmap({descriptor}, 5000); m[4990:4995] = b'hello'"
        subprocess.run([sys.executable, "-c", code], pass_fds=[descriptor], timeout=60, check=True)
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
    code = "import os; os.sched_setaffinity(0, {0}); from penstock.machine import cpu_count; print(cpu_count())"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
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
