"""What a failed run leaves: a sentence that says why, and nothing of the device's memory."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from flashmem.base.errors import RunError


class RequestError(Exception):
    """A run failed for what was asked, before or after its layers: the model is as it was. `error` is what the user gets."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def of_the_request() -> Iterator[None]:
    """Around what reads inputs, while no layer runs. Raises RequestError for anything but a RunError: a disk or a device that
    fails does so for the next request, too.
    """
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        raise RequestError(error) from None


def said(error: BaseException) -> str:
    """What an error says; its name, where it says nothing."""
    return str(error) or type(error).__name__


def why_closed(error: BaseException) -> str:
    """Why a run that ended so closes its session or model: for a sentence."""
    if isinstance(error, KeyboardInterrupt) and not str(error):
        return "its last run was interrupted"
    return f"its last run failed: {said(error)}"


def forget_locals(error: BaseException) -> None:
    """Have the calls that an error came through forget their variables, which hold placements and device memory.

    Whoever keeps the error would keep them otherwise. The traceback's lines stay. Calls that are not over are left alone.
    """
    seen, left = set[int](), [error]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        left += [other for other in (each.__cause__, each.__context__) if other is not None]
