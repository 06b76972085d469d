"""The exact wording of the errors of deliver/. Other tests check what an error names."""

from __future__ import annotations

import pytest

import batchwright as bw
from batchwright.batches.ranks import Standing, compare, find_ranks


def standing(process, **settings):
    settings = {"plan": "3f2a", "position": 24, "batch_size": 8, "world_size": 2} | settings
    return Standing(rank=process, step=3, settings=settings, batch={}, failure=None, process=process)


WORDING = {
    "ranks that differ": (
        lambda: compare([standing(0), standing(1, batch_size=16)]),
        """\
rank 1 holds another batch_size than rank 0
  plan       3f2a
  here       rank 0
  there      rank 1
  differs    batch_size: 8 here, 16 there
  try        the same settings on every rank""",
    ),
    "a share that nobody reads": (
        lambda: compare([standing(0), standing(0)]),
        """\
no process reads the rows of data rank 1 of 2
  differs    ranks 0, 0 are data rank 0
  try        rank= and world_size= of each process; with tensor, pipeline or context parallel ranks: mesh=""",
    ),
    "one number of two": (
        lambda: find_ranks(rank=0),
        """\
rank= was given without world_size=
  parameter  world_size
  try        give both, or neither""",
    ),
    "a rank that does not exist": (
        lambda: find_ranks(2, 2),
        """\
rank 2 of 2 does not exist (from rank=, world_size=)
  parameter  rank
  try        a rank from 0 to world_size - 1""",
    ),
    "a mesh of another kind": (
        lambda: find_ranks(mesh=[0, 1]),
        """\
mesh= is a list, not a torch DeviceMesh
  parameter  mesh
  try        torch.distributed.device_mesh.init_device_mesh(...), or rank= and world_size=""",
    ),
}


@pytest.mark.parametrize("name", WORDING)
def test_wording(name):
    act, text = WORDING[name]
    with pytest.raises(bw.BatchwrightError) as caught:
        act()
    assert str(caught.value) == text
