"""Rows of a buffer in torch, JAX and MLX: their types and memory, and torch's own DataLoader over a buffer."""

from __future__ import annotations

import warnings
import weakref

import jax
import mlx.core as mx
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import batchwright as bw
from batchwright.adapters import jax as jax_adapter
from batchwright.adapters import mlx as mlx_adapter
from batchwright.adapters import torch as torch_adapter
from batchwright.base.errors import SpecError
from batchwright.buffer.batch import RowBatch
from batchwright.buffer.schema import Field, Numbers, Schema
from refusals import refused

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # torch counts this machine's cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata still calls it
]
in_every_framework = pytest.mark.parametrize(
    ("framework", "array"), [("torch", torch.Tensor), ("jax", jax.Array), ("mlx", mx.array)], ids=str
)


@pytest.fixture
def buffer():
    """Row n of 20 has the number n, the array [n, n, n] and the text "row n"."""
    numbers = np.arange(20)
    obs = np.repeat(numbers.astype(np.float32)[:, None], 3, axis=1)
    made = bw.DatasetBuffer()
    for first in (0, 8):  # in two pieces
        rows = slice(first, 8 if not first else 20)
        made.extend({"n": numbers[rows], "obs": obs[rows], "text": [f"row {n}" for n in numbers[rows]]})
    return made


def small_batch():
    """The second row has no reward and no label."""
    schema = Schema((Field("reward", pa.float64()), Field("label", pa.int64()), Field("text", pa.string())))
    valid = np.array([True, False])
    columns = {"reward": Numbers(np.array([1.5, 8]), valid), "label": Numbers(np.array([4, 8]), valid)}
    columns["text"] = pa.array(["a", "b"])
    return RowBatch(schema, columns, [0, 1], [0, 1], weights=np.array([1, 0.5], np.float32))


# Types and memory


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 0)])
def test_torch_has_every_type_over_the_same_memory(dtype, shape):
    array = np.ones(shape, dtype)
    tensor = torch_adapter.numbers({"x": array})["x"]
    assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", shape)
    if array.size:
        array[0] = 0
        assert not tensor[0].any()


def test_what_may_only_be_read_is_copied_for_torch():
    array = np.arange(3)
    array.flags.writeable = False
    tensor = torch_adapter.numbers({"x": array})["x"]
    tensor[0] = 7
    assert array.tolist() == [0, 1, 2]


def test_what_may_only_be_read_is_shared_with_torch_if_asked_for():
    array = np.arange(6).reshape(3, 2).T
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = torch_adapter.numbers({"x": array}, share=True)["x"]
    assert tensor.data_ptr() == array.ctypes.data
    assert tensor.tolist() == array.tolist()
    memory = weakref.ref(array)
    del array
    assert memory() is not None  # held by the tensor
    del tensor
    assert memory() is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_mlx_has_every_type_but_float64(dtype):
    array = np.array([[0, 1], [1, 1]]).astype(dtype)
    made = mlx_adapter.numbers({"x": array})["x"]
    assert str(made.dtype) == f"mlx.core.{'float32' if dtype == 'float64' else dtype}"
    array[:] = 0
    assert made.tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_has_every_type_in_32_bits_unless_x64_is_on(dtype):
    array = np.array([[0, 1], [1, 1]]).astype(dtype)
    assert jax_adapter.numbers({"x": array})["x"].dtype.name == dtype.replace("64", "32")
    with jax.enable_x64(True):
        made = jax_adapter.numbers({"x": array})["x"]
        assert made.dtype.name == dtype
    array[:] = 0
    assert made.tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize(("dtype", "value"), [("int64", 1 << 40), ("int64", -(1 << 31) - 1), ("uint64", 1 << 32)])
def test_an_integer_that_jax_cannot_hold_is_refused(dtype, value):
    with refused(SpecError, value, parameter="time", remedy="jax_enable_x64"):
        jax_adapter.numbers({"time": np.array([0, value], dtype)})
    with jax.enable_x64(True):
        assert int(jax_adapter.numbers({"time": np.array([0, value], dtype)})["time"][1]) == value


@in_every_framework
def test_a_batch_in_a_framework_has_its_arrays_and_the_same_lists(framework, array):
    batch = getattr(small_batch(), framework)()
    assert all(isinstance(batch[name], array) for name in ("reward", "label"))
    assert isinstance(batch.weights, array)
    assert np.isnan(float(batch["reward"][1]))
    assert batch["label"].tolist() == [4, 0]
    assert batch["text"] == ["a", "b"]
    assert batch.missing["label"].tolist() == [False, True]
    assert batch.to_table().to_pydict() == small_batch().to_table().to_pydict()
    assert batch.torch()["label"].dtype in (torch.int64, torch.int32)


def test_a_batch_moves_to_a_device():
    batch = small_batch()
    moved = batch.torch().to("meta")
    assert {moved["reward"].device.type, moved.weights.device.type} == {"meta"}
    assert moved["text"] == ["a", "b"]
    (device,) = batch.jax().to(jax.devices()[0])["label"].devices()
    assert device == jax.devices()[0]
    with pytest.raises(TypeError, match=r"MLX .* device"):
        batch.mlx().to("gpu")


# Loaders


@in_every_framework
def test_a_loader_gives_the_same_rows_in_every_framework(buffer, framework, array):
    plain = list(buffer.loader(batch_size=4, seed=1))
    made = list(buffer.loader(batch_size=4, seed=1, framework=framework))
    assert all(isinstance(batch["obs"], array) for batch in made)
    assert [batch["obs"].tolist() for batch in made] == [batch["obs"].tolist() for batch in plain]
    assert [batch["text"] for batch in made] == [batch["text"] for batch in plain]
    assert made[-1].metadata["state"] == plain[-1].metadata["state"]


