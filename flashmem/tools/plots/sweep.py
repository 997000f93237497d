"""The two plots of a sweep: latency against peak memory with the Pareto front, and FlashMem's Figure 8.

Figure 8 shows integrated and execution latency against the preload ratio, or against memory where only memory differs.
Execution is a later run with W resident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmem.base.errors import UserError
from flashmem.tools.plots.figure import COLOURS, MARKERS, figure, legend_below, model_name, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, str]
_MB = 1e6
_COLUMNS = 3
_LINEAR_RANGE = 8
_RATIO = "preload-ratio="


def draw_sweep(path: Path, rows: Iterable[Row]) -> list[Path]:
    """Write NAME.png (Pareto) and NAME-figure8.png for the feasible `rows`; both paths.

    Raises:
        UserError: no row is feasible, or matplotlib is not installed.
    """
    feasible = [row for row in rows if row["integrated_ms"]]
    if not feasible:
        raise UserError("there is nothing to draw: no point of the sweep is feasible; raise the limits")
    beside = path.with_name(f"{path.stem}-figure8{path.suffix}")
    _draw_pareto(path, feasible)
    _draw_figure8(beside, feasible)
    return [path, beside]


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point beats in both coordinates (less is better), sorted by the first coordinate."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _series(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows grouped by device, precision, mode, objective and source, each group with a title."""
    rows = list(rows)
    everywhere = set[str].intersection(*(set(row["settings"].split()) for row in rows)) if rows else set[str]()

    def own(settings: str) -> str:
        """The settings that make a series: neither those of all rows nor the ratio, which is an axis."""
        words = (word for word in settings.split() if word not in everywhere and not word.startswith(_RATIO))
        return " ".join(words)

    def key(row: Row) -> tuple[str, ...]:
        kept = own(row["settings"])
        return row["device"], row["precision"], row["mode"], row["objective_asked"], kept, row["disk"], row["source"]

    found = [(parts, list(group)) for parts, group in groupby(sorted(rows, key=key), key)]
    differing = [at for at in range(7) if len({parts[at] for parts, _ in found}) > 1]
    shown = sorted({0, 1, 6, *differing})
    return [(", ".join(parts[at] for at in shown), group) for parts, group in found]


