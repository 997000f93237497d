"""Code styles of phones: aligned vector loads, 32-bit offsets, textures without samplers: the same bits as the plain style."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem.base.types import MemoryPath
from flashmem.runtime.opencl.device import HALF_ARITHMETIC
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.compared import Nodes, require_right
from tests.support.inputs import floats
from tests.support.paths import ROOT

DEVICES = [device.descriptor_name for device in list_devices()]
PATHS: tuple[MemoryPath, ...] = ("texture", "buffer")


def _model() -> Nodes:
    """Products whose depth is a multiple of four and those whose depth is not, with whole and ragged columns."""
    nodes, random = Nodes(), np.random.default_rng(11)

    def numbers(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    for depth, columns in ((52, 44), (52, 45), (50, 44)):
        stored = nodes.node("Tanh", nodes.input(numbers(2, 19, depth)))
        product = nodes.node("MatMul", *stored, nodes.constant(numbers(depth, columns)))
        nodes.node("Relu", *product)
    for depth, columns in ((20, 12), (20, 13), (22, 12)):
        nodes.node("MatMul", nodes.input(numbers(3, 2, 9, depth)), nodes.input(numbers(2, depth, columns)))
        transposed = nodes.node("Transpose", nodes.input(numbers(2, columns, depth)), perm=[0, 2, 1])
        nodes.node("MatMul", nodes.input(numbers(2, 5, depth)), *transposed)
    image = nodes.input(numbers(2, 16, 9, 7))
    nodes.node("Conv", image, nodes.constant(numbers(20, 16, 3, 3)), pads=[1, 2, 0, 1], strides=[2, 1])
    nodes.node("Conv", image, nodes.constant(numbers(6, 8, 3, 3)), group=2, dilations=[1, 2])
    nodes.node("Conv", image, nodes.constant(numbers(5, 16, 1, 1)))
    nodes.node("Conv", image, nodes.constant(numbers(16, 1, 3, 3)), pads=[1, 1, 1, 1], group=16)
    for kernel, strides, dilations, pads in (((3, 5), [2, 2], [1, 1], [1, 2, 0, 3]), ((2, 3), [1, 1], [2, 3], [1, 0, 2, 5])):
        weight = nodes.constant(numbers(16, 1, *kernel))
        product = nodes.node("Conv", image, weight, pads=pads, strides=strides, dilations=dilations, group=16)
        nodes.node("Sigmoid", *product)
    nodes.node("Conv", nodes.input(numbers(1, 6, 8, 7)), nodes.constant(numbers(6, 6, 3, 2)), pads=[1, 0, 1, 1])
    nodes.node("ConvTranspose", image, nodes.constant(numbers(16, 8, 3, 3)), strides=[2, 2])
    nodes.node("MaxPool", nodes.input(numbers(1, 6, 9, 8)), kernel_shape=[2, 2])
    return nodes


def _few_channels(nodes: Nodes) -> Nodes:
    """Convolutions of few channels (phones: by rows of taps), with padding on any side and less than a tile of pixels."""
    random = np.random.default_rng(12)
    for kind, shape, kernel, strides, dilations, pads in (
        ("around 1e3", (2, 3, 10, 12), (13, 3, 7, 7), [2, 2], [1, 1], [3, 3, 3, 3]),
        ("positive", (2, 3, 10, 12), (13, 3, 3, 2), [1, 1], [2, 1], [0, 1, 3, 0]),
        ("of many sizes", (1, 3, 10, 12), (13, 3, 10, 8), [1, 1], [1, 1], [0, 0, 0, 0]),  # five pixels, one row
        ("normal", (1, 1, 6, 8), (8, 1, 5, 5), [1, 1], [1, 1], [2, 2, 2, 2]),
    ):
        image = nodes.input(floats(*shape, kind=kind))
        weight = nodes.constant(random.standard_normal(kernel).astype(np.float32))
        nodes.node("Relu", *nodes.node("Conv", image, weight, pads=pads, strides=strides, dilations=dilations))
    return nodes


NODES, WITH_FEW_CHANNELS = _model(), _few_channels(_model())
_CODE = re.compile(r"\[code\]\n(?:\w.*\n)*")


def _descriptor(phone: str, code: str, folder: Path) -> str:
    """A file with a phone's descriptor in another code style."""
    text, found = _CODE.subn(f"[code]\n{code}\n", (ROOT / f"devices/{phone}.toml").read_text())
    assert found == 1
    folder.mkdir()
    (folder / f"{phone}.toml").write_text(text)
    return str(folder / f"{phone}.toml")


STYLES = {
    "plain": 'multiply_add = "fma"',
    "phone": "samplers = false\nprivate_arrays = false\nvector_loads = true\nlongest_row = 24",
}
LAST = {"mali-g710": "\ncopies_between_steps = false"}
"""Where stream lanes copy after the work."""


def _compared(device: str, path: MemoryPath, phone: str, precision: str, config: str, folder: Path, nodes: Nodes) -> list[str]:
    """The kernels in both styles, after answers on `device` were compared, in the phone's style also with stream lanes."""
    file = folder / "m.onnx"
    file.write_bytes(nodes.proto().SerializeToString())
    answers, sources = [], []
    for name, code in {**STYLES, "phone": STYLES["phone"] + LAST.get(phone, "")}.items():
        described = _descriptor(phone, code, folder / name)
        Path(described).write_text(f'only = "{config}"\n{Path(described).read_text()}')
        bundle = flashmem.compile(
            file, folder / f"{name}.flashmem", device=described, memory_path=path, precision=precision, build=False
        )
        sources.append(bundle.source.plain)
        for mode in ("auto", "interleave") if name == "phone" else ("auto",):
            with flashmem.Session(bundle, device=device, mode=mode) as session:
                answers.append(session.run(None, nodes.feeds))
    for answer in answers[1:]:
        for got, expected in zip(answer, answers[0], strict=True):
            np.testing.assert_array_equal(got, expected)
    if precision == "fp32":
        require_right(nodes.proto(), nodes.feeds, answers[1])
    return sources


PHONES = [("adreno750", "fp32"), ("mali-g710", "fp16")]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("device", "path", "phone", "precision"),
    [(device, PATHS[(i + j) % 2], *phone) for i, device in enumerate(DEVICES) for j, phone in enumerate(PHONES)],
)
@pytest.mark.filterwarnings("ignore::flashmem.base.errors.FlashmemWarning")
def test_the_same_bits(device: str, path: MemoryPath, phone: str, precision: str, tmp_path: Path) -> None:
    plain, written = _compared(device, path, phone, precision, "tile", tmp_path, WITH_FEW_CHANNELS)
    assert all(name in written and name not in plain for name in ("depthwise_row_", "conv_row_"))
    assert "const float4 q0 = *(__global const float4*)" in written and "float part[" not in written
    assert "NEAREST" not in written and ("NEAREST" in plain) == (path == "texture")


@pytest.mark.thorough
@pytest.mark.parametrize("device", [each.descriptor_name for each in list_devices() if HALF_ARITHMETIC in each.extensions])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.filterwarnings("ignore::flashmem.base.errors.FlashmemWarning")
def test_sums_in_half(device: str, path: MemoryPath, tmp_path: Path) -> None:
    # Not few channels: a phone's form for them sums in float, the plain form in half.
    _, written = _compared(device, path, "adreno750", "fp16", "8x4-half", tmp_path, NODES)
    assert re.search(r"const half4 q0 = \(?\*\(__global const half4\*\)", written)
