"""The steps of a program, prepared once for the queue that executes them in every run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from flashmem.runtime.engine.steps import Step
from flashmem.runtime.opencl.context import Queue
from flashmem.runtime.opencl.launching import PreparedLaunch, Recording
from flashmem.runtime.streaming.loading import Loading


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive steps `first` to `last`, which are enqueued without a wait between them.

    Attributes:
        needs: the slices of step `first`; those of the others are resident.
        launches: of all these steps; none where a later step does their work.
        recording: the launches, recorded.
        may_halt: whether a run can be halted before it: the launches so far do the work of all steps so far.
    """

    first: int
    last: int
    needs: tuple[str, ...]
    launches: Sequence[PreparedLaunch]
    may_halt: bool
    recording: Recording | None = None


class PreparedSteps:
    """A prepared call on `queue` for each launch of each step.

    `singly`: a part for each step.
    """

    def __init__(self, queue: Queue, steps: Sequence[Step]) -> None:
        self.queue = queue
        self.steps = steps
        self._launches = [[queue.prepare(c.kernel, c.global_size, c.local_size) for c in step.commands] for step in steps]
        self.singly = self.in_parts(range(1, len(steps)), 1)

    def in_parts(self, stops: Iterable[int], most_steps: int, most_launches: int = sys.maxsize) -> list[Part]:
        """All steps in parts, which end at `stops` and have at most so many launches, and steps with launches."""
        stops = frozenset(stops)
        count = len(self.steps)
        parts: list[Part] = []
        first = 1
        busy = 0
        launches = list[PreparedLaunch]()
        for layer, each in enumerate(self._launches, start=1):
            launches += each
            busy += bool(each)
            following = len(self._launches[layer]) if layer < count else 0
            if layer in stops or layer == count or busy == most_steps or len(launches) + following > most_launches:
                may_halt = first == 1 or bool(self._launches[first - 2])
                parts.append(Part(first, layer, self.steps[first - 1].needs, launches, may_halt))
                first = layer + 1
                busy = 0
                launches = []
        return parts

    def singly_after(self, done: int, loader: Loading | None) -> Sequence[Part]:
        """The steps after `done`, one by one. The first also needs what is loaded again, since the halted run had not ended."""
        parts = self.singly[done:]
        if not done or loader is None or not parts:
            return parts
        again = [name for step in self.steps[:done] for name in step.needs if name in loader.loaded]
        return [replace(parts[0], needs=(*again, *parts[0].needs)), *parts[1:]]

    def before_waits(self, loader: Loading | None) -> list[int]:
        """The steps before those for which `loader` loads a slice."""
        if loader is None:
            return []
        return [n for n, step in enumerate(self.steps) if any(name in loader.loaded for name in step.needs)]
