"""Runs an application by its designs, and switches between them while it runs: CARIn's runtime manager (sections 3.2 and 7.2).

    with flashmem.Manager("app.designs") as manager:
        words = manager.run("read", {"ids": ids})

Which design is in force is looked up in a table (`runtime/designs.py`) by what `runtime/watch.py` says of processors and
memory, before each run, so a run that has begun is finished where it began. Sessions of tasks that the next design solves in
the same way stay open; of the others, the old one is closed before the new one is opened, so that both are never held at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from flashmem.errors import UserError
from flashmem.runtime.designs import Design, Designs, Part, State
from flashmem.runtime.opencl import find_device
from flashmem.runtime.pressure import Sample, sample
from flashmem.runtime.session import Session
from flashmem.runtime.watch import Ticks, Watch, load_of_others, ticks

SAMPLE_SECONDS = 0.25
"""The system is asked at most this often."""


class Manager:
    """Sessions of the design in force. Methods may be called from any thread; each task has one run at a time.

    `switches`: (when it was done, by the clock; the design's place; seconds that closing and opening took) of each, the first
    placement among them.
    """

    def __init__(self, folder: str | Path, *, clock: Callable[[], float] = time.monotonic, root: Path = Path("/")) -> None:
        """Place the design for a device without trouble.

        Args:
            folder: what `flashmem design` wrote.
            clock: seconds.
            root: below which /proc and the cgroups are read.

        Raises:
            UserError: no such designs, or a bundle or a device of them is missing.
        """
        self._folder, self._clock, self._root = Path(folder), clock, root
        self.designs = Designs.read(self._folder)
        best = self.designs.designs[self.designs.choose(State())]
        self._watch = Watch(best.memory, self._cpu())
        self._ticks: Ticks | None = ticks(root)
        self._sampled = clock()
        self._lock = threading.RLock()
        self._sessions: dict[str, tuple[Part, Session, threading.Lock]] = {}
        self.current = -1
        self.switches: list[tuple[float, int, float]] = []
        self._switch()

    @property
    def design(self) -> Design:
        """The one in force."""
        return self.designs.designs[self.current]

    @property
    def state(self) -> State:
        """What the device was like when it was last looked at."""
        return self._watch.state

    def run(self, task: str, inputs: Mapping[str, Any]) -> list[NDArray[Any]]:
        """The outputs of `task`, from the model that the design in force has for it.

        Raises:
            UserError: no such task, or inputs that do not fit.
            RunError: the run failed.
        """
        tasks = [part.task for part in self.designs.designs[0].parts]
        if task not in tasks:
            raise UserError(f"no task {task!r} in these designs; there are: {', '.join(tasks)}")
        with self._lock:
            self._look()
        while True:
            with self._lock:
                part, session, alone = self._sessions[task]
            with alone:
                if self._sessions.get(task, (part, None, alone))[1] is not session:
                    continue  # closed by a switch while we waited for it
                begun = self._clock()
                outputs = session.run(None, dict(inputs))
                now = self._clock()
            with self._lock:
                self._watch.ran(part.processor, now - begun, part.seconds, now)
            return outputs

    def close(self) -> None:
        """Close all sessions."""
        with self._lock:
            for _, session, alone in self._sessions.values():
                with alone:
                    session.close()
            self._sessions.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _look(self) -> None:
        now = self._clock()
        if now - self._sampled >= SAMPLE_SECONDS:
            self._sampled = now
            before, self._ticks = self._ticks, ticks(self._root)
            others = load_of_others(before, self._ticks) if before and self._ticks else None
            self._watch.sampled(self._sample(now), others)
        self._switch()

    def _sample(self, now: float) -> Sample:
        return sample(now, self.design.memory, self._root)

    def _switch(self) -> None:
        """Put the design in force that the policy has for the present state."""
        chosen = self.designs.choose(self._watch.state)
        parts = {part.task: part for part in self.designs.designs[chosen].parts}
        if chosen == self.current and len(self._sessions) == len(parts):  # fewer: one could not be opened
            return
        begun = self._clock()
        leaving = [task for task, (part, _, _) in self._sessions.items() if _key(part) != _key(parts[task])]
        for task in leaving:
            _, session, alone = self._sessions[task]
            with alone:
                session.close()
                del self._sessions[task]
        for task, part in parts.items():
            if task in self._sessions:
                _, session, alone = self._sessions[task]
                self._sessions[task] = (part, session, alone)  # the same, beside others: what it usually takes may differ
            else:
                session = Session(self._folder / part.bundle, device=part.device)
                self._sessions[task] = (part, session, threading.Lock())
        self.current = chosen
        done = self._clock()
        self.switches.append((done, chosen, done - begun))

    def _cpu(self) -> str | None:
        """The processor of the devices that are CPUs, if there is one."""
        for design in self.designs.designs:
            for part in design.parts:
                if find_device(part.device).kind == "cpu":
                    return part.processor
        return None


def _key(part: Part) -> tuple[str, str]:
    return part.bundle, part.device
