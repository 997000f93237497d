"""Contractions: MatMul, Gemm, convolutions.

After the rewrites `MatMul` has attribute `transposed` (1 if the constant second operand is stored [N, K]). Gemm is MatMul, Mul
and Add. `Conv` and `ConvTranspose` are 2D or 3D, without bias, with attributes `strides`, `dilations`, `pads` (before every
dimension, then after every one) and `group`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flashmem.compiler.ir.builder import Rewriter, constant, derived
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.operators.registry import FLOAT, INDEX, WIDE, Operator, all_of, constant_inputs, register
from flashmem.compiler.operators.rewriting import chain, constant_integers, reshaped, spreads, transpose
from flashmem.compiler.operators.tiling_interface import product_tile, window_tile


def _rewrite_gemm(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Gemm as MatMul, Mul by alpha and Add of beta times C."""
    a = node.input(0)
    b = node.input(1)
    c = node.optional(2)
    alpha = float(node.attributes.get("alpha", 1.0))
    beta = float(node.attributes.get("beta", 1.0))
    output = node.outputs[0]
    dtype = a.dtype
    if node.attributes.get("transA", 0):
        a = transpose(rewriter, a, (1, 0), Value(f"{node.name}.a", a.shape[::-1], dtype))
    transposed = int(node.attributes.get("transB", 0))
    if transposed and b.constant is None:
        b = transpose(rewriter, b, (1, 0), Value(f"{node.name}.b", b.shape[::-1], dtype))
        transposed = 0
    steps: list[tuple[str, Value]] = []
    if alpha != 1.0:
        steps.append(("Mul", constant(f"{node.name}.alpha", np.array([alpha], dtype))))
    if c is not None and beta != 0.0:
        if beta != 1.0 and c.constant is not None:
            c = derived(c, f"{c.name}.scaled", c.shape, lambda array: array * np.dtype(dtype).type(beta))
        elif beta != 1.0:
            factor = constant(f"{node.name}.beta", np.array([beta], dtype))
            c = rewriter.emit("Mul", [c, factor], c.shape, dtype, f"{node.name}.c")
        steps.append(("Add", c))
    chain(rewriter, node, "MatMul", [a, b], output, steps, transposed=transposed)


