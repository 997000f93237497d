"""Plots of `benchmarks.serving.design`: runs under pressure (CARIn, Figures 7, 8), and optimality (3 to 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashmem.tools.plots.figure import COLOURS, MARKERS, figure, legend_below, plain_axes

_HIGHEST = 10.0
"""Larger ratios are drawn with this height and labelled with their value."""


def draw_pressure(path: Path, stories: Mapping[str, Mapping[str, Any]], memory: Sequence[int]) -> None:
    """For each kind of pressure, every run with its design, above the memory of the current design.

    `memory`: bytes of each design. Raises UserError if matplotlib is missing.
    """
    shown = sorted({run["design"] for story in stories.values() for run in story["runs"]})
    with figure(path, rows=2, columns=len(stories), size=(6.5 * len(stories), 6), squeeze=False, sharex="col") as (drawn, axes):
        for column, (kind, story) in enumerate(stories.items()):
            runs, (above, below) = story["runs"], axes[:, column]
            begun = runs[0]["at"] - runs[0]["seconds"]
            for place, task in enumerate(dict.fromkeys(run["task"] for run in runs)):
                for design in shown:
                    these = [run for run in runs if run["task"] == task and run["design"] == design]
                    above.plot(
                        [run["at"] - begun for run in these], [1e3 * run["seconds"] for run in these],
                        linestyle="", marker=MARKERS[place], color=COLOURS[design], markersize=4,
                        label=f"{task}, d{design}" if column == 0 else None,
                    )  # fmt: skip
            below.step([run["at"] - begun for run in runs], [memory[run["design"]] / 1e6 for run in runs], where="pre",
                       color="#444444")  # fmt: skip
            during = [run for run in runs if run["phase"] == "during"]
            for each in (above, below):
                each.axvspan(during[0]["at"] - during[0]["seconds"] - begun, during[-1]["at"] - begun, color="#00000012")
                plain_axes(each)
                each.set_ylim(bottom=0)
            above.set_title(f"a process takes {'a core' if kind == 'core' else 'memory'} (grey)", fontsize=10)
            below.set_xlabel("time, s")
        axes[0, 0].set_ylabel("latency of each run, ms")
        axes[1, 0].set_ylabel("memory of the design, MB")
        legend_below(drawn, axes[0, 0], columns=6)


def written(ratio: float | None) -> str:
    """The text of a ratio in tables and plots."""
    if ratio is None:
        return "!"
    return f"{ratio:.2f}" if ratio < 1e6 else "∞"


def draw_ratios(path: Path, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """RASS's optimality over that of each simpler method, on each set of processors; "!" if that method satisfies no
    constraint.

    `rows`: by title. Raises UserError if matplotlib is missing.
    """
    with figure(path, columns=len(rows), size=(6.5 * len(rows), 4), squeeze=False) as (drawn, grid):
        for axes, (title, these) in zip(grid[0], rows.items(), strict=True):
            ways = list(these[0]["ratio"])
            width = 0.8 / len(ways)
            for number, way in enumerate(ways):
                for place, row in enumerate(these):
                    ratio, at = row["ratio"][way], place + (number - (len(ways) - 1) / 2) * width
                    label = way if place == 0 and axes is grid[0][0] else None
                    axes.bar(at, min(ratio or 0.0, _HIGHEST), width * 0.9, color=COLOURS[number], label=label)
                    axes.annotate(written(ratio), (at, min(ratio or 0.0, _HIGHEST)), ha="center", va="bottom", fontsize=7)
            axes.axhline(1.0, color="#444444", linewidth=0.8, linestyle="--")
            axes.set_xticks(range(len(these)), [row["processors"] for row in these])
            axes.set_title({"here": "measured here", "described": "simulated"}.get(title, title), fontsize=10)
            plain_axes(axes)
        grid[0][0].set_ylabel("our optimality / theirs")
        legend_below(drawn, grid[0][0])
