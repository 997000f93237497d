"""The demo: two trained networks find and read the text in an image, with weights streamed inside a memory budget.

Without an image it draws a page first, so that it can compare the recognised text with the drawn text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import MissingFileError, RunError, UserError
from flashmem.base.extras import need
from flashmem.base.files import written_whole
from flashmem.base.paths import cache_folder, folder_until_exit, make_private, why_unusable
from flashmem.base.streams import say
from flashmem.base.units import format_size
from flashmem.cli.commands.compiling import compile_apart
from flashmem.cli.commands.temporary_cache import have_cache
from flashmem.cli.demo import ocr
from flashmem.cli.output.console import out, print_table, show_spinner
from flashmem.request.request import BundleRequest
from flashmem.runtime.session import Session

if TYPE_CHECKING:
    from PIL.Image import Image

    from flashmem.runtime.engine.report import RunReport

PAGE = (
    (44, "The Analytical Engine"),
    (26, "weaves algebraical patterns"),
    (26, "just as the Jacquard-loom weaves"),
    (34, "flowers and leaves."),
    (18, "Ada Lovelace, Notes by the Translator, 1843"),
    (15, "Taylor's Scientific Memoirs, volume 3, page 696"),
)
"""The text of the page, line by line, each with its size in pixels."""

_INPUT = "x"  # of both networks
_BUDGET = "50MB"
_PAPER = (250, 247, 240)
_INK = (30, 30, 40)
_MARGIN = 40


@dataclass
class Counted:
    """A session that keeps the report of each run. Called as a function it is a network for `flashmem.cli.demo.ocr`."""

    session: Session
    reports: list[RunReport] = field(default_factory=list)

    def __call__(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """Run the network once."""
        (answer,) = self.session.run(None, {_INPUT: pixels})
        assert self.session.last_run is not None
        self.reports.append(self.session.last_run)
        return answer


def draw_page(lines: Sequence[tuple[int, str]] = PAGE) -> Image:
    """Draw an RGB image of `lines` in Pillow's built-in typeface, of a width that the detector can resolve."""
    from PIL import Image, ImageDraw, ImageFont

    height = 2 * _MARGIN + sum(round(size * 1.6) for size, _ in lines)
    page = Image.new("RGB", (ocr.DETECTOR_SHAPE[3], height), _PAPER)
    draw = ImageDraw.Draw(page)
    top = _MARGIN
    for size, text in lines:
        draw.text((_MARGIN, top), text, font=ImageFont.load_default(size), fill=_INK)
        top += round(size * 1.6)
    return page


def open_image(path: Path) -> Image:
    """Open an image file, upright and in RGB.

    Raises:
        MissingFileError: no such file.
        UserError: not an image.
    """
    from PIL import Image, ImageOps

    if not path.is_file():
        raise MissingFileError(f"{path}: no such image")
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} is not an image that can be read ({error}); give a PNG or JPEG file") from error


def run_demo(image: Path | None, *, budget: int | None, device: str) -> None:
    """Read `image`, or a generated page, and print the text, the time and the memory.

    Raises:
        UserError: the `demo` extra is missing, `image` cannot be read, or `budget` is too small.
        RunError: the generated page was not read correctly.
    """
    need("the demo", "rapidocr", "PIL", "cv2")
    models = ocr.find_models()
    page = open_image(image) if image else _drawn_and_kept()
    bundles = [
        compile_apart(model, BundleRequest(device=device, budget=budget or _BUDGET, shapes={_INPUT: shape}))
        for model, shape in ((models.detector, ocr.DETECTOR_SHAPE), (models.recogniser, ocr.LINE_SHAPE))
    ]
    alphabet = ocr.read_alphabet(models.recogniser)
    started = time.perf_counter()
    with show_spinner("finding the lines", quiet=False), Session(bundles[0], device=device) as session:
        detector = Counted(session)
        found = ocr.find_lines(np.asarray(page), detector)
    with show_spinner("reading the lines", quiet=False), Session(bundles[1], device=device) as session:
        recogniser = Counted(session)
        lines = ocr.read_lines(np.asarray(page), found, recogniser, alphabet)
    seconds = time.perf_counter() - started
    _show(lines, [] if image else [text for _, text in PAGE])
    _account({"find the lines": detector, "read a line": recogniser}, seconds)
    if image is None and [line.text for line in lines] != [text for _, text in PAGE]:
        raise RunError("what was read is not what was drawn")


def _drawn_and_kept() -> Image:
    page = draw_page()
    have_cache()
    folder = cache_folder("demo")
    if why_unusable(folder) is None:
        make_private(folder)
    else:
        folder = folder_until_exit("flashmem-demo-")
    kept = folder / "page.png"
    with written_whole(kept, private=True) as file:
        page.save(file, format="PNG")
    say(f"no image given: reading the page drawn in {kept}")
    return page


def _show(lines: Sequence[ocr.Line], drawn: Sequence[str]) -> None:
    if not lines:
        out().print("no text found")
        return
    rows = []
    for line, text in zip_longest(lines, drawn):
        read, sure = (line.text, f"{line.confidence:.0%}") if line else ("", "")
        rows.append((read, sure, text or "")[: 3 if drawn else 2])
    print_table(("read", "sure", "drawn")[: 3 if drawn else 2], rows)


def _account(networks: dict[str, Counted], seconds: float) -> None:
    print_table(
        ("network", "runs", "first answer", "later ones", "memory", "budget", "device"),
        [_row(name, network) for name, network in networks.items() if network.reports],
    )
    out().print(f"{seconds:.2f} s in all. Memory is everything flashmem held on the device and in staging.")


def _row(name: str, network: Counted) -> tuple[object, ...]:
    reports = network.reports
    first, *later = reports
    return (
        name,
        len(reports),
        _milliseconds(first.latency.integrated),
        _milliseconds(median(report.latency.exec for report in later)) if later else "",
        format_size(max(report.memory.peak_bytes for report in reports)),
        format_size(first.memory.budget_bytes or 0),
        f"{network.session.device.name}, mode {network.session.mode}",
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"
