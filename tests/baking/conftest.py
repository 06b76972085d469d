"""What tests of baking share: small raw files of every kind, small units of work, scripts in their own processes."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import batchwright as bw
import shared
from batchwright.sources import units
from batchwright.store.layout import current_version, version_folder


def jsonl(numbers: range, word: str = "web") -> str:
    rows = [{"text": f"{word} {n} " + "so " * (n % 9), "number": n} for n in numbers]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """web/a.jsonl, b.jsonl.gz and c.jsonl.zst with 40 documents each; code/0.txt to 9.txt."""
    folder = tmp_path / "raw"
    (folder / "web").mkdir(parents=True)
    (folder / "code").mkdir()
    (folder / "web" / "a.jsonl").write_text(jsonl(range(40)))
    (folder / "web" / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(range(40, 80)).encode(), mtime=0))
    (folder / "web" / "c.jsonl.zst").write_bytes(pa.compress(jsonl(range(80, 120)).encode(), "zstd", asbytes=True))
    for n in range(10):
        (folder / "code" / f"{n}.txt").write_text(f"# file {n}\n" + f"line {n}\n" * n)
    return folder


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several units from a few kilobytes: two or three lines each, four rows from memory."""
    monkeypatch.setattr(units, "UNIT_BYTES", 150)
    monkeypatch.setattr(units.cut_rows, "__defaults__", (4,))


@pytest.fixture(scope="session")
def quiet_bake() -> Callable[..., bw.Store]:
    return shared.quiet_bake


@pytest.fixture(scope="session")
def version_files() -> Callable[[Path], dict[str, bytes]]:
    """Every file of a store's current version."""

    def read(store: Path) -> dict[str, bytes]:
        folder = version_folder(store, current_version(store) or "")
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    return read


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run Python code from a file, or `from_stdin`, in a process of its own, which must end well."""

    def run(
        code: str, *arguments: object, cwd: Path, from_stdin: bool = False, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        code = textwrap.dedent(code)
        script = "-"
        if not from_stdin:
            script = str(tmp_path_factory.mktemp("script") / "script.py")
            Path(script).write_text(code)
        source = str(Path(bw.__file__).parents[1])
        done = subprocess.run(
            [sys.executable, script, *map(str, arguments)],
            input=code if from_stdin else "",
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": source, **environment},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run
