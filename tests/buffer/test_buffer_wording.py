"""The exact wording of the errors of buffer/. Other tests check what an error names."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import batchwright as bw

ROWS = [{"text": "a", "label": 1}]

WORDING = {
    "a value of another type": (
        lambda: bw.DatasetBuffer(ROWS).append({"text": "b", "label": "one"}),
        """\
a value of another type
  row        0
  column     label
  has        int64
  got        str
  try        a number of type int64, or a column of its own""",
    ),
    "a value that does not fit": (
        lambda: bw.DatasetBuffer(ROWS, schema=pa.schema([("text", pa.string()), ("label", pa.int8())])).append(
            {"text": "b", "label": 300}
        ),
        """\
int8 cannot hold 300 exactly
  row        0
  column     label
  has        int8
  got        int
  try        a smaller number, or text""",
    ),
    "an unknown column": (
        lambda: bw.DatasetBuffer([{"loss": 1}]).append({"los": 1}),
        """\
a column that this buffer does not have: 'los'
  row        0
  column     los
  has        loss
  try        'loss', if that was meant; else buffer.set(ids, los=...) adds it, or schema=pa.schema(...) beforehand""",
    ),
    "a bare value": (
        lambda: bw.DatasetBuffer(ROWS).append(3),
        """\
int is not a sample
  got        int
  try        {"value": ...}: a dict names the column""",
    ),
    "columns of different lengths": (
        lambda: bw.DatasetBuffer().extend({"a": [1], "b": np.ones((2, 3))}),
        """\
columns of different lengths: 'a' has 1 rows, 'b' has 2
  column     b
  has        a: 1 rows
  got        b: 2 rows
  try        one value for each row in every column""",
    ),
    "percent for a share": (
        lambda: bw.DatasetBuffer(ROWS).append(ROWS[0], retain_prior=50),
        """\
retain_prior=50 is over 1: rows can be kept once at most
  parameter  retain_prior
  try        retain_prior=0.5 if percent are meant, 1.0 for all rows""",
    ),
    "an unknown strategy": (
        lambda: bw.DatasetBuffer(ROWS, max_size=1, drop_strategy="oldset").append(ROWS[0]),
        """\
drop_strategy='oldset' is neither a strategy nor a column that rows have
  parameter  drop_strategy
  strategies 'oldest', 'random'
  columns    'label'
  try        drop_strategy='oldest'""",
    ),
    "an unknown version": (
        lambda: bw.DatasetBuffer(ROWS).at("first"),
        """\
there is no version 'first'
  parameter  version
  versions   none was committed
  try        buffer.commit('name') keeps one""",
    ),
}


@pytest.mark.parametrize("name", WORDING)
def test_wording(name):
    act, text = WORDING[name]
    with pytest.raises(bw.BatchwrightError) as caught:
        act()
    assert str(caught.value) == text
