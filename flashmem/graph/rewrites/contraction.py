"""Rewrites of products and windows: Gemm, MatMul, convolutions, pooling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashmem.graph.builder import Rewriter, constant, derived
from flashmem.graph.ir import Node, Value
from flashmem.graph.rewrites.common import chain, reshaped, transpose


def rewrite_gemm(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Gemm is MatMul, Mul by alpha and Add of beta times C."""
    a, b, c = node.input(0), node.input(1), node.optional(2)
    alpha, beta = float(node.attributes.get("alpha", 1.0)), float(node.attributes.get("beta", 1.0))
    output, dtype = node.outputs[0], a.dtype
    if node.attributes.get("transA", 0):
        a = transpose(rewriter, a, (1, 0), Value(f"{node.name}.a", a.shape[::-1], dtype))
    transposed = int(node.attributes.get("transB", 0))
    if transposed and b.constant is None:
        b, transposed = transpose(rewriter, b, (1, 0), Value(f"{node.name}.b", b.shape[::-1], dtype)), 0
    steps: list[tuple[str, Value]] = []
    if alpha != 1.0:
        steps.append(("Mul", constant(f"{node.name}.alpha", np.array([alpha], np.float32))))
    if c is not None and beta != 0.0:
        if beta != 1.0 and c.constant is not None:
            c = derived(c, f"{c.name}.scaled", c.shape, lambda array: array * np.float32(beta))
        elif beta != 1.0:
            factor = constant(f"{node.name}.beta", np.array([beta], np.float32))
            c = rewriter.emit("Mul", [c, factor], c.shape, dtype, f"{node.name}.c")
        steps.append(("Add", c))
    chain(rewriter, node, "MatMul", [a, b], output, steps, transposed=transposed)


def rewrite_matmul(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Vectors become matrices of one row or column; a constant second operand that was transposed is read as stored."""
    a, b, output = node.input(0), node.input(1), node.outputs[0]
    if len(a.shape) > 1 and len(b.shape) > 1:
        stored = rewriter.transposed.get(b)
        rewriter.add("MatMul", [a, stored or b], output, node.name, transposed=int(stored is not None))
        return
    shape = output.shape
    if len(b.shape) == 1:
        shape = (*shape, 1)
        b = reshaped(rewriter, b, (b.shape[0], 1))
    if len(a.shape) == 1:
        shape = (*shape[:-1], 1, shape[-1])
        a = reshaped(rewriter, a, (1, a.shape[0]))
    product = rewriter.emit("MatMul", [a, b], shape, output.dtype, node.name, transposed=0)
    rewriter.add("Reshape", [product], output)


def _spatial(node: Node, kernel: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Strides, dilations and pads of a 1D or 2D window; pads that ONNX leaves open follow from the shapes."""
    rank = len(kernel)
    strides = tuple(int(i) for i in node.attributes.get("strides") or [1] * rank)
    dilations = tuple(int(i) for i in node.attributes.get("dilations") or [1] * rank)
    automatic = node.attributes.get("auto_pad", "NOTSET")
    if automatic in ("SAME_UPPER", "SAME_LOWER") or node.attributes.get("output_shape"):
        extra = [int(i) for i in node.attributes.get("output_padding") or [0] * rank]
        sizes = zip(node.input(0).shape[2:], node.outputs[0].shape[2:], kernel, strides, dilations, extra, strict=True)
        totals = [_total_pad(node.op == "ConvTranspose", *each) for each in sizes]
        smaller, larger = [total // 2 for total in totals], [total - total // 2 for total in totals]
        pads = smaller + larger if automatic == "SAME_UPPER" else larger + smaller
    else:
        given = node.attributes.get("pads") if automatic == "NOTSET" else None
        pads = [int(i) for i in given or [0] * (2 * rank)]
    return {"strides": strides, "dilations": dilations, "pads": tuple(pads)}


def _total_pad(transposed: bool, size: int, out_size: int, kernel: int, stride: int, dilation: int, extra: int) -> int:
    """The elements that pads add before and after, or that a transposed convolution leaves out of what it makes."""
    reach = dilation * (kernel - 1) + 1
    if transposed:
        return max(0, (size - 1) * stride + reach + extra - out_size)
    return max(0, (out_size - 1) * stride + reach - size)


def _lift(window: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """A 1D window as a 2D one over a single row."""
    (pad0, pad1), stride, dilation = window["pads"], window["strides"], window["dilations"]
    return {"strides": (1, *stride), "dilations": (1, *dilation), "pads": (0, pad0, 0, pad1)}


def rewrite_convolution(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Convolutions become 2D, with the bias as an Add."""
    x, w, bias, output = node.input(0), node.input(1), node.optional(2), node.outputs[0]
    window = _spatial(node, w.shape[2:])
    group = int(node.attributes.get("group", 1))
    result = output
    if len(x.shape) == 3:
        window = _lift(window)
        x = reshaped(rewriter, x, (*x.shape[:2], 1, x.shape[2]))
        w = reshaped(rewriter, w, (*w.shape[:2], 1, w.shape[2]))
        result = Value(f"{output.name}.2d", (*output.shape[:2], 1, output.shape[2]), output.dtype)
    steps = []
    if bias is not None:
        steps.append(("Add", reshaped(rewriter, bias, (bias.shape[0], 1, 1))))
    chain(rewriter, node, node.op, [x, w], result, steps, group=group, **window)
    if result is not output:
        rewriter.add("Reshape", [result], output)


def rewrite_pool(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Pooling becomes 2D."""
    x, output = node.input(0), node.outputs[0]
    kernel = tuple(int(i) for i in node.attributes["kernel_shape"])
    window = _spatial(node, kernel)
    result = output
    if len(x.shape) == 3:
        window, kernel = _lift(window), (1, *kernel)
        x = reshaped(rewriter, x, (*x.shape[:2], 1, x.shape[2]))
        result = Value(f"{output.name}.2d", (*output.shape[:2], 1, output.shape[2]), output.dtype)
    count_pads = int(node.attributes.get("count_include_pad", 0))
    rewriter.add(node.op, [x], result, node.name, kernel=kernel, count_include_pad=count_pads, **window)
    if result is not output:
        rewriter.add("Reshape", [result], output)
