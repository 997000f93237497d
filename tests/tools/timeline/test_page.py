"""The timeline page in headless Chromium, without network: it shows every bar, zooms, moves, explains and searches."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flashmem import RunReport, Session
from flashmem.base.errors import UserError
from flashmem.tools.timeline.lanes import Bar, HeldMemory, Timeline, timeline_of
from flashmem.tools.timeline.page import check_page, write_page
from tests.support.mini_bundle import write_mini_bundle

HOSTILE = "</script><img src=x onerror=\"document.title='taken'\">"
"""A name that a stranger's model could have."""

TEXT = """
const text = (node) => {
  if (node.nodeType === Node.TEXT_NODE) return node.data
  if (node.matches?.("script, style")) return ""
  return [...(node.shadowRoot?.childNodes ?? []), ...node.childNodes].map(text).join(" ")
}
return text(document.body)
"""
"""The text on the page, in shadow roots too."""

PLACE = """
const [run, number] = arguments
const all = [...Bokeh.documents[0]._all_models.values()]
const renderers = all.filter((each) => each.type === "GlyphRenderer" && each.data_source.name === "bars")
const view = Bokeh.index.find_one(renderers[run])
const data = renderers[run].data_source.data
const frame = view.plot_view.frame
const box = view.plot_view.el.getBoundingClientRect()
const middle = (data.start[number] + data.end[number]) / 2
return [box.x + frame.x_scale.compute(middle), box.y + frame.y_scale.compute(data.lane[number])]
"""
"""Where the middle of a bar is, in pixels of the window."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[RunReport]:
    """A first and a later run."""
    model = write_mini_bundle(tmp_path_factory.mktemp("mini") / "m.flashmem")
    found = []
    with Session(model.path, mode="dma", budget="1MB", trace=True) as session:
        for _ in range(2):
            session.run(None, model.inputs())
            assert session.last_run is not None
            found.append(session.last_run)
    return found


@pytest.fixture(scope="module")
def runs(reports: list[RunReport]) -> list[Timeline]:
    """Both runs, and a made one with a hostile name."""
    found = [timeline_of(report, title) for report, title in zip(reports, ("first run", "later run"), strict=True)]
    first = found[0]
    bars = (Bar("layer", "compute", 0, HOSTILE, first.busy[0], first.busy[1], why=HOSTILE),)
    held = (HeldMemory(0.0, first.end, 1000, (("weights", 1000),)),)
    return [*found, Timeline(HOSTILE, 0.0, first.end, ("compute",), bars, held, 1_000_000, 1000)]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        if os.environ.get("CI"):
            pytest.fail("the timeline page is tested in Chromium: install chromium and chromium-driver")
        pytest.skip("no chromium and chromedriver are here to open the page")
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1400,1000"):
        options.add_argument(flag)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")  # no network
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "localhost,127.0.0.1")  # the driver listens here
        started = Chrome(options=options, service=ChromeService(driver))
        yield started
        started.quit()


@pytest.fixture(scope="module")
def opened(chromium: Any, runs: list[Timeline], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The page of all runs, drawn."""
    path = tmp_path_factory.mktemp("page") / "t.html"
    write_page(path, f"mini {HOSTILE}", [runs[:2], runs[2:]])
    chromium.get(path.as_uri())
    until(chromium, lambda page: page.execute_script("return document.body.dataset.ready"))
    return chromium


@pytest.fixture
def page(opened: Any) -> Any:
    """The page of all runs, showing all of them."""
    press(opened, "0")
    return opened


def time_shown(page: Any) -> tuple[float, float]:
    """The range of time on the page, in milliseconds."""
    start, end = page.execute_script("const time = Bokeh.documents[0].get_model_by_name('time'); return [time.start, time.end]")
    return start, end


def until(page: Any, holds: Any) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(page, 30, poll_frequency=0.05).until(holds)


