"""Beside TorchRL and TRL: the same numbers, by their own code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from batchwright.base.kernels import numba_or_none
from batchwright.rl.advantage import gae, group_relative, leave_one_out, whiten
from batchwright.rl.dialects import dialect

pytestmark = pytest.mark.peers

TORCHRL = """
import sys
import numpy as np, torch
from torchrl.objectives.value.functional import generalized_advantage_estimate

given = np.load(sys.argv[1])
column = lambda name: torch.from_numpy(given[name])[..., None]
found = generalized_advantage_estimate(
    float(given["gamma"]), float(given["lam"]), *map(column, ["values", "next_values", "rewards", "dones"])
)
advantages, returns = (result[..., 0].numpy() for result in found)
np.savez(sys.argv[2], advantages=advantages, returns=returns)
"""

# TRL computes advantages inside a method that first generates: its statements are taken from there, as installed.
TRL = """
import ast, importlib.util, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np, torch
from trl.trainer.utils import nanstd

def statements(module, begins, ends):
    tree = ast.parse((Path(importlib.util.find_spec("trl").origin).parent / "trainer" / module).read_text())
    method = next(n for n in ast.walk(tree) if getattr(n, "name", "") == "_generate_and_score_completions")
    texts = [ast.unparse(statement) for statement in method.body]
    first, last = (next(i for i, t in enumerate(texts) if t.startswith(begin)) for begin in (begins, ends))
    assert first < last
    return "\\n".join(texts[first : last + 1])

grpo = statements("grpo_trainer.py", "if self.multi_objective_aggregation ==", "advantages = torch.nan_to_num(")
rloo = statements("rloo_trainer.py", "grouped_rewards = rewards.view(", "advantages = torch.nan_to_num(")

given = np.load(sys.argv[1])
rewards = torch.from_numpy(given["rewards"])
out = {}
for size in given["sizes"].tolist():
    for option in ("group", "none"):
        trainer = SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize", reward_weights=torch.ones(1), scale_rewards=option
        )
        names = dict(
            self=trainer, torch=torch, nanstd=nanstd, device="cpu", num_generations=size,
            rewards_per_func=rewards[:, None], unscorable_mask=torch.zeros(len(rewards), dtype=torch.bool),
        )
        exec(grpo, names)
        out[f"grpo_{option}_{size}"] = names["advantages"].numpy()
    for normalize in (False, True):
        trainer = SimpleNamespace(normalize_advantages=normalize)
        names = dict(self=trainer, torch=torch, nanstd=nanstd, num_generations=size, rewards=rewards)
        exec(rloo, names)
        out[f"rloo_{normalize}_{size}"] = names["advantages"].numpy()
np.savez(sys.argv[2], **out)
"""


def answer_of(peer: str, module: str, folder: Path, **given: object) -> dict[str, np.ndarray]:
    """What a script makes of arrays, in a process of its own, which may live in another environment."""
    beside = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"  # what `make bench-peers` builds
    python = os.environ.get("BATCHWRIGHT_PEERS_PYTHON") or (str(beside) if beside.exists() else sys.executable)
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if subprocess.run([python, "-c", probe]).returncode:
        pytest.skip(
            f"NOT COMPARED WITH {module}: `make bench-peers` builds an environment that has it; "
            "$BATCHWRIGHT_PEERS_PYTHON can name another one"
        )
    np.savez(folder / "given.npz", **given)
    done = subprocess.run(
        [python, "-W", "ignore", "-c", peer, str(folder / "given.npz"), str(folder / "found.npz")],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return dict(np.load(folder / "found.npz"))


@pytest.fixture(scope="module")
def episodes() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    rewards, values = draw.standard_normal((2, 64, 512)).astype(np.float32)
    return {
        "rewards": rewards,
        "values": values,
        "dones": draw.random((64, 512)) < 0.02,
        "bootstrap": draw.standard_normal(64).astype(np.float32),
    }


@pytest.fixture(scope="module")
def torchrl(tmp_path_factory, episodes) -> dict[str, np.ndarray]:
    next_values = np.concatenate([episodes["values"][:, 1:], episodes["bootstrap"][:, None]], axis=1)
    return answer_of(
        TORCHRL,
        "torchrl",
        tmp_path_factory.mktemp("torchrl"),
        **episodes,
        next_values=next_values,
        gamma=0.99,
        lam=0.95,
    )


@pytest.mark.parametrize("path", ["numpy", "numba"])
def test_gae_is_that_of_torchrl_to_1e_5_over_the_ends_of_episodes(torchrl, episodes, monkeypatch, path):
    if path == "numpy":
        monkeypatch.setenv("BATCHWRIGHT_NUMBA", "0")
    elif numba_or_none() is None:
        pytest.skip("numba is not installed, or turned off")
    advantages, returns = gae(**episodes, gamma=0.99, lam=0.95)
    np.testing.assert_allclose(advantages, torchrl["advantages"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(returns, torchrl["returns"], rtol=1e-5, atol=1e-5)


SIZES = (1, 2, 4, 8)
REWARDS = np.random.default_rng(1).choice([0.0, 0.25, 1.0], 64, p=[0.5, 0.2, 0.3]).astype(np.float32)


@pytest.fixture(scope="module")
def trl(tmp_path_factory) -> dict[str, np.ndarray]:
    return answer_of(TRL, "trl", tmp_path_factory.mktemp("trl"), rewards=REWARDS, sizes=np.array(SIZES))


def close(one: np.ndarray, other: np.ndarray) -> None:
    assert one.dtype == np.float32
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def groups_of(size: int) -> np.ndarray:
    """Rows in a row are a group, as TRL has them."""
    return np.arange(len(REWARDS)) // size


@pytest.mark.parametrize("size", SIZES)
def test_group_advantages_are_those_of_trl(trl, size):
    close(dialect("trl").group_relative(REWARDS, groups_of(size)), trl[f"grpo_group_{size}"])
    close(group_relative(REWARDS, groups_of(size), eps=1e-4), trl[f"grpo_group_{size}"])


@pytest.mark.parametrize("size", SIZES)
def test_group_advantages_without_a_division_are_those_of_trl(trl, size):
    close(dialect("trl").group_relative(REWARDS, groups_of(size), std=False), trl[f"grpo_none_{size}"])


@pytest.mark.parametrize("size", SIZES)
def test_leave_one_out_advantages_are_those_of_trl(trl, size):
    close(dialect("trl").leave_one_out(REWARDS, groups_of(size)), trl[f"rloo_False_{size}"])


@pytest.mark.parametrize("size", SIZES)
def test_normalised_leave_one_out_advantages_are_those_of_trl(trl, size):
    ours = whiten(leave_one_out(REWARDS, groups_of(size)), unbiased=True, eps=1e-4, eps_in="std")
    close(ours, trl[f"rloo_True_{size}"])
