"""Batches handed between processes: providers write files of them into a folder, trainers take them from there."""

__all__: list[str] = []
