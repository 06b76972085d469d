"""The exact wording of the errors of loaders/. Other tests check what an error names."""

from __future__ import annotations

import pytest

import batchwright as bw

ROLLOUTS = [{"prompt": [1], "response": [2], "reward": 1.0}] * 8


def opened(**settings):
    settings = {"framework": "numpy", "batch_size": 4} | settings
    return bw.RolloutDataLoader(ROLLOUTS, **settings)


def used_up():
    loader = opened(epochs=1)
    list(loader)
    loader.get_batch()


def ended_by_a_newer_one():
    loader = opened()
    first = loader.get_iterator()
    next(loader.get_iterator())
    next(first)


WORDING = {
    "a batch without rows": (
        lambda: opened(batch_size=0),
        """\
batch_size must be at least 1, got 0
  parameter  batch_size
  try        batch_size=1""",
    ),
    "a batch that ranks cannot share": (
        lambda: opened(rank=0, world_size=3),
        """\
batch_size=4 does not divide by world_size=3
  parameter  batch_size
  try        batch_size=3 or 6 (it is global: each rank gets its share), or Batching(uneven=True)""",
    ),
    "an unknown framework": (
        lambda: opened(framework="jaxx"),
        """\
framework='jaxx' is not one of 'numpy', 'torch', 'jax', 'mlx'
  parameter  framework
  try        framework='jax'""",
    ),
    "a position outside the run": (
        lambda: opened(epochs=1).seek(position=9),
        """\
position 9 is outside this run
  position   9
  try        a position from 0 to 8""",
    ),
    "not a state": (
        lambda: opened().load_state_dict({}),
        """\
this is not a loader's state
  got        {}
  try        what state_dict() returned""",
    ),
    "a state of another seed": (
        lambda: opened().load_state_dict(opened(seed=1).state_dict()),
        """\
this state belongs to a loader with seed=1, and this one has 0
  parameter  seed
  try        open the loader with the settings of that run""",
    ),
    "the end of a run": (
        used_up,
        """\
the run is over: 1 epoch, 8 rows
  try        epochs=2 for more, epochs=None for no end, or reset() to start again""",
    ),
    "an iterator that a newer one ended": (
        ended_by_a_newer_one,
        """\
this iterator was ended by a newer one (or by get_batch): a loader has one cursor
  try        open a second loader to read twice at once""",
    ),
}


@pytest.mark.parametrize("name", WORDING)
def test_wording(name):
    act, text = WORDING[name]
    with pytest.raises(bw.BatchwrightError) as caught:
        act()
    assert str(caught.value) == text
