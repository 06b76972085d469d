"""The order of samples: positions only, never data."""

__all__: list[str] = []
