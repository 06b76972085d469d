"""Batches from a rollout log: the order of the journal, on any number of ranks, again after any restart."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from rollout_jobs import BATCH_ROWS, GROUP_SIZE, PROMPTS, generate, train

import batchwright as bw
from batchwright.rl.advantage import group_relative
from batchwright.rollouts.log.status import status
from refusals import refused


@pytest.fixture
def log(tmp_path):
    with bw.RolloutLog(tmp_path / "log", prompts=[f"prompt {n}: " for n in range(20)], group_size=4, seed=3) as log:
        yield log


def answer(log, count: int, version: int | None = 0) -> list[int]:
    """Answer so many prompts: ids that say which prompt, which answer and which attempt they are of."""
    jobs = log.next_prompts(count)
    for job in jobs:
        responses = [[job.ordinal, number, job.attempt][: 1 + (job.ordinal + number) % 3] for number in range(4)]
        rewards = [float((job.ordinal + number) % 5) for number in range(4)]
        log.add(job, responses=responses, rewards=rewards, policy_version=version)
    return [job.ordinal for job in jobs]


def opened(log, compute=True, **settings):
    return bw.RolloutDataLoader(log, "bytes", compute, **({"batch_size": 8, "framework": "numpy"} | settings))


def ordinals(batch) -> list[int]:
    order = np.argsort(batch.metadata["position"], kind="stable")
    return batch.metadata["ordinal"][order][batch.metadata["weight"][order] > 0].tolist()


def test_rows_come_in_the_order_of_the_journal_with_the_advantages_of_their_whole_group(log):
    answered = answer(log, 5)
    loader = opened(log, batch_size=6)
    found, worth = [], []
    for _ in range(3):
        batch = loader.get_batch()
        found += ordinals(batch)
        worth += ((batch.metadata["advantages"] * batch.loss_mask).sum(1) / batch.loss_mask.sum(1)).tolist()
    assert found == [ordinal for ordinal in answered for _ in range(4)][:18]
    rewards = [float((ordinal + number) % 5) for ordinal in answered for number in range(4)]
    expected = group_relative(rewards, np.repeat(answered, 4))
    np.testing.assert_allclose(worth, expected[:18], atol=1e-5)
    assert "advantages by group_relative" in repr(loader)


def test_what_is_not_there_yet_is_said_and_comes_later(log):
    answer(log, 1)
    loader = opened(log)
    with refused(bw.NotReadyError, "4 of 8 rows", folder=log.path, remedy="timeout=600"):
        loader.get_batch()
    assert loader.position == 0
    answer(log, 1)
    assert len(loader.get_batch()) == 8


@pytest.mark.parametrize(("epoch_end", "rows"), [("short", 8), ("pad", 24)])
def test_the_last_batch_of_a_log_has_the_rows_that_are_left_and_then_it_is_over(log, epoch_end, rows):
    answer(log, 20)
    batches = list(opened(log, batch_size=bw.Batching(24, epoch_end=epoch_end)))
    assert [batch.metadata["global_sequences"] for batch in batches] == [24, 24, 24, 8]
    assert [batch.metadata["global_rows"] for batch in batches] == [24, 24, 24, 8]
    assert batches[-1].metadata["weight"].tolist() == [1] * 8 + [0] * (rows - 8)
    assert not batches[-1].loss_mask[8:].any()
    loader = opened(log, batch_size=bw.Batching(24, epoch_end=epoch_end))
    loader.load_state_dict(batches[-1].metadata["state"])
    with refused(bw.EndOfRun, "80 rows"):
        loader.get_batch()


def test_rows_at_the_end_of_a_log_that_no_batch_has_are_counted(log, caplog):
    answer(log, 20)
    assert len(list(opened(log, batch_size=bw.Batching(24, epoch_end="drop")))) == 3
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "the last 8 rows" in said.getMessage()


def test_ranks_share_the_last_rows_of_a_log_and_none_misses_a_step(log):
    answered = answer(log, 20)  # 80 rows: the last batch has 3, for 5 ranks
    sizes = bw.Batching(11, uneven=True)
    ranks = [opened(log, batch_size=sizes, rank=rank, world_size=5) for rank in range(5)]
    found = []
    for parts in zip(*ranks, strict=True):
        assert all(batch.metadata["weight"].all() or len(batch.input_ids) == 1 for batch in parts)
        assert {batch.metadata["global_rows"] for batch in parts} == {
            int(sum(batch.metadata["weight"].sum() for batch in parts))
        }
        found += [ordinal for batch in parts for ordinal in ordinals(batch)]
    assert found == [ordinal for ordinal in answered for _ in range(4)]
    assert {loader.step for loader in ranks} == {8}


def test_a_restored_trainer_gets_the_same_batches_again_though_others_added_more(log):
    answer(log, 6)
    loader = opened(log)
    first = loader.get_batch()
    state = json.loads(json.dumps(loader.state_dict()))
    assert first.metadata["state"] == state
    second = loader.get_batch()
    answer(log, 6)
    again = opened(log)
    again.load_state_dict(state)
    assert again.step == 1
    assert again.get_batch().input_ids.tobytes() == second.input_ids.tobytes()


def test_another_batch_size_goes_on_at_the_same_row(log):
    answered = answer(log, 20)
    loader = opened(log, batch_size=6)
    loader.get_batch()
    other = opened(log, batch_size=10)
    other.load_state_dict(loader.state_dict())
    assert ordinals(other.get_batch()) == [ordinal for ordinal in answered for _ in range(4)][6:16]


def test_stale_groups_are_not_used_and_their_prompts_come_again_and_a_replay_repeats_that(log):
    old, new = answer(log, 2, version=0), answer(log, 2, version=3)
    loader = opened(log, max_staleness=2)
    batch = loader.get_batch(policy_version=3)
    assert ordinals(batch) == [ordinal for ordinal in new for _ in range(4)]
    assert [job.ordinal for job in log.next_prompts(2)] == sorted(old)
    replay = opened(log)  # no filter, another version: the decision is on record
    assert replay.get_batch(policy_version=0).input_ids.tobytes() == batch.input_ids.tobytes()


def test_a_policy_version_cannot_go_backwards(log):
    answer(log, 4, version=5)
    loader = opened(log)
    loader.get_batch(policy_version=5)
    with refused(bw.SpecError, parameter="policy_version"):
        loader.get_batch(policy_version=4)
    assert loader.position == 8
    loader.load_state_dict(loader.state_dict())
    assert len(loader.get_batch(policy_version=4)) == 8  # restored weights may be older


def test_a_trainer_that_counts_its_steps_may_go_on_with_a_larger_batch(log):
    answer(log, 20)
    loader = opened(log, batch_size=4, max_staleness=9)
    states = []
    for step in range(8):
        loader.get_batch(policy_version=step)
        states.append(loader.state_dict())
    larger = opened(log, batch_size=8, max_staleness=9)
    larger.load_state_dict(states[3])
    for _ in range(6):
        larger.get_batch(policy_version=larger.step)


def test_each_group_is_used_as_often_as_the_log_says(tmp_path):
    prompts = [f"{n}" for n in range(6)]
    settings = {"group_size": 4, "samples_per_insert": 3, "round_groups": 2}
    with bw.RolloutLog(tmp_path / "log", prompts=prompts, **settings) as log:
        answered = answer(log, 6)
        batches = list(opened(log))
    assert len(batches) == 9
    rounds = [sorted({*ordinals(batch)}) for batch in batches]
    assert rounds == [sorted(answered[n : n + 2]) for n in (0, 2, 4) for _ in range(3)]


def test_a_budget_takes_as_many_rows_as_fit(log):
    answered = answer(log, 20)
    loader = opened(log, batch_size=bw.Batching(tokens=100, multiple=4))
    found, filled = [], []
    for step, batch in enumerate(loader):
        assert batch.input_ids.size <= 100
        assert len(batch) % 4 == 0
        assert loader.step == step + 1
        found += ordinals(batch)
        filled = [*filled, bool((batch.metadata["weight"] == 0).any())]
    assert found == [ordinal for ordinal in answered for _ in range(4)]
    assert loader.batch_tokens == 100
    assert not any(filled[:-1])  # only where rows run out


def test_a_budget_keeps_its_multiple_where_a_long_row_comes_in_between(tmp_path):
    with bw.RolloutLog(tmp_path / "log", prompts=["ten bytes.", "ten bytes!"], group_size=4) as log:
        for job, lengths in zip(log.next_prompts(2), ([1, 1, 1, 1], [1, 1, 30, 1]), strict=True):
            log.add(job, responses=[[7] * length for length in lengths], rewards=[0.0] * 4)
        batches = list(opened(log, batch_size=bw.Batching(tokens=170, multiple=4)))  # 6 rows fit, and 8 do not
    assert [batch.input_ids.shape for batch in batches] == [(4, 11), (4, 40)]
    assert all(batch.metadata["weight"].all() for batch in batches)


def test_a_budget_goes_on_from_any_step(log):
    answer(log, 20)
    whole = list(opened(log, batch_size=bw.Batching(tokens=60)))
    for step, batch in enumerate(whole[:-1]):
        loader = opened(log, batch_size=bw.Batching(tokens=60))
        loader.load_state_dict(json.loads(json.dumps(batch.metadata["state"])))
        assert loader.step == step + 1
        assert loader.get_batch().input_ids.tobytes() == whole[step + 1].input_ids.tobytes()


def test_a_budget_waits_until_it_is_known_that_no_more_rows_fit(log):
    answer(log, 1)
    loader = opened(log, batch_size=bw.Batching(tokens=2000))
    with pytest.raises(bw.NotReadyError):
        loader.get_batch()
    answer(log, 19)
    assert loader.get_batch().metadata["global_sequences"] == 80


def test_a_row_of_a_log_that_is_longer_than_the_budget_is_named(log):
    (job,) = log.next_prompts(1)
    log.add(job, responses=[[1] * 90] + [[1] * 3] * 3, rewards=[0.0] * 4)
    with refused(
        bw.SpecError, "batch_tokens=60", ordinal=job.ordinal, parameter="batch_tokens", remedy="batch_tokens="
    ):
        opened(log, batch_size=bw.Batching(tokens=60)).get_batch()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sizes", [8, bw.Batching(8, balance=True), bw.Batching(tokens=100, multiple=4)])
def test_ranks_together_have_the_batch_of_one(log, world, sizes):
    answer(log, 20)
    given = {"compute": bw.Advantages(whiten=True), "batch_size": sizes}
    alone = list(opened(log, **given))
    parts = [list(opened(log, rank=rank, world_size=world, **given)) for rank in range(world)]
    for step, whole in enumerate(alone):
        ranks = [part[step] for part in parts]
        rows = {}
        for batch in (whole, *ranks):
            for row in range(len(batch)):
                if batch.metadata["weight"][row]:
                    rows.setdefault(int(batch.metadata["position"][row]), []).append(
                        batch.input_ids[row].tobytes() + batch.metadata["advantages"][row].tobytes()
                    )
        assert all(len(copies) == 2 and copies[0] == copies[1] for copies in rows.values())
        assert len(rows) == whole.metadata["global_sequences"]
        for name in ("global_tokens", "global_groups"):
            assert {batch.metadata[name] for batch in ranks} == {whole.metadata[name]}


@pytest.mark.parametrize(
    ("settings", "parameter"),
    [
        ({"seed": 1}, "seed"),
        ({"shuffle": True}, "shuffle"),
        ({"epochs": 2}, "epochs"),
        ({"group_size": 4}, "group_size"),
        ({"columns": {"response": "r"}}, "columns"),
        ({"batch_size": bw.Batching(8, pad_to="max_length")}, "pad_to"),
        ({"batch_size": bw.Batching(tokens=64), "world_size": 2, "rank": 0}, "row_multiple"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"batch_size": bw.Batching(8, epoch_end="wrap")}, "epoch_end"),
    ],
)
def test_settings_that_a_log_cannot_have(log, settings, parameter):
    with refused(bw.SpecError, parameter=parameter):
        opened(log, **settings)


def test_a_state_of_another_log_or_of_a_list_is_refused(log, tmp_path):
    answer(log, 2)
    with bw.RolloutLog(tmp_path / "other", prompts=["a", "b"], group_size=4) as other:
        state = opened(other).state_dict()
    with refused(bw.PlanError, "differs", folder=log.path):
        opened(log).load_state_dict(state)
    rows = [{"prompt": [1], "response": [2], "reward": 1.0}] * 8
    state = bw.RolloutDataLoader(rows, framework="numpy").state_dict()
    with refused(bw.PlanError, "rollouts", folder=log.path):
        opened(log).load_state_dict(state)


def test_a_state_that_used_more_than_the_log_has_is_refused(log, tmp_path):
    answer(log, 6)
    shutil.copytree(log.path, tmp_path / "copy")
    loader = opened(log)
    loader.get_batch()
    with bw.RolloutLog(tmp_path / "copy") as copy:
        older = opened(copy)
        with refused(bw.PlanError, "8 rows", folder=copy.path):
            older.load_state_dict(loader.state_dict())
        assert older.position == 0


def test_a_group_that_the_trainer_cannot_read_is_named_and_can_be_passed_by(log):
    for job in log.next_prompts(5):
        log.add(job, [[65], [65], [900 if job.ordinal == 1 else 65], [65]], [1.0, 0.0, 0.0, 0.0])
    loader = opened(log)
    with refused(bw.SampleError, row=15, column="response", remedy="loader.seek(position=8)") as error:
        loader.get_batch()
    assert (error.value.where["ordinal"], error.value.where["answer"]) == (1, 2)
    assert loader.position == 0
    loader.seek(position=8)
    assert ordinals(loader.get_batch()) == [2] * 4 + [3] * 4


def test_a_log_whose_groups_have_one_row_has_no_groups_to_compare(tmp_path):
    with bw.RolloutLog(tmp_path / "log", [str(n) for n in range(4)], group_size=1) as log:
        for job in log.next_prompts(4):
            log.add(job, [[65]], [float(job.ordinal)])
        batch = opened(log, batch_size=4).get_batch()
        np.testing.assert_allclose(batch.metadata["advantages"].sum(1), [-1.5, -0.5, 0.5, 1.5])
        asked = bw.RolloutDataLoader(log, "bytes", "group_relative", batch_size=4, framework="numpy")
        assert not asked.get_batch().metadata["advantages"].any()


def test_a_trainer_that_starts_again_says_its_version_anew(log):
    answer(log, 4)
    loader = opened(log)
    loader.get_batch(policy_version=3)
    loader.reset()
    loader.policy_version = 0
    assert loader.get_batch().metadata["position"].tolist() == list(range(8))


def test_what_comes_before_a_row_that_is_too_long_is_handed_over_first(log):
    for job in log.next_prompts(4):
        log.add(job, [[65] * (90 if job.ordinal == 1 and n == 2 else 2) for n in range(4)], [1.0, 0.0, 0.0, 0.0])
    loader = opened(log, batch_size=bw.Batching(tokens=64, multiple=2))
    assert [ordinals(loader.get_batch()) for _ in range(2)] == [[0] * 4, [1] * 2]
    with refused(bw.SpecError, "batch_tokens=64", parameter="batch_tokens", row=15, remedy="seek(position=8)") as error:
        loader.get_batch()
    assert (error.value.where["ordinal"], error.value.where["answer"]) == (1, 2)


def test_a_budget_that_finds_its_rows_on_record_decides_nothing(log, tmp_path):
    answer(log, 20, version=9)
    shutil.copytree(log.path, tmp_path / "copy")
    expected = opened(log, batch_size=bw.Batching(tokens=160)).get_batch()
    with bw.RolloutLog(tmp_path / "copy") as copy:
        num_groups = copy.take(len(expected) // 4 + 1, policy_version=3)  # up to the row that does not fit any more
        found = opened(copy, batch_size=bw.Batching(tokens=160)).get_batch(
            policy_version=2
        )  # it looks further, to find what fits
        assert found.input_ids.tolist() == expected.input_ids.tolist()
        assert copy.num_taken == num_groups


def test_a_budget_is_cut_alike_where_another_rank_takes_the_last_groups_meanwhile(log, monkeypatch):
    answer(log, 20)
    with bw.RolloutLog(log.path) as other:
        alone = opened(other, batch_size=bw.Batching(tokens=160))
        take_uses = log.take_uses

        def and_meanwhile(last_use, **settings):
            have = 0 if other.num_taken == 0 else take_uses(last_use, **settings)
            other.take(20)
            return have

        monkeypatch.setattr(log, "take_uses", and_meanwhile)
        found = opened(log, batch_size=bw.Batching(tokens=160)).get_batch()
        assert found.input_ids.tolist() == alone.get_batch().input_ids.tolist()


def test_worker_processes_are_refused(log):
    answer(log, 4)
    with refused(bw.SpecError, parameter="num_workers"):
        next(opened(log, framework="torch").turns(0, 2))


def test_looking_at_the_next_batch_leaves_the_loader_where_it_is(log):
    answer(log, 20)
    loader = opened(log, batch_size=bw.Batching(tokens=60))
    loader.get_batch()
    state = loader.state_dict()
    loader.check_sync()
    assert loader.state_dict() == state


# Real processes


def test_killed_ranks_and_generators_lose_nothing_and_use_nothing_twice(tmp_path, processes):
    folder, total = tmp_path / "log", len(PROMPTS) * GROUP_SIZE
    bw.RolloutLog(folder, prompts=PROMPTS, group_size=GROUP_SIZE, seed=1).close()
    uses: dict[int, list[int]] = {}  # position -> (prompt, answer), whoever said it
    state, used_before = None, 0
    for number, world in enumerate((2, 3, 1, 2)):
        is_last = number == 3
        ranks = [f"rank-{number}-{rank}" for rank in range(world)]
        generators = [f"generator-{number}-{n}" for n in range(2)]
        for name in generators:
            processes.start(name, generate, folder)
        for rank, name in enumerate(ranks):
            # Of 11 steps, so that some are left for the last.
            processes.start(name, train, folder, rank, world, state, None if is_last else 3)
        if is_last:
            processes.finish(*ranks, *generators)
        else:
            processes.wait_for_lines(ranks, 1)
            processes.pause(0.05)
            processes.kill(*ranks, *generators)
        steps: dict[int, list[dict]] = {}
        for line in processes.said(*ranks):
            steps.setdefault(line["step"], []).append(line)
        whole = {step: lines for step, lines in steps.items() if len(lines) == world}
        for step, lines in steps.items():
            assert len({json.dumps([line["state"], line["tokens"]]) for line in lines}) == 1, f"step {step}"
            for position, *prompt_and_answer in (row for line in lines for row in line["rows"]):
                assert uses.setdefault(position, prompt_and_answer) == prompt_and_answer
        for step, lines in whole.items():
            positions = sorted(row[0] for line in lines for row in line["rows"])
            assert positions == list(range(step * BATCH_ROWS, min((step + 1) * BATCH_ROWS, total)))
        if not is_last:
            checkpoint = processes.chance.choice(sorted(whole))
            assert checkpoint * BATCH_ROWS >= used_before
            state = whole[checkpoint][0]["state"]
            used_before = state["position"]
    assert sorted(uses) == list(range(total))
    assert sorted(map(tuple, uses.values())) == [(p, a) for p in range(len(PROMPTS)) for a in range(GROUP_SIZE)]
    found = status(folder)
    assert (found["lost"], found["used_twice"]) == ([], [])


def test_the_folder_of_a_log_is_no_file_of_rollouts(tmp_path):
    bw.RolloutLog(tmp_path / "log", prompts=["a"], group_size=2).close()
    with refused(bw.SpecError, parameter="rollout_data", remedy="RolloutDataLoader(RolloutLog("):
        bw.RolloutDataLoader(tmp_path / "log", "bytes", True, max_staleness=2)
