"""Every peer beside us: `make bench-peers`. One small file for each peer, and a runner that leaves none out.

    load_<peer>.py      shuffled windows of tokens:  convert(), open_batches()
    bake_<peer>.py      JSONL to tokens on disk:     bake(), read_back()
    source.py           what all peers read
    child.py            runs one peer, in a process of its own
    loading.py, baking.py, table.py, __main__.py    the rounds, the checks, the tables

Only `source.py`, `child.py` and one peer's file are imported in a measured process, so no peer pays for another.
"""
