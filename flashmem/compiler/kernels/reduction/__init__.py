"""Reductions, softmax and normalizations over rows."""
