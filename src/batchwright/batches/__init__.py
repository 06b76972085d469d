"""Batches from rows, on time: windows, packing, gathering, masks, read-ahead, and the rows of each rank."""
