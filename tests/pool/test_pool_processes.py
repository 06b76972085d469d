"""A mixed shard pool in real processes: ranks and workers share an epoch, are killed, and go on as other numbers."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain, islice

import pytest
from pool_jobs import (
    BATCH,
    CHECKPOINT_STEPS,
    open_pool,
    run_rank,
    train_past_a_dead_worker,
    train_until_killed,
    write_shards,
)

from batchwright.base.errors import PlanError, SpecError
from harness import descendants, is_running, wait_for
from refusals import refused

pytest.importorskip("torch")

SIZES = [23, 40, 1, 31, 40, 23, 40, 31, 2, 40]
NUM_ROWS = 271


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    assert sum(SIZES) == NUM_ROWS
    return write_shards(tmp_path_factory.mktemp("pool") / "npz", SIZES)


@pytest.fixture(scope="module")
def jsonl_shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("pool") / "jsonl", [37, 30], "jsonl")


def start_ranks(processes, folder, job):
    """The names of a job's ranks."""
    folder.mkdir(parents=True)
    names = ["-".join([*folder.parts[-2:], str(rank)]) for rank in range(job["world_size"])]
    for rank, name in enumerate(names):
        processes.start(name, run_rank, str(folder), job, rank)
    return names


@pytest.fixture
def run(processes):
    """run(folder, job): what each rank of a job was handed, its lines."""

    def ran(folder, job):
        ranks = start_ranks(processes, folder, job)
        processes.finish(*ranks)
        return [processes.said(name) for name in ranks]

    return ran


def ids_of(lines):
    return [id_ for line in lines for id_ in line["ids"]]


def check_states_are_equal(ranks):
    """After as many batches, the ranks have the same state."""
    for step, states in enumerate(zip(*([line["state"] for line in lines] for lines in ranks), strict=False)):
        assert all(state == states[0] for state in states), f"step {step}: {[state['by_lane'] for state in states]}"


# Ranks that live


@pytest.mark.parametrize(("world_size", "num_workers"), [(2, 0), (2, 2), (4, 0), (4, 2)])
def test_ranks_are_handed_every_position_once_and_have_one_state(run, shards, tmp_path, world_size, num_workers):
    job = {"shards": shards, "world_size": world_size, "num_workers": num_workers}
    ranks = run(tmp_path / "job", job)
    assert sorted(chain(*map(ids_of, ranks))) == list(range(NUM_ROWS))
    assert all(line["state"]["lanes"] == world_size * max(1, num_workers) for line in chain(*ranks))
    check_states_are_equal(ranks)


def test_ranks_whose_shards_must_be_decoded_to_count_them_have_one_state(run, jsonl_shards, tmp_path):
    ranks = run(tmp_path / "job", {"shards": jsonl_shards, "world_size": 2, "num_workers": 1})
    assert sorted(chain(*map(ids_of, ranks))) == list(range(67))
    assert [lines[-1]["state"]["epoch"] for lines in ranks] == [1, 1]
    check_states_are_equal(ranks)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_with_drop_last_real_ranks_have_equally_many_whole_batches(run, shards, tmp_path, num_workers):
    settings = {"drop_last": True, "max_examples_unaugmented": 259}  # a rank has 130 of them, the other 129
    ranks = run(tmp_path / "job", {"shards": shards, "settings": settings, "world_size": 2, "num_workers": num_workers})
    assert [len(line["ids"]) for line in chain(*ranks)] == [BATCH] * (2 * 16)
    assert [len(lines) for lines in ranks] == [16, 16]
    assert max(Counter(chain(*map(ids_of, ranks))).values()) == 1
    check_states_are_equal(ranks)


