"""Packed weights: no wasted texels on devices that align image rows; reading them back like kernels gives the weights."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem.base.types import TEXEL_BYTES, MemoryPath
from flashmem.bundle.bundle import Bundle
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages import planned
from flashmem.compiler.stages.pipeline import generate
from flashmem.compiler.weights.packing import WASTED, PackedSlice, Packing
from flashmem.compiler.weights.slicing import DEFAULT, LEAST_BYTES, Slicing
from flashmem.program.program import raw_bytes
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.target.descriptor import DeviceDescriptor, load_descriptor
from flashmem.tools.zoo.graphs import zoo_graph
from tests.support.compared import DEVICES as PLACES
from tests.support.compared import require_right
from tests.support.inputs import KINDS, floats
from tests.support.paths import ROOT

Array = NDArray[Any]


def read_back(packing: Packing, part: PackedSlice, data: Array, panel: int) -> Array:
    """Local panel `panel` of a slice, [depth, elements of a row], at the addresses of contraction/mac.cl.j2."""
    row = packing.row_bytes
    flat = data.reshape(-1).view(np.uint8)
    if not part.width:
        found = flat.reshape(part.panels, packing.depth, row)[panel]
    else:
        texel = TEXEL_BYTES[packing.channel]
        image = flat.reshape(part.height, part.row_pitch)
        k = np.arange(packing.depth)
        x = panel * packing.panel_texels + k // part.height * (part.panels * packing.panel_texels)
        assert x.max() + packing.panel_texels <= part.width
        found = image[(k % part.height)[:, None], x[:, None] * texel + np.arange(row)]
    return np.ascontiguousarray(found).view(data.dtype)


@given(
    st.integers(1, 700), st.integers(1, 300), st.sampled_from([1, 1, 2, 5]), st.sampled_from([4, 8, 32]),
    st.sampled_from(["float32", "float16", "int8", "uint16", "int4"]), st.sampled_from(["buffer", "texture"]),
    st.sampled_from([1, 1, 6, 64]), st.sampled_from([1, 16, 64]), st.sampled_from([(64, 16384), (512, 512), (16384, 16384)]),
    st.integers(1, 1 << 20),
)  # fmt: skip
@settings(max_examples=250, deadline=None)
def test_what_is_packed_is_read_back_and_hardly_padded(
    depth: int, columns: int, groups: int, panel: int, storage: Any, path: MemoryPath, unit: int, alignment: int,
    sides: tuple[int, int], slice_bytes: int,
) -> None:  # fmt: skip
    width, height = sides
    panel = max(panel, 8) if storage == "int4" else panel
    device = DeviceDescriptor("made-up", "gpu", image_max_width=width, image_max_height=height, image_pitch_alignment=alignment)
    packing = Packing(depth, columns, groups, panel, storage, path, unit, device)
    parts = packing.slices(slice_bytes)
    assert [part.first_panel for part in parts] == [sum(p.panels for p in parts[:i]) for i in range(len(parts))]
    assert sum(part.panels for part in parts) == packing.panels
    assert all(part.nbytes <= slice_bytes or part.panels == 1 for part in parts)
    assert sum(part.raw for part in parts) in range(
        depth * columns * groups * packing.bits // 8, depth * columns * groups * packing.bits // 8 + len(parts) + 1
    )
    # Always: if images would need more padding than that, there are none.
    elements = packing.panels * packing.panel_bytes
    assert sum(part.nbytes for part in parts) <= elements + max(WASTED * elements, device.page_bytes)
    assert len({(part.width > 0, part.height) for part in parts}) == 1  # one kernel, and textures that share a slot
    for part in parts:
        if part.width:
            assert path == "texture" and part.width <= width and part.height <= height
            assert part.row_pitch % (alignment * TEXEL_BYTES[packing.channel]) == 0
            assert part.height >= depth or part.height % unit == 0
    generator = np.random.default_rng(depth)
    low, high = (-8, 8) if storage == "int4" else (0, 100)
    matrix = generator.integers(low, high, (depth, columns * groups)).astype(packing.dtype)
    for part in parts[:2] + parts[-1:]:
        data = packing.pack(part, lambda first, end: matrix[:, first:end])
        assert data.nbytes == part.nbytes
        for at in {0, part.panels - 1}:
            group, within = divmod(part.first_panel + at, packing.group_panels)
            first = group * columns + within * panel
            wanted = np.zeros((depth, panel), packing.dtype)
            kept = matrix[:, first : min(first + panel, (group + 1) * columns)]
            wanted[:, : kept.shape[1]] = kept
            got = read_back(packing, part, data, at)
            if storage == "int4":
                bits = got.view(np.uint8)
                got = np.concatenate((bits & 15, bits >> 4), axis=1).astype(np.int8)
                got = np.where(got > 7, got - 16, got)
            np.testing.assert_array_equal(got, wanted)


def test_images_are_taken_where_they_can_be_without_waste() -> None:
    """Deep convolutions, whose slices are a few panels, and rows whose length is a multiple of no alignment."""
    device = load_descriptor("adreno750")
    for depth, columns in ((11520, 1280), (23040, 1280), (2048, 8192), (768, 50257), (147, 64), (2048, 1000), (577, 331)):
        for storage in ("float32", "float16", "uint8"):
            packing = Packing(depth, columns, 1, 8, storage, "texture", 1, device)  # type: ignore[arg-type]
            parts = packing.slices(LEAST_BYTES)
            assert all(part.width for part in parts), (depth, columns)
            fewest = math.ceil(packing.panels * packing.panel_bytes / LEAST_BYTES)
            assert len(parts) <= max(math.ceil(packing.panels / (LEAST_BYTES // packing.panel_bytes)), fewest) + 1


def test_weights_are_buffers_where_images_would_be_padding() -> None:
    device = DeviceDescriptor("made-up", "gpu", image_max_width=128, image_max_height=64, image_pitch_alignment=64)
    whole = Packing(64, 4096, 1, 4, "float32", "texture", 64, device)
    assert all(part.width for part in whole.slices(LEAST_BYTES))
    odd = Packing(64, 4000, 1, 4, "float32", "texture", 64, device)  # rows of 1000 texels, which no fold makes narrower
    assert not any(part.width for part in odd.slices(LEAST_BYTES))
    deep = Packing(7919, 40, 1, 4, "float32", "texture", 61, device)  # more folds than an image is wide
    assert not any(part.width for part in deep.slices(LEAST_BYTES))


def elements(graph: Any, half: bool) -> int:
    """Bytes of a graph's constants; floats count two bytes if `half`, though larger tables may stay float32."""
    constants = {id(v): v for node in graph.nodes for v in node.inputs if v is not None and v.constant is not None}
    sizes = {"float32": 2 if half else 4, "int64": 8, "bool": 1}
    return sum(sizes.get(value.dtype, 4) * value.size for value in constants.values())


