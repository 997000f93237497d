"""Mesa's open compilers for the GPUs of phones: compile kernels for Adreno and Mali without a device, and count instructions.

docs/phone-compilers.md explains what is installed, what the numbers mean and what they cannot say.
"""
