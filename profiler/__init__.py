"""The profiler: measures a device with the kernels and the runtime that models use, and trains the capacity predictor on it.

`run.py` runs it all: rates, launches of known models, sampled kernels, training. docs/capacity.md explains what is measured.
"""
