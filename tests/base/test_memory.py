"""The pool hands out a block again when nothing refers to it any more, and never before."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from batchwright.base.memory import ALIGNMENT, BlockPool

# What a user may keep of a block instead of the block itself.
KEPT = {
    "the array": lambda block: block,
    "a row": lambda block: block[1],
    "a view of a view of a view": lambda block: block[1:][:, 1:][0, ::2],
    "a transposed view": lambda block: block.T,
    "a reshaped view": lambda block: block.reshape(-1),
    "another dtype's view": lambda block: block.view(np.uint8),
    "an iterator over it": lambda block: iter(block),
    "a flat iterator": lambda block: block.flat,
    "a memoryview": lambda block: memoryview(block),
    "a slice of a memoryview": lambda block: memoryview(block)[1:2],
    "a frombuffer array": lambda block: np.frombuffer(block, np.int64),
    "a dlpack array": lambda block: np.from_dlpack(block),
    "a ctypes array": lambda block: np.ctypeslib.as_ctypes(block),
    "a tensor": lambda block: torch.from_numpy(block),
    "a slice of a tensor": lambda block: torch.from_numpy(block)[1:, :-1],
    "a tensor of a slice": lambda block: torch.from_numpy(block[1:, :-1]),
    "a detached tensor": lambda block: torch.from_numpy(block).detach().T[0],
    "a dlpack tensor": lambda block: torch.from_dlpack(block),
    "a storage": lambda block: torch.from_numpy(block).untyped_storage(),
    "a tensor's NumPy view": lambda block: torch.from_numpy(block)[0].numpy()[1:],
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT.keys())
def test_whatever_is_kept_of_a_block_keeps_it_from_being_reused(keep):
    pool = BlockPool()
    block = pool.take(3, 4)
    address = block.ctypes.data
    kept = keep(block)
    del block
    taken = [pool.take(3, 4) for _ in range(8)]
    assert address not in [other.ctypes.data for other in taken]
    del kept


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT.keys())
def test_a_block_comes_back_when_the_last_thing_kept_of_it_is_dropped(keep):
    pool = BlockPool()
    block = pool.take(3, 4)
    address = block.ctypes.data
    kept = keep(block)
    del block
    assert pool.take(3, 4).ctypes.data != address
    del kept
    gc.collect()
    assert address in [block.ctypes.data for block in [pool.take(3, 4), pool.take(3, 4)]]


def test_a_block_that_nobody_holds_is_the_next_one_taken():
    pool = BlockPool()
    addresses = set()
    for _ in range(20):
        block = pool.take(8, 9)
        addresses.add(block.ctypes.data)
        del block
    assert len(addresses) == 1


def test_a_hundred_kept_blocks_keep_what_was_written_into_them():
    pool = BlockPool()
    kept = []
    for number in range(100):
        block = pool.take(4, 5)
        block[:] = number
        kept.append(block[:, 1:] if number % 2 else torch.from_numpy(block)[1:])
    assert [int(block[0, 0]) for block in kept] == list(range(100))
    assert all((block == number).all() for number, block in enumerate(kept))


def test_the_pool_itself_holds_only_a_few_blocks():
    pool = BlockPool()
    kept = [pool.take(4, 5) for _ in range(100)]
    assert len({block.ctypes.data for block in kept}) == 100
    assert len(pool._owners) == 4


def test_a_larger_block_serves_a_smaller_request_and_not_the_other_way_round():
    pool = BlockPool()
    address = pool.take(100, 3).ctypes.data
    small = pool.take(2, 3)
    assert small.ctypes.data == address
    assert small.shape == (2, 3)
    assert pool.take(200, 3).ctypes.data != address


@pytest.mark.parametrize("shape", [(0, 9), (1, 1), (3, 7), (32, 2049)])
def test_blocks_are_aligned_int64_and_writable(shape):
    block = BlockPool().take(*shape)
    assert block.shape == shape
    assert block.dtype == np.int64
    assert block.ctypes.data % ALIGNMENT == 0
    block[:] = 7
    assert (block == 7).all()


def test_threads_that_take_at_the_same_time_never_share_a_block():
    pool = BlockPool()
    mixed_up = []

    def write_and_look(mark):
        for _ in range(300):
            block = pool.take(4, 5)
            block[:] = mark
            time.sleep(0)  # let another thread run while this one holds its block
            if (block != mark).any():
                mixed_up.append(mark)
            del block

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=write_and_look, args=(mark,)) for mark in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert mixed_up == []


def test_the_count_of_an_unused_block_is_measured_on_this_interpreter():
    # 3.14 counts fewer references on the stack: with a number written down, a held block would look free there.
    code = (
        "import sys; real = sys.getrefcount; sys.getrefcount = lambda x: real(x) - 2\n"
        "from batchwright.base.memory import BlockPool\n"
        "pool = BlockPool(); first = pool.take(2, 3); second = pool.take(2, 3)\n"
        "assert first.ctypes.data != second.ctypes.data, 'a held block was handed out'\n"
        "address = second.ctypes.data; del second\n"
        "assert pool.take(2, 3).ctypes.data == address, 'a free block was not reused'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_a_global_lock_nothing_is_reused():
    code = (
        "import sys; sys._is_gil_enabled = lambda: False\n"
        "from batchwright.base.memory import BlockPool\n"
        "pool = BlockPool(); block = pool.take(2, 3); first = block.base; del block\n"
        "assert pool.take(2, 3).base is not first\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
