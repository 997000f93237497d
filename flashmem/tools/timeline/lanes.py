"""A run as bars on lanes: every layer and every step of a load with its bytes and why it waited, and memory over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from flashmem.base.units import format_size
from flashmem.runtime.engine.report import MemoryUse, RunReport
from flashmem.schedule.loads import Step, TimedInterval

BarKind = Literal["layer", "idle", "disk", "read", "wait", "copy"]
"""What a bar shows: a layer, the device while it waits for a slice, a read of a cold disk, or a step of a load."""

COMPUTE = "compute"
DISK = "disk"

_NOTICEABLE = 50e-6
"""Seconds of a delay below which a text does not mention it: a thread needs them to wake up."""


@dataclass(frozen=True)
class Bar:
    """An interval on a lane, in seconds since the session was open. `index` is that of the layer, load or read in its report.

    `nbytes` are those of the whole load or read, 0 for layers. `rate` is in bytes per second; 0 if it is unknown. `why` says in
    words what it waited for.
    """

    kind: BarKind
    lane: str
    index: int
    name: str
    start: float
    end: float
    nbytes: int = 0
    rate: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class HeldMemory:
    """Memory between two changes: `nbytes` from `start` to `end`, in seconds since the session was open."""

    start: float
    end: float
    nbytes: int
    by_category: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Timeline:
    """A run to draw. `start` is the session's creation (0 for later runs) and `end` the answer, in seconds since it was open.

    `lanes` are the names of the lanes from top to bottom. `budget` and `peak` are in bytes.
    """

    title: str
    start: float
    end: float
    lanes: tuple[str, ...]
    bars: tuple[Bar, ...]
    memory: tuple[HeldMemory, ...]
    budget: int | None
    peak: int

    @property
    def busy(self) -> tuple[float, float]:
        """The first start and the last end of a bar, in seconds; the whole run if there is none."""
        if not self.bars:
            return self.start, self.end
        return min(bar.start for bar in self.bars), max(bar.end for bar in self.bars)


def timeline_of(report: RunReport, title: str, disk: Sequence[TimedInterval] = ()) -> Timeline:
    """The timeline of a traced or predicted run. `disk` has the reads of a cold disk (`Prediction.disk`)."""
    opened = report.ended - report.latency.exec
    bars = tuple(_since_opening(_bars(report, disk, opened), opened))
    found = {bar.lane for bar in bars}
    loaders = sorted({load.thread for load in report.loads})
    order = [DISK, *(lane for n in loaders for lane in (_read_lane(n), _copy_lane(n))), COMPUTE]
    end = report.latency.exec
    return Timeline(
        title=title,
        start=-report.latency.init,
        end=end,
        lanes=tuple(lane for lane in order if lane in found),
        bars=bars,
        memory=tuple(_memory(report.memory, opened, -report.latency.init, end)),
        budget=report.memory.budget_bytes,
        peak=report.memory.peak_bytes,
    )


def _bars(report: RunReport, disk: Sequence[TimedInterval], opened: float) -> Iterator[Bar]:
    """All bars, in the report's seconds."""
    for index, read in enumerate(disk):
        rate = _rate(read.nbytes, read.start, read.end)
        yield Bar("disk", DISK, index, read.name, read.start, read.end, read.nbytes, rate, "in the order of announcements")
    for index, (load, why) in enumerate(zip(report.loads, _why_loads(report), strict=True)):
        yield from _steps(index, load, why)
    before = opened
    for index, layer in enumerate(report.layers):
        gap = layer.start - before
        if layer.waited_for and gap > 0:
            why = f"no layer can run until {layer.waited_for} is loaded"
            yield Bar("idle", COMPUTE, index, layer.name, before, layer.start, why=why)
        yield Bar("layer", COMPUTE, index, layer.name, layer.start, layer.end, why=_why_layer(layer, gap))
        before = layer.end


def _since_opening(bars: Iterable[Bar], opened: float) -> Iterator[Bar]:
    """The bars with times since the session was open."""
    for bar in bars:
        yield replace(bar, start=bar.start - opened, end=bar.end - opened)


def _read_lane(thread: int) -> str:
    return f"read {thread + 1}"


def _copy_lane(thread: int) -> str:
    return f"copy {thread + 1}"


