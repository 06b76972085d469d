"""A tiny neural language model in plain NumPy (Bengio et al., 2003), its optimiser and its checkpoints.

It sees the last tokens, has one hidden layer, and predicts the next token. The arithmetic has the same order every
time, so two processes on one machine agree in every bit.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from batchwright.base.files import write_whole

Weights = dict[str, NDArray[Any]]

CONTEXT_TOKENS = 8
"""The model sees this many tokens, the newest included, and predicts the next one."""

CHECKPOINT = "checkpoint.npz"


def new_weights(vocab_size: int, *, embedding: int = 32, hidden: int = 128, seed: int = 0) -> Weights:
    """Random weights, float32."""
    random = np.random.default_rng(seed)
    vectors = (random.standard_normal((vocab_size, embedding)) * 0.3).astype(np.float32)
    return {"embedding": vectors, **layers(random, CONTEXT_TOKENS * embedding, hidden, vocab_size)}


def layers(random: np.random.Generator, inputs: int, hidden: int, outputs: int) -> Weights:
    """A hidden layer and an output layer. The output starts small: the first loss is close to log(outputs)."""
    return {
        "hidden": (random.standard_normal((inputs, hidden)) * inputs**-0.5).astype(np.float32),
        "hidden_bias": np.zeros(hidden, np.float32),
        "output": (random.standard_normal((hidden, outputs)) * 0.05).astype(np.float32),
        "output_bias": np.zeros(outputs, np.float32),
    }


def loss_and_gradients(weights: Weights, input_ids: NDArray[Any], targets: NDArray[Any]) -> tuple[float, Weights]:
    """Mean cross-entropy of targets [rows, tokens] in nats, and its gradient by every weight."""
    losses, gradients = row_losses_and_gradients(weights, input_ids, targets)
    return float(losses.mean()), gradients


def row_losses_and_gradients(
    weights: Weights, input_ids: NDArray[Any], targets: NDArray[Any]
) -> tuple[NDArray[Any], Weights]:
    """Mean cross-entropy of each row, and the gradient of the mean over all rows."""
    losses, gradients = token_losses_and_gradients(weights, input_ids, targets)
    return losses.mean(axis=1, dtype=np.float64), gradients


def token_losses_and_gradients(
    weights: Weights,
    input_ids: NDArray[Any],
    targets: NDArray[Any],
    *,
    loss_mask: NDArray[Any] | None = None,
    segment_ids: NDArray[Any] | None = None,
) -> tuple[NDArray[Any], Weights]:
    """Cross-entropy of each token [rows, tokens], and the gradient of the mean of those that `loss_mask` counts.

    If rows hold several samples, `segment_ids` separates them: the model sees no token of another sample.
    """
    B, T = input_ids.shape  # rows, tokens
    vocab_size, E = weights["embedding"].shape
    # A row or a sample follows the last id, which ends documents.
    before = np.full((B, CONTEXT_TOKENS - 1), vocab_size - 1)
    ids = np.concatenate([before, input_ids], axis=1)
    context = sliding_window_view(ids, CONTEXT_TOKENS, axis=1)  # [B, T, CONTEXT_TOKENS]
    if segment_ids is None:
        is_other = np.zeros(context.shape, bool)
    else:
        segments = np.concatenate([np.full_like(before, -1), segment_ids], axis=1)
        is_other = sliding_window_view(segments, CONTEXT_TOKENS, axis=1) != segment_ids[:, :, None]
        context = np.where(is_other, vocab_size - 1, context)

    if loss_mask is None:
        loss_mask = np.ones((B, T), weights["embedding"].dtype)
    seen = weights["embedding"][context].reshape(B * T, -1)
    losses, gradients, by_seen = classified(weights, seen, targets.ravel(), loss_mask.ravel())

    by_context = by_seen.reshape(B, T, CONTEXT_TOKENS, E)
    by_last = by_context[is_other].sum(axis=0)
    by_context[is_other] = 0
    by_embedded = np.zeros((*ids.shape, E), by_context.dtype)
    for c in range(CONTEXT_TOKENS):
        by_embedded[:, c : c + T] += by_context[:, :, c]
    one_hot = np.eye(vocab_size, dtype=by_embedded.dtype)[ids.ravel()]
    gradients["embedding"] = one_hot.T @ by_embedded.reshape(-1, E)
    gradients["embedding"][-1] += by_last
    return losses.reshape(B, T), gradients


def classified(
    weights: Weights, inputs: NDArray[Any], targets: NDArray[Any], mask: NDArray[Any]
) -> tuple[NDArray[Any], Weights, NDArray[Any]]:
    """The losses of inputs [n, width] under `layers`, and the gradients of their mean by weights and by inputs.

    Only losses that `mask` [n] counts are in the mean. Their targets must not be negative.
    """
    hidden = np.maximum(inputs @ weights["hidden"] + weights["hidden_bias"], 0)
    logits = hidden @ weights["output"] + weights["output_bias"]
    logits -= logits.max(axis=1, keepdims=True)
    exponentials = np.exp(logits)
    total = exponentials.sum(axis=1, keepdims=True)
    each, right = np.arange(len(targets)), np.maximum(targets, 0)
    losses = np.log(total[:, 0]) - logits[each, right]

    by_logits = exponentials / total
    by_logits[each, right] -= 1
    by_logits *= (mask / mask.sum())[:, None]
    by_hidden = by_logits @ weights["output"].T
    by_hidden *= hidden > 0
    gradients = {
        "hidden": inputs.T @ by_hidden,
        "hidden_bias": by_hidden.sum(axis=0),
        "output": hidden.T @ by_logits,
        "output_bias": by_logits.sum(axis=0),
    }
    return losses, gradients, by_hidden @ weights["hidden"].T


@dataclass(slots=True)
class Adam:
    """Adam (Kingma and Ba, 2014). `num_updates`, `mean` and `square` are its whole state."""

    num_updates: int = 0
    mean: Weights = field(default_factory=dict)
    square: Weights = field(default_factory=dict)

    def update(self, weights: Weights, gradients: Weights, *, rate: float) -> None:
        """Change the weights in place."""
        self.num_updates += 1
        for name, gradient in gradients.items():
            mean = self.mean.setdefault(name, np.zeros_like(gradient))
            square = self.square.setdefault(name, np.zeros_like(gradient))
            mean += 0.1 * (gradient - mean)
            square += 0.01 * (gradient * gradient - square)
            unbiased_square = square / (1 - 0.99**self.num_updates)
            weights[name] -= rate / (1 - 0.9**self.num_updates) * mean / (np.sqrt(unbiased_square) + 1e-8)


@dataclass(slots=True)
class Checkpoint:
    """All that a run needs to go on: the model, the optimiser, and the position in the data."""

    weights: Weights
    adam: Adam
    loader: dict[str, Any]
    """What `loader.state_dict()` returned."""


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write all of it or nothing: a process that is killed here leaves the checkpoint before."""
    parts = {"weights": checkpoint.weights, "mean": checkpoint.adam.mean, "square": checkpoint.adam.square}
    arrays = {f"{part}/{name}": array for part, named in parts.items() for name, array in named.items()}
    numbers = {"num_updates": checkpoint.adam.num_updates, "loader": checkpoint.loader}
    data = io.BytesIO()
    np.savez(data, json=np.frombuffer(json.dumps(numbers).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    write_whole(path, data.getbuffer())


def read_checkpoint(path: Path) -> Checkpoint:
    parts: dict[str, Weights] = {"weights": {}, "mean": {}, "square": {}}
    with np.load(path, allow_pickle=False) as arrays:
        numbers = json.loads(arrays["json"].tobytes())
        for key in arrays.files:
            part, _, name = key.partition("/")
            if name:
                parts[part][name] = arrays[key]
    return Checkpoint(parts["weights"], Adam(numbers["num_updates"], parts["mean"], parts["square"]), numbers["loader"])


def resumed(path: Path, weights: Weights) -> Checkpoint:
    """The checkpoint in a file, or the beginning of a run with these weights."""
    if path.exists():
        return read_checkpoint(path)
    return Checkpoint(weights, Adam(), {})


def digest_of(weights: Weights) -> str:
    """A name for weights: equal ones, bit for bit, have the same."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(np.ascontiguousarray(weights[name]).data)
    return digest.hexdigest()[:16]
