"""Adapters of frameworks, the only code that imports them. A module here is imported on first use."""

from __future__ import annotations
