"""What a user writes, for type checkers: `make types` runs mypy --strict and basedpyright over it. It is never run.

The last two lines must be errors: an ignore that nothing needs is an error of its own.
"""
# pyright: standard, reportUnnecessaryTypeIgnoreComment=error

from collections.abc import Iterator
from typing import assert_type

import batchwright as bw

loader = bw.PretrainDataLoader("corpus.store", chunk_size=2048, batch_size=32, framework="numpy")
assert_type(loader.get_batch(), bw.TrainingBatch)
assert_type(bw.digest("corpus.store", loader, 0, 99), str)
bw.MixedDataLoader({"web": "web.store", "code": loader}, {"web": 3, "code": 1}, chunk_size=2048)
bw.RolloutDataLoader([{"prompt": [1], "response": [2], "reward": 1.0}], compute_advantages=True)
bw.ConversationDataLoader("sft.jsonl", bw.train_tokenizer("corpus/"), 2048, packing="best_fit")
bw.PretrainDataLoader(
    "corpus.store",
    chunk_size=2048,
    batch_size=bw.Batching(32, epoch_end="pad"),
    shuffle=bw.Shuffle("pool", pool_rows=4096),
    weights=bw.Mixture({"web": 3, "code": 1}, num_tokens=10**9),
    fields=bw.Fields(segment_ids=True),
    delivery=bw.Delivery(prefetch=2),
)
bw.RolloutDataLoader("log", compute_advantages=bw.Advantages("gae", gamma=0.99), batch_size=bw.Batching(tokens=4096))


class MyDataLoader(bw.DataLoader):
    def __init__(self, batches: list[bw.TrainingBatch]) -> None:
        self.batches, self.at = batches, 0

    def get_batch(self, batch_size: int | None = None) -> bw.TrainingBatch:
        self.at += 1
        return self.batches[self.at - 1]

    def get_iterator(self) -> Iterator[bw.TrainingBatch]:
        return iter(self.batches)

    def get_num_batches(self, batch_size: int | None = None) -> int:
        return len(self.batches)

    def reset(self, epoch: int = 0) -> None:
        self.at = 0


loaders: list[bw.DataLoader] = [loader, MyDataLoader([])]
assert_type(loaders[0].get_batch(), bw.TrainingBatch)
bw.DatasetBuffer([{"loss": 1.0}]).set([0], loss=0.5)
bw.PretrainDataLoader("corpus.store", chunk_sise=2048)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
value = bw.no_such_name  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
