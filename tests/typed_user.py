"""What a user writes, for type checkers: `make types` runs mypy --strict and basedpyright over it. It is never run.

The last two lines must be errors: an ignore that nothing needs is an error of its own.
"""
# pyright: standard, reportUnnecessaryTypeIgnoreComment=error

from typing import assert_type

import batchwright as bw

loader = bw.PretrainDataLoader("corpus.store", chunk_size=2048, batch_size=32, framework="numpy")
assert_type(loader.get_batch(), bw.TrainingBatch)
assert_type(bw.digest("corpus.store", loader, 0, 99), str)
bw.MixedDataLoader({"web": "web.store", "code": loader}, {"web": 3, "code": 1}, chunk_size=2048)
bw.RolloutDataLoader([{"prompt": [1], "response": [2], "reward": 1.0}], compute_advantages=True)
bw.ConversationDataLoader("sft.jsonl", bw.train_tokenizer("corpus/"), 2048, packing="best_fit")
bw.DatasetBuffer([{"loss": 1.0}]).set([0], loss=0.5)
bw.PretrainDataLoader("corpus.store", chunk_sise=2048)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
value = bw.no_such_name  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