def test_workers_of_torch_give_what_the_loader_gives(buffer):
    expected = list(buffer.loader(batch_size=3, seed=1))
    alone = [batch["n"].tolist() for batch in expected]
    loader = buffer.loader(batch_size=3, seed=1)
    batches = loader.torch().loader(num_workers=2, multiprocessing_context="fork")
    found = iter(batches)
    first = [next(found) for _ in range(4)]
    state = batches.state_dict()
    assert [batch["n"].tolist() for batch in first] == alone[:4]
    assert [batch.metadata["state"] for batch in first] == [batch.metadata["state"] for batch in expected[:4]]
    assert state == first[-1].metadata["state"]
    assert first[0]["obs"].dtype == torch.float32
    assert first[0]["text"] == [f"row {n}" for n in alone[0]]
    again = buffer.loader(batch_size=3, seed=1)
    again.load_state_dict(state)
    assert [batch["n"].tolist() for batch in again] == alone[4:]


# A buffer as torch's dataset


def checked_numbers(batches):
    """The numbers in batches as torch's collate makes them, each of which is whole."""
    found = []
    for batch in batches:
        numbers = batch["n"].tolist()
        assert batch["obs"].dtype == torch.float32
        assert batch["obs"].tolist() == [[n] * 3 for n in numbers]
        assert batch["text"] == [f"row {n}" for n in numbers]
        found.append(numbers)
    return found


def shuffled(seed=3):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork"), (1, "spawn")])  # one: a start takes seconds
def test_torchs_own_loader_reads_a_buffer(buffer, workers, context):
    settings = {"num_workers": workers, "multiprocessing_context": context}
    loader = DataLoader(buffer, batch_size=8, shuffle=True, generator=shuffled(), **settings)
    batches = checked_numbers(loader)
    assert [len(batch) for batch in batches] == [8, 8, 4]
    assert sorted(n for batch in batches for n in batch) == list(range(20))


def test_a_batch_of_torchs_loader_is_one_gather(buffer, monkeypatch):
    asked = []
    at = type(buffer).__getitems__
    monkeypatch.setattr(type(buffer), "__getitems__", lambda self, index: asked.append(len(index)) or at(self, index))
    checked_numbers(DataLoader(buffer, batch_size=8))
    assert asked == [8, 8, 4]


def test_torchs_loader_drops_the_last_batch_and_takes_a_sampler(buffer):
    assert checked_numbers(DataLoader(buffer, batch_size=8, drop_last=True)) == [list(range(8)), list(range(8, 16))]
    only = WeightedRandomSampler([0.0] * 5 + [1.0] + [0.0] * 14, num_samples=6)
    assert checked_numbers(DataLoader(buffer, batch_size=3, sampler=only)) == [[5] * 3] * 2
    assert checked_numbers(DataLoader(buffer, batch_sampler=[[1, 2], [-1]])) == [[1, 2], [19]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_of_torchdata_goes_on_in_the_middle(buffer, workers):
    settings = {"batch_size": 4, "shuffle": True, "num_workers": workers, "generator": shuffled()}
    loader = StatefulDataLoader(buffer, **settings)
    batches = iter(loader)
    checked_numbers(next(batches) for _ in range(2))
    state = loader.state_dict()
    rest = checked_numbers(batches)
    again = StatefulDataLoader(buffer, **settings | {"generator": shuffled()})
    again.load_state_dict(state)
    assert checked_numbers(again) == rest
    assert len(rest) == 3


# A whole buffer


@in_every_framework
def test_a_whole_buffer_is_arrays_and_lists(buffer, framework, array):
    found = getattr(buffer, f"to_{framework}")()
    assert list(found) == ["n", "obs", "text"]
    assert isinstance(found["obs"], array)
    assert found["n"].tolist() == list(range(20))
    assert found["obs"].tolist() == [[n] * 3 for n in range(20)]
    assert found["text"] == [f"row {n}" for n in range(20)]


def test_tensors_of_rows_in_one_run_are_over_the_same_memory_which_later_changes_do_not_touch():
    buffer = bw.DatasetBuffer()
    buffer.extend({"n": np.arange(3)})
    tensor = buffer.to_torch()["n"]
    assert tensor.data_ptr() == buffer.to_numpy()["n"].ctypes.data
    buffer.set(buffer.ids, n=np.array([7, 8, 9]))
    assert tensor.tolist() == [0, 1, 2]


def test_tensors_of_rows_that_lie_in_a_file_are_copies(tmp_path):
    with bw.DatasetBuffer({"n": np.arange(3)}, path=tmp_path / "buffer") as buffer:
        buffer.commit("one")
    with bw.DatasetBuffer(path=tmp_path / "buffer") as buffer:
        buffer.at("one").to_torch()["n"][:] = -1  # a write into a mapped file would end the process
        assert buffer.at("one").to_numpy()["n"].tolist() == [0, 1, 2]


def test_writing_into_a_loaders_tensors_does_not_change_the_buffer():
    buffer = bw.DatasetBuffer()
    buffer.extend({"n": np.arange(3)})
    buffer.loader(batch_size=3, framework="torch").get_batch()["n"][:] = -1
    assert buffer.to_numpy()["n"].tolist() == [0, 1, 2]
