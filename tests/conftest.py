"""What all tests share: small stores, baked once, a slow reference to compare with, and a home for plans of our own."""

from __future__ import annotations

import gc
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import batchwright as bw
from batchwright.batches.window import WindowRows
from harness import Processes

# No time limits: machines that run tests are busy. The same examples on every run, so that CI does not flicker.
settings.register_profile(
    "batchwright", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("batchwright")

# A shell starts its background jobs with Ctrl-C ignored, and children inherit that: tests that interrupt a process
# would find it deaf, though nothing is wrong with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A full collection walks what torch, JAX and 9,000 collected tests left in memory: a fifth of the suite's CPU time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Not the user's: plans that cannot lie beside their store, and which tokens are known, go here.

    And no launcher's variables say who we are.
    """
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("BATCHWRIGHT_HOME", str(home))
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "BATCHWRIGHT_TOKEN_CACHE"):
            patch.delenv(name, raising=False)
        yield home


@pytest.fixture(autouse=True)
def _nothing_tokenised_before(_own_home: Path) -> None:
    """No test finds the tokens of another's stores: those of fixtures that many share neither."""
    shutil.rmtree(_own_home / "tokenized", ignore_errors=True)


# Toy data that one can check by eye: every document says which one it is. Lengths differ, some lines are empty, some
# characters have more than one byte.


def web_row(number: int) -> dict[str, Any]:
    return {"text": f"web {number}: " + "word " * (number % 23) + "café → thé" * (number % 7 == 0), "number": number}


def code_text(number: int) -> str:
    lines = [
        f"def function_{number}_{line}(): return {line * number}" + "\n" * (line % 3) for line in range(number + 3)
    ]
    return f"# file {number}\n\n" + "\n".join(lines) + "\n"


def note(number: int) -> str:
    return f"note {number}." + " More." * (number % 5)


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """web/a.jsonl, web/b.jsonl (60 documents each, a blank line among them) and code/0.txt to code/9.txt."""
    folder = tmp_path_factory.mktemp("raw")
    (folder / "web").mkdir()
    (folder / "code").mkdir()
    for name, numbers in (("a", range(60)), ("b", range(60, 120))):
        lines = [json.dumps(web_row(n), ensure_ascii=False) for n in numbers]
        lines.insert(7, "")
        (folder / "web" / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for n in range(10):
        (folder / "code" / f"{n}.txt").write_text(code_text(n), encoding="utf-8")
    return folder


def small_recipe(raw: Path) -> bw.DatasetRecipe:
    """Three sources of different sizes: web (JSONL), code (text files), notes (memory); a tenth is held out."""
    recipe = bw.DatasetRecipe(seed=3)
    recipe.add_ingredient(raw / "web" / "*.jsonl", name="web")
    recipe.add_ingredient(raw / "code" / "*.txt", name="code")
    recipe.add_ingredient([note(n) for n in range(50)], name="notes")
    return recipe.prepare_step(bw.tokenize("bytes", append_eos=True)).holdout(0.1)


@pytest.fixture(scope="session")
def small_store(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 600 rows of 16 tokens, one shard for each source. Read only: `own_store` is a copy to write into."""
    path = tmp_path_factory.mktemp("small") / "small.store"
    bw.bake(small_recipe(raw), to=path, workers=0, show_progress=False)
    return path


@pytest.fixture(scope="session")
def sharded_store(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same documents as `small_store`, in dozens of small shards."""
    from batchwright.baking import run
    from batchwright.sources import units

    path = tmp_path_factory.mktemp("sharded") / "sharded.store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_SHARD_BYTES", 900)
        patch.setattr(units, "cut_files", partial(units.cut_files, unit_bytes=400))
        patch.setattr(units, "cut_rows", partial(units.cut_rows, rows_per_unit=8))
        bw.bake(small_recipe(raw), to=path, workers=0, show_progress=False)
    return path


@pytest.fixture(scope="session")
def long_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One source of about 1.6 million tokens: enough that batches do not all share one block of memory."""
    path = tmp_path_factory.mktemp("long") / "long.store"
    letters = np.random.default_rng(0).integers(97, 123, 1_600_000).astype(np.uint8).tobytes().decode()
    recipe = bw.DatasetRecipe(seed=0).add_ingredient([letters[i : i + 4000] for i in range(0, len(letters), 4000)])
    bw.bake(recipe.prepare_step(bw.tokenize("bytes", append_eos=True)), to=path, workers=0, show_progress=False)
    return path


@pytest.fixture(scope="session")
def chat_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 conversations of 90 to 138 bytes by chatml, in one source, `talk`. Read only."""
    path = tmp_path_factory.mktemp("chat") / "talk.store"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {n:02} " + "x" * n},
                {"role": "assistant", "content": f"answer {n:02}"},
            ]
        }
        for n in range(48)
    ]
    recipe = bw.DatasetRecipe(seed=1).add_ingredient(rows, name="talk").prepare_step(bw.chat("bytes", "chatml"))
    bw.bake(recipe, to=path, workers=0, show_progress=False)
    return path


