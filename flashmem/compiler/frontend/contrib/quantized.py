"""Expansion of quantised operators.

They become ONNX operators between a DequantizeLinear and a QuantizeLinear, integer products with scales, and products with
weights of four or eight bits in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from flashmem.compiler.frontend.contrib.attention import project_and_attend, projected_columns
from flashmem.compiler.frontend.contrib.expansion import Expand, Expansion, RefusedError
from flashmem.compiler.frontend.contrib.normalization import word_count
from flashmem.compiler.frontend.contrib.packed import BlocksTensor, packed_zero_points, quantised_matrix, reinterpreted
from flashmem.compiler.ir.blocks import STORED

_POOL = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
_WINDOW = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def _single(e: Expansion, value: ir.Value | None) -> ir.Value | None:
    """`value`, a scale or zero point; a single element becomes a scalar."""
    return e.reshape(value) if value is not None and e.shape(value) == (1,) else value


def _dequantized(e: Expansion, index: int) -> ir.Value:
    """Dequantise inputs `index`, `index` + 1 and, if given, `index` + 2: elements, scale and zero point of a whole tensor."""
    scale, zero = (_single(e, value) for value in (e.input(index + 1), e.optional(index + 2)))
    return e.op("DequantizeLinear", e.input(index), scale, *([] if zero is None else [zero]))


def _quantized(e: Expansion, value: ir.Value, index: int, like: ir.Value) -> ir.Value:
    """Quantise `value` by scale and zero point in inputs `index` and `index` + 1; without zero point, to the type of `like`."""
    scale, zero = (_single(e, given) for given in (e.input(index), e.optional(index + 1)))
    return e.op("QuantizeLinear", value, scale, e.constant(0, like) if zero is None else zero)


def _binary(op: str) -> Expand:
    def expand(e: Expansion) -> list[ir.Value]:
        return [_quantized(e, e.op(op, _dequantized(e, 0), _dequantized(e, 3)), 6, e.input(0))]

    return expand


def _unary(apply: Callable[[Expansion, ir.Value], ir.Value]) -> Expand:
    def expand(e: Expansion) -> list[ir.Value]:
        return [_quantized(e, apply(e, _dequantized(e, 0)), 3, e.input(0))]

    return expand


def _where(e: Expansion) -> list[ir.Value]:
    return [_quantized(e, e.op("Where", e.input(0), _dequantized(e, 1), _dequantized(e, 4)), 7, e.input(1))]


def _concat(e: Expansion) -> list[ir.Value]:
    """Concatenate: output scale and zero point, then elements, scale and zero point of each part."""
    count, rest = divmod(len(e.node.inputs) - 2, 3)
    if rest or count < 1:
        raise RefusedError(f"of {len(e.node.inputs)} inputs")
    parts = [_dequantized(e, 2 + 3 * i) for i in range(count)]
    return [_quantized(e, e.op("Concat", *parts, axis=e.integer("axis")), 0, e.input(2))]


def _softmax(e: Expansion, x: ir.Value) -> ir.Value:
    """Softmax; before operator set 13, all dimensions from `axis` on are one."""
    shape = e.shape(e.input(0))
    axis = e.integer("axis", -1)
    if not -len(shape) <= axis < len(shape):
        raise RefusedError(f"along axis {axis} of a tensor of {len(shape)} dimensions")
    axis %= len(shape)
    if e.integer("opset") >= 13:
        last = len(shape) - 1
        if axis == last:
            return e.op("Softmax", x, axis=-1)
        order = [i for i in range(len(shape)) if i != axis] + [axis]
        back = [order.index(i) for i in range(len(shape))]
        return e.transpose(e.op("Softmax", e.transpose(x, *order), axis=-1), *back)
    rows = e.reshape(x, *shape[:axis], math.prod(shape[axis:]))
    return e.reshape(e.op("Softmax", rows, axis=-1), *shape)


def _reduce_mean(e: Expansion, x: ir.Value) -> ir.Value:
    axes = [int(axis) for axis in e.numbers("axes")]
    keep = e.integer("keepdims", 1)
    if e.opset >= 18:
        return e.op("ReduceMean", x, e.integers(*axes), keepdims=keep)
    return e.op("ReduceMean", x, axes=axes, keepdims=keep)


def _channels_last(e: Expansion, x: ir.Value, apply: Callable[[ir.Value], ir.Value]) -> ir.Value:
    """Call `apply` with `x`, which has the rank of input 0, and transpose around it if the node is channels-last."""
    if not e.integer("channels_last", 0):
        return apply(x)
    rank = len(e.shape(e.input(0)))
    if rank < 3:
        raise RefusedError(f"of a tensor of {rank} dimensions")
    return e.transpose(apply(e.transpose(x, 0, rank - 1, *range(1, rank - 1))), 0, *range(2, rank), 1)


def _average_pool(e: Expansion, x: ir.Value) -> ir.Value:
    return _channels_last(e, x, lambda first: e.op("AveragePool", first, **e.keep(*_POOL)))


def _global_average_pool(e: Expansion, x: ir.Value) -> ir.Value:
    return _channels_last(e, x, lambda first: e.op("GlobalAveragePool", first))


def _conv(e: Expansion) -> list[ir.Value]:
    """ONNX's QLinearConv, or the same channels-last."""
    rest = [e.optional(index) for index in range(1, 9)]
    while rest and rest[-1] is None:
        rest.pop()
    return [_channels_last(e, e.input(0), lambda x: e.op("QLinearConv", x, *rest, **e.keep(*_WINDOW)))]


