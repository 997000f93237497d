"""State of the device: which processors are overloaded, and whether memory is short (CARIn, section 4.3.2).

`Watch` computes it from runs and samples of the system. Each answer has two thresholds, so that it does not oscillate:

- A processor is in trouble when each of its last `RUNS` runs took `SLOW` times the seconds of its profile. The CPU is also in
  trouble when other processes use `LOAD_HIGH` of it. The trouble ends after `REST_SECONDS`; for the CPU, only when other
  processes use less than `LOAD_LOW`. If the next runs on the processor are slow again, the rest is twice as long, up to
  `LONGEST_REST`.
- Memory is short when tasks waited for it in `WAITED` percent of the last 10 s (PSI). It is also short when less than a quarter
  of the best design's memory is available. It is over when one and a half times that design's memory was available, and tasks
  waited in less than `WAITED_LOW` percent, for `QUIET_SECONDS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flashmem.runtime.application.designs import DeviceState
from flashmem.runtime.memory.pressure import Sample

RUNS = 2
SLOW = 1.5
LOAD_HIGH = 0.2
LOAD_LOW = 0.1
REST_SECONDS = 5.0
LONGEST_REST = 80.0
WAITED = 5.0
WAITED_LOW = 1.0
QUIET_SECONDS = 3.0


@dataclass
class _Processor:
    slow_runs: int = 0
    since: float | None = None  # start of the present trouble
    rest: float = REST_SECONDS
    on_trial: bool = False


@dataclass
class Watch:
    """`best`: memory in bytes of the design without trouble. `cpus`: the names of this machine's CPU."""

    best: int
    cpus: frozenset[str] = frozenset()
    _processors: dict[str, _Processor] = field(default_factory=dict)
    _memory: bool = False
    _quiet_since: float | None = None

    def ran(self, processor: str, seconds: float, usual: float, now: float) -> None:
        """Record a run of `seconds` on `processor`, whose profile has `usual` seconds."""
        known = self._processors.setdefault(processor, _Processor())
        known.slow_runs = known.slow_runs + 1 if seconds >= SLOW * usual else 0
        if not known.slow_runs:
            known.on_trial = False
            known.rest = REST_SECONDS
        elif known.slow_runs >= RUNS and known.since is None:
            known.since = now
            known.rest = min(2 * known.rest, LONGEST_REST) if known.on_trial else known.rest

    def sampled(self, sample: Sample, others: float | None) -> None:
        """Record a sample of the system, and the share of the CPU that other processes use (None: unknown)."""
        self._watch_memory(sample)
        for name, known in self._processors.items():
            loaded = name in self.cpus and others is not None and others >= LOAD_LOW
            if known.since is not None and sample.seconds - known.since >= known.rest and not loaded:
                known.since = None
                known.slow_runs = 0
                known.on_trial = True
        for name in self.cpus if others is not None and others >= LOAD_HIGH else ():
            known = self._processors.setdefault(name, _Processor())
            known.since = sample.seconds if known.since is None else known.since

    @property
    def state(self) -> DeviceState:
        """The state of the device after all runs and samples so far."""
        return DeviceState(frozenset(name for name, known in self._processors.items() if known.since is not None), self._memory)

    def _watch_memory(self, sample: Sample) -> None:
        if sample.available is None:
            return
        if sample.waited >= WAITED or sample.available < self.best / 4:
            self._memory = True
            self._quiet_since = None
        elif sample.available + sample.held < 1.5 * self.best or sample.waited >= WAITED_LOW:
            self._quiet_since = None
        else:
            self._quiet_since = sample.seconds if self._quiet_since is None else self._quiet_since
            if sample.seconds - self._quiet_since >= QUIET_SECONDS:
                self._memory = False


@dataclass(frozen=True)
class Ticks:
    """Clock ticks since the start: of all processors, those not idle, and those of this process and its ended children (which
    build kernels).
    """

    all: int
    busy: int
    own: int


def ticks(root: Path = Path("/")) -> Ticks | None:
    """The present clock ticks from /proc; None if it has none."""
    try:
        counts = [int(word) for word in (root / "proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        own = (root / "proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    everything = sum(counts)
    idle = counts[3] + counts[4]
    return Ticks(everything, everything - idle, sum(map(int, own[11:15])))


def load_of_others(before: Ticks, now: Ticks) -> float | None:
    """The share of all processors' time that other processes used between two readings; None if no time has passed."""
    passed = now.all - before.all
    return max(0, now.busy - before.busy - (now.own - before.own)) / passed if passed > 0 else None
