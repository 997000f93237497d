"""Random numbers: a function of a seed and of the element's position, so that every run, device and plan draws the same ones.

The generator is Philox2x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3). The counter
is an element's row and column. The key is a checksum of the `seed` attribute (none: 0) and of the node's name, so that nodes
draw independent numbers. After the rewrites, `Random` computes floats from positions; `normal` says which distribution.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np

from flashmem.compiler.ir.builder import Rewriter, constant
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.operators.registry import ANY, FLOAT, Operator, Types, elementwise, fp32_outputs, register
from flashmem.compiler.operators.rewriting import reshaped, too_long
from flashmem.compiler.operators.vector import Vector

_POSITION: Types = frozenset({"uint32"})


def key_of(node: Node) -> int:
    """The generator's key for `node`: 32 bits."""
    seed = np.float32(node.attributes.get("seed", 0.0))
    return zlib.crc32(node.name.encode(), zlib.crc32(seed.tobytes()))


def _random(node: Node, x: Sequence[str], v: Vector) -> str:
    kind = "normal" if node.attributes["normal"] else "uniform"
    return f"fm_random_{kind}{v.width if v.width > 1 else ''}({x[0]}, {x[1]}, {node.attributes['key']}u)"


def _drawn(rewriter: Rewriter, node: Node, size: int, normal: bool) -> Value:
    """`size` numbers as a matrix: standard normal ones, or uniform in [0, 1)."""
    rows = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
    if size // rows > 1 << 16:  # a size with few divisors: a few more numbers than needed, so that positions stay short
        rows = math.isqrt(size)
    columns = -(-size // rows)
    row = constant(f"{node.name}.rows", np.arange(rows, dtype=np.uint32).reshape(-1, 1))
    column = constant(f"{node.name}.columns", np.arange(columns, dtype=np.uint32).reshape(1, -1))
    drawn = rewriter.emit(
        "Random", [row, column], (rows, columns), "float32", f"{node.name}.drawn", normal=normal, key=key_of(node)
    )
    if rows * columns == size:
        return drawn
    flat = reshaped(rewriter, drawn, (rows * columns,))
    return rewriter.emit("Slice", [flat], (size,), "float32", f"{node.name}.cut", starts=(0,), steps=(1,))


def _rewrite_random(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite RandomNormal, RandomUniform and those like a tensor: drawn numbers times a scale, plus a shift."""
    output = node.outputs[0]
    normal = "Normal" in node.op
    if normal:
        shift, scale = (float(node.attributes.get(name, default)) for name, default in (("mean", 0.0), ("scale", 1.0)))
    else:
        low, high = (float(node.attributes.get(name, default)) for name, default in (("low", 0.0), ("high", 1.0)))
        shift = low
        scale = high - low
    value = _drawn(rewriter, node, output.size, normal)
    for op, number in (("Mul", scale), ("Add", shift)):
        operand = constant(f"{node.name}.{op}.number", np.array(number, np.float32))
        value = rewriter.emit(op, [value, operand], value.shape, "float32", f"{node.name}.{op}")
    rewriter.add("Reshape", [value], output, node.name)


def _check_random(node: Node) -> str | None:
    if node.outputs[0].dtype != "float32":
        return f"{node.op} of {node.outputs[0].dtype} is not implemented"
    if "Normal" in node.op and not float(node.attributes.get("scale", 1.0)) >= 0:
        return f"{node.op} with scale {node.attributes['scale']}, a standard deviation,"
    return None


def _rewrite_bernoulli(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Bernoulli: 1 where a uniform number in [0, 1) is less than the probability."""
    x = node.input(0)
    output = node.outputs[0]
    drawn = reshaped(rewriter, _drawn(rewriter, node, output.size, normal=False), output.shape)
    is_one = rewriter.emit("Less", [drawn, x], output.shape, "bool", f"{node.name}.less")
    if output.dtype == "bool":
        rewriter.add("Reshape", [is_one], output, node.name)
    else:
        rewriter.add("Cast", [is_one], output, node.name, rounding=None)


def _rewrite_multinomial(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Multinomial: the number of classes whose cumulative weight is at most a uniform part of the total weight."""
    x = node.input(0)
    output = node.outputs[0]
    batch, classes = x.shape
    samples = output.shape[1]
    largest = rewriter.emit("ReduceMax", [x], (batch, 1), "float32", f"{node.name}.largest", axes=(1,))
    below = rewriter.emit("Sub", [x, largest], x.shape, "float32", f"{node.name}.below")
    weight = rewriter.emit("Exp", [below], x.shape, "float32", f"{node.name}.weight")
    heap = rewriter.emit(
        "CumSum", [weight], x.shape, "float32", f"{node.name}.cumulative", axis=1, exclusive=False, reverse=False
    )
    total = rewriter.emit("Slice", [heap], (batch, 1), "float32", f"{node.name}.total", starts=(0, classes - 1), steps=(1, 1))
    drawn = reshaped(rewriter, _drawn(rewriter, node, output.size, normal=False), (batch, samples))
    part = rewriter.emit("Mul", [drawn, total], (batch, samples), "float32", f"{node.name}.part")
    shape = (batch, samples, classes)
    heap = reshaped(rewriter, heap, (batch, 1, classes))
    part = reshaped(rewriter, part, (batch, samples, 1))
    is_passed = rewriter.emit("LessOrEqual", [heap, part], shape, "bool", f"{node.name}.passed")
    passed = rewriter.emit("Cast", [is_passed], shape, "int32", f"{node.name}.passed.int32", rounding=None)
    count = rewriter.emit("ReduceSum", [passed], (batch, samples, 1), "int32", f"{node.name}.count", axes=(2,))
    last = constant(f"{node.name}.last", np.array(classes - 1, np.int32))  # a part that is rounded up to the total
    index = rewriter.emit("Min", [count, last], (batch, samples, 1), "int32", f"{node.name}.index")
    if output.dtype != "int32":
        index = rewriter.emit("Cast", [index], index.shape, output.dtype, f"{node.name}.wide", rounding=None)
    rewriter.add("Reshape", [index], output, node.name)


def _check_multinomial(node: Node) -> str | None:
    x = node.input(0).shape
    if len(x) != 2 or not x[1]:
        return f"Multinomial of a tensor of shape {x}"
    return too_long(node, x[1])


register(
    __name__,
    Operator("Bernoulli", (FLOAT,), rewrite=_rewrite_bernoulli),
    Operator("Multinomial", (FLOAT,), check=_check_multinomial, rewrite=_rewrite_multinomial),
    elementwise("Random", _POSITION, _random, keep_fp32=fp32_outputs, special=True, onnx=False),
    *(
        Operator(f"Random{kind}{like}", (ANY,), check=_check_random, rewrite=_rewrite_random)
        for kind in ("Normal", "Uniform")
        for like in ("", "Like")
    ),
)
