"""What batches promise on a GPU, as checks that need one: `python tests/adapters/cuda_check.py`.

Needs torch with CUDA, numpy, msgspec, xxhash and cloudpickle; no store and no network. `test_torch_cuda.py` runs the
same checks under pytest, and skips them where there is no GPU.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import batchwright.adapters.torch as adapter
from batchwright.base.memory import BlockPool
from batchwright.batches.flow import Flow
from batchwright.batches.row_index import RowSpec, plan_rows
from batchwright.batches.samples import SampleRows
from batchwright.batches.settings import Asked, Fields
from batchwright.batches.types import TrainingBatch
from batchwright.buffer import DatasetBuffer
from batchwright.loaders.loader import Loader
from batchwright.loaders.rollout import RolloutDataLoader
from batchwright.loaders.stored import StoreStream
from batchwright.order.plan import Plan, PlanSource
from batchwright.order.schedule import Order
from batchwright.pool.dataset import StreamingMixedShardDataset
from batchwright.queue.batch_file import BatchFileWriter, FileFacts, pooled, read_batches
from batchwright.queue.schema import fields_of

NUM_ROWS, ROW_TOKENS, BATCH_ROWS = 20_000, 512, 32
SLEEP_CYCLES = 400_000_000  # a good tenth of a second: copies queued behind it cannot have begun


class NumberedRows:
    """Row i holds i * 1000, i * 1000 + 1, ...: any token says which row it is of."""

    name, num_rows, row_tokens, fingerprint = "numbered", NUM_ROWS, ROW_TOKENS, "numbered-1"

    def gather(self, index: np.ndarray, epoch: np.ndarray, out: np.ndarray) -> None:
        np.add(index[:, None] * 1000, np.arange(out.shape[1]), out=out)


class StreamInMemory(StoreStream):
    """Of rows that are in no store: there is no place to keep the plan."""

    def keep(self, plan: Plan) -> StreamInMemory:
        return self


def loader_of(plan: Plan, flow: Flow, batch_size: int = BATCH_ROWS) -> Loader:
    asked = Asked(batch_size=batch_size)
    return Loader(StreamInMemory(plan, flow), asked, rank=0, world_size=1, framework="torch")


def open_loader(batch_size: int = BATCH_ROWS) -> Loader:
    source = PlanSource(
        name="numbered", split="train", fingerprint="numbered-1", num_rows=NUM_ROWS, num_tokens=NUM_ROWS * ROW_TOKENS
    )
    plan = Plan(row_tokens=ROW_TOKENS, seed=7, shuffle="global", sources=(source,))
    flow = Flow([NumberedRows()], Order({"numbered": NUM_ROWS}, seed=7))
    return loader_of(plan, flow, batch_size)


def expected_tokens(num_steps: int) -> list[np.ndarray]:
    """[rows, tokens + 1] of the first steps, computed without a loader."""
    index = Order({"numbered": NUM_ROWS}, seed=7).at(np.arange(num_steps * BATCH_ROWS)).index
    rows = index[:, None] * 1000 + np.arange(ROW_TOKENS + 1)
    return list(rows.reshape(num_steps, BATCH_ROWS, -1))


def assert_is(batch: TrainingBatch, tokens: np.ndarray) -> None:
    assert np.array_equal(batch.input_ids.cpu().numpy(), tokens[:, :-1]), "input_ids are not the loader's"
    assert np.array_equal(batch.targets.cpu().numpy(), tokens[:, 1:]), "labels are not the loader's"


def are_one_block(batch: TrainingBatch) -> bool:
    """Whether the tokens came in one piece, which labels and targets are made of."""
    return bool(batch.input_ids.stride() == (ROW_TOKENS + 1, 1))


@contextmanager
def copies_of_tensors() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of what is copied by `to` or into pinned memory inside the block."""
    shapes: list[tuple[int, ...]] = []
    saved = {name: getattr(torch.Tensor, name) for name in ("to", "pin_memory")}
    pinned = adapter.pinned

    def counted(method: Callable) -> Callable:
        return lambda self, *args, **kwargs: shapes.append(tuple(self.shape)) or method(self, *args, **kwargs)

    for name, method in saved.items():
        setattr(torch.Tensor, name, counted(method))
    adapter.pinned = counted(pinned)
    try:
        yield shapes
    finally:
        adapter.pinned = pinned
        for name, method in saved.items():
            setattr(torch.Tensor, name, method)


