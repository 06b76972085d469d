"""Samples -> batch: cut windows out of token streams and gather them in bulk."""

from penstock.assemble.batch import Block, constant_mask
from penstock.assemble.gather import gather_windows, windows_at
from penstock.assemble.window import WindowRows

__all__ = ["Block", "WindowRows", "constant_mask", "gather_windows", "windows_at"]
