"""A pool of positions in memory. A thread reads shards ahead and keeps it full."""
