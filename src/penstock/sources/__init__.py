"""Raw bytes -> rows: formats, compression, and which files a source means."""

from penstock.sources import arrow as arrow
from penstock.sources import csv as csv
from penstock.sources import json as json
from penstock.sources import parquet as parquet
from penstock.sources import tar as tar
from penstock.sources.formats import Format, Malformed, format_for, known_formats, register_format
from penstock.sources.listing import InputFile, list_files, looks_like_paths
from penstock.sources.units import Unit, cut_files, cut_rows, read_unit

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
