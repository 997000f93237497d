"""Quantisation parameters of a contraction: zero points, scales and minima, which its kernel reads (contraction/mac.cl.j2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import DType
from flashmem.compiler.ir.blocks.constant import BlockConstant
from flashmem.compiler.ir.blocks.floats import FloatFormat
from flashmem.compiler.ir.blocks.format import BlockFormat
from flashmem.compiler.ir.broadcast import place
from flashmem.compiler.ir.builder import constant
from flashmem.compiler.ir.graph import Constant, Node, Value
from flashmem.compiler.ir.quantised import QuantizedConstant, wide
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.operators.vector import STORED
from flashmem.compiler.weights.packing import Storage, weight_columns
from flashmem.program.launches import Arg

PartOf = Literal["zero", "scale", "minimum"]
"""What the elements of quantised weights are computed with."""

LEAST_BLOCK = 2
"""The least steps of depth that share a column's scale for weights to stay quantised; with fewer, floats need fewer bytes."""


@dataclass(frozen=True)
class QuantisationParameters:
    """Zero points or scales for the templates: elements of `type`; the one for (row, col) of the output is at `index`.

    `spread`: one element holds for all columns of a vector. Those of blocks have no index: they are packed like the weights, or
    in the order of depth if they hold for all columns. `ahead`: bytes of each column before them, in the head of a block of
    weights, if they are in such heads.
    """

    type: str
    index: str = ""
    spread: bool = False
    ahead: int = 0


@dataclass(frozen=True)
class ByBlock:
    """Zero points, scales or minima by block, packed in panels like the weights; `array` makes them, axes in their order."""

    of: PartOf
    storage: Storage
    array: Callable[[], NDArray[Any]]


@dataclass(frozen=True)
class WeightBinding:
    """The stored type of constant weights, and the zero points and scales of a product; `args` in the order of the kernel's.

    `codes` is None for weights that are computed at run time. With `format`, they are bytes of blocks of that kind.
    """

    storage: Storage
    codes: Callable[[], NDArray[Any]] | None = None
    args: Sequence[Arg] = ()
    zero: QuantisationParameters | None = None
    scale: QuantisationParameters | None = None
    weight_zero: QuantisationParameters | None = None
    weight_scale: QuantisationParameters | None = None
    weight_minimum: QuantisationParameters | None = None
    block: int = 0
    by_block: Sequence[ByBlock] = ()
    format: BlockFormat | None = None


def zero_points(
    context: LoweringContext, node: Node
) -> tuple[QuantisationParameters | None, QuantisationParameters | None, list[Arg]]:
    """Zero points of both operands of an integer product (its third and fourth input), and the arguments that hold them."""
    found: list[QuantisationParameters | None] = []
    args = []
    output = node.outputs[0]
    for index in (2, 3):
        value = node.optional(index)
        if value is None:
            found.append(None)
            continue
        placed = place(value, output.shape, len(output.shape) - 1)
        assert placed is not None, f"{node.op} {node.name} has a zero point that no kernel reads"
        found.append(QuantisationParameters(STORED[value.dtype], placed.index, placed.spread))
        args.append(context.operand(value))
    return found[0], found[1], args


