"""The loads of one run: what the executor, and whoever shares the disk between models, see of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Lock

from flashmem.base.errors import RunError
from flashmem.base.threads import Waiters
from flashmem.runtime.opencl.handles import Event
from flashmem.schedule.loads import Load, TimedInterval


class Loading(ABC):
    """The loads of one run, which have begun. The thread of the launches calls `take_over`, `launched` or `layer_done` for
    every launch, `wait` before a use, and `stop` at the end.
    """

    follows_launches = False
    """Whether copies wait on the device for launches, so that a load is released when its launch is enqueued, not complete."""

    wakes: frozenset[int]
    """The launches that release loads, or free slices."""

    loaded: dict[str, bool]
    """By slice: whether launches may use it."""

    when_freed: Callable[[int], None] | None = None
    """Called with a completed launch, after its slices are freed."""

    _lock: Lock
    """Guards the loads."""

    _changed: Waiters
    """Threads without work."""

    _admit: Callable[[Load], bool] | None
    """Whether there is memory for a load; None: for all. Asked with the lock."""

    @property
    @abstractmethod
    def intervals(self) -> Sequence[TimedInterval]:
        """The loads that were made, after `stop`."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether the disk is free for other models: nothing is loading, and nothing can before the next launch ends."""

    @abstractmethod
    def take_over(self) -> None:
        """From now on the caller's thread makes the loads in its calls, unless loader threads do."""

    def launched(self, layer: int, event: Event) -> None:
        """Launch `layer` is enqueued and flushed, and `event` is its event, where copies follow launches.

        Raises:
            RunError: the device refuses a copy, or a read failed.
        """
        raise NotImplementedError

    def layer_done(self, layer: int) -> None:  # noqa: B027 - nothing waits for it where copies follow launches
        """Launch `layer` and all before it are complete: free slices last used there, and release waiting loads."""

    @abstractmethod
    def wait(self, name: str) -> None:
        """Wait until slice `name` is loaded. Raises RunError: a load failed."""

    def wake(self) -> None:
        """Retry loads that were not admitted: memory may be available now."""
        with self._lock:
            self._changed.wake()

    def admit_all(self) -> None:
        """Admit every released load from now on."""
        with self._lock:  # no thread may be asking `_admit`
            self._admit = None
            self._changed.wake()

    @abstractmethod
    def stop(self) -> None:
        """End the loads, and free the slices that are due. Ctrl-C waits for that. Raises RunError if a load failed."""


def said_of_load(error: BaseException) -> str:
    """The message, in the thread of the launches, for a failure of another thread."""
    return str(error) if isinstance(error, RunError) else f"loading weights failed: {type(error).__name__}: {error}"
