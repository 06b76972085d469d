"""The exact wording of the errors of assemble/. Other tests check what an error names."""

from __future__ import annotations

import numpy as np
import pytest

import batchwright as bw
from batchwright.batches.pack import pack
from batchwright.batches.row_index import RowSpec, plan_rows

WORDING = {
    "an item longer than a row": (
        lambda: pack(np.array([3, 9]), 8, "best_fit"),
        """\
item 1 has length 9, more than the capacity 8 of a row
  parameter  lengths
  item       1
  length     9
  capacity   8
  try        cut or drop it, or capacity=9""",
    ),
    "an empty item": (
        lambda: pack(np.array([3, 0]), 8, "best_fit"),
        """\
item 1 has length 0
  parameter  lengths
  item       1
  length     0
  capacity   8
  try        leave empty items out before packing""",
    ),
    "an unknown method": (
        lambda: pack(np.array([3]), 8, "bestfit"),
        """\
method='bestfit' is not one of 'best_fit', 'first_fit', 'greedy'
  parameter  method
  try        method='best_fit'""",
    ),
    "a sample longer than a row": (
        lambda: plan_rows(np.array([0, 2, 7]), RowSpec(3, None, "raise"), source="chat"),
        """\
1 of 2 samples of 'chat' have more than max_length=3 tokens, the first is document 1 with 5
  parameter  max_length
  source     chat
  document   1
  try        max_length=5, or truncation='drop', 'keep_start' or 'keep_end'""",
    ),
}


@pytest.mark.parametrize("name", WORDING)
def test_wording(name):
    act, text = WORDING[name]
    with pytest.raises(bw.BatchwrightError) as caught:
        act()
    assert str(caught.value) == text
