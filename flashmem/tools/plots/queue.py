"""Plot of memory over time for several models in turn, compared with sessions that preload each (FlashMem, Figure 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flashmem.tools.plots.figure import COLOURS, figure, plain_axes

OverTime = Sequence[tuple[float, int]]
"""(seconds, bytes in use from then on)."""


def draw_queue(path: Path, rows: Mapping[str, OverTime], budget: int | None) -> None:
    """Write the PNG with one plot for each of `rows`, by title. Raises UserError if matplotlib is not installed."""
    with figure(path, rows=len(rows), size=(11, 0.5 + 2.5 * len(rows)), sharex=True, sharey=True) as (_, axes):
        for at, (title, moments) in enumerate(rows.items()):
            times = [when for when, _ in moments]
            held = [nbytes / 1e6 for _, nbytes in moments]
            axes[at].fill_between(times, held, step="post", color=f"{COLOURS[at]}55", linewidth=0)
            axes[at].step(times, held, where="post", color=COLOURS[at], linewidth=1.0)
            if budget is not None:
                axes[at].axhline(budget / 1e6, color="#444444", linewidth=0.8, linestyle="--")
            axes[at].set_title(f"{title}: peak {max(held, default=0.0):.0f} MB, {max(times, default=0.0):.1f} s", fontsize=10)
            axes[at].set_ylabel("memory held, MB")
            plain_axes(axes[at])
        axes[-1].set_xlabel("time, s")
        axes[-1].set_xlim(left=0)
        axes[-1].set_ylim(bottom=0)