def check_the_block_is_copied_once_and_seen_twice() -> None:
    loader = open_loader()
    loader.get_batch().to("cuda")  # the masks are on the device from here on
    tokens = expected_tokens(3)
    with copies_of_tensors() as shapes:
        pageable = loader.get_batch().to("cuda")
    assert shapes == [(BATCH_ROWS, ROW_TOKENS + 1)], f"copied {shapes}"
    pinned = loader.get_batch().pin_memory()
    with copies_of_tensors() as shapes:
        moved = pinned.to("cuda", non_blocking=True)
    assert shapes == [(BATCH_ROWS, ROW_TOKENS + 1)], f"copied {shapes}"
    torch.cuda.synchronize()
    for batch, step in ((pageable, 1), (moved, 2)):
        assert are_one_block(batch)
        assert all(batch[name].is_cuda for name in batch)
        assert_is(batch, tokens[step])


def check_a_pinned_batch_is_pinned_as_one_block() -> None:
    loader = open_loader()
    loader.get_batch().pin_memory()
    with copies_of_tensors() as shapes:
        batch = loader.get_batch().pin_memory()
    assert shapes == [(BATCH_ROWS, ROW_TOKENS + 1)], f"pinned {shapes}"
    assert all(batch[name].is_pinned() for name in batch)
    assert are_one_block(batch)
    assert_is(batch, expected_tokens(2)[1])
    assert batch.metadata["state"]["position"] == 2 * BATCH_ROWS


def check_copies_behind_a_busy_stream_arrive_whole_though_their_batches_are_dropped() -> None:
    for pin in (False, True):
        loader = open_loader()
        tokens = expected_tokens(60)
        moved = []
        torch.cuda._sleep(SLEEP_CYCLES)
        for _ in range(60):
            batch = loader.get_batch()
            batch = batch.pin_memory() if pin else batch
            moved.append(batch.to("cuda", non_blocking=True))
            del batch  # its memory would be free for the next one now
        torch.cuda.synchronize()
        for batch, expected in zip(moved, tokens, strict=True):
            assert_is(batch, expected)


def check_memory_is_held_until_its_copy_is_done_and_free_after() -> None:
    torch.cuda.synchronize()
    pool = BlockPool()
    block = pool.take(64, 1024)
    block[:] = 1
    address = block.ctypes.data
    torch.cuda._sleep(SLEEP_CYCLES)
    stream = torch.cuda.current_stream()
    on_device = adapter.copied(torch.from_numpy(block), "cuda", True)
    was_waiting = not stream.query()
    del block
    if was_waiting:  # a driver that waits for the stream itself leaves nothing to hold
        assert address not in [pool.take(64, 1024).ctypes.data for _ in range(3)], "used again during the copy"
    torch.cuda.synchronize()
    adapter.copied(torch.zeros(8, dtype=torch.int64), "cuda", True)  # the next copy lets go of those that are done
    assert address in [block.ctypes.data for block in [pool.take(64, 1024) for _ in range(4)]], "never free again"
    assert bool((on_device == 1).all())


def check_device_masks_are_shared_until_somebody_writes_into_one() -> None:
    loader = open_loader()
    one, two = loader.get_batch().to("cuda"), loader.get_batch().to("cuda")
    assert one.attention_mask is two.attention_mask
    two.loss_mask.zero_()
    three = loader.get_batch().to("cuda")
    assert bool((three.loss_mask == 1).all())
    assert three.loss_mask is not two.loss_mask
    side = torch.cuda.Stream()
    other = open_loader(batch_size=16)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        on_side = other.get_batch().to("cuda", non_blocking=True)
    assert bool((on_side.loss_mask == 1).all()), "a mask must be whole for every stream from the beginning"
    torch.cuda.synchronize()


def check_a_hundred_batches_kept_on_the_device_stay_unchanged() -> None:
    kept = [batch.to("cuda", non_blocking=True) for batch in islice(open_loader().get_iterator(), 100)]
    torch.cuda.synchronize()
    for batch, tokens in zip(kept, expected_tokens(100), strict=True):
        assert_is(batch, tokens)


def check_torchs_dataloader_pins_batches_with_and_without_workers() -> None:
    torch.zeros(1).cuda()  # workers are forked from a process that has CUDA running, as in any training program
    for num_workers in (0, 2):
        dataset = open_loader().torch()
        batches = TorchDataLoader(dataset, batch_size=None, num_workers=num_workers, pin_memory=True)
        for batch, tokens in zip(islice(batches, 20), expected_tokens(20), strict=True):
            assert type(batch) is TrainingBatch
            assert all(batch[name].is_pinned() for name in batch)
            assert are_one_block(batch)
            assert_is(batch.to("cuda", non_blocking=True), tokens)


