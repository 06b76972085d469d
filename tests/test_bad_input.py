"""Bad input: one clear error that names the thing and the remedy, and nothing that was there before is changed.

One case for each line of the promise. A case says what happens, which error it gives, what the error names, and what
it advises; the one test below asserts all of that and that nothing changed: the store that was there before has the
same bytes and opens, and where there was none, none opens.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import batchwright as bw
from batchwright.store import verify_store
from harness import wait_for
from refusals import refused
from shared import quiet_bake

GOOD = "".join(json.dumps({"text": f"document {n}", "url": f"http://{n}"}) + "\n" for n in range(20))


@dataclass
class World:
    """A folder of good input, a store that was baked from it, and a place where there is no store yet."""

    folder: Path
    ends: list[Callable[[], object]] = field(default_factory=list)

    @property
    def raw(self) -> Path:
        return self.folder / "raw"

    @property
    def store(self) -> Path:
        return self.folder / "good.store"

    @property
    def fresh(self) -> Path:
        return self.folder / "fresh.store"

    def write(self, name: str, data: str | bytes) -> Path:
        (self.raw / name).write_bytes(data.encode() if isinstance(data, str) else data)
        return self.raw / name

    def recipe(self, **ingredient: Any) -> bw.DatasetRecipe:
        return bw.DatasetRecipe().add_ingredient(self.raw, **{"name": "web", **ingredient})

    def bake(self, to: Path, **ingredient: Any) -> bw.Store:
        return quiet_bake(self.recipe(**ingredient).prepare_step(bw.tokenize("bytes")), to)

    def copy(self) -> Path:
        shutil.copytree(self.store, self.folder / "copy.store")
        return self.folder / "copy.store"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.raw.mkdir()
    made.write("a.jsonl", GOOD)
    made.bake(made.store)
    yield made
    for end in made.ends:
        end()


@dataclass
class Expected:
    error: type[Exception]
    headline: str
    where: dict[str, Any]
    remedy: str
    act: Callable[[Path], object]
    """What the user does. `Path` is a folder to bake into: one where a store is, then one where there is none."""
    bakes: bool = True
    """Whether `act` bakes; otherwise it is done once, and only reads."""


Case = Callable[[World], Expected]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES[name] = function
        return function

    return add


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def what_a_store_is(path: Path) -> dict[str, bytes]:
    """Its pointer and its complete versions: the work of a bake that stopped may lie beside them."""
    complete = [manifest.parent for manifest in (path / "versions").glob("*/manifest.json")]
    files = {f"{folder.name}/{name}": data for folder in complete for name, data in everything(folder).items()}
    return files | {"batchwright.json": (path / "batchwright.json").read_bytes()}


@case("malformed line")
def malformed_line(world: World) -> Expected:
    file = world.write("b.jsonl", GOOD + '{"text": "half\n' + GOOD)
    return Expected(
        bw.SourceError,
        "malformed row: ",
        {"file": str(file), "line": 21},
        "mend the row, or on_error='skip'",
        world.bake,
    )


@case("wrong column")
def wrong_column(world: World) -> Expected:
    world.write("a.jsonl", GOOD.replace("text", "content"))
    return Expected(
        bw.SourceError,
        "no column 'contnet': this row has 'content', 'url'; perhaps text='content'",
        {"file": str(world.raw / "a.jsonl"), "line": 1},
        "text= with the column that holds the text",
        lambda to: world.bake(to, text="contnet"),
    )


@case("empty file")
def empty_file(world: World) -> Expected:
    file = world.write("b.txt", "")
    return Expected(
        bw.SourceError,
        "empty file",
        {"file": str(file)},
        "mend or leave out the file, or on_error='skip'",
        world.bake,
    )


@case("not UTF-8: a text file")
def not_utf8_text(world: World) -> Expected:
    file = world.write("b.txt", b"caf\xe9 latin-1")
    return Expected(
        bw.SourceError, "not UTF-8: byte 0xe9 at 3", {"file": str(file)}, "mend or leave out the file", world.bake
    )


@case("not UTF-8: a line")
def not_utf8_line(world: World) -> Expected:
    file = world.write("b.jsonl", GOOD.encode() + b'{"text": "caf\xe9"}\n')
    return Expected(
        bw.SourceError, "not UTF-8: byte 0xe9 at 13", {"file": str(file), "line": 21}, "mend the row", world.bake
    )


@case("truncated archive: gzip")
def truncated_gzip(world: World) -> Expected:
    file = world.write("b.jsonl.gz", gzip.compress(GOOD.encode())[:-20])
    return Expected(
        bw.SourceError,
        "damaged archive: this gzip file is truncated or damaged (Truncated compressed stream)",
        {"file": str(file), "line": 1},
        "mend or leave out the file, or on_error='skip'",
        world.bake,
    )


@case("truncated archive: zstd")
def truncated_zstd(world: World) -> Expected:
    file = world.write("b.jsonl.zst", pa.compress(GOOD.encode(), "zstd", asbytes=True)[:-20])
    return Expected(
        bw.SourceError,
        "damaged archive: this zstd file is truncated or damaged (Truncated compressed stream)",
        {"file": str(file), "line": 1},
        "mend or leave out the file, or on_error='skip'",
        world.bake,
    )


@case("vocabulary larger than the dtype")
def vocabulary_larger_than_dtype(world: World) -> Expected:
    def act(to: Path) -> object:
        step = bw.tokenize(lambda text: [0], vocab_size=70_000, dtype="uint16")
        return quiet_bake(world.recipe().prepare_step(step), to)

    return Expected(
        bw.TokenizerError,
        "dtype=uint16 cannot hold a vocabulary of 70,000 ids",
        {"parameter": "dtype"},
        "dtype='uint32'",
        act,
    )


@case("zero documents")
def zero_documents(world: World) -> Expected:
    return Expected(
        bw.SourceError,
        "no documents: every row was dropped",
        {"dropped": "web: 20 not where"},
        "look at where=",
        lambda to: world.bake(to, where=lambda row: False),
    )


@case("a tokenizer that gives nothing")
def tokenizer_gives_nothing(world: World) -> Expected:
    def act(to: Path) -> object:
        return quiet_bake(world.recipe().prepare_step(bw.tokenize(lambda text: [], vocab_size=10)), to)

    return Expected(
        bw.TokenizerError,
        "no tokens: the tokenizer gave none for any document",
        {"documents": "20"},
        "try the tokenizer on one text",
        act,
    )


@case("chunk longer than the corpus")
def chunk_longer_than_corpus(world: World) -> Expected:
    return Expected(
        bw.SpecError,
        "chunk_size=1000000 needs 1,000,001 tokens; source 'web' (train) has 210",
        {"parameter": "chunk_size", "source": "web"},
        "chunk_size=209 or less",
        lambda to: bw.PretrainDataLoader(to, chunk_size=1_000_000),
        bakes=False,
    )


@case("batch not divisible by ranks")
def batch_not_divisible(world: World) -> Expected:
    return Expected(
        bw.SpecError,
        "batch_size=8 does not divide by world_size=3",
        {"parameter": "batch_size"},
        "batch_size=6 or 9",
        lambda to: bw.PretrainDataLoader(to, chunk_size=8, batch_size=8, rank=0, world_size=3),
        bakes=False,
    )


@case("state of another plan")
def state_of_another_plan(world: World) -> Expected:
    other = bw.PretrainDataLoader(world.store, chunk_size=8, seed=1, framework="numpy")
    loader = bw.PretrainDataLoader(world.store, chunk_size=8, seed=2, framework="numpy")
    loader.get_batch()
    before = loader.state_dict()
    world.ends.append(lambda: _assert(loader.state_dict() == before, "the loader moved"))
    return Expected(
        bw.PlanError,
        f"this state belongs to plan {other.plan.fingerprint}",
        {"differs": "seed: 2 here, 1 there"},
        "open the loader with the settings of that run",
        lambda to: loader.load_state_dict(other.state_dict()),
        bakes=False,
    )


@case("store with a missing shard")
def missing_shard(world: World) -> Expected:
    shard = _shard(world.copy())
    shard.unlink()
    return Expected(
        bw.StoreError,
        "a shard of this store is missing",
        {"file": shard},
        "bake again",
        lambda to: bw.open_store(world.folder / "copy.store"),
        bakes=False,
    )


@case("store with a truncated shard")
def truncated_shard(world: World) -> Expected:
    shard = _shard(world.copy())
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    return Expected(
        bw.StoreError,
        "a shard of this store was truncated or altered",
        {"file": shard, "expected": f"{size:,} bytes", "found": f"{size - 1:,} bytes"},
        "bake again",
        lambda to: bw.open_store(world.folder / "copy.store"),
        bakes=False,
    )


@case("store with an altered shard: open_store(verify=True)")
def altered_shard(world: World) -> Expected:
    shard = _shard(world.copy())
    _alter(shard)
    return Expected(
        bw.StoreError,
        "a shard of this store was altered: its hash differs",
        {"file": shard},
        "bake again",
        lambda to: bw.open_store(world.folder / "copy.store", verify=True),
        bakes=False,
    )


@case("store with an altered shard: verify")
def altered_shard_verify(world: World) -> Expected:
    shard = _shard(world.copy())
    _alter(shard)

    def act(to: Path) -> None:
        (damage,) = verify_store(bw.Store(world.folder / "copy.store"))
        raise damage.error()

    return Expected(
        bw.StoreError,
        "a shard of this store was altered: its hash differs",
        {"file": shard},
        "copy the store again",
        act,
        bakes=False,
    )


def _shard(store: Path) -> Path:
    (shard,) = (store / "versions").glob("*/web-train-00000.arrow")
    return shard


def _alter(shard: Path) -> None:
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b"document 7", b"dokument 7"))
    assert shard.read_bytes() != data


def _assert(holds: bool, what: str) -> None:
    assert holds, what


def small_disk(world: World) -> Path:
    """A disk of 256 kB, with a copy of the good store on it."""
    disk = world.folder / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "batchwright-test", str(disk)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("NO SMALL DISK COULD BE MOUNTED (that needs root): only a limit on file sizes is tested")
    world.ends.append(lambda: subprocess.run(["umount", "-l", str(disk)], check=True))
    shutil.copytree(world.store, disk / "good.store")
    world.write("big.jsonl", "".join(json.dumps({"text": "x" * 1000}) + "\n" for _ in range(400)))
    return disk


@case("disk full while baking: a real full disk (needs root)")
def disk_full(world: World) -> Expected:
    disk = small_disk(world)

    def act(to: Path) -> object:
        on_disk = disk / to.name
        before = what_a_store_is(on_disk) if on_disk.exists() else None
        try:
            return world.bake(on_disk)
        finally:
            if before is None:
                _opens_no_store(on_disk)
                shutil.rmtree(on_disk)
            else:
                assert what_a_store_is(on_disk) == before
                assert bw.open_store(on_disk, verify=True).num_rows == 20

    return Expected(
        bw.OutOfSpaceError,
        "no space left while writing",
        {"reason": "No space left on device"},
        "free some space and run the same call again: it continues where it stopped",
        act,
    )


LIMITED = """
import pickle, resource, sys
import batchwright as bw
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
recipe = bw.DatasetRecipe().add_ingredient(sys.argv[1], name="web").prepare_step(bw.tokenize("bytes"))
try:
    bw.bake(recipe, sys.argv[2], workers=int(sys.argv[3]), show_progress=False)
