"""Raw files straight into batches: how soon the first one, how near to the encoder's own rate, what resume costs.

    python -m benchmarks.streaming

A trained byte-level BPE over JSONL files of Python's own sources; rows of 2,048 tokens, 32 in a batch. The encoder's
own rate is `Tokenize.encode` over the same texts in lists, in one thread, in the same run, in turns with the loader.
"""

from __future__ import annotations

import argparse
import glob
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import batchwright as bw

ROWS, ROW_TOKENS = 32, 2048
FIRST_BATCH = """
import sys, time
began = time.perf_counter()
import batchwright as bw
loader = bw.PretrainDataLoader(sys.argv[1], sys.argv[2], 2048, streaming=True, batch_size=32, framework="numpy")
opened = time.perf_counter()
loader.get_batch()
print(opened - began, time.perf_counter() - began)
"""


def make_corpus(folder: Path, num_bytes: int) -> list[str]:
    """JSONL files of about 8 MB; returns the texts."""
    sources = [
        Path(path).read_bytes() for path in sorted(glob.glob(sysconfig.get_path("stdlib") + "/**/*.py", recursive=True))
    ]
    texts, written = [], 0
    while written < num_bytes:
        with open(folder / f"{len(texts):06d}.jsonl", "w") as file:
            size = 0
            while size < 8_000_000 and written + size < num_bytes:
                text = f"# copy {len(texts)}\n" + sources[len(texts) % len(sources)].decode("utf-8", "replace")
                file.write(json.dumps({"text": text}) + "\n")
                texts.append(text)
                size += len(text)
            written += size
    return texts


def open_loader(folder: Path, tokenizer: Path, **settings: object) -> bw.PretrainDataLoader:
    return bw.PretrainDataLoader(
        folder, tokenizer, ROW_TOKENS, streaming=True, batch_size=ROWS, framework="numpy", **settings
    )


def seconds_of_stream(folder: Path, tokenizer: Path) -> tuple[float, int]:
    loader = open_loader(folder, tokenizer)
    began = time.perf_counter()
    steps = sum(1 for _ in loader)
    return time.perf_counter() - began, steps * ROWS * ROW_TOKENS


def seconds_of_encoder(texts: list[str], tokenizer: Path) -> tuple[float, int]:
    step = bw.tokenize(str(tokenizer), append_eos=True)
    began, tokens = time.perf_counter(), 0
    for first in range(0, len(texts), 64):
        tokens += sum(map(len, step.encode(texts[first : first + 64])))
    return time.perf_counter() - began, tokens


def seconds_to_resume(folder: Path, tokenizer: Path, steps: int) -> float:
    loader = open_loader(folder, tokenizer)
    for _ in range(steps):
        loader.get_batch()
    state = loader.state_dict()
    began = time.perf_counter()
    resumed = open_loader(folder, tokenizer)
    resumed.load_state_dict(state)
    resumed.get_batch()
    return time.perf_counter() - began


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--megabytes", type=int, default=48)
    arguments.add_argument("--pairs", type=int, default=5)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, tokenizer = Path(place) / "corpus", Path(place) / "tokenizer.json"
        folder.mkdir()
        texts = make_corpus(folder, chosen.megabytes * 1_000_000)
        bw.train_tokenizer(texts[:1000], vocab_size=8000, out=tokenizer)
        first = [
            [float(x) for x in subprocess.check_output([sys.executable, "-c", FIRST_BATCH, folder, tokenizer]).split()]
            for _ in range(5)
        ]
        print(f"process start to opened: {statistics.median(f[0] for f in first):.2f} s")
        print(f"process start to first batch: {statistics.median(f[1] for f in first):.2f} s")
        rates, ratios = [], []
        for _ in range(chosen.pairs):
            seconds, tokens = seconds_of_stream(folder, tokenizer)
            raw_seconds, raw_tokens = seconds_of_encoder(texts, tokenizer)
            rates.append(tokens / seconds / 1e6)
            ratios.append(tokens / seconds / (raw_tokens / raw_seconds))
        rate, ratio = statistics.median(rates), statistics.median(ratios)
        print(f"streaming: {rate:.2f} M tokens/s, {ratio:.2f} of the encoder alone")
        print(f"spread of the ratio: {min(ratios):.2f} - {max(ratios):.2f}")
        steps = tokens // (ROWS * ROW_TOKENS)
        for share in (0.1, 0.5, 0.9):
            print(f"resume at {share:.0%}: {1000 * seconds_to_resume(folder, tokenizer, int(steps * share)):.0f} ms")


if __name__ == "__main__":
    main()
