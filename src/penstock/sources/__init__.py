"""Raw bytes -> rows: formats, compression, and which files a source means."""

from penstock.sources.formats import Format, format_for, register_format
from penstock.sources.listing import InputFile, list_files, looks_like_paths
from penstock.sources.units import Unit, cut_files, cut_rows, read_unit

__all__ = [
    "Format",
    "InputFile",
    "Unit",
    "cut_files",
    "cut_rows",
    "format_for",
    "list_files",
    "looks_like_paths",
    "read_unit",
    "register_format",
]
