"""Kernel families, each in a folder of its own: its configs, what they fit and cost, and its lowering to launches.

A family registers itself: kinds of configs in `configs.py` and `tensor_cores.py`, lowerings in `lowering.py`.
"""
