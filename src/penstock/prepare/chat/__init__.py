"""Conversations -> tokens, with what each token is: formats, templates, rendering, spans."""
