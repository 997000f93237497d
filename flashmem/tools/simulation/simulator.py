"""The simulator: runs a scenario with host, loader threads and disk as processes that share resources.

It models the concurrency and the waits of `runtime/engine/executor.py` and `runtime/streaming`:

- The disk reads what was announced, in order. Its queue is limited, and a thread that announces more waits. A read from the
  page cache cannot end before the disk has read the data.
- Loader threads free slices, then take the next released load. If loads pass through staging of a thread, it reads one
  load before its release and copies it afterwards. Threads share one read rate, and one copy rate or a copy engine, which makes
  one copy at a time. The fixed cost of a slice is interpreter time, for one thread at a time.
- With a copy engine (runtime/streaming/ahead.py) as many loads are read at a time as the ring has pieces, each of which is free
  again after its copy. A thread alone reads no faster than its share of the rate of all. Copies from the host tier need no
  piece. The fixed cost of a load is that of the thread that enqueues launches and copies.
- The device runs launches in order, each after its slices are loaded, for the time that the planner computes with the copies
  during it. The host costs nothing: it always waits for the oldest launch in flight, so loads are released when a launch ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from flashmem.runtime.engine.report import Latency, MemoryUse, RunReport
from flashmem.runtime.memory.accounts import Category
from flashmem.schedule.load_queue import LoadQueue
from flashmem.schedule.loads import Step, TimedInterval
from flashmem.tools.simulation.events import Events, Process, Work
from flashmem.tools.simulation.scenario import Machine, Scenario, SimulatedLoad


@dataclass(frozen=True)
class Prediction:
    """The predicted report of a first run, with times since the session's creation, and of a later run, since its begin.

    `busy` is the seconds of the first run in which each resource worked: disk, read, copy and compute; "slice" is the fixed
    cost of loads, "time" is time without a shared resource. `disk` has the reads of a cold disk in the first run.
    """

    report: RunReport
    later_report: RunReport
    busy: dict[str, float]
    disk: tuple[TimedInterval, ...]

    @property
    def later(self) -> float:
        """The seconds of a later run."""
        return self.later_report.latency.integrated


def simulate(scenario: Scenario, budget: int | None = None) -> Prediction:
    """Simulate the first run of a session, and a later one. `budget` is only written to the reports."""
    first = _SimulatedRun(scenario)
    later = _SimulatedRun(scenario.later())
    return Prediction(first.simulate_run(budget), later.simulate_run(budget), first.events.busy, tuple(first.disk))


def speeds(machine: Machine, busy: Mapping[str, int]) -> dict[str, float]:
    """Units per second of each work: bytes (disk, read, copy), or seconds (compute, slices, fixed times)."""
    return {
        "disk": machine.disk_bandwidth or 0.0,
        "slice": 1.0,
        "read": machine.read_bandwidth / max(machine.readers if machine.copy_engine else 1, busy.get("read", 0)),
        "copy": machine.copy_bandwidth / max(1, busy.get("copy", 0)),
        "compute": 1.0,
        "time": 1.0,
    }


@dataclass
class _Memory:
    """Bytes in use over time, with the ledger's rules."""

    history: list[tuple[float, int]] = field(default_factory=list)
    changes: list[tuple[float, Category, int]] = field(default_factory=list)
    total: int = 0
    peak: int = 0
    by_category: dict[Category, int] = field(default_factory=dict)
    peak_by_category: dict[Category, int] = field(default_factory=dict)

    def change(self, now: float, category: Category, nbytes: int) -> None:
        self.total += nbytes
        self.by_category[category] = self.by_category.get(category, 0) + nbytes
        self.history.append((now, self.total))
        self.changes.append((now, category, self.by_category[category]))
        if self.total > self.peak:
            self.peak = self.total
            self.peak_by_category = dict(self.by_category)

    def average(self, until: float) -> float:
        moments = [*self.history, (until, 0)]
        seconds = until - moments[0][0]
        if seconds <= 0:
            return float(self.total)
        return sum(held * (after - at) for (at, held), (after, _) in pairwise(moments)) / seconds


