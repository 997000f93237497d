"""The loads of a run that nobody has taken yet, in the order of first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from flashmem.schedule.loads import LOOKED_AT, Load


class LoadQueue:
    """A queue from which loads are taken out of order: those that are released pass those that are not.

    Not safe for several threads: call it with a lock. Loads are named by their numbers.
    """

    def __init__(self, loads: Sequence[Load]) -> None:
        self._loads = loads
        self._after = [load.after for load in loads]
        self._soonest = list(accumulate(reversed(self._after), min))[::-1]  # of a load and those behind it
        self._taken = bytearray(len(loads))
        self._announced = bytearray(len(loads))
        self._first = 0  # all loads before this one are taken

    def __getitem__(self, number: int) -> Load:
        return self._loads[number]

    def next(self, done: int, *, ahead: bool) -> int | None:
        """The first load that is released after `done` launches; with `ahead`, else the first one. None if there is none."""
        first, after = next(self._waiting(1), None), self._after
        if first is None or self._soonest[first] > done:
            return first if ahead else None
        released = (number for number in self._waiting(LOOKED_AT) if after[number] <= done)
        return next(released, first if ahead else None)

    def take(self, number: int, joins: Callable[[Sequence[Load], Load], bool] | None = None) -> list[Load]:
        """Take a load, and those behind it that `joins` lets be read together with it; None: only that one."""
        loads, first = [self._loads[number]], self._loads[number]
        self._taken[number] = True
        while joins is not None and (number := number + 1) < len(self._loads) and not self._taken[number]:
            load = self._loads[number]
            if load.after > first.after or load.preload != first.preload or not joins(loads, load):
                break
            self._taken[number] = True
            loads.append(load)
        return loads

    def announce(self, taken: int, most: int, done: int) -> list[Load]:
        """A taken load, and those of the next `most` that are released after `done` launches: the ones that were not announced
        to the disk before.
        """
        ahead = [taken, *(number for number in self._waiting(most) if self._after[number] <= done)]
        ahead = [number for number in ahead if not self._announced[number]]
        for number in ahead:
            self._announced[number] = True
        return [self._loads[number] for number in ahead]

    def _waiting(self, most: int) -> Iterator[int]:
        """The first loads that are not taken, at most `most`."""
        taken, last, number = self._taken, len(self._taken), self._first
        while number < last and taken[number]:
            number += 1
        self._first = number
        while number < last and most:
            if not taken[number]:
                yield number
                most -= 1
            number += 1
