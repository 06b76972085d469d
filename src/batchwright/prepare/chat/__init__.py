"""Conversations to tokens with spans: formats, templates, rendering."""
