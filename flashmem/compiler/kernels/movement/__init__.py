"""Copies: Transpose, Concat, Pad and others."""
