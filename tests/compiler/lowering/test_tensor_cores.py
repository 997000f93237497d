"""Contractions by tensor cores: their kernels without PTX agree with float64 on CPUs, for every config of every descriptor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem.base.errors import UserError
from flashmem.compiler.configs.listed import listed_configs
from flashmem.compiler.configs.workload import TF32, Workload
from flashmem.compiler.kernels.contraction.tensor_cores import TensorContraction, Tf32Contraction
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.program.kernel_text import kernel_texts, uses_tensor_cores
from flashmem.runtime.kernels.cache import CachedKernels
from flashmem.runtime.kernels.cache_files import ProgramCache
from flashmem.runtime.kernels.required import RequiredKernel
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.opencl.tensor_cores import with_tensor_cores
from flashmem.target.descriptor import descriptor_names, load_descriptor
from flashmem.tools.verify import compare, reference
from tests.support.compared import Nodes, require_right
from tests.support.zoo_data import DATA, examples

PRECISIONS: dict[str, Any] = {"float16": "fp16", TF32: "tf32"}
SHIPPED = [
    config
    for name in descriptor_names()
    for config in listed_configs(load_descriptor(name))
    if isinstance(config, TensorContraction) and config.storage in PRECISIONS
]
HERE = sorted(list_devices(), key=lambda device: (not device.mma, device.descriptor_name))
LAST = [[each for each in SHIPPED if each.storage == storage and each.split_k == 1][-1] for storage in ("float16", TF32)]
CASES = [(config, HERE[0]) for config in SHIPPED] + [(config, device) for config in LAST for device in HERE[1:]]
"""Every config on one runtime, with tensor cores if any has them, and one on all: PoCL takes long to build such kernels."""


def model(*, complete: bool) -> Nodes:
    """Products and convolutions of activations that are exact in half and in TF32, as are all weights.

    Results that a device may store in half, before they are transposed, are small whole numbers. No size is a multiple of a
    block, apart from the depth of some. If not `complete`: a product whose depth is one, and a convolution whose depth is not.
    """
    nodes, random = Nodes(), np.random.default_rng(7)

    def halves(*shape: int) -> Any:
        return random.uniform(-0.5, 1.5, shape).astype(np.float16).astype(np.float32)

    def whole(*shape: int) -> Any:
        return random.integers(-2, 3, shape).astype(np.float32)

    def stored(data: Any) -> str:
        [made] = nodes.node("Abs", nodes.input(data))
        nodes.outputs.pop()
        return made

    [product] = nodes.node("MatMul", stored(halves(2, 75, 128)), nodes.constant(halves(128, 150)))
    nodes.outputs.pop()
    [biased] = nodes.node("Add", product, nodes.constant(halves(150) - 40))
    nodes.outputs.pop()
    nodes.node("Relu", biased)
    image = stored(whole(2, 16, 9, 11))
    nodes.node("Conv", image, nodes.constant(whole(36, 16, 3, 3)), pads=[1, 2, 0, 1], strides=[2, 1])
    if not complete:
        return nodes
    [first] = nodes.node("MatMul", stored(whole(37, 72)), nodes.constant(whole(72, 40)))
    nodes.outputs.pop()
    nodes.node("MatMul", first, nodes.constant(halves(40, 36)))
    nodes.node("MatMul", stored(halves(19, 8)), nodes.constant(halves(8, 140)))
    nodes.node("Conv", image, nodes.constant(whole(8, 8, 3, 2)), group=2, dilations=[1, 2], pads=[2, 0, 1, 1])
    nodes.node("Conv", stored(whole(1, 128, 5, 4)), nodes.constant(whole(8, 128, 2, 3)), pads=[1, 1, 0, 1], dilations=[2, 1])
    return nodes


NODES = {complete: model(complete=complete) for complete in (False, True)}


@pytest.mark.parametrize(
    ("config", "device"), CASES, ids=lambda each: each.name if isinstance(each, TensorContraction) else each.descriptor_name
)
def test_answers(config: TensorContraction, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelSelector, "config", lambda *asked, **given: config)
    monkeypatch.setattr("flashmem.options.check_precision", lambda *given: None)
    complete = config in LAST and device is HERE[0]
    nodes = NODES[complete]
    file, proto, name = tmp_path / "m.onnx", nodes.proto(), device.descriptor_name
    file.write_bytes(proto.SerializeToString())
    bundle = flashmem.compile(file, tmp_path / "b", device=name, memory_path="buffer", precision=PRECISIONS[config.storage])
    texts = kernel_texts(bundle.source.plain)
    families = [launch.shape.family for launch in bundle.program.launches if uses_tensor_cores(texts[launch.kernel])]
    assert (families.count("matmul"), families.count("conv")) == ((4, 3) if complete else (1, 1))
    modes, answers = load_descriptor(name).modes["buffer"], []
    for mode in (modes[0], "interleave") if complete else modes[:1]:
        with flashmem.Session(bundle, device=name, mode=mode) as session:
            answers.append(session.run(None, nodes.feeds))
    require_right(proto, nodes.feeds, answers[0])
    for one, other in zip(answers[0], answers[-1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_floats_are_rounded_to_ten_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the nearest number of TF32, and ties away from zero, by the numbers' definition."""
    random, config = np.random.default_rng(3), LAST[1]
    left, right = (random.normal(size=shape).astype(np.float32) for shape in ((37, 72), (72, 40)))
    left[0] *= np.float32(2.0) ** random.integers(-60, 60, 72).astype(np.float32)
    left[1, :4] = [1 + 2.0**-11, -(1 + 2.0**-11), 1 + 3 * 2.0**-11, 1 + 2.0**-11 - 2.0**-23]  # ties, and less than one
    left[1, 4:] = 0

    def rounded(data: Any) -> Any:
        mantissa, exponent = np.frexp(data.astype(np.float64))
        return np.ldexp(np.copysign(np.floor(np.abs(mantissa) * 2**11 + 0.5), mantissa), exponent - 11)

    nodes = Nodes()
    nodes.node("MatMul", nodes.input(left), nodes.constant(right))
    monkeypatch.setattr(KernelSelector, "config", lambda *asked, **given: config)
    monkeypatch.setattr("flashmem.options.check_precision", lambda *given: None)
    name, exact = HERE[0].descriptor_name, rounded(left) @ rounded(right)
    with flashmem.Session(nodes.proto(), device=name, memory_path="buffer", precision="tf32") as session:
        [answer] = session.run(None, nodes.feeds)
    sizes = np.abs(rounded(left)) @ np.abs(rounded(right))
    assert (np.abs(answer - exact) <= 72 * 2.0**-23 * sizes).all()
    assert (np.abs(left.astype(np.float64) @ right - exact) > 2.0**-12 * sizes).any(), "rounding makes a difference"


