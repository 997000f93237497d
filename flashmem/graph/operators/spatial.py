"""Pooling and resizing. After the rewrites pools are 2D, with attributes `kernel`, `strides`, `dilations` and `pads`."""

from __future__ import annotations

from flashmem.graph.builder import Rewriter
from flashmem.graph.ir import Node, Value
from flashmem.graph.operators.contraction import bad_window, lift, window
from flashmem.graph.operators.lowering import from_front, reshaped
from flashmem.graph.operators.registry import FLOAT, INDEX, each, register


def _rewrite_pool(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Pooling becomes 2D."""
    x, output = node.input(0), node.outputs[0]
    kernel = tuple(int(i) for i in node.attributes["kernel_shape"])
    sliding = window(node, kernel)
    result = output
    if len(x.shape) == 3:
        sliding, kernel = lift(sliding), (1, *kernel)
        x = reshaped(rewriter, x, (*x.shape[:2], 1, x.shape[2]))
        result = Value(f"{output.name}.2d", (*output.shape[:2], 1, output.shape[2]), output.dtype)
    count_pads = int(node.attributes.get("count_include_pad", 0))
    rewriter.add(node.op, [x], result, node.name, kernel=kernel, count_include_pad=count_pads, **sliding)
    if result is not output:
        rewriter.add("Reshape", [result], output)


def _check_pool(node: Node) -> str | None:
    rank = len(node.input(0).shape)
    if rank not in (3, 4):
        return f"{node.op} over {rank - 2} spatial dimensions is not implemented (1 and 2 are)"
    if len(node.outputs) > 1:
        return f"{node.op} with the indices as second output is not implemented"
    kernel = node.attributes["kernel_shape"]
    if len(kernel) != rank - 2:
        return f"{node.op} with a window of {tuple(kernel)} over an input of {rank} dimensions"
    return bad_window(node, kernel)


def _rewrite_resize(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Scales as ONNX defines them: given ones are kept (they need not equal the ratio of the sizes)."""
    x, output = node.input(0), node.outputs[0]
    attributes = dict(node.attributes)
    index = 1 if node.op == "Upsample" or opset < 11 else 2
    given = node.optional(index)
    scales = (
        [float(s) for s in given.constant.array().reshape(-1)] if given is not None and given.constant and given.size else None
    )
    if scales is not None and len(scales) != len(x.shape):
        axes = [from_front(int(a), len(x.shape)) for a in attributes.get("axes", ())]
        scales = [scales[axes.index(a)] if a in axes else 1.0 for a in range(len(x.shape))]
    if node.op == "Upsample" or opset < 11:
        attributes["coordinate_transformation_mode"] = "asymmetric"
        attributes["nearest_mode"] = "floor"
    attributes["scales"] = tuple(scales or (o / i for o, i in zip(output.shape, x.shape, strict=True)))
    rewriter.add("Resize", [x], output, node.name, **attributes)


def _check_resize(node: Node) -> str | None:
    shape, out = node.input(0).shape, node.outputs[0].shape
    mode = node.attributes.get("mode", "nearest")
    if mode not in ("nearest", "linear", "cubic"):
        return f"{node.op} with mode {mode!r} is not implemented"
    if node.attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        return f"{node.op} with tf_crop_and_resize is not implemented"
    if node.attributes.get("antialias", 0):
        return f"{node.op} with antialias is not implemented"
    if len(shape) != 4 or shape[:2] != out[:2]:
        return f"{node.op} of other than the last two of four dimensions is not implemented"
    return None


register(
    *each(
        ("AveragePool", "MaxPool"), inputs=(FLOAT,), check=_check_pool, rewrite=_rewrite_pool, kernel="pool",
        layout="channels_last",
    ),
    *each(
        ("Resize", "Upsample"), inputs=(FLOAT, FLOAT, FLOAT, INDEX), check=_check_resize, rewrite=_rewrite_resize,
        kernel="resize", layout="channels_last",
    ),
)  # fmt: skip
