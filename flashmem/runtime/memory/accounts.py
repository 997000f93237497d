"""Memory accounting: one limit that several accounts share.

Pure bookkeeping, without OpenCL: the ledger (`flashmem.runtime.memory.ledger`) allocates what is counted here. Bytes are *held*
while they are allocated. They can be *promised* before: a run is promised its peak, so that no other account can make its loads
fail. Bytes that several accounts use are held by one of them and *borrowed* by the others. So the others can continue to use
them when the holder releases them. The *commitment* of an account is the larger of what is promised and what is held or
borrowed. The sum of all commitments never exceeds the limit, unless the limit was lowered later.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

from flashmem.base.errors import RunError
from flashmem.base.threads import Waiters
from flashmem.base.units import format_size

Category = Literal["constants", "arena", "states", "outputs", "staging", "weights"]

_REMEMBERED = 1 << 16
"""The most changes of the total that a budget remembers."""


class Changes:
    """A bounded history of a total: its latest changes, 16 bytes each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._first = 0  # index of the oldest change in a full history
        self._at = array("d")
        self._held = array("q")

    def note(self, at: float, held: int) -> None:
        """Add a change: from second `at` on, `held` bytes are held."""
        if len(self._at) < self._most:
            self._at.append(at)
            self._held.append(held)
        else:
            self._at[self._first] = at
            self._held[self._first] = held
            self._first = (self._first + 1) % self._most

    def __iter__(self) -> Iterator[tuple[float, int]]:
        """The changes as (seconds, bytes held from then on), the oldest first."""
        yield from zip(self._at[self._first :], self._held[self._first :], strict=True)
        yield from zip(self._at[: self._first], self._held[: self._first], strict=True)


class Budget:
    """A limit in bytes for all its accounts together; None for no limit. Thread-safe.

    `lock` guards it and its accounts; `changed`: who waits until there may be more room.
    """

    def __init__(self, limit: int | None, name: str = "budget") -> None:
        """`name`: what messages call it."""
        self.name = name
        self.lock = threading.RLock()
        self.changed = Waiters()
        self.total = 0  # bytes held
        self.peak = 0
        self.committed = 0
        self.history = Changes(_REMEMBERED)
        self._limit = limit

    @property
    def limit(self) -> int | None:
        """The current limit in bytes."""
        return self._limit

    @limit.setter
    def limit(self, nbytes: int | None) -> None:
        """Change the limit. Accounts keep their commitments beyond a lower limit until they release them."""
        with self.lock:
            self._limit = nbytes
            self.changed.wake()

    @property
    def room(self) -> float:
        """Uncommitted bytes; negative after the limit was lowered."""
        return float("inf") if self._limit is None else self._limit - self.committed


