"""Does a GPU wait for data? A 124M-parameter GPT in bf16 on one CUDA device, 32 x 2048 tokens a step, real batches.

    python -m benchmarks.gpu                  about 3 minutes on a large GPU

Prints: the step time with one batch that is already on the device (the limit), the step time with our loader, the share
of the step that the loop waited for data, the longest wait; and how fast the token block moves, pinned and pageable.
Says nothing about cold data: the store is small and in the page cache.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import batchwright as bw
from benchmarks.data import corpus_store

ROWS, TOKENS, VOCAB = 32, 2048, 50_304


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def transfer_rates(loader: Any) -> dict[str, float]:
    """GB/s of one batch's token block to the device."""
    batch = loader.get_batch()
    tokens, first, last = batch._block
    block = tokens[first:last]
    rates = {}
    for name, source in (("pageable", block), ("pinned", block.pin_memory())):
        target = torch.empty_like(source, device="cuda")
        for _ in range(5):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(200):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates[f"{name}_gb_s"] = 200 * block.numel() * 8 / (time.perf_counter() - began) / 1e9
    return rates


def train(step: Any, batches: Any, num_steps: int, look_every: int) -> dict[str, float]:
    """Seconds a step, and how long each batch took to be on its way to the device.

    With look_every=1 the loop waits for the device before it asks for a batch: so the wait is the data's alone, with
    nothing hidden behind work that is still queued. With more, the host runs ahead and the wait is also the device's.
    """
    waits = np.zeros(num_steps)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number in range(num_steps):
        asked = time.perf_counter()
        batch = next(batches)
        waits[number] = time.perf_counter() - asked
        step(batch)
        if number % look_every == look_every - 1:
            torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / num_steps
    return {
        "step_ms": 1e3 * seconds,
        "tokens_s": ROWS * TOKENS / seconds,
        "wait_percent": 100 * waits.sum() / (seconds * num_steps),
        "wait_median_us": 1e6 * float(np.median(waits)),
        "wait_longest_ms": 1e3 * float(waits.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--waits", type=int, default=10_000, help="batches to time without a model")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    store = corpus_store(100_000_000)

    def open_loader(**options: Any) -> Any:
        return bw.PretrainDataLoader(
            store, chunk_size=TOKENS, batch_size=ROWS, seed=7, framework="torch", epochs=None, **options
        )

    def on_device(loader: Any) -> Any:
        while True:
            for batch in loader.get_iterator():
                yield batch.pin_memory().to("cuda", non_blocking=True)

    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(json.dumps({"transfer": transfer_rates(open_loader())}), flush=True)

    checked = 0
    host, device = open_loader().get_iterator(), on_device(open_loader())
    for expected, got in zip((next(host) for _ in range(200)), device, strict=False):
        assert torch.equal(got.input_ids.cpu(), expected.input_ids)
        assert torch.equal(got.targets.cpu(), expected.targets)
        checked += 1
    print(json.dumps({"batches_equal_on_device": checked}), flush=True)

    kept = [batch for _, batch in zip(range(100), on_device(open_loader()), strict=False)]
    again = [batch for _, batch in zip(range(100), open_loader().get_iterator(), strict=False)]
    torch.cuda.synchronize()
    assert all(torch.equal(a.input_ids.cpu(), b.input_ids) for a, b in zip(kept, again, strict=True))
    print(json.dumps({"kept_batches_unchanged": len(kept)}), flush=True)
    del kept, again

    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    compiled = torch.compile(model)

    def step(batch: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(batch.input_ids, batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    parameters = sum(p.numel() for p in model.parameters())
    same = next(on_device(open_loader()))

    def forever() -> Any:
        while True:
            yield same

    for _ in range(5):
        step(same)
    print(json.dumps({"parameters_m": parameters / 1e6}), flush=True)
    for look_every in (1, 10):
        for name, batches in (
            ("limit", forever()),
            ("ours", on_device(open_loader())),
            ("ours, prefetch=1", on_device(open_loader(delivery=bw.Delivery(prefetch=1)))),
            ("limit again", forever()),
        ):
            got = train(step, batches, options.steps, look_every)
            print(f"look every {look_every}: {name}", json.dumps({k: round(v, 3) for k, v in got.items()}), flush=True)

    waits = np.zeros(options.waits)
    batches = on_device(open_loader())
    next(batches)
    for number in range(options.waits):
        asked = time.perf_counter()
        next(batches)
        waits[number] = time.perf_counter() - asked
        if number % 64 == 63:
            torch.cuda.synchronize()
    print(
        "delivery alone",
        json.dumps({"median_us": round(1e6 * float(np.median(waits)), 1), "longest_ms": round(1e3 * waits.max(), 3)}),
    )


if __name__ == "__main__":
    main()
