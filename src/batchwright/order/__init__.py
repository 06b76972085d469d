"""The order of samples: positions only, never data."""
