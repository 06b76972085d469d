"""The demo's model learns by its true gradients, and does the same arithmetic every time."""

from __future__ import annotations

import numpy as np
import pytest

from batchwright.demo.model import CONTEXT_TOKENS, Adam, loss_and_gradients, new_weights


def _tiny():
    weights = new_weights(vocab_size=7, embedding=3, hidden=5, seed=1)
    random = np.random.default_rng(2)
    return weights, random.integers(0, 7, (2, 6)), random.integers(0, 7, (2, 6))


@pytest.mark.parametrize("name", ["embedding", "hidden", "hidden_bias", "output", "output_bias"])
def test_gradients_equal_the_slope_of_the_loss(name):
    weights, input_ids, labels = _tiny()
    weights = {n: w.astype(np.float64) for n, w in weights.items()}  # so that a small difference still has digits
    _, gradients = loss_and_gradients(weights, input_ids, labels)
    slope = np.zeros_like(weights[name])
    for at in np.ndindex(slope.shape):
        for sign in (1, -1):
            moved = {n: w.copy() for n, w in weights.items()}
            moved[name][at] += sign * 1e-6
            slope[at] += sign * loss_and_gradients(moved, input_ids, labels)[0] / 2e-6
    np.testing.assert_allclose(gradients[name], slope, atol=1e-7)


def test_untrained_loss_is_close_to_that_of_guessing():
    weights = new_weights(vocab_size=257)
    ids = np.arange(256).reshape(4, 64)
    loss, _ = loss_and_gradients(weights, ids, (ids + 1) % 257)
    assert loss == pytest.approx(np.log(257), abs=0.1)


def test_a_token_is_predicted_from_the_tokens_before_it_and_no_more_than_it_can_see():
    weights = {n: w.astype(np.float64) for n, w in new_weights(vocab_size=7, embedding=3, hidden=5, seed=1).items()}
    labels = np.zeros((1, 12), np.int64)

    def loss_of_last_token(ids: np.ndarray) -> float:
        whole, _ = loss_and_gradients(weights, ids, labels)
        without, _ = loss_and_gradients(weights, ids[:, :-1], labels[:, :-1])
        return whole * 12 - without * 11

    ids = np.arange(12).reshape(1, 12) % 7
    out_of_sight, in_sight = ids.copy(), ids.copy()
    out_of_sight[0, -CONTEXT_TOKENS - 1] = 6
    in_sight[0, -CONTEXT_TOKENS] = 6
    assert loss_of_last_token(out_of_sight) == pytest.approx(loss_of_last_token(ids), abs=1e-12)
    assert loss_of_last_token(in_sight) != pytest.approx(loss_of_last_token(ids), abs=1e-12)


def test_updates_lower_the_loss():
    weights, input_ids, labels = _tiny()
    adam = Adam()
    losses = []
    for _ in range(50):
        loss, gradients = loss_and_gradients(weights, input_ids, labels)
        adam.update(weights, gradients, rate=0.02)
        losses.append(loss)
    assert losses[-1] < losses[0] / 2
    assert {array.dtype for array in (*weights.values(), *adam.mean.values())} == {np.dtype(np.float32)}
