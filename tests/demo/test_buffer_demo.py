"""`batchwright demo buffer` keeps what was acknowledged, finds what it planted, and notices when it did not."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest

import batchwright as bw
from batchwright.demo import buffer as demo_buffer
from batchwright.demo.buffer import losses_and_gradients, pictures
from batchwright.demo.harness import NotAsExpected
from batchwright.demo.model import layers


@pytest.fixture(scope="module")
def demo(run_demo):
    """One whole run of the demo in an empty folder: (what it printed, the buffer that it left)."""
    printed, folder = run_demo("demo buffer")
    with bw.DatasetBuffer(path=folder / "runs" / "buffer", read_only=True) as buffer:
        yield printed, buffer


def _accuracy(printed: str) -> list[float]:
    return [float(percent) for percent in re.findall(r"^  epoch \d .* accuracy ([\d.]+) %$", printed, re.MULTILINE)]


def test_what_the_killed_process_acknowledged_is_there(demo):
    steps = int(re.search(r"it had acknowledged (\d+) of 50 steps", demo[0])[1])
    losses = int(re.search(r"and all ([\d,]+) losses that this epoch had written back", demo[0])[1].replace(",", ""))
    assert 12 <= steps < 50
    assert losses == 80 * steps
    assert "the same weights, in every bit" in demo[0]


def test_the_mislabelled_rows_spoil_an_epoch_and_the_rollback_mends_it(demo):
    first, second, third, spoiled, instead, last = _accuracy(demo[0])
    assert first < second < third < instead < last
    assert spoiled < third - 5


def test_the_rows_that_spoiled_it_are_named_and_gone(demo):
    printed, buffer = demo
    assert "of the rows added: 2,000 from 'scrape-2'." in printed
    assert "scrape-2" in buffer.at("after epoch 4").provenance()["origin"].to_pylist()
    assert "scrape-2" not in buffer.provenance()["origin"].to_pylist()


def test_the_hardest_half_of_each_epoch_stayed_for_the_next(demo):
    buffer = demo[1]
    for epoch in (1, 2, 3):
        ended, began = buffer.at(f"after epoch {epoch}"), buffer.at(f"epoch {epoch + 1}")
        losses = ended.to_numpy()["loss"]
        stayed = np.isin(ended.ids, began.ids)
        assert stayed.sum() == 2000
        assert losses[stayed].min() >= losses[~stayed].max()


def test_the_output_is_clean_and_fits_100_columns(demo):
    assert [line for line in demo[0].splitlines() if len(line) > 100 or line != line.rstrip()] == []
    assert not re.search(r"Traceback|EXPECTED|DIFFERENT|[\r\x1b]", demo[0])
    assert demo[0].endswith("Everything was as promised.\n")


# What would not be as promised


def _run_with(tmp_path, losses, number):
    run = demo_buffer._Run(tmp_path / "buffer", tmp_path, acknowledged=losses, last={"number": number})
    with bw.DatasetBuffer(path=run.buffer) as buffer:
        buffer.extend({"loss": np.arange(float(demo_buffer.ROWS))})
    return run


@pytest.mark.parametrize(
    ("acknowledged", "number", "held"),
    [
        ({7: 7.0, 9: 9.0}, 1, True),
        ({7: 7.0}, 0, True),  # one change that it did not come to acknowledge
        ({7: 7.5}, 1, False),
        ({7: 7.0, 4000: 1.0}, 1, False),
        ({7: 7.0}, 2, False),
    ],
    ids=["all there", "one change more", "another loss", "a row that is gone", "a change that is gone"],
)
def test_a_loss_that_is_gone_is_noticed(tmp_path, acknowledged, number, held):
    run = _run_with(tmp_path, acknowledged, number)
    with contextlib.nullcontext() if held else pytest.raises(NotAsExpected, match="losses are missing"):
        demo_buffer._expect_nothing_lost(run)


# The classifier


@pytest.mark.parametrize("name", ["hidden", "hidden_bias", "output", "output_bias"])
def test_gradients_of_the_classifier_equal_the_slope_of_its_loss(name):
    weights = {n: w.astype(np.float64) for n, w in layers(np.random.default_rng(1), 63, 4, 10).items()}
    columns = pictures(6, seed=2)
    gradients = losses_and_gradients(weights, columns)[1]
    slope = np.zeros_like(weights[name])
    for at in np.ndindex(slope.shape):
        for sign in (1, -1):
            moved = {n: w.copy() for n, w in weights.items()}
            moved[name][at] += sign * 1e-6
            slope[at] += sign * losses_and_gradients(moved, columns)[0].mean() / 2e-6
    np.testing.assert_allclose(gradients[name], slope, atol=1e-7)


def test_mislabelled_pictures_are_the_same_with_the_next_label():
    good, bad = pictures(50, seed=3), pictures(50, seed=3, mislabelled=True)
    assert np.array_equal(good["pixels"], bad["pixels"])
    assert np.array_equal((good["label"] + 1) % 10, bad["label"])
