"""Pooling. After the rewrites pools are 2D, with attributes `kernel`, `strides`, `dilations` and `pads`."""

from __future__ import annotations

from flashmem.graph.builder import Rewriter
from flashmem.graph.ir import Node, Value
from flashmem.graph.operators.contraction import bad_window, lift, window
from flashmem.graph.operators.lowering import reshaped
from flashmem.graph.operators.registry import FLOAT, each, register


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


register(
    __name__,
    *each(
        ("AveragePool", "MaxPool"), inputs=(FLOAT,), check=_check_pool, rewrite=_rewrite_pool, kernel="pool",
        layout="channels_last",
    ),
)  # fmt: skip
