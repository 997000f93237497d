"""Designs at run time: duration of a switch, latency of concurrent runs, reactions to pressure.

    python -m benchmarks.serving.design_pressure DESIGNS (switches | together | core | memory) [--repeats 3] [--group CGROUP]

Prints one JSON object. `core` starts a process that keeps one core busy. `memory` starts one that allocates memory, inside the
memory cgroup CGROUP of this process. The benchmark lowers that cgroup's limit to its present use plus twice the best design's
memory. So no other process on the machine is affected. Both processes end with this one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from flashmem.bundle.bundle import Bundle
from flashmem.runtime.application.designs import Designs, DeviceState
from flashmem.runtime.application.manager import Manager
from flashmem.runtime.engine.inputs import complete_inputs
from flashmem.runtime.memory.pressure import sample

Kind = Literal["core", "memory"]

PATIENCE_SECONDS = 60.0
"""The longest wait for an idle machine before pressure, and for the switch back after it."""

MOST_RUNS = 12
"""Runs after which pressure counts as unanswered."""

LEFT = 1 / 8
"""Fraction of the best design's memory that pressure leaves available."""

_HOLD = """
import sys
held = []
for line in iter(sys.stdin.readline, ""):
    held.append(b"\\1" * int(line))
    print(flush=True)
"""
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1000000):
        pass
"""


class System(Protocol):
    """The system that the manager observes."""

    root: Path

    def clock(self) -> float:
        """The time in seconds."""
        ...

    def press(self, kind: Kind, best: int) -> None:
        """Start to occupy a core, or memory; `best` is the memory of the best design."""
        ...

    def release(self) -> None:
        """Free it."""
        ...


class Here:
    """This machine, with processes that really occupy a core or memory. `group`: a memory cgroup for this benchmark."""

    def __init__(self, group: Path | None = None) -> None:
        self.root, self._group = Path("/"), group
        self._process: subprocess.Popen[str] | None = None

    def clock(self) -> float:
        """See `System`."""
        return time.monotonic()

    def press(self, kind: Kind, best: int) -> None:
        """See `System`."""
        pipe = subprocess.PIPE
        if kind == "core":
            self._process = subprocess.Popen([sys.executable, "-c", _SPIN], text=True)
            return
        if self._group is None:
            raise SystemExit("memory is only taken inside a cgroup; name one with --group")
        free = _lower(self._group, 2 * best)
        self._process = subprocess.Popen([sys.executable, "-c", _HOLD], stdin=pipe, stdout=pipe, text=True)
        while free > LEFT * best:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(f"{max(1 << 20, int((free - LEFT * best) / 2))}\n")
            self._process.stdin.flush()
            self._process.stdout.readline()
            free = _free()

    def release(self) -> None:
        """See `System`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _free() -> int:
    available = sample(0.0, 0).available
    if available is None:
        raise SystemExit("this system does not say how much memory can be had")
    return available


def _lower(group: Path, room: int) -> int:
    """Set the limit of `group` to its use without files plus `room`; returns the available bytes."""
    version_1 = group / "memory.limit_in_bytes"
    limit = version_1 if version_1.exists() else group / "memory.max"
    limit.write_text(str(int(limit.read_text()) - _free() + room))
    free = _free()
    if not room / 2 < free < 2 * room:
        raise SystemExit(f"{free} bytes can be had where there should be {room}; is {group} the group of this process?")
    return free


class MadeUp:
    """A simulated system below `root`: each run takes a second, and pressure is written to its files; nothing is occupied."""

    def __init__(self, root: Path, best: int) -> None:
        self.root, self._best = root, best
        self._now, self._busy = 0.0, 0
        self._pressure: Kind | None = None
        self.passes()

    def clock(self) -> float:
        """See `System`."""
        return self._now

    def press(self, kind: Kind, best: int) -> None:
        """See `System`."""
        self._pressure = kind

    def release(self) -> None:
        """See `System`."""
        self._pressure = None

    def passes(self) -> None:
        """Advance by a second of two cores."""
        self._now += 1.0
        self._busy += 100 if self._pressure == "core" else 0
        available = LEFT * self._best if self._pressure == "memory" else 2.0 * self._best
        (self.root / "proc/self").mkdir(parents=True, exist_ok=True)
        (self.root / "proc/meminfo").write_text(f"MemAvailable: {int(available) // 1024} kB\n")
        (self.root / "proc/stat").write_text(f"cpu  {self._busy} 0 0 {int(200 * self._now) - self._busy} 0 0 0 0\n")
        (self.root / "proc/self/stat").write_text("7 (a) S " + "0 " * 20)


@dataclass(frozen=True)
class Answered:
    """One run: its end time, task, seconds and design, the state that the manager had seen, and the pressure."""

    at: float
    task: str
    seconds: float
    design: int
    troubled: tuple[str, ...]
    short: bool
    phase: str


class Drawn:
    """Inputs of all bundles, drawn in advance."""

    def __init__(self, folder: Path) -> None:
        parts = [part for design in Designs.read(folder).designs for part in design.parts]
        bundles = [Bundle.open(folder / name) for name in {part.bundle for part in parts}]
        self._known = {bundle.path.name: complete_inputs(bundle.program, {}, 0) for bundle in bundles}

    def __call__(self, bundle: Bundle) -> dict[str, Any]:
        """The inputs of one bundle."""
        return self._known[bundle.path.name]


