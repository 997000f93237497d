"""The demo's two networks on its generated page: every device compared with ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

import flashmem
from flashmem.base.errors import MissingFileError, UserError
from flashmem.cli.demo import ocr
from flashmem.cli.demo.run import PAGE, draw_page, open_image
from flashmem.compiler.frontend.quantize import quantised
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.tools.verify import compare

DEVICES = [device.descriptor_name for device in list_devices()]
SHAPES = {"detector": ocr.DETECTOR_SHAPE, "recogniser": ocr.LINE_SHAPE}
BUDGET = 50_000_000


class Reference:
    """A network in ONNX Runtime; records its inputs."""

    def __init__(self, model: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        self.inputs: list[NDArray[np.float32]] = []

    def __call__(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        self.inputs.append(pixels)
        answer: NDArray[np.float32] = self.session.run(None, {"x": pixels})[0]
        return answer


@pytest.fixture(scope="module")
def models() -> ocr.Models:
    return ocr.find_models()


@pytest.fixture(scope="module")
def page() -> ocr.Image:
    return np.asarray(draw_page())


@pytest.fixture(scope="module")
def references(models: ocr.Models) -> dict[str, Reference]:
    return {"detector": Reference(models.detector), "recogniser": Reference(models.recogniser)}


def text_on(image: ocr.Image, networks: dict[str, Any], models: ocr.Models) -> list[str]:
    found = ocr.find_lines(image, networks["detector"])
    return [line.text for line in ocr.read_lines(image, found, networks["recogniser"], ocr.read_alphabet(models.recogniser))]


def test_the_page_is_read_by_the_reference(page: ocr.Image, models: ocr.Models, references: dict[str, Reference]) -> None:
    assert text_on(page, references, models) == [text for _, text in PAGE]


def test_the_page_is_read_with_quantised_weights(page: ocr.Image, models: ocr.Models) -> None:
    """Trained networks: all filters in 8 bits, all matrices but the last in 4."""
    networks = {}
    for name, model in (("detector", models.detector), ("recogniser", models.recogniser)):
        with quantised(model, "int4", as_floats=True) as made:
            networks[name] = Reference(made.path)
            assert made.weights and all(weight.error < 0.15 for weight in made.weights)
    assert text_on(page, networks, models) == [text for _, text in PAGE]


def test_a_page_of_another_size_lying_askew(models: ocr.Models, references: dict[str, Reference]) -> None:
    """The result depends on the image alone: lines are found at their places, turned upright, and in reading order."""
    tilted = draw_page().rotate(5, expand=True, fillcolor="white", resample=3).resize((1400, 1000), resample=3)
    wanted = [text for _, text in PAGE]
    read = text_on(np.asarray(tilted), references, models)
    assert len(read) == len(wanted)
    assert sum(a == b for a, b in zip(read, wanted, strict=True)) >= len(wanted) - 1
    assert text_on(np.full((300, 500, 3), 255, np.uint8), references, models) == []


def test_lines_lie_where_they_were_drawn(page: ocr.Image, references: dict[str, Reference]) -> None:
    ink = np.flatnonzero((page.min(axis=2) < 128).any(axis=1))
    rows = np.split(ink, np.flatnonzero(np.diff(ink) > 1) + 1)  # the pixel rows of each line
    tall = [row for row in rows if len(row) > 3]
    found = ocr.find_lines(page, references["detector"])
    assert len(found) == len(tall) == len(PAGE)
    for corners, row in zip(found, tall, strict=True):
        assert corners[:, 1].min() <= row[0] + 2 and corners[:, 1].max() >= row[-1] - 2, "a box holds its line"
        assert np.ptp(corners[:, 1]) < 2.5 * len(row), "and not much more"


@pytest.fixture(scope="module", params=DEVICES)
def bundles(request: pytest.FixtureRequest, models: ocr.Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    made = {}
    for name, model in (("detector", models.detector), ("recogniser", models.recogniser)):
        made[name] = folder / f"{name}.flashmem"
        flashmem.compile(model, made[name], device=request.param, budget=BUDGET, shapes={"x": SHAPES[name]})
    return made


def test_the_page_is_read_inside_the_budget_as_the_reference_reads_it(
    page: ocr.Image, models: ocr.Models, references: dict[str, Reference], bundles: dict[str, Path]
) -> None:
    for reference in references.values():
        reference.inputs.clear()
    text_on(page, references, models)
    for name, path in bundles.items():
        reference = references[name]
        seen = list(reference.inputs)
        with flashmem.Session(path) as session:
            assert session.device.descriptor_name == session.bundle.descriptor.name
            answers = [session.run(None, {"x": pixels})[0] for pixels in seen]
            assert 0 < session.last_run.memory.peak_bytes <= BUDGET
        result = compare(answers, [reference(pixels) for pixels in seen], "fp32")
        assert result.ok, f"{name}: {result}"
    with flashmem.Session(bundles["detector"]) as detector, flashmem.Session(bundles["recogniser"]) as recogniser:
        networks = {
            "detector": lambda pixels: detector.run(None, {"x": pixels})[0],
            "recogniser": lambda pixels: recogniser.run(None, {"x": pixels})[0],
        }
        assert text_on(page, networks, models) == [text for _, text in PAGE]


def test_greedy_ctc() -> None:
    alphabet = ("", "a", "b", " ")
    steps = np.eye(4, dtype=np.float32)[[0, 1, 1, 0, 1, 2, 2, 3, 1, 0, 3]][None]
    text, confidence = ocr.decode(steps * 0.8, alphabet)
    assert text == "aab a"
    assert confidence == pytest.approx(0.8)
    assert ocr.decode(np.eye(4, dtype=np.float32)[[0, 0]][None], alphabet) == ("", 0.0)


def test_boxes_in_reading_order() -> None:
    probability = np.zeros((200, 300), np.float32)
    places = [(20, 150), (24, 20), (100, 20), (160, 200)]  # top, left: the first two have the same row
    for top, left in places:
        probability[top : top + 20, left : left + 80] = 0.9
    probability[80:84, 280:284] = 0.31  # below the threshold
    found = ocr.boxes(probability, scale=0.5)
    centres = [box.mean(axis=0) for box in found]
    np.testing.assert_allclose(centres, [(119, 67), (379, 59), (119, 219), (479, 339)], atol=2)


def test_images_that_cannot_be_read(tmp_path: Path) -> None:
    text, cut = tmp_path / "text.png", tmp_path / "cut.png"
    text.write_text("not a picture")
    draw_page().save(cut)
    cut.write_bytes(cut.read_bytes()[:2000])
    for path in (text, cut):
        with pytest.raises(UserError, match=rf"{path.name} is not an image"):
            open_image(path)
    with pytest.raises(MissingFileError, match="no such image"):
        open_image(tmp_path / "none.png")


def test_a_photograph_is_turned_upright(tmp_path: Path) -> None:
    from PIL import Image

    picture = Image.new("L", (40, 20), 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: rotated by 90 degrees
    picture.save(tmp_path / "turned.jpg", exif=exif)
    opened = open_image(tmp_path / "turned.jpg")
    assert (opened.size, opened.mode) == ((20, 40), "RGB")
