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
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.program.kernel_text import kernel_texts, uses_tensor_cores
from flashmem.runtime.kernels.cache import CachedKernels
from flashmem.runtime.kernels.cache_files import ProgramCache
from flashmem.runtime.kernels.required import RequiredKernel
from flashmem.runtime.opencl.context import list_devices
from flashmem.runtime.opencl.devices import Device
from flashmem.runtime.opencl.tensor_cores import with_instructions
from flashmem.target.descriptor import descriptor_names, load_descriptor
from flashmem.target.kernel_configs.tensor_cores import TensorContraction
from flashmem.target.kernel_configs.workload import Workload
from tests.support.compared import Nodes, require_right

SHIPPED = [
    config for name in descriptor_names() for config in load_descriptor(name).configs if isinstance(config, TensorContraction)
]
HERE = sorted(list_devices(), key=lambda device: (not device.mma, device.descriptor_name))
CASES = [(config, HERE[0]) for config in SHIPPED] + [(SHIPPED[-1], device) for device in HERE[1:]]
"""Every config on one runtime, with tensor cores if any has them, and one on all: PoCL takes long to build such kernels."""


def model(*, complete: bool) -> Nodes:
    """Products and convolutions of activations that are stored in half and exact in it, as are all weights.

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
    complete = config is SHIPPED[-1] and device is HERE[0]
    nodes = NODES[complete]
    file, proto, name = tmp_path / "m.onnx", nodes.proto(), device.descriptor_name
    file.write_bytes(proto.SerializeToString())
    bundle = flashmem.compile(file, tmp_path / "b", device=name, memory_path="buffer", precision="fp16")
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


PRODUCT = Workload("matmul", "buffer", 1024, 1024, 4096, storage="float16")
CONVOLUTION = Workload("conv", "buffer", 784, 9 * 128, 128, storage="float16", taps=9)


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
    """A weight may have a left operand in half and another one in float, and is packed once."""
    other = config.in_float().cut(PRODUCT)
    assert (other.panel, other.needs) == (config.panel, frozenset()) and other.fits(PRODUCT)


def test_only_kernels_and_devices_with_tensor_cores_get_their_instructions() -> None:
    text = "#ifdef FM_TENSOR_CORES"
    added = with_instructions(text, mma=True)
    assert added.endswith(text) and "mma.sync" in added
    assert with_instructions(text, mma=False) == text and with_instructions("other", mma=True) == "other"


def test_an_older_gpu_says_that_it_has_none() -> None:
    older: Any = SimpleNamespace(device=replace(HERE[0], platform="NVIDIA CUDA", name="Tesla T4", mma=False))
    wanted = [RequiredKernel("k", "#ifdef FM_TENSOR_CORES", ())]
    with pytest.raises(UserError, match=r"use tensor cores \(.*\), which Tesla T4 does not have; compile the model for"):
        CachedKernels(ProgramCache(), older, (), wanted)
