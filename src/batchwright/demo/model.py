"""A tiny neural language model in plain NumPy: the last bytes, one hidden layer, the next byte (Bengio et al., 2003).

It does the same arithmetic in the same order every time, so that two processes on one machine agree in every bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Adam",
    "Weights",
    "loss_and_gradients",
    "new_weights",
    "row_losses_and_gradients",
    "token_losses_and_gradients",
]

Weights = dict[str, NDArray[Any]]

CONTEXT_TOKENS = 8
"""The model sees this many tokens, the newest included, and predicts the next one."""


def new_weights(vocab_size: int, *, embedding: int = 32, hidden: int = 128, seed: int = 0) -> Weights:
    """Random weights, float32. The last layer starts small, so that the first loss is close to log(vocab_size)."""
    random = np.random.default_rng(seed)
    inputs = CONTEXT_TOKENS * embedding

    def normal(rows: int, columns: int, scale: float) -> NDArray[Any]:
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    return {
        "embedding": normal(vocab_size, embedding, 0.3),
        "hidden": normal(inputs, hidden, inputs**-0.5),
        "hidden_bias": np.zeros(hidden, np.float32),
        "output": normal(hidden, vocab_size, 0.05),
        "output_bias": np.zeros(vocab_size, np.float32),
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

    Where several samples are in a row, `segment_ids` tells them apart, and the model sees none of another one.
    """
    B, T = input_ids.shape  # rows, tokens
    E = weights["embedding"].shape[1]
    vocab_size = len(weights["output_bias"])

    # What lies before a row's first token is shown to the model as the last id, which ends documents.
    before = np.full((B, CONTEXT_TOKENS - 1), vocab_size - 1)
    ids = np.concatenate([before, input_ids], axis=1)
    embedded = weights["embedding"][ids]
    context = np.stack([embedded[:, c : c + T] for c in range(CONTEXT_TOKENS)], axis=2)
    if segment_ids is not None:  # and so is what lies before the first token of a sample
        segments = np.concatenate([np.full_like(before, -1), segment_ids], axis=1)
        is_other = np.stack([segments[:, c : c + T] != segment_ids for c in range(CONTEXT_TOKENS)], axis=2)
        context[is_other] = weights["embedding"][vocab_size - 1]
    seen = context.reshape(B * T, -1)
    hidden = np.maximum(seen @ weights["hidden"] + weights["hidden_bias"], 0)
    logits = hidden @ weights["output"] + weights["output_bias"]

    logits -= logits.max(axis=1, keepdims=True)
    probabilities = np.exp(logits)
    total = probabilities.sum(axis=1, keepdims=True)
    each, right = np.arange(B * T), np.maximum(targets.ravel(), 0)  # -100 is no token: the mask must leave it out
    losses = (np.log(total[:, 0]) - logits[each, right]).reshape(B, T)

    by_logits = probabilities / total
    by_logits[each, right] -= 1
    if loss_mask is None:
        by_logits /= B * T
    else:
        by_logits *= (loss_mask / loss_mask.sum()).reshape(-1, 1)
    by_hidden = by_logits @ weights["output"].T
    by_hidden *= hidden > 0
    by_seen = (by_hidden @ weights["hidden"].T).reshape(B, T, CONTEXT_TOKENS, E)
    by_embedded = np.zeros_like(embedded)
    by_last = np.zeros(E, embedded.dtype)
    if segment_ids is not None:
        by_last = by_seen[is_other].sum(axis=0)
        by_seen[is_other] = 0
    for c in range(CONTEXT_TOKENS):
        by_embedded[:, c : c + T] += by_seen[:, :, c]
    one_hot = np.eye(vocab_size, dtype=embedded.dtype)[ids.ravel()]
    by_embedding = one_hot.T @ by_embedded.reshape(-1, E)
    by_embedding[vocab_size - 1] += by_last
    return losses, {
        "embedding": by_embedding,
        "hidden": seen.T @ by_hidden,
        "hidden_bias": by_hidden.sum(axis=0),
        "output": hidden.T @ by_logits,
        "output_bias": by_logits.sum(axis=0),
    }


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
