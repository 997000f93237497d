"""Error bounds of float32 answers: every node in float64, and again with random rounding of each step.

`evaluated` gives for each output of a model its exact value and `spread`, the effect of rounding. A node with a definition by
simpler operators (LogSoftmax, LayerNormalization) is computed by those, so that each step inside it is rounded. A step is
rounded

- relative to its result, if that is computed from few numbers (Exp, Sub);
- relative to the same sum of absolute values, if it is a sum of many (MatMul, Conv, ReduceMean);
- by its operands, if its steps are unknown (LSTM, Resize).

So the difference of nearly equal numbers has no error, because they are exact. Adding a large number to a small one before
subtracting it again has one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.support.definitions import DEFINITIONS, NUMPY, by_numpy

Array = NDArray[Any]

EPS = 2.0**-22
"""Largest relative rounding of a step: four units in the last place of float32, as OpenCL permits for its functions."""

HALF_EPS = 2.0**-11
"""Largest relative rounding to half."""

SAMPLES = 6
"""Number of evaluations with random rounding."""

SUMS = frozenset({
    "AveragePool", "Conv", "ConvTranspose", "CumSum", "Einsum", "Gemm", "GlobalAveragePool", "MatMul", "Mean", "ReduceMean",
    "ReduceSum", "Sum",
})  # fmt: skip
"""Operators that sum products of their operands, or the operands."""

OPAQUE = frozenset({
    "AffineGrid", "Col2Im", "DFT", "DeformConv", "Det", "GRU", "GlobalLpPool", "GridSample", "LRN", "LSTM", "LpPool",
    "MelWeightMatrix", "RNN", "Resize", "RoiAlign", "STFT", "Upsample",
})  # fmt: skip
"""Operators of many steps that ONNX does not define by others."""

EXACT = frozenset({
    "Abs", "ArgMax", "ArgMin", "Ceil", "Clip", "Compress", "Concat", "DepthToSpace", "Equal", "Expand", "EyeLike", "Flatten",
    "Floor", "Gather", "GatherElements", "GatherND", "GlobalMaxPool", "Greater", "GreaterOrEqual", "Identity", "IsInf",
    "IsNaN", "Less", "LessOrEqual", "Max", "MaxPool", "MaxUnpool", "Min", "Neg", "OneHot", "Pad", "ReduceMax", "ReduceMin",
    "Relu", "Reshape", "ReverseSequence", "Round", "Sign", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "TopK",
    "Transpose", "Trilu", "Unsqueeze", "Where",
})  # fmt: skip
"""Operators that do not round."""

_PLACES = frozenset({"Col2Im", "DFT", "Resize", "STFT", "Upsample"})
"""Those of `OPAQUE` whose first operand is data, and whose other operands are positions."""

_WHOLE = frozenset({
    "AffineGrid", "BlackmanWindow", "CastLike", "Clip", "Einsum", "HammingWindow", "HannWindow", "Mean", "Range", "ReduceMean",
    "ReduceSum", "Relu",
})  # fmt: skip
"""Operators of one step, though ONNX has a definition for them."""


@dataclass(frozen=True)
class Answer:
    """A tensor computed in float64 (integers and booleans in their own type), and computed again with random rounding.

    `alone`: each element is computed from those at its own position.
    """

    exact: Array
    noisy: tuple[Array, ...]
    alone: bool = True

    @property
    def spread(self) -> Array:
        """The largest effect of rounding on each element in any sample; the maximum of its row, unless elements are `alone`."""
        if self.alone:
            return spread_of(self.exact[..., None], [each[..., None] for each in self.noisy])[..., 0]
        return spread_of(self.exact, self.noisy)

    def moved_to(self, exact: Array) -> Answer:
        """The same spread around another exact value."""
        return Answer(exact, tuple(exact + (each - self.exact) for each in self.noisy), self.alone)


def spread_of(exact: Array, noisy: Sequence[Array]) -> Array:
    """The largest distance of `noisy` from `exact`, for each row of elements along the last axis; ignores infinite elements."""
    finite = np.isfinite(exact)
    apart = np.zeros(exact.shape)
    for other in noisy:
        with np.errstate(invalid="ignore"):
            away = np.where(finite & np.isfinite(other), np.abs(other - exact), 0)
        apart = np.maximum(apart, away)
    return np.broadcast_to(apart.max(-1, keepdims=True, initial=0), apart.shape) if apart.ndim else apart


ALONE = frozenset({
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "Cast", "CastLike", "Ceil", "Celu", "Clip",
    "Constant", "Cos", "Cosh", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater", "HardSigmoid", "HardSwish",
    "Identity", "LeakyRelu", "Less", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "PRelu", "Pow",
    "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub",
    "Sum", "Tan", "Tanh", "ThresholdedRelu", "Where",
})  # fmt: skip
"""Operators that compute each element from those at its own position."""


def evaluated(model: onnx.ModelProto, feeds: Mapping[str, Array], seed: int = 0, eps: float = EPS) -> list[Answer]:
    """The outputs of a model of ONNX's own operators, without loops and branches; each step rounds by up to `eps`."""
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    random = np.random.default_rng(seed)
    known = {tensor.name: _given(numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}
    known |= {name: _given(array) for name, array in feeds.items()}
    for node in model.graph.node:
        operands = [known[name] if name else None for name in node.input]
        known.update(computed(node, operands, opset, random, eps))
    return [known[output.name] for output in model.graph.output]


def computed(
    node: onnx.NodeProto, operands: Sequence[Answer | None], opset: int, random: np.random.Generator, eps: float = EPS
) -> dict[str, Answer]:
    """The named outputs of one node, whose steps are rounded by up to `eps` relative to their sums."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        steps = _definition(node, operands, opset)
        if steps is None:
            made = _step(node, operands, opset, random, eps)
            return {name: answer for name, answer in zip(node.output, made, strict=True) if name}
        names = dict(zip(steps.input, operands, strict=False))
        versions = {entry.domain: entry.version for entry in steps.opset_import}
        for inner in _with_attributes(steps, node, opset):
            given = [names.get(n) if n else None for n in inner.input]
            names.update(computed(inner, given, versions.get("", opset), random, eps))
        found = {name: names[inside] for name, inside in zip(node.output, steps.output, strict=False) if name}
        return {name: answer for name, answer in found.items() if answer is not None}


def _given(array: Array) -> Answer:
    exact = array.astype(np.float64) if np.asarray(array).dtype.name in ("float32", "float16", "bfloat16", "float64") else array
    return Answer(exact, (exact,) * SAMPLES)


def _definition(node: onnx.NodeProto, operands: Sequence[Answer | None], opset: int) -> onnx.FunctionProto | None:
    """ONNX's definition of a node by simpler ones, or the one here if ONNX has none."""
    if node.op_type in _WHOLE | SUMS | EXACT or by_numpy(node):
        return None
    if node.op_type in DEFINITIONS:
        return DEFINITIONS[node.op_type](node, [None if x is None else x.exact for x in operands])
    schema = onnx.defs.get_schema(node.op_type, opset)
    if schema.has_context_dependent_function:
        types = []
        for operand in operands:
            if operand is None:
                types.append(onnx.TypeProto().SerializeToString())
                continue
            kind = helper.np_dtype_to_tensor_dtype(operand.exact.dtype)
            types.append(helper.make_tensor_type_proto(kind, operand.exact.shape).SerializeToString())
        if not (text := schema.get_context_dependent_function(node.SerializeToString(), types)):
            return None
        body = onnx.FunctionProto()
        body.ParseFromString(text)
        return body
    return schema.function_body if schema.has_function else None


def _with_attributes(body: onnx.FunctionProto, node: onnx.NodeProto, opset: int) -> list[onnx.NodeProto]:
    """The nodes of a definition, with the attributes of the defined node."""
    given: dict[str, onnx.AttributeProto] = {}
    if node.op_type not in DEFINITIONS:
        known = onnx.defs.get_schema(node.op_type, opset).attributes
        given = {name: attribute.default_value for name, attribute in known.items() if attribute.default_value.name}
    given |= {attribute.name: attribute for attribute in body.attribute_proto} | {a.name: a for a in node.attribute}
    nodes = []
    for template in body.node:
        inner = onnx.NodeProto()
        inner.CopyFrom(template)
        del inner.attribute[:]
        for attribute in template.attribute:
            if not attribute.ref_attr_name:
                inner.attribute.append(attribute)
            elif attribute.ref_attr_name in given:
                inner.attribute.append(given[attribute.ref_attr_name])
                inner.attribute[-1].name = attribute.name
        nodes.append(inner)
    return nodes


def _step(
    node: onnx.NodeProto, operands: Sequence[Answer | None], opset: int, random: np.random.Generator, eps: float
) -> list[Answer]:
    run = _function(node, operands, opset)
    exact = run([None if x is None else x.exact for x in operands])
    alone = node.op_type in ALONE and all(x is None or x.alone for x in operands)
    is_exact = node.op_type in EXACT or (node.op_type in ("Cast", "CastLike") and exact[0].dtype != np.float64)
    if is_exact and all(x is None or x.noisy[0] is x.exact for x in operands):
        return [Answer(array, (array,) * SAMPLES, alone) for array in exact]
    samples = []
    for sample in range(SAMPLES):
        given = [None if x is None else x.noisy[sample] for x in operands]
        if node.op_type in OPAQUE:
            given = [x if node.op_type in _PLACES and i else _shaken(x, eps, random) for i, x in enumerate(given)]
            if node.op_type == "GridSample" and given[1] is not None:  # x of the grid means the position (x + 1) / 2
                given[1] = _moved(given[1], np.full_like(given[1], eps), random)
        made = run(given)
        if node.op_type in SUMS:
            total = run([np.abs(x) if x is not None and x.dtype.kind == "f" else x for x in given])
            made = [_moved(x, eps * most, random) for x, most in zip(made, total, strict=True)]
        elif not is_exact:
            made = [_shaken(x, eps, random) for x in made]
        samples.append(made)
    return [Answer(array, tuple(made[i] for made in samples), alone) for i, array in enumerate(exact)]


def _shaken(array: Array | None, eps: float, random: np.random.Generator) -> Any:
    return array if array is None or array.dtype.kind != "f" else array * (1 + eps * random.uniform(-1, 1, array.shape))


def _moved(array: Array, reach: Array, random: np.random.Generator) -> Array:
    return array + reach * random.uniform(-1, 1, array.shape) if array.dtype.kind == "f" else array


def _function(
    node: onnx.NodeProto, operands: Sequence[Answer | None], opset: int
) -> Callable[[Sequence[Array | None]], list[Array]]:
    """One node by the reference evaluator of the onnx package, with floats as float64."""
    if node.op_type in ("Cast", "CastLike") and _to_float(node, operands):
        return lambda arrays: [np.asarray(arrays[0], np.float64)]
    if node.op_type == "Constant":
        value = ReferenceEvaluator(_alone(node, [], opset)).run(None, {})[0]
        array = np.asarray(value)
        return lambda arrays: [array.astype(np.float64) if array.dtype == np.float32 else array]
    if node.op_type == "QLinearConv":
        return lambda arrays: [_quantised_convolution(node, arrays, opset)]
    if opset >= _BY_RUNTIME.get(node.op_type, opset + 1):
        return lambda arrays: _by_runtime(node, arrays, opset)
    if by_numpy(node):
        return lambda arrays: _outputs(node, NUMPY[node.op_type](node, *arrays))
    names = list(dict.fromkeys(name for name in node.input if name))
    evaluator = ReferenceEvaluator(_alone(node, names, opset))

    def run(arrays: Sequence[Array | None]) -> list[Array]:
        by_name = {name: array for name, array in zip(node.input, arrays, strict=True) if name}
        made = [np.asarray(result) for result in evaluator.run(None, by_name)]
        return [x.astype(np.float64) if x.dtype == np.float32 else x for x in made]

    return run


def _outputs(node: onnx.NodeProto, made: Array | tuple[Array, ...]) -> list[Array]:
    """The outputs that `node` names, of all or of the only one."""
    return [np.asarray(each) for each, _ in zip(made if isinstance(made, tuple) else (made,), node.output, strict=False)]


_BY_RUNTIME = {"DeformConv": 19, "GridSample": 20, "MaxPool": 1, "Pad": 1, "RoiAlign": 16}
"""Operators that ONNX Runtime computes in float64, from these operator sets on.

The reference evaluator lacks them, computes positions in float32, or moves them to the border before it interpolates cubically.
"""


def _by_runtime(node: onnx.NodeProto, arrays: Sequence[Array | None], opset: int) -> list[Array]:
    given = {name: x for name, x in zip(node.input, arrays, strict=True) if x is not None}
    ports = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in given.items()]
    graph = helper.make_graph([node], "node", ports, [onnx.ValueInfoProto(name=name) for name in node.output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return [np.asarray(x) for x in onnxruntime.InferenceSession(model.SerializeToString()).run(None, given)]


def _quantised_convolution(node: onnx.NodeProto, arrays: Sequence[Array | None], opset: int) -> Array:
    """QLinearConv with exact sums: ONNX Runtime's saturate on processors without VNNI, and onnx's evaluator lacks it."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = (np.asarray(each) for each in arrays[:8])
    by_channel = (-1, *[1] * (w.ndim - 2))
    given = {"x": x.astype(np.float64) - x_zero, "w": w.astype(np.float64) - w_zero.reshape(-1, 1, *by_channel[1:])}
    if len(arrays) > 8:
        given["bias"] = np.asarray(arrays[8], np.float64)
    convolution = helper.make_node("Conv", list(given), ["y"])
    convolution.attribute.extend(node.attribute)
    [sums] = ReferenceEvaluator(_alone(convolution, list(given), opset)).run(None, given)
    scales = np.float32(x_scale) * w_scale.astype(np.float32) / np.float32(y_scale)
    scaled = np.rint(np.asarray(sums, np.float32) * scales.reshape(by_channel)) + y_zero.astype(np.float32)
    limits = np.iinfo(y_zero.dtype)
    return scaled.clip(limits.min, limits.max).astype(y_zero.dtype)


def _to_float(node: onnx.NodeProto, operands: Sequence[Answer | None]) -> bool:
    if node.op_type == "CastLike":
        like = operands[1]
        return like is not None and like.exact.dtype.kind == "f"
    target = helper.tensor_dtype_to_np_dtype(helper.get_node_attr_value(node, "to"))
    return np.dtype(target).name in ("float32", "float64", "float16", "bfloat16")


def _alone(node: onnx.NodeProto, names: Sequence[str], opset: int) -> onnx.ModelProto:
    ports = [onnx.ValueInfoProto(name=name) for name in names]
    graph = helper.make_graph([node], "node", ports, [onnx.ValueInfoProto(name=name) for name in node.output if name])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
