"""Measure one way from a list of rollouts to the batches of an epoch, in this process: each stage, and the whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.peers.buffers import CLOCKS, memory_bytes, touch_free_memory

__all__ = ["BATCH_ROWS", "MAX_PROMPT", "MAX_RESPONSE", "WORLD", "Epoch", "make_rollouts", "measure_rollouts"]

MAX_PROMPT = 512
MAX_RESPONSE = 2048
BATCH_ROWS = 256
WORLD = 8
_VOCABULARY = 32_000
_PER_PROMPT = 8
_CHECKED_PROMPTS = 64
_TOUCHED_BYTES = 3 << 30


class Epoch:
    """What a contender tells of one epoch: seconds of its stages, and the batches, which are counted and let go."""

    def __init__(self, is_checked: bool, clock: str = "wall") -> None:
        self.clock = CLOCKS[clock]
        self.seconds: dict[str, float] = {}
        self.rows = self.places = 0
        self.checked: dict[str, float] | None = None
        if is_checked:
            self.checked = dict.fromkeys(("learned", "ids", "log_probs", "advantages", "squared"), 0.0)

    @contextmanager
    def stage(self, name: str) -> Any:
        began = self.clock()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - began

    def take(self, ids: Any, learned_ids: Callable[[], Any], is_learned: Any, log_probs: Any, advantages: Any) -> None:
        """One batch, as a trainer would move it on. Only in a checked epoch are its numbers looked at."""
        self.rows, self.places = self.rows + len(ids), self.places + ids.shape[0] * ids.shape[1]
        if self.checked is not None:
            mask = np.asarray(is_learned, np.float64)
            worth = np.asarray(advantages, np.float64) * mask
            self.checked["learned"] += float(mask.sum())
            self.checked["ids"] += float((np.asarray(learned_ids(), np.float64) * mask).sum())
            self.checked["log_probs"] += float((np.asarray(log_probs, np.float64) * mask).sum())
            self.checked["advantages"] += float(np.abs(worth).sum())
            self.checked["squared"] += float((worth * worth).sum())


def make_rollouts(num_prompts: int, form: str = "lists") -> list[dict[str, Any]]:
    """8 answers to each prompt; lengths are log-normal around 128 and 512, cut at 512 and 2048.

    Ids and log-probabilities are lists of Python numbers, as engines return them, or arrays.
    """
    rng = np.random.default_rng(7)
    rows = []
    for number in range(num_prompts):
        length = int(min(rng.lognormal(np.log(128), 0.5), MAX_PROMPT))
        prompt = rng.integers(3, _VOCABULARY, length, dtype=np.int64)
        given = prompt.tolist() if form == "lists" else prompt
        for _ in range(_PER_PROMPT):
            length = int(min(rng.lognormal(np.log(512), 0.5), MAX_RESPONSE))
            response = rng.integers(3, _VOCABULARY, length, dtype=np.int64)
            log_probs = -rng.random(length, dtype=np.float32)
            rows.append(
                {
                    "prompt": given,
                    "response": response.tolist() if form == "lists" else response,
                    "old_log_probs": log_probs.tolist() if form == "lists" else log_probs,
                    "reward": float(rng.integers(0, 5)) / 4,
                    "group": f"prompt-{number}",
                }
            )
    return rows


def measure_rollouts(run: Callable[[list[dict[str, Any]], str, Epoch], None], task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the stages and of the whole. A small epoch comes before: its numbers are added up, to be compared."""
    few = Epoch(is_checked=True)
    run(make_rollouts(min(_CHECKED_PROMPTS, task["num_prompts"]), task["form"]), task["how"], few)
    rows = make_rollouts(task["num_prompts"], task["form"])
    if task["num_prompts"] > _CHECKED_PROMPTS:
        touch_free_memory(_TOUCHED_BYTES)
    before = memory_bytes()
    epoch = Epoch(is_checked=False, clock=task["clock"])
    with epoch.stage("all"):
        run(rows, task["how"], epoch)
    return {
        **{f"{name}_s": seconds for name, seconds in epoch.seconds.items()},
        "more_mb": (memory_bytes()["VmHWM"] - before["VmRSS"]) / 1e6,
        "rows": epoch.rows,
        "places": epoch.places,
        "tokens": sum(len(row["prompt"]) + len(row["response"]) for row in rows),
        "checked": few.checked,
    }
