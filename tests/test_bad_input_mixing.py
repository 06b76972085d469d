"""Bad input for mixtures: one clear error each, which names the thing and the remedy, and a loader that is as before.

One case for each line of the promise. Every case begins with a run that is under way; the one test below asserts what
the error is, what it names and advises, and that the run then goes on with the same plan, position and rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import batchwright as bw
from shared import bake_source

WEIGHTS = {"web": 2.0, "code": 1.0}


@dataclass
class Run:
    """A mixture of two stores, ten steps of eight rows in; and a third store, with other content."""

    folder: Path

    def __post_init__(self) -> None:
        for name, count in (("web", 120), ("code", 20), ("other", 30)):
            bake_source(self.folder / f"{name}.store", [f"{name} {n} " * (3 + n % 5) for n in range(count)])
        self.loader = self.open(bw.Mixture(WEIGHTS, num_rows=800))
        for _ in range(10):
            self.loader.get_batch()

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.store"

    def open(self, weights: Any, **settings: Any) -> bw.MixedDataLoader:
        settings = {"chunk_size": 16, "batch_size": 8, "framework": "numpy"} | settings
        return bw.MixedDataLoader({n: self.path(n) for n in ("web", "code")}, weights, **settings)

    def state_of_a_sibling(self) -> dict[str, Any]:
        sibling = self.open(bw.Mixture(WEIGHTS, num_rows=800))
        sibling.amend(at=96, weights={"web": 1})
        return sibling.state_dict() | {"position": 104}


def amend_twice(run: Run) -> None:
    run.loader.plan.amend(at=200, weights={"web": 1}).amend(at=200, weights={"code": 1})


def amend_before_the_last(run: Run) -> None:
    run.loader.plan.amend(at=200, weights={"web": 1}).amend(at=199, skip=(300, 301))


def cap_below_what_was_used(run: Run) -> None:
    at = run.loader.plan.order.position_of(1, run_rows(run, 2) + 1)[0]
    run.loader.amend(at=int(at) + 1, max_epochs={"code": 2})


def run_rows(run: Run, epochs: int) -> Any:
    import numpy as np

    return np.array([epochs * run.loader.plan.sources[1].num_rows - 1])


def open_replaced(run: Run) -> None:
    plan = run.loader.plan
    bake_source(run.folder / "new" / "web.store", ["other text " * 20] * 30)
    bw.MixedDataLoader([run.folder / "new" / "web.store", run.path("code")], plan=without_places(plan))


def without_places(plan: bw.Plan) -> bw.Plan:
    from dataclasses import replace

    return replace(plan, places=())


def of_another_tokenizer(run: Run) -> None:
    bake_source(run.folder / "chars.store", ["characters " * 20] * 30, bw.tokenize("chars"))
    bw.MixedDataLoader({"web": run.path("web"), "chars": run.folder / "chars.store"}, chunk_size=16)


def of_two_lengths(run: Run) -> None:
    short = bw.PretrainDataLoader(run.path("code"), chunk_size=8)
    bw.MixedDataLoader({"web": bw.PretrainDataLoader(run.path("web"), chunk_size=16), "code": short})


CASES: dict[str, tuple[Callable[[Run], Any], type[bw.BatchwrightError], str, dict[str, str], str]] = {
    # name: (what is done, error, its headline, what it names, what it advises)
    "a negative weight": (
        lambda run: run.open({"web": 1, "code": -0.5}),
        bw.SpecError,
        "the weight of 'code' is -0.5",
        {"parameter": "weights", "source": "code"},
        "a number of 0 or more",
    ),
    "a weight that is not a number": (
        lambda run: run.open({"web": 1, "code": math.nan}),
        bw.SpecError,
        "the weight of 'code' is nan",
        {"parameter": "weights", "source": "code"},
        "a number of 0 or more",
    ),
    "an infinite weight": (
        lambda run: run.loader.amend(weights={"web": math.inf, "code": 1}),
        bw.SpecError,
        "the weight of 'web' is inf",
        {"parameter": "weights", "source": "web"},
        "a number of 0 or more",
    ),
    "weights that add up to nothing": (
        lambda run: run.loader.amend(weights={"web": 0, "code": 0.0}),
        bw.SpecError,
        "all weights are 0",
        {"parameter": "weights"},
        "a weight for one of 'web', 'code'",
    ),
    "a weight too small for the pattern": (
        lambda run: run.loader.amend(weights={"web": 1, "code": 1e-6}),
        bw.SpecError,
        "the weight of 'code' is 1e-06 of the mixture, too small to be kept exactly",
        {"parameter": "weights", "source": "code"},
        "a share of at least 1.2e-05, or 0 to leave it out",
    ),
    "a weight for a source that is not there": (
        lambda run: run.loader.amend(weights={"web": 1, "cod": 1}),
        bw.SpecError,
        "weights= names a source 'cod' that is not there",
        {"parameter": "weights", "source": "cod", "sources": "web, code"},
        "perhaps 'code'",
    ),
    "a cap for a source that is not there": (
        lambda run: run.open(bw.Mixture(WEIGHTS, max_epochs={"cod": 2})),
        bw.SpecError,
        "max_epochs= names a source 'cod' that is not there",
        {"parameter": "max_epochs", "source": "cod"},
        "perhaps 'code'",
    ),
    "an amendment in the past": (
        lambda run: run.loader.amend(at=79, weights={"web": 1}),
        bw.SpecError,
        "position 79 is past: the cursor is at 80",
        {"parameter": "at"},
        "at=80 or more, or load an earlier state first",
    ),
    "two amendments at one position": (
        amend_twice,
        bw.SpecError,
        "position 200 has an amendment already (from position 200: weights web=1)",
        {"parameter": "at"},
        "both changes in one amend()",
    ),
    "an amendment before the last one": (
        amend_before_the_last,
        bw.SpecError,
        "position 199 lies before the last amendment (from position 200: weights web=1), which would change",
        {"parameter": "at"},
        "at=201 or more",
    ),
    "an amendment that changes nothing": (
        lambda run: run.loader.amend(),
        bw.SpecError,
        "an amendment that changes nothing",
        {"parameter": "weights"},
        "weights=, add=, skip=, or another change",
    ),
    "skipping what was read already": (
        lambda run: run.loader.amend(skip=(70, 90)),
        bw.SpecError,
        "position 70 cannot be skipped: it lies before 80, from which on the plan is amended",
        {"parameter": "skip"},
        "load a state from position 70 or before",
    ),
    "skipping backwards": (
        lambda run: run.loader.amend(skip=(99, 90)),
        bw.SpecError,
        "skip=(99, 90) runs backwards",
        {"parameter": "skip"},
        "skip=(90, 99)",
    ),
    "an end before the cursor": (
        lambda run: run.loader.amend(num_rows=80),
        bw.SpecError,
        "the stream cannot end at row 80: 80 were given by then",
        {"parameter": "num_rows"},
        "num_rows=81 or more",
    ),
    "a cap below what was used": (
        cap_below_what_was_used,
        bw.SpecError,
        "source 'code' is in epoch 3 at position",
        {"parameter": "max_epochs", "source": "code"},
        "max_epochs={'code': 3} or more, or a weight of 0",
    ),
    "a source that was replaced under a plan": (
        lambda run: run.loader.amend(add={"web": run.path("other")}),
        bw.PlanError,
        "source 'web' was replaced: its first",
        {"source": "web", "file": "other.store"},
        "or another name",
    ),
    "a plan over stores that have other content now": (
        open_replaced,
        bw.PlanError,
        "has the content of plan",
        {"source": "web (train)"},
        "the stores that the plan was made over",
    ),
    "a new source without a weight": (
        lambda run: run.loader.amend(add={"other": run.path("other")}),
        bw.SpecError,
        "source 'other' joins a mixture without a weight",
        {"parameter": "weights", "source": "other"},
        "weights= with one for 'other'",
    ),
    "a state from a sibling amendment": (
        lambda run: (run.loader.amend(at=96, skip=(100, 101)), run.loader.load_state_dict(run.state_of_a_sibling())),
        bw.PlanError,
        "this state belongs to plan",
        {"differs": "amendment 1: from position 96: skip 100-101 here, from position 96: weights web=1 there"},
        "open the loader with the settings of that run, or with plan=",
    ),
    "a world size that does not divide the batch": (
        lambda run: run.open(WEIGHTS, rank=0, world_size=3),
        bw.SpecError,
        "batch_size=8 does not divide by world_size=3",
        {"parameter": "batch_size"},
        "batch_size=6 or 9 (it is global: each rank gets its share), or Batching(uneven=True)",
    ),
    "stores of two tokenizers": (
        of_another_tokenizer,
        bw.SpecError,
        "'chars' was tokenized by",
        {"parameter": "sources", "source": "chars", "file": "chars.store"},
        "bake both with one tokenizer",
    ),
    "rows of two lengths": (
        of_two_lengths,
        bw.SpecError,
        "'web' has rows of 16 tokens, 'code' of 8",
        {"parameter": "chunk_size", "source": "code"},
        "one chunk_size for all, or pad= with the token id that fills up the shorter rows",
    ),
    "a temperature that is none": (
        lambda run: run.open(bw.Mixture(WEIGHTS, temperature=0)),
        bw.SpecError,
        "temperature is 0",
        {"parameter": "temperature"},
        "a number above 0; 1 changes nothing",
    ),
    "an unknown rule for sources that run out": (
        lambda run: run.open(bw.Mixture(WEIGHTS, exhausted="renormalize")),
        bw.SpecError,
        "exhausted='renormalize' is not one of",
        {"parameter": "exhausted"},
        "renormalise",
    ),
    "caps without weights": (
        lambda run: run.open(bw.Mixture(max_epochs={"code": 2})),
        bw.SpecError,
        "without weights every source is read equally often, so none can be capped",
        {"parameter": "max_epochs"},
        "weights=, or epochs=",
    ),
    "weights that do not begin at 0": (
        lambda run: run.open([(100, WEIGHTS)]),
        bw.SpecError,
        "weights do not say what holds from position 0 on",
        {"parameter": "weights"},
        "a first entry (0, {...})",
    ),
    "weights in the wrong order": (
        lambda run: run.open([(0, WEIGHTS), (50, WEIGHTS), (50, WEIGHTS)]),
        bw.SpecError,
        "weights from position 50 come after those from position 50",
        {"parameter": "weights"},
        "positions that rise",
    ),
    "a list as a source": (
        lambda run: bw.MixedDataLoader({"web": [1, 2]}, chunk_size=16),
        bw.SpecError,
        "a list cannot be a source of a mixture",
        {"parameter": "sources", "source": "web"},
        "stores, paths, or loaders over them, by name",
    ),
    "no sources": (
        lambda run: bw.MixedDataLoader({}, chunk_size=16),
        bw.SpecError,
        "a mixture of no sources",
        {"parameter": "sources"},
        "sources={'web': 'web.store', ...}",
    ),
}
"""Ranks with different plans are in tests/batches/test_sync.py: that takes several processes."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What comes after the tenth step, if nothing goes wrong."""
    run = Run(tmp_path_factory.mktemp("good"))
    return [run.loader.get_batch().input_ids.tolist() for _ in range(3)]


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_clear_error_and_the_run_goes_on(case, tmp_path, expected):
    do, error, headline, names, remedy = CASES[case]
    run = Run(tmp_path)
    state = run.loader.state_dict()
    with pytest.raises(error) as caught:
        do(run)
    assert headline in caught.value.headline
    for name, value in names.items():
        assert str(value) in str(caught.value.where[name])
    assert remedy in caught.value.remedy
    if case != "a state from a sibling amendment":
        assert run.loader.state_dict() == state
        assert [run.loader.get_batch().input_ids.tolist() for _ in range(3)] == expected
    else:
        assert run.loader.position == state["position"]
