"""The loads of a run that nobody has taken yet, in the order of first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from flashmem.schedule.loads import LOOKED_AT, Load


class LoadQueue:
    """A queue from which loads are taken out of order: those that are released pass those that are not.

    Not safe for several threads: call it with a lock. Loads are named by their numbers.
    """

    def __init__(self, loads: Sequence[Load], is_released: Callable[[Load], bool]) -> None:
        self._loads, self._is_released = loads, is_released
        self._taken = bytearray(len(loads))
        self._announced = bytearray(len(loads))
        self._first = 0  # all loads before this one are taken

    def __getitem__(self, number: int) -> Load:
        return self._loads[number]

    def next(self, *, ahead: bool) -> int | None:
        """The first released load; with `ahead`, else the first one. None if there is none."""
        first = None
        for number in self._waiting(LOOKED_AT):
            if self._is_released(self._loads[number]):
                return number
            first = number if first is None else first
        return first if ahead else None

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

    def announce(self, taken: int, most: int) -> list[Load]:
        """A taken load, and those of the next `most` that are released: the ones that were not announced to the disk before."""
        ahead = [taken, *(number for number in self._waiting(most) if self._is_released(self._loads[number]))]
        ahead = [number for number in ahead if not self._announced[number]]
        for number in ahead:
            self._announced[number] = True
        return [self._loads[number] for number in ahead]

    def _waiting(self, most: int) -> Iterator[int]:
        """The first loads that are not taken, at most `most`."""
        taken, last = self._taken, len(self._taken)
        while self._first < last and taken[self._first]:
            self._first += 1
        return islice((number for number in range(self._first, last) if not taken[number]), most)
