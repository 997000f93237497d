"""Candidates for the next token."""
