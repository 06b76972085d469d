"""The exact wording of the command line's refusals. Other tests check what a message names."""

from __future__ import annotations

import pytest

WORDING = {
    (): """\
batchwright: the following arguments are required: VERB
  try        batchwright --help
""",
    ("bake", "recipe.py"): """\
batchwright: where to?
  parameter  to
  try        --to corpus.store, or --explain to see what would happen
""",
    ("plan", "a.store", "--weights", "web"): """\
batchwright: argument --weights: 'web' is not NAME=VALUE, as in web=.7,code=.3
  try        batchwright plan --help
""",
    ("amend", "a.store", "PLAN", "--at", "80", "--step", "10"): """\
batchwright: argument --step: not allowed with argument --at
  try        batchwright amend --help
""",
}


@pytest.mark.parametrize("arguments", WORDING, ids=" ".join)
def test_wording(arguments, tmp_path, refuses):
    assert refuses(*arguments, cwd=tmp_path) == WORDING[arguments]