def _steps(index: int, load: TimedInterval, why: str) -> Iterator[Bar]:
    """A bar for each step of a load. Reads, and waits after them, are on the lane of its thread's reads."""
    count = Counter(step for step, _ in load.steps)
    for step, start, end in _timed_steps(load):
        lane = _copy_lane(load.thread) if step == "copy" else _read_lane(load.thread)
        # A load in several pieces does not say how many bytes each has.
        rate = _rate(load.nbytes, start, end) if step != "wait" and count[step] == 1 else 0.0
        yield Bar(step, lane, index, load.name, start, end, load.nbytes, rate, why)


def _rate(nbytes: int, start: float, end: float) -> float:
    return nbytes / (end - start) if end > start else 0.0


def _why_layer(layer: TimedInterval, gap: float) -> str:
    if not layer.waited_for:
        return "waited for no weight"
    if gap > _NOTICEABLE:
        return f"the device waited {_ms(gap)} for {layer.waited_for}"
    return f"its launch waited for {layer.waited_for} while earlier layers ran"


def _why_loads(report: RunReport) -> list[str]:
    """Why each load began when it did, and copied when it did."""
    busy_until = dict[int, float]()  # by thread
    order = sorted(range(len(report.loads)), key=lambda index: report.loads[index].start)
    said = [""] * len(order)
    for index in order:
        load = report.loads[index]
        said[index] = _why_load(load, report.layers, busy_until.get(load.thread))
        busy_until[load.thread] = load.end
    return said


def _why_load(load: TimedInterval, layers: Sequence[TimedInterval], free: float | None) -> str:
    if not load.after:
        reason = "waits for no layer"
        if free is not None:
            reason += f"; began when loader {load.thread + 1} was free"
        return reason
    if load.after > len(layers):  # the run was not traced
        return f"released by layer {load.after}"
    layer = layers[load.after - 1]
    reason = f"released when layer {load.after}, {layer.name}, was done"
    waited = sum(end - start for step, start, end in _timed_steps(load) if step == "wait")
    if waited > 0:
        return f"{reason}: read ahead, then waited {_ms(waited)}"
    late = load.start - layer.end
    if free is not None and free > layer.end + _NOTICEABLE and late > _NOTICEABLE:
        return f"{reason}, {_ms(late)} before it began: loader {load.thread + 1} was busy"
    return reason


def _timed_steps(load: TimedInterval) -> Iterator[tuple[Step, float, float]]:
    """The steps with their start and end."""
    start = load.start
    for step, end in load.steps:
        yield step, start, end
        start = end


def _memory(memory: MemoryUse, opened: float, start: float, end: float) -> Iterator[HeldMemory]:
    """Memory between changes, with times since the session was open, up to `end`."""
    totals = _last_at_each_time((at - opened, nbytes) for at, nbytes in memory.over_time)
    categories = dict[str, int]()
    changes = memory.changes
    taken = 0
    ends = [*(at for at, _ in totals[1:]), end] if totals else []
    for (at, nbytes), until in zip(totals, ends, strict=True):
        while taken < len(changes) and changes[taken][0] - opened <= at:
            categories[changes[taken][1]] = changes[taken][2]
            taken += 1
        largest = sorted(((name, held) for name, held in categories.items() if held), key=lambda each: -each[1])
        if until > at and nbytes:
            yield HeldMemory(max(at, start), min(until, end), nbytes, tuple(largest))


def _last_at_each_time(moments: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """The totals without those that another one replaces at the same time."""
    found = list(moments)
    return [one for one, other in pairwise(found) if other[0] > one[0]] + found[-1:]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def bar_text(bar: Bar) -> str:
    """The facts of a bar in one line: what it shows, when, how long, how many bytes, how fast."""
    what = {
        "layer": f"layer {bar.index + 1}",
        "idle": f"idle before layer {bar.index + 1}",
        "disk": "read from the disk",
        "read": "read",
        "wait": "waits for its release",
        "copy": "copied to the device",
    }[bar.kind]
    text = f"{what}: {_ms(bar.end - bar.start)}, from {_ms(bar.start)}"
    if bar.nbytes:
        text += f", {format_size(bar.nbytes)}"
    if bar.rate:
        text += f", {format_size(bar.rate)}/s"
    return text


def memory_text(held: HeldMemory) -> str:
    """The bytes of each category in one line, the largest first."""
    return ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in held.by_category)
