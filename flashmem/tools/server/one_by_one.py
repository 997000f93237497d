"""Work in a thread beside the event loop, in the order of arrival. What waits holds no thread, and can be taken back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class OneByOne:
    """A thread for work, one piece of it at a time. The methods are for the thread of the event loop."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._is_busy = False
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()

    def begin(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Do `work` after all before it. Cancelling the result takes it back while it waits; later it is done to its end."""
        result: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        entry = result, work
        self._waiting.append(entry)
        result.add_done_callback(lambda _: self._waiting.remove(entry) if entry in self._waiting else None)
        self._begin_next()
        return result

    def _begin_next(self) -> None:
        while not self._is_busy and self._waiting:
            result, work = self._waiting.popleft()
            try:
                running = asyncio.get_running_loop().run_in_executor(self._thread, work)
            except RuntimeError as error:  # no thread can be started
                result.set_exception(error)
                continue
            self._is_busy = True
            running.add_done_callback(partial(self._end, result))

    def _end(self, result: asyncio.Future[Any], running: asyncio.Future[Any]) -> None:
        self._is_busy = False
        error = None if running.cancelled() else running.exception()
        if result.done() or running.cancelled():
            result.cancel()
        elif error is not None:
            result.set_exception(error)
        else:
            result.set_result(running.result())
        self._begin_next()