@pytest.mark.parametrize("name", ["resnet-tiny", "vit-tiny", "gptneo-tiny"])
def test_models_in_tf32_are_within_its_tolerance(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime computes the same model in float32; the error is that of rounded operands, far above that of sums."""
    select, config, model = KernelSelector.config, LAST[1], DATA / f"{name}.onnx"

    def rounding(self: KernelSelector, workload: Workload, *asked: Any, **given: Any) -> Any:
        return config if config.fits(workload) else select(self, workload, *asked, **given)

    monkeypatch.setattr(KernelSelector, "config", rounding)
    monkeypatch.setattr("flashmem.options.check_precision", lambda *given: None)
    device = HERE[0].descriptor_name
    bundle = flashmem.compile(model, tmp_path / "b", device=device, memory_path="buffer", precision="tf32")
    assert any(map(uses_tensor_cores, kernel_texts(bundle.source.plain).values()))
    inputs = examples(name)
    with flashmem.Session(bundle, device=device) as session:
        answers = session.run(None, inputs)
    wanted = reference(model, inputs, [port.name for port in bundle.program.outputs])
    found = compare(answers, wanted, bundle.program.lowest_precision)
    assert found.ok and found.relative_error > 1e-5


def test_tf32_changes_products_and_convolutions_only(tmp_path: Path) -> None:
    """Weights and activations stay in float, and other kernels are those of fp32."""

    def ones(*shape: int) -> Any:
        return np.ones(shape, np.float32)

    nodes = Nodes()
    nodes.node("MatMul", nodes.input(ones(256, 512)), nodes.constant(ones(512, 512)))
    nodes.node("Conv", nodes.input(ones(1, 128, 28, 28)), nodes.constant(ones(128, 128, 3, 3)), pads=[1, 1, 1, 1])
    nodes.node("MatMul", nodes.input(ones(3, 5, 16)), nodes.input(ones(3, 16, 8)))
    nodes.node("ConvTranspose", nodes.input(ones(1, 8, 4, 4)), nodes.constant(ones(8, 8, 2, 2)))
    nodes.node("Softmax", nodes.input(ones(4, 20)))
    wanted: Any = {"device": "nvidia", "memory_path": "buffer", "build": False}
    file = tmp_path / "m.onnx"
    file.write_bytes(nodes.proto().SerializeToString())
    plain, rounding = (flashmem.compile(file, tmp_path / each, precision=each, **wanted) for each in ("fp32", "tf32"))
    assert not uses_tensor_cores(plain.source.plain)
    assert [bundle.program.precision for bundle in (plain, rounding)] == ["fp32", "tf32"]
    assert {tensor.dtype for tensor in rounding.program.tensors} == {"float32"}
    assert rounding.program.weights_bytes >= 4 * sum(np.prod(each.dims) for each in nodes.constants)

    def texts(bundle: flashmem.Bundle) -> list[tuple[str, str]]:
        found = kernel_texts(bundle.source.plain)
        return [(launch.name, found[launch.kernel].replace(launch.kernel, "")) for launch in bundle.program.launches]

    others, those = dict(texts(plain)), dict(texts(rounding))
    others, those = ({name: text for name, text in each.items() if "[join]" not in name} for each in (others, those))
    by_units = [name for name, text in those.items() if uses_tensor_cores(text)]
    assert [name.split(".")[0] for name in by_units] == ["MatMul_MatMul0", "Conv_Conv1"]
    assert {name: those[name] for name in those if name not in by_units} == {
        name: others[name] for name in others if name not in by_units
    }


def test_tf32_is_refused_where_it_would_change_nothing(tmp_path: Path) -> None:
    nodes, name = model(complete=False), "mali-g715"
    with pytest.raises(UserError, match=rf"tf32 is for NVIDIA's tensor cores .*, which device {name} does not have; use"):
        flashmem.compile(nodes.proto(), tmp_path / "b", device=name, precision="tf32", build=False)
    with pytest.raises(UserError, match="tf32 needs weights in buffers, not in textures; use --memory-path buffer"):
        flashmem.compile(nodes.proto(), tmp_path / "b", device="nvidia", memory_path="texture", precision="tf32", build=False)


PRODUCT = Workload("matmul", "buffer", 1024, 1024, 4096, storage="float16")
CONVOLUTION = Workload("conv", "buffer", 784, 9 * 128, 128, storage="float16", taps=9)


@pytest.mark.parametrize("workload", [PRODUCT, CONVOLUTION], ids=lambda each: each.family)
def test_they_multiply_floats_for_tf32_alone(workload: Workload) -> None:
    def selected(**changes: Any) -> bool:
        found = KernelSelector(load_descriptor("nvidia")).config(replace(workload, storage=TF32, **changes))
        return isinstance(found, Tf32Contraction)

    assert selected() and not selected(path="texture")
    assert not selected(depth=workload.taps * 6), "a row, or a tap, is no whole number of chunks"


@pytest.mark.parametrize("workload", [PRODUCT, CONVOLUTION], ids=lambda each: each.family)
def test_they_multiply_halves_in_buffers(workload: Workload) -> None:
    def selected(halves: bool = True, **changes: Any) -> bool:
        found = KernelSelector(load_descriptor("nvidia")).config(replace(workload, **changes), halves=halves)
        return isinstance(found, TensorContraction)

    assert selected()
    assert not selected(halves=False), "activations are floats"
    assert not selected(storage="float32") and not selected(path="texture")
    assert not selected(depth=workload.taps * 12), "a row, or a tap, is no whole number of chunks"


@pytest.mark.parametrize("config", SHIPPED, ids=lambda each: each.name)
def test_packed_weights_are_also_multiplied_by_floats(config: TensorContraction) -> None:
    """A weight may have left operands of several types, and is packed once."""
    other = config.in_float().cut(PRODUCT)
    assert (other.panel, other.needs) == (config.panel, frozenset()) and other.fits(replace(PRODUCT, storage=config.storage))


def test_only_kernels_and_devices_with_tensor_cores_get_their_instructions() -> None:
    text = "#ifdef FM_TENSOR_CORES"
    added = with_tensor_cores(text, mma=True)
    assert added.endswith(text) and "mma.sync" in added
    assert with_tensor_cores(text, mma=False) == text and with_tensor_cores("other", mma=True) == "other"


def test_an_older_gpu_says_that_it_has_none() -> None:
    older: Any = SimpleNamespace(device=replace(HERE[0], platform="NVIDIA CUDA", name="Tesla T4", mma=False))
    wanted = [RequiredKernel("k", "#ifdef FM_TENSOR_CORES", ())]
    with pytest.raises(UserError, match=r"use tensor cores \(.*\), which Tesla T4 does not have; compile the model for"):
        CachedKernels(ProgramCache(), older, (), wanted)
