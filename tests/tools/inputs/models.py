"""Small ONNX models for inputs from files, with metadata and configuration files beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

FLOAT = TensorProto.FLOAT


def photo(width: int = 97, height: int = 61) -> NDArray[np.uint8]:
    """Pixels [height, width, 3] with slopes, a curve and edges; the stored numbers of test_images.py are of 97 x 61."""
    y, x = np.mgrid[:height, :width]
    return np.stack([(3 * x + 5 * y) % 256, (x * y // 7) % 256, np.where((x // 9 + y // 11) % 2, 230, 20)], -1).astype(np.uint8)


def saved_photo(path: Path, width: int = 97, height: int = 61) -> Path:
    from PIL import Image

    Image.fromarray(photo(width, height)).save(path)
    return path


def identity(
    path: Path,
    inputs: Mapping[str, Sequence[int | str]],
    *,
    dtype: int = FLOAT,
    metadata: Mapping[str, str] | None = None,
    **files: Any,
) -> Path:
    """A model that returns the negative of each input, as NAME_out; `files`: JSON files beside it, by name without suffix."""
    ports = [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()]
    outputs = [helper.make_tensor_value_info(f"{name}_out", dtype, None) for name in inputs]
    op = "Neg" if dtype != TensorProto.UINT8 else "BitwiseNot"
    nodes = [helper.make_node(op, [name], [f"{name}_out"]) for name in inputs]
    return _saved(path, helper.make_graph(nodes, "g", ports, outputs), metadata, files)


def classifier(path: Path, shape: Sequence[int | str], *, metadata: Mapping[str, str] | None = None, **files: Any) -> Path:
    """Means over the pixels of three channels (NCHW), as `logits` of shape [1, 3]."""
    nodes = [helper.make_node("GlobalAveragePool", ["x"], ["means"]), helper.make_node("Flatten", ["means"], ["logits"])]
    ports = [helper.make_tensor_value_info("x", FLOAT, shape)]
    outputs = [helper.make_tensor_value_info("logits", FLOAT, None)]
    return _saved(path, helper.make_graph(nodes, "g", ports, outputs), metadata, files)


def _saved(path: Path, graph: onnx.GraphProto, metadata: Mapping[str, str] | None, files: Mapping[str, Any]) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    helper.set_model_props(model, dict(metadata or {}))
    onnx.save(model, path)
    for name, content in files.items():
        (path.parent / f"{name}.json").write_text(json.dumps(content))
    return path
