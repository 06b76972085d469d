"""The checks of `cuda_check.py`, where there is a GPU."""

from __future__ import annotations

import cuda_check
import numpy as np
import pytest
import torch


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="NOT CHECKED: pinned memory and CUDA copies need a GPU; run tests/adapters/cuda_check.py where there is one",
)
@pytest.mark.parametrize("name", cuda_check.CHECKS)
def test_on_a_gpu(name):
    cuda_check.CHECKS[name]()


def test_the_checks_own_expectation_is_the_loaders_stream():
    loader = cuda_check.open_loader()
    for tokens in cuda_check.expected_tokens(5):
        batch = loader.get_batch()
        assert np.array_equal(batch.input_ids.numpy(), tokens[:, :-1])
        assert np.array_equal(batch.targets.numpy(), tokens[:, 1:])
