"""Errors of the interpreter."""

from __future__ import annotations


class UnknownTextError(Exception):
    """A kernel's text uses OpenCL C that the interpreter does not know; the message names it."""


class OutsideError(Exception):
    """A work-item accesses memory outside of a kernel's arguments; the message says which."""
