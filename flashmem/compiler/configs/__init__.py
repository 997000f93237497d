"""Kernel configs: what all kinds have in common, and those of a device."""
