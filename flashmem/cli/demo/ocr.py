"""Optical character recognition (OCR) with two networks: preprocessing, and decoding of their outputs.

The networks are PP-OCR's (PaddleOCR, Apache-2.0), as shipped in the `rapidocr` package: a detector that marks text in an image
(differentiable binarisation, Liao et al., AAAI 2020) and a recogniser that reads one line (a CTC head). A network is passed as
a function from input array to output array: the demo passes flashmem's sessions, the tests another engine. Needs the `demo`
extra.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError

Network = Callable[[NDArray[np.float32]], NDArray[np.float32]]
Image = NDArray[np.uint8]  # height x width x 3, RGB

DETECTOR_SHAPE = (1, 3, 640, 640)
LINE_SHAPE = (1, 3, 48, 640)

_THRESHOLD = 0.3  # minimum probability of a text pixel; this and the next two are PP-OCR's values
_BOX_THRESHOLD = 0.5  # minimum mean over a box
_UNCLIP = 1.6  # the network marks the core of a line: a box grows by area * _UNCLIP / perimeter
_SMALLEST_SIDE = 3

_INSTALL = "install flashmem with its `demo` extra, for instance: pip install '.[desktop,demo]'"


@dataclass(frozen=True)
class Models:
    """The ONNX files of the detector and of the recogniser."""

    detector: Path
    recogniser: Path


@dataclass(frozen=True)
class Line:
    """A line of text in an image: its four corners (x, y) clockwise from the top left, and its text."""

    corners: NDArray[np.float32]
    text: str
    confidence: float


def find_models() -> Models:
    """The models inside the installed `rapidocr` package, which is not imported.

    Raises:
        UserError: the package is not installed, or lacks the models.
    """
    spec = importlib.util.find_spec("rapidocr")
    if spec is None or spec.origin is None:
        raise UserError(
            "the demo needs its models: install flashmem with its `demo` extra, pip install 'flashmem[desktop,demo]'"
        )
    folder = Path(spec.origin).parent / "models"
    found = {part: sorted(folder.glob(f"*_{part}_*.onnx")) for part in ("det", "rec")}
    if not all(found.values()):
        raise UserError(
            f"no detector and recogniser in {folder}; reinstall the `demo` extra, pip install 'flashmem[desktop,demo]'"
        )
    return Models(found["det"][0], found["rec"][0])


def read_alphabet(recogniser: Path) -> tuple[str, ...]:
    """The text of each class of the recogniser: the CTC blank (an empty string), the characters, the space."""
    import onnx

    model = onnx.load(str(recogniser), load_external_data=False)
    characters = next(entry.value for entry in model.metadata_props if entry.key == "character")
    return ("", *characters.split("\n"), " ")


def find_lines(image: Image, detector: Network) -> list[NDArray[np.float32]]:
    """Corners of each line of text, in pixels of `image`, in reading order.

    `detector` maps `DETECTOR_SHAPE` to the probability that a pixel is text, (1, 1, height, width).
    """
    pixels, scale = detector_input(image)
    return boxes(detector(pixels)[0, 0], scale)


def read_lines(
    image: Image, found: Sequence[NDArray[np.float32]], recogniser: Network, alphabet: tuple[str, ...]
) -> list[Line]:
    """Read the lines between the corners in `found`; lines without readable text are omitted.

    `recogniser` maps `LINE_SHAPE` to class probabilities (1, steps, classes) for steps along the line.
    """
    lines = []
    for corners in found:
        text, confidence = decode(recogniser(line_input(image, corners)), alphabet)
        if text:
            lines.append(Line(corners, text, confidence))
    return lines


def detector_input(image: Image) -> tuple[NDArray[np.float32], float]:
    """`image` scaled to fit `DETECTOR_SHAPE` and padded, with the factor it was scaled by."""
    import cv2

    height, width = DETECTOR_SHAPE[2:]
    scale = min(height / image.shape[0], width / image.shape[1], 1.0)
    canvas = np.full((height, width, 3), 255, np.uint8)
    fitted = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)[:height, :width]
    canvas[: fitted.shape[0], : fitted.shape[1]] = fitted
    return _planes(canvas), scale


def boxes(probability: NDArray[np.float32], scale: float) -> list[NDArray[np.float32]]:
    """Boxes around the connected regions of a text probability map, scaled back by `scale`, in reading order."""
    import cv2

    mask = cv2.dilate((probability > _THRESHOLD).astype(np.uint8), np.ones((2, 2), np.uint8))
    contours, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    found = []
    for contour in contours:
        centre, (width, height), angle = cv2.minAreaRect(contour)
        if min(width, height) < _SMALLEST_SIDE or _mean_inside(probability, contour) < _BOX_THRESHOLD:
            continue
        grow = width * height * _UNCLIP / (width + height)  # both sides: twice area * _UNCLIP / perimeter
        corners = cv2.boxPoints((centre, (width + grow, height + grow), angle))
        found.append(_clockwise(np.asarray(corners, np.float32) / scale))
    return _reading_order(found)


def line_input(image: Image, corners: NDArray[np.float32]) -> NDArray[np.float32]:
    """The line between `corners`, rotated upright, scaled to `LINE_SHAPE`'s height, and padded to its width."""
    import cv2

    height, limit = LINE_SHAPE[2:]
    across = np.linalg.norm(corners[1] - corners[0])
    down = np.linalg.norm(corners[3] - corners[0])
    width = int(min(limit, max(1, np.ceil(height * across / down))))
    target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    turn = cv2.getPerspectiveTransform(corners, target)
    line = cv2.warpPerspective(image, turn, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)
    padded = np.zeros(LINE_SHAPE, np.float32)  # 0 is mid-grey, which the recogniser reads as no text
    padded[..., :width] = _planes(np.asarray(line, np.uint8))
    return padded


