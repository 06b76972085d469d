"""Mutation testing: change one operator or constant of the source at a time, and see whether a test fails.

    python tests/mutate.py --count 400 --seed 0            # `make mutate`

Each mutant is a copy of the package with one change. The tests of its folder run against it until one fails. The last
lines list the survivors: changes that no test noticed. Some change nothing (a hint, a message, a speed).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
SECONDS = 900

# What is mutated, and the tests that ought to notice, the quickest first.
TESTS = {
    "order": ["tests/order"],
    "store": ["tests/store", "tests/baking/test_bake_versions.py"],
    "batches": ["tests/batches", "tests/loaders/test_same_stream.py"],
    "base/journal.py": ["tests/base/test_journal.py", "tests/buffer/test_buffer_durable.py"],
    "loaders": ["tests/loaders"],
    "rl": ["tests/rl"],
}

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    file: Path
    number: int
    """Which of the file's possible changes it is."""
    line: int
    change: str
    tests: list[list[str]]

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCE)}:{self.line}: {self.change}"


def changes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Make one change after another in place: (line, what was changed). Each is undone before the next."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
            yield from _swapped(node.ops, 0, line)
        elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPPED:
            was = node.op
            node.op = SWAPPED[type(was)]()  # type: ignore[assignment]
            yield line, f"{type(was).__name__} becomes {type(node.op).__name__}"
            node.op = was
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            number = node.value
            node.value = not number if isinstance(number, bool) else number + 1
            yield line, f"{number} becomes {node.value}"
            node.value = number
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node.op = ast.UAdd()  # `+condition` is as true as `condition`, for bools and numbers
            yield line, "not is left out"
            node.op = ast.Not()


def _swapped(ops: list[ast.cmpop], at: int, line: int) -> Iterator[tuple[int, str]]:
    was = ops[at]
    ops[at] = SWAPPED[type(was)]()  # type: ignore[assignment]
    yield line, f"{type(was).__name__} becomes {type(ops[at]).__name__}"
    ops[at] = was


def mutants(places: list[str]) -> list[Mutant]:
    """Every change that can be made."""
    found = []
    for place in places or TESTS:
        tests = TESTS[place]
        path = SOURCE / "batchwright" / place
        for file in [path] if path.is_file() else sorted(path.glob("*.py")):
            for number, (line, change) in enumerate(changes(ast.parse(file.read_text()))):
                found.append(Mutant(file, number, line, change, _closest_first(file, tests)))
    return found


def _closest_first(file: Path, tests: list[str]) -> list[list[str]]:
    """The file's own tests, then those of its folder, then the others: each group is a run of pytest."""
    own = [str(path) for path in [ROOT / tests[0] / f"test_{file.stem}.py"] if path.exists()]
    return [group for group in (own, tests[:1], tests[1:]) if group]


def mutated(mutant: Mutant) -> str:
    """The source of the file with the change."""
    tree = ast.parse(mutant.file.read_text())
    for number, _ in enumerate(changes(tree)):
        if number == mutant.number:
            return ast.unparse(copy.deepcopy(tree))
    raise AssertionError(mutant)


def survives(mutant: Mutant) -> bool:
    """Whether all tests pass with the change."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "batchwright"
        shutil.copytree(SOURCE / "batchwright", package)  # compiled files too: they stay valid with the time of a file
        (package / mutant.file.relative_to(SOURCE / "batchwright")).write_text(mutated(mutant))
        return all(_pass(tests, folder) for tests in mutant.tests)


def _pass(tests: list[str], folder: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not peers"]
    run = subprocess.Popen(
        [*command, "-o", "addopts=", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": folder},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return run.wait(SECONDS) in (0, 5)  # 5: none of these tests is quick
    except subprocess.TimeoutExpired:
        return False  # a loop without end is noticed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # with what the tests started
        run.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", choices=[*TESTS, []], help="what to mutate (all)")
    parser.add_argument("--count", type=int, default=400, help="mutants to try (400)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    everything = mutants(asked.places)
    chosen = random.Random(asked.seed).sample(everything, min(asked.count, len(everything)))
    print(f"{len(chosen)} of {len(everything):,} mutants", flush=True)
    tried, killed, survivors = Counter[str](), Counter[str](), []
    with ThreadPoolExecutor(asked.processes) as threads:
        for mutant, survived in zip(chosen, threads.map(survives, chosen), strict=True):
            folder = mutant.file.parent.name
            tried[folder] += 1
            killed[folder] += not survived
            if survived:
                survivors.append(mutant)
                print(f"survived: {mutant}", flush=True)
    for folder, number in sorted(tried.items()):
        print(f"{folder:<10} {killed[folder]:>4} of {number:>4} noticed")
    print(f"all        {sum(killed.values()):>4} of {len(chosen):>4} noticed: {sum(killed.values()) / len(chosen):.1%}")


if __name__ == "__main__":
    main()
