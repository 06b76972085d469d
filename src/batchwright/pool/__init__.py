"""A pool of positions in memory, kept full from shards by a thread that reads ahead."""

__all__: list[str] = []
