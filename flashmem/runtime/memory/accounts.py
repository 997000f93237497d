"""Who holds how much: one limit, and an account for each of those who share it.

Pure bookkeeping, without OpenCL: the ledger (`flashmem.runtime.memory.ledger`) allocates what is counted here. Bytes are
*held* while they are allocated, and may be *promised* before: a run is promised its peak, so that nothing that others take
meanwhile can make one of its loads fail. Bytes that several accounts use are held by one of them and *borrowed* by the
others, so that any of them may go on with them when their holder lets go. What an account may count on is the larger of what
is promised and what is held or borrowed, its commitment; the commitments of all accounts never pass the limit, unless the
limit was lowered below what had been granted before.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

from flashmem.base.errors import RunError
from flashmem.base.units import format_size

Category = Literal["constants", "arena", "outputs", "staging", "weights"]

_REMEMBERED = 1 << 16
"""Changes of the total that a budget remembers at most."""


class Changes:
    """The latest changes of a total, at most so many, in 16 bytes each: a runtime that runs for weeks grows by none."""

    def __init__(self, most: int) -> None:
        self._most, self._first = most, 0  # the oldest, once there are so many
        self._at, self._held = array("d"), array("q")

    def note(self, at: float, held: int) -> None:
        """From second `at` on, `held` bytes are held."""
        if len(self._at) < self._most:
            self._at.append(at)
            self._held.append(held)
        else:
            self._at[self._first], self._held[self._first] = at, held
            self._first = (self._first + 1) % self._most

    def __iter__(self) -> Iterator[tuple[float, int]]:
        """(seconds, bytes held from then on), the oldest first."""
        yield from zip(self._at[self._first :], self._held[self._first :], strict=True)
        yield from zip(self._at[: self._first], self._held[: self._first], strict=True)


class Budget:
    """The limit that accounts share, in bytes; None for no limit. Safe to use from several threads.

    `changed` is notified whenever there may be more room than before.
    """

    def __init__(self, limit: int | None) -> None:
        self.changed = threading.Condition()
        self.total = 0  # held
        self.peak = 0
        self.committed = 0
        self.history = Changes(_REMEMBERED)
        self._limit = limit

    @property
    def limit(self) -> int | None:
        """The limit in force."""
        return self._limit

    @limit.setter
    def limit(self, nbytes: int | None) -> None:
        """Lowering it takes nothing from anybody: what is committed beyond it stays until its holder gives it back."""
        with self.changed:
            self._limit = nbytes
            self.changed.notify_all()

    @property
    def room(self) -> float:
        """Bytes that nobody counts on; below 0 where the limit was lowered."""
        return float("inf") if self._limit is None else self._limit - self.committed


class Account:
    """What one holder has of a budget, by category, and over time."""

    def __init__(self, budget: int | Budget | None) -> None:
        """`budget`: one that is shared, or the limit of this account alone."""
        self.shared = budget if isinstance(budget, Budget) else Budget(budget)
        self.by_category: dict[Category, int] = {}
        self.peak_by_category: dict[Category, int] = {}  # when the total was highest
        self.total = 0
        self.peak = 0
        self.changes: list[tuple[float, Category, int]] = []  # (seconds, category, its bytes from then on)
        self._began = (time.perf_counter(), dict[Category, int]())  # what the changes start from
        self._promised = 0
        self._borrowed = 0
        self._lock = self.shared.changed

    def reserve(self, category: Category, nbytes: int, what: str) -> None:
        """Hold `nbytes` more.

        Raises:
            RunError: they were not promised, and would pass the budget; nothing is counted.
        """
        with self._lock:
            self._refuse_beyond(nbytes, what)
            self._change(category, nbytes)

    def _refuse_beyond(self, nbytes: int, what: str) -> None:
        budget = self.shared
        more = max(self._promised, self.total + self._borrowed + nbytes) - self.commitment
        if more and budget.limit is not None and budget.committed + more > budget.limit:
            raise RunError(
                f"{what} needs {format_size(nbytes)}, but {format_size(budget.committed)} of the budget of "
                f"{format_size(budget.limit)} are in use; raise the budget or compile for it"
            )

    def borrow(self, nbytes: int, what: str) -> None:
        """Count on `nbytes` more, which another account holds. Raises RunError as `reserve` does."""
        with self._lock:
            self._refuse_beyond(nbytes, what)
            self._owe(nbytes)

    def give_up(self, nbytes: int) -> None:
        """Count on `nbytes` less of what is borrowed."""
        with self._lock:
            self._owe(-nbytes)

    def hand_to(self, other: Account, category: Category, nbytes: int) -> None:
        """Let `other` hold `nbytes` that it has borrowed from this account. It counted on them: nothing can be refused."""
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
        """From now on count on holding `nbytes` in all; True unless that would pass the budget. Less is always granted."""
        with self._lock:
            more = max(nbytes, self.total + self._borrowed) - self.commitment
            if more > self.shared.room and more > 0:
                return False
            self._promised = nbytes
            self._commit(more)
            return True

    def extend(self, nbytes: int) -> bool:
        """Count on `nbytes` more than is promised or held; False where that would pass the budget."""
        with self._lock:
            return self.promise(self.commitment + nbytes)

    @property
    def commitment(self) -> int:
        """Bytes that it counts on."""
        return max(self._promised, self.total + self._borrowed)

    def _commit(self, more: int) -> None:
        self.shared.committed += more
        if more < 0:
            self.shared.changed.notify_all()

    def _change(self, category: Category, nbytes: int, *, lent: int = 0) -> None:
        budget, now, before = self.shared, time.perf_counter(), self.commitment
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
        """Begin a new account over time: a new run."""
        with self._lock:
            self._began = (time.perf_counter(), dict(self.by_category))
            self.changes = [(self._began[0], category, nbytes) for category, nbytes in self.by_category.items()]
            self.peak, self.peak_by_category = self.total, dict(self.by_category)

    @property
    def history(self) -> list[tuple[float, int]]:
        """(seconds, bytes of all categories from then on)."""
        with self._lock:
            begun, held = self._began[0], dict(self._began[1])
            moments = [(begun, sum(held.values()))]
            for at, category, nbytes in self.changes[len(held) :]:
                held[category] = nbytes
                moments.append((at, sum(held.values())))
            return moments

    def average(self, until: float) -> float:
        """Time-weighted mean of the total since the history began, in bytes; `until` as `time.perf_counter()` gives it."""
        moments = [*self.history, (until, 0)]
        weighted = sum(held * (after - at) for (at, held), (after, _) in pairwise(moments))
        duration = until - moments[0][0]
        return weighted / duration if duration > 0 else float(moments[0][1])

    def clear(self) -> None:
        """Hold nothing, and count on nothing."""
        with self._lock:
            for category, nbytes in self.by_category.items():
                self._change(category, -nbytes)
            self._owe(-self._borrowed)
            self.promise(0)
