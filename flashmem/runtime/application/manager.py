"""Runs an application by its designs, and switches between them: CARIn's runtime manager (sections 3.2 and 7.2).

    with flashmem.Manager("app.designs") as manager:
        words = manager.run("read", {"ids": ids})

Before each run, a table (`runtime/application/designs.py`) gives the current design for the state of processors and memory,
which `runtime/application/watch.py` computes. A run ends under the design under which it began. A switch closes the sessions
that the next design lacks before it opens any other, so that both never use memory together. The next run of each task opens
the task's new session, and so is charged for its own weights only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from numpy.typing import NDArray

from flashmem.base.errors import RunError, UserError
from flashmem.bundle.bundle import Bundle
from flashmem.runtime.application.designs import Design, Designs, DeviceState, TaskAssignment
from flashmem.runtime.application.watch import Ticks, Watch, load_of_others, ticks
from flashmem.runtime.memory.pressure import Sample, sample
from flashmem.runtime.opencl.discovery import find_device
from flashmem.runtime.session import Session

Inputs = Mapping[str, Any]

SAMPLE_SECONDS = 0.1
"""Shortest interval between two samples of the system."""


class Switch(NamedTuple):
    """A change of the current design: the time, by the clock; the design's index; the seconds for closing sessions."""

    at: float
    design: int
    seconds: float


class Opening(NamedTuple):
    """The opening of a session: the time, by the clock; its task and bundle; its seconds, without the weights."""

    at: float
    task: str
    bundle: str
    seconds: float


@dataclass
class _Open:
    """The session of a task. `cold`: its next run is the first and loads weights, so its time does not rate the processor."""

    part: TaskAssignment
    session: Session
    alone: threading.Lock = field(default_factory=threading.Lock)
    cold: bool = True


@dataclass(eq=False)
class _Running:
    """A run in progress, and the usual seconds of concurrent runs on the same processor."""

    part: TaskAssignment
    waits: float