except bw.BatchwrightError as error:
    sys.stdout.buffer.write(pickle.dumps(error))
"""


def disk_full_by_limit(workers: int) -> Case:
    def make(world: World) -> Expected:
        for name in "bcd":  # several units, so that workers have work
            world.write(f"{name}.jsonl", "".join(json.dumps({"text": "x" * 1000}) + "\n" for _ in range(100)))

        def act(to: Path) -> None:
            code = LIMITED.replace(
                "\nresource", "\nfrom batchwright.sources import units; units.UNIT_BYTES = 50_000\nresource", 1
            )
            done = subprocess.run(
                [sys.executable, "-c", code, world.raw, to, str(workers)], env=_environment(), capture_output=True
            )
            assert done.returncode == 0, done.stderr.decode()
            raise pickle.loads(done.stdout)

        return Expected(
            bw.OutOfSpaceError,
            "no space left while writing",
            {"reason": "File too large"},
            "free some space and run the same call again: it continues where it stopped",
            act,
        )

    return make


case("disk full while baking: a limit on file sizes")(disk_full_by_limit(0))
case("disk full while baking: a limit on file sizes, in workers")(disk_full_by_limit(2))


# A bake in another process that stops in the middle, and says that it did.
WAITING = """
import pathlib, sys, time
import batchwright as bw
from batchwright.sources import units
units.UNIT_BYTES = 200
def wait(row, seen=pathlib.Path(sys.argv[3])):
    if row["text"] == "document 15":
        seen.touch()
        time.sleep(600)
    return row
