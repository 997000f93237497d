"""Contractions by tensor cores: their kernels without PTX agree with float64 on CPUs, for every config of every descriptor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem.base.errors import UserError
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.program.kernel_text import kernel_texts
from flashmem.runtime.opencl.context import list_devices
from flashmem.target.descriptor import DeviceDescriptor, descriptor_names, load_descriptor
from flashmem.target.kernel_configs.tensor_cores import TensorContraction
from flashmem.target.kernel_configs.workload import Workload
from tests.support.compared import Nodes, require_right

SHIPPED = [
    config
    for name in descriptor_names()
    for config in load_descriptor(name).configs
    if isinstance(config, TensorContraction)
]
HERE = [device.descriptor_name for device in list_devices()]
CASES = [(config, min(HERE)) for config in SHIPPED] + [(SHIPPED[-1], device) for device in sorted(HERE)[1:]]
"""Every config on one runtime, one config on all: PoCL takes five times as long to build them as Intel's."""


def model() -> Nodes:
    """Products and convolutions of activations that are stored in half and exact in it, as are all weights.

    No size is a multiple of a block, apart from the depth of some.
    """
    nodes, random = Nodes(), np.random.default_rng(7)

    def halves(*shape: int) -> Any:
        return random.uniform(-0.5, 1.5, shape).astype(np.float16).astype(np.float32)

    def stored(*shape: int) -> str:
        [made] = nodes.node("Abs", nodes.input(halves(*shape)))
        nodes.outputs.pop()
        return made

    [product] = nodes.node("MatMul", stored(2, 75, 128), nodes.constant(halves(128, 150)))
    nodes.outputs.pop()
    [biased] = nodes.node("Add", product, nodes.constant(halves(150) - 60))
    nodes.outputs.pop()
    nodes.node("Relu", biased)
    nodes.node("MatMul", stored(37, 72), nodes.constant(halves(72, 36)))
    nodes.node("MatMul", stored(19, 8), nodes.constant(halves(8, 140)))
    image = stored(2, 16, 9, 11)
    nodes.node("Conv", image, nodes.constant(halves(36, 16, 3, 3)), pads=[1, 2, 0, 1], strides=[2, 1])
    nodes.node("Conv", image, nodes.constant(halves(8, 8, 3, 2)), group=2, dilations=[1, 2], pads=[2, 0, 1, 1])
    nodes.node("Conv", stored(1, 128, 5, 4), nodes.constant(halves(8, 128, 2, 3)), pads=[1, 1, 0, 1], dilations=[2, 1])
    return nodes


NODES = model()


@pytest.mark.parametrize(("config", "device"), CASES, ids=lambda each: getattr(each, "name", each))
def test_answers(config: TensorContraction, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelSelector, "config", lambda *asked: config)
    file, proto = tmp_path / "m.onnx", NODES.proto()
    file.write_bytes(proto.SerializeToString())
    bundle = flashmem.compile(file, tmp_path / "b", device=device, memory_path="buffer", precision="fp16")
    texts = kernel_texts(bundle.source.plain)
    families = [launch.shape.family for launch in bundle.program.launches if "mma.sync" in texts[launch.kernel]]
    assert (families.count("matmul"), families.count("conv")) == (3, 3)
    answers = []
    for mode in ("map", "interleave") if config is SHIPPED[-1] else ("map",):
        with flashmem.Session(bundle, device=device, mode=mode) as session:
            answers.append(session.run(None, NODES.feeds))
    require_right(proto, NODES.feeds, answers[0])
    for one, other in zip(answers[0], answers[-1], strict=True):
        np.testing.assert_array_equal(one, other)