def decode(probabilities: NDArray[np.float32], alphabet: tuple[str, ...]) -> tuple[str, float]:
    """Greedy CTC decoding: the best class at each step, repeats merged, blanks dropped; and the mean probability of the
    rest.
    """
    best = probabilities[0].argmax(axis=1)
    kept = (best != 0) & np.diff(best, prepend=-1).astype(bool)
    if not kept.any():
        return "", 0.0
    return "".join(alphabet[index] for index in best[kept]).strip(), float(probabilities[0].max(axis=1)[kept].mean())


def _planes(image: Image) -> NDArray[np.float32]:
    """`image` in PP-OCR's form: blue, green and red planes, -1 to 1, in a batch of one."""
    return np.ascontiguousarray(image[None, :, :, ::-1].transpose(0, 3, 1, 2), np.float32) / 127.5 - 1


def _mean_inside(probability: NDArray[np.float32], contour: Any) -> float:
    import cv2

    x, y, width, height = cv2.boundingRect(contour)
    inside = np.zeros((height, width), np.uint8)
    cv2.drawContours(inside, [contour - np.array([x, y])], -1, 1, cv2.FILLED)
    return float(probability[y : y + height, x : x + width][inside.astype(bool)].mean())


def _clockwise(corners: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same corners from the top left on: the smallest x + y first, then x - y largest, x + y largest, x - y smallest."""
    total = corners.sum(axis=1)
    difference = corners[:, 0] - corners[:, 1]
    return corners[[total.argmin(), difference.argmax(), total.argmax(), difference.argmin()]]


def _reading_order(found: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """Sort boxes into rows from top to bottom, and each row from left to right, by comparing vertical centres."""
    rows: list[list[NDArray[np.float32]]] = []
    for box in sorted(found, key=lambda box: float(box[:, 1].mean())):
        if rows and box[:, 1].mean() < rows[-1][0][:, 1].max() - np.ptp(rows[-1][0][:, 1]) / 4:
            rows[-1].append(box)
        else:
            rows.append([box])
    return [box for row in rows for box in sorted(row, key=lambda box: float(box[:, 0].mean()))]
