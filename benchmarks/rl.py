"""How fast are advantages, balancing, and the way from rollouts to batches? Beside TorchRL and a dict of tensors.

    .venv-peers/bin/python -m benchmarks.rl              what `make bench-peers` builds has numba and TorchRL
    python -m benchmarks.rl --only balancing             one part: gae, balancing, rollouts, log
    python -m benchmarks.rl --rounds 3 --epochs 1        quicker, noisier
    python -m benchmarks.rl --clock cpu                  CPU seconds, torch with one thread: on a busy machine

**GAE**: [1024, 2048] float32, an episode ends every 256 steps on average. All get arrays in memory and give advantages
and returns in fresh memory; results must agree to 1e-4 of their size. TorchRL has as many threads as the machine, or
one; "time-major" has its inputs in the order in which its loop walks them. The limit is two plain passes (`r - v`, then
`+ v`) into memory that is there already.

**Balancing**: log-normal lengths around 512 into 8 ranks by tokens. Karmarkar-Karp is largest differencing with equal
counts, which verl uses; zigzag deals sorted rows there and back. Imbalance is what the busiest rank has over the mean.

**Rollouts**: 1,024 prompts of about 128 tokens with 8 responses of about 512, as a list of dicts with ids, old
log-probabilities, a reward and the name of the group; from the list to the last batch of 256 rows of one epoch, as
torch tensors. Each run is a process of its own that has done a small epoch before, whose sums must agree. The dict of
tensors (`benchmarks/peers/rollouts_tensors.py`) pads every row to 512 + 2048, as trainers in the style of verl do;
batchwright pads to the longest row of a batch, or to the longest of all, or cuts batches by tokens. The tensors are
balanced over 8 ranks, and the rows of all ranks are cut out in one process; batchwright makes them as one rank, without
anything to balance, or as one of 8 ranks, which reads everything and makes its eighth. "Places a token" says how much
padding there is; memory is what was needed beyond the list. Rounds go over all; a ratio is between two of one round.

**Log**: groups of 8 x 512 ids and log-probabilities, every call durable when it returns: mostly the disk's fsync.

Printed is the median of the rounds, with the least and the most. Not shown: tokenising, copies to a GPU, sending
batches to other machines (which a single controller must), several processes on one log, cold files.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import batchwright as bw
from batchwright.base.kernels import numba_or_none
from batchwright.order.balance import balance, imbalance
from batchwright.rl.advantage import gae
from benchmarks.peers.buffers import CLOCKS
from benchmarks.peers.karmarkar_karp import karmarkar_karp
from benchmarks.peers.processes import run_child
from benchmarks.peers.source import bench_home, version_of
from benchmarks.peers.table import Row, markdown, missing, spread

GAMMA, LAM = 0.99, 0.95
WORLD = 8
LOOP = "TorchRL's loop"
LIMIT = "two plain passes (the limit)"
TENSORS = "dict of tensors, in the style of verl"


# GAE


@contextmanager
def numba_off() -> Iterator[None]:
    before = os.environ.get("BATCHWRIGHT_NUMBA")
    os.environ["BATCHWRIGHT_NUMBA"] = "0"
    try:
        yield
    finally:
        del os.environ["BATCHWRIGHT_NUMBA"]
        if before is not None:
            os.environ["BATCHWRIGHT_NUMBA"] = before


class Episodes(NamedTuple):
    rewards: np.ndarray
    values: np.ndarray
    dones: np.ndarray
    bootstrap: np.ndarray


def episodes(num_rows: int, num_steps: int) -> Episodes:
    rng = np.random.default_rng(7)
    shape = (num_rows, num_steps)
    rewards, values = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    return Episodes(rewards, values, rng.random(shape) < 1 / 256, rng.standard_normal(num_rows, dtype=np.float32))


Arrays = Callable[[], tuple[Any, Any]]


def gae_contenders(given: Episodes, clock: str) -> dict[str, Arrays | str]:
    """What each does, called without arguments; or why it cannot."""
    rewards, values, dones, bootstrap = given

    def ours() -> tuple[Any, Any]:
        return gae(rewards, values, gamma=GAMMA, lam=LAM, bootstrap=bootstrap, dones=dones)

    def without_numba() -> tuple[Any, Any]:
        with numba_off():
            return ours()

    first, second = np.empty_like(rewards), np.empty_like(rewards)

    def plain() -> tuple[Any, Any]:
        return np.subtract(rewards, values, out=first), np.add(first, values, out=second)

    return {
        LIMIT: plain,
        "batchwright, numba": ours if numba_or_none() is not None else "numba is not installed",
        "batchwright, NumPy": without_numba,
        **torchrl_contenders(given, clock),
    }


def torchrl_contenders(given: Episodes, clock: str) -> dict[str, Arrays | str]:
    names = (LOOP, f"{LOOP}, 1 thread", f"{LOOP}, time-major", "TorchRL, vectorised")
    try:
        import torch
        from torchrl.objectives.value import functional
    except ImportError as error:
        return dict.fromkeys(names, f"ImportError: {error}")
    rewards, values, dones, bootstrap = given
    after = np.concatenate([values[:, 1:], bootstrap[:, None]], 1)
    columns = (values, after, rewards, dones)
    tensors = [torch.from_numpy(column)[..., None] for column in columns]
    turned = [torch.from_numpy(np.ascontiguousarray(column.T)).T[..., None] for column in columns]
    threads = torch.get_num_threads() if clock == "wall" else 1
    torch.set_num_threads(threads)

    def one_thread() -> tuple[Any, Any]:
        torch.set_num_threads(1)
        try:
            return loop(*tensors)  # type: ignore[no-any-return]
        finally:
            torch.set_num_threads(threads)

    loop = partial(functional.generalized_advantage_estimate, GAMMA, LAM)
    at_once = partial(functional.vec_generalized_advantage_estimate, GAMMA, LAM)
    calls = (partial(loop, *tensors), one_thread, partial(loop, *turned), partial(at_once, *tensors))
    return dict(zip(names, calls, strict=True))


def measure_gae(rounds: int, num_rows: int = 1024, num_steps: int = 2048, clock: str = "wall") -> list[Row]:
    """Milliseconds of each, in turn. The first call of each is not counted, and is compared with ours."""
    calls = gae_contenders(episodes(num_rows, num_steps), clock)
    rows = {name: Row(name) for name in calls}
    with numba_off():
        expected = calls["batchwright, NumPy"]()  # type: ignore[operator]
    for name, call in calls.items():
        if isinstance(call, str):
            rows[name].why_not = call
        elif name != LIMIT:
            for wanted, found in zip(expected, call(), strict=True):
                apart = np.abs(np.asarray(found).reshape(wanted.shape) - wanted).max()
                assert apart < 1e-4 * np.abs(wanted).max(), f"{name}: {apart}"
    for _ in range(rounds):
        for name, call in calls.items():
            if not isinstance(call, str):
                rows[name].add({"ms": _milliseconds(call, clock)})
    return list(rows.values())


def show_gae(rows: Sequence[Row]) -> str:
    by_name = {row.name: row for row in rows}
    lines = [
        [row.name, row.why_not, ""]
        if row.why_not is not None
        else [row.name, spread(row.measured["ms"], ".1f"), _ratios(by_name[LOOP], row, "ms")]
        for row in sorted(rows, key=lambda row: row.middle("ms") or 1e9)
    ]
    return markdown(["GAE, [1024, 2048]", "ms", f"over {LOOP}"], lines)


# Balancing


def zigzag(lengths: np.ndarray, world: int) -> np.ndarray:
    """The rank of each row: sorted rows are dealt to ranks 0, 1, ..., 7, 7, ..., 1, 0, 0, 1, ..."""
    order = np.argsort(-lengths, kind="stable")
    there_and_back = np.concatenate([np.arange(world), np.arange(world)[::-1]])
    ranks = np.empty(len(lengths), np.int64)
    ranks[order] = np.resize(there_and_back, len(lengths))
    return ranks


def differenced(lengths: np.ndarray, world: int) -> np.ndarray:
    """The rank of each row by Karmarkar-Karp."""
    ranks = np.empty(len(lengths), np.int64)
    for rank, rows in enumerate(karmarkar_karp(lengths.tolist(), world)):
        ranks[rows] = rank
    return ranks


def imbalance_of(lengths: np.ndarray, ranks: np.ndarray, world: int) -> float:
    """What the busiest rank has over the mean, less 1."""
    loads = np.bincount(ranks, lengths, world)
    return float(loads.max() / loads.mean() - 1)


def balancing(rounds: int, num_rows: int, world: int = WORLD, clock: str = "wall") -> list[Row]:
    """Milliseconds and imbalance of each way to divide the same lengths among ranks."""
    lengths = np.random.default_rng(7).lognormal(np.log(512), 0.6, num_rows).astype(np.int64) + 1
    rows = {}
    for name, is_equal in (("batchwright, equal counts", True), ("batchwright", False)):
        rows[name] = Row(name)
        divided = balance(lengths, world, equal_counts=is_equal)
        rows[name].measured["imbalance"] = [imbalance(lengths, divided).measured]
    calls: dict[str, Callable[[], Any]] = {
        "batchwright, equal counts": lambda: balance(lengths, world, equal_counts=True),
        "batchwright": lambda: balance(lengths, world),
        "Karmarkar-Karp, equal counts": lambda: differenced(lengths, world),
        "zigzag": lambda: zigzag(lengths, world),
    }
    for name, call in calls.items():
        if name not in rows:
            rows[name] = Row(name, {"imbalance": [imbalance_of(lengths, call(), world)]})
    for _ in range(rounds):
        for name, call in calls.items():
            rows[name].add({"ms": _milliseconds(call, clock)})
    return list(rows.values())


def show_balancing(rows: Sequence[Row], num_rows: int) -> str:
    lines = [
        [row.name, spread(row.measured["ms"], ".2f"), f"{row.last('imbalance'):.2g}", _ratios(rows[2], row, "ms")]
        for row in rows
    ]
    return markdown([f"{num_rows:,} lengths into {WORLD}", "ms", "imbalance", "over Karmarkar-Karp"], lines)


# Rollouts to batches


class Way(NamedTuple):
    name: str
    module: str
    how: str
    is_whole: bool = True
    """Whether it makes the batches of all ranks."""


WAYS = (
    Way(TENSORS, "rollouts_tensors", ""),
    Way(f"{TENSORS}, 1 thread", "rollouts_tensors", "1 thread"),
    Way("batchwright", "rollouts_batchwright", "one rank"),
    Way('batchwright, `pad_to="max_length"`', "rollouts_batchwright", "one width"),
    Way("batchwright, `Batching(tokens=)`", "rollouts_batchwright", "by tokens"),
    Way("batchwright, one of 8 ranks, balanced", "rollouts_batchwright", "one of 8 ranks, balanced", is_whole=False),
)
FORMS = {"lists": "ids and log-probabilities are lists", "arrays": "they are NumPy arrays"}


def measure_rollouts(rounds: int, form: str, num_prompts: int, clock: str, say: Callable[[str], None]) -> list[Row]:
    """A row for each way, the tensors first. One that cannot run keeps its row, which says why."""
    rows = {way.name: Row(way.name) for way in WAYS}
    task = {"do": "rollouts", "form": form, "num_prompts": num_prompts, "clock": clock}
    for number in range(rounds):
        sums = None
        for way in WAYS:
            if rows[way.name].why_not is not None:
                continue
            found = run_child({**task, "peer": way.module, "how": way.how}, limit_seconds=300)
            rows[way.name].add(found)
            say(f"round {number + 1}: {form}: {way.name}: {found.get('error') or round(found['all_s'], 3)}")
            if "error" not in found and way.is_whole:
                sums = sums or found["checked"]
                assert all(np.isclose(found["checked"][name], sums[name], rtol=1e-5) for name in sums), (way, found)
    return list(rows.values())


def show_rollouts(rows: Sequence[Row], form: str) -> str:
    header = [f"{FORMS[form]}, ms", "all", "reading", "advantages", "other preparation", "batches", "over the tensors",
              "places a token", "memory, GB"]  # fmt: skip
    lines = []
    for row in rows:
        if row.why_not is not None:
            lines.append([row.name, row.why_not, *[""] * (len(header) - 2)])
            continue
        stages = {name: 1000 * (row.middle(f"{name}_s") or 0) for name in ("read", "advantages", "balance", "batches")}
        other = stages["balance"]
        if "open_s" in row.measured:  # all that the loader does before its first batch
            other = 1000 * (row.middle("open_s") or 0) - stages["read"] - stages["advantages"]
        lines.append(
            [
                row.name,
                spread([1000 * seconds for seconds in row.measured["all_s"]], ".0f"),
                f"{stages['read']:.0f}",
                f"{stages['advantages']:.0f}",
                f"{other:.0f}",
                f"{stages['batches']:.0f}",
                _ratios(rows[0], row, "all_s"),
                f"{row.last('places') / row.last('tokens'):.2f}",
                f"{(row.middle('more_mb') or 0) / 1000:.2f}",
            ]
        )
    return markdown(header, lines)


# Log


def measure_log(num_groups: int, clock: str = "wall", ask: int = 64, batch_rows: int = 256) -> dict[str, float]:
    """Calls of a log, one after the other, per second: prompts leased, groups added, batches of a loader over it."""
    rng = np.random.default_rng(7)
    prompts = [{"prompt": rng.integers(3, 32_000, 128).tolist()} for _ in range(num_groups)]
    responses = [rng.integers(3, 32_000, 512).tolist() for _ in range(8)]
    log_probs = [(-rng.random(512)).tolist() for _ in range(8)]
    rewards = rng.random(8).tolist()
    bench_home().mkdir(parents=True, exist_ok=True)
    now = CLOCKS[clock]
    with tempfile.TemporaryDirectory(prefix="rollouts-", dir=bench_home()) as folder:
        log = bw.RolloutLog(Path(folder, "log"), prompts=prompts, group_size=8, seed=0)
        began = now()
        jobs = [job for _ in range(num_groups // ask) for job in log.next_prompts(ask)]
        leased = now()
        for job in jobs:
            log.add(job, responses, rewards, policy_version=0, old_log_probs=log_probs)
        added = now()
        loader = bw.RolloutDataLoader(log, None, compute_advantages=True, batch_size=batch_rows, framework="numpy")
        num_batches = len(jobs) * 8 // batch_rows
        for _ in range(num_batches):
            loader.get_batch()
        read = now()
        log.close()
    return {
        f"`next_prompts({ask})`": num_groups // ask / (leased - began),
        "`add` of 8 x 512 ids and log-probabilities": len(jobs) / (added - leased),
        f"`get_batch` of {batch_rows} rows from the log": num_batches / (read - added),
    }


def show_log(found: Sequence[dict[str, float]]) -> str:
    lines = [[name, spread([one[name] for one in found], ",.0f")] for name in found[0]]
    return markdown(["log, one process", "calls/s"], lines)


# Common


def _milliseconds(call: Callable[[], Any], clock: str) -> float:
    began = CLOCKS[clock]()
    call()
    return 1000 * (CLOCKS[clock]() - began)


def _ratios(other: Row, row: Row, name: str) -> str:
    """How many times as fast a row is as another, round by round."""
    if other.why_not is not None or other is row:
        return ""
    found = np.array(other.measured[name]) / np.array(row.measured[name])
    return spread(found.tolist(), ".0f" if np.median(found) >= 20 else ".1f" if np.median(found) >= 1 else ".2f")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of GAE and balancing")
    parser.add_argument("--epochs", type=int, default=3, help="of rollouts to batches: rounds of processes")
    parser.add_argument("--prompts", type=int, default=1024, help="of rollouts to batches, with 8 responses each")
    parser.add_argument("--only", nargs="+", choices=["gae", "balancing", "rollouts", "log"])
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: for a machine that is not quiet")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    options = parser.parse_args()
    parts = options.only or ["gae", "balancing", "rollouts", "log"]
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("numpy", "numba", "torch", "torchrl"))
    pieces = [f"{machine}, {versions}; {options.clock} seconds"]
    print(pieces[0], flush=True)
    absent: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        print(f"\n{piece}", flush=True)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if "gae" in parts:
        show(show_gae(measure_gae(options.rounds, clock=options.clock)))
    if "balancing" in parts:
        for num_rows in (65_536, 1_024):
            show(show_balancing(balancing(options.rounds, num_rows, clock=options.clock), num_rows))
    if "rollouts" in parts:
        for form in FORMS:
            rows = measure_rollouts(options.epochs, form, options.prompts, options.clock, say)
            absent += missing([way.name for way in WAYS], rows, "all_s")
            absent += [row.name for row in rows if row.name.startswith("batchwright") and row.why_not is not None]
            show(show_rollouts(rows, form))
    if "log" in parts:
        show(show_log([measure_log(512, options.clock) for _ in range(options.epochs)]))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n\n".join(pieces) + "\n")
    if absent:
        print(f"missing: {', '.join(absent)}", file=sys.stderr)
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
