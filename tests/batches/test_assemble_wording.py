"""The exact wording of the errors of assemble/. Other tests check what an error names."""

from __future__ import annotations

import numpy as np
import pytest

import batchwright as bw
from batchwright.batches.row_index import RowSpec, plan_rows

WORDING = {
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
