"""Dot products of words: exact sums of products of bytes by every instruction that can run here, and what they are used for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem.bundle.bundle import Bundle
from flashmem.compiler.weights.packing import signed_words
from flashmem.runtime.kernels.cache import kernel_key
from flashmem.runtime.kernels.required import RequiredKernel
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.opencl.dot_products import ARM, ARM_ACCUMULATED, DOT_PRODUCTS, KHRONOS, KHRONOS_MIXED, cpu_dots, gpu_dots
from flashmem.target.descriptor import load_descriptor
from tests.support.compared import DEVICES, PLACES
from tests.support.integer_products import Case, exact

Array = NDArray[Any]
HERE = list_devices()
_OF_X86 = ("", "vpdpbusd", "vpmaddwd 512", "vpmaddwd 256")


def _instructions(device: Device) -> list[str]:
    """Those that a CPU's driver can compile for its instruction set, and "", which is none."""
    known = [name + " by LLVM" * (bool(name) and "intel" in device.platform.lower()) for name in _OF_X86]
    widest = {"avx512": 4 if device.dots.startswith("vpdpbusd") else 3, "avx2": 2}.get(device.instruction_set, 1)
    ordered = [known[0], known[3], known[2], known[1]]
    return ordered[:widest]


INSTRUCTIONS = [(device.descriptor_name, name) for device in HERE if device.kind == "cpu" for name in _instructions(device)]

PRODUCTS = [
    Case(left, right, zero=zero, weight_zero=weight_zero, by_column=by_column)
    for left, right in (("uint8", "int8"), ("uint8", "uint8"), ("int8", "int8"), ("int8", "uint8"))
    for zero in (None, 100)
    for weight_zero, by_column in ((None, False), (77, False), (3, True))
]
DEEP = [
    Case("uint8", "int8", sizes=(5, 2048, 70), zero=255, ends=True),
    Case("int8", "uint8", sizes=(9, 1028, 33), zero=-128, weight_zero=255, ends=True),
    Case("uint8", "uint8", sizes=(1, 4096, 16), zero=3, weight_zero=128, ends=True),
]
CONVOLUTIONS = [
    Case("uint8", "int8", (1, 8, 9, 11), (20, 8, 3, 3), zero=200, attributes=(("pads", (1, 1, 1, 1)),)),
    Case(
        "uint8", "uint8", (2, 16, 10, 7), (12, 8, 3, 2), zero=9, weight_zero=99, by_column=True,
        attributes=(("pads", (2, 0, 1, 1)), ("strides", (2, 1)), ("dilations", (1, 2)), ("group", 2)),
    ),
    Case("int8", "int8", (1, 12, 6, 6), (40, 12, 1, 1), zero=-5),
    Case("int8", "uint8", (1, 4, 8, 8), (16, 4, 5, 5), weight_zero=128, attributes=(("pads", (2, 2, 2, 2)),)),
    Case("uint8", "int8", (1, 32, 5, 6), (20, 16, 3, 3), zero=31, attributes=(("pads", (0, 1, 1, 0)), ("group", 2))),
]  # fmt: skip
CASES = [*PRODUCTS, *DEEP, *CONVOLUTIONS]


def compiled(case: Case, folder: Path, **options: Any) -> tuple[Bundle, dict[str, Array]]:
    """The case's bundle and input."""
    model, feeds = case.model()
    onnx.save(model, folder / "m.onnx")
    return flashmem.compile(folder / "m.onnx", folder / "b.flashmem", build=False, **options), feeds


def by_dots(bundle: Bundle) -> bool:
    """Whether the bundle's kernels have dot products."""
    return any("FM_DOT" in file.read_text() for file in bundle.path.rglob("*.cl"))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_exact(case: Case, place: tuple[str, Any], tmp_path: Path) -> None:
    bundle, feeds = compiled(case, tmp_path, device=place[0], memory_path=place[1])
    assert by_dots(bundle)
    with flashmem.Session(bundle, device=place[0]) as session:
        [y] = session.run(None, feeds)
    assert np.array_equal(y, exact(case))
    assert np.abs(exact(case)).max() > 2**15, "sums of 16 bits would do"


