"""The page and the plots of `benchmarks.memory.activations`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashmem.tools.plots.figure import COLOURS, figure, legend_below, plain_axes

Row = dict[str, Any]

_CATEGORIES = ("weights", "staging", "constants", "outputs")
_HEAD = """# Memory of models

`python -m benchmarks.memory.activations` writes this page; its text says how each number is measured. MB are 10^6 bytes,
first answers are in seconds, weights are random.

- *Arena*: the memory of activations. *Alive*: the most of it that is needed at once, a lower bound for every arena.
- *Average*: memory over the run of the fastest plan within twice the smallest budget. *Paper*: FlashMem's Table 8, measured on
  another device, without such a limit, some models with smaller inputs. It shows the order of magnitude and is no comparison.
- *First answer*: at the smallest budget, at twice that, and without a limit. No limit is the rival of a small budget: where the
  three agree, the smaller budget costs no time.
- *Error*: the largest difference from ONNX Runtime, over the range of the output.
"""


def page(rows: Sequence[Row], pictures: str) -> str:
    """The page, in Markdown; `pictures` is the folder of the plots beside it."""
    text = [_HEAD]
    for device in dict.fromkeys(row["device"] for row in rows):
        mine = [row for row in rows if row["device"] == device]
        dates = {row["date"][:10] for row in mine if "date" in row}
        text += [
            f"\n## {mine[-1]['runtime']}\n",
            *([f"Measured from {min(dates)} to {max(dates)}.\n"] if dates else []),
            "| model | precision | weights | smallest budget | arena / alive | average within twice it / paper "
            "| first answer: smallest / twice / no limit | error |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in (row for row in mine if "failed" not in row):
            first = row["first"]
            cells = (
                f"[{row['model']}]({pictures}/{row['model']}-{row['precision']}.png)",
                row["precision"],
                _mb(row["weights"]),
                f"**{_mb(row['smallest'])}**",
                f"{_mb(row['arena'])} / {_mb(row['alive'])}",
                f"{_mb(row['average_twice'])} / {row['paper'] or '–'}",
                " / ".join(f"{first[what]:.2f}" for what in ("smallest", "twice", "unlimited")),
                "not finite" if row["error"] is None else f"{row['error']:.1e}",
            )
            text.append(f"| {' | '.join(cells)} |")
        failed = [f"- {row['model']}, {row['precision']}, failed: {row['failed']}" for row in mine if "failed" in row]
        text += ["", *failed] if failed else []
    return "\n".join(text) + "\n"


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}" if nbytes < 1e8 else f"{nbytes / 1e6:.0f}"


def draw(trace: Row, alive: Sequence[int], arena: int, title: str, path: Path) -> None:
    """Plot memory over one traced run, stacked. `trace` is the output of `benchmarks.worker`; `alive` is by launch, starting
    before the first one.

    Raises:
        UserError: matplotlib is missing.
    """
    end = trace["integrated"]
    starts = [start for start, _ in trace["layers"]]
    changes: dict[str, list[tuple[float, int]]] = {}
    for at, category, nbytes in trace["changes"]:
        changes.setdefault(category, []).append((at, nbytes))
    opened = changes["arena"][0][0] if "arena" in changes else 0.0
    changes["activations"] = [(opened, alive[0]), *zip(starts, alive[1:], strict=True)]
    changes["rest of the arena"] = [(at, arena - nbytes) for at, nbytes in changes["activations"]]
    times = sorted({0.0, end, *(at for moments in changes.values() for at, _ in moments)})
    order = ("activations", "rest of the arena", *_CATEGORIES)
    stacked = {name: _at(changes.get(name, []), times) for name in order}
    shown = {name: values for name, values in stacked.items() if any(values)}
    with figure(path, size=(8.0, 4.2)) as (drawn, axes):
        plot: Any = axes if hasattr(axes, "stackplot") else axes[0]
        colours = ["#d0d0d0" if name == "rest of the arena" else COLOURS[at % len(COLOURS)] for at, name in enumerate(shown)]
        values = [[nbytes / 1e6 for nbytes in held] for held in shown.values()]
        plot.stackplot([1e3 * at for at in times], values, labels=list(shown), colors=colours, step="post", linewidth=0)
        plot.set_xlim(0, 1e3 * end)
        plot.set_xlabel("ms since the session was opened")
        plot.set_ylabel("MB")
        plot.set_title(title, fontsize=10)
        plain_axes(plot)
        legend_below(drawn, plot, columns=len(shown))


def _at(moments: Sequence[tuple[float, int]], times: Sequence[float]) -> list[int]:
    """The value at each of `times`, in ascending order; 0 before the first moment."""
    values, index, value = [], 0, 0
    for time in times:
        while index < len(moments) and moments[index][0] <= time:
            value = moments[index][1]
            index += 1
        values.append(value)
    return values
