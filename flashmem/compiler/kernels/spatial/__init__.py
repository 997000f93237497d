"""Pooling and resizing."""