class Manager:
    """Sessions of the current design. Any thread may call the methods; each task has one run at a time.

    `switches` and `openings` record what was done so far, including the first design; `current` is the index of the design.
    """

    def __init__(self, folder: str | Path, *, clock: Callable[[], float] = time.monotonic, root: Path = Path("/")) -> None:
        """Select the design for a device without trouble.

        Args:
            folder: the output folder of `flashmem design`.
            clock: the time in seconds.
            root: the root of the paths of /proc and the cgroups.

        Raises:
            UserError: no such designs, or a bundle or a device of one of them is missing.
        """
        self._clock = clock
        self._root = root
        self.designs = Designs.read(Path(folder))
        parts = {part.bundle: part for design in self.designs.designs for part in design.parts}
        self._bundles = {name: Bundle.open(Path(folder) / name) for name in parts}
        cpus = frozenset(part.processor for part in parts.values() if find_device(part.device).kind == "cpu")
        self._watch = Watch(self.designs.designs[self.designs.choose(DeviceState())].memory, cpus)
        self._ticks: Ticks | None = ticks(root)
        self._sampled = clock()
        self._lock = threading.RLock()
        self._closed = False
        self._sessions: dict[str, _Open] = {}
        self._running: list[_Running] = []
        self._overlap = threading.Lock()  # guards `_running`; a switch that waits for a run may hold the other lock
        self.current = -1
        self.switches: list[Switch] = []
        self.openings: list[Opening] = []
        self._switch()
        try:
            for part in self.design.parts:
                self._session(part.task)
        except BaseException:
            self.close()
            raise

    @property
    def design(self) -> Design:
        """The current design."""
        return self.designs.designs[self.current]

    @property
    def state(self) -> DeviceState:
        """The state of the device at the last sample."""
        return self._watch.state

    def run(self, task: str, inputs: Inputs | Callable[[Bundle], Inputs]) -> list[NDArray[Any]]:
        """Run `task` with the model that the current design assigns to it; returns the outputs.

        Args:
            task: its name.
            inputs: an array for every input. Or, if the models of a task have different inputs, a function that maps the
                bundle to its inputs. The function may call methods of the manager. It is called again if a switch before the
                run changes the bundle.

        Raises:
            UserError: no such task.
            ValueError: unknown, missing or misshapen inputs; the manager stays usable.
            RunError: the run failed, and the next one opens the bundle again; or the manager is closed.
        """
        tasks = [part.task for part in self.designs.designs[0].parts]
        if task not in tasks:
            raise UserError(f"no task {task!r} in these designs; there are: {', '.join(tasks)}")
        with self._lock:
            self._look()
        given: Any = inputs
        given_for: str | None = None  # the bundle of these inputs
        while True:
            with self._lock:
                opened = self._session(task)
            if callable(inputs) and given_for != opened.part.bundle:  # without a lock: it may call the manager
                given = inputs(opened.session.bundle)
                given_for = opened.part.bundle
            with opened.alone:
                if self._sessions.get(task) is not opened:
                    continue  # a switch closed it during the wait
                try:
                    with self._among_others(opened.part) as running:
                        begun = self._clock()
                        outputs = opened.session.run(None, given)
                        now = self._clock()
                except RunError:
                    opened.session.close()
                    self._sessions.pop(task, None)
                    raise
                cold = opened.cold
                opened.cold = False
            if not cold:
                with self._lock:
                    self._watch.ran(opened.part.processor, now - begun, opened.part.seconds + running.waits, now)
            return outputs

    def close(self) -> None:
        """Close all sessions."""
        with self._lock:
            self._closed = True
            self._leave(list(self._sessions))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _look(self) -> None:
        now = self._clock()
        if now - self._sampled >= SAMPLE_SECONDS:
            self._sampled = now
            before = self._ticks
            self._ticks = ticks(self._root)
            others = load_of_others(before, self._ticks) if before and self._ticks else None
            self._watch.sampled(self._sample(now), others)
        self._switch()

    def _sample(self, now: float) -> Sample:
        return sample(now, self.design.memory, self._root)

    def _switch(self) -> None:
        """Make the policy's design for the present state the current one."""
        chosen = self.designs.choose(self.state)
        if chosen == self.current or self._closed:
            return
        next_parts = self.designs.designs[chosen].parts
        seconds = self._leave([task for task, opened in list(self._sessions.items()) if opened.part not in next_parts])
        self.current = chosen
        self.switches.append(Switch(self._clock(), chosen, seconds))

    def _leave(self, tasks: list[str]) -> float:
        """Close the sessions of `tasks` after their runs; returns the seconds for closing."""
        seconds = 0.0
        for task in tasks:
            opened = self._sessions.get(task)
            if opened is None:
                continue  # its run has failed meanwhile
            with opened.alone:
                begun = self._clock()
                opened.session.close()
                self._sessions.pop(task, None)
                seconds += self._clock() - begun
        return seconds

    def _session(self, task: str) -> _Open:
        """The session of `task` in the current design; opens it if needed."""
        if self._closed:
            raise RunError("the manager is closed; open another one")
        if task not in self._sessions:
            part = next(part for part in self.design.parts if part.task == task)
            begun = self._clock()
            self._sessions[task] = _Open(part, Session(self._bundles[part.bundle], device=part.device))
            done = self._clock()
            self.openings.append(Opening(done, task, part.bundle, done - begun))
        return self._sessions[task]

    @contextmanager
    def _among_others(self, part: TaskAssignment) -> Iterator[_Running]:
        """While `part` runs: record which runs overlap it on the same processor."""
        with self._overlap:
            beside = [other for other in self._running if other.part.processor == part.processor]
            running = _Running(part, sum(other.part.seconds for other in beside))
            for other in beside:
                other.waits += part.seconds
            self._running.append(running)
        try:
            yield running
        finally:
            with self._overlap:
                self._running.remove(running)