@pytest.fixture
def own_store(small_store: Path, tmp_path: Path) -> Path:
    """A copy of `small_store` without plans, for tests that look at what is written beside a store."""
    path = tmp_path / "own.store"
    shutil.copytree(small_store, path, ignore=shutil.ignore_patterns("plans", "rows"))
    return path


@pytest.fixture(scope="session")
def open_loader() -> Callable[..., bw.PretrainDataLoader]:
    """A loader over rows of 16 tokens, 12 in a batch, in NumPy; settings as given."""

    def opened(store: Any, **given: Any) -> bw.PretrainDataLoader:
        if "plan" not in given:
            given = {"chunk_size": 16, "batch_size": 12, "seed": 7} | given
        return bw.PretrainDataLoader(store, **({"framework": "numpy"} | given))

    return opened


class SlowRows:
    """Rows of a plan read token by token from the documents themselves: slow, simple, and nobody else's code."""

    def __init__(self, store: Any, plan: bw.Plan) -> None:
        opened = store if isinstance(store, bw.Store) else bw.open_store(store)
        self.plan, self.order, self.names = plan, plan.order, [source.name for source in plan.sources]
        self._draws: dict[int, list[tuple[int, int, int]]] = {}
        self.tokens: list[list[int]] = []
        self.document: list[list[tuple[int, int]]] = []
        """(document, place in it) of each token of each source."""
        self.offset: list[Callable[[int], int]] = []
        for source in plan.sources:
            stream = opened.stream(source.name, source.split)
            documents = [stream.document(d).tokens.tolist() for d in range(stream.num_documents)]
            self.tokens.append([token for document in documents for token in document])
            self.document.append([(d, i) for d, document in enumerate(documents) for i in range(len(document))])
            self.offset.append(WindowRows(stream, plan.row_tokens, seed=plan.seed, recut=plan.recut).offset)

    def _drawn(self, position: int) -> tuple[int, int, int]:
        first = position - position % 256  # asked for many at a time: alone each costs half a millisecond
        if first not in self._draws:
            draw = self.order.at(np.arange(first, first + 256))
            self._draws[first] = list(zip(*(part.tolist() for part in draw), strict=True))
        return self._draws[first][position - first]

    def places(self, position: int) -> tuple[int, int, list[int]]:
        """(source, epoch, place in the source's stream of each token) of the row at a position."""
        source, index, epoch = self._drawn(position)
        length = self.plan.row_tokens
        start = index * length + self.offset[source](epoch)
        return source, epoch, [(start + i) % len(self.tokens[source]) for i in range(length + 1)]

    def row(self, position: int) -> list[int]:
        """chunk_size + 1 tokens."""
        source, _, places = self.places(position)
        return [self.tokens[source][place] for place in places]

    def documents(self, position: int) -> list[tuple[int, int]]:
        """(document, place in it) of each token of the row."""
        source, _, places = self.places(position)
        return [self.document[source][place] for place in places]


@pytest.fixture(scope="session")
def slow_rows() -> Callable[..., SlowRows]:
    return SlowRows


@pytest.fixture
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Real processes of a test; see harness.py. What they said is shown when the test fails."""
    with Processes(tmp_path_factory.mktemp("processes")) as started:
        yield started
        print(started.told())