def press(page: Any, keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(page, duration=0).send_keys(keys).perform()


def point(page: Any, *places: tuple[int, int], held: bool = False) -> None:
    """Move the mouse from place to place, with its button held or not."""
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    actions = ActionBuilder(page, duration=50)
    first, *others = places
    actions.pointer_action.move_to_location(*first)
    if held:
        actions.pointer_action.pointer_down()
    for each in others:
        actions.pointer_action.move_to_location(*each)
    if held:
        actions.pointer_action.pointer_up()
    actions.perform()


def test_the_page_shows_every_layer_and_load_without_network(page: Any, runs: list[Timeline], reports: list[RunReport]) -> None:
    drawn = page.execute_script("""
        const all = [...Bokeh.documents[0]._all_models.values()]
        const renderers = all.filter((each) => each.type === "GlyphRenderer" && each.data_source.name === "bars")
        return renderers.map((each) => {
          const {kind, index} = each.data_source.data
          return [Bokeh.index.find_one(each).glyph.data_size, kind, [...index]]
        })
    """)
    assert [count for count, _, _ in drawn] == [len(run.bars) for run in runs]
    for (_, kinds, indices), report in zip(drawn, reports, strict=False):
        assert [n for n, kind in zip(indices, kinds, strict=True) if kind == "layer"] == list(range(len(report.layers)))
        loads = {n for n, kind in zip(indices, kinds, strict=True) if kind in ("read", "wait", "copy")}
        assert report.layers and loads == set(range(len(report.loads))) and loads
    pixels = np.asarray(Image.open(io.BytesIO(page.get_screenshot_as_png())).convert("RGB")).astype(int)
    for colour in ((0x00, 0x72, 0xB2), (0xB0, 0x00, 0x20)):  # layers; the budget
        assert np.count_nonzero(np.abs(pixels - colour).max(axis=-1) < 24) > 100
    assert page.execute_script("return performance.getEntriesByType('resource').map((each) => each.name)") == []
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_keys_and_mouse_zoom_and_move(page: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    start, end = time_shown(page)
    press(page, "+")
    zoomed = time_shown(page)
    assert start < zoomed[0] < zoomed[1] < end and zoomed[1] - zoomed[0] == pytest.approx((end - start) / 1.5)
    press(page, "-")
    assert time_shown(page) == pytest.approx((start, end))
    press(page, "\ue014")  # arrow to the right
    moved = time_shown(page)
    assert moved[0] > start and moved[1] - moved[0] == pytest.approx(end - start)
    press(page, "0")
    assert time_shown(page) == (start, end)
    x, y = (round(each) for each in page.execute_script(PLACE, 0, 0))
    ActionChains(page).scroll_from_origin(ScrollOrigin.from_viewport(x, y), 0, -300).perform()
    until(page, lambda page: time_shown(page)[1] - time_shown(page)[0] < 0.95 * (end - start))
    press(page, "0")
    point(page, (400, y), (300, y), (250, y), held=True)
    until(page, lambda page: time_shown(page)[0] > start)
    assert time_shown(page)[1] - time_shown(page)[0] == pytest.approx(end - start)


def test_the_mouse_over_a_bar_says_what_it_is_and_why_it_waited(page: Any, runs: list[Timeline]) -> None:
    number, load = max(
        ((n, bar) for n, bar in enumerate(runs[0].bars) if bar.nbytes), key=lambda each: each[1].end - each[1].start
    )
    x, y = (round(each) for each in page.execute_script(PLACE, 0, number))
    point(page, (x - 3, y), (x, y))
    until(page, lambda page: load.why in page.execute_script(TEXT))
    text = page.execute_script(TEXT)
    assert load.name in text and "KB" in text
    x, y = (round(each) for each in page.execute_script(PLACE, 2, 0))
    point(page, (x - 3, y), (x, y))
    until(page, lambda page: page.execute_script(TEXT).count(HOSTILE) >= 2)  # as text
    assert page.title == f"mini {HOSTILE}"


def test_the_search_highlights_and_shows_what_it_finds(page: Any, runs: list[Timeline]) -> None:
    wanted = next(bar for bar in reversed(runs[0].bars) if bar.kind == "layer").name
    expected = [sorted(n for n, bar in enumerate(run.bars) if wanted in bar.name) for run in runs]
    press(page, "+" * 6)
    width = time_shown(page)[1] - time_shown(page)[0]
    press(page, "/")
    press(page, wanted)
    selected = """
        const all = [...Bokeh.documents[0]._all_models.values()]
        const renderers = all.filter((each) => each.type === "GlyphRenderer" && each.data_source.name === "bars")
        return renderers.map((each) => [...each.data_source.selected.indices])
    """
    until(page, lambda page: page.execute_script(selected) == expected)
    found = sorted((bar.start + bar.end) / 2 for run in runs for bar in run.bars if wanted in bar.name)
    assert len(found) >= 2
    press(page, "\ue007")  # Enter
    shown = [sum(time_shown(page)) / 2]
    assert time_shown(page)[1] - time_shown(page)[0] == pytest.approx(width, rel=0.01)
    for _ in found[1:]:
        press(page, "\ue007")
        shown.append(sum(time_shown(page)) / 2)
    assert sorted(shown) == pytest.approx([1e3 * each for each in found], abs=1e-6)
    assert f"{len(found)} of {len(found)} bars" in page.execute_script(TEXT)
    press(page, "\ue00c")  # Escape leaves the field, so that a key is a command again
    press(page, "0")
    assert time_shown(page)[1] - time_shown(page)[0] > width


def test_only_a_page_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--timeline .*t\.png: a timeline is a page; end its name in \.html"):
        check_page(tmp_path / "t.png", "--timeline")
    with pytest.raises(UserError, match="there is no folder"):
        check_page(tmp_path / "none" / "t.html", "--timeline")
    check_page(tmp_path / "t.html", "--timeline")