@pytest.mark.parametrize(("device", "dots"), INSTRUCTIONS)
@pytest.mark.parametrize("case", [PRODUCTS[2], PRODUCTS[-1], *DEEP, *CONVOLUTIONS[:2]], ids=str)
def test_every_instruction_gives_the_same_bits(
    case: Case, device: str, dots: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, feeds = compiled(case, tmp_path, device=device)
    used = []
    given = Device.with_instructions

    def chosen(self: Device, text: str) -> str:
        made = given(replace(self, dots=dots), text)
        used.append(made != text)
        return made

    monkeypatch.setattr(Device, "with_instructions", chosen)
    with flashmem.Session(bundle, device=device) as session:
        [y] = session.run(None, feeds)
    assert any(used) == bool(dots)
    assert np.array_equal(y, exact(case))


@pytest.mark.parametrize("target", ["adreno750", "mali-g710", "nvidia"])
@pytest.mark.parametrize("path", ["buffer", "texture"])
@pytest.mark.parametrize("case", [*DEEP, *CONVOLUTIONS], ids=str)
@pytest.mark.filterwarnings("ignore:.*was compiled for")
def test_kernels_of_gpus(case: Case, path: Any, target: str, tmp_path: Path) -> None:
    """With four words of a row at a time where vectors are loaded and rows are whole."""
    bundle, feeds = compiled(case, tmp_path, device=target, memory_path=path)
    assert by_dots(bundle)
    with flashmem.Session(bundle, device=DEVICES[0][0]) as session:
        [y] = session.run(None, feeds)
    assert np.array_equal(y, exact(case))


@pytest.mark.parametrize("case", [PRODUCTS[1], PRODUCTS[4], DEEP[0], CONVOLUTIONS[0]], ids=str)
def test_sums_are_those_of_onnx_runtime(case: Case, tmp_path: Path) -> None:
    model, feeds = case.model()
    [wanted] = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    bundle, feeds = compiled(case, tmp_path, device=HERE[0].descriptor_name)
    with flashmem.Session(bundle, device=HERE[0].descriptor_name) as session:
        [y] = session.run(None, feeds)
    if (case.left, case.right) == ("uint8", "int8") and not np.array_equal(wanted, exact(case)):
        assert np.array_equal(y, exact(case))
        pytest.skip("without VNNI, ONNX Runtime's sums of pairs of such bytes saturate")
    assert np.array_equal(y, wanted)


def _scaled(conv: bool, seed: int = 3) -> tuple[onnx.ModelProto, dict[str, Array], Array]:
    """A MatMul or Conv between DequantizeLinears, its input, and its answer in float64."""
    case = CONVOLUTIONS[0] if conv else Case("uint8", "int8", sizes=(11, 516, 50), zero=131)
    x, w, _ = case.drawn(seed)
    draw = np.random.default_rng(seed)
    scale, scales = np.float32(0.017), draw.uniform(0.001, 0.02, w.shape[0] if conv else w.shape[1]).astype(np.float32)
    constants = {"w": w, "xs": scale, "xz": np.uint8(case.zero or 0), "ws": scales}
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "xs", "xz"], ["xf"]),
        helper.make_node("DequantizeLinear", ["w", "ws"], ["wf"], axis=0 if conv else 1),
        helper.make_node("Conv" if conv else "MatMul", ["xf", "wf"], ["y"], **dict(case.attributes)),
    ]
    wanted = exact(case, seed).astype(np.float64) * np.float64(scale)
    wanted *= scales.astype(np.float64).reshape((-1, 1, 1) if conv else (-1,))
    graph = helper.make_graph(
        nodes, "scaled", [helper.make_tensor_value_info("x", TensorProto.UINT8, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, wanted.shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), {"x": x}, wanted


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("conv", [False, True])
def test_products_between_dequantisers_round_four_times(conv: bool, place: tuple[str, Any], tmp_path: Path) -> None:
    """The sum as a float, the product of the scales, their product, and twice the half unit of a subnormal at most."""
    model, feeds, wanted = _scaled(conv)
    onnx.save(model, tmp_path / "m.onnx")
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", device=place[0], memory_path=place[1], build=False)
    assert by_dots(bundle)
    with flashmem.Session(bundle, device=place[0]) as session:
        [y] = session.run(None, feeds)
    assert (np.abs(y - wanted) <= 4 * 2.0**-24 * np.abs(wanted)).all()


@pytest.mark.parametrize(
    "case",
    [
        Case(sizes=(3, 30, 16)),  # words are not whole
        Case("uint8", "int8", (1, 6, 5, 5), (8, 6, 3, 3)),
        Case(sizes=(1, 33028, 4)),  # a sum may not fit in 32 bits
    ],
    ids=str,
)
def test_other_products_stay_as_they_are(case: Case, tmp_path: Path) -> None:
    bundle, feeds = compiled(case, tmp_path, device=HERE[0].descriptor_name)
    assert not by_dots(bundle)
    with flashmem.Session(bundle, device=HERE[0].descriptor_name) as session:
        [y] = session.run(None, feeds)
    assert np.array_equal(y, exact(case))


def test_one_packing_serves_all_cpus(tmp_path: Path) -> None:
    """The launches for other registers read the same slices; only rows and columns of a work-item differ."""
    bundle, _ = compiled(Case(sizes=(64, 64, 64)), tmp_path, device="generic-cpu")
    slices = {part.nbytes for part in bundle.program.slices}
    assert slices == {4 * 16 * (64 + 4)}, "four panels of 16 columns, each with its sums"
    tiles = set()
    for name in ("avx2", "avx512"):
        program = bundle.for_instruction_set(name).program
        assert program.slices == bundle.program.slices
        tiles |= {(launch.shape.tile_rows, launch.shape.tile_columns) for launch in program.launches}
    assert tiles == {(5, 16), (8, 32)}


def test_words_of_a_panel() -> None:
    draw = np.random.default_rng(1)
    for dtype in ("int8", "uint8"):
        panel = draw.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, (12, 8)).astype(dtype)
        made = signed_words(panel)
        assert made.shape == (16, 8) and made.dtype == panel.dtype
        signed = panel.astype(int) - 128 * (dtype == "uint8")
        flat = made.reshape(-1).view(np.int8)
        for step in range(12):
            for column in range(8):
                assert flat[step // 4 * 32 + 4 * column + step % 4] == signed[step, column]
        assert np.array_equal(flat[96:].view("<i4"), signed.sum(axis=0))


@pytest.fixture
def _flags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("flashmem.runtime.opencl.dot_products.processors", lambda: [{"flags": request.param}])
    yield


@pytest.mark.parametrize(
    ("_flags", "platform", "version", "instructions", "wanted"),
    [
        ("avx512_vnni", "Portable Computing Language", "3.1", "avx512", "vpdpbusd"),
        ("avx512_vnni", "Portable Computing Language", "3.1", "avx2", "vpmaddwd 256"),  # compiled for an older processor
        ("avx512f", "Portable Computing Language", "6.0", "avx512", "vpmaddwd 512"),
        ("avx512_vnni", "Intel(R) OpenCL", "2026.22.10.0", "avx512", "vpdpbusd by LLVM"),
        ("avx512_vnni", "Intel(R) OpenCL", "2031.1.0.0", "avx512", "vpmaddwd 512 by LLVM"),  # a version nobody has tried
        ("avx512_vnni", "Intel(R) OpenCL", "2026.22.10.0", "avx2", "vpmaddwd 256 by LLVM"),
        ("sse4_2", "Portable Computing Language", "3.1", "sse", ""),
        ("asimddp", "Portable Computing Language", "3.1", "neon", ""),
        ("avx512_vnni", "Another", "1.0", "avx512", ""),
    ],
    indirect=["_flags"],
)
@pytest.mark.usefixtures("_flags")
def test_instruction_of_a_cpu(platform: str, version: str, instructions: str, wanted: str) -> None:
    assert cpu_dots(platform, version, instructions) == wanted
    assert wanted in ("", *DOT_PRODUCTS)


def test_instruction_of_a_gpu() -> None:
    both = {KHRONOS, ARM, ARM_ACCUMULATED}
    assert gpu_dots(both, (1, 1, 1, 1, 1, 1)) == gpu_dots(both, (0, 1, 1, 0, 1, 1)) == KHRONOS_MIXED
    assert gpu_dots(both, (1, 1, 0, 1, 1, 0)) == KHRONOS
    assert gpu_dots(both, (0, 1, 0, 0, 1, 0)) == gpu_dots(both) == ARM_ACCUMULATED
    assert gpu_dots({ARM}) == ARM
    assert gpu_dots({"cl_qcom_dot_product8"}) == gpu_dots({KHRONOS}, (0, 0, 0, 0, 0, 0)) == ""


def test_the_instruction_is_part_of_the_key_of_kernels_that_use_it() -> None:
    plain, dots = (RequiredKernel("k", text, ()) for text in ("__kernel", "#ifdef FM_HAS_DOT16"))
    devices = [replace(HERE[0], dots=name) for name in ("", KHRONOS, "dp4a")]
    assert len({kernel_key(each, plain, ()) for each in devices}) == 1
    assert len({kernel_key(each, dots, ()) for each in devices}) == 3


def test_descriptors() -> None:
    for device in HERE:
        assert descriptor_for(device).dot_products == (device.kind == "cpu" or bool(device.dots))
    gpu = replace(HERE[0], kind="gpu", platform="ARM Platform", name="Mali-G710", instruction_set="", dots="")
    assert load_descriptor("mali-g710").dot_products
    assert not descriptor_for(gpu).dot_products and descriptor_for(replace(gpu, dots=ARM)).dot_products
