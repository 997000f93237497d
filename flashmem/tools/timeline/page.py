"""The timeline page: one HTML file with Bokeh's scripts in it. It needs no network.

A row of the page has the runs to compare, for instance predicted beside measured. Each has a figure of lanes above a figure of
memory. All figures share one time axis, so that zooming one zooms all. `page.mjs` has the keys and the search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmem.base.errors import UserError
from flashmem.base.extras import need
from flashmem.base.files import check_target, written_whole
from flashmem.base.units import format_size
from flashmem.tools.plots.figure import COLOURS
from flashmem.tools.timeline.lanes import Bar, BarKind, Timeline, bar_text, memory_text

if TYPE_CHECKING:
    from bokeh.models import ColumnDataSource, Range1d, Span
    from bokeh.plotting import figure

_GREY = "#9a9a9a"
_LOOKS: dict[BarKind, tuple[str, str]] = {
    "layer": (COLOURS[0], "layer"),
    "idle": ("#d9d9d9", "device waits for a weight"),
    "disk": (COLOURS[6], "disk"),
    "read": (COLOURS[4], "read"),
    "wait": (_GREY, "read, waits for its release"),
    "copy": (COLOURS[1], "copy"),
}
"""Colour and legend of each kind of bar."""

_KEYS = (
    ("wheel or + −", "zoom"),
    ("drag or ← →", "move"),
    ("0", "all of it"),
    ("/", "search"),
    ("Enter, n, p", "next and previous match"),
)
_LANE = (32, 24)
_TITLE = 34
_MEMORY = (280, 190)
"""Heights in pixels: of a lane and of a figure of memory, on a page with one row and with more, and of a title."""

_TIP = """<div style="max-width: 34em; white-space: normal; font-size: 12px"><b>@name</b><br>@what<br>@why</div>"""
_MEMORY_TIP = """<div style="max-width: 34em; white-space: normal; font-size: 12px"><b>@name</b><br>@what</div>"""


def check_page(path: Path, flag: str) -> None:
    """Raise UserError if `path`, the value of `flag`, cannot become a page. Called before the work that it shows."""
    if path.suffix != ".html":
        raise UserError(f"{flag} {path}: a timeline is a page; end its name in .html")
    check_target(path, flag)
    need(flag, "bokeh")


def write_page(path: Path, title: str, rows: Sequence[Sequence[Timeline]]) -> None:
    """Write the page, `rows` of timelines that are side by side.

    Raises:
        UserError: Bokeh is not installed.
    """
    need("a timeline", "bokeh")
    from bokeh.embed import file_html
    from bokeh.resources import INLINE

    page = file_html(_document(title, rows), INLINE, title)
    with written_whole(path) as file:
        file.write(page.encode())


def _document(title: str, rows: Sequence[Sequence[Timeline]]) -> Any:
    """A Bokeh document. Its sources of bars are named `bars`, the range of time `time`, the field for words `search`."""
    from bokeh.document import Document
    from bokeh.events import DocumentReady
    from bokeh.layouts import column, gridplot, row
    from bokeh.models import CustomJS, Div, Range1d, Span, TextInput

    timelines = [timeline for each in rows for timeline in each]
    first = min(t.busy[0] for t in timelines)
    last = max(t.busy[1] for t in timelines)
    margin = 0.02 * max(last - first, 1e-6)
    time = Range1d(1e3 * (first - margin), 1e3 * (last + margin), name="time", min_interval=1e-3)
    most = 1e-6 * max(max(t.peak, t.budget or 0) for t in timelines)
    held = Range1d(0, 1.15 * most or 1, bounds=(0, None))
    crosshair = Span(dimension="height", line_color="#555555", line_dash="dotted", line_width=1)
    kinds = {bar.kind for timeline in timelines for bar in timeline.bars}
    cells = []
    sources = []
    small = len(rows) > 1
    for beside in rows:
        drawn = [
            (_lanes(each, time, crosshair, _LANE[small]), _memory(each, time, held, crosshair, _MEMORY[small]))
            for each in beside
        ]
        cells += [[lanes for (lanes, _), _ in drawn], [memory for _, memory in drawn]]
        sources += [source for (_, source), _ in drawn]
    search = TextInput(placeholder="Search layers and weights", width=260, name="search")
    found = Div(text="", width=110, name="found", styles={"padding-top": "6px", "color": "#444444"})
    name = Div(text=f'<div style="font-size: 17px">{escape(title)}</div>', sizing_mode="stretch_width")
    help_ = row(search, found, Div(text=_help(kinds), sizing_mode="stretch_width"), sizing_mode="stretch_width")
    grid = gridplot(cells, toolbar_location=None, merge_tools=False, sizing_mode="stretch_width")
    document = Document()
    document.add_root(column(name, help_, grid, sizing_mode="stretch_width", styles={"font-family": "sans-serif"}))
    script = files("flashmem.tools.timeline").joinpath("page.mjs").read_text(encoding="utf-8")
    arguments = {"time": time, "whole": [time.start, time.end], "sources": sources, "search": search, "found": found}
    document.js_on_event(DocumentReady, CustomJS(code=script, args=arguments, module=True))
    return document


def _help(kinds: set[BarKind]) -> str:
    """Legend and keys as HTML."""
    legend = "".join(
        f'<span style="margin-right: 1.2em; white-space: nowrap"><span style="color: {colour}">&#9632;</span> {label}</span>'
        for kind, (colour, label) in _LOOKS.items()
        if kind in kinds
    )
    keys = " &nbsp; ".join(f"<b>{escape(key)}</b> {what}" for key, what in _KEYS)
    return (
        f'<div style="font-size: 12px">{legend}</div><div style="font-size: 12px; color: #444444; margin-top: 2px">{keys}</div>'
    )


def _figure(time: Range1d, crosshair: Span, **options: Any) -> figure:
    """An empty figure over the shared range of time, in milliseconds."""
    from bokeh.models import CrosshairTool, PanTool, WheelZoomTool
    from bokeh.plotting import figure

    pan = PanTool(dimensions="width")
    zoom = WheelZoomTool(dimensions="width")
    made = figure(
        x_range=time, tools=[pan, zoom, CrosshairTool(overlay=crosshair)], active_drag=pan, active_scroll=zoom,
        toolbar_location=None, min_border_left=84, min_border_right=16, sizing_mode="stretch_width",
        title=None, **options,
    )  # fmt: skip
    made.grid.grid_line_color = "#e6e6e6"
    made.outline_line_color = None
    return made


def _lanes(timeline: Timeline, time: Range1d, crosshair: Span, height: int) -> tuple[figure, ColumnDataSource]:
    """The bars of a run on lanes of `height` pixels, and their source."""
    from bokeh.models import ColumnDataSource, HoverTool, Title

    bars = timeline.bars
    source = ColumnDataSource(
        {
            "lane": [bar.lane for bar in bars],
            "start": [1e3 * bar.start for bar in bars],
            "end": [1e3 * bar.end for bar in bars],
            "colour": [_LOOKS[bar.kind][0] for bar in bars],
            "shade": _shades(bars),
            "kind": [bar.kind for bar in bars],
            "index": [bar.index for bar in bars],
            "name": [bar.name for bar in bars],
            "what": [bar_text(bar) for bar in bars],
            "why": [bar.why for bar in bars],
        },
        name="bars",
    )
    made = _figure(
        time, crosshair, y_range=list(reversed(timeline.lanes)) or [""], height=height * max(1, len(timeline.lanes)) + _TITLE
    )
    drawn = made.hbar(
        y="lane", left="start", right="end", height=0.8, source=source, fill_color="colour", line_color=None,
        fill_alpha="shade", nonselection_fill_alpha=0.12, selection_fill_alpha=1.0,
    )  # fmt: skip
    made.add_tools(HoverTool(renderers=[drawn], tooltips=_TIP, point_policy="follow_mouse"))
    made.add_layout(Title(text=timeline.title, text_font_size="13px"), "above")
    made.xaxis.visible = False
    made.ygrid.grid_line_color = None
    _mark_opening(made)
    return made, source


def _shades(bars: Sequence[Bar]) -> list[float]:
    """Opacities of the bars: two in turn on each lane separate neighbours."""
    count = Counter[str]()
    shades = []
    for bar in bars:
        shades.append(0.95 if count[bar.lane] % 2 == 0 else 0.65)
        count[bar.lane] += 1
    return shades


def _memory(timeline: Timeline, time: Range1d, held: Range1d, crosshair: Span, height: int) -> figure:
    """Memory over time in MB against the budget."""
    from bokeh.models import ColumnDataSource, HoverTool, Label, Span

    moments = timeline.memory
    outline = [*((1e3 * each.start, 1e-6 * each.nbytes) for each in moments), (1e3 * timeline.end, 0.0)]
    times, tops = zip(*outline, strict=True)
    source = ColumnDataSource(
        {
            "start": [1e3 * each.start for each in moments],
            "end": [1e3 * each.end for each in moments],
            "held": [1e-6 * each.nbytes for each in moments],
            "name": [f"{format_size(each.nbytes)} held" for each in moments],
            "what": [memory_text(each) for each in moments],
        },
        name="memory",
    )
    made = _figure(time, crosshair, y_range=held, height=height)
    made.varea_step(x=times, y1=[0.0] * len(times), y2=tops, step_mode="after", color=COLOURS[2], alpha=0.35)
    made.step(x=times, y=tops, mode="after", color=COLOURS[2], line_width=1.5)
    # One area cannot say what it is at a point: invisible rectangles answer the mouse.
    drawn = made.quad(left="start", right="end", bottom=0, top="held", source=source, fill_alpha=0, line_color=None)
    made.add_tools(HoverTool(renderers=[drawn], tooltips=_MEMORY_TIP, point_policy="follow_mouse"))
    if timeline.budget is not None:
        budget = 1e-6 * timeline.budget
        made.add_layout(Span(location=budget, dimension="width", line_color="#B00020", line_width=2))
        made.add_layout(
            Label(x=6, y=budget, x_units="screen", y_offset=3, text=f"budget {format_size(timeline.budget)}",
                  text_font_size="12px", text_color="#B00020")
        )  # fmt: skip
    made.yaxis.axis_label = "memory held, MB"
    made.xaxis.axis_label = "ms since the session was open"
    _mark_opening(made)
    return made


def _mark_opening(made: figure) -> None:
    """A line where the session is open and the run begins."""
    from bokeh.models import Span

    made.add_layout(Span(location=0, dimension="height", line_color="#444444", line_dash="dashed", line_width=1))
