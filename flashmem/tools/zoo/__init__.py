"""Known architectures to try things on: exported with random weights, or as graphs without any."""