def read_weights(context: LoweringContext, node: Node, *, blocks: bool = True) -> WeightBinding:
    """Bind the weights of `node` in the fewest bits. `blocks`: whether its kernel supports scales by block."""
    weight = node.input(1)
    if weight.constant is None:
        return WeightBinding("float32")
    read = weight.constant.array
    if node.op == "DeformConv":  # its further inputs are offsets of the taps
        return WeightBinding("float16" if context.half else "float32", read)
    if weight.dtype != "float32":
        zero, weight_zero, args = zero_points(context, node)
        return WeightBinding(cast(Storage, weight.dtype), read, args, zero, weight_zero=weight_zero)
    zero, scale, activation = read_activation(context, node)
    quantized = weight.constant
    if isinstance(quantized, BlockConstant) and blocks and node.op == "MatMul" and node.attributes["transposed"]:
        kind = quantized.format
        if not isinstance(kind, FloatFormat):
            return _in_blocks(quantized.data, kind, activation, zero, scale)
        if not context.half:
            return WeightBinding(kind.storage, lambda: kind.elements(quantized.data.array()), activation, zero, scale)
    block = quantized_block(node, quantized) if isinstance(quantized, QuantizedConstant) else None
    if not isinstance(quantized, QuantizedConstant) or block is None or (block and not blocks):
        return WeightBinding("float16" if context.half else "float32", read, activation, zero, scale)
    if block and quantized.scale.shape[_axes(node)[0]] > 1:
        parameters, by_block = _packed_parameters(node, quantized)
        args = list(activation)
    else:
        parameters, made = _plain_parameters(context, node, quantized, block)
        by_block = []
        args = [*activation, *made]
    return WeightBinding(
        cast(Storage, quantized.storage), quantized.codes.array, args, zero, scale,
        parameters.get("zero"), parameters["scale"], parameters.get("minimum"), block, by_block,
    )  # fmt: skip


def _in_blocks(
    weight: Constant,
    kind: BlockFormat,
    args: Sequence[Arg],
    zero: QuantisationParameters | None,
    scale: QuantisationParameters | None,
) -> WeightBinding:
    """The binding of weights in ggml's blocks, of which all that kernels read is in one array."""
    of_run = QuantisationParameters("half")
    return WeightBinding(
        cast(Storage, kind.storage), weight.array, args, zero, scale,
        weight_scale=of_run, weight_minimum=of_run if kind.has_minimum else None, block=kind.run, format=kind,
    )  # fmt: skip


def _parts(quantized: QuantizedConstant) -> dict[PartOf, Constant]:
    """What the elements of `quantized` are computed with."""
    parts: dict[PartOf, Constant | None]
    parts = {"zero": quantized.zero, "scale": quantized.scale, "minimum": quantized.minimum}
    return {name: part for name, part in parts.items() if part is not None}


def _packed_parameters(node: Node, quantized: QuantizedConstant) -> tuple[dict[PartOf, QuantisationParameters], list[ByBlock]]:
    """The parameters of a column of a block, which are packed like the weights."""
    column, _, taps = _axes(node)

    def by_block(name: PartOf, part: Constant) -> ByBlock:
        storage = cast(Storage, part.dtype.name)
        return ByBlock(name, storage, lambda: quantized.spread(_full(quantized, part.array(), taps), [column]))

    parameters: dict[PartOf, QuantisationParameters] = {}
    ahead = 0
    for name, part in _parts(quantized).items():
        parameters[name] = QuantisationParameters(STORED[cast(DType, part.dtype.name)], ahead=ahead)
        ahead += part.dtype.itemsize
    return parameters, [by_block(*each) for each in _parts(quantized).items()]


def _plain_parameters(
    context: LoweringContext, node: Node, quantized: QuantizedConstant, block: int
) -> tuple[dict[PartOf, QuantisationParameters], list[Arg]]:
    """The parameters of a column, or of a block of all columns, which are arguments of the kernel."""
    column, _, taps = _axes(node)
    parameters: dict[PartOf, QuantisationParameters] = {}
    args = []
    for name, part in _parts(quantized).items():
        array = wide(part)
        if block:
            array = np.ascontiguousarray(weight_columns(node, _full(quantized, array, taps))(0, 1))
        else:
            array = quantized.spread(array, [column])
        value = constant(f"{node.input(1).name}.{name}", array.reshape(-1))
        index = "" if block else "0" if value.size == 1 else "col"
        parameters[name] = QuantisationParameters(STORED[value.dtype], index, index != "col")
        args.append(context.constant(value))
    return parameters, args


def read_activation(
    context: LoweringContext, node: Node
) -> tuple[QuantisationParameters | None, QuantisationParameters | None, list[Arg]]:
    """Zero point and scale of a left operand of integers that the kernel dequantises (`compiler.passes.qdq_fusion`)."""
    return _single(context, node, 2, 4)