def _same(op: str) -> Expand:
    """The ONNX operator of that name; its axis counts only if each element along it has a scale."""

    def expand(e: Expansion) -> list[ir.Value]:
        scale, zero = (_single(e, value) for value in (e.input(1), e.optional(2)))
        single = e.shape(e.input(1)) in ((), (1,))
        axis = {} if single else {"axis": e.integer("axis")}
        if e.optional(2) is not None and e.dtype(e.input(2)).itemsize > 1:
            axis["block_size"] = 0  # only the version that supports 16 bits has this attribute
        return [e.op(op, e.input(0), scale, *([] if zero is None else [zero]), **axis)]

    return expand


def _product(
    e: Expansion,
    a: ir.Value,
    b: ir.Value,
    zeros: tuple[ir.Value | None, ir.Value | None],
    scale: ir.Value,
    added: ir.Value | None = None,
) -> ir.Value:
    """The product of integers `a` and `b` minus their zero points, plus an integer, times `scale`."""
    points = list(zeros)
    while points and points[-1] is None:
        points.pop()
    total = e.plus(e.op("MatMulInteger", a, b, *points), added)
    return e.op("Mul", e.cast(total, ir.DataType.FLOAT), scale)


def _integer_to_float(e: Expansion) -> list[ir.Value]:
    scale = e.op("Mul", _single(e, e.input(2)), _single(e, e.input(3)))
    product = _product(e, e.input(0), e.input(1), (_single(e, e.optional(4)), _single(e, e.optional(5))), scale)
    return [e.plus(product, e.optional(6))]


def _dynamic_matmul(e: Expansion) -> list[ir.Value]:
    """A product whose first operand is quantised to 8 bits by its own range."""
    a, a_scale, a_zero = e.ops("DynamicQuantizeLinear", 3, e.input(0))
    scale = e.op("Mul", a_scale, _single(e, e.input(2)))
    return [e.plus(_product(e, a, e.input(1), (a_zero, _single(e, e.optional(3))), scale), e.optional(4))]


def _gemm(e: Expansion) -> list[ir.Value]:
    """Integer Gemm: `C` has the units of the product; the answer is quantised if its scale is given."""
    a, b = (
        e.transpose(e.input(index), 1, 0) if e.integer(name, 0) else e.input(index)
        for index, name in ((0, "transA"), (3, "transB"))
    )
    scale = e.op("Mul", _single(e, e.input(1)), _single(e, e.input(4)))
    scale = e.scaled(scale, e.number("alpha", 1.0), e.input(1))
    zeros = _single(e, e.optional(2)), _single(e, e.optional(5))
    product = _product(e, a, b, zeros, scale, e.optional(6))
    return [product if e.optional(7) is None else _quantized(e, product, 7, e.input(0))]


def _attention(e: Expansion) -> list[ir.Value | None]:
    """Attention whose projection is a product of integers."""
    columns = projected_columns(e)
    scale = e.op("Mul", _single(e, e.input(3)), _single(e, e.input(4)))
    zeros = _single(e, e.optional(6)), _single(e, e.optional(7))
    projected = _product(e, e.input(0), e.input(1), zeros, scale)
    return project_and_attend(e, e.plus(projected, e.optional(2)), columns, mask=5, past=8, bias=None)


