"""A batch of JAX arrays: its types, its devices, and masks that a program may give away."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import batchwright as bw
from batchwright.adapters.jax import JaxBlocks
from shared import arrays_of


def types_of(batch):
    return {name: array.dtype.name for name, array in arrays_of(batch).items()}


def test_integers_are_int32_unless_x64_is_on(open_small):
    loader = open_small("jax", fields=bw.Fields(position_ids=True, segment_ids=True, border_loss=False))
    integers = ("input_ids", "attention_mask", "labels", "targets", "position_ids", "segment_ids")
    assert types_of(loader.get_batch()) == dict.fromkeys(integers, "int32") | {"loss_mask": "float32"}
    with jax.enable_x64(True):
        assert types_of(loader.get_batch()) == dict.fromkeys(integers, "int64") | {"loss_mask": "float32"}
    assert types_of(loader.get_batch())["attention_mask"] == "int32"


def test_what_is_given_to_jax_is_aligned_and_nobody_elses(monkeypatch):
    given = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda arrays: given.extend(arrays) or put(arrays))
    block = np.arange(34).reshape(2, 17)
    inputs, targets = JaxBlocks().copies([block[:, :-1], block[:, 1:]])
    assert all(array.ctypes.data % 64 == 0 and not np.shares_memory(array, block) for array in given)
    assert not np.shares_memory(*given)
    block[:] = -1
    assert inputs.tolist()[1][-1] == 32
    assert targets.tolist()[1][-1] == 33


def test_a_step_compiled_once_takes_every_batch(open_small):
    traced = []

    @jax.jit
    def step(batch):
        traced.append(batch)
        return (batch["targets"] * batch["loss_mask"]).sum()

    for batch in open_small("jax"):
        step(arrays_of(batch))
    assert len(traced) == 1


def test_a_mask_that_a_program_gave_away_is_made_again(open_small):
    loader = open_small("jax")
    first = loader.get_batch()
    assert loader.get_batch().loss_mask is first.loss_mask
    first.loss_mask.delete()  # what a jitted function does with what is donated to it
    assert (loader.get_batch().loss_mask == 1).all()


def test_a_batch_of_jax_arrays_cannot_be_pinned(open_small):
    with pytest.raises(TypeError, match=r"batch.to\(device\)"):
        open_small("jax").get_batch().pin_memory()


def test_batches_go_to_the_default_device_and_from_there_anywhere(small_store):
    code = """
        import sys, jax, batchwright as bw
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        one, two = jax.devices()
        sizes = bw.Batching(12, epoch_end="short")
        loader = bw.PretrainDataLoader(sys.argv[1], chunk_size=16, batch_size=sizes, seed=7, framework="jax")
        names = ["input_ids", "attention_mask", "targets", "loss_mask"]
        def where(batch):
            return [sorted(d.id for d in getattr(batch, name).devices()) for name in names]
        assert where(loader.get_batch()) == [[0]] * 4
        with jax.default_device(two):
            assert where(loader.get_batch()) == [[1]] * 4
        batch = loader.get_batch()
        assert where(batch.to(two)) == [[1]] * 4
        rows = NamedSharding(Mesh([one, two], "data"), P("data"))
        halves = batch.to(rows)
        assert halves.targets.sharding == rows and halves.loss_mask.sharding == rows
        assert (halves.targets == batch.to(rows).targets).all() and halves.targets.tolist() == batch.targets.tolist()
        assert halves.metadata["state"] == batch.metadata["state"]
        with jax.transfer_guard("disallow"):
            loader.get_batch()
    """
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), str(small_store)],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