@pytest.mark.parametrize("name", ["resnet50", "whisper-medium-encoder", "gptneo-1.3b"])
def test_bundles_are_no_larger_than_their_weights(name: str) -> None:
    graph = prepare(zoo_graph(name))
    fused = fuse(graph)
    for device in ("adreno750", "mali-g715"):
        for precision in ("fp32", "fp16"):
            for slicing in (DEFAULT, Slicing(most=None)):
                program = generate(fused, load_descriptor(device), precision=precision, slicing=slicing).program  # type: ignore[arg-type]
                what = (name, device, precision, slicing)
                assert program.weights_bytes <= 1.02 * elements(graph, precision == "fp16"), what
                assert raw_bytes(program) <= program.weights_bytes <= 1.02 * raw_bytes(program), what
                assert len({launch.kernel for launch in program.launches}) <= 40, what
                if slicing is DEFAULT:
                    assert all(part.file_bytes <= LEAST_BYTES for part in program.slices if part.is_image), what


def model(folder: Path) -> tuple[Path, dict[str, dict[str, Array]]]:
    """Products and convolutions with depths that are multiples of no block or alignment; scales by block. Inputs by kind."""
    random = np.random.default_rng(0)
    constants: dict[str, Array] = {
        "w": random.standard_normal((203, 66)) / 8, "c": random.standard_normal((40, 37, 3, 3)) / 8,
        "g": random.standard_normal((24, 20, 3, 3)) / 8, "t": random.standard_normal((24, 12, 2, 2)) / 8,
        "d": random.standard_normal((10, 24, 3, 3)) / 8, "offset": random.standard_normal((1, 18, 12, 10)),
        "scale": random.uniform(0.01, 0.02, (3, 90)),
    }  # fmt: skip
    initializers = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in constants.items()]
    codes = random.integers(-8, 8, (96, 90)).astype(np.int8)
    initializers.append(helper.make_tensor("codes", TensorProto.INT4, codes.shape, codes.reshape(-1)))
    nodes = [
        helper.make_node("MatMul", ["a", "w"], ["product"]),
        helper.make_node("Conv", ["x", "c"], ["convolved"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["convolved", "g"], ["grouped"], group=2, pads=[1, 1, 1, 1], strides=[1, 1]),
        helper.make_node("ConvTranspose", ["grouped", "t"], ["grown"], strides=[2, 2]),
        helper.make_node("DeformConv", ["grouped", "d", "offset"], ["deformed"], pads=[1, 1, 1, 1]),
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["narrow"], axis=0, block_size=32),
        helper.make_node("MatMul", ["b", "narrow"], ["by block"]),
    ]
    inputs = {"a": (5, 203), "x": (1, 37, 12, 10), "b": (7, 96)}
    outputs = ("product", "grown", "deformed", "by block")
    graph = helper.make_graph(
        nodes, "packed", [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs], initializers,
    )  # fmt: skip
    path = folder / "packed.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path, {kind: {name: floats(*shape, kind=kind) for name, shape in inputs.items()} for kind in KINDS}


