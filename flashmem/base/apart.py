"""One call in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


def apart(name: str, function: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Future[Result]:
    """Begin a call in a new thread called `name`, which ends with it. The interpreter waits for it before it exits."""
    threads = ThreadPoolExecutor(1, name)
    try:
        return threads.submit(function, *args, **kwargs)
    finally:
        threads.shutdown(wait=False)
