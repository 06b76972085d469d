"""The exact wording of the errors of adapters/. Other tests check what an error names."""

from __future__ import annotations

import numpy as np
import pytest

import batchwright as bw
from batchwright.adapters import jax as jax_adapter
from batchwright.adapters import mlx as mlx_adapter

ARRAYS = {"time": np.array([2**40])}
ROLLOUTS = [{"prompt": [1], "response": [2], "reward": 1.0}] * 8

WORDING = {
    "a device that MLX does not choose": (
        lambda: mlx_adapter.handed(ARRAYS, "gpu"),
        """\
device='gpu': MLX arrays are on every device already
  parameter  device
  try        device=None""",
    ),
    "an integer that JAX cannot hold": (
        lambda: jax_adapter.handed(ARRAYS, None),
        """\
1099511627776 in column 'time' (int64) does not fit into JAX's int32
  parameter  time
  try        jax.config.update('jax_enable_x64', True), or a column of smaller numbers""",
    ),
    "steps out of order": (
        lambda: bw.RolloutDataLoader(ROLLOUTS).torch().loader(num_workers=2, in_order=False),
        """\
in_order=False would hand over steps in another order, which no state can describe
  parameter  in_order
  try        leave in_order= out""",
    ),
}


@pytest.mark.parametrize("name", WORDING)
def test_wording(name):
    act, text = WORDING[name]
    with pytest.raises(bw.BatchwrightError) as caught:
        act()
    assert str(caught.value) == text
