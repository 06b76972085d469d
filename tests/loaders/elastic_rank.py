"""One rank of a job that will be killed: appends what it was handed, step by step, until somebody stops it.

A folder of raw files, instead of a store, is streamed.

python elastic_rank.py STORE RANK WORLD_SIZE STATE_FILE OUT_FILE WORKERS
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from pathlib import Path

import batchwright as bw

store, rank, world_size, state_file, out_file, workers = sys.argv[1:]
is_raw = not (Path(store) / "batchwright.json").exists()
raw = {"tokenizer": "bytes", "streaming": True, "shuffle_rows": 100} if is_raw else {}
loader = bw.PretrainDataLoader(
    store,
    chunk_size=16,
    batch_size=48,
    seed=7,
    epochs=None,
    rank=int(rank),
    world_size=int(world_size),
    framework="numpy",
    workers=int(workers),
    **raw,
)
with open(state_file) as file:
    state = json.load(file)
if state is not None:
    loader.load_state_dict(state)
out = os.open(out_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    for batch in loader.get_iterator():
        hashes = [zlib.crc32(row.tobytes()) for row in batch.input_ids]
        line = json.dumps({"step": loader.step - 1, "hashes": hashes, "state": loader.state_dict()})
        os.write(out, line.encode() + b"\n")  # one write: a reader may see half of the last line, never a mixed one
        time.sleep(0.002)
