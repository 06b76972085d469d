"""Batches of rollouts: what stands where, what a loss divides by; ranks, resumes and budgets change nothing."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest

import batchwright as bw
from batchwright.rl.advantage import gae, group_relative, leave_one_out, whiten
from refusals import refused


def rollouts(count: int = 20, group: int = 4, seed: int = 0, **without: bool) -> list[dict]:
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        response = rng.integers(1, 200, rng.integers(1, 9)).tolist()
        numbers = rng.normal(size=(3, len(response))).round(3).tolist()
        rows.append(
            {
                "prompt": rng.integers(1, 200, rng.integers(1, 6)).tolist(),
                "response": response,
                "reward": round(float(rng.random()), 3),
                "group": f"g{i // group}",
                "old_log_probs": numbers[0],
                "ref_log_probs": numbers[1],
                "values": numbers[2],
                "policy_version": i // 8,
            }
        )
    return [{name: value for name, value in row.items() if without.get(name, True)} for row in rows]


def opened(data=None, compute=True, **settings):
    settings = {"framework": "numpy", "batch_size": 8, **settings}
    return bw.RolloutDataLoader(rollouts(values=False) if data is None else data, None, compute, **settings)


def by_hand(row: dict, width: int, advantages: list[float], returns: list[float]) -> dict:
    """One row of a batch, place by place."""
    tokens = row["prompt"] + row["response"]
    first = len(row["prompt"])
    made = {
        "input_ids": [0] * width,
        "targets": [-100] * width,
        "loss_mask": [0.0] * width,
        "attention_mask": [0] * width,
        "rewards": [0.0] * width,
        "advantages": [0.0] * width,
        "returns": [0.0] * width,
        "old_log_probs": [0.0] * width,
        "ref_log_probs": [0.0] * width,
    }
    for place, token in enumerate(tokens):
        made["input_ids"][place] = token
        made["attention_mask"][place] = 1
        if place + 1 < len(tokens) and place + 1 >= first:
            number = place + 1 - first
            made["targets"][place] = tokens[place + 1]
            made["loss_mask"][place] = 1.0
            made["advantages"][place] = advantages[number]
            made["returns"][place] = returns[number]
            made["old_log_probs"][place] = row["old_log_probs"][number]
            made["ref_log_probs"][place] = row["ref_log_probs"][number]
            made["rewards"][place] = row["reward"] if number == len(row["response"]) - 1 else 0.0
    return made


def assert_is(batch, index: int, expected: dict) -> None:
    for name, values in expected.items():
        found = (batch.metadata[name] if name in batch.metadata else getattr(batch, name))[index]
        np.testing.assert_allclose(found, values, atol=1e-5, err_msg=name)


def test_every_number_stands_at_the_target_that_it_belongs_to():
    data = rollouts(values=False)
    rewards, groups = [row["reward"] for row in data], [row["group"] for row in data]
    worth = group_relative(np.array(rewards), np.array(groups))
    seen = []
    for batch in opened(data):
        for index, row in enumerate(batch.metadata["row"].tolist()):
            if batch.metadata["weight"][index]:
                seen.append(row)
                length = len(data[row]["response"])
                width = batch.input_ids.shape[1]
                assert_is(batch, index, by_hand(data[row], width, [worth[row]] * length, [rewards[row]] * length))
                assert batch.metadata["reward"][index] == np.float32(rewards[row])
                assert batch.metadata["policy_version"][index] == data[row]["policy_version"]
    assert sorted(seen) == list(range(20))


def test_values_give_generalised_advantages():
    data = rollouts()
    loader = opened(data, bw.Advantages(gamma=0.9, lam=0.8))
    assert "advantages by gae (gamma 0.9, lam 0.8)" in repr(loader)
    for batch in loader:
        for index, row in enumerate(batch.metadata["row"].tolist()):
            if batch.metadata["weight"][index]:
                rewards = [0.0] * (len(data[row]["response"]) - 1) + [data[row]["reward"]]
                advantages, returns = gae([rewards], [data[row]["values"]], gamma=0.9, lam=0.8)
                expected = by_hand(data[row], batch.input_ids.shape[1], advantages[0].tolist(), returns[0].tolist())
                assert_is(batch, index, expected)


def test_without_values_and_groups_the_mean_is_the_baseline():
    data = rollouts(values=False, group=4)
    for row in data:
        del row["group"]
    loader = opened(data, shuffle=False)
    assert "advantages by reinforce" in repr(loader)
    batch = loader.get_batch()
    mean = np.mean([row["reward"] for row in data])
    np.testing.assert_allclose(
        batch.metadata["advantages"].max(axis=1) + batch.metadata["advantages"].min(axis=1),
        [row["reward"] - mean for row in data[:8]],
        atol=1e-6,
    )
    assert "global_groups" not in batch.metadata


def test_a_method_can_be_asked_for_by_name():
    data = rollouts()
    batch = opened(data, "leave_one_out", shuffle=False).get_batch()
    worth = leave_one_out([row["reward"] for row in data], [row["group"] for row in data])
    found = (batch.metadata["advantages"] * batch.loss_mask).sum(1) / batch.loss_mask.sum(1)
    np.testing.assert_allclose(found, worth[:8], atol=1e-6)


def test_without_advantages_there_are_rewards_only():
    metadata = opened(compute=False).get_batch().metadata
    assert "rewards" in metadata
    assert "advantages" not in metadata
    assert "returns" not in metadata


def test_groups_are_normalised_whole_though_a_batch_has_a_part_of_them():
    data = rollouts(12, group=12, values=False)
    worth = group_relative([row["reward"] for row in data], [0] * 12)
    loader = opened(data, batch_size=5, shuffle=False)
    found = [
        value
        for batch in loader
        for value, mask, weight in zip(
            batch.metadata["advantages"], batch.loss_mask, batch.metadata["weight"], strict=True
        )
        if weight
        for value in [value[mask > 0][0]]
    ]
    np.testing.assert_allclose(found, worth, atol=1e-6)


def test_discounted_rewards_to_come_are_the_returns():
    data = [{"prompt": [1], "response": [2, 3, 4], "reward": [1.0, 0.0, 4.0], "group": 0}] * 2
    batch = opened(data, bw.Advantages(gamma=0.5), batch_size=2).get_batch()
    np.testing.assert_allclose(batch.metadata["returns"][0], [2.0, 2.0, 4.0, 0.0])
    np.testing.assert_allclose(batch.metadata["rewards"][0], [1.0, 0.0, 4.0, 0.0])
    assert batch.metadata["reward"].tolist() == [5.0, 5.0]


def test_a_huge_reward_of_one_row_leaves_the_returns_of_others_alone():
    data = [
        {"prompt": [1], "response": [2, 3, 4], "reward": [1e30, 0.0, 0.0], "group": 0},
        {"prompt": [1], "response": [2, 3, 4], "reward": [0.5, 0.25, 0.125], "group": 1},
    ]
    batch = opened(data, batch_size=2, shuffle=False).get_batch()
    assert batch.metadata["returns"][1].tolist() == [0.875, 0.375, 0.125, 0.0]


def test_what_a_reference_model_would_not_have_said_costs_reward():
    data = [
        {"prompt": [1], "response": [2, 3], "reward": 1.0, "old_log_probs": [-1.0, -2.0], "ref_log_probs": [-1.5, -2.0]}
    ]
    batch = opened(data, bw.Advantages("reinforce", kl_coef=0.1), batch_size=1).get_batch()
    np.testing.assert_allclose(batch.metadata["rewards"][0], [-0.05, 1.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(batch.metadata["returns"][0], [0.95, 1.0, 0.0], atol=1e-6)


def test_tool_output_is_read_and_not_learned():
    turns = [
        {"role": "assistant", "token_ids": [5, 6]},
        {"role": "tool", "token_ids": [7, 8, 9]},
        {"role": "assistant", "token_ids": [10]},
    ]
    batch = opened([{"prompt": [1, 2], "response": turns, "reward": 3.0, "group": 0}], batch_size=1).get_batch()
    assert batch.input_ids[0].tolist() == [1, 2, 5, 6, 7, 8, 9, 10]
    assert batch.targets[0].tolist() == [-100, 5, 6, -100, -100, -100, 10, -100]
    assert batch.metadata["rewards"][0].tolist() == [0, 0, 0, 0, 0, 0, 3.0, 0]
    assert batch.metadata["global_tokens"] == 3


def test_advantages_step_over_tool_output_as_if_it_were_not_there():
    whole = {"prompt": [1], "response": [5, 6, 9], "reward": 1.0, "values": [0.1, 0.2, 0.3]}
    split = {
        **whole,
        "response": [5, 6, 7, 7, 9],
        "values": [0.1, 0.2, 0.0, 0.0, 0.3],
        "response_mask": [1, 1, 0, 0, 1],
    }
    one = opened([whole], bw.Advantages(gamma=0.9), batch_size=1).get_batch()
    other = opened([split], bw.Advantages(gamma=0.9), batch_size=1).get_batch()
    np.testing.assert_allclose(
        one.metadata["advantages"][one.loss_mask > 0], other.metadata["advantages"][other.loss_mask > 0]
    )


def test_a_dialect_brings_its_conventions():
    data = rollouts()
    ours, theirs = opened(data, shuffle=False), opened(data, bw.Advantages(dialect="verl"), shuffle=False)
    assert "whitened over the global batch, as verl does" in repr(theirs)
    batch = theirs.get_batch()
    mask = batch.loss_mask > 0
    assert abs(batch.metadata["advantages"][mask].mean()) < 1e-6
    assert abs(batch.metadata["advantages"][mask].var(ddof=1) - 1) < 1e-4
    assert not np.allclose(batch.metadata["advantages"], ours.get_batch().metadata["advantages"])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sizes", [8, bw.Batching(8, balance=True), bw.Batching(tokens=64, multiple=4, balance=(1, 1))])
def test_all_ranks_together_have_the_batch_of_one_and_the_same_whitened_advantages(world, sizes):
    given = {"compute": bw.Advantages(whiten=True), "batch_size": sizes}
    alone = list(opened(rollouts(), **given))
    parts = [list(opened(rollouts(), rank=rank, world_size=world, **given)) for rank in range(world)]
    assert all(len(part) == len(alone) for part in parts)
    for step, whole in enumerate(alone):
        ranks = [part[step] for part in parts]
        rows = np.concatenate([batch.metadata["row"] for batch in ranks])
        weight = np.concatenate([batch.metadata["weight"] for batch in ranks])
        advantages = np.concatenate([batch.metadata["advantages"] for batch in ranks])
        real, counted = whole.metadata["weight"] > 0, weight > 0
        assert sorted(rows[counted]) == sorted(whole.metadata["row"][real])
        mine = dict(zip(rows[counted].tolist(), advantages[counted], strict=True))
        for row, expected in zip(whole.metadata["row"][real].tolist(), whole.metadata["advantages"][real], strict=True):
            assert mine[row].tobytes() == expected.tobytes()
        for name in ("global_tokens", "global_sequences", "global_groups"):
            assert {batch.metadata[name] for batch in ranks} == {whole.metadata[name]}
        assert whole.metadata["global_tokens"] == whole.loss_mask.sum()
        assert {batch.input_ids.shape[1] for batch in ranks} == {whole.input_ids.shape[1]}


def test_whitening_is_that_of_the_function_over_the_whole_batch():
    plain, white = opened(rollouts()).get_batch(), opened(rollouts(), bw.Advantages(whiten=True)).get_batch()
    expected = whiten(plain.metadata["advantages"].astype(np.float64), plain.loss_mask)
    np.testing.assert_allclose(white.metadata["advantages"], expected, atol=1e-5)


@pytest.mark.parametrize("sizes", [8, bw.Batching(tokens=50), bw.Batching(tokens=64, multiple=2, balance=True)])
def test_a_run_goes_on_from_any_step_with_the_batch_that_would_have_come(sizes):
    whole = list(opened(epochs=2, batch_size=sizes).get_iterator())
    loader = opened(epochs=2, batch_size=sizes)
    for step in range(len(whole) - 1):
        state = json.loads(json.dumps(loader.get_batch().metadata["state"]))
        assert state == loader.state_dict()
        other = opened(epochs=2, batch_size=sizes)
        other.load_state_dict(state)
        assert other.step == step + 1
        following = other.get_batch()
        assert following.input_ids.tobytes() == whole[step + 1].input_ids.tobytes()
        assert following.metadata["advantages"].tobytes() == whole[step + 1].metadata["advantages"].tobytes()


def test_a_budget_is_never_exceeded_and_nothing_is_lost():
    loader = opened(rollouts(500, values=False), batch_size=bw.Batching(tokens=100, multiple=3))
    seen = []
    for batch in loader:
        assert batch.input_ids.size <= 100
        assert len(batch) % 3 == 0
        seen += batch.metadata["row"][batch.metadata["weight"] > 0].tolist()
    assert sorted(seen) == list(range(500))


def test_a_sequence_longer_than_the_budget_is_named():
    data = [*rollouts(4, values=False), {**rollouts(1, values=False)[0], "prompt": [1] * 100}]
    with refused(bw.SpecError, "batch_tokens=64", row=4, parameter="batch_tokens", remedy="batch_tokens=1"):
        opened(data, batch_size=bw.Batching(tokens=64))


def test_the_batch_is_the_same_in_every_framework_and_moves_whole():
    torch = pytest.importorskip("torch")
    plain, tensors = opened().get_batch(), opened(framework="torch").get_batch()
    moved = tensors.to("cpu")
    for name in ("advantages", "returns", "rewards", "old_log_probs", "reward", "weight", "group", "row"):
        assert torch.equal(tensors.metadata[name], torch.from_numpy(plain.metadata[name]))
        assert torch.equal(moved.metadata[name], tensors.metadata[name])
    assert tensors.metadata["advantages"].is_contiguous()
    meta = tensors.to("meta")
    assert {meta.metadata[name].device.type for name in ("advantages", "reward", "row")} == {"meta"}


@pytest.mark.parametrize("framework", ["jax", "mlx"])
def test_other_frameworks_get_their_own_arrays(framework):
    plain, other = opened().get_batch(), opened(framework=framework).get_batch()
    assert type(other.metadata["advantages"]).__module__.startswith(framework)
    np.testing.assert_allclose(np.array(other.metadata["advantages"]), plain.metadata["advantages"])
    np.testing.assert_array_equal(np.array(other.targets), plain.targets)


def test_a_column_that_jax_cannot_hold_is_named():
    pytest.importorskip("jax")
    data = [{"prompt": [1], "response": [2], "reward": 1.0, "policy_version": 1 << 40}]
    with refused(bw.SpecError, parameter="policy_version"):
        opened(data, batch_size=1, framework="jax").get_batch()


def test_batches_that_are_kept_do_not_change():
    data = rollouts(400, values=False)
    kept = list(opened(data))
    copies = [(batch.input_ids.copy(), batch.metadata["advantages"].copy()) for batch in opened(data)]
    for batch, (tokens, advantages) in zip(kept, copies, strict=True):
        assert batch.input_ids.tobytes() == tokens.tobytes()
        assert batch.metadata["advantages"].tobytes() == advantages.tobytes()


def test_processes_that_take_turns_give_what_one_gives():
    torch = pytest.importorskip("torch")
    loader = opened(rollouts(64, values=False), framework="torch")
    expected = [batch.input_ids for batch in loader]
    loader.reset()
    found = [batch.input_ids for batch in loader.torch().loader(num_workers=2)]
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_rows_can_be_padded_on_the_left():
    right, left = opened().get_batch(), opened(batch_size=bw.Batching(8, padding_side="left")).get_batch()
    width = right.input_ids.shape[1]
    for row in range(8):
        length = int(right.attention_mask[row].sum())
        for one, other in (
            (right.input_ids, left.input_ids),
            (right.targets, left.targets),
            (right.metadata["advantages"], left.metadata["advantages"]),
        ):
            assert other[row, width - length :].tolist() == one[row, :length].tolist()
        assert left.attention_mask[row].tolist() == [0] * (width - length) + [1] * length


@pytest.mark.parametrize(
    ("pad_to", "width"), [(64, 64), (3, 6), ([8, 64], 8), ([4, 64], 64), ([4], 5), ("max_length", 5), ("longest", 5)]
)
def test_widths_are_those_asked_for_however_short_the_rollouts_are(pad_to, width):
    data = [{"prompt": [1, 2], "response": [3, 4, 5], "reward": 1.0}] * 2
    batch = opened(data, batch_size=bw.Batching(2, pad_to=pad_to)).get_batch()
    assert batch.input_ids.shape == (2, width)
    budget = opened(data, batch_size=bw.Batching(tokens=2 * width, pad_to=pad_to)).get_batch()
    assert budget.input_ids.shape == (2, width)


def test_rows_that_fill_up_the_last_batch_teach_nothing():
    *_, last = opened(rollouts(10, values=False), batch_size=bw.Batching(8, epoch_end="pad"))
    filled = last.metadata["weight"] == 0
    assert filled.sum() == 6
    assert not last.loss_mask[filled].any()
    assert (last.targets[filled] == -100).all()
    assert not last.metadata["advantages"][filled].any()
    assert last.metadata["global_sequences"] == last.metadata["global_rows"] == 2
    assert last.metadata["global_tokens"] == last.loss_mask.sum()


def test_a_loader_is_the_same_in_another_process():
    loader = opened()
    loader.get_batch()
    twin = pickle.loads(pickle.dumps(loader))
    assert twin.get_batch().input_ids.tobytes() == loader.get_batch().input_ids.tobytes()


def test_a_batch_can_be_looked_at(tmp_path):
    data = [{"prompt": "2+2=", "response": "4", "reward": 1.0, "group": 0}] * 2
    batch = bw.RolloutDataLoader(data, "bytes", True, batch_size=2, framework="numpy").get_batch()
    assert "4" in str(bw.look(batch))


def test_the_plan_of_rollouts_can_be_printed():
    assert "rollouts (train)  100.0 %  20 rows" in repr(opened().plan)


def test_a_state_of_other_rollouts_is_refused_and_changes_nothing():
    loader = opened()
    state = opened(rollouts(24, values=False)).state_dict()
    with refused(bw.PlanError, "differs"):
        loader.load_state_dict(state)
    assert loader.position == 0
    with refused(bw.PlanError, "seed=1", parameter="seed"):
        loader.load_state_dict(opened(seed=1).state_dict())


@pytest.mark.parametrize(
    ("opening", "parameter", "remedy"),
    [
        (lambda: opened(compute=bw.Advantages(dialect="verle")), "dialect", "verl"),
        (lambda: opened(compute="gaee"), "compute_advantages", "gae"),
        (lambda: opened(compute="GRPO"), "compute_advantages", "'group_relative'"),
        (lambda: opened(compute="gae"), "compute_advantages", "'values' in each row"),
        (lambda: opened(compute=bw.Advantages(gamma=1.5)), "gamma", "gamma=1.0"),
        (lambda: opened(compute=bw.Advantages(lam=-0.1)), "lam", "lam=1.0"),
        (lambda: opened(compute=bw.Advantages(gamma="high")), "gamma", "gamma=1.0"),
        (lambda: opened(compute=bw.Advantages(kl_coef=math.nan)), "kl_coef", "kl_coef=0"),
        (lambda: opened(compute=bw.Advantages(kl_coef="low")), "kl_coef", "kl_coef=0"),
        (lambda: opened(compute=bw.Advantages(whiten="yes")), "whiten", "whiten=True"),
        (lambda: opened(compute=bw.Advantages(False, whiten=True)), "whiten", "compute_advantages=True"),
        (lambda: opened(max_staleness=2), "max_staleness", "RolloutDataLoader(log, ...)"),
        (lambda: opened(timeout=5), "timeout", "leave out timeout="),
        (lambda: opened(batch_size=bw.Batching(4, tokens=64)), "batch_tokens", "one of them"),
        (lambda: opened(batch_size=bw.Batching(8, multiple=4)), "row_multiple", "tokens="),
        (lambda: opened(batch_size=bw.Batching(tokens=64, epoch_end="wrap")), "epoch_end", "nothing is dropped"),
        (lambda: opened(batch_size=bw.Batching(8, pad_to="widest")), "pad_to", "'longest'"),
    ],
)
def test_settings_that_cannot_work(opening, parameter, remedy):
    with refused(bw.SpecError, parameter=parameter, remedy=remedy):
        opening()


@pytest.mark.parametrize("reward", [1e39, -1e300, [3e38, 3e38]])
def test_a_reward_that_would_be_infinite_in_a_batch_is_refused(reward):
    good = {"prompt": [1], "response": [2, 3], "reward": 1.0 if isinstance(reward, float) else [1.0, 1.0]}
    with refused(bw.SampleError, "32", row=1, column="reward"):
        opened([good, {**good, "reward": reward}])


def test_groups_need_names_and_advantages_need_rewards():
    data = [{"prompt": [1], "response": [2]}] * 8
    with refused(bw.SpecError, column="reward", parameter="compute_advantages"):
        opened(data)
    assert "rewards" not in opened(data, compute=False).get_batch().metadata
    with refused(bw.SpecError, column="group", parameter="compute_advantages"):
        opened([{**row, "reward": 1.0} for row in data], "group_relative")


def test_a_state_serves_as_a_plan_and_so_does_its_file(tmp_path):
    loader = opened(seed=5, batch_size=bw.Batching(8, epoch_end="drop"))
    state = loader.state_dict()
    (tmp_path / "state.json").write_text(json.dumps(state))
    for plan in (state, tmp_path / "state.json", str(tmp_path / "state.json")):
        assert opened(plan=plan).plan == loader.plan
        with refused(bw.PlanError, "of other rollouts", parameter="plan"):
            opened(rollouts(24, values=False), plan=plan)
    with refused(bw.PlanError, parameter="plan"):
        opened(plan=state | {"rollouts": {"log": "x"}})


def test_a_plan_says_the_order_again_and_only_for_the_same_rollouts(tmp_path):
    loader = opened(seed=5, batch_size=bw.Batching(8, epoch_end="drop"))
    loader.plan.save(tmp_path / "plan.json")
    again = opened(plan=tmp_path / "plan.json")
    assert again.plan.fingerprint == loader.plan.fingerprint
    assert again.get_batch().input_ids.tobytes() == loader.get_batch().input_ids.tobytes()
    assert opened(plan=loader).plan == loader.plan
    with refused(bw.PlanError, parameter="plan"):
        opened(rollouts(24, values=False), plan=loader.plan)
    with refused(bw.SpecError, parameter="seed"):
        opened(plan=loader.plan, seed=6)


def test_groups_of_one_are_compared_with_the_mean_of_all():
    data = rollouts(8, group=1, values=False)
    loader = opened(data, shuffle=False)
    assert "advantages by reinforce" in repr(loader)
    advantages = loader.get_batch().metadata["advantages"]
    rewards = np.array([row["reward"] for row in data])
    np.testing.assert_allclose(advantages.max(axis=1) + advantages.min(axis=1), rewards - rewards.mean(), atol=1e-6)
    as_verl = opened(data, bw.Advantages(dialect="verl"))
    assert "advantages by group_relative" in repr(as_verl)  # there a group of one keeps its reward


def test_ranks_that_compute_other_advantages_are_not_in_step():
    one, other, same = (
        opened(compute=bw.Advantages(gamma=gamma)).this_run.settings_to_compare() for gamma in (0.9, 0.8, 0.9)
    )
    assert one != other
    assert one == same


def test_what_the_reference_says_counts_in_the_comparison_too():
    same = {"prompt": [1], "response": [2, 3], "reward": 1.0, "group": 0, "ref_log_probs": [-1.0, -1.0]}
    data = [{**same, "old_log_probs": [-1.0, -1.0]}, {**same, "old_log_probs": [-1.0, -3.0]}]
    batch = opened(data, bw.Advantages("leave_one_out", kl_coef=0.5), batch_size=2, shuffle=False).get_batch()
    assert batch.metadata["advantages"][:, 0].tolist() == [-1.0, 1.0]  # rewards of 1 and 2


def test_a_batch_may_have_more_rows_than_are_looked_up_at_once():
    data = [{"prompt": [n % 100], "response": [n % 77], "reward": 0.0} for n in range(9000)]
    batch = opened(data, False, batch_size=9000).get_batch()
    assert sorted(batch.metadata["row"].tolist()) == list(range(9000))


def test_moments_do_not_depend_on_the_order_of_rows():
    from batchwright.rl.estimate import Advantages
    from batchwright.rollouts import read_rollouts
    from batchwright.rollouts.aligned import RolloutRows

    rows = RolloutRows(read_rollouts(rollouts(2000)), Advantages(whiten=True))
    order = np.arange(2000)
    expected = rows.moments(order)
    for seed in range(5):
        assert rows.moments(np.random.default_rng(seed).permutation(order)) == expected