recipe = bw.DatasetRecipe().add_ingredient(sys.argv[1], name="web").prepare_step(wait, version="1")
bw.bake(recipe.prepare_step(bw.tokenize("bytes")), sys.argv[2], workers=0, show_progress=False)
"""


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(bw.__file__).parents[1])}


def _bake_that_waits(world: World, to: Path) -> subprocess.Popen[bytes]:
    seen = world.folder / f"{to.name}.seen"
    process = subprocess.Popen([sys.executable, "-c", WAITING, world.raw, to, seen], env=_environment())
    world.ends += [process.kill, process.wait]
    wait_for("beginning of the other bake", lambda: seen.exists() or process.poll() is not None)
    assert process.poll() is None, "the other bake ended"
    return process


@case("two bakes to one folder")
def two_bakes(world: World) -> Expected:
    where: dict[str, Any] = {}

    def act(to: Path) -> object:
        other = _bake_that_waits(world, to)
        where.update(folder=to, process=f"pid {other.pid}")
        try:
            return world.bake(to, where=lambda row: True)
        finally:
            other.kill()
            other.wait()

    return Expected(
        bw.BusyError, "another process is baking into", where, "wait for it, or stop it; then run this again", act
    )


@case("kill -9 in mid-bake")
def killed(world: World) -> Expected:
    def act(_: Path) -> object:
        for to in (world.store, world.fresh):
            other = _bake_that_waits(world, to)
            assert list((to / "work").glob("*.arrow")), "the other bake has done nothing yet"
            other.kill()
            assert other.wait() == -signal.SIGKILL
        return bw.open_store(world.fresh)

    return Expected(
        bw.StoreError,
        f"{world.fresh} is not complete: its first bake has not finished",
        {"folder": world.fresh},
        "run the same bake again: it continues where it stopped",
        act,
        bakes=False,
    )


@case("unknown extension without format=")
def unknown_extension(world: World) -> Expected:
    file = world.write("b.docx", b"PK")
    return Expected(
        bw.SourceError,
        "cannot tell the format of a file from its extension '.docx'",
        {"file": str(file), "parameter": "format"},
        "add_ingredient(..., format='text')",
        world.bake,
    )


@case("a folder that is not a store")
def not_a_store(world: World) -> Expected:
    other = world.folder / "thesis"
    other.mkdir()
    (other / "chapter1.tex").write_text("years of work")
    before = everything(other)
    world.ends.append(lambda: _assert(everything(other) == before, "the folder was changed"))
    return Expected(
        bw.SpecError,
        f"{other} is a folder that is not a store, and is left as it is",
        {"parameter": "to"},
        "a new folder, such as to='corpus.store'",
        lambda to: world.bake(other),
        bakes=False,
    )


def _opens_no_store(path: Path) -> None:
    for settings in ({}, {"verify": True}):
        with pytest.raises(bw.StoreError, match=r"no store at|is not complete|is not a store"):
            bw.open_store(path, **settings)


@pytest.mark.parametrize("name", list(CASES))
def test_bad_input_is_one_clear_error_and_changes_nothing(name: str, world: World) -> None:
    expected = CASES[name](world)
    before = what_a_store_is(world.store)
    raw = everything(world.raw)
    for to in (world.store, world.fresh) if expected.bakes else (world.store,):
        with pytest.raises(expected.error) as caught:
            expected.act(to)
        error = caught.value
        assert type(error) is expected.error
        assert error.headline.startswith(expected.headline)
        assert {key: error.where.get(key) for key in expected.where} == expected.where
        assert expected.remedy in (error.remedy or "")
        text = str(error)
        assert all(str(value) in text for value in expected.where.values())
        assert f"  try        {error.remedy}" in text
        assert what_a_store_is(world.store) == before
        assert bw.open_store(world.store, verify=True).num_rows == 20
        _opens_no_store(world.fresh)
    assert everything(world.raw) == raw


def test_after_space_was_made_the_same_call_continues(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = small_disk(world)
    monkeypatch.setattr("batchwright.sources.units.UNIT_BYTES", 20_000)
    read = world.folder / "read"

    def count(row: dict[str, Any]) -> dict[str, Any]:
        with open(read, "a") as file:
            file.write(".")
        return row

    recipe = world.recipe().prepare_step(count, version="1").prepare_step(bw.tokenize("bytes"))
    with refused(bw.OutOfSpaceError, folder=disk / "good.store"):
        quiet_bake(recipe, disk / "good.store")
    finished = len(list((disk / "good.store" / "work").glob("*.arrow")))
    assert finished > 2
    read.unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
    store = quiet_bake(recipe, disk / "good.store")
    assert store.num_rows == 420
    assert read.stat().st_size < 420 - 15 * finished  # units that were done are not read again
    assert bw.open_store(disk / "good.store", verify=True).version == store.version


# With on_error="skip" such rows are left out, and counted with their reasons.


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_skipped_is_counted_with_reasons_and_printed(
    world: World, workers: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchwright.sources.units.UNIT_BYTES", 300)
    lines = GOOD.splitlines()
    lines[3], lines[12], lines[15], lines[19] = "{broken", '{"txet": "x"}', '{"text": 5}', "[]"
    bad = world.write("bad.jsonl", "\n".join(lines).encode() + b'\n{"text": "caf\xe9"}\n')
    world.write("cut.jsonl.gz", gzip.compress(GOOD.encode())[:-20])
    world.write("empty.txt", "")
    latin = world.write("latin.txt", b"caf\xe9")
    recipe = world.recipe(where=lambda row: row["text"] != "document 0").prepare_step(bw.tokenize("bytes"))
    store = quiet_bake(recipe, world.store, on_error="skip", workers=workers, show_progress=True)
    assert store.report["errors"] == 8
    assert store.report["ingredients"]["web"] == {
        "rows_read": 20 + 21 + 1 + 1 + 1,
        "documents": 34,
        "tokens": store.num_tokens,
        "dropped": {
            "column 'text' is not text": 1,
            "damaged archive": 1,
            "empty file": 1,
            "malformed row": 2,
            "no column 'text'": 1,
            "not UTF-8": 2,
            "not where": 2,
        },
    }
    examples = {(file, row): reason for file, row, reason in store.report["examples"]}
    assert len(examples) == 8
    assert examples[str(bad), 12] == "no column 'text': this row has 'txet'; perhaps text='txet'"
    assert examples[str(bad), 20] == "not UTF-8: byte 0xe9 at 13"
    assert examples[str(latin), 0] == "not UTF-8: byte 0xe9 at 3"
    printed = capsys.readouterr().err
    assert "web: 34 of 44 rows kept; dropped: 1 column 'text' is not text, 1 damaged archive, 1 empty file" in printed
    assert f"for example {bad}, row 3: malformed row" in printed
    assert bw.open_store(world.store, verify=True).num_rows == 34


def test_what_was_skipped_once_is_raised_when_that_is_asked_for(world: World) -> None:
    world.write("empty.txt", "")
    recipe = world.recipe().prepare_step(bw.tokenize("bytes"))
    skipped = quiet_bake(recipe, world.store, on_error="skip")
    assert quiet_bake(recipe, world.store, on_error="skip").version == skipped.version
    with refused(bw.SourceError, "empty", file=world.raw / "empty.txt"):
        quiet_bake(recipe, world.store, on_error="raise")
    assert bw.open_store(world.store).version == skipped.version
