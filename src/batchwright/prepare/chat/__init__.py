"""Conversations to tokens with spans: formats, templates, rendering."""

__all__: list[str] = []
