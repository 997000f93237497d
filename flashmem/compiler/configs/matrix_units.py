"""NVIDIA's tensor cores: numbers that configs of several kernel families share."""

CHUNK = 8
"""Halves that are copied to local memory at a time: 16 bytes."""

STEP = 16
"""Steps of depth of one instruction on halves."""

CORE = 2048
"""Work-items of a core, at most: NVIDIA's programming guide, compute capability 8.0 and 9.0."""
