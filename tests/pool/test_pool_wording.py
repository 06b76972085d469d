"""The exact wording of the errors of pool/. Other tests check what an error names."""

from __future__ import annotations

import numpy as np
import pytest

import batchwright as bw
from batchwright.pool.augment import Augmentation, apply, augmentation_for, dihedral8, hex4

BOARDS = np.zeros((2, 2, 3, 3), np.int8)
WHICH = np.array([0, 1])
LOSES = Augmentation("mine", 2, lambda columns, which: {"board": columns["board"]})

WORDING = {
    "no board": (
        lambda: apply(dihedral8(), {"x": np.zeros((2, 7))}, WHICH),
        """\
dihedral8: no column has boards [rows, ..., n, n]
  parameter  augmentation
  augmentation dihedral8
  columns    x float64 [rows, 7]
  try        dihedral8(boards="name"), or boards=() for none""",
    ),
    "a column that can be several things": (
        lambda: apply(dihedral8(), {"a": BOARDS, "mv": np.zeros(2, np.int8)}, WHICH),
        """\
dihedral8: column 'mv', int8 [rows], can be several things
  parameter  augmentation
  augmentation dihedral8
  column     mv
  columns    a int8 [rows, 2, 3, 3]
             mv int8 [rows]
  try        dihedral8(moves="mv" for cell numbers), or moves=() for none of them""",
    ),
    "an unknown setting": (
        lambda: hex4(colours="rgb"),
        """\
colours='rgb' is not one of 'planes', 'signs', '1/2', 'mover'
  parameter  colours
  try        colours='planes'""",
    ),
    "an unknown augmentation": (
        lambda: augmentation_for("hex5"),
        """\
no augmentation named 'hex5'
  parameter  augmentation
  known      dihedral8, hex4
  try        'hex4'""",
    ),
    "a function without a factor": (
        lambda: augmentation_for(print),
        """\
augmentation 'print' has no factor: how many entries does a position give?
  parameter  augmentation
  try        print.factor = 8, or @register_augmentation('print', factor=8) above it""",
    ),
    "a column that is lost": (
        lambda: apply(LOSES, {"board": BOARDS, "value": np.zeros(2)}, WHICH),
        """\
augmentation 'mine' lost column 'value'
  parameter  augmentation
  augmentation mine
  column     value
  given      board, value
  returned   board
  try        return every column that was given, and no other; add columns with transform= instead""",
    ),
}


@pytest.mark.parametrize("name", WORDING)
def test_wording(name):
    act, text = WORDING[name]
    with pytest.raises(bw.BatchwrightError) as caught:
        act()
    assert str(caught.value) == text
