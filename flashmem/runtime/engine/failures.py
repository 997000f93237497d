"""Failures of runs: what is said about them, and tracebacks that keep no device memory alive."""

from __future__ import annotations

import traceback


class RequestError(Exception):
    """A run failed because of its request, while no layer ran: the model stays usable. `error` is for the user."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def said(error: BaseException) -> str:
    """The message of an error, or its type's name if there is none."""
    return str(error) or type(error).__name__


def why_closed(error: BaseException) -> str:
    """Why a run that raised `error` closes its session or model, for a message."""
    if isinstance(error, KeyboardInterrupt) and not str(error):
        return "its last run was interrupted"
    return f"its last run failed: {said(error)}"


def forget_locals(error: BaseException) -> None:
    """Clear the local variables in the traceback of an error, which keep device memory alive.

    The traceback's lines stay. Calls that are not over keep their variables.
    """
    seen, left = set[int](), [error]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        left += [other for other in (each.__cause__, each.__context__) if other is not None]
