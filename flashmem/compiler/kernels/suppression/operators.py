"""NonMaxSuppression. Its boxes depend on data, but not how many there can be: its output has room for that many.

A second result, the `count` in the node's attributes, is the number of boxes. `compiler.frontend.selected_rows` follows the
output through the nodes that read it, and a run cuts the outputs of the model to that number.

After the rewrite the node reads boxes, scores and the order of the boxes by score. It has attributes `most` (boxes selected for
each image and class), `overlap`, `least` (a score, or None) and `centred`.
"""

from __future__ import annotations

import numpy as np

from flashmem.compiler.ir.builder import Rewriter
from flashmem.compiler.ir.graph import Node
from flashmem.compiler.operators.registry import FLOAT, Operator, Types, all_of, constant_inputs, fp32_inputs, register

_INT64: Types = frozenset({"int64"})


def _number(node: Node, index: int) -> float | None:
    value = node.optional(index)
    if value is None or value.constant is None or not value.size:
        return None
    return float(np.asarray(value.constant.array()).reshape(-1)[0])


def _rewrite_suppression(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite NonMaxSuppression: thresholds become attributes, and a TopK orders the boxes, of equal scores the first."""
    boxes = node.input(0)
    scores = node.input(1)
    output = node.outputs[0]
    order = rewriter.emit(
        "TopK", [scores], scores.shape, "int32", f"{node.name}.order", axis=2, k=scores.shape[2], largest=True, nan_first=False
    )
    rewriter.add(
        "NonMaxSuppression", [boxes, scores, order], output, node.name, count=node.attributes["count"],
        most=output.shape[0] // (scores.shape[0] * scores.shape[1]), overlap=_number(node, 3) or 0.0, least=_number(node, 4),
        centred=bool(node.attributes.get("center_point_box", 0)),
    )  # fmt: skip


def _check_suppression(node: Node) -> str | None:
    boxes = node.input(0).shape
    scores = node.input(1).shape
    if len(boxes) != 3 or len(scores) != 3 or boxes[2] != 4 or (boxes[0], boxes[1]) != (scores[0], scores[2]):
        return f"NonMaxSuppression of boxes of shape {boxes} by scores of shape {scores}"
    overlap = _number(node, 3)
    if overlap is not None and not 0 <= overlap <= 1:
        return f"NonMaxSuppression with iou_threshold {overlap}, which is not between 0 and 1,"
    return None


register(
    __name__,
    Operator(
        "NonMaxSuppression", (FLOAT, FLOAT, _INT64, FLOAT, FLOAT),
        check=all_of(constant_inputs(2, 3, 4), _check_suppression), rewrite=_rewrite_suppression, kernel="suppression",
        keep_fp32=fp32_inputs(0, 1), operator_class="hierarchical",
    ),
)  # fmt: skip
