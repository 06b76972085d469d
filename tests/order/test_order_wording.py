"""The exact wording of the errors of order/. Other tests check what an error names."""

from __future__ import annotations

import pytest

import batchwright as bw
from batchwright.order.balance import Cost
from batchwright.order.mix import integer_shares
from batchwright.order.schedule import Order
from batchwright.order.sharding import sharding_of
from batchwright.order.split import Cut, Epochs

WORDING = {
    "a wrong coefficient": (
        lambda: Cost(-1),
        """\
linear must be a number from 0 to 1e+200, got -1
  parameter  linear
  try        linear=1, or another such number""",
    ),
    "a share that is too small": (
        lambda: integer_shares([1.0, 1e-6], ["web", "rare"]),
        """\
the weight of 'rare' is 1e-06 of the mixture, too small to be kept exactly
  parameter  weights
  source     rare
  try        a share of at least 1.2e-05, or 0 to leave it out""",
    ),
    "a weight for an unknown source": (
        lambda: Order({"web": 5, "code": 5}, seed=0, weights={"wep": 1.0}),
        """\
weights= names a source 'wep' that is not there
  parameter  weights
  source     wep
  sources    web, code
  try        'web'""",
    ),
    "a batch larger than an epoch": (
        lambda: Cut(rows_per_step=9, epochs=Epochs.of(5), epoch_end="drop"),
        """\
batch_size=9 is more than an epoch, which has 5 rows
  parameter  batch_size
  try        batch_size=5 or less, or epoch_end='short', 'pad' or 'wrap'""",
    ),
    "a sharding that gives a row twice": (
        lambda: sharding_of(lambda n, rank, world: [0, 0]).share(6, rank=0, world=2),
        """\
sharding '<lambda>.<locals>.<lambda>' gives row 0 of a batch of 6 to the ranks [0, 0, 1, 1]
  parameter  sharding
  row        0
  try        each row from 0 to 5 must go to exactly one rank""",
    ),
}


@pytest.mark.parametrize("name", WORDING)
def test_wording(name):
    act, text = WORDING[name]
    with pytest.raises(bw.BatchwrightError) as caught:
        act()
    assert str(caught.value) == text
