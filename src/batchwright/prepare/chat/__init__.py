"""Conversations -> tokens, with what each token is: formats, templates, rendering, spans."""

__all__: list[str] = []