def _single(
    context: LoweringContext, node: Node, *indices: int
) -> tuple[QuantisationParameters | None, QuantisationParameters | None, list[Arg]]:
    """Two inputs of one number each, and the arguments that hold them."""
    values = [node.optional(index) for index in indices]
    first, second = (None if value is None else QuantisationParameters(STORED[value.dtype], "0", True) for value in values)
    return first, second, [context.operand(value) for value in values if value is not None]


def quantized_block(node: Node, weight: QuantizedConstant) -> int | None:
    """Steps of depth that share a scale: 0 if all do; None if too few do, or if blocks are not consecutive."""
    if weight.bits > 16:
        return None
    column, channel, taps = _axes(node)
    counts = weight.scale.shape
    if node.op == "ConvTranspose" and node.attributes["group"] > 1 and math.prod(counts) > 1:
        return None  # the channels of all groups are one axis, and the groups share the columns' scales
    if counts[channel] == 1 and all(counts[axis] == 1 for axis in taps):
        return 0
    channels = weight.shape[channel]
    block = channels if counts[channel] == 1 else weight.block[channel]
    if (counts[column] > 1 and block < LEAST_BLOCK) or (taps and channels % block):
        return None
    return block


def read_both(context: LoweringContext, node: Node) -> tuple[Arg, WeightBinding]:
    """The right operand of a product with unpacked operands, and the zero points and scales of both.

    A stack of constant matrices stays integers of 8 or 16 bits if all steps of depth share a scale.
    """
    right = node.input(1)
    output = node.outputs[0]
    quantized = right.constant
    if output.dtype != "float32":
        zero, right_zero, args = zero_points(context, node)
        return context.operand(right), WeightBinding(cast(Storage, right.dtype), lambda: _nothing, args, zero, None, right_zero)
    zero, scale, args = read_activation(context, node)
    is_narrow = isinstance(quantized, QuantizedConstant) and quantized.bits in (8, 16) and quantized.minimum is None
    column, depth, _ = _axes(node)
    if not isinstance(quantized, QuantizedConstant) or not is_narrow or quantized.scale.shape[depth] != 1:
        right_zero, right_scale, others = _single(context, node, 3, 5)
        kind = cast(Storage, context.storage(right))
        return context.operand(right), WeightBinding(
            kind, lambda: _nothing, [*args, *others], zero, scale, right_zero, right_scale
        )
    codes = Value(f"{right.name}.codes", right.shape, cast(DType, quantized.codes.dtype.name), quantized.codes)
    parameters: dict[str, QuantisationParameters] = {}
    for name, part in (("zero", quantized.zero), ("scale", quantized.scale)):
        if part is not None:
            array = quantized.spread(wide(part))
            value = constant(f"{right.name}.{name}", array.swapaxes(-1, -2) if column < depth else array)
            placed = place(value, output.shape, len(output.shape) - 1)
            assert placed is not None
            parameters[name] = QuantisationParameters(STORED[value.dtype], placed.index, placed.spread)
            args.append(context.constant(value))
    storage = cast(Storage, quantized.storage)
    binding = WeightBinding(storage, lambda: _nothing, args, zero, scale, parameters.get("zero"), parameters["scale"])
    return context.constant(codes), binding


_nothing = np.zeros(0)
"""The packed data of an operand that is not packed: an empty array."""


def _axes(node: Node) -> tuple[int, int, list[int]]:
    """The axes of a contraction's weights: output columns, the axis that is summed over, and the taps of a window."""
    rank = len(node.input(1).shape)
    if node.op.startswith("MatMul"):
        return (rank - 2, rank - 1, []) if node.attributes["transposed"] else (rank - 1, rank - 2, [])
    taps = list(range(2, rank))
    return (1, 0, taps) if node.op == "ConvTranspose" else (0, 1, taps)


def _full(quantized: QuantizedConstant, array: NDArray[Any], taps: Sequence[int]) -> NDArray[Any]:
    """Scales with one element for each tap."""
    shape = list(array.shape)
    for axis in taps:
        if shape[axis] == 1:
            shape[axis] = quantized.shape[axis]
    return np.broadcast_to(quantized.spread(array, taps), shape)
