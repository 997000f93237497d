"""ONNX Runtime's answer for a file, and how far its answers may be from one another.

Two of its deviations depend on the processor, and are taken out of the reference where a file has them:

- Sums of products of signed weights saturate on processors without VNNI. The reference has such weights unsigned, with zero
  points moved by 128 too: the same products.
- DynamicQuantizeLSTM rounds the inputs and states of each thread by their range. The reference is the LSTM of its dequantised
  weights, as flashmem computes it (docs/reference/onnxruntime.md).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from benchmarks.packages.files import Drawn
from benchmarks.packages.makers import numpy_name
from flashmem.tools.verify import TOLERANCE, compare

Arrays = list[NDArray[Any]]
FLOATS, ROUNDED = (3, 1), (8, 16)
"""How often float weights are moved, and by how many units in the last place at most: in files of floats, and in those that
round values to 8 bits. There one value in 10^5 is so near to the middle between two codes that the order of a sum decides it,
and sums of some hundred products in two orders differ by about so much.
"""
_SMALLEST_NUDGED = 8  # elements: shorter constants may be scales of a Resize, which decide shapes
_SIGNED = {"MatMulInteger": (1, 3), "ConvInteger": (1, 3)}
"""Inputs of weights and their zero points."""


class Reference:
    """ONNX Runtime's answer for inputs from a seed, and how far its own answers are from one another.

    `own` is the distance of its answer for the file itself from the reference, None where they are of the same file. `spread`
    is the largest distance of answers without graph optimisations, and with every float32 input, weight and scale moved
    (`FLOATS`, `ROUNDED`). Distances are over the range of an output. `unsure` are the elements of integer outputs that differ.
    `plain`: never with graph optimisations.
    """

    def __init__(self, model: Path, drawn: Mapping[str, Drawn], runs: int, plain: bool = False) -> None:
        self.plain = plain
        begun = time.perf_counter()
        session = self._session(model)
        opened = time.perf_counter() - begun
        types = {port.name: numpy_name(port.type) for port in session.get_inputs()}
        self.inputs = {name: how.draw(types[name], seed=1) for name, how in drawn.items() if name in types}
        self.names = [port.name for port in session.get_outputs()]
        times = []
        for _ in range(1 + runs):
            begun = time.perf_counter()
            answer: Arrays = session.run(None, self.inputs)
            times.append(time.perf_counter() - begun)
        self.first, self.later = opened + times[0], statistics.median(times[1:])
        proto = onnx.load(model)
        independent = _unsigned(proto) + _dequantised_lstms(proto)
        self.outputs = self._answer(proto) if independent else answer
        self.own = self._distance(answer) if independent else None
        rounds = any("Quantize" in node.op_type for node in proto.graph.node)
        count, units = ROUNDED if rounds else FLOATS
        others = [self._answer(proto, plain=True), *(self._moved(proto, units, seed) for seed in range(count))]
        self.spread = max(map(self._distance, others))
        self.unsure = [np.any([other[i] != own for other in others], axis=0) for i, own in enumerate(self.outputs)]

    def _session(self, model: Path | bytes, plain: bool = False) -> Any:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        if plain or self.plain:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        given = model if isinstance(model, bytes) else str(model)
        return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])

    def _answer(self, proto: onnx.ModelProto, plain: bool = False) -> Arrays:
        answer: Arrays = self._session(proto.SerializeToString(), plain).run(None, self.inputs)
        return answer

    def _moved(self, proto: onnx.ModelProto, units: int, seed: int) -> Arrays:
        """The answer with inputs and weights moved by at most `units` in the last place, at random."""
        generator = np.random.default_rng(seed)
        inputs = {name: _near(array, units, generator) for name, array in self.inputs.items()}
        answer: Arrays = self._session(_nudged(proto, units, generator).SerializeToString()).run(None, inputs)
        return answer

    def _distance(self, answer: Arrays) -> float:
        """The largest difference of floats from the reference, over the range of their output."""
        return compare(self._floats(answer), self._floats(self.outputs), "fp32").relative_error

    @staticmethod
    def _floats(arrays: Sequence[NDArray[Any]]) -> Arrays:
        return [array for array in arrays if array.dtype.kind == "f"]

    def verdict(self, answer: Sequence[NDArray[Any]]) -> dict[str, Any]:
        """Whether `answer` is right; the largest error of floats over the range of their output; integers that differ."""
        error = self._distance(list(answer))
        wrong = 0
        for got, own, unsure in zip(answer, self.outputs, self.unsure, strict=True):
            if got.shape != own.shape or got.dtype != own.dtype:
                why = f"{got.dtype} {got.shape} for {own.dtype} {own.shape}"
                return {"right": False, "error": None, "integers": None, "why": why}
            if own.dtype.kind != "f":
                wrong += int(((got != own) & ~unsure).sum())
        right = wrong == 0 and error <= max(TOLERANCE["fp32"], 2 * self.spread)
        return {"right": bool(right), "error": error if np.isfinite(error) else None, "integers": wrong}


def _near(values: NDArray[Any], units: int, generator: np.random.Generator) -> NDArray[Any]:
    """Each float32 moved by at most `units` in its last place, at random; other types unchanged."""
    if values.dtype != np.float32:
        return values
    moved = values.astype(np.float64) * (1 + np.finfo(np.float32).eps * generator.uniform(-units, units, values.shape))
    return np.asarray(moved, np.float32)


def _nudged(original: onnx.ModelProto, units: int, generator: np.random.Generator) -> onnx.ModelProto:
    """The model with each float32 weight, and each scale of a rounding, moved by at most `units` in its last place.

    Weights between QuantizeLinear and DequantizeLinear become floats for this: a sum of products of floats has the rounding of
    its order, which no definition fixes, and ONNX Runtime's sums of integers do not show it.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(original)
    _dequantise_weights(proto)
    scales = {name for node in proto.graph.node if "uantize" in node.op_type for name in node.input[1:]}

    def move(tensor: onnx.TensorProto) -> None:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and (values.size >= _SMALLEST_NUDGED or tensor.name in scales):
            tensor.CopyFrom(numpy_helper.from_array(_near(values, units, generator), tensor.name))

    def visit(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            move(tensor)
        for node in graph.node:
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.name == "value":
                    move(attribute.t)
                if attribute.type == onnx.AttributeProto.GRAPH:
                    visit(attribute.g)

    visit(proto.graph)
    return proto


def _dequantise_weights(proto: onnx.ModelProto) -> None:
    """Replace each DequantizeLinear of constants by its result."""
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    for index, node in reversed([*enumerate(proto.graph.node)]):
        if node.op_type != "DequantizeLinear" or not all(name in stored for name in node.input if name):
            continue
        codes, scale, *zero = (numpy_helper.to_array(stored[name]).astype(np.float64) for name in node.input if name)
        axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
        shape = [-1 if each == axis % codes.ndim else 1 for each in range(codes.ndim)] if scale.size > 1 else []
        dense = (codes - (zero[0].reshape(shape) if zero else 0)) * scale.reshape(shape)
        proto.graph.initializer.append(numpy_helper.from_array(dense.astype(np.float32), node.output[0]))
        del proto.graph.node[index]


def _unsigned(proto: onnx.ModelProto) -> int:
    """Store signed weights of integer products as unsigned ones, and their zero points too. Returns how many were moved."""
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    moved: set[str] = set()
    for node in proto.graph.node:
        places = _SIGNED.get(node.op_type)
        if places is None or node.input[places[0]] not in stored:
            continue
        if numpy_helper.to_array(stored[node.input[places[0]]]).dtype != np.int8:
            continue
        if len(node.input) <= places[1]:
            zero = "zero_for_unsigned_weights"
            if zero not in stored:
                stored[zero] = numpy_helper.from_array(np.array(0, np.int8), zero)
            node.input.extend([""] * (places[1] - len(node.input)) + [zero])
        for place in places:
            name = f"{node.input[place]}_unsigned"
            if name not in moved:
                codes = numpy_helper.to_array(stored[node.input[place]]).astype(np.int16) + 128
                proto.graph.initializer.append(numpy_helper.from_array(codes.astype(np.uint8), name))
                moved.add(name)
            node.input[place] = name
    return len(moved)


def _dequantised_lstms(proto: onnx.ModelProto) -> int:
    """Replace each DynamicQuantizeLSTM by an LSTM of its dequantised weights. Returns how many there were."""
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    found = 0
    for index, node in enumerate(proto.graph.node):
        if node.op_type != "DynamicQuantizeLSTM":
            continue
        found += 1
        inputs = [*node.input, *[""] * 12][:12]
        weights = []
        for place, scale in ((1, 8), (2, 10)):  # codes of shape [directions, inputs, gates]
            codes, factor, zero = (
                numpy_helper.to_array(stored[inputs[each]]).astype(np.float64) for each in (place, scale, scale + 1)
            )
            spread = (len(factor), 1, -1)  # one for all of a direction, or one for each gate
            dense = (codes - zero.reshape(spread)) * factor.reshape(spread)
            weights.append(f"{node.output[0]}_{place}_dense")
            dense = dense.transpose(0, 2, 1).astype(np.float32)
            proto.graph.initializer.append(numpy_helper.from_array(dense, weights[-1]))
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        lstm = helper.make_node("LSTM", [inputs[0], *weights, *inputs[3:8]], list(node.output), name=node.name, **attributes)
        proto.graph.node[index].CopyFrom(lstm)
    return found
