"""The values of a drawn graph: ONNX Runtime's results, and the error bounds of each.

Each node is evaluated alone when it is drawn, by ONNX Runtime without optimisation. If that has no kernel for the types, the
reference evaluator of the onnx package evaluates it. The reference evaluator also computes the node in float64, and a few times
with random rounding of a few units in the last place in every step (`rounding`). The spread of these results in each row shows
how much correct implementations differ: it becomes the tolerance. A node is rejected, and another drawn, if

- ONNX leaves the result undefined: integers divided by zero, floats cast to integers that cannot hold them, shifts beyond the
  width;
- the noise determines the result: a comparison of nearly equal numbers, a NaN, a result that is mostly rounding error;
- floats leave the range in which flashmem, which computes in float32, promises the same (subnormals, float16 overflow);
- the two evaluators disagree, which is counted in `disagreements` and so never hidden.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper
from onnx.reference import ReferenceEvaluator

from tests.support.rounding import EXACT, SAMPLES, Answer, computed, spread_of

Array = NDArray[Any]

FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in ("float32", "float16", "float64", "bool", *INTEGERS)}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)

LARGEST = 6000
"""Elements of a value."""

_SAMPLES = SAMPLES
_BOTTOM = 1e-30


@dataclass(frozen=True)
class Rounding:
    """Rounding of floats of each type. `eps`: two units in the last place of the stored type, four of float32, as OpenCL
    permits for its functions. `ill`: the spread, relative to the largest element, from which a result is mostly rounding error.
    `top`: the largest number. `least`: the distance between the smallest ones. `exact`: whether some operators do not round.
    """

    eps: Mapping[str, float]
    ill: Mapping[str, float]
    top: Mapping[str, float]
    least: Mapping[str, float]
    exact: bool = True


_FP32 = Rounding(
    {"float32": 2.0**-22, "float64": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7},
    {"float32": 1e-3, "float64": 1e-3, "float16": 0.1, "bfloat16": 0.3},
    {"float32": 1e15, "float64": 1e15, "float16": 3e4, "bfloat16": 1e15},
    {"float32": _BOTTOM, "float64": _BOTTOM, "float16": 2.0**-23, "bfloat16": _BOTTOM},
)
_FP16 = Rounding(
    {**dict.fromkeys(FLOATS, 2.0**-10), "bfloat16": 2.0**-7},
    {**dict.fromkeys(FLOATS, 0.1), "bfloat16": 0.3},
    dict.fromkeys(FLOATS, 3e4),
    dict.fromkeys(FLOATS, 2.0**-23),
    exact=False,
)
"""With weights and all stored results in half: all floats are rounded like float16."""

_rounding = _FP32


def set_precision(precision: Literal["fp32", "fp16"]) -> None:
    """Set the precision for which graphs are drawn and judged from now on, in this process."""
    global _rounding
    _rounding = _FP16 if precision == "fp16" else _FP32


_REFERENCE_WRONG = frozenset({
    "GlobalMaxPool",  # with rank 3 it loses an axis
    "LpNormalization",  # p=1 sums without taking absolute values
    "MaxPool",  # wrong shape with asymmetric pads, and an empty result with SAME_LOWER
    "Slice",  # for a start before the tensor with a negative step it returns nothing; ONNX clamps it
})  # fmt: skip
"""Operators that the reference evaluator of onnx 1.23 computes wrongly: ONNX Runtime's float64 is the second opinion."""

disagreements: Counter[str] = Counter()
"""How often ONNX Runtime and the reference evaluator gave different answers, by operator and type."""

_options = onnxruntime.SessionOptions()
_options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
_options.intra_op_num_threads = _options.inter_op_num_threads = 1
_options.log_severity_level = 4


