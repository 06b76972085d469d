"""Adapters of frameworks: the only code that imports them. Nothing here is imported until it is asked for."""

from __future__ import annotations

__all__: list[str] = []
