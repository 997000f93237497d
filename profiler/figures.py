"""Figures of a profile: latency increase over streamed bytes (the paper's Figure 2), and predicted over measured latency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.planning.capacity.features import MAX_RATIO
from flashmem.schedule.modes import MODES
from flashmem.tools.plots.figure import COLOURS, figure, plain_axes

from .dataset import Row, read_dataset, stem_of
from .report import HeldOut, curves, default_path, operator_type

_GRID = np.linspace(0, MAX_RATIO, 61)
_MARKERS = ((0.20, "o"), (0.30, "s"))  # as in the paper's figure
_LEAST_SECONDS = 1e-4
_LEAST_LAUNCHES = 3
_COLOURS = {"reusable": COLOURS[0], "elemental": COLOURS[1], "hierarchical": COLOURS[2]}
_STYLES = ("-", "--", ":", "-.")


def draw_figures(dataset: Path, parts: Sequence[HeldOut], folder: Path) -> list[Path]:
    """Draw NAME-response.png and NAME-prediction.png into `folder` and return their paths.

    `parts`: the result of `report.held_out` for the dataset.

    Raises:
        UserError: matplotlib is not installed, not a dataset, or one without loads.
    """
    about, rows = read_dataset(dataset)
    folder.mkdir(parents=True, exist_ok=True)
    name = stem_of(dataset).name
    device = about["source"].removeprefix("flashmem profile, ")
    paths = [folder / f"{name}-response.png", folder / f"{name}-prediction.png"]
    draw_response(rows, device, paths[0])
    draw_prediction(parts, device, paths[1])
    return paths


def draw_response(rows: Sequence[Row], device: str, path: Path) -> None:
    """Draw the median latency increase of each operator type over the ratio of streamed bytes to its input, by mode."""
    usual = default_path(rows)
    chosen = [row for row in rows if row.features.memory_path == usual]
    modes = sorted({row.mode for row in chosen} - {"none"}, key=lambda mode: (MODES[mode].by_kernels, mode))
    if not modes:
        raise UserError(f"nothing was streamed during the launches on the {usual} path; profile for more minutes")
    with figure(path, columns=len(modes), size=(4.6 * len(modes), 6.4), sharey=True, squeeze=False) as (drawn, axes):
        for axis, mode in zip(axes[0], modes, strict=True):
            _response_panel(axis, _responses(chosen, mode), mode)
        axes[0][0].set_ylabel("latency increase, % of the kernel alone")
        drawn.suptitle(
            f"Latency increase under streaming: {device}\n"
            "over streamed bytes / bytes the kernel reads itself; ○ first past +20 %, □ first past +30 %\n"
            "blue: reusable, orange: elemental, green: hierarchical (the paper's Table 5)",
            fontsize=9,
        )


def _responses(rows: Sequence[Row], mode: str) -> dict[tuple[str, str], NDArray[np.float64]]:
    """(operator type, class) -> the median slowdown over `_GRID`, minus 1."""
    found: dict[tuple[str, str], list[NDArray[np.float64]]] = {}
    for (_, used), points in curves(rows).items():
        if used != mode or points[0].seconds < _LEAST_SECONDS:
            continue
        ratios = [0.0, *(row.streamed_bytes / row.features.own_bytes for row in points)]
        factors = np.interp(_GRID, ratios, [1.0, *(row.slowdown for row in points)], right=np.nan)
        found.setdefault((operator_type(points[0]), points[0].features.operator_class), []).append(factors - 1)
    return {key: np.maximum(_median(values), 0) for key, values in found.items() if len(values) >= _LEAST_LAUNCHES}


def _median(values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The median at points that at least half of the curves reach."""
    stack = np.stack(values)
    enough = np.isfinite(stack).sum(0) * 2 >= len(values)
    result = np.full(stack.shape[1], np.nan)
    result[enough] = np.nanmedian(stack[:, enough], 0)
    return result


def _response_panel(axis: Any, responses: dict[tuple[str, str], NDArray[np.float64]], mode: str) -> None:
    used: dict[str, int] = {}
    for (operator, kind), curve in sorted(responses.items(), key=lambda item: -float(np.nanmax(item[1]))):
        style = _STYLES[used.get(kind, 0) % len(_STYLES)]
        width = 1.9 if used.get(kind, 0) < len(_STYLES) else 1.0
        used[kind] = used.get(kind, 0) + 1
        axis.plot(_GRID, 100 * curve, style, color=_COLOURS[kind], linewidth=width, label=operator)
        for level, marker in _MARKERS:
            above = np.flatnonzero(curve >= level)
            if above.size:
                at = above[0]
                axis.plot(_GRID[at], 100 * curve[at], marker, color=_COLOURS[kind], markersize=5, markerfacecolor="white")
    axis.set_yscale("symlog", linthresh=10)
    axis.set_yticks([0, 10, 20, 30, 50, 100, 200, 500, 1000], [0, 10, 20, 30, 50, 100, 200, 500, 1000])
    axis.set_ylim(0, 1500)
    axis.set_xlim(0, MAX_RATIO)
    axis.set_title(mode, fontsize=10)
    plain_axes(axis)
    if responses:
        axis.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.07), frameon=False, handlelength=3.2)


def draw_prediction(parts: Sequence[HeldOut], device: str, path: Path) -> None:
    """Draw latency under load of held-out launches, predicted over measured; XGBoost and the roofline side by side."""
    with figure(path, columns=2, size=(11, 5.4), sharex=True, sharey=True) as (drawn, axes):
        for axis, which, title in zip(axes, ("predicted", "roofline"), ("XGBoost", "roofline"), strict=True):
            _prediction_panel(axis, parts, which)
            axis.set_title(title, fontsize=10)
        axes[0].set_ylabel("predicted while held out, ms")
        drawn.suptitle(device, fontsize=10)


def _prediction_panel(axis: Any, parts: Sequence[HeldOut], which: str) -> None:
    low = 1e9
    high = 0.0
    for part in parts:
        measured = np.array([p.measured for p in part.predictions]) * 1e3
        found = np.array([getattr(p, which) for p in part.predictions]) * 1e3
        if not measured.size:
            continue
        low = min(low, measured.min())
        high = max(high, measured.max())
        middle = np.median(np.abs(found / measured - 1))
        axis.scatter(measured, found, s=6, alpha=0.45, linewidths=0, label=f"{part.what}: median error {middle:.0%}")
    line = np.array([low * 0.7, high * 1.4])
    axis.plot(line, line, color="black", linewidth=0.8)
    axis.fill_between(line, line * 0.85, line * 1.15, color="black", alpha=0.1, linewidth=0, label="±15 %")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("measured latency, alone and under load, ms")
    plain_axes(axis)
    axis.legend(fontsize=8, loc="upper left")
