"""Rows to batches on time: windows, packing, gathering, masks, read-ahead, and which rank gets what."""

__all__: list[str] = []