class RejectedNodeError(Exception):
    """The node cannot be part of a graph with a certain answer."""


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of a drawn graph.

    `own` is in its own type, as ONNX Runtime computes it; `exact` and `noisy` are float64 if the type is a float, else `own`.
    """

    name: str
    own: Array
    exact: Array
    noisy: tuple[Array, ...]
    leaf: Literal["input", "constant"] | None = None

    @property
    def dtype(self) -> str:
        """The name of its element type."""
        return self.own.dtype.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.own.shape

    @property
    def is_float(self) -> bool:
        """Whether its elements are floats, of any width."""
        return self.dtype in FLOATS

    @property
    def tolerance(self) -> Array:
        """Largest permitted absolute difference from `own`, for each element; 0 for integers."""
        if not self.is_float:
            return np.zeros(self.shape)
        known = self.own.astype(np.float64)
        relative = _relative(self.dtype)
        spread = spread_of(self.exact, (*self.noisy, known))
        magnitude = np.where(np.isfinite(known), np.abs(known), 0)
        return relative * magnitude + 6 * spread + _rounding.least[self.dtype]


def leaf(name: str, data: Array, kind: Literal["input", "constant"]) -> Value:
    """A value that no node computes."""
    data = np.asarray(data)
    exact = data.astype(np.float64) if data.dtype.name in FLOATS else data
    return Value(name, data, exact, (exact,) * _SAMPLES, kind)


def evaluate(node: onnx.NodeProto, operands: Sequence[Value | None], opset: int, seed: int) -> list[Value]:
    """The outputs of `node` with these operands.

    Raises:
        RejectedNodeError: see the module.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        inputs = list(dict.fromkeys(value for value in operands if value is not None))
        given = [value for value in operands if value is not None]
        _require_defined_numbers(node, given)
        _require_defined_windows(node, given)
        own = _wrapped_gemm(node, operands) or _by_runtime(node, [value.own for value in inputs], opset)
        reference = _reference(node, inputs, opset)
        exact = reference([value.exact for value in inputs])
        noisy = [exact] * _SAMPLES
        rounds = node.op_type not in EXACT and not (node.op_type == "Cast" and not _is_narrowing(node))
        rounds |= not _rounding.exact
        if rounds and _rounding.exact and any(value.is_float for value in inputs) and node.op_type not in _REFERENCE_WRONG:
            exact, noisy = _rounded_steps(node, operands, opset, seed)
        elif any(value.is_float for value in inputs) and (rounds or any(v.noisy[0] is not v.exact for v in inputs)):
            random = np.random.default_rng(seed)
            noisy = []
            for sample in range(_SAMPLES):
                arrays = [value.noisy[sample] for value in inputs]
                if rounds:
                    arrays = [
                        _shaken(x, _rounding.eps["float32"], random) if v.is_float else x
                        for x, v in zip(arrays, inputs, strict=True)
                    ]
                noisy.append(reference(arrays))
        if own is None:
            _require_trusted(node, inputs)
            own = _rounded(exact, node, inputs, opset)
        made = []
        for index, name in enumerate(node.output):
            results = [sample[index] for sample in noisy]
            if rounds and own[index].dtype.name in FLOATS:
                random = np.random.default_rng(seed + 1 + index)
                results = [_shaken(x, _rounding.eps[own[index].dtype.name], random) for x in results]
            made.append(_certain(name, node, own[index], exact[index], results, inputs))
        return made


def _rounded_steps(
    node: onnx.NodeProto, operands: Sequence[Value | None], opset: int, seed: int
) -> tuple[list[Array], list[list[Array]]]:
    """The outputs in float64, and samples of them in which each step of the node is rounded at random."""
    answers = [None if value is None else Answer(value.exact, value.noisy) for value in operands]
    try:
        made = list(computed(node, answers, opset, np.random.default_rng(seed)).values())
    except Exception as error:  # an operator that the evaluator lacks
        raise RejectedNodeError(f"the reference evaluator: {error}") from error
    return [answer.exact for answer in made], [[answer.noisy[i] for answer in made] for i in range(_SAMPLES)]


