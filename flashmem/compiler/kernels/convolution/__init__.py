"""Convolutions."""