def pressed(folder: Path, kind: Kind, system: System, passes: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run all tasks in turn: before, during and after pressure on a core or memory. Calls `passes` after each run."""
    designs = Designs.read(folder)
    best = designs.choose(DeviceState())
    given, runs = Drawn(folder), list[Answered]()
    with Manager(folder, clock=system.clock, root=system.root) as manager:
        turns = itertools.cycle([part.task for part in manager.design.parts])

        def run(phase: str) -> Answered:
            task, begun = next(turns), system.clock()
            manager.run(task, given)
            at, state = system.clock(), manager.state
            runs.append(Answered(at, task, at - begun, manager.current, tuple(sorted(state.troubled)), state.memory, phase))
            passes()
            return runs[-1]

        def until(phase: str, done: Callable[[Answered], bool]) -> bool:
            begun = system.clock()
            while system.clock() - begun < PATIENCE_SECONDS:
                if done(run(phase)):
                    return True
            return False

        tasks = len(manager.design.parts)
        for _ in range(2 * tasks):
            run("before")
        if not until("before", lambda last: not last.troubled and not last.short):
            raise SystemExit(f"there is pressure already: {manager.state}; try again when the machine is quiet")
        for _ in range(tasks):
            run("before")
        system.press(kind, designs.designs[best].memory)
        try:
            count, answered = 0, False
            while not answered and count < MOST_RUNS:
                last = run("during")
                count += 1
                seen = last.short if kind == "memory" else bool(last.troubled)
                answered = seen and last.design == designs.choose(manager.state)
            for _ in range(3 * tasks):
                run("during")
        finally:
            system.release()
        released = system.clock()
        back = until("after", lambda last: last.design == best and not last.troubled and not last.short)
        reverted = system.clock() - released
        for _ in range(tasks):
            run("after")
    return {
        "kind": kind,
        "answered_after_runs": count if answered else None,
        "reverted_after_seconds": reverted if back else None,
        "runs": [asdict(each) for each in runs],
    }


class Led(Manager):
    """A manager whose device state is set from outside."""

    led = DeviceState()

    @property
    def state(self) -> DeviceState:
        """The state that was set."""
        return self.led


def switches(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Switch from the best design to each other one and back, by states for which the policy selects them."""
    designs = Designs.read(folder)
    given, rows = Drawn(folder), list[dict[str, Any]]()
    with Led(folder) as manager:
        _round(manager, given)
        for state in [*states(designs).values()] * repeats:
            for led in (state, DeviceState()):
                before, opened = manager.current, len(manager.openings)
                manager.led = led
                seconds = _round(manager, given)
                if manager.current == before:
                    continue
                again, closing = _round(manager, given), manager.switches[-1].seconds
                seconds[next(iter(seconds))] -= closing
                openings = {each.task: each.seconds for each in manager.openings[opened:]}
                rows.append(
                    {
                        "from": before,
                        "to": manager.current,
                        "closing": closing,
                        "opening": openings,
                        "loading": {task: seconds[task] - again[task] - each for task, each in openings.items()},
                    }
                )
    return rows


def states(designs: Designs) -> dict[int, DeviceState]:
    """A state for each design, except the one without trouble."""
    known = sorted({name for each in designs.sets for name in each})
    subsets = [frozenset(some) for size in range(len(known) + 1) for some in itertools.combinations(known, size)]
    found: dict[int, DeviceState] = {}
    for memory, troubled in itertools.product((False, True), subsets):
        state = DeviceState(troubled, memory)
        found.setdefault(designs.choose(state), state)
    return {design: state for design, state in found.items() if state != DeviceState()}


def _round(manager: Manager, given: Drawn) -> dict[str, float]:
    """Seconds of one run of each task."""
    seconds = {}
    for part in manager.design.parts:
        begun = time.perf_counter()
        manager.run(part.task, given)
        seconds[part.task] = time.perf_counter() - begun
    return seconds


def together(folder: Path, repeats: int) -> dict[str, float]:
    """Average seconds of each task of the best design while all run concurrently, each with its requests in sequence."""
    given = Drawn(folder)
    with Led(folder) as manager:
        _round(manager, given)
        taken: dict[str, list[float]] = {part.task: [] for part in manager.design.parts}
        enough = threading.Event()

        def ask(task: str) -> None:
            while not enough.is_set():
                begun = time.perf_counter()
                manager.run(task, given)
                taken[task].append(time.perf_counter() - begun)
                if all(len(each) >= repeats for each in taken.values()):
                    enough.set()

        threads = [threading.Thread(target=ask, args=(part.task,)) for part in manager.design.parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {task: statistics.fmean(seconds[:-1] or seconds) for task, seconds in taken.items()}


def main() -> None:
    """Run one measurement in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("designs", type=Path)
    parser.add_argument("what", choices=("switches", "together", "core", "memory"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--group", type=Path)
    args = parser.parse_args()
    if args.what == "switches":
        found: Any = switches(args.designs, args.repeats)
    elif args.what == "together":
        found = together(args.designs, args.repeats)
    else:
        found = pressed(args.designs, args.what, Here(args.group))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
