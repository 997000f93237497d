"""Operators against ONNX's own node tests: inputs and expected outputs come with the onnx package.

Each case is compiled and run on every device, on one memory path on the first and on the other on the next, so that all
kernels meet both paths.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import flashmem
from flashmem.errors import UnsupportedModelError
from flashmem.graph.operators import REGISTRY
from flashmem.runtime.opencl import list_devices

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from onnx.backend.test.case.node import collect_testcases

    CASES = {case.name: case for case in collect_testcases(None)}

DEVICES = list_devices()
PATHS = ("buffer", "texture")

# Inputs that describe, rather than hold data: compiled as constants, as every exporter writes them.
SETTLED = {"Reshape", "Slice", "Squeeze", "Unsqueeze", "Expand", "Pad", "Tile", "Resize", "Upsample", "Split", "Clip", "Conv"}
SETTLED |= {"ConvTranspose", "BatchNormalization", "InstanceNormalization", "GroupNormalization"}
SETTLED |= {name for name in REGISTRY if name.startswith("Reduce")}


DEFINED = {"MeanVarianceNormalization", "ThresholdedRelu", "HardSwish", "Celu", "Shrink", "CenterCropPad", "Attention"}
"""Some of the operators that ONNX defines by others, with and without attributes left to their defaults."""


DISPUTED = {"test_resize_downsample_scales_cubic_align_corners", "test_resize_downsample_scales_linear_align_corners"}
"""ONNX's reference divides by the fractional size there; ONNX's text (`length_resized`) and ONNX Runtime by the whole one."""


def _usable(case: Any) -> bool:
    """One node that flashmem claims, an operator set it reads, float32 and integers it has."""
    model = case.model
    if not 11 <= model.opset_import[0].version <= 23 or len(model.graph.node) != 1:
        return False
    node = model.graph.node[0]
    if node.domain not in ("", "ai.onnx") or node.op_type not in {*REGISTRY, *DEFINED}:
        return False
    arrays = [*case.data_sets[0][0], *case.data_sets[0][1]]
    kinds = {
        "float32",
        "int32",
        "int64",
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float64",
        "bfloat16",
    }
    return all(isinstance(a, np.ndarray) and a.dtype.name in kinds and a.size > 0 for a in arrays)


NAMES = sorted(name for name, case in CASES.items() if _usable(case) and name not in DISPUTED)


def _with_constants(case: Any) -> tuple[onnx.ModelProto, dict[str, np.ndarray[Any, Any]]]:
    """The case's model with describing inputs as initializers, and the data that is left to feed."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    node = model.graph.node[0]
    feeds = dict(zip([value.name for value in model.graph.input], case.data_sets[0][0], strict=True))
    if node.op_type in SETTLED:
        for name in [n for n in feeds if n != node.input[0]]:
            model.graph.initializer.append(numpy_helper.from_array(feeds.pop(name), name))
            model.graph.input.remove(next(value for value in model.graph.input if value.name == name))
    return model, feeds


@pytest.mark.parametrize("device", range(len(DEVICES)), ids=[d.descriptor_name for d in DEVICES])
@pytest.mark.parametrize("name", NAMES)
def test_node(name: str, device: int, tmp_path: Path) -> None:
    case = CASES[name]
    model, feeds = _with_constants(case)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    shapes = {key: value.shape for key, value in feeds.items() if value.ndim}
    memory_path = PATHS[(NAMES.index(name) + device) % 2]
    try:
        bundle = flashmem.compile(
            path, tmp_path / "b.flashmem", device=DEVICES[device].descriptor_name, shapes=shapes, memory_path=memory_path
        )
    except UnsupportedModelError as error:
        # Only what the rules refuse may be refused.
        assert error.nodes
        pytest.skip(str(error))
    with flashmem.Session(bundle, device=DEVICES[device].descriptor_name) as session:
        outputs = session.run(None, feeds)
    for answer, expected in zip(outputs, case.data_sets[0][1], strict=True):
        assert answer.dtype == expected.dtype
        assert answer.shape == expected.shape
        np.testing.assert_allclose(answer, expected, rtol=1e-3, atol=1e-5)