def small_images(name: str, folder: Path) -> str:
    """The device's descriptor with images of small height, rows of multiples of 64 texels, and small slices."""
    text = (ROOT / "devices" / f"{name}.toml").read_text()
    numbers = {
        "image_max_width": 2048, "image_max_height": 50, "image_pitch_alignment": 64, "max_alloc_bytes": 1 << 15,
        "rows": 2, "columns": 8, "vector": 4,
    }  # fmt: skip
    for key, number in numbers.items():
        text = re.sub(rf"^{key} = \d+", f"{key} = {number}", text, flags=re.MULTILINE)
    small = folder / f"{name}.toml"
    small.write_text(re.sub(r"^(capacity_model|counted|tuned) .*", "", text, flags=re.MULTILINE))
    return str(small)


@pytest.mark.parametrize("device", [name for name, _ in PLACES])
def test_folded_textures_give_right_answers_in_every_mode(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The small allocation limit cuts slices; other buffers may be as large as the real device permits.
    monkeypatch.setattr(planned, "within_allocations", lambda program, plan, *rest: plan)
    path, kinds = model(tmp_path)
    here = next(each for each in list_devices() if each.descriptor_name == device)
    made = flashmem.compile(
        path, tmp_path / "m.flashmem", device=small_images(device, tmp_path), memory_path="texture", chunk=4096
    )
    images = [part for part in made.program.slices if part.is_image]
    assert max(part.height for part in images) <= 50 and len({part.weight for part in images}) >= 4
    assert len(images) > len({part.weight for part in images})
    first: dict[str, list[Array]] = {}
    for mode in descriptor_for(here).modes["texture"]:
        with flashmem.Session(Bundle.open(made.path), device=device, mode=mode) as session:
            for kind, feeds in kinds.items():
                answers = session.run(None, feeds)
                for got, same in zip(answers, first.setdefault(kind, answers), strict=True):
                    np.testing.assert_array_equal(got, same, err_msg=mode)
    for kind, feeds in kinds.items():
        require_right(onnx.load(path), feeds, first[kind], against_runtime=False)
