"""Failures of runs: their messages, and tracebacks that keep no device memory alive."""

from __future__ import annotations

import traceback


class RequestError(Exception):
    """A run failed because of its request, while no launch ran: the model stays usable. `error` is for the user."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def said(error: BaseException) -> str:
    """The message of an error, or the name of its type if it has none."""
    return str(error) or type(error).__name__


def why_closed(error: BaseException) -> str:
    """The reason, for a message, why a run that raised `error` closes its session or model."""
    if isinstance(error, KeyboardInterrupt) and not str(error):
        return "its last run was interrupted"
    return f"its last run failed: {said(error)}"


def forget_locals(error: BaseException) -> None:
    """Clear the local variables in the traceback of an error, which keep device memory alive.

    The lines of the traceback stay. Frames that still execute keep their variables.
    """
    seen = set[int]()
    left = [error]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        left += [other for other in (each.__cause__, each.__context__) if other is not None]
