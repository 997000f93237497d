"""Attention of a decoder's new tokens over its cache of keys and values, as ONNX models with states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx
from onnx import helper, numpy_helper

from flashmem.compiler.configs.listed import configs_of, plain_configs
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.kernels.indexing.quantised_rows import row_bytes
from flashmem.target.descriptor import DeviceDescriptor

from .cliffs import folder, imported

FAMILIES = ("attention", "split_keys", "join_chunks", "mask_blocks")
"""The kernel families of attention. Others, which write new rows into the cache or compute masks, are not measured."""

_CAPACITY = 8192
"""Keys that fit the cache."""

_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Decode:
    """Attention of `rows` tokens over a cache in which `keys` keys are filled: heads of `size`, and fewer heads of keys.

    `config`: the name of the kernel config that computes it where it fits.
    """

    heads: int
    key_heads: int
    size: int
    keys: int
    stored: Literal["fp16", "int8"]
    config: str
    rows: int = 1

    def __str__(self) -> str:
        tokens = f"{self.rows} tokens, " if self.rows > 1 else ""
        return f"{tokens}{self.heads}x{self.size} of {self.key_heads}, {self.keys} keys, {self.stored}, {self.config}"

    @property
    def flops(self) -> int:
        """Floating point operations of both products."""
        return 4 * self.heads * self.rows * self.keys * self.size

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, each read once."""
        row = 2 * self.size if self.stored == "fp16" else row_bytes(self.size)
        return 2 * self.key_heads * self.keys * row

    def graph(self) -> Graph:
        """The graph of the model, as the compiler imports it."""
        path = folder() / f"{abs(hash(str(self)))}.onnx"
        onnx.save(self._model(), path)
        states = (("past.key", "present.key"), ("past.value", "present.value"))
        return replace(imported(path), states=states, state_precision=self.stored)

    def _model(self) -> onnx.ModelProto:
        each, cache = self.heads // self.key_heads, (1, self.key_heads, _CAPACITY, self.size)
        shapes = {
            "rows": (1, self.key_heads, each * self.rows, self.size),
            "scores": (1, self.heads, self.rows, _CAPACITY),
            "weights": (1, self.key_heads, each * self.rows, _CAPACITY),
        }
        constants = {f"{name}.shape": np.array(shape, np.int64) for name, shape in shapes.items()}
        constants |= {
            "places": np.arange(_CAPACITY, dtype=np.int32)[None],
            "filled": np.array(self.keys, np.int32),
            "lowest": np.array(_LOWEST, np.float32),
        }
        nodes = [
            helper.make_node("TensorScatter", [f"past.{part}", f"new.{part}", "at"], [f"present.{part}"], axis=2)
            for part in ("key", "value")
        ]
        for op, inputs, output, attributes in (
            ("Reshape", ["query", "rows.shape"], "rows", {}),
            ("Transpose", ["present.key"], "turned", {"perm": [0, 1, 3, 2]}),
            ("MatMul", ["rows", "turned"], "products", {}),
            ("Reshape", ["products", "scores.shape"], "scores", {}),
            ("Min", ["given", "filled"], "ends", {}),  # what is given is a large number
            ("Less", ["places", "ends"], "seen", {}),
            ("Where", ["seen", "scores", "lowest"], "kept", {}),
            ("Softmax", ["kept"], "weights.each", {"axis": -1}),
            ("Reshape", ["weights.each", "weights.shape"], "weights", {}),
            ("MatMul", ["weights", "present.value"], "answer", {}),
        ):
            nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        new = (1, self.key_heads, self.rows, self.size)
        floats = {"query": (1, self.heads, self.rows, self.size), "past.key": cache, "past.value": cache}
        floats |= {"new.key": new, "new.value": new}
        inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in floats.items()]
        inputs.append(helper.make_tensor_value_info("at", onnx.TensorProto.INT64, (1,)))
        inputs.append(helper.make_tensor_value_info("given", onnx.TensorProto.INT32, (1, 1, self.rows, 1)))
        outputs = [
            helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
            for name in ("answer", "present.key", "present.value")
        ]
        initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
        graph = helper.make_graph(nodes, "decode", inputs, outputs, initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)


def decoding(descriptor: DeviceDescriptor) -> tuple[Decode, ...]:
    """Two sizes of decoders at four lengths, with each config of `descriptor` that shares the keys of few queries.

    A config is measured where it fits: tokens of all heads that share keys are queries of one matrix.
    """
    plain = plain_configs(descriptor, "attention")
    configs = [each for each in configs_of(descriptor, "attention") if each.kind in ("split-keys", "query-rows")]
    configs = [each for each in configs if each.name not in {other.name for other in plain}]
    tokens = [(heads, size, keys, stored, 1) for heads, size in (((32, 4), 64), ((32, 8), 128)) for stored in ("fp16", "int8")
              for keys in (64, 512, 2048, 8192)]  # fmt: skip
    tokens += [(((32, 4)), 64, keys, "fp16", 8) for keys in (512, 2048)]
    return tuple(
        Decode(*heads, size, keys, "fp16" if stored == "fp16" else "int8", config.name, rows)
        for heads, size, keys, stored, rows in tokens
        for config in configs
        if config.fits(Workload("attention", "buffer", heads[0] // heads[1] * rows, size, _CAPACITY, heads[1]))
    )