class _SimulatedRun:
    """One simulated run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.machine = scenario.machine
        in_turn = ("slice", "copy") if self.machine.copy_engine else ("slice",)
        self.events = Events(lambda busy: speeds(self.machine, busy), in_turn)
        self.memory = _Memory()
        self.opened = 0.0
        self.loads: list[TimedInterval] = []
        self.layers: list[TimedInterval] = []
        self.disk: list[TimedInterval] = []
        self._disk_queue: deque[SimulatedLoad] = deque()
        self._backlog = 0  # bytes announced and not yet read
        self._announced: set[tuple[str, int]] = set()  # slice, and first byte of the segment
        self._in_cache: set[tuple[str, int]] = set()

    def simulate_run(self, budget: int | None) -> RunReport:
        """Simulate the run, until the outputs are in host memory."""
        if self.machine.disk_bandwidth is not None:
            self.events.start(self._disk())
        self.events.run(self._host())
        memory = self.memory
        ended = self.events.now
        use = MemoryUse(
            memory.peak, memory.average(ended), budget, dict(memory.peak_by_category), None, tuple(memory.history),
            changes=tuple(memory.changes), host=self.scenario.host,
        )  # fmt: skip
        latency = Latency(ended, self.opened, ended - self.opened)
        return RunReport(latency, use, tuple(self.loads), tuple(self.layers), ended=ended)

    # The actions of the session, in order.

    def _host(self) -> Process:
        scenario = self.scenario
        self.events.start(self._announcer())
        yield from self._open()
        if scenario.resident_first:
            yield from self._bring_in(scenario.loads)
        self.opened = self.events.now
        yield Work("time", scenario.run_seconds)
        yield from self._storage(scenario.gathered_bytes)
        yield Work("copy", scenario.input_bytes)
        loads: tuple[SimulatedLoad, ...] = () if scenario.resident_first else scenario.loads
        loader = _Loader(self, loads, scenario.frees, self.machine.readers)
        yield from self._execute(loader)
        loader.stop()
        yield Work("copy", scenario.output_bytes)

    def _open(self) -> Process:
        """Everything except weights."""
        scenario = self.scenario
        yield Work("time", scenario.context_seconds)
        self.memory.history.append((self.events.now, 0))  # the ledger's first entry
        yield Work("time", scenario.kernel_seconds)
        for allocation in scenario.allocations:
            self.memory.change(self.events.now, allocation.category, allocation.nbytes)
            if allocation.category == "constants":
                yield from self._storage(scenario.constants_bytes)

    def _storage(self, nbytes: int) -> Process:
        """The host reads a part of the file that was not announced."""
        rates = (self.machine.read_bandwidth, self.machine.disk_bandwidth or float("inf"))
        yield Work("time", nbytes / min(rates))

    def _bring_in(self, loads: Sequence[SimulatedLoad]) -> Process:
        """Make the loads before the first launch, and wait for all of them."""
        loader = _Loader(self, loads, {}, self.machine.readers)
        yield lambda: not loader.is_missing_any
        loader.stop()

    def _execute(self, loader: _Loader) -> Process:
        """Executor and compute queue: launches in order, each after its slices are loaded."""
        for number, layer in enumerate(self.scenario.layers, start=1):
            waited_for = ""
            for name in layer.needs:
                if loader.lacks(name):
                    waited_for = name
                    yield lambda name=name: not loader.lacks(name)  # type: ignore[misc]
            start = self.events.now
            yield Work("compute", layer.seconds)
            self.layers.append(TimedInterval(layer.name, start, self.events.now, waited_for=waited_for))
            loader.layer_done(number)

    # The processes that run concurrently with the session.

    def _announcer(self) -> Process:
        """The announcements that the session makes while it opens."""
        for load in self.scenario.loads[: self.scenario.announced]:
            yield from self.announce(load)

    def _disk(self) -> Process:
        """Reads the announced parts of the file in sequence."""
        while True:
            yield lambda: bool(self._disk_queue)
            load = self._disk_queue.popleft()
            start = self.events.now
            yield Work("disk", load.nbytes)
            self.disk.append(TimedInterval(load.name, start, self.events.now, nbytes=load.nbytes))
            self._backlog -= load.nbytes
            self._in_cache.add((load.name, load.first))

    def announce(self, load: SimulatedLoad) -> Process:
        """Announce a load to the disk; waits while the disk's queue is full."""
        if self.machine.disk_bandwidth is None or (load.name, load.first) in self._announced:
            return
        self._announced.add((load.name, load.first))
        yield lambda: not self._backlog or self._backlog + load.nbytes <= self.machine.disk_queue_bytes
        self._disk_queue.append(load)
        self._backlog += load.nbytes

    def read(self, load: SimulatedLoad, steps: list[tuple[Step, float]]) -> Process:
        """The steps before the copy of a load, with a copy engine."""
        yield Work("slice", self.machine.load_seconds)
        nbytes = sum(nbytes for resource, nbytes in load.pieces if resource == "read")
        if nbytes:
            yield Work("read", nbytes)
            if self.machine.disk_bandwidth is not None:
                yield lambda: (load.name, load.first) in self._in_cache
            steps.append(("read", self.events.now))

    def transfer(self, load: SimulatedLoad, is_released: Callable[[], bool], steps: list[tuple[Step, float]]) -> Process:
        """The steps of a loader thread for one load, which it adds to `steps`. `is_released` returns whether it is released."""
        yield Work("slice", self.machine.load_seconds)
        for index, (resource, nbytes) in enumerate(load.pieces):
            if resource == "copy" and not is_released():
                yield is_released
                steps.append(("wait", self.events.now))
            yield Work(resource, nbytes)
            if index == load.last_of_file and self.machine.disk_bandwidth is not None:
                yield lambda: (load.name, load.first) in self._in_cache
            steps.append((resource, self.events.now))


