"""Samples -> batch: cut windows out of token streams and gather them in bulk."""

from batchwright.assemble.batch import Block, constant_mask
from batchwright.assemble.gather import gather_windows, windows_at
from batchwright.assemble.window import WindowRows

__all__ = ["Block", "WindowRows", "constant_mask", "gather_windows", "windows_at"]
