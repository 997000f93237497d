"""Operator classes and their thresholds (FlashMem section 4.2, Table 5), and the roofline over a device's rates.

A layer may be slowed down by a share of its own latency that depends on its class; what can be streamed in that time is its
load capacity C_l (capacity/model.py).
"""

from __future__ import annotations

from typing import Final

from flashmem.device import DeviceDescriptor
from flashmem.program import Launch, OperatorClass

THRESHOLDS: Final[dict[OperatorClass, float]] = {"hierarchical": 0.0, "reusable": 0.20, "elemental": 3.0}
"""Slowdown a class of operators may take from streaming, as a share of its own latency."""

_REUSABLE = frozenset({
    "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "Einsum", "FusedConv", "FusedMatMul", "GRU", "Gemm", "LSTM",
    "MatMul", "MatMulInteger", "QLinearConv", "QLinearMatMul", "RNN",
})  # fmt: skip
_ELEMENTAL = frozenset({
    # arithmetic and comparison, element by element
    "Abs", "Add", "And", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Ceil", "Clip", "Cos", "Cosh",
    "Div", "Equal", "Erf", "Exp", "Floor", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log",
    "Max", "Mean", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Round", "Sign", "Sin", "Sinh", "Sqrt",
    "Sub", "Sum", "Tan", "Where", "Xor", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cast", "CastLike",
    # activations
    "BiasGelu", "Celu", "Elu", "FastGelu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "QuickGelu",
    "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Swish", "Tanh", "ThresholdedRelu", "Dropout", "Shrink",
    # one multiply and one add an element once the statistics are constants
    "BatchNormalization", "DequantizeLinear", "QuantizeLinear",
    # data movement
    "Compress", "Concat", "ConstantOfShape", "DepthToSpace", "Expand", "EyeLike", "Flatten", "Gather", "GatherElements",
    "GatherND", "Identity", "OneHot", "Pad", "Range", "Reshape", "Resize", "ReverseSequence", "ScatterElements",
    "ScatterND", "Shape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze",
    "Upsample", "GridSample", "RotaryEmbedding",
})  # fmt: skip


def classify(op: str) -> OperatorClass:
    """The class of an ONNX operator type (FlashMem Table 5).

    Softmax, normalisation, reductions, pooling, attention and every type that is not listed are hierarchical: nothing is
    streamed beside an operator of which nothing is known.
    """
    if op in _REUSABLE:
        return "reusable"
    return "elemental" if op in _ELEMENTAL else "hierarchical"


def predict_seconds(launch: Launch, descriptor: DeviceDescriptor, weight_bytes: int = 0) -> float:
    """Predicted latency of one launch, seconds: the slower of arithmetic and memory traffic, plus the launch itself.

    `weight_bytes`: bytes of weights it reads, beside the activations that the launch declares.
    """
    rates = descriptor.rates
    arithmetic = 2 * launch.macs / rates.gemm_flops
    traffic = (launch.bytes + weight_bytes) / rates.memory_bandwidth
    return max(arithmetic, traffic) + rates.launch_seconds