class Account:
    """The share of one holder in a budget, by category, with its history."""

    def __init__(self, budget: int | Budget | None) -> None:
        """Open an account of a shared budget, or one with its own limit in bytes."""
        self.shared = budget if isinstance(budget, Budget) else Budget(budget)
        self.by_category: dict[Category, int] = {}
        self.peak_by_category: dict[Category, int] = {}  # at the time of the highest total
        self.total = 0
        self.peak = 0
        self.changes: list[tuple[float, Category, int]] = []  # (seconds, category, its bytes from then on)
        self._began = (time.perf_counter(), dict[Category, int]())  # the state before the first change
        self._promised = 0
        self._borrowed = 0
        self._lock = self.shared.lock

    def reserve(self, category: Category, nbytes: int, what: str) -> None:
        """Hold `nbytes` more.

        Raises:
            RunError: they were not promised and would exceed the budget; nothing is counted.
        """
        with self._lock:
            self._refuse_beyond(nbytes, what)
            self._change(category, nbytes)

    def _refuse_beyond(self, nbytes: int, what: str) -> None:
        budget = self.shared
        more = max(self._promised, self.total + self._borrowed + nbytes) - self.commitment
        if more and budget.limit is not None and budget.committed + more > budget.limit:
            raise RunError(
                f"{what} needs {format_size(nbytes)}, but {format_size(budget.committed)} of the {budget.name} of "
                f"{format_size(budget.limit)} are in use; raise the {budget.name} or compile for it"
            )

    def borrow(self, nbytes: int, what: str) -> None:
        """Borrow `nbytes` more, which another account holds. Raises RunError like `reserve`."""
        with self._lock:
            self._refuse_beyond(nbytes, what)
            self._owe(nbytes)

    def give_up(self, nbytes: int) -> None:
        """Return `nbytes` of the borrowed bytes."""
        with self._lock:
            self._owe(-nbytes)

    def hand_to(self, other: Account, category: Category, nbytes: int) -> None:
        """Transfer `nbytes` to `other`, which has borrowed them from this account. Cannot fail: `other` is committed to
        them.
        """
        with self._lock:
            self._change(category, -nbytes)
            other._change(category, nbytes, lent=nbytes)

    def _owe(self, nbytes: int) -> None:
        before = self.commitment
        self._borrowed += nbytes
        self._commit(self.commitment - before)

    def release(self, category: Category, nbytes: int) -> None:
        """Hold `nbytes` less."""
        with self._lock:
            self._change(category, -nbytes)

    def promise(self, nbytes: int) -> bool:
        """Commit to `nbytes` in all; returns whether the budget permits it. A decrease always succeeds."""
        with self._lock:
            more = max(nbytes, self.total + self._borrowed) - self.commitment
            if more > self.shared.room and more > 0:
                return False
            self._promised = nbytes
            self._commit(more)
            return True

    def extend(self, nbytes: int) -> bool:
        """Commit to `nbytes` more than is promised or held; False if that would exceed the budget."""
        with self._lock:
            return self.promise(self.commitment + nbytes)

    @property
    def commitment(self) -> int:
        """The committed bytes."""
        return max(self._promised, self.total + self._borrowed)

    def _commit(self, more: int) -> None:
        self.shared.committed += more
        if more < 0:
            self.shared.changed.wake()

    def _change(self, category: Category, nbytes: int, *, lent: int = 0) -> None:
        budget = self.shared
        now = time.perf_counter()
        before = self.commitment
        self.total += nbytes
        self._borrowed -= lent
        self.by_category[category] = self.by_category.get(category, 0) + nbytes
        self.changes.append((now, category, self.by_category[category]))
        if self.total > self.peak:
            self.peak = self.total
            self.peak_by_category = dict(self.by_category)
        self._commit(self.commitment - before)
        budget.total += nbytes
        budget.peak = max(budget.peak, budget.total)
        budget.history.note(now, budget.total)

    def restart_history(self) -> None:
        """Clear the history, at the start of a run."""
        with self._lock:
            self._began = (time.perf_counter(), dict(self.by_category))
            self.changes = [(self._began[0], category, nbytes) for category, nbytes in self.by_category.items()]
            self.peak = self.total
            self.peak_by_category = dict(self.by_category)

    @property
    def history(self) -> list[tuple[float, int]]:
        """The history as (seconds, bytes of all categories from then on)."""
        with self._lock:
            if len(self.changes) == len(self._began[1]):  # nothing has changed
                return [(self._began[0], self.total)]
            begun = self._began[0]
            held = dict(self._began[1])
            moments = [(begun, sum(held.values()))]
            for at, category, nbytes in self.changes[len(held) :]:
                held[category] = nbytes
                moments.append((at, sum(held.values())))
            return moments

    def average(self, until: float) -> float:
        """The time-weighted mean of the total over the history up to `until`, in bytes; `until` in seconds of
        `time.perf_counter()`.
        """
        if len(self.changes) == len(self._began[1]):  # nothing has changed
            return float(self.total)
        moments = [*self.history, (until, 0)]
        weighted = sum(held * (after - at) for (at, held), (after, _) in pairwise(moments))
        duration = until - moments[0][0]
        return weighted / duration if duration > 0 else float(moments[0][1])

    def clear(self) -> None:
        """Release everything: hold nothing and commit to nothing."""
        with self._lock:
            for category, nbytes in self.by_category.items():
                self._change(category, -nbytes)
            self._owe(-self._borrowed)
            self.promise(0)
