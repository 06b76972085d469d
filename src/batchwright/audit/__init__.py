"""Look at a run from outside: trace a step to its documents, digest what was read, drill a restart."""

__all__: list[str] = []
