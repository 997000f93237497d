"""Kernel families, each in a folder of its own: its configs, what fits, and its costs."""
