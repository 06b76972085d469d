"""Small noisy pictures of digits, made from nothing, and a classifier with one hidden layer in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.demo.model import Weights

__all__ = ["accuracy_of", "drawn", "losses_and_gradients", "new_weights", "pictures"]

FONT = """\
01110 00100 01110 11111 00010 11111 00110 11111 01110 01110
10001 01100 10001 00010 00110 10000 01000 00001 10001 10001
10011 00100 00001 00100 01010 11110 10000 00010 10001 10001
10101 00100 00010 00010 10010 00001 11110 00100 01110 01111
11001 00100 00100 00001 11111 00001 10001 01000 10001 00001
10001 00100 01000 10001 00010 10001 10001 01000 10001 00010
01110 01110 11111 01110 00010 01110 01110 01000 01110 01100"""
HEIGHT, WIDTH = 9, 7
"""A digit has 7 x 5 dots and may lie anywhere in its picture."""
LARGEST_NOISE = 0.9


def pictures(count: int, *, seed: int, mislabelled: bool = False) -> dict[str, NDArray[Any]]:
    """Columns of pictures and what they show; mislabelled ones say that they show the next digit."""
    random = np.random.default_rng(seed)
    shown = random.integers(0, 10, count)
    pixels = np.zeros((count, HEIGHT, WIDTH), np.float32)
    glyphs = np.array([[list(map(int, line.split()[digit])) for line in FONT.split("\n")] for digit in range(10)])
    top, left = random.integers(0, HEIGHT - 6, count), random.integers(0, WIDTH - 4, count)
    for number in range(count):
        pixels[number, top[number] : top[number] + 7, left[number] : left[number] + 5] = glyphs[shown[number]]
    noise = random.uniform(0.1, LARGEST_NOISE, count).astype(np.float32)  # some pictures are harder than others
    pixels += random.standard_normal(pixels.shape).astype(np.float32) * noise[:, None, None]
    return {"pixels": pixels, "label": (shown + 1) % 10 if mislabelled else shown}


def drawn(pixels: NDArray[Any]) -> list[str]:
    """
    >>> drawn(np.array([[0.0, 0.5, 1.2], [0.9, -0.3, 0.1]]))
    [' +#', '#  ']
    """
    return ["".join(" +#"[int(np.clip(pixel * 3, 0, 2))] for pixel in line) for line in pixels]


def new_weights(*, hidden: int = 64, seed: int = 0) -> Weights:
    random = np.random.default_rng(seed)
    return {
        "hidden": (random.standard_normal((HEIGHT * WIDTH, hidden)) * 0.1).astype(np.float32),
        "hidden_bias": np.zeros(hidden, np.float32),
        "output": (random.standard_normal((hidden, 10)) * 0.05).astype(np.float32),
        "output_bias": np.zeros(10, np.float32),
    }


def losses_and_gradients(
    weights: Weights, pixels: NDArray[Any], labels: NDArray[Any]
) -> tuple[NDArray[np.float32], Weights]:
    """Cross-entropy of each row in nats, and the gradient of its mean by every weight."""
    seen = pixels.reshape(len(pixels), -1)
    hidden, logits = _forward(weights, seen)
    each, total = np.arange(len(labels)), np.exp(logits).sum(axis=1)
    losses = np.log(total) - logits[each, labels]
    by_logits = np.exp(logits) / total[:, None]
    by_logits[each, labels] -= 1
    by_logits /= len(labels)
    by_hidden = (by_logits @ weights["output"].T) * (hidden > 0)
    return losses, {
        "hidden": seen.T @ by_hidden,
        "hidden_bias": by_hidden.sum(axis=0),
        "output": hidden.T @ by_logits,
        "output_bias": by_logits.sum(axis=0),
    }


def _forward(weights: Weights, seen: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    hidden = np.maximum(seen @ weights["hidden"] + weights["hidden_bias"], 0)
    logits = hidden @ weights["output"] + weights["output_bias"]
    return hidden, logits - logits.max(axis=1, keepdims=True)


def accuracy_of(weights: Weights, columns: dict[str, NDArray[Any]]) -> float:
    """The share of pictures that are classified correctly."""
    _, logits = _forward(weights, columns["pixels"].reshape(len(columns["label"]), -1))
    return float((logits.argmax(axis=1) == columns["label"]).mean())
