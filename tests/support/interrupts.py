"""Ctrl-C at every moment of an action, one after the other, as CPython has them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupted_at(number: int) -> Iterator[list[int]]:
    """In the body, a SIGINT arrives when a function of Python begins, or one of C has returned, for the n-th time.

    Those are the moments at which CPython runs signal handlers, but for backward jumps. Yields a list that is empty until then.
    """
    seen, came = 0, list[int]()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal seen
        if event in ("call", "c_return") and not came:
            seen += 1
            if seen == number:
                came.append(number)
                signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setprofile(look)
    try:
        yield came
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, before)


def interrupt_everywhere(act: Callable[[], object], check: Callable[[], object], most: int = 1000) -> int:
    """Call `act` again and again, each time with a SIGINT one moment later, and `check` after each; the number of moments."""
    for number in range(1, most):
        try:
            with interrupted_at(number) as came:
                act()
        except KeyboardInterrupt:
            pass
        check()
        if not came:
            return number - 1
    raise AssertionError(f"the action has more than {most} moments")
