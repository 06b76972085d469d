"""`batchwright demo chat` finds every fault that it planted, trains on answers alone, and notices when it did not."""

from __future__ import annotations

import re

import numpy as np
import pytest

from batchwright.demo import chat
from batchwright.demo.harness import NotAsExpected
from batchwright.demo.model import new_weights, token_losses_and_gradients

STEPS = 40


@pytest.fixture(scope="module")
def demo(run_demo) -> str:
    """What one whole run of the demo in an empty folder printed."""
    return run_demo(f"demo chat --steps {STEPS}")[0]


@pytest.mark.parametrize("fault", chat.FAULTS, ids=lambda fault: fault.kind)
def test_every_planted_fault_is_found_at_its_line(demo, fault):
    line = re.search(rf"^  line +(\d+)  {re.escape(fault.what)}$", demo, re.MULTILINE)[1]
    found = re.split(r"\n(?:FAILED|note)  +", demo.partition("2. The conversations are good now")[0])
    (mine,) = [text for text in found if text.startswith(f"{fault.kind}: 1 of ")]
    assert re.search(rf"\.jsonl, line {line}\b", mine)
    assert f"All {len(chat.FAULTS)} were found, each at its line" in demo


def test_a_template_without_an_end_of_turn_is_found(demo):
    assert "\nFAILED  end of turn: " in demo.partition("2. The conversations are good now")[2]


def test_a_loader_refuses_the_same_in_words(demo):
    refused = demo.partition("A loader refuses the same")[2]
    assert "these conversations did not pass the check: end of turn" in refused
    assert "check=False" in " ".join(refused.split())


def test_answers_are_learned_and_questions_are_not(demo):
    users, answers = (
        list(map(float, re.search(rf"^what {who} say +([\d. ]+)$", demo, re.MULTILINE)[1].split()))
        for who in ("users", "assistants")
    )
    assert answers[1] < 0.85 * answers[0]
    assert users[1] > 1.5 * users[2]


def test_the_output_is_clean_and_fits_100_columns(demo):
    assert [line for line in demo.splitlines() if len(line) > 100] == []
    assert not re.search(r"Traceback|EXPECTED|[\r\x1b]", demo)
    assert demo.endswith("Everything was as promised.\n")


def test_a_fault_that_is_not_found_is_noticed(tmp_path, monkeypatch):
    good = list(chat._conversations())
    monkeypatch.setattr(
        chat, "FAULTS", (chat._Fault("unknown role", "nothing at all", lambda row: chat._said(row, "user")),)
    )
    with pytest.raises(NotAsExpected, match="not found: unknown role"):
        chat._catch_bad_rows(tmp_path, good[:40], "bytes")


def test_too_few_steps_are_refused(capsys):
    assert chat.main(["--steps", "3"]) == 2
    assert "--steps 40" in capsys.readouterr().err


# The model, where several conversations are in a row


def _packed():
    weights = {n: w.astype(np.float64) for n, w in new_weights(vocab_size=7, embedding=3, hidden=5, seed=1).items()}
    ids, labels = np.random.default_rng(2).integers(0, 6, (2, 1, 9))
    return weights, ids, labels, np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0]])


def test_a_conversation_does_not_see_the_one_before_it_in_its_row():
    weights, ids, labels, segments = _packed()
    packed, _ = token_losses_and_gradients(weights, ids, labels, segment_ids=segments)
    alone, _ = token_losses_and_gradients(weights, ids[:, 4:8], labels[:, 4:8])
    joined, _ = token_losses_and_gradients(weights, ids, labels)
    np.testing.assert_allclose(packed[:, 4:8], alone, atol=1e-12)
    assert not np.allclose(joined[:, 4:8], alone)


@pytest.mark.parametrize("name", ["embedding", "hidden", "output_bias"])
def test_masked_gradients_equal_the_slope_of_the_masked_loss(name):
    weights, ids, labels, segments = _packed()
    mask = np.array([[0, 1, 0.5, 0, 0, 1, 1, 0, 0]])

    def step(of):
        losses, gradients = token_losses_and_gradients(of, ids, labels, loss_mask=mask, segment_ids=segments)
        return (losses * mask).sum() / mask.sum(), gradients

    slope = np.zeros_like(weights[name])
    for at in np.ndindex(slope.shape):
        for sign in (1, -1):
            moved = {n: w.copy() for n, w in weights.items()}
            moved[name][at] += sign * 1e-6
            slope[at] += sign * step(moved)[0] / 2e-6
    np.testing.assert_allclose(step(weights)[1][name], slope, atol=1e-7)
