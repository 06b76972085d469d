"""Every peer beside us, as Markdown tables.

    make bench-peers                                      builds the environment, then everything
    python -m benchmarks.peers --out tables.md            everything, about 20 minutes on two quiet cores
    python -m benchmarks.peers --quick                    one short round: noisy, shows that all of it runs
    python -m benchmarks.peers --only load_grain bake     the peers and parts whose file names begin so, and batchwright
    python -m benchmarks.peers --only mix                 mixtures of 4 sources
    python -m benchmarks.peers --only bake --large        baking of 200 MB instead of 24

A peer that cannot be installed or fails stays in the table; its row says why. A peer that is in no row, or batchwright
without numbers, makes the exit code 1.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import baking, loading, mixing
from benchmarks.peers.source import version_of
from benchmarks.peers.table import Row, missing, spread

_PACKAGES = (
    "batchwright", "numpy", "pyarrow", "torch", "torchdata", "tokenizers", "tiktoken", "datasets", "mosaicml-streaming",
    "litdata", "webdataset", "grain", "megatron-core", "pylance", "datatrove",
)  # fmt: skip

_NOT_SHOWN = """\
What the numbers do not show: cold data, network storage, more than one reader, augmentation or decoding of rows (where
worker processes earn their cost), other processors, how fast a model trains."""


def machine() -> str:
    """Processor, memory, Python, date and versions, in two lines."""
    processor = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    versions = ", ".join(f"{name} {version_of(name)}" for name in _PACKAGES)
    today = datetime.datetime.now(tz=datetime.UTC).strftime("%d %B %Y")
    return (
        f"{processor}, {os.cpu_count()} CPUs, {memory_gb:.0f} GB, {platform.system()}, "
        f"Python {platform.python_version()}, {today}.\n{versions}."
    )


def loading_claim(rows: Sequence[Row]) -> str:
    """Our rate over that of each library whose resume was exact: the least of them, with a state of the library's own
    and with code of the user's own."""
    lines: list[str] = []
    for kept, what in ((False, "with a state that the library keeps"), (True, "by code of the user's own")):
        ratios = {}
        for row in rows:
            resume = row.last("resume")
            if row.name.startswith((loading.OURS, "hand-written")) or not resume or not loading.ratios(row):
                continue
            if resume.get("is_exact") and str(row.last("resumes_by")).startswith(("own code", "replays")) == kept:
                ratios[row.name] = loading.ratios(row)
        if ratios:
            name = min(ratios, key=lambda name: sorted(ratios[name])[len(ratios[name]) // 2])
            lines.append(f"- the fastest that resumes exactly, {what}, is {name}: batchwright is "
                         f"{spread(ratios[name], '.2f')} times as fast")  # fmt: skip
    return "\n".join(lines)


def _chosen(only: Sequence[str], module: str, name: str) -> bool:
    return not only or name == loading.OURS or any(module.startswith(start) for start in only)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="load, mix, bake, load_grain ...")
    parser.add_argument("--quick", action="store_true", help="one short round: rows of 2048 tokens, and 6 MB to bake")
    parser.add_argument("--large", action="store_true", help="bake 200 MB instead of 24")
    parser.add_argument("--rounds", type=int, help="instead of 3 for loading and baking")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    absent: list[str] = []
    pieces: list[str] = []

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def show(piece: str) -> None:
        """On the screen and into the file at once: a run that is stopped has shown what it had."""
        pieces.append(piece)
        print(piece, end="\n\n", flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text("\n\n".join(pieces) + "\n")

    show(machine())
    show(_NOT_SHOWN)
    peers = [peer for peer in loading.PEERS if _chosen(options.only, peer.module, peer.name)]
    if not options.only or any(peer.name != loading.OURS for peer in peers):
        lengths = {2048: rounds} if options.quick or options.only else {2048: rounds, 256: 1}
        for row_tokens, times in lengths.items():
            rows = loading.measure_loading(
                peers,
                row_tokens=row_tokens,
                rounds=times,
                seconds=1 if options.quick else 2.5,
                is_resumed=row_tokens == 2048,
                say=say,
            )
            wanted = [name for peer in peers for name, _ in peer.rows()]
            absent += missing(wanted, rows, "mtok_s") + missing([wanted[0]], _with_numbers(rows), "mtok_s")
            show(f"### Loading: shuffled 32 x {row_tokens} windows of 200M tokens (uint16), warm, {_rounds(times)}")
            show(loading.show_loading(rows))
            if claim := loading_claim(rows):
                show(claim)
    mixers = [mixer for mixer in mixing.MIXERS if _chosen(options.only, mixer.module, mixer.name)]
    if not options.only or any(mixer.name != loading.OURS for mixer in mixers):
        rows = mixing.measure_mixing(
            mixers, row_tokens=2048, rounds=rounds, seconds=1 if options.quick else 2.5, say=say
        )
        wanted = [mixer.name for mixer in mixers]
        absent += missing(wanted, rows, "mtok_s") + missing([wanted[0]], _with_numbers(rows), "mtok_s")
        show(f"### Mixing: {mixing.NUM_SOURCES} sources of 50M tokens, shuffled 32 x 2048 windows, {_rounds(rounds)}")
        show(mixing.show_mixing(rows))
    num_bytes = 200_000_000 if options.large else 6_000_000 if options.quick else 24_000_000
    for kind, what in baking.KINDS.items():
        bakers = [baker for baker in baking.bakers_of(kind) if _chosen(options.only, baker.module, baker.name)]
        if options.only and all(baker.name == loading.OURS for baker in bakers):
            continue
        rows, corpus = baking.measure_baking(bakers, kind, num_bytes=num_bytes, rounds=rounds, say=say)
        wanted = [baker.name for baker in bakers]
        absent += missing(wanted, rows, "seconds") + missing([wanted[0]], _with_numbers(rows), "seconds")
        facts = corpus.facts
        show(
            f"### Baking: {what}, {_rounds(rounds)}\n\n"
            f"{facts['documents']:,} documents, {facts['bytes'] / 1e6:.1f} MB, "
            f"{facts[f'{kind}_tokens']:,} tokens, in 8 JSONL files; {baking.WORKERS} processes. The ids of every "
            "document of every row with numbers were compared in the first round, and were identical."
        )
        show(baking.show_baking(rows, bakers))
    if absent:
        say(f"missing from the tables, without a reason or without our numbers: {', '.join(sorted(set(absent)))}")
    return 1 if absent else 0


def _rounds(number: int) -> str:
    return "1 round" if number == 1 else f"{number} rounds: median (least - most)"


def _with_numbers(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.why_not is None]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a child that runs is ended too
    sys.exit(main())