class _Loader:
    """Loader threads on one sequence of loads (runtime/streaming/loader.py), or pieces of a ring (ahead.py there)."""

    def __init__(
        self, simulated: _SimulatedRun, loads: Sequence[SimulatedLoad], frees: Mapping[int, Sequence[str]], threads: int
    ) -> None:
        self._missing = Counter(load.name for load in loads)  # segments, by slice
        self._simulated = simulated
        self._frees = frees
        self._held = Counter[str]()
        for load in simulated.scenario.loads:
            self._held[load.name] += load.held
        self._ahead = threads
        enqueued = {number for number, load in enumerate(loads) if simulated.machine.copy_engine and not load.is_read}
        self._queue = LoadQueue([load for number, load in enumerate(loads) if number not in enqueued])
        self._done = 0
        self._to_free: list[str] = []
        self._stopping = False
        for number in sorted(enqueued):
            simulated.events.start(self._enqueue(loads[number]))
        for number in range(min(threads, len(loads))):
            simulated.events.start(self._work(number))

    def lacks(self, name: str) -> bool:
        """Whether a part of `name` is not loaded yet."""
        return name in self._missing

    @property
    def is_missing_any(self) -> bool:
        """Whether any load is left."""
        return bool(self._missing)

    def layer_done(self, layer: int) -> None:
        """Record that the host knows the end of launch `layer`."""
        self._done = layer
        self._to_free.extend(self._frees.get(layer, ()))

    def stop(self) -> None:
        """Stop the threads and make the remaining frees."""
        self._stopping = True
        self._free()

    def _work(self, thread: int) -> Process:
        simulated = self._simulated
        events = self._simulated.events
        while True:
            yield lambda: self._stopping or bool(self._to_free) or self._next() is not None
            if self._stopping:
                return
            self._free()
            number = self._next()
            if number is None:
                continue
            load = self._queue.take(number)
            for part in self._queue.announce(number, self._ahead, self._done):
                yield from simulated.announce(part)
            start = events.now
            if load.held:
                simulated.memory.change(start, "weights", load.held)
            steps: list[tuple[Step, float]] = []
            if simulated.machine.copy_engine:
                yield from simulated.read(load, steps)
                yield from self._copy(load, start, thread, steps)
            else:
                yield from simulated.transfer(load, self._release_condition(load), steps)
                self._note_load(load, start, thread, steps)

    def _release_condition(self, load: SimulatedLoad) -> Callable[[], bool]:
        return lambda: load.after <= self._done

    def _enqueue(self, load: SimulatedLoad) -> Process:
        """A load of a slice that the host tier holds."""
        yield from self._copy(load, self._simulated.events.now, 0, [])

    def _copy(self, load: SimulatedLoad, start: float, thread: int, steps: list[tuple[Step, float]]) -> Process:
        """The copy of a load, after its release."""
        released = self._release_condition(load)
        events = self._simulated.events
        if not released():
            yield released
            steps.append(("wait", events.now))
        yield Work("copy", sum(nbytes for resource, nbytes in load.pieces if resource == "copy"))
        steps.append(("copy", events.now))
        self._note_load(load, start, thread, steps)

    def _note_load(self, load: SimulatedLoad, start: float, thread: int, steps: Sequence[tuple[Step, float]]) -> None:
        simulated = self._simulated
        made = TimedInterval(load.name, start, simulated.events.now, thread, tuple(steps), load.nbytes, load.after)
        simulated.loads.append(made)
        self._missing[load.name] -= 1
        if not self._missing[load.name]:
            del self._missing[load.name]

    def _free(self) -> None:
        for name in self._to_free:
            self._simulated.memory.change(self._simulated.events.now, "weights", -self._held[name])
        self._to_free.clear()

    def _next(self) -> int | None:
        """The number of the next load: the first released one, else one to read ahead."""
        number = self._queue.next(self._done, ahead=True)
        if number is None or self._queue[number].after <= self._done or self._queue[number].reads_ahead:
            return number
        return None
