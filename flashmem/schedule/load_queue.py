"""What a run has to load and nobody has taken yet, in the order of first use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar


class Released(Protocol):
    """Something that is released by a launch, or by none (0)."""

    @property
    def after(self) -> int:
        """That launch."""
        ...


Item = TypeVar("Item", bound=Released)


class LoadQueue(Generic[Item]):
    """A queue from which items are taken out of order: those that are released pass those that are not.

    Not safe for several threads: call it with a lock. Items are named by their numbers.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        self._taken = bytearray(len(items))
        self._announced = bytearray(len(items))
        self._first = 0  # all items before this one are taken
        self._due: list[int] = []  # a heap of released items; the first one can be taken
        self._by_release = sorted(range(len(items)), key=lambda number: items[number].after)
        self._released = 0  # so many of these are, or were, in `_due`

    def __getitem__(self, number: int) -> Item:
        return self._items[number]

    def next(self, done: int, *, ahead: bool) -> int | None:
        """The first item that is released after `done` launches; with `ahead`, else the first one. None if there is none."""
        due = self._due
        taken = self._taken
        by_release = self._by_release
        while self._released < len(taken) and self._items[by_release[self._released]].after <= done:
            heappush(due, by_release[self._released])
            self._released += 1
        while due and taken[due[0]]:
            heappop(due)
        if due:
            return due[0]
        return next(self._first_waiting(1), None) if ahead else None

    def take(self, number: int) -> Item:
        """Take an item."""
        self._taken[number] = True
        return self._items[number]

    def announce(self, taken: int, most: int, done: int) -> list[Item]:
        """A taken item, and those of the first `most` waiting ones that are released after `done` launches: the ones that were
        not announced to the disk before.
        """
        ahead = [taken, *(number for number in self._first_waiting(most) if self._items[number].after <= done)]
        ahead = [number for number in ahead if not self._announced[number]]
        for number in ahead:
            self._announced[number] = True
        return [self._items[number] for number in ahead]

    def _first_waiting(self, most: int) -> Iterator[int]:
        """The first items that are not taken, at most `most`."""
        taken = self._taken
        last = len(self._taken)
        number = self._first
        while number < last and taken[number]:
            number += 1
        self._first = number
        while number < last and most:
            if not taken[number]:
                yield number
                most -= 1
            number += 1
