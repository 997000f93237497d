"""The profiler: measures a device with the kernels and the runtime of models, and trains the capacity predictor on the results.

`run.py` runs all steps: rates, launches of known models, sampled kernels, training. docs/reference/internals/profile.md
explains the measurements.
"""
