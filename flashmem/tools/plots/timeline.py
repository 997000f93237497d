"""Plot of a simulated run over time: the work of compute, loader threads and disk above, memory in use below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashmem.schedule.loads import TimedInterval
from flashmem.tools.plots.figure import COLOURS, figure, plain_axes
from flashmem.tools.simulation.simulator import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MB = 1e6


def draw_timeline(path: Path, prediction: Prediction, *, title: str) -> None:
    """Write the PNG. Raises UserError if matplotlib is not installed."""
    report = prediction.report
    threads = max((load.thread for load in report.loads), default=-1) + 1
    tracks: list[tuple[str, str, Sequence[TimedInterval]]] = [("compute", COLOURS[0], report.layers)]
    for number in range(threads):
        tracks.append((f"loader {number + 1}", COLOURS[1], [load for load in report.loads if load.thread == number]))
    if prediction.disk:
        tracks.append(("disk", COLOURS[6], prediction.disk))
    with figure(path, rows=2, size=(11, 5), sharex=True, height_ratios=(1, 1.4)) as (drawn, (work, memory)):
        _draw_work(work, tracks, init=1e3 * report.latency.init)
        _draw_memory(memory, prediction)
        memory.set_xlabel("time since the session's creation, ms")
        memory.set_xlim(0, 1e3 * report.latency.integrated)
        drawn.suptitle(title, fontsize=11)


def _draw_work(axes: Axes, tracks: Sequence[tuple[str, str, Sequence[TimedInterval]]], *, init: float) -> None:
    for at, (_, colour, intervals) in enumerate(reversed(tracks)):
        bars = [(1e3 * interval.start, 1e3 * (interval.end - interval.start)) for interval in intervals]
        shades = [colour if number % 2 == 0 else f"{colour}99" for number in range(len(bars))]  # two shades separate neighbours
        axes.broken_barh(bars, (at - 0.36, 0.72), facecolors=shades, linewidth=0)
    axes.axvline(init, color="#444444", linewidth=1, linestyle="--")
    axes.annotate(
        "session is open", (init, 1.0), xycoords=("data", "axes fraction"), xytext=(-4, 3), textcoords="offset points",
        ha="right", fontsize=8, color="#444444",
    )  # fmt: skip
    axes.set_yticks(range(len(tracks)), [label for label, _, _ in reversed(tracks)])
    axes.set_ylim(-0.6, len(tracks) - 0.4)
    plain_axes(axes)
    axes.grid(False, axis="y")


def _draw_memory(axes: Axes, prediction: Prediction) -> None:
    memory, end = prediction.report.memory, prediction.report.latency.integrated
    moments = [(0.0, 0), *memory.over_time, (end, memory.over_time[-1][1] if memory.over_time else 0)]
    times, held = [1e3 * at for at, _ in moments], [nbytes / _MB for _, nbytes in moments]
    axes.fill_between(times, held, step="post", color=f"{COLOURS[2]}55", linewidth=0)
    axes.step(times, held, where="post", color=COLOURS[2], linewidth=1.2)
    lines = [("peak", memory.peak_bytes), ("average", memory.average_bytes)]
    if memory.budget_bytes is not None:
        lines.append(("budget", memory.budget_bytes))
    for label, nbytes in lines:
        axes.axhline(nbytes / _MB, color="#444444", linewidth=0.8, linestyle={"budget": "-"}.get(label, ":"))
    axes.set_ylim(0, 1.12 * max(nbytes for _, nbytes in lines) / _MB)
    _label_lines(axes, lines)
    axes.set_ylabel("memory held, MB")
    plain_axes(axes)


def _label_lines(axes: Axes, lines: Sequence[tuple[str, float]]) -> None:
    """Label lines outside of the right edge; labels that would overlap are joined."""
    top = axes.get_ylim()[1]
    groups: list[tuple[float, list[str]]] = []
    for label, nbytes in sorted(lines, key=lambda line: line[1]):
        text = f"{label} {nbytes / _MB:.0f}"
        if groups and nbytes / _MB - groups[-1][0] < 0.07 * top:
            groups[-1][1].append(text)
        else:
            groups.append((nbytes / _MB, [text]))
    for at, texts in groups:
        axes.annotate(
            "\n".join(reversed(texts)), (1, at), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8, color="#444444",
        )  # fmt: skip
