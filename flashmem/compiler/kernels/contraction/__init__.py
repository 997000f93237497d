"""Contractions: MatMul, convolutions, and products of two activations."""
