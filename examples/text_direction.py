"""Is a line of text upside down? PP-OCR's direction classifier (PaddleOCR, Apache-2.0), as the `rapidocr` package ships it.

python -m examples.text_direction IMAGE...
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from examples.trained import Run, Trained, command, runner
from flashmem.base.streams import exit_codes
from flashmem.cli.demo.run import open_image

NETWORK = Trained("rapidocr", "models/*_cls_*.onnx", {"x": (1, 3, 48, 192)}, "1MB")


def prepare(line: NDArray[np.uint8]) -> NDArray[np.float32]:
    """An image of one line (height, width, RGB), 48 pixels high, cut or filled up with mid-grey to 192, from -1 to 1."""
    from PIL import Image

    height, width = NETWORK.shapes["x"][2:]
    scaled = Image.fromarray(line).resize((max(1, round(line.shape[1] * height / line.shape[0])), height))
    pixels = np.asarray(scaled, np.float32)[:, :width, ::-1] / 127.5 - 1  # the network was trained on blue, green, red
    filled = np.zeros((1, 3, height, width), np.float32)
    filled[..., : pixels.shape[1]] = pixels.transpose(2, 0, 1)
    return filled


def upside_down(line: NDArray[np.uint8], run: Run) -> float:
    """The probability that a line is upside down."""
    (scores,) = run({"x": prepare(line)})
    return float(scores[0, 1])


if __name__ == "__main__":
    with exit_codes():
        files = command(__doc__, files="IMAGE").parse_args().files
        with NETWORK.open() as session:
            for name in files:
                turned = upside_down(np.asarray(open_image(name)), runner(session))
                print(f"{name}: {'upside down' if turned > 0.5 else 'upright'} ({max(turned, 1 - turned):.0%})")