def _require_defined_numbers(node: onnx.NodeProto, inputs: Sequence[Value]) -> None:
    """Raise RejectedNodeError if ONNX leaves a number undefined, or implementations are known to differ in it."""
    op = node.op_type
    if op in ("Div", "Mod") and not inputs[1].is_float:
        divisor, dividend = inputs[1].own, inputs[0].own
        if (divisor == 0).any() or (dividend.dtype.kind == "i" and (divisor == -1).any()):
            raise RejectedNodeError("division by zero, or of the lowest integer by -1")
    if op in ("Div", "Reciprocal", "Mod", "Pow") and inputs[0].is_float and inputs[-1].leaf is None:
        divisor = inputs[0].own if op in ("Pow", "Reciprocal") else inputs[-1].own
        if (divisor == 0).any():
            raise RejectedNodeError("the sign of a computed zero")
    if op == "Pow" and inputs[1].own.dtype.kind == "i" and not inputs[0].is_float and (inputs[1].own < 0).any():
        raise RejectedNodeError("an integer to a negative power")
    if op == "BitShift" and (inputs[1].own >= 8 * inputs[0].own.dtype.itemsize).any():
        raise RejectedNodeError("a shift past the width")
    if op == "Cast" and inputs[0].is_float:
        target = np.dtype(helper.tensor_dtype_to_np_dtype(helper.get_node_attr_value(node, "to")))
        rounded = inputs[0].noisy[0] is not inputs[0].exact
        if target.kind == "b" and rounded and _is_finite(inputs[0]):
            size = np.abs(inputs[0].exact)
            if (size <= 4 * _rounding.eps[inputs[0].dtype] * size.max(initial=0)).any():
                raise RejectedNodeError("rounding decides whether it is zero")
        if target.kind in "iu":
            limits = np.iinfo(target)
            x = inputs[0].exact
            if not np.isfinite(x).all() or ((x <= float(limits.min) - 1) | (x >= float(limits.max))).any():
                raise RejectedNodeError("a float cast to an integer that cannot hold it")
    if op == "Shrink" and inputs[0].dtype != "float32":
        raise RejectedNodeError("fractions in narrower types: ONNX's definition rounds them, ONNX Runtime the result")
    if op in ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual") and _rounding.eps.get(inputs[0].dtype, 0) > 1e-5:
        one, other = (value.own.astype(np.float64) for value in (inputs[0], inputs[-1]))
        near = np.abs(one - other) <= 4 * _rounding.eps[inputs[0].dtype] * np.maximum(np.abs(one), np.abs(other))
        if near.any() and not all(value.leaf for value in inputs):
            raise RejectedNodeError("rounding decides, and float32 keeps more of it")


def _require_defined_windows(node: onnx.NodeProto, inputs: Sequence[Value]) -> None:
    """Raise RejectedNodeError if implementations are known to differ in windows or sequences over such values."""
    op = node.op_type
    if op in ("MaxPool", "GlobalMaxPool") and np.isnan(inputs[0].exact).any():
        raise RejectedNodeError("ONNX Runtime drops NaN, the reference evaluator keeps it")
    if op in ("MaxPool", "GlobalMaxPool") and inputs[0].is_float and np.isnan(inputs[0].own.astype(np.float64)).any():
        raise RejectedNodeError("NaN in a window: ONNX Runtime drops some")
    if (op.endswith("Pool") or op.startswith("Conv")) and not all(value.own.size for value in inputs):
        raise RejectedNodeError("windows over nothing, from which ONNX Runtime may never return")
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if op.endswith("Pool") and b"SAME" in attributes.get("auto_pad", b"") and max(attributes.get("dilations", [1])) > 1:
        raise RejectedNodeError("ONNX Runtime's SAME pads of pools forget dilations")
    if op in ("GRU", "LSTM", "RNN") and not all(_is_finite(value) for value in inputs):
        raise RejectedNodeError("infinite weights times a first state of zeros, which flashmem leaves out")
    if op in ("BatchNormalization", "Resize") and not all(_is_finite(value) for value in inputs):
        raise RejectedNodeError("infinity times zero, in some orders of evaluation")


