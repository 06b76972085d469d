"""Who am I among how many: as given, else a mesh, else torch.distributed, else the environment, else alone."""

from __future__ import annotations

import logging

import pytest

import batchwright as bw
from batchwright.base.errors import SpecError
from batchwright.batches.ranks import Ranks, find_ranks
from refusals import refused


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def as_if_launched(monkeypatch, rank, world_size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)


def test_alone_is_rank_0_of_1():
    assert find_ranks() == Ranks(0, 1, "nothing says otherwise")


def test_the_launchers_environment_is_found(monkeypatch):
    as_if_launched(monkeypatch, "3", "8")
    assert find_ranks() == Ranks(3, 8, "the environment: RANK, WORLD_SIZE")


def test_what_is_given_beats_the_environment(monkeypatch):
    as_if_launched(monkeypatch, "3", "8")
    assert find_ranks(1, 2) == Ranks(1, 2, "rank=, world_size=")


# SLURM: srun sets the step's own number of tasks, in each task that it starts.


def as_if_under_slurm(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_a_task_that_srun_started_is_found(monkeypatch):
    as_if_under_slurm(monkeypatch, PROCID="5", STEP_NUM_TASKS="8", NTASKS="8", JOB_NAME="train", NODEID="1")
    assert find_ranks() == Ranks(5, 8, "the environment: SLURM_PROCID, SLURM_STEP_NUM_TASKS")


def test_a_step_smaller_than_its_job_counts_its_own_tasks(monkeypatch):
    as_if_under_slurm(monkeypatch, PROCID="1", STEP_NUM_TASKS="2", NTASKS="16")
    assert find_ranks() == Ranks(1, 2, "the environment: SLURM_PROCID, SLURM_STEP_NUM_TASKS")


def test_an_srun_inside_an_interactive_allocation_is_found(monkeypatch):
    as_if_under_slurm(monkeypatch, PROCID="3", STEP_NUM_TASKS="4", NTASKS="4", JOB_NAME="interactive")
    assert find_ranks() == Ranks(3, 4, "the environment: SLURM_PROCID, SLURM_STEP_NUM_TASKS")


@pytest.mark.parametrize("shell", [{"PROCID": "0", "NTASKS": "8"}, {"NTASKS": "8", "JOB_NAME": "interactive"}])
def test_one_process_of_a_batch_script_or_an_salloc_shell_is_alone(monkeypatch, shell):
    as_if_under_slurm(monkeypatch, JOB_ID="77", **shell)
    assert find_ranks() == Ranks(0, 1, "nothing says otherwise")


def test_torchrun_inside_an_srun_task_beats_slurm(monkeypatch):
    as_if_under_slurm(monkeypatch, PROCID="1", STEP_NUM_TASKS="2")
    as_if_launched(monkeypatch, "12", "16")
    assert find_ranks() == Ranks(12, 16, "the environment: RANK, WORLD_SIZE")


def test_a_slurm_variable_that_is_not_a_number_is_named(monkeypatch):
    as_if_under_slurm(monkeypatch, PROCID="1", STEP_NUM_TASKS="2(x3)")
    with refused(SpecError, "'2(x3)'", parameter="SLURM_STEP_NUM_TASKS"):
        find_ranks()


JAX_SCRIPT = """
    import json, os
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from jax._src import xla_bridge
    from batchwright.batches.ranks import find_ranks

    me, address = int(os.environ["RANK"]), f"127.0.0.1:{os.environ['MASTER_PORT']}"
    os.environ.update(RANK="7", WORLD_SIZE="9")     # of some outer launcher: what was set up here knows better
    made = [find_ranks()]
    jax.distributed.initialize(address, num_processes=2, process_id=me)
    made.append(find_ranks())
    is_started = xla_bridge.backends_are_initialized()
    jax.distributed.shutdown()
    print(json.dumps([*([one.rank, one.world_size, one.found_in] for one in made), is_started]))
"""


def test_jax_distributed_is_found_and_no_backend_started_by_asking(launch):
    for rank, (before, after, is_started) in enumerate(launch(JAX_SCRIPT, 2)):
        assert before == [7, 9, "the environment: RANK, WORLD_SIZE"]
        assert after == [rank, 2, "jax.distributed"]
        assert not is_started


@pytest.mark.parametrize(("given", "missing"), [({"rank": 0}, "world_size"), ({"world_size": 2}, "rank")])
def test_one_of_the_two_numbers_alone_is_refused(given, missing):
    with refused(SpecError, parameter=missing):
        find_ranks(**given)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(rank, world_size):
    with refused(SpecError, f"rank {rank} of {world_size}", "rank=, world_size=", parameter="rank"):
        find_ranks(rank, world_size)


def test_an_environment_that_is_not_a_number_names_the_variable(monkeypatch):
    as_if_launched(monkeypatch, "first", "2")
    with refused(SpecError, "'first'", parameter="RANK"):
        find_ranks()


def test_a_mesh_of_another_kind_is_refused_by_name():
    with refused(SpecError, "list", parameter="mesh", remedy="init_device_mesh"):
        find_ranks(mesh=[0, 1])


def test_the_first_log_line_says_which_rank_and_why(small_store, monkeypatch, caplog):
    as_if_launched(monkeypatch, "1", "2")
    with caplog.at_level(logging.INFO, logger="batchwright"):
        bw.PretrainDataLoader(small_store, chunk_size=16)
    assert all(named in caplog.messages[0] for named in ("PretrainDataLoader", "rank 1 of 2", "RANK, WORLD_SIZE"))


# What two processes of one gloo group see. `made` is filled by the script itself, so that one launch serves all tests.
RANK_SCRIPT = """
    import json, logging, os, sys, warnings
    warnings.simplefilter("ignore")
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    import batchwright as bw
    from batchwright.batches.ranks import find_ranks
    from batchwright.base.errors import SpecError

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("batchwright").addHandler(handler)
    logging.getLogger("batchwright").setLevel(logging.INFO)

    def ranks(**given):
        try:
            found = find_ranks(**given)
        except SpecError as error:
            return [error.headline, error.remedy]
        return [found.rank, found.world_size, found.found_in]

    def mesh(shape, names=None):
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    me = int(os.environ["RANK"])
    made = {"before init": ranks()}
    dist.init_process_group("gloo")
    os.environ.update(RANK="7", WORLD_SIZE="9")     # of some outer launcher: the initialised group knows better
    made["after init"] = ranks()
    made["explicit"] = ranks(rank=0, world_size=1)
    made["1-D"] = ranks(mesh=mesh((2,)))
    made["dp x tp = 2 x 1"] = ranks(mesh=mesh((2, 1), ("dp", "tp")))
    made["dp x tp = 1 x 2"] = ranks(mesh=mesh((1, 2), ("dp", "tp")))
    made["tp"] = ranks(mesh=mesh((2,), ("tp",)))
    made["pp x cp"] = ranks(mesh=mesh((1, 2), ("pp", "cp")))
    made["tp of dp x tp"] = ranks(mesh=mesh((1, 2), ("dp", "tp"))["tp"])
    made["pp x mine = 1 x 2"] = ranks(mesh=mesh((1, 2), ("pp", "mine")))
    made["mine of pp x mine"] = ranks(mesh=mesh((1, 2), ("pp", "mine"))["mine"])
    made["2-D without names"] = ranks(mesh=mesh((2, 1)))
    loader = bw.PretrainDataLoader(sys.argv[1], chunk_size=16, batch_size=4)
    made["first line"] = lines[0]
    made["positions"] = next(loader.get_iterator()).metadata["position"].tolist()
    lines.clear()
    two_by_one = bw.Batching(4, mesh=mesh((2, 1), ("dp", "tp")))
    bw.PretrainDataLoader(sys.argv[1], chunk_size=16, batch_size=two_by_one)
    made["first line with a mesh"] = lines[0]
    dist.barrier()      # rank 0 holds the store through which the other's last mesh may still be forming
    dist.destroy_process_group()

    if me == 0:     # larger meshes, seen by each of their ranks in turn: torch's own mesh over its pretended group
        from torch.testing._internal.distributed.fake_pg import FakeStore
        made["2 x 2 x 2"] = []
        for rank in range(8):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
            made["2 x 2 x 2"].append(ranks(mesh=mesh((2, 2, 2), ("dp_replicate", "dp_shard", "tp"))))
            dist.destroy_process_group()
    print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def two_processes(small_store, launch):
    """What each of two real gloo processes, started as torchrun starts them, found."""
    return launch(RANK_SCRIPT, 2, str(small_store))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("before init", [[0, 2, "the environment: RANK, WORLD_SIZE"], [1, 2, "the environment: RANK, WORLD_SIZE"]]),
        ("after init", [[0, 2, "torch.distributed"], [1, 2, "torch.distributed"]]),
        ("explicit", [[0, 1, "rank=, world_size="]] * 2),
        ("1-D", [[0, 2, "mesh= (1 dimension)"], [1, 2, "mesh= (1 dimension)"]]),
        ("dp x tp = 2 x 1", [[0, 2, "mesh= (dp)"], [1, 2, "mesh= (dp)"]]),
        ("dp x tp = 1 x 2", [[0, 1, "mesh= (dp)"]] * 2),  # two tensor-parallel ranks read the same rows
        ("tp", [[0, 1, "mesh= (only tp)"]] * 2),
        ("pp x cp", [[0, 1, "mesh= (only pp, cp)"]] * 2),
        ("tp of dp x tp", [[0, 1, "mesh= (only tp)"]] * 2),
        ("mine of pp x mine", [[0, 2, "mesh= (mine)"], [1, 2, "mesh= (mine)"]]),
    ],
)
def test_real_processes_find_their_rank(two_processes, where, expected):
    assert [made[where] for made in two_processes] == expected


@pytest.mark.parametrize(("where", "has"), [("pp x mine = 1 x 2", "pp, mine"), ("2-D without names", "2")])
def test_a_mesh_whose_data_dimension_is_unknown_says_what_to_pass(two_processes, where, has):
    for made in two_processes:
        headline, remedy = made[where]
        assert headline.endswith(has)
        assert "mesh['yours']" in remedy


def test_replicated_and_sharded_dimensions_together_are_the_data_ranks(two_processes):
    found = "mesh= (dp_replicate, dp_shard)"
    assert two_processes[0]["2 x 2 x 2"] == [[rank // 2, 4, found] for rank in range(8)]


def test_each_real_process_gets_its_own_half_of_the_batch(two_processes):
    assert [made["positions"] for made in two_processes] == [[0, 1], [2, 3]]


def test_the_first_log_line_of_a_real_process_says_where_its_rank_comes_from(two_processes):
    assert [made["first line"] for made in two_processes] == [
        f"PretrainDataLoader: rank {rank} of 2 (torch.distributed)" for rank in range(2)
    ]
    assert [made["first line with a mesh"] for made in two_processes] == [
        f"PretrainDataLoader: rank {rank} of 2 (mesh= (dp))" for rank in range(2)
    ]
