"""What every folder may use: errors, files, locks, journals, processes, memory, fingerprints."""

__all__: list[str] = []