@pytest.mark.parametrize("num_rows", [1, 8, 31, 32, 33, 63, 64, 65, 95, 96, 97, 255, 271])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_with_drop_last_ranks_have_equally_many_batches_for_any_size(shards, num_rows, world_size):
    job = {"shards": shards, "settings": {"drop_last": True, "max_examples_unaugmented": num_rows}}
    datasets = [open_pool(job, rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = [[batch["id"].tolist() for batch in ds] for ds in datasets]
    assert [len(of_rank) for of_rank in batches] == [num_rows // world_size // BATCH] * world_size
    assert all(len(batch) == BATCH for batch in chain(*batches))
    assert [len(ds) for ds in datasets] == [len(of_rank) for of_rank in batches]


@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_state_of_any_rank_after_any_step_restores_all(shards, drop_last, after):
    """4 ranks go on as fewer: nothing is lost, nothing comes twice, and with drop_last steps stay equally many."""
    job = {"shards": shards, "settings": {"drop_last": drop_last}}
    for steps in (1, 2, 5, 7):
        before = [open_pool(job, rank=rank, world_size=4) for rank in range(4)]
        handed = [batch["id"].tolist() for ds in before for batch in islice(ds, steps)]
        states = [ds.state_dict() for ds in before]
        assert all(state == states[0] for state in states)
        goes_on = job | {"state": json.loads(json.dumps(states[-1]))}
        resumed = [open_pool(goes_on, rank=rank, world_size=after) for rank in range(after)]
        rest = [[batch["id"].tolist() for batch in ds] for ds in resumed]
        ids = [*chain(*handed), *chain(*chain(*rest))]
        if drop_last:
            assert len({*ids}) == len(ids) >= NUM_ROWS // (4 * BATCH) * 4 * BATCH
            assert len({len(of_rank) for of_rank in rest}) == 1
        else:
            assert sorted(ids) == list(range(NUM_ROWS))


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_ranks_with_workers_have_one_state_after_a_change_of_batch_size(shards, steps):
    """Two of four lanes are behind, and each is one worker's: torch asks that worker no more often than the other."""
    first = [open_pool({"shards": shards}, rank=rank, world_size=2).loader(num_workers=2) for rank in range(2)]
    handed = [batch["id"].tolist() for loader in first for batch in islice(loader, 1)]
    goes_on = {"shards": shards, "state": first[0].state_dict()}
    second = [open_pool(goes_on, rank=n, world_size=2).loader(num_workers=2, batch_size=3) for n in range(2)]
    handed += [batch["id"].tolist() for loader in second for batch in islice(loader, steps)]
    states = [loader.state_dict() for loader in second]
    assert states[0] == states[1]
    rest = [batch["id"].tolist() for batch in open_pool({"shards": shards, "state": states[0]})]
    assert sorted(chain(*handed, *rest)) == list(range(NUM_ROWS))


def test_a_number_of_ranks_that_does_not_divide_the_lanes_is_refused(shards):
    first = open_pool({"shards": shards}, rank=0, world_size=4)
    next(iter(first))
    state = first.state_dict()
    ds = open_pool({"shards": shards, "state": state}, rank=2, world_size=3)
    with refused(PlanError, lanes=4, parameter="world_size", remedy="1, 2, 4"):
        next(iter(ds))
    assert ds.state_dict() == state


def test_ranks_that_would_each_draw_a_seed_are_refused(shards, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ds = open_pool({"shards": shards}, random_seed=None)
    with refused(SpecError, "random_seed=None", parameter="random_seed"):
        next(iter(ds))


# Ranks that are killed


def run_and_kill(processes, folder, job):
    """The lines of each rank, and rank 0's last checkpoint. All were killed at some moment after the first one."""
    ranks = start_ranks(processes, folder, job | {"wait_at_step": 6})
    processes.wait_for_lines(ranks, processes.chance.randint(CHECKPOINT_STEPS, 4))
    processes.wait_for("checkpoint", (folder / "checkpoint.json").exists)
    processes.pause(0.06)
    processes.kill(*ranks)
    checkpoint = json.loads((folder / "checkpoint.json").read_bytes())
    return [processes.said(name) for name in ranks], checkpoint["step"], checkpoint["state"]


def check_a_killed_job(processes, run, shards, folder):
    """4 ranks x 1 worker, then 2 ranks, then 1. Returns how many batches were repeated."""
    job, kept, lost, chance = {"shards": shards}, [], [], processes.chance
    for life, (world_size, num_workers) in enumerate([(4, 1), (2, chance.choice([0, 1, 2]))]):
        job |= {"world_size": world_size, "num_workers": num_workers}
        ranks, step, state = run_and_kill(processes, folder / str(life), job)
        kept += [line["ids"] for lines in ranks for line in lines[:step]]
        lost += [line["ids"] for lines in ranks for line in lines[step:]]
        assert state["lanes"] == 4
        assert len(ranks[0]) - step <= CHECKPOINT_STEPS
        job |= {"state": state}
    if job["state"]["epoch"] == 0:  # and not killed at the end of the epoch
        (last,) = run(folder / "last", job | {"world_size": 1, "num_workers": chance.choice([0, 1, 2, 4])})
        kept += [line["ids"] for line in last]

    assert sorted(chain(*kept)) == list(range(NUM_ROWS))
    at_start = state | {"epoch": 0, "drawn": 0, "by_lane": [0] * 4}
    without_interruption = [batch["id"].tolist() for batch in open_pool({"shards": shards, "state": at_start})]
    assert sorted(kept) == sorted(without_interruption)
    assert all(batch in kept for batch in lost)  # they came again, as they were
    return len(lost)


def test_a_job_that_is_killed_goes_on_with_fewer_ranks_and_loses_nothing(processes, run, shards, tmp_path):
    check_a_killed_job(processes, run, shards, tmp_path / "job")


@pytest.mark.slow
def test_jobs_that_are_killed_at_many_moments_lose_nothing(processes, run, shards, tmp_path):
    num_repeated = [check_a_killed_job(processes, run, shards, tmp_path / str(number)) for number in range(25)]
    assert sum(num_repeated) > 0  # moments between two checkpoints were among them


def test_a_dead_worker_is_an_error_and_its_pass_goes_on_exactly_from_the_state(processes, shards):
    job = {"shards": shards}
    processes.start("trainer", train_past_a_dead_worker, job)
    processes.finish("trainer")
    (told,) = processes.said("trainer")
    assert told["raised"] is not None

    at_start = told["state"] | {"drawn": 0, "by_lane": [0, 0]}
    whole = [batch["id"].tolist() for batch in open_pool(job | {"state": at_start})]
    num_handed = told["state"]["drawn"] // BATCH
    # torch's signal handler can raise between a batch and the line that records it
    assert num_handed - len(told["handed"]) in (0, 1)
    assert told["handed"] == whole[: len(told["handed"])]
    assert told["rest"] == whole[num_handed:]


@pytest.mark.parametrize(("num_workers", "depth"), [(0, 1), (2, 2)])
def test_a_killed_trainer_takes_its_workers_and_decoders_with_it(processes, tmp_path, num_workers, depth):
    """Positions of 32 KB: a shard is more than what is read ahead, so a decoder waits in the middle of one."""
    job = {"shards": write_shards(tmp_path / "large", [400, 400], "jsonl", cells=4096), "num_workers": num_workers}
    processes.start("trainer", train_until_killed, job)
    processes.wait_until_said("trainer", drawn=True)

    def running():
        found = descendants(processes.pid("trainer"))
        return max(found.values(), default=0) == depth and all(map(is_running, found)) and found

    pids = processes.wait_for("decoders", running)
    processes.kill("trainer")
    wait_for("end of all", lambda: not any(map(is_running, pids)), lambda: f"{pids}\n{processes.told()}")
