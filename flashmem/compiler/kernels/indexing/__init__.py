"""Gathers and scatters by index tensors."""