def _embed_layer_norm(e: Expansion) -> list[ir.Value | None]:
    """EmbedLayerNormalization of quantised tables: rows are gathered first, then dequantised."""
    batch, length = e.ranked(0, 2)
    if e.ranked(3, 2)[0] < length:
        raise RefusedError(f"of {length} words with a table of {e.shape(e.input(3))[0]} positions")

    def meant(value: ir.Value, table: int) -> ir.Value:
        """Dequantise elements of the table in input `table` by its scale and zero point."""
        return e.op("DequantizeLinear", value, _single(e, e.input(table + 6)), _single(e, e.input(table + 11)))

    words = meant(e.op("Gather", e.input(2), e.input(0)), 2)
    total = e.op("Add", words, meant(e.part(e.input(3), 0, 0, length), 3))
    if (segments := e.optional(1)) is not None:
        total = e.op("Add", total, meant(e.op("Gather", e.input(4), segments), 4))
    result = e.layer_norm(total, meant(e.input(5), 5), meant(e.input(6), 6), e.number("epsilon", 1e-12))
    return [result, word_count(e, batch) if e.wants(1) else None]


def _matmul_nbits(e: Expansion) -> list[ir.Value]:
    """The product with a matrix [N, K] of four- or eight-bit weights, which have a scale for each block along K."""
    e.refuse_input(4)
    inner = e.integer("K")
    columns = e.integer("N")
    block = e.integer("block_size")
    bits = e.integer("bits", 4)
    if bits not in (4, 8) or e.integer("weight_prepacked", 0):
        raise RefusedError(f"of {bits} bits, or of weights that are packed for a GPU,")
    if min(inner, columns) < 1 or block < 16 or block & (block - 1):
        raise RefusedError(f"of {columns} x {inner} weights in blocks of {block}")
    blocks = -(-inner // block)
    weight = e.input(1).const_value
    scales = e.input(2).const_value
    if weight is None or scales is None:
        raise RefusedError("with weights or scales computed at run time")
    if weight.size != columns * blocks * block * bits // 8 or scales.size != columns * blocks:
        raise RefusedError(
            f"of {columns} x {inner} weights of {bits} bits that have {weight.size} bytes and {scales.size} scales"
        )
    x = e.input(0)
    shape = e.shape(e.input(0))
    if not shape or shape[-1] != inner:
        raise RefusedError(f"with K {inner} over an input of shape {shape}")
    matrix = e.tensor(quantised_matrix(weight, (columns, inner), block, bits))
    scale = e.tensor(reinterpreted(scales, scales.dtype, (columns, blocks)))
    zero = e.optional(3)
    how = {"axis": 1, "block_size": block}
    given = None if zero is None else e.known(zero)
    if given is None or given.dtype == np.uint8:
        dense = e.op("DequantizeLinear", matrix, scale, _zero_points(e, zero, columns, blocks, bits), **how)
    else:  # of any value
        if given.size != columns * blocks:
            raise RefusedError(f"of {columns} x {blocks} blocks with {given.size} zero points")
        minimum = -given.reshape(columns, blocks).astype(np.float32) * scales.numpy().reshape(columns, blocks).astype(
            np.float32
        )
        dense = e.op("DequantizeLinear", matrix, scale, None, e.constant(minimum, scale), **how)
    return [e.plus(e.op("MatMul", x, e.transpose(dense, 1, 0)), e.optional(5))]


def _zero_points(e: Expansion, zero: ir.Value | None, rows: int, blocks: int, bits: int) -> ir.Value:
    """Packed zero points of `bits` bits as a matrix [rows, blocks]; the middle of the codes, if they are omitted."""
    points = np.full((rows, blocks), 1 << (bits - 1), np.uint8)
    if zero is not None:
        given = e.known(zero)
        width = blocks if bits == 8 else -(-blocks // 2)
        if given is None:
            raise RefusedError("with zero points computed at run time")
        if given.size != rows * width:
            raise RefusedError(f"of {rows} x {blocks} blocks with {given.size} bytes of zero points")
        points = packed_zero_points(given.reshape(rows, width), blocks, bits)
    return e.tensor(quantised_matrix(ir.tensor(points), (rows, blocks), blocks, 8, bits))


def _gather_blocks(e: Expansion) -> list[ir.Value]:
    """Rows of a matrix of four- or eight-bit weights, which have a scale for each block of a row."""
    bits = e.integer("bits", 4)
    block = e.integer("block_size", 128)
    table = e.input(0)
    scales = e.input(2)
    zero = e.optional(3)
    weight = table.const_value
    rows, width = e.ranked(0, 2)
    axes = e.integer("gather_axis", 0), e.integer("quantize_axis", 1) % 2
    if weight is None or axes != (0, 1) or bits not in (4, 8) or block < 16 or block & (block - 1):
        raise RefusedError(f"of {bits} bits in blocks of {block}, along axes {axes}")
    points = [] if zero is None else [zero]
    if weight.dtype == ir.DataType.UINT8:  # two codes of four bits in a byte, and zero points likewise
        columns = width * 8 // bits
        table = e.tensor(quantised_matrix(weight, (rows, columns), block, bits))
        points = [_zero_points(e, zero, rows, -(-columns // block), bits)]
    dense = e.op("DequantizeLinear", table, scales, *points, axis=1, block_size=block)
    return [e.op("Gather", dense, e.input(1), axis=0)]


def ggml_blocks(e: Expansion) -> list[ir.Value]:
    """A weight of a GGUF file: rows of blocks of a `kind`, or of floats of 16 bits, uint8 [rows, bytes of a row]."""
    data = e.input(0).const_value
    kind = e.text("kind", "")
    if data is None or kind not in STORED:
        raise RefusedError(f"of the kind {kind!r}, or with blocks computed at run time")
    _, nbytes = e.ranked(0, 2)
    if nbytes % STORED[kind].nbytes:
        raise RefusedError(f"of the kind {kind} with {nbytes} bytes in a row")
    return [e.tensor(BlocksTensor(data, STORED[kind]))]


def blocks_dequantised(e: Expansion) -> list[ir.Value]:
    """A weight that `flashmem.compiler.frontend.quantize` made: each block of a row has a scale.

    Inputs: signed codes of `bits` bits, uint8 [rows, columns * bits / 8], and scales [rows, columns / block_size]. Rows of one
    block may have a `shape` of more dimensions.
    """
    bits = e.integer("bits")
    given = e.input(0).const_value
    if given is None:
        raise RefusedError("with codes computed at run time")
    rows, width = e.ranked(0, 2)
    shape = [int(size) for size in e.numbers("shape")]
    kind = ir.DataType[f"INT{bits}"]
    if shape:
        codes = e.tensor(reinterpreted(given, kind, tuple(shape)))
        return [e.op("DequantizeLinear", codes, e.reshape(e.input(1), rows), axis=0)]
    codes = e.tensor(reinterpreted(given, kind, (rows, width * 8 // bits)))
    block = {"axis": 1, "block_size": e.integer("block_size")}
    return [e.op("DequantizeLinear", codes, e.input(1), **block)]


EXPANSIONS: dict[str, Expand] = {
    "DequantizeLinear": _same("DequantizeLinear"),
    "DynamicQuantizeMatMul": _dynamic_matmul,
    "GatherBlockQuantized": _gather_blocks,
    "MatMulIntegerToFloat": _integer_to_float,
    "MatMulNBits": _matmul_nbits,
    "QAttention": _attention,
    "QEmbedLayerNormalization": _embed_layer_norm,
    "QGemm": _gemm,
    "QLinearAdd": _binary("Add"),
    "QLinearAveragePool": _unary(_average_pool),
    "QLinearConcat": _concat,
    "QLinearConv": _conv,
    "QLinearGlobalAveragePool": _unary(_global_average_pool),
    "QLinearLeakyRelu": _unary(lambda e, x: e.op("LeakyRelu", x, alpha=e.number("alpha", 0.01))),
    "QLinearMul": _binary("Mul"),
    "QLinearReduceMean": _unary(_reduce_mean),
    "QLinearSigmoid": _unary(lambda e, x: e.op("Sigmoid", x)),
    "QLinearSoftmax": _unary(_softmax),
    "QLinearWhere": _where,
    "QuantizeLinear": _same("QuantizeLinear"),
}
"""Expansions by operator name."""
