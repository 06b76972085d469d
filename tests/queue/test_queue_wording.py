"""The exact wording of the errors of queue/. Other tests check what an error names."""

from __future__ import annotations

import re

import pytest
from providers import SETTINGS, Numbered

import batchwright as bw


class Failing(Numbered):
    def sample_batch(self, split, rng):
        raise ValueError("low >= high")


class Global(Numbered):
    num_made = 0

    def sample_batch(self, split, rng):
        Global.num_made += 1
        return super().sample_batch(split, rng) | {"x": super().sample_batch(split, rng)["x"] + Global.num_made}


def run(kind=Numbered, **given):
    kind("data", **(SETTINGS | given)).run(max_files=1)


def of_another_provider():
    run()
    with bw.DatasetConsumer("data") as consumer:
        consumer.get_batch("train")
    run(seed=3)


def of_another_queue():
    run()
    bw.DatasetConsumer("data").load_state_dict({"queue": "0f"})


WORDING = {
    "a queue of another provider": (
        of_another_provider,
        """\
the queue was made by something else than this provider
  folder     data/queue
  difference seed was 1337, and is 3
  try        undo the change; --accept-change (in Python run(accept_change=True)) makes the next files with it; \
or throw its files away:
             batchwright queue purge data""",
    ),
    "an error of the user's code": (
        lambda: run(Failing),
        """\
sample_batch failed making train file 0: ValueError: low >= high
  provider   Failing
  at         test_queue_wording.py:LINE
  try        mend sample_batch and start the provider again, with --accept-change where batches were taken already: \
it goes on with this file""",
    ),
    "a generator other than rng": (
        lambda: run(Global),
        """\
sample_batch made the first batch of train file 0 twice, and not the same
  provider   Global
  field      x
  try        draw from rng, the second argument, and only from it; or say reproducible = False in the class""",
    ),
    "a state of another queue": (
        of_another_queue,
        """\
this state is of another queue: its schema, code, settings, raw files or seed differ
  parameter  state
  state      0f
  queue      FINGERPRINT
  try        prepare with what the state was saved with; or begin at the queue's first batch, without it""",
    ),
    "no queue": (
        lambda: bw.DatasetConsumer("data"),
        """\
Queue directory not found: HERE/data/queue
  folder     HERE/data/queue
  try        batchwright prepare CONFIG (python prepare.py CONFIG), with the config of this trainer""",
    ),
}


@pytest.mark.parametrize("name", WORDING)
def test_wording(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    act, text = WORDING[name]
    with pytest.raises(bw.BatchwrightError) as caught:
        act()
    said = str(caught.value).replace(str(tmp_path), "HERE")
    assert re.sub(r"\b[0-9a-f]{32}\b", "FINGERPRINT", re.sub(r"(\.py):\d+", r"\1:LINE", said)) == text