def _models(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    ordered = sorted(rows, key=lambda row: row["model"])
    return [(model_name(Path(model)), list(group)) for model, group in groupby(ordered, lambda row: row["model"])]


def _draw_pareto(path: Path, rows: Sequence[Row]) -> None:
    models = _models(rows)
    labels = [label for label, _ in _series(rows)]
    columns = min(_COLUMNS, len(models))
    lines = -(-len(models) // columns)
    size = (max(6.4, 4.4 * columns), 3.7 * lines + 0.7)
    with figure(path, rows=lines, columns=columns, size=size, squeeze=False) as (drawn, grid):
        panels = list(grid.flat)
        for axes, (name, own) in zip(panels, models, strict=False):
            _draw_front(axes, own, rows)
            axes.set_title(name, fontsize=10)
            axes.set_xlabel("peak memory, MB")
            axes.set_ylabel("integrated latency, ms")
        for axes in panels[len(models) :]:
            axes.set_visible(False)
        handles: dict[str, Any] = {}
        for axes in panels:
            handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        ordered = [*(label for label in labels if label in handles), *(x for x in ("Pareto front",) if x in handles)]
        drawn.legend(
            [handles[label] for label in ordered],
            ordered,
            loc="outside lower center",
            ncols=min(3, len(ordered)),
            frameon=False,
        )
        drawn.suptitle("Latency and memory of every plan, and the plans that nothing beats in both", fontsize=11)


def _draw_front(axes: Axes, rows: Sequence[Row], everything: Sequence[Row]) -> None:
    looks = {label: number for number, (label, _) in enumerate(_series(everything))}
    names = {id(row): label for label, group in _series(everything) for row in group}
    for label, number in looks.items():
        own = [row for row in rows if names[id(row)] == label]
        if not own:
            continue
        points = [(int(row["peak_bytes"]) / _MB, float(row["integrated_ms"])) for row in own]
        colour = COLOURS[number % len(COLOURS)]
        look: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "color": colour}
        memory, latency = zip(*points, strict=True)
        axes.scatter(memory, latency, s=26, alpha=0.35, linewidths=0, label=label, zorder=3, **look)
        memory, latency = zip(*pareto_front(points), strict=True)
        axes.step(memory, latency, where="post", color=colour, linewidth=1.4, zorder=2)
        axes.scatter(memory, latency, s=40, edgecolors="#222222", linewidths=0.9, zorder=4, **look)
    axes.plot([], [], "o-", color="#777777", markeredgecolor="#222222", linewidth=1.4, label="Pareto front")
    axes.set_xlim(0, 1.08 * max(axes.dataLim.x1, 0.0))
    axes.set_ylim(0, 1.08 * max(axes.dataLim.y1, 0.0))
    plain_axes(axes)


def _draw_figure8(path: Path, rows: Sequence[Row]) -> None:
    several = len(_series(rows)) > 1
    lines = [
        (f"{name}, {label}" if several else name, own)
        for name, group in _models(rows)
        for label, own in _series_like(group, rows)
    ]
    # Plans for a budget rarely preload weights; memory then is the axis that the limits change.
    by_ratio = len({row["preload_ratio"] for row in rows}) > 1
    place = _ratio if by_ratio else _peak
    with figure(path, columns=2, size=(10.5, 4.9)) as (drawn, (integrated, execution)):
        for axes, column in ((integrated, "integrated_ms"), (execution, "warm_ms")):
            _draw_latency(axes, lines, place, column)
            axes.set_xlabel("preload ratio, % of the weights' bytes" if by_ratio else "peak memory, MB")
            axes.set_xlim(*((-3, 103) if by_ratio else (0, 1.06 * max(map(_peak, rows)))))
        integrated.set_title("(a) integrated latency: the first answer", fontsize=10)
        execution.set_title("(b) execution latency: later answers, W resident", fontsize=10)
        integrated.set_ylabel("latency, ms")
        legend_below(drawn, integrated, columns=2 if several else 4)
        drawn.suptitle(
            f"Latency and {'preloading' if by_ratio else 'memory'}; the area of a point grows with peak memory", fontsize=11
        )


def _series_like(group: Sequence[Row], everything: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The series of `everything`, restricted to the rows in `group`."""
    own = {id(row) for row in group}
    found = ((label, [row for row in rows if id(row) in own]) for label, rows in _series(everything))
    return [(label, rows) for label, rows in found if rows]


def _ratio(row: Row) -> float:
    return 100 * float(row["preload_ratio"])


def _peak(row: Row) -> float:
    return int(row["peak_bytes"]) / _MB


def _draw_latency(axes: Axes, lines: Sequence[tuple[str, Sequence[Row]]], place: Callable[[Row], float], column: str) -> None:
    """Draw a line for each series: the latency in `column` against the coordinate `place`."""
    most = max(_peak(row) for _, rows in lines for row in rows)
    for number, (label, rows) in enumerate(lines):
        ordered = sorted(rows, key=lambda row: (place(row), _peak(row)))
        places = [place(row) for row in ordered]
        values = [float(row[column]) for row in ordered]
        areas = [14 + 90 * _peak(row) / most for row in ordered]
        colour = COLOURS[number % len(COLOURS)]
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(places, values, color=colour, linewidth=1, alpha=0.5, zorder=2)
        axes.scatter(places, values, s=areas, marker=marker, color=colour, alpha=0.6, linewidths=0, label=label, zorder=3)
    _scale_latency(axes, [float(row[column]) for _, rows in lines for row in rows])
    plain_axes(axes)


def _scale_latency(axes: Axes, values: Sequence[float]) -> None:
    """Scale the axis from 0, or logarithmically if models differ too much for one linear scale."""
    low = min(values)
    high = max(values)
    if low <= 0 or high / low < _LINEAR_RANGE:
        axes.set_ylim(0, 1.08 * high)
        return
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.set_ylim(low / 1.5, high * 1.5)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
