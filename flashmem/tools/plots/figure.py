"""Figures as PNG files: matplotlib without a display, a common style, atomic writing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmem.base.extras import need
from flashmem.base.files import written_whole
from flashmem.tools.zoo.names import architecture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#882255")
"""Colours that colour-blind readers can distinguish (Okabe and Ito, without yellow and black)."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

_DPI = 160


def require_matplotlib() -> None:
    """Raise UserError if matplotlib is not installed. Called before the work whose result is drawn."""
    need("drawing", "matplotlib")


@contextmanager
def figure(path: Path, *, rows: int = 1, columns: int = 1, size: tuple[float, float], **grid: Any) -> Iterator[Any]:
    """A figure and its axes, as `(figure, axes)`, written to `path` when the body succeeds. `size` in inches.

    Raises:
        UserError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    drawn = Figure(figsize=size, layout="constrained")
    axes = drawn.subplots(rows, columns, **grid)
    yield drawn, axes
    with written_whole(path) as file:
        drawn.savefig(file, format="png", dpi=_DPI)


def plain_axes(axes: Axes) -> None:
    """Draw the grid behind the data, and no frame at the top and right."""
    axes.grid(True, color="#e0e0e0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(drawn: Figure, axes: Axes, *, columns: int = 4) -> None:
    """Draw one legend below the figure."""
    handles, labels = axes.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=min(columns, max(1, len(labels))), frameon=False)


def model_name(path: Path) -> str:
    """The model's name for readers: that of its file, or of the folder if the file is `model.onnx`, or of an architecture."""
    if (name := architecture(path)) is not None:
        return name  # some have a dot in it
    return path.parent.name if path.stem == "model" and path.parent.name else path.stem
