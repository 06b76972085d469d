"""Inspect a run from outside: trace a step to its documents, digest its rows, drill a restart."""
