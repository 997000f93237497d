"""Mesa's open compilers for the GPUs of phones: compile kernels for Adreno and Mali without a device, and count instructions.

docs/research/phone-compilers.md explains the installation, the meaning of the numbers and their limits.
"""
