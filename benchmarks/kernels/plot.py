"""Roofline plot of `benchmarks.kernels.operators`: FLOP/s of each shape over its FLOP per byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.kernels.cases import LOW_PRECISION
from flashmem.tools.plots.figure import COLOURS, MARKERS, figure, legend_below, plain_axes

Row = dict[str, Any]


def draw(data: Row, path: Path) -> None:
    """Draw two plots: the roofline, and ratios by group.

    Raises:
        UserError: matplotlib is missing.
    """
    about, rows = data["about"], [row for row in data["rows"] if row["seconds"] and row["group"] not in LOW_PRECISION]
    if not rows:
        raise SystemExit("nothing was measured, so there is nothing to draw")
    ours = about["paths"]
    with figure(path, columns=2, size=(12.5, 5.2), width_ratios=(1.25, 1)) as (drawn, (left, right)):
        _roofline(left, about, rows, ours)
        _ratios(right, rows, ours)
        drawn.suptitle(f"{about['device']}, float32, {about['date'][:10]}; peer: {about['peer'] or 'none'}", fontsize=10)
        legend_below(drawn, left)


def _roofline(axes: Any, about: Row, rows: list[Row], ours: list[str]) -> None:
    unit, name = (1e12, "TFLOP/s") if about["kind"] == "gpu" else (1e9, "GFLOP/s")
    best = max(row["flops"] / seconds for row in rows for seconds in row["seconds"].values())
    intensities = sorted(row["flops"] / row["bytes"] for row in rows)
    low, high = intensities[0] / 2, intensities[-1] * 2
    bandwidth = about["memory_bandwidth"]
    ridge = min(max(best / bandwidth, low), high)
    axes.plot([low, ridge, high], [min(best, low * bandwidth) / unit, min(best, ridge * bandwidth) / unit, best / unit],
              color="#404040", linewidth=1.0, zorder=1, label="roof: best rate seen, measured memory bandwidth")  # fmt: skip
    for i, who in enumerate((*ours, "peer")):
        points = [(row["flops"] / row["bytes"], row["flops"] / s / unit) for row in rows if (s := row["seconds"].get(who))]
        if points:
            x, y = zip(*points, strict=True)
            label = "peer" if who == "peer" else f"flashmem, {who}"
            axes.scatter(x, y, s=22, color=COLOURS[i], marker=MARKERS[i], label=label, alpha=0.8, linewidths=0, zorder=2 + i)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP for each byte of operands and result")
    axes.set_ylabel(name)
    plain_axes(axes)


def _ratios(axes: Any, rows: list[Row], ours: list[str]) -> None:
    groups = list(dict.fromkeys(row["group"] for row in rows))
    for i, path in enumerate(ours):
        points = [
            (groups.index(row["group"]) + (i - (len(ours) - 1) / 2) * 0.25, row["seconds"]["peer"] / row["seconds"][path])
            for row in rows
            if row["seconds"].get(path) and row["seconds"].get("peer")
        ]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=22, color=COLOURS[i], marker=MARKERS[i], alpha=0.8, linewidths=0)
    axes.axhline(1.0, color="#404040", linewidth=1.0)
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right", fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("the peer's time over ours (above 1: faster)")
    plain_axes(axes)
