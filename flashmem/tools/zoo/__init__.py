"""Known architectures for tests and measurements: exported with random weights, or as graphs without weights."""
