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
dihedral8: no column is a board of n x n cells
  parameter  augmentation
  augmentation dihedral8
  columns    x float64 [rows, 7]
  try        dihedral8(boards="name", policies="name", moves="name"), each a name, several, or () for none: when all \
are given, others stay""",
    ),
    "a column that is not named": (
        lambda: apply(dihedral8(), {"board": BOARDS, "mv": np.zeros(2, np.int8)}, WHICH),
        """\
dihedral8: column 'mv', int8 [rows], is not named
  parameter  augmentation
  augmentation dihedral8
  column     mv
  columns    board int8 [rows, 2, 3, 3]
             mv int8 [rows]
  try        dihedral8(boards="mv", policies="mv", moves="mv"), each a name, several, or () for none: when all are \
given, others stay""",
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
augmentation 'print' has no factor of 1 or more, got None: how many entries does a position give?
  parameter  augmentation
  try        print.factor = 8, or @register_augmentation('print', factor=8) above it""",
    ),
    "a column that is lost": (
        lambda: apply(LOSES, {"board": BOARDS, "value": np.zeros(2)}, WHICH),
        """\
augmentation 'mine' did not return the columns that it was given
  parameter  augmentation
  augmentation mine
  given      board, value
  returned   board
  try        {**columns, 'board': turned}; add or leave out columns with transform= instead""",
    ),
}


@pytest.mark.parametrize("name", WORDING)
def test_wording(name):
    act, text = WORDING[name]
    with pytest.raises(bw.BatchwrightError) as caught:
        act()
    assert str(caught.value) == text
