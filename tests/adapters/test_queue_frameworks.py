"""Batches of a queue in torch, JAX and MLX: their values, types, memory and devices."""

from __future__ import annotations

import jax
import mlx.core as mx
import numpy as np
import pytest
import torch

from batchwright.adapters import jax as jax_adapter
from batchwright.adapters import mlx as mlx_adapter
from batchwright.adapters import torch as torch_adapter
from batchwright.base.errors import SpecError
from batchwright.base.memory import BlockPool
from batchwright.queue.batch_file import BatchFileWriter, FileFacts, pooled, read_batches
from batchwright.queue.schema import DTYPES, fields_of
from refusals import refused

ADAPTERS = {"torch": torch_adapter, "jax": jax_adapter, "mlx": mlx_adapter}
in_every_framework = pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)


def arrays_of(number=0):
    return {"x": np.full((4, 3), number), "weight": np.full(4, number, np.float32)}


@pytest.fixture
def files(tmp_path):
    """Ten files of two batches each; x of batch b in file f is full of 2 f + b."""
    schema = [{"name": "x", "dtype": "int64", "shape": [3]}, {"name": "weight", "dtype": "float32", "shape": []}]
    fields = fields_of({"batch_schema": schema})
    for number in range(10):
        with BatchFileWriter(tmp_path / f"{number}", FileFacts("stamp", "train", number, 4, 2, fields)) as writer:
            for batch in range(2):
                writer.append(list(arrays_of(2 * number + batch).values()))
            writer.finish()
    return [tmp_path / f"{number}" for number in range(10)]


@in_every_framework
def test_a_batch_has_the_values_of_its_arrays(adapter):
    found = adapter.handed(arrays_of(5), None)
    assert list(found) == ["x", "weight"]
    assert {name: np.asarray(value).tolist() for name, value in found.items()} == {
        "x": [[5, 5, 5]] * 4,
        "weight": [5.0] * 4,
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_a_schema_is_one_of_torch(dtype):
    (tensor,) = torch_adapter.handed({"x": np.ones((2, 3), dtype)}, "cpu").values()
    assert str(tensor.dtype) == f"torch.{dtype}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_a_schema_is_one_of_jax_and_mlx_where_they_have_it(dtype):
    array = np.ones((2, 3), dtype)
    (in_jax,) = jax_adapter.handed({"x": array}, None).values()
    assert in_jax.dtype == dtype.replace("64", "32")
    (in_mlx,) = mlx_adapter.handed({"x": array}, None).values()
    assert in_mlx.dtype == getattr(mx, {"float64": "float32", "bool": "bool_"}.get(dtype, dtype))


def test_jax_refuses_integers_that_it_would_change():
    with refused(SpecError, "int32", parameter="x"):
        jax_adapter.handed({"x": np.array([2**40])}, None)


def test_tensors_on_a_cpu_are_views_without_a_copy():
    arrays = arrays_of()
    for device in (None, "cpu", torch.device("cpu")):
        for name, tensor in torch_adapter.handed(arrays, device).items():
            assert tensor.data_ptr() == arrays[name].ctypes.data


@in_every_framework
def test_batches_that_are_kept_stay_unchanged_while_memory_is_used_again(adapter, files):
    memory, kept = pooled(BlockPool()), []
    for _ in range(5):
        for path in files:
            _, rows = read_batches(path, memory)
            kept += [adapter.handed({name: array[at : at + 4] for name, array in rows.items()}, None) for at in (0, 4)]
            del rows
    for number, batch in enumerate(kept):
        assert np.asarray(batch["x"]).tolist() == [[number % 20] * 3] * 4
        assert np.asarray(batch["weight"]).tolist() == [number % 20] * 4


@pytest.mark.parametrize("adapter", [jax_adapter, mlx_adapter], ids=["jax", "mlx"])
def test_copies_do_not_change_with_the_memory_they_came_from(adapter):
    array = pooled(BlockPool())(64).view(np.int32)  # 64-byte aligned: JAX would take it as it is
    array[:] = 5
    found = adapter.handed({"x": array}, None)
    array[:] = 6
    assert np.asarray(found["x"]).tolist() == [5] * 16


def test_jax_puts_a_batch_on_a_device_by_object_and_by_name():
    for device in (jax.devices()[0], "cpu", "cpu:0"):
        assert jax_adapter.handed(arrays_of(), device)["x"].devices() == {jax.devices("cpu")[0]}


@pytest.mark.parametrize(
    ("adapter", "device"),
    [
        (torch_adapter, "gpu!"),
        (torch_adapter, "cuda:77"),
        (jax_adapter, "abacus"),
        (jax_adapter, "cpu:9999"),
        (mlx_adapter, "gpu"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(adapter, device):
    with refused(SpecError, device, parameter="device"):
        adapter.handed(arrays_of(), device)


def test_only_cuda_asks_for_memory_of_its_own():
    assert torch_adapter.memory_for(None) is None
    assert torch_adapter.memory_for("cpu") is None
    with refused(SpecError, "cuda:77", parameter="device"):
        torch_adapter.memory_for("cuda:77")


# Generators


def drawn(seed):
    return torch.randint(0, 2**62, (4,), generator=torch_adapter.generator(seed)).tolist()


def test_a_generator_depends_on_all_bits_of_its_seed():
    seeds = [0, 1, 5, 5 + (1 << 32), 5 + (1 << 63), (1 << 64) - 1]
    assert len({tuple(drawn(seed)) for seed in seeds}) == len(seeds)
    assert drawn(seeds[3]) == drawn(seeds[3])


def test_a_generator_is_pinned():
    # Providers make files again from these numbers: if they change, resumed runs get other batches.
    key = 7 + (9 << 40)
    words = torch.empty(4, dtype=torch.int32).random_(generator=torch_adapter.generator(key))
    twin = np.random.MT19937(np.random.SeedSequence(key)).random_raw(5)[1:]  # NumPy begins one number earlier
    assert words.tolist() == (twin % 2**31).tolist()
    assert words.tolist() == [1373170570, 2071120029, 1513649743, 431005511]


def test_a_generator_says_its_seed_and_leaves_torchs_own_alone():
    before = torch.get_rng_state()
    assert torch_adapter.generator(5 + (1 << 40)).initial_seed() == 5 + (1 << 40)
    assert torch.equal(torch.get_rng_state(), before)
