"""All ranks of a run hold the same plan and place, every share has its rank, and replicas get equal batches.

Whoever differs is named, with what differs, on every rank: nobody is left waiting.
"""

from __future__ import annotations

import numpy as np
import pytest

import batchwright as bw
from batchwright.base.errors import SpecError, SyncError
from batchwright.batches.ranks import Standing, compare, digests_of
from refusals import refused

# What processes say, compared: pure, so without processes.


def standing(process, rank, world_size, *, batch=None, failure=None, **settings):
    """One process of a run of `world_size` data ranks."""
    return Standing(
        rank=rank,
        step=3,
        settings={"plan": "3f2a", "position": 24, "batch_size": 8, "world_size": world_size} | settings,
        batch={"input_ids": f"rows of {rank}"} if batch is None else batch,
        failure=failure,
        process=process,
    )


def refusal(standings):
    with refused(SyncError) as caught:
        compare(standings)
    return caught.value


def test_what_agrees_is_reported():
    report = compare([standing(process, process // 2, 2) for process in range(4)])
    assert (report.num_processes, report.world_size, report.num_replicas, report.is_compared) == (4, 2, 2, True)
    assert str(report) == (
        "4 processes in step: plan 3f2a, step 3 (position 24); 2 data ranks, 2 replicas of each with equal next batches"
    )
    assert str(compare([standing(0, 0, 2), standing(1, 1, 2)])).endswith("(position 24); 2 data ranks")


def test_the_one_that_differs_is_named_even_if_it_is_the_first():
    error = refusal([standing(0, 0, 4, batch_size=16), *(standing(n, n, 4) for n in (1, 2, 3))])
    assert error.headline.startswith("rank 0 ")
    assert error.where == {
        "plan": "3f2a",
        "here": "rank 1",
        "there": "rank 0",
        "differs": "batch_size: 8 here, 16 there",
    }


def test_of_many_that_differ_some_are_named():
    error = refusal([standing(n, n, 100, position=24 if n < 90 else 32) for n in range(100)])
    assert "ranks 90, 91, 92, 93, 94, 95, 96, 97 and 2 more" in error.headline
    assert error.where["differs"] == "position: 24 here, 32 there"


def test_a_rank_that_could_not_read_its_next_batch_is_an_error_of_all():
    error = refusal([standing(0, 0, 2), standing(1, 1, 2, batch={}, failure="StoreError: the shard is gone")])
    assert "rank 1" in error.headline
    assert error.where == {"position": 24, "reason": "StoreError: the shard is gone"}


def test_a_share_that_nobody_reads_is_named():
    error = refusal([standing(0, 0, 3), standing(1, 0, 3), standing(2, 2, 3)])
    assert "data rank 1 of 3" in error.headline
    assert error.where == {"differs": "ranks 0, 1 are data rank 0"}
    assert "mesh=" in error.remedy


def test_data_ranks_with_unequal_numbers_of_replicas_are_refused():
    error = refusal([standing(0, 0, 2), standing(1, 0, 2), standing(2, 0, 2), standing(3, 1, 2)])
    assert "data rank 1 of 2" in error.headline
    assert error.where == {"differs": "ranks 0, 1, 2 are data rank 0"}


def test_fields_that_only_one_replica_has_are_named():
    both = {"input_ids": "a", "labels": "b"}
    error = refusal([standing(0, 0, 1, batch=both), standing(1, 0, 1, batch={**both, "position_ids": "c"})])
    assert all(rank in error.headline for rank in ("rank 1 ", "than rank 0", "data rank 0"))
    assert error.where == {"position": 24, "differs": "position_ids"}


@pytest.mark.parametrize("other", [np.array([[1, 3]]), np.array([[1], [2]]), np.array([[1, 2]], np.int32)])
def test_a_digest_tells_values_shapes_and_types_apart(other):
    assert digests_of({"ids": np.array([[1, 2]])}) == digests_of({"ids": np.array([[1, 2]])})
    assert digests_of({"ids": np.array([[1, 2]])}) != digests_of({"ids": other})


# One process


def test_one_loader_alone_says_that_there_is_nothing_to_compare(small_store, open_loader):
    loader = open_loader(small_store)
    loader.get_batch()
    report = loader.check_sync()
    assert not report.is_compared
    assert str(report) == (
        "one process, without torch.distributed: nothing to compare. "
        f"plan {loader.plan.fingerprint}, step 1 (position 12)"
    )


def test_one_of_many_without_a_process_group_is_told_to_set_one_up(small_store, open_loader):
    loader = open_loader(small_store, rank=1, world_size=2)
    with refused(SpecError, "rank 1 of 2", parameter="group", remedy="init_process_group"):
        loader.check_sync()
    assert loader.position == 0


@pytest.mark.parametrize(
    "settings",
    [{}, {"delivery": bw.Delivery(prefetch=2)}, {"tokenizer": "bytes", "streaming": True, "epochs": None}],
)
def test_a_look_at_the_next_batch_moves_nothing(small_store, raw, open_loader, settings):
    path = raw / "code" if settings.get("streaming") else small_store
    asked, never = open_loader(path, **settings), open_loader(path, **settings)
    asked_batches, never_batches = asked.get_iterator(), never.get_iterator()
    for _ in range(6):
        assert np.array_equal(next(asked_batches).input_ids, next(never_batches).input_ids)
        asked.check_sync()
        assert asked.state_dict() == never.state_dict()


# Real processes. `case` is collective: each process opens its own loader, and says what came of check_sync().
SCRIPT = """
    import json, os, sys
    import torch.distributed as dist
    import batchwright as bw

    dist.init_process_group("gloo")
    me, size, made = dist.get_rank(), dist.get_world_size(), {}

    def opened(**given):
        return bw.PretrainDataLoader(sys.argv[1], **({"chunk_size": 16, "batch_size": 12, "seed": 7} | given))

    def case(name, loader, **given):
        try:
            made[name] = str(loader.check_sync(**given))
        except bw.BatchwrightError as error:
            made[name] = [type(error).__name__, error.headline, error.where]

    def broken(task):
        raise OSError("the disk is gone")

    if size == 2:
        case("all well", opened())
        loader = opened(batch_size=bw.Batching(12, sharding="strided"), delivery=bw.Delivery(prefetch=2))
        batches = loader.get_iterator()
        next(batches), next(batches)
        case("in mid run", loader)
        made["goes on"] = next(batches).metadata["position"].tolist()
        case("seed", opened(seed=7 + me))
        loader = opened()
        loader.get_batch() if me == 1 else None
        case("position", loader)
        case("batch_size", opened(batch_size=12 + 2 * me))
        case("epochs", opened(epochs=1 + me))
        case("sharding", opened(batch_size=bw.Batching(12, sharding=("contiguous", "strided")[me])))
        mine = (lambda n, r, w: range(r, n, w), lambda n, r, w: range(w - 1 - r, n, w))[me]
        case("two functions of one name", opened(batch_size=bw.Batching(12, sharding=mine)))
        case("both data rank 0", opened(rank=0, world_size=2))
        case("replicas", opened(rank=0, world_size=1))
        loader = opened()
        if me == 1:
            loader.stream.flow.locate = broken
        case("cannot read", loader)
        loader = opened()
        loader.seek(position=loader.plan.epoch_rows)
        case("over", loader)
        alone = dist.new_group([0])
        case("group", opened(rank=0, world_size=1), group=alone)
        case("after all errors", opened())
    else:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        meshed = bw.Batching(12, mesh=mesh)
        loader = opened(batch_size=meshed)
        case("all well", loader)
        made["rows"] = loader.get_batch().metadata["position"].tolist()
        case("seed", opened(batch_size=meshed, seed=7 + me % 2))
        case("one seed", opened(batch_size=meshed, seed=8 if me == 0 else 7))
        loader = opened(batch_size=meshed)
        loader.seek(step=5 if me == 2 else 4)
        case("position", loader)
        case("border_loss", opened(batch_size=meshed, fields=bw.Fields(border_loss=me != 3)))
        case("fields", opened(batch_size=meshed, fields=bw.Fields(position_ids=me == 0)))
        case("tp for dp", opened(rank=me % 2 if me < 3 else 0, world_size=2))
        case("no mesh", opened(rank=me, world_size=4))
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def two(small_store, launch):
    return launch(SCRIPT, 2, str(small_store))


@pytest.fixture(scope="module")
def four(small_store, launch):
    """dp x tp = 2 x 2: processes 0 and 1 are data rank 0, processes 2 and 3 data rank 1."""
    return launch(SCRIPT, 4, str(small_store))


def said(processes, case):
    """What all processes said, which must be the same."""
    first, *others = (made[case] for made in processes)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(
    ("case", "report"),
    [
        ("all well", "step 0 (position 0); 2 data ranks"),
        ("in mid run", "step 2 (position 24); 2 data ranks"),
        ("replicas", "step 0 (position 0); 1 data rank, 2 replicas of each with equal next batches"),
        ("after all errors", "step 0 (position 0); 2 data ranks"),
    ],
)
def test_two_processes_that_belong_together_say_so(two, case, report):
    text = said(two, case)
    assert text.startswith("2 processes in step: plan ")
    assert text.endswith(report)


def test_a_finished_run_is_in_step_too(two):
    assert said(two, "over").endswith("2 data ranks")


def test_a_check_in_mid_run_changes_nothing(two):
    assert [made["goes on"] for made in two] == [list(range(24, 36, 2)), list(range(25, 36, 2))]


@pytest.mark.parametrize(
    ("case", "differs"),
    [
        ("seed", "seed: 7 here, 8 there"),
        ("position", "position: 0 here, 12 there"),
        ("batch_size", "batch_size: 12 here, 14 there"),
        ("epochs", "epochs: 1 here, 2 there"),
        ("sharding", "sharding: contiguous here, strided there"),
    ],
)
def test_two_processes_that_differ_both_say_who_and_in_what(two, case, differs):
    kind, headline, where = said(two, case)
    assert kind == "SyncError"
    assert headline.startswith("rank 1 ")
    assert where["differs"] == differs
    assert (where["here"], where["there"]) == ("rank 0", "rank 1")


def test_functions_of_one_name_that_do_other_things_are_told_apart(two):
    kind, headline, where = said(two, "two functions of one name")
    assert kind == "SyncError"
    assert headline.startswith("rank 1 ")
    assert where["differs"].count("<lambda>") == 2


def test_two_processes_that_both_think_they_are_the_first_are_refused(two):
    kind, headline, where = said(two, "both data rank 0")
    assert kind == "SyncError"
    assert "data rank 1 of 2" in headline
    assert where == {"differs": "ranks 0, 1 are data rank 0"}


def test_a_process_that_cannot_read_leaves_nobody_waiting(two):
    kind, headline, where = said(two, "cannot read")
    assert kind == "SyncError"
    assert "rank 1" in headline
    assert where == {"position": 0, "reason": "OSError: the disk is gone"}


def test_a_group_is_compared_by_its_members(two):
    member, stranger = (made["group"] for made in two)
    assert member.startswith("1 process ")
    assert (stranger[0], stranger[2]["parameter"]) == ("SpecError", "group")


def test_a_mesh_of_data_and_tensor_parallel_ranks_is_in_step(four):
    report = said(four, "all well")
    assert all(named in report for named in ("step 0 (position 0)", "2 data ranks", "2 replicas"))
    assert [made["rows"] for made in four] == [list(range(6))] * 2 + [list(range(6, 12))] * 2


@pytest.mark.parametrize(
    ("case", "who", "differs"),
    [
        ("seed", "ranks 1, 3 ", "seed: 7 here, 8 there"),
        ("one seed", "rank 0 ", "seed: 7 here, 8 there"),
        ("position", "rank 2 ", "position: 48 here, 60 there"),
        ("border_loss", "rank 3 ", "loss_mask, targets"),
        ("fields", "rank 1 ", "position_ids"),
        ("tp for dp", "data rank 1 of 2 ", "ranks 0, 2, 3 are data rank 0"),
    ],
)
def test_four_processes_that_differ_all_say_who_and_in_what(four, case, who, differs):
    kind, headline, where = said(four, case)
    assert kind == "SyncError"
    assert headline.startswith(who)
    assert where["differs"] == differs


def test_the_same_processes_without_a_mesh_are_four_data_ranks(four):
    assert said(four, "no mesh").endswith("4 data ranks")


def test_a_sync_error_is_public():
    assert bw.SyncError is SyncError