def _require_trusted(node: onnx.NodeProto, inputs: Sequence[Value]) -> None:
    """Raise RejectedNodeError if the reference evaluator deviates from ONNX and ONNX Runtime has no kernel."""
    op = node.op_type
    if op in ("MatMul", "Gemm", "PRelu") and not all(_is_finite(value) for value in inputs):
        raise RejectedNodeError("zero times infinity, which BLAS leaves out")
    if op in ("ArgMax", "ArgMin", "Hardmax", "TopK") and np.isnan(inputs[0].exact).any():
        raise RejectedNodeError("NaN, which it takes for the largest number")
    if op.endswith("Pool") and any(attribute.name == "dilations" for attribute in node.attribute):
        raise RejectedNodeError("dilated windows, whose number it miscounts")
    if op in ("AveragePool", "LpPool") and not all(_is_finite(value) for value in inputs):
        raise RejectedNodeError("it takes NaN for padding")
    if op == "ConvTranspose" and any(attribute.name == "group" and attribute.i > 1 for attribute in node.attribute):
        raise RejectedNodeError("groups, in which it errs")
    if op == "LRN":
        raise RejectedNodeError("it normalises over as many channels as there are images")
    if op in ("DynamicQuantizeLinear", "DFT") and not all(_is_finite(value) for value in inputs):
        raise RejectedNodeError("NaN and infinity, which it spreads otherwise")
    if op == "LogSoftmax" and inputs[0].dtype in ("float16", "bfloat16"):
        raise RejectedNodeError("exponentials rounded to zero before their logarithm")
    if op in ("ArgMax", "ArgMin") and inputs[0].dtype in ("float16", "bfloat16") and inputs[0].leaf is None:
        raise RejectedNodeError("ties that rounding makes, and float32 does not")
    if op == "Resize" or (op == "ReduceMean" and not inputs[0].is_float):
        raise RejectedNodeError("by way of floats, or of other ties")
    if op.startswith("Conv") and not all(_is_finite(value) for value in inputs):
        raise RejectedNodeError("infinite weights times padding")


def _wrapped_gemm(node: onnx.NodeProto, operands: Sequence[Value | None]) -> list[Array] | None:
    """Gemm of integers, which ONNX Runtime and the reference evaluator both compute in floats."""
    if node.op_type != "Gemm":
        return None
    a, b, *rest = (value.own for value in operands if value is not None)
    if a.dtype.kind not in "iu":
        return None
    turned = {attribute.name: attribute.i for attribute in node.attribute}
    product = (a.T if turned.get("transA") else a) @ (b.T if turned.get("transB") else b)
    return [product + rest[0] if rest else product]


def _is_finite(value: Value) -> bool:
    return not value.is_float or bool(np.isfinite(value.own.astype(np.float64)).all())


def _is_narrowing(node: onnx.NodeProto) -> bool:
    target = helper.tensor_dtype_to_np_dtype(helper.get_node_attr_value(node, "to"))
    return np.dtype(target).name in FLOATS


def _by_runtime(node: onnx.NodeProto, arrays: Sequence[Array], opset: int) -> list[Array] | None:
    """ONNX Runtime's results; None if it has no kernel for the types."""
    if any(array.dtype.name == "bfloat16" for array in arrays):
        return None
    names = list(dict.fromkeys(name for name in node.input if name))
    model = _model(node, [(name, array.dtype, array.shape) for name, array in zip(names, arrays, strict=True)], opset)
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), _options, providers=["CPUExecutionProvider"])
        outputs = session.run(None, dict(zip(names, arrays, strict=True)))
    except Exception:  # of many classes, none of which is documented
        return None
    return None if any(not isinstance(output, np.ndarray) for output in outputs) else outputs


def _reference(node: onnx.NodeProto, inputs: Sequence[Value], opset: int) -> Callable[[Sequence[Array]], list[Array]]:
    """The reference evaluator, on operands in the types of `Value.exact`."""
    names = list(dict.fromkeys(name for name in node.input if name))
    plain = onnx.NodeProto()
    plain.CopyFrom(node)
    if node.op_type == "Cast" and _is_narrowing(node):
        next(a for a in plain.attribute if a.name == "to").i = onnx.TensorProto.DOUBLE
    model = _model(plain, [(n, v.exact.dtype, v.shape) for n, v in zip(names, inputs, strict=True)], opset)
    try:
        evaluator = ReferenceEvaluator(model)
    except Exception as error:
        raise RejectedNodeError(f"the reference evaluator: {error}") from error

    def run(arrays: Sequence[Array]) -> list[Array]:
        if node.op_type in _REFERENCE_WRONG:
            narrow = [array.astype(np.float32) if array.dtype == np.float64 else array for array in arrays]
            trusted = _by_runtime(plain, arrays, opset) or _by_runtime(plain, narrow, opset)
            if trusted is not None:
                return [x.astype(np.float64) if x.dtype == np.float32 else x for x in trusted]
        try:
            results = evaluator.run(None, dict(zip(names, arrays, strict=True)))
        except Exception as error:  # it lacks negative pads, among others: ONNX Runtime's float64 replaces it
            by_runtime = _by_runtime(plain, arrays, opset)
            if by_runtime is None:
                raise RejectedNodeError(f"the reference evaluator: {error}") from error
            results = by_runtime
        return [np.asarray(result) for result in results]

    return run


