"""The only place that names a framework. Nothing here is imported until it is asked for."""

from __future__ import annotations

__all__: list[str] = []
