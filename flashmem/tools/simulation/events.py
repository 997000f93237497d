"""Discrete-event simulation of processes that share resources.

A process is a generator. It yields `Work` (an amount of one resource, whose speed decides the time) or a condition to wait for.
Between two events all speeds are constant, so time advances to the next completion. One function maps the busy resources to
speeds; it models how works share a resource (a bus) or slow each other (kernels during a copy). A resource can also be used by
one work at a time (a disk, a copy engine).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field

Condition = Callable[[], bool]
Speeds = Callable[[Mapping[str, int]], Mapping[str, float]]
"""Maps the number of active works of each resource to units per second for each of them; at least one is positive."""


@dataclass(frozen=True)
class Work:
    """`amount` units of `resource`: bytes, or seconds at the resource's full speed."""

    resource: str
    amount: float


Process = Generator[Work | Condition, None, None]


@dataclass(eq=False)
class _Running:
    process: Process
    resource: str
    left: float


@dataclass(eq=False)
class _Waiting:
    process: Process
    ready: Condition


@dataclass
class Events:
    """The simulation clock. `now` is in seconds; `busy` is the time in which each resource had any work.

    `in_turn` has the resources that do one work at a time, in order of arrival.
    """

    speeds: Speeds
    in_turn: Collection[str] = ()
    now: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    _running: list[_Running] = field(default_factory=list)
    _waiting: list[_Waiting] = field(default_factory=list)

    def start(self, process: Process) -> None:
        """Start `process` at the current time."""
        self._resume(process)

    def run(self, process: Process) -> None:
        """Start `process` and simulate until it ends; other processes stop where they are.

        Raises:
            RuntimeError: every process waits for another one.
        """
        ended = False

        def watched() -> Process:
            nonlocal ended
            yield from process
            ended = True

        self._resume(watched())
        while not ended:
            if not self._wake():
                self._advance()

    def _resume(self, process: Process) -> None:
        """Run `process` up to its next pause."""
        for pause in process:
            if isinstance(pause, Work):
                if pause.amount > 0:
                    self._running.append(_Running(process, pause.resource, pause.amount))
                    return
            elif not pause():
                self._waiting.append(_Waiting(process, pause))
                return

    def _wake(self) -> bool:
        """Resume the process that waits longest among those whose condition holds; whether there was one."""
        for waiting in self._waiting:
            if waiting.ready():
                self._waiting.remove(waiting)
                self._resume(waiting.process)
                return True
        return False

    def _advance(self) -> None:
        """Advance to the next completion."""
        at_work = self._at_work()
        speeds = self.speeds(Counter(running.resource for running in at_work))
        times = [running.left / speeds[running.resource] for running in at_work if speeds[running.resource] > 0]
        if not times:
            raise RuntimeError("the simulation is stuck: every process waits for another one")
        step = min(times)
        self.now += step
        for resource in {running.resource for running in at_work}:
            self.busy[resource] = self.busy.get(resource, 0.0) + step
        finished: list[_Running] = []
        for running in at_work:
            speed = speeds[running.resource]
            # Works that end at the same time end together despite rounding.
            if running.left <= step * speed * (1 + 1e-12):
                finished.append(running)
            running.left -= step * speed
        for running in finished:
            self._running.remove(running)
        for running in finished:
            self._resume(running.process)

    def _at_work(self) -> list[_Running]:
        """The works in progress, without those that wait for their turn."""
        taken: set[str] = set()
        found = []
        for running in self._running:
            if running.resource not in taken:
                found.append(running)
            if running.resource in self.in_turn:
                taken.add(running.resource)
        return found
