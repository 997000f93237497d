"""Threads, locks and Ctrl-C: what the main thread may use at any moment.

CPython raises KeyboardInterrupt in the main thread where a function of Python begins, among other places. `__enter__` and
`__exit__` of `threading.Condition`, and all methods of `threading.Event`, are such functions: `with condition:` can so be left
with its lock held, and whoever needs the lock next waits for ever. `__enter__` and `__exit__` of `threading.Lock` and
`threading.RLock` are functions of C. So here only those are in `with`, and threads wait for a change by `Waiters`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from flashmem.base.errors import RunError
from flashmem.base.interrupts import held_back


class Waiters:
    """Threads that wait until another one changes what a lock guards.

        while True:
            with lock:
                if ready:
                    return
                turn = waiters.turn()
            turn.acquire()

    The lock is free while a thread waits, and Ctrl-C ends the wait of the main thread. In place of `threading.Condition`.
    """

    def __init__(self) -> None:
        self._turns: list[threading.Lock] = []

    def turn(self) -> threading.Lock:
        """A lock for the caller to `acquire` once it has released the one that guards the change, which it holds here. That
        returns after the next `wake`.
        """
        turn = threading.Lock()
        turn.acquire()
        self._turns.append(turn)
        return turn

    def leave(self, turn: threading.Lock) -> None:
        """Wait no longer, after a time limit. Requires the lock."""
        if turn in self._turns:
            self._turns.remove(turn)

    def wake(self) -> None:
        """Let all threads go on that wait. Requires the lock."""
        turns = self._turns
        while turns:
            try:  # noqa: SIM105 - functions of Python would be more places for Ctrl-C
                turns[-1].release()
            except RuntimeError:  # by an earlier call, which Ctrl-C ended here
                pass
            turns.pop()


class Condition(threading.Condition):
    """One for `concurrent.futures`, whose main thread waits in `with condition:`: what that calls are the functions of C of its
    lock. Where Ctrl-C ends a wait, it can raise RuntimeError instead of KeyboardInterrupt.
    """

    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)


class Thread(threading.Thread):
    """A thread that main threads can wait for at any moment.

    When Ctrl-C ends `join` or `is_alive` of `threading.Thread`, Python 3.11 and 3.12 take a thread that runs for one that has
    ended, and later calls of `join` return at once.
    """

    def __init__(self, work: Callable[..., object], name: str, arguments: Sequence[Any], *, daemon: bool) -> None:
        """`started` starts it.

        `threading` has a weak set of all thread objects, of which only a forked process asks. At the end of an object it calls
        a function of Python, in which Ctrl-C would be lost: the main thread may drop a session, and its threads, at any moment.
        """
        super().__init__(target=work, args=arguments, name=name, daemon=daemon)
        threading._dangling.discard(self)  # type: ignore[attr-defined]
        self._running = threading.Lock()
        self._running.acquire()
        self._over = False

    def run(self) -> None:
        """Call `work`."""
        try:
            super().run()
        finally:
            self._over = True
            self._running.release()

    def is_alive(self) -> bool:
        """Whether `work` has yet to return."""
        return not self._over

    def join(self, timeout: float | None = None) -> None:
        """Wait until `work` has returned, and the thread has ended; here without a time limit."""
        assert timeout is None
        with self._running:
            pass
        super().join()  # a moment; Ctrl-C may end it


def started(work: Callable[..., object], name: str, *arguments: Any, daemon: bool = True) -> Thread:
    """A new thread that calls `work` with the arguments. Assign the result inside `held_back` where the thread must be known.

    Ctrl-C waits until it has begun: `Thread.start` waits for the thread by an Event, which an interrupt would leave locked.

    Raises:
        RunError: the system has no more threads.
    """
    thread = Thread(work, name, arguments, daemon=daemon)
    with held_back():
        try:
            thread.start()
        except RuntimeError as error:
            raise RunError(
                f"the thread {name} could not be started ({error}); end other programs, or allow more threads (ulimit -u)"
            ) from error
    return thread


def call_each(*calls: Callable[[], object] | None) -> None:
    """Call all of these that there are, also after one has failed, while Ctrl-C waits; then raise the first error.

    To close several things.
    """
    first: BaseException | None = None
    with held_back():
        for call in calls:
            try:
                if call is not None:
                    call()
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first
