"""`--timeline`: the page of a run, measured and predicted, or of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashmem.base.units import format_size
from flashmem.runtime.engine.report import RunReport
from flashmem.tools.simulation.simulator import Prediction
from flashmem.tools.timeline.lanes import Timeline, timeline_of
from flashmem.tools.timeline.page import write_page


def write_prediction(path: Path, title: str, predicted: Prediction) -> None:
    """Write the page with the predicted first and later run side by side. Raises UserError if Bokeh is not installed."""
    write_page(path, title, [[_first(predicted), _later(predicted)]])


def write_runs(path: Path, title: str, reports: Sequence[RunReport], predicted: Prediction) -> None:
    """Write the page with the first run, and below it the last of several, each beside its prediction.

    Raises:
        UserError: Bokeh is not installed.
    """
    first, *later = reports
    rows = [[timeline_of(first, _title("first run, measured", first)), _first(predicted)]]
    if later:
        rows.append([timeline_of(later[-1], _title(f"run {len(reports)}, measured", later[-1])), _later(predicted)])
    write_page(path, title, rows)


def _first(predicted: Prediction) -> Timeline:
    return timeline_of(predicted.report, _title("first run, predicted", predicted.report), predicted.disk)


def _later(predicted: Prediction) -> Timeline:
    return timeline_of(predicted.later_report, _title("later run, predicted", predicted.later_report))


def _title(what: str, report: RunReport) -> str:
    latency = report.latency
    opening = f" after {1e3 * latency.init:.1f} ms to open the session" if latency.init else ""
    return f"{what}: {1e3 * latency.exec:.1f} ms{opening}, {format_size(report.memory.peak_bytes)} at most"
