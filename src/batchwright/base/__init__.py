"""What every folder may use: errors, files, locks, journals, processes, memory, fingerprints."""
