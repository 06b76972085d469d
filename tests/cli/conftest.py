"""Run `batchwright` as a user does, in a process of its own; or, for the many small cases, inside this one."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import batchwright as bw
from batchwright.cli.main import main
from shared import bake_source

Run = Callable[..., Any]


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def _words(line: str, arguments: Iterable[object]) -> list[str]:
    """A command line as a shell splits it, and arguments that are whole whatever is in them."""
    return [*shlex.split(line), *map(str, arguments)]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """For processes that a test starts: they find the package that is under test."""
    paths = [str(Path(bw.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="session")
def process(environment: dict[str, str]) -> Run:
    """process(f"info {store}"): the command line in a process of its own."""

    def ran(line: str = "", *arguments: object, cwd: Path | None = None, **more: str) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "batchwright", *_words(line, arguments)],
            capture_output=True,
            text=True,
            cwd=cwd,
            env=environment | more,
            stdin=subprocess.DEVNULL,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return ran


@pytest.fixture
def batchwright(capsys: pytest.CaptureFixture[str]) -> Run:
    """batchwright(f"info {store}"): the same, inside this process."""

    def ran(line: str = "", *arguments: object, cwd: Path | None = None) -> Ran:
        capsys.readouterr()
        with contextlib.chdir(cwd or "."):
            try:
                code = main(_words(line, arguments))
            except SystemExit as exit:
                code = int(exit.code or 0)
        return Ran(code, *capsys.readouterr())

    return ran


def _succeeded(done: Ran) -> Ran:
    assert done.code == 0, done.err
    return done


def _message(done: Ran) -> str:
    """The message of a command that bad input ended: exit code 2, one message on stderr, and nothing else."""
    assert done.code == 2, (done.out, done.err)
    assert done.out == ""
    assert done.err.startswith("batchwright: ")
    assert done.err.count("batchwright: ") == 1
    assert "Traceback" not in done.err
    return done.err


@pytest.fixture
def succeeds(batchwright: Run) -> Run:
    return lambda *arguments, **options: _succeeded(batchwright(*arguments, **options))


@pytest.fixture
def refuses(batchwright: Run) -> Run:
    return lambda *arguments, **options: _message(batchwright(*arguments, **options))


@pytest.fixture(scope="session")
def process_succeeds(process: Run) -> Run:
    return lambda *arguments, **options: _succeeded(process(*arguments, **options))


@pytest.fixture(scope="session")
def process_refuses(process: Run) -> Run:
    return lambda *arguments, **options: _message(process(*arguments, **options))


@pytest.fixture(scope="session")
def store(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources web, code and notes; one plan is kept: rows of 16 tokens, 12 in a batch, seed 7."""
    path = tmp_path_factory.mktemp("cli") / "corpus.store"
    shutil.copytree(small_store, path, ignore=shutil.ignore_patterns("plans", "rows"))
    bw.PretrainDataLoader(path, chunk_size=16, batch_size=12, seed=7, framework="numpy")
    return path


@pytest.fixture(scope="session")
def plan(store: Path) -> str:
    """The fingerprint of the plan that is kept."""
    (file,) = (store / "plans").glob("*.json")
    return file.stem


@pytest.fixture(scope="session")
def _mixed_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    bake_source(folder / "web.store", [f"web {n}: " + "word " * (n % 23) for n in range(90)])
    bake_source(folder / "code.store", [f"def f{n}(): return {n}\n" * (1 + n % 5) for n in range(30)])
    bake_source(folder / "math.store", [f"{n} + {n} = {2 * n}. " * 3 for n in range(40)])
    notes = [f"note {n}." + " More." * (n % 5) for n in range(70)]
    bake_source(folder / "notes.store", notes[:40], shuffle=False)
    bake_source(folder / "more.store", notes, shuffle=False)
    return folder


@pytest.fixture
def mixed_stores(_mixed_stores: Path, tmp_path: Path) -> Path:
    """A folder with web.store, code.store and math.store; notes.store, and more.store, which it has grown to."""
    return Path(shutil.copytree(_mixed_stores, tmp_path / "stores"))
