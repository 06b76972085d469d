"""Rows of raw data: formats, compression, and the files of a source."""

from batchwright.sources import csv as csv
from batchwright.sources import json as json
from batchwright.sources import tar as tar
from batchwright.sources.formats import Format, Malformed, format_for, known_formats, register_format
from batchwright.sources.listing import InputFile, list_files, looks_like_paths
from batchwright.sources.units import Unit, cut_files, cut_rows, read_unit

__all__ = [
    "Format",
    "InputFile",
    "Malformed",
    "Unit",
    "cut_files",
    "cut_rows",
    "format_for",
    "known_formats",
    "list_files",
    "looks_like_paths",
    "read_unit",
    "register_format",
]
