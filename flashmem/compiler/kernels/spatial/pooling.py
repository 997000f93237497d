"""Pooling. After the rewrites pools are 2D or 3D, with attributes `kernel`, `strides`, `dilations` and `pads`.

`MaxPoolAt` returns the positions of the maxima, MaxPool's second output. `MaxUnpool` has attribute `unpooled`, the shape in
which its indices count.
"""

from __future__ import annotations

from typing import Any

from flashmem.compiler.ir.builder import Rewriter
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.kernels.contraction.operators import bad_window, lift, window
from flashmem.compiler.operators.registry import FLOAT, INDEX, Operator, Types, constant_inputs, each, register
from flashmem.compiler.operators.rewriting import reshaped
from flashmem.compiler.operators.tiling_interface import window_tile

_POOLED: Types = frozenset({"float32", "int8", "uint8"})


def _rewrite_pool(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite pooling: one dimension becomes 2D; the indices of MaxPool are a separate node."""
    x = node.input(0)
    kernel = tuple(int(i) for i in node.attributes["kernel_shape"])
    sliding = window(node, kernel)
    if len(x.shape) == 3:
        sliding = lift(sliding)
        kernel = (1, *kernel)
        x = reshaped(rewriter, x, (*x.shape[:2], 1, x.shape[2]))
    kept = {name: int(node.attributes.get(name, default)) for name, default in _NUMBERS.get(node.op, {}).items()}
    for op, output in zip((node.op, "MaxPoolAt"), node.outputs, strict=False):
        lifted = len(output.shape) == 3
        result = Value(f"{output.name}.2d", (*output.shape[:2], 1, output.shape[2]), output.dtype) if lifted else output
        name = node.name if op == node.op else f"{node.name}.indices"
        rewriter.add(op, [x], result, name, kernel=kernel, **kept, **sliding)
        if lifted:
            rewriter.add("Reshape", [result], output)


_NUMBERS = {"AveragePool": {"count_include_pad": 0}, "LpPool": {"p": 2}, "MaxPool": {"storage_order": 0}}
"""The attributes that are kept, with their defaults."""


def _check_pool(node: Node) -> str | None:
    rank = len(node.input(0).shape)
    if rank not in (3, 4, 5):
        return f"{node.op} over {rank - 2} spatial dimensions is not implemented (1, 2 and 3 are)"
    if node.op == "LpPool" and (reason := _check_norm(node)) is not None:
        return reason
    kernel = node.attributes["kernel_shape"]
    if len(kernel) != rank - 2:
        return f"{node.op} with a window of {tuple(kernel)} over an input of {rank} dimensions"
    return bad_window(node, kernel)


def _check_norm(node: Node) -> str | None:
    p = int(node.attributes.get("p", 2))
    rank = len(node.input(0).shape)
    if p < 1:
        return f"{node.op} with p = {p}"
    return None if rank > 2 else f"{node.op} of a tensor of {rank} dimensions"


def _rewrite_global_lp_pool(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite GlobalLpPool as a norm over the spatial axes."""
    x = node.input(0)
    output = node.outputs[0]
    p = int(node.attributes.get("p", 2))
    axes = tuple(range(2, len(x.shape)))
    if p <= 2:
        rewriter.add(f"ReduceL{p}", [x], output, node.name, axes=axes)
        return
    absolute = rewriter.emit("Abs", [x], x.shape, x.dtype, f"{node.name}.abs")
    powers = rewriter.emit("Pow", [absolute], x.shape, x.dtype, f"{node.name}.powers", exponent=float(p))
    total = rewriter.emit("ReduceSum", [powers], output.shape, x.dtype, f"{node.name}.sum", axes=axes)
    rewriter.add("Pow", [total], output, node.name, exponent=1 / p)


def unpooled_shape(node: Node) -> tuple[int, ...]:
    """The shape in which the indices of a MaxUnpool count: that of the pooled tensor, if every window was full."""
    x = node.input(0).shape
    kernel = node.attributes["kernel_shape"]
    sliding = window(node, kernel)
    pads = zip(sliding["pads"][: len(kernel)], sliding["pads"][len(kernel) :], strict=True)
    sizes = zip(x[2:], kernel, sliding["strides"], pads, strict=True)
    return (*x[:2], *((size - 1) * stride + reach - before - after for size, reach, stride, (before, after) in sizes))


def _rewrite_max_unpool(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite MaxUnpool: the shape becomes an attribute."""
    shape = unpooled_shape(node)
    rewriter.add("MaxUnpool", [node.input(0), node.input(1)], node.outputs[0], node.name, unpooled=shape)


def _check_max_unpool(node: Node) -> str | None:
    x = node.input(0).shape
    kernel = node.attributes["kernel_shape"]
    rank = len(kernel)
    if len(x) != rank + 2 or not kernel or min(kernel) < 1:
        return f"MaxUnpool with a window of {tuple(kernel)} over an input of {len(x)} dimensions"
    for name, count in (("strides", rank), ("pads", 2 * rank)):
        given = node.attributes.get(name)
        if given is not None and len(given) != count:
            return f"MaxUnpool with {name} {tuple(given)} over {rank} spatial dimensions"
    if node.input(1).shape != x:
        return f"MaxUnpool of shape {x} with indices of shape {node.input(1).shape}"
    made = node.outputs[0].shape
    shape = unpooled_shape(node)
    if min(shape) < 1 or len(made) != len(shape) or any(m < n for m, n in zip(made, shape, strict=True)):
        return f"MaxUnpool to the shape {made}, which is smaller than the {shape} that its indices count in"
    return None


_KERNEL: dict[str, Any] = {"kernel": "pool", "layout": "channels_last", "operator_class": "hierarchical"}
_POOL: dict[str, Any] = {"rewrite": _rewrite_pool, "check": _check_pool, **_KERNEL}

register(
    __name__,
    *each(("AveragePool", "LpPool"), inputs=(FLOAT,), tiling=window_tile, **_POOL),
    Operator("MaxPool", (_POOLED,), tiling=window_tile, **_POOL),
    Operator("MaxPoolAt", (_POOLED,), onnx=False, **_KERNEL),
    Operator(
        "MaxUnpool", (FLOAT, INDEX, INDEX), check=lambda node: constant_inputs(2)(node) or _check_max_unpool(node),
        rewrite=_rewrite_max_unpool, kernel="unpool",
    ),
    Operator(
        "GlobalLpPool", (FLOAT,), check=_check_norm, rewrite=_rewrite_global_lp_pool, operator_class="hierarchical"
    ),
)  # fmt: skip