def _model(node: onnx.NodeProto, inputs: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]], opset: int) -> onnx.ModelProto:
    ports = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(dtype), shape) for n, dtype, shape in inputs]
    graph = helper.make_graph([node], "node", ports, [onnx.ValueInfoProto(name=name) for name in node.output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _rounded(exact: Sequence[Array], node: onnx.NodeProto, inputs: Sequence[Value], opset: int) -> list[Array]:
    """The reference's results in the types of the graph, if ONNX Runtime has no kernel."""
    names = list(dict.fromkeys(name for name in node.input if name))
    model = _model(node, [(n, v.own.dtype, v.shape) for n, v in zip(names, inputs, strict=True)], opset)
    try:
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        raise RejectedNodeError(f"invalid: {error}") from error
    kinds = [output.type.tensor_type.elem_type for output in inferred.graph.output]
    # Without type inference (GroupNormalization) the result has the first operand's type.
    dtypes = [helper.tensor_dtype_to_np_dtype(kind) if kind else inputs[0].own.dtype for kind in kinds]
    return [array.astype(dtype) for array, dtype in zip(exact, dtypes, strict=True)]


def _shaken(array: Array, eps: float, random: np.random.Generator) -> Array:
    return array * (1 + eps * random.uniform(-1, 1, array.shape))


def _certain(
    name: str, node: onnx.NodeProto, own: Array, exact: Array, noisy: Sequence[Array], inputs: Sequence[Value]
) -> Value:
    if own.size > LARGEST:
        raise RejectedNodeError("too large")
    own = np.asarray(own)
    dtype = own.dtype.name
    label = f"{node.op_type} {'/'.join(dict.fromkeys(value.dtype for value in inputs))}"
    if own.shape != exact.shape:
        disagreements[f"{label} shape"] += 1
        raise RejectedNodeError("the evaluators disagree")
    if dtype not in FLOATS:
        if any(not np.array_equal(exact, sample) for sample in noisy):
            raise RejectedNodeError("noise decides")
        if not np.array_equal(own, exact):
            disagreements[label] += 1
            raise RejectedNodeError("the evaluators disagree")
        return Value(name, own, own, (own,) * _SAMPLES)
    known = own.astype(np.float64)
    if dtype == "float32":
        exact, *noisy = (np.where(np.abs(x) > np.finfo(np.float32).max, np.copysign(np.inf, x), x) for x in (exact, *noisy))
    special = _special(exact)
    if any(not np.array_equal(special, _special(sample)) for sample in noisy):
        raise RejectedNodeError("noise decides")
    if not np.array_equal(special, _special(known)):
        if dtype in ("float32", "float64"):
            disagreements[f"{label} nan/inf"] += 1
        raise RejectedNodeError("the evaluators disagree")
    magnitude = np.abs(np.concatenate([exact[special == 0], known[special == 0]]))
    if ((magnitude > _rounding.top[dtype]) | (magnitude < _BOTTOM) & (magnitude > 0)).any():
        raise RejectedNodeError("out of the range of float32")
    spread = spread_of(exact, noisy)
    if spread.max(initial=0) > _rounding.ill[dtype] * max(magnitude.max(initial=0), _BOTTOM):
        raise RejectedNodeError("noise decides")
    exact = exact.astype(np.float64)
    made = Value(name, own, exact, (exact,) * _SAMPLES if not spread.any() else tuple(x.astype(np.float64) for x in noisy))
    apart = np.abs(np.where(special == 0, known, 0) - np.where(special == 0, exact, 0))
    relative = _relative(dtype)
    if (apart > relative * np.where(special == 0, np.abs(exact), 0) + 6 * spread + 1e-7 * (dtype == "float16")).any():
        disagreements[label] += 1
        raise RejectedNodeError("the evaluators disagree")
    return made


def _relative(dtype: str) -> float:
    return max(1e-5, 2 * _rounding.eps[dtype])


def _special(array: Array) -> Array:
    """0 for finite elements, 1 and -1 for infinities, 2 for NaN."""
    infinite = np.where(np.isinf(array), np.sign(array), 0)
    return np.where(np.isnan(array), 2, infinite).astype(np.int8)
