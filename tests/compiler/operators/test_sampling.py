"""GridSample, AffineGrid, RoiAlign and DeformConv: coordinates computed at run time, also far outside the image."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest

import flashmem
from tests.support.compared import DEVICES, Nodes, answers_of, compare, refusal
from tests.support.inputs import KINDS, floats


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_grid_sample(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes(opset=20)
    grid = n.input(np.random.default_rng(0).uniform(-1.7, 1.7, (2, 6, 7, 2)).astype(np.float32))
    volume = n.input(np.random.default_rng(1).uniform(-1.7, 1.7, (2, 3, 4, 5, 3)).astype(np.float32))
    paddings = ("zeros", "border", "reflection", "reflection", "zeros", "border")
    for kind in KINDS:
        x, v = n.input(floats(2, 6, 5, 9, kind=kind)), n.input(floats(2, 3, 4, 5, 6, kind=kind))
        for i, (mode, padding) in enumerate(zip(("linear", "nearest", "cubic") * 2, paddings, strict=True)):
            n.node("GridSample", x, grid, mode=mode, padding_mode=padding, align_corners=i % 2)
        n.node("GridSample", v, volume, mode="linear", padding_mode="zeros")
        n.node("GridSample", v, volume, mode="nearest", padding_mode="reflection", align_corners=1)
    compare(n, place, tmp_path, against_runtime=False)


def test_grid_sample_of_what_is_no_place(tmp_path: Path) -> None:
    """Infinite and undefined coordinates are outside, and read nothing."""
    n = Nodes()
    places = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30, 0.0], np.float32)
    x = n.input(np.ones((1, 1, 4, 4), np.float32))
    n.node("GridSample", x, n.input(np.stack([places, np.zeros(6, np.float32)], -1)[None, None]))
    (answer,) = answers_of(n.proto(), n.feeds, DEVICES[0], tmp_path)
    np.testing.assert_array_equal(answer.reshape(-1), [0, 0, 0, 0, 0, 1])


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_affine_grid(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes()
    for kind, align in product(KINDS, (0, 1)):
        planes, volumes = n.input(floats(2, 2, 3, kind=kind)), n.input(floats(2, 3, 4, kind=kind))
        n.node("AffineGrid", planes, n.constant(np.array([2, 3, 5, 7])), align_corners=align)
        n.node("AffineGrid", volumes, n.constant(np.array([2, 3, 4, 5, 7])), align_corners=align)
    compare(n, place, tmp_path, against_runtime=False)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_roi_align(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes(opset=18)
    rois = [[0, 0, 9, 9], [1.5, 2.5, 7, 14], [-3, -2, 4, 5], [5, 5, 30, 30], [6, 6, 6.1, 6.2]]
    places = n.input(np.array(rois, np.float32)), n.input(np.array([0, 2, 1, 2, 0]))
    # With this scale no quotient that gives the number of samples is an integer, where float32 could round it up.
    sizes = {"output_height": 3, "output_width": 4, "spatial_scale": 0.8125}
    for kind in KINDS:
        x = n.input(floats(3, 9, 16, 12, kind=kind))
        for mode, rule, samples in product(("avg", "max"), ("half_pixel", "output_half_pixel"), (0, 2)):
            n.node("RoiAlign", x, *places, mode=mode, coordinate_transformation_mode=rule, sampling_ratio=samples, **sizes)
    compare(n, place, tmp_path, against_runtime=False)


def test_roi_align_in_an_image_that_does_not_exist(tmp_path: Path) -> None:
    n = Nodes()
    x, roi, batch = n.input(floats(2, 3, 4, 4)), n.input(np.array([[0, 0, 2, 2]], np.float32)), n.input(np.array([1]))
    n.node("RoiAlign", x, roi, batch, output_height=2, output_width=2)
    device, path = DEVICES[0]
    onnx.save(n.proto(), tmp_path / "roi.onnx")
    bundle = flashmem.compile(tmp_path / "roi.onnx", tmp_path / "b.flashmem", device=device, memory_path=path)  # type: ignore[arg-type]
    with flashmem.Session(bundle, device=device) as session:
        session.run(None, n.feeds)
        for name, wrong in ((batch, np.array([2])), (batch, np.array([-1])), (roi, np.array([[0, 0, 1e9, 2]], np.float32))):
            with pytest.raises(ValueError, match="RoiAlign"):
                session.run(None, {**n.feeds, name: wrong})


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_deform_conv(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes(opset=19)
    far, near = n.input(4 * floats(2, 36, 4, 5)), n.input(floats(1, 18, 2, 2))
    weights, bias, mask = n.constant(floats(8, 3, 3, 3)), n.constant(floats(8)), n.input(floats(2, 18, 4, 5))
    for kind in KINDS:
        x, y = n.input(floats(2, 6, 4, 5, kind=kind)), n.input(floats(1, 6, 7, 5, kind=kind))
        n.node("DeformConv", x, weights, far, bias, mask, group=2, offset_group=2, pads=[1] * 4)
        n.node("DeformConv", y, n.input(floats(4, 6, 3, 3, kind=kind)), near, strides=[2, 2], dilations=[2, 1])
    compare(n, place, tmp_path, against_runtime=False)


def test_refusals(tmp_path: Path) -> None:
    n = Nodes()
    x = n.input(floats(1, 2, 4, 4))
    n.node("GridSample", x, n.input(floats(1, 3, 3, 2)), mode="lanczos")
    n.node("RoiAlign", x, n.input(floats(2, 4)), n.input(np.zeros(2, np.int64)), mode="median", output_height=2)
    n.node("DeformConv", x, n.constant(floats(2, 2, 3, 3)), n.input(floats(1, 17, 2, 2)))
    text = refusal(n, tmp_path)
    assert "GridSample with mode 'lanczos'" in text
    assert "RoiAlign with mode 'median'" in text
    assert "DeformConv that gives (1, 2, 2, 2) with offsets of shape (1, 17, 2, 2)" in text
