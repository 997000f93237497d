"""One call in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from flashmem.base.interrupts import held_back
from flashmem.base.threads import started

Result = TypeVar("Result")


class Apart(Generic[Result]):
    """A call that has begun in a new thread. The interpreter waits for it before it exits."""

    def __init__(self, name: str, function: Callable[..., Result], *arguments: Any) -> None:
        """Begin it; `name`: of the thread. Raises RunError: the system has no more threads."""
        self._result: Result
        self._error: BaseException | None = None
        with held_back():
            self._thread = started(self._work, name, function, arguments, daemon=False)

    def _work(self, function: Callable[..., Result], arguments: tuple[Any, ...]) -> None:
        try:
            self._result = function(*arguments)
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether `result` need not wait."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def result(self) -> Result:
        """Wait until the thread has ended; what the call returned, or raises what it raised. Any thread may ask, also again."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result