def _rewrite_matmul(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite MatMul: vectors become matrices of one row or column; a transposed constant operand is read as stored."""
    a = node.input(0)
    b = node.input(1)
    output = node.outputs[0]
    if not a.size:  # empty sums
        rewriter.replaced[output] = constant(output.name, np.zeros(output.shape, output.dtype))
        return
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


def window(node: Node, kernel: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Strides, dilations and pads of a window; `auto_pad` is resolved from the shapes."""
    rank = len(kernel)
    strides = tuple(int(i) for i in node.attributes.get("strides") or [1] * rank)
    dilations = tuple(int(i) for i in node.attributes.get("dilations") or [1] * rank)
    automatic = node.attributes.get("auto_pad", "NOTSET")
    if automatic in ("SAME_UPPER", "SAME_LOWER") or node.attributes.get("output_shape"):
        extra = [int(i) for i in node.attributes.get("output_padding") or [0] * rank]
        sizes = zip(node.input(0).shape[2:], node.outputs[0].shape[2:], kernel, strides, dilations, extra, strict=True)
        totals = [_total_pad(node.op == "ConvTranspose", *each) for each in sizes]
        smaller = [total // 2 for total in totals]
        larger = [total - total // 2 for total in totals]
        pads = smaller + larger if automatic == "SAME_UPPER" else larger + smaller
    else:
        given = node.attributes.get("pads") if automatic == "NOTSET" else None
        pads = [int(i) for i in given or [0] * (2 * rank)]
    return {"strides": strides, "dilations": dilations, "pads": tuple(pads)}


def _total_pad(transposed: bool, size: int, out_size: int, kernel: int, stride: int, dilation: int, extra: int) -> int:
    """Elements that pads add before and after, or that a transposed convolution omits from its result."""
    reach = dilation * (kernel - 1) + 1
    if transposed:
        return max(0, (size - 1) * stride + reach + extra - out_size)
    return max(0, (out_size - 1) * stride + reach - size)


def lift(sliding: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """A 1D window as a 2D one over a single row."""
    (pad0, pad1), stride, dilation = sliding["pads"], sliding["strides"], sliding["dilations"]
    return {"strides": (1, *stride), "dilations": (1, *dilation), "pads": (0, pad0, 0, pad1)}


def _rewrite_convolution(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite convolutions: 1D becomes 2D; the bias becomes an Add."""
    x = node.input(0)
    w = node.input(1)
    bias = node.optional(2)
    output = node.outputs[0]
    sliding = window(node, w.shape[2:])
    group = int(node.attributes.get("group", 1))
    result = output
    if len(x.shape) == 3:
        sliding = lift(sliding)
        x = reshaped(rewriter, x, (*x.shape[:2], 1, x.shape[2]))
        w = reshaped(rewriter, w, (*w.shape[:2], 1, w.shape[2]))
        result = Value(f"{output.name}.2d", (*output.shape[:2], 1, output.shape[2]), output.dtype)
    steps = []
    if bias is not None:
        steps.append(("Add", reshaped(rewriter, bias, (bias.shape[0], *[1] * (len(x.shape) - 2)))))
    chain(rewriter, node, node.op, [x, w], result, steps, group=group, **sliding)
    if result is not output:
        rewriter.add("Reshape", [result], output)


_LARGEST_BLOCK = 1024
"""The most elements of a block of Col2Im: its matrix of places has their square."""


def _rewrite_col2im(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Col2Im as a transposed convolution of each channel's blocks: element t of a block is a channel for tap t."""
    x = node.input(0)
    output = node.outputs[0]
    block, sliding, counts = _blocks(node)
    if len(block) == 1:
        sliding = lift(sliding)
        block = (1, *block)
        counts = (1, *counts)
    images = x.shape[0] * output.shape[1]
    taps = math.prod(block)
    blocks = reshaped(rewriter, x, (images, taps, *counts))
    places = constant(f"{node.name}.places", np.eye(taps, dtype=np.float32).reshape(taps, 1, *block))
    image = (1, *output.shape[2:])[-len(block) :]
    made = Value(f"{output.name}.images", (images, 1, *image), output.dtype)
    rewriter.add("ConvTranspose", [blocks, places], made, node.name, group=1, **sliding)
    rewriter.add("Reshape", [made], output)


def _blocks(node: Node) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]], tuple[int, ...]]:
    """The block of a Col2Im, its sliding window, and the number of its places in each dimension."""
    image = constant_integers(node, 1, "image_shape") or []
    block = constant_integers(node, 2, "block_shape") or []
    rank = len(block)
    sliding = {
        name: tuple(int(i) for i in node.attributes.get(name) or default)
        for name, default in (("strides", [1] * rank), ("dilations", [1] * rank), ("pads", [0] * (2 * rank)))
    }
    pads = zip(sliding["pads"][:rank], sliding["pads"][rank:], strict=True)
    sizes = zip(image, block, sliding["strides"], sliding["dilations"], pads, strict=True)
    counts = tuple((size + sum(pad) - dilation * (reach - 1) - 1) // stride + 1 for size, reach, stride, dilation, pad in sizes)
    return tuple(block), sliding, counts


def _check_col2im(node: Node) -> str | None:
    x = node.input(0).shape
    y = node.outputs[0].shape
    image = constant_integers(node, 1, "image_shape") or []
    block = constant_integers(node, 2, "block_shape") or []
    rank = len(block)
    if rank not in (1, 2, 3) or len(image) != rank:
        return f"Col2Im over {len(image)} spatial dimensions in blocks of {rank} is not implemented (1, 2 and 3 are)"
    for name, count, least in (("strides", rank, 1), ("dilations", rank, 1), ("pads", 2 * rank, 0)):
        given = node.attributes.get(name)
        if given is not None and (len(given) != count or min(given) < least):
            return f"Col2Im with {name} {tuple(given)} over {rank} spatial dimensions"
    if min(image) < 1 or min(block) < 1:
        return f"Col2Im of blocks of {tuple(block)} to {tuple(image)}"
    if math.prod(block) > _LARGEST_BLOCK:
        return f"Col2Im in blocks of {math.prod(block)} elements is not implemented ({_LARGEST_BLOCK} at most)"
    counts = _blocks(node)[2]
    channels = x[1] // math.prod(block) if len(x) == 3 else 0
    if min(counts) < 1 or x != (x[0], channels * math.prod(block), math.prod(counts)) or y != (x[0], channels, *image):
        return f"Col2Im of shape {x} in blocks of {tuple(block)} to {tuple(image)}"
    return None


def last_columns(node: Node) -> int:
    """The first dimension of the output that kernels of products treat as columns: the last one."""
    return len(node.outputs[0].shape) - 1


def _check_matmul(node: Node) -> str | None:
    a = node.input(0).shape
    b = node.input(1).shape
    if not a or not b:
        return f"MatMul of shapes {a} and {b}"
    inner = b[-2] if len(b) > 1 else b[0]
    return None if a[-1] == inner else f"MatMul of shapes {a} and {b}"


def _check_gemm(node: Node) -> str | None:
    a = node.input(0).shape
    b = node.input(1).shape
    c = node.optional(2)
    if len(a) != 2 or len(b) != 2:
        return f"Gemm of shapes {a} and {b}"
    rows, depth = reversed(a) if node.attributes.get("transA", 0) else a
    depth_b, columns = reversed(b) if node.attributes.get("transB", 0) else b
    if depth != depth_b:
        return f"Gemm of shapes {a} and {b}"
    if node.input(0).dtype != "float32" and not all(float(node.attributes.get(k, 1)).is_integer() for k in ("alpha", "beta")):
        return "Gemm of integers by a fraction"
    if c is not None and not spreads(c.shape, (rows, columns)):
        return f"Gemm that adds a C of shape {c.shape} to {rows}x{columns}"
    return None


def _check_convolution(node: Node) -> str | None:
    x = node.input(0).shape
    w = node.input(1)
    bias = node.optional(2)
    rank = len(x)
    group = int(node.attributes.get("group", 1))
    transposed = node.op == "ConvTranspose"
    if rank not in (3, 4, 5):
        return f"{node.op} over {rank - 2} spatial dimensions is not implemented (1, 2 and 3 are)"
    if len(w.shape) != rank:
        return f"{node.op} with weights of {len(w.shape)} dimensions over an input of {rank}"
    if group < 1 or x[1] % group or (not transposed and w.shape[0] % group):
        return f"{node.op} with {x[1]} channels, {w.shape[0]} filters and group {group}"
    wanted = w.shape[0] if transposed else w.shape[1] * group
    if x[1] != wanted:
        return f"{node.op} with weights for {wanted} channels over an input of {x[1]}"
    columns = w.shape[1] * group if transposed else w.shape[0]
    if bias is not None and bias.shape != (columns,):
        return f"{node.op} with a bias of shape {bias.shape} for {columns} channels"
    kernel = node.attributes.get("kernel_shape")
    if kernel is not None and tuple(kernel) != w.shape[2:]:
        return f"{node.op} with kernel_shape {tuple(kernel)} but weights of shape {w.shape}"
    return bad_window(node, w.shape[2:])


def bad_window(node: Node, kernel: Sequence[int]) -> str | None:
    """Why a window of `kernel` cannot slide over the node's input, or None."""
    rank = len(kernel)
    for name, count, least in (("strides", rank, 1), ("dilations", rank, 1), ("pads", 2 * rank, None)):
        given = node.attributes.get(name)
        if given is not None and (len(given) != count or (least is not None and min(given) < least)):
            return f"{node.op} with {name} {tuple(given)} over {rank} spatial dimensions"
    if not kernel or min(kernel) < 1:
        return f"{node.op} with a window of {tuple(kernel)}"
    dilations = node.attributes.get("dilations") or [1] * rank
    pads = node.attributes.get("pads") or [0] * (2 * rank)
    automatic = str(node.attributes.get("auto_pad", "NOTSET"))
    rooms = [
        size + (pads[axis] + pads[axis + rank] if automatic == "NOTSET" else 0) - dilations[axis] * (kernel[axis] - 1) - 1
        for axis, size in enumerate(node.input(0).shape[2:])
    ]
    too_large = node.op != "ConvTranspose" and not automatic.startswith("SAME") and min(rooms) < 0
    if too_large or min(node.outputs[0].shape[2:], default=1) < 1:
        return f"{node.op} whose window, or crop, is larger than its padded input"
    return None


register(
    __name__,
    Operator(
        "Col2Im", (FLOAT, INDEX, INDEX), check=all_of(constant_inputs(1, 2), _check_col2im), rewrite=_rewrite_col2im,
        operator_class="reusable",
    ),
    Operator(
        "Conv", (FLOAT,), check=_check_convolution, rewrite=_rewrite_convolution, kernel="convolution", layout="channels_last",
        columns=last_columns, in_place="epilogue", epilogue_cast=True, operator_class="reusable", tiling=window_tile,
    ),
    Operator(
        "ConvTranspose", (FLOAT,), check=_check_convolution, rewrite=_rewrite_convolution, kernel="convolution",
        layout="channels_last", columns=last_columns, in_place="epilogue", epilogue_cast=True, operator_class="reusable",
        tiling=window_tile,
    ),
    Operator("Gemm", (WIDE,), check=_check_gemm, rewrite=_rewrite_gemm, operator_class="reusable"),
    Operator(
        "MatMul", (WIDE,), check=_check_matmul, rewrite=_rewrite_matmul, kernel="matmul", columns=last_columns,
        in_place="epilogue", epilogue_cast=True, operator_class="reusable", empty=True, tiling=product_tile,
    ),
)  # fmt: skip