def check_the_state_follows_what_was_handed_over_through_the_pinning_thread() -> None:
    loader = open_loader()
    batches = loader.torch().loader(num_workers=2, pin_memory=True)
    for step, batch in enumerate(islice(batches, 20)):
        assert batches.state_dict() == batch.metadata["state"]
        assert loader.position == (step + 1) * BATCH_ROWS


class NumberedDocuments:
    """Tokens 0, 1, 2, ... in documents of different lengths."""

    name, split, fingerprint, dtype = "documents", "train", "documents-1", np.dtype(np.uint32)

    def __init__(self, num_tokens: int) -> None:
        self.tokens = np.arange(num_tokens, dtype=np.uint32)

    def addresses(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        return self.tokens.ctypes.data + 4 * starts, np.ones(len(starts), bool), [self.tokens]


def open_packed() -> Loader:
    """Rows of several documents each, not all of them full."""
    lengths = np.random.default_rng(3).integers(1, 300, 4_000)
    borders = np.concatenate([[0], np.cumsum(lengths)])
    spec = RowSpec(ROW_TOKENS, "best_fit", "drop")
    rows = SampleRows(NumberedDocuments(int(borders[-1])), plan_rows(borders, spec), spec, borders)
    source = PlanSource(
        name="documents",
        split="train",
        fingerprint="documents-1",
        num_rows=rows.num_rows,
        num_tokens=rows.num_tokens,
        rows=tuple(sorted(spec.spec().items())),
    )
    plan = Plan(row_tokens=ROW_TOKENS, seed=7, shuffle="global", sources=(source,), pad=0)
    fields = Fields(position_ids=True, segment_ids=True, cu_seqlens=True)
    flow = Flow([rows], plan.order, fields, row_tokens=ROW_TOKENS, pad=0)
    return loader_of(plan, flow)


def check_packed_batches_arrive_whole_with_all_their_fields() -> None:
    for batch in islice(open_packed(), 20):
        there = batch.pin_memory().to("cuda", non_blocking=True)
        names = ("input_ids", "targets", "labels", "loss_mask", "position_ids", "segment_ids", "cu_seqlens")
        assert list(there) == list(batch)
        assert there.max_seqlen == batch.max_seqlen
        for name in names:
            assert getattr(there, name).is_cuda, name
            assert torch.equal(getattr(there, name).cpu(), getattr(batch, name)), name


def check_variable_length_attention_over_cu_seqlens_keeps_samples_apart() -> None:
    """A kernel that is given cu_seqlens gives for each sample what it gives for that sample alone."""
    from torch.nn.attention.varlen import varlen_attn

    batch = next(iter(open_packed())).to("cuda")
    torch.manual_seed(0)
    heads, size = 4, 64
    query, key, value = (
        torch.randn(batch.input_ids.numel(), heads, size, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    borders, longest = batch.cu_seqlens, batch.max_seqlen
    assert borders.dtype == torch.int32
    together = varlen_attn(query, key, value, borders, borders, longest, longest, window_size=(-1, 0))
    segments = batch.segment_ids.reshape(-1)
    num_samples = 0
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        assert len(segments[start:stop].unique()) == 1  # one sample, or padding
        if not segments[start]:
            continue
        alone = torch.nn.functional.scaled_dot_product_attention(
            *(x[start:stop].transpose(0, 1)[None] for x in (query, key, value)), is_causal=True
        )
        assert torch.allclose(together[start:stop], alone[0].transpose(0, 1), atol=2e-2)
        assert batch.position_ids.reshape(-1)[start:stop].tolist() == list(range(stop - start))
        num_samples += 1
    assert num_samples > 2 * BATCH_ROWS


def open_buffer() -> DatasetBuffer:
    """Row i has obs full of i."""
    buffer = DatasetBuffer(seed=3)
    for first in range(0, NUM_ROWS, 5_000):
        number = np.arange(first, first + 5_000)
        buffer.extend({"number": number, "obs": np.repeat(number[:, None], 84, 1).astype(np.float32)})
    return buffer


def check_rows_of_a_buffer_arrive_whole_from_pinned_memory_though_their_batches_are_dropped() -> None:
    moved, numbers = [], []
    loader = open_buffer().loader(batch_size=256, seed=1, framework="torch")
    torch.cuda._sleep(SLEEP_CYCLES)
    for batch in islice(loader.get_iterator(), 50):
        pinned = batch.pin_memory()
        assert pinned["obs"].is_pinned(), "pin_memory left a column in pageable memory"
        numbers.append(batch["number"].clone())
        moved.append(pinned.to("cuda", non_blocking=True))
        del pinned
    for batch, number in zip(moved, numbers, strict=True):
        assert batch["obs"].device.type == "cuda"
        assert torch.equal(batch["number"].cpu(), number)
        assert torch.equal(batch["obs"].cpu(), number[:, None].expand(-1, 84).float()), "rows changed on the way"


def check_a_draw_on_the_device_has_its_weights_there() -> None:
    buffer = open_buffer()
    buffer.set(buffer.ids, priority=np.arange(1.0, NUM_ROWS + 1))
    batch = buffer.sample(256, step=0, by="priority").torch().to("cuda")
    assert batch.weights.device.type == "cuda"
    assert torch.equal(batch["obs"][:, 0].long(), batch["number"])


def open_rollouts() -> RolloutDataLoader:
    """Row i has tokens and log-probs that say so."""
    data = [
        {
            "prompt": [i % 1000, 7],
            "response": [i % 1000] * (8 + i % 57),
            "reward": float(i % 5),
            "group": i // 8,
            "old_log_probs": [float(i)] * (8 + i % 57),
        }
        for i in range(2_000)
    ]
    return RolloutDataLoader(data, None, True, batch_size=BATCH_ROWS, framework="torch")


def check_advantages_and_log_probs_arrive_with_their_batch_from_pinned_memory_behind_a_busy_stream() -> None:
    loader, moved = open_rollouts(), []
    expected = [
        (batch.metadata["row"].clone(), batch.targets.clone(), batch.metadata["advantages"].clone()) for batch in loader
    ]
    loader.reset()
    torch.cuda._sleep(SLEEP_CYCLES)
    for batch in loader:
        pinned = batch.pin_memory()
        assert pinned.metadata["advantages"].is_pinned(), "pin_memory left advantages in pageable memory"
        moved.append(pinned.to("cuda", non_blocking=True))
        del pinned
    assert len(moved) == len(expected) == -(-2_000 // BATCH_ROWS)
    for batch, (rows, targets, advantages) in zip(moved, expected, strict=True):
        assert batch.metadata["advantages"].device.type == "cuda"
        assert torch.equal(batch.targets.cpu(), targets)
        assert torch.equal(batch.metadata["advantages"].cpu(), advantages), "advantages changed on the way"
        log_probs = batch.metadata["old_log_probs"].cpu()
        rows = rows[:, None].float()
        learned = batch.loss_mask.cpu() > 0
        assert torch.equal(log_probs[learned], rows.expand_as(log_probs)[learned])


@contextmanager
def open_pool() -> Iterator[StreamingMixedShardDataset]:
    """Ten shards in which everything of a position says its number."""
    with tempfile.TemporaryDirectory() as folder:
        for shard in range(10):
            numbers = np.arange(shard * 2000, (shard + 1) * 2000)
            board = np.broadcast_to(numbers[:, None, None] % 251, (2000, 9, 9)).astype(np.uint8)
            np.savez(f"{folder}/shard_{shard}.npz", number=numbers, board=board)
        yield StreamingMixedShardDataset([folder], ["all"], 8000, 6000, random_seed=3)


def check_positions_of_a_pool_arrive_whole_from_pinned_memory_with_and_without_workers() -> None:
    for num_workers in (0, 2):
        with open_pool() as dataset:
            seen = []
            loader = dataset.loader(num_workers=num_workers, batch_size=500, pin_memory=True)
            for batch in loader:
                assert all(column.is_pinned() for column in batch.values())
                torch.cuda._sleep(SLEEP_CYCLES // 20)
                moved = {name: column.to("cuda", non_blocking=True) for name, column in batch.items()}
                del batch
                seen.append(moved)
            numbers = torch.cat([moved["number"] for moved in seen])
            boards = torch.cat([moved["board"] for moved in seen])
            assert numbers.sort().values.equal(torch.arange(20_000, device="cuda"))
            assert (boards == (numbers % 251)[:, None, None]).all()


QUEUE_BATCH_ROWS, QUEUE_BATCHES, QUEUE_FILES = 64, 10, 10


@contextmanager
def open_queue_files() -> Iterator[list[Path]]:
    """Ten files of ten batches. x of batch b in file f is full of 10 f + b, and y of its negative."""
    fields = fields_of({"batch_schema": [{"name": name, "dtype": "int64", "shape": [256]} for name in "xy"]})
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number:08}.batches") for number in range(QUEUE_FILES)]
        for number, path in enumerate(paths):
            facts = FileFacts("stamp", "train", number, QUEUE_BATCH_ROWS, QUEUE_BATCHES, fields)
            with BatchFileWriter(path, facts) as writer:
                for batch in range(QUEUE_BATCHES):
                    x = np.full((QUEUE_BATCH_ROWS, 256), QUEUE_BATCHES * number + batch)
                    writer.append([x, -x])
                writer.finish()
        yield paths


def queue_batches(paths: list[Path], memory: Callable[[int], np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """As a consumer has them: views of a file's memory, which is given up when the next file is read."""
    for path in paths:
        _, rows = read_batches(path, memory)
        for batch in range(QUEUE_BATCHES):
            at = slice(batch * QUEUE_BATCH_ROWS, (batch + 1) * QUEUE_BATCH_ROWS)
            yield {name: array[at] for name, array in rows.items()}
        del rows


def assert_are_numbered(batches: list[dict[str, torch.Tensor]]) -> None:
    assert len(batches) == QUEUE_FILES * QUEUE_BATCHES
    for number, batch in enumerate(batches):
        assert batch["x"].is_cuda
        assert bool((batch["x"] == number).all()), f"x of batch {number} changed on the way"
        assert bool((batch["y"] == -number).all()), f"y of batch {number} changed on the way"


def check_a_hundred_batches_of_a_queue_arrive_whole_behind_a_busy_stream_though_their_memory_is_used_again() -> None:
    with open_queue_files() as paths:
        memory = adapter.memory_for("cuda")
        list(queue_batches(paths, memory))  # torch has page-locked memory in stock from here on: to ask for more waits
        adapter.handed({"x": np.zeros(8, np.int64)}, "cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        moved, were_waiting = [], 0
        for batch in queue_batches(paths, memory):
            assert torch.from_numpy(batch["x"]).is_pinned(), "the file was read into pageable memory"
            moved.append(adapter.handed(batch, "cuda"))
            were_waiting += not torch.cuda.current_stream().query()
            del batch
        assert were_waiting, "every copy was waited for"
        torch.cuda.synchronize()
        assert_are_numbered(moved)
        again = [adapter.handed(batch, "cuda") for batch in queue_batches(paths, memory)]  # its copies can be done
        assert_are_numbered(again)


def check_pinned_memory_of_a_queue_is_held_until_its_copies_are_done_and_free_after() -> None:
    memory = adapter.memory_for("cuda")
    num_bytes = 3 << 20
    adapter.handed({"x": memory(num_bytes)[: 1 << 20]}, "cuda")  # the device has room for it from here on
    kept = [memory(num_bytes) for _ in range(4)]  # in stock
    del kept
    torch.cuda.synchronize()
    block = memory(num_bytes)
    block[:] = 1
    address, held = block.ctypes.data, weakref.ref(block)
    torch.cuda._sleep(SLEEP_CYCLES)
    # Not from its beginning: of this copy torch's own allocator does not know that it is of this memory.
    there = adapter.handed({"x": block[1 << 20 : 2 << 20]}, "cuda")
    was_waiting = not torch.cuda.current_stream().query()
    del block
    others = [memory(num_bytes) for _ in range(4)]
    for other in others:
        other[:] = 2
    assert was_waiting, "the copy was waited for"
    assert address not in [other.ctypes.data for other in others], "used again during the copy"
    torch.cuda.synchronize()
    assert bool((there["x"] == 1).all())
    adapter.handed({"x": np.zeros(8, np.int64)}, "cuda")  # the next batch lets go of those that are done
    assert held() is None, "never free again"


def check_batches_of_ordinary_memory_arrive_whole_though_it_is_used_again() -> None:
    """A provider in the same process gives such ones."""
    with open_queue_files() as paths:
        moved = []
        torch.cuda._sleep(SLEEP_CYCLES)
        for batch in queue_batches(paths, pooled(BlockPool())):
            moved.append(adapter.handed(batch, torch.device("cuda", 0)))
            for array in batch.values():
                array[:] = -1  # at once: pinned memory of its own was copied from
        torch.cuda.synchronize()
        assert_are_numbered(moved)


CHECKS = {name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")}


def main() -> int:
    if not torch.cuda.is_available():
        print(f"no CUDA device here (torch {torch.__version__}): nothing was checked")
        return 2
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}")
    failed = 0
    for name, check in CHECKS.items():
        try:
            check()
            print(f"ok      {name}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
