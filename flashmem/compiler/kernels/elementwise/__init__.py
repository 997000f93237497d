"""Elementwise operators."""
