"""`--trace`: launches, loads and memory over time, in the format of Chrome's about:tracing and Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmem.base.files import written_whole

if TYPE_CHECKING:
    from flashmem.runtime.engine.report import RunReport
    from flashmem.schedule.loads import TimedInterval

_TRACKS = {"layer": 1, "load": 2}


def trace_events(report: RunReport) -> list[dict[str, Any]]:
    """Complete events (`ph` X) of launches and loads, a counter of the bytes in use, and the tracks' names; microseconds."""
    intervals = {"layer": report.layers, "load": report.loads}
    starts = [interval.start for track in intervals.values() for interval in track] + [
        when for when, _ in report.memory.over_time
    ]
    origin = min(starts, default=0.0)
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": f"{track}s"}}
        for track, tid in _TRACKS.items()
    ]
    events += [_complete(interval, track, origin) for track, found in intervals.items() for interval in found]
    events += [
        {"name": "memory held", "ph": "C", "pid": 1, "ts": 1e6 * (when - origin), "args": {"bytes": held}}
        for when, held in report.memory.over_time
    ]
    return events


def write_trace(path: Path, report: RunReport) -> None:
    """Write the trace atomically."""
    with written_whole(path) as file:
        file.write(json.dumps({"traceEvents": trace_events(report), "displayTimeUnit": "ms"}).encode())


def _complete(interval: TimedInterval, track: str, origin: float) -> dict[str, Any]:
    return {
        "name": interval.name,
        "cat": track,
        "ph": "X",
        "ts": 1e6 * (interval.start - origin),
        "dur": 1e6 * max(0.0, interval.end - interval.start),
        "pid": 1,
        "tid": _TRACKS[track],
    }
